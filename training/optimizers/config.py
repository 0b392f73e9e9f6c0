"""Configuration of the optimizer, its learning-rate schedule and clipping."""

from collections.abc import Iterator
from typing import Annotated, Any, Literal

from pydantic import BaseModel, Field, NonNegativeFloat, PositiveFloat

from training.parameter_kinds import ParameterKind

Fraction = Annotated[float, Field(ge=0, lt=1)]
"""A decay, from 0 to below 1."""


class GroupConfig(
    BaseModel, frozen=True, extra="forbid", use_attribute_docstrings=True, allow_inf_nan=False
):
    """Learning rate and weight decay of the parameters of one kind of layer."""

    learning_rate: NonNegativeFloat = 1.0
    """Factor of the learning rate of every step; 0 leaves the parameters as they are."""
    weight_decay: NonNegativeFloat | None = None
    """Weight decay of kernels and tables in place of optimizer.weight_decay; null: the same."""


class OptimizerConfig(
    BaseModel, frozen=True, extra="forbid", use_attribute_docstrings=True, allow_inf_nan=False
):
    """The optimizer, its learning-rate schedule, and clipping by global gradient norm."""

    name: str = "adamw"
    """Optimizer by name: adamw, muon, soap, lion, adafactor, schedule_free_adamw or sgd, and
    others that are registered."""
    options: dict[str, Any] = {}
    """Options of an optimizer beyond the keys below, such as {momentum: 0.9} of muon."""
    learning_rate: PositiveFloat = 3e-4
    """Peak of the schedule."""
    schedule: str = "cosine"
    """Learning rate after warm-up by name: cosine and linear decay to the end of the run, wsd
    (warm-up, stable, decay) stays flat and then decays linearly, inverse_sqrt decays with the
    square root of the step, whatever the length of the run, constant stays flat; and others that
    are registered."""
    schedule_steps: int | None = Field(default=None, gt=0, lt=2**31)
    """Length of the schedule in steps; afterwards the rate stays at its final value (inverse_sqrt
    goes on to decay). null: training.steps. To keep the schedule of a finished run that is
    extended, set it to the old training.steps."""
    warmup_steps: int = Field(default=100, ge=0, lt=2**31)
    """Steps of linear warm-up to the peak; at most those of the run."""
    decay_steps: int = Field(default=0, ge=0, lt=2**31)
    """Steps of decay at the end of a wsd schedule; 0: a tenth of the run."""
    final_fraction: float = Field(default=0.1, ge=0, le=1)
    """Learning rate at the end of a cosine, linear or wsd schedule, as a fraction of the peak."""
    weight_decay: NonNegativeFloat = 0.1
    """Decoupled weight decay per unit of learning rate; of matrices, not of norms or biases."""
    beta1: Fraction = 0.9
    """Decay of the first moment; adamw, muon (parameters that it leaves to AdamW), soap and lion.
    In schedule_free_adamw: gradients are those at beta1 * average + (1 - beta1) * newest step."""
    beta2: Fraction = 0.95
    """Decay of the second moment, or of Lion's momentum; adamw, muon, soap, schedule_free_adamw
    and lion."""
    eps: PositiveFloat = 1e-8
    """Added to the square root of the second moment; adamw, muon, soap and schedule_free_adamw."""
    groups: dict[ParameterKind, GroupConfig] = {}
    """Learning rate and weight decay by kind of layer (embedding, attention, mlp, experts, norms,
    head), such as {embedding: {learning_rate: 0.1, weight_decay: 0}}."""
    moments_dtype: Literal["bfloat16", "int8"] | None = None
    """Type of the moments in memory; null: that of the parameters. bfloat16 halves float32 moments,
    and int8, logarithms with one scale per row, quarters them; they are rounded stochastically."""
    clip_norm: PositiveFloat | None = 1.0
    """Maximum global gradient norm; null: no clipping."""
    ema_decay: Fraction | None = None
    """Decay of an exponential moving average of the parameters, which is evaluated in their place;
    null: none."""

    def warnings(self, param_dtype: str) -> Iterator[str]:
        """Yield a line if moments would not follow the gradients."""
        if self.moments_dtype is None and param_dtype == "bfloat16":
            yield (
                "moments in bfloat16 are rounded to the nearest value, so small changes of them "
                "are lost; set optimizer.moments_dtype=bfloat16, which rounds at random and takes "
                "the same memory"
            )

    def describe(self, param_dtype: str) -> str:
        """Return the optimizer, with parameters in `param_dtype`, as one line for a person."""
        options = ", ".join(f"{name} {value}" for name, value in self.options.items())
        return (
            f"optimizer {self.name}{options and f' ({options})'}, moments in "
            f"{self.moments_dtype or param_dtype}, learning rate up to "
            f"{self.learning_rate:g} ({self.schedule})"
        )
