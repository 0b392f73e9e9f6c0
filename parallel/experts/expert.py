"""Column- and row-parallel linears of experts, for rows that are sorted by expert.

`ExpertColumnParallelLinear` and `ExpertRowParallelLinear` own the kernels of all experts, sharded
by rule. Their calls are shard_maps of `column_products` and `row_product`; an expert layer runs
the same functions in its own shard_map, through `expert_mlp`.

Letters: R rows, E experts, e experts of this device, D embed, F intermediate.
"""

from collections.abc import Mapping
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jax.sharding import PartitionSpec as P

from parallel.experts.expert_mlp import ExpertLinearSpec, column_products, row_product
from parallel.experts.names import ExpertRule
from parallel.experts.row_layout import RowGroups
from parallel.linear.config import TensorParallelConfig
from parallel.linear.int8_kernel import Kernel, frozen, kernel_specs, with_scales
from parallel.linear.linear import Initializer, named_rngs
from parallel.linear.low_rank import LowRank, adapter_of
from parallel.linear.ring import pcast_varying
from parallel.linear.sharded_matmul import (
    adapter_for_shard_map,
    gather_factor,
    params_for_shard_map,
)
from parallel.linear.stored_kernel import gather_kernel
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
from parallel.sharding.specs import mesh_axes_of, split_dim, without_axis

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


class _ExpertLinear(nnx.Module):
    """Kernels `E in out` of all experts, one per output, and biases `E out`, which start at zero.

    out_features: as in `ParallelLinear`, a width or, for a column-parallel linear, a mapping from
    name to width. use_bias: whether there are biases.
    """

    is_column: bool
    kind = "experts"

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
        if not self.is_column and not isinstance(out_features, int):
            raise ValueError(
                f"{type(self).__name__} has one output, but out_features={out_features!r}; give a "
                "width"
            )
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

    @property
    def kernel_names(self) -> tuple[str, ...]:
        """Names of the outputs in order; a single output is named ""."""
        return self.output_names

    def kernels(self) -> list[Kernel]:
        """Return one array `E in out` per output, in the order of `out_features`.

        They have no gradient if the linear has adapters.
        """
        kernels = with_scales(self, self._arrays_of(self.kernel))
        return kernels if adapter_of(self) is None else [frozen(w) for w in kernels]

    def _arrays_of(self, parameter: Any) -> list[jax.Array]:
        if parameter is None:
            return []
        if isinstance(parameter, nnx.Param):
            return [parameter[...]]
        return [parameter[name][...] for name in self.output_names]

    def kernels_for(self, x: jax.Array) -> tuple[P, list[Kernel]]:
        """Return the kernels, and their spec, as they enter a shard_map together with `x`.

        `kernel_specs` returns the layouts of all their arrays.
        """
        spec, config = self.parallel_config.manager.resolve(self.axes), self.parallel_config
        return params_for_shard_map(self.kernels(), spec, x, config.axis_name)

    def biases_for(self, x: jax.Array) -> tuple[P, list[jax.Array]]:
        """Return the biases, none if there are none, and their spec, as `kernels_for` does."""
        spec, config = self.parallel_config.manager.resolve(self.bias_axes), self.parallel_config
        return params_for_shard_map(self._arrays_of(self.bias), spec, x, config.axis_name)

    def adapter_for(self, x: jax.Array) -> tuple[Any, LowRank | None]:
        """Return the specs of the adapters, and the adapters, as `kernels_for` does; or None."""
        return adapter_for_shard_map(adapter_of(self), self.axes, x, self.parallel_config)

    def _run(self, x: jax.Array, groups: RowGroups, out_spec: P, impl: str) -> list[jax.Array]:
        """Multiply local rows in a shard_map; one array laid out as `out_spec` per kernel."""
        config, spec = self.parallel_config, jax.typeof(x).sharding.spec
        tokens = spec if self.is_column else out_spec
        kernel_spec, kernels = self.kernels_for(x)
        bias_spec, biases = self.biases_for(x)
        adapter_spec, adapter = self.adapter_for(x)
        body = partial(
            _linear_body,
            specs=(kernel_spec, bias_spec, adapter_spec),
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
            in_specs=(
                spec,
                P(tokens[0]),
                kernel_specs(kernels, kernel_spec),
                bias_spec,
                adapter_spec,
            ),
            out_specs=out_spec,
        )
        return island(x, groups, kernels, biases, adapter)


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


def _linear_body(
    x: jax.Array,
    groups: RowGroups,
    kernels: list[Kernel],
    biases: list[jax.Array],
    adapter: LowRank | None,
    *,
    specs: tuple[P, P, Any],
    is_column: bool,
    spec: ExpertLinearSpec,
) -> list[jax.Array]:
    """Apply a linear to local rows `R D` or `R F/tp` and kernels `E/ep in out`, split over fsdp.

    specs: layouts of kernels, of biases and of adapters.
    """
    keep = (spec.axis_name, *mesh_axes_of(specs[0][0]))
    gather = partial(gather_kernel, keep=keep, dtype=x.dtype, like=x)
    whole, biases = [gather(w, specs[0]) for w in kernels], [gather(b, specs[1]) for b in biases]
    if adapter is not None:
        like = pcast_varying(x, (spec.axis_name,))
        adapter = jax.tree.map(partial(gather_factor, keep=keep, like=like), adapter, specs[2])
    if is_column:
        return column_products(x, groups, whole, spec, biases, adapter)
    y = row_product(x, groups, whole[0], spec, biases, adapter)
    return [lax.psum(y, spec.axis_name) if spec.split_dim is None else y]
