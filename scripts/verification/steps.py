"""One training step of a configuration on some devices: its loss, gradients and expert loads.

The step is that of train.py, except that its optimizer keeps the gradients as they are.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from configs.build import build_program
from configs.schema import Config
from training.state import TrainState
from training.step import Program
from verification.inputs import name_of


class StepResult(NamedTuple):
    """Results of one training step, in numpy."""

    loss: float
    gradients: dict[str, np.ndarray]
    """By name of the parameter; float32."""
    load_NE: np.ndarray
    """Tokens of every expert of every sparse layer."""


def _zeros(trained: Any) -> Any:
    return jax.tree.map(jnp.zeros_like, trained)


def _keep(gradients: Any, state: Any, params: Any = None, **_: Any) -> tuple[Any, Any]:
    return _zeros(gradients), gradients


GRADIENTS_AS_STATE = optax.GradientTransformationExtraArgs(_zeros, _keep)
"""Changes no parameter; its state is the gradients of the latest step."""


def program_of(config: Config, devices: Sequence[jax.Device]) -> Program:
    """Return the program of a configuration, whose optimizer keeps the gradients.

    Raises:
        ValueError: The configuration cannot run on these devices.
    """
    return dataclasses.replace(build_program(config, devices), optimizer=GRADIENTS_AS_STATE)


def run_step(program: Program, state: TrainState, batch: dict[str, np.ndarray]) -> StepResult:
    """Compile and run the step of a program on this state and batch."""
    with jax.set_mesh(program.tp.manager.mesh):
        placed = jax.tree.map(
            lambda x, want: jax.device_put(x.astype(want.dtype), want.sharding),
            state,
            program.abstract_state,
        )
        fields = {name: jax.device_put(x, program.batch_sharding) for name, x in batch.items()}
        after, metrics = jax.device_get(program.train_step(placed, fields))
    leaves, _ = jax.tree_util.tree_flatten_with_path(after.opt_state)
    experts = metrics.get("experts", {"load_NE": np.zeros((0, 0))})
    return StepResult(
        float(metrics["loss"] + metrics.get("extra_loss", 0.0)),
        {name_of(path): np.asarray(leaf, np.float32) for path, leaf in leaves},
        experts["load_NE"],
    )
