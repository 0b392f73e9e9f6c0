"""muP: rates and initial values of kernels scale with the width, the weight decay does not."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import ROOT

from configs.build import build_program
from configs.schema import ConfigError, load_config
from training.optimizers.parameters import matrices
from training.parameter_kinds import kind_of_parameter

BASE = "model.mup_base_width=64"  # the model is four times as wide
RATE = 1e-3
KEYS = [
    f"optimizer.learning_rate={RATE}",
    "optimizer.warmup_steps=0",
    "optimizer.schedule=constant",
    "optimizer.clip_norm=null",
]


def program_of(*keys: str):
    config = load_config(ROOT / "configs" / "moe_ep8.yaml", ["model.hidden_size=256", *KEYS, *keys])
    program = build_program(config, jax.devices())
    with jax.set_mesh(program.tp.manager.mesh):
        assert program.abstract_state
    return program


def is_kernel(path) -> bool:
    return any(key.key == "kernel" for key in path)


def leaves(tree):
    return [(path, np.asarray(x)) for path, x in jax.tree_util.tree_leaves_with_path(tree)]


def test_initial_kernels_shrink_with_the_width():
    trees = []
    for keys in ((), (BASE,)):
        program = program_of(*keys)
        with jax.set_mesh(program.tp.manager.mesh):
            trees.append(program.init().params)
    is_matrix = jax.tree.leaves(matrices(trees[0]))
    factors = set()
    for (path, plain), (_, scaled), matrix in zip(*map(leaves, trees), is_matrix, strict=True):
        factor = (0.5 if matrix else 0.25) if is_kernel(path) else 1
        factors.add((factor, kind_of_parameter(path)))
        np.testing.assert_allclose(scaled, factor * plain, rtol=1e-6, err_msg=str(path))
    assert {(0.25, "head"), (0.25, "experts"), (0.5, "experts"), (1, "embedding")} <= factors


def update_of(name: str, gradient: float, *keys: str):
    """Return the first update from equal gradients, at parameters of ones."""
    program = program_of(f"optimizer.name={name}", *keys)
    with jax.set_mesh(program.tp.manager.mesh):
        rng = np.random.default_rng(0)
        params = jax.tree.map(
            lambda x: jnp.ones(x.shape, x.dtype, device=x.sharding), program.abstract_state.params
        )
        grads = jax.tree.map(
            lambda x: jax.device_put(
                gradient * rng.normal(size=x.shape).astype(x.dtype), x.sharding
            ),
            params,
        )
        state = jax.jit(program.optimizer.init)(params)
        return jax.jit(program.optimizer.update)(grads, state, params)[0]


@pytest.mark.parametrize(
    ("name", "matrix"), [("adamw", 0.25), ("lion", 0.25), ("muon", 0.5), ("adafactor", 0.25)]
)
@pytest.mark.costly
def test_steps_of_kernels_shrink_with_the_width_and_their_decay_does_not(name, matrix):
    decay = "optimizer.weight_decay=0.3"
    plain, scaled = (
        leaves(update_of(name, 1.0, "optimizer.weight_decay=0", *keys)) for keys in ((), (BASE,))
    )
    both = leaves(update_of(name, 1.0, decay, BASE))
    is_matrix = jax.tree.leaves(matrices(update_of(name, 1.0)))
    for (path, x), (_, y), (_, z), of_layer in zip(plain, scaled, both, is_matrix, strict=True):
        factor = (matrix if of_layer else 0.25) if is_kernel(path) else 1
        where = jax.tree_util.keystr(path)
        np.testing.assert_allclose(y, factor * x, rtol=1e-5, atol=1e-9, err_msg=where)
        decayed = is_kernel(path) or "table" in where
        wanted = y - RATE * 0.3 * decayed
        np.testing.assert_allclose(z, wanted, rtol=1e-4, atol=1e-8, err_msg=where)


REFUSED = {
    "model.tie_word_embeddings=true": "model.mup_base_width=64: muP gives embedding and head diffe",
    "lora.rank=2": "model.mup_base_width=64 is not supported with lora.rank=2; remove it",
    "optimizer.name=sgd": "model.mup_base_width=64: optimizer sgd has no rule for the width; use",
}


@pytest.mark.parametrize(("key", "message"), REFUSED.items())
def test_what_has_no_rule_for_the_width_is_refused(key, message):
    with pytest.raises(ConfigError, match=message):
        load_config(ROOT / "configs" / "tp8.yaml", [BASE, key])
