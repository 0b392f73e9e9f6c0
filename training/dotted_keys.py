"""Nested mappings, such as configurations, as values by dotted keys."""

from typing import Any


def flatten(tree: Any, prefix: str = "") -> dict[str, Any]:
    """Return the values of a nested mapping by dotted keys.

    A mapping from numbers, such as a batch size by steps, is a value.
    """
    is_section = isinstance(tree, dict) and any(not isinstance(key, int) for key in tree)
    if not is_section:
        return {prefix.removesuffix("."): tree}
    parts = (flatten(value, f"{prefix}{key}.") for key, value in tree.items())
    return {key: value for part in parts for key, value in part.items()}


def as_yaml(value: Any) -> str:
    """Return a value as a user writes it in YAML."""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, str):
        return value or '""'
    if isinstance(value, list | tuple | set | frozenset):
        return f"[{', '.join(map(as_yaml, value))}]"
    if isinstance(value, dict):
        return f"{{{', '.join(f'{key}: {as_yaml(x)}' for key, x in value.items())}}}"
    return str(value)
