"""Read YAML and `section.key=value` overrides into a frozen pydantic model.

An unknown key suggests the nearest known one, and values are not converted between types. Every
mistake of a user is a ConfigError on one line: key path, value, rule, remedy.
"""

import difflib
import importlib
import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from types import UnionType
from typing import Any, TypeVar, get_args, get_origin

from pydantic import BaseModel, RootModel, ValidationError
from ruamel.yaml import YAML
from ruamel.yaml.constructor import DuplicateKeyError
from ruamel.yaml.error import MarkedYAMLError, YAMLError

from training.dotted_keys import as_yaml

Section = TypeVar("Section", bound=BaseModel)


# What other trainers call a key.
_OTHER_NAMES = {
    "batch_size": "global_batch_size",
    "d_model": "hidden_size",
    "grad_clip": "clip_norm",
    "gradient_accumulation_steps": "gradient_accumulation",
    "lr": "learning_rate",
    "max_grad_norm": "clip_norm",
    "max_seq_length": "sequence_length",
    "max_steps": "steps",
    "n_heads": "num_attention_heads",
    "n_layers": "num_hidden_layers",
    "num_experts_per_token": "num_experts_per_tok",
    "num_heads": "num_attention_heads",
    "num_layers": "num_hidden_layers",
    "output_dir": "dir",
    "seq_len": "sequence_length",
    "warmup": "warmup_steps",
    "wd": "weight_decay",
}


class ConfigError(ValueError):
    """A mistake in the configuration, described on one line."""


def read_tree(path: str | Path, overrides: Sequence[str] = ()) -> dict[str, Any]:
    """Read a YAML file and apply overrides; the values are not validated yet.

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
        raise ConfigError(
            f"--config {path} holds no sections but a {type(tree).__name__}; write, for example, "
            "'mesh: {tp: 8}'"
        )
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
        except Exception as error:  # a plugin may raise anything while it is imported
            missing = error.name if isinstance(error, ModuleNotFoundError) else None
            if missing is not None and f"{name}.".startswith(f"{missing}."):
                raise ConfigError(
                    f"plugins: cannot import {name!r} ({error}); put the folder of the module on "
                    "PYTHONPATH"
                ) from error
            raise ConfigError(
                f"plugins: importing {name!r} failed with {type(error).__name__}: {error}"
            ) from error


def apply_overrides(tree: dict[str, Any], overrides: Sequence[str]) -> None:
    """Set `section.key=value` in a tree; the last override of a key wins.

    A name of a section that the tree has may contain dots. Raises: ConfigError.
    """
    for override in overrides:
        path, equals, text = override.partition("=")
        if not equals or not path:
            wanted = f"{path}=VALUE" if "." in path else "section.key=value"
            raise ConfigError(f"override {override!r}: write {wanted}")
        node, parts = tree, path.split(".")
        while len(parts) > 1:
            longest_first = (".".join(parts[:end]) for end in range(len(parts) - 1, 0, -1))
            name = next((name for name in longest_first if name in node), parts[0])
            parts = parts[name.count(".") + 1 :]
            if node.get(name) is None:
                node[name] = {}
            node = node[name]
            if not isinstance(node, dict):
                section = path.removesuffix("." + ".".join(parts))
                raise ConfigError(f"override {override!r}: {section} is a value, not a section")
        node[parts[0]] = _value(text, f"override {override!r}")


def _value(text: str, what: str) -> Any:
    """Parse an override as YAML, but keep the whole text of an unquoted string."""
    if text.startswith(("*", "#")):  # a glob or a name, not a YAML alias or comment
        return text
    value = _parse(text, what)
    is_bare = isinstance(value, str) and not text.lstrip().startswith(("'", '"', "!", "|", ">"))
    return text if is_bare else value


def validate(tree: dict[str, Any], model: type[Section], prefix: str = "") -> Section:
    """Validate a tree as a model, without converting types.

    prefix: start of the key paths in messages.

    Raises: ConfigError with every wrong value, or with the first unknown key.
    """
    _check_keys(tree, model, prefix, list(config_keys(model, prefix)))
    try:
        return model.model_validate(tree, strict=True)
    except ValidationError as error:
        messages: dict[str, str] = {}
        for item in error.errors():
            keys, is_section = _keys_of(item["loc"], model)
            rule = item["msg"].removeprefix("Value error, ")
            path = prefix + ".".join(keys)
            if keys[-1:] == ["[key]"]:  # an unknown key of a mapping
                path = path.removesuffix(".[key]")
                rule = f"{path}: {rule[0].lower()}{rule[1:]}"
            elif not is_section:  # the rule of a section names its own keys
                hint = _default_hint(keys, model) if rule.startswith("Input should be") else ""
                hint += _spelling_hint(path, item["type"], item["input"])
                rule = f"{path}={_shown(item['input'])}: {rule[0].lower()}{rule[1:]}{hint}"
            messages.setdefault(path, rule)
        raise ConfigError("; ".join(messages.values())) from error


def config_keys(model: type[BaseModel], prefix: str = "") -> Iterator[str]:
    """Yield all dotted keys; NAME stands for the name of a section in a mapping."""
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
        reason = str(error)
        if isinstance(error, MarkedYAMLError) and error.problem_mark is not None:
            mark = error.problem_mark
            reason = f"line {mark.line + 1}, column {mark.column + 1}: "
            reason += _yaml_problem(error, is_file=where.startswith("--config"))
        reason = re.sub(r"\s+", " ", reason).strip()
        raise ConfigError(f"{where} is not YAML: {reason}") from error


def _yaml_problem(error: MarkedYAMLError, is_file: bool) -> str:
    """Return what is wrong with a YAML text, with a hint for the most frequent mistakes."""
    problem = str(error.problem)
    if isinstance(error, DuplicateKeyError):
        return re.sub(
            r'found duplicate key (".+?") with value.*', r"the key \1 is given twice", problem
        )
    if "document start" in problem and is_file:
        return "this text is no mapping; give a file of sections such as 'mesh: {tp: 8}'"
    if "document start" in problem:
        return "text follows the value; write a text with such characters as KEY='\"TEXT\"'"
    if "'\\t'" in problem:
        return f"{problem}; indent with spaces"
    if ("stream end" in problem or "end of stream" in problem) and error.context_mark is not None:
        begin = error.context_mark.line + 1
        return f"{problem}; check the bracket or quote that opens in line {begin}"
    if "block end" in problem:
        return f"{problem}; check the indentation"
    return problem


def section_of(annotation: Any) -> tuple[type[BaseModel] | None, bool]:
    """Return (the model of a section, or None for a value; whether the user names sections).

    A section may be optional: `Section | None`.
    """
    if isinstance(annotation, UnionType):
        kinds = [kind for kind in get_args(annotation) if kind is not type(None)]
        annotation = kinds[0] if len(kinds) == 1 else annotation
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
            # Below an unknown section, the key says more than the section.
            leaf = next(iter(value)) if isinstance(value, dict) and value else None
            asked = path if leaf is None else f"{path}.{leaf}"
            raise ConfigError(f"{asked}: unknown key; {_nearest(asked, model, prefix, known)}")
        field = model.model_fields[key]
        section, named = section_of(field.annotation)
        if section is None or (value is None and field.default is None):
            continue
        parts = {path: value}
        if named:
            if not isinstance(value, dict):
                raise ConfigError(
                    f"{path}={_shown(value)} is not a section; map names to sections below {path}:"
                )
            parts = {f"{path}.{name}": part for name, part in value.items()}
        for where, part in parts.items():
            if not isinstance(part, dict):
                names = _first_ten(section.model_fields)
                raise ConfigError(
                    f"{where}={_shown(part)} is not a section; write {where}: with {names}"
                )
            _check_keys(part, section, f"{where}.", known)


def _shown(value: Any) -> str:
    """Return a wrong value: null, true and false as in YAML, others as Python writes them."""
    return as_yaml(value) if value is None or isinstance(value, bool) else repr(value)


def _first_ten(names: Iterable[str]) -> str:
    listed = [*names]
    more = f" and {len(listed) - 10} more" if len(listed) > 10 else ""
    return ", ".join(listed[:10]) + more


def _nearest(path: str, model: type[BaseModel], prefix: str, known: list[str]) -> str:
    """Suggest a key: the same name in another section, else the nearest spelling.

    A key that ends with the whole path comes first, then keys and sections beside the unknown one,
    then those of other sections.
    """
    # Of equal names, that of the outermost section.
    outermost_last = sorted(known, key=lambda name: -name.count("."))
    leaves = {name.rpartition(".")[2]: name for name in outermost_last}
    leaf = path.rpartition(".")[2]
    leaf = _OTHER_NAMES.get(leaf, leaf)
    key = path.removeprefix(prefix)
    beside = difflib.get_close_matches(key, model.model_fields, n=1) if "." not in key else []
    close = [f"{prefix}{name}" for name in beside]
    close = [leaves[leaf]] if leaf in leaves else close
    if "." not in key and leaf in model.model_fields:
        close = [f"{prefix}{leaf}"]
    if "." in path:
        close = [name for name in known if name.endswith(f".{path}")][:1] or close
    close = close or difflib.get_close_matches(path, known, n=1)
    close = close or [leaves[name] for name in difflib.get_close_matches(leaf, leaves, n=1)]
    if close:
        return f"did you mean {close[0]}?"
    return f"{'keys' if prefix else 'sections'}: {', '.join(model.model_fields)}"


def _default_hint(keys: Sequence[str], model: type[BaseModel]) -> str:
    """Return the default of a key in brackets, as an example of what it accepts."""
    info = model.model_fields[keys[0]]
    section, named = section_of(info.annotation)
    if section is not None:
        below = keys[1 + named :]
        return _default_hint(below, section) if below else ""
    if type(None) in get_args(info.annotation):
        return ", or null (the default)" if info.default is None else ", or null"
    default = None if info.is_required() else info.get_default(call_default_factory=True)
    return "" if default is None else f" (default {as_yaml(default)})"


def _spelling_hint(path: str, rule: str, value: Any) -> str:
    """Return how to spell a value that YAML reads as something else, or an empty text."""
    if rule == "string_type" and value is not None and not isinstance(value, bool):
        return f"; write a text that looks like another value as {path}='\"TEXT\"'"
    if isinstance(value, dict) and any(
        isinstance(key, str) and ":" in key and number is None for key, number in value.items()
    ):
        return "; write a space after each colon"
    return ""


def _keys_of(loc: Sequence[Any], model: type[BaseModel]) -> tuple[list[str], bool]:
    """Return (the keys down to the wrong value, whether it is a section).

    Parts that pydantic adds after a value (union members, list indices) are dropped.
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
