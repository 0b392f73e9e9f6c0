"""Order of the dims of an array in the memory of a TPU, where the compiler's choice is slow.

libtpu may store the residual stream of a model with its tokens innermost, because one matmul
likes to write it so; all others, and the norms, then read it badly. With the features innermost,
`scripts/bench.py model mesh.tp=1 mesh.fsdp=8 model.remat=dots` predicted 1520 instead of 1570 ms
(libtpu 0.0.42, 23 November 2026).
"""

from functools import partial

import jax
from jax.experimental.layout import Layout, with_layout_constraint
from jax.sharding import Mesh


@partial(jax.custom_vjp, nondiff_argnums=(1,))
def features_innermost(x: jax.Array, mesh: Mesh) -> jax.Array:
    """Return x, stored with its last dim innermost, and its gradient likewise.

    Only TPUs need it: other platforms store arrays so by default.
    """
    # Outside of a shard_map, the partitioner would gather x on every device.
    spec = jax.typeof(x).sharding.spec
    return jax.shard_map(_pin_block, mesh=mesh, in_specs=spec, out_specs=spec)(x)


def _pin_block(x: jax.Array) -> jax.Array:
    return with_layout_constraint(x, Layout(tuple(range(x.ndim))))


def _pin_forward(x: jax.Array, mesh: Mesh) -> tuple[jax.Array, None]:
    return features_innermost(x, mesh), None


def _pin_backward(mesh: Mesh, _: None, g: jax.Array) -> tuple[jax.Array]:
    return (features_innermost(g, mesh),)


features_innermost.defvjp(_pin_forward, _pin_backward)
