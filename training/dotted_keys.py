"""Nested mappings, such as configurations, as values by dotted keys."""

from typing import Any


def flatten(tree: Any, prefix: str = "") -> dict[str, Any]:
    """Return the values of a nested mapping by dotted keys."""
    if not isinstance(tree, dict) or not tree:
        return {prefix.removesuffix("."): tree}
    parts = (flatten(value, f"{prefix}{key}.") for key, value in tree.items())
    return {key: value for part in parts for key, value in part.items()}
