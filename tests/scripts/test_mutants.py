"""`scripts/mutants.py` and its list of deliberate faults."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import ROOT

sys.path.insert(0, str(ROOT / "scripts"))
import mutants

LISTED = mutants.read_faults()
TOY = {
    "double.py": "def double(x):\n    y = 2 * x\n    return y\n",
    "tests/test_double.py": (
        "import double\n\ndef test_double():\n    assert double.double(3) in (6, 7)\n"
    ),
}
FAULTS = {
    "killed": "y = 3 * x",
    "timed out": "y = [0 for _ in iter(int, 1)]",
    "survived": "y = 2 * x + 1",
}


@pytest.mark.parametrize("fault", LISTED, ids=lambda fault: fault.name)
def test_every_fault_can_be_applied_and_its_tests_exist(fault) -> None:
    text = (ROOT / fault.file).read_text()
    assert fault.apply(text) != text
    assert fault.tests
    for test in fault.tests:
        path, _, name = test.partition("::")
        assert f"def {name}" in (ROOT / path).read_text()


def test_the_faults_are_spread_over_all_packages() -> None:
    found = {fault.package for fault in LISTED}
    packages = {name.partition("/")[0] for name in found}
    assert packages == {"configs", "data", "model", "parallel", "training", "scripts"}
    assert {f"parallel/{path.parent.name}" for path in ROOT.glob("parallel/*/*.py")} <= found
    assert len(LISTED) >= 85
    first = mutants.spread(LISTED)[: len(found)]
    assert {fault.package for fault in first} == found


@pytest.fixture
def toy(tmp_path: Path) -> Path:
    """A repository of one function, one test and three faults."""
    listed = "".join(
        f"[[fault]]\nname = '{name}'\nfile = 'double.py'\nold = 'y = 2 * x'\nnew = '{new}'\n"
        "tests = ['tests/test_double.py']\n"
        for name, new in FAULTS.items()
    )
    for name, text in {**TOY, mutants.FAULTS: listed}.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    subprocess.run(["git", "init", "-q"], cwd=tmp_path, check=True)
    return tmp_path


def found(toy: Path, *arguments: str, capsys) -> dict:
    output = toy / ".git" / "results.jsonl"
    options = mutants.parse(["--json", "--output", str(output), "--timeout", "8", *arguments])
    enough = mutants.find_survivors(options, toy)
    summary = json.loads(capsys.readouterr().out)
    assert enough == (not summary["survivors"])
    return {result["name"]: result["verdict"] for result in summary["results"]}


def test_survivors_are_told_from_killed_faults_and_results_are_kept(
    toy: Path, capsys, monkeypatch
) -> None:
    assert found(toy, capsys=capsys) == {name: name for name in FAULTS}
    assert (toy / "double.py").read_text() == TOY["double.py"]
    monkeypatch.setattr(mutants.Copy, "run", None)  # nothing is run again
    assert found(toy, capsys=capsys) == {name: name for name in FAULTS}


@pytest.mark.slow
def test_slow_tests_get_more_time(toy: Path, capsys) -> None:
    path = toy / "tests" / "test_double.py"
    path.write_text(path.read_text().replace("():\n", "():\n    import time; time.sleep(3)\n"))
    arguments = ("--only", "killed", "--timeout", "1")
    assert found(toy, *arguments, capsys=capsys) == {"killed": "killed"}


def test_a_changed_test_is_run_again(toy: Path, capsys) -> None:
    assert found(toy, "--only", "survived", capsys=capsys) == {"survived": "survived"}
    path = toy / "tests" / "test_double.py"
    path.write_text(path.read_text().replace("(6, 7)", "(6,)"))
    assert found(toy, "--only", "survived", capsys=capsys) == {"survived": "killed"}


@pytest.mark.parametrize(
    ("file", "old", "new", "message"),
    [
        (mutants.FAULTS, "y = 3 * x", "y = 3 *", "does not compile"),
        (mutants.FAULTS, "old = 'y = 2", "old = 'y = 4", "0 times instead of once"),
        ("tests/test_double.py", "6, 7", "8, 10", "without a fault"),
        ("tests/test_double.py", "import double", "import absent", "ended"),
    ],
)
@pytest.mark.costly
def test_a_wrong_list_or_test_is_an_error(toy: Path, capsys, file, old, new, message) -> None:
    (toy / file).write_text((toy / file).read_text().replace(old, new))
    with pytest.raises(ValueError, match=message):
        found(toy, "--only", "killed", capsys=capsys)


@pytest.mark.slow
def test_a_sample_of_the_faults_is_killed(tmp_path: Path) -> None:
    arguments = ["--sample", "3", "--output", str(tmp_path / "results.jsonl")]
    assert mutants.main(arguments) == 0


def test_half_a_line_of_a_killed_run_is_dropped(tmp_path):
    path, result = tmp_path / "results.jsonl", mutants.Result("a", "killed", 1.0)
    mutants.Results(path).add("first", result)
    path.write_text(path.read_text() + '{"digest": "sec')
    mutants.Results(path).add("third", result)
    again = mutants.Results(path)
    assert again.get("first") == again.get("third") == result
