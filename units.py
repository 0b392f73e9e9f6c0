"""Sizes and times as people read them."""


def format_bytes(num_bytes: float) -> str:
    """Return a size with three digits and a binary unit, such as `1.21 GiB`."""
    for unit in ("bytes", "KiB", "MiB", "GiB", "TiB"):
        if num_bytes < 999.5:
            return f"{num_bytes:.3g} {unit}"
        num_bytes /= 1024
    return f"{num_bytes:.3g} PiB"


def milliseconds(seconds: float) -> str:
    """Return the milliseconds with three digits, or without a fraction from 100 on."""
    found = seconds * 1e3
    return f"{found:,.0f}" if found >= 99.5 else f"{found:.3g}"
