"""Rules for the keys of config.json, as model families use them."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from model.config import BiasGroup, ModelConfig
from model.families.base import FamilyError, Fields, Keys, Rule, get_field

_REQUIRED = object()


def given(keys: Keys, name: str, default: Any = None) -> Any:
    """Return the value of a key, or the default where it is absent or null."""
    value = keys.get(name)
    return default if value is None else value


def whole_number(name: str, value: Any, least: int = 1) -> int:
    """Return the value of a key. Raises: FamilyError unless it is a whole number >= least."""
    if type(value) is not int or value < least:
        raise FamilyError(
            f"config.json: {name}={value!r} is not a whole number of at least {least}; correct it"
        )
    return value


@dataclass(frozen=True)
class Key:
    """A key that is one field of `ModelConfig`.

    default: Hugging Face's value where the key is absent or null. other: another spelling of the
    key, which some versions write. nullable: null is a value of its own. whole: the key is a whole
    number, our field is not. size: it is a whole number of at least 1. written: property of
    `ModelConfig` that is written where our field is null.
    """

    name: str
    field: str = ""
    default: Any = _REQUIRED
    other: str = ""
    nullable: bool = False
    whole: bool = False
    size: bool = False
    written: str = ""

    @property
    def names(self) -> tuple[str, ...]:
        """The key, and its other spelling."""
        return (self.name, self.other) if self.other else (self.name,)

    def read(self, keys: Keys, fields: Fields) -> None:
        """Set the field to the value of the key. Raises: FamilyError if it is missing."""
        found = [keys[name] for name in self.names if name in keys]
        value = next((x for x in found if x is not None), None)
        if value is None and not (found and self.nullable):
            value = self.default
        if value is _REQUIRED:
            raise FamilyError(f"config.json has no {self.name}; add it")
        fields[self.field or self.name] = whole_number(self.name, value) if self.size else value

    def write(self, model: ModelConfig, keys: dict[str, Any]) -> None:
        """Set the key to the value of the field. Raises: FamilyError for a null without meaning."""
        path = self.field or self.name
        value = get_field(model, path)
        if value is None and self.written:
            value = get_field(model, self.written)
        if value is None and not self.nullable and self.default is not None:
            raise FamilyError(f"model.{path}=None has no value of {self.name}")
        keys[self.name] = int(value) if self.whole and value is not None else value


@dataclass(frozen=True)
class KeyValueHeads:
    """`num_key_value_heads`; null: as many as query heads.

    default: Hugging Face's value where the key is absent; None: as for null.
    """

    default: int | None = None
    names: tuple[str, ...] = ("num_key_value_heads",)

    def read(self, keys: Keys, fields: Fields) -> None:
        """Set the field to the value of the key. Raises: FamilyError."""
        name = self.names[0]
        value = keys.get(name, self.default)
        value = fields["num_attention_heads"] if value is None else value
        fields[name] = whole_number(name, value)

    def write(self, model: ModelConfig, keys: dict[str, Any]) -> None:
        """Write the number of heads."""
        keys[self.names[0]] = model.num_key_value_heads


@dataclass(frozen=True)
class HeadDim:
    """`head_dim`, which is written in full: some models do not read null as the default.

    default: Hugging Face's value where the key is absent or null; None: hidden_size / heads.
    """

    default: int | None = None
    names: tuple[str, ...] = ("head_dim",)

    def read(self, keys: Keys, fields: Fields) -> None:
        """Set the field to the value of the key."""
        fields["head_dim"] = given(keys, "head_dim", self.default)

    def write(self, model: ModelConfig, keys: dict[str, Any]) -> None:
        """Write the width of a head."""
        keys["head_dim"] = model.head_size


@dataclass(frozen=True)
class ExpertWidth:
    """`intermediate_size` of families whose layers all have experts, of this width."""

    names: tuple[str, ...] = ("intermediate_size",)

    def read(self, keys: Keys, fields: Fields) -> None:
        """Set the width of the MLPs, which is that of experts too. Raises: FamilyError."""
        Key("intermediate_size", size=True).read(keys, fields)

    def write(self, model: ModelConfig, keys: dict[str, Any]) -> None:
        """Set the key to the width of an expert."""
        keys["intermediate_size"] = model.expert_size


@dataclass(frozen=True)
class Condition:
    """A condition that transformers has for the sizes of an architecture.

    find_problem: returns what is wrong with the fields that the rules before have read, or None.
    """

    find_problem: Callable[[Fields], str | None]
    names: tuple[str, ...] = ()

    def read(self, keys: Keys, fields: Fields) -> None:
        """Check the fields. Raises: FamilyError."""
        if (problem := self.find_problem(fields)) is not None:
            raise FamilyError(f"config.json: {problem}")

    def write(self, model: ModelConfig, keys: dict[str, Any]) -> None:
        """Write nothing: `read` also checks what the other rules have written."""


def _find_uneven_heads(fields: Fields) -> str | None:
    hidden, heads = fields["hidden_size"], fields["num_attention_heads"]
    if not hidden % heads:
        return None
    return (
        f"hidden_size={hidden} is not a multiple of num_attention_heads={heads}, as this "
        "architecture requires; correct one of them"
    )


HEADS_DIVIDE_HIDDEN = Condition(_find_uneven_heads)
"""Whether the heads divide `hidden_size`, even if config.json has another `head_dim`."""


@dataclass(frozen=True)
class FixedKey:
    """A key with a few supported values, none of which sets a field.

    The first one is the default. optional: the key is not written; only some models have it.
    """

    name: str
    values: tuple[Any, ...]
    optional: bool = False

    @property
    def names(self) -> tuple[str, ...]:
        """The key."""
        return (self.name,)

    def read(self, keys: Keys, fields: Fields) -> None:
        """Check the value. Raises: FamilyError."""
        value = given(keys, self.name, self.values[0])
        if value not in self.values:
            supported = " or ".join(repr(v) for v in self.values)
            raise FamilyError(
                f"config.json: {self.name}={value!r} is not supported; only {supported} is"
            )

    def write(self, model: ModelConfig, keys: dict[str, Any]) -> None:
        """Write the first supported value."""
        if not self.optional:
            keys[self.name] = self.values[0]


@dataclass(frozen=True)
class Named:
    """A key whose values have other names in our configuration, such as activations.

    values: (Hugging Face's name, ours), the default first; the first of equal ones is written.
    """

    name: str
    field: str
    values: tuple[tuple[Any, Any], ...]

    @property
    def names(self) -> tuple[str, ...]:
        """The key."""
        return (self.name,)

    def read(self, keys: Keys, fields: Fields) -> None:
        """Set the field to our name. Raises: FamilyError for another value."""
        value = given(keys, self.name, self.values[0][0])
        for theirs, ours in self.values:
            if value == theirs:
                fields[self.field] = ours
                return
        supported = ", ".join(repr(theirs) for theirs, _ in self.values)
        raise FamilyError(
            f"config.json: {self.name}={value!r} is not supported; supported: {supported}"
        )

    def write(self, model: ModelConfig, keys: dict[str, Any]) -> None:
        """Write Hugging Face's name."""
        value = get_field(model, self.field)
        found = [theirs for theirs, ours in self.values if ours == value]
        if not found:
            raise FamilyError(f"model.{self.field}={value} has no value of {self.name}")
        keys[self.name] = found[0]


@dataclass(frozen=True)
class Bias:
    """A key that gives some groups of linears a bias. default: value where it is absent."""

    name: str
    groups: tuple[BiasGroup, ...]
    default: bool = False

    @property
    def names(self) -> tuple[str, ...]:
        """The key."""
        return (self.name,)

    def read(self, keys: Keys, fields: Fields) -> None:
        """Add the groups to the biases."""
        if given(keys, self.name, self.default):
            fields["biases"] = (*fields.get("biases", ()), *self.groups)

    def write(self, model: ModelConfig, keys: dict[str, Any]) -> None:
        """Write whether all groups have a bias."""
        keys[self.name] = set(self.groups) <= set(model.biases)


@dataclass(frozen=True)
class IgnoredKeys:
    """Keys that are accepted and ignored: models of this family do not use them."""

    names: tuple[str, ...]

    def read(self, keys: Keys, fields: Fields) -> None:
        """Do nothing."""

    def write(self, model: ModelConfig, keys: dict[str, Any]) -> None:
        """Write nothing."""


@dataclass(frozen=True)
class ScaledEmbedding:
    """Embeddings times the square root of their width, without a key (Gemma)."""

    names: tuple[str, ...] = ()

    def read(self, keys: Keys, fields: Fields) -> None:
        """Set the factor."""
        fields["embedding_multiplier"] = float(fields["hidden_size"]) ** 0.5

    def write(self, model: ModelConfig, keys: dict[str, Any]) -> None:
        """Write nothing."""


def dimensions(
    *,
    eps: float = 1e-6,
    tied: bool = False,
    kv_heads: int | None = None,
    head_dim: int | None = None,
    has_head_dim: bool = True,
    width: Rule = Key("intermediate_size", size=True),
) -> tuple[Rule, ...]:
    """Return the rules that all families need: sizes, epsilon of the norms, tied embeddings.

    has_head_dim: `head_dim` is the width of a head. width: rule of `intermediate_size`. The other
    arguments are Hugging Face's defaults that differ between families.
    """
    return (
        Key("vocab_size", size=True),
        Key("hidden_size", size=True),
        Key("num_hidden_layers", size=True),
        Key("num_attention_heads", size=True),
        KeyValueHeads(kv_heads),
        *([HeadDim(head_dim)] if has_head_dim else []),
        width,
        Key("rms_norm_eps", default=eps),
        Key("tie_word_embeddings", default=tied),
        Key("attention_dropout", default=0.0),
    )
