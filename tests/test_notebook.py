"""The notebook of the documentation runs from its first cell to its last, and learns."""

import json
import os
import re
import subprocess
import sys

import pytest
from conftest import ROOT

NOTEBOOK = ROOT / "docs" / "notebooks" / "first_steps.ipynb"


def printed(notebook: dict) -> str:
    """Return all text that the cells printed or drew."""
    outputs = [output for cell in notebook["cells"] for output in cell.get("outputs", [])]
    texts = [out.get("text") or out.get("data", {}).get("text/plain", "") for out in outputs]
    return "\n".join("".join(text) for text in texts)


def check_outputs(notebook: dict) -> None:
    text = printed(notebook)
    first, last = map(float, re.findall(r"loss ([\d.]+) -> ([\d.]+) nats", text)[0])
    assert 5 < first < 6 and last < 3.5
    plain = re.sub(r"\x1b\[[\d;]*m", "", text)
    assert all(f"CPU {n}" in plain for n in range(8))
    assert "image/png" in json.dumps(notebook)


def test_the_saved_outputs_are_those_of_a_whole_run() -> None:
    notebook = json.loads(NOTEBOOK.read_text())
    code = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    counts = [cell["execution_count"] for cell in code]
    assert counts == list(range(1, len(code) + 1))
    check_outputs(notebook)


@pytest.mark.slow
def test_the_notebook_runs(tmp_path) -> None:
    command = [sys.executable, "-m", "nbconvert", "--to", "notebook", "--execute"]
    options = ["--ExecutePreprocessor.timeout=900", "--output-dir", str(tmp_path), str(NOTEBOOK)]
    flags = {"XLA_FLAGS", "JAX_NUM_CPU_DEVICES"}
    environment = {name: value for name, value in os.environ.items() if name not in flags}
    environment |= {"PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"}
    done = subprocess.run(
        [*command, *options], cwd=ROOT, env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-3000:]
    check_outputs(json.loads((tmp_path / NOTEBOOK.name).read_text()))
