"""PEFT adapter directories, read: low-rank adapters without the model that they belong to.

A directory holds adapter_config.json and adapter_model.safetensors. Its matrices are mapped into
memory, and copied to our factors one layer at a time; `adapter_export.py` writes directories.
"""

import math
import re
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, get_args

import jax
import numpy as np

from model.config import ModelConfig
from model.families.adapters import (
    AdaptedTensor,
    factor_names,
    find_adapted,
    module_of,
    output_name,
)
from model.families.base import Family
from model.families.layouts import Shape
from model.families.tensors import Entry, Piece
from model.int8_base import is_scale
from model.lora import LoRAConfig, LoRATarget, adapters_of, factor_paths, is_adapter, kernel_path
from training.fingerprint import leaf_name
from training.hugging_face.model_directory import few, read_json
from training.hugging_face.tensor_files import FLOATS, read_header

ADAPTER_CONFIG, ADAPTER_FILE = "adapter_config.json", "adapter_model.safetensors"
_KNOWN = frozenset(
    """
    peft_type r lora_alpha lora_dropout rank_pattern alpha_pattern target_modules target_parameters
    exclude_modules init_lora_weights layers_to_transform layers_pattern task_type inference_mode
    peft_version auto_mapping base_model_name_or_path revision ensure_weight_tying runtime_config
    megatron_core megatron_config qalora_group_size loftq_config eva_config corda_config
    lora_ga_config
    """.split()
)
"""Keys of adapter_config.json that are read, or that only choose tensors and initial values."""
_INITIAL_VALUES = (None, True, False, "gaussian", "orthogonal", "eva")
"""Values of init_lora_weights that leave the tensors of the model as they are."""


class AdapterDirectory:
    """A PEFT adapter directory, open for reading.

    Raises:
        ValueError: a file is damaged or missing, or the kind of adapter is not supported; one line.
    """

    def __init__(self, directory: str | Path):
        self.path = Path(directory).expanduser()
        self.keys = read_json(self.path, ADAPTER_CONFIG, "a PEFT adapter directory")
        self._check_kind()
        if not (self.path / ADAPTER_FILE).is_file():
            raise ValueError(f"{self.path} has no {ADAPTER_FILE}; only safetensors are read")
        self.infos = read_header(self.path / ADAPTER_FILE)

    def _check_kind(self) -> None:
        """Refuse adapters that are not plain LoRA. Raises: ValueError."""
        if (kind := self.keys.get("peft_type")) != "LORA":
            raise self._refusal("peft_type", kind, "only LORA is supported")
        for name, value in self.keys.items():
            if name not in _KNOWN and value not in (None, False, "none", [], {}):
                raise self._refusal(name, value, "is not supported; merge the adapters with PEFT")
        initial = self.keys.get("init_lora_weights")
        if initial not in _INITIAL_VALUES:
            reason = "changes the base model; convert the adapters to plain LoRA with PEFT"
            raise self._refusal("init_lora_weights", initial, reason)
        rank, alpha = self.keys.get("r"), self.keys.get("lora_alpha")
        if not _is_rank(rank):
            raise self._refusal("r", rank, "is not a whole number above 0; correct it")
        if not _is_alpha(alpha):
            raise self._refusal("lora_alpha", alpha, "is not a number above 0; correct it")
        self._check_patterns("rank_pattern", _is_rank, "a whole number above 0")
        self._check_patterns("alpha_pattern", _is_alpha, "a number above 0")
        targets = self.keys.get("target_parameters") or []
        if not isinstance(targets, list) or not all(isinstance(name, str) for name in targets):
            raise self._refusal("target_parameters", targets, "is no list of names; correct it")

    def _check_patterns(self, name: str, is_valid: Callable[[Any], bool], wanted: str) -> None:
        """Refuse a rank_pattern or alpha_pattern that cannot be applied. Raises: ValueError."""
        patterns = self.keys.get(name) or {}
        if not isinstance(patterns, dict) or not all(map(is_valid, patterns.values())):
            raise self._refusal(name, patterns, f"is no object with {wanted} per name; correct it")
        for pattern in patterns:
            try:
                _module_pattern(pattern)
            except re.error as error:
                reason = f"{pattern!r} is no regular expression ({error}); correct it"
                raise self._refusal(name, patterns, reason) from error

    def _refusal(self, name: str, value: Any, reason: str) -> ValueError:
        return ValueError(f"{self.path / ADAPTER_CONFIG}: {name}={value!r}: {reason}")

    def lora_fields(self, family: Family, model: ModelConfig) -> dict[str, Any]:
        """Return the section `lora` of the configuration of a run with these adapters.

        Where one tensor holds several of our kernels, all of them have adapters. Targets that
        differ between experts and other MLPs may name too many linears, which `read` refuses.
        Raises: ValueError: the adapters are not of a model of this family.
        """
        attention = set[str]()
        mlps = {"mlp": set[str](), "experts": set[str]()}
        for entry in family.tensors:
            if not self._has_adapter(entry, model):
                continue
            outputs = {output_name(path) for path in entry.paths}
            is_mlp = any(".mlp." in path for path in entry.paths)
            kind = "experts" if entry.stacked or "{expert}" in entry.name else "mlp"
            (mlps[kind] if is_mlp else attention).update(outputs)
        if not attention.union(*mlps.values()):
            raise ValueError(
                f"{self.path / ADAPTER_FILE}: no matrix belongs to a linear of "
                f"{family.architecture} (found: {few(sorted(self.infos)) or 'none'}); give "
                "adapters of this model"
            )
        sparse = model.sparse_layers
        has = {"mlp": False in sparse or model.moe.num_shared_experts, "experts": True in sparse}
        present = [outputs for group, outputs in mlps.items() if has[group]]
        common = set.intersection(*present)
        groups = {group for group, outputs in mlps.items() if outputs - common}
        return {
            "rank": self.keys["r"],
            "alpha": float(self.keys["lora_alpha"]),
            "targets": sorted(attention | common | groups, key=_target_order),
        }

    def _has_adapter(self, entry: Entry, model: ModelConfig) -> bool:
        """Return whether any layer has an adapter of a kind of tensor."""
        return any(
            self._is_adapted(entry.name.format(layer=layer, expert=0))
            for layer in range(model.num_hidden_layers)
        )

    def _is_adapted(self, name: str) -> bool:
        """Return whether there is an adapter of a tensor of the model."""
        if factor_names(module_of(name))[0] not in self.infos:
            return False
        if name.endswith(".weight"):
            return True
        targets = self.keys.get("target_parameters") or ()
        return any(f".{name}".endswith(f".{target}") for target in targets)

    def check(self, lora: LoRAConfig) -> None:
        """Check that a configuration has the rank and the scale of these adapters.

        Raises: ValueError.
        """
        rank, alpha = self.keys["r"], self.keys["lora_alpha"]
        if lora.rank != rank:
            raise ValueError(
                f"lora.rank={lora.rank} differs from r={rank} in {self.path / ADAPTER_CONFIG}; "
                f"set lora.rank={rank}"
            )
        if not math.isclose(lora.scale, alpha / rank):
            raise ValueError(
                f"lora.alpha={lora.scale * rank:g} differs from lora_alpha={alpha} in "
                f"{self.path / ADAPTER_CONFIG}; set lora.alpha={alpha}"
            )

    def find_tensors(
        self, family: Family, model: ModelConfig, lora: LoRAConfig, leaves: Mapping[str, Shape]
    ) -> list[AdaptedTensor]:
        """Return the adapted tensors, after a check of every matrix.

        leaves: shapes of all parameters of the run by dotted path, adapters included.
        Raises: ValueError: they are not the adapters that the configuration has.
        """
        base = {path: shape for path, shape in leaves.items() if not is_adapter(path)}
        wanted = {kernel_path(path) for path in leaves if is_adapter(path)}
        find = partial(
            find_adapted,
            family.tensors,
            base,
            model,
            exists=lambda piece: self._is_adapted(piece.name),
        )
        tensors = find()
        names = {name for tensor in tensors for name in factor_names(tensor.module)}
        problems = []
        if missing := sorted(names - self.infos.keys()):
            problems.append(f"missing: {few(missing)}")
        if unknown := sorted(self.infos.keys() - names):
            problems.append(f"unknown: {few(unknown)}")
        found = {path for tensor in tensors for path in tensor.paths}
        if not problems:
            extra = {tensor.paths[0] for tensor in tensors if not wanted.intersection(tensor.paths)}
            self._check_targets(family, model, lora, in_directory=extra, in_run=wanted - found)
            tensors = find(sorted(wanted))
            problems = [text for tensor in tensors if (text := self._problem(tensor, lora))][:1]
        if problems:
            reason = "; ".join(problems)
            raise ValueError(f"{self.path}: adapters do not fit {family.architecture}: {reason}")
        return tensors

    def _check_targets(
        self,
        family: Family,
        model: ModelConfig,
        lora: LoRAConfig,
        *,
        in_directory: set[str],
        in_run: set[str],
    ) -> None:
        """Refuse adapters of kernels that only the directory has, or only this run.

        Raises: ValueError.
        """
        for source, kernels in ((self.path, in_directory), ("this run", in_run)):
            if kernels:
                now, found = [*lora.targets], self.lora_fields(family, model)["targets"]
                others = "others" if found == now else f"[{','.join(found)}]"
                raise ValueError(
                    f"lora.targets=[{','.join(now)}]: only {source} has an adapter of "
                    f"{min(kernels)}; set lora.targets to {others}, or merge the adapters with PEFT"
                )

    def _problem(self, tensor: AdaptedTensor, lora: LoRAConfig) -> str | None:
        """Return how the matrices of a tensor differ from what the configuration asks for."""
        rank = self._setting("rank_pattern", "r", tensor)
        scale = self._setting("alpha_pattern", "lora_alpha", tensor) / rank
        if rank not in (lora.rank, len(tensor.paths) * lora.rank):
            return f"rank {rank} of {tensor.module} differs from lora.rank={lora.rank}"
        if not math.isclose(scale, lora.scale):
            return f"scale {scale:g} of {tensor.module} differs from {lora.scale:g}"
        for name, shape in zip(factor_names(tensor.module), tensor.shapes(rank), strict=True):
            if self.infos[name].dtype not in FLOATS:
                return f"{name} is {self.infos[name].dtype}"
            if self.infos[name].shape != shape:
                return f"wrong shape: {name} {self.infos[name].shape} instead of {shape}"
        if not self._is_whole(tensor, lora.rank):
            return f"B of {tensor.module} is not that of {', '.join(tensor.paths)} alone"
        return None

    def _setting(self, patterns: str, default: str, tensor: AdaptedTensor) -> Any:
        """Return the rank or alpha of a tensor, which a pattern may set as PEFT reads it."""
        names = tensor.name, tensor.name.removesuffix(".weight")
        for pattern, value in (self.keys.get(patterns) or {}).items():
            if any(map(_module_pattern(pattern).match, names)):
                return value
        return self.keys[default]

    def _is_whole(self, tensor: AdaptedTensor, rank: int) -> bool:
        """Return whether B is zero outside of the blocks of our kernels."""
        a, b = self._matrices(tensor)
        rest = np.array(b)
        for piece in tensor.pieces:
            tensor.views(a, rest, piece, rank)[1][...] = 0
        return not rest.any()

    def _matrices(self, tensor: AdaptedTensor) -> tuple[np.ndarray, np.ndarray]:
        a, b = (self.infos[name].open() for name in factor_names(tensor.module))
        return a, b

    def read(
        self, family: Family, model: ModelConfig, lora: LoRAConfig, abstract_params: Any
    ) -> dict[str, Any]:
        """Return the tree of adapters, with the dtypes and shardings asked for.

        All processes of the mesh call this. Communication: none.

        abstract_params: tree of jax.ShapeDtypeStruct with shardings, adapters included.
        Raises: ValueError as `find_tensors`.
        """
        paths = jax.tree_util.tree_leaves_with_path(abstract_params)
        leaves = {name: x.shape for path, x in paths if not is_scale(name := leaf_name(path))}
        pieces_by_index: dict[str, dict[tuple[int, ...], tuple[AdaptedTensor, Piece]]] = {}
        for tensor in self.find_tensors(family, model, lora, leaves):
            for piece in tensor.pieces:
                pieces_by_index.setdefault(piece.path, {})[piece.index] = tensor, piece

        def build(path: Any, leaf: jax.ShapeDtypeStruct) -> jax.Array:
            name = leaf_name(path)
            kernel = kernel_path(name)
            side = factor_paths(kernel).index(name)

            def fill(ranges: tuple[slice, ...] | None) -> np.ndarray:
                assert ranges is not None
                lead = leaf.ndim - 2
                shape = [len(range(n)[i]) for n, i in zip(leaf.shape, ranges, strict=True)]
                starts = [i.start or 0 for i in ranges[:lead]]
                block = np.empty(shape, leaf.dtype)
                for index in np.ndindex(*block.shape[:lead]):
                    global_index = tuple(i + n for i, n in zip(starts, index, strict=True))
                    tensor, piece = pieces_by_index[kernel][global_index]
                    views = tensor.views(*self._matrices(tensor), piece, lora.rank)
                    block[index] = views[side][ranges[lead:]]
                return block

            return jax.make_array_from_callback(leaf.shape, leaf.sharding, fill, dtype=leaf.dtype)

        return jax.tree_util.tree_map_with_path(build, adapters_of(abstract_params))


def _is_rank(value: Any) -> bool:
    return type(value) is int and value > 0


def _is_alpha(value: Any) -> bool:
    return type(value) in (int, float) and 0 < value < math.inf


def _module_pattern(pattern: str) -> re.Pattern[str]:
    """Return the expression that PEFT matches with names of modules. Raises: re.error."""
    return re.compile(rf"(.*\.)?({pattern})$")


def _target_order(name: str) -> int:
    order = ("q", "k", "v", *get_args(LoRATarget))
    return order.index(name) if name in order else len(order)
