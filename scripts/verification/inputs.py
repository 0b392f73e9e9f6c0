"""Parameters and batches of a verification, in numpy: the same on every mesh.

Experts are a discrete choice, which a rounding may turn where two of them are nearly equal. So that
it decides nothing, a few features of the residual stream are kept for routing: each token has
levels there that differ clearly from expert to expert and from group to group, no layer writes to
them, and the kernel of the router reads mostly them.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from configs.schema import Config
from training.state import TrainState
from training.step import Program

NOISE = 0.1
HIGHEST_LEVEL, LEVEL_RATIO = 4.0, 0.75
ROUTER_NOISE, ROUTER_BIAS_NOISE = 0.01, 0.005


def name_of(path: tuple[Any, ...]) -> str:
    """Return the name of a leaf of a tree of parameters, such as layers/mlp/down/kernel."""
    return "/".join(str(key.key) for key in path)


def initial_state(program: Program, config: Config, seed: int) -> TrainState:
    """Return the state of a step in numpy; parameters are rounded to the configured dtype.

    Parameters that all start equal (norms, biases, sinks, one factor of adapters) get noise, so
    that every parameter has an effect. A reference model differs from the trained one.
    """
    rng = np.random.default_rng(seed)
    with jax.set_mesh(program.tp.manager.mesh):
        state = jax.tree.map(np.asarray, program.init())

    def with_noise(value: np.ndarray) -> np.ndarray:
        if not jnp.issubdtype(value.dtype, jnp.floating) or value.std() > 0:
            return value
        return value + NOISE * rng.standard_normal(value.shape)

    params = jax.tree.map(with_noise, state.params)
    if config.model.moe.num_experts:
        params = _decide_experts(params, config, rng)
    params = jax.tree.map(lambda x: _rounded(x, config.model.param_dtype), params)
    reference = state.reference
    if reference is not None:
        reference = jax.tree.map(
            lambda x: x * (1 + NOISE * rng.standard_normal(x.shape)), program.trained(params)
        )
    return dataclasses.replace(state, params=params, reference=reference)


def _rounded(value: np.ndarray, dtype: str) -> np.ndarray:
    if not jnp.issubdtype(value.dtype, jnp.floating):
        return value
    return value.astype(jnp.dtype(dtype)).astype(np.float32)


def _decide_experts(params: Any, config: Config, rng: np.random.Generator) -> Any:
    """Return the parameters with features of the residual stream that only routing reads."""
    experts = config.model.moe.num_experts

    def changed(path: tuple[Any, ...], value: np.ndarray) -> np.ndarray:
        keys = name_of(path).split("/")
        if keys[0] == "embed":
            value = value.copy()
            value[:, :experts] = routing_levels(len(value), experts, config.model.moe.n_group, rng)
        elif keys[-2:] == ["router", "bias"]:
            value = ROUTER_BIAS_NOISE * rng.standard_normal(value.shape)
        elif keys[-2:] == ["router", "kernel"]:
            value = ROUTER_NOISE * rng.standard_normal(value.shape)
            value[..., range(experts), range(experts)] += 1
        elif {"o", "down"} & {*keys} and value.shape[-1] == config.model.hidden_size:
            value = value.copy()
            value[..., :experts] = 0
        return value

    return jax.tree_util.tree_map_with_path(changed, params)


def routing_levels(tokens: int, experts: int, groups: int, rng: np.random.Generator) -> np.ndarray:
    """Return a level per expert for every token, `T E`: the same levels in a random order.

    A router ranks a group of experts by its one or two best. These are above the two best of every
    lower group, so that the sums of two groups are never nearly equal.
    """
    levels = HIGHEST_LEVEL * LEVEL_RATIO ** np.arange(experts)
    best = min(2, experts // groups)
    highest, others = levels[: groups * best], levels[groups * best :]
    others_TGM = rng.permuted(np.tile(others, (tokens, 1)), axis=1).reshape(tokens, groups, -1)
    highest_TGM = np.broadcast_to(highest.reshape(groups, best), (tokens, groups, best))
    levels_TGM = rng.permuted(np.concatenate([highest_TGM, others_TGM], axis=2), axis=2)
    order_TG = rng.random((tokens, groups)).argsort(axis=1)
    return np.take_along_axis(levels_TGM, order_TG[:, :, None], axis=1).reshape(tokens, experts)


def random_batch(config: Config, seed: int) -> dict[str, np.ndarray]:
    """Return fields `A B/A L` of packed documents, with padding and tokens without a loss.

    The tokens of a row differ from one another.
    """
    rng = np.random.default_rng(seed)
    parts, length = config.training.gradient_accumulation, config.data.row_length
    rows = config.data.batch_sizes[0]
    segments = np.sort(rng.integers(0, 3, (rows, length)), axis=1)
    segments[2, -length // 4 :] = -1
    first = np.array([[np.flatnonzero(row == s)[0] for s in row] for row in segments])
    every = np.tile(np.arange(config.model.vocab_size), (2, rows, 1))
    tokens, targets = rng.permuted(every, axis=2)[:, :, :length]
    fields = {
        "tokens": tokens.astype(np.int32),
        "targets": targets.astype(np.int32),
        "positions": (np.arange(length) - first).astype(np.int32),
        "segment_ids": segments.astype(np.int32),
        "loss_mask": ((rng.random((rows, length)) < 0.8) & (segments >= 0)).astype(np.float32),
    }
    return {name: field.reshape(parts, rows // parts, length) for name, field in fields.items()}
