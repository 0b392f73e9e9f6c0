"""Text files and JSON lines, plain or compressed.

No more than two documents of the largest size are in memory at a time, whatever the file holds.
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
    find_field,
    missing_field,
    register_format,
    to_document,
    type_name,
)

MAX_BYTES = 2**26
"""Size of a document above which a text file is cut, at the end of a line, into several documents,
and a line of JSON lines is refused. To tokenize a document of this size takes about 8.3 GiB with a
BPE tokenizer and 0.8 GiB with bytes: 132 and 13 bytes per byte of 16 MiB on 24 November 2026."""
_BLOCK = 2**17  # bytes per read; decompressed blocks are larger
BOM = b"\xef\xbb\xbf"
_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")


@register_format(
    "text", suffixes=(".txt",), splittable=False, whole_bytes=MAX_BYTES, compressible=True
)
def read_text(file_range: FileRange, field: str | None) -> Iterator[Document | DocumentError]:
    """Yield the document of a text file, or one per `MAX_BYTES` of a larger file.

    Files without a known suffix are texts too. A line belongs to the document of the multiple of
    `MAX_BYTES` in which it starts, however the file is compressed.
    """
    for begin, content in _read_pieces(file_range):
        text = decode_utf8(file_range, None, content, first=begin)
        if isinstance(text, str) and not begin:
            text = text.removeprefix("\ufeff")
        yield to_document(file_range, None, text, field)


def _read_pieces(file_range: FileRange) -> Iterator[tuple[int, bytes]]:
    """Yield where each document of a range begins in the text, and its bytes.

    Raises: DamagedFileError, also for a line of more than `MAX_BYTES` across the end of a document.
    """
    begin, end = 0, None
    if not compression_of(file_range.path):
        begin, end = _find_first_line(file_range), file_range.end
        if begin and begin >= end:
            return
    rest, searched = bytearray(), begin
    try:
        for block in read_blocks(file_range.path, begin):
            rest += block
            boundary = (begin // MAX_BYTES + 1) * MAX_BYTES
            # The newline at or after boundary - 1 closes the last line that starts before it.
            while (at := rest.find(b"\n", max(searched, boundary - 1) - begin)) >= 0:
                content = bytes(memoryview(rest)[: at + 1])
                del rest[: at + 1]
                yield begin, content
                begin += at + 1
                if end is not None and begin >= end:
                    return
                boundary = (begin // MAX_BYTES + 1) * MAX_BYTES
            searched = begin + len(rest)
            if searched > boundary + MAX_BYTES:
                line = rest.rfind(b"\n", 0, boundary - begin) + begin + 1
                raise DamagedFileError("too long", f"the line at offset {line} {too_long()}")
    except DamagedFileError as damage:
        if damage.kind == "too long":
            raise
        detail = f"{damage.detail} after {begin + len(rest)} bytes of text"
        raise DamagedFileError(damage.kind, detail) from damage
    if rest or not begin:
        yield begin, bytes(rest)


def too_long() -> str:
    """Return the rule that a document breaks."""
    return f"has more than {MAX_BYTES:,} bytes"


def locate_line(file_range: FileRange, number: int) -> str:
    """Return the line of a file for a line of a range."""
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


@register_format("jsonl", suffixes=(".jsonl", ".ndjson"), compressible=True, locate=locate_line)
def read_json_lines(file_range: FileRange, field: str | None) -> Iterator[Document | DocumentError]:
    """Yield the document of each line that starts in the range; blank lines are skipped."""
    number = 0
    try:
        for number, line in enumerate(_read_lines(file_range), 1):
            if line is None:
                yield DocumentError(file_range, number, "too long", f"the line {too_long()}")
                continue
            if number == 1 and not file_range.begin:
                line = line.removeprefix(BOM)
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
        record: Any = json.loads(text)
    except json.JSONDecodeError as error:
        detail = f"{error.msg.removesuffix(' at')} at column {error.pos + 1}"
        return DocumentError(file_range, number, "invalid JSON", detail)
    except (ValueError, RecursionError) as error:  # a number or a depth beyond Python's limit
        return DocumentError(file_range, number, "invalid JSON", str(error))
    return parse_record(file_range, number, record, text, field)


def parse_record(
    file_range: FileRange, number: int, record: Any, text: str, field: str | None
) -> Document | DocumentError:
    """Make a document of a record; text: its JSON, which may spell half of a surrogate pair."""
    if not isinstance(record, dict):
        what = "line" if file_range.format == "jsonl" else "record"
        detail = f"the {what} is {type_name(record)}, not an object"
        return DocumentError(file_range, number, "wrong type", detail)
    name = None if field is None else find_field(field, record)
    if field is not None and name is None:
        texts = [key for key, value in record.items() if value and isinstance(value, str | list)]
        texts.sort(key=lambda key: -len(record[key]))
        return missing_field(file_range, number, field, record, texts)
    value = record if name is None else record[name]
    if "\\u" in text and _SURROGATE.search(text):
        try:
            json.dumps(value, ensure_ascii=False).encode()
        except UnicodeEncodeError as error:
            half = f"\\u{ord(error.object[error.start]):x}"
            detail = f"{half} is one half of a surrogate pair"
            return DocumentError(file_range, number, "invalid UTF-8", detail)
    return to_document(file_range, number, value, name)


def _read_lines(file_range: FileRange) -> Iterator[bytes | None]:
    """Yield the lines that start in the range, without their newlines; None: one is too long."""
    if compression_of(file_range.path):
        position, end = 0, None
    else:
        position, end = _find_first_line(file_range), file_range.end
        if position >= end:
            return
    parts: list[bytes] = []  # of a line longer than a block
    size = 0  # of the line so far
    for block in read_blocks(file_range.path, position):
        *whole, rest = block.split(b"\n")
        for part in whole:
            if end is not None and position >= end:
                return
            if size <= MAX_BYTES:  # else it is reported already
                is_short = size + len(part) <= MAX_BYTES
                yield b"".join([*parts, part]) if is_short else None
            position += size + len(part) + 1
            parts, size = [], 0
        if end is not None and position >= end:
            return
        if size <= MAX_BYTES < size + len(rest):
            parts = []
            yield None
        elif size <= MAX_BYTES:
            parts.append(rest)
        size += len(rest)
    if 0 < size <= MAX_BYTES:
        yield b"".join(parts)


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


def read_blocks(path: str, begin: int = 0) -> Iterator[bytes]:
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
