"""Registry of named extension points, such as optimizers; every package may import it."""

import difflib
from collections.abc import Callable
from typing import TypeVar

Entry = TypeVar("Entry")


class Registry(dict[str, Entry]):
    """Entries by name, in the order of registration; filled while modules are imported.

    `registry[name] = entry` raises a ValueError for a name that is taken, and `registry[name]` one
    that lists the names for an unknown name.

    Args:
        kind: what an entry is, for error messages.
    """

    def __init__(self, kind: str):
        super().__init__()
        self.kind = kind

    def __setitem__(self, name: str, entry: Entry) -> None:
        if name in self:
            raise ValueError(f"{self.kind} {name!r} is registered twice; use another name")
        super().__setitem__(name, entry)

    def __missing__(self, name: str) -> Entry:
        near = difflib.get_close_matches(name, self, n=1, cutoff=0.7)
        hint = f"; did you mean {near[0]}?" if near else ""
        raise ValueError(f"unknown {self.kind} {name!r}; use one of {', '.join(self)}{hint}")

    def register(self, name: str) -> Callable[[Entry], Entry]:
        """Return a decorator that adds what it decorates."""

        def add(entry: Entry) -> Entry:
            self[name] = entry
            return entry

        return add
