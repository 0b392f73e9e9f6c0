"""L2 norms, in float32: of all gradients, and by kind of layer (attention, MLP, ...)."""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from training.parameter_kinds import KINDS, kind_of_parameter


def global_norm(tree: Any) -> jax.Array:
    """Return the norm of all arrays of a tree together. Communication: a sum over all devices."""
    return optax.tree.norm(_as_float32(tree))


def clip_by_global_norm(max_norm: float) -> optax.GradientTransformation:
    """Return optax's clipping, computed in float32 whatever the dtype of the gradients is."""
    clip = optax.clip_by_global_norm(max_norm)

    def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        clipped, state = clip.update(_as_float32(updates), state, params)
        return jax.tree.map(lambda new, old: new.astype(old.dtype), clipped, updates), state

    return optax.GradientTransformation(clip.init, update)


def _as_float32(tree: Any) -> Any:
    return jax.tree.map(lambda x: x.astype(jnp.float32), tree)


def norms_by_kind(grads: Any, before: Any, params: Any) -> dict[str, jax.Array]:
    """Return [norm of gradients, of parameters, of their changes] of every kind, (3,) float32.

    grads, before, params: gradients, and parameters before and after an update; trees of one
    structure. Communication: the sums of squares over all devices, scalars.
    """
    changes = jax.tree.map(
        lambda new, old: new.astype(jnp.float32) - old.astype(jnp.float32), params, before
    )
    norms = [_norms(tree) for tree in (grads, params, changes)]
    return {kind: jnp.stack([found[kind] for found in norms]) for kind in norms[0]}


def _norms(tree: Any) -> dict[str, jax.Array]:
    squares: dict[str, jax.Array] = {}
    for path, x in jax.tree_util.tree_leaves_with_path(tree):
        kind = kind_of_parameter(path)
        squares[kind] = squares.get(kind, 0.0) + jnp.sum(jnp.square(x.astype(jnp.float32)))
    return {kind: jnp.sqrt(total) for kind, total in squares.items()}


def norm_metrics(norms: Mapping[str, np.ndarray]) -> dict[str, float]:
    """Return the metrics of a step.

    They are `param_norm`, and of every kind `grad_norm/KIND`, `param_norm/KIND` and
    `update_ratio/KIND`, the norm of the change over that of the parameters.
    """
    kinds = [kind for kind in KINDS if kind in norms]
    metrics = {"param_norm": float(np.sqrt(sum(float(norms[kind][1]) ** 2 for kind in kinds)))}
    for index, name in enumerate(("grad_norm", "param_norm")):
        metrics |= {f"{name}/{kind}": float(norms[kind][index]) for kind in kinds}
    for kind in kinds:
        _, after, change = map(float, norms[kind])
        metrics[f"update_ratio/{kind}"] = change / after if after else 0.0
    return metrics
