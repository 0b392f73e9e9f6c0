"""Where a run goes on: the newest checkpoint that is whole and fits, and what came before it."""

import hashlib
import platform
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from importlib.metadata import version
from typing import Any

from ruamel.yaml import YAML

from data.pipeline import Rows, explain_change
from data.schedule import batch_number
from parallel.cluster.errors import ProcessGroupError
from training.checkpoint import CheckpointConfig, CheckpointError, Checkpoints, DamageError
from training.metrics import log
from training.step import TrainState

_LIBRARIES = ("jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "grain", "numpy")


@dataclass(frozen=True)
class Origin:
    """Where a process begins, and what it must know of those before it."""

    step: int = 0
    """Finished steps."""
    skipped: tuple[tuple[int, int], ...] = ()
    """Batches [first, last) that are left out, ascending."""
    pending: tuple[str, ...] = ()
    """What belonged to the step and was interrupted: evaluation, sample."""
    lineage: tuple[dict[str, Any], ...] = ()
    """One entry per process before this one: what it was, and the step it began at."""
    goodput: dict[str, float] = field(default_factory=dict)
    """Seconds by label until then."""

    def batch(self, step: int) -> int:
        """The number of the batch that a zero-based step takes."""
        return batch_number(step, self.skipped)

    def without(self, first: int, last: int) -> "Origin":
        """Batches `first` .. `last` are left out too."""
        ranges = sorted([*self.skipped, (first, last + 1)])
        merged = ranges[:1]
        for begin, end in ranges[1:]:
            if begin <= merged[-1][1]:
                merged[-1] = merged[-1][0], max(end, merged[-1][1])
            else:
                merged.append((begin, end))
        return replace(self, skipped=tuple(merged))


def library_versions() -> dict[str, str]:
    """Of Python and of what decides numbers and files."""
    found = {name: version(name) for name in _LIBRARIES}
    return {"python": platform.python_version(), **found}


def describe_process(
    resolved_config: str, mesh: Mapping[str, int], num_processes: int
) -> dict[str, Any]:
    """What a checkpoint tells of the process that wrote it, as JSON values."""
    return {
        "config": resolved_config,
        "config_hash": hashlib.sha256(resolved_config.encode()).hexdigest(),
        "mesh": dict(mesh),
        "processes": num_processes,
        "versions": library_versions(),
        "began": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
    }


def find_origin(
    checkpoints: Checkpoints,
    config: CheckpointConfig,
    rows: Rows,
    abstract_state: TrainState,
    *,
    steps: int,
) -> Origin:
    """The newest checkpoint with a whole record; damaged ones are set aside, and that is told.

    steps: of the whole run. Raises: ValueError when it does not fit this run, or none is whole.
    """
    group = checkpoints.group
    found = group.broadcast(
        "origin",
        lambda: asdict(_search(checkpoints, config, rows, abstract_state, steps)),
    )
    if not group.is_primary:
        checkpoints.reload()
    return Origin(
        step=found["step"],
        skipped=tuple((first, last) for first, last in found["skipped"]),
        pending=tuple(found["pending"]),
        lineage=tuple(found["lineage"]),
        goodput=found["goodput"],
    )


def _search(
    checkpoints: Checkpoints,
    config: CheckpointConfig,
    rows: Rows,
    abstract_state: TrainState,
    steps: int,
) -> Origin:
    while (step := checkpoints.latest_step) is not None:
        try:
            record = checkpoints.record(step)
            _check(record, step, rows, steps)
            checkpoints.check(step, abstract_state)
            return _origin(record, step)
        except DamageError as error:
            leave_out(checkpoints, step, error)
    # This process may have set them aside, or one before it.
    if damaged := checkpoints.leftovers()[0]:
        raise ValueError(
            f"no whole checkpoint is left beside {', '.join(path.name for path in damaged)}; bring "
            "one back from a copy, or begin anew with checkpoint.resume=never"
        )
    if config.resume == "must":
        raise ValueError(
            "checkpoint.resume=must, but the run directory holds no checkpoint; "
            "check run.dir, or use checkpoint.resume=auto"
        )
    return Origin()


def restore_newest(
    checkpoints: Checkpoints,
    origin: Origin,
    rows: Rows,
    abstract_state: TrainState,
    *,
    steps: int,
) -> tuple[Origin, TrainState]:
    """The state of an origin, or of the newest one before it that is what was written.

    Raises: CheckpointError when none is left. Among several processes,
    ProcessGroupError after a damaged one: the others may wait in the restore for ever, so all start
    again, from the one before.
    """
    while True:
        try:
            return origin, checkpoints.restore(origin.step, abstract_state)
        except DamageError as error:
            leave_out(checkpoints, origin.step, error)
            if checkpoints.group.num_processes > 1:
                raise ProcessGroupError(
                    f"{error}; it was set aside, start all processes again"
                ) from error
        origin = find_again(checkpoints, rows, abstract_state, steps=steps)


def find_again(
    checkpoints: Checkpoints,
    rows: Rows,
    abstract_state: TrainState,
    *,
    steps: int,
) -> Origin:
    """As `find_origin`, for a run that has begun. Raises: CheckpointError when none is left."""
    try:
        return find_origin(checkpoints, checkpoints.config, rows, abstract_state, steps=steps)
    except ValueError as error:
        raise CheckpointError(str(error)) from error


def leave_out(checkpoints: Checkpoints, step: int, error: CheckpointError) -> None:
    """Sets a damaged checkpoint aside, loudly."""
    try:
        target = checkpoints.set_aside(step)
    except FileNotFoundError:  # another process was first
        log.error("%s; it was set aside", error)
        return
    newest = checkpoints.latest_step
    log.error(
        "%s; it is now %s, %s",
        error,
        target.name,
        "and no other is left" if newest is None else f"going on from step {newest}",
    )


def _origin(record: Mapping[str, Any], step: int) -> Origin:
    keys = ("config_hash", "mesh", "processes", "versions", "began", "from_step")
    entry = {key: record[key] for key in keys if key in record}
    return Origin(
        step,
        tuple((first, last) for first, last in record["skipped"]),
        tuple(record["pending"]),
        (*record["lineage"], entry),
        record.get("goodput", {}),
    )


def _check(record: Mapping[str, Any], step: int, rows: Rows, steps: int) -> None:
    """Raises: ValueError when this run is not the continuation of that one."""
    if step > steps:
        raise ValueError(
            f"training.steps={steps} but the run directory already holds step {step}; "
            "raise training.steps, or give another run.dir"
        )
    now = rows.order(batch_number(step, record["skipped"]))
    if record["order"] != now:
        raise ValueError(
            f"checkpoint {step} was trained on other data: "
            f"{explain_change(record['order'], now)}; restore it, or give another run.dir"
        )


def tell_changes(record: Mapping[str, Any], resolved_config: str) -> None:
    """Says on one line what the config has that the one of a checkpoint had not."""
    yaml = YAML(typ="safe", pure=True)
    before, now = (flatten(yaml.load(text)) for text in (record["config"], resolved_config))
    changed = [
        f"{key} {before.get(key)!r} -> {value!r}"
        for key, value in now.items()
        if before.get(key) != value
    ]
    if changed:
        log.info("changed since checkpoint %d: %s", record["step"], ", ".join(changed))


def flatten(tree: Any, prefix: str = "") -> dict[str, Any]:
    """A tree of values by dotted keys."""
    if not isinstance(tree, dict) or not tree:
        return {prefix.removesuffix("."): tree}
    parts = (flatten(value, f"{prefix}{key}.") for key, value in tree.items())
    return {key: value for part in parts for key, value in part.items()}


def record_of(
    origin: Origin, process: Mapping[str, Any], rows: Rows, step: int, pending: tuple[str, ...]
) -> dict[str, Any]:
    """What is saved beside the state of a step, as JSON values."""
    batch = origin.batch(step)
    return {
        **process,
        "from_step": origin.step,
        "lineage": list(origin.lineage),
        "skipped": [list(part) for part in origin.skipped],
        "pending": list(pending),
        "order": rows.order(batch),
        "order_hash": rows.order_hash(batch),
    }
