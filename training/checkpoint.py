"""Saving and restoring a run with orbax: asynchronous, sharded, onto any mesh, and proved.

The only file that meets orbax. On disk the state is plain nested dicts of arrays, independent of
the mesh, with a record: what the run was, and a fingerprint of every array, which what is read has
to match. A save that fails is told and tried again; a damaged checkpoint is an error that names it,
and can be set aside. A failed restore is never a silent start from scratch.
"""

import contextlib
import errno
import hashlib
import json
import logging
import math
import os
import re
import shutil
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

import jax
from orbax.checkpoint import v1
from pydantic import BaseModel, NonNegativeInt, PositiveInt

from parallel.cluster.errors import ProcessGroupError
from parallel.cluster.process_group import ProcessGroup
from training.fingerprint import fingerprints, leaf_name
from training.metrics import log
from training.step import TrainState

_ocp = v1.training
_READ_BYTES = 2**31


class CheckpointConfig(BaseModel, frozen=True, extra="forbid", use_attribute_docstrings=True):
    """When a run is saved, what is kept, how it resumes."""

    every: PositiveInt = 200
    """Steps between saves; the last step is always saved."""
    keep: PositiveInt = 3
    """How many of the newest checkpoints stay on disk."""
    keep_every: PositiveInt | None = None
    """Checkpoints of every so many steps stay for good; null: none."""
    keep_best: NonNegativeInt = 0
    """How many of those with the smallest evaluation loss stay too."""
    resume: Literal["auto", "never", "must"] = "auto"
    """auto: continue if there is a checkpoint; never: move an old run aside; must: or fail."""


class CheckpointError(Exception):
    """A checkpoint could not be written or read; the message says which and why, on one line."""


class DamageError(CheckpointError):
    """A checkpoint is not what was written."""


def _unread(what: str, error: BaseException) -> CheckpointError:
    """Damage, unless it is the fault of who reads: memory, rights, a storage that is away."""
    cause = _cause(error)
    is_here = isinstance(cause, MemoryError) or _NOT_DAMAGE.search(str(cause)) is not None
    is_here |= isinstance(cause, OSError) and cause.errno in _NOT_DAMAGE_ERRNO
    return (CheckpointError if is_here else DamageError)(f"{what}: {_reason(error)}")


_NOT_DAMAGE = re.compile(r"RESOURCE_EXHAUSTED|PERMISSION_DENIED|UNAVAILABLE|DEADLINE_EXCEEDED")
_NOT_DAMAGE_ERRNO = {errno.EACCES, errno.EPERM, errno.EIO, errno.ESTALE, errno.ETIMEDOUT}
_NOT_DAMAGE_ERRNO |= {errno.ENOMEM, errno.EMFILE, errno.ENFILE}


def _cause(error: BaseException) -> BaseException:
    """What lies beneath orbax's own error."""
    while error.__cause__ is not None:
        error = error.__cause__
    return error


def _reason(error: BaseException) -> str:
    """Its first line."""
    cause = _cause(error)
    line = str(cause).strip().partition("\n")[0]
    # Its storage library adds a page of its own settings.
    line = re.sub(r" \[(source locations|tensorstore_spec).*", "", line)
    return f"{type(cause).__name__}: {line}"


def _by_name(state: Any) -> dict[str, Any]:
    """Every array by its dotted path: what is on disk knows no class of any library.

    What is not there (no moving average) has no entry.
    """
    return {leaf_name(path): x for path, x in jax.tree_util.tree_leaves_with_path(state)}


def _in_place_of(abstract: Any, arrays: dict[str, jax.Array]) -> Any:
    """The tree whose arrays these are."""
    return jax.tree_util.tree_map_with_path(lambda path, _: arrays[leaf_name(path)], abstract)


def _leaves(arrays: dict[str, Any]) -> dict[str, list[Any]]:
    """[shape, dtype] of every array, as JSON values."""
    return {name: [list(x.shape), str(x.dtype)] for name, x in arrays.items()}


def _checksum(record: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(record, sort_keys=True).encode()).hexdigest()


@dataclass(frozen=True)
class _Best:
    """Preserves the n with the smallest evaluation loss, by their records."""

    losses: dict[int, float]
    n: int

    def should_preserve(self, checkpoints: Sequence[Any], *, context: Any) -> list[bool]:
        judged = [info.step for info in checkpoints if info.step in self.losses]
        best = sorted(judged, key=lambda step: self.losses[step])[: self.n]
        return [info.step in best for info in checkpoints]


class Checkpoints:
    """The checkpoints of one run directory."""

    def __init__(
        self,
        directory: Path,
        config: CheckpointConfig,
        *,
        read_only: bool = False,
        group: ProcessGroup | None = None,
    ):
        """read_only: another process may be saving here; nothing is cleaned up.

        group: the processes that open, save and restore together.
        """
        self.group = group or ProcessGroup()
        # orbax prints tracebacks from its threads before it raises; what it raises, we report.
        logging.getLogger("absl").setLevel(logging.CRITICAL)
        self._directory, self.config, self._read_only = Path(directory), config, read_only
        self._losses: dict[int, float] = {}
        self._saver = self._open_read_only() if read_only else self._open()
        if config.keep_best:
            for step in self.steps:
                with contextlib.suppress(CheckpointError):  # told when it is to be restored
                    self.remember(step, self.record(step)["metrics"])
        self._pending: tuple[int, Callable[[], Any]] | None = None
        self._failures = 0
        self._retry_at: int | None = None

    def _open(self) -> Any:
        policies, config = _ocp.preservation_policies, self.config
        kept = [policies.LatestN(config.keep)]
        if config.keep_every is not None:
            kept.append(policies.EveryNSteps(config.keep_every))
        if config.keep_best:
            kept.append(_Best(self._losses, config.keep_best))
        return _ocp.Checkpointer(
            os.path.abspath(self._directory),
            cleanup_tmp_directories=not self._read_only,
            preservation_policy=policies.AnyPreservationPolicy(kept),
        )

    def _open_read_only(self) -> Any:
        """As `_open`: a checkpoint that its run removes meanwhile is there when orbax lists them,
        and gone when it looks inside."""
        for _ in range(9):
            with contextlib.suppress(FileNotFoundError):
                return self._open()
            time.sleep(0.01)
        return self._open()

    @property
    def steps(self) -> list[int]:
        """The finished steps on disk, ascending."""
        return sorted(int(checkpoint.step) for checkpoint in self._saver.checkpoints)

    @property
    def latest_step(self) -> int | None:
        """The newest finished step on disk."""
        return max(self.steps, default=None)

    def save(
        self,
        state: TrainState,
        step: int,
        record: dict[str, Any],
        metrics: dict[str, float] | None = None,
    ) -> float:
        """Starts saving; returns when the state is copied off the devices. Seconds that took.

        record: JSON values, read back by `record`. metrics: eval_loss, by which the best are kept.
        A failure is told, and `is_owed` from some later step on.
        """
        begin = time.perf_counter()
        self.finish()
        if gone := [old for old in self.steps if not (self._directory / str(old)).exists()]:
            names = ", ".join(map(str, gone))
            log.warning("checkpoints %s are gone from %s; going on", names, self._directory)
            self._saver.reload()
        if step == self.latest_step:
            log.debug("step %d is not saved again: it is on disk", step)
            return 0.0
        arrays = _by_name(state)
        record = {
            **record,
            "step": step,
            "saved": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
            "metrics": metrics or {},
            "leaves": _leaves(arrays),
            "fingerprints": fingerprints(arrays),
        }
        self.remember(step, record["metrics"])
        try:
            response = self._saver.save_checkpointables_async(
                step,
                {"state": arrays},
                force=True,
                custom_metadata={"record": record, "sha256": _checksum(record)},
            )
        except Exception as error:
            self._pending = step, partial(_raise, error)
            self.poll()
        else:
            assert response is not None, "a forced save is never skipped"
            self._pending = step, response.result
        return time.perf_counter() - begin

    def remember(self, step: int, metrics: dict[str, float]) -> None:
        """The eval_loss of a step, by which the best are kept; it may come after the save."""
        if math.isfinite(metrics.get("eval_loss", math.nan)):
            self._losses[step] = metrics["eval_loss"]

    def is_owed(self, step: int) -> bool:
        """Whether a save failed and is to be tried again at this step."""
        return self._retry_at is not None and step >= self._retry_at

    @property
    def ended(self) -> int | None:
        """The step whose save has finished or failed in this process, and was not told yet."""
        if self._pending is None or self._saver.is_saving_in_progress():
            return None
        return self._pending[0]

    def poll(self, all_ended: int | None = None) -> None:
        """Tells of a save that has ended; among several processes when all know that it has.

        all_ended: a step that is that of `ended` in all of them.
        """
        if self.ended is not None and (self.group.num_processes == 1 or self.ended == all_ended):
            self.finish()

    def finish(self) -> None:
        """Waits for a save in progress, and tells how it ended.

        Raises: ProcessGroupError when it failed in this process, and the others still wait for
            its part.
        """
        if self._pending is None:
            return
        (step, result), self._pending = self._pending, None
        problem = None
        try:
            result()
        except Exception as error:
            problem = _reason(error)
        self.group.start_all_gather("saved", problem)
        try:
            # Orbax waits for the part of every process: who has failed is not told of the others.
            limit = None if problem is None else self.group.config.peer_timeout
            ends = self.group.wait_all_gather("saved", limit)
        except TimeoutError as error:
            raise ProcessGroupError(
                f"checkpoint {step} was not saved: {problem}; the others wait for it: start all "
                "processes again"
            ) from error
        for host, told in zip(self.group.hosts, ends, strict=True):
            if told is not None:
                self._failed(step, told if len(self.group.hosts) == 1 else f"on {host}: {told}")
                return
        self._failures, self._retry_at = 0, None
        log.info("saved step %d", step)

    def finish_last(self) -> None:
        """As `finish`. Raises: CheckpointError when the last save failed: it is not tried again."""
        self.finish()
        if self._retry_at is not None:
            raise CheckpointError(
                "the last state was not saved; the newest whole checkpoint is "
                f"{self.latest_step or 'none'}"
            )

    def _failed(self, step: int, problem: str) -> None:
        self._failures += 1
        wait = min(2 ** (self._failures - 1), self.config.every)
        self._retry_at = step + wait
        log.warning(
            "checkpoint %d was not saved: %s; training goes on, next try after step %d",
            step,
            problem,
            self._retry_at,
        )
        # What is left of it would fill the disk, and its saver repeats the error for ever.
        with contextlib.suppress(Exception):
            self._saver.close()
        if self.group.is_primary:
            for path in self._directory.glob(f"{step}.*tmp*"):
                shutil.rmtree(path, ignore_errors=True)
        self._saver = self._open()

    def record(self, step: int) -> dict[str, Any]:
        """What `save` was given for this step, with leaves and fingerprints.

        Raises: CheckpointError when it is not what was written.
        """
        try:
            # Not by orbax's own reader: it opens every array, and prints what it cannot open.
            file = self._directory / str(step) / "_CHECKPOINT_METADATA"
            metadata = json.loads(file.read_bytes())["custom_metadata"]
            record, checksum = metadata["record"], metadata["sha256"]
        except Exception as error:
            raise _unread(f"checkpoint {step} has no record", error) from error
        if checksum != _checksum(record) or record["step"] != step:
            raise DamageError(f"checkpoint {step}: its record is not what was written")
        return record

    def check(self, step: int, abstract_state: TrainState) -> None:
        """Compares what is stored with this model, reading the record only.

        orbax would cast a dtype that differs without a word. Raises: ValueError naming the first
        parameter that is missing, extra, or of another shape or dtype; CheckpointError.
        """
        found, wanted = self.record(step)["leaves"], _leaves(_by_name(abstract_state))
        by_parameter = sorted(
            found.keys() | wanted.keys(), key=lambda name: (not name.startswith("params."), name)
        )
        for name in by_parameter:
            if name.startswith("ema.") and name not in found:
                raise ValueError(
                    f"checkpoint {step} keeps no moving average, the config asks for one; leave "
                    "optimizer.ema_decay out, or give another run.dir"
                )
            if found.get(name) != wanted.get(name):
                raise ValueError(
                    f"checkpoint {step} holds {name.removeprefix('params.')} as "
                    f"{_shown(found.get(name))}, the config "
                    f"asks for {_shown(wanted.get(name))}; restore the values of the run's "
                    "config.yaml, or give another run.dir"
                )

    def restore(self, step: int, abstract_state: TrainState) -> TrainState:
        """The state of a step, on the mesh of `abstract_state`, as it was saved to the bit.

        Raises: CheckpointError if it cannot be read, or is not what was written.
        """
        wanted = _by_name(abstract_state)
        arrays = self._load(step, wanted)
        for name, want in wanted.items():
            got = arrays[name]
            assert got.sharding == want.sharding and got.dtype == want.dtype
        return _in_place_of(abstract_state, arrays)

    def restore_params(self, step: int, abstract_state: TrainState, part: str = "params") -> Any:
        """The parameters of a step alone, or their moving average `ema`, as `restore`."""
        wanted = {part: getattr(abstract_state, part)}
        return _in_place_of(wanted, self._load(step, _by_name(wanted)))[part]

    def read(self, step: int, name: str, sharding: jax.sharding.Sharding) -> jax.Array:
        """One array by its dotted path, as `restore`: nothing else of the step is read."""
        shape, dtype = self.record(step)["leaves"][name]
        return self._load(step, {name: jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)})[name]

    def _load(self, step: int, abstract: dict[str, Any]) -> dict[str, jax.Array]:
        """Arrays by name."""
        written = self.record(step)["fingerprints"]
        loading = v1.options.PyTreeOptions.Loading(partial_load=True)
        # Beside the arrays themselves: what is read at a time, at least the largest of them.
        largest = max(math.prod(x.shape) * x.dtype.itemsize for x in abstract.values())
        memory = v1.options.MemoryOptions(read_concurrent_bytes=max(_READ_BYTES, largest))
        try:
            with v1.Context(
                pytree_options=v1.options.PyTreeOptions(loading=loading), memory_options=memory
            ):
                arrays = self._saver.load_checkpointables(step, {"state": abstract})["state"]
        except Exception as error:
            raise _unread(f"checkpoint {step} cannot be read", error) from error
        if absent := [n for n, x in arrays.items() if not isinstance(x, jax.Array)]:
            # A partial load leaves what it does not find as it was given.
            raise DamageError(f"checkpoint {step}: {absent[0]} is not there")
        for name, found in fingerprints(arrays).items():
            if found != written[name]:
                raise DamageError(f"checkpoint {step}: {name} is not what was written")
        return arrays

    def set_aside(self, step: int) -> Path:
        """Renames a damaged checkpoint to `STEP.damaged`, so that nothing takes it for one."""
        number, source = 1, self._directory / str(step)
        target = source.with_name(f"{step}.damaged")
        while target.exists():
            number += 1
            target = source.with_name(f"{step}.damaged-{number}")
        source.rename(target)
        self._saver.reload()
        return target

    def reload(self) -> None:
        """Looks again at what is on disk."""
        self._saver.reload()

    def delete(self, step: int) -> None:
        """Removes a checkpoint; of a kill on the way the next run clears up what is left."""
        target = self._directory / f"{step}.orbax-checkpoint-tmp"
        shutil.rmtree(target, ignore_errors=True)
        (self._directory / str(step)).rename(target)
        self._saver.reload()
        shutil.rmtree(target)

    def leftovers(self) -> tuple[list[Path], list[Path]]:
        """(damaged checkpoints that were set aside, saves that were never finished)."""
        found = sorted(path for path in self._directory.iterdir() if path.is_dir())
        return (
            [path for path in found if ".damaged" in path.name],
            [path for path in found if ".orbax-checkpoint-tmp" in path.name],
        )

    def close(self) -> None:
        """Waits for a save in progress and lets go of the directory."""
        self.finish()
        self._saver.close()

    def on_exit(self, kind: type[BaseException] | None, *_: Any) -> None:
        """Closes it at the end of a context. After an error the other processes may not come here:
        nobody is asked how their part of a save went."""
        if kind is not None and self._pending is not None and self.group.num_processes > 1:
            (step, result), self._pending = self._pending, None
            with contextlib.suppress(Exception):
                result()
                log.info("saved step %d", step)
        self.close()


def _raise(error: Exception) -> None:
    raise error


def _shown(leaf: list[Any] | None) -> str:
    return "nothing" if leaf is None else f"({tuple(leaf[0])}, {leaf[1]!r})"
