"""Parquet, saved Hugging Face datasets and ArrayRecord: formats that count rows or records."""

import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

from fsspec.implementations.local import LocalFileSystem

from data.files import DamagedFileError, DataError, load_library, open_bytes, open_file_system
from data.formats.base import (
    PAIR_FIELDS,
    Document,
    DocumentError,
    FileRange,
    find_field,
    invalid_utf8,
    missing_field,
    missing_pair_field,
    register_format,
    to_document,
)

_ROWS = 256  # of a table read at once


@contextmanager
def _open_parquet(path: str) -> Iterator[Any]:
    """Open a `pyarrow.parquet.ParquetFile`. Raises: DamagedFileError for a damaged footer."""
    pyarrow, parquet = load_library("pyarrow"), load_library("pyarrow.parquet")
    with open_bytes(path) as file:
        try:
            table = parquet.ParquetFile(
                file, buffer_size=2**20, page_checksum_verification=True, pre_buffer=False
            )
        except (pyarrow.ArrowException, OSError) as error:
            raise DamagedFileError("corrupt file", error) from error
        yield table


def _count_row_groups(path: str) -> int:
    with _open_parquet(path) as table:
        return table.num_row_groups


@register_format("parquet", suffixes=(".parquet",), count=_count_row_groups)
def read_parquet(file_range: FileRange, field: str | None) -> Iterator[Document | DocumentError]:
    """Yield the documents of some row groups of a Parquet file."""
    with _open_parquet(file_range.path) as table:
        schema = table.schema_arrow
        columns = _find_columns(file_range, field, schema.names, schema)
        if isinstance(columns, DocumentError):
            yield columns
            return
        for name in columns:
            if (count := schema.names.count(name)) > 1:
                raise DamagedFileError("wrong type", f"there are {count} columns {name!r}")
        first = sum(table.metadata.row_group(group).num_rows for group in range(file_range.begin))
        read = partial(table.iter_batches, _ROWS, columns=columns, use_threads=False)
        # Group by group, since a damaged group would spoil a batch that begins before it.
        groups = range(file_range.begin, file_range.end)
        batches = (batch for group in groups for batch in read(row_groups=[group]))
        yield from _read_rows(file_range, field and columns[0], first, batches)


def _open_dataset(path: str) -> Any:
    """Open a `datasets.Dataset`. Raises: DamagedFileError when a part is missing or damaged."""
    datasets = load_library("datasets")
    try:
        return datasets.load_from_disk(path)
    except Exception as error:  # a damaged state.json raises many kinds
        raise DamagedFileError("corrupt file", f"{type(error).__name__}: {error}") from error


def _count_rows(path: str) -> int:
    return len(_open_dataset(path))


@register_format("datasets", count=_count_rows)
def read_dataset(file_range: FileRange, field: str | None) -> Iterator[Document | DocumentError]:
    """Yield the documents of some rows of a folder that `Dataset.save_to_disk` wrote."""
    dataset = _open_dataset(file_range.path)
    schema = dataset.features.arrow_schema
    columns = _find_columns(file_range, field, dataset.column_names, schema)
    if isinstance(columns, DocumentError):
        yield columns
        return
    part = dataset.select(range(file_range.begin, file_range.end)).select_columns(columns)
    tables = part.with_format("arrow").iter(_ROWS)
    yield from _read_rows(file_range, field and columns[0], file_range.begin, tables)


def _find_columns(
    file_range: FileRange, field: str | None, names: list[str], schema: Any
) -> list[str] | DocumentError:
    """Return the columns to read: the field, or without one those of a preference pair."""
    if field is None:
        found = [name for name in PAIR_FIELDS if name in names]
        if {*PAIR_FIELDS[1:]} <= {*found}:
            return found
        return missing_pair_field(file_range, None, names)
    name = find_field(field, names)
    if name is None:
        return missing_field(file_range, None, field, names, _text_columns(schema))
    return [name]


def _text_columns(schema: Any) -> list[str]:
    types = load_library("pyarrow").types
    tests = (types.is_string, types.is_large_string, types.is_list, types.is_large_list)
    return [column.name for column in schema if any(test(column.type) for test in tests)]


def _read_rows(
    file_range: FileRange, field: str | None, first: int, tables: Iterable[Any]
) -> Iterator[Document | DocumentError]:
    """Yield the documents of Arrow tables; `first` is the number of their first row in the file."""
    number = first
    try:
        for table in tables:
            for scalar in table.to_struct_array() if field is None else table.column(field):
                try:
                    value = scalar.as_py()
                except UnicodeDecodeError as error:  # Arrow does not validate strings
                    yield invalid_utf8(file_range, number, error)
                else:
                    yield to_document(file_range, number, value, field)
                number += 1
    except (load_library("pyarrow").ArrowException, OSError) as error:
        if isinstance(error, OSError) and error.errno is not None:
            raise  # not the content of the file
        raise DamagedFileError("corrupt file", f"{error} after row {number}") from error


def _open_array_record(path: str) -> Any:
    """Open an `ArrayRecordReader`. Raises: DamagedFileError for a damaged footer."""
    library = load_library("array_record.python.array_record_module")
    system, name = open_file_system(path)
    if not isinstance(system, LocalFileSystem):
        raise DataError(f"{path}: ArrayRecord must be on a local disk; copy it and name the copy")
    os.stat(name)  # the reader does not report a missing file
    # One thread, since pieces are read in parallel already.
    reader = library.ArrayRecordReader(name, "max_parallelism:0")
    if reader.ok():
        return reader
    reason = "no ArrayRecord"
    try:
        reader.close()  # which raises the reason
    except RuntimeError as error:
        reason = str(error)
    raise DamagedFileError("corrupt file", reason)


def _count_records(path: str) -> int:
    return _open_array_record(path).num_records()


def _locate_record(file_range: FileRange, number: int) -> str:
    return f"{file_range.path}, record {number}"


@register_format(
    "array_record",
    suffixes=(".array_record", ".arrayrecord"),
    count=_count_records,
    locate=_locate_record,
)
def read_array_record(
    file_range: FileRange, field: str | None
) -> Iterator[Document | DocumentError]:
    """Yield the documents of some records of an ArrayRecord file."""
    reader = _open_array_record(file_range.path)
    reader.seek(file_range.begin)
    for number in range(file_range.begin, file_range.end):
        try:
            record = reader.read()
        except (RuntimeError, IndexError) as error:
            detail = f"{error} at record {number}; records to {file_range.end - 1} are lost"
            raise DamagedFileError("corrupt file", detail) from error
        yield to_document(file_range, number, record, field)
