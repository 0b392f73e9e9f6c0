"""Sizes and times as commands and logs print them."""

import pytest

from units import format_bytes, milliseconds


@pytest.mark.parametrize(
    ("num_bytes", "text"),
    [
        (0, "0 bytes"),
        (28, "28 bytes"),
        (999, "999 bytes"),
        (1000, "0.977 KiB"),
        (1536, "1.5 KiB"),
        (1023 * 1024, "0.999 MiB"),
        (2**30, "1 GiB"),
        (1234 * 2**30, "1.21 TiB"),
        (2**50, "1 PiB"),
    ],
)
def test_a_size_has_three_digits_and_a_binary_unit(num_bytes: int, text: str) -> None:
    assert format_bytes(num_bytes) == text


@pytest.mark.parametrize(
    ("seconds", "text"), [(0.0004, "0.4"), (0.01234, "12.3"), (0.0996, "100"), (2.2944, "2,294")]
)
def test_milliseconds_keep_three_digits(seconds: float, text: str) -> None:
    assert milliseconds(seconds) == text
