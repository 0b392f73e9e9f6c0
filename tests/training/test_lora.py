"""LoRA runs train adapters alone, equal to a step written by hand, and never touch the base."""

import dataclasses
import re
from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import MESHES, ONE_DEVICE, ROOT, release, slow
from test_step import TINY, assert_same_layout, fields, leaves, placed  # noqa: F401 (a fixture)

from configs.build import build_program, build_sharding_table, describe_parameters
from configs.runs import Run
from configs.schema import Config, load_config
from model.lora import adapters_of, drop_features, merge_adapters, with_adapters
from parallel.sharding.mesh import MeshConfig
from training.checkpoint import Checkpoints
from training.checkpoint_policy import CheckpointConfig
from training.resume import describe_process, first_record
from training.step import Program

GRID = MESHES["dp2-fsdp2-tp2"]
LORA = ("lora.rank=4", "lora.alpha=6")
SCALE = 1.5
RATE, BETA1, BETA2, EPS, DECAY, CLIP = 1e-2, 0.9, 0.95, 1e-8, 0.1, 0.5
OPTIMIZER = (
    "optimizer.schedule=constant",
    f"optimizer.learning_rate={RATE}",
    f"optimizer.weight_decay={DECAY}",
    f"optimizer.clip_norm={CLIP}",
)


def config_on(mesh: MeshConfig, *overrides: str) -> Config:
    sizes = [f"mesh.{name}={size}" for name, size in mesh.model_dump().items()]
    return load_config(ROOT / "configs" / "tp8.yaml", [*TINY, *OPTIMIZER, *sizes, *overrides])


@cache
def program_on(mesh: MeshConfig, *overrides: str) -> Program:
    return build_program(config_on(mesh, *overrides), jax.devices()[: mesh.num_devices])


def with_random_b(program, params):
    """Return the parameters with an update that is not zero, equal on every mesh."""

    def fill(path, x):
        name = jax.tree_util.keystr(path)
        if "lora_b" not in name:
            return x
        rng = np.random.default_rng(len(name))
        value = (rng.standard_normal(x.shape) / 20).astype(np.float32)
        return jax.device_put(value, x.sharding)

    return jax.tree_util.tree_map_with_path(fill, params)


def started(mesh, *overrides):
    program = program_on(mesh, *LORA, *overrides)
    with jax.set_mesh(program.tp.mesh):
        state = program.init()
        return program, dataclasses.replace(state, params=with_random_b(program, state.params))


def on_one_device(params, *overrides):
    wanted = program_on(ONE_DEVICE, *LORA, *overrides).abstract_state.params
    return jax.tree.map(
        lambda x, want: jax.device_put(np.asarray(x), want.sharding), params, wanted
    )


def update(kernel, a, b):
    return kernel + SCALE * jnp.einsum("...dr,...rf->...df", a, b)


def plain_merge(base, adapters):
    """W + scale * A B, written again."""
    if not isinstance(base, dict):
        return base
    merged = {}
    for name, value in base.items():
        inner = adapters.get(name, {}) if isinstance(adapters, dict) else {}
        if name == "kernel" and "lora_a" in adapters:
            a, b = adapters["lora_a"], adapters["lora_b"]
            merged[name] = (
                {key: update(w, a[key], b[key]) if key in a else w for key, w in value.items()}
                if isinstance(value, dict)
                else update(value, a, b)
            )
        else:
            merged[name] = plain_merge(value, inner)
    return merged


def steps_by_hand(batch, count, params):
    """Train the adapters of a model without adapters by plain AdamW, on one device."""
    program = program_on(ONE_DEVICE)
    adapters, base = adapters_of(params), stripped(params)

    @jax.jit
    def step(adapters, mean, square, number, base, batch):
        def loss(adapters):
            part = {name: field[0] for name, field in batch.items()}
            sums, _ = program.loss_sum(plain_merge(base, adapters), part)
            return sums.objective / jnp.sum(part["loss_mask"])

        value, grads = jax.value_and_grad(loss)(adapters)
        norm = jnp.sqrt(sum(jnp.sum(g * g) for g in jax.tree.leaves(grads)))
        grads = jax.tree.map(lambda g: g * jnp.minimum(1.0, CLIP / norm), grads)
        mean = jax.tree.map(lambda m, g: BETA1 * m + (1 - BETA1) * g, mean, grads)
        square = jax.tree.map(lambda v, g: BETA2 * v + (1 - BETA2) * g * g, square, grads)

        def adam(x, m, v):
            m_hat, v_hat = m / (1 - BETA1**number), v / (1 - BETA2**number)
            return x - RATE * (m_hat / (jnp.sqrt(v_hat) + EPS) + DECAY * x)

        return jax.tree.map(adam, adapters, mean, square), mean, square, value, norm

    zeros = jax.tree.map(jnp.zeros_like, adapters)
    mean, square, found = zeros, zeros, []
    for number in range(1, count + 1):
        adapters, mean, square, value, norm = step(adapters, mean, square, number, base, batch)
        found.append((float(value), float(norm)))
    return leaves(adapters), found


@pytest.mark.parametrize(
    ("mesh", "overlap", "residual"),
    [
        ("dp2-fsdp2-tp2", "ring", "sequence"),
        release("tp8", "bidirectional", "sequence"),
        release("tp4-sp2", "none", "hidden"),
        slow("fsdp8", "none", "replicated"),
    ],
)
def test_train_steps_equal_steps_written_by_hand(fields, mesh, overlap, residual):  # noqa: F811
    options = (f"parallel.overlap={overlap}", f"parallel.residual={residual}")
    program, state = started(MESHES[mesh], *options)
    alone = program_on(ONE_DEVICE)
    with jax.set_mesh(alone.tp.mesh):
        params = on_one_device(state.params)
        want, history = steps_by_hand(placed(alone, fields), 3, params)
    before = leaves(state.params)
    with jax.set_mesh(program.tp.mesh):
        for loss, norm in history:
            state, metrics = program.train_step(state, placed(program, fields))
            assert float(metrics["loss"]) == pytest.approx(loss, rel=1e-5)
            assert float(metrics["grad_norm"]) == pytest.approx(norm, rel=1e-4)
    after = leaves(state.params)
    for name, array in after.items():
        if name in want:
            moved = np.abs(want[name] - before[name]).max()
            assert moved > RATE, name
            # Adam divides small gradients by their own size: their rounding moves parameters.
            assert np.abs(array - want[name]).max() <= 2e-2 * moved, name
        else:
            np.testing.assert_array_equal(array, before[name], err_msg=name)


SPARSE = (
    "model.moe.num_experts=4",
    "model.moe.num_shared_experts=1",
    "model.moe.first_k_dense_replace=1",
    "model.moe.router_aux_loss_coef=0",
    "model.tie_word_embeddings=true",
)
LATENT = (
    "model.mla={q_lora_rank: 16, kv_lora_rank: 8, qk_nope_head_dim: 6, qk_rope_head_dim: 4, "
    "v_head_dim: 8}"
)


@pytest.mark.parametrize(
    ("mesh", "options"),
    [
        (GRID, ("parallel.overlap=split", "model.remat=full")),
        release(GRID, (LATENT, "parallel.overlap=ring")),
        slow(MESHES["tp4-sp2"], (LATENT, "parallel.residual=hidden")),
        slow(MeshConfig(ep=2, fsdp=2, tp=2), (*SPARSE, "parallel.overlap=ring")),
        release(
            MeshConfig(ep=2, tp=4),
            (*SPARSE, "parallel.residual=hidden", "model.moe.expert_rule=unified"),
        ),
        release(
            MESHES["ep2-fsdp2-sp2"],
            (*SPARSE, "parallel.residual=replicated", "model.moe.exchange=ragged"),
        ),
    ],
)
def test_gradients_equal_those_of_merged_kernels(fields, mesh, options):  # noqa: F811
    program, state = started(mesh, *options)
    model = [option for option in options if option.startswith("model.")]
    alone = program_on(ONE_DEVICE, *model)
    with jax.set_mesh(alone.tp.mesh):
        params = on_one_device(state.params, *model)
        batch = {name: field[0] for name, field in placed(alone, fields).items()}

        def loss(adapters):
            sums, _ = alone.loss_sum(plain_merge(stripped(params), adapters), batch)
            return sums.objective / jnp.sum(batch["loss_mask"])

        want = leaves(jax.jit(jax.grad(loss))(adapters_of(params)))
    with jax.set_mesh(program.tp.mesh):
        _, _, grads = jax.jit(program.gradients)(state.params, placed(program, fields))
        _, _, parts = jax.jit(program.gradients)(state.params, placed(program, fields, 2))
    for found in (leaves(grads), leaves(parts)):
        assert found.keys() == want.keys()
        for name, grad in want.items():
            bound = 2e-5 * np.abs(grad).max()
            assert bound > 0 and np.abs(found[name] - grad).max() <= bound, name


def stripped(params):
    return {
        name: stripped(value) if isinstance(value, dict) else value
        for name, value in params.items()
        if not name.startswith("lora")
    }


def test_the_base_is_that_of_a_model_without_adapters_on_every_mesh():
    want = None
    for mesh in (ONE_DEVICE, GRID, MESHES["tp4-sp2"]):
        lora, base = program_on(mesh, *LORA), program_on(mesh)
        with jax.set_mesh(lora.tp.mesh):
            params, plain = lora.init().params, base.init().params
        found, adapters = leaves(stripped(params)), leaves(adapters_of(params))
        want = want or adapters
        for name, array in leaves(plain).items():
            np.testing.assert_array_equal(found[name], array)
        for name, array in want.items():
            np.testing.assert_array_equal(adapters[name], array)
            assert np.any(array) == ("lora_a" in name)
    assert len({array.tobytes() for name, array in want.items() if "lora_a" in name}) == 7


def test_a_fresh_adapter_does_not_change_the_loss(fields):  # noqa: F811
    totals = []
    for overrides in (LORA, ()):
        program = program_on(ONE_DEVICE, *overrides)
        with jax.set_mesh(program.tp.mesh):
            totals.append(program.eval_step(program.init().params, placed(program, fields))[:2])
    np.testing.assert_array_equal(*totals)


def test_optimizer_and_average_cover_the_adapters_alone():
    program = program_on(GRID, *LORA, "optimizer.ema_decay=0.9")
    with jax.set_mesh(program.tp.mesh):
        state = program.abstract_state
    adapters = [x.shape for x in jax.tree.leaves(adapters_of(state.params))]
    assert [x.shape for x in jax.tree.leaves(state.ema)] == adapters
    moments = [x.shape for x in jax.tree.leaves(state.opt_state) if x.shape]
    assert moments == [*adapters, *adapters]
    averaged = program.averaged(state)
    assert jax.tree.structure(averaged) == jax.tree.structure(state.params)


@pytest.mark.parametrize("base_dtype", ["float32", "int8"])
def test_the_start_lines_count_what_is_trained(base_dtype):
    sizes = [f"mesh.{name}={size}" for name, size in GRID.model_dump().items()]
    options = (*LORA, f"lora.base_dtype={base_dtype}", "optimizer.ema_decay=0.9")
    config = load_config(ROOT / "configs" / "tp8.yaml", [*TINY, *sizes, *options])
    program = program_on(GRID, *options)
    table = build_sharding_table(config, program)
    both, lora = describe_parameters(program, table)
    trained = sum(x.size for x in jax.tree.leaves(adapters_of(program.abstract_state.params)))
    total = trained + program.config.num_parameters  # scales of int8 kernels are not counted
    assert both.startswith("memory of parameters, optimizer and moving average: ")
    assert lora.startswith(f"LoRA: {trained:,} trainable of {total:,} parameters")
    assert "; optimizer and moving average: " in lora
    assert any("LoRA of rank 4, scale 1.5" in line for line in program.plan.describe())
    assert not any("LoRA" in line for line in program_on(GRID).plan.describe())


def test_merged_parameters_equal_the_adapters(fields):  # noqa: F811
    program, state = started(GRID)
    base = program_on(GRID)
    with jax.set_mesh(program.tp.mesh):
        merged = jax.jit(lambda p: merge_adapters(p, program.plan.lora, jnp.float32))(state.params)
        assert_same_layout(
            dataclasses.replace(base.abstract_state, params=merged), base.abstract_state
        )
        found, *_ = base.eval_step(merged, placed(base, fields))
        want, *_ = program.eval_step(state.params, placed(program, fields))
        plain, *_ = base.eval_step(stripped(state.params), placed(base, fields))
    # Stated bound: float32 rounding of the sum x W + x A B in another order.
    assert float(found) == pytest.approx(float(want), rel=2e-6)
    assert abs(float(found) - float(plain)) > 1e-3 * abs(float(plain))


def test_kernels_merged_in_the_dtype_of_the_model_give_the_same_numbers(fields):  # noqa: F811
    program, state = started(ONE_DEVICE, "model.dtype=bfloat16")
    base = program_on(ONE_DEVICE, "model.dtype=bfloat16")
    with jax.set_mesh(program.tp.mesh):
        wide, narrow = (
            merge_adapters(state.params, program.plan.lora, dtype)
            for dtype in (jnp.float32, jnp.bfloat16)
        )
        want, *_ = base.eval_step(wide, placed(base, fields))
        found, *_ = base.eval_step(narrow, placed(base, fields))
    assert float(found) == float(want)


def test_routers_and_gates_stay_float32_when_adapters_are_merged():
    sparse = (
        "model.param_dtype=bfloat16",
        "model.moe.num_experts=4",
        "model.moe.num_experts_per_tok=2",
        "model.moe.num_shared_experts=1",
        "model.moe.shared_expert_gate=true",
    )
    program, base = program_on(GRID, *LORA, *sparse), program_on(GRID, *sparse)
    with jax.set_mesh(program.tp.mesh):
        merged = jax.eval_shape(
            lambda p: merge_adapters(p, program.plan.lora, jnp.bfloat16),
            program.abstract_state.params,
        )
    with jax.set_mesh(base.tp.mesh):
        wanted = base.abstract_state.params
    found = jax.tree.map(lambda x: x.dtype, merged)
    assert found == jax.tree.map(lambda x: x.dtype, wanted)
    assert jax.tree.leaves(found).count(jnp.float32) == 2


@pytest.mark.parametrize("targets", ["qkv,o,mlp,experts", "experts,mlp,o,qkv"])
@pytest.mark.parametrize("present", ["mlp", "experts"])
def test_default_targets_that_a_model_does_not_have_are_left_out_in_any_order(present, targets):
    sparse = ("model.moe.num_experts=4", "model.moe.num_experts_per_tok=2")
    overrides = (*LORA, f"lora.targets=[{targets}]", *(sparse if present == "experts" else ()))
    (line,) = [x for x in program_on(ONE_DEVICE, *overrides).plan.describe() if "LoRA of" in x]
    assert [name for name in ("mlp", "experts") if name in line] == [present]


def test_parameters_that_no_step_has_changed_are_their_own_average(tmp_path):
    averaged = "optimizer.ema_decay=0.9"
    program, state = started(GRID, averaged)
    with jax.set_mesh(program.tp.mesh):
        checkpoints = Checkpoints(tmp_path / "checkpoints", CheckpointConfig())
        checkpoints.save({"params": state.params}, 0, first_record(describe_process("", {}, 1)))
        checkpoints.finish()
        run = Run(tmp_path, config_on(GRID, *LORA, averaged), program, None, None)
        step, found = run.load_params(ema=True)
    assert step == 0
    for name, array in leaves(state.params).items():
        np.testing.assert_array_equal(leaves(found)[name], array, err_msg=name)


SHAPES = (
    "model.hidden_size=48",
    "model.intermediate_size=80",
    "model.num_attention_heads=4",
    "model.num_key_value_heads=2",
)
KERNELS = {(48, 24), (24, 48), (48, 40), (40, 48), (48, 132), (264, 12), (48, 12)}
KERNELS |= {(24, 24), (24, 40), (40, 24), (24, 12)}  # blocks of rings over features


def kernel_shaped(program, batch) -> set[tuple[int, ...]]:
    """Shapes of kernel blocks among the results of matmuls and reduce-scatters of the step.

    A kernel that adapters of rank 5 join has more columns. No activation has such a shape.
    """
    with jax.set_mesh(program.tp.mesh):
        lowered = program.train_step.lower(program.abstract_state, placed(program, batch))
        text = lowered.compile().as_text()
    found = re.findall(r"= \(?f32\[([0-9,]+)\]\S* (?:dot|reduce-scatter)\(", text)
    shapes = {tuple(map(int, shape.split(","))) for shape in found}
    wide = {(a, b + more) for a, b in KERNELS for more in (0, 5, 10, 15)}
    return {shape for shape in shapes if shape in wide or shape[::-1] in wide}


@pytest.mark.parametrize(
    ("overlap", "residual"),
    [
        ("ring", "sequence"),
        slow("none", "sequence"),
        release("ring", "hidden"),
        release("none", "hidden"),
    ],
)
def test_frozen_kernels_have_no_gradient_in_the_compiled_step(
    fields,  # noqa: F811
    overlap,
    residual,
):
    mesh = MeshConfig(fsdp=2, tp=2)
    options = (*SHAPES, f"parallel.overlap={overlap}", f"parallel.residual={residual}")
    assert not kernel_shaped(program_on(mesh, *options, "lora.rank=5"), fields)
    assert len(kernel_shaped(program_on(mesh, *options), fields)) >= 5


def test_dropout_is_a_function_of_seed_step_and_path_alone(fields):  # noqa: F811
    losses = {}
    for mesh in (GRID, ONE_DEVICE):
        program, state = started(mesh, "lora.dropout=0.25")
        with jax.set_mesh(program.tp.mesh):
            gradients = jax.jit(program.gradients)
            batch = placed(program, fields)
            keys = [program._dropout_key(jnp.asarray(step)) for step in (1, 2)]
            losses[mesh] = [
                float(gradients(state.params, batch, key)[0]["loss"]) for key in (*keys, None)
            ]
    first, second, none = losses[GRID]
    assert losses[ONE_DEVICE] == pytest.approx([first, second, none], rel=1e-5)
    assert len({first, second, none}) == 3


@pytest.mark.parametrize("probability", [0.25, 0.5, 0.75])
@pytest.mark.costly
def test_dropout_removes_features_and_scales_up_the_others(probability):
    program, state = started(ONE_DEVICE, "model.hidden_size=64")
    with jax.set_mesh(program.tp.mesh):
        drop = jax.jit(partial(drop_features, probability=probability))
        found = leaves(drop(state.params, jax.random.key(0)))
    kept = []
    for name, before in leaves(state.params).items():
        if "lora_a" not in name:
            np.testing.assert_array_equal(found[name], before)
            continue
        is_kept = found[name].any(axis=-1, keepdims=True)
        wanted = np.where(is_kept, before / (1 - probability), 0)
        np.testing.assert_allclose(found[name], wanted, rtol=1e-6)
        kept += is_kept.ravel().tolist()
    deviation = np.sqrt(probability * (1 - probability) / len(kept))
    assert abs(np.mean(kept) - (1 - probability)) < 6 * deviation < 0.2


def test_with_adapters_puts_back_what_adapters_of_takes():
    params = {"a": {"kernel": 1, "lora_a": {"q": 2}, "lora_b": {"q": 3}}, "norm": {"scale": 4}}
    adapters = adapters_of(params)
    assert adapters == {"a": {"lora_a": {"q": 2}, "lora_b": {"q": 3}}}
    assert with_adapters(params, adapters) == params
