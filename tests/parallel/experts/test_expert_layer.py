"""Expert layers equal every expert on every token in float64, less the dropped assignments."""

import math
import re
from dataclasses import dataclass
from functools import lru_cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import sample
from islands import layer_spec, mesh_of
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from parallel.experts.expert_layer import RoutedTokens, apply_experts
from parallel.experts.expert_mlp import SAVED_NAMES, ExpertKernels, ExpertLayerSpec
from parallel.sharding.residual import RESIDUAL_LAYOUTS

N, K, E, D, F = 48, 3, 8, 8, 12
# Stated bounds: float32 rounding of sums in another order, relative to the largest of an array.
VALUE_BOUND, GRADIENT_BOUND = 2e-6, 1e-5
# A rounding of bfloat16 is 2^-8 at most: two in the same direction on values, four on gradients.
BFLOAT16_BOUNDS = 2.0**-7, 2.0**-6


@dataclass(frozen=True)
class Case:
    """One exchange on one mesh, all of whose axes but tp share the experts."""

    exchange: str
    impl: str
    residual: str = "sequence"
    factor: float | None = 0.5
    chunks: int = 1
    overlap: str = "none"
    max_assignments: int | None = None
    distances: tuple[int, ...] = ()
    row_dtype: str | None = None
    mesh: tuple[tuple[str, int], ...] = (("ep", 2), ("tp", 2))

    def __str__(self) -> str:
        mesh = "-".join(f"{name}{size}" for name, size in self.mesh)
        capacity = f"capacity{self.factor}" if self.factor else "dropless"
        parts = mesh, self.exchange, self.impl, self.residual, capacity, self.overlap, self.chunks
        parts += self.distances if self.row_dtype is None else (self.row_dtype,)
        return "-".join(map(str, parts))

    @property
    def sizes(self) -> dict[str, int]:
        return dict(self.mesh)

    @property
    def axes(self) -> tuple[str, ...]:
        return tuple(name for name in self.sizes if name != "tp")

    @property
    def sources(self) -> tuple[int, int]:
        """Devices that share the experts, and for each the tp devices with different tokens."""
        n = math.prod(self.sizes[name] for name in self.axes)
        return n, self.sizes["tp"] if self.residual == "sequence" else 1

    @property
    def spec(self) -> ExpertLayerSpec:
        return layer_spec(
            axes=self.axes,
            split_dim=RESIDUAL_LAYOUTS[self.residual].split_dim,
            exchange=self.exchange,
            grouped_matmul=self.impl,
            overlap=self.overlap,
            capacity_factor=self.factor,
            chunks=self.chunks,
            distances=self.distances,
            row_dtype=self.row_dtype,
            block=4,
        )


FOUR, PAIRS = (("ep", 4), ("tp", 1)), (("ep", 2), ("tp", 2))


def activation(gate: jax.Array, up: jax.Array) -> jax.Array:
    return jnp.tanh(gate) * up


def inputs(dtype=np.float32, crowded=False):
    """Return (tokens, weights, kernels), experts and a cotangent. Experts 0 and 7 are popular.

    crowded: every token has one of the last two experts.
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
    """Return (differentiable arrays, experts) -> (outputs, drops of each device), and placement."""
    axes, residual = case.axes, case.residual
    rows = P((*axes, "tp")) if residual == "sequence" else P(axes or None)
    x_spec = P(*rows, "tp") if residual == "hidden" else rows
    split = axes or None

    def body(x, weights, column, row, experts):
        tokens = RoutedTokens(x, experts, weights, case.max_assignments)
        y, dropped = apply_experts(tokens, ExpertKernels(column, row, activation), case.spec)
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
    """Return outputs, drops of each device and gradients as numpy, and the compiled program."""
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
    """Return which assignments are kept, `N K`: loops over devices in the order of the buffers."""
    n, others = case.sources
    blocks = experts.reshape(n, others, -1, K)
    kept, T = np.zeros_like(blocks, bool), blocks.shape[2]
    chosen = list(np.argwhere(blocks >= 0))
    if case.exchange == "dense" or case.factor is None:
        return (blocks >= 0).reshape(N, K)
    if case.exchange == "alltoall":
        # One buffer for each source device and expert, filled in order.
        capacity, order = max(1, math.ceil(case.factor * T * 2 / E)), chosen
        buffers = [(source, other, blocks[source, other, t, k]) for source, other, t, k in chosen]
    else:
        # One buffer for each owner, filled by source, then expert, then in order.
        capacity = math.ceil(case.factor * T * 2)
        order = sorted(chosen, key=lambda a: (a[0], blocks[tuple(a)]))
        buffers = [(other, blocks[s, other, t, k] // (E // n)) for s, other, t, k in order]
    used: dict[tuple[int, ...], int] = {}
    for assignment, buffer in zip(order, buffers, strict=True):
        used[buffer] = used.get(buffer, 0) + 1
        kept[tuple(assignment)] = used[buffer] <= capacity
    return kept.reshape(N, K)


@jax.jit
@partial(jax.value_and_grad, has_aux=True)
def every_expert_on_every_token(arrays, experts, kept, cotangent):
    x, weights, column, row = arrays
    h = activation(*(jnp.einsum("td,edf->tef", x, w) for w in column))
    y_TED = jnp.einsum("tef,efd->ted", h, row)
    own = (experts[..., None] == jnp.arange(E)) & kept[..., None]
    y = jnp.einsum("tke,tk,ted->td", own.astype(x.dtype), weights, y_TED)
    return jnp.sum(y * cotangent), y


def in_float64(arrays, experts, kept, cotangent):
    """Return the sums over kept assignments and their gradients, by autodiff."""
    with jax.enable_x64(True):
        arrays, cotangent = jax.tree.map(lambda y: np.asarray(y, np.float64), (arrays, cotangent))
        (_, y), gradient = every_expert_on_every_token(arrays, experts, kept, cotangent)
        assert y.dtype == np.float64
        return jax.tree.map(np.asarray, (y, gradient))


def assert_close(got, want, bound: float) -> None:
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        error = np.abs(a.astype(np.float64) - b).max()
        assert error <= bound * np.abs(b).max(), error / np.abs(b).max()


def assert_equals_every_expert_on_every_token(
    case: Case, value_bound=VALUE_BOUND, gradient_bound=GRADIENT_BOUND, **options
):
    (y, dropped, gradient), _ = run(case, **options)
    arrays, experts, cotangent = inputs(**options)
    if case.row_dtype is not None:
        arrays = (in_one_byte(arrays[0], case.row_dtype), *arrays[1:])
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
    Case("alltoall", "padded", mesh=FOUR, chunks=3, distances=(3, 1, 2)),
    Case("alltoall", "ragged_dot", "sequence", chunks=2, overlap="ring"),
    Case("ragged", "ragged_dot", "sequence"),
    Case("alltoall", "padded", "hidden"),
    Case("ragged", "ragged_dot", "replicated"),
    Case("ragged", "reference", mesh=(("sp", 2), ("ep", 2), ("tp", 1))),
    Case("alltoall", "padded", mesh=(("tp", 2),)),  # all experts on every device
]
SLOW_CASES = [Case("dense", "einsum", "hidden"), Case("ragged", "blocked", mesh=FOUR)]
MORE_CASES = [
    Case(exchange, impl, residual, factor, chunks, overlap, mesh=mesh)
    for exchange, chunks in (("alltoall", 1), ("alltoall", 2), ("alltoall", 4), ("ragged", 1))
    for impl in ("padded", "ragged_dot", "blocked")
    for factor in (None, 0.5)
    for residual, overlap, mesh in (
        ("sequence", "none", FOUR),
        ("sequence", "none", PAIRS),
        ("sequence", "bidirectional", PAIRS),
        ("hidden", "none", PAIRS),
        ("hidden", "bidirectional", PAIRS),
        ("replicated", "none", PAIRS),
    )
    if (exchange, impl) != ("ragged", "padded")
]


@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.costly
def test_kept_tokens_meet_their_experts_and_dropped_ones_are_counted(case) -> None:
    assert_equals_every_expert_on_every_token(case)


@pytest.mark.parametrize(
    "case", sample([(case,) for case in (*SLOW_CASES, *MORE_CASES)], 13), ids=str
)
def test_more_layouts_implementations_and_exchanges_drop_and_compute_alike(case) -> None:
    assert_equals_every_expert_on_every_token(case)


@pytest.mark.parametrize("exchange", ["alltoall", "ragged"])
def test_full_buffers_without_a_capacity_drop_nothing(exchange) -> None:
    """One device owns the experts of all tokens; each token has one expert, not K."""
    case = Case(exchange, "ragged_dot", factor=None, mesh=FOUR, max_assignments=N // 4)
    assert_equals_every_expert_on_every_token(case, crowded=True)


def test_bfloat16_differs_by_a_few_roundings_and_drops_the_same_tokens() -> None:
    case = Case("alltoall", "ragged_dot", mesh=FOUR)
    assert_equals_every_expert_on_every_token(case, *BFLOAT16_BOUNDS, dtype=jnp.bfloat16)


def in_one_byte(x: np.ndarray, dtype: str) -> np.ndarray:
    """Return rows rounded to one byte per number times a power of two for each row."""
    most = float(jnp.finfo(dtype).max if dtype.startswith("float") else jnp.iinfo(dtype).max)
    rounded = np.empty_like(x)
    for row, out in zip(x, rounded, strict=True):
        scale = 2.0 ** math.ceil(math.log2(np.abs(row).max() / most))
        scaled = row / scale if dtype.startswith("float") else np.rint(row / scale)
        out[:] = scale * scaled.astype(jnp.dtype(dtype)).astype(np.float64)
    return rounded


BYTES = [
    Case("alltoall", "ragged_dot", mesh=FOUR, row_dtype="float8_e4m3fn"),
    Case("alltoall", "padded", "hidden", chunks=2, row_dtype="int8"),
    Case("ragged", "ragged_dot", "sequence", row_dtype="int8"),
    Case("alltoall", "padded", mesh=(("tp", 2),), row_dtype="float8_e4m3fn"),
    Case("dense", "einsum", "hidden", row_dtype="int8"),
]


@pytest.mark.parametrize("case", BYTES, ids=str)
def test_experts_read_rows_in_one_byte_per_number_on_every_mesh(case) -> None:
    """The results and gradients are those of rounded rows, however and whether they travel."""
    assert_equals_every_expert_on_every_token(case)


@pytest.mark.parametrize(("chunks", "collective"), [(1, "all-to-all"), (3, "collective-permute")])
def test_rows_travel_in_one_byte_per_number(chunks, collective) -> None:
    case = Case("alltoall", "padded", mesh=FOUR, chunks=chunks, row_dtype="float8_e4m3fn")
    _, program = run(case)
    sent = re.findall(rf"= \(?(\w+)\[[\d,]*\b{D}\]\S* .*{collective}\(.*/dispatch/", program)
    there = back = 1 if chunks == 1 else 3
    # The gradients return in their own dtype.
    assert sorted(sent) == ["f32"] * back + ["u8"] * there


REMAT = jax.checkpoint_policies.save_only_these_names(*SAVED_NAMES)


def dispatches(program: str) -> int:
    """Count collectives that carry rows to experts, or their gradients back."""
    collective = r" (?:all-to-all|collective-permute|all-gather|reduce-scatter|all-reduce)\("
    return len(re.findall(collective + r'.*op_name="[^"]*/dispatch/', program))


def assert_remat_dispatches_once(case: Case) -> None:
    want, plain = run(case)
    got, program = run(case, wrap=partial(jax.checkpoint, policy=REMAT))
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        # Not bit-equal: recomputation may be fused differently (seen on jax 0.12).
        np.testing.assert_allclose(a, b, atol=GRADIENT_BOUND * np.abs(b).max(), rtol=0)
    # One exchange of rows; or permutes of three blocks, each of rows and of their weights.
    forward_and_gradient = 2 * (1 if case.chunks == 1 else 3 * 2)
    assert dispatches(program) == dispatches(plain) == forward_and_gradient


def test_remat_with_saved_names_dispatches_once_and_changes_no_number() -> None:
    assert_remat_dispatches_once(Case("alltoall", "ragged_dot", mesh=FOUR))


@pytest.mark.slow
@pytest.mark.parametrize("chunks", [2, 4])
def test_remat_with_saved_names_repeats_no_permute_of_a_dispatch(chunks) -> None:
    assert_remat_dispatches_once(Case("alltoall", "blocked", mesh=FOUR, chunks=chunks))


@pytest.mark.slow
def test_remat_without_saved_names_dispatches_again() -> None:
    """Proves that the count of dispatches sees what the names save."""
    _, program = run(Case("alltoall", "ragged_dot", mesh=FOUR), wrap=jax.checkpoint)
    assert dispatches(program) == 3
