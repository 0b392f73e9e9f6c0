"""Filters: which documents are left out of a store when it is prepared.

`prepare_data.py --filter NAME:ARGUMENT` names them. A new filter is one function with
`@register_filter`, in a module of the configuration's `plugins`.
"""

import hashlib
import importlib
import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import numpy as np

from data.files import DataError
from data.formats.base import Document
from data.store import LEFT_OUT
from registry import Registry

Keep = Callable[[str], Any]
"""Takes the text of a document; false: the document is left out. Worker processes receive it by
pickle, so it is a module-level function, or a `functools.partial` of one."""

DUPLICATES = "duplicates"
KEY = np.dtype("S16")
"""Of `content_keys`. NumPy sorts such bytes, and finds them; zeros at the end do not matter."""
FILTERS: Registry[Callable[[str], Keep]] = Registry("filter")
_PACKAGE = Path(__file__).parent


def register_filter(name: str) -> Callable[[Callable[[str], Keep]], Callable[[str], Keep]]:
    """Return a decorator for a function that makes a filter of its argument.

    The function takes what follows `NAME:` on the command line, or "", and returns a `Keep`. It
    raises ValueError, with the rule, for an argument that it does not accept.
    """
    return FILTERS.register(name)


def plugin_file(function: Any) -> Path | None:
    """Return the file of a function or an object, unless its code is part of Torus."""
    module = sys.modules.get(_function_of(function).__module__)
    file = getattr(module, "__file__", None)
    return None if file is None or Path(file).is_relative_to(_PACKAGE) else Path(file)


@dataclass(frozen=True)
class Filter:
    """A filter with its argument. spec: as it is given, NAME:ARGUMENT."""

    spec: str
    keep: Keep

    @property
    def kind(self) -> str:
        """The reason for which documents are left out, in the counts of a store."""
        return f"{LEFT_OUT}{self.spec}"

    @property
    def code(self) -> Path | None:
        """The file of its function, unless that is part of Torus."""
        return plugin_file(self.keep)


@dataclass(frozen=True)
class Filters:
    """The filters of a store, in the order in which they are asked."""

    each: tuple[Filter, ...] = ()
    """Those that decide about a document by its text alone."""
    without_duplicates: bool = False
    """Whether a document is left out that equals an earlier one, which no other filter left out."""

    @cached_property
    def key(self) -> list[str]:
        """The filters and the code of classifiers, which decide what documents are kept."""
        parts = [*(entry.spec for entry in self.each)]
        for path in (entry.code for entry in self.each):
            if path is not None:
                parts.append(hashlib.sha256(path.read_bytes()).hexdigest())
        return [*parts, DUPLICATES] if self.without_duplicates else parts

    @property
    def specs(self) -> list[str]:
        """The filters as they are given."""
        return [*(entry.spec for entry in self.each), *[DUPLICATES] * self.without_duplicates]

    def refuse(self, document: Document) -> str | None:
        """Return the kind of the first filter that leaves a document out, or None.

        Raises: DataError when the function of a filter fails, with the place of the document.
        """
        if not self.each:
            return None
        text = text_of(document)
        for entry in self.each:
            try:
                is_kept = bool(entry.keep(text))
            except Exception as error:  # a classifier may raise anything
                reason = " ".join(f"{type(error).__name__}: {error}".split())[:300]
                raise DataError(
                    f"{document.location}: --filter {entry.spec} failed ({reason}); correct its "
                    "function"
                ) from error
            if not is_kept:
                return entry.kind
        return None


NO_FILTERS = Filters()


def parse_filters(specs: Sequence[str]) -> Filters:
    """Return the filters that the command line names. Raises: ValueError."""
    found = []
    for spec in specs:
        name, _, argument = spec.partition(":")
        if name == DUPLICATES:
            if argument:
                raise ValueError(f"--filter {spec}: {DUPLICATES} has no argument; leave it out")
            continue
        if name not in FILTERS:
            names = ", ".join([*FILTERS, DUPLICATES])
            raise ValueError(f"--filter {spec}: there is no filter {name!r}; use one of {names}")
        try:
            found.append(Filter(spec, FILTERS[name](argument)))
        except ValueError as error:
            raise ValueError(f"--filter {spec}: {error}") from error
    return Filters(tuple(found), DUPLICATES in specs)


def text_of(document: Document) -> str:
    """Return the text by which filters judge a document.

    For a chat, these are the contents of its messages, one after the other; for a preference pair,
    those of both conversations.
    """
    if document.messages is None:
        assert document.text is not None
        return document.text
    return "\n".join(content for _, content in [*document.messages, *(document.rejected or ())])


def content_keys(document: Document) -> list[bytes]:
    """Return 16 bytes for a document, or for each conversation of a pair, that only equals share.

    Both conversations of a pair are duplicates if the whole pair is one.
    """
    if document.text is not None:
        return [hashlib.sha256(b"text " + document.text.encode()).digest()[:16]]
    content = repr((document.messages, document.rejected)).encode(errors="surrogatepass")
    count = 1 if document.rejected is None else 2
    return [hashlib.sha256(b"chat %d " % n + content).digest()[:16] for n in range(count)]


def _function_of(keep: Keep) -> Any:
    while isinstance(keep, partial):
        keep = keep.func
    return keep


@register_filter("length")
def length(argument: str) -> Keep:
    """Return a filter that keeps documents of MIN..MAX characters; either may be missing."""
    found = re.fullmatch(r"(\d*)\.\.(\d*)", argument)
    if found is None or argument == "..":
        raise ValueError("write MIN..MAX characters, such as length:200.. or length:200..100000")
    least, most = int(found[1] or 0), int(found[2]) if found[2] else sys.maxsize
    if least > most:
        raise ValueError("no document has such a length; write the smaller number first")
    return partial(_has_length, least, most)


def _has_length(least: int, most: int, text: str) -> bool:
    return least <= len(text) <= most


@register_filter("regex")
def regex(argument: str) -> Keep:
    """Return a filter that leaves documents out in which a regular expression is found."""
    try:
        return partial(_is_without, re.compile(argument))
    except re.error as error:
        raise ValueError(f"{error}; correct the regular expression") from error


def _is_without(pattern: re.Pattern[str], text: str) -> bool:
    return pattern.search(text) is None


@register_filter("classifier")
def classifier(argument: str) -> Keep:
    """Return the function MODULE.NAME, which takes a text and returns whether to keep it."""
    module, _, name = argument.rpartition(".")
    if not module:
        raise ValueError("write classifier:MODULE.FUNCTION")
    try:
        found = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise ValueError(f"{error}; put the folder of the module on PYTHONPATH") from error
    except Exception as error:  # a module may raise anything while it is imported
        reason = " ".join(f"{type(error).__name__}: {error}".split())[:300]
        raise ValueError(f"importing {module} failed with {reason}") from error
    if not callable(found) or getattr(found, "__qualname__", None) != name:
        raise ValueError(
            f"{argument} is not a function of that module; define it there by its name"
        )
    keep: Keep = found
    return keep
