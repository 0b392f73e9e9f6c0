"""Configuration of the optimizer and of its learning-rate schedule."""

from typing import Any

from pydantic import BaseModel, Field, NonNegativeFloat, NonNegativeInt, PositiveFloat


class OptimizerConfig(
    BaseModel, frozen=True, extra="forbid", use_attribute_docstrings=True, allow_inf_nan=False
):
    """The optimizer, its learning-rate schedule, and clipping by global gradient norm."""

    name: str = "adamw"
    """Optimizer by name: adamw (arXiv 1711.05101), and others that are registered."""
    options: dict[str, Any] = {}
    """Options of an optimizer that has more than the keys below; adamw has none."""
    learning_rate: PositiveFloat = 3e-4
    """Peak of the schedule."""
    schedule: str = "cosine"
    """Learning rate after warm-up by name: cosine decays to the end of the run, wsd (warm-up,
    stable, decay) stays flat and then decays linearly, constant stays flat; and others that are
    registered."""
    warmup_steps: NonNegativeInt = 100
    """Steps of linear warm-up to the peak."""
    decay_steps: NonNegativeInt = 0
    """Steps of decay at the end of a wsd schedule; 0: a tenth of the run."""
    final_fraction: float = Field(default=0.1, ge=0, le=1)
    """Learning rate at the end of the run as a fraction of the peak."""
    weight_decay: NonNegativeFloat = 0.1
    """Decoupled weight decay per unit of learning rate; of matrices, not of norms or biases."""
    beta1: float = Field(default=0.9, ge=0, lt=1)
    """Decay of the first moment."""
    beta2: float = Field(default=0.95, ge=0, lt=1)
    """Decay of the second moment."""
    eps: PositiveFloat = 1e-8
    """Added to the square root of the second moment."""
    clip_norm: PositiveFloat | None = 1.0
    """Maximum global gradient norm; null: no clipping."""
    ema_decay: float | None = Field(default=None, ge=0, lt=1)
    """Decay of an exponential moving average of the parameters, which is evaluated in their place;
    null: none."""
