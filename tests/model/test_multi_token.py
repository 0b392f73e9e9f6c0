"""The parameters of modules of multi-token prediction, as counted by the configuration."""

import jax
import pytest
from conftest import ONE_DEVICE, tensor_parallel
from flax import nnx
from model_runs import SMALL, abstract_model

from model.config import ModelConfig, MoEConfig
from model.mla_config import MLAConfig

LATENT = MLAConfig(kv_lora_rank=8, q_lora_rank=12, qk_nope_head_dim=4, qk_rope_head_dim=4)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"tie_word_embeddings": True, "norm_placement": "both", "qk_norm": True},
        {"biases": ("qkv", "o", "mlp"), "attention_sinks": True, "norm_placement": "post"},
        {"moe": MoEConfig(num_experts=4, num_shared_experts=1)},
        {"mla": LATENT},
    ],
    ids=str,
)
def test_parameters_and_flops_of_modules_are_counted(changes) -> None:
    plain = SMALL.model_copy(update=changes)
    config = plain.model_copy(update={"mtp_loss_weights": (0.3, 0.1)})
    (with_modules, without) = (
        nnx.to_pure_dict(nnx.state(abstract_model(model, tensor_parallel(ONE_DEVICE))))
        for model in (config, plain)
    )
    assert with_modules.keys() - without.keys() == {"mtp"}
    assert sum(x.size for x in jax.tree.leaves(with_modules)) == config.num_parameters
    modules = jax.tree_util.tree_leaves_with_path(with_modules["mtp"])
    kernels = sum(leaf.size for path, leaf in modules if "kernel" in [key.key for key in path])
    heads = 2 * config.hidden_size * config.vocab_size
    assert config.num_matmul_parameters - plain.num_matmul_parameters == kernels + heads

    def of_attention(model: ModelConfig) -> float:
        return model.flops_per_token(16) - 6 * model.num_matmul_parameters

    assert of_attention(config) == 2 * of_attention(plain)  # four blocks instead of two layers
