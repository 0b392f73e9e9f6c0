"""The metrics writer `tensorboard`: event files in the folder `tensorboard/`.

Scalars are in the groups of `training/writers/groups.py`. TensorBoard sorts them by name; its tab
"Custom Scalars" has the charts of `LAYOUT`, in that order, with the losses first.

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
from training.writers.groups import grouped_name
from training.writers.registry import MetricsWriter, WriterContext, register

SECONDS_PER_FLUSH = 10.0
_CHARTS: dict[str, dict[str, list[str]]] = {
    "train": {
        "loss": ["^train/loss$", "^eval/loss$"],
        "gradient norm": ["^train/grad_norm$"],
        "gradient norm by kind of layer": ["^train/grad_norm/"],
        "parameter norm by kind of layer": ["^train/param_norm/"],
        "update ratio by kind of layer": ["^train/update_ratio/"],
        "learning rate": ["^train/learning_rate$"],
    },
    "eval": {
        "loss": ["^eval/(.*/)?loss$"],
        "bits per byte": ["^eval/(.*/)?bits_per_byte$"],
        "scale of activations": ["^eval/activation/"],
    },
    "perf": {
        "tokens per second": ["^perf/tokens_per_second$"],
        "seconds per step": ["^perf/step_time$", "^perf/host_time$"],
        "MFU": ["^perf/mfu$"],
        "wall time in seconds": ["^perf/goodput/"],
        "memory in GiB": ["^perf/memory/"],
    },
    "guard": {
        "deviation from the mean": ["^guard/loss_z$", "^guard/grad_z$"],
        "skipped steps": ["^guard/skipped_steps$"],
    },
    "data": {"tokens": ["^data/.*/tokens$"], "passes": ["^data/.*/epoch$"]},
    "moe": {
        "load of the busiest expert": ["^moe/load_max_over_mean$", "^moe/.*/load_max_over_mean$"],
        "dropped assignments": ["^moe/dropped$"],
        "entropy of the router": ["^moe/entropy$"],
    },
}
LAYOUT = {
    group: {title: ["Multiline", tags] for title, tags in charts.items()}
    for group, charts in _CHARTS.items()
}
"""Charts of the tab "Custom Scalars", as tensorboardX takes them: regular expressions of tags."""


@register("tensorboard")
class TensorBoardWriter(MetricsWriter):
    """Writes scalars, texts and images as TensorBoard events."""

    def __init__(self, context: WriterContext):
        self._directory, self._purge_step = context.directory / "tensorboard", 1
        self._texts = {"config": context.resolved_config, "command": context.command}
        self._writer: RecordWriter | None = None
        self._num_files, self._flushed, self._has_warned = 0, 0.0, False

    def begin(self, resumed_step: int) -> None:
        """Purge events after the resumed step, from the first event on."""
        self._purge_step, self._num_files, self._has_warned = resumed_step + 1, 0, False

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Write one event per scalar."""
        for name, value in values.items():
            self._add(step, summary.scalar(grouped_name(name), value))

    def write_text(self, step: int, name: str, text: str) -> None:
        """Write a text event, shown verbatim."""
        self._add(step, _verbatim(name, text))

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
            self._write_texts(writer)
        return writer

    def _write_texts(self, writer: RecordWriter) -> None:
        """Write what holds for all steps, at the step before the first."""
        texts = [_verbatim(name, text) for name, text in self._texts.items() if text]
        for event_summary in [summary.custom_scalars(LAYOUT), *texts]:
            self._write_event(writer, Event(step=self._purge_step - 1, summary=event_summary))

    @staticmethod
    def _write_event(writer: RecordWriter, event: Any) -> None:
        event.wall_time = time.time()
        writer.write(event.SerializeToString())

    def _drop_file(self, error: OSError) -> None:
        self._writer = None
        if not self._has_warned:
            self._has_warned = True
            log.warning("cannot write %s: %s; some events are lost", self._directory, error)


def _verbatim(name: str, text: str) -> Any:
    return summary.text(name, f"```\n{text}\n```")
