"""Schedule-free AdamW equals optax's, at the point of its gradients and in its average."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import optax.contrib
import pytest
from conftest import ROOT, slow

from configs.build import abstract_batch, build_program
from configs.schema import ConfigError, load_config
from training.optimizers import OptimizerConfig, gradient_point, make_optimizer
from training.schedules import make_schedule

KEYS = ["optimizer.name=schedule_free_adamw", "optimizer.schedule=constant"]
CONFIG = OptimizerConfig(
    name="schedule_free_adamw",
    schedule="constant",
    learning_rate=3e-2,
    warmup_steps=5,
    weight_decay=0.3,
    clip_norm=None,
)


def test_thirty_steps_equal_optax():
    schedule = make_schedule(CONFIG, 30)
    ours, point = make_optimizer(CONFIG, schedule), gradient_point(CONFIG)
    assert point is not None
    theirs = optax.contrib.schedule_free(
        optax.chain(
            optax.scale_by_rms(CONFIG.beta2, CONFIG.eps, eps_in_sqrt=False, bias_correction=True),
            optax.add_decayed_weights(CONFIG.weight_decay),
            optax.scale_by_learning_rate(schedule),
        ),
        lambda count: schedule(count - 1),  # optax counts from 1, and weighs by the next rate
        b1=CONFIG.beta1,
        weight_lr_power=2.0,
    )
    rng = np.random.default_rng(0)
    x = {"attention": {"kernel": jnp.asarray(rng.normal(size=(6, 5)), jnp.float32)}}
    y, state, their_state = x, ours.init(x), theirs.init(x)
    for _ in range(30):
        at = point(x, state)
        np.testing.assert_allclose(*map(leaf, (at, y)), rtol=2e-5, atol=1e-6)
        grads = jax.tree.map(lambda y: jnp.sin(3 * y) + 0.1 * rng.normal(size=y.shape), y)
        updates, state = ours.update(grads, state, x)
        x = optax.apply_updates(x, updates)
        updates, their_state = theirs.update(grads, their_state, y)
        y = optax.apply_updates(y, updates)
        average = optax.contrib.schedule_free_eval_params(their_state, y)
        np.testing.assert_allclose(*map(leaf, (x, average)), rtol=2e-5, atol=1e-6)
    assert np.abs(leaf(x) - leaf(y)).max() > 1e-3


def leaf(tree):
    return np.asarray(tree["attention"]["kernel"])


@pytest.mark.parametrize(
    ("config", "extra"), [("tp8", []), slow("moe_ep8", []), slow("tp8", ["lora.rank=2"])]
)
def test_a_step_takes_the_gradients_between_average_and_steps(config, extra):
    config = load_config(ROOT / "configs" / f"{config}.yaml", [*KEYS, *extra, "model.remat=none"])
    program = build_program(config, jax.devices())
    with jax.set_mesh(program.tp.manager.mesh):
        state, batch = program.init(), abstract_batch(config, program)
        rng = np.random.default_rng(0)
        values = {"tokens": rng.integers(0, 256, batch["tokens"].shape)}
        values["targets"] = np.roll(values["tokens"], -1, -1)
        values["positions"] = np.broadcast_to(
            np.arange(batch["tokens"].shape[-1]), batch["tokens"].shape
        )
        values |= {
            "segment_ids": np.zeros(batch["tokens"].shape),
            "loss_mask": np.ones(batch["tokens"].shape),
        }
        batch = {
            name: jax.device_put(np.asarray(values[name], x.dtype), x.sharding)
            for name, x in batch.items()
        }
        for _ in range(3):
            state, _ = program.train_step(state, batch)
        point = jax.jit(gradient_point(config.optimizer))
        y = program.with_trained(
            state.params, point(program.trained(state.params), state.opt_state)
        )
        gradients = jax.jit(lambda params: program.gradients(params, batch)[0]["loss"])
        wanted, at_average = float(gradients(y)), float(gradients(state.params))
        state, metrics = program.train_step(state, batch)
    assert float(metrics["loss"]) == pytest.approx(wanted, rel=1e-6)
    assert abs(at_average - wanted) > 1e-4


def test_router_biases_move_with_the_load_alone():
    config = load_config(ROOT / "configs" / "moe_ep8.yaml", KEYS)
    program = build_program(config, jax.devices())
    optimizer = program.optimizer
    with jax.set_mesh(program.tp.manager.mesh):
        params = jax.tree.map(
            lambda x: jnp.ones(x.shape, x.dtype, device=x.sharding), program.abstract_state.params
        )
        state = optimizer.init(jax.tree.map(jnp.zeros_like, params))
        updates, state = jax.jit(optimizer.update)(params, state, params)
        y = jax.jit(gradient_point(config.optimizer))(params, state)
    bias, others = updates["sparse_layers"]["mlp"]["router"], updates["embed"]["table"]
    np.testing.assert_array_equal(bias["bias"], 0)
    np.testing.assert_array_equal(y["sparse_layers"]["mlp"]["router"]["bias"], 1)
    assert np.all(np.asarray(others) != 0)


REFUSED = {
    "optimizer.name=schedule_free_adamw": "optimizer.schedule=cosine: optimizer schedule_free_adam",
    "optimizer.moments_dtype=bfloat16": "optimizer.moments_dtype=bfloat16: the state of schedule",
}


@pytest.mark.parametrize(("key", "message"), REFUSED.items())
def test_what_an_average_does_not_allow_is_refused(key, message):
    keys = [key] if key in KEYS else [*KEYS, key]
    with pytest.raises(ConfigError, match=message):
        load_config(ROOT / "configs" / "tp8.yaml", keys)


def test_parameters_of_16_bits_are_refused():
    config = load_config(ROOT / "configs" / "tp8.yaml", [*KEYS, "model.param_dtype=bfloat16"])
    program = build_program(config, jax.devices())
    with jax.set_mesh(program.tp.manager.mesh):
        with pytest.raises(ValueError, match=r"needs float32; set model.param_dtype=float32"):
            _ = program.abstract_state


def test_a_group_without_a_rate_stays_as_it_is():
    keys = [*KEYS, "optimizer.groups={embedding: {learning_rate: 0}}", "optimizer.warmup_steps=0"]
    config = load_config(ROOT / "configs" / "tp8.yaml", keys)
    program = build_program(config, jax.devices())
    with jax.set_mesh(program.tp.manager.mesh):
        params = jax.tree.map(
            lambda x: jnp.ones(x.shape, x.dtype, device=x.sharding), program.abstract_state.params
        )
        updates, _ = jax.jit(program.optimizer.update)(
            params, program.optimizer.init(params), params
        )
    np.testing.assert_array_equal(updates["embed"]["table"], 0)
    assert np.all(np.asarray(updates["head"]["kernel"]) != 0)
