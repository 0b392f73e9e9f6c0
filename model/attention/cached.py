"""Attention of new tokens to a key-value cache, of dense rows or of pages.

New keys and values are written first; the new tokens then attend to the whole cache.

Letters: B rows, L new tokens of a row, T slots of a row, H query heads, K kv heads, h head dim.
"""

from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.sharding import PartitionSpec as P

from model.attention.api import attend
from model.attention.mask import AttentionInputs, AttentionSpec, PagedInputs, chunk_ids
from model.attention.metadata import OperationMetadata
from model.attention.registry import AttentionChoice, Backend
from model.attention.sharded import local_kv_heads
from model.config import ModelConfig
from model.generation.cache import DenseCache, PagedCache
from parallel.linear.config import TensorParallelConfig
from parallel.sharding.axes import BATCH, HEAD, HEAD_DIM, MODE_DECODE

Cache = DenseCache | PagedCache


@dataclass(frozen=True, kw_only=True)
class LayerCache:
    """The cache of all layers, with what one layer needs to write to it and read from it.

    layer: the number of the layer. slots_BL: slots of the new tokens; a token whose slot does not
    exist is dropped. counts_B: real tokens among the new ones of a row; they come first.
    """

    cache: Cache
    layer: Array
    slots_BL: Array
    counts_B: Array
    config: ModelConfig
    tp: TensorParallelConfig

    def write(self, k_BLKh: Array, v_BLKh: Array | None) -> "LayerCache":
        """Return the cache with the new tokens' keys and values; in place if it is donated.

        v_BLKh: None: the keys are latents.
        Communication: an all-gather of k and v over sp if they are split there (prefill).
        """
        specs = self.cache.specs(self.config, self.tp)
        batch = specs.lengths_B[0]
        heads = specs.k_NBTKh[3] if isinstance(specs, DenseCache) else specs.pages_PSKh[2]
        new = P(batch, None, heads, None)
        island = jax.shard_map(
            lambda cache, *arrays: cache.write(*arrays),
            mesh=self.tp.manager.mesh,
            in_specs=(specs, P(), new, None if v_BLKh is None else new, P(batch, None)),
            out_specs=specs,
        )
        k, v = (y if y is None else jax.sharding.reshard(y, new) for y in (k_BLKh, v_BLKh))
        return replace(self, cache=island(self.cache, self.layer, k, v, self.slots_BL))


def write_index(
    cache: DenseCache,
    positions_BL: Array,
    slots_BL: Array,
    config: ModelConfig,
    tp: TensorParallelConfig,
) -> DenseCache:
    """Return the cache with the row indices of new tokens, which all layers share."""
    specs = cache.specs(config, tp)
    rows = P(*specs.lengths_B, None)
    island = jax.shard_map(
        lambda cache, *arrays: cache.write_index(*arrays),
        mesh=tp.manager.mesh,
        in_specs=(specs, rows, rows),
        out_specs=specs,
    )
    return island(cache, positions_BL, slots_BL)


def attend_cached(
    choice: AttentionChoice,
    q_BLHh: Array,
    view: LayerCache,
    positions_BL: Array,
    spec: AttentionSpec,
    metadata: OperationMetadata,
    *,
    sinks_H: Array | None = None,
) -> Array:
    """Return attention of queries at these positions to all that the cache holds -> `B L H h`.

    The keys of the queries themselves are in the cache already. choice: an operation for decoding;
    for a PagedCache one that takes pages.
    Communication: that of the operation over sp, where a dense cache is split.
    """
    if isinstance(view.cache, PagedCache):
        block_q, block_k = metadata.block_sizes(choice.name)
        spec = replace(spec, block_q=block_q, block_k=block_k)
        return _attend_pages(choice.backend, q_BLHh, view, spec, sinks_H)
    specs = view.cache.specs(view.config, view.tp)
    read = jax.shard_map(
        lambda cache, layer: cache.read_layer(layer),
        mesh=view.tp.manager.mesh,
        in_specs=(specs, P()),
        out_specs=(P(*specs.k_NBTKh[1:]),) * 2,
    )
    k_BTKh, v_BTKh = read(view.cache, view.layer)
    index_BT = view.cache.index_BT
    inputs = AttentionInputs(q_index_BL=positions_BL, kv_index_BT=index_BT, sinks_H=sinks_H)
    if spec.chunk is not None:
        ids = partial(chunk_ids, segment_ids_BL=None, chunk=spec.chunk, keys=view.cache.capacity)
        inputs = replace(
            inputs, q_segment_ids_BL=ids(positions_BL), kv_segment_ids_BT=ids(index_BT)
        )
    qkv = q_BLHh, k_BTKh, v_BTKh
    return attend((choice.backend,), qkv, inputs, spec, metadata, MODE_DECODE)


def _attend_pages(
    backend: Backend, q_BLHh: Array, view: LayerCache, spec: AttentionSpec, sinks_H: Array | None
) -> Array:
    config, manager = view.config, view.tp.manager
    specs = PagedCache.specs(config, view.tp)
    q_spec = manager.resolve([BATCH, None, HEAD, HEAD_DIM], MODE_DECODE)
    batch, head_axis = specs.lengths_B, q_spec[2]
    body = partial(
        _pages_body,
        backend=backend,
        spec=spec,
        head_axis=head_axis,
        heads_per_key=(
            config.num_attention_heads // config.num_key_value_heads
            if specs.pages_PSKh[2] is None and not spec.shared_values
            else None
        ),
    )
    sinks_spec = None if sinks_H is None else P(head_axis)
    island = jax.shard_map(
        body,
        mesh=manager.mesh,
        in_specs=((q_spec, specs, P(), batch, sinks_spec),),
        out_specs=q_spec,
        check_vma=backend.capabilities.check_vma,
    )
    return island((q_BLHh, view.cache, view.layer, view.counts_B, sinks_H))


def _pages_body(
    arrays: tuple[Any, ...],
    *,
    backend: Backend,
    spec: AttentionSpec,
    head_axis: str,
    heads_per_key: int | None,
) -> Array:
    """Return attention to pages on one device: q `B L H/tp h` -> `B L H/tp h`.

    arrays: q, cache, layer, counts_B, sinks_H. heads_per_key: query heads per kv head if every
    device holds all kv heads, and takes those of its query heads. The result is zero for the
    padding of rows with fewer than L tokens.
    """
    q_BLHh, cache, layer, counts_B, sinks_H = arrays
    B, L, H, h = q_BLHh.shape
    pages, page_table_BP = cache.read_layer(layer)
    if heads_per_key is not None:
        own_H = local_kv_heads(head_axis, H, heads_per_key)
        pages = jnp.take(pages, jnp.stack([2 * own_H, 2 * own_H + 1], axis=1).ravel(), axis=2)
    inputs = PagedInputs(page_table_BP, cache.lengths_B + counts_B, None, sinks_H)
    if L == 1:
        return backend.function(q_BLHh[:, 0], pages, inputs, spec)[:, None]
    # The operation takes the real tokens of all rows one after another; padding is dropped.
    starts_B = jnp.cumsum(counts_B) - counts_B
    offset_L = jnp.arange(L)
    there_BL = jnp.where(offset_L < counts_B[:, None], starts_B[:, None] + offset_L, B * L)
    q_THh = jnp.zeros_like(q_BLHh).reshape(B * L, H, h)
    q_THh = q_THh.at[there_BL.reshape(-1)].set(q_BLHh.reshape(B * L, H, h), mode="drop")
    query_starts = jnp.concatenate([starts_B, starts_B[-1:] + counts_B[-1:]]).astype(jnp.int32)
    out_THh = backend.function(q_THh, pages, replace(inputs, query_starts=query_starts), spec)
    return out_THh.at[there_BL].get(mode="fill", fill_value=0)
