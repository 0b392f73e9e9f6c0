"""The example of docs/checkpoints.md continues a prompt with a run."""

import re

from conftest import ROOT

PAGE = (ROOT / "docs" / "checkpoints.md").read_text()


def test_the_example_prints_a_continuation_with_the_newest_checkpoint(undisturbed, capsys) -> None:
    (block,) = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    assert "runs/tp8" in block
    exec(compile(block.replace("runs/tp8", str(undisturbed / "run")), "checkpoints.md", "exec"), {})
    printed = capsys.readouterr().out
    assert printed.startswith("step 6: def ") and len(printed) > len("step 6: def \n"), printed
