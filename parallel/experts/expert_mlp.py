"""MLPs of experts on local rows that are sorted by expert, overlapped with their communication.

Every function runs inside `jax.shard_map`. Rows or features that are sharded over tp travel around
the tp ring as in a dense MLP.

Letters: R rows, E experts, e experts of this device, D embed, F intermediate.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from parallel.experts.exchange import num_devices
from parallel.experts.grouped_matmul import GROUPED_MATMULS, grouped_matmul
from parallel.experts.names import ExchangeMethod, RowDtype
from parallel.experts.row_layout import RowGroups, RowLayout
from parallel.linear.collective_matmul import Overlap
from parallel.linear.local_matmul import concat_columns, split_columns
from parallel.linear.low_rank import LowRank
from parallel.linear.ring import Ring, all_gather, reduce_scatter
from parallel.sharding.specs import FEATURES, ROWS, SplitDim

SAVED_NAMES = ("expert_rows", "expert_product")
"""`checkpoint_name`s of arrays that remat should save: recomputing them repeats a matmul or an
exchange."""


@dataclass(frozen=True, kw_only=True)
class ExpertLinearSpec:
    """Static description of the linears of experts on one mesh."""

    axis_name: str
    """Mesh axis of tensor parallelism."""
    split_dim: SplitDim | None
    """Dim of the tokens that `axis_name` splits: rows, features, or none."""
    grouped_matmul: str
    overlap: Overlap

    @property
    def is_uniform(self) -> bool:
        """The grouped matmul needs the same number of rows for every expert."""
        return GROUPED_MATMULS[self.grouped_matmul].is_uniform

    def ring(self) -> Ring | None:
        """Return the ring that tokens travel; None: one collective, blocks in natural order.

        Raises: ValueError for an overlap that cuts blocks.
        """
        if self.overlap in ("split", "hypercube"):
            raise ValueError(
                f"overlap {self.overlap} cuts blocks, and its pieces would not hold whole groups "
                "of rows, one per expert; use bidirectional"
            )
        if self.overlap == "none" or lax.axis_size(self.axis_name) == 1:
            return None
        return Ring(self.axis_name, self.overlap)


@dataclass(frozen=True, kw_only=True)
class ExpertLayerSpec(ExpertLinearSpec):
    """Static description of an expert layer on one mesh."""

    num_experts: int
    axes: tuple[str, ...]
    """Mesh axes that share the experts, outermost first."""
    exchange: ExchangeMethod
    top_k: int
    """Experts per token, for the expert capacity."""
    capacity_factor: float | None = None
    """Size of a buffer relative to a balanced load; None: large enough for every load, so that no
    token is dropped."""
    chunks: int = 1
    """Chunks of `alltoall` that travel as collective permutes during the matmuls of other chunks;
    1: one collective."""
    distances: tuple[int, ...] = ()
    """Order of these permutes, see `PermuteAllToAll`."""
    row_dtype: RowDtype | None = None
    """Dtype in which rows travel to their experts (`quantized_rows`); None: their own."""
    native: bool = False
    """Use `lax.ragged_all_to_all`."""
    block: int = 128
    """Rows of a block in the `blocks` layout."""

    def capacity(self, tokens: int) -> int:
        """Return the expert capacity: rows of one expert from one device with `tokens` tokens."""
        if self.capacity_factor is None:
            return tokens
        rows = self.capacity_factor * tokens * self.top_k / self.num_experts
        return max(1, math.ceil(min(rows, tokens)))

    def receive_rows(self, tokens: int, assignments: int) -> int:
        """Return the rows of the receiving buffer of `ragged`; arguments are per device."""
        n = num_devices(self.axes)
        most = n * min(assignments, tokens * (self.num_experts // n))
        if self.capacity_factor is None:
            return most
        return max(1, math.ceil(min(self.capacity_factor * tokens * self.top_k, most)))

    def layout(self, max_rows: int, groups: int) -> RowLayout:
        """Return the layout that the grouped matmul prefers, for at most `max_rows` used rows."""
        if GROUPED_MATMULS[self.grouped_matmul].layouts[0] == "blocks":
            return RowLayout.blocks(max_rows, groups, self.block)
        return RowLayout("packed", 1, max_rows, groups)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class ExpertKernels:
    """Kernels of this device's experts: `e D F/tp` each for `column`, `e F/tp D` for `row`.

    Outside of shard_map, a tree of their PartitionSpecs.
    activation: elementwise, from the products with `column` to the input of `row`. column_biases,
    row_biases: `e F/tp` each and `e D`, or empty. column_adapter, row_adapter: factors `e D r`,
    `e r F/tp` and `e F/tp r`, `e r D`.
    """

    column: tuple[Any, ...]
    row: Any
    activation: Callable[..., jax.Array] = field(metadata={"static": True})
    column_biases: tuple[Any, ...] = ()
    row_biases: tuple[Any, ...] = ()
    column_adapter: LowRank | None = None
    row_adapter: LowRank | None = None

    def merged(self) -> "ExpertKernels":
        """Return the same kernels with their adapters added to them."""
        column, row = self.column, self.row
        if self.column_adapter is not None:
            column = tuple(self.column_adapter.merged(column))
        if self.row_adapter is not None:
            (row,) = self.row_adapter.merged([row])
        return replace(self, column=column, row=row, column_adapter=None, row_adapter=None)


def expert_mlp(
    rows: jax.Array,
    weights: jax.Array,
    groups: RowGroups,
    kernels: ExpertKernels,
    spec: ExpertLinearSpec,
) -> jax.Array:
    """Return weight * row(activation(column(rows))) with the kernels of each row's group.

    rows: `R/tp D`, `R D/tp` or `R D`, by `spec.split_dim`; the result has the same layout, `R D`
    without the sum over tp. weights: float32, one per row of the argument. They multiply the hidden
    features, so that no gradient needs the result. If rows are split, every device of the ring has
    its own group sizes.
    Communication: over tp, what `gather_matmul_scatter` sends for these rows, and their weights.
    """
    ring = spec.ring()
    biases, adapter = kernels.row_biases, kernels.row_adapter
    if ring is None or spec.split_dim != ROWS:
        rest = kernels.column_biases, kernels.column_adapter
        hidden = _activated(column_products(rows, groups, kernels.column, spec, *rest), kernels)
        whole = all_gather(weights, spec.axis_name, 0) if spec.split_dim == ROWS else weights
        hidden = _weighted(hidden, whole)
        return row_product(hidden, groups, kernels.row, spec, biases, adapter, weights)
    # Blocks stay in the order of arrival, and both rings run at the same time.
    groups_n, weights_n = _groups_of_blocks(groups, ring, spec), _by_block(weights, ring, spec)

    def work(position: int, block: jax.Array) -> tuple[jax.Array, RowGroups]:
        own = groups_n[position]
        products = _products(block, own, column, spec)
        products = _add_rest(products, kernels.column_biases, kernels.column_adapter, own, spec)
        return _weighted(_activated(products, kernels), weights_n[position]), own

    def term(hidden: tuple[jax.Array, RowGroups]) -> jax.Array:
        return concat_columns(_products(hidden[0], hidden[1], row, spec))

    column = _with_columns(kernels.column, kernels.column_adapter)
    row = _with_columns([kernels.row], adapter)
    y = ring.gather_scatter(rows, work, term, dim=0)[2]
    return _add_rest(split_columns(y, row), biases, adapter, groups, spec, weights)[0]


def column_products(
    rows: jax.Array,
    groups: RowGroups,
    kernels: Sequence[jax.Array],
    spec: ExpertLinearSpec,
    biases: Sequence[jax.Array] = (),
    adapter: LowRank | None = None,
) -> list[jax.Array]:
    """Gather rows over tp and multiply by each kernel: `R/tp D`, `R D/tp` or `R D` -> `R F/tp`.

    biases: one `e F/tp` per kernel, or empty. adapter: see `ExpertKernels`.
    """
    axis, ring, kernels = spec.axis_name, spec.ring(), _with_columns(kernels, adapter)
    if spec.split_dim == ROWS and lax.axis_size(axis) > 1:
        groups_n = _groups_of_blocks(groups, ring, spec)

        def products(position: int, block: jax.Array) -> list[jax.Array]:
            own = groups_n[position]
            return _add_rest(_products(block, own, kernels, spec), biases, adapter, own, spec)

        if ring is not None:
            parts = ring.gather(rows, products, 0)[1]
            return [ring.unshard(blocks, 0) for blocks in zip(*parts, strict=True)]
        blocks = jnp.split(all_gather(rows, axis, 0), len(groups_n))
        parts = [products(i, block) for i, block in enumerate(blocks)]
        return [jnp.concatenate(blocks) for blocks in zip(*parts, strict=True)]
    if spec.split_dim is None or ring is None:
        whole = rows if spec.split_dim is None else all_gather(rows, axis, -1)
        return _add_rest(_products(whole, groups, kernels, spec), biases, adapter, groups, spec)
    shards = [ring.shard(w, 1) for w in kernels]

    def terms(position: int, block: jax.Array) -> list[jax.Array]:
        products = _products(block, groups, [shard(position) for shard in shards], spec)
        return [y.astype(jnp.float32) for y in products]

    parts = ring.gather(rows, terms, -1)[1]
    sums = [sum(terms[1:], terms[0]).astype(rows.dtype) for terms in zip(*parts, strict=True)]
    return _add_rest(sums, biases, adapter, groups, spec)


def row_product(
    hidden: jax.Array,
    groups: RowGroups,
    kernel: jax.Array,
    spec: ExpertLinearSpec,
    biases: Sequence[jax.Array] = (),
    adapter: LowRank | None = None,
    weights: jax.Array | None = None,
) -> jax.Array:
    """Multiply `R F/tp` and reduce-scatter over tp: `R/tp D` or `R D/tp`; or `R D`, not summed.

    biases: one `e D`, or empty. If the result is not summed, only the first device of tp adds it.
    adapter: see `ExpertKernels`. weights: factors of the biases, one per row of the result.
    """
    kernels = _with_columns([kernel], adapter)
    if adapter is not None and spec.split_dim == FEATURES:
        # The r columns are whole on every device, and b has the columns of the result.
        (u,) = _products(hidden, groups, kernels[1:], spec)
        sums = _row_sums(hidden, groups, kernels[:1], spec)
        parts: tuple[jax.Array, ...] = (sums, lax.psum(u, spec.axis_name))
    else:
        parts = split_columns(_row_sums(hidden, groups, kernels, spec), kernels)
    rank, width = lax.axis_index(spec.axis_name), parts[0].shape[-1]
    if spec.split_dim == FEATURES:
        biases = [lax.dynamic_slice_in_dim(b, rank * width, width, axis=1) for b in biases]
        if adapter is not None:
            b = lax.dynamic_slice_in_dim(adapter.b[0], rank * width, width, axis=2)
            adapter = replace(adapter, b=(b,))
    elif spec.split_dim is None:
        biases = [jnp.where(rank == 0, b, 0) for b in biases]
    return _add_rest(parts, biases, adapter, groups, spec, weights)[0]


def _row_sums(
    hidden: jax.Array, groups: RowGroups, kernels: Sequence[jax.Array], spec: ExpertLinearSpec
) -> jax.Array:
    """Compute `row_product` without biases; the columns of several kernels side by side."""
    axis, ring = spec.axis_name, spec.ring()

    def product(block: jax.Array, own: RowGroups) -> jax.Array:
        return concat_columns(_products(block, own, kernels, spec))

    if spec.split_dim is None or lax.axis_size(axis) == 1:
        return product(hidden, groups)
    if spec.split_dim == ROWS:
        groups_n = _groups_of_blocks(groups, ring, spec)
        if ring is None:
            blocks = zip(jnp.split(hidden, len(groups_n)), groups_n, strict=True)
            parts = [product(block, own) for block, own in blocks]
            return reduce_scatter(jnp.concatenate(parts), axis, 0)
        block = ring.shard(hidden, 0)
        return ring.scatter(
            lambda position: (block(position), groups_n[position]),
            lambda pair: product(pair[0], pair[1]),
            dim=0,
        )
    if ring is None:
        return reduce_scatter(product(hidden, groups), axis, -1)
    (kernel,) = kernels
    return ring.scatter(
        ring.shard(kernel, 2), lambda w: _products(hidden, groups, [w], spec)[0], dim=-1
    )


def _with_columns(kernels: Sequence[jax.Array], adapter: LowRank | None) -> list[jax.Array]:
    """Return the kernels, and the matrices a of their adapters as one more."""
    return [*kernels] if adapter is None else [*kernels, adapter.columns()]


def _add_rest(
    products: Sequence[jax.Array],
    biases: Sequence[jax.Array],
    adapter: LowRank | None,
    groups: RowGroups,
    spec: ExpertLinearSpec,
    weights: jax.Array | None = None,
) -> list[jax.Array]:
    """Add biases, times weights, and adapters to products.

    With adapters, the last product is x @ columns() of them.
    """
    if adapter is not None:
        *products, u = products
        add = partial(_add_product, groups=groups, impl=spec.grouped_matmul)
        products = adapter.update_by(add, products, u)
    return _add_biases(products, biases, groups, weights)


def _add_product(
    y: jax.Array, u: jax.Array, b: jax.Array, scale: float, *, groups: RowGroups, impl: str
) -> jax.Array:
    """Return y + scale * u @ b of each row's group: `R F`, `R r` and `e r F`."""
    return y + grouped_matmul(u * jnp.asarray(scale, u.dtype), b, groups, impl=impl)


def _products(
    rows: jax.Array, groups: RowGroups, kernels: Sequence[jax.Array], spec: ExpertLinearSpec
) -> list[jax.Array]:
    return [grouped_matmul(rows, w, groups, impl=spec.grouped_matmul) for w in kernels]


def _add_biases(
    products: Sequence[jax.Array],
    biases: Sequence[jax.Array],
    groups: RowGroups,
    weights: jax.Array | None,
) -> list[jax.Array]:
    """Add to each row of each product the bias of the row's group; empty `biases` add none."""
    if not biases:
        return list(products)
    added = [_bias_of_rows(b, groups, y.dtype) for y, b in zip(products, biases, strict=True)]
    if weights is not None:
        added = [_weighted(b, weights) for b in added]
    return [y + b for y, b in zip(products, added, strict=True)]


def _weighted(x: jax.Array, weights: jax.Array) -> jax.Array:
    """Multiply each row by its weight in float32, and round once."""
    return (x.astype(jnp.float32) * weights[:, None]).astype(x.dtype)


@partial(jax.checkpoint, prevent_cse=False, static_argnums=2)
def _bias_of_rows(bias_EF: jax.Array, groups: RowGroups, dtype: jnp.dtype) -> jax.Array:
    """Return the bias of each row's group, `R F`; 0 for rows of no group.

    A matmul with the one-hot groups: its gradient is one as well, where a gather would scatter. The
    sum has one term, so it is exact. Recomputed in the backward pass instead of kept.
    """
    members_RE = groups.members_RE.astype(dtype)
    return jnp.matmul(members_RE, bias_EF.astype(dtype), precision=lax.Precision.HIGHEST)


def _groups_of_blocks(
    groups: RowGroups, ring: Ring | None, spec: ExpertLinearSpec
) -> list[RowGroups]:
    """Return the groups of the block of every tp device, in the order of `_by_block`."""
    return [RowGroups(groups.layout, sizes) for sizes in _by_block(groups.sizes_E, ring, spec)]


def _by_block(x: jax.Array, ring: Ring | None, spec: ExpertLinearSpec) -> list[jax.Array]:
    """Return x of every tp device, by position in the ring if there is one.

    Communication: an all-gather of x, which is small.
    """
    axis, n = spec.axis_name, lax.axis_size(spec.axis_name)
    gathered = all_gather(x[None], axis, 0)
    sources: Sequence[Any] = range(n)
    if ring is not None:
        sources = [(lax.axis_index(axis) - offset) % n for offset, _ in ring.positions()]
    return [gathered[source] for source in sources]


def _activated(products: Sequence[jax.Array], kernels: ExpertKernels) -> jax.Array:
    return kernels.activation(*(checkpoint_name(y, "expert_product") for y in products))
