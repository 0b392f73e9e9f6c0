"""The model, the batch and the stopwatch that the benchmarks of this machine share."""

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np

# Every figure is a ratio, so the model only has to be large enough that matmuls dominate.
MODEL: dict[str, Any] = {
    "vocab_size": 8192,
    "hidden_size": 512,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "intermediate_size": 1408,
    "dtype": "float32",
}
NUM_ROWS, ROW_LENGTH = 8, 512


def random_batch(
    vocab_size: int = MODEL["vocab_size"], rows: int = NUM_ROWS, length: int = ROW_LENGTH
) -> dict[str, np.ndarray]:
    """Return one microbatch of rows of random tokens, every field `1 B L`; a row is a document."""
    rng, shape = np.random.default_rng(0), (1, rows, length)
    return {
        "tokens": rng.integers(0, vocab_size, shape, np.int32),
        "targets": rng.integers(0, vocab_size, shape, np.int32),
        "positions": np.broadcast_to(np.arange(length, dtype=np.int32), shape),
        "segment_ids": np.zeros(shape, np.int32),
        "loss_mask": np.ones(shape, np.float32),
    }


def time_in_turns(
    runs: Mapping[str, Callable[[], Any]], repeats: int, *, show: bool = False
) -> dict[str, list[float]]:
    """Call every function in turn, `repeats` times, and return the seconds of each call.

    The speed of a machine varies. Because the functions take turns, a slow moment affects all of
    them. One more round comes first and is not counted: it pays for page faults.

    show: print the seconds of every round.
    """
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(repeats + 1):
        for name, run in runs.items():
            begin = time.perf_counter()
            jax.block_until_ready(run())
            seconds[name].append(time.perf_counter() - begin)
        if show:
            print("  ".join(f"{name} {row[-1]:.3f} s" for name, row in seconds.items()), flush=True)
    return {name: row[1:] for name, row in seconds.items()}


def ratios(numerators: Sequence[float], denominators: Sequence[float]) -> list[float]:
    """Return the ratio of two measurements for every turn."""
    return [a / b for a, b in zip(numerators, denominators, strict=True)]


def medians(rows: Mapping[str, Sequence[float]]) -> dict[str, float]:
    """Return the median of every row of measurements."""
    return {name: statistics.median(row) for name, row in rows.items()}
