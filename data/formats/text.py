"""Text files and JSON lines, plain or compressed.

Memory is bounded by the longest line of JSON lines, or by one text file.
"""

import bz2
import json
import lzma
import re
import zlib
from collections.abc import Callable, Iterable, Iterator
from functools import lru_cache, partial
from typing import Any

from data.files import DamagedFileError, compression_of, load_library, open_bytes
from data.formats.base import (
    Document,
    DocumentError,
    FileRange,
    decode_utf8,
    missing_field,
    register_format,
    to_document,
    type_name,
)

_BLOCK = 2**17  # bytes per read; decompressed blocks are larger
_BOM = b"\xef\xbb\xbf"
_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")


@register_format("text", suffixes=(".txt",), splittable=False, compressible=True)
def read_text(file_range: FileRange, field: str | None) -> Iterator[Document | DocumentError]:
    """Yield the one document of a text file; files without a known suffix are texts too."""
    parts: list[bytes] = []
    try:
        parts.extend(_read_blocks(file_range.path))
    except DamagedFileError as damage:
        length = sum(map(len, parts))
        detail = f"{damage.detail} after {length} bytes of text"
        raise DamagedFileError(damage.kind, detail) from damage
    text = decode_utf8(file_range, None, b"".join(parts))
    if isinstance(text, str):
        text = text.removeprefix("\ufeff")
    yield to_document(file_range, None, text, field)


def _locate_line(file_range: FileRange, number: int) -> str:
    line = _lines_before(file_range.path, file_range.begin) + number
    return f"{file_range.path}:{line}"


@lru_cache(maxsize=64)  # a range may have many errors, and files do not change during a run
def _lines_before(path: str, begin: int) -> int:
    """Count the lines of a plain file that start before byte `begin`."""
    if not begin:
        return 0
    with open_bytes(path) as file:
        # The newline at or after begin - 1 closes the last of them.
        starts = range(0, begin - 1, _BLOCK)
        return 1 + sum(file.read(min(_BLOCK, begin - 1 - at)).count(b"\n") for at in starts)


@register_format(
    "jsonl", suffixes=(".jsonl", ".ndjson", ".json"), compressible=True, locate=_locate_line
)
def read_json_lines(file_range: FileRange, field: str | None) -> Iterator[Document | DocumentError]:
    """Yield the document of each line that starts in the range; blank lines are skipped."""
    number = 0
    try:
        for number, line in enumerate(_read_lines(file_range), 1):
            if number == 1 and not file_range.begin:
                line = line.removeprefix(_BOM)
            if line and not line.isspace():
                yield _parse_line(file_range, number, line, field)
    except DamagedFileError as damage:
        raise DamagedFileError(damage.kind, f"{damage.detail} after {number} lines") from damage


def _parse_line(
    file_range: FileRange, number: int, line: bytes, field: str | None
) -> Document | DocumentError:
    text = decode_utf8(file_range, number, line, "column", 1)
    if isinstance(text, DocumentError):
        return text
    try:
        record = json.loads(text)
    except json.JSONDecodeError as error:
        detail = f"{error.msg} at column {error.pos + 1}"
        return DocumentError(file_range, number, "invalid JSON", detail)
    except (ValueError, RecursionError) as error:  # a number or a depth beyond Python's limit
        return DocumentError(file_range, number, "invalid JSON", str(error))
    if not isinstance(record, dict):
        detail = f"the line is {type_name(record)}, not an object"
        return DocumentError(file_range, number, "wrong type", detail)
    if field is not None and field not in record:
        texts = [name for name, value in record.items() if value and isinstance(value, str | list)]
        texts.sort(key=lambda name: -len(record[name]))
        return missing_field(file_range, number, field, record, texts)
    value = record if field is None else record[field]
    if "\\u" in text and _SURROGATE.search(text):
        try:
            json.dumps(value, ensure_ascii=False).encode()
        except UnicodeEncodeError as error:
            half = f"\\u{ord(error.object[error.start]):x}"
            detail = f"{half} is one half of a surrogate pair"
            return DocumentError(file_range, number, "invalid UTF-8", detail)
    return to_document(file_range, number, value, field)


def _read_lines(file_range: FileRange) -> Iterator[bytes]:
    """Yield the lines that start in the range, without their newlines."""
    if compression_of(file_range.path):
        position, end = 0, None
    else:
        position, end = _find_first_line(file_range), file_range.end
        if position >= end:
            return
    parts: list[bytes] = []  # of a line longer than a block
    for block in _read_blocks(file_range.path, position):
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


def _find_first_line(file_range: FileRange) -> int:
    """Return where the first line of the range starts, or its end if none starts in it."""
    if not file_range.begin:
        return 0
    position = file_range.begin - 1
    with open_bytes(file_range.path) as file:
        file.seek(position)
        while position < file_range.end and (block := file.read(_BLOCK)):
            found = block.find(b"\n")
            if found >= 0:
                return position + found + 1
            position += len(block)
    return file_range.end


def _read_blocks(path: str, begin: int = 0) -> Iterator[bytes]:
    """Yield the bytes of a file from `begin`, decompressed."""
    compression = compression_of(path)
    with open_bytes(path) as file:
        file.seek(begin)
        blocks = iter(partial(file.read, _BLOCK), b"")
        yield from _decompress(blocks, compression) if compression else blocks


def _decompress(blocks: Iterable[bytes], compression: str) -> Iterator[bytes]:
    """Yield the content of a compressed file of one or more members.

    The libraries' own file objects are not used: zstandard's accepts a truncated stream as whole.
    """
    make, failure = _decompressor(compression)
    member, closed = make(), False
    for block in blocks:
        while block := block.lstrip(b"\0") if closed else block:  # a file may be padded with zeros
            try:
                content = member.decompress(block)
            except failure as error:
                raise DamagedFileError("corrupt file", error) from error
            if content:
                yield content
            closed, block = member.eof, b""
            if closed:
                block, member = member.unused_data, make()
    if not closed:
        raise DamagedFileError("truncated file", f"the {compression} stream has no end")


def _decompressor(compression: str) -> tuple[Callable[[], Any], tuple[type[Exception], ...]]:
    """Return a constructor of decompressors for one member, and what they raise."""
    match compression:
        case ".gz":
            return partial(zlib.decompressobj, wbits=16 + zlib.MAX_WBITS), (zlib.error,)
        case ".bz2":
            return bz2.BZ2Decompressor, (OSError,)
        case ".xz":
            # Not the older .lzma format, which accepts zeros as an empty file.
            return partial(lzma.LZMADecompressor, lzma.FORMAT_XZ), (lzma.LZMAError,)
        case _:
            zstandard = load_library("zstandard")
            # The window of `zstd --long=31`, used for large dumps.
            library = zstandard.ZstdDecompressor(max_window_size=2**31)
            return library.decompressobj, (zstandard.ZstdError,)
