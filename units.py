"""Sizes and times as people read them."""


def format_bytes(num_bytes: float) -> str:
    """Return a size with three digits and a binary unit, such as `1.21 GiB`."""
    for unit in ("bytes", "KiB", "MiB", "GiB", "TiB"):
        if num_bytes < 999.5:
            return f"{num_bytes:.3g} {unit}"
        num_bytes /= 1024
    return f"{num_bytes:.3g} PiB"


def three_digits(value: float) -> str:
    """Return a number with three digits, or without a fraction from 100 on."""
    return f"{value:,.0f}" if value >= 99.5 else f"{value:.3g}"


def milliseconds(seconds: float) -> str:
    """Return seconds as milliseconds, with `three_digits`."""
    return three_digits(seconds * 1e3)
