"""The configuration of a run: one frozen tree of typed values, from YAML and overrides.

Every section is defined, with its defaults, in the file of the component that it configures. This
module combines the sections and checks them against each other; configs/reading.py reads them.
Every mistake of a user is a ConfigError on one line: key path, value, rule, remedy.
"""

import io
import math
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, get_args

from pydantic import BaseModel, field_validator
from ruamel.yaml import YAML

from configs.divisibility import check_divides, check_multiple, multiples
from configs.reading import ConfigError, import_plugins, read_tree, validate
from data.batch_schedule import BatchSchedule
from data.config import DataConfig, values_by_step
from data.tokenizers.byte_level import ByteTokenizer
from model.attention.registry import (
    AUTO,
    Feature,
    backends_of,
    blockwise_names,
    operation_for_generation,
)
from model.checks import check_model
from model.config import ModelConfig
from model.lora import LoRAConfig, LoRATarget, check_lora
from model.remat import AUTO as AUTO_REMAT
from model.remat import REMAT_POLICIES
from model.router import ROUTERS, check_router
from parallel.cluster.config import ClusterConfig
from parallel.experts.grouped_matmul import GROUPED_MATMULS
from parallel.linear.choice import OverlapChoice
from parallel.sharding.mesh import AUTO_SIZES, AXIS_NAMES, MeshConfig
from parallel.sharding.residual import DEFAULT_RESIDUAL, RESIDUAL_LAYOUTS
from parallel.sharding.specs import FEATURES, ROWS
from training.checkpoint_policy import CheckpointConfig
from training.config import RunConfig, TrainingConfig
from training.dpo import DPOConfig
from training.early_stop import check_early_stop, evaluation_metrics
from training.optimizers import OPTIMIZERS, OptimizerConfig, check_optimizer
from training.schedules import SCHEDULES
from training.writers.registry import WRITERS


class ParallelConfig(BaseModel, frozen=True, extra="forbid", use_attribute_docstrings=True):
    """Activation sharding and communication of linears."""

    residual: str = DEFAULT_RESIDUAL
    """Sharding of the residual stream over tp: sequence, hidden, replicated or a registered one."""
    overlap: OverlapChoice = "auto"
    """How linears overlap communication with matmuls; auto: chosen by shape and chip."""
    overlap_qkv: OverlapChoice | None = None
    """Overlap method of the q, k, v projections; null: as overlap."""
    overlap_o: OverlapChoice | None = None
    """Overlap method of the output projection of attention; null: as overlap."""
    overlap_mlp: OverlapChoice | None = None
    """Overlap method of the gate, up and down projections; null: as overlap."""
    overlap_head: OverlapChoice | None = None
    """Overlap method of the output head and its loss; null: as overlap."""
    overlap_experts: OverlapChoice | None = None
    """Overlap method of the experts' projections, not split or hypercube; null: as overlap."""
    overlap_fsdp: OverlapChoice | None = None
    """How kernels of linears are gathered over fsdp and sp, and how their gradients are summed,
    where tp is 1; auto: chosen by width and chip; null: as overlap. Experts, the head, and
    all linears of a run with lora.rank use plain collectives."""
    group_hops: bool = True
    """Tell the compiler for TPUs which matmuls hide a hop of `hypercube`; false: for a libtpu that
    refuses such a program."""
    replicate_kv: bool = False
    """Allow more tp devices than kv heads: every device all-gathers keys and values and takes the
    heads it needs."""

    @field_validator("residual")
    @classmethod
    def _is_a_layout(cls, name: str) -> str:
        RESIDUAL_LAYOUTS[name]
        return name


class Config(BaseModel, frozen=True, extra="forbid", use_attribute_docstrings=True):
    """Root of the configuration, with one section per component."""

    run: RunConfig = RunConfig()
    """Output directory, logging and compilation cache."""
    model: ModelConfig = ModelConfig()
    """Model dimensions and numerics."""
    lora: LoRAConfig = LoRAConfig()
    """Low-rank adapters for fine-tuning."""
    mesh: MeshConfig = MeshConfig()
    """Devices along each axis. One axis may be auto (or -1): it takes what the others leave."""
    cluster: ClusterConfig = ClusterConfig()
    """Timeouts among several processes."""
    parallel: ParallelConfig = ParallelConfig()
    """Activation sharding and overlap."""
    data: DataConfig = DataConfig()
    """Data sources and batches."""
    optimizer: OptimizerConfig = OptimizerConfig()
    """Optimizer and learning-rate schedule."""
    training: TrainingConfig = TrainingConfig()
    """Number of steps, seed, evaluation and sampling."""
    checkpoint: CheckpointConfig = CheckpointConfig()
    """Checkpointing and resuming."""
    plugins: tuple[str, ...] = ()
    """Python modules to import first, which register extensions such as an attention operation."""


def load_config(path: str | Path, overrides: Sequence[str] = ()) -> Config:
    """Read a YAML file, apply `section.key=value` overrides, and check everything.

    Raises: ConfigError.
    """
    tree = read_tree(path, overrides)
    mesh, named = tree.get("mesh"), {override.partition("=")[0] for override in overrides}
    if isinstance(mesh, dict):
        # An override that is auto takes over from an axis that is auto in the file.
        automatic = [axis for axis in AXIS_NAMES if mesh.get(axis) in AUTO_SIZES]
        replaced = [axis for axis in automatic if f"mesh.{axis}" not in named]
        if 0 < len(replaced) < len(automatic):
            mesh |= dict.fromkeys(replaced, 1)
    return make_config(tree)


def make_config(tree: dict[str, Any]) -> Config:
    """Check the values of a configuration file, and return them with all defaults.

    Raises: ConfigError.
    """
    import_plugins(tree)
    config = validate({**tree, "plugins": tuple(tree.get("plugins") or ())}, Config)
    # fill_mesh checks the sizes that an automatic axis divides: its own size is not known yet.
    _cross_check(config.model_copy(update={"mesh": config.mesh.smallest()}))
    return config


def fill_mesh(config: Config, num_devices: int) -> Config:
    """Return the configuration with the size that an automatic mesh axis has on these devices.

    Raises: ConfigError if the mesh, or what it divides, does not fit this number of devices.
    """
    axis = config.mesh.auto_axis
    if axis is None:
        return config
    try:
        filled = config.model_copy(update={"mesh": config.mesh.filled(num_devices)})
        _cross_check(filled)
    except ValueError as error:
        rule, _, remedy = str(error).partition("; ")
        remedy = _divided_between_axes(config, axis, num_devices) or remedy
        raise ConfigError(f"mesh.{axis}=auto on {num_devices} devices: {rule}; {remedy}") from error
    return filled


def _divided_between_axes(config: Config, axis: str, num_devices: int) -> str | None:
    """Return a remedy for an automatic axis that is too large: its largest size that fits.

    The other devices go along fsdp or dp. None: no such mesh fits.
    """
    mesh = config.mesh
    parts, remainder = divmod(num_devices, mesh.smallest().num_devices)
    for size in [n for n in range(parts, 0, -1) if not (remainder or parts % n)]:
        for other in [name for name in ("fsdp", "dp") if name != axis]:
            least = getattr(mesh.smallest(), axis)
            sizes = {axis: size * least, other: getattr(mesh, other) * parts // size}
            try:
                changed = MeshConfig(**(mesh.model_dump() | sizes))
                _cross_check(config.model_copy(update={"mesh": changed}))
            except ValueError:
                continue
            return "use " + " ".join(f"mesh.{name}={count}" for name, count in sizes.items())
    return None


def dump_config(config: Config) -> str:
    """Return the resolved configuration as YAML; `load_config` reads it back to an equal one."""
    stream = io.StringIO()
    yaml = YAML()
    yaml.default_flow_style = False
    yaml.dump(config.model_dump(mode="python"), stream)
    return stream.getvalue()


def _cross_check(config: Config) -> None:
    """Check the rules between sections; report the first one that is broken."""
    model, mesh = config.model, config.mesh
    _check_heads(config)
    if model.has_dense_mlp:
        check_divides("model.intermediate_size", model.intermediate_size, "mesh.tp", mesh.tp)
    vocab = "model.vocab_size" + (" (padded)" if model.pad_vocab_to_multiple_of > 1 else "")
    or_pad = f"model.pad_vocab_to_multiple_of={mesh.tp}"
    check_divides(vocab, model.padded_vocab_size, "mesh.tp", mesh.tp, or_pad)
    check_divides(
        "model.hidden_size", model.hidden_size, "mesh.fsdp * mesh.sp", mesh.fsdp * mesh.sp
    )
    for name in ("q_lora_rank", "kv_lora_rank") if model.mla is not None else ():
        width = getattr(model.mla, name) or 0
        check_divides(f"model.mla.{name}", width, "mesh.fsdp * mesh.sp", mesh.fsdp * mesh.sp)
    split_by_features = RESIDUAL_LAYOUTS[config.parallel.residual].split_dim == FEATURES
    if split_by_features or not model.tie_word_embeddings:
        check_divides("model.hidden_size", model.hidden_size, "mesh.tp", mesh.tp)
    if not model.tie_word_embeddings:
        axes, parts = "mesh.tp * mesh.fsdp * mesh.sp", mesh.tp * mesh.fsdp * mesh.sp
        check_divides("model.hidden_size (embedding)", model.hidden_size, axes, parts)
    _check_data(config)
    if len(model.layer_types) > model.num_hidden_layers:
        raise ConfigError(
            f"model.layer_types has {len(model.layer_types)} entries, but model.num_hidden_layers="
            f"{model.num_hidden_layers}; remove the entries past the last layer"
        )
    for kind, name in (
        ("sliding_attention", "sliding_window"),
        ("chunked_attention", "attention_chunk_size"),
    ):
        if kind in model.layer_types and getattr(model, name) is None:
            raise ConfigError(f"model.layer_types has {kind}, which needs model.{name}; set it")
        if kind not in model.layer_types and getattr(model, name) is not None:
            raise ConfigError(
                f"model.{name}={getattr(model, name)} applies to {kind} layers only, and "
                "model.layer_types has none; remove it, or add such a layer"
            )
    _check_experts(config)
    _check_objective(config)
    _check_groups(config)
    _require("model", lambda: check_model(model))
    _require("lora", lambda: check_lora(config.lora, model))
    _check_longrope(config)
    _check_registered(config)


def _check_heads(config: Config) -> None:
    """Check the heads of attention; `check_model` checks those of latent attention."""
    model, mesh = config.model, config.mesh
    heads, kv_heads = model.num_attention_heads, model.num_key_value_heads
    has_rope = True in model.rope_pattern
    if model.mla is not None:
        check_divides("model.num_attention_heads", heads, "mesh.tp", mesh.tp)
        return
    if model.head_dim is None:
        check_divides(
            "model.hidden_size",
            model.hidden_size,
            "model.num_attention_heads",
            heads,
            even=has_rope,
        )
    check_divides("model.num_attention_heads", heads, "model.num_key_value_heads", kv_heads)
    check_divides("model.num_attention_heads", heads, "mesh.tp", mesh.tp)
    if not config.parallel.replicate_kv:
        check_divides(
            "model.num_key_value_heads", kv_heads, "mesh.tp", mesh.tp, "parallel.replicate_kv=true"
        )
    check_divides(
        "kv features (model.num_key_value_heads * head_dim)",
        kv_heads * model.head_size,
        "mesh.tp",
        mesh.tp,
    )


def _check_objective(config: Config) -> None:
    """Check that the data are those of the objective, and that its options have an effect."""
    training, packing = config.training, config.data.packing
    if training.objective == "dpo" and packing != "pairs":
        raise ConfigError(
            f"training.objective=dpo learns from preference pairs, but data.packing={packing}; set "
            "data.packing=pairs"
        )
    if training.objective == "sft" and packing == "pairs":
        raise ConfigError(
            "data.packing=pairs reads preference pairs, but training.objective=sft; set "
            "training.objective=dpo"
        )
    if training.objective == "sft" and training.dpo != DPOConfig():
        raise ConfigError(
            "training.dpo has no effect with training.objective=sft; set training.objective=dpo, "
            "or remove training.dpo"
        )
    names = "label_smoothing", "z_loss", "noise_scale"
    unused = {f"training.{name}": getattr(training, name) for name in names}
    unused["model.mtp_loss_weights"] = [*config.model.mtp_loss_weights]
    for key, value in unused.items() if training.objective == "dpo" else ():
        if value:
            remedy = "set it to []" if isinstance(value, list) else "remove it"
            remedy += " or set training.dpo.label_smoothing" if "smoothing" in key else ""
            why = "has no effect with training.objective=dpo"
            raise ConfigError(f"{key}={str(value).lower()} {why}; {remedy}")
    if training.noise_scale and training.gradient_accumulation == 1:
        raise ConfigError(
            "training.noise_scale compares microbatches with their sum; set "
            "training.gradient_accumulation to 2 or more"
        )
    metrics = evaluation_metrics(training.objective, config.data.evaluated_sources)
    _require("training.early_stop", lambda: check_early_stop(training.early_stop, metrics))
    if (best := config.checkpoint.keep_best) and not metrics:
        raise ConfigError(
            f"checkpoint.keep_best={best} needs an evaluation, and there is no held-out split; "
            "raise data.eval_fraction, give eval_files, or set checkpoint.keep_best=0"
        )


def _check_longrope(config: Config) -> None:
    """Check that the choice between the two lists of factors fits the rows of the data."""
    scaling = config.model.rope_scaling
    longest = max(values_by_step(config.data.sequence_length).values())
    original = scaling.original_max_position_embeddings or longest
    if scaling.type == "longrope" and (scaling.row_length or 0) <= original < longest:
        raise ConfigError(
            f"data.sequence_length={longest} is longer than model.rope_scaling."
            f"original_max_position_embeddings={original}, but row_length={scaling.row_length} "
            f"chooses short_factor; set model.rope_scaling.row_length={longest}"
        )


def _check_groups(config: Config) -> None:
    """Check that the groups of `optimizer.groups` have trained parameters that can decay."""
    model, groups = config.model, config.optimizer.groups
    reasons = {
        "experts": None if any(model.sparse_layers) else "the model has none",
        "mlp": None if model.has_dense_mlp else "all layers have experts",
        "head": "the head is the embedding" if model.tie_word_embeddings else None,
    }
    if config.lora.rank:
        reasons |= dict.fromkeys(("embedding", "norms", "head"), "LoRA does not train it")
        outputs = {"gate", "up", "down"}
        targets = {
            "mlp": {"mlp", *outputs},
            "experts": {"experts", *outputs, *(["mlp"] if model.moe.num_shared_experts else [])},
        }
        targets["attention"] = {*get_args(LoRATarget)} - {"experts", *targets["mlp"]}
        for kind, names in targets.items():
            if not names & {*config.lora.targets}:
                reasons[kind] = reasons.get(kind) or "lora.targets has none of its linears"
    for kind in groups:
        if reason := reasons.get(kind):
            raise ConfigError(f"optimizer.groups.{kind} has no effect: {reason}; remove it")
    if "norms" in groups and groups["norms"].weight_decay is not None:
        raise ConfigError("optimizer.groups.norms.weight_decay: norms do not decay; remove it")


def _check_generates(config: Config) -> None:
    """Check that an operation of the user can generate samples, because none replaces it."""
    name = operation_for_generation(config.model.attention)
    if name == AUTO or not config.training.sample_tokens:
        return
    needed: set[Feature] = {"decode"} if config.model.mla is None else {"decode", "shared_values"}
    if not any(needed <= backend.capabilities.features for backend in backends_of(name)):
        raise ConfigError(
            f"model.attention={name} cannot generate text without {' and '.join(sorted(needed))} "
            "among its features; set training.sample_tokens=0, or add them"
        )


def _check_registered(config: Config) -> None:
    """Check the names that refer to registered implementations."""
    model, optimizer = config.model, config.optimizer
    if model.attention != AUTO:
        _require("model.attention", lambda: backends_of(model.attention), AUTO)
        _check_generates(config)
    for name in model.operation_configs.root:
        if name not in blockwise_names():
            raise ConfigError(
                f"model.operation_configs.{name}: no operation of this name works in blocks; use "
                f"one of {', '.join(blockwise_names())}"
            )
    if model.moe.grouped_matmul != "auto":
        given = model.moe.grouped_matmul
        _require("model.moe.grouped_matmul", lambda: GROUPED_MATMULS[given], "auto")
    if model.remat != AUTO_REMAT:
        _require("model.remat", lambda: REMAT_POLICIES[model.remat], AUTO_REMAT)
    _require("optimizer.name", lambda: OPTIMIZERS[optimizer.name])
    _require("optimizer", lambda: check_optimizer(optimizer))
    if model.mup_base_width is not None and not OPTIMIZERS[optimizer.name].width_powers:
        names = [name for name, entry in OPTIMIZERS.items() if entry.width_powers]
        raise ConfigError(
            f"model.mup_base_width={model.mup_base_width}: optimizer {optimizer.name} has no rule "
            f"for the width; use optimizer.name={' or '.join(names)}, or remove mup_base_width"
        )
    _require("optimizer.schedule", lambda: SCHEDULES[optimizer.schedule])
    for name in config.training.writers:
        _require("training.writers", partial(WRITERS.__getitem__, name))


def _require(key: str, look_up: Callable[[], object], other: str | None = None) -> None:
    """Raise a ConfigError that names the key if a name is not registered.

    other: A name that is allowed beside those that the error lists.
    """
    try:
        look_up()
    except ValueError as error:
        text = str(error) if other is None else f"{error}, or {other}"
        raise ConfigError(text if text.startswith(key) else f"{key}: {text}") from error


def _check_data(config: Config) -> None:
    """Check the rules of rows and batches, for every phase of their schedules."""
    mesh, data = config.mesh, config.data
    micro, devices = config.training.gradient_accumulation, mesh.dp * mesh.fsdp * mesh.ep
    unit = micro * math.lcm(devices, data.rows_per_item)
    for size in data.batch_sizes:
        check_divides(
            "data.global_batch_size",
            size,
            "training.gradient_accumulation",
            micro,
            f"data.global_batch_size={multiples(size, unit)}",
        )
        if size // micro % data.rows_per_item:
            raise ConfigError(
                f"data.global_batch_size / training.gradient_accumulation={size // micro} is odd, "
                "but with data.packing=pairs every pair is two rows of a microbatch; use "
                f"data.global_batch_size={multiples(size, unit)}"
            )
        axes = "mesh.dp * mesh.fsdp * mesh.ep"
        if micro > 1:
            axes = f"training.gradient_accumulation * {axes}"
        check_multiple("data.global_batch_size", size, axes, micro * devices, unit)
    split_over_tp = RESIDUAL_LAYOUTS[config.parallel.residual].split_dim == ROWS
    axes = "mesh.sp * mesh.tp" if split_over_tp else "mesh.sp"
    for length in values_by_step(data.sequence_length).values():
        parts = mesh.sp * (mesh.tp if split_over_tp else 1)
        check_multiple("data.sequence_length", length, axes, parts, parts)
    if data.tokenizer == "bytes" and config.model.vocab_size < ByteTokenizer.vocab_size:
        least = ByteTokenizer.vocab_size
        raise ConfigError(
            f"model.vocab_size={config.model.vocab_size} is smaller than the tokenizer's {least} "
            f"ids; set it to {-(-least // 8) * 8} (a multiple of 8) or more"
        )
    try:
        BatchSchedule(data)
    except ValueError as error:
        raise ConfigError(str(error)) from error


def _check_experts(config: Config) -> None:
    """Check the rules of mixture-of-experts layers."""
    model, mesh, moe = config.model, config.mesh, config.model.moe
    if not moe.num_experts:
        if config.parallel.overlap_experts is not None:
            raise ConfigError(
                f"parallel.overlap_experts={config.parallel.overlap_experts} applies to "
                "experts only, and model.moe.num_experts=0; set it, or remove the override"
            )
        for name, value in moe:
            if value != type(moe).model_fields[name].default:
                raise ConfigError(
                    f"model.moe.{name}={value} applies to experts only, and model.moe.num_experts="
                    f"0; set it, or remove model.moe.{name}"
                )
        return
    if True not in model.sparse_layers:
        raise ConfigError(
            f"model.moe.num_experts={moe.num_experts}, but first_k_dense_replace="
            f"{moe.first_k_dense_replace} and decoder_sparse_step={moe.decoder_sparse_step} leave "
            f"no mixture-of-experts layer among {model.num_hidden_layers}; lower them"
        )
    try:
        router = ROUTERS[moe.router]
        check_router(moe)
    except ValueError as error:
        raise ConfigError(f"model.moe.router={moe.router}: {error}") from error
    unified = moe.expert_rule == "unified"
    owners = "mesh.fsdp * mesh.sp * mesh.ep" if unified else "mesh.ep"
    count = mesh.ep * (mesh.fsdp * mesh.sp if unified else 1)
    check_divides("model.moe.num_experts", moe.num_experts, owners, count)
    check_divides("model.moe.moe_intermediate_size", model.expert_size, "mesh.tp", mesh.tp)
    if config.parallel.overlap_experts in ("split", "hypercube"):
        raise ConfigError(
            f"parallel.overlap_experts={config.parallel.overlap_experts}: pieces of a block would "
            "not hold whole groups of rows, one per expert; use bidirectional"
        )
    unread = {
        "bias_update_speed": (not router.uses_bias, f"router={moe.router}"),
        "router_bias": (not router.uses_bias, f"router={moe.router}"),
        "norm_topk_prob": (not router.uses_normalise, f"router={moe.router}"),
        "exchange_chunks": (moe.exchange in ("ragged", "dense"), f"exchange={moe.exchange}"),
        "capacity_factor": (moe.exchange == "dense", "exchange=dense"),
        "grouped_matmul": (moe.exchange == "dense", "exchange=dense"),
    }
    for name, (is_unread, by) in unread.items():
        value = getattr(moe, name)
        if is_unread and value != type(moe).model_fields[name].default:
            raise ConfigError(
                f"model.moe.{name}={value} has no effect with model.moe.{by}; remove one of them"
            )
    if not router.is_causal and config.training.sample_tokens:
        raise ConfigError(
            f"model.moe.router={moe.router} depends on later tokens and cannot generate text; set "
            "training.sample_tokens=0, or use another router"
        )
