"""Constraint files pin all that pyproject.toml asks for, and the launchers install by them."""

import re
import tomllib

import pytest
from conftest import ROOT
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
FILES = sorted((ROOT / "constraints").glob("*.txt"))


def pins(text: str) -> dict[str, str]:
    """Versions by name; every line but comments is NAME==VERSION."""
    lines = [line for line in text.splitlines() if not line.startswith("#")]
    found = [re.fullmatch(r"([\w.-]+)==([\w.+!]+)", line) for line in lines]
    assert all(found), [line for line, match in zip(lines, found, strict=True) if not match]
    return {canonicalize_name(match[1]): match[2] for match in found if match}


def required() -> list[Requirement]:
    extras = [PROJECT["optional-dependencies"][name] for name in ("data", "test", "plan")]
    texts = [*PROJECT["dependencies"], *(text for extra in extras for text in extra)]
    return [found for found in map(Requirement, texts) if found.name != PROJECT["name"]]


def test_there_is_a_file_for_each_python():
    assert [path.stem for path in FILES] == ["python3.11", "python3.12", "python3.13"]


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_every_dependency_is_pinned_to_a_version_that_the_project_accepts(path):
    found = pins(path.read_text())
    for requirement in required():
        version = found.get(canonicalize_name(requirement.name))
        assert version is not None, f"{requirement.name} is missing; run .ci/renew_constraints"
        assert requirement.specifier.contains(version, prereleases=True), requirement
    assert found["jaxlib"] and found["libtpu"]  # of jax, and of its extra tpu


def test_image_and_hosts_install_the_versions_of_their_python():
    image = (ROOT / "Dockerfile").read_text()
    (python,) = re.findall(r"^FROM python:(\d+\.\d+)-", image, re.MULTILINE)
    assert re.findall(r"--constraint constraints/(\S+)\.txt", image) == [f"python{python}"]
    host = (ROOT / "scripts/launch/tpu_pod.sh").read_text()
    (python,) = re.findall(r"--python (3\.\d+) ", host)
    assert re.findall(r"-c constraints/(\S+)\.txt", host) == [f"python{python}"]
