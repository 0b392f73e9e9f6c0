"""Matmuls that hide their communication: every hop of a ring travels under a partial product.

Every function here runs inside `jax.shard_map` on local blocks of a ring of n devices; s is this
device. What travels is rows (dim -2, tokens) or features (dim -1). `overlap="none"` is the plain
twin of each (one collective, one matmul, derivatives by autodiff); the other values walk a `Ring`
and carry derivative rules of their own: the derivative of a gather ring is the mirrored scatter
ring and the other way round, and the kernel's derivative multiplies `WGRAD_BLOCKS` blocks at a time
to fill the wait of that ring. Matmuls accumulate in float32 and arriving sums are added in float32;
sums that travel, and those of a kernel's derivative between its matmuls, have the dtype of x.
Blocks that the forward pass gathered are residuals: they are kept or, under a remat policy that
does not save them, gathered again. Reverse mode only: there is no jvp rule. It refuses to know what
the numbers mean: no model word in here.

Letters: R rows, D in features, F out features; x_k the block of device k, g a cotangent.
"""

from collections.abc import Callable, Sequence
from functools import partial, reduce
from typing import Any, Literal, get_args

import jax
import jax.numpy as jnp
from jax import lax

from parallel.linear.ring import Direction, Ring, all_gather, reduce_scatter, vary

Overlap = Literal["none", Direction]
"""How the communication of a linear is hidden under its matmuls; see `ring.Direction`."""

# Blocks per matmul of a kernel's derivative; libtpu reads stacked blocks as separate operands,
# up to four. Chosen by the compiled schedules of `scripts/bench.py overlap`, November 2026.
WGRAD_BLOCKS, CHAIN_WGRAD_BLOCKS = 2, 4

Dim = Literal[-2, -1]


def gather_matmul(
    x: jax.Array,
    kernels: Sequence[jax.Array],
    *,
    axis_name: str,
    dim: Dim,
    overlap: Overlap = "none",
    precision: lax.PrecisionLike = None,
) -> tuple[jax.Array, ...]:
    """All-gathers x over the ring and multiplies it with every kernel; one gather serves all.

    dim=-2: x `... R/n D`, kernel `D F/n` -> `... R F/n`, rows in natural order.
      forward y[rows k] = x_k W;  dgrad dx = scatter over k of g[rows k] W^T;
      wgrad dW = sum over k of x_k^T g[rows k].
    dim=-1: x `... R D/n`, kernel `D F/n` -> `... R F/n`, added in float32.
      forward y = sum over k of x_k W[rows k];  dgrad dx = scatter over k of g W[rows k]^T;
      wgrad dW[rows k] = x_k^T g.
    Communication: n - 1 blocks of x per device, as many of dx in the backward pass.
    Raises: ValueError for an unknown overlap, mixed dtypes, or blocks that `split` cannot halve.
    """
    ring = _ring(axis_name, overlap, x, dim, together=dim == -2)
    if ring is None:
        whole = all_gather(x, axis_name, dim)
        return tuple(jnp.matmul(whole, w, precision=precision) for w in kernels)
    x, *kernels = _alike(x, *kernels)
    rule = _gather_rows if dim == -2 else _gather_features
    return rule(ring, precision, x, tuple(kernels))


def matmul_scatter(
    x: jax.Array,
    kernel: jax.Array,
    *,
    axis_name: str,
    dim: Dim,
    overlap: Overlap = "none",
    precision: lax.PrecisionLike = None,
) -> jax.Array:
    """Multiplies and reduce-scatters the product over the ring.

    dim=-2: x `... R F/n`, kernel `F/n D` -> `... R/n D`.
      forward y = scatter over k of x[rows k] W;  dgrad dx[rows k] = g_k W^T;
      wgrad dW = sum over k of x[rows k]^T g_k.
    dim=-1: x `... R F/n`, kernel `F/n D` -> `... R D/n`.
      forward y = scatter over k of x W[cols k];  dgrad dx = sum over k of g_k W[cols k]^T;
      wgrad dW[cols k] = x^T g_k.
    Communication: n - 1 blocks of the result per device, as many of g in the backward pass.
    Raises: ValueError as `gather_matmul`, and for a result that does not divide into n blocks.
    """
    ring = _ring(axis_name, overlap, x, dim, together=dim == -2)
    if ring is None:
        return reduce_scatter(jnp.matmul(x, kernel, precision=precision), axis_name, dim)
    x, kernel = _alike(x, kernel)
    rule = _scatter_rows if dim == -2 else _scatter_features
    return rule(ring, precision, x, kernel)


def gather_matmul_scatter(
    x: jax.Array,
    kernels: Sequence[jax.Array],
    extras: Sequence[jax.Array],
    kernel: jax.Array,
    *,
    function: Callable[..., jax.Array],
    axis_name: str,
    overlap: Overlap = "none",
    precision: lax.PrecisionLike = None,
) -> jax.Array:
    """A column linear, elementwise work and a row linear, the blocks never put in natural order.

    x `... R/n D`, kernels `D F/n` each, kernel `F/n D` -> `... R/n D`. function: from the products
    `... r F/n`, then the extras (arrays `F/n`), to `... r F/n`, elementwise: it sees some rows and
    this device's features, never all of either. With
    a_k = x_k W and h_k = function(a_k):
      forward y = scatter over k of h_k V;  dgrad dh_k = g_k V^T, da_k = function'(a_k) dh_k,
      dx = scatter over k of da_k W^T;  wgrad dW = sum of x_k^T da_k, dV = sum of h_k^T g_k.
    Communication: n - 1 blocks of x and of y per device, as many of g and dx in the backward pass.
    Raises: ValueError for an unknown overlap, mixed dtypes, or blocks that `split` cannot halve.
    """
    ring = _ring(axis_name, overlap, x, -2, together=False)
    function = partial(_in_dtype, function=function, dtype=x.dtype)
    if ring is not None:
        x, kernel, *rest = _alike(x, kernel, *kernels, *extras)
        kernels, extras = rest[: len(kernels)], rest[len(kernels) :]
        return _chain(function, ring, precision, x, tuple(kernels), tuple(extras), kernel)
    whole = all_gather(x, axis_name, -2)
    products = [jnp.matmul(whole, w, precision=precision) for w in kernels]
    y = jnp.matmul(function(*products, *extras), kernel, precision=precision)
    return reduce_scatter(y, axis_name, -2)


def _ring(axis_name: str, overlap: Overlap, x: jax.Array, dim: Dim, together: bool) -> Ring | None:
    """The ring to walk; None: there is nothing to hide, or nothing shall be hidden."""
    if overlap not in get_args(Overlap):
        raise ValueError(f"overlap {overlap!r}: use {', '.join(get_args(Overlap))}")
    if overlap == "none" or lax.axis_size(axis_name) == 1:
        return None
    # Halves of the batch are contiguous, halves of the rows of every sequence are not.
    halve_batch = dim == -2 and x.ndim > 2 and x.shape[0] % 2 == 0
    return Ring(axis_name, overlap, halve_batch, together)


def _in_dtype(
    *arrays: jax.Array, function: Callable[..., jax.Array], dtype: jnp.dtype
) -> jax.Array:
    return function(*arrays).astype(dtype)


def _alike(*arrays: jax.Array) -> list[jax.Array]:
    """Arrays of one dtype, typed as varying over the same axes: so are then their derivatives."""
    if len({array.dtype for array in arrays}) > 1:
        raise ValueError(
            f"a ring multiplies arrays of one dtype, got {', '.join(str(a.dtype) for a in arrays)}"
            "; cast them first"
        )
    axes = set().union(*(jax.typeof(array).manual_axis_type.varying for array in arrays))
    return [vary(array, tuple(sorted(axes))) for array in arrays]


def _matmul(x: jax.Array, w: jax.Array, precision: Any, **options: Any) -> jax.Array:
    """x @ w: `... D`, `D F` -> `... F`."""
    dims = (((x.ndim - 1,), (0,)), ((), ()))
    return lax.dot_general(x, w, dims, precision=precision, **options)


def _matmul_t(x: jax.Array, w: jax.Array, precision: Any, **options: Any) -> jax.Array:
    """x @ w^T: `... F`, `D F` -> `... D`."""
    dims = (((x.ndim - 1,), (1,)), ((), ()))
    return lax.dot_general(x, w, dims, precision=precision, **options)


def _outer(x: jax.Array, g: jax.Array, precision: Any) -> jax.Array:
    """x^T @ g over all rows: `... D`, `... F` -> `D F`."""
    rows = tuple(range(x.ndim - 1))
    return lax.dot_general(x, g, ((rows, rows), ((), ())), precision=precision)


def _wgrad(
    xs: Sequence[jax.Array],
    gs: Sequence[jax.Array],
    precision: Any,
    blocks: int = WGRAD_BLOCKS,
) -> jax.Array:
    """The sum over positions of x_k^T g_k, some blocks per matmul."""
    groups = (slice(start, start + blocks) for start in range(0, len(xs), blocks))
    parts = (_outer(jnp.stack(xs[some]), jnp.stack(gs[some]), precision) for some in groups)
    return reduce(jnp.add, parts)


def _sum(terms: Sequence[jax.Array]) -> jax.Array:
    """Added in float32, rounded once."""
    if len(terms) == 1:
        return terms[0]
    wide = jnp.promote_types(terms[0].dtype, jnp.float32)
    return reduce(jnp.add, (term.astype(wide) for term in terms)).astype(terms[0].dtype)


def _beside(kernels: Sequence[jax.Array]) -> jax.Array:
    """One kernel as wide as all of them: one matmul, and one derivative with respect to x."""
    return kernels[0] if len(kernels) == 1 else jnp.concatenate(kernels, axis=1)


def _apart(y: jax.Array, kernels: Sequence[jax.Array]) -> tuple[jax.Array, ...]:
    """The columns of each of the kernels that lie beside each other."""
    if len(kernels) == 1:
        return (y,)
    return tuple(lax.split(y, [w.shape[1] for w in kernels], axis=y.ndim - 1))


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _gather_rows(
    ring: Ring, precision: Any, x: jax.Array, kernels: tuple[jax.Array, ...]
) -> tuple[jax.Array, ...]:
    return _gather_rows_forward(ring, precision, x, kernels)[0]


def _gather_rows_forward(
    ring: Ring, precision: Any, x: jax.Array, kernels: tuple[jax.Array, ...]
) -> tuple[tuple[jax.Array, ...], Any]:
    # A kernel of half the columns or more has a matmul, and so a result written in place, of its
    # own; narrow ones would each read x again and share one.
    total = sum(w.shape[1] for w in kernels)
    narrow = [i for i, w in enumerate(kernels) if 2 * w.shape[1] < total]
    groups = [*([i] for i in range(len(kernels)) if i not in narrow), *([narrow] if narrow else [])]
    used = [_beside([kernels[i] for i in group]) for group in groups]
    blocks, products = ring.gather(
        x, lambda _, block: [_matmul(block, w, precision) for w in used], -2
    )
    outs: dict[int, jax.Array] = {}
    for group, ys in zip(groups, zip(*products, strict=True), strict=True):
        whole = ring.place(ys, -2)
        outs |= zip(group, _apart(whole, [kernels[i] for i in group]), strict=True)
    return tuple(outs[i] for i in range(len(kernels))), (blocks, kernels)


def _gather_rows_backward(ring: Ring, precision: Any, residuals: Any, gs: Any) -> Any:
    blocks, kernels = residuals
    w, cut = _beside(kernels), ring.cut(jnp.concatenate(gs, axis=-1), -2)
    taken = [cut(position) for position in range(len(blocks))]
    dx = ring.scatter(
        taken.__getitem__, lambda g: _matmul_t(g, w, precision), dim=-2, followed=True
    )
    return dx, _apart(_wgrad(blocks, taken, precision), kernels)


_gather_rows.defvjp(_gather_rows_forward, _gather_rows_backward)


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _scatter_rows(ring: Ring, precision: Any, x: jax.Array, w: jax.Array) -> jax.Array:
    return ring.scatter(ring.cut(x, -2), lambda rows: _matmul(rows, w, precision), dim=-2)


def _scatter_rows_forward(
    ring: Ring, precision: Any, x: jax.Array, w: jax.Array
) -> tuple[jax.Array, Any]:
    return _scatter_rows(ring, precision, x, w), (x, w)


def _scatter_rows_backward(ring: Ring, precision: Any, residuals: Any, g: jax.Array) -> Any:
    x, w = residuals
    cut = ring.cut(x, -2)
    gs, products = ring.gather(g, lambda _, block: _matmul_t(block, w, precision), -2)
    taken = [cut(position) for position in range(len(gs))]
    return ring.place(products, -2), _wgrad(taken, gs, precision)


_scatter_rows.defvjp(_scatter_rows_forward, _scatter_rows_backward)


def _features_sum(
    ring: Ring, x: jax.Array, product: Callable[..., jax.Array]
) -> tuple[list[jax.Array], jax.Array]:
    """Blocks of x, and the sum over positions of product(position, block), added in float32."""
    sums: list[jax.Array] = []

    def add(position: int, block: jax.Array) -> jax.Array:
        wide = jnp.promote_types(x.dtype, jnp.float32)
        part = product(position, block, preferred_element_type=wide)
        sums.append(sums[-1] + part if sums else part)
        return sums[-1]

    blocks, running = ring.gather(x, add, -1)
    return blocks, running[-1].astype(x.dtype)


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _gather_features(
    ring: Ring, precision: Any, x: jax.Array, kernels: tuple[jax.Array, ...]
) -> tuple[jax.Array, ...]:
    return _gather_features_forward(ring, precision, x, kernels)[0]


def _gather_features_forward(
    ring: Ring, precision: Any, x: jax.Array, kernels: tuple[jax.Array, ...]
) -> tuple[tuple[jax.Array, ...], Any]:
    rows = ring.cut(_beside(kernels), 0)

    def product(position: int, block: jax.Array, **options: Any) -> jax.Array:
        return _matmul(block, rows(position), precision, **options)

    blocks, y = _features_sum(ring, x, product)
    return _apart(y, kernels), (blocks, kernels)


def _gather_features_backward(ring: Ring, precision: Any, residuals: Any, gs: Any) -> Any:
    blocks, kernels = residuals
    rows, g = ring.cut(_beside(kernels), 0), jnp.concatenate(gs, axis=-1)
    dx = ring.scatter(rows, lambda w: _matmul_t(g, w, precision), dim=-1, followed=True)
    dkernel = ring.place([_outer(block, g, precision) for block in blocks], 0)
    return dx, _apart(dkernel, kernels)


_gather_features.defvjp(_gather_features_forward, _gather_features_backward)


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _scatter_features(ring: Ring, precision: Any, x: jax.Array, w: jax.Array) -> jax.Array:
    return ring.scatter(ring.cut(w, 1), lambda columns: _matmul(x, columns, precision), dim=-1)


def _scatter_features_forward(
    ring: Ring, precision: Any, x: jax.Array, w: jax.Array
) -> tuple[jax.Array, Any]:
    return _scatter_features(ring, precision, x, w), (x, w)


def _scatter_features_backward(ring: Ring, precision: Any, residuals: Any, g: jax.Array) -> Any:
    x, w = residuals
    columns = ring.cut(w, 1)

    def product(position: int, block: jax.Array, **options: Any) -> jax.Array:
        return _matmul_t(block, columns(position), precision, **options)

    gs, dx = _features_sum(ring, g, product)
    return dx, ring.place([_outer(x, block, precision) for block in gs], 1)


_scatter_features.defvjp(_scatter_features_forward, _scatter_features_backward)


@partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2))
def _chain(
    function: Callable[..., jax.Array],
    ring: Ring,
    precision: Any,
    x: jax.Array,
    kernels: tuple[jax.Array, ...],
    extras: tuple[jax.Array, ...],
    kernel: jax.Array,
) -> jax.Array:
    return _chain_forward(function, ring, precision, x, kernels, extras, kernel, False)[0]


def _chain_forward(
    function: Callable[..., jax.Array],
    ring: Ring,
    precision: Any,
    x: jax.Array,
    kernels: tuple[jax.Array, ...],
    extras: tuple[jax.Array, ...],
    kernel: jax.Array,
    followed: bool = True,
) -> tuple[jax.Array, Any]:
    blocks, products, y = ring.gather_scatter(
        x,
        lambda _, block: [_matmul(block, w, precision) for w in kernels],
        lambda a: _matmul(function(*a, *extras), kernel, precision),
        dim=-2,
        followed=followed,
    )
    return y, (blocks, products, kernels, extras, kernel)


def _chain_backward(
    function: Callable[..., jax.Array],
    ring: Ring,
    precision: Any,
    residuals: Any,
    g: jax.Array,
) -> Any:
    blocks, products, kernels, extras, kernel = residuals

    def pull(position: int, block: jax.Array) -> tuple[jax.Array, Any]:
        # The hidden block is a second output of the fusion that has it anyway, and pinned there.
        hidden, vjp = jax.vjp(function, *products[position], *extras)
        return hidden, vjp(_matmul_t(block, kernel, precision))

    count = len(kernels)
    gs, pulled, dx = ring.gather_scatter(
        g,
        pull,
        lambda result: _sum(
            [_matmul_t(da, w, precision) for da, w in zip(result[1][:count], kernels, strict=True)]
        ),
        dim=-2,
        followed=True,
    )
    wgrad = partial(_wgrad, precision=precision, blocks=CHAIN_WGRAD_BLOCKS)
    hidden = [h for h, _ in pulled]
    cotangents = list(zip(*(c for _, c in pulled), strict=True))
    dkernels = tuple(wgrad(blocks, das) for das in cotangents[:count])
    dextras = tuple(_sum(parts) for parts in cotangents[count:])
    return dx, dkernels, dextras, wgrad(hidden, gs)


_chain.defvjp(_chain_forward, _chain_backward)
