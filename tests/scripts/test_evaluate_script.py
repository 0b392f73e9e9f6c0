"""`scripts/evaluate.py` without lm-eval, and its table; tests/interop compares its numbers."""

import importlib
import sys

import pytest
from conftest import ROOT

sys.path.insert(0, str(ROOT / "scripts"))
import _clone
import evaluate as script
from evaluation.results import result_lines


def test_without_the_library_one_line_says_how_to_install_it(monkeypatch, capsys, tmp_path):
    # Its modules too: another test may have imported them where the library is installed.
    for name in ["lm_eval", *(name for name in sys.modules if name.startswith("lm_eval."))]:
        monkeypatch.setitem(sys.modules, name, None)
    monkeypatch.delitem(sys.modules, "evaluation.adapter", raising=False)
    assert script.main(["--run", str(tmp_path), "--tasks", "arc_easy"]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: this script needs the library lm-eval (")
    assert error.endswith('; pip install -e ".[eval]"\n') and error.count("\n") == 1


@pytest.mark.parametrize("option", ["--limit", "--batch-size"])
def test_a_number_below_one_is_refused(capsys, option):
    assert script.main(["--run", "x", "--tasks", "y", option, "0"]) == 2
    assert capsys.readouterr().err == f"error: {option} 0: use at least 1\n"


def test_a_negative_seed_is_refused_before_the_evaluation(capsys):
    assert script.main(["--run", "x", "--tasks", "y", "--seed", "-1"]) == 2
    assert capsys.readouterr().err == "error: --seed -1: use at least 0\n"


def test_an_output_that_cannot_be_written_fails_before_the_evaluation(tmp_path, capsys):
    (tmp_path / "file").touch()
    output = tmp_path / "file" / "results.json"
    assert script.main(["--run", "x", "--tasks", "y", "--output", str(output)]) == 1
    error = capsys.readouterr().err
    assert error == f"error: [Errno 17] File exists: '{output.parent}'\n"


def test_a_library_with_the_name_of_a_script_is_found_where_it_is_installed(tmp_path, monkeypatch):
    (tmp_path / "verify.py").write_text("found = 'the library'")
    monkeypatch.delitem(sys.modules, "verify", raising=False)
    monkeypatch.setattr(sys, "path", [str(ROOT / "scripts"), str(tmp_path), *sys.path])
    before = list(sys.path)
    with _clone.hidden_scripts():
        assert importlib.import_module("verify").found == "the library"
    assert sys.path == before
    del sys.modules["verify"]


def test_every_metric_is_a_line_with_its_standard_error():
    results = {
        "choice": {"alias": "choice", "acc,none": 0.5, "acc_stderr,none": 0.125, "sample_len": 4},
        "long_name": {"exact_match,strict": 1.0, "exact_match_stderr,strict": "N/A"},
    }
    assert list(result_lines(results)) == [
        "task       metric                value   stderr",
        "choice     acc                   0.5000  0.1250",
        "long_name  exact_match (strict)  1.0000",
    ]
