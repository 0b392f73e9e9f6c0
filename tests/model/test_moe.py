"""Sparse layers equal the dense exchange on any mesh and by any exchange: values and gradients."""

import itertools
from functools import lru_cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import ONE_DEVICE, release, sample, slow, tensor_parallel
from flax import nnx
from model_runs import with_noise

from model.config import ModelConfig, MoEConfig
from model.moe import MoE, Router, auxiliary_loss
from model.plan import make_plan
from parallel.sharding.axes import ResidualSharding, TokenSharding
from parallel.sharding.mesh import MeshConfig

B, L, D = 8, 16, 16
ROUTERS = {
    "softmax": {"router": "softmax", "num_experts_per_tok": 2},
    "unnormalised": {"router": "softmax", "num_experts_per_tok": 3, "norm_topk_prob": False},
    "topk_softmax": {"router": "topk_softmax", "num_experts_per_tok": 2},
    "sigmoid": {
        "router": "sigmoid",
        "num_experts_per_tok": 3,
        "n_group": 4,
        "topk_group": 2,
        "routed_scaling_factor": 2.5,
        "bias_update_speed": 0.01,
        "num_shared_experts": 1,
    },
    "switch": {"router": "switch", "num_experts_per_tok": 1},
    "expert_choice": {"router": "expert_choice", "num_experts_per_tok": 2},
}
MESHES = {
    "one": ONE_DEVICE,
    "ep2": MeshConfig(ep=2),
    "ep4": MeshConfig(ep=4),
    "ep8": MeshConfig(ep=8),
    "ep2-tp4": MeshConfig(ep=2, tp=4),
    "ep4-fsdp2": MeshConfig(ep=4, fsdp=2),
    "ep2-sp2-tp2": MeshConfig(ep=2, sp=2, tp=2),
    "dp2-fsdp2-sp2": MeshConfig(dp=2, fsdp=2, sp=2),
}
# Stated bounds: float32 rounding of sums in another order, relative to the largest of an array.
VALUE_BOUND, GRADIENT_BOUND = 2e-6, 1e-5


def config_of(router: str = "softmax", **changes) -> ModelConfig:
    moe = {
        "num_experts": 8,
        "moe_intermediate_size": 24,
        "router_aux_loss_coef": 0.3,
        "router_z_loss_coef": 0.02,
        **ROUTERS[router],
        **changes,
    }
    return ModelConfig(
        vocab_size=64,
        hidden_size=D,
        num_hidden_layers=2,
        intermediate_size=32,
        dtype="float32",
        initializer_range=0.3,
        moe=MoEConfig(**moe),
    )


def inputs(seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Return x_BLD and valid tokens: one row is half padding, one is all padding."""
    rng = np.random.default_rng(seed)
    valid = np.ones((B, L), bool)
    valid[1, L // 2 :] = False
    valid[5] = False
    return rng.standard_normal((B, L, D)).astype(np.float32), valid


@lru_cache
def compiled_layer(config, mesh, residual, overlap):
    """Return the parameters of one layer, its gradient step and its forward pass, compiled once."""
    tp = tensor_parallel(mesh, residual, overlap)
    plan = make_plan(config, tp, lengths=[])

    def build() -> MoE:
        return MoE(plan, rngs=nnx.Rngs(params=jax.random.key(3)))

    with jax.set_mesh(tp.mesh):
        definition = nnx.graphdef(nnx.eval_shape(build))
        params = jax.jit(lambda: nnx.to_pure_dict(nnx.state(build())))()

    def forward(params, x, valid):
        y, report = nnx.merge(definition, params)(x, valid)
        stacked = jax.tree.map(lambda leaf: leaf[None], report)
        return y, report, auxiliary_loss(stacked, config)

    def loss(params, x, valid):
        y, report, aux = forward(params, x, valid)
        return jnp.sum(jnp.sin(y)) + 100 * aux, (y, report, aux)

    return tp, params, jax.jit(jax.value_and_grad(loss, (0, 1), has_aux=True)), jax.jit(forward)


def run(config, mesh, *, residual="sequence", overlap="none", data=None, alter=None, grads=True):
    """Return outputs and statistics by name, and gradients, of one layer as numpy.

    alter: changes the parameters. grads: False for the forward pass alone.
    """
    tp, params, gradient_step, forward = compiled_layer(config, mesh, residual, overlap)
    x_BLD, valid_BL = data or inputs()
    with jax.set_mesh(tp.mesh):
        params = alter(params) if alter else params
        x = x_BLD.astype(jnp.dtype(config.dtype))
        x = jax.device_put(x, tp.manager.sharding(ResidualSharding))
        valid = jax.device_put(valid_BL, tp.manager.sharding(TokenSharding))
        if grads:
            (_, (y, report, aux)), gradients = gradient_step(params, x, valid)
        else:
            (y, report, aux), gradients = forward(params, x, valid), ()
    values = {"y": y, "aux": aux, **vars(report.stats), "dropped": report.dropped}
    return jax.tree.map(np.asarray, (values, gradients))


def assert_equal_runs(got, want) -> None:
    for name, value in want[0].items():
        np.testing.assert_allclose(
            got[0][name],
            value,
            atol=VALUE_BOUND * max(1, np.abs(value).max()),
            rtol=0,
            err_msg=name,
        )
    flat, _ = jax.tree_util.tree_flatten_with_path(want[1])
    for (path, b), a in zip(flat, jax.tree.leaves(got[1]), strict=True):
        assert np.isfinite(a).all(), path
        error = np.abs(a - b).max() / max(np.abs(b).max(), 1e-30)
        assert error <= GRADIENT_BOUND, (jax.tree_util.keystr(path), error)


@lru_cache
def dense_layer(router: str = "softmax", **changes):
    """Compute every expert for every token on one device."""
    return run(config_of(router, exchange="dense", **changes), ONE_DEVICE)


def test_the_dense_exchange_equals_a_loop_over_experts_in_float64() -> None:
    """One token and expert after the other, in numpy."""
    got, _ = dense_layer()
    config = config_of(exchange="dense")
    state = compiled_layer(config, ONE_DEVICE, "sequence", "none")[1]
    params = jax.tree.map(lambda leaf: np.asarray(leaf, np.float64), state)
    x_BLD, valid = inputs()
    want = np.zeros((B, L, D))
    for b, t in np.argwhere(valid):
        x = x_BLD[b, t].astype(np.float64)
        scores = np.exp(x @ params["router"]["kernel"])
        best = np.argsort(-scores)[:2]
        for e in best:
            gate, up = (x @ params["gate_up"]["kernel"][name][e] for name in ("gate", "up"))
            y = (gate / (1 + np.exp(-gate)) * up) @ params["down"]["kernel"][e]
            want[b, t] += scores[e] / scores[best].sum() * y
    np.testing.assert_allclose(got["y"], want, atol=1e-6 * np.abs(want).max(), rtol=0)
    assert got["tokens"] == valid.sum() and got["load_E"].sum() == 2 * valid.sum()


# Every router and every exchange once; the others are every exchange on every mesh and with every
# router.
PAIRS = [
    ("alltoall", "unnormalised", "ep2-tp4"),
    ("ragged", "topk_softmax", "ep4-fsdp2"),
    ("alltoall", "sigmoid", "ep4"),
    ("ragged", "switch", "ep2"),
    ("alltoall", "expert_choice", "ep2-sp2-tp2"),
    ("dense", "softmax", "ep2-tp4"),
]
MORE = [
    (exchange, tuple(ROUTERS)[(i + j) % len(ROUTERS)], mesh)
    for i, exchange in enumerate(("alltoall", "ragged", "dense"))
    for j, mesh in enumerate(MESHES)
    if (exchange, mesh) != ("dense", "one")
]


@pytest.mark.parametrize(
    ("exchange", "router", "mesh"),
    [*PAIRS, *sample(case for case in MORE if case not in PAIRS)],
)
@pytest.mark.costly
def test_every_exchange_and_router_equals_the_dense_layer(exchange, router, mesh) -> None:
    got = run(config_of(router, exchange=exchange), MESHES[mesh])
    assert got[0]["dropped"] == 0
    assert_equal_runs(got, dense_layer(router))


FAST = [("sequence", "bidirectional"), ("hidden", "ring"), ("replicated", "none")]
LAYOUTS = [
    pytest.param(*case, marks=[] if case in FAST else [pytest.mark.slow])
    for case in itertools.product(
        ("sequence", "hidden", "replicated"), ("none", "ring", "bidirectional")
    )
]


@pytest.mark.parametrize(("residual", "overlap"), LAYOUTS)
@pytest.mark.costly
def test_every_residual_layout_and_overlap_equals_the_dense_layer(residual, overlap) -> None:
    got = run(config_of(), MESHES["ep2-tp4"], residual=residual, overlap=overlap)
    assert_equal_runs(got, dense_layer())
    if overlap == "none":
        got = run(config_of(exchange="dense"), MESHES["ep2-tp4"], residual=residual)
        assert_equal_runs(got, dense_layer())


@pytest.mark.parametrize("rule", [slow("alt"), "unified"])
def test_other_sharding_rules_of_expert_kernels_change_no_number(rule) -> None:
    mesh = MeshConfig(ep=2, fsdp=2, sp=2)
    # For unified the experts are sharded over fsdp, sp and ep: not the order of the mesh axes.
    for choice in ({"exchange": "alltoall", "exchange_chunks": 3}, {"exchange": "ragged"}):
        got = run(config_of(expert_rule=rule, **choice), mesh)
        assert_equal_runs(got, dense_layer())


@pytest.mark.slow
@pytest.mark.parametrize("exchange", ["alltoall", "ragged"])
def test_three_devices_share_experts_as_well(exchange) -> None:
    """Not a power of two: the permutes of a chunked exchange form rings instead of pairs."""
    mesh = MeshConfig(ep=3)
    data = tuple(y[:6] for y in inputs())
    want = run(config_of(num_experts=9, exchange="dense"), ONE_DEVICE, data=data)
    for chunks in (1, 2):
        if chunks == 1 or exchange == "alltoall":
            config = config_of(num_experts=9, exchange=exchange, exchange_chunks=chunks)
            assert_equal_runs(run(config, mesh, data=data), want)


def all_to_one(params):
    """Return parameters whose router chooses expert 5 first and 0 second for every token."""
    kernel = jnp.zeros_like(params["router"]["kernel"])
    router = {
        "kernel": kernel,
        "bias": params["router"]["bias"] * 0 + jnp.eye(8)[5] + 1e-3 * jnp.eye(8)[0],
    }
    return {**params, "router": router}


@pytest.mark.parametrize("mesh", ["ep8", release("ep2-tp4")])
@pytest.mark.parametrize("exchange", ["alltoall", slow("ragged")])
def test_a_collapsed_router_with_empty_experts_equals_the_dense_layer(exchange, mesh) -> None:
    changes = {"bias_update_speed": 0.1}
    want = run(config_of(exchange="dense", **changes), ONE_DEVICE, alter=all_to_one)
    load = want[0]["load_E"]
    assert load[5] == load[0] == inputs()[1].sum() and np.count_nonzero(load) == 2
    got = run(config_of(exchange=exchange, **changes), MESHES[mesh], alter=all_to_one)
    assert got[0]["dropped"] == 0
    assert_equal_runs(got, want)


@pytest.mark.parametrize("exchange", [release("alltoall"), "ragged"])
def test_ninety_six_experts_on_eight_devices_equal_the_dense_layer(exchange) -> None:
    sizes = {"num_experts": 96, "num_experts_per_tok": 4, "moe_intermediate_size": 8}
    want = run(config_of(exchange="dense", **sizes), ONE_DEVICE)
    got = run(config_of(exchange=exchange, **sizes), MESHES["ep8"])
    assert (want[0]["load_E"] == 0).any(), "some experts are empty here"
    assert_equal_runs(got, want)


def test_a_capacity_below_the_load_drops_and_counts_assignments() -> None:
    """Which assignments are dropped: tests/parallel/experts/test_expert_layer.py."""
    valid = inputs()[1]
    want = dense_layer()[0]
    for mesh, exchange in (("one", "alltoall"), ("ep4", "alltoall"), ("ep4", "ragged")):
        config = config_of(exchange=exchange, capacity_factor=0.5)
        got, _ = run(config, MESHES[mesh], grads=False)
        assert 0 < got["dropped"] < got["load_E"].sum() / 2 + 8 * B
        np.testing.assert_array_equal(got["load_E"], want["load_E"])
        same = np.abs(got["y"] - want["y"]).max(-1) <= 1e-6
        assert same[valid].any() and not same[valid].all()
    roomy = run(config_of(exchange="alltoall", capacity_factor=8.0), MESHES["ep4"])
    assert roomy[0]["dropped"] == 0
    assert_equal_runs(roomy, dense_layer())


@pytest.mark.parametrize("residual", ["hidden", "replicated"])
def test_drops_are_counted_once_where_tp_repeats_tokens(residual) -> None:
    config = config_of(exchange="alltoall", capacity_factor=0.5)
    on_tp, without = (
        run(config, MESHES[mesh], residual=residual, grads=False)[0]["dropped"]
        for mesh in ("ep2-tp4", "ep2")
    )
    assert on_tp == without > 0


def test_padding_gets_no_expert_and_no_gradient() -> None:
    x, valid = inputs()
    other = np.where(valid[..., None], x, 1e3).astype(np.float32)
    config = config_of(exchange="alltoall")
    a, b = (run(config, MESHES["ep4"], data=(y, valid)) for y in (x, other))
    np.testing.assert_array_equal(a[0]["load_E"], b[0]["load_E"])
    assert np.abs(a[0]["y"][~valid]).max() == 0 == np.abs(a[1][1][~valid]).max()
    for one, two in zip(jax.tree.leaves(a[1][0]), jax.tree.leaves(b[1][0]), strict=True):
        np.testing.assert_array_equal(one, two)


BIASES = [
    ("alltoall", "ep4", "sequence", "none", {}),
    ("ragged", "ep2-tp4", "hidden", "none", {}),
    ("dense", "ep2-tp4", "replicated", "none", {}),
    ("alltoall", "ep2-tp4", "sequence", "bidirectional", {}),
    ("alltoall", "ep2-tp4", "hidden", "ring", {}),
    ("dense", "ep2-sp2-tp2", "sequence", "none", {}),
    ("dense", "ep2-tp4", "hidden", "none", {}),
    ("ragged", "ep2-tp4", "replicated", "none", {}),
    ("alltoall", "ep4-fsdp2", "sequence", "none", {"exchange_chunks": 2}),
    ("alltoall", "ep4-fsdp2", "sequence", "none", {"grouped_matmul": "padded"}),
    ("ragged", "ep4-fsdp2", "sequence", "none", {"expert_rule": "unified"}),
]


@pytest.mark.parametrize(
    ("exchange", "mesh", "residual", "overlap", "changes"),
    [*BIASES[:4], *(release(*case) for case in BIASES[4:])],
)
@pytest.mark.costly
def test_biases_and_shared_gate_equal_the_dense_layer(
    exchange, mesh, residual, overlap, changes
) -> None:
    """The dense layer on one device equals a formula: tests/model/test_family_features.py."""
    fields = {"biases": ("experts", "router", "mlp"), "hidden_act": "gelu_tanh"}
    moe = {"num_shared_experts": 1, "shared_expert_gate": True}
    want = config_of(exchange="dense", **moe).model_copy(update=fields)
    got = config_of(exchange=exchange, **moe, **changes).model_copy(update=fields)
    runs = (
        run(got, MESHES[mesh], residual=residual, overlap=overlap, alter=with_noise),
        run(want, ONE_DEVICE, alter=with_noise),
    )
    assert_equal_runs(*runs)
    biases = [g for p, g in jax.tree_util.tree_leaves_with_path(runs[1][1][0]) if "bias" in str(p)]
    assert len(biases) == 7 and all(np.abs(g).max() > 0 for g in biases)


def test_bfloat16_is_close_to_float32_by_every_exchange() -> None:
    """Up to a few roundings, 2 ** -8 each, relative to the largest value."""
    want = dense_layer()[0]["y"]
    for exchange in ("alltoall", "ragged", "dense"):
        config = config_of(exchange=exchange).model_copy(update={"dtype": "bfloat16"})
        got, _ = run(config, MESHES["ep2"], grads=False)
        # Routers read rounded tokens, so a few near ties are decided differently.
        error = np.abs(got["y"].astype(np.float32) - want).max(-1) / np.abs(want).max()
        assert np.quantile(error, 0.9) < 4 * 2**-8


def test_unsupported_grouped_matmuls_are_refused() -> None:
    with pytest.raises(ValueError, match="pallas runs on tpu only, these devices are cpu"):
        run(config_of(grouped_matmul="pallas"), ONE_DEVICE)
    with pytest.raises(ValueError, match="grouped_matmul=padded needs the same number of rows"):
        run(config_of(exchange="ragged", grouped_matmul="padded"), MESHES["ep2"])


@pytest.mark.parametrize("residual", ["sequence", "hidden", "replicated"])
@pytest.mark.costly
def test_the_router_is_a_linear_whose_bias_moves_no_logit(residual) -> None:
    tp = tensor_parallel(MESHES["ep2-sp2-tp2"], residual)
    config = config_of("sigmoid")
    x_BLD = inputs()[0]
    with jax.set_mesh(tp.mesh):
        router = Router(config, tp, rngs=nnx.Rngs(params=jax.random.key(3)))
        router.bias[...] += 1.0
        x = jax.device_put(x_BLD, tp.manager.sharding(ResidualSharding))
        got, native = jax.jit(router.__call__)(x), router.native_forward(x)
        assert got.sharding.spec[:2] == x.sharding.spec[:2]
    want = x_BLD @ np.asarray(router.kernel[...])
    for logits in (got, native):
        np.testing.assert_allclose(logits, want, atol=1e-6 * np.abs(want).max(), rtol=0)
