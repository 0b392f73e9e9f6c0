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


def num_heads(keys: Keys) -> Any:
    """Return num_attention_heads, the default of num_key_value_heads."""
    return keys.get("num_attention_heads")


@dataclass(frozen=True)
class Key:
    """A key that is one field of `ModelConfig`.

    default: Hugging Face's value where the key is absent; a function of the keys: also where it is
    null. other: another spelling of the key, which some versions write. whole: the key is a whole
    number, our field is not.
    """

    name: str
    field: str = ""
    default: Any = _REQUIRED
    other: str = ""
    whole: bool = False

    @property
    def names(self) -> tuple[str, ...]:
        """The key, and its other spelling."""
        return (self.name, self.other) if self.other else (self.name,)

    def read(self, keys: Keys, fields: Fields) -> None:
        """Set the field to the value of the key. Raises: FamilyError if it is missing."""
        value = next((keys[name] for name in self.names if name in keys), self.default)
        if callable(self.default) and (value is None or value is self.default):
            value = self.default(keys)
        if value is _REQUIRED:
            raise FamilyError(f"config.json has no {self.name}; add it")
        fields[self.field or self.name] = value

    def write(self, model: ModelConfig, keys: dict[str, Any]) -> None:
        """Set the key to the value of the field."""
        value = get_field(model, self.field or self.name)
        keys[self.name] = int(value) if self.whole and value is not None else value


@dataclass(frozen=True)
class HeadDim:
    """`head_dim`, which is written in full: some models do not read null as the default.

    default: Hugging Face's value where the key is absent; None: hidden_size / heads.
    """

    default: int | None = None
    names: tuple[str, ...] = ("head_dim",)

    def read(self, keys: Keys, fields: Fields) -> None:
        """Set the field to the value of the key."""
        fields["head_dim"] = keys.get("head_dim", self.default)

    def write(self, model: ModelConfig, keys: dict[str, Any]) -> None:
        """Write the width of a head."""
        keys["head_dim"] = model.head_size


@dataclass(frozen=True)
class Only:
    """A key with a few supported values, none of which sets a field. The first one is written.

    default: value where the key is absent.
    """

    name: str
    values: tuple[Any, ...]
    default: Any = None

    @property
    def names(self) -> tuple[str, ...]:
        """The key."""
        return (self.name,)

    def read(self, keys: Keys, fields: Fields) -> None:
        """Check the value. Raises: FamilyError."""
        value = keys.get(self.name, self.default if self.default is not None else self.values[0])
        if value not in self.values:
            supported = " or ".join(repr(v) for v in self.values)
            raise FamilyError(
                f"config.json: {self.name}={value!r} is not supported; only {supported} is"
            )

    def write(self, model: ModelConfig, keys: dict[str, Any]) -> None:
        """Write the first supported value."""
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
        value = keys.get(self.name, self.values[0][0])
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


def after_max_window_layers(keys: Keys, count: int, window: int | None) -> list[LayerType]:
    """Return sliding attention from layer `max_window_layers` on, if there is a window."""
    first = keys.get("max_window_layers", 28)
    return [
        "sliding_attention" if window is not None and layer >= first else "full_attention"
        for layer in range(count)
    ]


def full_every(period: int) -> LayerPattern:
    """Return a pattern: every layer whose number, from 1, is a multiple of `period` is full.

    `sliding_window_pattern`, a key of older configurations, overrides `period`.
    """

    def pattern(keys: Keys, count: int, window: int | None) -> list[LayerType]:
        given = keys.get("sliding_window_pattern", keys.get("_sliding_window_pattern", period))
        return [
            "sliding_attention" if (layer + 1) % given else "full_attention"
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
        count, window = keys["num_hidden_layers"], keys.get("sliding_window", self.window)
        if self.switch and not keys.get(self.switch, False):
            window = None
        types = keys.get("layer_types") if self.listed else None
        types = tuple(self.pattern(keys, count, window) if types is None else types)
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
        if keys.get(self.name, self.default):
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
        count, every = keys["num_hidden_layers"], keys.get("no_rope_layer_interval", 4)
        listed = keys.get("no_rope_layers") or [(n + 1) % every != 0 for n in range(count)]
        pattern = tuple(map(bool, listed[:count]))
        fields["rope_layers"] = pattern[: _period(pattern)]

    def write(self, model: ModelConfig, keys: dict[str, Any]) -> None:
        """Write the list in full."""
        keys["no_rope_layers"] = list(map(int, model.rope_pattern))


def _period(values: tuple[Any, ...]) -> int:
    """Return the length of the shortest prefix whose repetition gives the list."""
    return next(n for n in range(1, len(values) + 1) if values[n:] == values[: len(values) - n])


@dataclass(frozen=True)
class DenseLayers:
    """`mlp_only_layers`: numbers of dense layers; they must be the first ones."""

    names: tuple[str, ...] = ("mlp_only_layers",)

    def read(self, keys: Keys, fields: Fields) -> None:
        """Set the number of leading dense layers. Raises: FamilyError."""
        layers = keys.get("mlp_only_layers") or []
        if sorted(layers) != list(range(len(layers))):
            raise FamilyError(
                f"config.json: mlp_only_layers={layers} is not supported; only the first layers "
                "may be dense"
            )
        fields["moe.first_k_dense_replace"] = len(layers)

    def write(self, model: ModelConfig, keys: dict[str, Any]) -> None:
        """Write the numbers of the leading dense layers."""
        keys["mlp_only_layers"] = list(range(model.moe.first_k_dense_replace))


def dimensions(
    *, eps: float = 1e-6, tied: bool = False, head_dim: int | None = None
) -> tuple[Rule, ...]:
    """Return the rules that all families need: sizes, epsilon of the norms, tied embeddings.

    The arguments are Hugging Face's defaults that differ between families.
    """
    return (
        Key("vocab_size"),
        Key("hidden_size"),
        Key("num_hidden_layers"),
        Key("num_attention_heads"),
        Key("num_key_value_heads", default=num_heads),
        HeadDim(head_dim),
        Key("intermediate_size"),
        Key("rms_norm_eps", default=eps),
        Key("tie_word_embeddings", default=tied),
        Key("attention_dropout", default=0.0),
    )
