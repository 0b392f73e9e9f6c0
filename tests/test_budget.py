"""The option `--budget` of the tests, with which CI ends in time on a busy machine."""

import subprocess
import sys

from conftest import ROOT


def test_a_test_that_begins_after_the_budget_is_skipped_and_counted() -> None:
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-rs", "--budget", "0"]
    ran = subprocess.run(
        [*command, "tests/test_units.py"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert "no time left: --budget" in ran.stdout and "passed" not in ran.stdout
