"""Low-rank adapters (LoRA) of linears: y = x W + scale * (x A) B, with x [W A] as one product.

W is frozen; A `... D r` and B `... r F` are trained. A joins the kernels that x is multiplied by,
so x A travels with x W: an adapter adds no collective to a linear but r columns. The factors are
sharded as the rows and the columns of W. r is never split.
Source: arXiv 2106.09685, section 4.1.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax

from parallel.linear.local_matmul import (
    concat_columns,
    kernel_gradient,
    matmul,
    matmul_transposed,
)
from parallel.linear.ring import pcast_varying
from parallel.sharding.axes import EMPTY

SAVED_NAMES = ("adapter_sum",)
"""`checkpoint_name` of the r columns of a row-parallel linear, summed over tp. Remat should save
them: the gradient of B reads them, and recomputing them repeats the whole linear."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class LowRank:
    """Adapters of a linear: they add scale * (x @ a) @ b to some of its outputs.

    The same class holds their semantic axes or PartitionSpecs in place of the arrays.
    """

    a: tuple[Any, ...]
    """Matrices `... D r`, one per adapted output."""
    b: tuple[Any, ...]
    """Matrices `... r F`."""
    outputs: tuple[int, ...] = field(metadata={"static": True})
    """Indices of the adapted outputs, ascending."""
    scale: float = field(metadata={"static": True})

    def columns(self) -> jax.Array:
        """Return the matrices a side by side: one kernel for all adapted outputs."""
        return concat_columns(self.a)

    def update(
        self, products: Sequence[jax.Array], u: jax.Array, precision: Any = None
    ) -> tuple[jax.Array, ...]:
        """Return the products with the kernels, plus scale * u_i @ b_i, where u = x @ columns()."""
        return self.update_by(partial(add_product, precision=precision), products, u)

    def update_by(
        self, add: Callable[..., jax.Array], products: Sequence[jax.Array], u: jax.Array
    ) -> tuple[jax.Array, ...]:
        """Return `update`, where `add(y, u_i, b_i, scale)` multiplies and adds."""
        found = list(products)
        for i, part, b in zip(
            self.outputs, jnp.split(u, len(self.b), axis=-1), self.b, strict=True
        ):
            found[i] = add(found[i], part, b, self.scale)
        return tuple(found)

    def of(self, output: int) -> "LowRank | None":
        """Return the adapter of one output alone, as output 0; None if it has none."""
        if output not in self.outputs:
            return None
        i = self.outputs.index(output)
        return replace(self, a=self.a[i : i + 1], b=self.b[i : i + 1], outputs=(0,))

    def merged(self, kernels: Sequence[jax.Array]) -> list[jax.Array]:
        """Return the kernels with the update of each: `merge`."""
        found = list(kernels)
        for i, a, b in zip(self.outputs, self.a, self.b, strict=True):
            found[i] = merge(found[i], a, b, self.scale)
        return found


def merge(kernel: jax.Array, a: jax.Array, b: jax.Array, scale: float) -> jax.Array:
    """Return kernel + scale * a @ b, computed in float32 and rounded once: `... D F`."""
    wide = jnp.promote_types(kernel.dtype, jnp.float32)
    product = jnp.matmul(a.astype(wide), b.astype(wide), precision=lax.Precision.HIGHEST)
    return (kernel.astype(wide) + scale * product).astype(kernel.dtype)


def add_product(
    y: jax.Array, u: jax.Array, b: jax.Array, scale: float, precision: Any = None
) -> jax.Array:
    """Return y + scale * u @ b for local blocks `... F`, `... r` and `r F`."""
    axes = set().union(*(jax.typeof(array).manual_axis_type.varying for array in (y, u, b)))
    y, u, b = (pcast_varying(array, tuple(sorted(axes))) for array in (y, u, b))
    return _add_product(scale, precision, y, u, b)


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _add_product(
    scale: float, precision: Any, y: jax.Array, u: jax.Array, b: jax.Array
) -> jax.Array:
    return y + matmul(u * jnp.asarray(scale, u.dtype), b, precision)


def _add_product_forward(
    scale: float, precision: Any, y: jax.Array, u: jax.Array, b: jax.Array
) -> tuple[jax.Array, Any]:
    # Not inlined: a remat policy that saves matmuls would save a second array as large as y.
    return _add_product(scale, precision, y, u, b), (u, b)


def _add_product_backward(scale: float, precision: Any, residuals: Any, dy: jax.Array) -> Any:
    u, b = residuals
    factor = jnp.asarray(scale, u.dtype)
    return (
        dy,
        matmul_transposed(dy, b, precision) * factor,
        kernel_gradient(u * factor, dy, precision),
    )


_add_product.defvjp(_add_product_forward, _add_product_backward)


def update_blocks(
    *arrays: jax.Array,
    function: Callable[..., jax.Array],
    count: int,
    outputs: tuple[int, ...],
    scale: float,
    precision: Any,
) -> jax.Array:
    """Call `function` with adapted products, inside of a chain of two linears.

    arrays: `count` products; x @ columns(); the other arguments of `function`; the matrices b.
    """
    products, u, rest = arrays[:count], arrays[count], arrays[count + 1 :]
    others, bs = rest[: len(rest) - len(outputs)], rest[len(rest) - len(outputs) :]
    return function(*LowRank((), bs, outputs, scale).update(products, u, precision), *others)


def factor_axes(kernel_axes: Any) -> tuple[Any, Any]:
    """Return the semantic axes of A and B: those of the rows and of the columns of the kernel."""
    *stack, rows, columns = getattr(kernel_axes, "axes", kernel_axes)
    return _hashable([*stack, rows, EMPTY]), _hashable([*stack, EMPTY, columns])


def _hashable(entry: Any) -> Any:
    return entry if entry is None or isinstance(entry, str) else tuple(map(_hashable, entry))


def add_adapter(
    linear: Any,
    outputs: Sequence[str],
    *,
    rank: int,
    scale: float,
    initializers: Mapping[str, Any],
) -> None:
    """Give a linear or a linear of experts the parameters `lora_a` and `lora_b`, beside its kernel.

    They are mappings by output, as the kernel is, or single parameters. B starts at zero.

    Args:
        linear: The linear; `kernel_names` names its outputs in order.
        outputs: Names of the outputs to adapt.
        rank: Columns of A.
        scale: Factor on the update.
        initializers: For each output (shape, dtype, out_sharding=...) -> initial A.
    """
    config = linear.parallel_config
    found: tuple[dict[str, nnx.Param], ...] = ({}, {})
    for name in outputs:
        kernel = linear.kernel[name] if name else linear.kernel
        *stack, rows, columns = kernel.shape
        shapes = (*stack, rows, rank), (*stack, rank, columns)
        axes = factor_axes(kernel.get_metadata()["semantic_axes"])
        for factors, shape, own, init in zip(
            found, shapes, axes, (initializers[name], jnp.zeros), strict=True
        ):
            options = {}
            if config is not None and config.mesh is not None:
                options = {"out_sharding": config.manager.resolve(own, shape=shape, name="adapter")}
            value = init(shape, kernel.dtype, **options)
            factors[name] = nnx.Param(value, semantic_axes=own)
    single = linear.kernel_names == ("",)
    linear.lora_a, linear.lora_b = (f[""] if single else nnx.Dict(f) for f in found)
    linear.lora_scale = scale


def adapter_of(linear: Any) -> LowRank | None:
    """Return the adapters of a linear, or None."""
    if getattr(linear, "lora_a", None) is None:
        return None
    if isinstance(linear.lora_a, nnx.Param):
        return LowRank((linear.lora_a[...],), (linear.lora_b[...],), (0,), linear.lora_scale)
    outputs = tuple(i for i, name in enumerate(linear.kernel_names) if name in linear.lora_a)
    a, b = (
        tuple(factors[linear.kernel_names[i]][...] for i in outputs)
        for factors in (linear.lora_a, linear.lora_b)
    )
    return LowRank(a, b, outputs, linear.lora_scale)
