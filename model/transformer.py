"""The decoder: embedding, a scan over blocks, final norm and head.

Parameters depend on ModelConfig and the seed only. Blocks are stacked on a leading layer dim and
scanned, so compile time does not grow with depth.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jax.sharding import PartitionSpec as P

from model.activation_scale import Reports
from model.attention.cached import Cache, LayerCache, write_index
from model.block import Block
from model.embedding import Embedding
from model.generation.cache import DenseCache
from model.head import Head
from model.layers import RMSNorm, TokenInfo
from model.lora import store_frozen
from model.loss_formula import CROSS_ENTROPY, LossSums, LossTerms
from model.multi_token import FurtherTokens, PredictionModule
from model.plan import ExecutionPlan
from model.remat import REMAT_POLICIES
from model.rotation import Rotation, layer_rotations
from model.segments import LayerKind, LayerType, Segment
from parallel.linear.linear import named_rngs
from parallel.linear.scheduling import scheduling_groups
from parallel.sharding.axes import MODE_PREFILL, RUNTIME_MODE_TYPES, TokenSharding
from parallel.sharding.ordering import after, in_order

_STACKS = {False: "layers", True: "sparse_layers"}


class Transformer(nnx.Module):
    """Decoder-only transformer from tokens to hidden states, and from those to logits.

    Build it inside `jax.jit` or `jax.eval_shape` under `jax.set_mesh(tp.mesh)`, so that parameters
    are created with their sharding.
    """

    def __init__(self, plan: ExecutionPlan, *, rngs: nnx.Rngs):
        config, tp = plan.model, plan.tp
        self.plan, self.config, self.tp = plan, config, tp
        self.embed = Embedding(config, tp, rngs=named_rngs(rngs, "embed"))
        for sparse, name in _STACKS.items():
            if count := config.sparse_layers.count(sparse):
                build = partial(Block, plan, sparse=sparse)
                setattr(self, name, _stack(build, count, rngs=named_rngs(rngs, name)))
        self.norm = RMSNorm(config, tp)
        self.head = Head(config, tp, rngs=named_rngs(rngs, "head"))
        if depth := len(config.mtp_loss_weights):
            self.mtp = _stack(partial(PredictionModule, plan), depth, rngs=named_rngs(rngs, "mtp"))
        store_frozen(self, plan.frozen_dtype)

    def __call__(
        self,
        tokens_BL: jax.Array,
        positions_BL: jax.Array,
        segment_ids_BL: jax.Array,
        *,
        index_L: jax.Array | None = None,
        dropout_key: jax.Array | None = None,
        dropless: bool = False,
        measure: bool = False,
    ) -> tuple[jax.Array, Reports]:
        """Return hidden states after the final norm, and reports of the layers that have them.

        Reports are stacked over those N layers: `N ...`.

        tokens_BL: token ids. The hidden states x_BLD have the residual layout. positions_BL:
        position of every token in its document; not read if the plan attends across documents.
        segment_ids_BL: document of every token; negative: padding, which no expert receives.
        index_L: index in the row of every token (`ExecutionPlan.row_order`); None: natural order.
        dropout_key: key of this batch; None: no dropout. dropless: give experts room for all tokens
        instead of their capacity, for losses that must not depend on drops. measure: report the
        scale of activations.
        """
        tokens_BL = self.tp.manager.constrain(tokens_BL, TokenSharding)
        info = self._token_info(positions_BL, segment_ids_BL, index_L, measure=measure)
        definitions, stacks = self._layers()

        def body(x_BLD: jax.Array, layer: Any, number: jax.Array, kind: LayerKind) -> Any:
            block, key = nnx.merge(definitions[kind.is_sparse], layer), dropout_key
            if key is not None:
                key = jax.random.fold_in(key, number)
            x_BLD, _, reports = block(
                x_BLD,
                dataclasses.replace(info, dropout_key=key),
                kind=kind,
                choice=self.plan.attention_of(kind.layer_type, tokens_BL.shape[1]),
                dropless=dropless,
            )
            return x_BLD, reports

        policy = REMAT_POLICIES[self.config.remat]
        if policy is not None:
            # Inside of scan, prevent_cse is not needed and would block fusion.
            body = jax.checkpoint(body, policy=policy, prevent_cse=False, static_argnums=3)
        with jax.named_scope("embed"):
            x_BLD = self.embed(tokens_BL)
        with jax.named_scope("layers"):
            x_BLD, reports = _scan_layers(body, x_BLD, stacks, self.config.segments)
        return self._final_norm(x_BLD), reports

    def extend(
        self,
        tokens_BL: jax.Array,
        counts_B: jax.Array,
        cache: Cache,
        *,
        mode: RUNTIME_MODE_TYPES,
    ) -> tuple[jax.Array, Cache]:
        """Append new tokens `B L` to the cache; return (hidden states x_BLD, the cache).

        counts_B: number of valid tokens of each row. They come first; the others are not stored and
        their hidden states are meaningless. mode: prefill (empty cache; new tokens attend to each
        other, L over sp), insert or autoregressive (they attend to the cache, L not split).
        """
        manager = self.tp.manager
        tokens_BL = manager.constrain(tokens_BL, TokenSharding, mode)
        slots_BL = cache.next_slots(counts_B, tokens_BL.shape[1])
        offset_L = jnp.arange(tokens_BL.shape[1], dtype=jnp.int32)
        positions_BL = cache.lengths_B[:, None] + offset_L
        if isinstance(cache, DenseCache):
            cache = write_index(cache, positions_BL, slots_BL, self.config, self.tp)
        definitions, stacks = self._layers()
        valid_BL = offset_L < counts_B[:, None]
        positions_BL = manager.constrain(positions_BL, TokenSharding, mode)
        info = TokenInfo(
            positions_BL=positions_BL,
            rotations=self._rotations(positions_BL),
            valid_BL=manager.constrain(valid_BL, TokenSharding, mode) if True in stacks else None,
        )

        choices = self.plan.generation_attention(
            mode,
            tokens_BL.shape[1],
            paged=mode != MODE_PREFILL and not isinstance(cache, DenseCache),
        )

        def body(carry: Any, layer: Any, number: jax.Array, kind: LayerKind) -> Any:
            x_BLD, cache = carry
            view = LayerCache(
                cache=cache,
                layer=number,
                slots_BL=slots_BL,
                counts_B=counts_B,
                config=self.config,
                tp=self.tp,
            )
            x_BLD, view, _ = nnx.merge(definitions[kind.is_sparse], layer)(
                x_BLD,
                info,
                kind=kind,
                choice=choices[kind.layer_type],
                mode=mode,
                cache=view,
            )
            return (x_BLD, view.cache), {}

        x_BLD = self.embed(tokens_BL, mode)
        (x_BLD, cache), _ = _scan_layers(body, (x_BLD, cache), stacks, self.config.segments)
        return self._final_norm(x_BLD), cache.advance(counts_B)

    def _token_info(
        self,
        positions_BL: jax.Array,
        segment_ids_BL: jax.Array,
        index_L: jax.Array | None,
        *,
        measure: bool,
    ) -> TokenInfo:
        """Return what attention and experts need in training; arguments as of `__call__`."""
        constrain, across = self.tp.manager.constrain, self.plan.attend_across_documents
        segment_ids_BL = constrain(segment_ids_BL, TokenSharding)
        if across:
            B, L = segment_ids_BL.shape
            order_L = jnp.arange(L, dtype=jnp.int32) if index_L is None else index_L
            positions_BL = jnp.broadcast_to(order_L, (B, L))
        positions_BL = constrain(positions_BL, TokenSharding)
        return TokenInfo(
            positions_BL=positions_BL,
            rotations=self._rotations(positions_BL),
            # Padding comes last in a row, so causal attention never reads it.
            segment_ids_BL=None if across else segment_ids_BL,
            index_L=index_L,
            valid_BL=segment_ids_BL >= 0 if True in self.config.sparse_layers else None,
            measured_BL=segment_ids_BL >= 0 if measure else None,
        )

    def _rotations(self, positions_BL: jax.Array) -> Mapping[LayerType, Rotation]:
        return layer_rotations(self.config, positions_BL, by_matmul=self.plan.tpu_forms)

    def _layers(self) -> tuple[dict[bool, Any], dict[bool, Any]]:
        """Return definitions and stacked parameters of dense (False) and sparse (True) blocks."""
        modules = {sparse: getattr(self, name, None) for sparse, name in _STACKS.items()}
        parts = {sparse: nnx.split(m) for sparse, m in modules.items() if m is not None}
        return {s: part[0] for s, part in parts.items()}, {s: part[1] for s, part in parts.items()}

    def further_losses(
        self,
        x_BLD: jax.Array,
        objective: jax.Array,
        further: Sequence[FurtherTokens],
        positions_BL: jax.Array,
        segment_ids_BL: jax.Array,
        *,
        index_L: jax.Array | None = None,
        dropout_key: jax.Array | None = None,
    ) -> tuple[jax.Array, list[jax.Array]]:
        """Return (objective plus the losses of the prediction modules, these losses one by one).

        The losses are cross-entropies in nats, summed over all tokens with the weights of their
        masks. Take gradients of the first result; the others are for metrics.

        x_BLD: hidden states of the model. objective: its own loss. further: tokens of each module,
        in the order of x_BLD. The other arguments are those of `__call__`.
        """
        info = self._token_info(positions_BL, segment_ids_BL, index_L, measure=False)
        config, mesh = self.config, self.tp.manager.mesh
        kind = LayerKind(config.layer_kinds[-1], is_sparse=False, has_rope=config.rope_pattern[-1])
        choice = self.plan.attention_of(kind.layer_type, x_BLD.shape[1])
        definitions, states = zip(*map(nnx.split, (self.embed, self.head, self.mtp)), strict=True)
        policy, losses = REMAT_POLICIES[config.remat], list[jax.Array]()

        def body(x_BLD: jax.Array, states: Any, tokens_BL: jax.Array, info: TokenInfo) -> jax.Array:
            embed, _, module = map(nnx.merge, definitions, states)
            with jax.named_scope("embed"):
                embedded_BLD = embed(tokens_BL)
            return module(x_BLD, embedded_BLD, info, kind=kind, choice=choice)

        # On simulated devices, recomputed collectives would not wait for the loop of the loss.
        recomputes = policy is not None and mesh.devices.flat[0].platform != "cpu"
        for place, own in enumerate(further):
            *shared, stack = states
            parameters = *shared, jax.tree.map(lambda y, n=place: y[n], stack)
            # On simulated devices one loss after the other, and the gradients in reverse.
            objective, (x_BLD, parameters) = in_order(objective, (x_BLD, parameters), mesh)
            fields = after(own, objective, mesh)
            if dropout_key is not None:
                key = jax.random.fold_in(dropout_key, config.num_hidden_layers + place)
                info = dataclasses.replace(info, dropout_key=key)
            with jax.named_scope("mtp"):
                # libtpu refuses a group in one computation with its copy: a recomputed one, or that
                # of another module, with which a checkpoint of the same function shares its trace.
                apply = jax.checkpoint(partial(body), policy=policy) if recomputes else body
                with scheduling_groups(enabled=False):
                    x_BLD = apply(x_BLD, parameters, fields.tokens, info)
                embed, head, module = map(nnx.merge, definitions, parameters)
                normed_BLD, w = in_order(module.norm(x_BLD), _head_kernel(embed, head), mesh)
                with jax.named_scope("head"):
                    sums = head(normed_BLD, fields.targets, fields.mask, w=w)
            objective += sums.objective
            losses.append(sums.cross_entropy)
        return objective, losses

    def loss(
        self,
        x_BLD: jax.Array,
        targets_BL: jax.Array,
        mask_BL: jax.Array,
        terms: LossTerms = CROSS_ENTROPY,
    ) -> LossSums:
        """Return the masked losses of hidden states, summed over all tokens, in nats."""
        x_BLD, w = self._head_inputs(x_BLD)
        with jax.named_scope("head"):
            return self.head(x_BLD, targets_BL, mask_BL, w=w, terms=terms)

    def token_losses(self, x_BLD: jax.Array, targets_BL: jax.Array) -> jax.Array:
        """Return the cross-entropy of hidden states at every token `B L`, in nats."""
        x_BLD, w = self._head_inputs(x_BLD)
        with jax.named_scope("head"):
            return self.head.token_losses(x_BLD, targets_BL, w=w)

    def most_likely(self, x_BLD: jax.Array) -> jax.Array:
        """Return the most likely token after each of the hidden states, `B L`."""
        x_BLD, w = self._head_inputs(x_BLD)
        return self.head.most_likely(x_BLD, w=w)

    def logits(self, x_BLD: jax.Array) -> jax.Array:
        """Return the logits `B L V` of hidden states, V over tp; see `Head.logits`."""
        x_BLD, w = self._head_inputs(x_BLD)
        return self.head.logits(x_BLD, w=w)

    def _final_norm(self, x_BLD: jax.Array) -> jax.Array:
        """Return the normalised outputs of the last layer."""
        return self.norm(*self._ordered(x_BLD, self.norm.scale[...]))

    def _head_inputs(self, x_BLD: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Return (hidden states, kernel of the head (D, V)), for use by the head."""
        return self._ordered(x_BLD, _head_kernel(self.embed, self.head))

    def _ordered(self, x_BLD: jax.Array, w: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Return arrays as they are; on simulated devices, what uses the parameter w waits for x.

        A frozen parameter has no gradient, for which the backward pass would otherwise wait.
        """
        x_BLD, w = in_order(x_BLD, w, self.tp.manager.mesh)
        return x_BLD, lax.stop_gradient(w) if self.plan.lora.rank else w


def _head_kernel(embed: Embedding, head: Head) -> jax.Array:
    """Return the kernel (D, V) of a head, which is the table of embeddings if it has none."""
    return embed.table[...].T if head.kernel is None else head.kernel[...]


def _scan_layers(
    body: Callable[..., Any], carry: Any, stacks: dict[bool, Any], segments: Sequence[Segment]
) -> tuple[Any, Any]:
    """Apply body(carry, layer, number, kind) -> (carry, reports) to every layer in order.

    stacks: the parameters of dense (False) and sparse (True) layers, stacked on dim 0. Each segment
    is one scan over the repeats of its pattern, so its pattern is compiled once. Returns the last
    carry, and every report by its name, stacked over the layers that have it.
    """
    reports: dict[str, list[Any]] = {}
    first, used = 0, dict.fromkeys(stacks, 0)
    for pattern, repeats in segments:
        numbers = jnp.arange(first, first + repeats * len(pattern))
        first += repeats * len(pattern)
        layers = {}
        for is_sparse, stack in stacks.items():
            per_repeat = sum(kind.is_sparse == is_sparse for kind in pattern)
            start, used[is_sparse] = used[is_sparse], used[is_sparse] + repeats * per_repeat
            if per_repeat:
                part = slice(start, used[is_sparse])
                layers[is_sparse] = jax.tree.map(lambda y, part=part: y[part], stack)
        if len(pattern) == 1:  # no dimension for the position in the pattern
            kind = pattern[0]
            single = partial(_apply_layer, body, kind)
            carry, found = lax.scan(single, carry, (layers[kind.is_sparse], numbers))
            _add(reports, found)
            continue
        layers = jax.tree.map(lambda y, n=repeats: y.reshape(n, -1, *y.shape[1:]), layers)
        step = partial(_apply_pattern, body, pattern)
        inputs = (layers, numbers.reshape(repeats, len(pattern)))
        if repeats == 1:
            carry, found = step(carry, jax.tree.map(lambda y: y[0], inputs))
        else:
            carry, found = lax.scan(step, carry, inputs)
            found = jax.tree.map(_merge_leading, found)
        _add(reports, found)
    return carry, _joined(jnp.concatenate, reports)


def _merge_leading(y: jax.Array) -> jax.Array:
    """Merge the first two dims, which are not split over devices."""
    spec = jax.typeof(y).sharding.spec
    return y.reshape(-1, *y.shape[2:], out_sharding=P(None, *spec[2:]))


def _add(reports: dict[str, list[Any]], found: Reports) -> None:
    for name, report in found.items():
        reports.setdefault(name, []).append(report)


def _joined(join: Callable[..., jax.Array], reports: dict[str, list[Any]]) -> Reports:
    """Return the reports of one name as one tree, whose arrays are joined."""
    return {name: jax.tree.map(lambda *y: join(y), *parts) for name, parts in reports.items()}


def _apply_layer(
    body: Callable[..., Any], kind: LayerKind, carry: Any, inputs: tuple[Any, Any]
) -> tuple[Any, Any]:
    """Apply one layer of a pattern of one."""
    return body(carry, *inputs, kind)


def _apply_pattern(
    body: Callable[..., Any], pattern: Sequence[LayerKind], carry: Any, inputs: tuple[Any, Any]
) -> tuple[Any, Any]:
    """Apply the layers of one repeat of a pattern, one after another."""
    layers, numbers = inputs
    reports, used = dict[str, list[Any]](), dict.fromkeys(layers, 0)
    for place, kind in enumerate(pattern):
        index = used[kind.is_sparse]
        used[kind.is_sparse] += 1
        layer = jax.tree.map(lambda y, n=index: y[n], layers[kind.is_sparse])
        carry, found = body(carry, layer, numbers[place], kind)
        _add(reports, found)
    return carry, _joined(jnp.stack, reports)


def _stack(build: Callable[..., nnx.Module], count: int, *, rngs: nnx.Rngs) -> nnx.Module:
    """Build one module whose parameters have a leading dim of `count`; entry i uses key i."""
    key = rngs.params.key[...]
    definition = nnx.graphdef(nnx.eval_shape(lambda: build(rngs=nnx.Rngs(params=key))))
    keys = jax.vmap(lambda index: jax.random.fold_in(key, index))(jnp.arange(count))
    states = jax.vmap(lambda k: nnx.state(build(rngs=nnx.Rngs(params=k))))(keys)
    return nnx.merge(definition, states)
