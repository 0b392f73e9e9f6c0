"""Launch scripts in a copy of the checkout, beside programs that stand in for a cluster."""

import shutil
import subprocess
from pathlib import Path

import pytest
from conftest import ROOT

LAUNCH = ROOT / "scripts" / "launch"
BASH = shutil.which("bash") or "/bin/bash"
PLACE = ["--name", "torus", "--zone", "z"]
TRAIN = ["--config", "configs/tp8.yaml", "mesh.dp=2", "mesh.tp=8"]
UP = ["up", *PLACE, "--accelerator", "v5litepod-16"]
STRANGE = ["data.files=a b/*.txt", "x='q' \"r\" & \\n $HOME `id`", "--flag="]


def write_program(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!{BASH}\n{text}\n")
    path.chmod(0o755)


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A copy of the scripts elsewhere, with an empty folder of programs."""
    shutil.copytree(LAUNCH, tmp_path / "scripts" / "launch")
    (tmp_path / "train.py").touch()
    (tmp_path / "bin").mkdir()
    return tmp_path


def start(checkout: Path, *command: str, system: bool = False, **environment: str):
    """Start a script that finds only the stand-ins, and with `system` the usual tools."""
    path = f"{checkout / 'bin'}{':/usr/local/bin:/usr/bin:/bin' if system else ''}"
    return subprocess.Popen(
        [BASH, *command],
        cwd=checkout,
        env={"PATH": path, "HOME": str(checkout), "STAND_INS": str(checkout), **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def run(checkout: Path, *command: str, system: bool = False, **environment: str):
    """Return exit code, stdout and stderr of a script."""
    process = start(checkout, *command, system=system, **environment)
    out, err = process.communicate(timeout=60)
    return process.returncode, out, err


def script(name: str) -> str:
    return f"scripts/launch/{name}"


RECORD = """
{ printf '%s\\0' "${0##*/}" "$@"; [[ $* != *--filename=- ]] || cat; printf '\\1'; } \\
    >> "$STAND_INS/record"
[[ $* != *"queued-resources list"* ]] || echo ACTIVE
[[ $* != *"tpu-vm list"* ]] || echo READY
"""
