"""A registry: names from the configuration to the things that they choose."""

from collections.abc import Callable
from typing import Generic, TypeVar

T = TypeVar("T")


class Registry(Generic[T]):
    """Entries by name, filled when modules are imported.

    Args:
        kind: what an entry is, for messages.
        key: the configuration key that holds a name.
    """

    def __init__(self, kind: str, key: str):
        self._kind, self._key = kind, key
        self._entries: dict[str, T] = {}

    def add(self, name: str, entry: T) -> T:
        """Add an entry and return it. Raises: ValueError if the name is taken."""
        if name in self._entries:
            raise ValueError(f"{self._kind} {name!r} is registered twice")
        self._entries[name] = entry
        return entry

    def register(self, name: str) -> Callable[[T], T]:
        """Return a decorator that adds what it decorates."""
        return lambda entry: self.add(name, entry)

    def names(self) -> list[str]:
        """Return all names in order."""
        return sorted(self._entries)

    def get(self, name: str) -> T:
        """Return an entry. Raises: ValueError with the known names."""
        if name not in self._entries:
            raise ValueError(f"{self._key}={name!r} is unknown; use {', '.join(self.names())}")
        return self._entries[name]
