"""From an entry of a file to its documents, and to a report of everything in it that is none.

Every format ends in the same two: a Document, or a Fault that names its place. Nothing is repaired
or left out here; what a fault does is the caller's policy. Memory is bounded by the longest line of
JSON lines, a few hundred rows, or one text.
"""

import bz2
import json
import lzma
import re
import zlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any

from data.source import (
    Damaged,
    Entry,
    Format,
    compression_of,
    load_library,
    open_array_record,
    open_bytes,
    open_dataset,
    open_parquet,
)

_BLOCK = 2**17  # bytes read at once; compressed ones grow, so not much more
_ROWS = 256  # of a table read at once
_BOM = b"\xef\xbb\xbf"
_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")
_JSON_TYPES = {
    dict: "an object",
    list: "a list",
    str: "a string",
    bool: "a truth value",
    int: "a number",
    float: "a number",
    type(None): "null",
}


@dataclass(frozen=True, slots=True)
class Document:
    """One document: a text, or the (role, content) messages of a chat.

    number: line of the entry from 1; row or record of the file from 0; None for a whole file.
    """

    entry: Entry
    number: int | None
    text: str | None
    messages: tuple[tuple[str, str], ...] | None

    @property
    def where(self) -> str:
        """Its place for a person: `path:line`, `path, row n` or `path`.

        The line of an entry inside a file costs a reading of the file up to there: ask only for
        what is shown.
        """
        return _place(self.entry, self.number)


@dataclass(frozen=True, slots=True)
class Fault:
    """What should have been a document, or the rest of a file, and why it is not.

    kind: invalid UTF-8, invalid JSON, missing field, wrong type, empty, truncated file or corrupt
        file; the last two end their entry, and so does a field that a table lacks.
    """

    entry: Entry
    number: int | None
    kind: str
    detail: str

    @property
    def where(self) -> str:
        """As that of a document."""
        return _place(self.entry, self.number)


def read_documents(entry: Entry, field: str) -> Iterator[Document | Fault]:
    """The documents of an entry in order, and a fault in the place of each that cannot be read.

    field: what holds a text, or a list of messages with role and content, in JSON lines, Parquet
        and datasets; further fields are not read. A record of ArrayRecord is a text.
    Raises: DataError without the format's library, OSError when the file is gone.
    """
    try:
        yield from _READERS[entry.format](entry, field)
    except Damaged as damage:
        yield Fault(entry, None, damage.kind, damage.detail)


def _place(entry: Entry, number: int | None) -> str:
    if number is None:
        return entry.path
    if entry.format == "jsonl":
        return f"{entry.path}:{_lines_before(entry.path, entry.begin) + number}"
    return f"{entry.path}, {'record' if entry.format == 'array_record' else 'row'} {number}"


@lru_cache(maxsize=64)  # a broken entry has many faults, and files stay as they are during a run
def _lines_before(path: str, begin: int) -> int:
    """Lines that start before byte `begin` of a plain file."""
    if not begin:
        return 0
    with open_bytes(path) as file:
        # The newline at or after begin - 1 closes the last of them.
        starts = range(0, begin - 1, _BLOCK)
        return 1 + sum(file.read(min(_BLOCK, begin - 1 - at)).count(b"\n") for at in starts)


def _text(entry: Entry, field: str) -> Iterator[Document | Fault]:
    parts: list[bytes] = []
    try:
        parts.extend(_blocks(entry.path))
    except Damaged as damage:
        length = sum(map(len, parts))
        raise Damaged(damage.kind, f"{damage.detail} after {length} bytes of text") from damage
    data = b"".join(parts)
    yield _document(entry, None, data, field)


def _jsonl(entry: Entry, field: str) -> Iterator[Document | Fault]:
    number = 0
    try:
        for number, line in enumerate(_lines(entry), 1):
            if number == 1 and not entry.begin:
                line = line.removeprefix(_BOM)
            if line and not line.isspace():
                yield _record(entry, number, line, field)
    except Damaged as damage:
        raise Damaged(damage.kind, f"{damage.detail} after {number} lines") from damage


def _record(entry: Entry, number: int, line: bytes, field: str) -> Document | Fault:
    """The document of one JSON line."""
    try:
        text = line.decode()
        record = json.loads(text)
    except UnicodeDecodeError as error:
        return Fault(entry, number, "invalid UTF-8", _broken_byte(error, "column", 1))
    except json.JSONDecodeError as error:
        return Fault(entry, number, "invalid JSON", f"{error.msg} at column {error.pos + 1}")
    except (ValueError, RecursionError) as error:  # a number or a depth beyond Python's limit
        return Fault(entry, number, "invalid JSON", str(error))
    if not isinstance(record, dict):
        detail = f"the line is {_type_name(record)}, not an object"
        return Fault(entry, number, "wrong type", detail)
    if field not in record:
        return Fault(entry, number, "missing field", _no_field(field, record))
    value = record[field]
    if "\\u" in text and _SURROGATE.search(text):
        try:
            json.dumps(value, ensure_ascii=False).encode()
        except UnicodeEncodeError as error:
            half = f"\\u{ord(error.object[error.start]):x}"
            return Fault(entry, number, "invalid UTF-8", f"{half} is half of a pair, without it")
    return _document(entry, number, value, field)


def _document(entry: Entry, number: int | None, value: Any, field: str) -> Document | Fault:
    """A value of the field (text as str or bytes, or messages) as a document."""
    if isinstance(value, bytes):
        try:
            value = value.decode()
        except UnicodeDecodeError as error:
            return Fault(entry, number, "invalid UTF-8", _broken_byte(error, "offset", 0))
        if entry.format == "text":
            value = value.removeprefix("\ufeff")
    if isinstance(value, str):
        if not value:
            return Fault(entry, number, "empty", "the document has no character")
        return Document(entry, number, value, None)
    if not isinstance(value, list):
        detail = f"field {field!r} is {_type_name(value)}, neither text nor a list of messages"
        return Fault(entry, number, "wrong type", detail)
    return _messages(entry, number, value)


def _messages(entry: Entry, number: int | None, values: list[Any]) -> Document | Fault:
    messages = []
    for index, value in enumerate(values):
        if not isinstance(value, dict):
            detail = f"message {index} is {_type_name(value)}, not role and content"
            return Fault(entry, number, "wrong type", detail)
        for key in ("role", "content"):
            if key not in value:
                detail = f"message {index} has {_no_field(key, value)}"
                return Fault(entry, number, "missing field", detail)
            if not isinstance(value[key], str):
                detail = f"{key} of message {index} is {_type_name(value[key])}, not text"
                return Fault(entry, number, "wrong type", detail)
        messages.append((value["role"], value["content"]))
    if not any(content for _, content in messages):
        return Fault(entry, number, "empty", "no message has a character")
    return Document(entry, number, None, tuple(messages))


def _type_name(value: object) -> str:
    return _JSON_TYPES.get(type(value), f"a {type(value).__name__}")


def _no_field(field: str, fields: Iterable[Any]) -> str:
    there = [str(name) for name in fields]
    more = f" and {len(there) - 10} more" if len(there) > 10 else ""
    return f"no field {field!r}; there is {', '.join(there[:10]) or 'none'}{more}"


def _broken_byte(error: UnicodeDecodeError, unit: str, first: int) -> str:
    return f"byte 0x{error.object[error.start]:02x} at {unit} {error.start + first}"


def _lines(entry: Entry) -> Iterator[bytes]:
    """The lines that start in the entry, without their newlines."""
    if compression_of(entry.path):
        position, end = 0, None
    else:
        position, end = _first_line(entry), entry.end
        if position >= end:
            return
    parts: list[bytes] = []  # of a line longer than a block
    for block in _blocks(entry.path, position):
        *whole, rest = block.split(b"\n")
        if whole and parts:
            whole[0] = b"".join([*parts, whole[0]])
            parts = []
        for line in whole:
            if end is not None and position >= end:
                return
            position += len(line) + 1
            yield line
        parts.append(rest)
    last = b"".join(parts)
    if last and (end is None or position < end):
        yield last


def _first_line(entry: Entry) -> int:
    """Where the first line starts that does not start before the entry; its end, if past that."""
    if not entry.begin:
        return 0
    position = entry.begin - 1
    with open_bytes(entry.path) as file:
        file.seek(position)
        while position < entry.end and (block := file.read(_BLOCK)):
            found = block.find(b"\n")
            if found >= 0:
                return position + found + 1
            position += len(block)
    return entry.end


def _blocks(path: str, begin: int = 0) -> Iterator[bytes]:
    """The bytes of a file from `begin`, decompressed."""
    compression = compression_of(path)
    with open_bytes(path) as file:
        file.seek(begin)
        blocks = iter(partial(file.read, _BLOCK), b"")
        yield from _decompress(blocks, compression) if compression else blocks


def _decompress(blocks: Iterable[bytes], compression: str) -> Iterator[bytes]:
    """The content of a compressed file of one or more members.

    Not by the libraries' own file objects: zstandard's takes a cut stream for a whole one.
    """
    make, failure = _decompressor(compression)
    machine, closed = make(), False
    for block in blocks:
        while block := block.lstrip(b"\0") if closed else block:  # zeros may fill a file up
            try:
                content = machine.decompress(block)
            except failure as error:
                raise Damaged("corrupt file", error) from error
            if content:
                yield content
            closed, block = machine.eof, b""
            if closed:
                block, machine = machine.unused_data, make()
    if not closed:
        raise Damaged("truncated file", f"the {compression} stream has no end")


def _decompressor(compression: str) -> tuple[Callable[[], Any], tuple[type[Exception], ...]]:
    """What makes a decompressor of one member, and what it raises."""
    match compression:
        case ".gz":
            return partial(zlib.decompressobj, wbits=16 + zlib.MAX_WBITS), (zlib.error,)
        case ".bz2":
            return bz2.BZ2Decompressor, (OSError,)
        case ".xz":
            # Not the old .lzma, which takes zeros for an empty file.
            return partial(lzma.LZMADecompressor, lzma.FORMAT_XZ), (lzma.LZMAError,)
        case _:
            zstandard = load_library("zstandard")
            # The window of `zstd --long=31`, in which large dumps come.
            library = zstandard.ZstdDecompressor(max_window_size=2**31)
            return library.decompressobj, (zstandard.ZstdError,)


def _parquet(entry: Entry, field: str) -> Iterator[Document | Fault]:
    with open_parquet(entry.path) as table:
        if field not in (names := table.schema_arrow.names):
            raise Damaged("missing field", _no_field(field, names))
        if names.count(field) > 1:
            raise Damaged("wrong type", f"there are {names.count(field)} columns {field!r}")
        first = sum(table.metadata.row_group(group).num_rows for group in range(entry.begin))
        read = partial(table.iter_batches, _ROWS, columns=[field], use_threads=False)
        # Group by group, as one broken group would spoil a batch that begins before it.
        groups = range(entry.begin, entry.end)
        batches = (batch for group in groups for batch in read(row_groups=[group]))
        yield from _rows(entry, field, first, batches)


def _datasets(entry: Entry, field: str) -> Iterator[Document | Fault]:
    dataset = open_dataset(entry.path)
    if field not in dataset.column_names:
        raise Damaged("missing field", _no_field(field, dataset.column_names))
    part = dataset.select(range(entry.begin, entry.end)).select_columns(field)
    yield from _rows(entry, field, entry.begin, part.with_format("arrow").iter(_ROWS))


def _rows(
    entry: Entry, field: str, first: int, tables: Iterable[Any]
) -> Iterator[Document | Fault]:
    """The documents of arrow tables; `first` is the row of the file where they begin."""
    number = first
    try:
        for table in tables:
            for scalar in table.column(field):
                try:
                    value = scalar.as_py()
                except UnicodeDecodeError as error:  # arrow does not look at what it takes for text
                    detail = _broken_byte(error, "offset", 0)
                    yield Fault(entry, number, "invalid UTF-8", detail)
                else:
                    yield _document(entry, number, value, field)
                number += 1
    except (load_library("pyarrow").ArrowException, OSError) as error:
        if isinstance(error, OSError) and error.errno is not None:
            raise  # not the file's content
        raise Damaged("corrupt file", f"{error} after row {number}") from error


def _array_record(entry: Entry, field: str) -> Iterator[Document | Fault]:
    reader = open_array_record(entry.path)
    reader.seek(entry.begin)
    for number in range(entry.begin, entry.end):
        try:
            record = reader.read()
        except (RuntimeError, IndexError) as error:
            detail = f"{error} at record {number}, and so to record {entry.end - 1}"
            raise Damaged("corrupt file", detail) from error
        yield _document(entry, number, record, field)


_READERS: dict[Format, Callable[[Entry, str], Iterator[Document | Fault]]] = {
    "text": _text,
    "jsonl": _jsonl,
    "parquet": _parquet,
    "datasets": _datasets,
    "array_record": _array_record,
}
