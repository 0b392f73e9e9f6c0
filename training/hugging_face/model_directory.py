"""A model directory of Hugging Face: config.json, and the tensors of its safetensors files."""

import json
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import model.families  # noqa: F401 (registers the families)
from model.config import ModelConfig
from model.families.base import Family, FamilyError, Fields, family_of
from model.families.layouts import Shape
from model.families.quantization import ENCODINGS, StoredTensor
from model.families.tensors import Piece, find_pieces
from training.hugging_face.tensor_files import TensorInfo, read_header

CONFIG, INDEX, SINGLE = "config.json", "model.safetensors.index.json", "model.safetensors"
_MAX_LISTED = 8


class ModelDirectory:
    """A model directory, open for reading.

    Raises:
        ValueError: what is damaged, missing or not supported, on one line.
    """

    def __init__(self, directory: str | Path):
        self.path = Path(directory).expanduser()
        if not self.path.is_dir():
            raise ValueError(f"{directory} is not a directory; give a model of Hugging Face")
        self.keys = self._read_json(CONFIG)
        self.family: Family = family_of(self.keys)

    def _read_json(self, name: str) -> dict[str, Any]:
        path = self.path / name
        try:
            content = json.loads(path.read_text("utf-8"))
        except FileNotFoundError as error:
            raise ValueError(f"{self.path} has no {name}; give a model of Hugging Face") from error
        except (OSError, ValueError) as error:
            raise ValueError(f"{path} cannot be read: {error}; get it again") from error
        if not isinstance(content, dict):
            raise ValueError(f"{path} holds no JSON object; get it again")
        return content

    def read_fields(self) -> Fields:
        """Return the fields of `ModelConfig` by dotted path. Raises: FamilyError."""
        settings = self.keys.get("quantization_config")
        if settings and settings.get("quant_method") not in ENCODINGS:
            raise FamilyError(
                f"config.json: weights quantized by {settings.get('quant_method')!r} are not "
                f"supported, only {' and '.join(ENCODINGS)}; use the model without quantization"
            )
        fields = self.family.read(self.keys)
        stored = self.keys.get("dtype", self.keys.get("torch_dtype"))
        fields["dtype"] = "float32" if stored == "float32" else "bfloat16"
        return fields

    @cached_property
    def infos(self) -> dict[str, TensorInfo]:
        """The tensors of all files by name, as they are on disk."""
        if not (self.path / INDEX).is_file():
            if not (self.path / SINGLE).is_file():
                raise ValueError(
                    f"{self.path} has neither {SINGLE} nor {INDEX}; only safetensors are read"
                )
            return read_header(self.path / SINGLE)
        where = self._read_json(INDEX).get("weight_map")
        if not isinstance(where, dict) or not where:
            raise ValueError(f"{self.path / INDEX} has no weight_map; get it again")
        files = sorted(set(where.values()))
        if missing := [name for name in files if not (self.path / name).is_file()]:
            raise ValueError(f"{self.path}: {INDEX} names files that are missing: {_few(missing)}")
        headers = {name: read_header(self.path / name) for name in files}
        if absent := [name for name, file in where.items() if name not in headers[file]]:
            raise ValueError(
                f"{self.path}: {INDEX} names tensors that their files do not hold: {_few(absent)}"
            )
        return {name: headers[file][name] for name, file in where.items()}

    @cached_property
    def _encoded(self) -> dict[str, tuple[str, ...]]:
        """Names of the tensors on disk that encode a weight, by the name of the weight."""
        settings = self.keys.get("quantization_config")
        if not settings:
            return {}
        suffixes, decoded, _ = ENCODINGS[settings["quant_method"]]
        stems = [n.removesuffix(suffixes[-1]) for n in self.infos if n.endswith(suffixes[-1])]
        return {
            stem + decoded: tuple(stem + suffix for suffix in suffixes)
            for stem in stems
            if all(stem + suffix in self.infos for suffix in suffixes)
        }

    @cached_property
    def names(self) -> frozenset[str]:
        """Names of all weights, after decoding."""
        parts = {part for parts in self._encoded.values() for part in parts}
        return frozenset((self.infos.keys() - parts) | self._encoded.keys())

    def open(self, name: str) -> StoredTensor:
        """Return a weight; it is read, and decoded, when it is indexed."""
        if name not in self._encoded:
            return self.infos[name].open()
        settings = self.keys["quantization_config"]
        tensors = [self.infos[part].open() for part in self._encoded[name]]
        return ENCODINGS[settings["quant_method"]].decode(tensors, settings)

    def shape(self, name: str) -> Shape:
        """Return the shape of a weight."""
        stored = self.open(name) if name in self._encoded else self.infos[name]
        return tuple(stored.shape)

    def is_encoded(self, name: str) -> bool:
        """Return whether a weight is stored in few bits."""
        return name in self._encoded

    def find_pieces(
        self, config: ModelConfig, leaves: Mapping[str, Shape]
    ) -> dict[str, list[Piece]]:
        """Return the pieces of all our arrays, after a check of every tensor.

        leaves: shapes of our arrays by dotted path.

        Raises:
            FamilyError: tensors that are missing, unknown, or of another shape, by name.
        """
        found = find_pieces(
            self.family.tensors, leaves, config, lambda piece: piece.name in self.names
        )
        problems = []
        if unnamed := [path for path, pieces in found.items() if not pieces]:
            problems.append(f"{self.family.architecture} has no tensor for {_few(unnamed)}")
        pieces = {piece.name: piece for part in found.values() for piece in part}
        if missing := [name for name in pieces if name not in self.names]:
            problems.append(f"missing: {_few(missing)}")
        unknown = [name for name in sorted(self.names - pieces.keys()) if not self._is_unused(name)]
        if unknown:
            problems.append(f"unknown: {_few(unknown)}")
        shapes = [
            f"{name} {self.shape(name)} instead of {piece.stored_shape}"
            for name, piece in pieces.items()
            if name in self.names and self.shape(name) != piece.stored_shape
        ]
        if shapes:
            problems.append(f"wrong shape: {_few(shapes)}")
        if problems:
            raise FamilyError(f"{self.path}: tensors do not fit config.json: {'; '.join(problems)}")
        return found

    def _is_unused(self, name: str) -> bool:
        """Return whether the model does not need a tensor: it follows from others or is extra."""
        if name.endswith("rotary_emb.inv_freq"):
            return True
        if name == "lm_head.weight" and self.family.read(self.keys)["tie_word_embeddings"]:
            return True
        layer = name.removeprefix("model.layers.").partition(".")[0]
        extra = self.keys.get("num_nextn_predict_layers") or self.keys.get("num_mtp_layers") or 0
        first = self.keys["num_hidden_layers"]
        return layer.isdecimal() and first <= int(layer) < first + extra


def _few(names: Sequence[str]) -> str:
    """Return names as a list, shortened if there are many."""
    rest = f" and {len(names) - _MAX_LISTED} more" if len(names) > _MAX_LISTED else ""
    return ", ".join(names[:_MAX_LISTED]) + rest
