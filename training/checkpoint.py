"""Checkpoints of a run directory: asynchronous, sharded saves and verified restores with orbax.

No other file saves or restores with orbax. On disk the state is a nested dict of arrays that does
not depend on the mesh, with a record beside it: a description of the run and a fingerprint of every
array. A restore verifies each array that it reads against its fingerprint. A save that fails is
logged and retried at a later step; after the last step it is an error. A damaged checkpoint raises
an error that names it; the caller sets it aside. No restore falls back to fresh parameters.
"""

import contextlib
import math
import time
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import jax
from orbax.checkpoint import v1

from data.bucket_path import AnyPath, to_path
from model.config import ModelConfig
from parallel.cluster.process_group import ProcessGroup
from safe_files import json_digest
from training.bucket_arrays import orbax_options
from training.checkpoint_folders import (
    delete_checkpoint,
    delete_partial,
    find_leftovers,
    listing,
    orbax_path,
    rename_damaged,
    warn_of_missing,
)
from training.checkpoint_policy import CheckpointConfig, Preservation
from training.checkpoint_record import (
    CheckpointError,
    check_leaves,
    holds_only_parameters,
    read_error,
    read_record,
    shapes_and_dtypes,
    short_reason,
)
from training.fingerprint import fingerprints
from training.logs import log, silence_orbax
from training.save_barrier import SaveBarrier, compare_saves
from training.state import TrainState
from training.stored_arrays import Chunk, by_name, chunked, in_place_of, read_chunks, verify
from training.vocabulary_rows import as_stored, fit_rows

_ocp = v1.training
_READ_BYTES = 2**31  # read concurrently, at least
_POLL_SECONDS = 0.1


class Checkpoints:
    """The checkpoints of one run directory."""

    def __init__(
        self,
        directory: AnyPath,
        config: CheckpointConfig,
        *,
        read_only: bool = False,
        group: ProcessGroup | None = None,
        write_bytes: int | None = None,
        publish: Callable[[], None] = lambda: None,
        model: ModelConfig | None = None,
    ):
        """Open the checkpoint directory.

        directory: the folder `checkpoints` of a run, see `checkpoint_folder`.
        config: which checkpoints to keep.
        read_only: another process may be saving here; remove nothing.
        group: the processes that open, save and restore together.
        write_bytes: bytes of arrays written at a time, which bounds the host memory of a save
            beyond the largest array; None: all.
        publish: called before each save; copies the other files of the run to its bucket, so
            that none is older than a checkpoint.
        model: the model to restore for, which may pad the vocabulary differently from that of
            a checkpoint. None: it does not.
        """
        self.group = group or ProcessGroup()
        silence_orbax()
        self._options = orbax_options(to_path(directory))
        self._directory, self.config, self._read_only = to_path(directory), config, read_only
        self._write_bytes, self._publish, self._model = write_bytes, publish, model
        self._losses: dict[int, float] = {}
        self._unsaved: set[int] = set()  # listed by orbax until it is opened again
        self._saver = self._open_read_only() if read_only else self._open()
        if config.keep_best:
            for step in self.steps:
                with contextlib.suppress(CheckpointError):  # reported by a restore
                    self.set_eval_loss(step, self.record(step)["metrics"].get("eval_loss"))
        self._pending: tuple[int, Callable[[], Any]] | None = None
        self._failures, self._retry_step = 0, math.inf

    def _open(self, *, cleanup: bool = True) -> Any:
        self._barrier = SaveBarrier(self._options)
        with self._barrier.context, listing(self._directory):
            return _ocp.Checkpointer(
                orbax_path(self._directory),
                cleanup_tmp_directories=cleanup and not self._read_only,
                preservation_policy=Preservation(self.config, self._losses),
            )

    def _open_read_only(self) -> Any:
        """Open a directory whose run may delete a checkpoint while orbax lists them."""
        for _ in range(9):
            with contextlib.suppress(FileNotFoundError):
                return self._open()
            time.sleep(0.01)
        return self._open()

    @property
    def steps(self) -> list[int]:
        """Steps of the finished checkpoints, ascending."""
        listed = {int(checkpoint.step) for checkpoint in self._saver.checkpoints}
        return sorted(listed - self._unsaved)

    @property
    def latest_step(self) -> int | None:
        """Step of the newest finished checkpoint."""
        return max(self.steps, default=None)

    def save(
        self,
        state: TrainState | Mapping[str, Any],
        step: int,
        record: dict[str, Any],
        eval_loss: float | None = None,
    ) -> float:
        """Start an asynchronous save and return the seconds that it blocked.

        Returns when the state is copied from the devices, so that its buffers may be donated. A
        failure is logged, and `needs_retry` is true from a later step on.

        state: the state after `step`; for step 0 `{"params": ...}` is enough.
        step: number of finished steps.
        record: JSON values, returned by `record`.
        eval_loss: evaluation loss of the step, for `keep_best`.
        """
        begin = time.perf_counter()
        self.finish()
        if warn_of_missing(self._directory, self.steps):
            self.reload()
        if step == self.latest_step:
            log.debug("step %d is already on disk; not saved again", step)
            return 0.0
        arrays = by_name(state)
        record = {
            **record,
            "step": step,
            "saved": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
            "metrics": {} if eval_loss is None else {"eval_loss": eval_loss},
            "leaves": shapes_and_dtypes(arrays),
            "fingerprints": fingerprints(arrays),
        }
        self.set_eval_loss(step, eval_loss)
        try:
            if self._unsaved:
                self._saver, self._unsaved = self._open(cleanup=False), set()
            self._publish()
            with chunked(arrays, self._write_bytes, self._barrier.context):
                response = self._saver.save_checkpointables_async(
                    step,
                    {"state": arrays},
                    force=True,
                    custom_metadata={"record": record, "sha256": json_digest(record)},
                )
        except Exception as error:
            self._barrier.has_failed = True
            self._pending = step, partial(_raise, error)
        else:
            assert response is not None, "orbax never skips a forced save"
            self._pending = step, response.result
        self._compare()
        return time.perf_counter() - begin

    def set_eval_loss(self, step: int, eval_loss: float | None) -> None:
        """Set the evaluation loss of a step for `keep_best`; it may be known after the save."""
        if eval_loss is not None and math.isfinite(eval_loss):
            self._losses[step] = eval_loss

    def needs_retry(self, step: int) -> bool:
        """Return whether an earlier save failed and is due for another try at this step."""
        return self._pending is None and step >= self._retry_step

    @property
    def ended_step(self) -> int | None:
        """Step whose save has finished or failed in this process and is not yet reported."""
        return None if self._pending is None or self._is_saving else self._pending[0]

    @property
    def has_failed(self) -> bool:
        """Whether the save of `ended_step` has failed in this process."""
        return self._barrier.has_failed

    @property
    def _is_saving(self) -> bool:
        # orbax counts a save that failed in this process alone as one in progress.
        return self._saver.is_saving_in_progress() and not self._barrier.has_failed

    def poll(self, ended: int | None) -> None:
        """Report a save that has ended, without waiting.

        ended: a step that was `ended_step` on every process, or on one where it has failed.
        """
        if self._pending is not None and self._pending[0] == ended:
            self._compare()

    def finish(self) -> None:
        """Wait for the save in progress and log its result.

        Raises: ProcessGroupError if it failed here while other processes still wait for this one.
        """
        while self._pending is not None:
            end = time.monotonic() + _POLL_SECONDS
            while self._is_saving and time.monotonic() < end:
                time.sleep(_POLL_SECONDS / 10)
            self._compare()

    def _compare(self) -> None:
        """Compare the save with the other processes; log its result if it has ended.

        It has ended when it is complete in all of them, or has failed in one.
        """
        assert self._pending is not None
        (step, result), problem = self._pending, None
        if not (is_saving := self._is_saving):
            try:
                result()
            except Exception as error:
                problem = short_reason(error)
        has_ended, problems = compare_saves(self.group, step, is_saving, problem)
        if not has_ended:
            return
        self._pending = None
        if problems:
            self._handle_failure(step, problems)
        else:
            self._failures, self._retry_step = 0, math.inf
            log.info("saved step %d", step)

    def finish_last(self) -> None:
        """Wait for the last save of the run. Raises: CheckpointError if it failed."""
        self.finish()
        if self._failures:
            newest = f"that of step {max(self.steps)}" if self.steps else "none"
            raise CheckpointError(
                "the last state was not saved, for the reason in the log; the newest checkpoint is "
                f"{newest}; correct the cause, and run the same command again"
            )

    def _handle_failure(self, step: int, problem: str) -> None:
        """Log a failed save, schedule the retry and reset orbax."""
        self._failures += 1
        self._retry_step = step + min(2 ** (self._failures - 1), self.config.every)
        log.warning(
            "checkpoint %d was not saved: %s; training continues, next try after step %d",
            step,
            problem,
            self._retry_step,
        )
        # The partial save would fill the disk, and its saver raises the same error for ever.
        if not self._is_saving:
            with contextlib.suppress(Exception):
                self._saver.close()
        # Else threads of orbax wait for the process that failed, until a timeout; without that
        # process they cannot complete the checkpoint.
        if self.group.is_primary:
            with contextlib.suppress(OSError):  # the next start removes it
                delete_partial(self._directory, step)
        if self._unsaved:  # `save` could not open the directory, and tries again
            return
        try:
            self._saver = self._open(cleanup=False)  # such a thread may still write
        except CheckpointError as error:  # a bucket that is still out of reach
            if self.group.num_processes > 1:  # they wait for each other in `_open`
                raise
            self._barrier.has_failed, self._unsaved = True, {step}
            log.warning("%s; trying again at the next save", error)

    def record(self, step: int) -> dict[str, Any]:
        """Return the record given to `save`, with shapes, dtypes and fingerprints.

        Raises: CheckpointError if it is missing, unreadable or damaged.
        """
        return read_record(self._directory / str(step), step)

    def check(self, step: int, abstract_state: TrainState) -> None:
        """Check that a checkpoint has the parameters of this model; read only its record.

        Raises: ValueError with the first parameter that is missing, extra, or differs in shape or
            dtype; CheckpointError if the record cannot be read.
        """
        record = self.record(step)
        stored = as_stored(by_name(abstract_state), record, self._model)
        check_leaves(step, record["leaves"], shapes_and_dtypes(stored))

    def restore(self, step: int, abstract_state: TrainState) -> TrainState:
        """Return the state of a step on the mesh of `abstract_state`, bit-equal but for padding.

        Raises: CheckpointError if it cannot be read, or an array is damaged.
        """
        wanted = by_name(abstract_state)
        arrays = self._load(step, wanted)
        for got, want in ((arrays[name], wanted[name]) for name in wanted):
            assert (got.sharding, got.dtype) == (want.sharding, want.dtype)
        return in_place_of(abstract_state, arrays)

    def restore_params(self, step: int, abstract_state: TrainState, part: str = "params") -> Any:
        """Return only the parameters of a step, or with `part="ema"` their moving average.

        A checkpoint that holds only parameters precedes the first step: they are their own average.
        """
        if holds_only_parameters(self.record(step)["leaves"]):
            part = "params"
        wanted = {part: getattr(abstract_state, part)}
        return in_place_of(wanted, self._load(step, by_name(wanted)))[part]

    def read(
        self, step: int, name: str, sharding: jax.sharding.Sharding, shape: Any = None
    ) -> jax.Array:
        """Return one array by its dotted path; read nothing else. shape: None: as it is stored."""
        stored, dtype = self.record(step)["leaves"][name]
        want = jax.ShapeDtypeStruct(shape or stored, dtype, sharding=sharding)
        return self._load(step, {name: want})[name]

    def chunks(self, step: int, name: str, sharding: jax.sharding.NamedSharding) -> Iterator[Chunk]:
        """Yield an array as it is stored, in chunks of about 64 MiB; see `read_chunks`."""
        expected = self.record(step)["fingerprints"][name]
        return read_chunks(self._directory / str(step), name, expected, sharding)

    def _load(self, step: int, abstract: dict[str, Any]) -> dict[str, jax.Array]:
        """Return arrays by name, verified against their fingerprints."""
        record = self.record(step)
        stored = as_stored(abstract, record, self._model)
        options = v1.options.PyTreeOptions
        loading = options(loading=options.Loading(partial_load=True))
        # Host memory beyond the arrays themselves; the largest array must be below it.
        above = max(math.prod(x.shape) * x.dtype.itemsize for x in stored.values()) + 1
        memory = v1.options.MemoryOptions(read_concurrent_bytes=max(_READ_BYTES, above))
        try:
            with v1.Context(self._options, pytree_options=loading, memory_options=memory):
                arrays = self._saver.load_checkpointables(step, {"state": stored})["state"]
        except Exception as error:
            what, is_remote = f"checkpoint {step}", not isinstance(self._directory, Path)
            raise read_error(f"{what} cannot be read", error, is_remote=is_remote) from error
        verify(step, arrays, record["fingerprints"])
        return {name: fit_rows(x, abstract[name]) for name, x in arrays.items()}

    def set_aside(self, step: int) -> AnyPath:
        """Rename a damaged checkpoint to `STEP.damaged`, so that it is never restored."""
        target = rename_damaged(self._directory, step)
        self.reload()
        return target

    def reload(self) -> None:
        """List the directory again. Raises: CheckpointError if a bucket cannot be read."""
        with listing(self._directory):
            self._saver.reload()

    def delete(self, step: int) -> None:
        """Delete a checkpoint; after a kill midway the next run removes the rest."""
        delete_checkpoint(self._directory, step)
        self.reload()

    def leftovers(self) -> tuple[list[AnyPath], list[AnyPath]]:
        """Return (damaged checkpoints that were set aside, saves that never finished)."""
        return find_leftovers(self._directory)

    def close(self) -> None:
        """Wait for a save in progress and release the directory."""
        self.finish()
        if not self._unsaved:  # else it is closed already
            self._saver.close()

    def on_exit(self, kind: type[BaseException] | None, *_: Any) -> None:
        """Close at the end of a context.

        After an error the other processes may never get here: wait for the part of this process
        and do not exchange results.
        """
        if kind is not None and self._pending is not None and self.group.num_processes > 1:
            (step, result), self._pending = self._pending, None
            with contextlib.suppress(Exception):
                result()
                log.info("saved step %d", step)
        self.close()


def _raise(error: Exception) -> None:
    raise error
