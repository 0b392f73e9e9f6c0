"""The decoder: embed, a scan over blocks, norm, head. The table of contents of model/.

Parameters are a function of ModelConfig and the seed alone; blocks are stacked on a leading layer
dim and scanned, so compile time does not grow with depth.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax

from model.config import ModelConfig
from model.layers import Attention, Embedding, RMSNorm, SwiGLU, linear_of
from parallel.axes import TokenSharding
from parallel.layout import TensorParallelConfig
from parallel.linear import ColumnParallelLinear, named_rngs
from parallel.projection import column_parallel

_POLICIES: dict[str, Any] = {
    "dots": jax.checkpoint_policies.dots_with_no_batch_dims_saveable,
    "full": jax.checkpoint_policies.nothing_saveable,
}


class Block(nnx.Module):
    """x + attention(norm(x)), then x + mlp(norm(x))."""

    def __init__(self, config: ModelConfig, tp: TensorParallelConfig, *, rngs: nnx.Rngs):
        self.attention_norm = RMSNorm(config, tp)
        self.attention = Attention(config, tp, rngs=named_rngs(rngs, "attention"))
        self.mlp_norm = RMSNorm(config, tp)
        self.mlp = SwiGLU(config, tp, rngs=named_rngs(rngs, "mlp"))

    def __call__(
        self, x_BLD: jax.Array, positions_BL: jax.Array, segment_ids_BL: jax.Array
    ) -> jax.Array:
        x_BLD += self.attention(self.attention_norm(x_BLD), positions_BL, segment_ids_BL)
        return x_BLD + self.mlp(self.mlp_norm(x_BLD))


class Transformer(nnx.Module):
    """Tokens to hidden states, and hidden states to logits.

    Build it inside `jax.jit` or `jax.eval_shape` under `jax.set_mesh(tp.mesh)`: parameters are then
    born sharded.
    """

    def __init__(self, config: ModelConfig, tp: TensorParallelConfig, *, rngs: nnx.Rngs):
        self.config, self.tp = config, tp
        self.embed = Embedding(config, tp, rngs=named_rngs(rngs, "embed"))
        self.layers = _stack(
            lambda layer_rngs: Block(config, tp, rngs=layer_rngs),
            config.num_hidden_layers,
            rngs=named_rngs(rngs, "layers"),
        )
        self.norm = RMSNorm(config, tp)
        if not config.tie_word_embeddings:
            self.head = linear_of(
                config,
                tp,
                ColumnParallelLinear,
                config.hidden_size,
                config.vocab_size,
                kind=None,
                rngs=named_rngs(rngs, "head"),
            )

    def __call__(
        self, tokens_BL: jax.Array, positions_BL: jax.Array, segment_ids_BL: jax.Array
    ) -> jax.Array:
        """Tokens `B L` -> normed hidden states x_BLD in the residual layout."""
        rows = (tokens_BL, positions_BL, segment_ids_BL)
        constrain = self.tp.manager.constrain
        tokens_BL, positions_BL, segment_ids_BL = (constrain(y, TokenSharding) for y in rows)
        definition, stacked = nnx.split(self.layers)

        def body(x_BLD: jax.Array, layer: Any) -> tuple[jax.Array, None]:
            block = nnx.merge(definition, layer)
            return block(x_BLD, positions_BL, segment_ids_BL), None

        if self.config.remat != "none":
            # prevent_cse is for code outside of scan; inside it only blocks fusion.
            body = jax.checkpoint(body, policy=_POLICIES[self.config.remat], prevent_cse=False)
        with jax.named_scope("embed"):
            x_BLD = self.embed(tokens_BL)
        with jax.named_scope("layers"):
            x_BLD, _ = lax.scan(body, x_BLD, stacked)
        return self.norm(x_BLD)

    def logits(self, x_BLD: jax.Array) -> jax.Array:
        """Hidden states -> logits `B L V`, V on tp. Training uses `cross_entropy_sum` instead."""
        return column_parallel(x_BLD, [self.head_kernel()], self.tp)[0]

    def head_kernel(self) -> jax.Array:
        """The head's kernel (D, V), ColumnWise; the transposed embedding if tied."""
        if self.config.tie_word_embeddings:
            return self.embed.table[...].T
        return self.head.kernel[...]


def _stack(build: Callable[[nnx.Rngs], nnx.Module], count: int, *, rngs: nnx.Rngs) -> nnx.Module:
    """One module whose parameters have a leading dim of `count`, entry i built from key i."""
    key = rngs.params.key[...]
    definition = nnx.graphdef(nnx.eval_shape(lambda: build(nnx.Rngs(params=key))))
    keys = jax.vmap(lambda index: jax.random.fold_in(key, index))(jnp.arange(count))
    return nnx.merge(definition, jax.vmap(lambda k: nnx.state(build(nnx.Rngs(params=k))))(keys))
