"""Activation shapes and ring traffic of one layer, for the sharding table and the overlap choice.

Only shapes and bytes, of one microbatch; how many activations live at a time depends on remat and
on the compiler.

Letters: B batch, L length, D embed, H query heads, K kv heads, h head dim, F intermediate, C tokens
of a loss chunk on all devices, V vocab; in latent attention R latents, v value dims.
"""

from collections.abc import Collection
from functools import partial
from typing import Any

import jax.numpy as jnp

from model.config import LinearKind, ModelConfig
from model.loss_chunk import tokens_per_chunk
from parallel.experts.expert import EXPERT_AXES
from parallel.linear.choice import RingShape
from parallel.planning.sharding_table import Tensor
from parallel.sharding.axes import (
    BATCH,
    EMPTY,
    LENGTH,
    MLP_INTERMEDIATE,
    QUERY_LENGTH,
    TP,
    VOCAB,
    AttnKVSharding,
    AttnQSharding,
    ResidualSharding,
    TokenSharding,
)
from parallel.sharding.partition import PartitionManager
from parallel.sharding.specs import ROWS, split_dim


def activation_tensors(
    config: ModelConfig, manager: PartitionManager, *, batch: int, length: int
) -> list[Tensor]:
    """Return one activation of every kind, for a microbatch of `batch` rows of `length` tokens.

    tokens_BL counts five times, for the five fields of a batch. The logits are those of one chunk
    of the loss. The inputs of experts are local to a shard_map, so they have no layout to list.
    """
    dtype, rows = jnp.dtype(config.dtype), (batch, length)
    heads = config.num_attention_heads
    parts = manager.axis_size([BATCH, QUERY_LENGTH])
    chunk = parts * min(tokens_per_chunk(config, manager), batch * length // parts)
    mlp_axes = [BATCH, QUERY_LENGTH, MLP_INTERMEDIATE]
    logit_axes = [[BATCH, QUERY_LENGTH], VOCAB]
    mlp_size = _dense_mlp_size(config)
    activations = [
        ("tokens_BL", TokenSharding, rows, jnp.dtype("int32"), 5),
        ("x_BLD", ResidualSharding, (*rows, config.hidden_size), dtype, 1),
        ("q_BLHh", AttnQSharding, (*rows, heads, config.head_size), dtype, 1),
        *((name, axes, shape, dtype, count) for name, axes, shape, count in _keys(config, rows)),
        ("mlp_BLF", mlp_axes, (*rows, mlp_size), dtype, 2 if mlp_size else 0),
        ("logits_CV", logit_axes, (chunk, config.padded_vocab_size), jnp.dtype("float32"), 1),
    ]
    return [
        Tensor(name=name, axes=axes, shape=shape, dtype=kind, count=count)
        for name, axes, shape, kind, count in activations
        if count
    ]


def _keys(
    config: ModelConfig, rows: tuple[int, int]
) -> list[tuple[str, Any, tuple[int, ...], int]]:
    """Return name, axes, shape and number of the keys, values and latents of one layer."""
    mla, kv_heads = config.mla, config.num_key_value_heads
    if mla is None:
        return [("kv_BLKh", AttnKVSharding, (*rows, kv_heads, config.head_size), 2)]
    width = mla.kv_width + (mla.q_lora_rank or 0)
    return [
        ("latents_BLR", [BATCH, LENGTH, EMPTY], (*rows, width), 1),
        ("k_BLHh", AttnQSharding, (*rows, kv_heads, config.head_size), 1),
        ("v_BLHv", AttnQSharding, (*rows, kv_heads, config.value_size), 1),
    ]


def _dense_mlp_size(config: ModelConfig) -> int:
    """Return the width of the widest gated MLP that every token passes, or 0 if there is none."""
    shared = config.moe.num_shared_experts * config.expert_size
    return max(
        config.intermediate_size if config.has_dense_mlp else 0,
        shared if True in config.sparse_layers else 0,
    )


def ring_shapes(
    config: ModelConfig,
    manager: PartitionManager,
    *,
    batch: int,
    length: int,
    shorter: Collection[int] = (),
) -> dict[LinearKind, RingShape]:
    """Return the block that each kind of linear sends around the tp ring, for one microbatch.

    The result is empty if the residual stream is replicated, because nothing is gathered then. A
    block counts as divisible only if those of shorter rows are, too, and only along the gathered
    dim: generation has single rows.
    """
    n = manager.axis_size(TP)
    axis = manager.partition_axis.tensor_parallel_axis
    dim = split_dim(manager.resolve(ResidualSharding), axis)
    if dim is None:
        return {}
    local_batch = batch // manager.axis_size(BATCH)
    lengths = [size // manager.axis_size(QUERY_LENGTH) for size in (length, *shorter)]
    rows = local_batch * lengths[0] // n
    sizes = [size // n for size in (lengths if dim == ROWS else [config.hidden_size])]
    halves = all(size % 2 == 0 for size in sizes)

    def ring(rows: int, width: int = config.hidden_size, **columns: Any) -> RingShape:
        block_bytes = rows * width * jnp.dtype(config.dtype).itemsize
        return RingShape(rows=rows, width=width, block_bytes=block_bytes, **columns)

    dense = partial(ring, rows, halves=halves, pieces=min(sizes))
    heads = config.num_attention_heads * config.head_size // n
    kv_heads = config.num_key_value_heads * config.head_size // n
    shapes: dict[LinearKind, RingShape] = {
        "qkv": dense(gather_columns=heads + 2 * kv_heads),
        "o": dense(scatter_columns=config.num_attention_heads * config.value_size // n),
        # The loss sends its tokens in chunks.
        "head": ring(
            max(min(tokens_per_chunk(config, manager) // n, rows), 1),
            halves=dim == ROWS or halves,
            pieces=max(min(tokens_per_chunk(config, manager) // n, rows), 1),
            gather_columns=config.padded_vocab_size // n,
        ),
    }
    if config.mla is not None:
        # The widest ring of this kind: that of queries, from their latents if they have some.
        rank = config.mla.q_lora_rank
        if rank is None:
            shapes["qkv"] = dense(gather_columns=heads)
        elif dim == ROWS:
            shapes["qkv"] = dense(width=rank, gather_columns=heads)
        else:
            del shapes["qkv"]  # latents are whole on every device of tp
    if width := _dense_mlp_size(config) // n:
        shapes["mlp"] = dense(gather_columns=2 * width, scatter_columns=width)
    if True in config.sparse_layers:
        # A token is sent once per expert that it visits.
        shapes["experts"] = ring(
            rows * config.moe.num_experts_per_tok, **_expert_columns(config, manager)
        )
    return shapes


def _expert_columns(config: ModelConfig, manager: PartitionManager) -> dict[str, Any]:
    """Return fields of the `RingShape` of experts."""
    width = config.expert_size // manager.axis_size(TP)
    experts = EXPERT_AXES[config.moe.expert_rule][0].axes[0]
    return {
        # Rows are grouped by expert, and a part of a block has no whole groups.
        "halves": False,
        "pieces": 1,
        "kernels": config.moe.num_experts // manager.axis_size(experts),
        "gather_columns": 2 * width,
        "scatter_columns": width,
    }
