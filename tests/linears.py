"""Linears on simulated meshes for tests: cases, construction, and values with gradients."""

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from parallel.linear.linear import (
    ColumnParallelLinear,
    RowParallelLinear,
    TokenParallelLinear,
)
from parallel.sharding.axes import (
    BATCH,
    MLP_INTERMEDIATE,
    QUERY_LENGTH,
    ResidualSharding,
)

LAYOUTS = ("hidden", "sequence", "replicated")
RINGS = ("ring", "bidirectional", "split", "hypercube")
HIDDEN = [BATCH, QUERY_LENGTH, MLP_INTERMEDIATE]
B, L, D, F = 8, 16, 16, 32
GATE_UP = {"gate": F, "up": F}
# Every layout with the plain twin, every ring on the largest axis, and each ring on other meshes.
CASES = [
    *((mesh, y, "none") for mesh in ("tp8", "dp2-fsdp2-tp2", "tp4-sp2") for y in LAYOUTS),
    *(("tp8", "sequence", overlap) for overlap in RINGS),
    *(("tp8", "hidden", overlap) for overlap in RINGS if overlap != "hypercube"),  # 2 features each
    ("tp4-sp2", "hidden", "hypercube"),
    ("tp4-sp2", "sequence", "hypercube"),
    ("dp2-fsdp2-tp2", "hidden", "ring"),
    ("dp2-fsdp2-tp2", "sequence", "bidirectional"),
    ("dp2-fsdp2-tp2", "sequence", "split"),
    ("tp4-sp2", "sequence", "ring"),
    ("tp4-sp2", "hidden", "bidirectional"),
    ("tp4-sp2", "hidden", "split"),
    ("tp4-sp2", "replicated", "ring"),
]


_RNG = np.random.default_rng(0)
ARRAYS = {
    name: _RNG.normal(size=shape).astype(np.float32)
    for name, shape in {"x": (B, L, D), "h": (B, L, F)}.items()
}


def rngs() -> nnx.Rngs:
    return nnx.Rngs(params=jax.random.key(7))


def bias_init(key, shape, dtype, out_sharding=None):
    return nnx.initializers.normal(1.0)(key, shape, dtype, out_sharding=out_sharding)


def run(tp, axes, array, build, call, out_axes):
    """Output, gradient of the parameters and of the input, and the parameters, as numpy."""
    with jax.set_mesh(tp.mesh):
        definition, params = nnx.split(build(tp))
        x = jax.device_put(array, tp.manager.sharding(axes))

        def loss(params, x):
            y = call(nnx.merge(definition, params), x)
            return sum(jnp.sum(jnp.sin(leaf)) for leaf in jax.tree.leaves(y)), y

        (_, y), grads = jax.jit(jax.value_and_grad(loss, (0, 1), has_aux=True))(params, x)
        for leaf in jax.tree.leaves(y):
            assert leaf.sharding.spec == tp.manager.resolve(out_axes)
    return jax.tree.map(np.asarray, (y, grads, nnx.to_pure_dict(params)))


def assert_same_runs(got, want) -> None:
    """Outputs and gradients up to rounding, initial parameters to the bit."""
    assert jax.tree.structure(got) == jax.tree.structure(want)
    for a, b in zip(jax.tree.leaves(got[:2]), jax.tree.leaves(want[:2]), strict=True):
        np.testing.assert_allclose(a, b, rtol=2e-5, atol=2e-5)
    jax.tree.map(np.testing.assert_array_equal, got[2], want[2])


def close(got, want) -> None:
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)


def column(tp, out=GATE_UP, scale="fan_in", **options):
    options = {"parallel_config": tp, "bias_init": bias_init, "rngs": rngs(), **options}
    return ColumnParallelLinear(D, out, scale=scale, **options)


def row(tp, out=D, scale="fan_out", **options):
    options = {"parallel_config": tp, "bias_init": bias_init, "rngs": rngs(), **options}
    return RowParallelLinear(F, out, scale=scale, **options)


def token(tp, out=GATE_UP, scale="fan_in", **options):
    options = {"parallel_config": tp, "bias_init": bias_init, "rngs": rngs(), **options}
    return TokenParallelLinear(D, out, scale=scale, **options)


def to_residual(module, x):
    return module(x, module.parallel_config.manager.resolve(ResidualSharding))
