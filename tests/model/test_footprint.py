"""Activations in the sharding table have the shapes and sharding of the model's activations."""

import jax
import jax.numpy as jnp
import pytest
from conftest import MESHES, tensor_parallel
from flax import nnx

from model.config import ModelConfig
from model.footprint import activation_tensors
from model.layers import TokenInfo
from model.plan import make_plan
from model.segments import LayerKind
from model.transformer import Block, Transformer
from parallel.planning.sharding_table import sharding_table
from parallel.sharding.axes import TokenSharding

BATCH, LENGTH = 8, 16
CONFIG = ModelConfig(hidden_size=32, num_hidden_layers=2, intermediate_size=64, dtype="float32")


def activations_of_the_model(tp) -> dict[str, jax.Array]:
    """Return abstract activations of the model's layers."""

    def forward():
        plan = make_plan(CONFIG, tp, lengths=[LENGTH])
        model = Transformer(plan, rngs=nnx.Rngs(params=jax.random.key(0)))
        block = Block(plan, sparse=False, rngs=nnx.Rngs(params=jax.random.key(0)))
        spec = tp.manager.resolve(TokenSharding)
        tokens = jnp.zeros((BATCH, LENGTH), jnp.int32, out_sharding=spec)
        x = model.embed(tokens)
        qkv = block.attention.qkv(x)
        rows = TokenInfo(positions_BL=tokens, segment_ids_BL=tokens)
        return {
            "tokens_BL": tokens,
            "x_BLD": block(
                x,
                rows,
                kind=LayerKind("full_attention", is_sparse=False),
                choice=plan.attention_of("full_attention", LENGTH),
            )[0],
            "q_BLHh": block.attention._split_heads(qkv["q"]),
            "kv_BLKh": block.attention._split_heads(qkv["k"]),
            "mlp_BLF": block.mlp.gate_up(x)["gate"],
        }

    with jax.set_mesh(tp.manager.mesh):
        return jax.eval_shape(forward)


@pytest.mark.parametrize("residual", ["sequence", "hidden", "replicated"])
@pytest.mark.parametrize("name", MESHES)
def test_activations_of_the_table_are_sharded_as_in_the_model(name, residual):
    tp = tensor_parallel(MESHES[name], residual)
    tensors = activation_tensors(CONFIG, tp.manager, batch=BATCH, length=LENGTH)
    rows = {row.name: row for row in sharding_table(tensors, tp.manager)}
    for kind, activation in activations_of_the_model(tp).items():
        found = rows.pop(kind)
        assert (found.shape, found.dtype) == (activation.shape, activation.dtype.name)
        sharding = jax.sharding.NamedSharding(tp.manager.mesh, activation.sharding.spec)
        assert found.local_shape == sharding.shard_shape(activation.shape), kind
    assert rows.keys() == {"logits_CV"}


def test_logits_are_those_of_one_loss_chunk():
    tp = tensor_parallel(MESHES["dp2-fsdp2-tp2"])
    config = CONFIG.model_copy(update={"loss_chunk": 8})
    tensors = activation_tensors(config, tp.manager, batch=BATCH, length=LENGTH)
    row = sharding_table(tensors, tp.manager)[-1]
    assert row.name == "logits_CV" and row.local_shape == (8, config.vocab_size // 2)
