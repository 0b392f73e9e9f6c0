"""Sizes as people read them: binary units, as in the memory figures of jax and the planner."""


def format_bytes(num_bytes: float) -> str:
    """Return a size with three digits and a binary unit, such as `1.21 GiB`."""
    for unit in ("bytes", "KiB", "MiB", "GiB", "TiB"):
        if num_bytes < 999.5:
            return f"{num_bytes:.3g} {unit}"
        num_bytes /= 1024
    return f"{num_bytes:.3g} PiB"
