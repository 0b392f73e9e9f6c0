"""Greedy generation follows the argmax of the full forward pass."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import MESHES, ONE_DEVICE, tensor_parallel
from flax import nnx

from model.config import ModelConfig
from model.generate import generate
from model.transformer import Transformer

CONFIG = ModelConfig(
    vocab_size=64,
    hidden_size=32,
    num_hidden_layers=1,
    num_attention_heads=8,
    num_key_value_heads=8,
    intermediate_size=48,
    dtype="float32",
    initializer_range=0.3,
)
PROMPT = np.array([5, 9, 2])


def initial_model(config: ModelConfig, tp) -> Transformer:
    return Transformer(config, tp, rngs=nnx.Rngs(params=jax.random.key(0)))


def continue_prompt(tp, prompt=PROMPT, config=CONFIG, **options) -> np.ndarray:
    build = partial(initial_model, config, tp)
    with jax.set_mesh(tp.mesh):
        definition = nnx.graphdef(nnx.eval_shape(build))
        params = jax.jit(lambda: nnx.to_pure_dict(nnx.state(build())))()
        return generate(definition, params, prompt, tp=tp, length=16, **options)


def test_greedy_generation_equals_argmax_of_the_full_forward() -> None:
    tp = tensor_parallel(ONE_DEVICE)
    out = continue_prompt(tp, max_new_tokens=6)
    assert len(out) == 9 and list(out[:3]) == list(PROMPT)
    with jax.set_mesh(tp.mesh):
        model = initial_model(CONFIG, tp)
        tokens = jnp.asarray(out[None])
        index = jnp.arange(9)[None]
        logits = np.asarray(model.logits(model(tokens, index, jnp.zeros_like(tokens))))
    np.testing.assert_array_equal(np.argmax(logits[0, 2:-1], -1), out[3:])


@pytest.mark.parametrize("mesh", ["tp8", "dp2-fsdp2-tp2", "tp4-sp2"])
def test_every_mesh_writes_the_same_text(mesh: str) -> None:
    want = continue_prompt(tensor_parallel(ONE_DEVICE), max_new_tokens=6)
    got = continue_prompt(tensor_parallel(MESHES[mesh]), max_new_tokens=6)
    np.testing.assert_array_equal(got, want)


def test_a_tied_head_writes_the_same_text_on_every_mesh() -> None:
    config = CONFIG.model_copy(update={"tie_word_embeddings": True})
    want = continue_prompt(tensor_parallel(ONE_DEVICE), config=config, max_new_tokens=6)
    got = continue_prompt(tensor_parallel(MESHES["tp4-sp2"]), config=config, max_new_tokens=6)
    np.testing.assert_array_equal(got, want)


def test_sampling_repeats_with_its_seed_and_differs_without() -> None:
    tp = tensor_parallel(ONE_DEVICE)
    first, again, other = (
        continue_prompt(tp, max_new_tokens=12, temperature=2.0, seed=seed) for seed in (1, 1, 2)
    )
    np.testing.assert_array_equal(first, again)
    assert not np.array_equal(first, other)


def test_a_long_prompt_keeps_its_end() -> None:
    tp = tensor_parallel(ONE_DEVICE)
    out = continue_prompt(tp, prompt=np.arange(40), max_new_tokens=4)
    assert len(out) == 16 and list(out[:12]) == list(range(28, 40))
