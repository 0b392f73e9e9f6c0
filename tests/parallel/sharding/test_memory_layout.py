"""A pinned layout keeps values, gradients and shardings."""

import jax
import jax.numpy as jnp
import numpy as np
from conftest import MESHES, tensor_parallel
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from rings import primitives

from parallel.sharding.memory_layout import features_innermost


def test_a_pin_keeps_values_gradients_and_shardings() -> None:
    mesh, spec = tensor_parallel(MESHES["dp2-fsdp2-tp2"]).mesh, P(("dp", "fsdp"), "tp", None)
    with jax.set_mesh(mesh):
        x = jax.device_put(np.arange(64.0).reshape(4, 4, 4), NamedSharding(mesh, spec))

        def square(x):
            return jnp.sum(features_innermost(x, mesh) ** 2)

        value, gradient = jax.jit(jax.value_and_grad(square))(x)
        counts = primitives(jax.grad(square), x)
    assert value == np.sum(np.arange(64.0) ** 2)
    np.testing.assert_array_equal(gradient, 2 * np.arange(64.0).reshape(4, 4, 4))
    assert gradient.sharding.spec == spec
    assert counts["layout_constraint"] == 2
