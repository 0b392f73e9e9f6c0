"""Chunked attention: a chunk is counted from the start of a document, in every operation."""

from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import ONE_DEVICE, tensor_parallel
from flax import nnx
from hypothesis import given
from hypothesis import strategies as st

from model.attention.mask import MaskSpec, chunk_ids
from model.attention.registry import blockwise_names, choose_for_layer
from model.attention.ring import row_order
from model.config import ModelConfig
from model.layers import Attention, TokenInfo
from model.rotation import layer_rotations
from parallel.sharding.axes import ResidualSharding, TokenSharding
from parallel.sharding.mesh import MeshConfig

L, D, CHUNK = 32, 32, 8
# Lengths of the documents of two rows; no document but the first begins where a chunk of rows does.
DOCUMENTS = ((13, 17, 2), (5, 27))
# Bound: float32 rounding, relative to the largest value.
BOUND = 1e-5
SP4, SP2_TP2 = MeshConfig(sp=4), MeshConfig(sp=2, tp=2)


def packed() -> dict[str, np.ndarray]:
    """Fields `2 L` of packed rows, and the number of the chunk of every token, over all rows."""
    rows = []
    for lengths in DOCUMENTS:
        positions = np.concatenate([np.arange(n) for n in lengths])
        segments = np.repeat(np.arange(len(lengths)), lengths)
        chunks = np.cumsum(positions % CHUNK == 0) - 1
        rows.append({"positions": positions, "segments": segments, "chunks": chunks})
    rows[1]["chunks"] += rows[0]["chunks"][-1] + 1
    return {name: np.stack([row[name] for row in rows]).astype(np.int32) for name in rows[0]}


def run(layer_type: str, name: str, mesh: MeshConfig, x, positions, segments, real, **changes):
    """Return the result of an attention layer on these tokens, and its derivative by them."""
    config = ModelConfig(
        hidden_size=D,
        num_attention_heads=8,
        num_key_value_heads=4,
        dtype="float32",
        initializer_range=0.3,
        layer_types=(layer_type,),
        attention_chunk_size=CHUNK,
        attention=name,
        operation_configs={key: {"block_q": 4, "block_k": 4} for key in blockwise_names()},
        **changes,
    )
    tp = tensor_parallel(mesh)
    choice = choose_for_layer(config, layer_type, tp.manager, length=x.shape[1])
    order = row_order({"full_attention": choice}, config, tp.manager, x.shape[1])
    place = np.arange(x.shape[1]) if order is None else order
    put = jax.device_put
    with jax.set_mesh(tp.mesh):
        tokens, residual = (tp.manager.sharding(s) for s in (TokenSharding, ResidualSharding))
        positions_BL = put(positions[:, place], tokens)
        info = TokenInfo(
            positions_BL=positions_BL,
            rotations=layer_rotations(config, positions_BL, by_matmul=False),
            segment_ids_BL=put(segments[:, place], tokens),
            index_L=None if order is None else jnp.asarray(order),
        )
        real_BL1, x = put(real[:, place, None], residual), put(x[:, place], residual)

        @jax.jit
        def both(x, info):
            layer = Attention(config, tp, rngs=nnx.Rngs(params=jax.random.key(0)))

            def loss(x):
                out, _ = layer(x, info, layer_type=layer_type, choice=choice)
                return jnp.sum(jnp.where(real_BL1, jnp.sin(out), 0.0)), out

            return jax.grad(loss, has_aux=True)(x)

        dx, out = jax.tree.map(np.asarray, both(x, info))
    back = np.argsort(place)
    return out[:, back], dx[:, back], order is not None


@cache
def tokens() -> np.ndarray:
    return np.random.default_rng(0).normal(size=(2, L, D)).astype(np.float32)


@cache
def expected() -> tuple[np.ndarray, np.ndarray]:
    """Every chunk in a row of its own, by dense causal attention, which knows no chunk."""
    fields = packed()
    chunks = [fields["chunks"] == number for number in range(fields["chunks"].max() + 1)]
    sizes = [chunk.sum() for chunk in chunks]
    assert max(sizes) == CHUNK and min(sizes) < CHUNK
    x = np.zeros((len(chunks), CHUNK, D), np.float32)
    positions, real = np.zeros(x.shape[:2], np.int32), np.zeros(x.shape[:2], bool)
    for row, (chunk, size) in enumerate(zip(chunks, sizes, strict=True)):
        x[row, :size], positions[row, :size] = tokens()[chunk], fields["positions"][chunk]
        real[row, :size] = True
    results = run("full_attention", "vanilla", ONE_DEVICE, x, positions, 0 * positions, real)[:2]
    # Chunks are numbered in the order of their tokens.
    return tuple(result[real].reshape(2, L, D) for result in results)


@given(
    lengths=st.lists(st.integers(1, 20), min_size=1, max_size=6),
    chunk=st.integers(1, 25),
    first=st.integers(0, 40),
)
def test_ids_and_window_show_the_tokens_of_a_chunk_and_no_others(lengths, chunk, first) -> None:
    """first: position of the first token, of a document that begins in an earlier row."""
    segments = np.repeat(np.arange(len(lengths)) - 1, lengths)
    positions = np.concatenate([np.arange(n) for n in lengths])
    positions[: lengths[0]] += first
    ids = chunk_ids(positions, segments, chunk=chunk, keys=len(segments))
    index = np.arange(len(segments))
    got = MaskSpec(window=chunk).visible(index[:, None], index) & (ids[:, None] == ids)
    same = [(s, p // chunk) for s, p in zip(segments, positions, strict=True)]
    want = [[i >= j and same[i] == same[j] for j in index] for i in index]
    np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize(
    ("name", "mesh", "changes"),
    [
        *((name, ONE_DEVICE, {}) for name in ("vanilla", "sdpa", "flash_attn2", "blocksparse")),
        ("vanilla", SP2_TP2, {}),
        ("flash_attn2", SP4, {}),
        ("ulysses", SP4, {}),
        ("ring", SP4, {"zigzag": False}),
        ("ring", SP2_TP2, {"zigzag": True}),
        ("ring", SP4, {"zigzag": True, "scan_ring_attention": True}),
    ],
)
@pytest.mark.costly
def test_chunks_of_packed_documents_equal_rows_of_their_own(name, mesh, changes) -> None:
    fields = packed()
    real = np.ones((2, L), bool)
    rows = tokens(), fields["positions"], fields["segments"], real
    *results, reordered = run("chunked_attention", name, mesh, *rows, **changes)
    assert reordered == changes.get("zigzag", False)
    for got, want in zip(results, expected(), strict=True):
        assert np.abs(got - want).max() <= BOUND * np.abs(want).max()
