"""The metrics writer `tensorboard`: event files in the folder `tensorboard/`.

It uses tensorboardX's records without its writer thread: on a full disk that thread dies, and the
next write blocks for ever. Here an event that cannot be written is dropped with one warning, and a
new file is started, because readers stop at an incomplete record.
"""

import os
import socket
import time
from collections.abc import Mapping
from typing import Any

import numpy as np
from tensorboardX import summary
from tensorboardX.proto.event_pb2 import Event, SessionLog
from tensorboardX.record_writer import RecordWriter

from training.logs import log
from training.writers.registry import MetricsWriter, WriterContext, register

SECONDS_PER_FLUSH = 10.0


@register("tensorboard")
class TensorBoardWriter(MetricsWriter):
    """Writes scalars, texts and images as TensorBoard events."""

    def __init__(self, context: WriterContext):
        self._directory, self._purge_step = context.directory / "tensorboard", 1
        self._writer: RecordWriter | None = None
        self._num_files, self._flushed, self._has_warned = 0, 0.0, False

    def begin(self, resumed_step: int) -> None:
        """Purge events after the resumed step, from the first event on."""
        self._purge_step, self._num_files, self._has_warned = resumed_step + 1, 0, False

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Write one event per scalar."""
        for name, value in values.items():
            self._add(step, summary.scalar(name, value))

    def write_text(self, step: int, name: str, text: str) -> None:
        """Write a text event, shown verbatim."""
        self._add(step, summary.text(name, f"```\n{text}\n```"))

    def write_image(self, step: int, name: str, image_HWC: np.ndarray) -> None:
        """Write an image event."""
        self._add(step, summary.image(name, image_HWC, dataformats="HWC"))

    def close(self) -> None:
        """Flush and close the event file."""
        try:
            if self._writer is not None:
                self._writer.flush()
                self._writer.close()
                self._writer = None
        except OSError as error:
            self._drop_file(error)

    def _add(self, step: int, event_summary: Any) -> None:
        try:
            writer = self._writer = self._writer or self._open()
            self._write_event(writer, Event(step=step, summary=event_summary))
            if time.monotonic() - self._flushed > SECONDS_PER_FLUSH:
                self._flushed = time.monotonic()
                writer.flush()
        except OSError as error:
            self._drop_file(error)

    def _open(self) -> RecordWriter:
        self._directory.mkdir(exist_ok=True)
        name = f"events.out.tfevents.{time.time():.0f}.{socket.gethostname()}.{os.getpid()}"
        number = self._num_files
        while (self._directory / f"{name}.{number}").exists():
            number += 1
        writer = RecordWriter(str(self._directory / f"{name}.{number}"))
        self._num_files += 1
        self._write_event(writer, Event(file_version="brain.Event:2"))
        if self._num_files == 1:
            start = SessionLog(status=SessionLog.START)
            self._write_event(writer, Event(step=self._purge_step, session_log=start))
        return writer

    @staticmethod
    def _write_event(writer: RecordWriter, event: Any) -> None:
        event.wall_time = time.time()
        writer.write(event.SerializeToString())

    def _drop_file(self, error: OSError) -> None:
        self._writer = None
        if not self._has_warned:
            self._has_warned = True
            log.warning("cannot write %s: %s; some events are lost", self._directory, error)
