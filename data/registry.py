"""Registries of named extension points: text formats, tokenizers and chat templates."""

from typing import Generic, TypeVar

Entry = TypeVar("Entry")


class Registry(Generic[Entry]):
    """Entries by name, filled while modules are imported.

    kind: what an entry is, for error messages.
    """

    def __init__(self, kind: str):
        self.kind = kind
        self._entries: dict[str, Entry] = {}

    def register(self, name: str, entry: Entry) -> None:
        """Add an entry. Raises: ValueError when the name is taken."""
        if name in self._entries:
            raise ValueError(f"{self.kind} {name!r} is already registered; use another name")
        self._entries[name] = entry

    def get(self, name: str) -> Entry:
        """Return the entry of a name. Raises: ValueError that lists the registered names."""
        if name not in self._entries:
            raise ValueError(f"unknown {self.kind} {name!r}; use one of {', '.join(self.names())}")
        return self._entries[name]

    def names(self) -> tuple[str, ...]:
        """Return the registered names in alphabetical order."""
        return tuple(sorted(self._entries))

    def __contains__(self, name: object) -> bool:
        return name in self._entries
