"""Rotary frequencies equal the papers' formulas."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from model.rope import (
    _RULES,
    RopeScaling,
    register_scaling,
    rope_frequencies,
)

# Llama-3.1-8B and -70B; Qwen2.5 for 128k tokens; linear as in LongChat.
LLAMA = RopeScaling(
    type="llama3",
    factor=8,
    low_freq_factor=1,
    high_freq_factor=4,
    original_max_position_embeddings=8192,
)
QWEN = RopeScaling(type="yarn", factor=4, original_max_position_embeddings=32768)
LINEAR = RopeScaling(type="linear", factor=8)
SHORT, LONG = (1.0, 1.1, 1.5, 2.0), (1.2, 2.0, 16.0, 60.0)
LONGROPE = RopeScaling(
    type="longrope",
    factor=32,
    original_max_position_embeddings=4096,
    short_factor=SHORT,
    long_factor=LONG,
)
FAMILIES = {
    "default": (64, 1e4, RopeScaling()),
    "linear": (128, 1e4, LINEAR),
    "llama3": (128, 5e5, LLAMA),
    "yarn": (128, 1e6, QWEN),
}


def plain(head_dim: int, theta: float) -> list[float]:
    return [1.0 / theta ** (2 * i / head_dim) for i in range(head_dim // 2)]


def llama3(head_dim: int, theta: float, factor, low, high, original) -> list[float]:
    """Meta's rule, by wavelength."""
    out = []
    for frequency in plain(head_dim, theta):
        wavelength = 2 * math.pi / frequency
        if wavelength < original / high:
            out.append(frequency)
        elif wavelength > original / low:
            out.append(frequency / factor)
        else:
            smooth = (original / wavelength - low) / (high - low)
            out.append((1 - smooth) * frequency / factor + smooth * frequency)
    return out


def yarn(head_dim: int, theta: float, factor, original, fast=32.0, slow=1.0) -> list[float]:
    """The ramp over dims between two numbers of rotations (paper, section 3.2)."""

    def dim(rotations: float) -> float:
        return head_dim * math.log(original / (rotations * 2 * math.pi)) / (2 * math.log(theta))

    low, high = max(math.floor(dim(fast)), 0), min(math.ceil(dim(slow)), head_dim - 1)
    out = []
    for i, frequency in enumerate(plain(head_dim, theta)):
        ramp = min(max((i - low) / (high - low), 0.0), 1.0)
        out.append(frequency / factor * ramp + frequency * (1 - ramp))
    return out


def yarn_scaling(factor, original, **betas) -> RopeScaling:
    return RopeScaling(
        type="yarn", factor=factor, original_max_position_embeddings=original, **betas
    )


@pytest.mark.parametrize(
    ("head_dim", "theta", "scaling", "expected"),
    [
        (64, 1e4, None, plain(64, 1e4)),
        (64, 1e4, RopeScaling(), plain(64, 1e4)),
        (128, 1e4, LINEAR, [f / 8 for f in plain(128, 1e4)]),
        (128, 5e5, LLAMA, llama3(128, 5e5, 8, 1, 4, 8192)),
        (128, 1e6, QWEN, yarn(128, 1e6, 4, 32768)),
        (128, 1e6, yarn_scaling(1, 64), plain(128, 1e6)),
        (32, 1e4, yarn_scaling(16, 256, beta_fast=8, beta_slow=2), yarn(32, 1e4, 16, 256, 8, 2)),
        # A ramp that ends past the last pair (1 to 5 of 4 pairs) is clipped, not compressed.
        (
            8,
            1e4,
            yarn_scaling(4, 18730, beta_fast=100, beta_slow=0.1),
            yarn(8, 1e4, 4, 18730, 100, 0.1),
        ),
        # Kimi-K2: both ends of the ramp are at one rotation, rounded down and up.
        (64, 1e4, yarn_scaling(4, 4096, beta_fast=1, beta_slow=1), yarn(64, 1e4, 4, 4096, 1, 1)),
        # At most one rotation over the original length: a ramp without width is a step.
        (32, 1e4, yarn_scaling(4, 4), [f / (4 if i else 1) for i, f in enumerate(plain(32, 1e4))]),
    ],
)
def test_frequencies_equal_the_formulas_of_the_papers(head_dim, theta, scaling, expected) -> None:
    frequency_h = rope_frequencies(head_dim, theta, scaling)[0]
    np.testing.assert_allclose(frequency_h, expected, rtol=1e-13)


def test_llama_3_1_keeps_29_frequencies_and_divides_29_in_full() -> None:
    # Of 64 wavelengths 2 pi 500000 ** (i / 64): 0 .. 28 are below 2048, 35 .. 63 above 8192.
    ratio = rope_frequencies(128, 5e5, LLAMA)[0] / rope_frequencies(128, 5e5)[0]
    assert (ratio[:29] == 1).all() and (ratio[35:] == 1 / 8).all()
    assert ((1 / 8 < ratio[29:35]) & (ratio[29:35] < 1)).all()
    assert (np.diff(ratio) <= 0).all()


def test_qwen_with_yarn_ramps_from_pair_23_to_40() -> None:
    # 64 ln(32768 / 64 pi) / ln(1e6) = 23.6 and 64 ln(32768 / 2 pi) / ln(1e6) = 39.7.
    frequency_h, factor = rope_frequencies(128, 1e6, QWEN)
    ratio = frequency_h / rope_frequencies(128, 1e6)[0]
    assert (ratio[:24] == 1).all() and (ratio[40:] == 1 / 4).all()
    np.testing.assert_allclose(np.diff(ratio[23:41]), -0.75 / 17)
    assert factor == 0.1 * math.log(4) + 1 == pytest.approx(1.1386294361119891)


def test_only_yarn_has_an_attention_factor_and_it_can_be_set() -> None:
    for name, (head_dim, theta, scaling) in FAMILIES.items():
        assert (rope_frequencies(head_dim, theta, scaling)[1] == 1.0) == (name != "yarn")
    given_factor = QWEN.model_copy(update={"attention_factor": 0.75})
    assert rope_frequencies(128, 1e6, given_factor)[1] == 0.75
    assert rope_frequencies(128, 1e6, yarn_scaling(1, 64))[1] == 1.0


def test_yarn_without_truncation_ramps_between_fractions_of_pairs() -> None:
    """As in gpt-oss, of 32 pairs between 32 ln(4096 / 64 pi) / ln(150000) = 8.1 and 17.4."""
    scaling = yarn_scaling(32, 4096, truncate=False)
    ratio = rope_frequencies(64, 150000.0, scaling)[0] / rope_frequencies(64, 150000.0)[0]
    ends = [32 * math.log(4096 / (n * 2 * math.pi)) / math.log(150000.0) for n in (32, 1)]
    assert 8 < ends[0] < 9 and 17 < ends[1] < 18
    for i, found in enumerate(ratio):
        ramp = min(max((i - ends[0]) / (ends[1] - ends[0]), 0), 1)
        assert found == pytest.approx(1 - ramp + ramp / 32, rel=1e-12)


def test_mscale_divides_two_attention_factors() -> None:
    """DeepSeek-V2: (0.1 m ln f + 1) / (0.1 a ln f + 1)."""
    scaling = yarn_scaling(40, 4096, mscale=0.707, mscale_all_dim=1.0)
    want = (0.0707 * math.log(40) + 1) / (0.1 * math.log(40) + 1)
    assert rope_frequencies(64, 1e4, scaling)[1] == pytest.approx(want, rel=1e-15)
    equal = yarn_scaling(40, 4096, mscale=1.0, mscale_all_dim=1.0)
    assert rope_frequencies(64, 1e4, equal)[1] == 1.0


@pytest.mark.parametrize(
    ("row_length", "chosen"), [(None, SHORT), (4096, SHORT), (4097, LONG), (131072, LONG)]
)
def test_longrope_divides_by_the_list_for_the_length_of_the_rows(row_length, chosen) -> None:
    scaling = LONGROPE.model_copy(update={"row_length": row_length})
    frequency_h, factor = rope_frequencies(8, 1e4, scaling)
    np.testing.assert_allclose(frequency_h, np.array(plain(8, 1e4)) / chosen, rtol=1e-14)
    assert factor == pytest.approx(math.sqrt(1 + math.log(32) / math.log(4096)), rel=1e-15)
    with pytest.raises(ValueError, match="short_factor has 4 numbers for 8 frequencies; give one"):
        rope_frequencies(16, 1e4, scaling)


@settings(max_examples=50, deadline=None)
@given(
    half=st.integers(1, 64),
    theta=st.floats(10, 1e7),
    factor=st.floats(1, 64),
    original=st.integers(1, 2**20),
)
def test_scaled_frequencies_lie_between_unscaled_and_divided_ones(
    half, theta, factor, original
) -> None:
    unscaled = rope_frequencies(2 * half, theta)[0]
    for scaling in (
        LLAMA.model_copy(update={"factor": factor, "original_max_position_embeddings": original}),
        QWEN.model_copy(update={"factor": factor, "original_max_position_embeddings": original}),
    ):
        ratio = rope_frequencies(2 * half, theta, scaling)[0] / unscaled
        assert (ratio <= 1 + 1e-12).all() and (ratio >= (1 - 1e-12) / factor).all()
        assert (np.diff(ratio) <= 1e-12).all()


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (
            {"type": "linear"},
            r"rope_scaling\.type=linear needs rope_scaling\.factor; set it, or use type def",
        ),
        (
            {"type": "llama3", "factor": 8, "low_freq_factor": 1, "high_freq_factor": 4},
            r"rope_scaling\.type=llama3 needs rope_scaling\.original_max_position_embeddings",
        ),
        (
            {"type": "llama3", "factor": 8, "original_max_position_embeddings": 8192},
            r"rope_scaling\.type=llama3 needs rope_scaling\.low_freq_factor",
        ),
        (
            {"type": "yarn", "factor": 4},
            r"type=yarn needs rope_scaling\.original_max_position_embeddings",
        ),
        (
            {"type": "linear", "factor": 0.5},
            r"factor=0.5 would shorten the context; use at least 1",
        ),
        ({"factor": 8}, r"factor=8.0 has no effect with type default; .*use type linear or llama3"),
        (
            {"type": "linear", "factor": 2, "beta_fast": 16},
            r"rope_scaling.beta_fast=16.0 has no effect with type linear; remove it, or use type y",
        ),
        (
            {"type": "linear", "factor": 2, "attention_factor": 1.0},
            r"attention_factor=1.0 has no effect with type linear",
        ),
        (
            {**LLAMA.model_dump(), "low_freq_factor": 4.0},
            r"low_freq_factor=4.0 must be less than high_freq_factor=4.0; lower low_freq_factor",
        ),
        ({**QWEN.model_dump(), "beta_slow": 64.0}, r"beta_slow=64.0 must be less than beta_fast"),
        (
            {"type": "dynamic"},
            r"unknown rope scaling type 'dynamic'; use one of default, linear, llama3, yarn, lon",
        ),
        (
            {**QWEN.model_dump(), "mscale": 1.0},
            r"rope_scaling.mscale=1.0 is not supported without mscale_all_dim; set both, or rem",
        ),
        (
            {**QWEN.model_dump(), "mscale": 1.0, "mscale_all_dim": 1.0, "attention_factor": 2.0},
            r"rope_scaling.mscale=1.0 has no effect with attention_factor=2.0; remove one",
        ),
        (
            {**LLAMA.model_dump(), "truncate": False},
            r"rope_scaling.truncate=False has no effect with type llama3; .*or use type yarn",
        ),
        (
            {**LONGROPE.model_dump(), "short_factor": None},
            r"rope_scaling\.type=longrope needs rope_scaling\.short_factor",
        ),
        ({"rope_type": "yarn"}, r"Extra inputs are not permitted"),
        ({"type": "linear", "factor": math.inf}, r"finite number"),
    ],
)
def test_invalid_scaling_is_refused(fields, message: str) -> None:
    with pytest.raises(ValidationError, match=message) as refusal:
        RopeScaling(**fields)
    assert all("\n" not in item["msg"] for item in refusal.value.errors())


@pytest.mark.parametrize("family", FAMILIES)
def test_scaling_round_trips_through_its_dump(family: str) -> None:
    scaling = FAMILIES[family][2]
    assert RopeScaling.model_validate(scaling.model_dump(), strict=True) == scaling
    assert hash(scaling) == hash(RopeScaling(**scaling.model_dump()))


def test_odd_heads_and_wrong_bases_are_refused() -> None:
    for head_dim in (0, 7):
        with pytest.raises(ValueError, match=rf"head_dim={head_dim}: rope rotates pairs"):
            rope_frequencies(head_dim, 1e4)
    for theta in (1.0, math.inf, math.nan):
        with pytest.raises(ValueError, match=r"rope_theta=.*use more than 1"):
            rope_frequencies(8, theta)


def test_a_rule_is_registered_by_name() -> None:
    @register_scaling("halved", required=("factor",))
    def halved(frequency_h, theta, scaling):
        return frequency_h / 2, scaling.factor

    try:
        scaling = RopeScaling(type="halved", factor=3)
        frequency_h, factor = rope_frequencies(8, 1e4, scaling)
        np.testing.assert_array_equal(frequency_h, rope_frequencies(8, 1e4)[0] / 2)
        assert factor == 3
    finally:
        del _RULES["halved"]
