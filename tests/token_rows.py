"""Stores to test packing with, and their rows as plain lists.

The id of a token is its place in the stream, so that what a row holds says where it is from.
"""

from dataclasses import dataclass

import numpy as np

from data.batch import read_row
from data.packing import PackedRows, pack_best_fit, pack_split

PACKERS = {"split": pack_split, "best_fit": pack_best_fit}


@dataclass
class Tokens:
    """What packing needs of a store."""

    tokens: np.ndarray
    ends: np.ndarray
    num_bytes: np.ndarray
    loss_mask: np.ndarray | None = None
    digest: str = "0"
    folder: str = "stores/tales"


def store_of(lengths, learned=None) -> Tokens:
    ends = np.cumsum(lengths, dtype=np.int64)
    ids = np.arange(ends[-1], dtype=np.uint16)
    return Tokens(ids, ends, 3 * np.asarray(lengths), learned)


def read(store: Tokens, rows: PackedRows, row: int, length: int, **options):
    """The end of text has the first id that no place has."""
    end = int(store.ends[-1])
    return read_row(
        store, rows, row, **{"row_length": length, "eos_id": end, "vocab_size": end + 1} | options
    )


def read_all(store: Tokens, rows: PackedRows, length: int) -> list[dict[str, list]]:
    return [
        {name: values.tolist() for name, values in read(store, rows, row, length).items()}
        for row in range(rows.num_rows)
    ]


def inputs(rows) -> list[int]:
    return [
        t for row in rows for t, s in zip(row["tokens"], row["segment_ids"], strict=True) if s >= 0
    ]


def loss_pairs(rows) -> list[tuple[int, int]]:
    return [
        (token, target)
        for row in rows
        for token, target, mask in zip(row["tokens"], row["targets"], row["loss_mask"], strict=True)
        if mask
    ]
