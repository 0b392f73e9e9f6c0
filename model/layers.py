"""The parts of a block: norm, rope, embedding, attention, SwiGLU. Every product is a linear's.

Letters: B batch, L length, D embed, H query heads, K kv heads, h head dim, F intermediate, V vocab.
Activations are typed by the explicit mesh: heads and F on tp, L on sp, B on (dp, fsdp, ep); the
residual stream x_BLD as the residual rule says.
"""

from collections.abc import Mapping, Sequence
from functools import lru_cache, partial
from typing import TypeVar

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jax.sharding import PartitionSpec as P

from model.attention.operation import Operation, OperationRegistry
from model.config import LinearKind, ModelConfig
from parallel.axes import (
    MODE_TRAIN,
    AttnQSharding,
    Replicated,
    ResidualSharding,
    RowWise,
    TokenSharding,
)
from parallel.layout import TensorParallelConfig, layout_of
from parallel.linear import (
    ColumnParallelLinear,
    Initializer,
    ParallelLinear,
    RowParallelLinear,
    chain,
    named_rngs,
)
from parallel.projection import gather_kernel
from parallel.ring import all_gather, reduce_scatter

AnyLinear = TypeVar("AnyLinear", bound=ParallelLinear)


@lru_cache
def bell(stddev: float) -> Initializer:
    """Initialiser: bell-shaped, mean 0, this standard deviation, never beyond 3.5 of them.

    The sum of four uniform 16-bit integers, times one constant: exact arithmetic and one rounding,
    so that the same seed gives the same bits on every mesh, device and jax version. (A normal draw
    goes through erf_inv, whose last bit depends on how a compiler vectorises a shard.)
    """
    scale = stddev / (4 * (2**32 - 1) / 12) ** 0.5

    def init(
        key: jax.Array, shape: Sequence[int], dtype: jnp.dtype, out_sharding: P | None = None
    ) -> jax.Array:
        whole = None if out_sharding is None else P(None, *out_sharding)
        words = jax.random.bits(key, (2, *shape), jnp.uint32, out_sharding=whole)
        total = jnp.sum((words & 0xFFFF) + (words >> 16), axis=0).astype(jnp.int32)
        centred = (2 * total - 4 * 0xFFFF).astype(jnp.float32)  # below 2**24: exact
        return (centred * (scale / 2)).astype(dtype)

    return init


class RMSNorm(nnx.Module):
    """x / rms(x) * scale in float32. Source: arXiv 1910.07467, equation 4."""

    def __init__(self, config: ModelConfig, tp: TensorParallelConfig):
        spec = tp.manager.resolve(Replicated)
        shape, dtype = (config.hidden_size,), jnp.dtype(config.param_dtype)
        value = jnp.ones(shape, dtype, out_sharding=spec)
        self.scale = nnx.Param(value, semantic_axes=Replicated)
        self.eps = config.rms_norm_eps

    def __call__(self, x_BLD: jax.Array) -> jax.Array:
        x = x_BLD.astype(jnp.float32)
        normed = x * lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + self.eps)
        return (normed * self.scale[...]).astype(x_BLD.dtype)


def rope(x_BLHh: jax.Array, positions_BL: jax.Array, theta: float) -> jax.Array:
    """Rotates the pairs (i, i + h/2) of every head by position * theta ** (-2 i / h), in float32.

    Source: RoFormer (arXiv 2104.09864), with the half-split pairing of the Hugging Face models.
    """
    half = x_BLHh.shape[-1] // 2
    frequency_h = theta ** -(jnp.arange(half, dtype=jnp.float32) / half)
    angle_BLh = positions_BL[..., None].astype(jnp.float32) * frequency_h
    cos, sin = jnp.cos(angle_BLh)[:, :, None], jnp.sin(angle_BLh)[:, :, None]
    first, second = jnp.split(x_BLHh.astype(jnp.float32), 2, axis=-1)
    rotated = jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
    return rotated.astype(x_BLHh.dtype)


class Embedding(nnx.Module):
    """Token table (V, D), its rows split over tp: each device looks up the tokens it owns."""

    def __init__(self, config: ModelConfig, tp: TensorParallelConfig, *, rngs: nnx.Rngs):
        shape = (config.vocab_size, config.hidden_size)
        spec = tp.manager.resolve(RowWise, shape=shape, name="embedding")
        init = bell(config.initializer_range)
        table = init(rngs.params(), shape, jnp.dtype(config.param_dtype), out_sharding=spec)
        self.table = nnx.Param(table, semantic_axes=RowWise)
        self.dtype = jnp.dtype(config.dtype)
        self.tp = tp

    def __call__(self, tokens_BL: jax.Array) -> jax.Array:
        """Tokens `B L` -> x_BLD in the residual layout.

        Communication: one all-reduce or reduce-scatter over tp of B L D.
        """
        table_spec = self.tp.manager.resolve(RowWise)
        tokens_spec = jax.typeof(tokens_BL).sharding.spec
        out_spec = self.tp.manager.resolve(ResidualSharding)
        body = partial(
            _embed_body,
            table_spec=table_spec,
            layout=layout_of(out_spec, self.tp.axis_name),
            axis_name=self.tp.axis_name,
            dtype=self.dtype,
        )
        island = jax.shard_map(
            body, mesh=self.tp.manager.mesh, in_specs=(table_spec, tokens_spec), out_specs=out_spec
        )
        return island(self.table[...], tokens_BL)


def _embed_body(
    table: jax.Array,
    tokens_BL: jax.Array,
    *,
    table_spec: P,
    layout: str,
    axis_name: str,
    dtype: jnp.dtype,
) -> jax.Array:
    """`V/tp D/fsdp`, `B L` -> `B L D`, with D or L over tp if the layout says so."""
    # Looked up before the cast: the gradient adds up the rows of equal tokens, in float32.
    table = gather_kernel(table, table_spec, keep=axis_name, dtype=None, like=tokens_BL)
    rows = table.shape[0]
    local_BL = tokens_BL - lax.axis_index(axis_name) * rows
    owned_BL = (local_BL >= 0) & (local_BL < rows)
    x_BLD = table[jnp.clip(local_BL, 0, rows - 1)].astype(dtype)
    x_BLD = jnp.where(owned_BL[..., None], x_BLD, 0)
    if layout == "replicated":
        return lax.psum(x_BLD, axis_name)
    return reduce_scatter(x_BLD, axis_name, 1 if layout == "sequence" else 2)


class Attention(nnx.Module):
    """Grouped-query attention: one column linear for q,k,v, an operation by name, a row linear."""

    def __init__(self, config: ModelConfig, tp: TensorParallelConfig, *, rngs: nnx.Rngs):
        self.config, self.tp = config, tp
        heads = config.num_attention_heads * config.head_size
        kv_heads = config.num_key_value_heads * config.head_size
        linear = partial(linear_of, config, tp)
        self.qkv = linear(
            ColumnParallelLinear,
            config.hidden_size,
            {"q": heads, "k": kv_heads, "v": kv_heads},
            kind="qkv",
            rngs=named_rngs(rngs, "qkv"),
        )
        self.o = linear(
            RowParallelLinear,
            heads,
            config.hidden_size,
            kind="o",
            rngs=named_rngs(rngs, "o"),
            last=True,
        )

    def __call__(
        self, x_BLD: jax.Array, positions_BL: jax.Array, segment_ids_BL: jax.Array
    ) -> jax.Array:
        with jax.named_scope("qkv"):
            qkv = self.qkv(x_BLD)
            q, k, v = (self._split_heads(qkv[name]) for name in "qkv")
            q, k = (rope(y, positions_BL, self.config.rope_theta) for y in (q, k))
        with jax.named_scope("attention"):
            out_BLHh = self._attend(q, k, v, segment_ids_BL)
            B, L, H, h = out_BLHh.shape
            features = P(*jax.typeof(out_BLHh).sharding.spec[:3])
            out_BLF = out_BLHh.reshape(B, L, H * h, out_sharding=features)
        with jax.named_scope("o"):
            return self.o(out_BLF, jax.typeof(x_BLD).sharding.spec)

    def _split_heads(self, y_BLF: jax.Array) -> jax.Array:
        """`B L H*h` -> `B L H h` with heads on tp, or whole on every device if tp splits a head."""
        B, L, features = y_BLF.shape
        heads = features // self.config.head_size
        spec = jax.typeof(y_BLF).sharding.spec
        if heads % self.tp.manager.mesh.shape[self.tp.axis_name]:
            spec = P(*spec[:2], None)
            y_BLF = jax.sharding.reshard(y_BLF, spec)
        return y_BLF.reshape(B, L, heads, self.config.head_size, out_sharding=P(*spec, None))

    def _attend(
        self, q: jax.Array, k: jax.Array, v: jax.Array, segment_ids: jax.Array
    ) -> jax.Array:
        manager = self.tp.manager
        q_spec = manager.resolve(AttnQSharding, MODE_TRAIN)
        kv_spec = jax.typeof(k).sharding.spec
        token_spec = manager.resolve(TokenSharding)
        operation = OperationRegistry.get(self.config.attention)
        body = partial(
            _attend_body,
            operation=operation,
            softmax_scale=self.config.head_size**-0.5,
            head_axis=self.tp.axis_name,
            length_axis=manager.partition_axis.sequence_parallel_axis,
            heads_per_kv=self.config.num_attention_heads // self.config.num_key_value_heads,
            kv_replicated=kv_spec[2] is None,
        )
        island = jax.shard_map(
            body,
            mesh=self.tp.manager.mesh,
            in_specs=(q_spec, kv_spec, kv_spec, token_spec),
            out_specs=q_spec,
            check_vma=operation.capabilities.types_varying,
        )
        return island(q, k, v, segment_ids)


def _attend_body(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    segment_ids: jax.Array,
    *,
    operation: Operation,
    softmax_scale: float,
    head_axis: str,
    length_axis: str,
    heads_per_kv: int,
    kv_replicated: bool,
) -> jax.Array:
    """q `B L/sp H/tp h`, k and v `B L/sp K/tp h` (or K whole), ids `B L/sp` -> `B L/sp H/tp h`.

    Communication: an all-gather over sp of k, v and the segment ids if the operation needs it.
    """
    if kv_replicated:
        heads = q.shape[2]
        own = (lax.axis_index(head_axis) * heads + jnp.arange(heads)) // heads_per_kv
        k, v = jnp.take(k, own, axis=2), jnp.take(v, own, axis=2)
    index_L = lax.axis_index(length_axis) * q.shape[1] + jnp.arange(q.shape[1])
    kv_index_T, kv_segment_ids = index_L, segment_ids
    if operation.capabilities.needs_all_keys:
        k, v, kv_segment_ids = (all_gather(y, length_axis, 1) for y in (k, v, segment_ids))
        kv_index_T = jnp.arange(k.shape[1])
    return operation.function(
        q,
        k,
        v,
        q_index_L=index_L,
        kv_index_T=kv_index_T,
        q_segment_ids_BL=segment_ids,
        kv_segment_ids_BT=kv_segment_ids,
        softmax_scale=softmax_scale,
    )


class SwiGLU(nnx.Module):
    """down(silu(gate(x)) * up(x)), gate and up from one gather. Source: arXiv 2002.05202."""

    def __init__(self, config: ModelConfig, tp: TensorParallelConfig, *, rngs: nnx.Rngs):
        linear = partial(linear_of, config, tp)
        width = config.intermediate_size
        self.gate_up = linear(
            ColumnParallelLinear,
            config.hidden_size,
            {"gate": width, "up": width},
            kind="mlp",
            rngs=named_rngs(rngs, "gate_up"),
        )
        self.down = linear(
            RowParallelLinear,
            width,
            config.hidden_size,
            kind="mlp",
            rngs=named_rngs(rngs, "down"),
            last=True,
        )

    def __call__(self, x_BLD: jax.Array) -> jax.Array:
        return chain(x_BLD, self.gate_up, gated_silu, self.down)


def gated_silu(gate_BLF: jax.Array, up_BLF: jax.Array) -> jax.Array:
    """silu(gate) * up, elementwise."""
    return jax.nn.silu(gate_BLF) * up_BLF


def linear_of(
    config: ModelConfig,
    tp: TensorParallelConfig,
    linear: type[AnyLinear],
    in_features: int,
    out_features: int | Mapping[str, int],
    *,
    kind: LinearKind | None,
    rngs: nnx.Rngs,
    last: bool = False,
) -> AnyLinear:
    """A linear in this model's dtypes and initialisation.

    kind: names it where overlap methods are chosen one by one; None: the general one.
    last: it ends a residual branch; its weights shrink with depth so that the sum of 2 * layers
    branches keeps the scale of one. Source: GPT-2 report (Radford et al. 2019), section 2.3.
    """
    stddev = config.initializer_range / ((2 * config.num_hidden_layers) ** 0.5 if last else 1.0)
    return linear(
        in_features,
        out_features,
        use_bias=False,
        dtype=jnp.dtype(config.dtype),
        param_dtype=jnp.dtype(config.param_dtype),
        kernel_init=bell(stddev),
        parallel_config=tp.for_kind(kind) if kind else tp,
        rngs=rngs,
    )
