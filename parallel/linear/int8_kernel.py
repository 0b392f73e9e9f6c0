"""Kernels of linears stored as int8, with a float32 scale for every output column.

A kernel stays int8 in memory and in the gather over the axes that only store it. It becomes float
again just before the matmul: w = values * scale. Such a kernel is frozen.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jax.sharding import PartitionSpec as P

from parallel.linear.low_rank import factor_axes

SCALE = "kernel_scale"
"""Name of the parameter with the scales, beside the kernel of its linear."""
_STEP = 1 / 127


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Int8Kernel:
    """A quantized kernel. Also the tree of its PartitionSpecs."""

    values: Any
    """int8 `... D F`."""
    scale: Any
    """float32 `... 1 F`."""

    def floats(self, dtype: jax.typing.DTypeLike = jnp.float32) -> jax.Array:
        """Return the kernel, computed in float32 and rounded once."""
        return (self.values.astype(jnp.float32) * self.scale).astype(dtype)


Kernel = jax.Array | Int8Kernel


def quantize(kernel: jax.Array) -> Int8Kernel:
    """Return a kernel `... D F` as int8; the largest entry of a column becomes 127 or -127."""
    wide = kernel.astype(jnp.float32)
    largest = jnp.max(jnp.abs(wide), axis=-2, keepdims=True)
    scale = jnp.where(largest > 0, largest * _STEP, 1)
    return Int8Kernel(jnp.round(wide / scale).astype(jnp.int8), scale)


def floats(kernel: Kernel) -> jax.Array:
    """Return a kernel in a floating dtype: float32 if it is quantized, else its own."""
    return kernel.floats() if isinstance(kernel, Int8Kernel) else kernel


def kernel_specs(kernels: Sequence[Kernel], spec: P) -> list[Any]:
    """Return the layouts of kernels for shard_map.

    spec: Layout of a kernel that is not quantized.
    """
    return [
        Int8Kernel(spec, scale_spec(spec)) if isinstance(kernel, Int8Kernel) else spec
        for kernel in kernels
    ]


def values_spec(spec: Any) -> P:
    """Return the layout of a kernel, as `kernel_specs` returns it, without that of its scales."""
    return spec.values if isinstance(spec, Int8Kernel) else spec


def scale_spec(spec: P) -> P:
    """Return the layout of the scales of a kernel with this layout."""
    return P(*spec[:-2], None, spec[-1])


def frozen(kernel: Kernel) -> Kernel:
    """Return a kernel without a gradient."""
    return jax.tree.map(lax.stop_gradient, kernel)


def with_scales(linear: Any, kernels: Sequence[jax.Array]) -> list[Kernel]:
    """Return the kernels of a linear, in the order of its outputs, with scales if it has them."""
    scales = getattr(linear, SCALE, None)
    if scales is None:
        return list(kernels)
    if isinstance(scales, nnx.Param):
        return [Int8Kernel(kernels[0], scales[...])]
    names = linear.kernel_names
    return [Int8Kernel(w, scales[name][...]) for w, name in zip(kernels, names, strict=True)]


def store_as_int8(linear: Any) -> None:
    """Quantize the kernels of a linear, and give it their scales."""
    if isinstance(linear.kernel, nnx.Param):
        linear.kernel_scale = _quantize_parameter(linear.kernel)
    else:
        scales = {name: _quantize_parameter(kernel) for name, kernel in linear.kernel.items()}
        linear.kernel_scale = nnx.Dict(scales)


def _quantize_parameter(kernel: nnx.Param) -> nnx.Param:
    """Quantize a parameter, and return a parameter with its scales.

    Scales have one row and the columns of the kernel, as the matrix B of an adapter.
    """
    found = quantize(kernel[...])
    kernel.set_value(found.values)
    axes = factor_axes(kernel.get_metadata()["semantic_axes"])[1]
    return nnx.Param(found.scale, semantic_axes=axes)
