"""SOAP: AdamW in the eigenbasis of Shampoo's statistics (arXiv 2409.11321).

The kernels of attention, MLPs and experts are trained by SOAP, and the other parameters by AdamW.
A gradient G (M, N) is rotated to the eigenvectors of the moving means of G Gᵀ and Gᵀ G, Adam
computes its step there, and the step is rotated back.

As in the paper, the eigenvectors follow these means by one step of orthogonal iteration every
`interval` updates. Differences from it:

- They start as the identity instead of the eigenvectors of the first gradient. So the first update
  is AdamW's instead of none, and some updates pass until they are near the eigenvectors.
- d I is added to a mean in the iteration. It keeps the vectors well defined in directions that no
  gradient has had, where rounding errors would choose them.
- Embedding and head are trained by AdamW.
"""

import math
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from pydantic import NonNegativeFloat, PositiveInt

from parallel.sharding.specs import mesh_axes_of
from parallel.sharding.whole_matrices import map_whole_matrices
from training.optimizers.adamw import adamw
from training.optimizers.config import OptimizerConfig
from training.optimizers.parameters import decay_weights, matrices
from training.optimizers.registry import keep_if_bad, register, tree_where

_MAX_SIZE = 8192
# The long side of a low-rank factor would need as much memory as a whole kernel.
_MAX_RATIO = 16


class Side(NamedTuple):
    """Statistics of the rows or of the columns of matrices, K of them.

    statistic: float32 (..., K, K), the moving mean of G Gᵀ or Gᵀ G. basis: float32 (..., K, K), its
    approximate eigenvectors as columns.
    """

    statistic: jax.Array
    basis: jax.Array


Sides = tuple[Side | None, Side | None]
"""The statistics of the rows and of the columns; None: these are not rotated."""


class Kernel(NamedTuple):
    """The arrays of a stack of matrices (..., M, N) that an update replaces.

    step: the gradient before the update, and the step after it. nu: the moving mean of the squares
    of rotated gradients.
    """

    step: jax.Array
    nu: jax.Array
    sides: Sides


class SoapState(NamedTuple):
    """Number of updates, the moving mean of gradients, and that of the squares of rotated ones.

    sides: a tree like that of the parameters, with `Sides` in their places.
    """

    num_updates: jax.Array
    mu: Any
    nu: Any
    sides: Any


def _is_rotated(size: int, other: int, max_size: int) -> bool:
    """Return whether gradients are rotated on a side of this size, where the other is `other`."""
    return size <= max_size and size <= _MAX_RATIO * other


def _kernel_values(config: OptimizerConfig, rows: int, columns: int) -> int:
    """Return the values of statistics and bases of a kernel."""
    most = config.options.get("max_size", _MAX_SIZE)
    sides = (rows, columns), (columns, rows)
    return sum(2 * size**2 for size, other in sides if _is_rotated(size, other, most))


@register(
    "soap",
    obeys_is_good=True,
    kernel_values=_kernel_values,
    never_negative=("nu",),
    exact=("sides",),
    decays_by_group=True,
)
def soap(
    config: OptimizerConfig,
    schedule: optax.Schedule,
    *,
    interval: PositiveInt = 10,
    max_size: PositiveInt = _MAX_SIZE,
    damping: NonNegativeFloat = 1e-3,
) -> optax.GradientTransformationExtraArgs:
    """Return SOAP for matrices and AdamW for the rest.

    Args:
        config: `beta1`, `beta2` and `eps` are those of both; `beta2` is the decay of the
            statistics too.
        schedule: learning rate of a step, for all parameters.
        interval: updates between two steps of the orthogonal iteration; the paper's default.
        max_size: more rows or columns than this are not rotated. Neither are those that are more
            than 16 times as many as the other side has.
        damping: d, relative to the mean eigenvalue of a statistic.
    """
    matrix = optax.chain(
        _scale_by_soap(config, interval, max_size, damping),
        decay_weights(config),
        keep_if_bad(optax.scale_by_learning_rate(schedule)),
    )

    def names(params: Any) -> Any:
        return jax.tree.map(lambda x: "soap" if x else "adamw", matrices(params))

    return optax.partition({"soap": matrix, "adamw": adamw(config, schedule)}, names)


def _scale_by_soap(
    config: OptimizerConfig, interval: int, max_size: int, damping: float
) -> optax.GradientTransformationExtraArgs:
    betas = config.beta1, config.beta2
    step_of = partial(_update, betas=betas, eps=config.eps, interval=interval, damping=damping)

    def init(params: Any) -> SoapState:
        mu, nu = optax.tree.zeros_like(params), optax.tree.zeros_like(params)
        sides = jax.tree.map(partial(_first_sides, max_size=max_size), params)
        return SoapState(jnp.zeros((), jnp.int32), mu, nu, sides)

    def update(
        grads: Any, state: SoapState, params: Any = None, *, is_good: Any = True, **_: Any
    ) -> tuple[Any, SoapState]:
        mu = optax.tree.update_moment(grads, state.mu, config.beta1, 1)
        mu = tree_where(is_good, mu, state.mu)
        tree = jax.tree.map(Kernel, grads, state.nu, state.sides)
        kernels = jax.tree.leaves(tree, is_leaf=lambda x: isinstance(x, Kernel))
        shared = [jnp.asarray(is_good), state.num_updates]
        found = map_whole_matrices(step_of, kernels, jax.tree.leaves(mu), shared)
        num_updates = tree_where(
            is_good, optax.safe_increment(state.num_updates), state.num_updates
        )
        steps, nu, sides = (
            jax.tree.unflatten(
                jax.tree.structure(grads), [getattr(kernel, field) for kernel in found]
            )
            for field in Kernel._fields
        )
        return steps, SoapState(num_updates, mu, nu, sides)

    return optax.GradientTransformationExtraArgs(init, update)


def _first_sides(x: jax.Array, *, max_size: int) -> Sides:
    """Return the first statistics and bases of a stack of matrices (..., M, N).

    They are divided over all mesh axes that divide the matrices, as far as the sizes allow.
    """
    sharding = jax.typeof(x).sharding

    def first(size: int, other: int, of_size: Any, of_other: Any) -> Side | None:
        if not _is_rotated(size, other, max_size):
            return None
        basis = jnp.broadcast_to(jnp.eye(size, dtype=jnp.float32), (*x.shape[:-2], size, size))
        if not sharding.mesh.empty:
            parts = math.prod(sharding.mesh.shape[name] for name in mesh_axes_of(of_other))
            second = None if size % parts else of_other
            spec = P(*sharding.spec[:-2], of_size, second)
            basis = jax.sharding.reshard(basis, NamedSharding(sharding.mesh, spec))
        return Side(jnp.zeros_like(basis), basis)

    rows, columns = sharding.spec[-2:] if len(sharding.spec) else (None, None)
    M, N = x.shape[-2:]
    return first(M, N, rows, columns), first(N, M, columns, rows)


def _update(
    kernel: Kernel,
    mean: jax.Array,
    is_good: jax.Array,
    num_updates: jax.Array,
    *,
    betas: tuple[float, float],
    eps: float,
    interval: int,
    damping: float,
) -> Kernel:
    """Return the step of a matrix, its moments and its sides after an update.

    kernel: of a matrix (M, N). mean: the moving mean of its gradients. is_good: otherwise moments
    and sides stay as they are. num_updates: those before this one.
    """
    decay, sides = betas[1], kernel.sides
    gradient, mean = kernel.step.astype(jnp.float32), mean.astype(jnp.float32)
    square = jnp.square(_rotated(gradient, sides))
    nu = decay * kernel.nu.astype(jnp.float32) + (1 - decay) * square
    corrections = [1 - beta ** (num_updates + 1).astype(jnp.float32) for beta in betas]
    root = jnp.sqrt(nu / corrections[1])
    step = _rotated(mean / corrections[0], sides) / (root + eps)
    products = (_product(gradient, gradient.T), _product(gradient.T, gradient))
    is_due = is_good & (num_updates % interval == 0)
    after: list[Side | None] = []
    for side, product in zip(sides, products, strict=True):
        if side is None:
            after.append(None)
            continue
        moved = decay * side.statistic + (1 - decay) * product
        statistic = jnp.where(is_good, moved, side.statistic)
        follow = partial(next_basis, damping=damping)
        basis = lax.cond(is_due, follow, lambda _, basis: basis, statistic, side.basis)
        after.append(Side(statistic, basis))
    nu = jnp.where(is_good, nu.astype(kernel.nu.dtype), kernel.nu)
    step = _rotated(step, sides, is_back=True).astype(kernel.step.dtype)
    return Kernel(step, nu, (after[0], after[1]))


def _rotated(x: jax.Array, sides: Sides, *, is_back: bool = False) -> jax.Array:
    """Return a matrix (M, N), float32, in the bases of its sides, or back in the original ones."""
    left, right = (None if side is None else side.basis for side in sides)
    if left is not None:
        x = _product(left if is_back else left.T, x)
    if right is not None:
        x = _product(x, right.T if is_back else right)
    return x


def next_basis(statistic: jax.Array, basis: jax.Array, *, damping: float) -> jax.Array:
    """Return the basis (K, K) after one step of orthogonal iteration for a statistic (K, K).

    It is the orthogonal factor of (S + d I) Q, which is computed from the column with the largest
    eigenvalue to that with the smallest, because each column is made orthogonal to those before it.
    Columns keep their places, and their directions rather than the opposite ones: the moments of
    the optimizer belong to them. Without any gradient, the basis stays as it is.
    """
    product = _product(statistic, basis)
    order = jnp.argsort(-jnp.sum(basis * product, axis=0))
    trace = jnp.trace(statistic)
    product += jnp.where(trace > 0, damping * trace / len(statistic), 1.0) * basis
    found, triangle = jnp.linalg.qr(product[:, order])
    found *= jnp.where(jnp.diagonal(triangle) < 0, -1.0, 1.0)
    return found[:, jnp.argsort(order)]


def _product(a: jax.Array, b: jax.Array) -> jax.Array:
    """Return a product in full float32.

    With fewer bits, rounding errors would be larger than the smallest of the rotated gradients,
    which Adam divides by their own size.
    """
    return jnp.matmul(a, b, precision=lax.Precision.HIGHEST)
