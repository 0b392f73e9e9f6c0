"""Bytes to global batches: batch n is a pure function of (seed, files, sequence length, n).

The order is a permutation computed from the seed, reshuffled every epoch; nothing is remembered, so
a run resumes at any step in constant time and on any number of hosts. Each host reads only the rows
that its devices hold.
"""

import hashlib
import os
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import grain
import jax
import numpy as np
from pydantic import BaseModel, Field, PositiveInt

from data.packing import FIELDS, count_rows, pack_row
from data.source import find_files
from data.store import digest_files, open_store
from data.tokenizer import ByteTokenizer


class DataConfig(
    BaseModel, frozen=True, extra="forbid", use_attribute_docstrings=True, allow_inf_nan=False
):
    """What is read, and how it is cut into batches."""

    files: str | None = None
    """Glob of text files, one document each; null: the source of Python's standard library."""
    sequence_length: PositiveInt = 256
    """Tokens per row (L)."""
    global_batch_size: PositiveInt = 16
    """Rows per optimizer step, over all devices and accumulation steps."""
    eval_fraction: float = Field(default=0.01, ge=0, lt=1)
    """Share of the rows held out for evaluation."""
    seed: int = Field(default=0, ge=0, lt=2**32)
    """Of the order of rows."""
    cache_dir: str = ".cache/data"
    """Folder for tokenised stores."""


class Rows:
    """All rows of a run: a training order without end and a held-out set, disjoint.

    Raises: ValueError when the files are too short for one training and one held-out row.
    """

    def __init__(self, config: DataConfig):
        self.config = config
        self.tokenizer = ByteTokenizer()
        files = find_files(config.files)
        self._stream = open_store(files, self.tokenizer, Path(os.path.expanduser(config.cache_dir)))
        num_rows = count_rows(len(self._stream), config.sequence_length)
        self.num_eval = round(num_rows * config.eval_fraction)
        if config.eval_fraction:
            self.num_eval = max(1, self.num_eval)
        self.num_train = num_rows - self.num_eval
        if self.num_train < 1:
            need = (2 if config.eval_fraction else 1) * config.sequence_length + 1
            raise ValueError(
                f"data.files={config.files!r} holds {len(self._stream)} tokens, but rows of "
                f"data.sequence_length={config.sequence_length} need at least {need}; "
                "give more text or shorter rows"
            )
        split = grain.MapDataset.range(num_rows).seed(0).shuffle()
        self._eval = [int(split[index]) for index in range(self.num_eval)]
        # How many training rows come before each held-out row: what `_train_number` skips.
        self._before = np.sort(self._eval) - np.arange(self.num_eval)
        self._order = grain.MapDataset.range(self.num_train).seed(config.seed).shuffle().repeat()
        head = [self._train_number(index) for index in range(min(64, self.num_train))]
        digest = digest_files(files, self.tokenizer)
        shape = config.sequence_length, config.global_batch_size
        identity = digest, shape, config.seed, self._eval, head
        self.order_hash = hashlib.sha256(repr(identity).encode()).hexdigest()
        """Identity of the order: equal hashes give equal batches at every step."""

    @property
    def epoch_tokens(self) -> int:
        """Tokens in one pass over the training rows."""
        return self.num_train * self.config.sequence_length

    def train_row(self, index: int) -> dict[str, np.ndarray]:
        """Row `index` of the endless training order."""
        return self._row(self._train_number(index))

    def _train_number(self, index: int) -> int:
        number = int(self._order[index])
        return number + int(np.searchsorted(self._before, number, side="right"))

    def eval_row(self, index: int) -> dict[str, np.ndarray]:
        """Held-out row `index`; past the end, a row that counts for nothing."""
        if index < self.num_eval:
            return self._row(self._eval[index])
        row = self._row(self._eval[0])
        return {**row, "loss_mask": np.zeros_like(row["loss_mask"])}

    def _row(self, number: int) -> dict[str, np.ndarray]:
        length = self.config.sequence_length
        return pack_row(self._stream, number, length, self.tokenizer.eos_id)


def global_batch(
    read_row: Any, first_row: int, shape: tuple[int, int, int], sharding: jax.sharding.Sharding
) -> dict[str, jax.Array]:
    """A batch on its devices: each field (A, B/A, L) for A accumulation steps.

    read_row: row index -> fields. shape: (A, B/A, L); row (a, b) is first_row + a * B/A + b.
    """
    rows: dict[int, dict[str, np.ndarray]] = {}

    def local(field: str, index: tuple[slice, ...]) -> np.ndarray:
        steps, places = (
            range(*part.indices(size)) for part, size in zip(index[:2], shape[:2], strict=True)
        )
        for row in (a * shape[1] + b for a in steps for b in places):
            if row not in rows:
                rows[row] = read_row(first_row + row)
        return np.stack(
            [np.stack([rows[a * shape[1] + b][field][index[2]] for b in places]) for a in steps]
        )

    return {
        field: jax.make_array_from_callback(shape, sharding, partial(local, field))
        for field in FIELDS
    }


def train_batches(
    rows: Rows, sharding: jax.sharding.Sharding, *, start: int, stop: int, accumulation: int
) -> Iterator[dict[str, jax.Array]]:
    """Global batches of steps start .. stop - 1, read and placed ahead by a background thread."""
    config = rows.config
    size = config.global_batch_size
    shape = (accumulation, size // accumulation, config.sequence_length)

    def batch(step: int) -> dict[str, jax.Array]:
        return global_batch(rows.train_row, step * size, shape, sharding)

    steps = grain.MapDataset.range(start, stop).map(batch)
    options = grain.ReadOptions(num_threads=1, prefetch_buffer_size=2)
    return iter(steps.to_iter_dataset(options))


def eval_batches(
    rows: Rows, sharding: jax.sharding.Sharding, *, batch_size: int, limit: int
) -> Iterator[dict[str, jax.Array]]:
    """The first `limit` batches (1, batch_size, L) of held-out rows; a short one is filled up."""
    shape = (1, batch_size, rows.config.sequence_length)
    for first in range(0, min(rows.num_eval, limit * batch_size), batch_size):
        yield global_batch(rows.eval_row, first, shape, sharding)
