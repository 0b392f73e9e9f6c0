"""Reference of the configuration: every key with its type, default and description.

The same text is printed by `train.py --help-config` and kept in docs/configuration.md.
"""

import re
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, Literal, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from configs.reading import ConfigError, section_of
from configs.schema import Config
from training.dotted_keys import as_yaml

WIDTH = 100


@dataclass(frozen=True)
class Section:
    """A section of the configuration file: its dotted name, description, and keys."""

    name: str
    text: str
    keys: tuple["Key", ...]


@dataclass(frozen=True)
class Key:
    """A key of a section. default: as YAML; None if the key has to be given."""

    name: str
    type: str
    default: str | None
    text: str


def sections(
    model: type[BaseModel] = Config, name: str = "", text: str = "", prefix: str = ""
) -> Iterator[Section]:
    """Yield every section that has keys of its own, each before the sections inside it.

    NAME in a path is a key of a mapping, chosen by the user or listed in the text of the section.
    """
    below = {key: section_of(info.annotation) for key, info in model.model_fields.items()}
    keys = tuple(
        Key(key, _type_name(info.annotation), _default(info), _text(info))
        for key, info in model.model_fields.items()
        if below[key][0] is None
    )
    if keys:
        yield Section(name, text, keys)
    for key, (section, named) in below.items():
        if section is not None:
            path = f"{prefix}{key}" + (".NAME" if named else "")
            yield from sections(section, path, _text(model.model_fields[key]), f"{path}.")


def find_sections(name: str | None) -> list[Section]:
    """Return the section `name` and those inside it, or else the one key `name`; None: all.

    Raises: ConfigError.
    """
    every = list(sections())
    found = [s for s in every if name is None or f"{s.name}.".startswith(f"{name}.")]
    if not found and name is not None:
        above, _, last = name.rpartition(".")
        keys = [(s, tuple(k for k in s.keys if k.name == last)) for s in every if s.name == above]
        found = [replace(s, keys=of_name) for s, of_name in keys if of_name]
    if not found:
        names = ", ".join(dict.fromkeys(s.name.partition(".")[0] for s in every if s.name))
        raise ConfigError(f"--help-config {name}: unknown section or key; sections: {names}")
    return found


def as_text(found: list[Section]) -> str:
    """Return the reference for a terminal."""
    lines = []
    for section in found:
        lines.append(f"{section.name or 'top level'}: {section.text or 'keys without a section'}")
        prefix = f"{section.name}." if section.name else ""
        for key in section.keys:
            default = "" if key.default is None else f" = {key.default}"
            lines.append(f"  {prefix}{key.name}: {key.type}{default}")
            lines += textwrap.wrap(
                key.text, WIDTH - 6, initial_indent=" " * 6, subsequent_indent=" " * 6
            )
        lines.append("")
    return "\n".join(lines)


def as_markdown(found: list[Section]) -> str:
    """Return the reference as tables, a heading per section."""
    lines = []
    for section in found:
        lines += (
            [f"## {section.name or 'Top level'}", "", section.text, ""]
            if section.text
            else [f"## {section.name or 'Top level'}", ""]
        )
        lines += ["| key | type | default | meaning |", "|---|---|---|---|"]
        for key in section.keys:
            cells = (f"`{key.name}`", key.type, f"`{key.default}`" if key.default else "", key.text)
            lines.append(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |")
        lines.append("")
    return "\n".join(lines)


def _text(info: FieldInfo) -> str:
    return " ".join((info.description or "").split())


def _default(info: FieldInfo) -> str | None:
    if info.is_required():
        return None
    return as_yaml(info.get_default(call_default_factory=True))


def _type_name(annotation: Any) -> str:
    """Return a type as a user of YAML reads it: choices by value, null for None."""
    if annotation is type(None):
        return "null"
    if isinstance(annotation, type) and not get_args(annotation):
        return annotation.__name__
    origin, args = get_origin(annotation), get_args(annotation)
    if origin is Literal:
        return " | ".join(as_yaml(arg) for arg in args)
    if hasattr(annotation, "__metadata__"):  # a type with bounds
        return _type_name(args[0])
    if isinstance(origin, type) and issubclass(origin, tuple | list):
        return f"list of {_type_name(args[0])}"
    if isinstance(origin, type) and issubclass(origin, dict):
        return f"mapping of {_type_name(args[0])} to {_type_name(args[1])}"
    if args:
        return " | ".join(dict.fromkeys(map(_type_name, args)))
    return re.sub(r"[\w.]+\.", "", str(annotation))
