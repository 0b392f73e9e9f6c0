"""Activations in the sharding table have the shapes and sharding of the model's activations."""

from functools import partial

import jax
import jax.numpy as jnp
import pytest
from conftest import MESHES, tensor_parallel
from flax import nnx

from model.block import Block
from model.config import ModelConfig
from model.footprint import activation_tensors, ring_shapes
from model.layers import Attention, TokenInfo, split_heads
from model.mla_config import MLAConfig
from model.plan import make_plan
from model.rotation import layer_rotations
from model.segments import LayerKind
from model.transformer import Transformer
from parallel.planning.sharding_table import sharding_table
from parallel.sharding.axes import TokenSharding

BATCH, LENGTH = 8, 16
CONFIG = ModelConfig(hidden_size=32, num_hidden_layers=2, intermediate_size=64, dtype="float32")


LATENT = CONFIG.model_copy(
    update={
        "mla": MLAConfig(
            kv_lora_rank=16, qk_nope_head_dim=6, qk_rope_head_dim=8, v_head_dim=10, q_lora_rank=24
        )
    }
)


def heads_and_latents(attention, x) -> dict[str, jax.Array]:
    """Return queries, keys, values and latents of a layer, under their names in the table."""
    if isinstance(attention, Attention):
        qkv = attention.qkv(x)
        split = partial(split_heads, head_dim=attention.config.head_size, tp=attention.tp)
        return {"q_BLHh": split(qkv["q"]), "kv_BLKh": split(qkv["k"])}
    q_n, q_r, latent, k_r = attention._project(x)
    k, v = attention._keys_and_values(latent, k_r)
    down = attention.down(x).values()
    return {
        "q_BLHh": jnp.concatenate([q_n, q_r], -1),
        "k_BLHh": k,
        "v_BLHv": v,
        "latents_BLR": jnp.concatenate(list(down), -1),
    }


def activations_of_the_model(config, tp) -> dict[str, jax.Array]:
    """Return abstract activations of the model's layers."""

    def forward():
        plan = make_plan(config, tp, lengths=[LENGTH])
        model = Transformer(plan, rngs=nnx.Rngs(params=jax.random.key(0)))
        block = Block(plan, sparse=False, rngs=nnx.Rngs(params=jax.random.key(0)))
        spec = tp.manager.resolve(TokenSharding)
        tokens = jnp.zeros((BATCH, LENGTH), jnp.int32, out_sharding=spec)
        x = model.embed(tokens)
        rotations = layer_rotations(config, tokens, by_matmul=False)
        rows = TokenInfo(positions_BL=tokens, rotations=rotations, segment_ids_BL=tokens)
        return {
            "tokens_BL": tokens,
            "x_BLD": block(
                x,
                rows,
                kind=LayerKind("full_attention", is_sparse=False),
                choice=plan.attention_of("full_attention", LENGTH),
            )[0],
            **heads_and_latents(block.attention, x),
            "mlp_BLF": block.mlp.gate_up(x)["gate"],
        }

    with jax.set_mesh(tp.manager.mesh):
        return jax.eval_shape(forward)


@pytest.mark.parametrize("residual", ["sequence", "hidden", "replicated"])
@pytest.mark.parametrize("name", MESHES)
@pytest.mark.parametrize("config", [CONFIG, LATENT], ids=["heads", "latents"])
def test_activations_of_the_table_are_sharded_as_in_the_model(config, name, residual):
    tp = tensor_parallel(MESHES[name], residual)
    tensors = activation_tensors(config, tp.manager, batch=BATCH, length=LENGTH)
    rows = {row.name: row for row in sharding_table(tensors, tp.manager)}
    for kind, activation in activations_of_the_model(config, tp).items():
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


def test_the_ring_of_latent_queries_is_as_wide_as_their_latents():
    tp = tensor_parallel(MESHES["tp8"], "sequence")
    rings = ring_shapes(LATENT, tp.manager, batch=BATCH, length=LENGTH)
    assert (rings["qkv"].width, rings["qkv"].gather_columns) == (24, 14)
    assert (rings["o"].width, rings["o"].scatter_columns) == (32, 10)
    hidden = tensor_parallel(MESHES["tp8"], "hidden").manager
    assert "qkv" not in ring_shapes(LATENT, hidden, batch=BATCH, length=LENGTH)
