"""Devices, execution plan, program and sharding table of a configuration."""

import dataclasses
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import get_args

import jax
from flax import nnx

from configs.memory import resolve_remat
from configs.schema import Config, ParallelConfig, fill_mesh
from data.batch import FIELDS
from data.config import values_by_step
from model.config import LinearKind
from model.footprint import activation_tensors, ring_shapes
from model.int8_base import without_scales
from model.loss_formula import LossTerms
from model.plan import ExecutionPlan, make_plan
from parallel.linear.choice import (
    Choice,
    OverlapChoice,
    RingShape,
    choose_fsdp_overlap,
    choose_overlap,
)
from parallel.linear.config import TensorParallelConfig
from parallel.planning.sharding_table import (
    Row,
    sharding_table,
    summary,
    tensors_of_model,
    tensors_of_state,
)
from parallel.sharding.axes import FSDP, KV_HEAD, SP, TP, ColumnWise
from parallel.sharding.devices import CHIPS, find_devices
from parallel.sharding.mesh import build_mesh, is_hypercube, ring_of_axes
from parallel.sharding.partition import PartitionManager
from parallel.sharding.residual import RESIDUAL_LAYOUTS, residual_rules
from parallel.sharding.specs import FEATURES, mesh_axes_of
from safe_files import make_private
from training.logs import log
from training.multi_token_step import MultiTokenProgram
from training.optimizers import frozen_kinds, gradient_point, make_optimizer
from training.preference_step import PreferenceProgram
from training.schedules import make_schedule
from training.step import Program


def open_devices(config: Config) -> tuple[Sequence[jax.Device], str | None]:
    """Return the devices of this configuration, and a line to show if they are simulated.

    Also turns on the compilation cache of the configuration. One that other users may write to
    stays off, with a warning, because this process would run the programs that it holds. That is
    no error: without the cache the run only takes longer to start.
    """
    mesh = config.mesh
    devices, notice = find_devices(mesh.num_devices, take_all=mesh.given_devices is None)
    if config.run.compilation_cache is not None:
        given = config.run.compilation_cache
        cache = os.path.abspath(os.path.expanduser(given))
        try:
            if "://" in given:
                raise ValueError(f"{given} is not on a disk; give a folder of this machine")
            make_private(Path(cache))
        except (OSError, ValueError) as error:
            log.warning("run.compilation_cache is not used, every start compiles: %s", error)
        else:
            jax.config.update("jax_compilation_cache_dir", cache)
            # Small programs too: a resumed run compiles nothing.
            jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    return devices, notice


def build_plan(config: Config, devices: Sequence[jax.Device]) -> ExecutionPlan:
    """Make every choice of a run on these devices: the mesh, rules, overlap, attention, experts.

    Raises:
        ValueError: The configuration cannot run on these devices; names the key and a remedy.
    """
    config = _without_losses_of_frozen_routers(fill_mesh(config, len(devices)))
    tp = TensorParallelConfig(
        mesh=build_mesh(config.mesh, devices),
        partition_axis=residual_rules(config.parallel.residual),
        reduce_scatter_output=True,
        overlap="none" if config.parallel.overlap == "auto" else config.parallel.overlap,
        group_hops=config.parallel.group_hops,
    )
    overlap = _choose_overlaps(config, tp.manager)
    fsdp = _choose_fsdp_overlap(config, tp.manager)
    # The plan shows it only where kernels are gathered, or where the user set a method.
    gathers = tp.manager.axis_size([FSDP, SP]) > 1 and tp.manager.axis_size(TP) == 1
    lines = {"fsdp": fsdp} if gathers or config.parallel.overlap_fsdp is not None else {}
    tp = tp.replace(
        kind_overlaps={kind: choice.overlap for kind, choice in overlap.items()},
        fsdp_overlap=fsdp.overlap,
    )
    lengths = {config.data.row_length, *values_by_step(config.data.sequence_length).values()}
    device = tp.manager.mesh.devices.flat[0]
    config, remat_reason = resolve_remat(
        config, CHIPS.get(device.device_kind), simulated=device.platform == "cpu"
    )
    return make_plan(
        config.model,
        tp,
        lengths=sorted(lengths),
        overlap=[*overlap.items(), *lines.items()],
        lora=config.lora,
        attend_across_documents=config.data.attend_across_documents,
        remat_reason=remat_reason,
    )


def _without_losses_of_frozen_routers(config: Config) -> Config:
    """Return the configuration, without the auxiliary losses of routers if these are frozen."""
    if not config.lora.rank and "experts" not in frozen_kinds(config.optimizer):
        return config
    losses = {"router_aux_loss_coef": 0.0, "router_z_loss_coef": 0.0}
    moe = config.model.moe.model_copy(update=losses)
    return config.model_copy(update={"model": config.model.model_copy(update={"moe": moe})})


def build_program(config: Config, devices: Sequence[jax.Device]) -> Program:
    """Return the jitted functions of this configuration on these devices.

    Raises:
        ValueError: See `build_plan`.
    """
    training, schedule = config.training, make_schedule(config.optimizer, config.training.steps)
    parts = (
        build_plan(config, devices),
        make_optimizer(config.optimizer, schedule, config.model.base_width_share),
        schedule,
        training.seed,
        training.guard,
        config.optimizer.ema_decay,
        gradient_point(config.optimizer),
        frozen_kinds(config.optimizer),
    )
    if training.objective == "dpo":
        return PreferenceProgram(*parts, dpo=training.dpo)
    terms = LossTerms(training.label_smoothing, training.z_loss)
    program = MultiTokenProgram if config.model.mtp_loss_weights else Program
    return program(*parts, terms, training.noise_scale)


def abstract_batch(config: Config, program: Program) -> dict[str, jax.ShapeDtypeStruct]:
    """Return the fields of the largest batch of a run, without arrays."""
    parts = config.training.gradient_accumulation
    rows, length = config.data.largest_batch
    shape = (parts, rows // parts, length)
    return {
        name: jax.ShapeDtypeStruct(shape, field.dtype, sharding=program.batch_sharding)
        for name, field in FIELDS.items()
    }


def _choose_overlaps(config: Config, manager: PartitionManager) -> dict[LinearKind, Choice]:
    """Choose the overlap method of every kind of linear, with the reason.

    Raises:
        ValueError: A method that sends halves was asked for, but the blocks have an odd size.
    """
    n = manager.axis_size(TP)
    rows, length = config.data.largest_batch
    shapes = ring_shapes(
        config.model,
        manager,
        batch=rows // config.training.gradient_accumulation,
        length=length,
        shorter=values_by_step(config.data.sequence_length).values(),
    )
    chip = CHIPS.get(manager.mesh.devices.flat[0].device_kind)
    hypercube = is_hypercube(manager.mesh, manager.partition_axis.tensor_parallel_axis)
    choices: dict[LinearKind, Choice] = {}
    for kind in get_args(LinearKind):
        if kind not in _kinds_of(config):
            continue
        named, why = _configured_overlap(config.parallel, kind)
        if (
            n > 1
            and kind in shapes
            and (obstacle := _why_not_in_pieces(kind, named, n, shapes[kind]))
        ):
            named, why = "bidirectional", f"{named} is not available: {obstacle}"
        if n > 1 and kind in shapes:
            _check_halves(config, kind, named, shapes[kind])
        if n == 1 or kind not in shapes:
            why = "an input that tp does not split" if shapes else "a replicated residual stream"
            why = f"{'one device on tp' if n == 1 else why} gathers nothing"
            choices[kind] = Choice("none", _instead_of(named, why))
        elif named != "auto":
            choices[kind] = Choice(named, why)
        elif RESIDUAL_LAYOUTS[config.parallel.residual].split_dim == FEATURES:
            why = f"no estimate for residual {config.parallel.residual}: name a method"
            choices[kind] = Choice("none", why)
        else:
            choices[kind] = choose_overlap(shapes[kind], n, chip, hypercube=hypercube)
    return choices


def _why_not_in_pieces(
    kind: LinearKind, overlap: OverlapChoice, n: int, shape: RingShape
) -> str | None:
    """Return why the blocks of this kind of linear cannot travel in pieces, if they should."""
    if overlap in ("split", "hypercube") and kind == "experts":
        return "pieces of a block would not hold whole groups of rows"
    if overlap == "hypercube" and n & (n - 1):
        return f"mesh.tp={n} is no power of two"
    if overlap == "hypercube" and shape.pieces < (sides := n.bit_length() - 1):
        return f"a block of size {shape.pieces} has no {sides} pieces"
    return None


def _check_halves(
    config: Config, kind: LinearKind, overlap: OverlapChoice, shape: RingShape
) -> None:
    """Raise ValueError if `split` was asked for, but the blocks have an odd size."""
    if overlap != "split" or shape.halves:
        return
    size = "data.sequence_length / (mesh.sp * mesh.tp)"
    if RESIDUAL_LAYOUTS[config.parallel.residual].split_dim == FEATURES:
        size = "model.hidden_size / mesh.tp"
    raise ValueError(
        f"parallel.overlap=split (or overlap_{kind}=split) sends half blocks, but {size} "
        "is odd; make it even, or use bidirectional"
    )


def _choose_fsdp_overlap(config: Config, manager: PartitionManager) -> Choice:
    """Choose how kernels are gathered over fsdp and sp, and how their gradients are summed."""
    named, why = _configured_overlap(config.parallel, "fsdp")
    mla = config.model.mla
    stored = mesh_axes_of(manager.resolve(ColumnWise)[0])
    axes = [name for name in stored if manager.mesh.shape[name] > 1]
    n = manager.axis_size([FSDP, SP])
    widths = [config.model.hidden_size]
    if mla is not None:
        widths += [width for width in (mla.kv_lora_rank, mla.q_lora_rank) if width]
    obstacles = {
        "tp has several devices": manager.axis_size(TP) > 1,
        "one device on fsdp and sp gathers nothing": not axes,
        "frozen kernels have no gradients (lora.rank)": config.lora.rank > 0,
        "these chips form no ring of neighbours": bool(axes)
        and ring_of_axes(manager.mesh, axes) is None,
        f"blocks of {widths} features over {n} devices have no halves": named == "split"
        and any(width // n % 2 for width in widths),
        f"{n} devices are no power of two": named == "hypercube" and n & (n - 1) != 0,
        f"blocks of {widths} features over {n} devices cannot be cut into {n.bit_length() - 1}": (
            named == "hypercube" and min(widths) // n < n.bit_length() - 1
        ),
    }
    if obstacle := next((text for text, holds in obstacles.items() if holds), None):
        return Choice("none", _instead_of(named, obstacle))
    if named != "auto":
        return Choice(named, why)
    chip = CHIPS.get(manager.mesh.devices.flat[0].device_kind)
    return choose_fsdp_overlap(min(widths) // n, chip)


def _instead_of(named: OverlapChoice, obstacle: str) -> str:
    """Return why a method is not used, naming it unless it is `auto` or `none`."""
    return obstacle if named in ("auto", "none") else f"{named} was asked for, but {obstacle}"


def _configured_overlap(parallel: ParallelConfig, kind: str) -> tuple[OverlapChoice, str]:
    """Return the overlap method of a kind of linear, or of fsdp, and the key that sets it."""
    key = f"overlap_{kind}" if getattr(parallel, f"overlap_{kind}") else "overlap"
    return getattr(parallel, key), f"as parallel.{key} says"


def _kinds_of(config: Config) -> set[LinearKind]:
    """Return the kinds of linears that this model has."""
    sparse, moe = config.model.sparse_layers, config.model.moe
    kinds: set[LinearKind] = {"qkv", "o", "head"}
    kinds |= {"mlp"} if config.model.has_dense_mlp or moe.num_shared_experts else set()
    return kinds | ({"experts"} if True in sparse else set())


def build_sharding_table(config: Config, program: Program) -> dict[str, list[Row]]:
    """Describe the layout of parameters, optimizer state and one activation of every kind."""
    manager = program.tp.manager
    if config.parallel.replicate_kv:
        manager = dataclasses.replace(manager, replicate=frozenset({KV_HEAD}))
    with jax.set_mesh(manager.mesh):
        state = program.abstract_state
        parameters = tensors_of_model(nnx.merge(program.definition, state.params))
    others = tensors_of_state(dataclasses.replace(state, params=None), parameters)
    rows, length = config.data.largest_batch
    activations = activation_tensors(
        config.model,
        manager,
        batch=rows // config.training.gradient_accumulation,
        length=length,
    )
    return {
        "parameters": sharding_table(parameters, manager),
        "optimizer": sharding_table(others, manager),
        "activations": sharding_table(activations, manager),
    }


def describe_parameters(program: Program, table: Mapping[str, list[Row]]) -> Iterator[str]:
    """Yield lines with the memory of the parameters and of the optimizer, and what is trained."""
    rows = [*table["parameters"], *table["optimizer"]]
    state = program.abstract_state
    parts = {"optimizer": True, "moving average": state.ema, "reference model": state.reference}
    others = [name for name, part in parts.items() if part is not None]
    yield f"memory of {_joined(['parameters', *others])}: {summary(rows)}"
    if program.plan.lora.rank:
        trained, total = (
            sum(math.prod(x.shape) for x in jax.tree.leaves(tree))
            for tree in (program.trained(state.params), without_scales(state.params))
        )
        yield (
            f"LoRA: {trained:,} trainable of {total:,} parameters ({trained / total:.2%}); "
            f"{_joined(others)}: {summary(table['optimizer'])}"
        )


def _joined(names: Sequence[str]) -> str:
    """Return "a", "a and b" or "a, b and c"."""
    return " and ".join(part for part in (", ".join(names[:-1]), names[-1]) if part)
