"""Run a task for many items, in this process or in worker processes.

An engine takes the items and the task, and yields the results in the order of the items.
`data/ray_engine.py` has one for clusters.
"""

import ctypes
import multiprocessing
import os
import signal
import sys
from collections import deque
from collections.abc import Generator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, TypeVar

_PR_SET_PDEATHSIG = 1
Item = TypeVar("Item", contravariant=True)
Result = TypeVar("Result", covariant=True)
ItemOf = TypeVar("ItemOf")
ResultOf = TypeVar("ResultOf")


class Task(Protocol[Item, Result]):
    """Work to do on each item; it is pickled once for each process."""

    @property
    def code_files(self) -> set[Path]:
        """Files with code outside of this package that decides the results, such as plugins."""

    def run(self, item: Item) -> Result:
        """Return the result for an item. Raises: DataError for what the user can correct."""


class Engine(Protocol):
    """Callable that runs a task for each item: `run_tasks`, or one of a cluster."""

    def __call__(
        self, items: Sequence[ItemOf], task: Task[ItemOf, ResultOf], /
    ) -> Generator[ResultOf, None, None]:
        """Yield the result of a task for each item, in order.

        Raises: DataError of the first task that fails; RuntimeError when processes die.
        """


def code_of(*parts: Any) -> set[Path]:
    """Return the files that define these functions, classes, or classes of objects."""
    modules = (sys.modules.get(part.__module__) for part in parts)
    files = (getattr(module, "__file__", None) for module in modules)
    return {Path(file) for file in files if file is not None}


def run_tasks(
    items: Sequence[ItemOf], task: Task[ItemOf, ResultOf], /, workers: int = 0
) -> Generator[ResultOf, None, None]:
    """Yield the result of a task for each item, in order.

    workers: processes that run the task; 0: this one.
    Raises: DataError of the first task that fails; RuntimeError when a worker dies.
    """
    if not workers:
        for item in items:
            yield task.run(item)
        return
    others = {*multiprocessing.active_children()}
    pool = ProcessPoolExecutor(
        min(workers, max(1, len(items))),
        mp_context=multiprocessing.get_context("spawn"),
        initializer=_start_worker,
        initargs=(task, os.getpid()),
    )
    try:
        window: deque[Future[ResultOf]] = deque()
        for item in items:
            window.append(pool.submit(_run_in_worker, item))
            if len(window) == 2 * workers:
                yield window.popleft().result()
        while window:
            yield window.popleft().result()
    except BrokenProcessPool as error:
        raise RuntimeError(
            "a worker process died, perhaps for lack of memory; run scripts/prepare_data.py with a "
            "smaller --workers: it keeps what is finished"
        ) from error
    finally:
        pool.shutdown(cancel_futures=True)
        # Ctrl-C may come after the start of a process, and before the pool knows it.
        for process in {*multiprocessing.active_children()} - others:
            process.terminate()
            process.join()


@dataclass
class _Worker:
    """State of a worker process: to send a tokenizer with each item would cost seconds."""

    task: Task[Any, Any] | None = None


_worker = _Worker()


def bind_to_parent(parent: int) -> None:
    """Make a worker process die with its parent, even by SIGKILL, and ignore Ctrl-C."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:  # the parent died before the line above
            os._exit(1)


def _start_worker(task: Task[Any, Any], parent: int) -> None:
    bind_to_parent(parent)
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # the processes are the parallelism
    _worker.task = task


def _run_in_worker(item: Any) -> Any:
    assert _worker.task is not None
    return _worker.task.run(item)
