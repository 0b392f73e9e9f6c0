"""Rotary position embeddings (RoPE) and the scaling rules that extend a model's context.

Frequencies are computed once, in numpy float64. Without scaling they are those of RoFormer (arXiv
2104.09864). To add a scaling rule, decorate a function with `register_scaling`.

Letters: B batch, L length, H heads, h head dim. frequency_h has h / 2 entries, one per pair.
"""

import math
from collections.abc import Callable
from typing import Annotated, NamedTuple, Self

import numpy as np
from pydantic import (
    BaseModel,
    BeforeValidator,
    PositiveFloat,
    PositiveInt,
    field_validator,
    model_validator,
)

from registry import Registry

Rescaled = tuple[np.ndarray, float]
"""Rescaled frequency_h, and the attention factor on rotated queries and keys."""
Rescale = Callable[[np.ndarray, float, "RopeScaling"], Rescaled]
"""A scaling rule: (frequency_h, theta, scaling) -> rescaled."""


class _Rule(NamedTuple):
    rescale: Rescale
    required: tuple[str, ...]
    optional: tuple[str, ...]
    increasing: tuple[str, str] | None


_RULES: Registry[_Rule] = Registry("rope scaling type")


def register_scaling(
    name: str,
    *,
    required: tuple[str, ...] = (),
    optional: tuple[str, ...] = (),
    increasing: tuple[str, str] | None = None,
) -> Callable[[Rescale], Rescale]:
    """Return a decorator that registers a function as the rule `model.rope_scaling.type=name`.

    required, optional: the fields of `RopeScaling` that the rule reads. increasing: two fields of
    which the first must be less than the second. Raises: ValueError if the name is taken.
    """

    def register(rescale: Rescale) -> Rescale:
        _RULES[name] = _Rule(rescale, required, optional, increasing)
        return rescale

    return register


Factors = Annotated[
    tuple[PositiveFloat, ...] | None,
    BeforeValidator(lambda value: tuple(value) if isinstance(value, list) else value),
]
"""One positive number per frequency; a list is converted to a tuple, which is hashable."""


class RopeScaling(
    BaseModel, frozen=True, extra="forbid", use_attribute_docstrings=True, allow_inf_nan=False
):
    """Scaling of rotary frequencies; field names and defaults are those of Hugging Face."""

    type: str = "default"
    """Scaling rule. default: none; linear: all frequencies divided by factor; llama3: only low
    frequencies, as in Llama 3.1; yarn: as in YaRN; longrope: each frequency divided by a factor of
    its own, as in LongRoPE (Phi-3)."""
    factor: PositiveFloat | None = None
    """Ratio of the new context length to the original one, at least 1; every type but default."""
    original_max_position_embeddings: PositiveInt | None = None
    """Context length before scaling, in tokens; llama3, yarn and longrope."""
    low_freq_factor: PositiveFloat | None = None
    """llama3: pairs with fewer rotations over the original length are divided by factor."""
    high_freq_factor: PositiveFloat | None = None
    """llama3: pairs with more rotations over the original length are not changed."""
    beta_fast: PositiveFloat = 32.0
    """yarn: pairs with more rotations over the original length are not changed."""
    beta_slow: PositiveFloat = 1.0
    """yarn: pairs with fewer rotations over the original length are divided by factor."""
    truncate: bool = True
    """yarn: round the ends of the ramp between beta_fast and beta_slow outwards to whole pairs."""
    mscale: PositiveFloat | None = None
    """yarn: with mscale_all_dim, the attention factor is (0.1 mscale ln(factor) + 1) /
    (0.1 mscale_all_dim ln(factor) + 1)."""
    mscale_all_dim: PositiveFloat | None = None
    """yarn: see mscale. With model.mla it also multiplies attention scores by
    (0.1 mscale_all_dim ln(factor) + 1) squared."""
    short_factor: Factors = None
    """longrope: divisor of each frequency for rows up to original_max_position_embeddings."""
    long_factor: Factors = None
    """longrope: divisor of each frequency for longer rows."""
    row_length: PositiveInt | None = None
    """longrope: tokens per row for which the model is used, which decides between long_factor and
    short_factor; null: at most original_max_position_embeddings."""
    attention_factor: PositiveFloat | None = None
    """Multiplier on rotated queries and keys; null: 0.1 ln(factor) + 1 for yarn,
    sqrt(1 + ln(factor) / ln(original_max_position_embeddings)) for longrope."""

    @field_validator("type")
    @classmethod
    def _is_registered(cls, name: str) -> str:
        _RULES[name]
        return name

    @model_validator(mode="after")
    def _check_fields(self) -> Self:
        rule = _RULES[self.type]
        read = rule.required + rule.optional
        for name, info in type(self).model_fields.items():
            value = getattr(self, name)
            if name not in ("type", *read) and value != info.default:
                readers = [k for k, r in _RULES.items() if name in r.required + r.optional]
                raise ValueError(
                    f"rope_scaling.{name}={value} has no effect with type {self.type}; remove it, "
                    f"or use type {' or '.join(readers)}"
                )
            if name in rule.required and value is None:
                raise ValueError(
                    f"rope_scaling.type={self.type} needs rope_scaling.{name}; set it, or use type "
                    "default"
                )
        if self.factor is not None and self.factor < 1:
            raise ValueError(
                f"rope_scaling.factor={self.factor} would shorten the context; use at least 1"
            )
        if rule.increasing is not None:
            low, high = rule.increasing
            # A ramp of yarn may have no width, as that of Kimi-K2.
            is_step = self.type == "yarn" and getattr(self, low) == getattr(self, high)
            if getattr(self, low) >= getattr(self, high) and not is_step:
                raise ValueError(
                    f"rope_scaling.{low}={getattr(self, low)} must be less than "
                    f"{high}={getattr(self, high)}; lower {low} or raise {high}"
                )
        if (self.mscale is None) != (self.mscale_all_dim is None):
            names = ("mscale", "mscale_all_dim")
            given, other = names if self.mscale_all_dim is None else reversed(names)
            raise ValueError(
                f"rope_scaling.{given}={getattr(self, given)} is not supported without {other}; "
                "set both, or remove it"
            )
        if self.mscale is not None and self.attention_factor is not None:
            raise ValueError(
                f"rope_scaling.mscale={self.mscale} has no effect with attention_factor="
                f"{self.attention_factor}; remove one of them"
            )
        return self

    @property
    def score_factor(self) -> float:
        """Factor of `mscale_all_dim` on the scores of latent attention (DeepSeek-V2); else 1."""
        if self.mscale_all_dim is None or self.factor is None:
            return 1.0
        return (0.1 * self.mscale_all_dim * math.log(self.factor) + 1.0) ** 2


def rope_frequencies(head_dim: int, theta: float, scaling: RopeScaling | None = None) -> Rescaled:
    """Return the radians per position of every pair (float64, `h / 2`) and the attention factor.

    The attention factor multiplies rotated queries and keys. Unscaled frequencies are
    theta ** (-2 i / h).
    Raises: ValueError if head_dim is odd, or theta is not above 1.
    """
    if head_dim < 2 or head_dim % 2:
        raise ValueError(f"head_dim={head_dim}: rope rotates pairs; use an even head_dim")
    if not 1 < theta < math.inf:
        raise ValueError(f"rope_theta={theta}: wavelengths must grow with it; use more than 1")
    frequency_h = float(theta) ** -(np.arange(head_dim // 2, dtype=np.float64) * 2 / head_dim)
    scaling = scaling or RopeScaling()
    return _RULES[scaling.type].rescale(frequency_h, theta, scaling)


@register_scaling("default")
def _unscaled(frequency_h: np.ndarray, theta: float, scaling: RopeScaling) -> Rescaled:
    """Return the frequencies as they are."""
    return frequency_h, 1.0


@register_scaling("linear", required=("factor",))
def _linear(frequency_h: np.ndarray, theta: float, scaling: RopeScaling) -> Rescaled:
    """Divide every frequency by `factor`. Source: position interpolation, arXiv 2306.15595."""
    assert scaling.factor is not None
    return frequency_h / scaling.factor, 1.0


@register_scaling(
    "llama3",
    required=("factor", "original_max_position_embeddings", "low_freq_factor", "high_freq_factor"),
    increasing=("low_freq_factor", "high_freq_factor"),
)
def _llama3(frequency_h: np.ndarray, theta: float, scaling: RopeScaling) -> Rescaled:
    """Divide frequencies by `factor` where a pair rotates rarely over the original length.

    Pairs below `low_freq_factor` rotations are divided in full, pairs above `high_freq_factor` not
    at all, and a linear ramp in the number of rotations lies in between. Source: the code released
    with Llama 3.1.
    """
    original = scaling.original_max_position_embeddings
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    assert original and low and high and scaling.factor
    rotations_h = original * frequency_h / (2 * np.pi)
    kept_h = np.clip((rotations_h - low) / (high - low), 0.0, 1.0)
    return frequency_h * (kept_h + (1 - kept_h) / scaling.factor), 1.0


@register_scaling(
    "yarn",
    required=("factor", "original_max_position_embeddings"),
    optional=(
        *("beta_fast", "beta_slow", "truncate"),
        *("attention_factor", "mscale", "mscale_all_dim"),
    ),
    increasing=("beta_slow", "beta_fast"),
)
def _yarn(frequency_h: np.ndarray, theta: float, scaling: RopeScaling) -> Rescaled:
    """Divide frequencies by `factor` along a linear ramp over pairs. Source: arXiv 2309.00071.

    The ramp runs between the pairs that make beta_fast and beta_slow rotations over the original
    length. Its ends are rounded outwards (unless `truncate` is false) and kept within the head as
    Hugging Face does, so that released weights fit.
    """
    original = scaling.original_max_position_embeddings
    assert original and scaling.factor
    half = len(frequency_h)

    def pair(rotations: float) -> float:
        return half * math.log(original / (rotations * 2 * math.pi)) / math.log(theta)

    first, last = pair(scaling.beta_fast), pair(scaling.beta_slow)
    if scaling.truncate:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, 2 * half - 1)
    # A ramp of no width becomes a step; the small width avoids a division by zero.
    width = max(last - first, 1e-3)
    ramp_h = np.clip((np.arange(half) - first) / width, 0.0, 1.0)
    growth = 0.1 * math.log(scaling.factor)
    factor = scaling.attention_factor or growth + 1.0
    if scaling.mscale is not None and scaling.mscale_all_dim is not None:
        factor = (growth * scaling.mscale + 1.0) / (growth * scaling.mscale_all_dim + 1.0)
    return frequency_h * (1 - ramp_h + ramp_h / scaling.factor), factor


@register_scaling(
    "longrope",
    required=("factor", "original_max_position_embeddings", "short_factor", "long_factor"),
    optional=("row_length", "attention_factor"),
)
def _longrope(frequency_h: np.ndarray, theta: float, scaling: RopeScaling) -> Rescaled:
    """Divide each frequency by a number of its own. Source: arXiv 2402.13753, section 3.3.

    There is one list of numbers for rows up to the original length and one for longer rows.
    Raises: ValueError unless both lists have one number per frequency.
    """
    original = scaling.original_max_position_embeddings
    assert original and scaling.factor and scaling.short_factor and scaling.long_factor
    if original < 2:
        raise ValueError("original_max_position_embeddings=1 has no logarithm; use at least 2")
    for name in ("short_factor", "long_factor"):
        if (count := len(getattr(scaling, name))) != len(frequency_h):
            raise ValueError(
                f"{name} has {count} numbers for {len(frequency_h)} frequencies; give one each"
            )
    is_long = (scaling.row_length or 0) > original
    divisor_h = np.asarray(scaling.long_factor if is_long else scaling.short_factor, np.float64)
    factor = scaling.attention_factor
    if factor is None:
        factor = math.sqrt(1 + math.log(scaling.factor) / math.log(original))
    return frequency_h / divisor_h, factor
