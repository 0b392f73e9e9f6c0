"""The decoder: embed, a scan over blocks, norm, head. The table of contents of model/.

Parameters are a function of ModelConfig and the seed alone; blocks are stacked on a leading layer
dim and scanned, so compile time does not grow with depth.
"""

import dataclasses
import math
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import lax

from model.attention.cached import Cache, LayerCache, mark
from model.attention.dispatch import in_zigzag
from model.attention.operation import RESULT_NAME
from model.attention.ring import zigzag_order
from model.config import LayerType, ModelConfig
from model.generation.cache import DenseCache
from model.layers import Attention, Embedding, RMSNorm, RowInfo, SwiGLU, linear_of
from model.moe import MoE, MoEReport
from parallel.experts.expert import SAVED_NAMES
from parallel.linear.layout import TensorParallelConfig
from parallel.linear.linear import ColumnParallelLinear, named_rngs
from parallel.linear.projection import column_parallel
from parallel.sharding.axes import MODE_TRAIN, QUERY_LENGTH, RUNTIME_MODE_TYPES, TokenSharding

# The products of experts have a batch dim, or hide in a loop, as what attention computes block by
# block: they are saved by their names.
_POLICIES: dict[str, Any] = {
    "dots": jax.checkpoint_policies.save_from_both_policies(
        jax.checkpoint_policies.dots_with_no_batch_dims_saveable,
        jax.checkpoint_policies.save_only_these_names(*SAVED_NAMES, RESULT_NAME),
    ),
    "full": jax.checkpoint_policies.nothing_saveable,
}


_STACKS = {False: "layers", True: "sparse_layers"}

Kind = tuple[LayerType, bool]
"""What makes the program of a layer: what its queries see, and whether its MLP is sparse."""


class Block(nnx.Module):
    """x + attention(norm(x)), then x + mlp(norm(x)); the MLP of a sparse block is a `MoE`."""

    def __init__(
        self, config: ModelConfig, tp: TensorParallelConfig, *, sparse: bool, rngs: nnx.Rngs
    ):
        self.attention_norm = RMSNorm(config, tp)
        self.attention = Attention(config, tp, rngs=named_rngs(rngs, "attention"))
        self.mlp_norm = RMSNorm(config, tp)
        self.mlp = (MoE if sparse else SwiGLU)(config, tp, rngs=named_rngs(rngs, "mlp"))

    def __call__(
        self,
        x_BLD: jax.Array,
        rows: RowInfo,
        *,
        layer_type: LayerType,
        mode: RUNTIME_MODE_TYPES = MODE_TRAIN,
        cache: LayerCache | None = None,
        dropless: bool = False,
    ) -> tuple[jax.Array, LayerCache | None, MoEReport | None]:
        normed_BLD = self.attention_norm(x_BLD)
        out_BLD, cache = self.attention(
            normed_BLD, rows, layer_type=layer_type, mode=mode, cache=cache
        )
        x_BLD += out_BLD
        normed_BLD = self.mlp_norm(x_BLD)
        if isinstance(self.mlp, MoE):
            out_BLD, report = self.mlp(normed_BLD, rows.valid_BL, mode, dropless=dropless)
            return x_BLD + out_BLD, cache, report
        return x_BLD + self.mlp(normed_BLD), cache, None


class Transformer(nnx.Module):
    """Tokens to hidden states, and hidden states to logits.

    Build it inside `jax.jit` or `jax.eval_shape` under `jax.set_mesh(tp.mesh)`: parameters are then
    born sharded.
    """

    def __init__(self, config: ModelConfig, tp: TensorParallelConfig, *, rngs: nnx.Rngs):
        self.config, self.tp = config, tp
        self.embed = Embedding(config, tp, rngs=named_rngs(rngs, "embed"))
        for sparse, name in _STACKS.items():
            if count := config.sparse_layers.count(sparse):
                build = partial(Block, config, tp, sparse=sparse)
                setattr(self, name, _stack(build, count, rngs=named_rngs(rngs, name)))
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
        dropless: bool = False,
    ) -> tuple[jax.Array, MoEReport | None]:
        """Tokens `B L` -> (normed x_BLD in the residual layout, reports of sparse layers `N ...`).

        segment_ids_BL: documents; negative: padding, which goes to no expert.
        index_L: row index of every token, if they are in another order (see `row_order`).
        dropout_key: of this batch; None: no attention weight is dropped. dropless: experts have
        room for all tokens, whatever their capacity: losses to compare must not depend on it.
        """
        rows = (tokens_BL, positions_BL, segment_ids_BL)
        constrain = self.tp.manager.constrain
        tokens_BL, positions_BL, segment_ids_BL = (constrain(y, TokenSharding) for y in rows)
        definitions, stacks = self._layers()
        sparse = True in stacks
        info = RowInfo(
            positions_BL=positions_BL,
            segment_ids_BL=segment_ids_BL,
            index_L=index_L,
            valid_BL=segment_ids_BL >= 0 if sparse else None,
        )

        def body(x_BLD: jax.Array, layer: Any, number: jax.Array, kind: Kind) -> Any:
            block, key = nnx.merge(definitions[kind[1]], layer), dropout_key
            if key is not None:
                key = jax.random.fold_in(key, number)
            rows = dataclasses.replace(info, dropout_key=key)
            x_BLD, _, report = block(x_BLD, rows, layer_type=kind[0], dropless=dropless)
            return x_BLD, report

        if self.config.remat != "none":
            # prevent_cse is for code outside of scan; inside it only blocks fusion.
            policy = _POLICIES[self.config.remat]
            body = jax.checkpoint(body, policy=policy, prevent_cse=False, static_argnums=3)
        with jax.named_scope("embed"):
            x_BLD = self.embed(tokens_BL)
        with jax.named_scope("layers"):
            x_BLD, reports = self._over_layers(body, x_BLD, stacks)
        return self.norm(x_BLD), reports

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
        definitions, stacks = self._layers()
        real_BL = offset_L < counts_B[:, None]
        rows = RowInfo(
            positions_BL=manager.constrain(positions_BL, TokenSharding, mode),
            valid_BL=manager.constrain(real_BL, TokenSharding, mode) if True in stacks else None,
        )

        def body(carry: Any, layer: Any, number: jax.Array, kind: Kind) -> Any:
            x_BLD, cache = carry
            view = LayerCache(cache=cache, layer=number, slots_BL=slots_BL, counts_B=counts_B)
            x_BLD, view, _ = nnx.merge(definitions[kind[1]], layer)(
                x_BLD, rows, layer_type=kind[0], mode=mode, cache=view
            )
            return (x_BLD, view.cache), None

        x_BLD = self.embed(tokens_BL, mode)
        (x_BLD, cache), _ = self._over_layers(body, (x_BLD, cache), stacks)
        return self.norm(x_BLD), cache.advance(counts_B)

    def _layers(self) -> tuple[dict[bool, Any], dict[bool, Any]]:
        """Definitions and stacked parameters of dense (False) and sparse (True) blocks."""
        modules = {sparse: getattr(self, name, None) for sparse, name in _STACKS.items()}
        parts = {sparse: nnx.split(m) for sparse, m in modules.items() if m is not None}
        return {s: part[0] for s, part in parts.items()}, {s: part[1] for s, part in parts.items()}

    def _over_layers(self, body: Callable[..., Any], carry: Any, stacks: dict[bool, Any]) -> Any:
        """body(carry, layer, number, kind) -> (carry, report), for every layer: scans over periods.

        Layers of one period of kinds have different programs and follow each other in the loop's
        body; what is left of the last period follows the loop. The dense layers that come first
        have a loop of their own. Returns the carry and all reports, stacked, None without any.
        """
        config, count = self.config, self.config.num_hidden_layers
        sparse = config.sparse_layers
        kinds = tuple(zip(config.layer_kinds, sparse, strict=True))
        lead = min(config.moe.first_k_dense_replace, count) if True in sparse else 0
        types = len(config.layer_types)
        step = config.moe.decoder_sparse_step if True in sparse else 1
        reports: list[Any] = []
        for first, last, period in ((0, lead, types), (lead, count, math.lcm(types, step))):
            split = first + (last - first) // period * period
            for start, stop, length in ((first, split, period), (split, last, last - split)):
                if start == stop:
                    continue
                # Where this segment lies in the stack of each kind of block.
                layers = {
                    s: _part(stack, sparse[:start].count(s), sparse[:stop].count(s))
                    for s, stack in stacks.items()
                }
                segment = kinds[start : start + length]
                carry, found = _over_periods(body, carry, layers, start, stop, segment)
                reports += [found] if found is not None else []
        if not reports:
            return carry, None
        return carry, jax.tree.map(lambda *y: jnp.concatenate(y), *reports)

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


def _part(stack: Any, start: int, stop: int) -> Any:
    return jax.tree.map(lambda y: y[start:stop], stack)


def _over_periods(
    body: Callable[..., Any],
    carry: Any,
    layers: dict[bool, Any],
    start: int,
    stop: int,
    kinds: tuple[Kind, ...],
) -> tuple[Any, Any]:
    """Layers start .. stop - 1, whose kinds repeat: one after another, or a scan over periods.

    layers: parameters of the dense and of the sparse ones among them, stacked.
    """
    period, counts = len(kinds), {s: sum(k[1] == s for k in kinds) for s in layers}

    def several(carry: Any, layers: Any, numbers: jax.Array) -> tuple[Any, Any]:
        found, taken = [], dict.fromkeys(layers, 0)
        for place, kind in enumerate(kinds):
            layer = jax.tree.map(lambda y, n=taken[kind[1]]: y[n], layers[kind[1]])
            taken[kind[1]] += 1
            carry, report = body(carry, layer, numbers[place], kind)
            found += [report] if report is not None else []
        return carry, jax.tree.map(lambda *y: jnp.stack(y), *found) if found else None

    numbers = jnp.arange(start, stop)
    if period == 1:
        scanned = (layers[kinds[0][1]], numbers)
        return lax.scan(lambda x, y: body(x, *y, kinds[0]), carry, scanned)
    if stop - start == period:
        return several(carry, layers, numbers)
    parts = (stop - start) // period
    split = {
        s: jax.tree.map(lambda y, n=counts[s]: y.reshape(parts, n, *y.shape[1:]), layer)
        for s, layer in layers.items()
        if counts[s]
    }
    carry, found = lax.scan(
        lambda x, y: several(x, *y), carry, (split, numbers.reshape(parts, period))
    )
    return carry, jax.tree.map(lambda y: y.reshape(-1, *y.shape[2:]), found)


def _stack(build: Callable[..., nnx.Module], count: int, *, rngs: nnx.Rngs) -> nnx.Module:
    """One module whose parameters have a leading dim of `count`, entry i built from key i."""
    key = rngs.params.key[...]
    definition = nnx.graphdef(nnx.eval_shape(lambda: build(rngs=nnx.Rngs(params=key))))
    keys = jax.vmap(lambda index: jax.random.fold_in(key, index))(jnp.arange(count))
    states = jax.vmap(lambda k: nnx.state(build(rngs=nnx.Rngs(params=k))))(keys)
    return nnx.merge(definition, states)
