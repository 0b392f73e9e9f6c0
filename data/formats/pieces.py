"""Pieces of input files: parts of about equal size, each tokenized by one task."""

import hashlib
import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace

from data.files import DamagedFileError, DataError, compression_of, input_bytes, suffix_of
from data.formats.base import FORMATS, FileRange, format_of_suffix
from data.store import InputFile

PIECE_BYTES = 16 * 2**20
"""Input of one task: about a second of tokenization, small beside the memory of a machine."""


@dataclass(frozen=True, slots=True)
class InputPiece:
    """Ranges of files that one task tokenizes, in order."""

    ranges: tuple[FileRange, ...]


def plan_pieces(paths: Sequence[str], piece_bytes: int = PIECE_BYTES) -> list[InputPiece]:
    """Group the files into pieces of about `piece_bytes`, in order, without reading documents.

    What cannot be cut (a compressed file, a row group) is one range of any size.
    Raises: DataError when a format cannot be read where it is, or its library is missing.
    """
    pieces: list[InputPiece] = []
    ranges: list[FileRange] = []
    filled = 0
    for path in paths:
        for part, size in _cut_file(path, piece_bytes):
            if ranges and filled + size > piece_bytes:
                pieces.append(InputPiece(tuple(ranges)))
                ranges, filled = [], 0
            if ranges and ranges[-1] == replace(part, begin=ranges[-1].begin, end=part.begin):
                ranges[-1] = replace(part, begin=ranges[-1].begin)
            else:
                ranges.append(part)
            filled += size
    return [*pieces, InputPiece(tuple(ranges))] if ranges else pieces


def _cut_file(path: str, piece_bytes: int) -> Iterator[tuple[FileRange, int]]:
    """Yield the ranges of one file, and approximately how many bytes each has."""
    size = input_bytes([path])
    compression, suffix = compression_of(path), suffix_of(path)
    if os.path.isdir(path):
        entry = FORMATS["datasets"]
    else:
        entry = format_of_suffix(suffix) or FORMATS["text"]
    if compression and not entry.compressible:
        raise DataError(f"{path} is {suffix} inside {compression}; decompress it first")
    try:
        count = entry.count(path) if entry.count else size
    except DamagedFileError:  # the reader meets the damage again, and reports it
        count = 1
    whole = bool(compression) or not entry.splittable
    step = max(1, count if whole else count * piece_bytes // max(1, size))
    if entry.whole_bytes is not None and not compression:
        step = min(step, entry.whole_bytes)
    for begin in range(0, max(count, whole), step):
        end = min(begin + step, count)
        yield FileRange(path, entry.name, begin, end), size * (end - begin) // max(1, count)


def known_suffixes() -> set[str]:
    """Return the suffixes of all formats."""
    return {suffix for entry in FORMATS.values() for suffix in entry.suffixes}


def piece_key(piece: InputPiece) -> str:
    """Return the hash of the ranges of files that one task tokenizes."""
    # The form of the first version, so that interrupted preparations of it can be continued.
    content = {"entries": [asdict(file_range) for file_range in piece.ranges]}
    return hashlib.sha256(json.dumps(content).encode()).hexdigest()


def bytes_before_each(pieces: Sequence[InputPiece], files: Sequence[InputFile]) -> list[int]:
    """Return the bytes of input before piece 0, 1, ..., and of all pieces.

    Ranges may count in records: then each has the same share of bytes as of the file's records.
    """
    whole: dict[str, int] = {}
    for part in (part for piece in pieces for part in piece.ranges):
        whole[part.path] = whole.get(part.path, 0) + part.end - part.begin
    sizes, done = {file.path: file.size for file in files}, [0.0]
    for piece in pieces:
        shares = ((part.end - part.begin) / max(1, whole[part.path]) for part in piece.ranges)
        paths = (part.path for part in piece.ranges)
        done.append(done[-1] + sum(s * sizes[p] for s, p in zip(shares, paths, strict=True)))
    return [round(count) for count in done]
