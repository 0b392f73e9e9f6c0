"""From a configuration to the things that it describes."""

from collections.abc import Sequence

import jax

from configs.schema import Config
from parallel.linear import TensorParallelConfig
from parallel.mesh import build_mesh
from parallel.partition import residual_rules
from training.optimizer import make_optimizer, make_schedule
from training.step import Program


def build_program(config: Config, devices: Sequence[jax.Device]) -> Program:
    """The jitted functions of this configuration on these devices."""
    tp = TensorParallelConfig(
        mesh=build_mesh(config.mesh, devices),
        partition_axis=residual_rules(config.parallel.residual),
        overlap=config.parallel.overlap,
    )
    schedule = make_schedule(config.optimizer, config.training.steps)
    optimizer = make_optimizer(config.optimizer, schedule)
    return Program(config.model, tp, optimizer, schedule, config.training.seed)
