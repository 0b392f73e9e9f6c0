"""Runs with `model.matmul_dtype`: they resume bit-equal, and go on with another mesh and type."""

import numpy as np
import pytest
from conftest import release, slow
from runs import losses, run, write_config
from test_initial_parameters import stored

pytestmark = pytest.mark.usefixtures("signals")
MESH = ("mesh.tp=2", "mesh.fsdp=2")
ROUNDED = 0.02
"""Bound of the relative difference of losses, of the first steps of a tiny model."""


@pytest.mark.parametrize("dtype", [slow("int8"), release("fp8_e4m3")])
def test_a_run_resumes_bit_equal_and_goes_on_with_another_mesh_and_type(dtype, tmp_path):
    config = write_config(tmp_path)
    keys = (*MESH, f"model.matmul_dtype={dtype}")
    assert run(config, *keys, f"run.dir={tmp_path}/whole") == 0
    assert run(config, *keys, "training.steps=3") == 0
    assert run(config, *keys) == 0
    found = losses(tmp_path / "run")
    assert found == losses(tmp_path / "whole") and len(found) > 3
    last = max(found)
    whole, resumed = stored(tmp_path / "whole", last), stored(tmp_path / "run", last)
    for name, array in whole.items():
        np.testing.assert_array_equal(resumed[name], array, err_msg=name)
    assert all(x.dtype == np.float32 for name, x in whole.items() if "kernel" in name)

    assert run(config, *MESH, f"run.dir={tmp_path}/plain") == 0
    plain = losses(tmp_path / "plain")
    assert found != plain
    assert found == pytest.approx(plain, rel=ROUNDED)
    assert run(config, "mesh.tp=1", "mesh.fsdp=4", f"training.steps={last + 2}") == 0
    assert max(losses(tmp_path / "run")) == last + 2
