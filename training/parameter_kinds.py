"""Kinds of parameters by the layer that they belong to: embedding, attention, MLP, experts, ..."""

from typing import Any, Literal, get_args

ParameterKind = Literal["embedding", "attention", "mlp", "experts", "norms", "head"]
KINDS: tuple[ParameterKind, ...] = get_args(ParameterKind)
"""All kinds. Routers and shared experts count as experts."""


def kind_of_parameter(path: tuple[Any, ...]) -> ParameterKind:
    """Return the kind of a parameter of `Transformer`.

    path: the keys that lead to it, as jax.tree_util gives them.
    """
    parts = [str(part.key) for part in path]
    if any(part.endswith("norm") for part in parts):
        return "norms"
    if parts[0] == "embed":
        return "embedding"
    if parts[0] == "head":
        return "head"
    if "attention" in parts:
        return "attention"
    is_mlp = "mlp" in parts or parts[0] == "mtp"  # the projections of multi-token prediction
    assert is_mlp, f"{'.'.join(parts)} belongs to no kind of layer"
    return "experts" if parts[0] == "sparse_layers" else "mlp"
