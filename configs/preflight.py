"""Facts that must be equal on all processes of a run: code, versions, configuration, data."""

import hashlib
import importlib
import inspect
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax

from configs.schema import Config
from data.pipeline import Dataset
from training.config_changes import library_versions
from training.dotted_keys import flatten

_ROOT = Path(__file__).resolve().parent.parent
# Environment variables that change the compiled program.
_ENVIRONMENT = ("XLA_FLAGS", "LIBTPU_INIT_ARGS", "JAX_ENABLE_X64", "JAX_DEFAULT_MATMUL_PRECISION")
_PACKAGES = ("configs", "data", "model", "parallel", "training")


def describe_program(config: Config) -> dict[str, Any]:
    """Return code hash, versions and every configuration value, without starting a jax backend."""
    return {
        "code": _code_hash(config.plugins),
        **{name: os.environ.get(name, "") for name in _ENVIRONMENT},
        **{f"version of {name}": version for name, version in library_versions().items()},
        **flatten(config.model_dump(mode="json")),
    }


def describe_machine(dataset: Dataset, devices: list[jax.Device]) -> dict[str, Any]:
    """Return the devices of this process and the digests of its data."""
    return {
        "runtime": devices[0].client.platform_version,
        "devices": f"{len(devices)} x {devices[0].device_kind}",
        **{f"text of source {source.name}": source.store.digest for source in dataset.sources},
        **{
            f"eval_files of source {source.name}": source.evaluation[0].digest
            for source in dataset.sources
            if source.evaluation is not None
        },
        "order of the data": dataset.order_hash(0),
    }


def _code_hash(plugins: Sequence[str]) -> str:
    """Hash the names and contents of all source files, and the contents of plugin modules."""
    digest = hashlib.sha256()
    for name in plugins:
        source = inspect.getsource(importlib.import_module(name))
        digest.update(f"{name}\0{source}\0".encode())
    in_packages = (path for package in _PACKAGES for path in (_ROOT / package).rglob("*.py"))
    for path in sorted([*_ROOT.glob("*.py"), *in_packages]):
        digest.update(f"{path.relative_to(_ROOT)}\0".encode() + path.read_bytes() + b"\0")
    return digest.hexdigest()[:16]
