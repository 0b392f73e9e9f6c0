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


def format_duration(seconds: float) -> str:
    """Return seconds as text, such as 3.4 s, 1 min 26 s or 1 h 02 min."""
    if seconds < 9.95:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest} s" if minutes else f"{rest} s"
    return f"{minutes // 60:,} h {minutes % 60:02d} min"


def milliseconds(seconds: float) -> str:
    """Return seconds as milliseconds, with `three_digits`."""
    return three_digits(seconds * 1e3)
