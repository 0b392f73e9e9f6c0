"""Features of other model families equal a plain formula, on one device and on every mesh."""

from functools import cache as once

import jax
import jax.numpy as jnp
import numpy as np
import numpy_model
import pytest
from conftest import MESHES, ONE_DEVICE, release, sample, slow, tensor_parallel
from flax import nnx
from model_runs import SMALL, ModelRun, assert_equal_runs, batch, run_model, with_noise

from model.checks import check_model
from model.config import ModelConfig, MoEConfig
from model.generation.generator import Generator
from model.plan import make_plan
from model.transformer import Transformer
from parallel.sharding.mesh import MeshConfig

CONFIG = SMALL.model_copy(update={"initializer_range": 0.3})
EXPERTS = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "router": "topk_softmax",
}
# One group of fields per kind of family.
VARIANTS = {
    "biases": {"biases": ("qkv", "o", "mlp"), "query_pre_attn_scalar": 9.0},
    "gemma": {
        "norm_placement": "both",
        "norm_offset": 1.0,
        "hidden_act": "gelu_tanh",
        "embedding_multiplier": 32**0.5,
        "query_pre_attn_scalar": 24.0,
        "attn_logit_softcapping": 5.0,
        "final_logit_softcapping": 3.0,
        "tie_word_embeddings": True,
        "pad_vocab_to_multiple_of": 40,
        "layer_types": ("sliding_attention", "full_attention"),
        "sliding_window": 5,
        "rope_local_theta": 100.0,
        "qk_norm": True,
    },
    "olmo": {
        "norm_placement": "post",
        "qk_norm": True,
        "qk_norm_across_heads": True,
        "num_key_value_heads": 4,
    },
    "partial": {
        "partial_rotary_factor": 0.5,
        "rope_layers": (True, False, True),
        "num_hidden_layers": 3,
        "head_dim": 12,
    },
    "gpt_oss": {
        "biases": ("qkv", "o", "experts", "router"),
        "hidden_act": "clamped_swiglu",
        "swiglu_limit": 0.7,
        "attention_sinks": True,
        "moe": MoEConfig(**EXPERTS),
    },
    "shared_gate": {
        "biases": ("mlp",),
        "num_hidden_layers": 3,
        "moe": MoEConfig(
            **EXPERTS, num_shared_experts=2, shared_expert_gate=True, first_k_dense_replace=1
        ),
    },
    "latent": {
        "rope_scaling": {
            "type": "yarn",
            "factor": 4.0,
            "original_max_position_embeddings": 8,
            "beta_fast": 4.0,
            "beta_slow": 0.25,
            "mscale": 0.7,
            "mscale_all_dim": 1.2,
        },
        "layer_types": ("full_attention", "sliding_attention"),
        "sliding_window": 5,
        "mla": {
            "q_lora_rank": 24,
            "kv_lora_rank": 16,
            "qk_nope_head_dim": 6,
            "qk_rope_head_dim": 8,
            "v_head_dim": 10,
            "rope_interleave": True,
            "norm_eps": 1e-3,
        },
        "moe": MoEConfig(**EXPERTS, num_shared_experts=1, first_k_dense_replace=1),
    },
}
SPARSE = ("gpt_oss", "shared_gate", "latent")
B, L = 8, 16
MORE = {"ep2-tp2-sp2": MeshConfig(ep=2, tp=2, sp=2), "ep2-tp4": MeshConfig(ep=2, tp=4)}


def config_of(name: str) -> ModelConfig:
    config = ModelConfig.model_validate({**dict(CONFIG), **VARIANTS[name]})
    check_model(config)
    return config


@once
def one_device(name: str) -> ModelRun:
    tp = tensor_parallel(ONE_DEVICE)
    return run_model(config_of(name), tp, batch(B, L), alter=with_noise)


@once
def plain_formula(name: str) -> ModelRun:
    """The witness, in float64: a rounding of its own would count against the model."""
    config, params = config_of(name), one_device(name).params
    with jax.enable_x64(True):
        wide = jax.tree.map(lambda x: jnp.asarray(x, jnp.float64), params)
        formula = jax.jit(jax.value_and_grad(lambda p: numpy_model.loss(config, p, batch(B, L))))
        loss, gradients = jax.tree.map(np.asarray, formula(wide))
    return ModelRun(float(loss), gradients, params, None)


DENSE_RUNS = [("dp2-fsdp2-tp2", "sequence", "split"), ("tp4-sp2", "hidden", "ring")]
SPARSE_RUNS = [("ep2-tp2-sp2", "sequence", "bidirectional"), ("ep2-tp4", "replicated", "none")]
SLOW_RUNS = [
    ("tp8", "sequence", "bidirectional"),
    ("tp8", "replicated", "none"),
    ("fsdp8", "sequence", "none"),
    ("tp4-sp2", "sequence", "none"),
    ("dp2-fsdp2-tp2", "hidden", "none"),
    ("ep2-tp4", "hidden", "ring"),
]


# The runs take turns.
RUNS = [
    (name, *run) if (number + turn) % 2 else release(name, *run)
    for number, name in enumerate(VARIANTS)
    for turn, run in enumerate(SPARSE_RUNS if name in SPARSE else DENSE_RUNS)
]
SLOW = sample([(name, *run) for name in VARIANTS for run in SLOW_RUNS], 7)


@pytest.mark.parametrize("name", VARIANTS)
@pytest.mark.costly
def test_loss_and_every_gradient_on_one_device_equal_a_plain_formula(name) -> None:
    assert_equal_runs(one_device(name), plain_formula(name))


@pytest.mark.parametrize(("name", "mesh", "layout", "overlap"), [*RUNS, *SLOW])
@pytest.mark.costly
def test_loss_and_every_gradient_on_a_mesh_equal_a_plain_formula(
    name, mesh, layout, overlap
) -> None:
    tp = tensor_parallel((MESHES | MORE)[mesh], layout)
    kinds = dict.fromkeys(("qkv", "o", "mlp", "experts", "head"), overlap)
    tp = tp.replace(kind_overlaps=kinds | ({"experts": "none"} if overlap == "split" else {}))
    got = run_model(config_of(name), tp, batch(B, L), alter=with_noise)
    assert_equal_runs(got, plain_formula(name))


PROMPTS = [np.array([5, 9, 33]), np.array([7]), np.array([1, 2, 3, 4, 5, 6, 50, 60])]
CACHES = {
    "biases": "dense",
    "gemma": "paged",
    "partial": "dense",
    "gpt_oss": "paged",
    "latent": "dense",
}


@pytest.mark.parametrize(
    ("name", "cache"),
    [
        pytest.param(name, cache, marks=[] if CACHES.get(name) == cache else [pytest.mark.slow])
        for name in VARIANTS
        for cache in ("dense", "paged")
    ],
)
@pytest.mark.costly
def test_greedy_text_equals_that_of_a_plain_formula(name, cache) -> None:
    config = config_of(name)
    tp = tensor_parallel(MORE["ep2-tp4"] if name in SPARSE else MESHES["dp2-fsdp2-tp2"])
    plan = make_plan(config, tp, lengths=[])

    def build() -> Transformer:
        return Transformer(plan, rngs=nnx.Rngs(params=jax.random.key(3)))

    with jax.set_mesh(tp.mesh):
        definition = nnx.graphdef(nnx.eval_shape(build))
        params = jax.jit(lambda: nnx.to_pure_dict(nnx.state(build())))()
        params = with_noise(params)
        texts = Generator(definition, plan, cache=cache)(params, PROMPTS, max_new_tokens=8)
    wide = jax.tree.map(lambda x: np.asarray(x, np.float64), params)
    for prompt, text in zip(PROMPTS, texts, strict=True):
        assert len(text) == len(prompt) + 8 and (text[: len(prompt)] == prompt).all()
        place = np.arange(len(text))[None]
        logits, _ = numpy_model.forward(config, wide, np.array([text]), place, 0 * place)
        best = logits[0].argmax(-1)
        np.testing.assert_array_equal(text[len(prompt) :], best[len(prompt) - 1 : -1])


@pytest.mark.parametrize("name", ["biases", slow("latent")])
def test_bfloat16_is_close_to_float32_and_gradients_are_summed_in_float32(name) -> None:
    config = config_of(name).model_copy(update={"dtype": "bfloat16"})
    tp = tensor_parallel(MESHES["dp2-fsdp2-tp2"], overlap="bidirectional")
    got = run_model(config, tp, batch(B, L), alter=with_noise)
    want = one_device(name)
    assert got.loss == pytest.approx(want.loss, rel=5e-3)
    for a, b in zip(jax.tree.leaves(got.gradients), jax.tree.leaves(want.gradients), strict=True):
        assert a.dtype == np.float32 and np.linalg.norm(a - b) <= 0.15 * np.linalg.norm(b)
