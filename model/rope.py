"""Rotary positions: the wavelengths of a head's pairs, and the turn of queries and keys by them.

`RopeScaling` says how a model reads longer texts than it was first trained on; the frequencies that
follow from it are numbers, computed once in numpy float64. Without scaling this is RoFormer (arXiv
2104.09864). Nothing here knows a mesh or holds a parameter. Letters: B batch, L length, H heads,
h head dim (frequency_h has h / 2 entries, one per pair).
"""

import math
from typing import Any, Literal, Self

import jax
import jax.numpy as jnp
import numpy as np
from pydantic import BaseModel, PositiveFloat, PositiveInt, model_validator

RopeType = Literal["default", "linear", "llama3", "yarn"]


# The fields that a type reads; all but attention_factor must be given.
_READ: dict[RopeType, tuple[str, ...]] = {
    "default": (),
    "linear": ("factor",),
    "llama3": (
        "factor",
        "original_max_position_embeddings",
        "low_freq_factor",
        "high_freq_factor",
    ),
    "yarn": (
        "factor",
        "original_max_position_embeddings",
        "beta_fast",
        "beta_slow",
        "attention_factor",
    ),
}


class RopeScaling(
    BaseModel, frozen=True, extra="forbid", use_attribute_docstrings=True, allow_inf_nan=False
):
    """How rotary wavelengths are stretched; names and defaults are those of Hugging Face."""

    type: RopeType = "default"
    """default: not at all; linear: all alike; llama3: the long ones; yarn: by turns in training."""
    factor: PositiveFloat | None = None
    """How many times longer texts become, at least 1; read by every type but default."""
    original_max_position_embeddings: PositiveInt | None = None
    """Length of the texts before the stretch; read by llama3 and yarn."""
    low_freq_factor: PositiveFloat | None = None
    """llama3: pairs that turn less often in the original length are stretched in full."""
    high_freq_factor: PositiveFloat | None = None
    """llama3: pairs that turn more often in the original length stay as they are."""
    beta_fast: PositiveFloat = 32.0
    """yarn: pairs that turn more often in the original length stay as they are."""
    beta_slow: PositiveFloat = 1.0
    """yarn: pairs that turn less often in the original length are stretched in full."""
    attention_factor: PositiveFloat | None = None
    """yarn: of rotated queries and keys; null: 0.1 ln(factor) + 1."""

    @model_validator(mode="after")
    def _complete(self) -> Self:
        read = _READ[self.type]
        for name, info in type(self).model_fields.items():
            value = getattr(self, name)
            if name not in ("type", *read) and value != info.default:
                raise ValueError(
                    f"rope_scaling.{name}={value} is not read by type {self.type}; leave it out, "
                    f"or use type {' or '.join(kind for kind in _READ if name in _READ[kind])}"
                )
            if name in read and value is None and name != "attention_factor":
                raise ValueError(
                    f"rope_scaling type {self.type} needs {name}; give it, or use type default"
                )
        if self.factor is not None and self.factor < 1:
            raise ValueError(
                f"rope_scaling.factor={self.factor} would shorten texts; use at least 1"
            )
        if self.type == "llama3":
            self._ordered("low_freq_factor", "high_freq_factor")
        if self.type == "yarn":
            self._ordered("beta_slow", "beta_fast")
        return self

    def _ordered(self, less: str, more: str) -> None:
        if getattr(self, less) >= getattr(self, more):
            raise ValueError(
                f"rope_scaling.{less}={getattr(self, less)} is not less than "
                f"{more}={getattr(self, more)}; slow pairs turn less often than fast ones"
            )


def rope_frequencies(
    head_dim: int, theta: float, scaling: RopeScaling | None = None
) -> tuple[np.ndarray, float]:
    """Radians per position of every pair (float64, `h / 2`), and the factor of rotated heads.

    Unscaled: theta ** (-2 i / h). linear: divided by `factor` (arXiv 2306.15595). llama3: as Meta
    released it with Llama 3.1: `_llama3`. yarn: arXiv 2309.00071: `_yarn`.
    Raises: ValueError for an odd head_dim, or a theta that is not above 1.
    """
    if head_dim < 2 or head_dim % 2:
        raise ValueError(f"head_dim={head_dim}: rope turns pairs; use an even width")
    if not 1 < theta < math.inf:
        raise ValueError(f"rope_theta={theta}: wavelengths must grow with it; use more than 1")
    frequency_h = float(theta) ** -(np.arange(head_dim // 2, dtype=np.float64) * 2 / head_dim)
    if scaling is None or scaling.type == "default":
        return frequency_h, 1.0
    assert scaling.factor is not None
    if scaling.type == "linear":
        return frequency_h / scaling.factor, 1.0
    if scaling.type == "llama3":
        return _llama3(frequency_h, scaling), 1.0
    own = 0.1 * math.log(scaling.factor) + 1.0
    factor = own if scaling.attention_factor is None else scaling.attention_factor
    return _yarn(frequency_h, theta, scaling), factor


def _llama3(frequency_h: np.ndarray, scaling: RopeScaling) -> np.ndarray:
    """Stretched in full below `low_freq_factor` turns, not at all above `high_freq_factor`.

    In between, a straight line in the number of turns that a pair makes in the original length.
    """
    original = scaling.original_max_position_embeddings
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    assert original and low and high and scaling.factor
    turns_h = original * frequency_h / (2 * np.pi)
    kept_h = np.clip((turns_h - low) / (high - low), 0.0, 1.0)
    return frequency_h * (kept_h + (1 - kept_h) / scaling.factor)


def _yarn(frequency_h: np.ndarray, theta: float, scaling: RopeScaling) -> np.ndarray:
    """Stretched in full from pair `last` on, not at all up to pair `first`, a line in between.

    These are the pairs that make beta_slow and beta_fast turns in the original length, rounded
    outwards and kept within the head as Hugging Face does, so that released weights fit.
    """
    original = scaling.original_max_position_embeddings
    assert original and scaling.factor
    half = len(frequency_h)

    def pair(turns: float) -> float:
        return half * math.log(original / (turns * 2 * math.pi)) / math.log(theta)

    first = max(math.floor(pair(scaling.beta_fast)), 0)
    last = min(math.ceil(pair(scaling.beta_slow)), 2 * half - 1)
    # One pair wide at least, in effect a step: there is nothing to divide by.
    width = max(last - first, 1e-3)
    stretched_h = np.clip((np.arange(half) - first) / width, 0.0, 1.0)
    return frequency_h * (1 - stretched_h + stretched_h / scaling.factor)


def rope(
    x_BLHh: jax.Array, positions_BL: jax.Array, frequency_h: Any, attention_factor: float = 1.0
) -> jax.Array:
    """Rotates the pairs (i, i + h/2) of every head by position * frequency, in float32.

    frequency_h, attention_factor: of `rope_frequencies`. The half-split pairing is that of the
    Hugging Face models. Raises: ValueError if the frequencies are not one per pair.
    """
    frequency_h = jnp.asarray(frequency_h, jnp.float32)
    if frequency_h.shape != (x_BLHh.shape[-1] / 2,):
        raise ValueError(
            f"{frequency_h.shape} frequencies for heads of {x_BLHh.shape[-1]}: give one per pair, "
            "as rope_frequencies(head_dim, ...) does"
        )
    angle_BLh = positions_BL[..., None].astype(jnp.float32) * frequency_h
    cos, sin = jnp.cos(angle_BLh)[:, :, None], jnp.sin(angle_BLh)[:, :, None]
    if attention_factor != 1.0:
        cos, sin = cos * attention_factor, sin * attention_factor
    first, second = jnp.split(x_BLHh.astype(jnp.float32), 2, axis=-1)
    rotated = jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
    return rotated.astype(x_BLHh.dtype)
