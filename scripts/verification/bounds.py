"""Rounding bounds: how far the loss and the gradients of a mesh may be from those of one device.

A mesh adds the same numbers in another order. A sum of n terms in floating point with unit roundoff
u is the exact sum of terms that are each changed by a relative error. That error is at most n u,
and about sqrt(n) u if roundings are independent (Higham and Mary, "A New Approach to Probabilistic
Rounding Error Analysis", SIAM J. Sci. Comput. 41(5), 2019). So every activation of a mesh differs
from that of one device by about sqrt(n) u times its own size, from each of the two runs:

    bound = 2 * sqrt(n) * u * M

M is the change of a result if every activation changes by its own size, to first order. It is
measured: a bfloat16 step on one device rounds every activation by u_16 = 2^-8 of its size, and a
float32 step is exact beside it. With the rounding of the result itself,

    M = |result| + |bfloat16 result - float32 result| / u_16

The measurement covers every kind of layer, cancellation in it, and amplification by later layers.
The two constants depend on the dtype:

- float32: u = 2^-24, and n is the longest sum that a mesh divides: over features, vocabulary or
  tokens.
- bfloat16: u = 2^-8, and n is the number of devices: sums within a device are in float32, and only
  partial sums of devices are added as bfloat16.

Gradients are compared twice, each with an M of its own: by their norm and by their largest entry.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np

from configs.schema import Config
from model.config import DTypeName
from verification.cases import DEVICES
from verification.steps import StepResult

INF = math.inf
ROUNDOFF: dict[DTypeName, float] = {"float32": 2.0**-24, "bfloat16": 2.0**-8}
NORMS: tuple[Callable[[np.ndarray], float], ...] = (
    lambda x: float(np.linalg.norm(x)),
    lambda x: float(np.abs(x).max()),
)


@dataclass(frozen=True)
class Comparison:
    """Errors of a step against one device; relative, each beside its bound.

    The gradient is that of the parameter with the largest error relative to its bound; norm and
    largest entry are those of its error, relative to those of its reference.
    """

    loss_error: float
    loss_bound: float
    parameter: str
    norm_error: float
    norm_bound: float
    entry_error: float
    entry_bound: float
    moved_tokens: int
    """Tokens of experts that differ: a rounding must not move any."""
    ratio: float
    """The largest error relative to its bound, of the loss and all gradients."""
    problem: str = ""
    """The error with which the step ended, if it did not run."""

    @property
    def is_within(self) -> bool:
        """Whether the step ran, and all errors are within their bounds."""
        return self.ratio <= 1 and not self.moved_tokens and not self.problem


def failure(error: Exception) -> Comparison:
    """Return the comparison of a step that could not run."""
    text = f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"
    return Comparison(INF, INF, "", INF, INF, INF, INF, 0, INF, text)


def longest_sum(config: Config) -> int:
    """Return the number of terms of the longest sum that a mesh divides."""
    model, data = config.model, config.data
    return max(
        model.hidden_size,
        model.num_attention_heads * max(model.head_size, model.value_size),
        model.intermediate_size,
        model.expert_size,
        model.padded_vocab_size,
        data.batch_sizes[0] * data.row_length,
    )


def check_finite(step: StepResult, name: str) -> None:
    """Check that a step can be a reference.

    Raises:
        ValueError: Its loss or a gradient is not finite.
    """
    values = {"loss": np.array(step.loss)}
    values |= {f"gradient of {key}": value for key, value in step.gradients.items()}
    for what, value in values.items():
        if not np.isfinite(value).all():
            raise ValueError(
                f"{name}: the {what} is not finite, so no mesh can be compared with it; look for "
                "the cause in the model on one device"
            )


def compare(
    result: StepResult,
    dtype: DTypeName,
    references: Mapping[DTypeName, StepResult],
    config: Config,
) -> Comparison:
    """Compare a step with that of one device in the same dtype.

    references: Steps of one device. Where one is not finite, the ratio is infinite.
    """
    terms = DEVICES if dtype == "bfloat16" else longest_sum(config)
    factor = 2 * math.sqrt(terms) * ROUNDOFF[dtype]
    exact, rough, wanted = references["float32"], references["bfloat16"], references[dtype]

    def measure(
        size: Callable[[np.ndarray], float], x: np.ndarray, *others: np.ndarray
    ) -> tuple[float, float]:
        """Return error and bound, relative to the reference."""
        want, fine, coarse = others
        magnitude = size(fine) + size(coarse - fine) / ROUNDOFF["bfloat16"]
        scale = size(want) or 1.0
        error = size(x - want) / scale
        return (error if math.isfinite(error) else INF), factor * magnitude / scale

    def ratio_of(pair: tuple[float, float]) -> float:
        error, bound = pair
        if not (math.isfinite(error) and math.isfinite(bound)):
            return INF
        return error / bound if bound else (INF if error else 0.0)

    losses = (np.array([run.loss]) for run in (result, wanted, exact, rough))
    loss = measure(NORMS[1], *losses)
    worst, parameter, pairs = -1.0, "", ((0.0, 0.0), (0.0, 0.0))
    for name in wanted.gradients:
        runs = [run.gradients[name] for run in (result, wanted, exact, rough)]
        norm, entry = (measure(size, *runs) for size in NORMS)
        if (ratio := max(ratio_of(norm), ratio_of(entry))) > worst:
            worst, parameter, pairs = ratio, name, (norm, entry)
    moved = np.abs(result.load_NE - wanted.load_NE).sum() / 2
    return Comparison(
        *loss, parameter, *pairs[0], *pairs[1], math.ceil(moved), max(worst, ratio_of(loss))
    )
