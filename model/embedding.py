"""The embedding: a table of vectors for tokens, stored in shards that are never gathered.

Letters: B batch, L length, D embed, V vocab.
"""

from collections.abc import Sequence
from functools import partial
from math import prod

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jax.sharding import PartitionSpec as P

from model.config import ModelConfig
from model.layers import truncated_normal
from parallel.linear.config import TensorParallelConfig
from parallel.linear.ring import all_gather, pcast_varying, reduce_scatter
from parallel.linear.sharded_matmul import params_for_shard_map
from parallel.linear.stored_kernel import gather_kernel
from parallel.sharding.axes import (
    MODE_TRAIN,
    RUNTIME_MODE_TYPES,
    EmbeddingTable,
    EmbeddingTableWithoutEP,
    ResidualSharding,
    RowWise,
)
from parallel.sharding.specs import FEATURES, ROWS, SplitDim, mesh_axes_of, split_dim


class Embedding(nnx.Module):
    """Embedding table (V, D): features over tp, or rows over tp if the head is tied to it.

    Split by features, every device looks up all tokens, and only the features that it does not keep
    travel. Split by rows, as a tied head needs, devices look up their own tokens, and whole vectors
    are summed over tp: n times the bytes on n devices. The axes that only store the table (fsdp,
    sp) split features in both cases, and every device along them has tokens of its own.
    """

    def __init__(self, config: ModelConfig, tp: TensorParallelConfig, *, rngs: nnx.Rngs):
        features = mesh_axes_of(tp.manager.resolve(EmbeddingTable)[1])
        parts = prod(tp.manager.mesh.shape[name] for name in features)
        untied = EmbeddingTableWithoutEP if config.hidden_size % parts else EmbeddingTable
        self.axes = RowWise if config.tie_word_embeddings else untied
        shape = (config.padded_vocab_size, config.hidden_size)
        spec = tp.manager.resolve(self.axes, shape=shape, name="embedding")
        init = truncated_normal(config.initializer_range)
        table = init(rngs.params(), shape, jnp.dtype(config.param_dtype), out_sharding=spec)
        self.table = nnx.Param(table, semantic_axes=self.axes)
        self.dtype, self.multiplier = jnp.dtype(config.dtype), config.embedding_multiplier
        self.tp = tp

    def __call__(self, tokens_BL: jax.Array, mode: RUNTIME_MODE_TYPES = MODE_TRAIN) -> jax.Array:
        """Return the embeddings of tokens `B L`, times the multiplier, in the layout of this mode.

        Communication over the axes that store the table: an all-gather of the tokens and an
        all-to-all of their embeddings, never the table. Over tp, of n devices: with features split,
        an all-to-all of B L D / n if rows are split in the result, none if features are, an
        all-reduce of B L D otherwise. With rows split, a reduce-scatter or all-reduce of B L D.
        """
        table, tokens_spec = self.table[...], jax.typeof(tokens_BL).sharding.spec
        axis = self.tp.axis_name
        table_spec, (table,) = params_for_shard_map(
            [table], self.tp.manager.resolve(self.axes), tokens_BL, axis, table.dtype
        )
        out_spec = self.tp.manager.resolve(ResidualSharding, mode)
        body = partial(
            _look_up,
            table_spec=table_spec,
            by_rows=self.axes is RowWise,
            dim=split_dim(out_spec, axis),
            axis_name=axis,
            dtype=self.dtype,
        )
        island = jax.shard_map(
            body, mesh=self.tp.manager.mesh, in_specs=(table_spec, tokens_spec), out_specs=out_spec
        )
        x_BLD = island(table, tokens_BL)
        return x_BLD if self.multiplier == 1.0 else x_BLD * jnp.asarray(self.multiplier, self.dtype)


def _look_up(
    table: jax.Array,
    tokens_BL: jax.Array,
    *,
    table_spec: P,
    by_rows: bool,
    dim: SplitDim | None,
    axis_name: str,
    dtype: jnp.dtype,
) -> jax.Array:
    """Look up tokens `B L` in local blocks of the table -> `B L D`; tp splits L or D if `dim` does.

    table: `V/tp D/(fsdp sp)` by rows, else `V D/(tp fsdp sp)`.
    """
    stored = [name for entry in table_spec for name in mesh_axes_of(entry)]
    table = gather_kernel(table, table_spec, keep=tuple(stored), dtype=None, like=tokens_BL)
    n, index, rows = lax.axis_size(axis_name), lax.axis_index(axis_name), table.shape[0]
    if by_rows:
        local_BL = tokens_BL - index * rows
        owned_BL = (local_BL >= 0) & (local_BL < rows)
        x_BLD = _look_up_for_all(table, jnp.clip(local_BL, 0, rows - 1), stored, axis_name, dtype)
        x_BLD = jnp.where(owned_BL[..., None], x_BLD, 0)
        return lax.psum(x_BLD, axis_name) if dim is None else reduce_scatter(x_BLD, axis_name, dim)
    x_BLD = _look_up_for_all(table, tokens_BL, stored, axis_name, dtype)
    if dim == FEATURES or (dim == ROWS and n == 1):
        return x_BLD
    if dim == ROWS:
        return lax.all_to_all(x_BLD, axis_name, split_axis=1, concat_axis=2, tiled=True)
    width = x_BLD.shape[-1]
    whole = pcast_varying(jnp.zeros((*tokens_BL.shape, n * width), dtype), (axis_name,))
    return lax.psum(lax.dynamic_update_slice_in_dim(whole, x_BLD, index * width, 2), axis_name)


def _look_up_for_all(
    table: jax.Array,
    tokens_BL: jax.Array,
    stored: Sequence[str],
    axis_name: str,
    dtype: jnp.dtype,
) -> jax.Array:
    """Look up tokens `B L` of this device in a table whose features n devices store: `B L D`.

    Every device looks up the tokens of all of them, and sends its features to where they belong.
    The table has far more rows than there are tokens, and its gradient would be summed over these
    devices. The lookup precedes the cast, so that rows of equal tokens are summed in float32.
    """
    axes = tuple(name for name in stored if name != axis_name and lax.axis_size(name) > 1)
    if not axes:
        return table[tokens_BL].astype(dtype)
    x_nBLD = table[all_gather(tokens_BL[None], axes, 0)].astype(dtype)
    return lax.all_to_all(x_nBLD, axes, split_axis=0, concat_axis=3, tiled=True)[0]
