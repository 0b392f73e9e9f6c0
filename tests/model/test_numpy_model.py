"""The model equals plain numpy in float64: logits, losses and derivatives, for every feature."""

import ast
from functools import cache
from typing import NamedTuple

import jax
import numpy as np
import numpy_model
import pytest
from conftest import ONE_DEVICE, ROOT, sample, tensor_parallel
from flax import nnx
from model_runs import rounding_bound
from pydantic import BaseModel

from model.activations import ACTIVATIONS
from model.checks import check_model
from model.config import ModelConfig, MoEConfig
from model.mla_config import MLAConfig
from model.moe import auxiliary_loss
from model.plan import make_plan
from model.rope import _RULES, RopeScaling
from model.router import ROUTERS
from model.transformer import Transformer

B, L = 2, 24
SIZES = {
    "vocab_size": 50,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 24,
    "dtype": "float32",
    "loss_chunk": 20,
}
EXPERTS = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "router_aux_loss_coef": 0.5,
    "router_z_loss_coef": 0.1,
}
YARN = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 8, "beta_fast": 4.0}
LLAMA3 = {
    "type": "llama3",
    "factor": 4.0,
    "original_max_position_embeddings": 16,
    "low_freq_factor": 1.0,
    "high_freq_factor": 3.0,
}
LONG = {
    "type": "longrope",
    "factor": 3.0,
    "original_max_position_embeddings": 8,
    "short_factor": [1.5, 2.0],
    "long_factor": [2.0, 5.0],
}
LINEAR = {"type": "linear", "factor": 3.0}
LATENT = {
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 6,
    "qk_rope_head_dim": 8,
    "v_head_dim": 10,
    "norm_eps": 1e-3,
}
CASES = {
    "llama": {"rope_theta": 500.0, "rope_scaling": LLAMA3},
    "gemma": {
        "norm_placement": "both",
        "norm_offset": 1.0,
        "hidden_act": "gelu_tanh",
        "embedding_multiplier": 32**0.5,
        "head_dim": 10,
        "query_pre_attn_scalar": 24.0,
        "attn_logit_softcapping": 2.0,
        "final_logit_softcapping": 3.0,
        "tie_word_embeddings": True,
        "pad_vocab_to_multiple_of": 16,
        "layer_types": ("sliding_attention", "full_attention"),
        "sliding_window": 5,
        "rope_local_theta": 100.0,
        "rope_scaling": LINEAR,
        "qk_norm": True,
    },
    "olmo": {
        "norm_placement": "post",
        "rms_norm_eps": 0.1,
        "qk_norm": True,
        "qk_norm_across_heads": True,
        "num_hidden_layers": 3,
        "layer_types": ("chunked_attention", "full_attention"),
        "attention_chunk_size": 4,
        "rope_layers": (True, True, False),
        "partial_rotary_factor": 0.5,
        "rope_scaling": LONG,
        "biases": ("qkv", "o", "mlp"),
    },
    "gpt_oss": {
        "biases": ("qkv", "o", "experts", "router"),
        "hidden_act": "clamped_swiglu",
        "swiglu_limit": 0.7,
        "attention_sinks": True,
        "layer_types": ("sliding_attention", "full_attention"),
        "sliding_window": 5,
        "rope_scaling": {**YARN, "truncate": False, "beta_slow": 0.5},
        "moe": {**EXPERTS, "router": "topk_softmax"},
    },
    "deepseek_v3": {
        "num_key_value_heads": 4,
        "mla": {**LATENT, "q_lora_rank": 12, "rope_interleave": True},
        "rope_scaling": {**YARN, "mscale": 0.7, "mscale_all_dim": 1.2},
        "num_hidden_layers": 3,
        "moe": {
            **EXPERTS,
            "num_experts": 8,
            "num_experts_per_tok": 3,
            "router": "sigmoid",
            "n_group": 4,
            "topk_group": 2,
            "routed_scaling_factor": 2.5,
            "bias_update_speed": 0.01,
            "num_shared_experts": 2,
            "first_k_dense_replace": 1,
        },
    },
    "deepseek_v2": {
        "num_key_value_heads": 4,
        "mla": {**LATENT, "norm_eps": 0.1},
        "biases": ("o", "mlp"),
        "rope_scaling": {**YARN, "attention_factor": 1.3},
        "layer_types": ("sliding_attention", "full_attention"),
        "sliding_window": 5,
        "moe": {
            **EXPERTS,
            "num_experts": 6,
            "router": "softmax",
            "norm_topk_prob": False,
            "n_group": 3,
            "topk_group": 2,
            "num_shared_experts": 1,
        },
    },
    "qwen2_moe": {
        "biases": ("qkv",),
        "num_hidden_layers": 4,
        "moe": {
            **EXPERTS,
            "router": "softmax",
            "num_shared_experts": 2,
            "shared_expert_gate": True,
            "decoder_sparse_step": 2,
            "capacity_factor": 0.5,
        },
    },
    "switch": {
        "rope_scaling": {
            **LONG,
            "short_factor": [1.5] * 4,
            "long_factor": [2.0, 5.0, 6.0, 7.0],
            "row_length": 24,
            "attention_factor": 1.2,
        },
        "moe": {**EXPERTS, "num_experts_per_tok": 1, "router": "switch", "router_bias": True},
    },
    "expert_choice": {
        "num_key_value_heads": 1,
        "moe": {**EXPERTS, "moe_intermediate_size": None, "router": "expert_choice"},
    },
    "biased_choice": {
        "moe": {**EXPERTS, "router": "topk_softmax", "router_bias": True},
    },
}


def random_case(seed: int) -> dict:
    """Return fields of a random combination of features that `check_model` allows."""
    rng = np.random.default_rng(seed)

    def pick(*values):
        return values[rng.integers(len(values))]

    def some(*values):
        return tuple(value for value in values if rng.random() < 0.4)

    latent, moe = rng.random() < 0.3, {}
    activation = pick("silu", "gelu_tanh", "clamped_swiglu")
    fields = {
        "hidden_act": activation,
        "swiglu_limit": 0.8 if activation == "clamped_swiglu" else None,
        "norm_placement": pick("pre", "post", "both"),
        "norm_offset": pick(0.0, 1.0),
        "embedding_multiplier": pick(1.0, 3.0),
        "tie_word_embeddings": pick(False, True),
        "attn_logit_softcapping": pick(None, 2.0),
        "final_logit_softcapping": pick(None, 3.0),
        "layer_types": (pick(*WINDOWS), pick(*WINDOWS)),
        "sliding_window": pick(2, 4, 30),
        "attention_chunk_size": pick(3, 8),
        "rope_layers": pick((True,), (False, True)),
        "rope_theta": pick(100.0, 10000.0),
    }
    biases = some("o")
    if rng.random() < 0.5:
        moe = random_experts(pick)
        biases += some("mlp") if moe["num_shared_experts"] else ()
        biases += some("experts", "router")
    else:
        biases += some("mlp")
    if latent:
        rotary, mla = 8, {**LATENT, "q_lora_rank": pick(None, 12), "rope_interleave": pick(0, 1)}
        fields |= {"num_key_value_heads": 4, "mla": mla}
    else:
        rotary, norm = pick(4, 8), pick(0, 1, 2)
        biases += some("qkv")
        fields |= {
            "num_key_value_heads": pick(1, 2, 4),
            "partial_rotary_factor": rotary / 8,
            "qk_norm": norm > 0,
            "qk_norm_across_heads": norm > 1,
            "query_pre_attn_scalar": pick(None, 5.0),
            "attention_sinks": pick(False, True),
        }
    short, long = ([1 + pair / n for pair in range(rotary // 2)] for n in (2, 1))
    rope = pick({}, LINEAR, LLAMA3, YARN, {**LONG, "short_factor": short, "long_factor": long})
    return {**fields, "rope_scaling": rope, "biases": biases, "moe": moe}


WINDOWS = ("full_attention", "sliding_attention", "chunked_attention")


def random_experts(pick) -> dict:
    """Return fields of two sparse layers; pick: returns one of its arguments."""
    router, shared = (
        pick("softmax", "topk_softmax", "sigmoid", "switch", "expert_choice"),
        pick(0, 1),
    )
    grouped = pick(0, 1) and router in ("softmax", "sigmoid")
    return {
        **EXPERTS,
        "router": router,
        "num_experts": 6,
        "num_experts_per_tok": 1 if router == "switch" else pick(1, 2, 3),
        "n_group": 3 if grouped else 1,
        "topk_group": 2 if grouped else 1,
        "norm_topk_prob": pick(False, True),
        "routed_scaling_factor": pick(1.0, 2.5),
        "num_shared_experts": shared,
        "shared_expert_gate": shared == 1 and pick(False, True),
        "router_bias": pick(False, True),
    }


def config_of(fields) -> ModelConfig:
    config = ModelConfig.model_validate({**SIZES, **fields})
    check_model(config)
    return config


def rows() -> dict[str, np.ndarray]:
    """Two rows of packed documents, padding at the end of the second, and weights of tokens."""
    rng = np.random.default_rng(0)
    lengths = ((9, 2, 13), (15, 3, 6))
    segments = np.array([np.repeat(np.arange(3), row) for row in lengths])
    positions = np.array([np.concatenate([np.arange(n) for n in row]) for row in lengths])
    segments[1, -6:] = -1
    weights = rng.random((B, L)) * (rng.random((B, L)) < 0.8) * (segments >= 0)
    tokens, targets = rng.integers(0, SIZES["vocab_size"], (2, B, L))
    fields = {"tokens": tokens, "targets": targets, "positions": positions, "segment_ids": segments}
    fields = {name: y.astype(np.int32) for name, y in fields.items()}
    return fields | {"loss_mask": weights.astype(np.float32)}


def random_parameters(abstract, config: ModelConfig):
    """Return placed float32 arrays; none is constant, and every part of a block has an effect."""
    rng = np.random.default_rng(0)

    def draw(path, leaf):
        names = [key.key for key in path]
        x = rng.standard_normal(leaf.shape)
        if "scale" in names:
            x = 1 - config.norm_offset + 0.3 * x
        elif "kernel" in names:
            x /= leaf.shape[-2] ** 0.5
        elif "table" not in names and "sinks" not in names:
            x *= 0.3
        return jax.device_put(x.astype(np.float32), leaf.sharding.spec)

    return jax.tree_util.tree_map_with_path(draw, abstract)


class Run(NamedTuple):
    """A configuration, its parameters in numpy, and what a model computes from them."""

    config: ModelConfig
    params: dict
    logits: np.ndarray
    loss: float
    auxiliary: float
    gradients: dict


@cache
def run(case: str | int) -> Run:
    """Run our model for the name of a case, or for the seed of a random one."""
    config = config_of(CASES[case] if isinstance(case, str) else random_case(case))
    tp = tensor_parallel(ONE_DEVICE)
    plan, data = make_plan(config, tp, lengths=[L]), rows()

    def compute(params):
        model = nnx.merge(definition, params)
        tokens = (data[name] for name in ("tokens", "positions", "segment_ids"))
        x, reports = model(*tokens, dropless=True)
        loss = model.loss(x, data["targets"], data["loss_mask"]).objective
        report = reports.get("experts")
        auxiliary = 0.0 if report is None else auxiliary_loss(report, config)
        return loss + auxiliary, (model.logits(x)[..., : config.vocab_size], loss, auxiliary)

    with jax.set_mesh(tp.mesh):
        built = nnx.eval_shape(lambda: Transformer(plan, rngs=nnx.Rngs(0)))
        definition, state = nnx.split(built)
        params = random_parameters(nnx.to_pure_dict(state), config)
        (_, results), gradients = jax.jit(jax.value_and_grad(compute, has_aux=True))(params)
    params, results, gradients = jax.tree.map(np.asarray, (params, results, gradients))
    return Run(config, params, *results, gradients)


def in_numpy(config: ModelConfig, params) -> tuple[np.ndarray, float, float]:
    """Return logits, cross-entropy and auxiliary loss of the reference."""
    data = rows()
    tokens = (data[name] for name in ("tokens", "positions", "segment_ids"))
    logits, routings = numpy_model.forward(config, params, *tokens)
    losses = numpy_model.token_losses(logits, data["targets"])
    auxiliary = numpy_model.auxiliary_loss(config, routings, data["segment_ids"] >= 0)
    return logits, (data["loss_mask"] * losses).sum(), auxiliary


def widened(params):
    return jax.tree.map(lambda x: x.astype(np.float64), params)


def assert_equal_values(got: Run) -> None:
    logits, loss, auxiliary = in_numpy(got.config, widened(got.params))
    bound = rounding_bound(got.config, passes=1)
    assert np.abs(logits).max() > 0.3
    assert np.abs(got.logits - logits).max() <= bound * np.abs(logits).max()
    assert got.loss == pytest.approx(loss, rel=bound)
    assert got.auxiliary == pytest.approx(auxiliary, rel=bound)
    assert (auxiliary > 0.1) == (True in got.config.sparse_layers)


def directions(shape: tuple[int, ...], rng: np.random.Generator):
    """Yield two directions that change every entry of an array, and six that change one."""
    for _ in range(2):
        move = rng.standard_normal(shape)
        yield move / np.linalg.norm(move)
    for entry in rng.integers(0, np.prod(shape), 6):
        yield np.eye(1, np.prod(shape), entry).reshape(shape)


def is_derivative(got: float, loss_at, bound: float) -> bool:
    """Return whether `got` is the derivative of a function of a step at 0, by differences.

    A difference is off by the float64 rounding of the losses over the step; the square of the step
    is smaller. The second step is for a first one that changes the choice of experts, or crosses
    a corner of a clamped activation.
    """
    for step in (1e-5, 1e-7):
        above, below = loss_at(step), loss_at(-step)
        if abs(got - (above - below) / (2 * step)) <= bound + 1e-15 * above / step:
            return True
    return False


def assert_equal_derivatives(got: Run) -> None:
    rng, bound = np.random.default_rng(1), rounding_bound(got.config, passes=2)
    flat, structure = jax.tree_util.tree_flatten_with_path(widened(got.params))
    arrays, gradients = [array for _, array in flat], jax.tree.leaves(got.gradients)
    for number, (path, array) in enumerate(flat):
        name, gradient = jax.tree_util.keystr(path), gradients[number]
        largest = np.abs(gradient).max()
        assert largest > 1e-3 or name.endswith("['router']['bias']"), f"{name} has no gradient"
        for move in directions(array.shape, rng):

            def loss_at(step, number=number, move=move):
                changed = [*arrays]
                changed[number] = arrays[number] + step * move
                return sum(in_numpy(got.config, jax.tree.unflatten(structure, changed))[1:])

            assert is_derivative((gradient * move).sum(), loss_at, bound * largest), name


@pytest.mark.parametrize("name", CASES)
@pytest.mark.costly
def test_logits_and_losses_equal_numpy(name) -> None:
    assert_equal_values(run(name))


@pytest.mark.parametrize("name", CASES)
@pytest.mark.costly
def test_gradients_equal_finite_differences_of_numpy(name) -> None:
    assert_equal_derivatives(run(name))


@pytest.mark.parametrize("seed", [1, 2, *sample([(seed,) for seed in range(3, 35)])])
@pytest.mark.costly
def test_a_random_combination_of_features_equals_numpy(seed) -> None:
    got = run(seed)
    assert_equal_values(got)
    assert_equal_derivatives(got)


def test_the_reference_imports_none_of_our_packages() -> None:
    tree = ast.parse((ROOT / "tests" / "numpy_model.py").read_text())
    nodes = [node for node in ast.walk(tree) if isinstance(node, ast.Import | ast.ImportFrom)]
    names = {getattr(node, "module", None) or node.names[0].name for node in nodes}
    assert names == {"math", "types", "typing", "numpy"}


# Fields that choose between implementations of the same mathematics up to rounding, or are read by
# training only.
WITHOUT_EFFECT = {
    ModelConfig: {"dtype", "param_dtype", "initializer_range", "attention", "operation_configs"}
    | {"scan_ring_attention", "zigzag", "remat", "attention_dropout", "mup_base_width"}
    | {"matmul_dtype", "matmul_products", "matmul_scales", "mtp_loss_weights"},
    MoEConfig: {"exchange", "exchange_chunks", "dispatch_dtype", "grouped_matmul", "expert_rule"},
    MLAConfig: set(),
    RopeScaling: set(),
}


def parts(value):
    """Yield a configuration and those that it holds."""
    yield value
    for field in vars(value).values():
        if isinstance(field, BaseModel):
            yield from parts(field)


@pytest.mark.parametrize("kind", WITHOUT_EFFECT)
def test_every_field_that_changes_results_is_in_a_case(kind) -> None:
    found = [part for fields in CASES.values() for part in parts(config_of(fields))]
    found = [part for part in found if type(part) is kind]
    for name in kind.model_fields.keys() - WITHOUT_EFFECT[kind]:
        assert any(getattr(part, name) != kind.model_fields[name].default for part in found), name


def test_every_router_activation_and_rope_scaling_is_in_a_case() -> None:
    configs = [config_of(fields) for fields in CASES.values()]
    found = {
        **{config.moe.router: ROUTERS[config.moe.router].function for config in configs},
        **{config.hidden_act: ACTIVATIONS[config.hidden_act].function for config in configs},
        **{c.rope_scaling.type: _RULES[c.rope_scaling.type].rescale for c in configs},
    }
    ours = [entry.function for entry in (*ROUTERS.values(), *ACTIVATIONS.values())]
    ours += [rule.rescale for rule in _RULES.values()]
    for function in ours:
        # Tests of plugins register others.
        if function.__module__.startswith("model."):
            assert function in found.values(), function
