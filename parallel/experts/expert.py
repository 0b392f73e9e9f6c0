"""Experts over the ep axis: their kernels, the way of tokens to them and back, and their products.

`ExpertColumnParallelLinear` and `ExpertRowParallelLinear` own the kernels of all experts; rules
say how they lie. `experts_of_tokens` runs inside `jax.shard_map`: it sends every token to its
experts (`exchange.py`), multiplies in groups (`grouped_matmul.py`), around the
tp ring where rows or features lie on tp, and brings the weighted sum back. It refuses to choose
experts. Letters: T tokens of this device, K slots per token, R rows, E experts, e experts of this
device, n devices that share the experts, C rows per expert and pair of devices, D embed,
F intermediate.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from parallel.experts.exchange import (
    ExchangeMethod,
    Hops,
    Places,
    RaggedPlan,
    axis_count,
    exchange_blocks,
    from_places,
    place,
    to_places,
)
from parallel.experts.grouped_matmul import RowLayout, find_form, grouped_matmul
from parallel.linear.collective_matmul import Overlap
from parallel.linear.config import TensorParallelConfig
from parallel.linear.linear import Initializer, named_rngs
from parallel.linear.ring import Ring, all_gather, pcast_varying, reduce_scatter
from parallel.sharding.axes import (
    ExpertColumnWise,
    ExpertColumnWiseAlt,
    ExpertRowWise,
    ExpertRowWiseAlt,
    UnifiedExpertColumnWise,
    UnifiedExpertRowWise,
)
from parallel.sharding.specs import FEATURES, ROWS, SplitDim

ExpertRule = Literal["split", "alt", "unified"]
"""Where expert kernels lie. split: experts on ep, embed on fsdp; alt: embed on sp too; unified:
experts on fsdp, sp and ep together, each whole but for tp: nothing is gathered."""

EXPERT_AXES: Mapping[ExpertRule, tuple[Any, Any]] = {
    "split": (ExpertColumnWise, ExpertRowWise),
    "alt": (ExpertColumnWiseAlt, ExpertRowWiseAlt),
    "unified": (UnifiedExpertColumnWise, UnifiedExpertRowWise),
}

SAVED_NAMES = ("expert_rows", "expert_product", "expert_results")
"""`checkpoint_name`s of what a backward pass had better not compute, or fetch, again."""

Elementwise = Callable[..., jax.Array]


class _ExpertLinear(nnx.Module):
    """One kernel `E in out` per output; it owns them, `experts_of_tokens` multiplies.

    out_features: as in `ParallelLinear`, a width or a mapping from name to width.
    """

    column: bool

    def __init__(
        self,
        num_experts: int,
        in_features: int,
        out_features: int | Mapping[str, int],
        *,
        rule: ExpertRule = "split",
        param_dtype: jax.typing.DTypeLike = jnp.float32,
        kernel_init: Initializer,
        parallel_config: TensorParallelConfig,
        rngs: nnx.Rngs,
    ):
        axes = EXPERT_AXES[rule][0 if self.column else 1]
        widths = {"": out_features} if isinstance(out_features, int) else dict(out_features)
        self.axes = axes
        self.output_names = tuple(widths)
        kernels = {}
        for name, width in widths.items():
            shape = (num_experts, in_features, width)
            spec = parallel_config.manager.resolve(axes, shape=shape, name="expert kernel")
            stream = named_rngs(rngs, name) if name else rngs
            kernel = kernel_init(stream.params(), shape, jnp.dtype(param_dtype), out_sharding=spec)
            kernels[name] = nnx.Param(kernel, semantic_axes=axes)
        self.kernel = kernels[""] if isinstance(out_features, int) else nnx.Dict(kernels)

    def kernels(self) -> list[jax.Array]:
        """One `E in out` per output, in their order."""
        if isinstance(self.kernel, nnx.Param):
            return [self.kernel[...]]
        return [self.kernel[name][...] for name in self.output_names]


class ExpertColumnParallelLinear(_ExpertLinear):
    """Expert kernels (E, D, F) with F on tp, `ExpertColumnWise` or another rule's."""

    column = True


class ExpertRowParallelLinear(_ExpertLinear):
    """Expert kernels (E, F, D) with F on tp, `ExpertRowWise` or another rule's."""

    column = False


@dataclass(frozen=True, kw_only=True)
class ExpertPlan:
    """How tokens meet experts on one mesh; static.

    axes: mesh axes that share the experts, outermost first. form: of the grouped matmul.
    top_k: experts of a token, for the capacity. capacity_factor: rows of a buffer over those of an
    even load; None: room for all, nothing is ever dropped. chunks: parts of `alltoall` that
    travel hop by hop under the products of others; 1: one collective. items: most assignments of
    all tokens of this device, None: T K. native: `ragged_all_to_all` runs here. block: rows of a
    block of the `blocked` form.
    """

    num_experts: int
    axes: tuple[str, ...]
    axis_name: str
    split_dim: SplitDim | None
    exchange: ExchangeMethod
    form: str
    overlap: Overlap
    top_k: int
    capacity_factor: float | None = None
    chunks: int = 1
    items: int | None = None
    native: bool = False
    block: int = 128

    def capacity(self, tokens: int) -> int:
        """Rows for one expert from one device in `alltoall`, from so many tokens."""
        if self.capacity_factor is None:
            return tokens
        room = self.capacity_factor * tokens * self.top_k / self.num_experts
        return max(1, math.ceil(min(room, tokens)))

    def received(self, tokens: int, items: int) -> int:
        """Rows of a receiving buffer in `ragged`, for so many tokens and items per device."""
        n = axis_count(self.axes)
        most = n * min(items, tokens * (self.num_experts // n))
        if self.capacity_factor is None:
            return most
        return max(1, math.ceil(min(self.capacity_factor * tokens * self.top_k, most)))

    def layout(self, bound: int, groups: int) -> RowLayout:
        """Of rows that meet the experts, at most `bound`, as the grouped matmul wants them."""
        if find_form(self.form).layouts[0] == "blocks":
            return RowLayout.blocks(bound, groups, self.block)
        return RowLayout("packed", 1, bound, groups)


@dataclass(frozen=True)
class _Kernels:
    """Of the experts of this device: `e D F/tp` each, and `e F/tp D`."""

    column: tuple[jax.Array, ...]
    row: jax.Array
    function: Elementwise


def experts_of_tokens(
    x_TD: jax.Array,
    experts_TK: jax.Array,
    weights_TK: jax.Array,
    column: Sequence[jax.Array],
    row: jax.Array,
    *,
    function: Elementwise,
    plan: ExpertPlan,
) -> tuple[jax.Array, jax.Array]:
    """sum over k of weight * expert(token), and how many assignments were dropped (float32).

    x_TD: rows of this device, `T/tp D`, `T D/tp` or `T D` as `plan.split_dim` says; the sum lies
    alike. experts_TK: distinct within a token; -1: no expert. column, row: `e D F/tp`,
    `e F/tp D`. function: from the products with `column` to the input of `row`, elementwise.
    Communication: over `plan.axes` K rows per token each way (`alltoall`: its buffers), over tp
    what the linears of a dense MLP send, for K rows per token.
    """
    # What a custom derivative returns must have the type of its input: all vary over all axes.
    axes = jax.typeof(x_TD).manual_axis_type.varying | {plan.axis_name, *plan.axes}
    everywhere = partial(pcast_varying, axes=tuple(sorted(axes)))
    x_TD, experts_TK, weights_TK, row = map(everywhere, (x_TD, experts_TK, weights_TK, row))
    kernels = _Kernels(tuple(map(everywhere, column)), row, function)
    run = {"dense": _dense, "alltoall": _all_to_all, "ragged": _ragged}[plan.exchange]
    if not plan.axes and plan.exchange != "dense":
        run = _local
    y_TD, placed = run(x_TD, experts_TK, weights_TK, kernels, plan)
    if plan.split_dim is None:
        y_TD = lax.psum(y_TD, plan.axis_name)
    dropped = jnp.sum(experts_TK >= 0) - placed
    return y_TD, dropped.astype(jnp.float32)


def _bound(experts_TK: jax.Array, plan: ExpertPlan) -> int:
    """Most assignments of these tokens."""
    items = experts_TK.size
    return items if plan.items is None else min(items, plan.items)


def _combined(y_RD: jax.Array, weights_TK: jax.Array, places: Places) -> jax.Array:
    """The weighted sum per token; the derivative by the weights needs the rows once more."""
    return from_places(checkpoint_name(y_RD, "expert_results"), weights_TK, places)


def _local(
    x_TD: jax.Array,
    experts_TK: jax.Array,
    weights_TK: jax.Array,
    kernels: _Kernels,
    plan: ExpertPlan,
) -> tuple[jax.Array, jax.Array]:
    """All experts are here: sorted, multiplied, summed."""
    capacity = plan.capacity(x_TD.shape[0])
    if plan.form == "padded":
        layout = RowLayout("uniform", 1, plan.num_experts * capacity, plan.num_experts)
    else:
        layout = plan.layout(_bound(experts_TK, plan), plan.num_experts)
    places = place(experts_TK.reshape(-1), layout, capacity)
    y_RD = _mlp(to_places(x_TD, places), places.sizes_E, layout, kernels, plan)
    return _combined(y_RD, weights_TK, places), jnp.sum(places.sizes_E)


def _all_to_all(
    x_TD: jax.Array,
    experts_TK: jax.Array,
    weights_TK: jax.Array,
    kernels: _Kernels,
    plan: ExpertPlan,
) -> tuple[jax.Array, jax.Array]:
    """Buffers of C rows for every expert to their owners; what lies in them is put together."""
    n, E, D = axis_count(plan.axes), plan.num_experts, x_TD.shape[1]
    e, C, hops = E // n, plan.capacity(x_TD.shape[0]), Hops(plan.axes)
    piecewise = plan.chunks > 1
    # Position of every owner among the blocks that are sent.
    position_n = jnp.argsort(hops.targets()) if piecewise else jnp.arange(n)
    groups_TK = jnp.where(experts_TK >= 0, position_n[experts_TK // e] * e + experts_TK % e, -1)
    places = place(groups_TK.reshape(-1), RowLayout("uniform", 1, E * C, E))
    blocks_nMD = to_places(x_TD, places).reshape(n, e * C, D)
    sizes_ne = places.sizes_E.reshape(n, e)
    bound = _bound(experts_TK, plan)
    if piecewise:
        sizes_ne = exchange_blocks(sizes_ne[position_n], plan.axes)[hops.sources()]
        y_nMD = _hop_by_hop(blocks_nMD, sizes_ne, bound, hops, kernels, plan)
    else:
        sizes_ne = exchange_blocks(sizes_ne, plan.axes)
        with jax.named_scope("dispatch"):
            here = jnp.split(exchange_blocks(blocks_nMD, plan.axes), n)
        done = jnp.concatenate(_block_mlp(here, sizes_ne, bound, kernels, plan))
        with jax.named_scope("combine"):
            y_nMD = exchange_blocks(done, plan.axes)
    return _combined(y_nMD.reshape(-1, D), weights_TK, places), jnp.sum(places.sizes_E)


def _hop_by_hop(
    blocks_nMD: jax.Array,
    sizes_ne: jax.Array,
    bound: int,
    hops: Hops,
    kernels: _Kernels,
    plan: ExpertPlan,
) -> jax.Array:
    """Blocks by position -> what the experts of their targets make of them."""
    # Split, not indexed: the derivative of an index is a sum of arrays as large as all blocks.
    sent, results = jnp.split(blocks_nMD, len(blocks_nMD)), []
    for group in hops.groups(plan.chunks):
        with jax.named_scope("dispatch"):
            here = [hops.send(sent[i], i) for i in group]
        sizes = sizes_ne[group[0] : group[-1] + 1]
        done = _block_mlp(here, sizes, bound, kernels, plan)
        with jax.named_scope("combine"):
            results += [hops.send(y, i, back=True) for i, y in zip(group, done, strict=True)]
    return jnp.concatenate(results)


def _block_mlp(
    blocks: list[jax.Array], sizes_ge: jax.Array, bound: int, kernels: _Kernels, plan: ExpertPlan
) -> list[jax.Array]:
    """The MLP of g blocks `1 e*C D`, of one device each; bound: real rows of one, at most."""
    (_, M, D), (g, e) = blocks[0].shape, sizes_ge.shape
    C = M // e
    # Expert by expert: put together and brought into the order of groups in one copy.
    rows_eMD = jnp.concatenate([block.reshape(e, C, D) for block in blocks], axis=1)
    rows_RD = checkpoint_name(rows_eMD.reshape(g * M, D), "expert_rows")
    if plan.form == "padded":
        full_e = jnp.full_like(sizes_ge[0], g * C)
        y = _mlp(rows_RD, full_e, RowLayout("uniform", 1, g * M, e), kernels, plan)
    else:
        layout = plan.layout(g * min(bound, M), e)
        used_egC = jnp.arange(C) < sizes_ge.T[..., None]
        group = jnp.where(used_egC, jnp.arange(e)[:, None, None], -1)
        y = _regrouped(rows_RD, place(group.reshape(-1), layout), layout, kernels, plan)
    return [part.reshape(1, M, D) for part in jnp.split(y.reshape(e, g * C, D), g, axis=1)]


def _ragged(
    x_TD: jax.Array,
    experts_TK: jax.Array,
    weights_TK: jax.Array,
    kernels: _Kernels,
    plan: ExpertPlan,
) -> tuple[jax.Array, jax.Array]:
    """As many rows as there are to every owner, which sorts what came from all by expert."""
    items = _bound(experts_TK, plan)
    places = place(experts_TK.reshape(-1), RowLayout("packed", 1, items, plan.num_experts))
    room = plan.received(x_TD.shape[0], items)
    routes = RaggedPlan.of(places.sizes_E, plan.axes, room)
    with jax.named_scope("dispatch"):
        here = routes.send(to_places(x_TD, places), native=plan.native)
        here = checkpoint_name(here, "expert_rows")
    layout = plan.layout(room, plan.num_experts // axis_count(plan.axes))
    y_RD = _regrouped(here, place(routes.groups_R(), layout), layout, kernels, plan)
    with jax.named_scope("combine"):
        y_RD = routes.send_back(y_RD, items, native=plan.native)
    placed = jnp.sum(routes.kept_nnE[lax.axis_index(plan.axes)])
    return _combined(y_RD, weights_TK, places), placed


def _regrouped(
    rows_RD: jax.Array, places: Places, layout: RowLayout, kernels: _Kernels, plan: ExpertPlan
) -> jax.Array:
    """The MLP of rows that lie in no order of groups; results where the rows lay."""
    y = _mlp(to_places(rows_RD, places), places.sizes_E, layout, kernels, plan)
    return to_places(y, Places(places.item_R, places.place_A, places.sizes_E))


def _dense(
    x_TD: jax.Array,
    experts_TK: jax.Array,
    weights_TK: jax.Array,
    kernels: _Kernels,
    plan: ExpertPlan,
) -> tuple[jax.Array, jax.Array]:
    """Every expert on every token of the devices that share them, masked by the weights."""
    axis, hidden = plan.axis_name, plan.split_dim == FEATURES
    over = (*plan.axes, axis) if plan.split_dim == ROWS else plan.axes
    x, experts, weights = (all_gather(y, over, 0) for y in (x_TD, experts_TK, weights_TK))
    if hidden:
        x = all_gather(x, axis, -1)
    e = kernels.row.shape[0]
    first = lax.axis_index(plan.axes) * e if plan.axes else 0
    own = experts[..., None] == first + jnp.arange(e)
    weights_Te = jnp.sum(jnp.where(own, weights[..., None], 0), axis=1)
    h = kernels.function(*(jnp.einsum("td,edf->etf", x, w) for w in kernels.column))
    y = jnp.einsum("etf,efd->etd", h, kernels.row, preferred_element_type=jnp.float32)
    y = jnp.sum(y * weights_Te.T[..., None], axis=0)
    if hidden:
        y = reduce_scatter(y, axis, -1)
    if axis_count(over) > 1:
        y = lax.psum_scatter(y, over, scatter_dimension=0, tiled=True)
    return y.astype(x_TD.dtype), jnp.sum(experts_TK >= 0)


def _mlp(
    rows: jax.Array, sizes: jax.Array, layout: RowLayout, kernels: _Kernels, plan: ExpertPlan
) -> jax.Array:
    """row(function(column(rows))) in groups, as `gather_matmul_scatter` for plain matmuls.

    Rows that lie on tp (`sequence`) have sizes of their own on every device of the ring: work on an
    arriving block takes those of the device that it comes from.
    """
    product = partial(grouped_matmul, layout=layout, form=plan.form)
    axis, n = plan.axis_name, lax.axis_size(plan.axis_name)
    # None: one collective each way; its blocks in natural order.
    ring = Ring(axis, plan.overlap) if plan.overlap != "none" and n > 1 else None

    def up(block: jax.Array, sizes: jax.Array) -> jax.Array:
        products = [
            checkpoint_name(product(block, w, sizes), "expert_product") for w in kernels.column
        ]
        return kernels.function(*products)

    def down(hidden: tuple[jax.Array, jax.Array]) -> jax.Array:
        return product(hidden[0], kernels.row, hidden[1])

    if plan.split_dim == FEATURES:
        return _features_mlp(rows, sizes, product, kernels, ring, axis)
    if plan.split_dim is None or n == 1:
        return down((up(rows, sizes), sizes))
    everyones = all_gather(sizes[None], axis, 0)
    if ring is None:
        blocks = all_gather(rows[None], axis, 0)
        parts = [down((up(blocks[i], everyones[i]), everyones[i])) for i in range(n)]
        return reduce_scatter(jnp.concatenate(parts), axis, 0)

    def work(position: int, block: jax.Array) -> Any:
        offset, _ = ring.positions()[position]
        theirs = everyones[(lax.axis_index(axis) - offset) % n]
        return up(block, theirs), theirs

    return ring.gather_scatter(rows, work, down, dim=0)[2]


def _features_mlp(
    rows: jax.Array,
    sizes: jax.Array,
    product: Callable[..., jax.Array],
    kernels: _Kernels,
    ring: Ring | None,
    axis: str,
) -> jax.Array:
    """`_mlp` of rows whose features lie on tp, `R D/tp`: partial products are added in float32."""
    if ring is None or lax.axis_size(axis) == 1:
        whole = all_gather(rows, axis, -1)
        hidden = kernels.function(
            *(checkpoint_name(product(whole, w, sizes), "expert_product") for w in kernels.column)
        )
        return reduce_scatter(product(hidden, kernels.row, sizes), axis, -1)
    cuts = [ring.shard(w, 1) for w in kernels.column]

    def work(position: int, block: jax.Array) -> list[jax.Array]:
        return [product(block, cut(position), sizes).astype(jnp.float32) for cut in cuts]

    parts = ring.gather(rows, work, -1)[1]
    sums = [sum(terms[1:], terms[0]).astype(rows.dtype) for terms in zip(*parts, strict=True)]
    hidden = kernels.function(*(checkpoint_name(y, "expert_product") for y in sums))
    columns = ring.shard(kernels.row, 2)
    return ring.scatter(columns, lambda w: product(hidden, w, sizes), dim=-1)
