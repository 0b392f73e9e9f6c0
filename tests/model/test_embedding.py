"""The embedding equals a lookup in numpy on every mesh; its table never travels."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import MESHES, tensor_parallel
from flax import nnx

from model.config import ModelConfig
from model.embedding import Embedding
from parallel.planning.hlo import COLLECTIVES
from parallel.planning.hlo_parser import parse_hlo
from parallel.sharding.axes import ResidualSharding, TokenSharding
from parallel.sharding.mesh import MeshConfig

CONFIG = ModelConfig(vocab_size=64, hidden_size=16, dtype="float32")


def rngs() -> nnx.Rngs:
    return nnx.Rngs(params=jax.random.key(0))


@pytest.mark.parametrize("layout", ["hidden", "sequence", "replicated"])
@pytest.mark.parametrize("mesh", ["tp8", "fsdp8", "dp2-fsdp2-tp2", "tp4-sp2", "ep2-fsdp2-sp2"])
@pytest.mark.costly
def test_embedding_looks_up_rows_on_every_mesh(mesh: str, layout: str) -> None:
    tp = tensor_parallel(MESHES[mesh], layout)
    tokens = np.random.default_rng(2).integers(0, 64, (8, 16)).astype(np.int32)
    with jax.set_mesh(tp.mesh):
        embed = Embedding(CONFIG, tp, rngs=rngs())
        definition, params = nnx.split(embed)
        placed = jax.device_put(tokens, tp.manager.sharding(TokenSharding))

        def loss(params):
            x = nnx.merge(definition, params)(placed)
            return jnp.sum(x**2) / 2, x

        (_, x), grads = jax.jit(jax.value_and_grad(loss, has_aux=True))(params)
        assert x.sharding.spec == tp.manager.resolve(ResidualSharding)
    table = np.asarray(params["table"][...])
    np.testing.assert_array_equal(x, table[tokens])
    want = np.zeros_like(table)
    np.add.at(want, tokens, table[tokens])
    np.testing.assert_allclose(grads["table"][...], want, atol=1e-6)


def test_features_that_ep_does_not_divide_are_equal_over_ep() -> None:
    tp = tensor_parallel(MeshConfig(fsdp=2, ep=4))
    config = CONFIG.model_copy(update={"hidden_size": 12})
    tokens = np.random.default_rng(2).integers(0, 64, (8, 16)).astype(np.int32)
    with jax.set_mesh(tp.mesh):
        definition, params = nnx.split(Embedding(config, tp, rngs=rngs()))
        placed = jax.device_put(tokens, tp.manager.sharding(TokenSharding))
        assert params["table"][...].sharding.shard_shape((64, 12)) == (64, 6)

        def loss(params):
            return jnp.sum(nnx.merge(definition, params)(placed) ** 2) / 2

        grads = jax.jit(jax.grad(loss))(params)
    table = np.asarray(params["table"][...])
    want = np.zeros_like(table)
    np.add.at(want, tokens, table[tokens])
    np.testing.assert_allclose(grads["table"][...], want, atol=1e-6)


@pytest.mark.parametrize("tied", [False, True])
def test_neither_the_table_nor_its_gradient_travels_over_fsdp_and_sp(tied: bool) -> None:
    tp = tensor_parallel(MeshConfig(fsdp=2, sp=2, tp=2))
    config = CONFIG.model_copy(update={"vocab_size": 4096, "tie_word_embeddings": tied})
    with jax.set_mesh(tp.mesh):
        definition, params = nnx.split(Embedding(config, tp, rngs=rngs()))
        tokens = jax.device_put(np.zeros((8, 16), np.int32), tp.manager.sharding(TokenSharding))

        def loss(params):
            return jnp.sum(nnx.merge(definition, params)(tokens) ** 2)

        text = jax.jit(jax.grad(loss)).lower(params).compile().as_text()
    module = parse_hlo(text)
    instructions = [x for c in module.computations.values() for x in c.instructions]
    sent = [x.bytes for x in instructions if x.opcode in COLLECTIVES]
    # The embeddings of all tokens are 8 KiB, the table is 256 KiB.
    assert sent and sum(sent) < 64 * 1024


def test_gradients_of_equal_tokens_are_summed_in_float32() -> None:
    tp = tensor_parallel(MESHES["tp8"])
    config = CONFIG.model_copy(update={"dtype": "bfloat16"})
    with jax.set_mesh(tp.mesh):
        definition, params = nnx.split(Embedding(config, tp, rngs=rngs()))
        tokens = jax.device_put(np.zeros((8, 512), np.int32), tp.manager.sharding(TokenSharding))

        def loss(params):
            return jnp.sum(nnx.merge(definition, params)(tokens).astype(jnp.float32))

        grads = jax.jit(jax.grad(loss))(params)
    # 4096 ones: a bfloat16 sum would stop at 256.
    np.testing.assert_array_equal(np.asarray(grads["table"][...])[0], 4096)
