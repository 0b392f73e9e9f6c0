"""PEFT adapter directories, written from the low-rank adapters of a checkpoint."""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from model.families.adapters import AdaptedTensor, factor_names
from model.lora import LoRAConfig, factor_paths
from safe_files import replace_file, sync
from training.hugging_face.adapters import ADAPTER_CONFIG, ADAPTER_FILE
from training.hugging_face.tensor_files import create_file


def write_adapters(
    directory: Path,
    tensors: Sequence[AdaptedTensor],
    lora: LoRAConfig,
    read: Callable[[str], np.ndarray],
    *,
    dtype: str,
    base: str | None,
    progress: Callable[[int, int], None] | None = None,
) -> None:
    """Write an adapter directory.

    Args:
        directory: an existing folder.
        tensors: the adapted tensors of the model.
        lora: rank and scale.
        read: returns one of our factors by its path.
        dtype: safetensors type of the matrices.
        base: directory or name of the model without adapters, if it is known.
        progress: called with (bytes written, bytes in all).

    Raises:
        OSError: the disk is full or cannot be written.
    """
    shapes = {
        name: (dtype, shape)
        for tensor in tensors
        for name, shape in zip(
            factor_names(tensor.module), tensor.shapes(len(tensor.paths) * lora.rank), strict=True
        )
    }
    infos = create_file(directory / ADAPTER_FILE, shapes)
    total = sum(info.num_bytes for info in infos.values())
    done = 0
    for path in dict.fromkeys(path for tensor in tensors for path in tensor.paths):
        factors = [read(name) for name in factor_paths(path)]
        for tensor in (tensor for tensor in tensors if path in tensor.paths):
            a, b = (infos[name].open("r+") for name in factor_names(tensor.module))
            for piece in (piece for piece in tensor.pieces if piece.path == path):
                views = tensor.views(a, b, piece, lora.rank)
                for view, factor in zip(views, factors, strict=True):
                    view[...] = factor[piece.index]
                    done += view.nbytes
            if progress is not None:
                progress(done, total)
    keys = _adapter_config(tensors, lora, base)
    sync(directory / ADAPTER_FILE)
    replace_file(directory / ADAPTER_CONFIG, json.dumps(keys, indent=2) + "\n")


def _adapter_config(
    tensors: Sequence[AdaptedTensor], lora: LoRAConfig, base: str | None
) -> dict[str, Any]:
    """Return the content of adapter_config.json, which completes a directory."""
    alpha = 2.0 * lora.rank if lora.alpha is None else lora.alpha
    parameters = sorted({tensor.target for tensor in tensors if tensor.is_parameter})
    fused = {tensor.target: len(tensor.paths) for tensor in tensors if len(tensor.paths) > 1}
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "inference_mode": True,
        "r": lora.rank,
        "lora_alpha": _number(alpha),
        # PEFT has no dropout for parameters.
        "lora_dropout": 0.0 if parameters else lora.dropout,
        "target_modules": sorted({tensor.target for tensor in tensors if not tensor.is_parameter}),
        "target_parameters": parameters or None,
        "rank_pattern": {target: count * lora.rank for target, count in fused.items()},
        "alpha_pattern": {target: _number(count * alpha) for target, count in fused.items()},
        "bias": "none",
        "fan_in_fan_out": False,
        "use_rslora": False,
        "use_dora": False,
        "modules_to_save": None,
    }


def _number(value: float) -> int | float:
    """Return a whole number as such: PEFT's alpha is one."""
    return int(value) if value == int(value) else value
