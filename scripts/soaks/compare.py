"""Compare two runs by their metrics and by the arrays of their checkpoints."""

import contextlib
import json
from collections import Counter
from pathlib import Path

from soaks.processes import SoakError
from training.checkpoint import Checkpoints
from training.checkpoint_policy import CheckpointConfig
from training.checkpoint_record import CheckpointError

# The metrics that do not depend on the clock: equal bits on the same mesh.
EXACT = (
    "loss",
    "grad_norm",
    "learning_rate",
    "loss_z",
    "grad_z",
    "skipped_steps",
    "eval_loss",
    "params_fingerprint",
)
# On another mesh only losses are compared: relative, sixteen roundings of float32.
CLOSE = ("loss", "eval_loss")
CLOSE_BOUND = 16 * 2.0**-24


def read_metrics(directory: Path) -> list[dict[str, float]]:
    """Read the complete lines of metrics.jsonl."""
    path = directory / "metrics.jsonl"
    lines = path.read_text().splitlines(True) if path.exists() else []
    return [json.loads(line) for line in lines if line.endswith("\n")]


def metric_differences(wanted: Path, found: Path, bound: float = 0.0) -> tuple[list[str], float]:
    """Return the differences between the metrics of two runs, and the largest relative one.

    bound: 0 requires equal bits of every metric in `EXACT`; otherwise the allowed relative
        difference of those in `CLOSE`.

    Raises:
        SoakError: The first run has no metrics.
    """
    lines, others = read_metrics(wanted), read_metrics(found)
    if not lines:
        raise SoakError(f"{wanted} has no step to compare with")
    steps, other_steps = ([line["step"] for line in part] for part in (lines, others))
    if steps != other_steps:
        counts, other_counts = Counter(steps), Counter(other_steps)
        wrong = [n for n in sorted({*counts, *other_counts}) if counts[n] != other_counts[n]]
        return [f"{found.name}: steps lost, repeated or out of order: {wrong[:9]}"], 0.0
    greatest, differences = 0.0, []
    for a, b in zip(lines, others, strict=True):
        for key in EXACT if not bound else CLOSE:
            if a.get(key) == b.get(key):
                continue
            is_pair = key in a and key in b
            distance = abs(a[key] - b[key]) / abs(a[key] or 1.0) if is_pair else float("inf")
            greatest = max(greatest, distance)
            if not distance <= bound:
                differences.append(
                    f"{found.name}: step {a['step']}: {key} {b.get(key)}, not {a.get(key)}"
                )
    return differences, greatest


def array_differences(wanted: Path, found: Path, step: int) -> list[str]:
    """Return the arrays whose fingerprints differ between the checkpoints of one step.

    Raises:
        SoakError: The first run has no such checkpoint.
    """
    prints = [_fingerprints(directory, step) for directory in (wanted, found)]
    if not prints[0]:
        raise SoakError(f"{wanted} has no checkpoint {step} to compare with")
    return [
        f"{found.name}: checkpoint {step}: {name} differs"
        for name in sorted({*prints[0], *prints[1]})
        if prints[0].get(name) != prints[1].get(name)
    ]


def _fingerprints(directory: Path, step: int) -> dict[str, str]:
    """Return the fingerprint of every array of a checkpoint, or nothing if there is none."""
    with contextlib.closing(
        Checkpoints(directory / "checkpoints", CheckpointConfig(), read_only=True)
    ) as checkpoints:
        try:
            return checkpoints.record(step)["fingerprints"]
        except CheckpointError:
            return {}
