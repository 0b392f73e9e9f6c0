"""Experts: their kernels, sharded by rule, and the MLP of rows that are sorted by expert.

`ExpertColumnParallelLinear` and `ExpertRowParallelLinear` own the kernels of all experts.
`expert_mlp` runs inside `jax.shard_map` on local kernels; rows or features that are sharded over tp
travel around the tp ring as in a dense MLP.

Letters: R rows, E experts, e experts of this device, D embed, F intermediate.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from parallel.experts.exchange import num_devices
from parallel.experts.grouped_matmul import GROUPED_MATMULS, grouped_matmul
from parallel.experts.names import ExchangeMethod, ExpertRule
from parallel.experts.row_layout import RowGroups, RowLayout
from parallel.linear.collective_matmul import Overlap
from parallel.linear.config import TensorParallelConfig
from parallel.linear.linear import Initializer, named_rngs
from parallel.linear.ring import Ring, all_gather, reduce_scatter
from parallel.sharding.axes import (
    ExpertColumnWise,
    ExpertColumnWiseAlt,
    ExpertRowWise,
    ExpertRowWiseAlt,
    UnifiedExpertColumnWise,
    UnifiedExpertRowWise,
)
from parallel.sharding.specs import FEATURES, SplitDim

EXPERT_AXES: Mapping[ExpertRule, tuple[Any, Any]] = {
    "split": (ExpertColumnWise, ExpertRowWise),
    "alt": (ExpertColumnWiseAlt, ExpertRowWiseAlt),
    "unified": (UnifiedExpertColumnWise, UnifiedExpertRowWise),
}
"""Semantic axes of (column, row) kernels by rule."""

SAVED_NAMES = ("expert_rows", "expert_product", "expert_results")
"""`checkpoint_name`s of arrays that remat should save: recomputing them repeats a matmul or an
exchange."""


class _ExpertLinear(nnx.Module):
    """One kernel `E in out` per output. Owns the kernels; `expert_mlp` multiplies by them.

    out_features: as in `ParallelLinear`, a width or a mapping from name to width.
    """

    is_column: bool

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
        axes = EXPERT_AXES[rule][0 if self.is_column else 1]
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
        """Return one array `E in out` per output, in the order of `out_features`."""
        if isinstance(self.kernel, nnx.Param):
            return [self.kernel[...]]
        return [self.kernel[name][...] for name in self.output_names]


class ExpertColumnParallelLinear(_ExpertLinear):
    """Expert kernels (E, D, F) with F over tp: `ExpertColumnWise`, or the axes of another rule."""

    is_column = True


class ExpertRowParallelLinear(_ExpertLinear):
    """Expert kernels (E, F, D) with F over tp: `ExpertRowWise`, or the axes of another rule."""

    is_column = False


@dataclass(frozen=True, kw_only=True)
class ExpertLayerSpec:
    """Static description of an expert layer on one mesh."""

    num_experts: int
    axes: tuple[str, ...]
    """Mesh axes that share the experts, outermost first."""
    axis_name: str
    """Mesh axis of tensor parallelism."""
    split_dim: SplitDim | None
    """Dim of the tokens that `axis_name` splits: rows, features, or none."""
    exchange: ExchangeMethod
    grouped_matmul: str
    overlap: Overlap
    top_k: int
    """Experts per token, for the expert capacity."""
    capacity_factor: float | None = None
    """Size of a buffer relative to a balanced load; None: large enough for every load, so that no
    token is dropped."""
    chunks: int = 1
    """Chunks of `alltoall` that travel as collective permutes during the matmuls of other chunks;
    1: one collective."""
    native: bool = False
    """Use `lax.ragged_all_to_all`."""
    block: int = 128
    """Rows of a block in the `blocks` layout."""

    @property
    def is_uniform(self) -> bool:
        """The grouped matmul needs the same number of rows for every expert."""
        return GROUPED_MATMULS[self.grouped_matmul].is_uniform

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

    activation: elementwise, from the products with `column` to the input of `row`.
    """

    column: tuple[jax.Array, ...]
    row: jax.Array
    activation: Callable[..., jax.Array] = field(metadata={"static": True})


def expert_mlp(
    rows: jax.Array, groups: RowGroups, kernels: ExpertKernels, spec: ExpertLayerSpec
) -> jax.Array:
    """Return row(activation(column(rows))) with the kernels of each row's group.

    rows: `R/tp D`, `R D/tp` or `R D`, by `spec.split_dim`; the result has the same layout. Of
    split rows every device of the ring has its own group sizes.
    Communication: over tp, what `gather_matmul_scatter` sends for these rows.
    """
    product = partial(grouped_matmul, impl=spec.grouped_matmul)
    axis, n = spec.axis_name, lax.axis_size(spec.axis_name)
    # None: one collective each way, and blocks in natural order.
    ring = Ring(axis, spec.overlap) if spec.overlap != "none" and n > 1 else None
    if spec.split_dim == FEATURES:
        return _split_features_mlp(rows, groups, kernels, spec, ring)

    def up(block: jax.Array, groups: RowGroups) -> jax.Array:
        return _activated([product(block, w, groups) for w in kernels.column], kernels)

    def down(hidden: tuple[jax.Array, RowGroups]) -> jax.Array:
        return product(hidden[0], kernels.row, hidden[1])

    if spec.split_dim is None or n == 1:
        return down((up(rows, groups), groups))
    sizes_nE = all_gather(groups.sizes_E[None], axis, 0)
    if ring is None:
        blocks = all_gather(rows[None], axis, 0)
        groups_n = [RowGroups(groups.layout, sizes_nE[i]) for i in range(n)]
        parts = [down((up(blocks[i], groups_n[i]), groups_n[i])) for i in range(n)]
        return reduce_scatter(jnp.concatenate(parts), axis, 0)

    def work(position: int, block: jax.Array) -> Any:
        offset, _ = ring.positions()[position]
        source = (lax.axis_index(axis) - offset) % n
        source_groups = RowGroups(groups.layout, sizes_nE[source])
        return up(block, source_groups), source_groups

    return ring.gather_scatter(rows, work, down, dim=0)[2]


def _split_features_mlp(
    rows: jax.Array,
    groups: RowGroups,
    kernels: ExpertKernels,
    spec: ExpertLayerSpec,
    ring: Ring | None,
) -> jax.Array:
    """Apply `expert_mlp` to rows `R D/tp`; partial products are summed in float32."""
    axis = spec.axis_name
    product = partial(grouped_matmul, groups=groups, impl=spec.grouped_matmul)
    if ring is None:
        whole = all_gather(rows, axis, -1)
        hidden = _activated([product(whole, w) for w in kernels.column], kernels)
        return reduce_scatter(product(hidden, kernels.row), axis, -1)
    column_blocks = [ring.shard(w, 1) for w in kernels.column]

    def work(position: int, block: jax.Array) -> list[jax.Array]:
        return [product(block, w(position)).astype(jnp.float32) for w in column_blocks]

    parts = ring.gather(rows, work, -1)[1]
    sums = [sum(terms[1:], terms[0]).astype(rows.dtype) for terms in zip(*parts, strict=True)]
    hidden = _activated(sums, kernels)
    return ring.scatter(ring.shard(kernels.row, 2), lambda w: product(hidden, w), dim=-1)


def _activated(products: list[jax.Array], kernels: ExpertKernels) -> jax.Array:
    return kernels.activation(*(checkpoint_name(y, "expert_product") for y in products))
