"""What changed since a checkpoint: configuration keys, library versions, the learning rate."""

import platform
from collections.abc import Mapping
from importlib.metadata import version
from typing import Any

from pydantic import ValidationError
from ruamel.yaml import YAML

from model.families.base import NOT_MATHEMATICS
from training.dotted_keys import as_yaml, flatten
from training.logs import log
from training.optimizers import OptimizerConfig
from training.schedules import describe_change

_LIBRARIES = ("jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "grain", "numpy")


def library_versions() -> dict[str, str]:
    """Return the versions of Python and of the libraries that affect numerics and files."""
    found = {name: version(name) for name in _LIBRARIES}
    return {"python": platform.python_version(), **found}


def config_keys(config: str) -> dict[str, Any]:
    """Return the values of a configuration as YAML by dotted keys."""
    return flatten(YAML(typ="safe", pure=True).load(config))


# Sections whose keys are names that the user has chosen.
_NAMED_BY_USERS = ("optimizer.options.", "optimizer.groups.", "data.sources.")


def config_changes(before: Mapping[str, Any], now: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    """Return (old value, new value) of the keys that differ, also of those that are gone.

    Keys that this version of the program does not have are left out.
    """
    found = {key: (before.get(key), x) for key, x in now.items() if before.get(key) != x}
    gone = sorted(
        key
        for key in before.keys() - now.keys()
        if key.startswith(_NAMED_BY_USERS) or _is_in_null(key, now)
    )
    return found | {key: (before[key], None) for key in gone}


def _is_in_null(key: str, values: Mapping[str, Any]) -> bool:
    """Return whether a section that would hold this key is a value, which is null or empty."""
    parts = key.split(".")
    return any(".".join(parts[:n]) in values for n in range(1, len(parts)))


def _alters_the_model(key: str) -> bool:
    """Return whether restored parameters compute something else after a change of this key."""
    section, _, name = key.partition(".")
    names = {name, name.partition(".")[0]}  # a key, and the section that it may be in
    return key == "lora.alpha" or (section == "model" and not names & NOT_MATHEMATICS)


def log_config_changes(
    record: Mapping[str, Any], resolved_config: str, num_skipped: int = 0
) -> None:
    """Log the keys that differ from those of a checkpoint, and a change of the learning rate.

    num_skipped: steps up to the checkpoint that changed nothing.
    """
    trees = [*map(YAML(typ="safe", pure=True).load, (record["config"], resolved_config))]
    if (source := trees[1]["training"]["init_from"]) is not None:
        log.info(
            "training.init_from=%s is not read: the run goes on from its checkpoint %d",
            source,
            record["step"],
        )
    before = config_keys(record["config"])
    changes = config_changes(before, config_keys(resolved_config))
    changed = [f"{key} {as_yaml(old)} -> {as_yaml(new)}" for key, (old, new) in changes.items()]
    versions = record.get("versions", {})
    others = [
        f"{name} {versions[name]} -> {now}"
        for name, now in library_versions().items()
        if versions.get(name, now) != now
    ]
    if others:
        log.warning(
            "other library versions than those of checkpoint %d, so numbers may differ by "
            "roundings: %s",
            record["step"],
            ", ".join(others),
        )
    if changed:
        log.info("changed since checkpoint %d: %s", record["step"], ", ".join(changed))
    # Earlier versions of the program lacked some keys.
    known = [key for key in changes if key in before or _is_in_null(key, before)]
    if altered := [key for key in known if _alters_the_model(key)]:
        log.warning(
            "%s changed: the model computes something else with the restored parameters, and the "
            "loss may jump",
            ", ".join(altered),
        )
    try:
        old, new = (
            (OptimizerConfig.model_validate(tree["optimizer"]), tree["training"]["steps"])
            for tree in trees
        )
    except ValidationError as error:  # another version of the program wrote the checkpoint
        keys = (f"{'.'.join(map(str, part['loc']))}: {part['msg']}" for part in error.errors())
        log.warning(
            "checkpoint %d: its section optimizer is not one of this version (%s); learning rates "
            "are not compared",
            record["step"],
            ", ".join(keys),
        )
        return
    if line := describe_change(old, new, record["step"], num_skipped):
        log.info("%s", line)
