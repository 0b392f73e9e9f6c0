"""A chain of two linears equals plain matmuls, and is one ring where rows are gathered."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import MESHES, ONE_DEVICE, tensor_parallel
from flax import nnx
from jax import lax
from linears import (
    ARRAYS,
    CASES,
    LAYOUTS,
    RINGS,
    D,
    F,
    assert_same_runs,
    close,
    column,
    rngs,
    row,
    run,
)
from rings import primitives

from parallel.linear.chain import chain
from parallel.linear.linear import (
    Linear,
)
from parallel.sharding.axes import (
    ResidualSharding,
)


class Pair(nnx.Module):
    """Two linears with work between them."""

    def __init__(self, column, row, work):
        self.column, self.row, self.work = column, row, work

    def __call__(self, x):
        return chain(x, self.column, self.work, self.row)


def gated(gate, up):
    return jnp.tanh(gate) * up


def biased_pair(tp):
    return Pair(column(tp, scale=1.5), row(tp, scale=0.5), gated)


def scaled_pair(tp):
    return Pair(column(tp, F, 2.0, use_bias=False), row(tp, use_bias=False), jnp.tanh)


def plain_pair(tp):
    one = {"use_bias": False, "scale": 1.0}
    return Pair(column(tp, F, **one), row(tp, **one), jnp.tanh)


@pytest.fixture(scope="module")
def pairs_on_one_device():
    tp, x = tensor_parallel(ONE_DEVICE), ARRAYS["x"]
    runs = {
        pair: run(tp, ResidualSharding, x, pair, Pair.__call__, ResidualSharding)
        for pair in (biased_pair, scaled_pair, plain_pair)
    }
    y, _, params = runs[biased_pair]
    first, last = params["column"], params["row"]
    gate, up = (1.5 * (x @ first["kernel"][k]) + first["bias"][k] for k in ("gate", "up"))
    close(y, 0.5 * (gated(gate, up) @ last["kernel"]) + last["bias"])
    for pair, first_scale, last_scale in ((scaled_pair, 2.0, D**-0.5), (plain_pair, 1.0, 1.0)):
        y, _, params = runs[pair]
        hidden = np.tanh(first_scale * (x @ params["column"]["kernel"]))
        close(y, last_scale * (hidden @ params["row"]["kernel"]))
    return runs


@pytest.mark.parametrize(("mesh", "layout", "overlap"), CASES)
@pytest.mark.costly
def test_a_chain_equals_its_two_linears(pairs_on_one_device, mesh, layout, overlap) -> None:
    tp = tensor_parallel(MESHES[mesh], layout, overlap)
    for pair, want in pairs_on_one_device.items():
        if pair is biased_pair or (mesh, layout) == ("dp2-fsdp2-tp2", "sequence"):
            got = run(tp, ResidualSharding, ARRAYS["x"], pair, Pair.__call__, ResidualSharding)
            assert_same_runs(got, want)


def chain_program(tp, x, **options):
    with jax.set_mesh(tp.mesh):
        pair = Pair(column(tp), row(tp, **options), gated)
        placed = jax.device_put(x, tp.manager.sharding(ResidualSharding))
        return primitives(pair, placed)


@pytest.mark.parametrize("overlap", RINGS)
def test_a_chain_where_rows_travel_is_one_ring(overlap) -> None:
    tp = tensor_parallel(MESHES["tp8"], "sequence", overlap)
    joined = chain_program(tp, ARRAYS["x"])
    assert joined["ppermute"] and not joined["dynamic_update_slice"]
    other = tp.replace(overlap="bidirectional" if overlap == "ring" else "ring")
    apart = chain_program(tp, ARRAYS["x"], parallel_config=other)
    assert apart["ppermute"] and apart["dynamic_update_slice"]
    for layout in ("hidden", "replicated"):
        if (overlap, layout) == ("hypercube", "hidden"):
            continue  # 2 features per device cannot be cut in three
        moved = chain_program(tensor_parallel(MESHES["tp8"], layout, overlap), ARRAYS["x"])
        assert moved["ppermute"] == (0 if layout == "replicated" else joined["ppermute"])


def test_a_chain_computes_in_its_linears_dtypes_and_precisions() -> None:
    for overlap in ("none", "ring"):
        tp = tensor_parallel(MESHES["tp8"], "sequence", overlap)
        with jax.set_mesh(tp.mesh):
            x = jax.device_put(ARRAYS["x"], tp.manager.sharding(ResidualSharding))
            first = column(tp, dtype=jnp.bfloat16)
            for precision in (None, lax.Precision.HIGHEST):
                last = row(tp, dtype=jnp.float32, precision=precision)
                y = jax.eval_shape(lambda x, c=first, r=last: chain(x, c, gated, r), x)
                assert y.dtype == jnp.float32


def test_a_chain_without_a_parallel_config_calls_its_linears() -> None:
    first, last = Linear(D, {"gate": F, "up": F}, rngs=rngs()), Linear(F, D, rngs=rngs())
    hidden = gated(*first(ARRAYS["x"]).values())
    np.testing.assert_array_equal(chain(ARRAYS["x"], first, gated, last), last(hidden))


@pytest.mark.parametrize("overlap", ["none", "ring"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_chain_does_not_gather_between_its_linears(layout, overlap) -> None:
    tp = tensor_parallel(MESHES["tp4-sp2"], layout, overlap).replace(reduce_scatter_output=False)
    with jax.set_mesh(tp.mesh):
        x = jax.device_put(ARRAYS["x"], tp.manager.sharding(ResidualSharding))
        y = jax.eval_shape(Pair(column(tp), row(tp), gated), x)
        assert y.sharding.spec == jax.typeof(x).sharding.spec
