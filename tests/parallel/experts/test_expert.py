"""Expert kernels are sharded by rule; expert capacity and row layouts follow the specification."""

from functools import lru_cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import ONE_DEVICE, tensor_parallel
from flax import nnx
from islands import layer_spec, mesh_of
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from row_groups import starts_of

from model.layers import truncated_normal
from parallel.experts.expert import (
    EXPERT_AXES,
    ExpertColumnParallelLinear,
    ExpertRowParallelLinear,
)
from parallel.experts.row_layout import RowGroups, RowLayout
from parallel.sharding.mesh import MeshConfig

E, D, F = 8, 8, 12

SPECS = {
    "split": (P("ep", "fsdp", "tp"), P("ep", "tp", "fsdp")),
    "alt": (P("ep", ("fsdp", "sp"), "tp"), P("ep", "tp", ("fsdp", "sp"))),
    "unified": (P(("fsdp", "sp", "ep"), None, "tp"), P(("fsdp", "sp", "ep"), "tp", None)),
}
MESHES = [MeshConfig(ep=2, fsdp=2, tp=2), MeshConfig(ep=2, fsdp=2, sp=2)]


def linears(
    mesh: MeshConfig, rule="split", outputs=("gate", "up"), sizes=(E, D, F), config=None, **rest
):
    """Return a column linear with named outputs and a row linear."""
    options = {
        "rule": rule,
        "kernel_init": truncated_normal(0.1),
        "parallel_config": config or tensor_parallel(mesh),
    }
    rngs = nnx.Rngs(params=jax.random.key(5))
    experts, embed, width = sizes
    column = ExpertColumnParallelLinear(
        experts, embed, dict.fromkeys(outputs, width), rngs=rngs, **options, **rest
    )
    return column, ExpertRowParallelLinear(
        experts, width, embed, rngs=nnx.Rngs(params=jax.random.key(6)), **options, **rest
    )


@lru_cache
def kernels_on(mesh: MeshConfig, *args, **options) -> tuple[list[jax.Array], list[jax.Array]]:
    with jax.set_mesh(tensor_parallel(mesh).mesh):
        return jax.jit(
            lambda: tuple(linear.kernels() for linear in linears(mesh, *args, **options))
        )()


@pytest.mark.parametrize("rule", SPECS)
def test_kernels_are_bit_equal_to_one_device_and_sharded_by_their_rule(rule) -> None:
    want = kernels_on(ONE_DEVICE)
    for mesh in MESHES:
        got = kernels_on(mesh, rule)
        for linear, kernels, spec in zip(got, want, SPECS[rule], strict=True):
            assert [kernel.sharding.spec for kernel in linear] == [spec] * len(kernels)
            for a, b in zip(linear, kernels, strict=True):
                np.testing.assert_array_equal(a, b)
    (gate, up), (down,) = want
    assert gate.shape == up.shape == (E, D, F) and down.shape == (E, F, D)
    assert gate.dtype == jnp.float32 and not np.any(gate == up)
    np.testing.assert_allclose(np.std(gate), 0.1, rtol=0.1)


def test_kernels_are_initialised_by_name_and_kept_in_order_and_dtype() -> None:
    """An output does not depend on the number or order of the others."""
    (gate, up), _ = kernels_on(ONE_DEVICE)
    (a, b), _ = kernels_on(ONE_DEVICE, outputs=("up", "gate"))
    np.testing.assert_array_equal(a, up)
    np.testing.assert_array_equal(b, gate)
    ((only,), (row,)) = kernels_on(ONE_DEVICE, outputs=("up",), param_dtype=jnp.bfloat16)
    np.testing.assert_array_equal(only, up.astype(jnp.bfloat16))
    assert only.dtype == row.dtype == jnp.bfloat16


def test_kernels_carry_their_semantic_axes() -> None:
    for rule, axes in EXPERT_AXES.items():
        with jax.set_mesh(tensor_parallel(ONE_DEVICE).mesh):
            column, row = nnx.eval_shape(lambda rule=rule: linears(ONE_DEVICE, rule))
        for linear, own in zip((column, row), axes, strict=True):
            assert linear.axes is own
            for _, kernel in nnx.to_flat_state(nnx.state(linear)):
                assert kernel.get_metadata()["semantic_axes"] is own


@pytest.mark.parametrize(
    ("mesh", "sizes", "message"),
    [
        (MeshConfig(ep=4), (6, D, F), r"kernel \(6, 8, 12\): dim 0 = 6 .* ep = 4; .* 1, 2, 3"),
        (MeshConfig(fsdp=2), (E, 7, F), r"kernel \(8, 7, 12\): dim 1 = 7 .* fsdp = 2"),
        (MeshConfig(tp=2), (E, D, 9), r"kernel \(8, 8, 9\): dim 2 = 9 .* tp = 2"),
    ],
    ids=["experts", "embed", "intermediate"],
)
def test_a_dim_that_does_not_divide_is_refused(mesh, sizes, message) -> None:
    with pytest.raises(ValueError, match=f"expert {message}"):
        linears(mesh, sizes=sizes)


def test_a_row_linear_has_one_output() -> None:
    with pytest.raises(ValueError, match="ExpertRowParallelLinear has one output, but out_feature"):
        ExpertRowParallelLinear(
            E,
            F,
            {"a": 6, "b": 6},
            kernel_init=nnx.initializers.lecun_normal(),
            parallel_config=tensor_parallel(ONE_DEVICE),
            rngs=nnx.Rngs(0),
        )


@pytest.mark.parametrize("overlap", ["split", "hypercube"])
def test_overlaps_that_cut_blocks_are_refused(overlap) -> None:
    with pytest.raises(ValueError, match=f"overlap {overlap} cuts blocks.*use bidirectional"):
        layer_spec(overlap=overlap).ring()


@pytest.mark.parametrize(
    ("factor", "tokens", "top_k", "rows"),
    [
        (None, 6, 2, 6),  # all tokens may choose one expert
        (1.0, 6, 2, 2),  # 6 * 2 / 8 = 1.5
        (1.0, 8, 2, 2),
        (1.25, 8, 2, 3),
        (0.01, 8, 2, 1),
        (9.0, 8, 2, 8),  # a token chooses an expert once: never more than tokens
    ],
)
def test_expert_capacity(factor, tokens, top_k, rows) -> None:
    assert layer_spec(capacity_factor=factor, top_k=top_k).capacity(tokens) == rows


@pytest.mark.parametrize(
    ("factor", "tokens", "assignments", "rows"),
    [
        (None, 6, 12, 4 * 12),  # all assignments of all devices
        (None, 6, 5, 4 * 5),
        (None, 6, 18, 4 * 12),  # 6 tokens to each of both experts of a device
        (1.0, 6, 12, 12),
        (1.26, 6, 12, 16),
        (0.01, 6, 12, 1),
        (99.0, 6, 12, 48),
    ],
)
def test_rows_of_a_receiving_buffer(factor, tokens, assignments, rows) -> None:
    computed = []

    def body(x):
        computed.append(layer_spec(capacity_factor=factor).receive_rows(tokens, assignments))
        return x

    with jax.set_mesh(mesh_of(ep=4)):
        jax.eval_shape(jax.shard_map(body, in_specs=P(), out_specs=P()), jnp.ones(4))
    assert computed == [rows]


def test_rows_are_in_blocks_for_the_blocked_implementation_and_packed_for_others() -> None:
    assert layer_spec().layout(10, 3) == RowLayout("packed", 1, 10, 3)
    # 10 rows and 3 unused ones in each of 3 groups are 19, rounded down to whole blocks.
    assert layer_spec(grouped_matmul="blocked", block=4).layout(10, 3) == RowLayout(
        "blocks", 4, 16, 3
    )


# The linears alone: rows of every device, sorted by expert, in a layout of the residual stream.

RUNS = [
    (mesh, residual, overlap, impl)
    for mesh in (MeshConfig(ep=2, tp=2), MeshConfig(ep=2, fsdp=2, tp=2), MeshConfig(tp=4))
    for residual, overlap, impl in (
        ("sequence", "none", "ragged_dot"),
        ("sequence", "ring", "blocked"),
        ("sequence", "bidirectional", "padded"),
        ("hidden", "none", "ragged_dot"),
        ("hidden", "bidirectional", "ragged_dot"),
        ("replicated", "none", "blocked"),
    )
]
KIND = {"ragged_dot": ("packed", 1), "blocked": ("blocks", 4), "padded": ("uniform", 1)}


def loop_over_experts(expert, x, cotangent, kernels, biases) -> list[np.ndarray]:
    """Return gate, y, dx and the gradients of kernels and biases (gate, up, row), in numpy."""
    (w_gate, w_up, w_row), (b_gate, b_up, b_row) = kernels, biases
    h, y, dx = np.zeros((len(x), F)), np.zeros_like(x), np.zeros_like(x)
    dw_gate, dw_up, dw_row, db_gate, db_up, db_row = gradients = [
        np.zeros(array.shape) for array in (*kernels, *biases)
    ]
    for e in range(E):
        own = expert == e
        g, u = x[own] @ w_gate[e] + b_gate[e], x[own] @ w_up[e] + b_up[e]
        dh = cotangent[own] @ w_row[e].T
        h[own], y[own] = g, (g * u) @ w_row[e] + b_row[e]
        dw_gate[e], dw_up[e] = x[own].T @ (dh * u), x[own].T @ (dh * g)
        dw_row[e] = (g * u).T @ cotangent[own]
        db_gate[e], db_up[e], db_row[e] = (dh * u).sum(0), (dh * g).sum(0), cotangent[own].sum(0)
        dx[own] = (dh * u) @ w_gate[e].T + (dh * g) @ w_up[e].T
    return [h, y, dx, *gradients]


@pytest.mark.parametrize(("mesh", "residual", "overlap", "impl"), RUNS, ids=str)
@pytest.mark.costly
def test_linears_equal_a_loop_over_experts(mesh, residual, overlap, impl) -> None:
    """Column, then row, with biases: values and gradients. nnx.merge keeps the order of kernels."""
    tp = tensor_parallel(mesh, residual, overlap)
    owners, e = mesh.ep, E // mesh.ep
    blocks = mesh.fsdp * mesh.ep * (mesh.tp if residual == "sequence" else 1)
    kind, block = KIND[impl]
    layout = RowLayout(kind, block, 4 * 4 * e, e)
    rng = np.random.default_rng(1)
    sizes = rng.integers(0, 5, (blocks, e)).astype(np.int32)
    sizes[:, 0] = 0
    used = np.zeros((blocks, layout.rows), int) - 1  # the local expert of a row
    for s in range(blocks):
        for g, start in enumerate(starts_of(layout, sizes[s])):
            used[s, start : start + sizes[s, g]] = g
    owner_of = np.arange(blocks) // (blocks // (mesh.fsdp * owners)) % owners
    expert = np.where(used >= 0, used + e * owner_of[:, None], -1).reshape(-1)
    x, cotangent = rng.standard_normal((2, len(expert), D)).astype(np.float32)
    x[expert < 0] = 0
    rows = ("fsdp", "ep", "tp") if residual == "sequence" else ("fsdp", "ep")
    spec = P(rows, "tp" if residual == "hidden" else None)
    b_up, b_gate, b_row = (rng.standard_normal((E, n)).astype(np.float32) for n in (F, F, D))

    with jax.set_mesh(tp.mesh):
        column, row = linears(mesh, outputs=("up", "gate"), config=tp, use_bias=True)
        parameters = column.bias["up"], column.bias["gate"], row.bias
        for parameter, value in zip(parameters, (b_up, b_gate, b_row), strict=True):
            assert not parameter[...].any(), "biases start at zero"
            parameter[...] = jax.device_put(value, parameter[...].sharding)
        definition, params = nnx.split((column, row))

        def loss(params, x, cotangent, sizes):
            column, row = nnx.merge(definition, params)
            groups = RowGroups(layout, sizes)
            up, gate = column(x, groups, impl=impl)
            assert jax.typeof(gate).sharding.spec == P(("fsdp", "ep"), "tp")
            y = row(gate * up, groups, spec, impl=impl)
            return jnp.sum(y * cotangent), (gate, y)

        place = partial(jax.device_put, device=NamedSharding(tp.mesh, spec))
        placed_sizes = jax.device_put(sizes.reshape(-1), NamedSharding(tp.mesh, P(rows)))
        solve = jax.jit(jax.value_and_grad(loss, (0, 1), has_aux=True))
        (_, (gate, y)), (dparams, dx) = solve(params, place(x), place(cotangent), placed_sizes)
        assert y.sharding.spec == spec
        column, row = linears(mesh, outputs=("up", "gate"), config=tp)
        w_up, w_gate, w_row = (
            np.asarray(w, np.float64) for w in (*column.kernels(), *row.kernels())
        )
        column, row = nnx.merge(definition, dparams)
        dup, dgate, drow = (np.asarray(w) for w in (*column.kernels(), *row.kernels()))
        dbiases = column.bias["gate"][...], column.bias["up"][...], row.bias[...]
    want_h, want_y, want_dx, *want_gradients = loop_over_experts(
        expert, x, cotangent, (w_gate, w_up, w_row), (b_gate, b_up, b_row)
    )
    pairs = [(gate, want_h), (y, want_y), (dx, want_dx)]
    for got, wanted in pairs:
        error = np.abs(np.asarray(got) - wanted)[expert >= 0].max()
        assert error <= 1e-5 * np.abs(wanted).max()
    for got, wanted in zip((dgate, dup, drow, *dbiases), want_gradients, strict=True):
        np.testing.assert_allclose(got, wanted, atol=1e-5 * np.abs(wanted).max(), rtol=0)
