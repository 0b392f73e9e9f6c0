"""Resume points: the newest checkpoint that is complete and fits the run, and its history."""

import hashlib
import platform
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from importlib.metadata import version
from typing import Any

from pydantic import ValidationError
from ruamel.yaml import YAML

from data.batch_schedule import batch_number
from data.order_changes import explain_change, recorded_order, remedy_of_change
from data.pipeline import Dataset, Pins
from model.families.base import NOT_MATHEMATICS
from parallel.cluster.config import ProcessGroupError
from training.checkpoint import Checkpoints
from training.checkpoint_record import CheckpointError, DamageError
from training.dotted_keys import as_yaml, flatten
from training.initial_parameters import SHAPE_KEYS
from training.logs import log
from training.optimizers import OptimizerConfig
from training.schedules import describe_change
from training.state import TrainState

_LIBRARIES = ("jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "grain", "numpy")
_NONE_LEFT = "no checkpoint of a training step is left; start again to train from the beginning"
# Keys that decide the arrays of a checkpoint.
_ARRAY_KEYS = {f"model.{key}" for key in (*SHAPE_KEYS, "param_dtype")}
_MODULES = "model.mtp_loss_weights"
_ARRAY_KEYS |= {"lora.rank", "lora.targets", "lora.base_dtype"}


@dataclass(frozen=True)
class ResumePoint:
    """Step at which a process begins, and what it must know about the earlier processes."""

    step: int = 0
    """Number of finished steps."""
    skipped: tuple[tuple[int, int], ...] = ()
    """Ranges [first, last) of batches that are left out, ascending."""
    pending: tuple[str, ...] = ()
    """Interrupted parts of the step: `evaluation`, `sample`."""
    lineage: tuple[dict[str, Any], ...] = ()
    """One entry per earlier process: its description, and the step at which it began."""
    goodput: dict[str, float] = field(default_factory=dict)
    """Seconds by label up to the checkpoint."""
    early_stop: dict[str, Any] = field(default_factory=dict)
    """Evaluations up to the checkpoint, for early stopping."""

    def batch(self, step: int) -> int:
        """Return the number of the batch of a zero-based step."""
        return batch_number(step, self.skipped)

    def without(self, first: int, last: int) -> "ResumePoint":
        """Return a resume point that leaves out the batches `first` to `last` too."""
        ranges = sorted([*self.skipped, (first, last + 1)])
        merged = ranges[:1]
        for begin, end in ranges[1:]:
            if begin <= merged[-1][1]:
                merged[-1] = merged[-1][0], max(end, merged[-1][1])
            else:
                merged.append((begin, end))
        return replace(self, skipped=tuple(merged))

    @classmethod
    def from_record(cls, record: Mapping[str, Any], step: int) -> "ResumePoint":
        """Return the resume point that the record of a checkpoint describes."""
        keys = ("config_hash", "mesh", "processes", "versions", "began", "run_id", "from_step")
        entry = {key: record[key] for key in keys if key in record}
        return cls(
            step,
            tuple((first, last) for first, last in record.get("skipped", ())),
            tuple(record.get("pending", ())),
            (*record.get("lineage", ()), entry),
            record.get("goodput", {}),
            record.get("early_stop", {}),
        )


@dataclass(frozen=True)
class Resumer:
    """Finds and restores the checkpoint from which a run continues."""

    checkpoints: Checkpoints
    dataset: Dataset
    abstract_state: TrainState
    steps: int
    """Last step of the run."""
    resolved_config: str
    """The complete configuration of the run as YAML."""

    def find(self) -> ResumePoint:
        """Return the newest complete checkpoint, or step 0; set damaged ones aside.

        Communication: process 0 searches and broadcasts the result.

        Raises:
            ValueError: the checkpoint does not fit this run, or all of them are damaged.
        """
        group = self.checkpoints.group
        found = group.broadcast(
            "origin", lambda: {**asdict(self._search()), "pins": asdict(self.dataset.pins)}
        )
        if not group.is_primary:
            self.checkpoints.reload()
            self.dataset.pin(Pins(**found["pins"]))
        return ResumePoint(
            step=found["step"],
            skipped=tuple((first, last) for first, last in found["skipped"]),
            pending=tuple(found["pending"]),
            lineage=tuple(found["lineage"]),
            goodput=found["goodput"],
            early_stop=found["early_stop"],
        )

    def find_again(self) -> ResumePoint:
        """Return the resume point of a run that has begun.

        Raises:
            CheckpointError: no checkpoint of a training step is left.
        """
        try:
            found = self.find()
        except ValueError as error:
            raise CheckpointError(str(error)) from error
        if not found.step:  # at most parameters: training would begin anew
            raise CheckpointError(_NONE_LEFT)
        return found

    def restore(self, point: ResumePoint) -> tuple[ResumePoint, TrainState]:
        """Return (resume point, state) of this checkpoint, or of the newest undamaged older one.

        Batches that the resume point leaves out stay left out.

        Raises:
            CheckpointError: none of a training step is left.
            ProcessGroupError: a checkpoint was damaged, and there are several processes. The
                others may wait in the restore for ever, so all processes start again.
        """
        while True:
            if not point.step:  # at most parameters, such as those of a converted model
                raise CheckpointError(_NONE_LEFT)
            try:
                return point, self.checkpoints.restore(point.step, self.abstract_state)
            except DamageError as error:
                self._set_aside(point.step, error)
                if self.checkpoints.group.num_processes > 1:
                    raise ProcessGroupError(
                        f"{error}; it was set aside, start all processes again"
                    ) from error
            point = replace(self.find_again(), skipped=point.skipped)

    def _search(self) -> ResumePoint:
        checkpoints = self.checkpoints
        while (step := checkpoints.latest_step) is not None:
            try:
                record = checkpoints.record(step)
                if step:
                    self.dataset.pin(Pins.of_order(record["order"]))
                self._check(record, step)
                self._check_arrays(record, step)
                return ResumePoint.from_record(record, step)
            except DamageError as error:
                self._set_aside(step, error)
        # Set aside by this process, or by an earlier one.
        if damaged := checkpoints.leftovers()[0]:
            raise ValueError(
                f"every checkpoint is damaged: {', '.join(path.name for path in damaged)}; restore "
                "one from a backup, or start anew with checkpoint.resume=never"
            )
        if checkpoints.config.resume == "must":
            raise ValueError(
                "checkpoint.resume=must, but the run directory holds no checkpoint; "
                "check run.dir, or use checkpoint.resume=auto"
            )
        return ResumePoint()

    def _check(self, record: Mapping[str, Any], step: int) -> None:
        """Raise ValueError unless this run continues the run of the record."""
        if step > self.steps:
            raise ValueError(
                f"training.steps={self.steps}, but the run directory already holds step {step}; "
                "raise training.steps, or give another run.dir"
            )
        if not step:  # no batch has been read
            return
        before, now = map(_optimizer_state, (record["config"], self.resolved_config))
        for key, value in now.items():
            if before[key] != value:
                raise ValueError(
                    f"optimizer.{key}={value}, but checkpoint {step} was saved with {before[key]}; "
                    f"set optimizer.{key}={before[key]}, or give another run.dir and the old one "
                    "as training.init_from to go on from the parameters"
                )
        number = batch_number(step, record["skipped"])
        order = self.dataset.order(number)
        if (recorded := recorded_order(record)) != order:
            change = explain_change(recorded, order)
            remedy = remedy_of_change(recorded, order, number, self.dataset.config)
            raise ValueError(
                f"checkpoint {step} was trained on other data: {change}; {remedy}, or give another "
                "run.dir"
            )

    def _check_arrays(self, record: Mapping[str, Any], step: int) -> None:
        """Raise ValueError, with the keys to blame, unless the arrays are those of this model."""
        try:
            self.checkpoints.check(step, self.abstract_state)
        except ValueError as error:
            saved = _keys(record["config"])
            changes = _changes(saved, _keys(self.resolved_config))
            found = {key: x for key, x in changes.items() if key in _ARRAY_KEYS & saved.keys()}
            # If only one of the two has adapters or modules, the error already says so.
            modules = [len(weights or ()) for weights in found.get(_MODULES, ())]
            if len(set(modules)) == 1:  # other weights of as many modules
                del found[_MODULES], modules[:]
            if not found or 0 in modules or 0 in found.get("lora.rank", ()):
                raise
            before, now = (
                " ".join(f"{key}={as_yaml(values[side])}" for key, values in found.items())
                for side in (0, 1)
            )
            raise ValueError(
                f"checkpoint {step} was saved with {before}, but this run has {now}; restore the "
                "former, or give another run.dir"
            ) from error

    def _set_aside(self, step: int, error: CheckpointError) -> None:
        """Rename a damaged checkpoint, and log an error."""
        try:
            target = self.checkpoints.set_aside(step)
        except FileNotFoundError:  # another process was faster, or somebody has deleted it
            self.checkpoints.reload()
            log.error("%s; it was set aside or deleted", error)
            return
        newest = self.checkpoints.latest_step
        outcome = "no other is left" if newest is None else f"resuming from {newest}"
        log.error("%s; renamed to %s; %s", error, target.name, outcome)


def _optimizer_state(config: str) -> dict[str, str]:
    """Return the keys that decide what the optimizer's state is, of a configuration as YAML."""
    section = YAML(typ="safe", pure=True).load(config).get("optimizer", {})
    # The first versions had neither key.
    moments = section.get("moments_dtype") or "null"
    return {"name": section.get("name", "adamw"), "moments_dtype": moments}


def library_versions() -> dict[str, str]:
    """Return the versions of Python and of the libraries that affect numerics and files."""
    found = {name: version(name) for name in _LIBRARIES}
    return {"python": platform.python_version(), **found}


def describe_process(
    resolved_config: str, mesh: Mapping[str, int], num_processes: int, run_id: str | None = None
) -> dict[str, Any]:
    """Return the description of this process for the record of its checkpoints; JSON values.

    run_id: see `training/run_identity.py`; None: no run, but a converted model.
    """
    return {
        "config": resolved_config,
        "config_hash": hashlib.sha256(resolved_config.encode()).hexdigest(),
        "mesh": dict(mesh),
        "processes": num_processes,
        "versions": library_versions(),
        "began": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        **({} if run_id is None else {"run_id": run_id}),
    }


def first_record(process: Mapping[str, Any]) -> dict[str, Any]:
    """Return the record of a checkpoint from which training starts; no data has been read."""
    return {
        **process,
        "from_step": 0,
        "lineage": [],
        "skipped": [],
        "pending": [],
        "order": {"sources": {}},
        "order_hash": "",
    }


def make_record(
    resume_point: ResumePoint,
    process: Mapping[str, Any],
    dataset: Dataset,
    step: int,
    pending: tuple[str, ...],
) -> dict[str, Any]:
    """Return the record to save beside the state of a step; JSON values."""
    batch = resume_point.batch(step)
    return {
        **process,
        "from_step": resume_point.step,
        "lineage": list(resume_point.lineage),
        "skipped": [list(part) for part in resume_point.skipped],
        "pending": list(pending),
        "order": dataset.order(batch),
        "order_hash": dataset.order_hash(batch),
    }


def _keys(config: str) -> dict[str, Any]:
    """Return the values of a configuration as YAML by dotted keys."""
    return flatten(YAML(typ="safe", pure=True).load(config))


# Sections whose keys are names that the user has chosen.
_NAMED_BY_USERS = ("optimizer.options.", "optimizer.groups.", "data.sources.")


def _changes(before: Mapping[str, Any], now: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
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
    before = _keys(record["config"])
    changes = _changes(before, _keys(resolved_config))
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
