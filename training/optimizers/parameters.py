"""Treatment of parameters by kind: weight decay, rates of groups, and which are matrices."""

from typing import Any

import jax
import jax.numpy as jnp
import optax

from training.optimizers.config import GroupConfig, OptimizerConfig
from training.parameter_kinds import kind_of_parameter

_DECAYED = {"kernel", "table", "lora_a", "lora_b"}
_NOT_DECAYED = {"scale", "bias", "logit_bias", "sinks"}


def decays(params: Any) -> Any:
    """Return a tree of bools: whether weight decay applies to a parameter.

    True for kernels, embedding tables and adapters; False for norm scales, biases and attention
    sinks.

    Raises:
        ValueError: a parameter of an unknown kind.
    """

    def is_decayed(path: tuple[Any, ...], _: Any) -> bool:
        keys = {getattr(key, "key", None) for key in path}
        if not keys & (_DECAYED | _NOT_DECAYED):
            raise ValueError(
                f"parameter {jax.tree_util.keystr(path, simple=True, separator='.')} has an "
                "unknown kind; state in training/optimizers/parameters.py whether it decays"
            )
        return not keys & _NOT_DECAYED

    return jax.tree_util.tree_map_with_path(is_decayed, params)


def is_router_bias(path: tuple[Any, ...]) -> bool:
    """Return whether a parameter is a router bias, which the load of experts moves.

    It has no gradient: see `model.moe.bias_update_speed`.
    """
    return [getattr(key, "key", None) for key in path[-2:]] == ["router", "bias"]


_MATRICES = {"kernel", "lora_a", "lora_b"}
_NOT_BETWEEN_FEATURES = {"embed", "head", "router", "shared_gate"}


def matrices(params: Any) -> Any:
    """Return a tree of bools: whether a parameter is a matrix between features, or a stack of them.

    True for the kernels of attention, MLPs and experts, and for their adapters. False for the
    embedding, the head, routers and the gates of shared experts: there a row or a column stands for
    a token or an expert.
    """

    def is_matrix(path: tuple[Any, ...], _: Any) -> bool:
        keys = {getattr(key, "key", None) for key in path}
        return bool(keys & _MATRICES) and not keys & _NOT_BETWEEN_FEATURES

    return jax.tree_util.tree_map_with_path(is_matrix, params)


def width_rates(params: Any, share: float, powers: tuple[float, float]) -> Any:
    """Return a tree of factors of learning rates: those of kernels fall with powers of the width.

    share: the width for which the rate was chosen, as a share of this one.
    powers: for the kernels of layers, and for other kernels: of the head, routers and gates.
    """

    def rate(path: tuple[Any, ...], is_matrix: bool) -> float:
        if not any(getattr(key, "key", None) == "kernel" for key in path):
            return 1.0
        return float(share ** powers[0 if is_matrix else 1])

    return jax.tree_util.tree_map_with_path(rate, matrices(params))


def decay_weights(config: OptimizerConfig) -> optax.GradientTransformation:
    """Return a transformation that adds weight decay to the steps of parameters that decay."""
    uniform = optax.add_decayed_weights(config.weight_decay, decays)
    if not config.groups:
        return uniform

    def update(steps: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        def decayed(path: tuple[Any, ...], step: jax.Array, x: jax.Array, decay: bool) -> jax.Array:
            factor = _group(config, path).weight_decay
            factor = config.weight_decay if factor is None else factor
            return step + factor * x if decay else step

        steps = jax.tree_util.tree_map_with_path(decayed, steps, params, decays(params))
        return steps, state

    return optax.GradientTransformation(uniform.init, update)


def scale_groups(config: OptimizerConfig, updates: Any) -> Any:
    """Return updates, multiplied by the learning rates of their groups."""
    return jax.tree_util.tree_map_with_path(
        lambda path, update: _group(config, path).learning_rate * update, updates
    )


def frozen_kinds(config: OptimizerConfig) -> frozenset[str]:
    """Return the kinds of layers whose learning rate is 0."""
    return frozenset(kind for kind, group in config.groups.items() if group.learning_rate == 0)


def without_kinds(grads: Any, kinds: frozenset[str]) -> Any:
    """Return gradients that are 0 for these kinds of layers, so that no norm counts them."""
    return jax.tree_util.tree_map_with_path(
        lambda path, grad: jnp.zeros_like(grad) if kind_of_parameter(path) in kinds else grad, grads
    )


def _group(config: OptimizerConfig, path: tuple[Any, ...]) -> GroupConfig:
    return config.groups.get(kind_of_parameter(path), GroupConfig())
