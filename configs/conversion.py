"""Conversion of Hugging Face model directories into run directories, and back."""

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import jax
import numpy as np

from configs.build import build_program, open_devices
from configs.reading import apply_overrides, import_plugins
from configs.runs import longest_rows
from configs.schema import Config, dump_config, fill_mesh, load_config, make_config
from data.tokenizers.base import (
    TOKENIZER_FILE,
    TOKENIZER_FOLDER,
    document_bos,
    open_tokenizer,
    saved_tokenizer,
)
from model.families.adapters import find_adapted
from model.families.base import Family, family_of, find_family, nested
from model.families.layouts import Shape
from model.int8_base import block_floats, is_scale, scale_path, without_scales
from model.lora import factor_paths, is_adapter, merge_block, with_adapters, without_adapters
from model.multi_token import is_module
from parallel.cluster.process_group import ProcessGroup
from safe_files import replace_file
from training import checkpoint_tools as tools
from training.bucket_runs import CHECKPOINTS, open_local
from training.checkpoint import Checkpoints
from training.checkpoint_record import holds_only_parameters
from training.directory import locked_run, run_directory
from training.fingerprint import leaf_name
from training.hugging_face.adapter_export import write_adapters
from training.hugging_face.adapters import ADAPTER_CONFIG, ADAPTER_FILE, AdapterDirectory
from training.hugging_face.companions import (
    COMPANIONS,
    SOURCE_FILE,
    adapt_companions,
    copy_companions,
    export_companions,
    load_source,
    token_ids,
)
from training.hugging_face.model_directory import CONFIG, INDEX, ModelDirectory
from training.hugging_face.new_directory import NewDirectory
from training.hugging_face.read import read_parameters
from training.hugging_face.write import (
    SAFETENSORS_TYPES,
    describe_source,
    plan_export,
    write_config,
    write_tensors,
)
from training.resume import describe_process, first_record
from training.step import Program
from training.stored_arrays import Chunk

_TEMPORARY = ("*.tmp", f".{TOKENIZER_FILE}*")
_RUN_FILES = ("checkpoints", TOKENIZER_FOLDER, TOKENIZER_FILE, SOURCE_FILE, *_TEMPORARY)
_MODEL_FILES = ("*.safetensors", INDEX, *COMPANIONS, *_TEMPORARY)
_WRITE_BYTES = 2**30  # of an import; the compressed copies take about as much host memory

Progress = Callable[[int, int], None]
"""Called with (bytes done, bytes in all)."""


def import_config(
    directory: Path,
    run: Path,
    overrides: Sequence[str] = (),
    adapters: AdapterDirectory | None = None,
) -> Config:
    """Return the configuration of a run that starts from a Hugging Face model.

    The vocabulary is padded to a multiple of `mesh.tp` unless an override says otherwise. The
    section `lora` is that of the adapters, if there are any.
    Raises: ValueError for a model that is not supported, or an override that does not fit it.
    """
    given: dict[str, Any] = {}
    apply_overrides(given, overrides)
    if "dir" in (given.get("run") or {}):
        raise ValueError(f"run.dir: the run directory is the argument {run}; remove the override")
    import_plugins(given)  # they may register the family
    source = ModelDirectory(directory)
    saved = str(run_directory(str(run)) / TOKENIZER_FOLDER)
    has_tokenizer = (source.path / TOKENIZER_FILE).is_file()
    tree: dict[str, Any] = {
        "run": {"dir": str(run)},
        "model": nested(source.read_fields()),
        "data": {"tokenizer": saved} if has_tokenizer else {},
    }
    if adapters is not None:
        tree["lora"] = adapters.lora_fields(source.family, source.read_model())
    apply_overrides(tree, overrides)
    _pad_vocabulary(tree)
    config = make_config(tree)
    if adapters is not None:
        adapters.check(config.lora)
    # Without the library a model can be converted all the same.
    if has_tokenizer and config.data.tokenizer == saved and find_spec("tokenizers"):
        open_tokenizer(str(source.path), config.data.eos_token)
    return config


def _pad_vocabulary(tree: dict[str, Any]) -> None:
    """Pad the vocabulary for `mesh.tp`, unless the tree says how. Wrong values stay as they are."""
    mesh, model = tree.get("mesh"), tree.get("model")
    if not isinstance(mesh, dict) or not isinstance(model, dict):
        return
    tp, size = mesh.get("tp"), model.get("vocab_size")
    if type(tp) is int and tp > 0 and type(size) is int and size % tp:
        model.setdefault("pad_vocab_to_multiple_of", tp)


@dataclass(frozen=True)
class Imported:
    """Result of an import. notice: the line about simulated devices, if there are any."""

    num_bytes: int
    """Bytes of the parameters on the devices of this process."""
    has_tokenizer: bool
    notice: str | None


def import_model(
    directory: Path,
    config: Config,
    group: ProcessGroup,
    progress: Progress | None = None,
    adapters: AdapterDirectory | None = None,
) -> Imported:
    """Write the run directory `config.run.dir` with the parameters of a model as checkpoint 0.

    All processes call this; each reads what its own devices hold.

    Raises:
        ValueError: the model does not fit, or the run directory is not empty; nothing was written.
        CheckpointError: the checkpoint could not be written.
    """
    run = run_directory(config.run.dir)
    if config.lora.rank and adapters is None:
        raise ValueError(
            f"lora.rank={config.lora.rank}: a converted model has no adapters; convert it without, "
            "and set lora.rank and training.init_from in train.py, or give --adapters"
        )
    if weights := config.model.mtp_loss_weights:
        raise ValueError(
            f"model.mtp_loss_weights={[*weights]}: a converted model has no such modules; convert "
            "it without, and set the key in train.py, with training.init_from"
        )
    new = NewDirectory(run, "config.yaml", _RUN_FILES)
    if group.is_primary:
        new.check()
    devices, notice = open_devices(config)
    config = fill_mesh(config, len(devices))
    program = build_program(config, devices)
    with contextlib.ExitStack() as stack:
        stack.enter_context(jax.set_mesh(program.tp.manager.mesh))
        abstract = program.abstract_state.params
        base = without_adapters(abstract)
        source = describe_source(directory, config.model, _shapes(without_scales(base)))
        added = {}
        if adapters is not None:
            family = family_of(source.config)
            added = adapters.read(family, config.model, config.lora, abstract)
        if group.is_primary:
            num_bytes = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(abstract))
            stack.enter_context(locked_run(run, num_bytes, group))
            stack.enter_context(new.filling())
        group.barrier("empty")
        params = read_parameters(directory, config.model, base, progress)
        params = with_adapters(params, added)
        _save(run, config, program, params, group)
        if group.is_primary:
            copy_companions(directory, run)
            source.save(run)
            replace_file(run / "config.yaml", dump_config(config))
    has_tokenizer = (directory / TOKENIZER_FILE).is_file()
    return Imported(_local_bytes(params), has_tokenizer, notice)


def _save(run: Path, config: Config, program: Program, params: Any, group: ProcessGroup) -> None:
    """Save the parameters as checkpoint 0, and wait until they are on disk."""
    mesh = program.tp.manager.mesh.shape
    process = describe_process(dump_config(config), mesh, group.num_processes)
    checkpoints = Checkpoints(
        run / "checkpoints", config.checkpoint, group=group, write_bytes=_WRITE_BYTES
    )
    with contextlib.closing(checkpoints):
        checkpoints.save({"params": params}, 0, first_record(process))
        checkpoints.finish_last()


def _shapes(abstract: Any) -> dict[str, Shape]:
    paths = jax.tree_util.tree_leaves_with_path(abstract)
    return {leaf_name(path): leaf.shape for path, leaf in paths}


def _shapes_of(leaves: Mapping[str, Any], part: str) -> dict[str, Shape]:
    """Return the shapes of the arrays of one part of a checkpoint, by their paths in it."""
    return {n.removeprefix(part): tuple(x[0]) for n, x in leaves.items() if n.startswith(part)}


def _local_bytes(params: Any) -> int:
    return sum(s.data.nbytes for x in jax.tree.leaves(params) for s in x.addressable_shards)


def export_model(
    run: Path,
    directory: Path,
    step: int | None = None,
    *,
    ema: bool = False,
    dtype: str | None = None,
    progress: Progress | None = None,
) -> int:
    """Write a checkpoint of a run as a Hugging Face model directory; return its step.

    Args:
        run: run directory.
        directory: a new or empty folder.
        step: the checkpoint; None: the newest.
        ema: write the moving average of the parameters.
        dtype: float32 or bfloat16; None: the types of the model that the run was made from, else
            `model.param_dtype`.
        progress: called after each tensor.

    Raises:
        ValueError: the run or its model cannot be exported; nothing was written.
        CheckpointError: the checkpoint cannot be read.
    """
    new = NewDirectory(directory, CONFIG, _MODEL_FILES)
    new.check()
    with _open_parameters(run, step, ema=ema) as stored:
        config, source = stored.config, load_source(run)
        others: dict[str, Any] = {"max_position_embeddings": longest_rows(run, config)}
        tokenizer = None
        saved = saved_tokenizer(run, config.data.tokenizer)
        # An imported model keeps its own, unless the run was trained with another one.
        is_replaced = saved is not None and saved.name == TOKENIZER_FILE
        if source is None or (is_replaced and (run / TOKENIZER_FOLDER / TOKENIZER_FILE).is_file()):
            tokenizer = open_tokenizer(str(saved or config.data.tokenizer), config.data.eos_token)
            if source is not None:  # perhaps its own all the same, named by its file
                own = open_tokenizer(str(run / TOKENIZER_FOLDER), config.data.eos_token)
                tokenizer = None if own.digest == tokenizer.digest else tokenizer
            others |= {} if tokenizer is None else token_ids(tokenizer)
        export = plan_export(config.model, stored.shapes, source, dtype=dtype, others=others)
        with new.filling():
            write_tensors(directory, export, stored.chunks, progress)
            exported = None if saved == run / TOKENIZER_FOLDER else tokenizer
            export_companions(run, exported, directory)
            if saved is not None:
                opened = open_tokenizer(str(saved), config.data.eos_token)
                bos_id = document_bos(opened, config.data.add_bos)
                adapt_companions(directory, opened, bos_id)
            write_config(directory, export)
    return stored.step


def export_adapters(
    run: Path,
    directory: Path,
    step: int | None = None,
    *,
    ema: bool = False,
    dtype: str | None = None,
    progress: Progress | None = None,
) -> int:
    """Write the adapters of a checkpoint as a PEFT directory; return the step of the checkpoint.

    The arguments and errors are those of `export_model`; the type is float32 or bfloat16, by
    default `model.param_dtype`.
    """
    new = NewDirectory(directory, ADAPTER_CONFIG, (ADAPTER_FILE, *_TEMPORARY))
    new.check()
    with _open_parameters(run, step, ema=ema) as stored:
        model, lora = stored.config.model, stored.config.lora
        if not stored.adapters:
            raise ValueError(
                f"checkpoint {stored.step} of {run} has no adapters; leave out --adapters to write "
                "the model"
            )
        base, family = _find_base(run, stored.config)
        kernels = [path for path in stored.shapes if {*factor_paths(path)} & stored.adapters]
        tensors = find_adapted(family.tensors, stored.shapes, model, kernels)
        with new.filling():
            write_adapters(
                directory,
                tensors,
                lora,
                stored.read,
                dtype=SAFETENSORS_TYPES[dtype or model.param_dtype],
                base=None if base is None else str(base),
                progress=progress,
            )
    return stored.step


def _find_base(run: Path, config: Config) -> tuple[Path | None, Family]:
    """Return the model directory that a run started from, if it is known, and its family.

    A run may have started from another run, or from a checkpoint of one.
    Raises: ValueError: the model or run that `training.init_from` names does not exist any more.
    """
    source, first = load_source(run), config.training.init_from
    if source is not None:
        return None, family_of(source.config)
    if first is None:
        return None, find_family(config.model)
    path = open_local(first)
    if "://" not in first and not path.exists():
        raise ValueError(
            f"training.init_from={first} of {run} does not exist, and the names of adapters are "
            "those of that model; run this where it exists, or restore it"
        )
    if (path / CONFIG).is_file() and not (path / "checkpoints").is_dir():
        return path, ModelDirectory(path).family
    origin = path.parent.parent if path.parent.name == CHECKPOINTS else path  # a step of it
    return _find_base(origin, load_config(origin / "config.yaml"))


@dataclass(frozen=True)
class _StoredParameters:
    """The parameters of a checkpoint, as they are on disk."""

    config: Config
    """Configuration of the run."""
    step: int
    shapes: dict[str, Shape]
    """Shapes of all parameters but adapters, by dotted path."""
    adapters: frozenset[str]
    """Dotted paths of the factors of adapters."""
    read: Callable[[str], np.ndarray]
    """Returns a parameter by its dotted path, as it is stored."""
    chunks: Callable[[str], Iterator[Chunk]]
    """Yields a parameter in floats and with its adapter merged, in chunks of about 64 MiB."""


@contextlib.contextmanager
def _open_parameters(run: Path, step: int | None, *, ema: bool) -> Iterator[_StoredParameters]:
    """Open the parameters of a checkpoint, or their moving average. Raises: ValueError."""
    if not (run / "config.yaml").is_file():
        raise ValueError(f"{run} has no config.yaml; give a run directory of train.py")
    config = load_config(run / "config.yaml")
    with tools.open_checkpoints(tools.find_run(str(run))) as checkpoints:
        step = tools.choose_step(checkpoints, run, step)
        leaves = checkpoints.record(step)["leaves"]
        # Before the first step, the parameters are their own average.
        part = "ema." if ema and not holds_only_parameters(leaves) else "params."
        shapes = _shapes_of(leaves, part)
        if not shapes:
            raise ValueError(
                f"checkpoint {step} of {run} has no moving average of its parameters (ema); train "
                "with optimizer.ema_decay to get one"
            )
        adapters = frozenset(filter(is_adapter, shapes))
        base = "params." if adapters else part  # frozen parameters have no moving average
        names = _shapes_of(leaves, base)
        left_out = is_adapter, is_scale, is_module
        shapes = {n: x for n, x in names.items() if not any(is_part(n) for is_part in left_out)}
        device = tools.one_device()

        def stored(path: str) -> np.ndarray:
            name = (part if path in adapters else base) + path
            return np.asarray(checkpoints.read(step, name, device))

        def chunks(path: str) -> Iterator[Chunk]:
            (a, b), scales = factor_paths(path), scale_path(path)
            factors = (stored(a), stored(b)) if a in adapters else None
            scale = stored(scales) if scales != path and scales in names else None
            for start, block in checkpoints.chunks(step, base + path, device):
                if scale is not None:
                    block = block_floats(block, start, scale)
                if factors is not None:
                    block = merge_block(block, start, *factors, config.lora.scale)
                yield start, block

        yield _StoredParameters(config, step, shapes, adapters, stored, chunks)
