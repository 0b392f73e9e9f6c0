"""Trace of a predicted program in the JSON format of Chrome, which ui.perfetto.dev opens.

One track shows the instructions of the device, grouped by part of the model, the others what
transfers occupy: each direction of the torus, the rings of other collectives, the network between
slices, and DMA. A loop is simulated once: the trace shows its first iteration, then one event for
the others, so that the time axis ends at the predicted total.
"""

import gzip
import itertools
import json
from collections import defaultdict
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from parallel.planning.collective_cost import Resource
from parallel.planning.prediction import Prediction, Span

_COMPUTE = "compute"
_TRACKS = {"rings": "rings", "dcn": "between slices", "dma": "DMA"}
_COMMON_STEPS = ("jit(step)", "while", "body", "closed_call", "checkpoint", "shard_map")
_WIDTH = 60  # characters of a name


def write_trace(prediction: Prediction, path: str | Path, title: str = "predicted program") -> None:
    """Write the timeline of a prediction; gzip it if the name ends in .gz."""
    text = json.dumps({"displayTimeUnit": "ms", "traceEvents": trace_events(prediction, title)})
    path = Path(path)
    path.write_bytes(gzip.compress(text.encode()) if path.suffix == ".gz" else text.encode())


def trace_events(prediction: Prediction, title: str = "predicted program") -> list[dict[str, Any]]:
    """Return the events of a prediction, in microseconds to three places.

    Events of one track lie within each other or apart. Those below half a nanosecond are left out.
    """
    tracks = {_COMPUTE: list(_nested(x for x in prediction.spans if x.kind != "transfer"))}
    tracks |= dict(sorted(_transfers(prediction.spans).items()))
    events: list[dict[str, Any]] = [
        {"ph": "M", "pid": 0, "name": "process_name", "args": {"name": title}}
    ]
    for number, (track, spans) in enumerate(tracks.items(), 1):
        common = {"pid": 0, "tid": number}
        events.append({**common, "ph": "M", "name": "thread_name", "args": {"name": track}})
        order = {"sort_index": number}
        events.append({**common, "ph": "M", "name": "thread_sort_index", "args": order})
        events += [{**common, **event} for span in spans if (event := _event(span))["dur"]]
    return events


def _event(span: Span) -> dict[str, Any]:
    # Both ends are rounded, not the duration, so that neighbours still meet.
    start, end = _nanoseconds(span.start), _nanoseconds(span.end)
    return {
        "ph": "X",
        "name": _short(span.name),
        "cat": span.part,
        "ts": start / 1e3,
        "dur": (end - start) / 1e3,
        "args": {"op": span.name, "part": span.part, **span.details},
    }


def _nanoseconds(seconds: float) -> int:
    return round(seconds * 1e9)


def _short(name: str) -> str:
    """Return the name of an operation with the last two named scopes of its path.

    Loops around it on the same track show the others.
    """
    kind, _, path = name.rpartition(" ")
    steps = [step for step in path.split("/") if step not in _COMMON_STEPS]
    text = " ".join(filter(None, [kind, "/".join(steps[-2:]) or path]))
    return text if len(text) <= _WIDTH else f"..{text[2 - _WIDTH :]}"


def _nested(spans: Iterable[Span]) -> Iterator[Span]:
    """Yield the spans of the device with one around each run of a part, the outer before the inner.

    spans: as the simulation records them, a loop after what is in it.
    """
    ordered = sorted(spans, key=lambda x: (x.start, -x.end))
    for (kind, part), group in itertools.groupby(ordered, lambda x: (x.kind, x.part)):
        run = list(group)
        if kind == "instruction":
            yield Span(part, part, run[0].start, run[-1].end)
        yield from run


def _transfers(spans: Iterable[Span]) -> dict[str, list[Span]]:
    """Return the spans of transfers by track.

    A permute is on the track of every direction in which its messages travel. Permutes over
    different links may travel in the same direction at once; the later one is on another track.
    """
    tracks: dict[str, list[Span]] = defaultdict(list)
    for span in spans:
        for name in sorted({_track(resource) for resource in span.resources}):
            for number in itertools.count(1):
                track = tracks[name if number == 1 else f"{name} ({number})"]
                if not track or _nanoseconds(track[-1].end) <= _nanoseconds(span.start):
                    track.append(span)
                    break
    return tracks


def _track(resource: Resource) -> str:
    """Return the name of the track of a resource: a link's direction, such as "link +y"."""
    if isinstance(resource, str):
        return _TRACKS.get(resource, resource)
    source, target = resource
    axis = next(axis for axis, (a, b) in enumerate(zip(source, target, strict=True)) if a != b)
    step = target[axis] - source[axis]
    # The link from the last chip of a side around to the first goes up.
    return f"link {'+' if step == 1 or step < -1 else '-'}{'xyz'[axis]}"
