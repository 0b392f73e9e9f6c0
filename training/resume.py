"""Resume points: the newest checkpoint that is complete and fits the run, and its history."""

import contextlib
import hashlib
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from ruamel.yaml import YAML

from data.batch_schedule import batch_number
from data.order_changes import explain_change, recorded_order, remedy_of_change
from data.pipeline import Dataset, Pins
from parallel.cluster.config import ProcessGroupError
from training.bucket_runs import checkpoint_folder
from training.checkpoint import Checkpoints
from training.checkpoint_record import CheckpointError, DamageError, read_record, saved_steps
from training.config_changes import config_changes, config_keys, library_versions
from training.dotted_keys import as_yaml
from training.initial_parameters import SHAPE_KEYS
from training.logs import log
from training.state import TrainState

_NEW_RUN = "give another run.dir and the old one as training.init_from to go on from the parameters"
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
                    f"set optimizer.{key}={before[key]}, or {_NEW_RUN}"
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
            saved = config_keys(record["config"])
            changes = config_changes(saved, config_keys(self.resolved_config))
            options = [key for key in changes if key.startswith("optimizer.options.")]
            if options and "opt_state." in str(error):
                raise ValueError(
                    f"{', '.join(options)} changed, and the state of the optimizer in checkpoint "
                    f"{step} does not fit; restore the former values, or {_NEW_RUN}"
                ) from error
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


def pins_of_run(directory: Path) -> Pins | None:
    """Return the pins of the newest readable checkpoint of a run; None if there is none."""
    folder = checkpoint_folder(directory)
    for step in filter(None, reversed(saved_steps(folder))):  # checkpoint 0 has read no data
        with contextlib.suppress(CheckpointError):
            return Pins.of_order(read_record(folder / str(step), step)["order"])
    return None


def _optimizer_state(config: str) -> dict[str, str]:
    """Return the keys that decide what the optimizer's state is, of a configuration as YAML."""
    section = YAML(typ="safe", pure=True).load(config).get("optimizer", {})
    # The first versions had neither key.
    moments = section.get("moments_dtype") or "null"
    return {"name": section.get("name", "adamw"), "moments_dtype": moments}


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
