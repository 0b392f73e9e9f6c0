"""Layers of the transformer: RMSNorm, attention, gated MLP.

Letters: B batch, L length, D embed, H query heads, K kv heads, h head dim, F intermediate, V vocab.
Activations carry their sharding in their type: F over tp, heads over tp if they divide, L over sp
except in decoding, B over (dp, fsdp, ep), and the residual stream x_BLD by the residual rule.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache, partial
from typing import TypeVar

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import PartitionSpec as P

from model.activations import gated_activation
from model.attention.api import attend
from model.attention.cached import LayerCache, attend_cached
from model.attention.mask import AttentionInputs, AttentionSpec, chunk_ids
from model.attention.metadata import OperationMetadata
from model.attention.registry import INPUTS_NAME, AttentionChoice, layer_spec
from model.config import LayerType, LinearKind, ModelConfig
from model.rotation import Rotation, rotate
from parallel.linear.chain import chain
from parallel.linear.config import TensorParallelConfig
from parallel.linear.linear import (
    ColumnParallelLinear,
    Initializer,
    ParallelLinear,
    RowParallelLinear,
    named_rngs,
)
from parallel.sharding.axes import (
    MODE_PREFILL,
    MODE_TRAIN,
    RUNTIME_MODE_TYPES,
    Replicated,
    SRowWise,
)

AnyLinear = TypeVar("AnyLinear", bound=ParallelLinear)


@lru_cache
def truncated_normal(stddev: float) -> Initializer:
    """Return an initialiser: approximately normal, mean 0, truncated at 3.5 standard deviations.

    It sums four uniform 16-bit integers and multiplies by one constant. The arithmetic is exact up
    to one rounding, so a seed gives the same bits on every mesh, device and jax version. (A normal
    draw uses erf_inv, whose last bit depends on how the compiler vectorises a shard.)
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
    """RMS normalisation, x / rms(x) * (offset + scale), in float32.

    offset: `model.norm_offset`, 0 by default. Source: arXiv 1910.07467, equation 4.
    """

    def __init__(
        self,
        config: ModelConfig,
        tp: TensorParallelConfig,
        width: int | None = None,
        eps: float | None = None,
    ):
        spec = tp.manager.resolve(Replicated)
        shape, dtype = (width or config.hidden_size,), jnp.dtype(config.param_dtype)
        self.eps, self.offset = eps or config.rms_norm_eps, config.norm_offset
        value = jnp.full(shape, 1 - self.offset, dtype, out_sharding=spec)
        self.scale = nnx.Param(value, semantic_axes=Replicated)

    def __call__(self, x_BLD: jax.Array, scale_D: jax.Array | None = None) -> jax.Array:
        """Normalise the last dim; the layout stays. scale_D: takes the place of `scale`.

        Communication: an all-reduce of B L floats over tp if the last dim is split.
        """
        with jax.named_scope("norm"):
            x = x_BLD.astype(jnp.float32)
            normed = x * lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + self.eps)
            scale_D = self.scale[...] if scale_D is None else scale_D
            if self.offset:
                scale_D = self.offset + scale_D.astype(jnp.float32)
            return (normed * scale_D).astype(x_BLD.dtype)


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class TokenInfo:
    """Inputs of attention and experts that are equal for all layers.

    positions_BL: positions for rope. rotations: cosines and sines of rope, by type of layer.
    segment_ids_BL: document of every token; None: every token sees all earlier tokens of its row.
    index_L: index in the row of every token, None: natural order. dropout_key: None: no dropout.
    valid_BL: False for padding; None: no padding. measured_BL: tokens of which the scale of
    activations is measured; None: it is not measured.
    """

    positions_BL: jax.Array
    rotations: Mapping[LayerType, Rotation] = field(default_factory=dict)
    segment_ids_BL: jax.Array | None = None
    index_L: jax.Array | None = None
    dropout_key: jax.Array | None = None
    valid_BL: jax.Array | None = None
    measured_BL: jax.Array | None = None


class Attention(nnx.Module):
    """Grouped-query attention: a column-parallel q, k, v, an operation, a row-parallel output."""

    def __init__(self, config: ModelConfig, tp: TensorParallelConfig, *, rngs: nnx.Rngs):
        self.config, self.tp = config, tp
        heads = config.num_attention_heads * config.head_size
        kv_heads = config.num_key_value_heads * config.head_size
        linear = partial(make_linear, config, tp)
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
        if config.qk_norm:
            across = config.qk_norm_across_heads
            self.q_norm = RMSNorm(config, tp, heads if across else config.head_size)
            self.k_norm = RMSNorm(config, tp, kv_heads if across else config.head_size)
        if config.attention_sinks:
            spec = tp.manager.resolve(SRowWise)
            sinks = jnp.zeros((config.num_attention_heads,), jnp.float32, out_sharding=spec)
            self.sinks = nnx.Param(sinks, semantic_axes=SRowWise)

    def __call__(
        self,
        x_BLD: jax.Array,
        info: TokenInfo,
        *,
        layer_type: LayerType,
        has_rope: bool = True,
        choice: AttentionChoice,
        mode: RUNTIME_MODE_TYPES = MODE_TRAIN,
        cache: LayerCache | None = None,
    ) -> tuple[jax.Array, LayerCache | None]:
        """Attend, and return (x_BLD, the cache with the keys and values of these tokens).

        mode: train and prefill attend to the new tokens only, insert and autoregressive to the
        cache.
        """
        with jax.named_scope("qkv"):
            q, k, v = self._project_qkv(x_BLD)
            if has_rope:
                q, k = (rotate(y, info.rotations[layer_type]) for y in (q, k))
            if not self.config.qk_norm:
                q, k = (checkpoint_name(y, INPUTS_NAME) for y in (q, k))
            v = checkpoint_name(v, INPUTS_NAME)
        if cache is not None:
            cache = cache.write(k, v)
        with jax.named_scope("attention"):
            metadata = OperationMetadata.from_config(self.config)
            metadata = metadata.replace(partition_manager=self.tp.manager)
            spec = layer_spec(self.config, layer_type, mode)
            sinks_H = self.sinks[...] if self.config.attention_sinks else None
            if cache is not None and mode != MODE_PREFILL:
                positions_BL = info.positions_BL
                out_BLHh = attend_cached(
                    choice, q, cache, positions_BL, spec, metadata, sinks_H=sinks_H
                )
            else:
                inputs = attention_inputs(info, spec, sinks_H)
                out_BLHh = attend((choice.backend,), (q, k, v), inputs, spec, metadata, mode)
            out_BLF = merge_heads(out_BLHh)
        with jax.named_scope("o"):
            return self.o(out_BLF, jax.typeof(x_BLD).sharding.spec), cache

    def _project_qkv(self, x_BLD: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Return q, k and v `B L heads h`, with norms applied to q and k."""
        config = self.config
        qkv = self.qkv(x_BLD)
        if config.qk_norm:
            # The derivative of the norms needs their input; norms and rope are cheap to repeat.
            qkv |= {name: checkpoint_name(qkv[name], INPUTS_NAME) for name in "qk"}
        if config.qk_norm_across_heads:
            qkv |= {"q": self.q_norm(qkv["q"]), "k": self.k_norm(qkv["k"])}
        q, k, v = (split_heads(qkv[name], config.head_size, self.tp) for name in "qkv")
        if config.qk_norm and not config.qk_norm_across_heads:
            q, k = self.q_norm(q), self.k_norm(k)
        return q, k, v


def attention_inputs(
    info: TokenInfo, spec: AttentionSpec, sinks_H: jax.Array | None = None
) -> AttentionInputs:
    """Return the arrays with which new tokens attend to each other."""
    segment_ids_BL = info.segment_ids_BL
    if spec.chunk is not None:
        keys = info.positions_BL.shape[1]
        segment_ids_BL = chunk_ids(info.positions_BL, segment_ids_BL, chunk=spec.chunk, keys=keys)
    return AttentionInputs(
        q_index_BL=info.index_L,
        kv_index_BT=info.index_L,
        q_segment_ids_BL=segment_ids_BL,
        dropout_seed=info.dropout_key,
        sinks_H=sinks_H,
    )


def split_heads(y_BLF: jax.Array, head_dim: int, tp: TensorParallelConfig) -> jax.Array:
    """Reshape `B L H*h` to `B L H h`: H over tp, or not split if tp does not divide H."""
    B, L, features = y_BLF.shape
    heads = features // head_dim
    spec = jax.typeof(y_BLF).sharding.spec
    if heads % tp.manager.mesh.shape[tp.axis_name]:
        spec = P(*spec[:2], None)
        y_BLF = jax.sharding.reshard(y_BLF, spec)
    return y_BLF.reshape(B, L, heads, head_dim, out_sharding=P(*spec, None))


def merge_heads(y_BLHh: jax.Array) -> jax.Array:
    """Reshape `B L H h` to `B L H*h`, with the features split as H is."""
    B, L, H, h = y_BLHh.shape
    return y_BLHh.reshape(B, L, H * h, out_sharding=P(*jax.typeof(y_BLHh).sharding.spec[:3]))


class GatedMLP(nnx.Module):
    """Gated MLP: down(activation(gate(x), up(x))), where `model.hidden_act` names the activation.

    Source: arXiv 2002.05202.
    """

    def __init__(
        self,
        config: ModelConfig,
        tp: TensorParallelConfig,
        *,
        rngs: nnx.Rngs,
        width: int | None = None,
    ):
        linear = partial(make_linear, config, tp)
        width = width or config.intermediate_size
        self.activation = gated_activation(config.hidden_act, config.swiglu_limit)
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
        """Return x_BLD in the layout it had; gate and up share one gather of x."""
        with jax.named_scope("mlp"):
            return chain(x_BLD, self.gate_up, self.activation, self.down)


def make_linear(
    config: ModelConfig,
    tp: TensorParallelConfig,
    linear: type[AnyLinear],
    in_features: int,
    out_features: int | Mapping[str, int],
    *,
    kind: LinearKind,
    rngs: nnx.Rngs,
    last: bool = False,
) -> AnyLinear:
    """Build a linear with this model's dtypes and initialisation; biases start at zero.

    kind: the group whose overlap method it uses, and whether it has a bias. last: the linear ends a
    residual branch, so its weights shrink with depth to keep the sum of 2 * layers branches at the
    scale of one branch.
    Source: GPT-2 report (Radford et al. 2019), section 2.3.
    """
    stddev = config.hidden_stddev / ((2 * config.num_hidden_layers) ** 0.5 if last else 1.0)
    built = linear(
        in_features,
        out_features,
        use_bias=kind in config.biases,
        dtype=jnp.dtype(config.dtype),
        param_dtype=jnp.dtype(config.param_dtype),
        precision=config.matmul_precision,
        kernel_init=truncated_normal(stddev),
        parallel_config=tp.for_kind(kind),
        rngs=rngs,
    )
    built.kind = kind
    return built
