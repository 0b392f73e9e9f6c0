"""Attention to pages equals attention to rows, whatever unused slots hold."""

import importlib.util
import subprocess
import sys
from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import ROOT
from jax.experimental.pallas.ops.tpu.ragged_paged_attention import ref_ragged_paged_attention
from jax.sharding import PartitionSpec as P

from model.attention import paged
from model.attention import paged as paged_tpu
from model.attention.dense import vanilla
from model.attention.mask import UNUSED, AttentionInputs, AttentionSpec, MaskSpec
from model.attention.paged import PagedInputs, any_queries_each
from model.attention.registry import backends_of
from parallel.sharding.mesh import MeshConfig, build_mesh

SIZE, HEADS, KV_HEADS, WIDTH = 4, 4, 2, 8
LENGTHS = [7, 0, 13, 1, 8]
# Prefill (all 13 keys), an empty sequence, decoding, two more of a longer row; then padding.
QUERIES, PADDING = [1, 0, 13, 1, 2], 3
RULE = AttentionSpec(scale=WIDTH**-0.5)
RULES = {
    "causal": RULE,
    "window": replace(RULE, mask=MaskSpec(window=5)),
    "chunk": replace(RULE, chunk=6, mask=MaskSpec(window=6)),
    "prefix": replace(RULE, mask=MaskSpec(prefix=6, window=2)),
    "soft_cap": replace(RULE, soft_cap=1.5),
    "sinks": replace(RULE, mask=MaskSpec(window=3)),
}


def pages_of(lengths, *, width=WIDTH, kv_heads=KV_HEADS, dtype=jnp.float32, seed=0):
    """Return shuffled pages, a table wider than needed, and which slots hold a key."""
    rng = np.random.default_rng(seed)
    counts = [-(-length // SIZE) for length in lengths]
    ids = 1 + rng.permutation(sum(counts) + 2)
    table = np.zeros((len(lengths), max(counts) + 2), np.int32)
    used = np.zeros((len(ids) + 1, SIZE), bool)
    for row, (count, length) in enumerate(zip(counts, lengths, strict=True)):
        table[row, :count], ids = ids[:count], ids[count:]
        for slot in range(length):
            used[table[row, slot // SIZE], slot % SIZE] = True
    pages = rng.normal(size=(*used.shape, 2 * kv_heads, width))
    return jnp.asarray(pages, dtype), jnp.asarray(table), used


def problem(queries, *, sinks=False, padding=PADDING, **kwargs):
    pages, table, used = pages_of(LENGTHS, **kwargs)
    starts = np.concatenate([[0], np.cumsum(queries)])
    rng = np.random.default_rng(1)
    shape = (starts[-1] + padding, HEADS, kwargs.get("width", WIDTH))
    q = jnp.asarray(rng.normal(size=shape), pages.dtype)
    inputs = PagedInputs(
        page_table_SP=table,
        lengths_S=jnp.asarray(LENGTHS, jnp.int32),
        query_starts=jnp.asarray(starts, jnp.int32),
        sinks_H=jnp.asarray(rng.normal(size=HEADS), jnp.float32) if sinks else None,
    )
    return q, pages, inputs, used


def by_rows(q_THh, pages, inputs, used, spec):
    """Return `vanilla` with every token as a row of its own, and the keys of its sequence."""
    starts, lengths = np.asarray(inputs.query_starts), np.asarray(inputs.lengths_S)
    tokens, capacity = q_THh.shape[0], inputs.page_table_SP.shape[1] * SIZE
    q_index = np.full((tokens, 1), UNUSED)
    kv_index = np.full((tokens, capacity), UNUSED)
    sequence = np.zeros(tokens, int)
    for row, length in enumerate(lengths):
        for token in range(starts[row], starts[row + 1]):
            sequence[token] = row
            q_index[token] = length - starts[row + 1] + token
            if q_index[token] >= 0:
                kv_index[token, :length] = np.arange(length)
    held = jnp.where(used[..., None, None], pages, 0)
    kv = held[inputs.page_table_SP[sequence]].reshape(tokens, capacity, *pages.shape[2:])
    chunks = [jnp.asarray(x // (spec.chunk or 2**30)) for x in (q_index, kv_index)]
    scores = AttentionInputs(
        q_index_BL=jnp.asarray(q_index),
        kv_index_BT=jnp.asarray(kv_index),
        q_segment_ids_BL=chunks[0],
        kv_segment_ids_BT=chunks[1],
        sinks_H=inputs.sinks_H,
    )
    return vanilla(q_THh[:, None], kv[:, :, 0::2], kv[:, :, 1::2], scores, spec)[:, 0]


def value_and_gradients(function, q, pages, sinks=None):
    """Return the result and its derivatives for a fixed cotangent."""
    weights = jnp.asarray(np.random.default_rng(2).normal(size=q.shape), jnp.float32)

    @jax.jit
    def run(q, pages, sinks):
        def loss(q, pages, sinks):
            out = function(q, pages, sinks)
            return jnp.sum(out.astype(jnp.float32) * weights), out

        which = (0, 1) if sinks is None else (0, 1, 2)
        grads, out = jax.grad(loss, which, has_aux=True)(q, pages, sinks)
        return out, *grads

    return [np.asarray(x, np.float32) for x in run(q, pages, sinks)]


def with_sinks_of(function, inputs, *args):
    return lambda q, pages, sinks: function(q, pages, replace(inputs, sinks_H=sinks), *args)


@pytest.mark.parametrize("block_k", [None, 4 * SIZE, 100 * SIZE])
@pytest.mark.parametrize("name", RULES)
def test_pages_equal_rows(name, block_k) -> None:
    spec = replace(RULES[name], block_k=block_k)
    q, pages, inputs, used = problem(QUERIES, sinks=name == "sinks")
    expected = value_and_gradients(
        with_sinks_of(by_rows, inputs, used, spec), q, pages, inputs.sinks_H
    )
    # Unused slots may hold anything; results and derivatives must not depend on it.
    poisoned = jnp.where(used[..., None, None], pages, jnp.nan)
    found = value_and_gradients(
        with_sinks_of(any_queries_each, inputs, spec), q, poisoned, inputs.sinks_H
    )
    for x, y in zip(found, expected, strict=True):
        np.testing.assert_allclose(x, y, rtol=2e-5, atol=2e-6)
    assert (found[0][-PADDING:] == 0).all() and (found[1][-PADDING:] == 0).all()
    assert (found[2][~used] == 0).all()


@pytest.mark.parametrize("name", ["window", "sinks"])
def test_one_query_each_without_starts_equals_the_same_with_starts(name) -> None:
    q, pages, inputs, used = problem([1] * len(LENGTHS), sinks=name == "sinks", padding=0)
    one, mixed, rows = (
        value_and_gradients(with_sinks_of(function, given, *args), q, pages, inputs.sinks_H)
        for function, given, args in (
            (any_queries_each, replace(inputs, query_starts=None), (RULES[name],)),
            (any_queries_each, inputs, (RULES[name],)),
            (by_rows, inputs, (used, RULES[name])),
        )
    )
    for x, y, z in zip(one, mixed, rows, strict=True):
        np.testing.assert_array_equal(x, y)
        np.testing.assert_allclose(x, z, rtol=2e-5, atol=2e-6)
    assert (one[0][1] == 0).all()  # the empty sequence


# One query, the last of nine keys. Pages of four: it sees the last key of the second one.
@pytest.mark.parametrize(("window", "steps"), [(None, 3), (2, 2), (1, 1)])
def test_steps_in_which_nothing_is_seen_are_skipped(window, steps, monkeypatch) -> None:
    done = []

    def counted(*args):
        jax.debug.callback(lambda: done.append(1))
        return _add_keys(*args)

    _add_keys = paged._add_keys
    monkeypatch.setattr(paged, "_add_keys", counted)
    pages, table, used = pages_of([9])
    inputs = PagedInputs(table, jnp.asarray([9], jnp.int32), jnp.asarray([0, 1], jnp.int32))
    q = jnp.asarray(np.random.default_rng(1).normal(size=(1, HEADS, WIDTH)), jnp.float32)
    spec = replace(RULE, mask=MaskSpec(window=window))
    out = jax.jit(partial(any_queries_each, spec=spec))(q, pages, inputs)
    expected = jax.jit(lambda q, pages: by_rows(q, pages, inputs, used, spec))(q, pages)
    np.testing.assert_allclose(out, expected, rtol=2e-5, atol=2e-6)
    jax.effects_barrier()
    assert len(done) == steps


def test_bfloat16_pages_give_bfloat16_out_with_float32_scores() -> None:
    q, pages, inputs, used = problem(QUERIES, dtype=jnp.bfloat16)
    out = jax.jit(partial(any_queries_each, spec=RULE))(q, pages, inputs)
    wide = jax.jit(lambda q, pages: by_rows(q, pages, inputs, used, RULE))(
        q.astype(jnp.float32), pages.astype(jnp.float32)
    )
    assert out.dtype == jnp.bfloat16
    np.testing.assert_allclose(np.asarray(out, np.float32), wide, rtol=2e-2, atol=2e-2)


def test_more_queries_than_keys_see_nothing_before_the_first() -> None:
    q, pages, inputs, _ = problem(QUERIES)
    starts = jnp.asarray([0, 10, 10, 11, 12, 20], jnp.int32)
    out = jax.jit(partial(any_queries_each, spec=RULE))(
        q, pages, replace(inputs, query_starts=starts)
    )
    assert (out[:3] == 0).all() and (out[3:10] != 0).all()


def test_every_device_attends_in_its_own_pool_with_its_own_heads() -> None:
    mesh = build_mesh(MeshConfig(dp=2, tp=2), jax.devices()[:4])
    q, pages, inputs, used = problem(QUERIES)
    tables = PagedInputs(P("dp"), P("dp"), P("dp"))
    twice = PagedInputs(*(jnp.concatenate([x, x]) for x in jax.tree.leaves(inputs)))

    def loss(q, pages, inputs):
        island = jax.shard_map(
            partial(any_queries_each, spec=RULES["window"]),
            mesh=mesh,
            in_specs=(P("dp", "tp"), P("dp", None, "tp"), tables),
            out_specs=P("dp", "tp"),
        )
        out = island(q, pages, inputs)
        return jnp.sum(out**2), out

    with jax.set_mesh(mesh):

        def put(x, *spec):
            return jax.device_put(x, jax.NamedSharding(mesh, P(*spec)))

        arguments = (
            put(jnp.concatenate([q, q]), "dp", "tp"),
            put(jnp.concatenate([pages, pages]), "dp", None, "tp"),
            jax.tree.map(lambda x: put(x, "dp"), twice),
        )
        (dq, dpages), out = jax.jit(jax.grad(loss, (0, 1), has_aux=True))(*arguments)

    @jax.jit
    def reference(q, pages):
        return by_rows(q, pages, inputs, used, RULES["window"])

    expected, pull = jax.vjp(reference, q, pages)
    for found, single in zip((out, dq, dpages), (expected, *pull(2 * expected)), strict=True):
        both = np.concatenate([single, single])
        np.testing.assert_allclose(found, both, rtol=2e-5, atol=2e-6)


def gathered_bytes(table_pages: int, spec: AttentionSpec) -> int:
    """Return the temporary bytes of a decoding step with this number of pages per sequence."""
    struct = jax.ShapeDtypeStruct
    inputs = PagedInputs(struct((16, table_pages), jnp.int32), struct((16,), jnp.int32))
    compiled = jax.jit(partial(any_queries_each, spec=spec)).lower(
        struct((16, HEADS, 32), jnp.float32), struct((64, 8, 2 * KV_HEADS, 32), jnp.float32), inputs
    )
    return compiled.compile().memory_analysis().temp_size_in_bytes


def test_memory_is_that_of_a_step_not_of_the_context() -> None:
    spec = replace(RULE, block_k=8)
    short, long = gathered_bytes(8, spec), gathered_bytes(256, spec)
    # Page ids grow, two copies of 4 bytes per token and page; keys and values do not.
    assert long - short <= 2 * 4 * 16 * (256 - 8)
    assert gathered_bytes(256, replace(RULE, block_k=512)) > 8 * short


def kernel_inputs(queries, **kwargs):
    return problem(queries, width=128, **kwargs)


@pytest.mark.parametrize("name", ["causal", "window", "soft_cap"])
@pytest.mark.costly
def test_the_kernel_is_called_for_what_the_native_backend_computes(name, monkeypatch) -> None:
    """The kernel runs on TPU only; jax's reference implementation replaces it here."""

    def reference(*args, num_kv_pages_per_block, num_queries_per_block, **kwargs):
        assert num_kv_pages_per_block >= 1 and num_queries_per_block >= 1
        _, _, lengths, _, starts, num_seqs = args
        assert (lengths > 0).all() and starts[num_seqs[0]] == starts[-1]
        assert starts[num_seqs[0] - 1] < starts[-1]  # the last sequence has queries
        q, pages, *facts = args
        known = partial(ref_ragged_paged_attention, **kwargs)
        out = jax.jit(lambda q, pages: known(q, pages, *map(np.asarray, facts)))(q, pages)
        return jnp.full(args[0].shape, jnp.nan).at[: out.shape[0]].set(out)

    monkeypatch.setattr(paged_tpu, "ragged_paged_attention", reference)
    for queries in (QUERIES, [2, 0, 1, 0, 0], [0] * 5):
        q, pages, inputs, used = kernel_inputs(queries)
        pages = jnp.where(used[..., None, None], pages, 0)
        expected = jax.jit(partial(any_queries_each, spec=RULES[name]))(q, pages, inputs)
        found = paged_tpu.any_queries_each_tpu(q, pages, inputs, RULES[name])
        np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5)


def test_the_derivative_of_the_kernel_is_the_native_backends(monkeypatch) -> None:
    monkeypatch.setattr(paged_tpu, "ragged_paged_attention", lambda q, *_, **__: jnp.zeros_like(q))
    q, pages, inputs, _ = kernel_inputs([1] * 5, padding=0)
    backends = {
        backend.name: backend.function for backend in backends_of("ragged_page_attention_v2")
    }
    tpu, native = (
        value_and_gradients(
            lambda q, pages, _, function=function: function(q, pages, inputs, RULE), q, pages
        )
        for function in (backends["tpu"], backends["native"])
    )
    assert (tpu[0] == 0).all()
    for x, y in zip(tpu[1:], native[1:], strict=True):
        np.testing.assert_array_equal(x, y)


def test_the_kernel_refuses_what_it_cannot_tile() -> None:
    q, pages, inputs, _ = kernel_inputs(QUERIES, kv_heads=3)
    with pytest.raises(ValueError, match="3 kv heads of float32 per device: the paged kernel"):
        paged_tpu.any_queries_each_tpu(q, pages, inputs, RULE)
    q, pages, inputs, _ = kernel_inputs(QUERIES)
    wide = replace(inputs, page_table_SP=jnp.zeros((256, 1024), jnp.int32))
    with pytest.raises(ValueError, match="256 x 1024 entries needs 1054720 bytes of scalar mem"):
        paged_tpu.any_queries_each_tpu(q, pages, wide, RULE)


COMPILE = """
import jax, jax.numpy as jnp
from functools import partial
from jax.sharding import PartitionSpec as P
from model.attention.registry import backends_of
from model.attention.paged import PagedInputs
from model.attention.mask import MaskSpec, AttentionSpec
from parallel.planning.slices import absent_devices
from parallel.sharding.mesh import MeshConfig, build_mesh

mesh = build_mesh(MeshConfig(), absent_devices("v5p:2x2x1")[:1])
whole = jax.NamedSharding(mesh, P())
struct = partial(jax.ShapeDtypeStruct, sharding=whole)
spec = AttentionSpec(scale=128**-0.5, mask=MaskSpec({window}), soft_cap={soft_cap})
inputs = PagedInputs(
    struct((32, {pages}), jnp.int32), struct((32,), jnp.int32), struct((33,), jnp.int32)
)
backend = backends_of("{name}")[0]
assert backend.name == "tpu"
island = jax.shard_map(
    partial(backend.function, spec=spec), mesh=mesh, in_specs=(P(), P(), P()), out_specs=P(),
    check_vma=backend.capabilities.check_vma,
)
pool = struct((32 * {pages}, {size}, 2 * {kv_heads}, 128), jnp.{dtype})
with jax.set_mesh(mesh):
    q = struct(({tokens}, 4 * {kv_heads}, 128), jnp.{dtype})
    compiled = jax.jit(island).lower(q, pool, inputs).compile()
assert "ragged_paged_attention_kernel" in compiled.as_text()
print("temporary", compiled.memory_analysis().temp_size_in_bytes)
"""


# Llama-3-8B decoding on one device of tp 8, and all its heads on one device; 32 rows of 4096 slots.
@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("libtpu") is None, reason='pip install -e ".[plan]"')
@pytest.mark.parametrize(
    "case",
    [
        {"size": 16},
        {"size": 64},
        {"size": 16, "kv_heads": 8},
        {"size": 16, "dtype": "float32"},
        {"size": 16, "name": "ragged_page_attention_v3", "tokens": 512},
        {"size": 64, "name": "ragged_page_attention_v3", "tokens": 2048, "kv_heads": 8},
        {"size": 16, "window": "window=1024", "soft_cap": 50.0},
    ],
    ids=str,
)
def test_the_kernel_compiles_for_tpu_and_copies_no_pages(case) -> None:
    case = {
        "name": "ragged_page_attention_v2",
        "kv_heads": 1,
        "dtype": "bfloat16",
        "tokens": 32,
        "window": "",
        "soft_cap": None,
        "pages": 4096 // case["size"],
        **case,
    }
    script = COMPILE.format(**case)
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, done.stderr[-2000:]
    temporary = int(done.stdout.split("temporary")[1])
    pool = 32 * 4096 * 2 * case["kv_heads"] * 128 * (4 if case["dtype"] == "float32" else 2)
    assert temporary < pool / 8
