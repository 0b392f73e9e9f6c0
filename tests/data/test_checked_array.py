"""A checked array is the file's content, or an error; its checksums are those that it documents."""

import resource
import struct
import zlib
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from data import checked_array
from data.checked_array import (
    CheckedArray,
    ChecksumWriter,
    allow_open_files,
    checksum_path,
    make_seed,
)
from data.files import DataError

SEED = 2**32 - 3  # so that the seeds of blocks wrap


def write(path: Path, array: np.ndarray, block_bytes: int, cuts: list[int] = []) -> CheckedArray:  # noqa: B006
    """Write an array and its checksums, whose writer gets parts that end at `cuts`."""
    path.write_bytes(array.tobytes())
    with ChecksumWriter(checksum_path(path), block_bytes, SEED) as checksums:
        for part in np.split(array, sorted(cuts)):
            checksums.update(part)
        checksums.finish()
    return CheckedArray(
        path, array.dtype, len(array), remedy="mend it", block_bytes=block_bytes, seed=SEED
    )


@given(
    length=st.integers(0, 70),
    block_bytes=st.sampled_from([4, 8, 12, 64, 4096]),
    cuts=st.lists(st.integers(0, 70), max_size=3),
    begin=st.integers(-80, 80),
    end=st.integers(-80, 80),
    max_read=st.sampled_from([8, 64, 2**24]),
)
@settings(max_examples=200, deadline=None)
def test_every_part_of_an_array_is_read_as_it_was_written(
    tmp_path_factory, length, block_bytes, cuts, begin, end, max_read
):
    array = np.random.default_rng(0).integers(0, 2**32, length, np.uint32)
    found = write(tmp_path_factory.mktemp("a") / "x.bin", array, block_bytes, cuts)
    before, checked_array.MAX_READ = checked_array.MAX_READ, max_read
    try:
        np.testing.assert_array_equal(found[begin:end], array[begin:end])
        np.testing.assert_array_equal(np.concatenate([array[:0], *found.chunks()]), array)
        assert all(part.nbytes <= max_read for part in found.chunks())
    finally:
        checked_array.MAX_READ = before
    assert len(found) == length and list(found) == array.tolist()


def test_checksums_are_crc32_with_the_number_of_the_block(tmp_path):
    array = np.arange(100, dtype="<u2")
    write(tmp_path / "x.bin", array, 64)
    data, found = array.tobytes(), (tmp_path / "x.crc32").read_bytes()
    blocks = [data[n : n + 64] for n in range(0, 200, 64)]
    wanted = [zlib.crc32(block, (SEED + n) % 2**32) for n, block in enumerate(blocks)]
    assert struct.unpack("<4I", found) == tuple(wanted)


def test_an_element_outside_of_the_array_is_an_index_error(tmp_path):
    found = write(tmp_path / "x.bin", np.arange(3), 64)
    assert (found[0], found[-1]) == (0, 2)
    for index in (3, -4):
        with pytest.raises(IndexError):
            found[index]


@given(flips=st.sets(st.integers(0, 8 * 4096 - 1), min_size=1, max_size=3))
@settings(max_examples=100, deadline=None)
def test_one_to_three_flipped_bits_of_a_block_are_found(tmp_path_factory, flips):
    array = np.random.default_rng(1).integers(0, 256, 4096, np.uint8)
    found = write(tmp_path_factory.mktemp("a") / "x.bin", array, 4096)
    for flip in flips:
        array[flip // 8] ^= 1 << flip % 8
    found.path.write_bytes(array.tobytes())
    with pytest.raises(DataError, match=r"elements 0 to 4096 .* differ from what was .*; mend it$"):
        found[7:8]


def test_every_file_and_every_folder_has_a_seed_of_its_own():
    names = [(folder, name) for folder in ("a", "b") for name in ("x.bin", "y.bin")]
    assert len({make_seed(*name) for name in names}) == 4


def test_the_limit_of_open_files_is_raised_only_when_many_are_needed(monkeypatch):
    limits, calls = (1024, 4096), []
    monkeypatch.setattr(resource, "getrlimit", lambda _: limits)
    monkeypatch.setattr(resource, "setrlimit", lambda _, new: calls.append(new))
    for count in (10, 512, 513, 9000):
        allow_open_files(count)
    limits = (resource.RLIM_INFINITY, resource.RLIM_INFINITY)
    allow_open_files(10**6)
    assert calls == [(1026, 4096), (4096, 4096)]
