"""Decoding with an int8 cache equals decoding with keys and values that a test rounds itself."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import release
from flax import nnx
from test_generator import (
    BOUND,
    CONFIG,
    LENGTHS,
    MESHES_HERE,
    NEW,
    PROMPTS,
    WIDTH,
    program,
    put,
    rows,
    write,
)

from model.generation.cache import DenseCache
from model.generation.int8_cache import Int8Cache
from model.mla_config import MLAConfig
from parallel.sharding.axes import BATCH, MODE_DECODE, MODE_PREFILL, TokenSharding

LATENT = CONFIG.model_copy(
    update={
        "num_key_value_heads": 8,
        "attention_sinks": False,
        "qk_norm": False,
        "mla": MLAConfig(kv_lora_rank=16, qk_nope_head_dim=8, qk_rope_head_dim=4, v_head_dim=8),
    }
)
CONFIGS = {"heads": CONFIG, "latents": LATENT}


def rounded(x_BLKh: jax.Array) -> jax.Array:
    """Round every vector to multiples of its largest entry / 127."""
    unit = jnp.max(jnp.abs(x_BLKh), -1, keepdims=True) / 127
    return jnp.round(x_BLKh / jnp.maximum(unit, 1e-30)) * unit


class RoundingCache(DenseCache):
    """A dense cache in float32 that rounds what is written."""

    def write(self, layer, k_BLKh, v_BLKh, slots_BL):
        v_BLKh = None if v_BLKh is None else rounded(v_BLKh)
        return super().write(layer, rounded(k_BLKh), v_BLKh, slots_BL)


jax.tree_util.register_dataclass(
    RoundingCache,
    ["k_NBTKh", "v_NBTKh", "index_BT", "lengths_B"],
    ["sequence_axis"],
)


def decode(mesh: str, config, kind: type[DenseCache]) -> np.ndarray:
    """Return the logits `B NEW V` of given tokens after prompts of different lengths."""
    tp, definition, params = program(mesh, config)
    data, got = rows(), []

    @partial(jax.jit, static_argnames="mode", donate_argnums=1)
    def extend(params, cache, tokens, counts, mode):
        model = nnx.merge(definition, params)
        hidden, cache = model.extend(tokens, counts, cache, mode=mode)
        return model.logits(hidden), cache

    def run(cache, tokens, counts, mode):
        arrays = put(tp, tokens, TokenSharding, mode), put(tp, counts, [BATCH], mode)
        return extend(params, cache, *arrays, mode=mode)

    with jax.set_mesh(tp.mesh):
        cache = kind.empty(config, tp, batch=4, length=24)
        _, cache = run(cache, data[:, :WIDTH], LENGTHS, MODE_PREFILL)
        for step in range(NEW):
            tokens = data[np.arange(4), LENGTHS + step][:, None]
            logits, cache = run(cache, tokens, np.ones(4, int), MODE_DECODE)
            got.append(np.asarray(logits)[:, 0])
    return np.stack(got, axis=1)


@pytest.mark.parametrize(
    ("name", "mesh"),
    [
        ("heads", "one"),
        ("heads", "tp8"),
        ("latents", "tp4-sp2"),
        *(release("heads", mesh) for mesh in ("tp4-sp2", "dp2-fsdp2-tp2")),
        *(release("latents", mesh) for mesh in ("one", "tp8", "dp2-fsdp2-tp2")),
    ],
)
@pytest.mark.costly
def test_logits_equal_those_of_rounded_keys_and_values(name, mesh) -> None:
    config = CONFIGS[name]
    found, wanted = (decode(mesh, config, kind) for kind in (Int8Cache, RoundingCache))
    largest = np.abs(wanted).max()
    assert np.abs(found - wanted).max() <= BOUND * largest
    # A vector is off by up to half of 1/127 of its largest entry.
    error = np.abs(found - decode("one", config, DenseCache)).max() / largest
    assert 1e-3 < error < 0.1, error


def test_a_generator_with_an_int8_cache_writes_the_same_text_on_every_mesh() -> None:
    texts = [write(mesh, PROMPTS, cache="int8", max_new_tokens=NEW) for mesh in MESHES_HERE]
    assert all(text == texts[0] for text in texts)
