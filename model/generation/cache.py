"""Key-value caches for generation: `DenseCache` has slots per row, `PagedCache` pages of slots.

Both are frozen pytrees, sharded by the decoding rules; `specs` returns their layout for jit and
shard_map. A scan over layers carries the whole cache, donated: each layer writes its slots into the
stacked arrays (`write`) and then reads them (`read_layer`). As inputs and outputs of the scan the
cache would be held twice and copied once per token. Caches know slots, not models.

With latent attention (`model.mla`) the one head is the latent and the key with rope, from which all
keys and values can be computed; there are no other values.

Letters: N layers, B rows, T slots of a row, L new tokens, K kv heads, h head dim. Pages: P pages, S
slots of a page, 2K alternating heads of keys and values: k0, v0, k1, v1, ...
"""

from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Self

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from model.attention.mask import UNUSED
from model.config import ModelConfig
from parallel.linear.config import TensorParallelConfig
from parallel.sharding.axes import (
    BATCH,
    KV_HEAD,
    KV_HEAD_DIM,
    KV_LENGTH,
    MODE_DECODE,
    AttnKVSharding,
)


class _SlotCounter:
    """The part that both caches share: how many slots of every row are taken."""

    lengths_B: jax.Array

    @property
    def capacity(self) -> int:
        """Slots per row."""
        raise NotImplementedError

    def next_slots(self, count_B: jax.Array, length: int) -> jax.Array:
        """Return the slots `B L` of `length` new tokens per row, of which `count_B` are kept.

        The other tokens, and tokens without room, get the slot `capacity`, which does not exist.
        Call it outside of shard_map.
        """
        offset_L = jnp.arange(length, dtype=jnp.int32)
        kept_BL = offset_L < count_B[:, None]
        return jnp.where(kept_BL, self.lengths_B[:, None] + offset_L, self.capacity)

    def advance(self, count_B: jax.Array) -> Self:
        """Return the cache with count_B more tokens per row; call it after the last layer."""
        cache: Any = self
        return replace(cache, lengths_B=self.lengths_B + count_B)


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class DenseCache(_SlotCounter):
    """Key-value cache with a fixed number of slots per row.

    k_NBTKh, v_NBTKh: `N B T/sp K/tp h`; every device holds all of K if tp does not divide it.
        v_NBTKh is None with latent attention.
    index_BT: int32, position of every slot's token in its row, or UNUSED; shared by all layers.
    lengths_B: int32, tokens of every row. sequence_axis: mesh axis that splits the slots, or None.
    """

    k_NBTKh: jax.Array
    v_NBTKh: jax.Array | None
    index_BT: jax.Array
    lengths_B: jax.Array
    sequence_axis: str | None = field(default=None, metadata={"static": True})

    @classmethod
    def specs(cls, config: ModelConfig, tp: TensorParallelConfig) -> "DenseCache":
        """Return a cache that holds a PartitionSpec instead of every array."""
        manager = tp.manager
        kv: Any = manager.resolve([None, *_kv_axes(config, tp)], MODE_DECODE)
        index: Any = manager.resolve([BATCH, KV_LENGTH], MODE_DECODE)
        lengths: Any = manager.resolve([BATCH], MODE_DECODE)
        split = manager.axis_size(KV_LENGTH, MODE_DECODE) > 1
        axis = manager.partition_axis.sequence_parallel_axis if split else None
        v = kv if config.mla is None else None
        return cls(k_NBTKh=kv, v_NBTKh=v, index_BT=index, lengths_B=lengths, sequence_axis=axis)

    @classmethod
    def empty(
        cls, config: ModelConfig, tp: TensorParallelConfig, *, batch: int, length: int
    ) -> "DenseCache":
        """Return an empty cache with `length` slots per row, sharded from the start.

        Call it under `jax.set_mesh(tp.mesh)`. Raises: ValueError if the mesh does not divide rows
        or slots.
        """
        shape = (batch, length, config.num_cache_heads, config.cache_size)
        tp.manager.resolve(_kv_axes(config, tp), MODE_DECODE, shape, "rows of the cache")
        specs: Any = cls.specs(config, tp)
        stack, dtype = (config.num_hidden_layers, *shape), cls._dtype_of(config)
        # Two arrays: one array in both fields could not be donated.
        k_NBTKh = jnp.zeros(stack, dtype, out_sharding=specs.k_NBTKh)
        v_NBTKh = None
        if specs.v_NBTKh is not None:
            v_NBTKh = jnp.zeros(stack, dtype, out_sharding=specs.v_NBTKh)
        index_BT = jnp.full((batch, length), UNUSED, jnp.int32, out_sharding=specs.index_BT)
        lengths_B = jnp.zeros((batch,), jnp.int32, out_sharding=specs.lengths_B)
        return replace(
            specs, k_NBTKh=k_NBTKh, v_NBTKh=v_NBTKh, index_BT=index_BT, lengths_B=lengths_B
        )

    @classmethod
    def _dtype_of(cls, config: ModelConfig) -> Any:
        """Return the type in which keys and values are stored."""
        return jnp.dtype(config.dtype)

    @property
    def capacity(self) -> int:
        """Slots per row."""
        return self.index_BT.shape[1]

    def write_index(self, index_BL: jax.Array, slots_BL: jax.Array) -> "DenseCache":
        """Store the row positions of new tokens, for all layers, before the first layer attends.

        Call it inside shard_map on local blocks; index and slots `B L` are not split over sp.
        """
        row_B1, slots_BL = self._local_slots(slots_BL)
        return replace(self, index_BT=self.index_BT.at[row_B1, slots_BL].set(index_BL, mode="drop"))

    def write(
        self, layer: jax.Array, k_BLKh: jax.Array, v_BLKh: jax.Array | None, slots_BL: jax.Array
    ) -> "DenseCache":
        """Store new keys and values of one layer in their slots; in place if donated.

        Call it inside shard_map on local blocks. k, v `B L K/tp h` and slots `B L` are not split
        over sp: every device stores what falls into its own slots. Missing slots are dropped.
        v_BLKh: None: the keys are latents.
        """
        row_B1, slots_BL = self._local_slots(slots_BL)

        def written(stack: jax.Array, new: jax.Array) -> jax.Array:
            at = stack.at[layer, row_B1, slots_BL]
            return at.set(new.astype(stack.dtype), mode="drop")

        v_NBTKh = self.v_NBTKh
        if v_NBTKh is not None and v_BLKh is not None:
            v_NBTKh = written(v_NBTKh, v_BLKh)
        return replace(self, k_NBTKh=written(self.k_NBTKh, k_BLKh), v_NBTKh=v_NBTKh)

    def read_layer(self, layer: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Return keys and values `B T K h` of one layer. Call it inside shard_map.

        Latents are both keys and values.
        """
        take = partial(lax.dynamic_index_in_dim, index=layer, axis=0, keepdims=False)
        k_BTKh = take(self.k_NBTKh)
        return k_BTKh, k_BTKh if self.v_NBTKh is None else take(self.v_NBTKh)

    def _local_slots(self, slots_BL: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Return rows `B 1`, and slots `B L` as local indices; T for slots of other devices."""
        size, local_BL = self.index_BT.shape[1], slots_BL
        if self.sequence_axis is not None:
            local_BL = slots_BL - lax.axis_index(self.sequence_axis) * size
        # A scatter drops indices past the end, but counts negative ones from the end.
        local_BL = jnp.where((local_BL >= 0) & (local_BL < size), local_BL, size)
        return jnp.arange(slots_BL.shape[0])[:, None], local_BL


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class PagedCache(_SlotCounter):
    """Key-value cache with as many pages per row as the row needs.

    Every data-parallel device has its own pool of pages.

    pages_PSKh: `P S 2K/tp h`, P split like rows; every device holds all of K if tp does not divide
        it. With latent attention `P S 1 h`. A device holds the pages of layer 0, then as many of
        layer 1, and so on, in one dim: a layer is a range of page numbers, and reading it needs no
        slice or reshape.
    page_table_BP: int32, the pages of every row in order, counted within a layer and device; 0
        where a row has none: page 0 is reserved and stays zero.
    lengths_B: int32, tokens of every row. num_layers: number of layers that P is divided into.
    """

    pages_PSKh: jax.Array
    page_table_BP: jax.Array
    lengths_B: jax.Array
    num_layers: int = field(metadata={"static": True})

    @classmethod
    def specs(cls, config: ModelConfig, tp: TensorParallelConfig) -> "PagedCache":
        """Return a cache that holds a PartitionSpec instead of every array."""
        manager, heads = tp.manager, _kv_axes(config, tp)[2]
        pages: Any = manager.resolve([BATCH, None, heads, KV_HEAD_DIM], MODE_DECODE)
        table: Any = manager.resolve([BATCH, None], MODE_DECODE)
        lengths: Any = manager.resolve([BATCH], MODE_DECODE)
        return cls(
            pages_PSKh=pages,
            page_table_BP=table,
            lengths_B=lengths,
            num_layers=config.num_hidden_layers,
        )

    @classmethod
    def allocate(
        cls,
        config: ModelConfig,
        tp: TensorParallelConfig,
        *,
        lengths: np.ndarray,
        page_size: int,
        min_pages: int | None = None,
    ) -> "PagedCache":
        """Return an empty cache with pages for `lengths` tokens per row; under `jax.set_mesh`.

        Every pool has page 0 and as many pages as the rows of the device that needs most.
        min_pages: round pages per row and per pool up to this number times a power of two, so that
        few shapes are compiled; None: do not round.
        Raises: ValueError with sp > 1, or if the mesh does not divide the rows.
        """
        manager = tp.manager
        if (sp := manager.axis_size(KV_LENGTH, MODE_DECODE)) > 1:
            raise ValueError(
                f"mesh.sp={sp}: a paged cache cannot split rows over sp; use mesh.sp=1 or a dense "
                "cache"
            )
        manager.resolve([BATCH], MODE_DECODE, lengths.shape, "rows of the cache")
        pools = manager.axis_size(BATCH, MODE_DECODE)
        table, num_pages = _page_table(lengths, page_size, pools, min_pages)
        heads = config.num_cache_heads * (2 if config.mla is None else 1)
        shape = (config.num_hidden_layers * num_pages, page_size, heads, config.cache_size)
        specs: Any = cls.specs(config, tp)
        dtype = jnp.dtype(config.dtype)
        return replace(
            specs,
            pages_PSKh=jnp.zeros(shape, dtype, out_sharding=specs.pages_PSKh),
            page_table_BP=jax.sharding.reshard(jnp.asarray(table), specs.page_table_BP),
            lengths_B=jnp.zeros(lengths.shape, jnp.int32, out_sharding=specs.lengths_B),
        )

    @property
    def capacity(self) -> int:
        """Slots that the page table can address per row."""
        return self.page_table_BP.shape[1] * self.pages_PSKh.shape[1]

    def write(
        self, layer: jax.Array, k_BLKh: jax.Array, v_BLKh: jax.Array | None, slots_BL: jax.Array
    ) -> "PagedCache":
        """Store new keys and values of one layer in their slots; in place if donated.

        Call it inside shard_map on local blocks: k, v `B L K/tp h` and slots `B L`. Slots beyond
        the pages of a row are dropped. v_BLKh: None: the keys are latents.
        """
        B, L, K, h = k_BLKh.shape
        pages, size = self.pages_PSKh.shape[:2]
        entry_BL = jnp.clip(slots_BL // size, 0, self.page_table_BP.shape[1] - 1)
        page_BL = jnp.take_along_axis(self.page_table_BP, entry_BL, axis=1)
        exists_BL = (page_BL > 0) & (slots_BL >= 0) & (slots_BL < self.capacity)
        # A scatter drops indices past the end.
        page_BL = jnp.where(exists_BL, page_BL + layer * self._pages_per_layer, pages)
        new = k_BLKh
        if v_BLKh is not None:
            new = jnp.stack([k_BLKh, v_BLKh], axis=3).reshape(B, L, 2 * K, h)
        new = new.astype(self.pages_PSKh.dtype)
        written = self.pages_PSKh.at[page_BL, slots_BL % size].set(new, mode="drop")
        return replace(self, pages_PSKh=written)

    def read_layer(self, layer: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Return all pages `P S 2K h` and the page table `B P` of one layer.

        Call it inside shard_map. The pages are not sliced: a kernel would have to copy the slice.
        """
        return self.pages_PSKh, self.page_table_BP + layer * self._pages_per_layer

    @property
    def _pages_per_layer(self) -> int:
        return self.pages_PSKh.shape[0] // self.num_layers


def _kv_axes(config: ModelConfig, tp: TensorParallelConfig) -> list[Any]:
    """Return the semantic axes of `B T K h`; K is not split where tp does not divide it."""
    axes: list[Any] = list(AttnKVSharding.axes)
    if config.num_cache_heads % tp.manager.axis_size(KV_HEAD, MODE_DECODE):
        axes[2] = None
    return axes


def _page_table(
    lengths: np.ndarray, page_size: int, pools: int, min_pages: int | None
) -> tuple[np.ndarray, int]:
    """Return the pages of every row `B P`, counted from 1 in each pool, and the pages per layer."""
    if page_size < 1 or lengths.ndim != 1 or (lengths < 0).any():
        raise ValueError(
            f"lengths {lengths.tolist()} in pages of {page_size} slots: give one length of at "
            "least 0 per row, and at least one slot per page"
        )
    counts = -(-lengths.astype(np.int64) // page_size)
    columns = _round_up(max(int(counts.max(initial=0)), 1), min_pages)
    table = np.zeros((len(lengths), columns), np.int32)
    used = []
    for rows in np.split(np.arange(len(lengths)), pools):
        ends = np.cumsum(counts[rows])
        for row, end in zip(rows, ends, strict=True):
            table[row, : counts[row]] = np.arange(end - counts[row], end) + 1
        used.append(int(ends[-1]) if len(ends) else 0)
    return table, pools * (1 + _round_up(max(used), min_pages))


def _round_up(pages: int, min_pages: int | None) -> int:
    """Round up to a power of two times `min_pages`; None: do not round."""
    if min_pages is None:
        return pages
    return min_pages << max(-(-pages // min_pages) - 1, 0).bit_length()
