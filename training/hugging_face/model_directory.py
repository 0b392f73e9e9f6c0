"""A Hugging Face model directory: config.json, and the tensors of its safetensors files."""

import hashlib
import json
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from pydantic import ValidationError

import model.families  # noqa: F401 (registers the families)
from data.files import download_remedy
from model.config import ModelConfig
from model.families.base import Family, FamilyError, Fields, family_of, model_config
from model.families.layouts import Shape
from model.families.quantization import ENCODINGS, StoredTensor
from model.families.rules import given, whole_number
from model.families.tensors import Piece, find_pieces
from training.hugging_face.tensor_files import FLOATS, TensorInfo, read_header

CONFIG, INDEX, SINGLE = "config.json", "model.safetensors.index.json", "model.safetensors"
_HEAD, _EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"
_ROWS = 4096  # compared at once
_MAX_LISTED = 8
_COMPARED = 1024  # values of a tensor in the digest


class ModelDirectory:
    """A model directory, open for reading.

    Raises:
        ValueError: a file is damaged or missing, or the model is not supported; one line.
    """

    def __init__(self, directory: str | Path):
        self.path = Path(directory).expanduser()
        if not self.path.is_dir():
            raise ValueError(
                f"{directory} is not a directory; give the folder of a Hugging Face model"
                f"{download_remedy(str(directory))}"
            )
        self.keys = read_json(self.path, CONFIG, "a Hugging Face model")
        self.family: Family = family_of(self.keys)

    def read_fields(self) -> Fields:
        """Return the fields of `ModelConfig` by dotted path. Raises: FamilyError."""
        settings = self.keys.get("quantization_config") or {}
        is_object = isinstance(settings, dict)
        method = settings.get("quant_method") if is_object else settings
        if settings and not (is_object and str(method) in ENCODINGS):
            raise FamilyError(
                f"config.json: weights quantized by {method!r} are not supported, only "
                f"{' and '.join(ENCODINGS)}; use the model without quantization"
            )
        if settings:
            ENCODINGS[str(method)].check(settings)
        fields = self.family.read(self.keys)
        stored = self.keys.get("dtype", self.keys.get("torch_dtype"))
        fields["dtype"] = "float32" if stored == "float32" else "bfloat16"
        return fields

    def read_model(self) -> ModelConfig:
        """Return the model that config.json describes. Raises: ValueError if it is not valid."""
        fields = self.read_fields()
        try:
            return model_config(fields)
        except ValidationError as error:
            reason = " ".join(str(error).split())
            raise ValueError(f"{self.path / CONFIG}: {reason}; correct it") from error

    @cached_property
    def infos(self) -> dict[str, TensorInfo]:
        """The tensors of all files by name, as they are on disk."""
        if not (self.path / INDEX).is_file():
            if not (self.path / SINGLE).is_file():
                raise ValueError(
                    f"{self.path} has neither {SINGLE} nor {INDEX}; only safetensors are read"
                )
            return read_header(self.path / SINGLE)
        where = read_json(self.path, INDEX, "a Hugging Face model").get("weight_map")
        if not isinstance(where, dict) or not where or {*map(type, where.values())} != {str}:
            raise ValueError(
                f"{self.path / INDEX} has no map of names to files (weight_map); download it again"
            )
        files = sorted(set(where.values()))
        if missing := [name for name in files if not (self.path / name).is_file()]:
            raise ValueError(f"{self.path}: {INDEX} names files that are missing: {few(missing)}")
        headers = {name: read_header(self.path / name) for name in files}
        if absent := [name for name, file in where.items() if name not in headers[file]]:
            raise ValueError(
                f"{self.path}: {INDEX} names tensors that their files do not hold: {few(absent)}"
            )
        return {name: headers[file][name] for name, file in where.items()}

    @cached_property
    def digest(self) -> str:
        """SHA-256 of config.json, and of the name, type, shape and first values of every tensor."""
        found = hashlib.sha256(json.dumps(self.keys, sort_keys=True).encode())
        for name, info in sorted(self.infos.items()):
            found.update(repr((name, info.dtype, info.shape)).encode())
            found.update(info.open().reshape(-1)[:_COMPARED].tobytes())
        return found.hexdigest()

    @cached_property
    def _encoded(self) -> dict[str, tuple[str, ...]]:
        """Names of the tensors on disk that encode a weight, by the name of the weight."""
        settings = self.keys.get("quantization_config")
        if not settings:
            return {}
        suffixes, decoded, *_ = ENCODINGS[settings["quant_method"]]
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
        """Return whether a weight is quantized on disk."""
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
            problems.append(f"{self.family.architecture} has no tensor for {few(unnamed)}")
        pieces = {piece.name: piece for part in found.values() for piece in part}
        if missing := [name for name in pieces if name not in self.names]:
            problems.append(f"missing: {few(missing)}")
        rest = sorted(self.names - pieces.keys() - self.extra_names)
        if unknown := [name for name in rest if not self._is_derived(name)]:
            problems.append(f"unknown: {few(unknown)}")
        stored = [name for name in pieces if name in self.names]
        types = {name: problem for name in stored if (problem := self._find_type_problem(name))}
        if types:
            problems.append(f"wrong type: {few([f'{name} {types[name]}' for name in types])}")
        shapes = [
            f"{name} {self.shape(name)} instead of {pieces[name].stored_shape}"
            for name in stored
            if name not in types and self.shape(name) != pieces[name].stored_shape
        ]
        if shapes:
            problems.append(f"wrong shape: {few(shapes)}")
        if problems:
            raise FamilyError(f"{self.path}: tensors do not fit config.json: {'; '.join(problems)}")
        if _HEAD in self.names - pieces.keys() and not self._head_is_embedding:
            raise FamilyError(
                f"{self.path}: tie_word_embeddings is true, but {_HEAD} differs from {_EMBEDDING}; "
                "set tie_word_embeddings to false in config.json"
            )
        return found

    @cached_property
    def _head_is_embedding(self) -> bool:
        """Whether the head on disk, which is not read, equals the embedding."""
        if self.shape(_HEAD) != self.shape(_EMBEDDING):
            return False
        head, embedding = self.open(_HEAD), self.open(_EMBEDDING)
        parts = (slice(row, row + _ROWS) for row in range(0, self.shape(_HEAD)[0], _ROWS))
        return all(np.array_equal(head[part], embedding[part]) for part in parts)

    def _find_type_problem(self, name: str) -> str | None:
        """Return why a weight cannot be read whatever its shape is, or None."""
        if name not in self._encoded:
            dtype = self.infos[name].dtype
            return None if dtype in FLOATS else f"is {dtype} without scales"
        try:
            self.open(name)
        except ValueError as error:
            return str(error)
        return None

    def _is_derived(self, name: str) -> bool:
        """Return whether a tensor follows from others."""
        is_tied = name == _HEAD and self.family.read(self.keys)["tie_word_embeddings"]
        return is_tied or name.endswith("rotary_emb.inv_freq")

    @cached_property
    def extra_names(self) -> frozenset[str]:
        """Names of the weights of multi-token prediction, in layers after the last one."""
        first = self.family.read(self.keys)["num_hidden_layers"]
        name = "num_nextn_predict_layers"
        extra = whole_number(name, given(self.keys, name, given(self.keys, "num_mtp_layers", 0)), 0)
        layers = {f"model.layers.{layer}." for layer in range(first, first + extra)}
        return frozenset(n for n in self.names if any(map(n.startswith, layers)))


def read_json(directory: Path, name: str, wanted: str) -> dict[str, Any]:
    """Return the JSON object of a file; `wanted` says what the directory should be.

    Raises: ValueError if it is missing or damaged.
    """
    path = directory / name
    try:
        content = json.loads(path.read_text("utf-8"))
    except FileNotFoundError as error:
        raise ValueError(f"{directory} has no {name}; give {wanted}") from error
    except (OSError, ValueError) as error:
        raise ValueError(f"{path} cannot be read: {error}; download it again") from error
    if not isinstance(content, dict):
        raise ValueError(f"{path} holds no JSON object; download it again")
    return content


def few(names: Sequence[str]) -> str:
    """Return names as a list, shortened if there are many."""
    rest = f" and {len(names) - _MAX_LISTED} more" if len(names) > _MAX_LISTED else ""
    return ", ".join(names[:_MAX_LISTED]) + rest
