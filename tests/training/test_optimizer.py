"""Schedules against closed formulas, weight decay of a real tree, AdamW against numpy."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from conftest import ROOT
from hypothesis import given, settings
from hypothesis import strategies as st

from configs.build import build_program
from configs.schema import load_config
from training import optimizers, schedules
from training.optimizers import (
    OPTIMIZERS,
    OptimizerConfig,
    check_optimizer,
    decays,
    describe_unread_keys,
    make_optimizer,
)
from training.schedules import (
    SCHEDULES,
    describe_change,
    describe_schedule_warnings,
    make_schedule,
)

PEAK = 3e-3
LONGEST = 48
NAMES = ["cosine", "linear", "wsd", "inverse_sqrt", "constant"]


def rates(config: OptimizerConfig, steps: int) -> np.ndarray:
    """Return the learning rate of every step, and of the one after the last."""
    schedule = make_schedule(config, steps)
    return np.asarray(schedule(jnp.arange(LONGEST + 1)))[: steps + 1]


def formula(config: OptimizerConfig, steps: int, step: int) -> float:
    """Compute the documented learning rate in double precision."""
    peak, final = config.learning_rate, config.learning_rate * config.final_fraction
    warmup = min(config.warmup_steps, steps)
    if step < warmup:
        return peak * (step + 1) / warmup
    if config.schedule == "constant":
        return peak
    if config.schedule == "cosine":
        done = (step - warmup) / max(1, steps - warmup)
        return final + (peak - final) * (1 + math.cos(math.pi * done)) / 2
    if config.schedule == "linear":
        return peak + (final - peak) * (step - warmup) / max(1, steps - warmup)
    if config.schedule == "inverse_sqrt":
        return peak * math.sqrt(max(1, warmup) / (step + (warmup == 0)))
    decay = min(config.decay_steps or max(1, steps // 10), steps - warmup)
    down = max(0, step - (steps - decay))
    return peak + (final - peak) * down / max(1, decay)


@settings(deadline=None, max_examples=60)
@given(
    schedule=st.sampled_from(NAMES),
    steps=st.integers(1, LONGEST),
    warmup=st.integers(0, 2 * LONGEST),
    decay=st.integers(0, 2 * LONGEST),
    final=st.sampled_from([0.0, 0.1, 1.0]),
)
def test_a_schedule_equals_its_closed_formula_at_every_step(schedule, steps, warmup, decay, final):
    config = OptimizerConfig(
        learning_rate=PEAK,
        schedule=schedule,
        warmup_steps=warmup,
        decay_steps=decay,
        final_fraction=final,
    )
    wanted = [formula(config, steps, step) for step in range(steps)]
    np.testing.assert_allclose(rates(config, steps)[:steps], wanted, rtol=0, atol=1e-6 * PEAK)


@pytest.mark.parametrize("schedule", NAMES)
def test_schedules_at_their_corner_steps(schedule):
    config = OptimizerConfig(
        learning_rate=PEAK, schedule=schedule, warmup_steps=10, decay_steps=8, final_fraction=0.25
    )
    found = rates(config, 40) / PEAK
    corners = {
        "cosine": {10: 1, 25: 0.625, 40: 0.25},
        "linear": {10: 1, 25: 0.625, 30: 0.5, 40: 0.25},
        "inverse_sqrt": {10: 1, 25: 0.4**0.5, 40: 0.5},
        "wsd": {10: 1, 31: 1, 32: 1, 36: 0.625, 40: 0.25},
        "constant": {10: 1, 25: 1, 39: 1, 40: 1},
    }[schedule]
    for step, wanted in {0: 0.1, 4: 0.5, 9: 1, **corners}.items():
        assert found[step] == pytest.approx(wanted, rel=1e-6), step


@pytest.mark.parametrize("schedule", NAMES)
@pytest.mark.parametrize("warmup", [0, 1])
def test_without_warm_up_the_first_step_has_the_peak(schedule, warmup):
    config = OptimizerConfig(learning_rate=PEAK, schedule=schedule, warmup_steps=warmup)
    assert rates(config, 20)[0] == pytest.approx(PEAK, rel=1e-6)


@pytest.mark.parametrize("schedule", NAMES)
def test_a_schedule_takes_python_numbers_from_the_first_step_on(schedule):
    config = OptimizerConfig(learning_rate=PEAK, schedule=schedule, warmup_steps=4)
    assert [float(make_schedule(config, 12)(step)) for step in range(12)] == pytest.approx(
        [float(rate) for rate in rates(config, 12)[:12]], rel=1e-6
    )


@pytest.mark.parametrize("schedule", NAMES)
@pytest.mark.parametrize("warmup", [12, 13, 1000])
def test_a_warm_up_longer_than_the_run_reaches_the_peak_at_the_last_step(schedule, warmup):
    config = OptimizerConfig(learning_rate=PEAK, schedule=schedule, warmup_steps=warmup)
    np.testing.assert_allclose(rates(config, 12)[:12], PEAK * np.arange(1, 13) / 12, rtol=1e-6)


def test_a_warm_up_longer_than_the_run_is_said():
    config = OptimizerConfig(warmup_steps=20)
    assert [*describe_schedule_warnings(config, 20)] == []
    (line,) = describe_schedule_warnings(config, 19)
    assert "optimizer.warmup_steps=20 is more than the 19 steps of the schedule" in line
    assert line.endswith("raise training.steps")
    kept = config.model_copy(update={"schedule_steps": 20})
    assert [*describe_schedule_warnings(kept, 10)] == []
    (line,) = describe_schedule_warnings(config.model_copy(update={"schedule_steps": 9}), 40)
    assert line.endswith("raise optimizer.schedule_steps")
    (line,) = describe_schedule_warnings(kept, 40)
    assert "leaves no step of the schedule for a decay" in line
    assert [*describe_schedule_warnings(kept.model_copy(update={"schedule": "constant"}), 40)] == []


@pytest.mark.parametrize(
    ("moments", "param_dtype", "count"),
    [(None, "bfloat16", 1), ("bfloat16", "bfloat16", 0), (None, "float32", 0)],
)
def test_moments_that_are_rounded_to_the_nearest_value_are_said(moments, param_dtype, count):
    lines = [*OptimizerConfig(moments_dtype=moments).warnings(param_dtype)]
    assert len(lines) == count
    assert all("set optimizer.moments_dtype=bfloat16" in line for line in lines)


def test_a_decay_longer_than_the_run_is_said():
    config = OptimizerConfig(schedule="wsd", warmup_steps=5, decay_steps=15)
    assert [*describe_schedule_warnings(config, 20)] == []
    (line,) = describe_schedule_warnings(config, 19)
    assert "optimizer.decay_steps=15 is more than the 14 steps after warm-up" in line
    (line,) = describe_schedule_warnings(OptimizerConfig(warmup_steps=5, decay_steps=15), 40)
    assert "optimizer.decay_steps=15 has no effect with optimizer.schedule=cosine" in line
    kept = config.model_copy(update={"schedule_steps": 20})
    assert [*describe_schedule_warnings(kept, 10)] == []


def test_a_final_rate_that_a_schedule_does_not_reach_is_said():
    given = OptimizerConfig(final_fraction=0.0)
    for schedule in ("inverse_sqrt", "constant"):
        (line,) = describe_schedule_warnings(given.model_copy(update={"schedule": schedule}), 200)
        assert f"final_fraction=0.0 has no effect with optimizer.schedule={schedule}; use" in line
    assert [*describe_schedule_warnings(given, 200)] == []


def test_keys_that_an_optimizer_does_not_read_are_said():
    given = {"beta1": 0.95, "beta2": 0.99, "eps": 1e-6}
    unread = {"sgd": [*given], "adafactor": [*given], "lion": ["eps"]}
    for name in OPTIMIZERS:
        lines = [*describe_unread_keys(OptimizerConfig(name=name, **given))]
        assert [line.partition("=")[0].partition(".")[2] for line in lines] == unread.get(name, [])
        assert [*describe_unread_keys(OptimizerConfig(name=name))] == []
    assert [*describe_unread_keys(OptimizerConfig(name="sgd", beta1=0.95))] == [
        "optimizer.beta1=0.95 has no effect with optimizer sgd; its options are momentum, nesterov "
        "(optimizer.options)"
    ]


def test_wsd_decays_over_a_tenth_of_the_run_by_default():
    config = OptimizerConfig(learning_rate=PEAK, schedule="wsd", warmup_steps=5)
    found = rates(config, 40) / PEAK
    assert found[36] == pytest.approx(1) and found[37] < 1
    assert found[40] == pytest.approx(config.final_fraction)


@pytest.fixture(scope="module")
def abstract_params():
    """Abstract parameters of a model with stacked layers."""
    config = load_config(ROOT / "configs" / "tp8.yaml", ["model.num_hidden_layers=2"])
    program = build_program(config, jax.devices())
    with jax.set_mesh(program.tp.mesh):
        return program.abstract_state.params


def test_kernels_and_tables_decay_and_scales_do_not(abstract_params):
    mask = jax.tree_util.tree_flatten_with_path(decays(abstract_params))[0]
    kinds = {}
    for path, decay in mask:
        name = next(k.key for k in path if k.key in ("kernel", "table", "scale", "bias"))
        kinds.setdefault(name, set()).add(decay)
    assert kinds == {"kernel": {True}, "table": {True}, "scale": {False}}
    assert sum(decay for _, decay in mask) == 9 and len(mask) == 12


def test_nested_biases_and_sinks_do_not_decay():
    tree = {"layers": {"qkv": {"bias": {"q": jnp.ones((2, 3))}, "kernel": {"q": jnp.ones((2, 3))}}}}
    assert decays(tree) == {"layers": {"qkv": {"bias": {"q": False}, "kernel": {"q": True}}}}
    assert decays({"attention": {"sinks": jnp.ones((2, 8))}}) == {"attention": {"sinks": False}}


def random_tree(seed: int, scale: float) -> dict[str, dict[str, jax.Array]]:
    rng = np.random.default_rng(seed)
    shapes = {"kernel": (3, 4), "scale": (4,), "bias": (4,), "table": (5, 3)}
    return {"layer": {n: jnp.asarray(scale * rng.normal(size=s), "f4") for n, s in shapes.items()}}


def adamw(config: OptimizerConfig, params: dict, gradients: list[dict]) -> dict:
    """Run AdamW (arXiv 1711.05101, algorithm 2) with global clipping in double precision."""
    params = {name: np.float64(p) for name, p in params.items()}
    m = {name: np.zeros_like(p) for name, p in params.items()}
    v = {name: np.zeros_like(p) for name, p in params.items()}
    for t, gradient in enumerate(gradients, start=1):
        g = {name: np.float64(x) for name, x in gradient.items()}
        norm = math.sqrt(sum(np.sum(x * x) for x in g.values()))
        shrink = min(1.0, config.clip_norm / norm) if config.clip_norm is not None else 1.0
        rate = formula(config, 10, t - 1)
        for name in params:
            m[name] = config.beta1 * m[name] + (1 - config.beta1) * shrink * g[name]
            v[name] = config.beta2 * v[name] + (1 - config.beta2) * (shrink * g[name]) ** 2
            mean, square = m[name] / (1 - config.beta1**t), v[name] / (1 - config.beta2**t)
            decay = config.weight_decay if name in ("kernel", "table") else 0.0
            update = mean / (np.sqrt(square) + config.eps) + decay * params[name]
            params[name] = params[name] - rate * update
    return params


@pytest.mark.parametrize("schedule", ["cosine", "wsd"])
def test_schedule_steps_fix_the_schedule_whatever_the_length_of_the_run(schedule):
    config = OptimizerConfig(learning_rate=PEAK, schedule=schedule, warmup_steps=2)
    fixed = config.model_copy(update={"schedule_steps": 10})
    assert np.array_equal(rates(fixed, 40)[:11], rates(config, 10))
    assert rates(fixed, 40)[10:] == pytest.approx(PEAK * config.final_fraction)


def test_an_extended_run_says_what_happens_to_the_learning_rate():
    config = OptimizerConfig(learning_rate=1.0, warmup_steps=0, final_fraction=0.1)
    rate = 0.1 + 0.9 * (1 + math.cos(math.pi * 10 / 20)) / 2
    last = 0.1 + 0.9 * (1 + math.cos(math.pi * 9 / 10)) / 2
    assert describe_change((config, 10), (config, 20), 10) == (
        "the cosine schedule covered 10 steps and now covers 20: learning rate "
        f"{last:.3g} at step 10, {rate:.3g} at step 11; optimizer.schedule_steps=10 keeps the old "
        "length, 0.1 at step 11"
    )
    faster = config.model_copy(update={"learning_rate": 2.0})
    line = describe_change((config, 10), (faster, 20), 10)
    assert line.endswith("optimizer.schedule_steps=10 keeps the old length, 0.2 at step 11")
    fixed = config.model_copy(update={"schedule_steps": 10})
    assert describe_change((config, 10), (fixed, 20), 10) is None
    assert describe_change((fixed, 20), (fixed, 40), 20) is None


def test_a_change_that_is_no_extension_is_said_without_an_offer():
    config = OptimizerConfig(learning_rate=1.0, warmup_steps=0, schedule="constant")
    halved = config.model_copy(update={"learning_rate": 0.5})
    line = "learning rate 1 at step 10, 0.5 at step 11"
    assert describe_change((config, 20), (halved, 20), 10) == line
    assert describe_change((config, 20), (config, 20), 10) is None
    wsd = config.model_copy(update={"schedule": "wsd", "decay_steps": 5})
    assert describe_change((config, 10), (wsd, 20), 10) == (
        "the schedule was constant over 10 steps, and is now wsd over 20: learning rate 1 at step "
        "10, 1 at step 11"
    )
    # Schedules do not count steps that changed nothing.
    linear = config.model_copy(update={"schedule": "linear", "final_fraction": 0.0})
    skipped = describe_change((linear, 10), (linear, 20), 10, 2)
    assert "learning rate 0.3 at step 10, 0.6 at step 11; " in skipped
    assert skipped.endswith("keeps the old length, 0.2 at step 11")
    longer = describe_change((config, 10), (config, 20), 10)
    assert longer == (
        "the constant schedule covered 10 steps and now covers 20: learning rate 1 at step 10, 1 "
        "at step 11"
    )


@pytest.mark.parametrize("clip_norm", [0.5, 1e9, None])
def test_three_steps_equal_adamw_in_numpy(clip_norm):
    config = OptimizerConfig(
        learning_rate=0.1, warmup_steps=2, weight_decay=0.3, eps=0.01, clip_norm=clip_norm
    )
    optimizer = make_optimizer(config, make_schedule(config, 10))
    params = random_tree(0, 1.0)
    # The second gradient is below the clipping norm, the others above.
    gradients = [random_tree(1, 2.0), random_tree(2, 0.02), random_tree(3, 0.7)]
    wanted = adamw(config, params["layer"], [g["layer"] for g in gradients])
    state = optimizer.init(params)
    for gradient in gradients:
        updates, state = optimizer.update(gradient, state, params)
        params = optax.apply_updates(params, updates)
    for name, value in params["layer"].items():
        np.testing.assert_allclose(value, wanted[name], rtol=1e-5, atol=1e-6, err_msg=name)


@pytest.mark.parametrize("name", ["adamw", "muon", "soap", "lion", "adafactor", "sgd"])
@pytest.mark.costly
def test_groups_have_a_learning_rate_and_a_weight_decay_of_their_own(name):
    groups = {
        "embedding": {"learning_rate": 0.1, "weight_decay": 0.0},
        "attention": {"learning_rate": 0.0},
        "mlp": {"weight_decay": 0.7},
    }
    schedule = optax.constant_schedule(0.01)

    def steps(weight_decay: float, groups: dict) -> dict:
        config = OptimizerConfig(name=name, weight_decay=weight_decay, groups=groups)
        optimizer = make_optimizer(config, schedule)
        updates, state = optimizer.update(grads, optimizer.init(params), params)
        structures.add(jax.tree.structure(state))
        return updates

    structures = set()  # groups may change between the processes of a run
    rng = np.random.default_rng(0)
    shapes = {
        ("embed", "table"): (7, 4),
        ("layers", "attention", "kernel"): (2, 4, 4),
        ("layers", "mlp", "kernel"): (2, 4, 6),
        ("layers", "mlp_norm", "scale"): (2, 4),
        ("head", "kernel"): (4, 7),
    }
    params, grads = ({}, {})
    for tree in (params, grads):
        for (*outer, last), shape in shapes.items():
            inner = tree
            for key in outer:
                inner = inner.setdefault(key, {})
            inner[last] = jnp.asarray(rng.normal(size=shape), jnp.float32)
    found = steps(0.3, groups)
    plain, strong, common = steps(0.0, {}), steps(0.7, {}), steps(0.3, {})
    wanted = {
        "embed": jax.tree.map(lambda x: 0.1 * x, plain["embed"]),
        "layers": {
            "attention": jax.tree.map(jnp.zeros_like, plain["layers"]["attention"]),
            "mlp": strong["layers"]["mlp"],
            "mlp_norm": common["layers"]["mlp_norm"],
        },
        "head": common["head"],
    }
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-6), found, wanted)
    assert len(structures) == 1


@pytest.fixture
def fresh_registries():
    """Registries that forget what a test adds."""
    yield
    del OPTIMIZERS["toy"], SCHEDULES["halved"]


def test_a_registered_optimizer_gets_its_options_and_keeps_its_state_on_a_bad_step(
    fresh_registries,
):
    @optimizers.register("toy")
    def toy(config, schedule, *, momentum=0.5):
        return optax.chain(optax.trace(momentum), optax.scale_by_learning_rate(schedule))

    @schedules.register("halved")
    def halved(config, steps, warmup):
        return optax.constant_schedule(config.learning_rate / 2)

    config = OptimizerConfig(
        name="toy", options={"momentum": 0.9}, schedule="halved", warmup_steps=0, learning_rate=1.0
    )
    optimizer = make_optimizer(config, make_schedule(config, 10))
    params, grads = {"kernel": jnp.zeros(2)}, {"kernel": jnp.full(2, 0.1)}
    state = optimizer.init(params)
    _, kept = optimizer.update(grads, state, params, is_good=jnp.array(False))
    for before, after in zip(jax.tree.leaves(state), jax.tree.leaves(kept), strict=True):
        np.testing.assert_array_equal(before, after)
    for _ in range(2):
        updates, state = optimizer.update(grads, state, params, is_good=jnp.array(True))
    np.testing.assert_allclose(updates["kernel"], -0.5 * 0.1 * 1.9, rtol=1e-6)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"name": "adam0"}, "unknown optimizer 'adam0'; use one of adafactor, adamw, lion, muon"),
        (
            {"name": "muon", "options": {"iterations": 0}},
            "optimizer.options.iterations=0: Input should be greater than 0",
        ),
        (
            {"name": "sgd", "options": {"momentum": True}},
            "optimizer.options.momentum=True: Input should be a valid number",
        ),
        (
            {"name": "muon", "options": {"rms": math.inf}},
            "optimizer.options.rms=inf: Input should be a finite number",
        ),
        ({"options": {"nesterov": True}}, "optimizer adamw takes no options"),
        (
            {"name": "toy", "groups": {"mlp": {"weight_decay": 0.5}}},
            "optimizer.groups.mlp.weight_decay=0.5: optimizer toy has one weight decay for all; "
            "remove it, or register the optimizer with decays_by_group=True",
        ),
        ({"schedule": "step"}, "unknown schedule 'step'; use one of constant, "),
    ],
)
def test_unknown_names_and_options_are_refused(toy_of_options, values, message):
    config = OptimizerConfig(**values)
    with pytest.raises(ValueError) as error:
        make_optimizer(config, make_schedule(config, 10))
    assert message in str(error.value)


@pytest.fixture
def toy_of_options():
    """An optimizer whose options are a pair, an array, and any others."""

    @optimizers.register("toy")
    def toy(config, schedule, *, pair: tuple[float, float], array: jax.Array = None, **others):
        return optax.identity()

    yield
    del OPTIMIZERS["toy"]


def test_options_of_every_type_reach_an_optimizer(toy_of_options):
    options = {"pair": [0.9, 0.95], "array": 3, "other": {"a": 1}}
    check_optimizer(OptimizerConfig(name="toy", options=options))
    with pytest.raises(ValueError, match=r"optimizer\.options\.pair=\[0\.9\]: Field required"):
        check_optimizer(OptimizerConfig(name="toy", options={"pair": [0.9]}))


def test_a_parameter_of_an_unknown_kind_is_refused():
    with pytest.raises(ValueError, match=r"parameter layer\.gamma has an unknown kind"):
        decays({"layer": {"gamma": jnp.ones(2)}})


def test_without_gradients_only_weight_decay_updates():
    config = OptimizerConfig(learning_rate=0.1, warmup_steps=0, weight_decay=0.5)
    optimizer = make_optimizer(config, make_schedule(config, 10))
    params = random_tree(0, 1.0)
    updates, _ = optimizer.update(random_tree(0, 0.0), optimizer.init(params), params)
    for name, update in updates["layer"].items():
        shrink = 0.05 if name in ("kernel", "table") else 0.0
        np.testing.assert_allclose(update, -shrink * params["layer"][name], rtol=1e-6, atol=0)


def test_adafactor_clips_every_layer_and_expert_by_itself():
    config = OptimizerConfig(
        name="adafactor", weight_decay=0.0, clip_norm=None, options={"clip_rms": 0.5}
    )
    optimizer = make_optimizer(config, optax.constant_schedule(1.0))
    params = {"kernel": jnp.zeros((2, 3, 8, 4)), "norm": {"scale": jnp.zeros((2, 8))}}
    state = optimizer.init(params)
    small, large = jnp.ones((2, 3, 8, 4)), jnp.ones((2, 3, 8, 4)).at[1, 2].set(100.0)
    norm = {"scale": jnp.ones((2, 8))}
    _, state = optimizer.update({"kernel": small, "norm": norm}, state, params)
    updates, _ = optimizer.update({"kernel": large, "norm": norm}, state, params)
    sizes = np.sqrt(np.mean(np.square(updates["kernel"]), (-2, -1)))
    np.testing.assert_allclose(sizes, 0.5, rtol=1e-5)
    np.testing.assert_allclose(-updates["norm"]["scale"], 0.5, rtol=1e-5)


def test_adafactor_never_factors_over_layers_or_experts():
    params = {
        "kernel": jnp.zeros((2, 128, 256)),
        "experts": {"kernel": jnp.zeros((2, 256, 128, 192))},
        "norm": {"scale": jnp.zeros((130, 128))},
    }
    config = OptimizerConfig(name="adafactor")
    state = make_optimizer(config, optax.constant_schedule(0.1)).init(params)
    sizes = {x.size for x in jax.tree.leaves(state)}
    assert 2 * 128 * 256 not in sizes and {2 * 128, 2 * 256} <= sizes  # the kernel is factored
    assert {2 * 256 * 128 * 192, 130 * 128} <= sizes  # and nothing else
