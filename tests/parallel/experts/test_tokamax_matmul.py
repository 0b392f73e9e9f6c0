"""tokamax's grouped matmul equals a matmul per group, and is three kernels on an H100."""

import importlib
from functools import partial
from importlib.util import find_spec

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from rings import ring
from row_groups import GROUPS, LAYOUTS
from test_grouped_matmul import SIZES, Arrays, check, value_and_gradients

from parallel.experts import grouped_matmul, tokamax_matmul
from parallel.experts.grouped_matmul import choose_grouped_matmul
from parallel.experts.row_layout import RowLayout

needs_tokamax = pytest.mark.skipif(
    find_spec("tokamax") is None, reason='pip install -e ".[gpu]" with Python 3.12 or later'
)


@needs_tokamax
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("kind", tokamax_matmul.TokamaxRaggedDot.layouts)
def test_values_and_gradients_are_those_of_a_matmul_per_group(kind, dtype) -> None:
    """On a CPU tokamax calls XLA; layouts, rounding and rows outside of groups are ours."""
    layout = LAYOUTS[kind]
    solve = jax.jit(partial(value_and_gradients, layout=layout, impl="tokamax"))
    for sizes in SIZES.values():
        arrays = Arrays.of(layout, sizes, dtype)
        got = solve(arrays.x, arrays.w, arrays.g, np.array(sizes, np.int32))
        check(got, arrays, layout, sizes, dtype)


@needs_tokamax
def test_a_hopper_program_has_a_kernel_for_each_of_y_dx_and_dw(monkeypatch) -> None:
    """Inside of shard_map, whose types the kernels do not state; the H100 is absent."""
    tokamax = importlib.import_module("tokamax")
    gpu_utils = importlib.import_module("tokamax._src.gpu_utils")
    api = importlib.import_module("tokamax._src.ops.ragged_dot.api")
    monkeypatch.setattr(gpu_utils, "_compute_capability", lambda device=None: 9.0)
    monkeypatch.setattr(api, "_DEFAULT_IMPLEMENTATIONS", ("mosaic_gpu",))
    layout, D, F = RowLayout("packed", 1, 256, GROUPS), 128, 256
    mesh, split = ring(2), P("ring")
    solve = partial(value_and_gradients, layout=layout, impl="tokamax")
    island = jax.shard_map(solve, mesh=mesh, in_specs=(split,) * 4, out_specs=(split,) * 3)
    arrays = [
        jax.ShapeDtypeStruct((2 * rows, *rest), dtype, sharding=NamedSharding(mesh, split))
        for rows, rest, dtype in (
            (256, (D,), jnp.bfloat16),
            (GROUPS, (D, F), jnp.bfloat16),
            (256, (F,), jnp.bfloat16),
            (GROUPS, (), jnp.int32),
        )
    ]
    with tokamax.config.cross_compile(True):
        lowered = jax.jit(island).trace(*arrays).lower(lowering_platforms=("cuda",))
    assert lowered.as_text().count("custom_call @mosaic_gpu") == 3


@pytest.mark.parametrize(
    ("installed", "capability", "name"),
    [(True, (9, 0), "tokamax"), (True, (8, 0), "blocked"), (False, (9, 0), "blocked")],
)
def test_only_hopper_with_the_package_takes_tokamax(
    installed, capability, name, monkeypatch
) -> None:
    monkeypatch.setattr(grouped_matmul, "find_spec", lambda name: installed or None)
    chosen, _ = choose_grouped_matmul("gpu", uniform=False, compute_capability=capability)
    assert chosen == name
