"""Pack the rows of the shards of a part, once for each setting of packing."""

import shutil
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path

from data.bucket_path import AnyPath, BucketPath
from data.files import DataError
from data.packed_store import PACKS, PackSettings, open_rows, write_rows
from data.packing import TooLittleTextError
from data.shard_list import (
    NO_ROWS,
    SHARDS,
    RowsRecord,
    ShardRecord,
    in_parallel,
    part_file,
    read_list,
    rows_key,
    upload_folder,
    write_list,
    write_tree,
)
from data.shard_plan import PlannedPart
from data.sharded_store import read_rows_record
from data.store import Store


class ShardRows:
    """The rows of the shards of a part with one setting of packing."""

    def __init__(self, folder: AnyPath, part: PlannedPart, settings: PackSettings):
        self._folder, self._part, self._settings = folder, part, settings
        self._key = rows_key(settings)
        self.list_file = part_file(folder, part.number, self._key)
        """File of the list of the rows of all shards."""

    def pack(self, store: Store, shard: int, folder: Path) -> None:
        """Pack the rows of a shard into a folder. Raises: OSError."""
        packs, wanted = folder / PACKS, self._settings
        is_in_order, number = self._part.recorded.in_order, self._part.number
        if is_in_order and (number or self._is_held_out_before(shard)):
            wanted = replace(wanted, eval_fraction=0.0)
        try:
            rows = write_rows(store, wanted, packs)
        except TooLittleTextError:
            try:
                rows = write_rows(store, replace(wanted, eval_fraction=0.0), packs)
            except TooLittleTextError:  # no preference pair fits a row
                rows = None
        record = NO_ROWS
        if rows is not None:
            record = RowsRecord(name=rows.name, info=asdict(open_rows(rows, keep=False).info))
        write_tree(packs / f"{self._key}.json", record.model_dump(mode="json"))

    def _is_held_out_before(self, shard: int) -> bool:
        """Return whether an earlier shard of a store that is read in order has held-out rows."""
        for name in self._part.names[:shard]:
            record = read_rows_record(self._folder / SHARDS / name, self._key)
            if record is not None and record.counts.held_out_rows:
                return True
        return False

    def write_list(self, listed: Sequence[ShardRecord], work: Path) -> None:
        """Write the list of the rows of all shards, unless it is there.

        listed: the records of the shards. work: folder for the rows of a store in a bucket.
        Raises: DataError without rows to train on, or to hold out; OSError.
        """
        file = self.list_file
        records = read_list(file, RowsRecord)
        if records is None:

            def rows_of(shard: int) -> RowsRecord:
                return self.record_of(shard, work)

            numbers = [n for n, record in enumerate(listed) if record.num_tokens]
            if self._part.recorded.in_order:  # each looks at those before it
                found = [rows_of(number) for number in numbers]
            else:
                found = in_parallel(rows_of, numbers)
            by_number = dict(zip(numbers, found, strict=True))
            records = [by_number.get(n, NO_ROWS) for n in range(len(listed))]
            write_list(file, records)
        counts = [record.counts for record in records]
        if not sum(count.train_rows for count in counts):
            raise DataError(f"{self._folder}: no row is left for training; give more text")
        is_first = self._part.number == 0 and self._settings.eval_fraction
        if is_first and not sum(count.held_out_rows for count in counts):
            raise DataError(
                f"{self._folder}: no shard has enough text to hold out "
                f"data.eval_fraction={self._settings.eval_fraction:g} of it; give "
                f"data.eval_fraction=0 or a larger fraction, or delete {self._folder} and prepare "
                "it with a larger --shard-gb"
            )

    def record_of(self, shard: int, work: Path) -> RowsRecord:
        """Return the record of the rows of a shard, which are packed unless they are there."""
        name = self._part.names[shard]
        folder = self._folder / SHARDS / name
        if (record := read_rows_record(folder, self._key)) is not None:
            return record
        made = folder if isinstance(folder, Path) else work / f"{name}.rows"
        self.pack(Store(folder), shard, made)
        if isinstance(folder, BucketPath):
            upload_folder(made, folder, last=f"{PACKS}/{self._key}.json")
            shutil.rmtree(made)
        found = read_rows_record(folder, self._key)
        assert found is not None
        return found
