"""Muon: orthogonalised momentum for matrices (kellerjordan.github.io/posts/muon).

Kernels of attention, MLPs and experts are trained by Muon, and the other parameters by AdamW. The
steps of matrices are scaled to the root mean square that steps of AdamW usually have, so that both
share the learning rate and the weight decay (arXiv 2502.16982).
"""

from functools import partial
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import optax
from pydantic import PositiveFloat, PositiveInt

from parallel.sharding.whole_matrices import map_whole_matrices
from training.optimizers.adamw import adamw
from training.optimizers.config import Fraction, OptimizerConfig
from training.optimizers.parameters import decay_weights, matrices
from training.optimizers.registry import keep_if_bad, register, tree_where

# The quintic iteration of the reference implementation: singular values end in 0.7 to 1.2.
_COEFFICIENTS = (3.4445, -4.7750, 2.0315)


class MuonState(NamedTuple):
    """The momentum of matrices."""

    momentum: Any


@register(
    "muon",
    obeys_is_good=True,
    matrix_moments=1,
    never_negative=("nu",),
    decays_by_group=True,
    width_powers=(0.5, 1),
)
def muon(
    config: OptimizerConfig,
    schedule: optax.Schedule,
    *,
    momentum: Fraction = 0.95,
    nesterov: bool = True,
    iterations: PositiveInt = 5,
    rms: PositiveFloat = 0.2,
    dtype: Literal["bfloat16"] | None = None,
) -> optax.GradientTransformationExtraArgs:
    """Return Muon for matrices and AdamW for the rest.

    Args:
        config: `beta1`, `beta2` and `eps` are those of AdamW.
        schedule: learning rate of a step, for all parameters.
        momentum: decay of the mean of gradients.
        nesterov: whether a step mixes the newest gradient into the momentum once more.
        iterations: steps of the Newton-Schulz iteration.
        rms: root mean square of a step before the learning rate.
        dtype: type in which matrices travel between devices, and of the factors of products; None:
            that of the gradients, with float32 factors. TPUs round these to bfloat16 anyway, which
            changes a step by about 2 %.
    """
    matrix = optax.chain(
        _scale_by_momentum(momentum, nesterov),
        optax.stateless(lambda grads, _: orthogonal_steps(grads, iterations, rms, dtype)),
        decay_weights(config),
        keep_if_bad(optax.scale_by_learning_rate(schedule)),
    )

    def names(params: Any) -> Any:
        return jax.tree.map(lambda x: "muon" if x else "adamw", matrices(params))

    return optax.partition({"muon": matrix, "adamw": adamw(config, schedule)}, names)


def _scale_by_momentum(decay: float, nesterov: bool) -> optax.GradientTransformationExtraArgs:
    """Return a transformation of gradients to their moving mean, which bad steps leave as it is."""

    def init(params: Any) -> MuonState:
        return MuonState(optax.tree.zeros_like(params))

    def update(
        grads: Any, state: MuonState, params: Any = None, *, is_good: Any = True, **_: Any
    ) -> tuple[Any, MuonState]:
        mean = optax.tree.update_moment(grads, state.momentum, decay, 1)
        mean = tree_where(is_good, mean, state.momentum)
        step = optax.tree.update_moment(grads, mean, decay, 1) if nesterov else mean
        return step, MuonState(mean)

    return optax.GradientTransformationExtraArgs(init, update)


def orthogonal_steps(tree: Any, iterations: int, rms: float, dtype: str | None = None) -> Any:
    """Return nearly orthogonal matrices with this root mean square, for stacks (..., M, N).

    They are exchanged and multiplied in `dtype` (None: exchanged as they are, and multiplied in
    float32), and returned in the dtype of the arguments.

    Communication: see `map_whole_matrices`.
    """
    stacks, structure = jax.tree.flatten(tree)
    found = map_whole_matrices(
        partial(newton_schulz, iterations=iterations, dtype=dtype or "float32"),
        [x.astype(dtype or x.dtype) for x in stacks],
    )
    steps = [
        y.astype(x.dtype) * (rms * max(x.shape[-2:]) ** 0.5)
        for x, y in zip(stacks, found, strict=True)
    ]
    return jax.tree.unflatten(structure, steps)


def newton_schulz(matrix: jax.Array, *, iterations: int, dtype: str = "float32") -> jax.Array:
    """Return a matrix (M, N) with the same singular vectors, and singular values of about 1.

    dtype: that of the factors of products.

    Products have the platform's default precision: TPUs round float32 factors to bfloat16, GPUs to
    TF32. A matrix of zeros stays as it is.
    """
    a, b, c = _COEFFICIENTS
    is_tall = matrix.shape[0] > matrix.shape[1]
    x = (matrix.T if is_tall else matrix).astype(jnp.float32)
    x = (x / (jnp.linalg.norm(x) + 1e-8)).astype(dtype)

    def product(left: jax.Array, right: jax.Array) -> jax.Array:
        left, right = left.astype(dtype), right.astype(dtype)
        return jnp.matmul(left, right, preferred_element_type=jnp.float32)

    for _ in range(iterations):
        square = product(x, x.T)
        polynomial = b * square + c * product(square, square)
        x = (a * x + product(polynomial, x)).astype(dtype)
    return (x.T if is_tall else x).astype(matrix.dtype)
