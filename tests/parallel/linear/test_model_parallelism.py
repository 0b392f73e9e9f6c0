"""One copy of a module per device equals the copies one after the other."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from dense_layers import BITS, SPLIT, WHOLE, D, arrays, close, draw, grid, merged, place, pull
from flax import nnx
from jax.sharding import PartitionSpec as P

from parallel.linear.model_parallelism import ModelParallelismWrapper
from parallel.linear.tensor_parallel import TPDense


class Counting(nnx.Module):
    """A linear with dropout and a counter: parameters, a random stream and a statistic."""

    def __init__(self, features: int, *, rate: float = 0.0, rngs: nnx.Rngs):
        self.linear = nnx.Linear(D, features, kernel_init=BITS, bias_init=BITS, rngs=rngs)
        self.dropout = nnx.Dropout(rate, rngs=rngs)
        self.calls = nnx.Variable(jnp.ones((), jnp.int32))

    def __call__(self, x: jax.Array, *, count: bool = False) -> jax.Array:
        if count:
            self.calls[...] += 1
        return self.dropout(self.linear(x))


def copies(**options) -> ModelParallelismWrapper:
    kwargs = {"features": 6, "rate": options.pop("rate", 0.0)}
    rngs = nnx.Rngs(params=0, dropout=1)
    return ModelParallelismWrapper("tp", Counting, module_kwargs=kwargs, **options, rngs=rngs)


@pytest.mark.parametrize("inside", [False, True], ids=["global", "inside"])
@pytest.mark.parametrize("keep", [None, 0, 2])
@pytest.mark.parametrize("size", [1, 3, 4, 8])
def test_copies_equal_their_blocks_in_numpy(size: int, keep: int | None, inside: bool) -> None:
    if keep is not None and keep >= size:
        keep = size - 1
    with jax.set_mesh(grid(size)):
        definition, params, rest = nnx.split(copies(mask_except_model_idx=keep), nnx.Param, ...)
        values = arrays(params)
        kernel, bias = values["sharded.linear.kernel"], values["sharded.linear.bias"]
        assert kernel.shape == (size, D, 6)
        assert params["sharded"]["linear"]["bias"][...].sharding.spec == P("tp", None)

        def whole(params, x):
            return nnx.merge(definition, params, rest, copy=True)(x, out_specs=SPLIT)

        def blocks(params, x):
            body = partial(merged, definition)
            specs = nnx.get_partition_spec(params), nnx.get_partition_spec(rest), WHOLE
            return jax.shard_map(body, in_specs=specs, out_specs=SPLIT)(params, rest, x)

        x, c = draw((4, 3, D), (4, 3, size * 6))
        y, grads, dx = pull(blocks if inside else whole, params, place(x, WHOLE), c, SPLIT)
    kept = np.array([keep in (None, i) for i in range(size)])
    np.testing.assert_array_equal(arrays(rest)["sharded.calls"], [1] * size)
    assert not kernel[~kept].any() and not bias[~kept].any()
    assert all(kernel[i].any() for i in np.flatnonzero(kept))
    c_BLnF = c.reshape(4, 3, size, 6) * kept[:, None]
    close(y, (np.einsum("bld,ndf->blnf", x, kernel) + bias).reshape(c.shape))
    close(dx, np.einsum("blnf,ndf->bld", c_BLnF, kernel))
    close(grads["sharded.linear.kernel"], np.einsum("bld,blnf->ndf", x, c_BLnF))
    close(grads["sharded.linear.bias"], c_BLnF.sum((0, 1)))


def test_copy_i_depends_on_i_and_not_on_their_number() -> None:
    kernels = {}
    for size in (1, 2, 3, 4, 8):
        with jax.set_mesh(grid(size)):
            kernels[size] = np.asarray(copies().sharded.linear.kernel[...])
    for size in (1, 2, 3, 4, 8):
        np.testing.assert_array_equal(kernels[size], kernels[8][:size])
    assert len({kernel.tobytes() for kernel in kernels[8]}) == 8
    key = jax.random.fold_in(nnx.Rngs(params=0).params(), 5)
    alone = Counting(6, rngs=nnx.Rngs(params=key, dropout=0))
    np.testing.assert_array_equal(kernels[8][5], alone.linear.kernel[...])


def test_random_streams_and_statistics_of_copies_advance() -> None:
    with jax.set_mesh(grid(4, dp=2)):
        wrapper = copies(rate=0.5)
        x = place(np.ones((1, 1, D), np.float32), P())

        @nnx.jit
        def run(wrapper, x):
            return wrapper(x, out_specs=P(None, None, "tp"), count=True)

        first, second = np.asarray(run(wrapper, x)), np.asarray(run(wrapper, x))
        assert ((first == 0) != (second == 0)).any()
        dropped = (first == 0).reshape(4, 6)
        assert len({row.tobytes() for row in dropped}) > 1
        np.testing.assert_array_equal(wrapper.sharded.calls[...], [3] * 4)
        assert wrapper.sharded.calls[...].sharding.spec == P("tp")


def test_copies_take_blocks_by_in_specs() -> None:
    with jax.set_mesh(grid(4)):
        wrapper = copies()
        x = place(*draw((8, 1, D)), P("tp", None, None))
        y = jax.jit(lambda x: wrapper(x, out_specs=P("tp")))(x)
        same = jax.jit(lambda x: wrapper(x, in_specs=(P("tp"),), out_specs=P("tp")))(x)
        np.testing.assert_array_equal(y, same)
        params = arrays(nnx.state(wrapper.sharded.linear))
        x = np.asarray(x).reshape(4, 2, D)
        want = np.einsum("nrd,ndf->nrf", x, params["kernel"]) + params["bias"][:, None]
        close(y, want.reshape(8, 1, 6))


def test_abstract_copies_carry_their_layout() -> None:
    with jax.set_mesh(grid(4)):
        state = nnx.to_pure_dict(jax.eval_shape(lambda: nnx.state(copies())))
    assert state["sharded"]["linear"]["kernel"].sharding.spec == P("tp", None, None)


def test_wrong_copies_are_refused() -> None:
    with pytest.raises(ValueError, match="built without a mesh in context that has the axis 'tp'"):
        copies()
    with jax.set_mesh(grid(4)):
        for index in (-1, 4):
            with pytest.raises(ValueError, match=f"idx={index} is no index on tp=4; use 0 to 3"):
                copies(mask_except_model_idx=index)
        with pytest.raises(ValueError, match="pass out_specs"):
            copies()(np.ones((1, D), np.float32))
        inner = partial(TPDense, partial(nnx.Linear, D, 8), "tp", "gather")
        with pytest.raises(ValueError, match="TPDense is built inside a shard_map or ModelPar"):
            ModelParallelismWrapper("tp", inner, rngs=nnx.Rngs(0))
        with pytest.raises(ValueError, match="ModelParallelismWrapper is built inside a shard_map"):
            ModelParallelismWrapper("tp", lambda rngs: copies(), rngs=nnx.Rngs(0))
