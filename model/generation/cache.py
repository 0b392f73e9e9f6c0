"""Keys and values of the tokens so far: `DenseCache`, rows of slots; `PagedCache`, pages of slots.

Both are frozen pytrees, sharded by the rules of decoding; `specs` is where their layout stands, for
jit and for shard_map. A cache goes through a scan over layers as carry, whole and donated: each
layer writes its slots into the stacked arrays (`write`) and then reads itself (`layer`). As xs and
ys of the scan it would be held twice and copied once per token. It refuses to know a model: what is
written where is told by slots.

Letters: N layers, B rows, T slots of a row, L new tokens, K kv heads, h head dim. Of pages: P
pages, S slots of one, 2 K heads of keys and values side by side: k0, v0, k1, v1, ...
"""

from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from model.attention.scores import UNUSED
from model.config import ModelConfig
from parallel.linear.layout import TensorParallelConfig
from parallel.sharding.axes import (
    BATCH,
    KV_HEAD,
    KV_HEAD_DIM,
    KV_LENGTH,
    MODE_DECODE,
    AttnKVSharding,
)


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class DenseCache:
    """One row of slots per sequence.

    k_NBTKh, v_NBTKh: `N B T/sp K/tp h`, K whole on every device if tp does not divide it.
    index_BT: int32, the row index of the token in every slot, or UNUSED; shared by all layers.
    lengths_B: int32, tokens of every row. sequence_axis: over which the slots are split, if at all.
    """

    k_NBTKh: jax.Array
    v_NBTKh: jax.Array
    index_BT: jax.Array
    lengths_B: jax.Array
    sequence_axis: str | None = field(default=None, metadata={"static": True})

    @classmethod
    def specs(cls, config: ModelConfig, tp: TensorParallelConfig) -> "DenseCache":
        """A cache with a PartitionSpec in the place of every array."""
        manager = tp.manager
        kv: Any = manager.resolve([None, *_kv_axes(config, tp)], MODE_DECODE)
        index: Any = manager.resolve([BATCH, KV_LENGTH], MODE_DECODE)
        lengths: Any = manager.resolve([BATCH], MODE_DECODE)
        split = manager.axis_size(KV_LENGTH, MODE_DECODE) > 1
        axis = manager.partition_axis.sequence_parallel_axis if split else None
        return cls(k_NBTKh=kv, v_NBTKh=kv, index_BT=index, lengths_B=lengths, sequence_axis=axis)

    @classmethod
    def empty(
        cls, config: ModelConfig, tp: TensorParallelConfig, *, batch: int, length: int
    ) -> "DenseCache":
        """No token yet, room for `length` per row; born sharded under `jax.set_mesh(tp.mesh)`.

        Raises: ValueError if rows or slots do not divide.
        """
        shape = (batch, length, config.num_key_value_heads, config.head_size)
        tp.manager.resolve(_kv_axes(config, tp), MODE_DECODE, shape, "rows of the cache")
        specs: Any = cls.specs(config, tp)
        stack, dtype = (config.num_hidden_layers, *shape), jnp.dtype(config.dtype)
        # Two arrays: one that stood in both places could not be donated.
        k_NBTKh, v_NBTKh = (jnp.zeros(stack, dtype, out_sharding=specs.k_NBTKh) for _ in "kv")
        index_BT = jnp.full((batch, length), UNUSED, jnp.int32, out_sharding=specs.index_BT)
        lengths_B = jnp.zeros((batch,), jnp.int32, out_sharding=specs.lengths_B)
        return replace(
            specs, k_NBTKh=k_NBTKh, v_NBTKh=v_NBTKh, index_BT=index_BT, lengths_B=lengths_B
        )

    @property
    def capacity(self) -> int:
        """Slots of a row."""
        return self.index_BT.shape[1]

    def next_slots(self, count_B: jax.Array, length: int) -> jax.Array:
        """Slots `B L` for `length` tokens per row, of which the first `count_B` are to be kept.

        The others, and what has no room left, get a slot that does not exist. Outside of shard_map.
        """
        return _next_slots(self.lengths_B, count_B, length, self.capacity)

    def advance(self, count_B: jax.Array) -> "DenseCache":
        """Every row longer by so many tokens: once per step, after the last layer."""
        return replace(self, lengths_B=self.lengths_B + count_B)

    def mark(self, index_BL: jax.Array, slots_BL: jax.Array) -> "DenseCache":
        """Tells the row indices of new tokens, once for all layers and before the first attends.

        Inside shard_map, on local blocks; index and slots `B L`, whole over sp.
        """
        row_B1, own_BL = self._own(slots_BL)
        return replace(self, index_BT=self.index_BT.at[row_B1, own_BL].set(index_BL, mode="drop"))

    def write(
        self, layer: jax.Array, k_BLKh: jax.Array, v_BLKh: jax.Array, slots_BL: jax.Array
    ) -> "DenseCache":
        """New keys and values in their slots of one layer; in place if the cache is donated.

        Inside shard_map, on local blocks; k, v `B L K/tp h` and slots `B L` whole over sp: every
        device keeps what falls into its own slots. Slots that do not exist are dropped.
        """
        row_B1, own_BL = self._own(slots_BL)
        k_NBTKh, v_NBTKh = (
            stack.at[layer, row_B1, own_BL].set(new.astype(stack.dtype), mode="drop")
            for stack, new in ((self.k_NBTKh, k_BLKh), (self.v_NBTKh, v_BLKh))
        )
        return replace(self, k_NBTKh=k_NBTKh, v_NBTKh=v_NBTKh)

    def layer(self, layer: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Keys and values `B T K h` of one layer. Inside shard_map."""
        take = partial(lax.dynamic_index_in_dim, index=layer, axis=0, keepdims=False)
        return take(self.k_NBTKh), take(self.v_NBTKh)

    def _own(self, slots_BL: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Rows `B 1`, and slots `B L` as this device counts them; T for those of others."""
        own, own_BL = self.index_BT.shape[1], slots_BL
        if self.sequence_axis is not None:
            own_BL = slots_BL - lax.axis_index(self.sequence_axis) * own
        # A scatter drops what lies behind the end; below zero it would count from there.
        own_BL = jnp.where((own_BL >= 0) & (own_BL < own), own_BL, own)
        return jnp.arange(slots_BL.shape[0])[:, None], own_BL


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class PagedCache:
    """As many pages per row as it needs; every data-parallel device has a pool of its own.

    pages_PSKh: `P S 2K/tp h`, P split like rows, K whole on every device if tp does not divide it.
        A device holds the pages of layer 0, those of layer 1 and so on, equally many: one dim, so
        that a layer is a range of page numbers and nothing is cut out or reshaped to be read.
    page_table_BP: int32, the pages of every row in order, counted within a layer of its device; 0
        where it has none: page 0 belongs to nobody and stays zero.
    lengths_B: int32, tokens of every row. num_layers: what P is divided into.
    """

    pages_PSKh: jax.Array
    page_table_BP: jax.Array
    lengths_B: jax.Array
    num_layers: int = field(metadata={"static": True})

    @classmethod
    def specs(cls, config: ModelConfig, tp: TensorParallelConfig) -> "PagedCache":
        """A cache with a PartitionSpec in the place of every array."""
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
        least_pages: int | None = None,
    ) -> "PagedCache":
        """No token yet, pages for `lengths` tokens per row in the end; under `jax.set_mesh`.

        Every pool is as large as the neediest device's rows ask for, plus page 0. least_pages:
        rows and pools have room for this many pages times a power of two, so that few shapes are
        ever compiled; None: for as many as are needed.
        Raises: ValueError with sp > 1, or if rows do not divide.
        """
        manager = tp.manager
        if (sp := manager.axis_size(KV_LENGTH, MODE_DECODE)) > 1:
            raise ValueError(
                f"mesh.sp={sp}: the pages of a row are not split over sp; use mesh.sp=1 or a "
                "dense cache"
            )
        manager.resolve([BATCH], MODE_DECODE, lengths.shape, "rows of the cache")
        table, pool = _page_table(
            lengths, page_size, manager.axis_size(BATCH, MODE_DECODE), least_pages
        )
        heads = 2 * config.num_key_value_heads
        shape = (config.num_hidden_layers * pool, page_size, heads, config.head_size)
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
        """Slots that a row could have: its entries of the page table times the slots of a page."""
        return self.page_table_BP.shape[1] * self.pages_PSKh.shape[1]

    def next_slots(self, count_B: jax.Array, length: int) -> jax.Array:
        """Slots `B L` for `length` tokens per row, of which the first `count_B` are to be kept.

        The others, and what has no room left, get a slot that does not exist.
        """
        return _next_slots(self.lengths_B, count_B, length, self.capacity)

    def advance(self, count_B: jax.Array) -> "PagedCache":
        """Every row longer by so many tokens: once per step, after the last layer."""
        return replace(self, lengths_B=self.lengths_B + count_B)

    def write(
        self, layer: jax.Array, k_BLKh: jax.Array, v_BLKh: jax.Array, slots_BL: jax.Array
    ) -> "PagedCache":
        """New keys and values in their slots of one layer; in place if the cache is donated.

        Inside shard_map, on local blocks; k, v `B L K/tp h` and slots `B L`. Slots beyond the pages
        of a row are dropped.
        """
        B, L, K, h = k_BLKh.shape
        pages, size = self.pages_PSKh.shape[:2]
        entry_BL = jnp.clip(slots_BL // size, 0, self.page_table_BP.shape[1] - 1)
        page_BL = jnp.take_along_axis(self.page_table_BP, entry_BL, axis=1)
        there_BL = (page_BL > 0) & (slots_BL >= 0) & (slots_BL < self.capacity)
        # A scatter drops what lies behind the end.
        page_BL = jnp.where(there_BL, page_BL + layer * self._pages_per_layer, pages)
        new = jnp.stack([k_BLKh, v_BLKh], axis=3).reshape(B, L, 2 * K, h)
        new = new.astype(self.pages_PSKh.dtype)
        written = self.pages_PSKh.at[page_BL, slots_BL % size].set(new, mode="drop")
        return replace(self, pages_PSKh=written)

    def layer(self, layer: jax.Array) -> tuple[jax.Array, jax.Array]:
        """What a paged operation reads of one layer: all pages `P S 2K h`, and its table `B P`.

        Inside shard_map. Nothing is cut out: a kernel would have to copy it first.
        """
        return self.pages_PSKh, self.page_table_BP + layer * self._pages_per_layer

    @property
    def _pages_per_layer(self) -> int:
        return self.pages_PSKh.shape[0] // self.num_layers


def _kv_axes(config: ModelConfig, tp: TensorParallelConfig) -> list[Any]:
    """Semantic axes of rows `B T K h`: kv heads that tp does not divide are whole everywhere."""
    axes: list[Any] = list(AttnKVSharding.axes)
    if config.num_key_value_heads % tp.manager.axis_size(KV_HEAD, MODE_DECODE):
        axes[2] = None
    return axes


def _next_slots(lengths_B: jax.Array, count_B: jax.Array, length: int, capacity: int) -> jax.Array:
    offset_L = jnp.arange(length, dtype=jnp.int32)
    kept_BL = offset_L < count_B[:, None]
    return jnp.where(kept_BL, lengths_B[:, None] + offset_L, capacity)


def _page_table(
    lengths: np.ndarray, page_size: int, pools: int, least: int | None
) -> tuple[np.ndarray, int]:
    """The pages of every row `B P`, counted from 1 in each pool; the pages of all pools."""
    if page_size < 1 or lengths.ndim != 1 or (lengths < 0).any():
        raise ValueError(
            f"lengths {lengths.tolist()} in pages of {page_size} slots: give one length of at "
            "least 0 per row, and at least one slot"
        )
    counts = -(-lengths.astype(np.int64) // page_size)
    table = np.zeros((len(lengths), _room(max(int(counts.max(initial=0)), 1), least)), np.int32)
    used = []
    for rows in np.split(np.arange(len(lengths)), pools):
        ends = np.cumsum(counts[rows])
        for row, end in zip(rows, ends, strict=True):
            table[row, : counts[row]] = np.arange(end - counts[row], end) + 1
        used.append(int(ends[-1]) if len(ends) else 0)
    return table, pools * (1 + _room(max(used), least))


def _room(pages: int, least: int | None) -> int:
    """So many pages, or the power of two times `least` that holds them."""
    return pages if least is None else least << max(-(-pages // least) - 1, 0).bit_length()
