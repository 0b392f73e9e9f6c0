"""A block of TPAsyncDense or TPDense layers is the block of column- and row-parallel linears."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import MESHES, tensor_parallel
from flax import nnx
from linears import ARRAYS, GATE_UP, D, F, bias_init
from rings import collectives

from parallel.linear.linear import (
    ColumnParallelLinear,
    ParallelLinear,
    RowParallelLinear,
    TensorParallelConfig,
)
from parallel.linear.tensor_parallel import TPAsyncDense, TPDense
from parallel.sharding.axes import ResidualSharding

QKV = {"q": D, "k": D, "v": D}
# By overlap of columns and rows: the dense class and its directions.
DENSE = {
    ("none", "none"): TPDense,
    ("bidirectional", "ring"): TPAsyncDense,
    ("ring", "split"): partial(
        TPAsyncDense, use_bidirectional_gather=False, use_bidirectional_scatter=True
    ),
}
OUTPUTS = {"qkv": (D, QKV), "o": (D, D), "gate_up": (D, GATE_UP), "down": (F, D)}


def linear(name: str, tp: TensorParallelConfig, overlaps: tuple[str, str]) -> nnx.Module:
    column = isinstance(OUTPUTS[name][1], dict)
    cls = ColumnParallelLinear if column else RowParallelLinear
    options = {"parallel_config": tp.replace(overlap=overlaps[0 if column else 1])}
    return cls(*OUTPUTS[name], bias_init=bias_init, **options, rngs=nnx.Rngs(len(name)))


def dense(name: str, tp: TensorParallelConfig, overlaps: tuple[str, str]) -> nnx.Module:
    column = isinstance(OUTPUTS[name][1], dict)
    layer = partial(ParallelLinear if column else nnx.Linear, *OUTPUTS[name], bias_init=bias_init)
    mode = "gather" if column else "scatter"
    return DENSE[overlaps](layer, "tp", mode, parallel_config=tp, rngs=nnx.Rngs(len(name)))


def forward(layers: dict[str, nnx.Module], x_BLD: jax.Array) -> jax.Array:
    """Two residual branches; elementwise work stands in for attention."""
    residual = jax.typeof(x_BLD).sharding.spec
    q, k, v = layers["qkv"](x_BLD).values()
    x_BLD = x_BLD + layers["o"](jnp.tanh(q) * k + v, residual)
    gate, up = layers["gate_up"](x_BLD).values()
    return x_BLD + layers["down"](jax.nn.silu(gate) * up, residual)


def compiled(build, tp: TensorParallelConfig, overlaps: tuple[str, str]):
    """Return parameters, loss with gradients, and the collectives of the compiled program."""
    layers = {name: build(name, tp, overlaps) for name in OUTPUTS}
    definition, params = nnx.split(nnx.Dict(layers))

    def loss(params, x):
        y = forward(nnx.merge(definition, params), x)
        assert jax.typeof(y).sharding.spec == jax.typeof(x).sharding.spec
        return jnp.sum(jnp.sin(y)), y

    x = jax.device_put(ARRAYS["x"], tp.manager.sharding(ResidualSharding))
    program = jax.jit(jax.value_and_grad(loss, (0, 1), has_aux=True)).lower(params, x).compile()
    leaves = jax.tree.leaves((params, program(params, x)))
    return [np.asarray(leaf) for leaf in leaves], collectives(program.as_text())


@pytest.mark.parametrize(
    ("mesh", "overlaps"),
    [*(("tp8", overlaps) for overlaps in DENSE), ("dp2-fsdp2-tp2", ("bidirectional", "ring"))],
)
@pytest.mark.parametrize("layout", ["hidden", "sequence"])
@pytest.mark.costly
def test_a_block_of_dense_layers_is_the_block_of_linears(mesh, layout, overlaps) -> None:
    tp = tensor_parallel(MESHES[mesh], layout)
    got, want = (compiled(build, tp, overlaps) for build in (dense, linear))
    for one, other in zip(got[0], want[0], strict=True):
        np.testing.assert_array_equal(one, other)
    assert got[1] == want[1] and (got[1]["collective-permute"] > 0) == (overlaps[0] != "none")
