"""Configurations that train the same model on the same data, but are executed differently."""

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from configs.reading import ConfigError
from configs.schema import Config, make_config
from model.remat import REMAT_POLICIES
from parallel.planning.slices import Topology
from parallel.sharding.mesh import AXIS_NAMES
from parallel.sharding.residual import RESIDUAL_LAYOUTS


@dataclass(frozen=True)
class Candidate:
    """A changed configuration.

    Attributes:
        overrides: The changes as `section.key=value`.
        config: The configuration with them.
    """

    overrides: tuple[str, ...]
    config: Config


def change(config: Config, changes: dict[str, Any]) -> Candidate | None:
    """Return the configuration with other values of these keys, or None if that is not legal.

    changes: Values by "section.key". Values that are already set are left out of the overrides.
    """
    # Not as JSON, whose keys of a value by steps would be texts.
    tree = {**config.model_dump(), "plugins": [*config.plugins]}
    overrides = []
    for path, value in changes.items():
        section, key = path.split(".")
        if tree[section][key] != value:
            overrides.append(f"{path}={value}")
            tree[section][key] = value
    try:
        return Candidate(tuple(overrides), make_config(tree))
    except ConfigError:
        return None


def mesh_sizes(topology: Topology, *, sparse: bool) -> Iterator[dict[str, int]]:
    """Yield the sizes of all mesh axes for every division of the chips of these slices.

    sparse: Whether the model has experts, so that ep may split them.
    """
    per_slice = topology.num_chips // topology.num_slices
    divisors = [n for n in range(1, per_slice + 1) if per_slice % n == 0]
    for dp, fsdp, ep, sp in itertools.product(divisors, repeat=4):
        tp, remainder = divmod(per_slice, dp * fsdp * ep * sp)
        if remainder or not tp or (ep > 1 and not sparse):
            continue
        sizes = dict(zip(AXIS_NAMES, (dp * topology.num_slices, fsdp, ep, sp, tp), strict=True))
        if math.prod(sizes.values()) == topology.num_chips:
            yield {**sizes, "dcn_dp": topology.num_slices}


def all_candidates(config: Config, topology: Topology) -> Iterator[Candidate]:
    """Yield the legal meshes, residual layouts, remat policies and numbers of microbatches.

    The overlap method stays as configured: `auto` chooses it by shape and chip.
    """
    rows = max(config.data.batch_sizes)
    accumulations = [n for n in (1, 2, 4, 8, 16) if rows % n == 0]
    sparse = config.model.moe.num_experts > 0
    for sizes in mesh_sizes(topology, sparse=sparse):
        layouts = RESIDUAL_LAYOUTS if sizes["tp"] > 1 else ["sequence"]
        for residual, remat, parts in itertools.product(layouts, REMAT_POLICIES, accumulations):
            found = change(
                config,
                {
                    **{f"mesh.{axis}": size for axis, size in sizes.items()},
                    "parallel.residual": residual,
                    "model.remat": remat,
                    "training.gradient_accumulation": parts,
                },
            )
            if found is not None:
                yield found
