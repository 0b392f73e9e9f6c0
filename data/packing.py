"""The token stream cut into rows: what a row holds, and which part of it is learned.

Concatenate and split: row i is tokens i * L .. (i + 1) * L, with the token after it as the last
target. Documents that share a row do not see each other: they differ in `segment_ids`, `positions`
start at 0 in each, and no document is asked for the first token of the next.
"""

import numpy as np

FIELDS = ("tokens", "targets", "positions", "segment_ids", "loss_mask")


def count_rows(num_tokens: int, sequence_length: int) -> int:
    """How many whole rows the stream gives; the last target needs one token more."""
    return max(0, (num_tokens - 1) // sequence_length)


def pack_row(
    stream: np.ndarray, row: int, sequence_length: int, eos_id: int
) -> dict[str, np.ndarray]:
    """The fields of one row, each (L,): int32, `loss_mask` float32."""
    start = row * sequence_length
    window = np.asarray(stream[start : start + sequence_length + 1]).astype(np.int32)
    tokens, targets = window[:-1], window[1:]
    ends = tokens == eos_id
    segment_ids = np.concatenate([[0], np.cumsum(ends[:-1])]).astype(np.int32)
    index = np.arange(sequence_length, dtype=np.int32)
    firsts = np.where(np.concatenate([[True], ends[:-1]]), index, 0)
    return {
        "tokens": tokens,
        "targets": targets,
        "positions": index - np.maximum.accumulate(firsts).astype(np.int32),
        "segment_ids": segment_ids,
        "loss_mask": (~ends).astype(np.float32),
    }
