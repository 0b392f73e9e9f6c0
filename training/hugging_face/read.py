"""Parameters of a Hugging Face model directory, read straight onto the mesh.

Every process reads the bytes of its own devices into preallocated arrays, about 64 MiB per device
at a time. Host memory beyond these arrays is bounded by the largest tensor and these parts, on any
mesh.
"""

import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec as P

from model.config import ModelConfig
from model.families.base import nested
from model.families.layouts import Shape
from model.families.tensors import Piece
from model.int8_base import is_scale, quantize_array, scale_path
from training.fingerprint import leaf_name
from training.hugging_face.model_directory import ModelDirectory, few
from training.logs import log

_CHUNK_BYTES = 64 * 2**20
Progress = Callable[[int, int], None]
"""Called with (bytes of parameters read by this process, bytes in all)."""


def read_config(directory: str | Path) -> dict[str, Any]:
    """Return the section `model` of the configuration, as config.json of a directory gives it.

    Raises: ValueError for a model that is not supported.
    """
    return nested(ModelDirectory(directory).read_fields())


def read_parameters(
    directory: str | Path,
    config: ModelConfig,
    abstract_params: Any,
    progress: Progress | None = None,
) -> Any:
    """Return the parameters of a model directory, with the dtypes and shardings asked for.

    All processes of the mesh call this. Communication: none.

    Args:
        directory: folder with config.json and safetensors files.
        config: configuration of the model, with the mathematics of config.json.
        abstract_params: tree of jax.ShapeDtypeStruct with shardings.
        progress: called after each part.

    Raises:
        ValueError: tensors are missing, unknown or of another shape; none has been read by then.
    """
    source = ModelDirectory(directory)
    paths = jax.tree_util.tree_leaves_with_path(abstract_params)
    leaves = {name: x for path, x in paths if not is_scale(name := leaf_name(path))}
    pieces = source.find_pieces(config, {name: leaf.shape for name, leaf in leaves.items()})
    if source.extra_names and jax.process_index() == 0:
        log.warning(
            "%s: left out %d tensors of multi-token prediction: %s",
            source.path,
            len(source.extra_names),
            few(sorted(source.extra_names)),
        )
    readers = {
        name: _ArrayReader(source, pieces[name], _in_floats(leaf)) for name, leaf in leaves.items()
    }
    total, done, arrays = sum(reader.num_bytes for reader in readers.values()), 0, {}
    for name, reader in readers.items():
        array = reader.zeros()
        for offset in reader.offsets():
            array = jax.block_until_ready(reader.fill(array, offset))
            done += reader.num_bytes // reader.num_parts
            if progress is not None:
                progress(done, total)
        if leaves[name].dtype == np.int8:  # quantized at once, so that one array is in floats
            arrays[name], arrays[scale_path(name)] = quantize_array(array)
        else:
            arrays[name] = array
    if progress is not None:
        progress(total, total)
    return jax.tree_util.tree_map_with_path(
        lambda path, _: arrays[leaf_name(path)], abstract_params
    )


def _in_floats(leaf: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
    """Return the array that is read for an array of a state: int8 is made from float32."""
    dtype = np.float32 if leaf.dtype == np.int8 else leaf.dtype
    return jax.ShapeDtypeStruct(leaf.shape, dtype, sharding=leaf.sharding)


@dataclass(frozen=True)
class _ArrayReader:
    """Reader of one of our arrays: all devices fill their shards at the same local offsets.

    A part is a layer, or one expert of a layer, or some rows of it.
    """

    source: ModelDirectory
    pieces: Sequence[Piece]
    leaf: jax.ShapeDtypeStruct

    @cached_property
    def by_index(self) -> Mapping[tuple[int, ...], Piece]:
        """The pieces by their leading indices."""
        return {piece.index: piece for piece in self.pieces}

    @cached_property
    def num_lead(self) -> int:
        """Leading dims of our array that number its pieces."""
        return len(self.pieces[0].index)

    @cached_property
    def shard(self) -> Shape:
        """Shape of the block of a device."""
        return self.leaf.sharding.shard_shape(self.leaf.shape)

    @cached_property
    def part(self) -> Shape:
        """Shape of the part of a block that is filled at once."""
        shape = [1] * self.num_lead + list(self.shard[self.num_lead :])
        piece = self.pieces[0]
        if len(shape) > self.num_lead and not self.source.is_encoded(piece.name):
            strides = piece.view(self.source.open(piece.name)).strides
            along = self.num_lead + strides.index(max(strides))  # its rows are contiguous on disk
            size = math.prod(shape) * self.leaf.dtype.itemsize
            shape[along] = max(1, shape[along] // -(-size // _CHUNK_BYTES))
        return tuple(shape)

    @property
    def num_parts(self) -> int:
        """Parts of a block."""
        return math.prod(-(-w // p) for w, p in zip(self.shard, self.part, strict=True))

    @property
    def num_bytes(self) -> int:
        """Bytes of all blocks of this process."""
        count = len(self.leaf.sharding.addressable_devices_indices_map(self.leaf.shape))
        return count * math.prod(self.shard) * self.leaf.dtype.itemsize

    def offsets(self) -> Iterator[Shape]:
        """Yield the offsets of all parts in a block; the last ones may overlap others."""
        dims = [
            [min(first, whole - size) for first in range(0, whole, size)]
            for whole, size in zip(self.shard, self.part, strict=True)
        ]
        return itertools.product(*dims)

    def zeros(self) -> jax.Array:
        """Return the array before anything is read; padding of the vocabulary stays zero."""
        with jax.set_mesh(self.leaf.sharding.mesh):
            return _zeros(self.leaf.shape, self.leaf.dtype, self.leaf.sharding)

    def fill(self, array: jax.Array, offset: Shape) -> jax.Array:
        """Return the array with the part at an offset of every block."""
        dims = [*zip(self.leaf.shape, self.shard, self.part, offset, strict=True)]
        known: dict[Shape, np.ndarray] = {}  # replicas are read once

        def part(index: tuple[slice, ...] | None) -> np.ndarray:
            assert index is not None
            start = tuple(
                (along.start or 0) // size * block + first
                for along, (_, block, size, first) in zip(index, dims, strict=True)
            )
            if start not in known:
                known[start] = self.read(start)
            return known[start]

        shape = tuple(whole // block * size for whole, block, size, _ in dims)
        parts = jax.make_array_from_callback(shape, self.leaf.sharding, part, dtype=self.leaf.dtype)
        with jax.set_mesh(self.leaf.sharding.mesh):
            return _place(array, parts, np.array(offset, np.int32), self.leaf.sharding.spec)

    def read(self, start: Shape) -> np.ndarray:
        """Return the part of the whole array that begins at `start`."""
        piece = self.by_index[start[: self.num_lead]]
        ranges = tuple(
            slice(first, first + size)
            for first, size in zip(start[self.num_lead :], self.part[self.num_lead :], strict=True)
        )
        found = piece.view(self.source.open(piece.name))[ranges].astype(self.leaf.dtype)
        part = np.zeros(self.part, self.leaf.dtype)
        part[(0,) * self.num_lead][tuple(slice(size) for size in found.shape)] = found
        return part


@partial(jax.jit, static_argnums=(0, 1, 2))
def _zeros(shape: Shape, dtype: Any, sharding: jax.sharding.NamedSharding) -> jax.Array:
    return jnp.zeros(shape, dtype, out_sharding=sharding)


@partial(jax.jit, static_argnums=3, donate_argnums=0)
def _place(array: jax.Array, parts: jax.Array, offset: Any, spec: P) -> jax.Array:
    """Return the array with `parts`, one of every device, at the same offset of their blocks."""
    island = jax.shard_map(_place_block, in_specs=(spec, spec, P()), out_specs=spec)
    return island(array, parts, offset)


def _place_block(block: jax.Array, part: jax.Array, offset: jax.Array) -> jax.Array:
    return lax.dynamic_update_slice(block, part, [*offset])
