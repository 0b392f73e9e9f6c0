"""Store a run with the installed libraries: `python tests/stored_run/make.py jax_0.12`.

Writes that folder: the run directory after three of six steps, and `expected.json` with the losses
of steps 4 to 6 of an uninterrupted run. `tests/test_stored_run.py` resumes it with other libraries.
"""

import json
import shutil
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE.parent.parent), str(HERE.parent)]
import conftest  # noqa: E402, F401 (sets the compiler flags of the tests)
import runs  # noqa: E402

# Half of the arrays of the first folder, which has the whole configuration.
OVERRIDES = ("optimizer.ema_decay=null", "model.num_hidden_layers=2")


def store(name: str, folder: Path) -> None:
    """Run six steps in `folder`, and three; keep the latter's run directory."""
    shutil.copy(HERE / "a.txt", folder)
    config = (HERE / "config.yaml").read_text().replace("FOLDER", str(folder))
    (folder / "config.yaml").write_text(config)
    run, whole = folder / "run", folder / "whole"
    for more in ((f"run.dir={whole}",), ("training.steps=3",)):
        assert runs.run(str(folder / "config.yaml"), *OVERRIDES, *more) == 0
    target = HERE / name
    kept = ("config.yaml", "metrics.jsonl", "tokenizer.json", "checkpoints")
    left_out = [path.name for path in run.iterdir() if path.name not in kept]
    shutil.copytree(run, target, ignore=shutil.ignore_patterns(*left_out))
    losses = {step: loss for step, loss in runs.losses(whole).items() if step > 3}
    text = json.dumps({"overrides": OVERRIDES, "losses": losses}, indent=1)
    (target / "expected.json").write_text(text + "\n")


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as temporary:
        store(sys.argv[1], Path(temporary))
