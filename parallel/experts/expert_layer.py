"""Expert layer of one device: dispatch tokens to their experts, apply these, combine the results.

`apply_experts` runs inside `jax.shard_map`. The router has already chosen the experts; the methods
of exchange differ in how tokens reach experts on other devices. Expert capacity bounds the buffers,
and assignments without room are dropped and counted.

Letters: T tokens of this device, K assignments per token, R rows, E experts, e experts of this
device, n devices that share the experts, C expert capacity, M = e C rows of a block, D embed.
"""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from parallel.experts.exchange import PermuteAllToAll, RaggedAllToAll, all_to_all, num_devices
from parallel.experts.expert_mlp import ExpertKernels, ExpertLayerSpec, expert_mlp
from parallel.experts.permutation import (
    Permutation,
    permute,
    permute_blocks,
    permute_weights,
    sort_by_group,
    unpermute,
)
from parallel.experts.quantized_rows import send_quantized
from parallel.experts.row_layout import RowGroups, RowLayout
from parallel.linear.ring import all_gather, pcast_varying, reduce_scatter
from parallel.sharding.specs import FEATURES, ROWS


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class RoutedTokens:
    """Tokens of this device and the experts that the router assigned to them.

    x_TD: `T/tp D`, `T D/tp` or `T D`, by `spec.split_dim`. experts_TK: int32, distinct within a
    token; -1: no expert. max_assignments: static bound on the assignments of all tokens; None: T K.
    """

    x_TD: jax.Array
    experts_TK: jax.Array
    weights_TK: jax.Array
    max_assignments: int | None = field(default=None, metadata={"static": True})

    @property
    def assignment_bound(self) -> int:
        """Most assignments of these tokens."""
        size = self.experts_TK.size
        return size if self.max_assignments is None else min(size, self.max_assignments)


def apply_experts(
    tokens: RoutedTokens, kernels: ExpertKernels, spec: ExpertLayerSpec
) -> tuple[jax.Array, jax.Array]:
    """Return sum over k of weight * expert(token), laid out as the tokens, and the dropped count.

    The count is float32: assignments of this device without room.
    Communication: over `spec.axes`, K rows per token each way (`alltoall`: its whole buffers); over
    tp, what a dense MLP sends for K rows per token.
    """
    # A custom gradient must have the type of its argument, so all arguments vary over all axes.
    axes = jax.typeof(tokens.x_TD).manual_axis_type.varying | {spec.axis_name, *spec.axes}
    varying = partial(pcast_varying, axes=tuple(sorted(axes)))
    tokens, kernels = jax.tree.map(varying, (tokens, kernels))
    run = {"dense": _dense, "alltoall": _all_to_all, "ragged": _ragged}[spec.exchange]
    if not spec.axes and spec.exchange != "dense":
        run = _local
    if run in (_dense, _local):  # the others round what they send

        def stay(_: None, x: jax.Array) -> jax.Array:
            return x

        tokens = replace(tokens, x_TD=_dispatch(tokens.x_TD, None, stay, stay, spec))
    y_TD, num_kept = run(tokens, kernels, spec)
    if spec.split_dim is None:
        y_TD = lax.psum(y_TD, spec.axis_name)
    dropped = jnp.sum(tokens.experts_TK >= 0) - num_kept
    return y_TD, dropped.astype(jnp.float32)


def _dispatch(
    x_TD: jax.Array,
    route: Any,
    send: Callable[[Any, jax.Array], Any],
    send_back: Callable[[Any, Any], jax.Array],
    spec: ExpertLayerSpec,
) -> Any:
    """Return `send(route, x)`, in the bytes of `spec.row_dtype`; send_back: its transpose."""
    with jax.named_scope("dispatch"):
        if spec.row_dtype is None:
            return send(route, x_TD)
        axis_name = spec.axis_name if spec.split_dim == FEATURES else None
        return send_quantized(x_TD, route, send, send_back, spec.row_dtype, axis_name)


def _local(
    tokens: RoutedTokens, kernels: ExpertKernels, spec: ExpertLayerSpec
) -> tuple[jax.Array, jax.Array]:
    """Apply experts that are all on this device."""
    capacity = spec.capacity(tokens.x_TD.shape[0])
    if spec.is_uniform:
        layout = RowLayout("uniform", 1, spec.num_experts * capacity, spec.num_experts)
    else:
        layout = spec.layout(tokens.assignment_bound, spec.num_experts)
    permutation, groups = sort_by_group(tokens.experts_TK.reshape(-1), layout, capacity)
    weights_R = permute_weights(tokens.weights_TK.reshape(-1), permutation)
    y_RD = expert_mlp(permute(tokens.x_TD, permutation), weights_R, groups, kernels, spec)
    return unpermute([y_RD], permutation, len(tokens.x_TD)), jnp.sum(groups.sizes_E)


def _all_to_all(
    tokens: RoutedTokens, kernels: ExpertKernels, spec: ExpertLayerSpec
) -> tuple[jax.Array, jax.Array]:
    """Send a buffer of C rows for every expert to its owner."""
    n, E, (T, D) = num_devices(spec.axes), spec.num_experts, tokens.x_TD.shape
    e, C, permutes = E // n, spec.capacity(T), PermuteAllToAll(spec.axes, spec.distances)
    chunked = spec.chunks > 1
    # Position of every owner among the blocks that are sent.
    position_n = jnp.argsort(permutes.targets()) if chunked else jnp.arange(n)
    experts_TK = tokens.experts_TK
    groups_TK = jnp.where(experts_TK >= 0, position_n[experts_TK // e] * e + experts_TK % e, -1)
    uniform = RowLayout("uniform", 1, E * C, E)
    permutation, groups = sort_by_group(groups_TK.reshape(-1), uniform)
    weights_nM = permute_weights(tokens.weights_TK.reshape(-1), permutation).reshape(n, e * C)
    sizes_ne = groups.sizes_E.reshape(n, e)
    if chunked:
        sizes_ne = all_to_all(sizes_ne[position_n], spec.axes)[permutes.sources()]
        x_TD, kernels = _gradients_together(tokens.x_TD, kernels)
        tokens = replace(tokens, x_TD=x_TD)
    mlp = partial(_block_mlp, bound=tokens.assignment_bound, kernels=kernels, spec=spec)
    if chunked:

        def send(route: Permutation, x_TD: jax.Array) -> list[jax.Array]:
            return [permutes.send(rows, i) for i, rows in enumerate(permute_blocks(x_TD, route, n))]

        def send_back(route: Permutation, blocks: list[jax.Array]) -> jax.Array:
            blocks = [permutes.send(rows, i, back=True) for i, rows in enumerate(blocks)]
            return unpermute(blocks, route, T)

        received, results = _dispatch(tokens.x_TD, permutation, send, send_back, spec), []
        for chunk in permutes.chunks(spec.chunks):
            with jax.named_scope("dispatch"):
                weights = jnp.stack([permutes.send(weights_nM[i], i) for i in chunk])
            done = mlp([received[i] for i in chunk], weights, sizes_ne[chunk[0] : chunk[-1] + 1])
            with jax.named_scope("combine"):
                results += [
                    permutes.send(y, i, back=True) for i, y in zip(chunk, done, strict=True)
                ]
    else:
        sizes_ne, weights_nM = (all_to_all(x, spec.axes) for x in (sizes_ne, weights_nM))

        def exchange(rows: jax.Array) -> jax.Array:
            return all_to_all(rows.reshape(n, -1, *rows.shape[1:]), spec.axes).reshape(rows.shape)

        received = _dispatch(
            tokens.x_TD,
            permutation,
            lambda route, x_TD: exchange(permute(x_TD, route)),
            lambda route, rows: unpermute([exchange(rows)], route, T),
            spec,
        )
        y_nMD = jnp.stack(mlp(jnp.split(received, n), weights_nM, sizes_ne))
        with jax.named_scope("combine"):
            results = [exchange(y_nMD.reshape(-1, D))]
    return unpermute(results, permutation, T), jnp.sum(groups.sizes_E)


@jax.custom_vjp
def _gradients_together(x_TD: jax.Array, kernels: ExpertKernels) -> tuple[jax.Array, ExpertKernels]:
    """Return the arguments; in the backward pass their gradients wait for one another.

    The gradient of x travels last. libtpu would compute the gradients of kernels long after it,
    where they hide no transfer.
    """
    return x_TD, kernels


def _together_forward(x_TD: jax.Array, kernels: ExpertKernels) -> tuple[Any, None]:
    return (x_TD, kernels), None


def _together_backward(_: None, gradients: Any) -> Any:
    return lax.optimization_barrier(gradients)


_gradients_together.defvjp(_together_forward, _together_backward)


def _block_mlp(
    blocks: list[jax.Array],
    weights_gM: jax.Array,
    sizes_ge: jax.Array,
    *,
    bound: int,
    kernels: ExpertKernels,
    spec: ExpertLayerSpec,
) -> list[jax.Array]:
    """Apply the MLP to g blocks `M D` of one source device each, with at most `bound` used rows.

    sizes_ge: used rows by source and expert.
    """
    (M, D), (g, e) = blocks[0].shape, sizes_ge.shape
    C = M // e
    # Sorted by expert in the same copy that concatenates the blocks.
    rows_eMD = jnp.concatenate([block.reshape(e, C, D) for block in blocks], axis=1)
    rows_RD = checkpoint_name(rows_eMD.reshape(g * M, D), "expert_rows")
    weights_R = weights_gM.reshape(g, e, C).swapaxes(0, 1).reshape(-1)
    weights_R = checkpoint_name(weights_R, "expert_rows")
    if spec.is_uniform:
        full = RowGroups(RowLayout("uniform", 1, g * M, e), jnp.full_like(sizes_ge[0], g * C))
        y = expert_mlp(rows_RD, weights_R, full, kernels, spec)
    else:
        used_egC = jnp.arange(C) < sizes_ge.T[..., None]
        group = jnp.where(used_egC, jnp.arange(e)[:, None, None], -1)
        layout = spec.layout(g * min(bound, M), e)
        y = _sorted_mlp(rows_RD, weights_R, group.reshape(-1), layout, kernels, spec)
    return [part.reshape(M, D) for part in jnp.split(y.reshape(e, g * C, D), g, axis=1)]


def _ragged(
    tokens: RoutedTokens, kernels: ExpertKernels, spec: ExpertLayerSpec
) -> tuple[jax.Array, jax.Array]:
    """Send exactly the assigned rows to their owners, which sort them by expert."""
    bound, T = tokens.assignment_bound, len(tokens.x_TD)
    packed = RowLayout("packed", 1, bound, spec.num_experts)
    permutation, groups = sort_by_group(tokens.experts_TK.reshape(-1), packed)
    weights_A = permute_weights(tokens.weights_TK.reshape(-1), permutation)
    rows = spec.receive_rows(T, bound)
    exchange = RaggedAllToAll.create(groups.sizes_E, spec.axes, rows=rows, native=spec.native)
    received = _dispatch(
        tokens.x_TD,
        (exchange, permutation),
        lambda route, x_TD: route[0].send(permute(x_TD, route[1])),
        lambda route, rows: unpermute([route[0].send_back(rows, bound)], route[1], T),
        spec,
    )
    received = checkpoint_name(received, "expert_rows")
    with jax.named_scope("dispatch"):
        weights_R = checkpoint_name(exchange.send(weights_A), "expert_rows")
    layout = spec.layout(rows, spec.num_experts // num_devices(spec.axes))
    y_RD = _sorted_mlp(received, weights_R, exchange.groups_R(), layout, kernels, spec)
    with jax.named_scope("combine"):
        y_RD = exchange.send_back(y_RD, bound)
    num_kept = jnp.sum(exchange.kept_nnE[lax.axis_index(spec.axes)])
    return unpermute([y_RD], permutation, T), num_kept


def _sorted_mlp(
    rows_RD: jax.Array,
    weights_R: jax.Array,
    groups_R: jax.Array,
    layout: RowLayout,
    kernels: ExpertKernels,
    spec: ExpertLayerSpec,
) -> jax.Array:
    """Sort rows by group into `layout`, apply the MLP, and return the results in the old order."""
    permutation, groups = sort_by_group(groups_R, layout)
    weights_r = permute_weights(weights_R, permutation)
    y = expert_mlp(permute(rows_RD, permutation), weights_r, groups, kernels, spec)
    return permute(y, permutation.inverse)


def _dense(
    tokens: RoutedTokens, kernels: ExpertKernels, spec: ExpertLayerSpec
) -> tuple[jax.Array, jax.Array]:
    """Apply every expert to every token of the devices that share them; weights mask the result."""
    axis, hidden = spec.axis_name, spec.split_dim == FEATURES
    over = (*spec.axes, axis) if spec.split_dim == ROWS else spec.axes
    arrays = tokens.x_TD, tokens.experts_TK, tokens.weights_TK
    x, experts, weights = (all_gather(y, over, 0) for y in arrays)
    if hidden:
        x = all_gather(x, axis, -1)
    kernels = kernels.merged()
    e = kernels.row.shape[0]
    first = lax.axis_index(spec.axes) * e if spec.axes else 0
    own = experts[..., None] == first + jnp.arange(e)
    weights_Te = jnp.sum(jnp.where(own, weights[..., None], 0), axis=1)
    products = [jnp.einsum("td,edf->etf", x, w) for w in kernels.column]
    if kernels.column_biases:
        products = [h + b[:, None] for h, b in zip(products, kernels.column_biases, strict=True)]
    h = kernels.activation(*products)
    y = jnp.einsum("etf,efd->etd", h, kernels.row, preferred_element_type=jnp.float32)
    for bias in kernels.row_biases:  # added once, before the sum over tp
        y += jnp.where(lax.axis_index(axis) == 0, bias, 0)[:, None]
    y = jnp.sum(y * weights_Te.T[..., None], axis=0)
    if hidden:
        y = reduce_scatter(y, axis, -1)
    if num_devices(over) > 1:
        y = lax.psum_scatter(y, over, scatter_dimension=0, tiled=True)
    return y.astype(tokens.x_TD.dtype), jnp.sum(tokens.experts_TK >= 0)
