"""Multi-head latent attention (MLA): keys and values of all heads come from one latent per token.

Source: DeepSeek-V2, arXiv 2405.04434, section 2.1. Parts of a head: n dimensions without rope and r
with rope; the key of the latter is shared by all heads.

New tokens attend to each other with keys and values of every head. In a cache each token has one
latent and the key with rope. Queries to a cache are projected into the space of the latents, so
that no key or value of a head is computed again: (q W_k^T) c = q (W_k^T c). The plan says which
form runs (`AttentionChoice.latent_keys`).

Letters: B batch, L length, D embed, H heads, h head dim, R latent of keys and values, n and r as
above, v value dims.
"""

from functools import partial

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import PartitionSpec as P

from model.attention.api import attend
from model.attention.cached import LayerCache, attend_cached
from model.attention.metadata import OperationMetadata
from model.attention.registry import INPUTS_NAME, AttentionChoice, layer_spec
from model.config import LayerType, ModelConfig
from model.layers import (
    RMSNorm,
    TokenInfo,
    attention_inputs,
    make_linear,
    merge_heads,
    split_heads,
)
from model.rotation import Rotation, rotate
from parallel.linear.config import TensorParallelConfig
from parallel.linear.linear import (
    ColumnParallelLinear,
    RowParallelLinear,
    TokenParallelLinear,
    named_rngs,
)
from parallel.sharding.axes import MODE_TRAIN, RUNTIME_MODE_TYPES


class LatentAttention(nnx.Module):
    """Attention whose keys and values are linear in a latent; called as `Attention` is.

    The projections to latents (`down`) are narrow, and each device computes them for its own
    tokens. The projections from latents to heads (`q_b`, `kv_b`) are column-parallel and gather the
    latents of all tokens, under the overlap of qkv. `q` projects directly where queries have no
    latent.
    """

    def __init__(self, config: ModelConfig, tp: TensorParallelConfig, *, rngs: nnx.Rngs):
        mla = config.mla
        assert mla is not None
        self.config, self.tp, self.mla = config, tp, mla
        H, D, rank = config.num_attention_heads, config.hidden_size, mla.q_lora_rank
        linear = partial(make_linear, config, tp, kind="qkv")
        column = partial(linear, ColumnParallelLinear)
        down = {} if rank is None else {"q_a": rank}
        self.down = linear(
            TokenParallelLinear, D, {**down, "kv_a": mla.kv_width}, rngs=named_rngs(rngs, "down")
        )
        if rank is None:
            self.q = column(D, H * mla.qk_head_dim, rngs=named_rngs(rngs, "q"))
        else:
            self.q_a_norm = RMSNorm(config, tp, rank, mla.norm_eps)
            self.q_b = column(rank, H * mla.qk_head_dim, rngs=named_rngs(rngs, "q_b"))
        self.kv_a_norm = RMSNorm(config, tp, mla.kv_lora_rank, mla.norm_eps)
        self.kv_b = column(
            mla.kv_lora_rank,
            H * (mla.qk_nope_head_dim + mla.v_head_dim),
            rngs=named_rngs(rngs, "kv_b"),
        )
        self.o = make_linear(
            config,
            tp,
            RowParallelLinear,
            H * mla.v_head_dim,
            D,
            kind="o",
            rngs=named_rngs(rngs, "o"),
            last=True,
        )

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
        """Attend, and return (x_BLD, the cache with the latents of these tokens)."""
        config = self.config
        with jax.named_scope("qkv"):
            q_n, q_r, latent_BLR, k_r = self._project(x_BLD)
            if has_rope:
                q_r, k_r = (self._rotate(y, info.rotations[layer_type]) for y in (q_r, k_r))
            if cache is not None:
                kept = P(*jax.typeof(k_r).sharding.spec[:2], None)
                whole_BLR = jax.sharding.reshard(latent_BLR, kept)
                cache = cache.write(jnp.concatenate([whole_BLR[:, :, None], k_r], -1), None)
        metadata = OperationMetadata.from_config(config).replace(partition_manager=self.tp.manager)
        spec = layer_spec(config, layer_type, mode)
        if choice.latent_keys:
            assert cache is not None
            with jax.named_scope("qkv"):
                w_k, w_v = self._kernels_by_head(q_n.dtype)
                q = jnp.concatenate([_per_head("BLHn,RHn->BLHR", q_n, w_k), q_r], -1)
            with jax.named_scope("attention"):
                out = attend_cached(choice, q, cache, info.positions_BL, spec, metadata)
                out = _per_head("BLHR,RHv->BLHv", out[..., : self.mla.kv_lora_rank], w_v)
        else:
            with jax.named_scope("qkv"):
                k, v = self._keys_and_values(latent_BLR, k_r)
                q = jnp.concatenate([q_n, q_r], -1)
                q, k, v = (_padded(y, choice.head_dim) for y in (q, k, v))
            with jax.named_scope("attention"):
                inputs = attention_inputs(info, spec)
                out = attend((choice.backend,), (q, k, v), inputs, spec, metadata, mode)
                out = out[..., : self.mla.v_head_dim]
        with jax.named_scope("o"):
            return self.o(merge_heads(out), jax.typeof(x_BLD).sharding.spec), cache

    def _project(self, x_BLD: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
        """Return queries `B L H n` and `B L H r`, latents `B L R` and the shared keys `B L 1 r`.

        H is over tp. The rows of the latents are split as those of x, those of the others are not
        split over tp.
        Communication: an all-gather over tp of the keys with rope, and that of the linears.
        """
        mla = self.mla
        # Remat keeps the latents: keys and values of all heads are many times as large.
        down = checkpoint_name(self.down(x_BLD), INPUTS_NAME)
        if "q_a" in down:
            q_BLF = self.q_b(self.q_a_norm(down["q_a"]))
        else:
            q_BLF = checkpoint_name(self.q(x_BLD), INPUTS_NAME)
        q = split_heads(q_BLF, mla.qk_head_dim, self.tp)
        kv_a = down["kv_a"]
        latent_BLR = self.kv_a_norm(kv_a[..., : mla.kv_lora_rank])
        rows = P(*jax.typeof(q).sharding.spec[:2], None)
        k_r = jax.sharding.reshard(kv_a[..., mla.kv_lora_rank :], rows)[:, :, None]
        return q[..., : mla.qk_nope_head_dim], q[..., mla.qk_nope_head_dim :], latent_BLR, k_r

    def _rotate(self, x_BLHr: jax.Array, by: Rotation) -> jax.Array:
        """Apply rope. Interleaved pairs come out as (i, i + r/2), which changes no score."""
        if self.mla.rope_interleave:
            x_BLHr = jnp.concatenate([x_BLHr[..., 0::2], x_BLHr[..., 1::2]], -1)
        return rotate(x_BLHr, by)

    def _keys_and_values(
        self, latent_BLR: jax.Array, k_r: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        """Return the keys `B L H n+r` and values `B L H v` of every head."""
        n = self.mla.qk_nope_head_dim
        kv = split_heads(self.kv_b(latent_BLR), n + self.mla.v_head_dim, self.tp)
        k_n, v = kv[..., :n], kv[..., n:]
        shape = (*k_n.shape[:-1], k_r.shape[-1])
        spec = jax.typeof(k_n).sharding.spec
        shared = lax.broadcast_in_dim(k_r[:, :, 0], shape, (0, 1, 3), out_sharding=spec)
        return jnp.concatenate([k_n, shared], -1), v

    def _kernels_by_head(self, dtype: jnp.dtype) -> tuple[jax.Array, jax.Array]:
        """Return the parts of `kv_b` for keys `R H n` and for values `R H v`, H over tp."""
        (kernel,) = self.kv_b.merged_kernels()
        n, axis = self.mla.qk_nope_head_dim, self.tp.axis_name
        kernel = jax.sharding.reshard(kernel.astype(dtype), P(None, axis))
        H = self.config.num_attention_heads
        w = kernel.reshape(kernel.shape[0], H, -1, out_sharding=P(None, axis, None))
        return w[..., :n], w[..., n:]


def _per_head(equation: str, x_BLHh: jax.Array, w: jax.Array) -> jax.Array:
    """Multiply every head with a kernel of its own, in the layout of x."""
    return jnp.einsum(equation, x_BLHh, w, out_sharding=jax.typeof(x_BLHh).sharding.spec)


def _padded(x_BLHh: jax.Array, width: int) -> jax.Array:
    """Pad the last dim with zeros, which add nothing to scores, and zeros to values."""
    missing = width - x_BLHh.shape[-1]
    return jnp.pad(x_BLHh, ((0, 0), (0, 0), (0, 0), (0, missing))) if missing else x_BLHh
