"""Equal documents of a source: the first one stays, the others are left out.

Worker processes return 16 bytes of a SHA-256 with every document. The process that writes the store
compares them in the order of the documents, so the result does not depend on the number of workers.
It needs 16 bytes of memory per document (up to 48 while arrays are merged), and as much disk until
the store is complete.
"""

import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from data.files import DataError
from data.filters import DUPLICATES, KEY
from data.store import LEFT_OUT, Skipped, remedy
from data.store_writer import MAX_EXAMPLES, SEEN, TokenizedDocuments


class SeenDocuments:
    """The documents of a store that is being written.

    Their keys are in a file beside the arrays, so that a preparation continues after a kill: as
    many keys as the store has documents, in their order.

    Args:
        building: folder of the store that is being written.
        count: documents that it has; what the file holds beyond them is cut off.
        per_item: documents that are duplicates together: two of a preference pair.

    Raises:
        DataError: the file holds fewer keys.
    """

    def __init__(self, building: Path, count: int, per_item: int = 1):
        self._path, self._per_item = building / SEEN, per_item
        self._file = open(self._path, "ab")
        size = count * KEY.itemsize
        if os.fstat(self._file.fileno()).st_size < size:
            self._file.close()
            raise DataError(f"{self._path} is cut short; {remedy(building)}")
        os.truncate(self._path, size)
        self._keys = _SortedKeys()
        if count:
            self._keys.add(np.fromfile(self._path, KEY))

    def __enter__(self) -> "SeenDocuments":
        return self

    def __exit__(self, *_: Any) -> None:
        self.close()

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def first_of(
        self, parts: Sequence[TokenizedDocuments]
    ) -> tuple[list[TokenizedDocuments], dict[str, Skipped]]:
        """Return documents without those that equal an earlier one, and what is left out.

        The keys of the others are on disk when this returns.
        """
        found, dropped, paths = [], 0, []
        for part in parts:
            assert part.keys is not None
            is_new = ~self._keys.contains(part.keys)
            is_first = np.zeros(len(part.keys), bool)
            is_first[np.unique(part.keys, return_index=True)[1]] = True
            kept = is_new & is_first
            self._keys.add(part.keys[kept])
            self._file.write(part.keys[kept].tobytes())
            if count := len(kept) - int(kept.sum()):
                dropped += count
                paths.append(part.path)
            found.append(_choose(part, kept))
        self._file.flush()
        os.fsync(self._file.fileno())
        if not dropped:
            return found, {}
        examples = tuple(dict.fromkeys(paths))[:MAX_EXAMPLES]
        return found, {
            f"{LEFT_OUT}{DUPLICATES}": Skipped(count=dropped // self._per_item, examples=examples)
        }


def _choose(part: TokenizedDocuments, kept: np.ndarray) -> TokenizedDocuments:
    """Return the chosen documents; kept: (d,) bool."""
    if kept.all():
        return part
    tokens = np.repeat(kept, part.lengths)
    assert part.keys is not None
    return replace(
        part,
        tokens=part.tokens[tokens],
        lengths=part.lengths[kept],
        num_bytes=part.num_bytes[kept],
        loss_mask=None if part.loss_mask is None else part.loss_mask[tokens],
        keys=part.keys[kept],
    )


class _SortedKeys:
    """Set of keys in a few sorted arrays, each at least twice as large as the next one."""

    def __init__(self) -> None:
        self._arrays: list[np.ndarray] = []

    def contains(self, keys: np.ndarray) -> np.ndarray:
        """Return which keys are in the set, (d,) bool."""
        found = np.zeros(len(keys), bool)
        for array in self._arrays:
            places = np.minimum(np.searchsorted(array, keys), len(array) - 1)
            found |= array[places] == keys
        return found

    def add(self, keys: np.ndarray) -> None:
        """Add keys that are not in the set."""
        if not len(keys):
            return
        self._arrays.append(np.sort(keys))
        while len(self._arrays) > 1 and len(self._arrays[-2]) < 2 * len(self._arrays[-1]):
            last, before = self._arrays.pop(), self._arrays.pop()
            self._arrays.append(np.sort(np.concatenate([before, last]), kind="stable"))
