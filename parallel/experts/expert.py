"""Column- and row-parallel linears of experts, for rows that are sorted by expert.

`ExpertColumnParallelLinear` and `ExpertRowParallelLinear` own the kernels of all experts, sharded
by rule. Their calls are shard_maps of `column_products` and `row_product`; an expert layer runs
the same functions in its own shard_map, through `expert_mlp`. Rows or features that are sharded
over tp travel around the tp ring as in a dense MLP.

Letters: R rows, E experts, e experts of this device, D embed, F intermediate.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import PartitionSpec as P

from parallel.experts.exchange import num_devices
from parallel.experts.grouped_matmul import GROUPED_MATMULS, grouped_matmul
from parallel.experts.names import ExchangeMethod, ExpertRule
from parallel.experts.row_layout import RowGroups, RowLayout
from parallel.linear.collective_matmul import Overlap
from parallel.linear.config import TensorParallelConfig
from parallel.linear.linear import Initializer, named_rngs
from parallel.linear.ring import Ring, all_gather, reduce_scatter
from parallel.linear.sharded_matmul import gather_kernel, params_for_shard_map
from parallel.sharding.axes import (
    ExpertColumnBias,
    ExpertColumnWise,
    ExpertColumnWiseAlt,
    ExpertRowBias,
    ExpertRowWise,
    ExpertRowWiseAlt,
    UnifiedExpertColumnBias,
    UnifiedExpertColumnWise,
    UnifiedExpertRowBias,
    UnifiedExpertRowWise,
)
from parallel.sharding.specs import FEATURES, ROWS, SplitDim, mesh_axes_of, split_dim, without_axis

EXPERT_AXES: Mapping[ExpertRule, tuple[Any, Any]] = {
    "split": (ExpertColumnWise, ExpertRowWise),
    "alt": (ExpertColumnWiseAlt, ExpertRowWiseAlt),
    "unified": (UnifiedExpertColumnWise, UnifiedExpertRowWise),
}
"""Semantic axes of (column, row) kernels by rule."""

EXPERT_BIAS_AXES: Mapping[ExpertRule, tuple[Any, Any]] = {
    "split": (ExpertColumnBias, ExpertRowBias),
    "alt": (ExpertColumnBias, ExpertRowBias),
    "unified": (UnifiedExpertColumnBias, UnifiedExpertRowBias),
}
"""Semantic axes of (column, row) biases by rule."""

SAVED_NAMES = ("expert_rows", "expert_product", "expert_results")
"""`checkpoint_name`s of arrays that remat should save: recomputing them repeats a matmul or an
exchange."""


class _ExpertLinear(nnx.Module):
    """Kernels `E in out` of all experts, one per output, and biases `E out`, which start at zero.

    out_features: as in `ParallelLinear`, a width or a mapping from name to width. use_bias: whether
    there are biases.
    """

    is_column: bool

    def __init__(  # noqa: PLR0913  # the arguments of ParallelLinear, and those of experts
        self,
        num_experts: int,
        in_features: int,
        out_features: int | Mapping[str, int],
        *,
        use_bias: bool = False,
        rule: ExpertRule = "split",
        param_dtype: jax.typing.DTypeLike = jnp.float32,
        kernel_init: Initializer,
        parallel_config: TensorParallelConfig,
        rngs: nnx.Rngs,
    ):
        side = 0 if self.is_column else 1
        axes, bias_axes = EXPERT_AXES[rule][side], EXPERT_BIAS_AXES[rule][side]
        widths = {"": out_features} if isinstance(out_features, int) else dict(out_features)
        self.axes, self.bias_axes, self.parallel_config = axes, bias_axes, parallel_config
        self.output_names = tuple(widths)
        dtype, resolve = jnp.dtype(param_dtype), parallel_config.manager.resolve
        kernels, biases = {}, {}
        for name, width in widths.items():
            shape = (num_experts, in_features, width)
            spec = resolve(axes, shape=shape, name="expert kernel")
            stream = named_rngs(rngs, name) if name else rngs
            kernel = kernel_init(stream.params(), shape, dtype, out_sharding=spec)
            kernels[name] = nnx.Param(kernel, semantic_axes=axes)
            if use_bias:
                bias = jnp.zeros((num_experts, width), dtype, out_sharding=resolve(bias_axes))
                biases[name] = nnx.Param(bias, semantic_axes=bias_axes)
        is_single = isinstance(out_features, int)
        self.kernel: Any = kernels[""] if is_single else nnx.Dict(kernels)
        self.bias: Any = None if not biases else biases[""] if is_single else nnx.Dict(biases)

    def kernels(self) -> list[jax.Array]:
        """Return one array `E in out` per output, in the order of `out_features`."""
        return self._arrays_of(self.kernel)

    def _arrays_of(self, parameter: Any) -> list[jax.Array]:
        if parameter is None:
            return []
        if isinstance(parameter, nnx.Param):
            return [parameter[...]]
        return [parameter[name][...] for name in self.output_names]

    def kernels_for(self, x: jax.Array) -> tuple[P, list[jax.Array]]:
        """Return the kernels, and their spec, as they enter a shard_map together with `x`."""
        spec, config = self.parallel_config.manager.resolve(self.axes), self.parallel_config
        return params_for_shard_map(self.kernels(), spec, x, config.axis_name)

    def biases_for(self, x: jax.Array) -> tuple[P, list[jax.Array]]:
        """Return the biases, none if there are none, and their spec, as `kernels_for` does."""
        spec, config = self.parallel_config.manager.resolve(self.bias_axes), self.parallel_config
        return params_for_shard_map(self._arrays_of(self.bias), spec, x, config.axis_name)

    def _run(self, x: jax.Array, groups: RowGroups, out_spec: P, impl: str) -> list[jax.Array]:
        """Multiply local rows in a shard_map; one array laid out as `out_spec` per kernel."""
        config, spec = self.parallel_config, jax.typeof(x).sharding.spec
        tokens = spec if self.is_column else out_spec
        kernel_spec, kernels = self.kernels_for(x)
        bias_spec, biases = self.biases_for(x)
        body = partial(
            _linear_body,
            specs=(kernel_spec, bias_spec),
            is_column=self.is_column,
            spec=ExpertLinearSpec(
                axis_name=config.axis_name,
                split_dim=split_dim(tokens, config.axis_name, rank=2),
                grouped_matmul=impl,
                overlap=config.overlap,
            ),
        )
        island = jax.shard_map(
            body,
            mesh=config.manager.mesh,
            in_specs=(spec, P(tokens[0]), kernel_spec, bias_spec),
            out_specs=out_spec,
        )
        return island(x, groups, kernels, biases)


class ExpertColumnParallelLinear(_ExpertLinear):
    """Expert kernels (E, D, F) with F over tp: `ExpertColumnWise`, or the axes of another rule."""

    is_column = True

    def __call__(self, rows_RD: jax.Array, groups: RowGroups, *, impl: str) -> list[jax.Array]:
        """Multiply every row by the kernels of its expert: `R D` -> `R F` each, F on tp.

        rows_RD: blocks of rows sorted by expert, one for each device that splits R: `R/(ep tp) D`,
        `R/ep D/tp` or `R/ep D`. groups: layout of one block, and the sizes of the groups of all
        blocks, split as R. impl: the grouped matmul.
        Communication: the blocks of rows over tp, and each kernel over the axes that store it.
        """
        config = self.parallel_config
        rows = without_axis(jax.typeof(rows_RD).sharding.spec[0], config.axis_name)
        return self._run(rows_RD, groups, P(rows, config.axis_name), impl)


class ExpertRowParallelLinear(_ExpertLinear):
    """Expert kernels (E, F, D) with F over tp: `ExpertRowWise`, or the axes of another rule."""

    is_column = False

    def __call__(
        self, hidden_RF: jax.Array, groups: RowGroups, out_spec: P, *, impl: str
    ) -> jax.Array:
        """Multiply every row by the kernel of its expert: `R/ep F/tp` -> `R D` as `out_spec` says.

        groups: as for the column-parallel linear whose rows have the layout `out_spec`.
        Communication: a reduce-scatter or all-reduce of the results over tp, and the kernel over
        the axes that store it.
        """
        return self._run(hidden_RF, groups, out_spec, impl)[0]


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
        """Return the ring that tokens travel; None: one collective, blocks in natural order."""
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
    row_biases: `e F/tp` each and `e D`, or empty.
    """

    column: tuple[Any, ...]
    row: Any
    activation: Callable[..., jax.Array] = field(metadata={"static": True})
    column_biases: tuple[Any, ...] = ()
    row_biases: tuple[Any, ...] = ()


def _linear_body(
    x: jax.Array,
    groups: RowGroups,
    kernels: list[jax.Array],
    biases: list[jax.Array],
    *,
    specs: tuple[P, P],
    is_column: bool,
    spec: ExpertLinearSpec,
) -> list[jax.Array]:
    """Apply a linear to local rows `R D` or `R F/tp` and kernels `E/ep in out`, split over fsdp.

    specs: layouts of kernels and of biases.
    """
    keep = (spec.axis_name, *mesh_axes_of(specs[0][0]))
    gather = partial(gather_kernel, keep=keep, dtype=x.dtype, like=x)
    whole, biases = [gather(w, specs[0]) for w in kernels], [gather(b, specs[1]) for b in biases]
    if is_column:
        return column_products(x, groups, whole, spec, biases)
    y = row_product(x, groups, whole[0], spec, biases)
    return [lax.psum(y, spec.axis_name) if spec.split_dim is None else y]


def expert_mlp(
    rows: jax.Array, groups: RowGroups, kernels: ExpertKernels, spec: ExpertLinearSpec
) -> jax.Array:
    """Return row(activation(column(rows))) with the kernels of each row's group.

    rows: `R/tp D`, `R D/tp` or `R D`, by `spec.split_dim`; the result has the same layout, `R D`
    without the sum over tp. Of split rows every device of the ring has its own group sizes.
    Communication: over tp, what `gather_matmul_scatter` sends for these rows.
    """
    ring = spec.ring()
    if ring is None or spec.split_dim != ROWS:
        products = column_products(rows, groups, kernels.column, spec, kernels.column_biases)
        hidden = _activated(products, kernels)
        return row_product(hidden, groups, kernels.row, spec, kernels.row_biases)
    # Blocks stay in the order of arrival, and both rings run at the same time.
    groups_n = _groups_of_blocks(groups, ring, spec)

    def work(position: int, block: jax.Array) -> tuple[jax.Array, RowGroups]:
        own = groups_n[position]
        products = _products(block, own, kernels.column, spec)
        return _activated(_add_biases(products, kernels.column_biases, own), kernels), own

    def term(hidden: tuple[jax.Array, RowGroups]) -> jax.Array:
        return _products(hidden[0], hidden[1], [kernels.row], spec)[0]

    y = ring.gather_scatter(rows, work, term, dim=0)[2]
    return _add_biases([y], kernels.row_biases, groups)[0]


def column_products(
    rows: jax.Array,
    groups: RowGroups,
    kernels: Sequence[jax.Array],
    spec: ExpertLinearSpec,
    biases: Sequence[jax.Array] = (),
) -> list[jax.Array]:
    """Gather rows over tp and multiply by each kernel: `R/tp D`, `R D/tp` or `R D` -> `R F/tp`.

    biases: one `e F/tp` per kernel, or empty.
    """
    axis, ring = spec.axis_name, spec.ring()
    if spec.split_dim == ROWS and lax.axis_size(axis) > 1:
        groups_n = _groups_of_blocks(groups, ring, spec)

        def products(position: int, block: jax.Array) -> list[jax.Array]:
            own = groups_n[position]
            return _add_biases(_products(block, own, kernels, spec), biases, own)

        if ring is not None:
            parts = ring.gather(rows, products, 0)[1]
            return [ring.unshard(blocks, 0) for blocks in zip(*parts, strict=True)]
        blocks = jnp.split(all_gather(rows, axis, 0), len(groups_n))
        parts = [products(i, block) for i, block in enumerate(blocks)]
        return [jnp.concatenate(blocks) for blocks in zip(*parts, strict=True)]
    if spec.split_dim is None or ring is None:
        whole = rows if spec.split_dim is None else all_gather(rows, axis, -1)
        return _add_biases(_products(whole, groups, kernels, spec), biases, groups)
    shards = [ring.shard(w, 1) for w in kernels]

    def terms(position: int, block: jax.Array) -> list[jax.Array]:
        products = _products(block, groups, [shard(position) for shard in shards], spec)
        return [y.astype(jnp.float32) for y in products]

    parts = ring.gather(rows, terms, -1)[1]
    sums = [sum(terms[1:], terms[0]).astype(rows.dtype) for terms in zip(*parts, strict=True)]
    return _add_biases(sums, biases, groups)


def row_product(
    hidden: jax.Array,
    groups: RowGroups,
    kernel: jax.Array,
    spec: ExpertLinearSpec,
    biases: Sequence[jax.Array] = (),
) -> jax.Array:
    """Multiply `R F/tp` and reduce-scatter over tp: `R/tp D` or `R D/tp`; or `R D`, not summed.

    biases: one `e D`, or empty. If the result is not summed, only the first device of tp adds it.
    """
    y = _row_sums(hidden, groups, kernel, spec)
    rank, width = lax.axis_index(spec.axis_name), y.shape[-1]
    if spec.split_dim == FEATURES:
        biases = [lax.dynamic_slice_in_dim(b, rank * width, width, axis=1) for b in biases]
    elif spec.split_dim is None:
        biases = [jnp.where(rank == 0, b, 0) for b in biases]
    return _add_biases([y], biases, groups)[0]


def _row_sums(
    hidden: jax.Array, groups: RowGroups, kernel: jax.Array, spec: ExpertLinearSpec
) -> jax.Array:
    """Compute `row_product` without biases."""
    axis, ring = spec.axis_name, spec.ring()

    def product(block: jax.Array, own: RowGroups, w: jax.Array) -> jax.Array:
        return _products(block, own, [w], spec)[0]

    if spec.split_dim is None or lax.axis_size(axis) == 1:
        return product(hidden, groups, kernel)
    if spec.split_dim == ROWS:
        groups_n = _groups_of_blocks(groups, ring, spec)
        if ring is None:
            blocks = zip(jnp.split(hidden, len(groups_n)), groups_n, strict=True)
            parts = [product(block, own, kernel) for block, own in blocks]
            return reduce_scatter(jnp.concatenate(parts), axis, 0)
        block = ring.shard(hidden, 0)
        return ring.scatter(
            lambda position: (block(position), groups_n[position]),
            lambda pair: product(pair[0], pair[1], kernel),
            dim=0,
        )
    if ring is None:
        return reduce_scatter(product(hidden, groups, kernel), axis, -1)
    return ring.scatter(ring.shard(kernel, 2), lambda w: product(hidden, groups, w), dim=-1)


def _products(
    rows: jax.Array, groups: RowGroups, kernels: Sequence[jax.Array], spec: ExpertLinearSpec
) -> list[jax.Array]:
    return [grouped_matmul(rows, w, groups, impl=spec.grouped_matmul) for w in kernels]


def _add_biases(
    products: Sequence[jax.Array], biases: Sequence[jax.Array], groups: RowGroups
) -> list[jax.Array]:
    """Add to each row of each product the bias of the row's group; empty `biases` add none."""
    if not biases:
        return list(products)
    return [y + _bias_of_rows(b, groups, y.dtype) for y, b in zip(products, biases, strict=True)]


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
    """Return the groups of the block of every tp device, by position in the ring if there is one.

    Communication: an all-gather of the group sizes.
    """
    axis, n = spec.axis_name, lax.axis_size(spec.axis_name)
    sizes_nE = all_gather(groups.sizes_E[None], axis, 0)
    sources: Sequence[Any] = range(n)
    if ring is not None:
        sources = [(lax.axis_index(axis) - offset) % n for offset, _ in ring.positions()]
    return [RowGroups(groups.layout, sizes_nE[source]) for source in sources]


def _activated(products: Sequence[jax.Array], kernels: ExpertKernels) -> jax.Array:
    return kernels.activation(*(checkpoint_name(y, "expert_product") for y in products))
