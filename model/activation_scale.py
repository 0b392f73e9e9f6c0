"""Scale of activations: their root mean square by kind of layer, measured in evaluations."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P

Reports = dict[str, Any]
"""What layers report, by name: `experts`, the `MoEReport` of sparse layers, and their scales."""
_PREFIX = "activation/"


def scale_name(kind: str) -> str:
    """Return the name of the report of `local_squares` of a kind of layer, or of `residual`."""
    return _PREFIX + kind


def local_squares(x_BLD: jax.Array, measured_BL: jax.Array, mesh: jax.sharding.Mesh) -> jax.Array:
    """Return [sum of squares, number of entries] of every device, (devices, 2) float32.

    An entry that several devices hold counts once on each of them, in the sum and in the number, so
    the quotient of the sums over all devices is the mean. No communication.

    x_BLD: activations. measured_BL: False for tokens that do not count, such as padding.
    """
    batch, length, features = jax.typeof(x_BLD).sharding.spec
    axes = mesh.axis_names

    def local(x_BLD: jax.Array, measured_BL: jax.Array) -> jax.Array:
        squares_BL = jnp.sum(jnp.square(x_BLD.astype(jnp.float32)), axis=-1)
        count = jnp.sum(measured_BL, dtype=jnp.float32) * x_BLD.shape[-1]
        return jnp.stack([jnp.sum(jnp.where(measured_BL, squares_BL, 0)), count])[None]

    return jax.shard_map(
        local,
        mesh=mesh,
        in_specs=(P(batch, length, features), P(batch, length)),
        out_specs=P(axes),
    )(x_BLD, jax.sharding.reshard(measured_BL, P(batch, length)))


def sums_by_kind(reports: Reports) -> dict[str, jax.Array]:
    """Return [sum of squares, number of entries] over all devices of every layer, (layers, 2).

    Communication: one all-reduce of these arrays per kind of layer.
    """
    return {
        name.removeprefix(_PREFIX): jnp.sum(squares, axis=1)
        for name, squares in reports.items()
        if name.startswith(_PREFIX)
    }


def activation_metrics(batches: Sequence[Mapping[str, jax.Array]]) -> dict[str, float]:
    """Return `eval_activation/KIND`, the root mean square over all layers of a kind.

    batches: what `sums_by_kind` returned for every batch.
    """
    found = {}
    for kind in batches[0]:
        sums = np.sum([np.asarray(batch[kind], np.float64) for batch in batches], axis=0)
        found[f"eval_activation/{kind}"] = math.sqrt(np.mean(sums[:, 0] / sums[:, 1]))
    return found
