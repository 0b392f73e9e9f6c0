"""Rules for rotary embeddings in config.json, in its old and its new spelling.

Old: `rope_theta`, `rope_scaling` and `partial_rotary_factor`. New: all of them in
`rope_parameters`. The old spelling is written, because all versions of transformers read it. For
longrope, versions before 5 take `max_position_embeddings` divided by the original number for the
factor, so it is written too.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from model.config import ModelConfig
from model.families.base import FamilyError, Fields, Keys
from model.families.rules import whole_number
from model.rope import RopeScaling

_ORIGINAL = "original_max_position_embeddings"
_YARN = ("beta_fast", "beta_slow", "truncate", "mscale", "mscale_all_dim", "attention_factor")
_TYPES: Mapping[str, tuple[str, ...]] = {
    "default": (),
    "linear": ("factor",),
    "llama3": ("factor", _ORIGINAL, "low_freq_factor", "high_freq_factor"),
    "yarn": ("factor", _ORIGINAL, *_YARN),
    "longrope": ("factor", _ORIGINAL, "short_factor", "long_factor", "attention_factor"),
}
"""Parameters of every supported type; Hugging Face and `RopeScaling` use the same names."""


@dataclass(frozen=True)
class Rope:
    """Base, scaling and rotated share of the heads.

    theta, scaling, partial: base, `rope_scaling` and rotated share where config.json has none.
    partial=None: the family always rotates whole heads. types: those that transformers accepts.
    """

    theta: float = 10000.0
    scaling: Mapping[str, Any] | None = None
    partial: float | None = None
    types: tuple[str, ...] = tuple(_TYPES)
    names: tuple[str, ...] = (
        "rope_theta",
        "rope_scaling",
        "rope_parameters",
        "partial_rotary_factor",
        _ORIGINAL,
    )

    def read(self, keys: Keys, fields: Fields) -> None:
        """Set rope_theta, rope_scaling and partial_rotary_factor. Raises: FamilyError."""
        found = _parameters(keys, "rope_scaling") or _parameters(keys, "rope_parameters")
        found = found or self.scaling or {}
        fields["rope_theta"] = _first(found.get("rope_theta"), keys.get("rope_theta"), self.theta)
        fields["rope_scaling"] = scaling = read_scaling(found, keys)
        if scaling["type"] not in self.types:
            raise FamilyError(
                f"config.json: rope_type={scaling['type']} is not supported for this architecture; "
                f"use {' or '.join(self.types)}"
            )
        default = 1.0 if self.partial is None else self.partial
        share = _first(
            found.get("partial_rotary_factor"), keys.get("partial_rotary_factor"), default
        )
        if self.partial is None and share != 1:
            raise FamilyError(f"config.json: partial_rotary_factor={share} is not supported here")
        fields["partial_rotary_factor"] = share

    def write(self, model: ModelConfig, keys: dict[str, Any]) -> None:
        """Write the old spelling."""
        keys["rope_theta"] = model.rope_theta
        keys["rope_scaling"] = scaling = write_scaling(model.rope_scaling)
        if self.partial is not None:
            keys["partial_rotary_factor"] = model.partial_rotary_factor
        if scaling is None and self.scaling is not None:
            keys["rope_scaling"] = {"rope_type": "default"}  # null would be the family's default
        if scaling is not None and scaling["rope_type"] == "longrope":
            keys[_ORIGINAL] = scaling[_ORIGINAL]
            keys["max_position_embeddings"] = round(scaling["factor"] * scaling[_ORIGINAL])


@dataclass(frozen=True)
class RopeOfLayerTypes:
    """Rope with another base in sliding layers, and scaling in the other layers only (Gemma 3).

    theta, local_theta: bases where config.json has none. This rule follows `LayerTypes`.
    """

    theta: float
    local_theta: float
    names: tuple[str, ...] = (
        "rope_theta",
        "rope_local_base_freq",
        "rope_scaling",
        "rope_parameters",
    )

    def read(self, keys: Keys, fields: Fields) -> None:
        """Set rope_theta, rope_scaling and the base of sliding layers. Raises: FamilyError."""
        found = _parameters(keys, "rope_parameters")
        full = {**_parameters(found, "full_attention"), **_parameters(keys, "rope_scaling")}
        local = _parameters(found, "sliding_attention")
        if read_scaling(local, keys)["type"] != "default":
            raise FamilyError(
                "config.json: rope scaling of sliding_attention layers is not supported"
            )
        fields["rope_theta"] = _first(full.get("rope_theta"), keys.get("rope_theta"), self.theta)
        if "sliding_attention" in fields["layer_types"]:
            fields["rope_local_theta"] = _first(
                local.get("rope_theta"), keys.get("rope_local_base_freq"), self.local_theta
            )
        fields["rope_scaling"] = read_scaling(full, keys)

    def write(self, model: ModelConfig, keys: dict[str, Any]) -> None:
        """Write the old spelling."""
        local = model.rope_local_theta
        keys["rope_theta"] = model.rope_theta
        keys["rope_local_base_freq"] = model.rope_theta if local is None else local
        keys["rope_scaling"] = write_scaling(model.rope_scaling)


def _parameters(keys: Keys, name: str) -> Keys:
    """Return a key that holds an object; empty where it is absent. Raises: FamilyError."""
    value = keys.get(name) or {}
    if not isinstance(value, Mapping):
        raise FamilyError(f"config.json: {name}={value!r} is not supported; give an object")
    return value


def read_scaling(parameters: Keys, keys: Keys) -> dict[str, Any]:
    """Return the fields of `RopeScaling` from `rope_scaling` or `rope_parameters`.

    keys: the whole config.json. Raises: FamilyError.
    """
    kind = parameters.get("rope_type", parameters.get("type", "default"))
    if kind == "su" or (kind == "yarn" and "short_factor" in parameters):
        kind = "longrope"  # names of early versions
    if str(kind) not in _TYPES:
        raise FamilyError(
            f"config.json: rope type {kind!r} is not supported; supported: {', '.join(_TYPES)}"
        )
    read = {"rope_type", "type", "rope_theta", "partial_rotary_factor", *_TYPES[kind]}
    for name, value in parameters.items():
        if name not in read and value is not None:
            raise FamilyError(
                f"config.json: {name}={value!r} is not supported for rope type {kind}; if it has "
                "no effect, remove it"
            )
    values = {name: parameters[name] for name in _TYPES[kind] if parameters.get(name) is not None}
    if kind == "yarn" and "factor" not in values:
        raise FamilyError("config.json: rope type yarn has no factor; add it")
    if _ORIGINAL in _TYPES[kind]:
        longest = keys.get("max_position_embeddings")
        values[_ORIGINAL] = original = _first(keys.get(_ORIGINAL), values.get(_ORIGINAL), longest)
        if "factor" not in values and longest is not None:
            whole = whole_number("max_position_embeddings", longest)
            values["factor"] = max(1.0, whole / whole_number(_ORIGINAL, original))
    return {"type": kind, **values}


def write_scaling(scaling: RopeScaling) -> dict[str, Any] | None:
    """Return `rope_scaling`, or None for none."""
    if scaling.type == "default":
        return None
    values = {name: getattr(scaling, name) for name in _TYPES.get(scaling.type, ())}
    lists = {n: list(v) if isinstance(v, tuple) else v for n, v in values.items() if v is not None}
    return {"rope_type": scaling.type, **lists}


def _first(*values: Any) -> Any:
    """Return the first value that is not None."""
    return next((value for value in values if value is not None), None)
