"""Decoding token by token equals the full forward pass, for every cache, mesh and batch."""

from functools import cache as once
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import MESHES, ONE_DEVICE, tensor_parallel
from flax import nnx

from data.tokenizers.byte_level import ByteTokenizer
from model.attention import cached, registry
from model.attention.dense import vanilla
from model.config import BlockSizes, ModelConfig, OperationConfigs
from model.generation.cache import DenseCache, PagedCache
from model.generation.generator import (
    ROWS_PER_DEVICE,
    Generator,
    _step,
    bucket_length,
    stream_text,
)
from model.generation.sampling import SamplingConfig
from model.plan import make_plan
from model.rope import RopeScaling
from model.transformer import Transformer
from parallel.sharding.axes import BATCH, MODE_DECODE, MODE_INSERT, MODE_PREFILL, TokenSharding

CONFIG = ModelConfig(
    vocab_size=64,
    hidden_size=32,
    num_hidden_layers=3,
    num_attention_heads=8,
    num_key_value_heads=4,
    intermediate_size=48,
    dtype="float32",
    initializer_range=0.3,
    layer_types=("sliding_attention", "full_attention", "chunked_attention"),
    sliding_window=5,
    attention_chunk_size=7,
    attn_logit_softcapping=4.0,
    attention_sinks=True,
    qk_norm=True,
    rope_local_theta=100.0,
    rope_scaling=RopeScaling(type="linear", factor=2.0),
)
# Bound on the error of logits from float32 rounding, relative to the largest logit.
BOUND = 2e-6
LENGTHS, NEW, WIDTH = np.array([9, 3, 14, 1]), 6, 16
MESHES_HERE = {"one": ONE_DEVICE, **{k: MESHES[k] for k in ("tp8", "dp2-fsdp2-tp2", "tp4-sp2")}}

# Pages are not split over sp: see test_cache.
PAGED_ON = [("paged", mesh) for mesh in MESHES_HERE if mesh != "tp4-sp2"]


@once
def program(mesh: str, config: ModelConfig = CONFIG):
    """(parallel config, model definition, parameters); the attention sinks are not zero."""
    tp = tensor_parallel(MESHES_HERE[mesh])

    def build() -> Transformer:
        return Transformer(
            make_plan(config, tp, lengths=[WIDTH + NEW, len(PROMPTS[0]) + NEW]),
            rngs=nnx.Rngs(params=jax.random.key(0)),
        )

    with jax.set_mesh(tp.mesh):
        definition = nnx.graphdef(nnx.eval_shape(build))
        params = jax.jit(lambda: nnx.to_pure_dict(nnx.state(build())))()
    if config.attention_sinks:
        sinks = params["layers"]["attention"]["sinks"]
        values = np.random.default_rng(0).normal(size=sinks.shape).astype(np.float32)
        params["layers"]["attention"]["sinks"] = jax.device_put(values, sinks.sharding)
    return tp, definition, params


@once
def full_logits() -> np.ndarray:
    """Logits of every token of the rows, by one forward pass on one device."""
    tp, definition, params = program("one")
    tokens = jnp.asarray(rows())

    def forward(params):
        model = nnx.merge(definition, params)
        index = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
        return model.logits(model(tokens, index, jnp.zeros_like(tokens))[0])

    with jax.set_mesh(tp.mesh):
        return np.asarray(jax.jit(forward)(params))


def rows() -> np.ndarray:
    """Prompts and their continuations, row by row."""
    return np.random.default_rng(1).integers(0, 64, (4, WIDTH + NEW)).astype(np.int32)


def put(tp, array, axes, mode) -> jax.Array:
    return jax.device_put(np.asarray(array, np.int32), tp.manager.sharding(axes, mode))


def empty(kind: str, tp):
    if kind == "paged":
        return PagedCache.allocate(CONFIG, tp, lengths=LENGTHS + NEW, page_size=4)
    return DenseCache.empty(CONFIG, tp, batch=4, length=24)


# Every pair of a cache, a mesh and a way to fill the cache.
@pytest.mark.parametrize(
    ("kind", "mesh", "insert"),
    [
        ("dense", "one", 5),
        ("paged", "one", 0),
        ("dense", "tp8", 0),
        ("paged", "tp8", 5),
        ("dense", "dp2-fsdp2-tp2", 5),
        ("paged", "dp2-fsdp2-tp2", 0),
        ("dense", "tp4-sp2", 0),
        ("dense", "tp4-sp2", 5),
    ],
)
@pytest.mark.costly
def test_decoding_equals_the_full_forward_for_ragged_rows(kind, mesh, insert) -> None:
    """insert: number of tokens of every prompt that arrive in a second call."""
    tp, definition, params = program(mesh)

    @partial(jax.jit, static_argnames="mode", donate_argnums=1)
    def extend(params, cache, tokens, counts, mode):
        model = nnx.merge(definition, params)
        hidden, cache = model.extend(tokens, counts, cache, mode=mode)
        return model.logits(hidden), cache

    want, data, got = full_logits(), rows(), {}

    def run(cache, start, counts, width, mode):
        tokens = np.stack([data[b, s : s + width] for b, s in enumerate(start)])
        args = put(tp, tokens, TokenSharding, mode), put(tp, counts, [BATCH], mode)
        logits, cache = extend(params, cache, *args, mode=mode)
        logits = np.asarray(logits)
        for b, (s, n) in enumerate(zip(start, counts, strict=True)):
            got.update({(b, s + i): logits[b, i] for i in range(n)})
        return cache

    with jax.set_mesh(tp.mesh):
        first = np.maximum(LENGTHS - insert, 1)
        cache = run(empty(kind, tp), 0 * first, first, WIDTH, MODE_PREFILL)
        if insert:
            cache = run(cache, first, LENGTHS - first, insert, MODE_INSERT)
        for step in range(NEW):
            cache = run(cache, LENGTHS + step, np.ones(4, int), 1, MODE_DECODE)
    assert len(got) == LENGTHS.sum() + 4 * NEW
    for (b, i), logits in got.items():
        assert np.abs(logits - want[b, i]).max() <= BOUND * np.abs(want).max(), (b, i)


def write(mesh: str, prompts, config=CONFIG, **options) -> list[list[int]]:
    names = ("max_new_tokens", "stop_ids")
    call = {name: options.pop(name) for name in names if name in options}
    tp, definition, params = program(mesh, config)
    generator = Generator(definition, make_plan(config, tp, lengths=[]), **options)
    with jax.set_mesh(tp.mesh):
        return [list(map(int, ids)) for ids in generator(params, prompts, **call)]


PROMPTS = [np.array([5, 9, 2]), np.arange(11), np.array([63])]


@pytest.mark.parametrize("cache", ["dense", "paged"])
@pytest.mark.parametrize("mesh", MESHES_HERE)
@pytest.mark.costly
def test_every_mesh_and_cache_generates_the_same_text(mesh: str, cache: str) -> None:
    if cache == "paged" and mesh == "tp4-sp2":
        with pytest.raises(ValueError, match="a paged cache cannot split rows over sp"):
            write(mesh, PROMPTS, cache=cache, max_new_tokens=2)
        return
    texts = write(mesh, PROMPTS, cache=cache, max_new_tokens=NEW)
    assert texts == write("one", PROMPTS, max_new_tokens=NEW)
    for prompt, text in zip(PROMPTS, texts, strict=True):
        assert text[: len(prompt)] == list(prompt) and len(text) == len(prompt) + NEW


@pytest.mark.slow
def test_greedy_generation_follows_the_argmax_of_the_full_forward() -> None:
    check_follows_the_argmax(CONFIG)


def test_an_operation_of_a_user_generates_as_it_trains(monkeypatch) -> None:
    everything = {name: dict(backends) for name, backends in registry._OPERATIONS.items()}
    monkeypatch.setattr(registry, "_OPERATIONS", everything)

    @registry.register("cosine", capabilities=registry.Capabilities(features=registry.ALL))
    def cosine(q_BLHh, k_BTKh, v_BTKh, inputs, spec):
        # Keys in unused slots of the cache are zero.
        q, k = (y / (jnp.linalg.norm(y, axis=-1, keepdims=True) + 1e-6) for y in (q_BLHh, k_BTKh))
        return vanilla(q * 10 / spec.scale, k, v_BTKh, inputs, spec)

    config = CONFIG.model_copy(update={"attention": "cosine", "attn_logit_softcapping": None})
    check_follows_the_argmax(config)
    with pytest.raises(ValueError, match=r"attention operation cosine .*has no paged"):
        write("one", PROMPTS, config, cache="paged", max_new_tokens=2)


def test_block_sizes_reach_the_operation_on_pages(monkeypatch) -> None:
    seen, attend = [], cached._attend_pages

    def note(backend, q_BLHh, view, spec, sinks_H):
        seen.append(spec.block_k)
        return attend(backend, q_BLHh, view, spec, sinks_H)

    monkeypatch.setattr(cached, "_attend_pages", note)
    sizes = OperationConfigs({"ragged_page_attention_v2": BlockSizes(block_k=8)})
    config = CONFIG.model_copy(update={"operation_configs": sizes})
    texts = write("one", PROMPTS, config, cache="paged", max_new_tokens=3)
    assert set(seen) == {8} and texts == write("one", PROMPTS, max_new_tokens=3)


def check_follows_the_argmax(config: ModelConfig) -> None:
    (text,) = write("one", PROMPTS[:1], config, max_new_tokens=NEW)
    tp, definition, params = program("one", config)
    with jax.set_mesh(tp.mesh):
        model = nnx.merge(definition, params)
        tokens, index = jnp.asarray([text]), jnp.arange(len(text))[None]
        logits = model.logits(model(tokens, index, jnp.zeros_like(tokens))[0])
    np.testing.assert_array_equal(np.argmax(logits[0, 2:-1], -1), text[3:])


def test_a_row_is_independent_of_the_batch_and_sampling_repeats_with_its_seed() -> None:
    options = {"sampling": SamplingConfig(temperature=2.0, top_k=40, top_p=0.95)}
    together = write("one", PROMPTS, max_new_tokens=NEW, seed=1, **options)
    assert write("one", PROMPTS[:1], max_new_tokens=NEW, seed=1, **options) == together[:1]
    assert write("tp8", PROMPTS, max_new_tokens=NEW, seed=1, **options) == together
    assert write("one", PROMPTS, max_new_tokens=NEW, seed=2, **options) != together


def test_only_ids_of_tokens_are_drawn() -> None:
    options = {"sampling": SamplingConfig(temperature=9.0), "max_new_tokens": NEW}
    free, limited = (write("one", PROMPTS, num_tokens=n, **options) for n in (None, 9))
    drawn = [
        [t for text, p in zip(texts, PROMPTS, strict=True) for t in text[len(p) :]]
        for texts in (free, limited)
    ]
    assert max(drawn[0]) >= 9 > max(drawn[1])
    padded = CONFIG.model_copy(update={"vocab_size": 61, "pad_vocab_to_multiple_of": 32})
    assert padded.padded_vocab_size == 64
    texts = write("tp8", [np.arange(5)] * 8, padded, **options | {"max_new_tokens": 40})
    assert max(map(max, texts)) < 61


def test_rows_end_at_their_stop_tokens() -> None:
    texts = write("one", PROMPTS, max_new_tokens=NEW)
    stop = texts[0][len(PROMPTS[0]) + 1]
    stopped = write("one", PROMPTS, max_new_tokens=NEW, stop_ids=[stop])
    for prompt, free, got in zip(PROMPTS, texts, stopped, strict=True):
        new = free[len(prompt) :]
        kept = new[: new.index(stop) + 1] if stop in new else new
        assert got == [*map(int, prompt), *kept]


@pytest.mark.parametrize("sp", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("tp", [1, 2, 3, 6, 8, 16, 32])
def test_every_overlap_method_can_cut_a_prompt(sp, tp) -> None:
    rows, rest = divmod(bucket_length(1, ROWS_PER_DEVICE * sp * tp), sp * tp)
    assert rest == 0 and rows % 2 == 0 and rows >= tp.bit_length() - 1


@pytest.mark.parametrize("cache", ["dense", "paged"])
@pytest.mark.costly
def test_prefill_is_compiled_per_bucket_and_decoding_once(cache) -> None:
    assert [bucket_length(n, 8) for n in (1, 64, 65, 200)] == [64, 64, 128, 256]
    assert bucket_length(1, 48) == 96
    write("one", [np.arange(3)], max_new_tokens=3, cache=cache)
    compiled = _step._cache_size()
    for length in (2, 7, 40, 60):
        write("one", [np.arange(length) % 64], max_new_tokens=3, cache=cache)
    assert _step._cache_size() == compiled


def test_an_empty_prompt_is_refused() -> None:
    for prompts in ([], [np.array([1]), np.array([], np.int32)]):
        with pytest.raises(ValueError, match="every prompt needs at least one token"):
            write("one", prompts, max_new_tokens=1)


def test_invalid_page_sizes_and_seeds_are_refused() -> None:
    tp, definition, _ = program("one")
    for options, law in (
        ({"page_size": 0}, "page_size=0: use at least 1"),
        ({"seed": 10**20}, r"seed=1\d*: use at least 0 and less than"),
    ):
        with pytest.raises(ValueError, match=law):
            Generator(definition, make_plan(CONFIG, tp, lengths=[]), **options)


def test_unknown_token_ids_are_refused() -> None:
    for token in (-1, CONFIG.vocab_size):
        with pytest.raises(ValueError, match=r"token ids from .*; use 0 to 63"):
            write("one", [np.array([1, token])], max_new_tokens=1)


def test_incomplete_characters_of_streamed_text_wait_for_their_last_byte() -> None:
    def stream(tokens) -> list[str]:
        return list(stream_text(ByteTokenizer().decode, np.array([104]), tokens))

    pieces = stream("aé→z".encode())
    assert "".join(pieces) == "haé→z" and "\N{REPLACEMENT CHARACTER}" not in "".join(pieces)
    assert "".join(stream([0xC3])) == "h\N{REPLACEMENT CHARACTER}"
