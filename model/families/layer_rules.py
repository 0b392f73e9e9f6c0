"""Rules for the keys of config.json that differ between the layers of a model."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from model.config import ModelConfig
from model.families.base import FamilyError, Fields, Keys
from model.families.rules import given, whole_number
from model.segments import LayerType, shortest_period

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
        if window is not None:
            whole_number("sliding_window", window)
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
        fields["layer_types"] = types[: shortest_period(types)]
        fields["sliding_window"] = window if has_window else None

    def write(self, model: ModelConfig, keys: dict[str, Any]) -> None:
        """Write the window, and the list of types where the family has one."""
        keys["sliding_window"] = model.sliding_window
        if self.listed:
            keys["layer_types"] = list(model.layer_kinds)
        if self.switch:
            keys[self.switch] = model.sliding_window is not None


SWITCHED_WINDOW = LayerTypes(
    sliding_from(28), window=4096, switch="use_sliding_window", others=("max_window_layers",)
)
"""Sliding attention from layer `max_window_layers` on, if `use_sliding_window` (Qwen)."""


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
        pattern = tuple(map(bool, _per_layer("no_rope_layers", listed, count)))
        fields["rope_layers"] = pattern[: shortest_period(pattern)]

    def write(self, model: ModelConfig, keys: dict[str, Any]) -> None:
        """Write the list in full."""
        keys["no_rope_layers"] = list(map(int, model.rope_pattern))


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


def _per_layer(name: str, listed: Any, count: int) -> tuple[Any, ...]:
    """Return a list with one entry per layer. Raises: FamilyError for anything else."""
    if not isinstance(listed, list) or len(listed) != count:
        found = f"{len(listed)} entries" if isinstance(listed, list) else repr(listed)
        raise FamilyError(
            f"config.json: {name} has {found}, but num_hidden_layers={count}; give a list with one "
            "entry per layer"
        )
    return tuple(listed)
