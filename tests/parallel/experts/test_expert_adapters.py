"""Experts with adapters equal experts whose kernels are W + scale * A B, values and gradients."""

from functools import lru_cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import ONE_DEVICE, release, tensor_parallel
from islands import mesh_of
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from test_expert import linears
from test_expert_layer import (
    FOUR,
    GRADIENT_BOUND,
    VALUE_BOUND,
    Case,
    D,
    E,
    F,
    activation,
    assert_close,
    every_expert_on_every_token,
    inputs,
    kept_by,
)

from parallel.experts.expert_layer import RoutedTokens, apply_experts
from parallel.experts.expert_mlp import ExpertKernels
from parallel.experts.row_layout import RowGroups, RowLayout
from parallel.linear.low_rank import LowRank, adapter_of, add_adapter

RANK, SCALE = 3, 0.5
SHAPES = {
    "column": ([(E, D, RANK)] * 2, [(E, RANK, F)] * 2),
    "row": ([(E, F, RANK)], [(E, RANK, D)]),
}


def factors():
    rng = np.random.default_rng(9)

    def draw(shape):
        return (rng.standard_normal(shape) / 2).astype(np.float32)

    return {
        name: tuple(tuple(map(draw, shapes)) for shapes in both) for name, both in SHAPES.items()
    }


def low_rank(pair):
    a, b = pair
    return LowRank(a, b, tuple(range(len(a))), SCALE)


def layer_on(case: Case):
    axes = case.axes
    rows = P((*axes, "tp")) if case.residual == "sequence" else P(axes or None)
    x_spec = P(*rows, "tp") if case.residual == "hidden" else rows
    split = axes or None
    column, row = P(split, None, "tp"), P(split, "tp")
    specs = (x_spec, rows, (column,) * 2, row)
    adapter_specs = {
        "column": ((P(split),) * 2, (column,) * 2),
        "row": ((row,), (P(split),)),
    }

    def body(arrays, adapters, experts):
        x, weights, column, row = arrays
        kernels = ExpertKernels(
            column,
            row,
            activation,
            column_adapter=low_rank(adapters["column"]),
            row_adapter=low_rank(adapters["row"]),
        )
        return apply_experts(RoutedTokens(x, experts, weights), kernels, case.spec)[0]

    mesh = mesh_of(**case.sizes)

    def put(tree, layout):
        return jax.tree.map(lambda y, s: jax.device_put(y, NamedSharding(mesh, s)), tree, layout)

    island = jax.shard_map(body, mesh=mesh, in_specs=(specs, adapter_specs, rows), out_specs=x_spec)
    return island, lambda arrays, adapters, experts: (
        put(arrays, specs),
        put(adapters, adapter_specs),
        put(experts, rows),
    )


CASES = [
    Case("alltoall", "padded"),
    Case("ragged", "ragged_dot", factor=None, overlap="ring"),
    Case("alltoall", "blocked", residual="hidden", overlap="bidirectional", factor=None),
    Case("alltoall", "ragged_dot", residual="hidden", factor=None),
    Case("ragged", "blocked", residual="replicated"),
    Case("dense", "reference"),
    Case("alltoall", "padded", mesh=FOUR, chunks=2),
    Case("alltoall", "padded", mesh=(("tp", 4),), overlap="bidirectional", factor=None),
]


@pytest.mark.parametrize(
    "case",
    [case if number < 3 else release(case) for number, case in enumerate(CASES)],
    ids=str,
)
@pytest.mark.costly
def test_experts_with_adapters_equal_experts_of_merged_kernels(case) -> None:
    island, place = layer_on(case)
    arrays, experts, cotangent = inputs()
    adapters = factors()

    def loss(adapters, x, rest, experts, cotangent):
        y = island((x, *rest), adapters, experts)
        return jnp.sum(y * cotangent), y

    with jax.set_mesh(mesh_of(**case.sizes)):
        placed, own, chosen = place(arrays, adapters, experts)
        g = jax.device_put(cotangent, placed[0].sharding)
        solve = jax.jit(jax.value_and_grad(loss, (0, 1), has_aux=True))
        (_, y), gradients = solve(own, placed[0], placed[1:], chosen, g)
    y, gradients = jax.tree.map(np.asarray, (y, gradients))
    want_y, want = merged_in_float64(arrays, adapters, experts, kept_by(case, experts), cotangent)
    assert_close(y, want_y, VALUE_BOUND)
    assert_close(gradients, want, GRADIENT_BOUND)


def merged_in_float64(arrays, adapters, experts, kept, cotangent):
    """Gradients of merged kernels, taken back to A and B by the product rule."""
    with jax.enable_x64(True):
        wide = jax.tree.map(lambda y: np.asarray(y, np.float64), (arrays, adapters, cotangent))
        (x, weights, column, row), adapters, cotangent = wide
        kernels = {
            name: [w + SCALE * a @ b for w, a, b in zip(ws, *adapters[name], strict=True)]
            for name, ws in (("column", column), ("row", [row]))
        }
        merged = x, weights, tuple(kernels["column"]), kernels["row"][0]
        (_, y), (dx, _, dcolumn, drow) = every_expert_on_every_token(
            merged, experts, kept, cotangent
        )
        gradients = {}
        for name, dws in (("column", dcolumn), ("row", (drow,))):
            pairs = [(SCALE * dw, *pair) for dw, *pair in zip(dws, *adapters[name], strict=True)]
            gradients[name] = (
                tuple(dw @ b.swapaxes(1, 2) for dw, _, b in pairs),
                tuple(a.swapaxes(1, 2) @ dw for dw, a, _ in pairs),
            )
        return jax.tree.map(np.asarray, (y, (gradients, dx)))


@lru_cache
def rows_and_groups():
    layout = RowLayout("packed", 1, 24, E)
    sizes = np.array([5, 0, 3, 4, 1, 6, 2, 3], np.int32)
    x = np.random.default_rng(3).standard_normal((24, D), np.float32)
    return x, RowGroups(layout, jnp.asarray(sizes)), np.repeat(np.arange(E), sizes)


def test_the_linears_of_experts_take_adapters_of_single_outputs() -> None:
    x, groups, expert_R = rows_and_groups()
    with jax.set_mesh(tensor_parallel(ONE_DEVICE).mesh):
        column, _ = linears(ONE_DEVICE)
        ones = {"up": lambda shape, dtype, out_sharding: jnp.full(shape, 0.25, dtype)}
        add_adapter(column, ["up"], rank=RANK, scale=SCALE, initializers=ones)
        assert adapter_of(column).outputs == (1,)
        b = np.random.default_rng(4).standard_normal((E, RANK, F)).astype(np.float32)
        column.lora_b["up"].set_value(jnp.asarray(b))
        gate, up = jax.jit(lambda m, x, g: m(x, g, impl="ragged_dot"))(column, x, groups)
    kernels = [np.asarray(w) for w in column.kernels()]
    a = np.full((E, D, RANK), 0.25, np.float32)
    for y, kernel in ((gate, kernels[0]), (up, kernels[1] + SCALE * a @ b)):
        want = np.einsum("rd,rdf->rf", x[: len(expert_R)], kernel[expert_R])
        np.testing.assert_allclose(y[: len(expert_R)], want, rtol=1e-5, atol=1e-5)
