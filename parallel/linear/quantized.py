"""Matmuls of int8 or float8 values: operands are quantized before they are multiplied or sent.

Every row of activations and every column of a kernel has a scale of its own, or every array one
scale, so that the largest entry becomes the largest value of the type. Parameters, sums and what a
remat policy saves keep their types. Libraries such as qwix replace the matmuls of a model and
derive their gradients; here matmuls are parts of rings that have derivative rules of their own, so
only products are needed.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name

RESULT_NAME = "quantized_product"
"""`checkpoint_name` of results: remat policies keep them in place of the wide sums."""
Product = Literal["forward", "dgrad", "wgrad"]
"""y = x W, dx = dy W^T, and dW = x^T dy."""
MatmulDtype = Literal["int8", "fp8_e4m3"]
Scales = Literal["channel", "tensor"]
"""A scale per row of activations and per column of a kernel, or one per array of a device."""

# (type, largest value, type in which products are summed)
_TYPES: dict[MatmulDtype, tuple[Any, float, Any]] = {
    "int8": (jnp.int8, 127.0, jnp.int32),
    "fp8_e4m3": (jnp.float8_e4m3fn, 448.0, jnp.float32),
}
_MAX_INT8_TERMS = 2**31 // 127**2


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Quantized:
    """An array of small values, times a scale. A pytree, so that it travels as an array does."""

    values: jax.Array
    """int8 or float8."""
    scale: jax.Array
    """float32; 1 along the dims that share a scale, else the size of the values."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of `values`."""
        return self.values.shape

    @property
    def ndim(self) -> int:
        """Number of dims of `values`."""
        return self.values.ndim

    def floats(self, dtype: jax.typing.DTypeLike) -> jax.Array:
        """Return the array, computed in float32 and rounded once."""
        return (self.values.astype(jnp.float32) * self.scale).astype(dtype)


Operand = jax.Array | Quantized


@dataclass(frozen=True)
class QuantizedMatmul:
    """Quantization of a matmul, passed as its precision."""

    dtype: MatmulDtype
    products: tuple[Product, ...]
    """Products that it is for; others have the type of their operands."""
    scales: Scales = "channel"

    def quantize(
        self, x: jax.Array, over: Sequence[int], axes: str | tuple[str, ...] = ()
    ) -> Quantized:
        """Return an array with one scale for all entries along the dims `over`.

        With one scale per array, `over` is all dims. Source: symmetric quantization by the largest
        entry, as in arXiv 2105.03536.

        axes: Mesh axes whose devices share the scales. Communication: an all-reduce of these.
        """
        dtype, largest, _ = _TYPES[self.dtype]
        wide = x.astype(jnp.float32)
        over = range(x.ndim) if self.scales == "tensor" else over
        absmax = jnp.max(jnp.abs(wide), axis=tuple(over), keepdims=True)
        absmax = lax.pmax(absmax, axes) if axes else absmax
        # A scale below the normal numbers could become 0. NaN and infinities stay in the scale.
        smallest = largest * jnp.finfo(jnp.float32).tiny
        scale = jnp.where(absmax < smallest, 1, absmax * (1 / largest))
        values = wide / scale
        if self.dtype == "int8":
            values = jnp.round(values)
        return Quantized(values.astype(dtype), scale)

    def dot(
        self,
        x: Operand,
        y: Operand,
        axes: tuple[Sequence[int], Sequence[int]],
        product: Product,
        preferred_element_type: Any = None,
    ) -> jax.Array:
        """Return the sum of x * y over `axes` of x and of y: the other dims of x, then those of y.

        Where the scales of a quantized operand differ along a dim of the sum, they are multiplied
        into the other operand before that is quantized.

        Raises: ValueError if sums of int8 products could overflow.
        """
        dims = ((tuple(axes[0]), tuple(axes[1])), ((), ()))
        dtype = next((a.dtype for a in (x, y) if not isinstance(a, Quantized)), jnp.float32)
        if product not in self.products:
            x, y = (a.floats(dtype) if isinstance(a, Quantized) else a for a in (x, y))
            return lax.dot_general(x, y, dims, preferred_element_type=preferred_element_type)
        self._check_terms(math.prod(x.shape[axis] for axis in axes[0]))
        x, y = _fold(x, y, *axes)
        y, x = _fold(y, x, *axes[::-1])
        x, y = (
            a if isinstance(a, Quantized) else self.quantize(a, over)
            for a, over in zip((x, y), axes, strict=True)
        )
        total = lax.dot_general(
            x.values, y.values, dims, preferred_element_type=_TYPES[self.dtype][2]
        ).astype(jnp.float32)
        rows = jnp.squeeze(x.scale, tuple(axes[0]))
        rows = rows.reshape(*rows.shape, *[1] * (total.ndim - rows.ndim))
        total = total * rows * jnp.squeeze(y.scale, tuple(axes[1]))
        return checkpoint_name(total.astype(preferred_element_type or dtype), RESULT_NAME)

    def _check_terms(self, terms: int) -> None:
        if self.dtype == "int8" and terms > _MAX_INT8_TERMS:
            raise ValueError(
                f"an int8 matmul over {terms:,} terms could overflow; at most {_MAX_INT8_TERMS:,} "
                "are safe: raise training.gradient_accumulation, or leave the product out of "
                "model.matmul_products"
            )


Precision = lax.PrecisionLike | QuantizedMatmul


def _fold(
    a: Operand, b: Operand, a_axes: Sequence[int], b_axes: Sequence[int]
) -> tuple[Operand, Operand]:
    """Return (a, b) with the scales of a in b, if they differ along the dims that are summed."""
    if not isinstance(a, Quantized) or all(a.scale.shape[axis] == 1 for axis in a_axes):
        return a, b
    others = tuple(axis for axis in range(a.ndim) if axis not in a_axes)
    shape = [1] * b.ndim
    for axis, size in zip(b_axes, jnp.squeeze(a.scale, others).shape, strict=True):
        shape[axis] = size
    wide = b.floats(jnp.float32) if isinstance(b, Quantized) else b.astype(jnp.float32)
    scaled = wide * jnp.squeeze(a.scale, others).reshape(shape)
    one = jnp.ones([1] * a.ndim, jnp.float32)
    return Quantized(a.values, one), scaled


def rows_for(x: jax.Array, precision: Any, product: Product) -> Operand:
    """Return rows as they travel before this product: quantized, if the product is.

    Every row has a scale, equal ones if it is one per array: rings cut values and scales alike.
    """
    if not isinstance(precision, QuantizedMatmul) or product not in precision.products:
        return x
    rows = precision.quantize(x, (x.ndim - 1,))
    return replace(rows, scale=jnp.broadcast_to(rows.scale, (*x.shape[:-1], 1)))
