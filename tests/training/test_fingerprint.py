"""Fingerprints: equal on every mesh, different after any change of the stored bits."""

import itertools
import math
from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import MESHES, ONE_DEVICE
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from parallel.sharding.mesh import MeshConfig, build_mesh
from training.fingerprint import RunningFingerprint, fingerprints

SHAPE, COUNT = (3, 5), 15
DTYPES = {"float32": 4, "bfloat16": 2, "int32": 4, "uint8": 1}
NO_DEADLINE = settings(deadline=None, max_examples=100)


@cache
def mesh_of(config: MeshConfig) -> Mesh:
    return build_mesh(config, jax.devices()[: config.num_devices])


def put(values: np.ndarray, config: MeshConfig = ONE_DEVICE, spec: P | None = None) -> jax.Array:
    return jax.device_put(values, NamedSharding(mesh_of(config), spec or P()))


def of(values: np.ndarray) -> str:
    return fingerprints({"x": put(values)})["x"]


def content(dtype: str, data: bytes, shape: tuple[int, ...] = SHAPE) -> np.ndarray:
    return np.frombuffer(data, jnp.dtype(dtype)).reshape(shape)


def raw(size: int) -> st.SearchStrategy[bytes]:
    return st.binary(min_size=size, max_size=size)


def mixed(word: int) -> int:
    """Mix 32 bits with unbounded integers. Source: MurmurHash3 by Austin Appleby."""
    for shift, factor in ((16, 2246822507), (13, 3266489909), (16, 1)):
        word = (word ^ (word >> shift)) * factor % 2**32
    return word


def plain(values: np.ndarray) -> str:
    """Compute a fingerprint in Python, one element at a time."""
    # Checkpoints on disk hold these numbers: other factors would call them damaged.
    odd = (2654435761, 2246822519, 3266489917, 668265263, 374761393, 3550635117)
    width, data = values.dtype.itemsize, values.tobytes()
    sums = [0, 0]
    for number, index in enumerate(itertools.product(*map(range, values.shape))):
        bits = int.from_bytes(data[number * width : (number + 1) * width], "little")
        sums[0] += mixed(bits ^ mixed(number))
        place = 1 + sum(i * factor for i, factor in zip(index, odd, strict=False))
        sums[1] += mixed(bits ^ mixed(place % 2**32))
    return "".join(f"{lane % 2**32:08x}" for lane in sums)


def random_array(dtype: str, shape: tuple[int, ...]) -> np.ndarray:
    rng = np.random.default_rng(math.prod(shape))
    if dtype == "bool":
        return rng.integers(0, 2, shape).astype(bool)
    size = math.prod(shape) * jnp.dtype(dtype).itemsize
    return content(dtype, rng.bytes(size), shape)


SHAPES = [(), (7,), (0,), (3, 0, 2), (16, 8), (2, 3, 4), (1, 2, 1, 2, 3, 2)]
KINDS = ["float32", "bfloat16", "float16", "int32", "uint32", "int8", "bool"]


def test_fingerprints_equal_plain_integer_arithmetic_for_every_shape_and_dtype() -> None:
    arrays = {
        f"{dtype}{shape}": random_array(dtype, shape)
        for dtype, shape in itertools.product(KINDS, SHAPES)
    }
    found = fingerprints({name: put(values) for name, values in arrays.items()})
    assert found == {name: plain(values) for name, values in arrays.items()}


# A spec per array; axes of size one split nothing, so each holds on every mesh.
LAYOUTS = {
    "split_rows": P(("dp", "fsdp", "ep"), None),
    "split_both": P(("fsdp", "ep"), ("tp", "sp")),
    "whole": P(),
}


@pytest.mark.parametrize("name", ["tp8", "dp2-fsdp2-tp2", "ep2-fsdp2-sp2"])
def test_fingerprints_are_equal_on_every_mesh(name: str) -> None:
    values = {
        f"{layout}.{dtype}": (random_array(dtype, (16, 8)), spec)
        for dtype, (layout, spec) in itertools.product(("float32", "bfloat16"), LAYOUTS.items())
    }
    tree = {key: put(array, MESHES[name], spec) for key, (array, spec) in values.items()}
    tree["scalar"] = put(np.int32(-3), MESHES[name])
    pieces = [len({str(shard.index) for shard in x.addressable_shards}) for x in tree.values()]
    assert min(pieces) == 1 and max(pieces) >= 4, "nothing is split: the test shows nothing"
    found = fingerprints(tree)
    assert found.pop("scalar") == plain(np.array(-3, np.int32))
    assert found == {key: plain(array) for key, (array, _) in values.items()}


@pytest.mark.parametrize("dtype", DTYPES)
def test_any_flipped_bit_changes_both_lanes(dtype: str) -> None:
    num_bytes = COUNT * DTYPES[dtype]

    @NO_DEADLINE
    @given(raw(num_bytes), st.integers(0, 8 * num_bytes - 1))
    def law(data: bytes, bit: int) -> None:
        other = bytearray(data)
        other[bit // 8] ^= 1 << bit % 8
        before, after = of(content(dtype, data)), of(content(dtype, bytes(other)))
        assert before[:8] != after[:8] and before[8:] != after[8:]

    law()


@NO_DEADLINE
@given(raw(4 * COUNT), st.permutations(range(COUNT)))
def test_permuted_elements_change_the_fingerprint(data: bytes, order: list[int]) -> None:
    before = content("int32", data)
    after = before.ravel()[order].reshape(SHAPE)
    assume(not np.array_equal(before, after))
    assert of(before) != of(after)


@NO_DEADLINE
@given(raw(4 * COUNT), st.dictionaries(st.integers(0, COUNT - 1), st.integers(1, 2**31 - 1)))
def test_several_changes_do_not_cancel(data: bytes, changes: dict) -> None:
    assume(changes)
    before = content("int32", data)
    after = before.copy()
    for index, difference in changes.items():
        after.flat[index] ^= difference
    assert of(before) != of(after)


def test_signed_zeros_and_nans_differ_by_their_bits() -> None:
    words = (0x00000000, 0x80000000, 0x7FC00000, 0x7FC00001, 0xFFC00000, 0x7FA00000)
    found = {of(np.full(SHAPE, word, np.uint32).view(np.float32)) for word in words}
    assert len(found) == len(words)
    halves = (0x0000, 0x8000, 0x7FC0, 0x7FC1, 0xFFC0)
    found = {of(np.full(SHAPE, word, np.uint16).view(jnp.bfloat16)) for word in halves}
    assert len(found) == len(halves)


def test_a_reshape_changes_the_second_lane_unless_it_appends_ones() -> None:
    """The record holds the shape too, so this is no hole."""
    values = random_array("float32", (12,))
    flat, grid, row, column = (of(values.reshape(s)) for s in ((12,), (3, 4), (1, 12), (12, 1)))
    assert flat[:8] == grid[:8] == row[:8]
    assert len({flat[8:], grid[8:], row[8:]}) == 3
    assert column == flat


def test_equal_bits_have_equal_fingerprints_whatever_the_dtype() -> None:
    """The record holds the dtype too."""
    values = random_array("int32", SHAPE)
    assert of(values) == of(values.view(np.float32)) == of(values.view(np.uint32))
    small = np.arange(COUNT, dtype=np.uint8).reshape(SHAPE)
    assert of(small) == of(small.astype(np.int32)) != of(small.astype(np.float32))


def test_names_are_dotted_paths() -> None:
    one = put(np.ones(2, np.float32))
    found = fingerprints({"b": {"k": one}, "a": [one, (one,)]})
    assert found == dict.fromkeys(["a.0", "a.1.0", "b.k"], plain(np.ones(2, np.float32)))
    assert all(len(digits) == 16 and int(digits, 16) >= 0 for digits in found.values())


@pytest.mark.parametrize("dtype", DTYPES)
def test_blocks_in_any_order_have_the_fingerprint_of_the_array(dtype):
    shape = (3, 4, 6)
    data = np.random.default_rng(0).bytes(math.prod(shape) * DTYPES[dtype])
    values = content(dtype, data, shape)
    running = RunningFingerprint(shape, put(values).sharding)
    starts = [*itertools.product(range(3), (0, 3), (0, 2, 4))]
    for start in reversed(starts):
        ends = np.add(start, (1, 3, 2))
        running.add(start, values[tuple(map(slice, start, ends))])
    assert running.digits == of(values)
