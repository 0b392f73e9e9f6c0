"""Initial parameters from another run or a Hugging Face model: `training.init_from`.

Only parameters are read: optimizer, schedule, data and step start anew. They may belong to another
configuration, as long as every parameter has the same shape.
"""

import contextlib
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol

import jax
import numpy as np
from ruamel.yaml import YAML

from data.bucket_path import AnyPath
from data.files import download_remedy
from model.config import ModelConfig
from model.families.base import FamilyError, mathematics
from model.int8_base import is_scale, quantize_array, scale_path, without_scales
from model.lora import LoRAConfig, is_adapter, without_adapters
from model.multi_token import MODULES, is_module, without_modules
from parallel.cluster.process_group import ProcessGroup
from training.bucket_runs import checkpoint_folder, local_path, open_local
from training.checkpoint import Checkpoints
from training.checkpoint_policy import CheckpointConfig
from training.checkpoint_record import CheckpointError, Leaves, read_record, saved_steps
from training.dotted_keys import flatten
from training.fingerprint import leaf_name
from training.hugging_face.model_directory import CONFIG, ModelDirectory
from training.hugging_face.read import read_parameters
from training.logs import log
from training.state import TrainState
from training.step import Program
from training.vocabulary_rows import VocabularyRows

_KEY = "training.init_from"
_MODULES = "mtp_loss_weights"
_SPARSE_LAYERS = ("moe.num_experts", "moe.first_k_dense_replace", "moe.decoder_sparse_step")
# Keys of the model that decide which parameters there are, and their shapes. Another padding of the
# vocabulary fits too.
SHAPE_KEYS = (
    *_SPARSE_LAYERS,
    _MODULES,
    "vocab_size",
    "hidden_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "intermediate_size",
    "qk_norm",
    "attention_sinks",
    "tie_word_embeddings",
    "moe.moe_intermediate_size",
    "moe.num_shared_experts",
    "moe.bias_update_speed",
    "moe.router_bias",
    "moe.shared_expert_gate",
    "biases",
    "norm_placement",
    "qk_norm_across_heads",
    "mla.q_lora_rank",
    "mla.kv_lora_rank",
    "mla.v_head_dim",
    "mla.qk_nope_head_dim",
    "mla.qk_rope_head_dim",
)
Differences = dict[str, tuple[Any, Any]]
"""(value of the source, value of this run) of keys of the section `model`, by dotted path."""
Shapes = Mapping[str, tuple[int, ...]]


class InitialParameters(Protocol):
    """Source of initial parameters."""

    @property
    def description(self) -> str:
        """Place of the parameters, for a log line."""

    @property
    def has_adapters(self) -> bool:
        """Whether they include low-rank adapters."""

    def find_differences(self, model: ModelConfig) -> Differences:
        """Return how the model that they belong to differs from this one."""

    def find_problem(self, shapes: Shapes) -> str | None:
        """Return how the parameters differ from these shapes, or None if they fit."""

    def select(self, params: Any) -> Any:
        """Return the parameters of this run that the source has; it may lack adapters, for one."""

    def read(self, abstract_state: TrainState) -> Any:
        """Return these parameters with the shardings of `abstract_state.params`, in any dtype."""


@dataclass(frozen=True)
class CheckpointParameters:
    """The parameters of a checkpoint of ours."""

    folder: AnyPath
    """The folder `checkpoints` of a run directory."""
    step: int
    model: ModelConfig
    lora: LoRAConfig
    leaves: Leaves
    """Shape and dtype of every parameter that may be read, by its dotted path."""
    config: ModelConfig
    """The model of this run."""
    rows: VocabularyRows | None = None
    """Numbers of vocabulary rows, if the two models pad the same vocabulary differently."""
    is_own: bool = False
    """Whether it is checkpoint 0 of this run, as `scripts/convert.py` writes it."""

    @property
    def description(self) -> str:
        """The step and the run directory."""
        return f"checkpoint {self.step} of {self.folder.parent}"

    @property
    def has_adapters(self) -> bool:
        """Whether the run had LoRA."""
        return any(map(is_adapter, self.leaves))

    @property
    def has_scales(self) -> bool:
        """Whether the frozen kernels are stored as int8."""
        return any(map(is_scale, self.leaves))

    def find_differences(self, model: ModelConfig) -> Differences:
        """Return all keys that differ, also those of how a model is computed and trained."""
        return _compare(self.model.model_dump(), model.model_dump())

    def find_problem(self, shapes: Shapes) -> str | None:
        """Return the first parameter that is missing, extra, or has another shape."""
        if not self.has_scales:  # kernels are quantized when they are read
            shapes = {name: shape for name, shape in shapes.items() if not is_scale(name)}
        if (rows := self.rows) is not None:
            leaves = self.leaves
            shapes = {
                name: rows.stored_shape(tuple(leaves[name][0]), x) if name in leaves else x
                for name, x in shapes.items()
            }
        for name in sorted(self.leaves.keys() | shapes.keys()):
            there = tuple(self.leaves[name][0]) if name in self.leaves else "no"
            if (here := shapes.get(name, "no")) != there:
                here = here if name in shapes else "none"
                return f"it has {there} {name}, but the model of this run has {here}"
        return None

    def select(self, params: Any) -> Any:
        """Return the part of the parameters that this source has."""
        if not any(map(is_module, self.leaves)):
            params = without_modules(params)
        return params if self.has_adapters else without_adapters(params)

    def read(self, abstract_state: TrainState) -> Any:
        """Return the parameters as stored, verified against their fingerprints.

        Raises:
            CheckpointError: they cannot be read, or are damaged.
        """

        def stored(path: Any, want: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
            dtype = self.leaves[leaf_name(path)][1]
            return jax.ShapeDtypeStruct(want.shape, dtype, sharding=want.sharding)

        wanted = self.select(abstract_state.params)
        settings = CheckpointConfig()
        checkpoints = Checkpoints(self.folder, settings, read_only=True, model=self.config)
        with contextlib.closing(checkpoints):
            try:
                if not self.has_scales and without_scales(wanted) != wanted:
                    return self._read_quantized(checkpoints, wanted)
                params = jax.tree_util.tree_map_with_path(stored, wanted)
                return checkpoints.restore_params(self.step, replace(abstract_state, params=params))
            except CheckpointError as error:
                place = "run.dir" if self.is_own else _KEY
                remedy = _other_source(is_own=self.is_own)
                raise CheckpointError(f"{place}: {error}; {remedy}") from error

    def _read_quantized(self, checkpoints: Checkpoints, wanted: Any) -> Any:
        """Return the stored parameters; quantize those that are int8 in `wanted`, one at a time.

        Only one of them exists in floats at a time. Raises: CheckpointError.
        """
        arrays = {}
        for path, leaf in jax.tree_util.tree_leaves_with_path(without_scales(wanted)):
            name = leaf_name(path)
            array = checkpoints.read(self.step, f"params.{name}", leaf.sharding, leaf.shape)
            if leaf.dtype == np.int8:
                arrays[name], arrays[scale_path(name)] = quantize_array(array)
            else:
                arrays[name] = array
        return jax.tree_util.tree_map_with_path(lambda path, _: arrays[leaf_name(path)], wanted)


@dataclass(frozen=True)
class HuggingFaceParameters:
    """The parameters of a Hugging Face model directory."""

    source: ModelDirectory
    config: ModelConfig
    """The model of this run."""

    @property
    def description(self) -> str:
        """The directory."""
        return str(self.source.path)

    @cached_property
    def model(self) -> ModelConfig:
        """The model that config.json describes. Raises: ValueError if it is not supported."""
        return self.source.read_model()

    @property
    def has_adapters(self) -> bool:
        """Never: adapters have files of their own."""
        return False

    def find_differences(self, model: ModelConfig) -> Differences:
        """Return the keys that differ, without those that config.json has no place for."""
        # A dense model has no keys of experts among its mathematics.
        now = model.model_dump() | mathematics(model)
        found = _compare(mathematics(self.model), now)
        if found.pop("sparse_layers", None):  # several keys decide it
            keys = _compare(self.model.model_dump(), model.model_dump())
            found |= {key: keys[key] for key in _SPARSE_LAYERS if key in keys}
        return found

    def find_problem(self, shapes: Shapes) -> str | None:
        """Return which tensors are missing, unknown, or of another shape."""
        try:
            base = {name: shape for name, shape in shapes.items() if not is_scale(name)}
            self.source.find_pieces(self.config, base)
        except FamilyError as error:
            problem = str(error).removeprefix(f"{self.source.path}: ")
            return problem.replace("fit config.json", "fit the model of this run")
        return None

    def select(self, params: Any) -> Any:
        """Return the parameters without what the directory never has."""
        return without_adapters(without_modules(params))

    def read(self, abstract_state: TrainState) -> Any:
        """Return the parameters in the dtypes of `abstract_state`."""
        wanted = self.select(abstract_state.params)
        return read_parameters(self.source.path, self.config, wanted)


def check_is_elsewhere(path: str, run_directory: Path, *, is_moved: bool = False) -> None:
    """Raise ValueError if `training.init_from` names the run itself.

    is_moved: whether `checkpoint.resume=never` moves all of its directory aside.
    """
    found, own = local_path(path).resolve(), run_directory.resolve()
    if found == own or found.is_relative_to(own / "checkpoints"):
        reason = "is run.dir itself, which the run overwrites"
    elif is_moved and found.is_relative_to(own):
        reason = "is in run.dir, which checkpoint.resume=never moves aside"
    else:
        return
    raise ValueError(f"{_KEY}={path} {reason}; give another run.dir")


def open_initial_parameters(
    path: str, program: Program, group: ProcessGroup, *, is_own: bool = False
) -> InitialParameters:
    """Find the parameters that `training.init_from` names, and log how their model differs.

    No array is read. Communication: process 0 chooses the checkpoint and broadcasts its step. Of a
    Hugging Face model, the processes compare what they see.

    Args:
        path: value of `training.init_from`, or the place of checkpoint 0 of this run.
        program: of this run.
        group: the processes of this run.
        is_own: whether it is checkpoint 0 of this run.

    Raises:
        ValueError: there are none, they cannot be read, or they do not fit the model of this run.
        ProcessGroupError: the processes see different models.
    """
    folder = open_local(path)
    is_model = (folder / CONFIG).is_file() and not (folder / "checkpoints").is_dir()
    model = ModelDirectory(folder) if is_model else None
    if group.num_processes > 1:
        seen = "no Hugging Face model" if model is None else f"model {model.digest[:16]}"
        group.check_equal("initial parameters", {f"{_KEY}={path}": seen})
    found: InitialParameters = (
        _open_checkpoint(folder, group, program, is_own=is_own)
        if model is None
        else HuggingFaceParameters(model, program.config)
    )
    different = found.find_differences(program.config)
    wanted = found.select(program.abstract_state.params)
    paths = jax.tree_util.tree_leaves_with_path(wanted)
    if problem := found.find_problem({leaf_name(path): leaf.shape for path, leaf in paths}):
        remedy = _remedy(different, found.has_adapters)
        raise ValueError(f"{_KEY}: {found.description}: {problem}; {remedy}")
    if isinstance(found, CheckpointParameters) and found.has_adapters:
        _check_scale(found, program.plan.lora)
    for key, (before, now) in different.items():
        log.info("%s: model.%s was %r, is %r", _KEY, key, before, now)
    if MODULES in program.abstract_state.params and MODULES not in wanted:
        log.info("%s: modules of multi-token prediction start from random values", _KEY)
    return found


def _check_scale(found: CheckpointParameters, lora: LoRAConfig) -> None:
    """Raise ValueError if adapters would act with another scale than that of their training."""
    if not math.isclose(found.lora.scale, lora.scale):
        raise ValueError(
            f"{_KEY}: {found.description} has adapters of scale {found.lora.scale:g}, and this run "
            f"has {lora.scale:g}; set lora.alpha={found.lora.scale * lora.rank:.12g}"
        )


def _compare(source: Mapping[str, Any], model: Mapping[str, Any]) -> Differences:
    """Return the differences of two models, as trees of their fields."""
    # JSON has one kind of list.
    before, after = (json.loads(json.dumps(tree)) for tree in (source, model))
    # A section that only this model has, such as mla, is one difference.
    now = after | flatten(after)
    found = ((key, value, now.get(key)) for key, value in flatten(before).items())
    return {key: (value, other) for key, value, other in found if other != value}


def _remedy(different: Differences, has_adapters: bool) -> str:
    """Return what to do about parameters of other shapes."""
    keys = [key for key in different if key in (*SHAPE_KEYS, "mla")]
    # Weights do not have to be equal, only the number of modules, and only if both have some.
    before, now = map(len, different.get(_MODULES, ((), ())))
    keys = [key for key in keys if key != _MODULES or (before != now and before and now)]
    values = {f"model.{key}": different[key][0] for key in keys}
    if values.get("model.moe.bias_update_speed"):  # a frozen bias fits too, and adapters need it
        del values["model.moe.bias_update_speed"]
        values["model.moe.router_bias"] = True
    if values:  # as the command line takes them
        return "set " + ", ".join(f"{key}={json.dumps(value)}" for key, value in values.items())
    return "set the section lora as in that run" if has_adapters else "name another"


def _other_source(*, is_own: bool) -> str:
    """Return what to do about a checkpoint that cannot be read."""
    return "convert the model again, into a new run.dir" if is_own else "name another checkpoint"


def _open_checkpoint(
    path: Path, group: ProcessGroup, program: Program, *, is_own: bool
) -> CheckpointParameters:
    """Return the parameters of RUN_DIR/checkpoints/STEP, or of the newest step of RUN_DIR.

    Those of modules of multi-token prediction are left out if the program has none.
    """
    run, asked = path, None
    if path.name.isdecimal() and path.parent.name == "checkpoints":
        run, asked = path.parent.parent, int(path.name)
    folder = checkpoint_folder(run)
    step = group.broadcast("init_from", lambda: _find_step(path, folder, asked))
    try:
        record = read_record(folder / str(step), step)
        # A checkpoint that no run has written has no configuration of its own.
        text = record.get("config") or (run / "config.yaml").read_text("utf-8")
        tree = YAML(typ="safe", pure=True).load(text)
        model = ModelConfig.model_validate(tree.get("model") or {})
        lora = LoRAConfig.model_validate(tree.get("lora") or {})
    except (CheckpointError, OSError, ValueError) as error:
        reason = " ".join(str(error).split())
        place = "run.dir" if is_own else f"{_KEY}={path}"
        remedy = _other_source(is_own=is_own)
        raise ValueError(f"{place}: {reason}; {remedy}") from error
    leaves = {
        name.removeprefix("params."): leaf
        for name, leaf in record["leaves"].items()
        if name.startswith("params.")
    }
    if MODULES not in program.abstract_state.params:
        leaves = {name: leaf for name, leaf in leaves.items() if not is_module(name)}
    rows = VocabularyRows.between(record, program.config)
    return CheckpointParameters(folder, step, model, lora, leaves, program.config, rows, is_own)


def _find_step(path: Path, folder: AnyPath, asked: int | None) -> int:
    found = saved_steps(folder)
    if not found or asked not in (None, *found):
        listed = f" (found: {', '.join(map(str, found))})" if found else ""
        is_missing = not found and not path.exists()
        problem = "does not exist" if is_missing else f"holds no checkpoint{listed}"
        raise ValueError(
            f"{_KEY}={path} {problem}; "
            "give a run directory of train.py, RUN_DIR/checkpoints/STEP, or a Hugging Face model"
            f"{download_remedy(str(path))}"
        )
    return found[-1] if asked is None else asked
