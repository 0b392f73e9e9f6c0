"""Attention of new tokens to a cache: written first, then attended to. Dense rows or pages.

Letters: B rows, L new tokens of a row, T slots of a row, H query heads, K kv heads, h head dim.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from model.attention.capabilities import Form
from model.attention.dispatch import AttentionChoice, pattern_of
from model.attention.metadata import OperationMetadata
from model.attention.operation import OperationRegistry
from model.attention.scores import PagedInputs, ScoreRule
from model.config import LayerType, ModelConfig
from model.generation.cache import DenseCache, PagedCache
from parallel.linear.config import TensorParallelConfig
from parallel.sharding.axes import BATCH, HEAD, HEAD_DIM, MODE_DECODE, RUNTIME_MODE_TYPES

Cache = DenseCache | PagedCache


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class LayerCache:
    """The cache as one layer meets it.

    layer: its number. slots_BL: where the new tokens go; a slot that does not exist drops one.
    counts_B: how many of the new tokens of a row are real; they come first.
    """

    cache: Cache
    layer: jax.Array
    slots_BL: jax.Array
    counts_B: jax.Array

    def write(
        self, k_BLKh: jax.Array, v_BLKh: jax.Array, config: ModelConfig, tp: TensorParallelConfig
    ) -> "LayerCache":
        """With the keys and values of the new tokens; in place if the cache is donated.

        Communication: over sp an all-gather of k and v, if they are split there (prefill).
        """
        specs = self.cache.specs(config, tp)
        batch = specs.lengths_B[0]
        heads = specs.k_NBTKh[3] if isinstance(specs, DenseCache) else specs.pages_PSKh[2]
        new = P(batch, None, heads, None)
        island = jax.shard_map(
            lambda cache, *arrays: cache.write(*arrays),
            mesh=tp.manager.mesh,
            in_specs=(specs, P(), new, new, P(batch, None)),
            out_specs=specs,
        )
        k, v = (jax.sharding.reshard(y, new) for y in (k_BLKh, v_BLKh))
        return replace(self, cache=island(self.cache, self.layer, k, v, self.slots_BL))


def mark(
    cache: DenseCache,
    positions_BL: jax.Array,
    slots_BL: jax.Array,
    config: ModelConfig,
    tp: TensorParallelConfig,
) -> DenseCache:
    """The cache, told the row indices of new tokens: once for all layers."""
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
    q_BLHh: jax.Array,
    view: LayerCache,
    positions_BL: jax.Array,
    *,
    layer_type: LayerType,
    choice: AttentionChoice,
    mode: RUNTIME_MODE_TYPES,
    metadata: OperationMetadata,
    config: ModelConfig,
    tp: TensorParallelConfig,
    features: Mapping[str, Any],
) -> jax.Array:
    """Queries at these positions over all that the cache holds, themselves included.

    mode: insert or autoregressive. features: what the layer asks of a `BoundOperation`.
    Communication: over sp what the operation needs; a dense cache is split there.
    """
    if isinstance(view.cache, PagedCache):
        rule = ScoreRule(
            scale=metadata.scale_of(config.head_size),
            pattern=pattern_of(config, layer_type),
            soft_cap=config.attn_logit_softcapping,
        )
        sinks_H = features["softmax_aux"]
        return _attend_pages(
            q_BLHh, view, sinks_H, form=choice.form, rule=rule, tp=tp, config=config
        )
    specs = view.cache.specs(config, tp)
    read = jax.shard_map(
        lambda cache, layer: cache.read_layer(layer),
        mesh=tp.manager.mesh,
        in_specs=(specs, P()),
        out_specs=(P(*specs.k_NBTKh[1:]),) * 2,
    )
    k_BTKh, v_BTKh = read(view.cache, view.layer)
    operation = OperationRegistry.create(choice.name, metadata)
    return operation(
        q_BLHh,
        k_BTKh,
        v_BTKh,
        mode=mode,
        q_index=positions_BL,
        kv_index=view.cache.index_BT,
        **features,
    )


def _attend_pages(
    q_BLHh: jax.Array,
    view: LayerCache,
    sinks_H: jax.Array | None,
    *,
    form: Form,
    rule: ScoreRule,
    tp: TensorParallelConfig,
    config: ModelConfig,
) -> jax.Array:
    manager, specs = tp.manager, PagedCache.specs(config, tp)
    q_spec = manager.resolve([BATCH, None, HEAD, HEAD_DIM], MODE_DECODE)
    batch, head_axis = specs.lengths_B, q_spec[2]
    body = partial(
        _pages_body,
        form=form,
        rule=rule,
        head_axis=head_axis,
        heads_per_key=config.num_attention_heads // config.num_key_value_heads,
        kv_whole=specs.pages_PSKh[2] is None,
    )
    sinks_spec = None if sinks_H is None else P(head_axis)
    island = jax.shard_map(
        body,
        mesh=manager.mesh,
        in_specs=(q_spec, specs, P(), batch, sinks_spec),
        out_specs=q_spec,
        check_vma=form.capabilities.types_varying,
    )
    arrays: Any = (q_BLHh, view.cache, view.layer, view.counts_B, sinks_H)
    return island(*arrays)


def _pages_body(
    q_BLHh: jax.Array,
    cache: PagedCache,
    layer: jax.Array,
    counts_B: jax.Array,
    sinks_H: jax.Array | None,
    *,
    form: Form,
    rule: ScoreRule,
    head_axis: str,
    heads_per_key: int,
    kv_whole: bool,
) -> jax.Array:
    """q `B L H/tp h` -> `B L H/tp h`; rows with fewer than L tokens give zeros for the rest."""
    B, L, H, h = q_BLHh.shape
    pages, page_table_BP = cache.read_layer(layer)
    if kv_whole:
        first = jax.lax.axis_index(head_axis) * H
        own_H = (first + jnp.arange(H)) // heads_per_key
        pages = jnp.take(pages, jnp.stack([2 * own_H, 2 * own_H + 1], axis=1).ravel(), axis=2)
    lengths_B = cache.lengths_B + counts_B
    inputs = PagedInputs(page_table_BP, lengths_B, None, sinks_H)
    if L == 1:
        return form.function(q_BLHh[:, 0], pages, inputs, rule)[:, None]
    # Tokens of all rows behind each other; those that are padding have no place.
    starts_B = jnp.cumsum(counts_B) - counts_B
    offset_L = jnp.arange(L)
    there_BL = jnp.where(offset_L < counts_B[:, None], starts_B[:, None] + offset_L, B * L)
    q_THh = jnp.zeros_like(q_BLHh).reshape(B * L, H, h)
    q_THh = q_THh.at[there_BL.reshape(-1)].set(q_BLHh.reshape(B * L, H, h), mode="drop")
    query_starts = jnp.concatenate([starts_B, starts_B[-1:] + counts_B[-1:]]).astype(jnp.int32)
    out_THh = form.function(q_THh, pages, replace(inputs, query_starts=query_starts), rule)
    return out_THh.at[there_BL].get(mode="fill", fill_value=0)
