"""Models with sparse layers: equal loss on every mesh, generation equals the forward pass."""

from functools import lru_cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import MESHES, ONE_DEVICE, release, slow
from flax import nnx

from configs.build import build_program
from configs.schema import Config
from model.config import ModelConfig, MoEConfig
from model.generation.generator import Generator
from parallel.sharding.mesh import MeshConfig
from training.step import Program

MOE = MoEConfig(
    num_experts=8,
    num_experts_per_tok=2,
    moe_intermediate_size=24,
    num_shared_experts=1,
    router="sigmoid",
    n_group=2,
    topk_group=1,
    routed_scaling_factor=1.5,
    first_k_dense_replace=1,
    decoder_sparse_step=2,
    router_aux_loss_coef=0.05,
    router_z_loss_coef=0.01,
    bias_update_speed=0.01,
)
MODEL = ModelConfig(
    vocab_size=264,
    hidden_size=32,
    num_hidden_layers=5,
    num_attention_heads=8,
    num_key_value_heads=8,
    intermediate_size=48,
    dtype="float32",
    initializer_range=0.1,
    loss_chunk=16,
    moe=MOE,
)
B, L = 8, 32
LOSS_BOUND, GRADIENT_BOUND = 1e-6, 1e-5


def program_of(mesh: MeshConfig, model: ModelConfig = MODEL, **sections) -> Program:
    config = Config.model_validate(
        {
            "model": model,
            "mesh": mesh,
            "data": {"sequence_length": L, "global_batch_size": B},
            "training": {"steps": 10, "seed": 3},
            **sections,
        }
    )
    return build_program(config, jax.devices()[: mesh.num_devices])


def batch(program: Program, parts: int = 1) -> dict[str, jax.Array]:
    rng = np.random.default_rng(0)
    shape = (parts, B // parts, L)
    segments = np.sort(rng.integers(0, 3, (B, L)), axis=1)
    segments[2, 20:] = -1  # padding
    mask = (rng.random((B, L)) < 0.9) & (segments >= 0)
    fields = {
        "tokens": rng.integers(0, 264, (B, L)).astype(np.int32),
        "targets": rng.integers(0, 264, (B, L)).astype(np.int32),
        "positions": np.tile(np.arange(L, dtype=np.int32), (B, 1)),
        "segment_ids": segments.astype(np.int32),
        "loss_mask": mask.astype(np.float32),
    }
    put = {name: y.reshape(shape) for name, y in fields.items()}
    return {name: jax.device_put(y, program.batch_sharding) for name, y in put.items()}


def gradients(mesh: MeshConfig, model: ModelConfig = MODEL, parts: int = 1):
    program = program_of(mesh, model)
    with jax.set_mesh(program.tp.manager.mesh):
        params = program.init().params
        means, report, grads = jax.jit(program.gradients)(params, batch(program, parts))
    return jax.tree.map(np.asarray, (means["loss"], vars(report.stats), grads))


@pytest.fixture(scope="module")
def one_device():
    return gradients(ONE_DEVICE)


def assert_equal_gradients(got, want) -> None:
    assert got[0] == pytest.approx(want[0], rel=LOSS_BOUND)
    for name, value in want[1].items():
        np.testing.assert_allclose(got[1][name], value, rtol=1e-5, err_msg=name)
    flat, _ = jax.tree_util.tree_flatten_with_path(want[2])
    for (path, b), a in zip(flat, jax.tree.leaves(got[2]), strict=True):
        error = np.abs(a - b).max() / max(np.abs(b).max(), 1e-30)
        assert error <= GRADIENT_BOUND, (jax.tree_util.keystr(path), error)


MORE = {"ep8": MeshConfig(ep=8), "ep2-tp2-sp2": MeshConfig(ep=2, tp=2, sp=2)}


@pytest.mark.parametrize(
    "mesh", ["ep2-fsdp2-sp2", *(release(m) for m in
     ("ep8", "tp8", "fsdp8", "dp8", "dp2-fsdp2-tp2", "tp4-sp2", "ep2-tp2-sp2"))]
)  # fmt: skip
def test_loss_and_every_gradient_equal_one_device(one_device, mesh) -> None:
    assert_equal_gradients(gradients((MESHES | MORE)[mesh]), one_device)


def test_layers_are_dense_or_sparse_as_configured(one_device) -> None:
    """1 dense layer first, then every second layer of the model is sparse: D S D S D."""
    assert MODEL.sparse_layers == (False, True, False, True, False)
    params = one_device[2]
    assert params["layers"]["mlp"]["down"]["kernel"].shape == (3, 48, 32)
    assert params["sparse_layers"]["mlp"]["down"]["kernel"].shape == (2, 8, 24, 32)
    assert one_device[1]["load_E"].shape == (2, 8)
    assert (one_device[1]["tokens"] == B * L - 12).all(), "padding is not counted"
    for path, leaf in jax.tree_util.tree_flatten_with_path(params)[0]:
        moved = np.abs(leaf).max() > 0
        assert moved == ("bias" not in jax.tree_util.keystr(path)), "the bias has no gradient"


def test_flops_count_the_experts_of_a_token() -> None:
    idle = 2 * (8 - 2) * 3 * 32 * 24  # experts that a token does not use, in two layers
    norms, biases, embedding = 11 * 32, 2 * 8, 264 * 32
    active = MODEL.num_parameters - idle - norms - biases - embedding
    assert MODEL.num_matmul_parameters == active


@pytest.mark.slow
def test_accumulation_changes_no_loss_and_no_count(one_device) -> None:
    """Gradients differ only by the load-balancing loss, a mean over microbatches."""
    loss, stats, _ = gradients(ONE_DEVICE, parts=2)
    assert loss == pytest.approx(one_device[0], rel=LOSS_BOUND)
    np.testing.assert_array_equal(stats["load_E"], one_device[1]["load_E"])
    plain = MOE.model_copy(update={"router_aux_loss_coef": 0.0, "router_z_loss_coef": 0.0})
    model = MODEL.model_copy(update={"moe": plain})
    assert_equal_gradients(gradients(ONE_DEVICE, model, 2), gradients(ONE_DEVICE, model))


@pytest.mark.parametrize("objective", ["sft", slow("dpo")])
def test_two_equal_microbatches_have_the_loss_and_gradients_of_one(objective) -> None:
    """So the loss of experts, which is large here, is a mean over microbatches too."""
    changes = {"router_aux_loss_coef": 1.0, "first_k_dense_replace": 0, "decoder_sparse_step": 1}
    model = MODEL.model_copy(update={"num_hidden_layers": 1, "moe": MOE.model_copy(update=changes)})
    training = {"steps": 10, "seed": 3, "objective": objective}
    data = {"sequence_length": L, "global_batch_size": B}
    if objective == "dpo":
        data |= {"packing": "pairs", "files": "pairs.jsonl"}
    program = program_of(ONE_DEVICE, model, data=data, training=training)
    with jax.set_mesh(program.tp.manager.mesh):
        state, one = program.init(), batch(program)
        two = {name: jnp.concatenate([field, field]) for name, field in one.items()}
        found = [jax.jit(program.step_gradients)(state, fields) for fields in (one, two)]
    (loss, _, grads), (other, _, others) = found
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=LOSS_BOUND), other, loss)
    for a, b in zip(jax.tree.leaves(others), jax.tree.leaves(grads), strict=True):
        assert np.abs(a - b).max() <= GRADIENT_BOUND * np.abs(b).max()


def test_a_step_returns_expert_metrics_and_updates_the_bias() -> None:
    program = program_of(MeshConfig(ep=2))
    with jax.set_mesh(program.tp.manager.mesh):
        state, metrics = program.train_step(program.init(), batch(program))
        arrays = jax.tree.map(np.asarray, metrics["experts"])
    assert set(arrays) == {"load_NE", "entropy_N", "dropped_N", "balance_N", "z_N", "bias_NE"}
    assert all(arrays[name].shape == ((2, 8) if name.endswith("E") else (2,)) for name in arrays)
    bias = np.asarray(state.params["sparse_layers"]["mlp"]["router"]["bias"])
    load = arrays["load_NE"]
    np.testing.assert_allclose(bias, 0.01 * np.sign(load.mean(-1, keepdims=True) - load))
    assert (arrays["dropped_N"] == 0).all() and (arrays["balance_N"] >= 0.9).all()
    # Per token, whatever the number of its experts; a fresh router is nearly undecided.
    assert (0.9 * np.log(8) < arrays["entropy_N"]).all()
    assert (arrays["entropy_N"] <= np.log(8) + 1e-6).all()


def test_a_frozen_bias_takes_part_in_the_choice_and_never_changes() -> None:
    """Neither by its speed nor by weight decay."""
    frozen = MOE.model_copy(update={"bias_update_speed": 0.0, "router_bias": True})
    assert not MOE.model_copy(update={"bias_update_speed": 0.0}).has_router_bias
    program = program_of(
        MeshConfig(ep=2), MODEL.model_copy(update={"moe": frozen}), optimizer={"warmup_steps": 0}
    )
    with jax.set_mesh(program.tp.manager.mesh):
        state = program.init()
        router = state.params["sparse_layers"]["mlp"]["router"]
        router["bias"] = router["bias"] + jnp.asarray([0, 0, 0, 0, 0, 5.0, 9.0, 0])
        bias, kernel = np.asarray(router["bias"]), np.asarray(router["kernel"])
        for _ in range(2):
            state, metrics = program.train_step(state, batch(program))
    load_NE = np.asarray(metrics["experts"]["load_NE"])
    assert (load_NE[:, 5:7] == B * L - 12).all() and load_NE.sum() == 4 * (B * L - 12)
    router = state.params["sparse_layers"]["mlp"]["router"]
    np.testing.assert_array_equal(router["bias"], bias)
    assert not np.array_equal(router["kernel"], kernel)


@lru_cache
def full_forward(moe: MoEConfig):
    """Return the next token after every position of rows, by the forward pass on one device."""
    program = program_of(ONE_DEVICE, MODEL.model_copy(update={"moe": moe}))

    @jax.jit
    def next_tokens(params, tokens: jax.Array) -> jax.Array:
        model = nnx.merge(program.definition, params)
        index = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
        return model.logits(model(tokens, index, jnp.zeros_like(tokens))[0]).argmax(-1)

    def run(rows: np.ndarray) -> np.ndarray:
        with jax.set_mesh(program.tp.manager.mesh):
            return np.asarray(next_tokens(program.init().params, jnp.asarray(rows)))

    return run


@pytest.mark.parametrize("cache", [slow("dense"), "paged"])
def test_generation_equals_the_argmax_of_the_full_forward(cache) -> None:
    """With an expert capacity that drops tokens in training, but never in generation."""
    tight = MOE.model_copy(update={"capacity_factor": 0.5, "bias_update_speed": 0.0})
    program = program_of(MeshConfig(ep=2, tp=2), MODEL.model_copy(update={"moe": tight}))
    prompts = [np.array([5, 9, 200]), np.array([7]), np.array([1, 2, 3, 4, 5, 6])]
    with jax.set_mesh(program.tp.manager.mesh):
        params = program.init().params
        generator = Generator(program.definition, program.plan, cache=cache)
        texts = generator(params, prompts, max_new_tokens=5)
    rows = np.zeros((3, L), np.int32)
    for row, text in zip(rows, texts, strict=True):
        row[: len(text)] = text
    best = full_forward(tight.model_copy(update={"capacity_factor": None}))(rows)
    for row, (prompt, text) in enumerate(zip(prompts, texts, strict=True)):
        np.testing.assert_array_equal(text[: len(prompt)], prompt)
        np.testing.assert_array_equal(
            text[len(prompt) :], best[row, len(prompt) - 1 : len(text) - 1]
        )


@pytest.mark.slow
@pytest.mark.parametrize("remat", ["none", "full"])
def test_remat_changes_no_number(one_device, remat) -> None:
    model = MODEL.model_copy(update={"remat": remat})
    assert_equal_gradients(gradients(MeshConfig(ep=2), model), one_device)


@pytest.mark.release
def test_accumulation_on_several_devices_equals_one_device() -> None:
    assert_equal_gradients(gradients(MeshConfig(ep=4), parts=2), gradients(ONE_DEVICE, parts=2))


@pytest.mark.release
def test_bfloat16_loss_on_several_devices_equals_one_device() -> None:
    """Up to one rounding of activations, 2 ** -8."""
    model = MODEL.model_copy(update={"dtype": "bfloat16"})
    got, want = gradients(MeshConfig(ep=2, tp=2), model), gradients(ONE_DEVICE, model)
    assert got[0] == pytest.approx(want[0], rel=2**-8)


def test_evaluation_drops_nothing_whatever_the_capacity() -> None:
    tight = MOE.model_copy(update={"capacity_factor": 0.25})
    sums = []
    for moe, mesh in ((MOE, ONE_DEVICE), (tight, MeshConfig(ep=2))):
        program = program_of(mesh, MODEL.model_copy(update={"moe": moe}))
        with jax.set_mesh(program.tp.manager.mesh):
            params = program.init().params
            total, count, _ = program.eval_step(params, batch(program))
            sums.append([float(total), float(count)])
    assert sums[1] == pytest.approx(sums[0], rel=LOSS_BOUND)


@pytest.mark.parametrize("impl", ["blocked", "padded"])
@pytest.mark.costly
def test_float32_is_float32_in_every_matmul_of_forward_and_backward(monkeypatch, impl) -> None:
    """TPUs and GPUs multiply float32 at lower precision by default; gradients are traced apart."""
    monkeypatch.setattr(Program, "precision", "highest")
    moe = MOE.model_copy(update={"grouped_matmul": impl, "capacity_factor": 2.0})
    program = program_of(MeshConfig(ep=2, tp=2), MODEL.model_copy(update={"moe": moe}))
    with jax.set_mesh(program.tp.manager.mesh):
        text = program.train_step.lower(program.abstract_state, batch(program)).as_text()
    products = [line for line in text.splitlines() if "stablehlo.dot_general" in line]
    assert len(products) > 20
    assert not [line for line in products if "HIGHEST" not in line]
