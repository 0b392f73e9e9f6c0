"""Saving and restoring a run with orbax: asynchronous, sharded, onto any mesh.

The only file that meets orbax. On disk the state is plain nested dicts of arrays, independent of
the mesh; `abstract_state` says how they lie on the devices of this run. A failed restore is an
error, never a silent start from scratch.
"""

import contextlib
import fcntl
import logging
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import jax
from orbax.checkpoint import v1
from pydantic import BaseModel, PositiveInt

from training.metrics import log
from training.step import TrainState

_ocp = v1.training


class CheckpointConfig(BaseModel, frozen=True, extra="forbid", use_attribute_docstrings=True):
    """When a run is saved, what is kept, how it resumes."""

    every: PositiveInt = 200
    """Steps between saves; the last step is always saved."""
    keep: PositiveInt = 3
    """How many of the newest checkpoints stay on disk."""
    resume: Literal["auto", "never", "must"] = "auto"
    """auto: continue if there is a checkpoint; never: move an old run aside; must: or fail."""


class CheckpointError(Exception):
    """A checkpoint could not be written or read; the message says which and why, on one line."""


def _reason(error: Exception) -> str:
    """The first line of what lies beneath orbax's own error."""
    cause: BaseException = error
    while cause.__cause__ is not None:
        cause = cause.__cause__
    return f"{type(cause).__name__}: {str(cause).strip().partition(chr(10))[0]}"


@contextlib.contextmanager
def locked_run(directory: Path, required_bytes: int) -> Iterator[None]:
    """Makes the run directory, and holds it alone for as long as the context lasts.

    required_bytes: what the checkpoints to come will take.
    Raises: ValueError if it cannot be written, has too little room, or another run holds it.
    """
    try:
        directory.mkdir(parents=True, exist_ok=True)
        lock = open(directory / ".lock", "w")
    except OSError as error:
        raise ValueError(
            f"run.dir={str(directory)!r} cannot be written: {error.strerror}; "
            "give a directory that you own"
        ) from error
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise ValueError(
                f"run.dir={str(directory)!r} is in use by another process; give another run.dir"
            ) from error
        free = shutil.disk_usage(directory).free
        if free < required_bytes:
            raise ValueError(
                f"run.dir={str(directory)!r} has {free / 2**20:.0f} MiB free, but its checkpoints "
                f"need {required_bytes / 2**20:.0f} MiB; free some room, lower checkpoint.keep, or "
                "give another run.dir"
            )
        yield


def move_aside(directory: Path) -> Path | None:
    """Renames an old run directory to `NAME.old-K`; returns the new name, None if there was none.

    The lock file stays behind, with whoever holds it.
    """
    old = (
        [path for path in directory.iterdir() if path.name != ".lock"] if directory.exists() else []
    )
    if not old:
        return None
    number = 1
    while (target := directory.with_name(f"{directory.name}.old-{number}")).exists():
        number += 1
    target.mkdir()
    for path in old:
        path.rename(target / path.name)
    return target


def _as_tree(state: TrainState) -> dict[str, Any]:
    return {"step": state.step, "params": state.params, "opt_state": state.opt_state}


def _leaves(tree: Any) -> dict[str, tuple[tuple[int, ...], str]]:
    flat, _ = jax.tree_util.tree_flatten_with_path(tree)
    return {
        jax.tree_util.keystr(path, simple=True, separator="."): (tuple(x.shape), str(x.dtype))
        for path, x in flat
    }


class Checkpoints:
    """The checkpoints of one run directory."""

    def __init__(self, directory: Path, config: CheckpointConfig, *, read_only: bool = False):
        """read_only: another process may be saving here; nothing is cleaned up."""
        # orbax prints tracebacks from its threads before it raises; what it raises, we report.
        logging.getLogger("absl").setLevel(logging.CRITICAL)
        self._saver = _ocp.Checkpointer(
            os.path.abspath(directory),
            cleanup_tmp_directories=not read_only,
            preservation_policy=_ocp.preservation_policies.LatestN(config.keep),
        )
        self._pending: tuple[int, Any] | None = None

    @property
    def latest_step(self) -> int | None:
        """The newest finished step on disk."""
        latest = self._saver.latest
        return None if latest is None else int(latest.step)

    def save(self, state: TrainState, step: int, metadata: dict[str, Any]) -> None:
        """Starts saving; returns when the state is copied off the devices.

        metadata: JSON values, read back by `metadata`. Raises: CheckpointError of an earlier save.
        """
        self.finish()
        if step == self.latest_step:
            return
        response = self._saver.save_checkpointables_async(
            step, {"state": _as_tree(state)}, force=True, custom_metadata=metadata
        )
        self._pending = None if response is None else (step, response)

    def poll(self) -> None:
        """Says so if a save has finished. Raises: CheckpointError if it failed."""
        if self._pending is not None and not self._saver.is_saving_in_progress():
            self.finish()

    def finish(self) -> None:
        """Waits for a save in progress. Raises: CheckpointError if it failed."""
        if self._pending is None:
            return
        (step, response), self._pending = self._pending, None
        try:
            response.result()
        except Exception as error:
            raise CheckpointError(f"checkpoint {step} was not saved: {_reason(error)}") from error
        log.info("saved step %d", step)

    def metadata(self, step: int) -> dict[str, Any]:
        """What `save` was given for this step."""
        return dict(self._saver.checkpointables_metadata(step).custom_metadata or {})

    def check(self, step: int, abstract_state: TrainState) -> None:
        """Compares what is stored with this model, reading metadata only.

        orbax would cast a dtype that differs without a word. Raises: ValueError naming the first
        parameter that is missing, extra, or of another shape or dtype.
        """
        stored = self._saver.checkpointables_metadata(step).metadata["state"]
        found, wanted = _leaves(stored["params"]), _leaves(abstract_state.params)
        for name in sorted(found.keys() | wanted.keys()):
            if found.get(name) != wanted.get(name):
                raise ValueError(
                    f"checkpoint {step} holds {name} as {found.get(name, 'nothing')}, the config "
                    f"asks for {wanted.get(name, 'nothing')}; restore the model.* values of the "
                    "run's config.yaml, or give another run.dir"
                )

    def restore(self, step: int, abstract_state: TrainState) -> TrainState:
        """The state of a step, on the mesh of `abstract_state`.

        Raises: CheckpointError if it cannot be read.
        """
        abstract = {"state": _as_tree(abstract_state)}
        try:
            tree = self._saver.load_checkpointables(step, abstract)["state"]
        except Exception as error:
            raise CheckpointError(f"checkpoint {step} cannot be read: {_reason(error)}") from error
        state = TrainState(**tree)
        for got, want in zip(jax.tree.leaves(state), jax.tree.leaves(abstract_state), strict=True):
            assert got.sharding == want.sharding and got.dtype == want.dtype
        return state

    def restore_params(self, step: int, abstract_state: TrainState) -> Any:
        """The parameters of a step alone, on the mesh of `abstract_state`.

        Raises: CheckpointError if they cannot be read.
        """
        loading = v1.options.PyTreeOptions.Loading(partial_load=True)
        abstract = {"state": {"params": abstract_state.params}}
        try:
            with v1.Context(pytree_options=v1.options.PyTreeOptions(loading=loading)):
                tree = self._saver.load_checkpointables(step, abstract)["state"]
        except Exception as error:
            raise CheckpointError(f"checkpoint {step} cannot be read: {_reason(error)}") from error
        return tree["params"]

    def close(self) -> None:
        """Waits for a save in progress and lets go of the directory."""
        self.finish()
        self._saver.close()
