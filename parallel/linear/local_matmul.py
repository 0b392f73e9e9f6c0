"""Matmuls of local blocks, as the collective matmuls use them.

Nothing here communicates. Letters: D in features, F out features.
"""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial, reduce
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from parallel.linear.quantized import (
    RESULT_NAME,
    Operand,
    Product,
    Quantized,
    QuantizedMatmul,
)
from parallel.linear.ring import same_type

# Blocks per matmul of a kernel gradient; libtpu reads stacked blocks as separate operands, up to
# four. Chosen by the compiled schedules of `scripts/bench.py overlap`, November 2026.
WGRAD_BLOCKS, CHAIN_WGRAD_BLOCKS = 2, 4


def plain_matmul(x: jax.Array, w: jax.Array, precision: Any = None) -> jax.Array:
    """Return `jnp.matmul(x, w)`, `... D`, `D F` -> `... F`, whose derivative is fast on CPUs.

    It multiplies all rows as one matrix. With several dims of rows, XLA:CPU transposes dy for the
    kernel's gradient, element by element, together with all that computes dy: three times as long.
    """
    rows = x.reshape(-1, x.shape[-1])
    if isinstance(precision, QuantizedMatmul):
        y = checkpoint_name(_quantized_matmul(precision, *same_type(rows, w)), RESULT_NAME)
    else:
        y = jnp.matmul(rows, w, precision=precision)
    return y.reshape(*x.shape[:-1], w.shape[-1])


def matmul(x: Operand, w: Operand, precision: Any, **options: Any) -> jax.Array:
    """Return x @ w: `... D`, `D F` -> `... F`."""
    return dot(x, w, ((x.ndim - 1,), (0,)), precision, "forward", **options)


def matmul_transposed(x: Operand, w: Operand, precision: Any, **options: Any) -> jax.Array:
    """Return x @ w^T: `... F`, `D F` -> `... D`."""
    return dot(x, w, ((x.ndim - 1,), (1,)), precision, "dgrad", **options)


def kernel_gradient(x: Operand, dy: Operand, precision: Any, dtype: Any = None) -> jax.Array:
    """Return x^T @ dy over all rows: `... D`, `... F` -> `D F`."""
    rows = tuple(range(x.ndim - 1))
    return dot(x, dy, (rows, rows), precision, "wgrad", preferred_element_type=dtype)


def dot(
    x: Operand,
    y: Operand,
    axes: tuple[Sequence[int], Sequence[int]],
    precision: Any,
    product: Product,
    **options: Any,
) -> jax.Array:
    """Return the sum of x * y over `axes` of x and of y: the other dims of x, then those of y."""
    if isinstance(precision, QuantizedMatmul):
        return precision.dot(x, y, axes, product, **options)
    if isinstance(x, Quantized) or isinstance(y, Quantized):
        raise TypeError("quantized operands need a QuantizedMatmul as precision")
    return lax.dot_general(x, y, (axes, ((), ())), precision=precision, **options)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _quantized_matmul(precision: QuantizedMatmul, x: jax.Array, w: jax.Array) -> jax.Array:
    return matmul(x, w, precision)


def _quantized_forward(precision: QuantizedMatmul, x: jax.Array, w: jax.Array) -> Any:
    # Not inlined, for the sake of remat policies: see `collective_matmul`.
    return _quantized_matmul(precision, x, w), (x, w)


def _quantized_backward(precision: QuantizedMatmul, residuals: Any, dy: jax.Array) -> Any:
    x, w = residuals
    return matmul_transposed(dy, w, precision), kernel_gradient(x, dy, precision)


_quantized_matmul.defvjp(_quantized_forward, _quantized_backward)


def kernel_gradient_of_blocks(
    xs: Sequence[Operand],
    dys: Sequence[Operand],
    precision: Any,
    blocks: int = WGRAD_BLOCKS,
    dtype: Any = None,
) -> jax.Array:
    """Return the sum over positions of xs[k]^T @ dys[k], several blocks of a shape per matmul."""
    stack = partial(jax.tree.map, lambda *blocks: jnp.stack(blocks))
    by_shape: dict[tuple[int, ...], list[int]] = {}
    for position, x in enumerate(xs):
        by_shape.setdefault(x.shape, []).append(position)
    groups = (
        same[start : start + blocks]
        for same in by_shape.values()
        for start in range(0, len(same), blocks)
    )
    parts = (
        kernel_gradient(
            stack(*(xs[k] for k in group)), stack(*(dys[k] for k in group)), precision, dtype
        )
        for group in groups
    )
    return reduce(jnp.add, parts)


def add_in_float32(terms: Sequence[jax.Array]) -> jax.Array:
    """Add in float32 and round once."""
    if len(terms) == 1:
        return terms[0]
    wide = jnp.promote_types(terms[0].dtype, jnp.float32)
    return reduce(jnp.add, (term.astype(wide) for term in terms)).astype(terms[0].dtype)


def concat_columns(kernels: Sequence[jax.Array]) -> jax.Array:
    """Return arrays side by side: kernels for one matmul and one dx, or products."""
    return kernels[0] if len(kernels) == 1 else jnp.concatenate(kernels, axis=-1)


def split_columns(y: jax.Array, kernels: Sequence[jax.Array]) -> tuple[jax.Array, ...]:
    """Split the last dim into the columns of each kernel; reverses `concat_columns`."""
    if len(kernels) == 1:
        return (y,)
    return tuple(lax.split(y, [w.shape[-1] for w in kernels], axis=y.ndim - 1))


def trained_columns(dy: Operand, kernels: Sequence[jax.Array], frozen: int) -> Operand:
    """Return the columns of dy that belong to `kernels[frozen:]`; its rows may be quantized."""
    start = sum(w.shape[1] for w in kernels[:frozen])
    if not start:
        return dy
    if isinstance(dy, Quantized):  # the columns of a row share its scale
        return replace(dy, values=dy.values[..., start:])
    return dy[..., start:]


def split_gradient(
    dw: jax.Array, kernels: Sequence[jax.Array], frozen: int
) -> tuple[jax.Array | None, ...]:
    """Return the gradients of kernels side by side from that of `kernels[frozen:]`."""
    return (*[None] * frozen, *split_columns(dw, kernels[frozen:]))
