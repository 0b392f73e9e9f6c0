"""Experts' kernels lie by rule; tokens meet them as in float64 loops, less those without room."""

import math
import re
from dataclasses import dataclass, replace
from functools import lru_cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import ONE_DEVICE, tensor_parallel
from flax import nnx
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from model.layers import truncated_normal
from parallel.experts.expert import (
    EXPERT_AXES,
    SAVED_NAMES,
    ExpertColumnParallelLinear,
    ExpertPlan,
    ExpertRowParallelLinear,
    experts_of_tokens,
)
from parallel.experts.grouped_matmul import RowLayout
from parallel.sharding.mesh import MeshConfig
from parallel.sharding.residual import get_residual

N, K, E, D, F = 48, 3, 8, 8, 12
# Stated bounds: float32 rounding of sums in another order, relative to the largest of an array.
VALUE_BOUND, GRADIENT_BOUND = 2e-6, 1e-5
# A rounding of bfloat16 is 2^-8 at most: two in the same direction on values, four on gradients.
BFLOAT16_BOUNDS = 2.0**-7, 2.0**-6

SPECS = {
    "split": (P("ep", "fsdp", "tp"), P("ep", "tp", "fsdp")),
    "alt": (P("ep", ("fsdp", "sp"), "tp"), P("ep", "tp", ("fsdp", "sp"))),
    "unified": (P(("fsdp", "sp", "ep"), None, "tp"), P(("fsdp", "sp", "ep"), "tp", None)),
}
MESHES = [MeshConfig(ep=2, fsdp=2, tp=2), MeshConfig(ep=2, fsdp=2, sp=2)]


def linears(mesh: MeshConfig, rule="split", outputs=("gate", "up"), sizes=(E, D, F), **rest):
    """A column linear of named outputs and a row linear of one."""
    options = {
        "rule": rule,
        "kernel_init": truncated_normal(0.1),
        "parallel_config": tensor_parallel(mesh),
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
def test_kernels_have_the_bits_of_one_device_and_lie_as_their_rule_says(rule) -> None:
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


def test_kernels_are_drawn_by_name_kept_in_order_and_in_their_dtype() -> None:
    """One output less, or in another order, changes no other."""
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


def a_plan(**changes) -> ExpertPlan:
    plan = ExpertPlan(
        num_experts=E,
        axes=("ep",),
        axis_name="tp",
        residual="sequence",
        exchange="alltoall",
        form="ragged_dot",
        overlap="none",
        top_k=2,
    )
    return replace(plan, **changes)


@lru_cache
def mesh_of(**sizes: int) -> Mesh:
    devices = np.array(jax.devices()[: math.prod(sizes.values())]).reshape(*sizes.values())
    return Mesh(devices, tuple(sizes), axis_types=(AxisType.Explicit,) * len(sizes))


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
def test_rows_of_one_expert_from_one_device(factor, tokens, top_k, rows) -> None:
    assert a_plan(capacity_factor=factor, top_k=top_k).capacity(tokens) == rows


@pytest.mark.parametrize(
    ("factor", "tokens", "items", "rows"),
    [
        (None, 6, 12, 4 * 12),  # everything from everyone
        (None, 6, 5, 4 * 5),
        (None, 6, 18, 4 * 12),  # 6 tokens to each of both experts of a device
        (1.0, 6, 12, 12),
        (1.26, 6, 12, 16),
        (0.01, 6, 12, 1),
        (99.0, 6, 12, 48),
    ],
)
def test_rows_of_a_receiving_buffer(factor, tokens, items, rows) -> None:
    told = []

    def body(x):
        told.append(a_plan(capacity_factor=factor).received(tokens, items))
        return x

    with jax.set_mesh(mesh_of(ep=4)):
        jax.eval_shape(jax.shard_map(body, in_specs=P(), out_specs=P()), jnp.ones(4))
    assert told == [rows]


def test_rows_lie_in_blocks_for_the_blocked_form_and_packed_for_others() -> None:
    assert a_plan().layout(10, 3) == RowLayout("packed", 1, 10, 3)
    # 10 rows and 3 unused in each of 3 groups are 19, of which whole blocks count.
    assert a_plan(form="blocked", block=4).layout(10, 3) == RowLayout("blocks", 4, 16, 3)


@dataclass(frozen=True)
class Case:
    """One way of tokens to experts on one mesh; `axes` share the experts."""

    exchange: str
    form: str
    residual: str = "sequence"
    factor: float | None = 0.5
    chunks: int = 1
    overlap: str = "none"
    items: int | None = None
    mesh: tuple[tuple[str, int], ...] = (("ep", 2), ("tp", 2))

    def __str__(self) -> str:
        mesh = "-".join(f"{name}{size}" for name, size in self.mesh)
        room = f"room{self.factor}" if self.factor else "all"
        parts = mesh, self.exchange, self.form, self.residual, room, self.overlap, self.chunks
        return "-".join(map(str, parts))

    @property
    def sizes(self) -> dict[str, int]:
        return dict(self.mesh)

    @property
    def axes(self) -> tuple[str, ...]:
        return tuple(name for name in self.sizes if name != "tp")

    @property
    def sources(self) -> tuple[int, int]:
        """Devices that share the experts, and those of each with tokens of their own."""
        n = math.prod(self.sizes[name] for name in self.axes)
        return n, self.sizes["tp"] if self.residual == "sequence" else 1

    @property
    def plan(self) -> ExpertPlan:
        return a_plan(
            axes=self.axes,
            split_dim=get_residual(self.residual).split_dim,
            exchange=self.exchange,
            form=self.form,
            overlap=self.overlap,
            capacity_factor=self.factor,
            chunks=self.chunks,
            items=self.items,
            block=4,
        )


FOUR, PAIRS = (("ep", 4), ("tp", 1)), (("ep", 2), ("tp", 2))


def function(gate: jax.Array, up: jax.Array) -> jax.Array:
    return jnp.tanh(gate) * up


def inputs(dtype=np.float32, crowded=False):
    """Tokens, weights and kernels; experts, some none, some twice, 0 and 7 often; a cotangent.

    crowded: every token to one of the last two experts.
    """
    rng = np.random.default_rng(4)
    shapes = [(N, D), (N, K), (E, D, F), (E, D, F), (E, F, D), (N, D)]
    x, weights, gate, up, row, cotangent = (
        rng.standard_normal(shape, np.float32) for shape in shapes
    )
    chance = [0.2, 0.2, 0.05, 0.1, 0.05, 0.05, 0.05, 0.1, 0.2]
    experts = rng.choice(np.arange(-1, E), (N, K), p=chance).astype(np.int32)
    x, gate, up, row = (y.astype(dtype) for y in (x, gate / 2, up, row / 2))
    if crowded:
        experts[:] = -1
        experts[np.arange(N), rng.integers(0, K, N)] = rng.integers(E - 2, E, N)
    return (x, weights, (gate, up), row), experts, cotangent


def sparse_layer(case: Case):
    """(differentiable arrays, experts) -> (sums, drops of every device), on the case's mesh."""
    axes, residual = case.axes, case.residual
    rows = P((*axes, "tp")) if residual == "sequence" else P(axes or None)
    x_spec = P(*rows, "tp") if residual == "hidden" else rows
    split = axes or None

    def body(x, weights, column, row, experts):
        y, dropped = experts_of_tokens(
            x, experts, weights, column, row, function=function, plan=case.plan
        )
        return y, dropped[None]

    specs = x_spec, rows, (P(split, None, "tp"),) * 2, P(split, "tp")

    def place(arrays, experts):
        def put(array, spec):
            return jax.device_put(array, NamedSharding(mesh_of(**case.sizes), spec))

        return tuple(jax.tree.map(put, arrays, specs)), put(experts, rows)

    island = jax.shard_map(
        body,
        mesh=mesh_of(**case.sizes),
        in_specs=(*specs, rows),
        out_specs=(x_spec, P((*axes, "tp"))),
    )
    return lambda arrays, experts: island(*arrays, experts), place


@lru_cache
def run(case: Case, dtype=np.float32, wrap=None, crowded=False):
    """Sums, drops of every device, gradients, as numpy; and the compiled program."""
    layer, place = sparse_layer(case)
    layer = wrap(layer) if wrap else layer
    arrays, experts, cotangent = inputs(dtype, crowded)

    def loss(arrays, experts, cotangent):
        y, dropped = layer(arrays, experts)
        return jnp.sum(y * cotangent), (y, dropped)

    with jax.set_mesh(mesh_of(**case.sizes)):
        arrays, experts = place(arrays, experts)
        cotangent = jax.device_put(cotangent, arrays[0].sharding)
        solve = jax.jit(jax.value_and_grad(loss, has_aux=True))
        compiled = solve.lower(arrays, experts, cotangent).compile()
        (_, (y, dropped)), gradient = compiled(arrays, experts, cotangent)
    return jax.tree.map(np.asarray, (y, dropped, gradient)), compiled.as_text()


def kept_by(case: Case, experts: np.ndarray) -> np.ndarray:
    """Which assignments have room, `N K`: loops over devices in the order of the buffers."""
    n, others = case.sources
    blocks = experts.reshape(n, others, -1, K)
    kept, T = np.zeros_like(blocks, bool), blocks.shape[2]
    chosen = list(np.argwhere(blocks >= 0))
    if case.exchange == "dense" or case.factor is None:
        return (blocks >= 0).reshape(N, K)
    if case.exchange == "alltoall":
        # First come, first served, by source device and expert.
        room, order = max(1, math.ceil(case.factor * T * 2 / E)), chosen
        buffers = [(source, other, blocks[source, other, t, k]) for source, other, t, k in chosen]
    else:
        # At its owner: by source, there by expert, there in order.
        room = math.ceil(case.factor * T * 2)
        order = sorted(chosen, key=lambda a: (a[0], blocks[tuple(a)]))
        buffers = [(other, blocks[s, other, t, k] // (E // n)) for s, other, t, k in order]
    used: dict[tuple[int, ...], int] = {}
    for assignment, buffer in zip(order, buffers, strict=True):
        used[buffer] = used.get(buffer, 0) + 1
        kept[tuple(assignment)] = used[buffer] <= room
    return kept.reshape(N, K)


@jax.jit
@partial(jax.value_and_grad, has_aux=True)
def every_expert_on_every_token(arrays, experts, kept, cotangent):
    x, weights, column, row = arrays
    h = function(*(jnp.einsum("td,edf->tef", x, w) for w in column))
    y_TED = jnp.einsum("tef,efd->ted", h, row)
    own = (experts[..., None] == jnp.arange(E)) & kept[..., None]
    y = jnp.einsum("tke,tk,ted->td", own.astype(x.dtype), weights, y_TED)
    return jnp.sum(y * cotangent), y


def in_float64(arrays, experts, kept, cotangent):
    """Sums of what was kept and their gradients, by autodiff."""
    with jax.enable_x64(True):
        arrays, cotangent = jax.tree.map(lambda y: np.asarray(y, np.float64), (arrays, cotangent))
        (_, y), gradient = every_expert_on_every_token(arrays, experts, kept, cotangent)
        assert y.dtype == np.float64
        return jax.tree.map(np.asarray, (y, gradient))


def assert_close(got, want, bound: float) -> None:
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        error = np.abs(a.astype(np.float64) - b).max()
        assert error <= bound * np.abs(b).max(), error / np.abs(b).max()


def assert_is_oracle(case: Case, value_bound=VALUE_BOUND, gradient_bound=GRADIENT_BOUND, **options):
    (y, dropped, gradient), _ = run(case, **options)
    arrays, experts, cotangent = inputs(**options)
    assert y.dtype == arrays[0].dtype and gradient[1].dtype == dropped.dtype == np.float32
    kept = kept_by(case, experts)
    lost_of = ((experts >= 0) & ~kept).reshape(math.prod(case.sources), -1).sum(1)
    repeats = len(dropped) // len(lost_of)
    np.testing.assert_array_equal(dropped, np.repeat(lost_of, repeats))
    assert (lost_of.sum() > 0) == (case.factor is not None and case.exchange != "dense")
    # A weight has a gradient where its expert saw the token, and only there.
    np.testing.assert_array_equal(gradient[1] != 0, kept)
    want, want_gradient = in_float64(arrays, experts, kept, cotangent)
    assert_close(y, want, value_bound)
    assert_close(gradient, want_gradient, gradient_bound)


CASES = [
    Case("alltoall", "ragged_dot", mesh=FOUR),
    Case("alltoall", "padded", mesh=FOUR, chunks=3),
    Case("alltoall", "ragged_dot", "sequence", chunks=2, overlap="ring"),
    Case("ragged", "ragged_dot", "sequence"),
    Case("alltoall", "padded", "hidden"),
    Case("ragged", "ragged_dot", "replicated"),
    Case("ragged", "reference", mesh=(("sp", 2), ("ep", 2), ("tp", 1))),
    Case("alltoall", "padded", mesh=(("tp", 2),)),  # all experts on every device
]
SLOW_CASES = [Case("dense", "einsum", "hidden"), Case("ragged", "blocked", mesh=FOUR)]
# Every fifth of all combinations.
MORE_CASES = [
    Case(exchange, form, residual, factor, chunks, overlap, mesh=mesh)
    for exchange, chunks in (("alltoall", 1), ("alltoall", 2), ("alltoall", 4), ("ragged", 1))
    for form in ("padded", "ragged_dot", "blocked")
    for factor in (None, 0.5)
    for residual, overlap, mesh in (
        ("sequence", "none", FOUR),
        ("sequence", "none", PAIRS),
        ("sequence", "bidirectional", PAIRS),
        ("hidden", "none", PAIRS),
        ("hidden", "bidirectional", PAIRS),
        ("replicated", "none", PAIRS),
    )
    if (exchange, form) != ("ragged", "padded")
][::5]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_what_has_room_meets_its_expert_and_the_rest_is_dropped_and_counted(case) -> None:
    assert_is_oracle(case)


@pytest.mark.slow
@pytest.mark.parametrize("case", [*SLOW_CASES, *MORE_CASES], ids=str)
def test_drops_and_numbers_in_more_layouts_forms_and_exchanges(case) -> None:
    assert_is_oracle(case)


@pytest.mark.parametrize("exchange", ["alltoall", "ragged"])
def test_buffers_that_all_tokens_of_all_devices_fill_to_the_last_row_lose_none(exchange) -> None:
    """Both experts of one device take all; `items` says that a token has one, not K."""
    case = Case(exchange, "ragged_dot", factor=None, mesh=FOUR, items=N // 4)
    assert_is_oracle(case, crowded=True)


def test_bfloat16_tokens_meet_their_experts_up_to_a_few_roundings() -> None:
    """Which are dropped does not depend on it."""
    case = Case("alltoall", "ragged_dot", mesh=FOUR)
    assert_is_oracle(case, *BFLOAT16_BOUNDS, dtype=jnp.bfloat16)


REMAT = jax.checkpoint_policies.save_only_these_names(*SAVED_NAMES)


def dispatches(program: str) -> int:
    """Collectives that carry rows to experts, or derivatives back to where these came from."""
    collective = r" (?:all-to-all|collective-permute|all-gather|reduce-scatter|all-reduce)\("
    return len(re.findall(collective + r'.*op_name="[^"]*/dispatch/', program))


def assert_remat_keeps_what_was_dispatched(case: Case) -> None:
    want, plain = run(case)
    got, program = run(case, wrap=partial(jax.checkpoint, policy=REMAT))
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        # Not the same bits: what is computed again may be fused otherwise (seen on jax 0.12).
        np.testing.assert_allclose(a, b, atol=GRADIENT_BOUND * np.abs(b).max(), rtol=0)
    there_and_derivative = 2 * (1 if case.chunks == 1 else 3)
    assert dispatches(program) == dispatches(plain) == there_and_derivative


def test_with_remat_nothing_is_dispatched_twice_and_no_number_changes() -> None:
    assert_remat_keeps_what_was_dispatched(Case("alltoall", "ragged_dot", mesh=FOUR))


@pytest.mark.slow
@pytest.mark.parametrize("chunks", [2, 4])
def test_with_remat_no_hop_of_a_dispatch_is_repeated(chunks) -> None:
    assert_remat_keeps_what_was_dispatched(Case("alltoall", "blocked", mesh=FOUR, chunks=chunks))


@pytest.mark.slow
def test_without_saved_names_rows_are_dispatched_again() -> None:
    """That the count of dispatches sees what the names save."""
    _, program = run(Case("alltoall", "ragged_dot", mesh=FOUR), wrap=jax.checkpoint)
    assert dispatches(program) == 3


def test_kernels_keep_their_order_through_a_split_and_a_merge() -> None:
    tp = tensor_parallel(ONE_DEVICE)
    with jax.set_mesh(tp.mesh):
        linear = ExpertColumnParallelLinear(
            2,
            D,
            {"up": 4, "gate": F},
            kernel_init=truncated_normal(1.0),
            parallel_config=tp,
            rngs=nnx.Rngs(0),
        )
        merged = nnx.merge(*nnx.split(linear))
        assert [w.shape[-1] for w in linear.kernels()] == [4, F]
        assert [w.shape[-1] for w in merged.kernels()] == [4, F]
