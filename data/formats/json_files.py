"""The format of .json files: an array of records, as chats are often published, or JSON lines."""

import codecs
import json
from collections.abc import Iterator
from typing import Any

from data.files import DamagedFileError, input_bytes
from data.formats.base import Document, DocumentError, FileRange, register_format
from data.formats.text import (
    BOM,
    MAX_BYTES,
    locate_line,
    parse_record,
    read_blocks,
    read_json_lines,
    too_long,
)

_MARGIN = 16  # characters that an escape, a number or a literal may still need


def _is_array(path: str) -> bool:
    try:
        texts = (block.lstrip(BOM + b" \t\r\n") for block in read_blocks(path))
        return next((text for text in texts if text), b"").startswith(b"[")
    except DamagedFileError:  # the reader reports it
        return False


def _count_positions(path: str) -> int:
    return 1 if _is_array(path) else input_bytes([path])


def _locate(file_range: FileRange, number: int) -> str:
    if _is_array(file_range.path):
        return f"{file_range.path}, item {number}"
    return locate_line(file_range, number)


@register_format(
    "json", suffixes=(".json",), count=_count_positions, compressible=True, locate=_locate
)
def read_json(file_range: FileRange, field: str | None) -> Iterator[Document | DocumentError]:
    """Yield the document of each item of an array, or else of each line that starts in the range.

    Raises: DamagedFileError when the rest of an array cannot be read.
    """
    if not _is_array(file_range.path):
        yield from read_json_lines(file_range, field)
        return
    for number, (record, text) in enumerate(_Items(file_range.path)):
        yield parse_record(file_range, number, record, text, field)


class _Items:
    """Items of an array, and the text of each; one item is in memory at a time."""

    def __init__(self, path: str):
        self._blocks = read_blocks(path)
        self._decode = codecs.getincrementaldecoder("utf-8-sig")().decode
        self._text, self._at = "", 0
        """Text that is read, and how much of it is done."""
        self._has_ended = False
        self._number = 0

    def __iter__(self) -> Iterator[tuple[Any, str]]:
        self._take("[")
        if self._peek() != "]":
            yield self._item()
            while self._peek() == ",":
                self._at += 1
                yield self._item()
        self._take("]")
        if self._peek():
            raise self._invalid("text after the end of the array")

    def _read(self, size: int) -> None:
        """Read at least `size` more bytes, or up to the end of the file."""
        parts = [self._text[self._at :]]
        while size > 0 and not self._has_ended:
            block = next(self._blocks, b"")
            self._has_ended, size = not block, size - len(block)
            try:
                parts.append(self._decode(block, self._has_ended))
            except UnicodeDecodeError as error:
                detail = f"byte 0x{error.object[error.start]:02x} in item {self._number} or later"
                raise DamagedFileError("invalid UTF-8", detail) from error
        self._text, self._at = "".join(parts), 0

    def _peek(self) -> str:
        """Return the next character that is no white space, or nothing at the end."""
        while True:
            while self._at < len(self._text):
                if not (found := self._text[self._at]).isspace():
                    return found
                self._at += 1
            if self._has_ended:
                return ""
            self._read(1)

    def _take(self, wanted: str) -> None:
        if (found := self._peek()) != wanted:
            what = f"{found!r} instead of {wanted!r}" if found else "the array has no end"
            raise self._invalid(what)
        self._at += 1

    def _item(self) -> tuple[Any, str]:
        self._peek()
        while True:
            try:
                item, end = json.JSONDecoder().raw_decode(self._text, self._at)
                # Of a number, more digits may come.
                if end < len(self._text) or self._has_ended:
                    break
            except json.JSONDecodeError as error:
                is_cut = (
                    error.msg.startswith("Unterminated") or error.pos > len(self._text) - _MARGIN
                )
                if self._has_ended or not is_cut:
                    raise self._invalid(error.msg) from error
            except (ValueError, RecursionError) as error:  # beyond the limits of Python
                raise self._invalid(str(error)) from error
            size = len(self._text) - self._at
            if size > MAX_BYTES:
                raise DamagedFileError("too long", f"item {self._number} {too_long()}")
            self._read(max(1, size))  # twice as much: the decoder begins anew
        text, self._at = self._text[self._at : end], end
        self._number += 1
        return item, text

    def _invalid(self, reason: str) -> DamagedFileError:
        return DamagedFileError("invalid JSON", f"{reason} after {self._number} items")
