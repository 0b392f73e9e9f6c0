"""Reads the log of a run: restarts, spikes and other events, text samples, command, versions."""

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

_RECORD = re.compile(r"^(\d{4}-\d\d-\d\d \d\d:\d\d:\d\d),\d{3} ", re.MULTILINE)
_STEP = re.compile(r"step (\d+)(?:/\d+)?  ")
_SAMPLE = re.compile(r"sample(?: at step (\d+))?(?: \([^)\n]*\))?:\n")
_SUMMARY = re.compile(r"(devices|model|memory)\s+")
# The kind of an event, and the lines that report one; the first group is its step.
_EVENTS = (
    ("restart", re.compile(r"resumed from step (\d+) in ")),
    ("rollback", re.compile(r"back to step (\d+); batches ")),
    ("stop", re.compile(r"stopped by \w+ after step (\d+);")),
    ("skipped", re.compile(r"step (\d+): loss .*; the update was skipped")),
    ("spike", re.compile(r"step (\d+): loss .*; the update was applied")),
    ("straggler", re.compile(r"step (\d+): .* is a straggler")),
    ("damage", re.compile(r"checkpoint (\d+) (?:is damaged|cannot be read|has no record)")),
)
_UNNUMBERED = (
    ("change", re.compile(r"changed since checkpoint |other library versions than ")),
    ("experts", re.compile(r"layer \d+: .*above training\.health\.")),
    ("data", re.compile(r".*/metrics\.jsonl has steps 1 to |.* are missing; training continues")),
)


@dataclass(frozen=True)
class LogEvent:
    """A line of the log about something other than the usual progress."""

    kind: str
    step: int | None
    time: str
    text: str


@dataclass
class RunLog:
    """The content of `log.txt`, as far as a report shows it."""

    events: list[LogEvent] = field(default_factory=list)
    samples: list[tuple[int, str]] = field(default_factory=list)
    """(step, text), ascending; of a step that was trained twice, the later text."""
    commands: list[str] = field(default_factory=list)
    """The command line of every process of the run; empty if an old version wrote the log."""
    versions: str = ""
    """Versions of the last process, as one line."""
    summary: dict[str, str] = field(default_factory=dict)
    """Lines of the last process about its devices, model and memory, by these words."""


def read_log(path: Path) -> RunLog:
    """Return what a `log.txt` says; nothing if it does not exist."""
    found, last_step, samples = RunLog(), 0, dict[int, str]()
    rolls_back = False
    for time, text in _records(path):
        if step := _STEP.match(text):
            last_step = int(step[1])
        elif sample := _SAMPLE.match(text):
            samples[int(sample[1] or last_step)] = text[sample.end() :].rstrip("\n")
        elif text.startswith("command: "):
            rolls_back = False
            found.commands.append(text.removeprefix("command: ").strip())
        elif text.startswith("versions: "):
            found.versions = text.removeprefix("versions: ").strip()
        elif start := _SUMMARY.match(text):
            found.summary[start[1]] = text[start.end() :].strip()
        elif (event := _event(time, text)) is not None:
            if rolls_back and event.kind == "restart":  # it restores a checkpoint as a restart does
                rolls_back = False
                continue
            rolls_back |= event.kind == "rollback"
            found.events.append(event)
    found.samples = sorted(samples.items())
    return found


def _records(path: Path) -> Iterator[tuple[str, str]]:
    """Yield (time, text) of every record of a log; a text may have several lines."""
    if not path.is_file():
        return
    content = path.read_text(encoding="utf-8", errors="replace")
    starts = [*_RECORD.finditer(content)]
    ends = [start.start() for start in starts[1:]] + [len(content)]
    for start, end in zip(starts, ends, strict=True):
        yield start[1], content[start.end() : end]


def _event(time: str, text: str) -> LogEvent | None:
    line = text.strip()
    for kind, pattern in _EVENTS:
        if found := pattern.match(line):
            return LogEvent(kind, int(found[1]), time, line)
    for kind, pattern in _UNNUMBERED:
        if pattern.match(line):
            return LogEvent(kind, None, time, line)
    return None
