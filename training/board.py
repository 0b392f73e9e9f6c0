"""Events for tensorboard, by tensorboardX's records but without its thread.

That thread dies of a full disk, and who writes after that waits for ever. Here what cannot be
written is left out, with one warning, and a new file is begun: readers stop at a torn record.
"""

import logging
import os
import socket
import time
from pathlib import Path
from typing import Any

from tensorboardX.proto.event_pb2 import Event, SessionLog
from tensorboardX.record_writer import RecordWriter

log = logging.getLogger("torus")

SECONDS_PER_FLUSH = 10.0


class Board:
    """The folder `tensorboard/` of a run. Events of steps after `resumed_step` are purged."""

    def __init__(self, directory: Path, resumed_step: int):
        self._directory, self._purge_step = directory, resumed_step + 1
        self._writer: RecordWriter | None = None
        self._files, self._flushed, self._is_told = 0, 0.0, False

    def add(self, step: int, summary: Any) -> None:
        """A `Summary` of tensorboardX.summary."""
        try:
            writer = self._writer = self._writer or self._open()
            self._write(writer, Event(step=step, summary=summary))
            if time.monotonic() - self._flushed > SECONDS_PER_FLUSH:
                self._flushed = time.monotonic()
                writer.flush()
        except OSError as error:
            self._give_up(error)

    def close(self) -> None:
        """Writes what waits."""
        try:
            if self._writer is not None:
                self._writer.flush()
                self._writer.close()
        except OSError as error:
            self._give_up(error)

    def _open(self) -> RecordWriter:
        self._directory.mkdir(exist_ok=True)
        name = f"events.out.tfevents.{time.time():.0f}.{socket.gethostname()}.{os.getpid()}"
        writer = RecordWriter(str(self._directory / f"{name}.{self._files}"))
        self._files += 1
        self._write(writer, Event(file_version="brain.Event:2"))
        if self._files == 1:
            start = SessionLog(status=SessionLog.START)
            self._write(writer, Event(step=self._purge_step, session_log=start))
        return writer

    @staticmethod
    def _write(writer: RecordWriter, event: Any) -> None:
        event.wall_time = time.time()
        writer.write(event.SerializeToString())

    def _give_up(self, error: OSError) -> None:
        self._writer = None
        if not self._is_told:
            self._is_told = True
            log.warning("%s cannot be written: %s; some of it is lost", self._directory, error)
