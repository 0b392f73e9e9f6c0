"""The decoder: embed, a scan over blocks, norm, head. The table of contents of model/.

Parameters are a function of ModelConfig and the seed alone; blocks are stacked on a leading layer
dim and scanned, so compile time does not grow with depth.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import lax

from model.attention.cached import Cache, LayerCache, mark
from model.attention.dispatch import in_zigzag
from model.attention.ring import zigzag_order
from model.cache import DenseCache
from model.config import LayerType, ModelConfig
from model.layers import Attention, Embedding, RMSNorm, RowInfo, SwiGLU, linear_of
from parallel.axes import MODE_TRAIN, QUERY_LENGTH, RUNTIME_MODE_TYPES, TokenSharding
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
        self,
        x_BLD: jax.Array,
        rows: RowInfo,
        *,
        layer_type: LayerType,
        mode: RUNTIME_MODE_TYPES = MODE_TRAIN,
        cache: LayerCache | None = None,
    ) -> tuple[jax.Array, LayerCache | None]:
        normed_BLD = self.attention_norm(x_BLD)
        out_BLD, cache = self.attention(
            normed_BLD, rows, layer_type=layer_type, mode=mode, cache=cache
        )
        x_BLD += out_BLD
        return x_BLD + self.mlp(self.mlp_norm(x_BLD)), cache


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
        self,
        tokens_BL: jax.Array,
        positions_BL: jax.Array,
        segment_ids_BL: jax.Array,
        *,
        index_L: jax.Array | None = None,
        dropout_key: jax.Array | None = None,
    ) -> jax.Array:
        """Tokens `B L` -> normed hidden states x_BLD in the residual layout.

        index_L: row index of every token, if they are in another order (see `row_order`).
        dropout_key: of this batch; None: nothing is dropped.
        """
        rows = (tokens_BL, positions_BL, segment_ids_BL)
        constrain = self.tp.manager.constrain
        tokens_BL, positions_BL, segment_ids_BL = (constrain(y, TokenSharding) for y in rows)
        definition, stacked = nnx.split(self.layers)
        info = RowInfo(positions_BL=positions_BL, segment_ids_BL=segment_ids_BL, index_L=index_L)

        def body(x_BLD: jax.Array, layer: Any, number: jax.Array, kind: LayerType) -> jax.Array:
            block, key = nnx.merge(definition, layer), dropout_key
            if key is not None:
                key = jax.random.fold_in(key, number)
            return block(x_BLD, dataclasses.replace(info, dropout_key=key), layer_type=kind)[0]

        if self.config.remat != "none":
            # prevent_cse is for code outside of scan; inside it only blocks fusion.
            policy = _POLICIES[self.config.remat]
            body = jax.checkpoint(body, policy=policy, prevent_cse=False, static_argnums=3)
        with jax.named_scope("embed"):
            x_BLD = self.embed(tokens_BL)
        with jax.named_scope("layers"):
            x_BLD = self._over_layers(body, x_BLD, stacked)
        return self.norm(x_BLD)

    def extend(
        self,
        tokens_BL: jax.Array,
        counts_B: jax.Array,
        cache: Cache,
        *,
        mode: RUNTIME_MODE_TYPES,
    ) -> tuple[jax.Array, Cache]:
        """New tokens `B L` of every row, after those in the cache -> (normed x_BLD, the cache).

        counts_B: how many of a row are real; they come first, the others are not kept and their
        results mean nothing. mode: prefill (the cache is empty: new tokens attend to themselves, L
        over sp), insert or autoregressive (they attend to the cache, L whole on every device).
        """
        manager = self.tp.manager
        tokens_BL = manager.constrain(tokens_BL, TokenSharding, mode)
        slots_BL = cache.next_slots(counts_B, tokens_BL.shape[1])
        offset_L = jnp.arange(tokens_BL.shape[1], dtype=jnp.int32)
        positions_BL = cache.lengths_B[:, None] + offset_L
        if isinstance(cache, DenseCache):
            cache = mark(cache, positions_BL, slots_BL, self.config, self.tp)
        rows = RowInfo(positions_BL=manager.constrain(positions_BL, TokenSharding, mode))
        definition, stacked = nnx.split(self.layers)

        def body(carry: Any, layer: Any, number: jax.Array, kind: LayerType) -> Any:
            x_BLD, cache = carry
            view = LayerCache(cache=cache, layer=number, slots_BL=slots_BL, counts_B=counts_B)
            x_BLD, view = nnx.merge(definition, layer)(
                x_BLD, rows, layer_type=kind, mode=mode, cache=view
            )
            return x_BLD, view.cache

        x_BLD = self.embed(tokens_BL, mode)
        x_BLD, cache = self._over_layers(body, (x_BLD, cache), stacked)
        return self.norm(x_BLD), cache.advance(counts_B)

    def _over_layers(self, body: Callable[..., Any], carry: Any, stacked: Any) -> Any:
        """body(carry, layer, number, layer type) -> carry, for every layer: a scan over periods.

        Layers of one period of types have different programs and follow each other in the loop's
        body; what is left of the last period follows the loop.
        """
        kinds = self.config.layer_types
        period, count = len(kinds), self.config.num_hidden_layers
        whole = count // period * period
        layers = (stacked, jnp.arange(count))
        if period == 1:
            return lax.scan(lambda x, y: (body(x, *y, kinds[0]), None), carry, layers)[0]

        def several(carry: Any, layers: Any, number: int) -> Any:
            for place in range(number):
                layer = jax.tree.map(lambda y, p=place: y[p], layers)
                carry = body(carry, *layer, kinds[place])
            return carry

        if whole:
            periods = jax.tree.map(
                lambda y: y[:whole].reshape(whole // period, period, *y.shape[1:]), layers
            )
            carry, _ = lax.scan(lambda x, y: (several(x, y, period), None), carry, periods)
        rest = jax.tree.map(lambda y: y[whole:], layers)
        return several(carry, rest, count - whole)

    def row_order(self, length: int) -> np.ndarray | None:
        """The order in which training rows of this length shall lie, if not the natural one.

        Entry i is the index of the token that comes i-th: permute tokens, targets and everything
        else of a batch alike, and pass it as index_L.
        """
        manager = self.tp.manager
        if not in_zigzag(self.config, manager, length):
            return None
        return zigzag_order(length, manager.axis_size(QUERY_LENGTH))

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
