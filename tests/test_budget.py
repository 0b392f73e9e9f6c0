"""The options `--budget` and `--rotate` of the tests, with which CI ends in time."""

import re
import subprocess
import sys

from conftest import ROOT


def test_a_test_that_begins_after_the_budget_is_skipped_and_counted() -> None:
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-rs", "--budget", "0"]
    ran = subprocess.run(
        [*command, "tests/test_units.py"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert "no time left: --budget" in ran.stdout and "passed" not in ran.stdout


def test_of_a_costly_test_the_default_suite_runs_the_first_of_every_four_cases(tmp_path) -> None:
    (tmp_path / "test_x.py").write_text(
        "import pytest\n\n\n"
        "@pytest.mark.costly\n"
        '@pytest.mark.parametrize("n", [*range(6), pytest.param(6, marks=pytest.mark.slow)])\n'
        "def test_x(n):\n    pass\n"
    )
    command = [sys.executable, "-m", "pytest", "-c", ROOT / "pyproject.toml", "--collect-only"]
    for marks, cases in (((), [0, 4]), (("-m", "further"), [1, 2, 3, 5]), (("-m", "slow"), [6])):
        ran = subprocess.run(
            [*command, "-p", "conftest", *marks, "--rootdir", ROOT, tmp_path],
            cwd=ROOT / "tests",
            capture_output=True,
            text=True,
        )
        assert [int(n) for n in re.findall(r"test_x\[(\d)\]", ran.stdout)] == cases, ran.stdout


def test_every_rotation_begins_elsewhere_and_has_all_tests(tmp_path) -> None:
    (tmp_path / "test_x.py").write_text(
        'import pytest\n\n\n@pytest.mark.parametrize("n", range(10))\ndef test_x(n):\n    pass\n'
    )
    command = [sys.executable, "-m", "pytest", "-c", ROOT / "pyproject.toml", "--collect-only"]
    command += ["-p", "conftest", "--rootdir", ROOT, tmp_path, "--rotate"]
    first = []
    for number in (0, 1, 2):
        ran = subprocess.run(
            [*command, str(number)], cwd=ROOT / "tests", capture_output=True, text=True, check=True
        )
        order = [int(n) for n in re.findall(r"test_x\[(\d)\]", ran.stdout)]
        assert order == [*range(order[0], 10), *range(order[0])]
        first.append(order[0])
    assert first == [0, 6, 2]
