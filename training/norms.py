"""L2 norms of gradients and parameters by kind of layer: embedding, attention, MLP, experts, ..."""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

KINDS = ("embedding", "attention", "mlp", "experts", "norms", "head")
"""All kinds of layers. Routers and shared experts count as experts."""


def layer_kind(path: str) -> str:
    """Return the kind of the layer that a parameter belongs to.

    path: the dotted path of a parameter of `Transformer`.
    """
    parts = path.split(".")
    if any(part.endswith("norm") for part in parts):
        return "norms"
    top = {"embed": "embedding", "head": "head"}.get(parts[0])
    if top is not None:
        return top
    if "attention" in parts:
        return "attention"
    assert "mlp" in parts, f"{path} belongs to no kind of layer"
    return "experts" if parts[0] == "sparse_layers" else "mlp"


def norms_by_kind(grads: Any, params: Any) -> dict[str, jax.Array]:
    """Return [norm of the gradients, norm of the parameters] of every kind, (2,) float32.

    grads, params: trees of one structure. Communication: the sums of squares over all devices,
    scalars.
    """
    norms = {name: _norms(tree) for name, tree in (("grads", grads), ("params", params))}
    return {
        kind: jnp.stack([norms["grads"][kind], norms["params"][kind]]) for kind in norms["grads"]
    }


def _norms(tree: Any) -> dict[str, jax.Array]:
    squares: dict[str, jax.Array] = {}
    for path, x in jax.tree_util.tree_leaves_with_path(tree):
        kind = layer_kind(".".join(str(part.key) for part in path))
        squares[kind] = squares.get(kind, 0.0) + jnp.sum(jnp.square(x.astype(jnp.float32)))
    return {kind: jnp.sqrt(total) for kind, total in squares.items()}


def norm_metrics(norms: Mapping[str, np.ndarray]) -> dict[str, float]:
    """Return the metrics `grad_norm/KIND`, `param_norm/KIND` and `param_norm` of a step."""
    kinds = [kind for kind in KINDS if kind in norms]
    metrics = {"param_norm": float(np.sqrt(sum(float(norms[kind][1]) ** 2 for kind in kinds)))}
    for index, name in enumerate(("grad_norm", "param_norm")):
        metrics |= {f"{name}/{kind}": float(norms[kind][index]) for kind in kinds}
    return metrics
