"""Interface and registry of metrics writers.

A new writer is one file with a subclass of `MetricsWriter` and `@register("name")`; the key
`training.writers` lists the names that a run uses. The `__init__.py` of this folder, or `plugins`
of the configuration, must import the file.
"""

import contextlib
import importlib.util
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar

import numpy as np
from rich.console import Console

from registry import Registry


@dataclass(frozen=True)
class WriterContext:
    """Facts about a run for its metrics writers."""

    directory: Path
    """Run directory; it exists."""
    steps: int
    """Last step of the run."""
    log_every: int = 1
    """Steps between console lines."""
    resolved_config: str = ""
    """The complete configuration as YAML."""
    console: Console | None = None
    """Terminal with room for a progress bar; None: output is a plain log."""
    console_metrics: Mapping[str, str] = field(default_factory=dict)
    """Metrics of the objective on console lines: format strings by name."""
    command: str = ""
    """Command line of this process."""
    project: str = "torus"
    """Project of the run at a tracker."""


class MetricsWriter:
    """Receives the metrics of a run on the primary process; every method does nothing by default.

    The constructor of a registered writer takes a `WriterContext`.
    """

    requires: ClassVar[str | None] = None
    """Package that the writer needs and that the extra of the same name installs."""

    def begin(self, resumed_step: int) -> None:
        """Start after `resumed_step`, and drop later steps: they are trained again.

        Called at the start, and after a rollback once more, behind `close`.
        """

    def show_phase(self, label: str) -> None:
        """Show what the run does now: a label of `training.goodput.LABELS`."""

    def preview(self, step: int, values: Mapping[str, float]) -> None:
        """Show the training metrics of a step before spike handling and evaluation."""

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Write scalars of a step; on disk when it returns.

        `values` may lack training metrics such as `loss` when `amend` passes an evaluation on.
        """

    def amend(self, step: int, values: Mapping[str, float]) -> None:
        """Add scalars to the last step, which an earlier process wrote."""
        self.write(step, values)

    def write_text(self, step: int, name: str, text: str) -> None:
        """Write a text, such as a generated sample."""

    def write_image(self, step: int, name: str, image_HWC: np.ndarray) -> None:
        """Write an image: uint8, height x width x 3 colours."""

    def finish(self) -> None:
        """Record that the run reached its last step or an early stop; `close` follows."""

    def close(self) -> None:
        """Flush, and release files and threads."""


Factory = Callable[[WriterContext], MetricsWriter]
WRITERS: Registry[Factory] = Registry("metrics writer")
register = WRITERS.register


class MetricsWriters(MetricsWriter):
    """Passes everything on to a list of writers, in order."""

    def __init__(self, writers: Sequence[MetricsWriter]):
        self._writers = writers

    def begin(self, resumed_step: int) -> None:
        """Start every writer."""
        for writer in self._writers:
            writer.begin(resumed_step)

    def show_phase(self, label: str) -> None:
        """Show what the run does with every writer."""
        for writer in self._writers:
            writer.show_phase(label)

    def preview(self, step: int, values: Mapping[str, float]) -> None:
        """Show the training metrics of a step with every writer."""
        for writer in self._writers:
            writer.preview(step, values)

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Write all scalars of a step with every writer."""
        for writer in self._writers:
            writer.write(step, values)

    def amend(self, step: int, values: Mapping[str, float]) -> None:
        """Add scalars to the last step with every writer."""
        for writer in self._writers:
            writer.amend(step, values)

    def write_text(self, step: int, name: str, text: str) -> None:
        """Write a text with every writer."""
        for writer in self._writers:
            writer.write_text(step, name, text)

    def write_image(self, step: int, name: str, image_HWC: np.ndarray) -> None:
        """Write an image with every writer."""
        for writer in self._writers:
            writer.write_image(step, name, image_HWC)

    def finish(self) -> None:
        """Record the end of the run with every writer."""
        for writer in self._writers:
            writer.finish()

    def close(self) -> None:
        """Close every writer, also when one of them fails."""
        with contextlib.ExitStack() as stack:
            for writer in reversed(self._writers):
                stack.callback(writer.close)


def check_writers(writer_names: Sequence[str]) -> None:
    """Raise ValueError if a named metrics writer is unknown or lacks its package."""
    for name in writer_names:
        package = getattr(WRITERS[name], "requires", None)
        spec = importlib.util.find_spec(package) if package is not None else None
        # A folder of the name, such as one with the files of a tracker, has no origin.
        if package is not None and (spec is None or spec.origin is None):
            raise ValueError(
                f"training.writers has {name}, but the package {package} is not installed; "
                f'pip install -e ".[{package}]"'
            )


def open_writers(writer_names: Sequence[str], context: WriterContext) -> MetricsWriter:
    """Return the named metrics writers of a run as one. Raises: see `check_writers`."""
    check_writers(writer_names)
    return MetricsWriters([WRITERS[name](context) for name in writer_names])


@contextlib.contextmanager
def begun(writers: MetricsWriter, resumed_step: int) -> Iterator[None]:
    """Begin writing after a resumed step, and close the writers at the end of the context."""
    try:
        writers.begin(resumed_step)
        yield
    finally:
        writers.close()
