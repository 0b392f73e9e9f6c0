"""From a configuration to the things that it describes."""

import dataclasses
import os
from collections.abc import Sequence
from typing import get_args

import jax
from flax import nnx

from configs.schema import Config
from model.attention.dispatch import AttentionChoice, choose_for_layer
from model.config import LayerType, LinearKind
from model.footprint import activation_tensors, ring_shapes
from model.moe import choose_experts
from parallel.linear.choice import Choice, choose_overlap
from parallel.linear.layout import TensorParallelConfig
from parallel.planning.sharding_table import Row, sharding_table, tensors_alike, tensors_of_model
from parallel.sharding.axes import KV_HEAD, TP
from parallel.sharding.mesh import CHIPS, build_mesh, find_devices
from parallel.sharding.partition import residual_rules
from training.optimizer import make_optimizer, make_schedule
from training.step import Program


def open_devices(config: Config) -> tuple[Sequence[jax.Device], str | None]:
    """The devices of this configuration, and a line on those that are simulated.

    From here on, compiled programs are kept where the configuration says.
    """
    devices, notice = find_devices(config.mesh.num_devices)
    if config.run.compilation_cache is not None:
        cache = os.path.abspath(os.path.expanduser(config.run.compilation_cache))
        jax.config.update("jax_compilation_cache_dir", cache)
        # Small programs too: a resumed run compiles nothing.
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    return devices, notice


def build_program(config: Config, devices: Sequence[jax.Device]) -> Program:
    """The jitted functions of this configuration on these devices."""
    tp = TensorParallelConfig(
        mesh=build_mesh(config.mesh, devices),
        partition_axis=residual_rules(config.parallel.residual),
        reduce_scatter_output=True,
        overlap="none" if config.parallel.overlap == "auto" else config.parallel.overlap,
    )
    choices = choose_overlaps(config, tp)
    tp = tp.replace(kind_overlaps={kind: choice.overlap for kind, choice in choices.items()})
    choose_attention(config, tp)
    if True in config.model.sparse_layers:
        for dropless in (False, True):  # training, and evaluation
            choose_experts(config.model, tp.manager, dropless=dropless)
    schedule = make_schedule(config.optimizer, config.training.steps)
    optimizer = make_optimizer(config.optimizer, schedule)
    return Program(
        config.model,
        tp,
        optimizer,
        schedule,
        config.training.seed,
        config.training.guard,
        config.optimizer.ema_decay,
    )


def choose_attention(config: Config, tp: TensorParallelConfig) -> dict[LayerType, AttentionChoice]:
    """The attention operation of every type of layer in training on this mesh, and why.

    Raises: ValueError if the configured one cannot do what a layer needs, with what it lacks.
    """
    model, length = config.model, config.data.row_length
    try:
        return {
            kind: choose_for_layer(model, kind, tp.manager, length=length)
            for kind in dict.fromkeys(model.layer_kinds)
        }
    except ValueError as error:
        raise ValueError(f"model.attention: {error}") from error


def choose_overlaps(config: Config, tp: TensorParallelConfig) -> dict[str, Choice]:
    """The overlap method of every kind of linear on this mesh, and why.

    Raises: ValueError if blocks that shall be split cannot be halved.
    """
    manager = tp.manager
    n = manager.axis_size(TP)
    shapes = ring_shapes(
        config.model,
        manager,
        batch=max(config.data.batch_sizes) // config.training.gradient_accumulation,
        length=config.data.row_length,
    )
    chip = CHIPS.get(manager.mesh.devices.flat[0].device_kind)
    choices: dict[str, Choice] = {}
    for kind in get_args(LinearKind):
        if kind not in _kinds_of(config):
            continue
        named = getattr(config.parallel, f"overlap_{kind}") or config.parallel.overlap
        general = config.parallel.overlap  # also that of the head
        halves_groups = kind == "experts" and named == "split"
        if halves_groups:
            named = "bidirectional"
        halved = "split" in (named, general) and kind != "experts"
        if halved and n > 1 and kind in shapes and not shapes[kind].halves:
            size = "data.sequence_length / (mesh.sp * mesh.tp)"
            if config.parallel.residual == "hidden":
                size = "model.hidden_size / mesh.tp"
            raise ValueError(
                f"parallel.overlap (or overlap_{kind}) split halves what a device gathers, but "
                f"{size} is odd; make it even, or use bidirectional"
            )
        if n == 1 or kind not in shapes:
            why = "one device on tp" if n == 1 else "a replicated residual stream"
            choices[kind] = Choice("none", f"{named} was asked for, but {why} gathers nothing")
        elif named != "auto":
            why = "as configured"
            if halves_groups:
                why = "blocks of grouped rows cannot be split in halves"
            choices[kind] = Choice(named, why)
        elif config.parallel.residual == "hidden":
            choices[kind] = Choice("none", "no estimate for residual hidden: name a method")
        else:
            choices[kind] = choose_overlap(shapes[kind], n, chip)
    return choices


def _kinds_of(config: Config) -> set[LinearKind]:
    """The kinds of linears that this model has."""
    sparse, moe = config.model.sparse_layers, config.model.moe
    kinds: set[LinearKind] = {"qkv", "o"}
    kinds |= {"mlp"} if False in sparse or moe.num_shared_experts else set()
    return kinds | ({"experts"} if True in sparse else set())


def build_sharding_table(config: Config, program: Program) -> dict[str, list[Row]]:
    """Where everything lies that this program keeps, and one activation of every kind."""
    manager = program.tp.manager
    if config.parallel.replicate_kv:
        manager = dataclasses.replace(manager, replicate=frozenset({KV_HEAD}))
    with jax.set_mesh(manager.mesh):
        state = program.abstract_state
        parameters = tensors_of_model(nnx.merge(program.definition, state.params))
    others = tensors_alike(dataclasses.replace(state, params=None), parameters)
    activations = activation_tensors(
        config.model,
        manager,
        batch=max(config.data.batch_sizes) // config.training.gradient_accumulation,
        length=config.data.row_length,
    )
    return {
        "parameters": sharding_table(parameters, manager),
        "optimizer": sharding_table(others, manager),
        "activations": sharding_table(activations, manager),
    }
