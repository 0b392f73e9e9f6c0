"""The example of docs/debug_nan.md finds what is not finite."""

import re

from conftest import ROOT

PAGE = (ROOT / "docs" / "debug_nan.md").read_text()


def test_the_example_names_parameters_and_gradients_that_are_not_finite(
    undisturbed, monkeypatch, capsys
) -> None:
    (block,) = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    where = {"runs/mine": str(undisturbed / "run"), "1234": "6"}
    for old, new in where.items():
        assert old in block
        block = block.replace(old, new)
    exec(compile(block, "debug_nan.md", "exec"), {})
    assert re.fullmatch(
        r"step 6 with the parameters of checkpoint 6: loss \d\.\d{4}\n", capsys.readouterr().out
    )
    # The same with a parameter that is not finite.
    loading = "saved, params = run.load_params()"
    broken = f"{loading}; params['head']['kernel'] = params['head']['kernel'] * float('nan')"
    assert loading in block
    exec(compile(block.replace(loading, broken), "debug_nan.md", "exec"), {})
    found = capsys.readouterr().out
    assert "loss nan" in found and "parameter head/kernel is not finite" in found
    assert "gradient embed/table is not finite" in found
