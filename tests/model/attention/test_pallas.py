"""The Pallas kernels for TPU equal dense float32 attention, in Pallas' interpreter.

Letters: B batch, L queries, T keys, H query heads, K kv heads, h head dim.
"""

import importlib.util
import subprocess
import sys
from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import ROOT
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.experimental.pallas import tpu as pltpu
from plain_mask import sees
from test_blockwise import dense as dense_attention

from model.attention import blockwise
from model.attention import pallas_flash as flash
from model.attention import pallas_kernels as grid
from model.attention.blockwise import OutputGradients
from model.attention.mask import UNUSED, AttentionInputs, AttentionSpec, MaskSpec
from model.attention.pallas_flash import KernelOptions

HEAD_DIM = 128
CAUSAL = MaskSpec()
INTERPRET = KernelOptions(interpret=True, dq_stays=False)


@dataclass(frozen=True)
class Case:
    """One attention; indices and segments are rows of a batch, or one row for all."""

    q_index: object
    kv_index: object
    mask: MaskSpec = CAUSAL
    segments: object = None
    soft_cap: float | None = None
    batch: int = 1
    heads: tuple[int, int] = (2, 1)
    dtype: str = "float32"
    block_q: int | None = 128
    block_k: int | None = 128
    dq_stays: bool = False

    @property
    def inputs(self) -> AttentionInputs:
        def rows(x):
            return None if x is None else jnp.atleast_2d(jnp.asarray(x, jnp.int32))

        return AttentionInputs(
            q_index_BL=rows(self.q_index),
            kv_index_BT=rows(self.kv_index),
            q_segment_ids_BL=rows(self.segments),
            kv_segment_ids_BT=rows(self.segments),
        )

    @property
    def spec(self) -> AttentionSpec:
        return AttentionSpec(
            scale=HEAD_DIM**-0.5,
            mask=self.mask,
            soft_cap=self.soft_cap,
            block_q=self.block_q,
            block_k=self.block_k,
        )

    def arrays(self):
        """q, k, v and the derivative of out."""
        L, T = (x.shape[1] for x in (self.inputs.q_index_BL, self.inputs.kv_index_BT))
        shapes = [(L, self.heads[0]), (T, self.heads[1]), (T, self.heads[1]), (L, self.heads[0])]
        random = np.random.default_rng(0)
        return [
            jnp.asarray(random.normal(size=(self.batch, *shape, HEAD_DIM)), self.dtype)
            for shape in shapes
        ]


dense = jax.jit(dense_attention, static_argnums=4)


@partial(jax.jit, static_argnums=(5, 6))
def kernels(q, k, v, dout, inputs, spec, options=INTERPRET):
    """(out, lse) and (dq, dk, dv) of the kernels."""
    out, lse = flash.attend(q, k, v, inputs, spec, options)
    delta = jnp.sum(dout.astype(jnp.float32) * out, axis=-1).transpose(0, 2, 1)
    output = OutputGradients(lse, delta, dout)
    return (out, lse), flash.attend_gradients(q, k, v, inputs, spec, output, options)


@partial(jax.jit, static_argnums=5)
def dense_gradients(q, k, v, dout, inputs, spec):
    (out, lse), pull_back = jax.vjp(lambda *x: dense(*x, inputs, spec), q, k, v)
    return pull_back((dout.astype(out.dtype), jnp.zeros_like(lse)))


def check(case: Case, interpret=True) -> None:
    """Compare values, logsumexp and gradients with dense attention."""
    options = KernelOptions(interpret=interpret, dq_stays=case.dq_stays)
    *qkv, dout = case.arrays()
    (out, lse), grads = kernels(*qkv, dout, case.inputs, case.spec, options)
    expected_out, expected_lse = dense(*qkv, case.inputs, case.spec)
    expected_grads = dense_gradients(*qkv, dout, case.inputs, case.spec)
    bounds = {"rtol": 1e-5, "atol": 1e-5}
    if case.dtype == "bfloat16":
        # Weights and their derivatives are rounded to 8 bits before they meet v, k and q.
        bounds = {"rtol": 0.02, "atol": 0.04}
    close = partial(np.testing.assert_allclose, **bounds)
    close(lse, expected_lse, rtol=1e-5, atol=1e-5)
    close(out, expected_out)
    assert {x.dtype for x in (out, lse, *grads)} == {jnp.dtype("float32")}
    for grad, expected in zip(grads, expected_grads, strict=True):
        close(grad, expected.astype(jnp.float32))


NATURAL = np.arange(256)
ZIGZAG = np.concatenate([np.arange(128), np.arange(384, 512)])
MIDDLE = np.arange(128, 384)
DOCUMENTS = np.sort(np.random.default_rng(1).integers(0, 3, (2, 256)), axis=1)

FAST = {
    "causal": Case(NATURAL, NATURAL, heads=(4, 2)),
    "zigzag sees another's rows in part": Case(ZIGZAG, MIDDLE, heads=(4, 1)),
    "dq stays": Case(ZIGZAG, MIDDLE, heads=(4, 2), dq_stays=True),
    "window, documents, cap": Case(
        NATURAL, NATURAL, MaskSpec(window=70), DOCUMENTS, soft_cap=2.0, batch=2
    ),
    "nothing is seen": Case(NATURAL, NATURAL + 256),
}
SLOW = {
    "bidirectional": Case(NATURAL, NATURAL, MaskSpec(causal=False), heads=(4, 2)),
    "bidirectional window": Case(NATURAL, NATURAL, MaskSpec(causal=False, window=40)),
    "window and prefix": Case(NATURAL, NATURAL, MaskSpec(window=100, prefix=33)),
    "zigzag sees itself": Case(ZIGZAG, ZIGZAG, heads=(4, 4)),
    "any order": Case(*np.random.default_rng(2).permuted(np.tile(NATURAL, (2, 1)), axis=1)),
    "one row of indices per row of the batch": Case(
        np.stack([NATURAL, NATURAL + 77]), NATURAL, MaskSpec(window=128), batch=2, heads=(4, 2)
    ),
    "unused keys, more keys than queries": Case(
        NATURAL + 128,
        np.where(np.arange(384) % 3 == 0, UNUSED, np.arange(384)),
        block_q=256,
        block_k=384,
    ),
    "documents without order": Case(
        NATURAL, NATURAL, MaskSpec(causal=False), DOCUMENTS, batch=2, block_q=None, block_k=None
    ),
    "dq stays, documents, cap": Case(
        NATURAL, NATURAL, MaskSpec(window=70), DOCUMENTS, soft_cap=2.0, batch=2, dq_stays=True
    ),
    "dq stays, nothing is seen": Case(NATURAL, NATURAL + 256, dq_stays=True),
    "dq stays, bfloat16": Case(NATURAL, NATURAL, dtype="bfloat16", heads=(4, 2), dq_stays=True),
    "bfloat16": Case(NATURAL, NATURAL, dtype="bfloat16", heads=(4, 2)),
    "bfloat16 with a cap": Case(NATURAL, NATURAL, dtype="bfloat16", soft_cap=3.0),
}


@pytest.mark.parametrize("name", FAST)
@pytest.mark.costly
def test_kernels_equal_dense_attention(name: str) -> None:
    check(FAST[name])


@pytest.mark.slow
@pytest.mark.parametrize("name", SLOW)
def test_kernels_equal_dense_attention_in_every_case(name: str) -> None:
    check(SLOW[name])


@pytest.mark.slow
@pytest.mark.parametrize("dq_stays", [False, True])
def test_a_simulated_tpu_reads_no_uninitialised_memory(dq_stays: bool) -> None:
    # Its memory starts as NaN; blocks are copied in and out as on a TPU.
    simulated = pltpu.InterpretParams(uninitialized_memory="nan", out_of_bounds_reads="raise")
    case = Case(ZIGZAG, MIDDLE, heads=(4, 2), dq_stays=dq_stays)
    check(case, simulated)


def test_queries_that_see_nothing_get_zeros() -> None:
    # Half of the queries of one block see nothing, the others something.
    case = Case(NATURAL, NATURAL + 64, heads=(1, 1))
    *qkv, dout = case.arrays()
    (out, lse), grads = kernels(*qkv, dout, case.inputs, case.spec)
    assert np.all(out[:, :64] == 0) and np.all(lse[..., :64] == -np.inf)
    assert np.all(np.isfinite(lse[..., 64:]))
    assert np.all(grads[0][:, :64] == 0)
    assert all(np.all(np.isfinite(grad)) for grad in grads)


def test_two_halves_of_the_keys_merge_to_the_whole() -> None:
    case = Case(NATURAL, NATURAL, heads=(2, 1))
    q, k, v, dout = case.arrays()
    (out, lse), grads = kernels(q, k, v, dout, case.inputs, case.spec)
    delta = jnp.sum(dout * out, axis=-1).transpose(0, 2, 1)

    @jax.jit
    def half(k, v, inputs):
        output = OutputGradients(lse, delta, dout)
        return (
            flash.attend(q, k, v, inputs, case.spec, INTERPRET),
            flash.attend_gradients(q, k, v, inputs, case.spec, output, INTERPRET),
        )

    (first, one), (second, two) = (
        half(k[:, part], v[:, part], Case(NATURAL, NATURAL[part]).inputs)
        for part in (slice(0, 128), slice(128, 256))
    )
    np.testing.assert_allclose(np.logaddexp(first[1], second[1]), lse, rtol=1e-5)
    shares = (np.exp(x[1] - lse).transpose(0, 2, 1)[..., None] for x in (first, second))
    merged = sum(share * x[0] for share, x in zip(shares, (first, second), strict=True))
    np.testing.assert_allclose(merged, out, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(one[0] + two[0], grads[0], rtol=1e-5, atol=1e-5)
    for index in (1, 2):
        joined = np.concatenate([one[index], two[index]], axis=1)
        np.testing.assert_allclose(joined, grads[index], rtol=1e-5, atol=1e-5)


@pytest.mark.slow
def test_kernels_equal_the_native_engine() -> None:
    case = Case(ZIGZAG, ZIGZAG, MaskSpec(window=300), heads=(4, 2), soft_cap=4.0)
    *qkv, dout = case.arrays()
    (out, lse), grads = kernels(*qkv, dout, case.inputs, case.spec)

    @jax.jit
    def native(q, k, v, inputs):
        delta = jnp.sum(dout * out, axis=-1).transpose(0, 2, 1)
        output = OutputGradients(lse, delta, dout)
        gradients = blockwise.attend_gradients(q, k, v, inputs, case.spec, output)
        return blockwise.attend(q, k, v, inputs, case.spec), gradients[:3]

    close = partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-5)
    jax.tree.map(
        close, ((out, lse), tuple(grads)), jax.tree.map(lambda x: x, native(*qkv, case.inputs))
    )


rows = st.lists(st.integers(-2, 40), min_size=8, max_size=8).map(np.array)


@settings(max_examples=60, deadline=None)
@given(
    q_index=rows,
    kv_index=rows,
    segments=st.tuples(*[st.lists(st.integers(0, 1), min_size=8, max_size=8)] * 2),
    causal=st.booleans(),
    window=st.none() | st.sampled_from([1, 5, 2**31 - 1, 2**40]),
    prefix=st.sampled_from([0, 3]),
)
def test_row_facts_say_what_the_mask_says(
    q_index, kv_index, segments, causal, window, prefix
) -> None:
    mask = MaskSpec(causal=causal, window=window, prefix=prefix)
    inputs = AttentionInputs(
        q_index_BL=q_index[None],
        kv_index_BT=kv_index[None],
        q_segment_ids_BL=np.array(segments[:1]),
        kv_segment_ids_BT=np.array(segments[1:]),
    )
    visibility = grid.Visibility.of(inputs, mask)
    query, key = (np.asarray(x) for x in grid.row_facts(inputs, mask))
    seen = np.asarray(visibility.seen(query[0, :, :, None], key[0, :, None]))
    same = inputs.q_segment_ids_BL[0][:, None] == inputs.kv_segment_ids_BT[0]
    wide = q_index.astype(np.int64)[:, None], kv_index.astype(np.int64)[None]
    # numpy has no bound at 2^31; a prefix is within its document like everything else.
    np.testing.assert_array_equal(seen, sees(mask, *wide) & same)
    kinds = visibility.kinds(query.reshape(1, 3, 2, 4), key.reshape(1, 2, 2, 4))[0]
    pairs = seen.reshape(2, 4, 2, 4).transpose(0, 2, 1, 3).reshape(2, 2, 16)
    assert np.all((kinds > grid.HIDDEN) | ~pairs.any(-1))
    assert np.all((kinds < grid.FULL) | pairs.all(-1))


def test_the_grid_holds_visible_pairs_only() -> None:
    kinds = np.zeros((2, 4, 3), np.int32)
    kinds[0, 0, 1], kinds[0, 2] = 2, [1, 0, 2]
    kinds[1, 3, 2] = 1
    steps = grid.steps_of(jnp.asarray(kinds))
    assert int(steps.count) == 5 and steps.stride == 12
    step = grid.Step(np.asarray(steps.words).reshape(2, 12)[:, :5])
    # A block of queries that meets nothing has one step of kind 0; the second row ends idle.
    np.testing.assert_array_equal(step.outer, [[0, 1, 2, 2, 3], [0, 1, 2, 3, 3]])
    np.testing.assert_array_equal(step.inner, [[1, 0, 0, 2, 0], [0, 0, 0, 2, 2]])
    np.testing.assert_array_equal(step.kind, [[2, 0, 1, 2, 0], [0, 0, 0, 1, 0]])
    np.testing.assert_array_equal(step.begins, [[1, 1, 1, 0, 1], [1, 1, 1, 1, 0]])
    np.testing.assert_array_equal(step.ends, [[1, 1, 0, 1, 1], [1, 1, 1, 1, 0]])


COMPILE = """
import os
os.environ["JAX_PLATFORMS"] = "cpu,tpu"
import jax, jax.numpy as jnp
from jax.sharding import PartitionSpec, NamedSharding
from model.attention.blockwise import OutputGradients
from model.attention import pallas_flash as flash
from model.attention.pallas_flash import KernelOptions
from model.attention.mask import AttentionInputs, AttentionSpec
from parallel.planning.slices import absent_devices
from parallel.sharding.mesh import MeshConfig, build_mesh

L, spec = 4096, AttentionSpec(scale=128**-0.5)
mesh = build_mesh(MeshConfig(sp=4), absent_devices("{topology}"))

def both(q, k, v, dout, q_index, kv_index):
    inputs = AttentionInputs(q_index_BL=q_index, kv_index_BT=kv_index)
    out, lse = flash.attend(q, k, v, inputs, spec)
    delta = jnp.sum(dout * out, axis=-1).transpose(0, 2, 1)
    output, options = OutputGradients(lse, delta, dout), KernelOptions(dq_stays={dq_stays})
    return out, flash.attend_gradients(q, k, v, inputs, spec, output, options)

split = PartitionSpec(None, "sp")
def array(heads):
    shape = (1, 4 * L, heads, 128) if heads else (1, 4 * L)
    dtype = jnp.bfloat16 if heads else jnp.int32
    return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, split))

jax.set_mesh(mesh)
# The results of a pallas_call have no varying axes.
island = jax.shard_map(both, in_specs=split, out_specs=split, check_vma=False)
compiled = jax.jit(island).lower(*map(array, (32, 8, 8, 32, 0, 0))).compile()
print(compiled.memory_analysis().temp_size_in_bytes)
print(compiled.as_text())
"""


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("libtpu") is None, reason='pip install -e ".[plan]"')
@pytest.mark.parametrize(
    ("topology", "dq_stays", "backward"),
    [("v5p:2x2x1", "None", ["flash_dkv_dq"]), ("v5e:2x2", "False", ["flash_dkv", "flash_dq"])],
)
def test_the_compiled_program_has_the_kernels_and_no_scores(topology, dq_stays, backward) -> None:
    program = COMPILE.format(topology=topology, dq_stays=dq_stays)
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, done.stderr[-2000:]
    temporary, text = done.stdout.split("\n", 1)
    assert "[4096,4096]" not in text and ",4096,4096]" not in text
    # One bfloat16 score matrix of all heads would be a GiB; q, out and their derivatives are less.
    assert int(temporary) < 2**28
    for name in ("flash_forward", *backward):
        assert f"%{name}." in text


@pytest.mark.parametrize(
    ("length", "asked", "message"),
    [
        (200, None, "over 200 tokens per device: use a multiple of 128"),
        (256, 192, "block_q=192 must divide the 256 tokens per device"),
        (384, 256, "block_q=256 must divide the 384 tokens per device"),
    ],
)
def test_rows_that_do_not_tile_are_refused(length: int, asked: int | None, message: str) -> None:
    case = Case(np.arange(length), NATURAL, block_q=asked)
    q, k, v, _ = case.arrays()
    with pytest.raises(ValueError, match=message):
        flash.attend(q, k, v, case.inputs, case.spec, INTERPRET)
