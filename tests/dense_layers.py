"""Dense layers on simulated meshes for tests: meshes, random arrays, values with gradients."""

import jax
import numpy as np
from flax import nnx
from jax.sharding import AxisType, Mesh
from jax.sharding import PartitionSpec as P

# Bit for bit the same in blocks of any shape: no transcendental function, no rounding.
BITS = nnx.initializers.uniform(1.0)
D, F = 24, 48
WHOLE, SPLIT = P("dp", None, None), P("dp", None, "tp")


def grid(tp: int, dp: int = 1) -> Mesh:
    devices = np.array(jax.devices()[: dp * tp]).reshape(dp, tp)
    return Mesh(devices, ("dp", "tp"), axis_types=(AxisType.Explicit,) * 2)


def place(array: np.ndarray, spec: P) -> jax.Array:
    return jax.device_put(array, jax.NamedSharding(jax.sharding.get_mesh(), spec))


def draw(*shapes: tuple[int, ...], seed: int = 0) -> list[np.ndarray]:
    rng = np.random.default_rng(seed)
    return [rng.normal(size=shape).astype(np.float32) for shape in shapes]


def merged(definition, *states_and_input):
    *states, x = states_and_input
    return nnx.merge(definition, *states)(x)


def close(got, want: np.ndarray) -> None:
    np.testing.assert_allclose(np.asarray(got), want, rtol=2e-5, atol=2e-5)


def arrays(state) -> dict[str, np.ndarray]:
    flat = nnx.to_flat_state(state)
    return {".".join(map(str, p)): np.asarray(v[...]) for p, v in flat if "rngs" not in p}


def pull(function, state, x: jax.Array, cotangent: np.ndarray, spec: P):
    """Return output and gradients of state and x, in one compilation."""

    @jax.jit
    def run(state, x, cotangent):
        y, vjp = jax.vjp(function, state, x)
        return y, vjp(cotangent)

    y, (dstate, dx) = run(state, x, place(cotangent, spec))
    return y, arrays(dstate), dx
