"""Small meshes, functions that run on each of their devices, and an expert layer for them."""

import math
import re
from dataclasses import replace
from functools import cached_property, lru_cache

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from parallel.experts.expert_mlp import ExpertLayerSpec
from parallel.sharding.specs import ROWS


@lru_cache
def mesh_of(**sizes: int) -> Mesh:
    """Return a mesh of the first devices of this process, with axes of these sizes."""
    devices = np.array(jax.devices()[: math.prod(sizes.values())]).reshape(*sizes.values())
    return Mesh(devices, tuple(sizes), axis_types=(AxisType.Explicit,) * len(sizes))


class Island:
    """Runs `body` on row s of every array on device s; row s of the result is from device s."""

    def __init__(self, mesh: Mesh, body, *arrays) -> None:
        def local(*rows):
            return jax.tree.map(lambda y: y[None], body(*jax.tree.map(lambda y: y[0], rows)))

        self.mesh, spec = mesh, P(mesh.axis_names)
        self.sharding = NamedSharding(mesh, spec)
        with jax.set_mesh(mesh):
            island = jax.shard_map(local, in_specs=spec, out_specs=spec)
            self.lowered = jax.jit(island).lower(*jax.device_put(arrays, self.sharding))

    @cached_property
    def compiled(self):
        return self.lowered.compile()

    def run(self, *arrays):
        placed = jax.device_put(arrays, self.sharding)
        return jax.tree.map(np.asarray, self.compiled(*placed))

    def collectives(self) -> dict[str, int]:
        text = self.lowered.as_text()
        found = re.findall(r"stablehlo\.(collective_\w+|all_\w+|reduce_scatter)", text)
        return {name: found.count(name) for name in found}


def layer_spec(**changes) -> ExpertLayerSpec:
    """Return a specification of 8 experts over ep, with these changes."""
    spec = ExpertLayerSpec(
        num_experts=8,
        axes=("ep",),
        axis_name="tp",
        split_dim=ROWS,
        exchange="alltoall",
        grouped_matmul="ragged_dot",
        overlap="none",
        top_k=2,
    )
    return replace(spec, **changes)
