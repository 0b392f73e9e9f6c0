"""Traces of predictions: tracks without overlap, spans that sum to the total, files that load."""

import gzip
import json
from collections import defaultdict
from typing import Any

import pytest
from hlo_text import (
    FIVE_TIMES,
    MB,
    UP,
    loop_body,
    matmul,
    permute_done,
    permute_start,
    program,
    vector,
)

from parallel.planning.parts import PartPattern
from parallel.planning.prediction import Prediction
from parallel.planning.timeline import predict
from parallel.planning.trace import trace_events, write_trace
from parallel.sharding.devices import Chip

CHIP = Chip(peak_flops=1e12, hbm_bandwidth=1e9, ici_bandwidth=1e9, clock_hz=1e6)
PARTS = (PartPattern("layer", "layers"),)
CORNERS = ((0, 0), (0, 1), (1, 1), (1, 0), (2, 0), (2, 1), (3, 1), (3, 0))


def made() -> Prediction:
    """Predict a program with loops, waits, DMA and permutes in several directions."""
    body = loop_body(
        permute_start("s"), matmul("m", 700), vector("v", 40), permute_done("d", "s"),
        f"%g = {MB} all-reduce(%x), replica_groups={{}}",
    )  # fmt: skip
    lines = (
        f"%c = ({MB}, {MB}, u32[]) copy-start(%x)",
        matmul("a", 300),
        permute_start("t", UP),
        permute_start("u", "source_target_pairs={{0,3},{1,0},{2,1},{3,2}}"),
        FIVE_TIMES,
        permute_done("w", "t"),
        permute_done("z", "u"),
        f"%e = {MB} copy-done(%c)",
        vector("last", 123),
    )
    text = program(*lines, others=body)
    return predict(text, CHIP, (4, 2), CORNERS, parts=PARTS)


def by_track(events: list[dict[str, Any]]) -> dict[str, list[tuple[int, int, str]]]:
    """Return (start, end, name) in nanoseconds of the events of each track."""
    names = {x["tid"]: x["args"]["name"] for x in events if x["name"] == "thread_name"}
    tracks: dict[str, list[tuple[int, int, str]]] = defaultdict(list)
    for x in events:
        if x["ph"] == "X":
            start = round(x["ts"] * 1e3)
            tracks[names[x["tid"]]].append((start, start + round(x["dur"] * 1e3), x["name"]))
    return tracks


def test_events_of_a_track_lie_within_each_other_or_apart() -> None:
    tracks = by_track(trace_events(made()))
    for name, events in tracks.items():
        around: list[int] = []
        for start, end, _ in sorted(events, key=lambda x: (x[0], -x[1])):
            while around and around[-1] <= start:
                around.pop()
            assert not around or end <= around[-1], name
            around.append(end)


def test_the_device_is_busy_or_waits_from_the_start_to_the_predicted_total() -> None:
    found = made()
    # A part with one instruction spans what that does; both count once.
    spans = {(start, end) for start, end, _ in by_track(trace_events(found))["compute"]}
    total = round(found.total * 1e9)
    outer = [x for x in spans if not any(y != x and covers(y, x) for y in spans)]
    leaves = [x for x in spans if not any(y != x and covers(x, y) for y in spans)]
    assert sum(end - start for start, end in outer) == total
    assert sum(end - start for start, end in leaves) == total


def covers(outer: tuple[int, int], inner: tuple[int, int]) -> bool:
    return outer[0] <= inner[0] and inner[1] <= outer[1]


def test_the_spans_of_a_program_sum_to_its_ledger() -> None:
    found = made()
    instructions = [x for x in found.spans if x.kind == "instruction"]
    (rest,) = [x for x in found.spans if x.kind == "iterations"]
    assert rest.name == "4 more iterations"
    spanned = sum(x.end - x.start for x in [*instructions, rest])
    assert spanned == pytest.approx(found.total, rel=1e-12)
    (loop,) = [x for x in found.spans if x.kind == "loop"]
    assert rest.end == loop.end
    assert rest.end - rest.start == pytest.approx(0.8 * (loop.end - loop.start))


def test_permutes_are_on_the_tracks_of_their_directions() -> None:
    tracks = by_track(trace_events(made()))
    assert {"compute", "rings", "DMA"} < set(tracks)
    assert {x for x in tracks if x.startswith("link")} >= {"link +x", "link -x", "link +y"}


@pytest.mark.parametrize("name", ["step.json", "step.json.gz"])
def test_a_written_trace_loads(tmp_path, name: str) -> None:
    path = tmp_path / name
    write_trace(made(), path, title="step")
    data = path.read_bytes()
    loaded = json.loads(gzip.decompress(data) if name.endswith(".gz") else data)
    assert loaded["traceEvents"] == json.loads(json.dumps(trace_events(made(), title="step")))
    matmuls = [x for x in loaded["traceEvents"] if x.get("args", {}).get("kind") == "matmul"]
    assert matmuls[0]["args"]["flops"] == 2 * 500**3
    assert matmuls[0]["args"]["cycles"] == 300
