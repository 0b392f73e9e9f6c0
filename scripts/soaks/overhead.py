"""Measure what saving checkpoints costs a training step."""

import statistics
from pathlib import Path
from typing import Any

from soaks.compare import read_metrics
from soaks.processes import run_undisturbed, write_config

MAX_RATIO = 1.03


def typical_seconds(turns: list[list[float]]) -> float:
    """Return the typical duration of a turn of steps: the sum of the medians by position.

    A single slow step does not count. A save does, because it is always at the same position.
    """
    return sum(statistics.median(position) for position in zip(*turns, strict=True))


def soak_overhead(folder: Path, *, every: int, cycles: int) -> dict[str, Any]:
    """Compare the steps after a save with as many steps without one, in turns, in one run."""
    model = {"vocab_size": 8192, "hidden_size": 384, "num_hidden_layers": 8, "dtype": "float32"}
    model |= {"num_attention_heads": 6, "num_key_value_heads": 6, "intermediate_size": 1024}
    config = write_config(
        folder,
        mesh={},
        model=model,
        data__sequence_length=128,
        data__global_batch_size=4,
        # The first save compiles, so it and the steps after it do not count.
        training__steps=2 * every * (cycles + 2),
        training__eval_every=10**9,
        checkpoint={"every": 2 * every, "keep": 1},
    )
    run = folder / "run"
    run_undisturbed(config, run, seconds=24 * 3600)
    lines = read_metrics(run)
    times = [line["step_time"] for line in lines]
    # The metrics of a step are read before the save that follows it: the save falls on later steps.
    starts = [2 * every * cycle for cycle in range(2, cycles + 2)]
    saving = typical_seconds([times[n : n + every] for n in starts])
    idle = typical_seconds([times[n + every : n + 2 * every] for n in starts])
    blocked = [line["save_blocked"] for line in lines if "save_blocked" in line]
    files = (run / "checkpoints").rglob("*")
    return {
        "ok": saving / idle < MAX_RATIO,
        "every": every,
        "ratio": saving / idle,
        "seconds_per_step": idle / every,
        "seconds_per_save": saving - idle,
        "blocked_first": blocked[0],
        "blocked": statistics.median(blocked[1:]),
        "bytes": sum(path.stat().st_size for path in files),
    }
