"""A configuration scaled down: small sizes, and every choice of its structure kept.

A size keeps its greatest common divisor with 16, so that a mesh which does not divide the full size
does not divide the small one either.
"""

import math
from typing import Any

from configs.schema import Config, make_config
from model.config import ModelConfig, MoEConfig
from model.segments import shortest_period
from training.config import RunConfig

HIDDEN, HEAD, MLP, EXPERT, VOCABULARY, TOKENS, ROWS = 64, 16, 48, 32, 264, 32, 8
WINDOW, CHUNK, BLOCK, LOSS_CHUNK, RANK = 11, 12, 8, 16, 4
# 1 / sqrt(HIDDEN): with smaller kernels attention would be nearly uniform.
INITIALIZER_RANGE = 0.125


def shrink(size: int, target: int) -> int:
    """Return `target`, or the largest size below it with the factors of two of `size`, up to 16.

    target: a multiple of 8.
    """
    if size <= target:
        return size
    common = math.gcd(size, 16)
    if math.gcd(target, 16) == common or common == 16:
        return target
    multiple = max(target // common, 1)
    return common * (multiple if multiple % 2 else multiple - 1)


def scale_down(config: Config) -> Config:
    """Return the configuration with small sizes, on one device.

    Attention keeps the number of query heads per key head, windows, chunks, sinks and soft caps;
    experts keep their router, groups and shared experts; layers keep their types and their order.
    No expert capacity drops a token, because which tokens are dropped depends on the mesh.

    Raises:
        ConfigError: The small model breaks a rule of the configuration.
    """
    data, training = config.data, config.training
    parts = min(training.gradient_accumulation, 2)
    small = config.model_copy(
        update={
            "run": RunConfig(compilation_cache=config.run.compilation_cache),
            "model": _model(config.model, data.row_length),
            "mesh": type(config.mesh)(),
            "lora": _lora(config),
            "data": data.model_copy(
                update={
                    "sequence_length": shrink(data.row_length, TOKENS),
                    "repack_at": (),
                    "global_batch_size": ROWS * parts,
                    "tokenizer": "bytes",
                    "eos_token": None,
                    "add_bos": "auto",
                }
            ),
            "training": training.model_copy(update={"gradient_accumulation": parts}),
            "optimizer": config.optimizer.model_copy(update={"ema_decay": None}),
        }
    )
    return make_config(as_tree(small))


def as_tree(config: Config) -> dict[str, Any]:
    """Return the values of a configuration as they are read from YAML."""
    tree = config.model_dump(mode="python")
    tree["plugins"] = list(config.plugins)
    return tree


def _lora(config: Config) -> Any:
    lora = config.lora
    rank = min(lora.rank, RANK)
    alpha = None if lora.alpha is None else lora.scale * rank
    return lora.model_copy(update={"rank": rank, "alpha": alpha})


def _model(model: ModelConfig, length: int) -> ModelConfig:
    kv_heads = math.gcd(model.num_key_value_heads, 8)
    changes: dict[str, Any] = {
        "vocab_size": VOCABULARY + (model.vocab_size % 2),
        "pad_vocab_to_multiple_of": math.gcd(model.pad_vocab_to_multiple_of, 16),
        "hidden_size": shrink(model.hidden_size, HIDDEN),
        "num_key_value_heads": kv_heads,
        "num_attention_heads": kv_heads * (model.num_attention_heads // model.num_key_value_heads),
        "intermediate_size": shrink(model.intermediate_size, MLP),
        "initializer_range": INITIALIZER_RANGE,
        "loss_chunk": LOSS_CHUNK,
        "sliding_window": model.sliding_window and min(model.sliding_window, WINDOW),
        "attention_chunk_size": model.attention_chunk_size
        and min(model.attention_chunk_size, CHUNK),
        "moe": _experts(model.moe),
        **_layers(model),
        **_heads(model),
    }
    return model.model_copy(update=changes)


def _heads(model: ModelConfig) -> dict[str, Any]:
    """Return the widths of the heads, and the factors of rope for them."""
    if (mla := model.mla) is not None:
        ratio = max(mla.qk_nope_head_dim // HEAD, 1)
        small = {
            "q_lora_rank": mla.q_lora_rank and shrink(mla.q_lora_rank, 2 * HEAD),
            "kv_lora_rank": shrink(mla.kv_lora_rank, HEAD),
            "qk_nope_head_dim": mla.qk_nope_head_dim // ratio,
            "qk_rope_head_dim": max(mla.qk_rope_head_dim // ratio // 2 * 2, 2),
            "v_head_dim": max(mla.v_head_dim // ratio, 1),
        }
        return {"mla": mla.model_copy(update=small)}
    # The part that rope rotates must be even.
    sizes = [size for size in (HEAD, 2 * HEAD, 4 * HEAD) if size < model.head_size]
    rotated = [int(size * model.partial_rotary_factor) for size in sizes]
    even = [size for size, part in zip(sizes, rotated, strict=True) if part and part % 2 == 0]
    size = (even or [model.head_size])[0]
    scalar = model.query_pre_attn_scalar
    pairs, scaling = int(size * model.partial_rotary_factor) // 2, model.rope_scaling
    factors = {
        name: None if values is None else values[:pairs]
        for name in ("short_factor", "long_factor")
        for values in (getattr(scaling, name),)
    }
    return {
        "head_dim": size,
        "query_pre_attn_scalar": scalar and scalar * size / model.head_size,
        "rope_scaling": scaling.model_copy(update=factors),
    }


def _layers(model: ModelConfig) -> dict[str, Any]:
    """Return the fields of a short model: one leading dense layer, two repeats of the pattern."""
    kinds = [*zip(model.layer_kinds, model.sparse_layers, model.rope_pattern, strict=True)]
    moe, count = model.moe, len(kinds)
    lead = moe.first_k_dense_replace if True in model.sparse_layers else 0
    # Which layers are sparse is counted from the first one, so whole steps are left out.
    dropped = max(lead - 1, 0) // moe.decoder_sparse_step * moe.decoder_sparse_step
    period = shortest_period(kinds[lead:])
    repeats, rest = divmod(count - lead, period)
    kept = kinds[dropped : lead + min(repeats, 2) * period + rest]
    return {
        "num_hidden_layers": len(kept),
        "layer_types": tuple(kind for kind, _, _ in kept),
        "rope_layers": tuple(has_rope for _, _, has_rope in kept),
        "moe": _experts(moe).model_copy(update={"first_k_dense_replace": lead - dropped})
        if moe.num_experts
        else moe,
    }


def _experts(moe: MoEConfig) -> MoEConfig:
    """Return fewer and smaller experts, and as much capacity as no token is dropped with."""
    if not moe.num_experts:
        return moe
    top_k, groups = min(moe.num_experts_per_tok, 3), math.gcd(moe.n_group, 4)
    experts = shrink(moe.num_experts, 16 if top_k > 2 or groups > 1 else 8)
    return moe.model_copy(
        update={
            "num_experts": experts,
            "num_experts_per_tok": top_k,
            "moe_intermediate_size": None
            if moe.moe_intermediate_size is None
            else shrink(moe.moe_intermediate_size, EXPERT),
            "n_group": groups,
            "topk_group": max(moe.topk_group * groups // moe.n_group, 1),
            "capacity_factor": None if moe.capacity_factor is None else experts / top_k,
        }
    )
