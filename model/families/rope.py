"""Rule for rotary embeddings in config.json, in its old and its new spelling.

Old: `rope_theta`, `rope_scaling` and `partial_rotary_factor`. New: all of them in
`rope_parameters`. The old spelling is written, because all versions of transformers read it.
"""

from dataclasses import dataclass
from typing import Any

from model.config import ModelConfig
from model.families.base import FamilyError, Fields, Keys
from model.rope import RopeScaling

_TYPES: dict[str, tuple[str, ...]] = {
    "default": (),
    "linear": ("factor",),
    "llama3": (
        "factor",
        "low_freq_factor",
        "high_freq_factor",
        "original_max_position_embeddings",
    ),
    "yarn": (
        "factor",
        "original_max_position_embeddings",
        "beta_fast",
        "beta_slow",
        "attention_factor",
    ),
}
"""Parameters of every supported type, under the names of both sides."""
_OTHER_NAMES = {"su": "longrope"}


@dataclass(frozen=True)
class Rope:
    """Base, scaling and rotated share of the heads. theta: base where config.json has none."""

    theta: float = 10000.0

    names: tuple[str, ...] = (
        "rope_theta",
        "rope_scaling",
        "rope_parameters",
        "original_max_position_embeddings",
    )

    def read(self, keys: Keys, fields: Fields) -> None:
        """Set rope_theta and rope_scaling. Raises: FamilyError."""
        parameters = keys.get("rope_scaling") or keys.get("rope_parameters") or {}
        theta = parameters.get("rope_theta", keys.get("rope_theta"))
        fields["rope_theta"] = float(self.theta if theta is None else theta)
        fields["rope_scaling"] = read_scaling(parameters, keys)

    def write(self, model: ModelConfig, keys: dict[str, Any]) -> None:
        """Write the old spelling."""
        keys["rope_theta"] = model.rope_theta
        keys["rope_scaling"] = write_scaling(model.rope_scaling)


def read_scaling(parameters: Keys, keys: Keys) -> dict[str, Any]:
    """Return the fields of `RopeScaling` from `rope_scaling` or `rope_parameters`.

    keys: the whole config.json. Raises: FamilyError.
    """
    kind = parameters.get("rope_type", parameters.get("type", "default"))
    kind = _OTHER_NAMES.get(kind, kind)
    if kind not in _TYPES:
        raise FamilyError(
            f"config.json: rope type {kind!r} is not supported; supported: {', '.join(_TYPES)}"
        )
    passed = {"rope_type", "type", "rope_theta", "partial_rotary_factor", *_TYPES[kind]}
    unknown = [name for name, v in parameters.items() if name not in passed and v is not None]
    if unknown:
        raise FamilyError(
            f"config.json: {unknown[0]}={parameters[unknown[0]]!r} is not supported for rope type "
            f"{kind}; if it has no effect, remove it from config.json"
        )
    values = {name: parameters[name] for name in _TYPES[kind] if parameters.get(name) is not None}
    if "original_max_position_embeddings" in _TYPES[kind]:
        original = keys.get("original_max_position_embeddings")
        if original is not None:
            values["original_max_position_embeddings"] = original
        values.setdefault("original_max_position_embeddings", keys.get("max_position_embeddings"))
    return {"type": kind, **values}


def write_scaling(scaling: RopeScaling) -> dict[str, Any] | None:
    """Return `rope_scaling`, or None for none."""
    if scaling.type == "default":
        return None
    values = {name: getattr(scaling, name) for name in _TYPES[scaling.type]}
    values = {name: value for name, value in values.items() if value is not None}
    return {"rope_type": scaling.type, **values}
