"""Commands use the packages of their own clone, wherever they are started."""

import ast
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import ROOT

PACKAGES = ("configs", "data", "model", "parallel", "training")
MODULES = ("exit_codes.py", "registry.py", "safe_files.py", "units.py")


def is_command(path: Path) -> bool:
    """Whether a file is run by name and imports packages of the clone."""
    text = path.read_text()
    modules = {node.module for node in ast.parse(text).body if isinstance(node, ast.ImportFrom)}
    rooms = {str(module).partition(".")[0] for module in modules}
    return "__main__" in text and bool(rooms & set(PACKAGES))


COMMANDS = [path.name for path in sorted((ROOT / "scripts").glob("*.py")) if is_command(path)]


@pytest.mark.parametrize("name", COMMANDS)
@pytest.mark.costly
def test_a_command_imports_from_its_clone_and_not_from_an_installed_copy(name, tmp_path):
    shutil.copytree(ROOT / "scripts", tmp_path / "clone/scripts")
    for module in MODULES:
        shutil.copy(ROOT / module, tmp_path / "clone")
    for package in PACKAGES:
        own, installed = tmp_path / "clone" / package, tmp_path / "installed" / package
        own.mkdir()
        (own / "__init__.py").write_text("raise SystemExit('own clone')\n")
        installed.mkdir(parents=True)
        (installed / "__init__.py").write_text("raise SystemExit('installed copy')\n")
    done = subprocess.run(
        [sys.executable, tmp_path / "clone/scripts" / name],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(tmp_path / "installed")},
        capture_output=True,
        text=True,
    )
    assert done.stderr == "own clone\n"


def test_ctrl_c_during_the_imports_of_a_command_ends_it_silently():
    # importtime prints a line on stderr after every import.
    command = [sys.executable, "-X", "importtime", "scripts/checkpoint.py", "--help"]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    # Children of a background job would ignore the signal.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    process = subprocess.Popen(command, cwd=ROOT, **pipes)
    signal.signal(signal.SIGINT, before)
    with process:
        assert any("jax.version" in line for line in process.stderr)
        process.send_signal(signal.SIGINT)
        output, errors = process.communicate(timeout=100)
    assert process.returncode == 128 + signal.SIGINT
    assert output == "" and "Traceback" not in errors and "KeyboardInterrupt" not in errors
