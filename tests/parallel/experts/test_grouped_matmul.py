"""Every grouped matmul equals a matmul per group in float64: values and gradients.

Rows outside of every group hold large numbers, which must not leak into any result.
Letters: R rows, E groups, D features in, F features out, S devices.
"""

import importlib.util
import subprocess
import sys
from dataclasses import dataclass
from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import ROOT
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.experimental.pallas import tpu as pltpu
from jax.sharding import PartitionSpec as P
from rings import place, ring
from row_groups import BOUND, GROUPS, LAYOUTS, member_rows, starts_of

from parallel.experts import grouped_kernels
from parallel.experts.grouped_matmul import (
    GROUPED_MATMULS,
    choose_grouped_matmul,
    grouped_matmul,
)
from parallel.experts.row_layout import RowGroups, RowLayout

D, F = 24, 32
SIZES = {
    "balanced": (10, 10, 10, 10),
    "skewed": (27, 1, 4, 8),
    "some empty": (0, 13, 0, 5),
    "one group": (0, 0, 40, 0),
    "last group": (0, 0, 0, 3),
    "all empty": (0, 0, 0, 0),
}
# Pallas runs in an interpreter, in tests of its own; tokamax has a file of its own.
CASES = [
    (name, kind)
    for name in GROUPED_MATMULS
    if "cpu" in GROUPED_MATMULS[name].platforms
    for kind in GROUPED_MATMULS[name].layouts
]


@dataclass(frozen=True)
class Arrays:
    """x, w, g; rows outside of every group are large."""

    x: np.ndarray
    w: np.ndarray
    g: np.ndarray

    @staticmethod
    def of(layout: RowLayout, sizes, dtype="float32", seed=0, features=(D, F)) -> "Arrays":
        rng = np.random.default_rng(seed)
        d, f = features
        shapes = (layout.rows, d), (layout.groups, d, f), (layout.rows, f)
        x, w, g = (rng.normal(size=shape).astype(jnp.dtype(dtype)) for shape in shapes)
        outside = ~member_rows(layout, sizes)
        x[outside] *= 1e3
        g[outside] *= 1e3
        return Arrays(x, w, g)

    def wanted(self, layout: RowLayout, sizes) -> list[np.ndarray]:
        """Return y, dx and dw by loops in float64; zeros outside of every group."""
        x, w, g = (array.astype(np.float64) for array in (self.x, self.w, self.g))
        y, dx, dw = np.zeros_like(g), np.zeros_like(x), np.zeros_like(w)
        for e, (start, size) in enumerate(zip(starts_of(layout, sizes), sizes, strict=True)):
            rows = slice(start, start + size)
            y[rows], dx[rows], dw[e] = x[rows] @ w[e], g[rows] @ w[e].T, x[rows].T @ g[rows]
        return [y, dx, dw]


def value_and_gradients(x, w, g, sizes, *, layout: RowLayout, impl: str):
    groups = RowGroups(layout, sizes)
    y, pull = jax.vjp(lambda x, w: grouped_matmul(x, w, groups, impl=impl), x, w)
    return y, *pull(g)


@cache
def compiled(layout: RowLayout, impl: str):
    return jax.jit(partial(value_and_gradients, layout=layout, impl=impl))


def run(layout: RowLayout, impl: str, arrays: Arrays, sizes):
    return compiled(layout, impl)(arrays.x, arrays.w, arrays.g, np.array(sizes, np.int32))


def check(got, arrays: Arrays, layout: RowLayout, sizes, dtype: str) -> None:
    """Compare rows of groups and dw with loops; everything must be finite.

    float32: 1e-5 of the largest. bfloat16: summed in float32 and rounded once, by 2^-8 at most.
    """
    member = member_rows(layout, sizes)
    for name, value, want in zip(("y", "dx", "dw"), got, arrays.wanted(layout, sizes), strict=True):
        assert value.dtype == jnp.dtype(dtype), name
        value = np.asarray(value, np.float64)
        assert np.isfinite(value).all(), name
        rows = slice(None) if name == "dw" else member
        rounding = 2**-8 * np.abs(want[rows]) if dtype == "bfloat16" else 0
        bound = rounding + 1e-5 * np.abs(want).max()
        worst = np.max(np.abs(value[rows] - want[rows]) - bound, initial=-np.inf)
        assert worst <= 0, f"{name} is off by {worst} more than its bound"


@pytest.mark.parametrize(("dtype", "features"), [("float32", (D, F)), ("bfloat16", (F, D))])
@pytest.mark.parametrize(("impl", "kind"), CASES)
def test_values_and_gradients_are_those_of_a_matmul_per_group(impl, kind, dtype, features) -> None:
    layout = LAYOUTS[kind]
    for sizes in SIZES.values():
        arrays = Arrays.of(layout, sizes, dtype, features=features)
        check(run(layout, impl, arrays, sizes), arrays, layout, sizes, dtype)


@pytest.mark.parametrize(("impl", "kind"), CASES)
def test_zero_rows_give_zeros(impl, kind) -> None:
    layout, sizes = LAYOUTS[kind], SIZES["some empty"]
    arrays = Arrays.of(layout, sizes)
    outside = ~member_rows(layout, sizes)
    arrays.x[outside], arrays.g[outside] = 0, 0
    y, dx, _ = run(layout, impl, arrays, sizes)
    assert outside.any() and not np.asarray(y)[outside].any() and not np.asarray(dx)[outside].any()


def test_blocks_that_are_not_in_use_are_never_read() -> None:
    layout, sizes = LAYOUTS["blocks"], SIZES["some empty"]
    arrays = Arrays.of(layout, sizes)
    used = starts_of(layout, sizes)[-1] + 8  # the last group has two blocks
    arrays.x[used:], arrays.g[used:] = np.nan, np.nan
    got = run(layout, "blocked", arrays, sizes)
    check(got, arrays, layout, sizes, "float32")
    assert used < layout.rows and not np.asarray(got[0])[used:].any()


@pytest.mark.parametrize("block", [1, 3, 64, 512, 1024])
def test_blocks_of_any_size_and_number_are_multiplied(block) -> None:
    """Up to 512 rows are multiplied in one step."""
    sizes = (1300, 0, 513, 1)
    layout = RowLayout.blocks(sum(sizes), GROUPS, block)
    arrays = Arrays.of(layout, sizes, features=(3, 5))
    check(run(layout, "blocked", arrays, sizes), arrays, layout, sizes, "float32")


@settings(deadline=None, max_examples=30, derandomize=True)
@given(
    shares=st.lists(st.integers(0, BOUND), min_size=GROUPS, max_size=GROUPS),
    impl=st.sampled_from([impl for impl, kind in CASES if kind == "blocks"]),
)
def test_any_sizes_within_the_bound_are_multiplied(shares, impl) -> None:
    layout = LAYOUTS["blocks"]
    sizes = np.diff(np.sort([0, *shares]))
    arrays = Arrays.of(layout, sizes)
    check(run(layout, impl, arrays, sizes), arrays, layout, sizes, "float32")


# Inside shard_map.

DEVICE_SIZES = np.array([SIZES["skewed"], SIZES["some empty"]], np.int32)


@pytest.mark.parametrize("shared", [False, True], ids=["own matrices", "shared matrices"])
@pytest.mark.parametrize(
    ("impl", "kind"),
    [
        ("padded", "uniform"),
        ("blocked", "blocks"),
        ("ragged_dot", "packed"),
        ("reference", "blocks"),
    ],
)
def test_devices_with_sizes_of_their_own_multiply_and_differentiate(impl, kind, shared) -> None:
    """Matrices that all devices share get the sum of their gradients."""
    mesh, layout = ring(2), LAYOUTS[kind]
    parts = [Arrays.of(layout, DEVICE_SIZES[s], seed=s) for s in range(2)]
    w = parts[0].w if shared else np.concatenate([part.w for part in parts])
    if shared:
        parts = [Arrays(part.x, w, part.g) for part in parts]
    spec = P() if shared else P("ring")
    x, g = (np.concatenate([getattr(part, name) for part in parts]) for name in "xg")

    def body(x, w, sizes):
        return grouped_matmul(x, w, RowGroups(layout, sizes), impl=impl)

    with jax.set_mesh(mesh):
        specs = (P("ring"), spec, P("ring"))
        island = jax.shard_map(body, in_specs=specs, out_specs=P("ring"))
        sizes = place(mesh, P("ring"), DEVICE_SIZES.reshape(-1))

        @jax.jit
        def both(x, w, g):
            y, pull = jax.vjp(lambda x, w: island(x, w, sizes), x, w)
            return y, *pull(g)

        got = both(place(mesh, P("ring"), x), place(mesh, spec, w), place(mesh, P("ring"), g))
        y, dx, dw = (np.asarray(value) for value in got)
    halves = [(*np.split(y, 2), *np.split(dx, 2))[s::2] for s in range(2)]
    for s, (part, (y_s, dx_s)) in enumerate(zip(parts, halves, strict=True)):
        own = part.wanted(layout, DEVICE_SIZES[s])[2].astype(np.float32)
        dw_s = own if shared else np.split(dw, 2)[s]
        check((y_s, dx_s, dw_s), part, layout, DEVICE_SIZES[s], "float32")
    if shared:
        total = sum(part.wanted(layout, DEVICE_SIZES[s])[2] for s, part in enumerate(parts))
        np.testing.assert_allclose(dw, total, atol=1e-5 * np.abs(total).max())


# TPU kernels in Pallas' interpreter: memory that was not written reads as NaN.


@pytest.mark.parametrize(
    ("dtype", "cases"),
    [("float32", ("skewed", "some empty", "all empty")), ("bfloat16", ("last group",))],
)
@pytest.mark.costly
def test_kernels_multiply_and_differentiate(dtype, cases, monkeypatch) -> None:
    """Two tiles each way, the second extending past the matrix; a group of several blocks."""
    monkeypatch.setattr(grouped_kernels, "_MAX_TILE_ROWS", 128)
    layout = RowLayout.blocks(BOUND, GROUPS, 16)
    with pltpu.force_tpu_interpret_mode(pltpu.InterpretParams(uninitialized_memory="nan")):
        solve = jax.jit(partial(value_and_gradients, layout=layout, impl="pallas"))
        for name in cases:
            sizes = SIZES[name]
            arrays = Arrays.of(layout, sizes, dtype, features=(136, 144))
            got = solve(arrays.x, arrays.w, arrays.g, np.array(sizes, np.int32))
            check(got, arrays, layout, sizes, dtype)


@cache
def walk(layout: RowLayout, min_steps: int):
    def tables(sizes):
        return grouped_kernels.grid_steps(RowGroups(layout, sizes), min_steps=min_steps).tables

    return jax.jit(tables)


@settings(deadline=None, max_examples=50, derandomize=True)
@given(
    sizes=st.lists(st.integers(0, 70), min_size=GROUPS, max_size=GROUPS),
    least=st.sampled_from([0, 1]),
)
def test_steps_visit_every_block_in_use_once_and_in_order(sizes, least) -> None:
    layout = RowLayout.blocks(70 * GROUPS, GROUPS, 16)
    tables = walk(layout, least)(np.array(sizes, np.int32))
    group, source, count = (np.asarray(table).tolist() for table in tables)
    assert group == sorted(group) and source == sorted(source)
    assert set(group) <= set(range(GROUPS)) and set(source) <= set(range(layout.rows // 16))
    seen = [(e, block, rows) for e, block, rows in zip(group, source, count, strict=True) if rows]
    starts = starts_of(layout, sizes)
    assert seen == [
        (e, (starts[e] + row) // 16, min(16, size - row))
        for e, size in enumerate(sizes)
        for row in range(0, size, 16)
    ]
    if least:
        assert set(group) == set(range(GROUPS))
    else:
        assert len(group) == layout.rows // 16


def test_a_step_of_a_group_without_rows_stays_within_a_full_buffer() -> None:
    tables = walk(RowLayout("blocks", 16, 64, GROUPS), 1)(np.array([16, 30, 10, 0], np.int32))
    group, source, count = (np.asarray(table).tolist() for table in tables)
    assert group == [0, 1, 1, 2, 3, 3, 3, 3]
    assert source == [0, 1, 2, 3, 3, 3, 3, 3]
    assert count == [16, 16, 14, 10, 0, 0, 0, 0]


@pytest.mark.parametrize(
    ("width", "most", "cores", "tile"),
    [
        (768, 2048, 2, 384),  # one tile for each core
        (768, 2048, 1, 768),
        (14336, 2600, 2, 1792),  # an even number of tiles
        (2880, 2048, 1, 1536),  # two tiles, the last one extends past the width
        (96, 2048, 2, 96),
    ],
)
def test_tiles_fit_and_divide_the_columns_among_cores(width, most, cores, tile) -> None:
    assert grouped_kernels._tile(width, most, cores=cores) == tile


COMPILE = """
import os
os.environ["JAX_PLATFORMS"] = "cpu,tpu"
import jax, jax.numpy as jnp, numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec
from parallel.experts.grouped_matmul import grouped_matmul
from parallel.experts.row_layout import RowGroups, RowLayout
from parallel.planning.slices import absent_devices

E, D, F = 8, 2048, 768
layout = RowLayout.blocks(8192, E, 512)
devices = absent_devices("{topology}")
mesh = Mesh(np.array(devices), ("ep",), axis_types=(AxisType.Explicit,))

def both(x, w, sizes, g):
    groups = RowGroups(layout, sizes)
    multiply = lambda x, w: grouped_matmul(x, w, groups, impl="pallas")
    y, pull = jax.vjp(multiply, x, w)
    return y, pull(g)

def array(*shape, dtype=jnp.bfloat16):
    sharding = NamedSharding(mesh, PartitionSpec("ep"))
    shape = len(devices) * shape[0], *shape[1:]
    return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)

jax.set_mesh(mesh)
R = layout.rows
arrays = array(R, D), array(E, D, F), array(E, dtype=jnp.int32), array(R, F)
island = jax.shard_map(both, out_specs=PartitionSpec("ep"))
compiled = jax.jit(island).lower(*arrays).compile()
print(compiled.memory_analysis().temp_size_in_bytes)
print(compiled.as_text())
"""


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("libtpu") is None, reason='pip install -e ".[plan]"')
@pytest.mark.parametrize("topology", ["v4:2x2x1", "v5p:2x2x1", "v6e:2x2"])
def test_the_compiled_program_is_three_kernels_and_no_copy(topology) -> None:
    done = subprocess.run(
        [sys.executable, "-c", COMPILE.format(topology=topology)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    temporary, text = done.stdout.split("\n", 1)
    # The smallest array, w, has 24 MiB.
    assert int(temporary) < 2**20
    calls = [line for line in text.splitlines() if "tpu_custom_call" in line]
    assert len(calls) == 3
    assert sum("grouped_products" in line.split(" = ")[0] for line in calls) == 2
    assert sum("grouped_outers" in line.split(" = ")[0] for line in calls) == 1


# Names and refusals.


@pytest.mark.parametrize("platform", ["cpu", "gpu", "tpu"])
def test_the_chosen_implementation_accepts_the_rows_and_runs_on_the_platform(platform) -> None:
    for uniform, kinds in ((True, {"uniform"}), (False, {"packed", "blocks"})):
        name, reason = choose_grouped_matmul(platform, uniform=uniform)
        impl = GROUPED_MATMULS[name]
        assert kinds & set(impl.layouts) and platform in impl.platforms
        assert reason and "\n" not in reason


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda: GROUPED_MATMULS["dense"],
            "unknown grouped matmul 'dense'; use one of reference, padded",
        ),
        (
            lambda: choose_grouped_matmul("abacus", uniform=True),
            "platform 'abacus': no measurements to choose by; set model.moe.grouped_matmul to ref",
        ),
        (
            lambda: product("padded", LAYOUTS["packed"]),
            "padded accepts row layouts uniform, got packed; use another implementation or layout",
        ),
        (
            lambda: product("blocked", LAYOUTS["blocks"], rows=3),
            r"rows \(3, 24\), matrices \(4, 24, 32\) and sizes \(4,\)",
        ),
        (
            lambda: product("reference", LAYOUTS["packed"], dtype=jnp.bfloat16),
            "of bfloat16 rows, float32 matrices and int32 sizes",
        ),
        (
            lambda: product("pallas", LAYOUTS["blocks"]),
            "pallas in blocks of 4 rows: they must be a multiple of 16; use 512",
        ),
        (
            lambda: product("pallas", RowLayout.blocks(4096, GROUPS, 4096), width=4096),
            "a tile of 32 of 32 columns does not fit into VMEM; use ragged_dot, or",
        ),
    ],
)
def test_unsupported_arguments_are_refused(call, message) -> None:
    with pytest.raises(ValueError, match=message):
        call()


def product(impl, layout, *, rows=None, width=D, dtype=jnp.float32):
    x = jax.ShapeDtypeStruct((rows or layout.rows, width), dtype)
    w = jax.ShapeDtypeStruct((layout.groups, width, F), jnp.float32)
    groups = RowGroups(layout, jax.ShapeDtypeStruct((layout.groups,), jnp.int32))
    return jax.eval_shape(partial(grouped_matmul, impl=impl), x, w, groups)
