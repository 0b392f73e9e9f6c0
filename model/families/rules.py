"""Rules for the keys of config.json, as model families use them."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from model.config import BiasGroup, ModelConfig
from model.families.base import FamilyError, Fields, Keys, Rule, get_field
from model.segments import LayerType

_REQUIRED = object()
Default = Callable[[Keys], Any]
"""A default that depends on other keys."""


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

    default: Hugging Face's value where the key is absent or null, or a function of the keys. other:
    another spelling of the key, which some versions write. nullable: null is a value of its own.
    whole: the key is a whole number, our field is not. size: it is a whole number of at least 1.
    written: property of `ModelConfig` that is written where our field is null.
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
            value = self.default(keys) if callable(self.default) else self.default
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
class Only:
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


LayerPattern = Callable[[Keys, int, int | None], Sequence[LayerType]]
"""(keys, number of layers, sliding window) -> the type of every layer."""


def every_layer(keys: Keys, count: int, window: int | None) -> list[LayerType]:
    """Return sliding attention for all layers if there is a window, else full attention."""
    return ["full_attention" if window is None else "sliding_attention"] * count


def sliding_from(default: int) -> LayerPattern:
    """Return a pattern: sliding attention from layer `max_window_layers` on, if there is a window.

    default: Hugging Face's value of `max_window_layers`.
    """

    def pattern(keys: Keys, count: int, window: int | None) -> list[LayerType]:
        name = "max_window_layers"
        first = whole_number(name, given(keys, name, default), least=0)
        return [
            "sliding_attention" if window is not None and layer >= first else "full_attention"
            for layer in range(count)
        ]

    return pattern


def full_every(period: int) -> LayerPattern:
    """Return a pattern: every layer whose number, from 1, is a multiple of `period` is full.

    `sliding_window_pattern`, a key of older configurations, overrides `period`.
    """

    def pattern(keys: Keys, count: int, window: int | None) -> list[LayerType]:
        name = "sliding_window_pattern"
        found = whole_number(name, given(keys, name, given(keys, f"_{name}", period)))
        return [
            "sliding_attention" if (layer + 1) % found else "full_attention"
            for layer in range(count)
        ]

    return pattern


@dataclass(frozen=True)
class LayerTypes:
    """Attention types of the layers, and the sliding window.

    pattern: types where `layer_types` is absent. listed: the family has the key `layer_types`.
    window: default of `sliding_window`. switch: boolean key; there is no window unless it is true.
    others: keys that the pattern reads.
    """

    pattern: LayerPattern
    listed: bool = True
    window: int | None = None
    switch: str = ""
    others: tuple[str, ...] = ()

    @property
    def names(self) -> tuple[str, ...]:
        """The keys that older and newer configurations use."""
        switch = (self.switch,) if self.switch else ()
        return ("sliding_window", *(["layer_types"] * self.listed), *switch, *self.others)

    def read(self, keys: Keys, fields: Fields) -> None:
        """Set layer_types and sliding_window."""
        count, window = fields["num_hidden_layers"], keys.get("sliding_window", self.window)
        if self.switch and not keys.get(self.switch, False):
            window = None
        listed = keys.get("layer_types") if self.listed else None
        if listed is None:
            listed = list(self.pattern(keys, count, window))
        types = _per_layer("layer_types", listed, count)
        has_window = "sliding_attention" in types
        if has_window and window is None:
            raise FamilyError(
                "config.json: layer_types has sliding_attention, but there is no sliding_window; "
                f"set it{f' and {self.switch}' if self.switch else ''}"
            )
        fields["layer_types"] = types[: _period(types)]
        fields["sliding_window"] = window if has_window else None

    def write(self, model: ModelConfig, keys: dict[str, Any]) -> None:
        """Write the window, and the list of types where the family has one."""
        keys["sliding_window"] = model.sliding_window
        if self.listed:
            keys["layer_types"] = list(model.layer_kinds)
        if self.switch:
            keys[self.switch] = model.sliding_window is not None


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
class Unread:
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


@dataclass(frozen=True)
class NoRopeLayers:
    """`no_rope_layers`: 1 for a layer with rope, 0 for one without (SmolLM3)."""

    names: tuple[str, ...] = ("no_rope_layers", "no_rope_layer_interval")

    def read(self, keys: Keys, fields: Fields) -> None:
        """Set rope_layers."""
        count, name = fields["num_hidden_layers"], "no_rope_layer_interval"
        every = whole_number(name, given(keys, name, 4))
        default = [(n + 1) % every != 0 for n in range(count)]
        listed = given(keys, "no_rope_layers", default)
        listed = listed[:count] if isinstance(listed, list) else listed
        has_rope = tuple(map(bool, _per_layer("no_rope_layers", listed, count)))
        fields["rope_layers"] = has_rope[: _period(has_rope)]

    def write(self, model: ModelConfig, keys: dict[str, Any]) -> None:
        """Write the list in full."""
        keys["no_rope_layers"] = list(map(int, model.has_rope))


def _per_layer(name: str, listed: Any, count: int) -> tuple[Any, ...]:
    """Return a list with one entry per layer. Raises: FamilyError for anything else."""
    if not isinstance(listed, list) or len(listed) != count:
        found = f"{len(listed)} entries" if isinstance(listed, list) else repr(listed)
        raise FamilyError(
            f"config.json: {name} has {found}, but num_hidden_layers={count}; give a list with one "
            "entry per layer"
        )
    return tuple(listed)


def _period(values: tuple[Any, ...]) -> int:
    """Return the length of the shortest prefix whose repetition gives the list."""
    return next(n for n in range(1, len(values) + 1) if values[n:] == values[: len(values) - n])


@dataclass(frozen=True)
class DenseLayers:
    """`mlp_only_layers`: numbers of dense layers; they must be the first ones."""

    names: tuple[str, ...] = ("mlp_only_layers",)

    def read(self, keys: Keys, fields: Fields) -> None:
        """Set the number of leading dense layers. Raises: FamilyError."""
        layers = given(keys, "mlp_only_layers", [])
        if not isinstance(layers, list) or {*map(repr, layers)} != {*map(repr, range(len(layers)))}:
            raise FamilyError(
                f"config.json: mlp_only_layers={layers} is not supported; only the first layers "
                "may be dense"
            )
        fields["moe.first_k_dense_replace"] = len(layers)

    def write(self, model: ModelConfig, keys: dict[str, Any]) -> None:
        """Write the numbers of the leading dense layers."""
        keys["mlp_only_layers"] = list(range(model.moe.first_k_dense_replace))


def dimensions(
    *,
    eps: float = 1e-6,
    tied: bool = False,
    kv_heads: int | None = None,
    head_dim: int | None = None,
) -> tuple[Rule, ...]:
    """Return the rules that all families need: sizes, epsilon of the norms, tied embeddings.

    The arguments are Hugging Face's defaults that differ between families.
    """
    return (
        Key("vocab_size", size=True),
        Key("hidden_size", size=True),
        Key("num_hidden_layers", size=True),
        Key("num_attention_heads", size=True),
        KeyValueHeads(kv_heads),
        HeadDim(head_dim),
        Key("intermediate_size", size=True),
        Key("rms_norm_eps", default=eps),
        Key("tie_word_embeddings", default=tied),
        Key("attention_dropout", default=0.0),
    )
