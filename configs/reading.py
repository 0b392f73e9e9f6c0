"""YAML and `section.key=value` overrides to a typed, frozen tree of values; knows no component.

Unknown keys name the nearest one, values are not converted, and whatever a user can get wrong is a
ConfigError: path, value, law, remedy, on one line.
"""

import difflib
import importlib
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar, get_args, get_origin

from pydantic import BaseModel, RootModel, ValidationError
from ruamel.yaml import YAML
from ruamel.yaml.error import YAMLError

Section = TypeVar("Section", bound=BaseModel)


class ConfigError(ValueError):
    """What a user can mend in the configuration, on one line."""


def read_tree(path: str | Path, overrides: Sequence[str] = ()) -> dict[str, Any]:
    """A YAML file as a tree of values, with overrides; not validated yet.

    Values are YAML 1.2 (1e-3 is a number, null is null). Raises: ConfigError.
    """
    try:
        text = Path(path).read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ConfigError(
            f"--config {path} is not text: {error.reason}; give a YAML file"
        ) from error
    except OSError as error:
        near = ", ".join(str(p) for p in sorted(Path("configs").glob("*.yaml")))
        raise ConfigError(
            f"--config {path}: {error.strerror}; give a YAML file"
            + (f", for example one of {near}" if near else "")
        ) from error
    tree = _parse(text, f"--config {path}")
    if tree is None:
        tree = {}
    if not isinstance(tree, dict):
        raise ConfigError(f"--config {path} is a {type(tree).__name__}; write 'section:' mappings")
    apply_overrides(tree, overrides)
    return tree


def import_plugins(tree: dict[str, Any]) -> None:
    """Import the modules of the key `plugins`, which register extensions under new names.

    Raises:
        ConfigError: The key is not a list of module names, or a module cannot be imported.
    """
    names = tree.get("plugins") or []
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise ConfigError(f"plugins={names!r} is not a list of modules; write plugins: [my_module]")
    for name in names:
        try:
            importlib.import_module(name)
        except ImportError as error:
            raise ConfigError(
                f"plugins: cannot import {name!r} ({error}); put the folder of the module on "
                "PYTHONPATH"
            ) from error


def apply_overrides(tree: dict[str, Any], overrides: Sequence[str]) -> None:
    """Sets `section.key=value` in a tree; the last one wins. Raises: ConfigError."""
    for override in overrides:
        path, equals, text = override.partition("=")
        if not equals or not path:
            raise ConfigError(f"override {override!r}: write section.key=value")
        *sections, key = path.split(".")
        node = tree
        for depth, name in enumerate(sections):
            if node.get(name) is None:
                node[name] = {}
            node = node[name]
            if not isinstance(node, dict):
                raise ConfigError(
                    f"override {override!r}: {'.'.join(sections[: depth + 1])} is a value"
                )
        node[key] = _value(text, f"override {override!r}")


def _value(text: str, what: str) -> Any:
    """What YAML makes of it; but of a string that is not quoted nothing is left out."""
    if text.startswith(("*", "#")):  # a glob, a name: not a reference, not a comment
        return text
    value = _parse(text, what)
    is_bare = isinstance(value, str) and not text.lstrip().startswith(("'", '"', "!", "|", ">"))
    return text if is_bare else value


def validate(tree: dict[str, Any], model: type[Section], prefix: str = "") -> Section:
    """The tree as a model; nothing is converted. prefix: of the paths that messages name.

    Raises: ConfigError with every wrong value, or the first unknown key.
    """
    _check_keys(tree, model, prefix, list(config_keys(model, prefix)))
    try:
        return model.model_validate(tree, strict=True)
    except ValidationError as error:
        told: dict[str, str] = {}
        for item in error.errors():
            keys, is_section = _keys_of(item["loc"], model)
            law = item["msg"].removeprefix("Value error, ")
            path = prefix + ".".join(keys)
            if not is_section:  # else the law names keys of the section
                law = f"{path}={item['input']!r}: {law[0].lower()}{law[1:]}"
            told.setdefault(path, law)
        raise ConfigError("; ".join(told.values())) from error


def config_keys(model: type[BaseModel], prefix: str = "") -> Iterator[str]:
    """All dotted keys; NAME stands for what a user names."""
    for name, info in model.model_fields.items():
        section, named = section_of(info.annotation)
        if section is not None:
            yield from config_keys(section, f"{prefix}{name}.{'NAME.' if named else ''}")
        else:
            yield f"{prefix}{name}"


def _parse(text: str, where: str) -> Any:
    try:
        return YAML(typ="safe", pure=True).load(text)
    except YAMLError as error:
        reason = re.sub(r"\s+", " ", str(error)).strip()
        raise ConfigError(f"{where} is not YAML: {reason}") from error


def section_of(annotation: Any) -> tuple[type[BaseModel] | None, bool]:
    """(the model of a section, whether there are several under names); None: a value."""
    if isinstance(annotation, type) and issubclass(annotation, RootModel):
        annotation = annotation.model_fields["root"].annotation
    named = get_origin(annotation) is dict
    kind = get_args(annotation)[1] if named else annotation
    is_section = isinstance(kind, type) and issubclass(kind, BaseModel)
    return (kind if is_section else None), named


def _check_keys(
    tree: dict[str, Any], model: type[BaseModel], prefix: str, known: list[str]
) -> None:
    for key, value in tree.items():
        path = f"{prefix}{key}"
        if key not in model.model_fields:
            raise ConfigError(f"{path}: unknown key; {_nearest(path, model, prefix, known)}")
        section, named = section_of(model.model_fields[key].annotation)
        if section is None:
            continue
        parts = {path: value}
        if named:
            if not isinstance(value, dict):
                raise ConfigError(f"{path}={value!r} is not a section; write {path}: with names")
            parts = {f"{path}.{name}": part for name, part in value.items()}
        for where, part in parts.items():
            if not isinstance(part, dict):
                names = ", ".join(section.model_fields)
                raise ConfigError(f"{where}={part!r} is not a section; write {where}: with {names}")
            _check_keys(part, section, f"{where}.", known)


def _nearest(path: str, model: type[BaseModel], prefix: str, known: list[str]) -> str:
    """The key that was meant: the same name in another section, else the nearest spelling."""
    leaves = {name.rpartition(".")[2]: name for name in known}
    leaf = path.rpartition(".")[2]
    close = [leaves[leaf]] if leaf in leaves else difflib.get_close_matches(path, known, n=1)
    close = close or [leaves[name] for name in difflib.get_close_matches(leaf, leaves, n=1)]
    if close:
        return f"did you mean {close[0]}?"
    return f"{'keys' if prefix else 'sections'}: {', '.join(model.model_fields)}"


def _keys_of(loc: Sequence[Any], model: type[BaseModel]) -> tuple[list[str], bool]:
    """(the keys down to what is wrong, whether it is a section).

    What pydantic adds behind a value (members of a union, places in a list) is left out.
    """
    if not loc:
        return [], True
    if loc[0] not in model.model_fields:
        return [str(loc[0])], False
    section, named = section_of(model.model_fields[loc[0]].annotation)
    if section is None or len(loc) < 1 + named:
        return [str(loc[0])], False
    keys, is_section = _keys_of(loc[1 + named :], section)
    return [*map(str, loc[: 1 + named]), *keys], is_section
