"""What a forward pass holds and sends, by name: for the sharding table and the choice of overlap.

No arrays and no mathematics: one of every kind, for one microbatch and one layer. How many of them
live at a time is for remat and the compiler to say. Letters: B batch, L length, D embed, H query
heads, K kv heads, h head dim, F intermediate, C tokens of a chunk on all devices, V vocab.
"""

from functools import partial

import jax.numpy as jnp

from model.config import LinearKind, ModelConfig
from parallel.linear.choice import RingShape
from parallel.linear.layout import layout_of
from parallel.planning.sharding_table import Tensor
from parallel.sharding.axes import (
    BATCH,
    EP,
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


def activation_tensors(
    config: ModelConfig, manager: PartitionManager, *, batch: int, length: int
) -> list[Tensor]:
    """Of a microbatch of `batch` rows of `length` tokens.

    tokens_BL stands for all five fields of a batch. The logits are those of one chunk of the loss.
    What experts see lies within one shard_map and has no layout to show.
    """
    dtype, rows = jnp.dtype(config.dtype), (batch, length)
    heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
    parts = manager.axis_size([BATCH, QUERY_LENGTH])
    chunk = parts * min(config.loss_chunk, batch * length // parts)
    of_mlp = [BATCH, QUERY_LENGTH, MLP_INTERMEDIATE]
    of_logits = [[BATCH, QUERY_LENGTH], VOCAB]
    tables = [
        ("tokens_BL", TokenSharding, rows, jnp.dtype("int32"), 5),
        ("x_BLD", ResidualSharding, (*rows, config.hidden_size), dtype, 1),
        ("q_BLHh", AttnQSharding, (*rows, heads, config.head_size), dtype, 1),
        ("kv_BLKh", AttnKVSharding, (*rows, kv_heads, config.head_size), dtype, 2),
        ("mlp_BLF", of_mlp, (*rows, _dense_width(config)), dtype, 2 if _dense_width(config) else 0),
        ("logits_CV", of_logits, (chunk, config.vocab_size), jnp.dtype("float32"), 1),
    ]
    return [
        Tensor(name=name, axes=axes, shape=shape, dtype=kind, count=count)
        for name, axes, shape, kind, count in tables
        if count
    ]


def _dense_width(config: ModelConfig) -> int:
    """Of the widest SwiGLU that sees every token; 0: there is none."""
    shared = config.moe.num_shared_experts * config.expert_size
    return max(
        config.intermediate_size if False in config.sparse_layers else 0,
        shared if True in config.sparse_layers else 0,
    )


def ring_shapes(
    config: ModelConfig, manager: PartitionManager, *, batch: int, length: int
) -> dict[LinearKind, RingShape]:
    """What each kind of linear sends around tp in one microbatch `batch length`.

    Empty if the residual stream is replicated: nothing is gathered then. A block can be halved
    along what is gathered, whatever the batch: text is generated from single rows.
    """
    n = manager.axis_size(TP)
    axis = manager.partition_axis.tensor_parallel_axis
    layout = layout_of(manager.resolve(ResidualSharding), axis)
    if layout == "replicated":
        return {}
    local_batch = batch // manager.axis_size(BATCH)
    local_length = length // manager.axis_size(QUERY_LENGTH)
    rows = local_batch * local_length // n
    halved = local_length // n if layout == "sequence" else config.hidden_size // n
    shape = partial(
        RingShape,
        rows=rows,
        width=config.hidden_size,
        block_bytes=rows * config.hidden_size * jnp.dtype(config.dtype).itemsize,
        halves=halved % 2 == 0,
    )
    heads = config.num_attention_heads * config.head_size // n
    kv_heads = config.num_key_value_heads * config.head_size // n
    shapes: dict[LinearKind, RingShape] = {
        "qkv": shape(gather_columns=heads + 2 * kv_heads),
        "o": shape(scatter_columns=heads),
    }
    if width := _dense_width(config) // n:
        shapes["mlp"] = shape(gather_columns=2 * width, scatter_columns=width)
    if True in config.sparse_layers:
        # Every token once per expert of its, in groups: halves of a block would not be groups.
        rows, width = rows * config.moe.num_experts_per_tok, config.expert_size // n
        shapes["experts"] = RingShape(
            rows=rows,
            width=config.hidden_size,
            block_bytes=rows * config.hidden_size * jnp.dtype(config.dtype).itemsize,
            halves=False,
            kernels=config.moe.num_experts // manager.axis_size(EP),
            gather_columns=2 * width,
            scatter_columns=width,
        )
    return shapes
