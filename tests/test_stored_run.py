"""A run directory that commit f624a8e wrote must resume with the same losses.

`stored_run/` holds the configuration, the text and the run directory after three of six steps,
written on jax 0.10.2 with the compiler flags of `conftest.py`.
"""

import shutil
from pathlib import Path

import jax
import pytest
from runs import losses, run

pytestmark = pytest.mark.usefixtures("signals")

STORED = Path(__file__).parent / "stored_run"
# The losses of steps 4 to 6 in the uninterrupted run of commit f624a8e.
EXPECTED = {4: 5.01567268371582, 5: 4.811561107635498, 6: 4.649572849273682}


def test_a_run_directory_of_an_older_commit_resumes_with_the_same_losses(tmp_path):
    shutil.copytree(STORED / "run", tmp_path / "run")
    shutil.copy(STORED / "a.txt", tmp_path)
    config = (STORED / "config.yaml").read_text().replace("FOLDER", str(tmp_path))
    (tmp_path / "config.yaml").write_text(config)

    assert run(str(tmp_path / "config.yaml")) == 0

    resumed = {step: loss for step, loss in losses(tmp_path / "run").items() if step > 3}
    # Other jax versions round differently: 2**-20 is eight units in the last place of a float32.
    bit_equal = jax.__version__ == "0.10.2"
    assert resumed == (EXPECTED if bit_equal else pytest.approx(EXPECTED, rel=2**-20))
    log = (tmp_path / "run" / "log.txt").read_text()
    assert "resumed from step 3" in log
