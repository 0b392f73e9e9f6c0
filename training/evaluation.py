"""Cross-entropy over the held-out rows of every source."""

import math
from typing import Any

import numpy as np

from data.pipeline import Rows, eval_batches
from training.metrics import log
from training.step import Program


def evaluate(
    program: Program, rows: Rows, params: Any, *, step: int, batches: int, accumulation: int
) -> dict[str, float]:
    """In nats per token and bits per byte of text, of each source and of all.

    batches: how many of `accumulation` microbatches each at most, per source. Empty if no held-out
    row has a token to learn.
    """
    numbers: dict[str, float] = {}
    totals = np.zeros(3)
    batch_size = max(rows.config.batch_sizes) // accumulation
    for source in rows.sources:
        sums = [
            program.eval_step(params, batch)
            for batch in eval_batches(
                source,
                program.batch_sharding,
                batch_size=batch_size,
                limit=batches * accumulation,
            )
        ]
        nats, count = (sum(float(pair[n]) for pair in sums) for n in range(2))
        if not count:
            continue
        num_bytes = source.eval_bytes(len(sums) * batch_size)
        totals += nats, count, num_bytes
        numbers[f"eval/{source.name}/loss"] = nats / count
        numbers[f"eval/{source.name}/bits_per_byte"] = nats / math.log(2) / num_bytes
    if not numbers:
        log.warning("step %d  no held-out row has a token to learn: no evaluation", step)
        return {}
    nats, count, num_bytes = totals
    numbers["eval_loss"] = nats / count
    numbers["eval_bits_per_byte"] = nats / math.log(2) / num_bytes
    parts = [
        f"{source.name} {numbers[f'eval/{source.name}/loss']:.4f}"
        for source in rows.sources
        if len(rows.sources) > 1 and f"eval/{source.name}/loss" in numbers
    ]
    log.info(
        "step %d  eval loss %.4f nats, %.3f bits per byte%s",
        step,
        numbers["eval_loss"],
        numbers["eval_bits_per_byte"],
        f" ({', '.join(parts)})" if parts else "",
    )
    return numbers
