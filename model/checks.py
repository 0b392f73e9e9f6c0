"""Rules between the fields of a model: each field must have an effect and contradict no other."""

from collections.abc import Iterator

from model.activations import ACTIVATIONS
from model.config import BiasGroup, ModelConfig
from model.rope import rope_frequencies


def check_model(model: ModelConfig) -> None:
    """Check the fields of a model against each other.

    Raises: ValueError with key path, value, rule and remedy.
    """
    for check in (_activation, _linears, _norms, _latent_attention, _rope):
        for message in check(model):
            raise ValueError(message)


def _activation(model: ModelConfig) -> Iterator[str]:
    """Yield error messages about the activation of the MLPs."""
    try:
        takes_limit = ACTIVATIONS[model.hidden_act].takes_limit
    except ValueError as error:
        yield f"model.hidden_act: {error}"
        return
    if takes_limit and model.swiglu_limit is None:
        yield f"model.hidden_act={model.hidden_act} needs model.swiglu_limit; set it, e.g. to 7.0"
    if not takes_limit and model.swiglu_limit is not None:
        yield (
            f"model.swiglu_limit={model.swiglu_limit} has no effect with model.hidden_act="
            f"{model.hidden_act}; remove it, or use model.hidden_act=clamped_swiglu"
        )


def _linears(model: ModelConfig) -> Iterator[str]:
    """Yield error messages about optional parameters: biases and the shared-expert gate."""
    sparse, moe = model.sparse_layers, model.moe
    has_mlp = model.has_dense_mlp or moe.num_shared_experts > 0
    absent: dict[BiasGroup, bool] = {
        "mlp": not has_mlp,
        "experts": True not in sparse,
        "router": True not in sparse,
    }
    for group in dict.fromkeys(model.biases):
        if model.biases.count(group) > 1:
            yield f"model.biases lists {group} twice; remove one"
        if absent.get(group):
            yield (
                f"model.biases lists {group}, but no layer of this model has such a linear; remove "
                "it, or change model.moe"
            )
    if moe.shared_expert_gate and not moe.num_shared_experts:
        yield (
            "model.moe.shared_expert_gate=true has no effect with model.moe.num_shared_experts=0; "
            "set it, or remove shared_expert_gate"
        )
    if model.mup_base_width is not None and model.tie_word_embeddings:
        yield (
            f"model.mup_base_width={model.mup_base_width}: muP gives embedding and head different "
            "learning rates; set model.tie_word_embeddings=false, or remove mup_base_width"
        )
    for name in ("matmul_products", "matmul_scales") if model.matmul_dtype is None else ():
        if getattr(model, name) != type(model).model_fields[name].default:
            yield f"model.{name} has no effect without model.matmul_dtype; set it, or remove {name}"


def _norms(model: ModelConfig) -> Iterator[str]:
    """Yield error messages about norms."""
    if model.qk_norm_across_heads and not model.qk_norm:
        yield (
            "model.qk_norm_across_heads=true has no effect with model.qk_norm=false; set qk_norm, "
            "or remove qk_norm_across_heads"
        )


def _latent_attention(model: ModelConfig) -> Iterator[str]:
    """Yield error messages about fields that latent attention does not read."""
    mla = model.mla
    if mla is None:
        return
    if model.num_key_value_heads != model.num_attention_heads:
        yield (
            f"model.num_key_value_heads={model.num_key_value_heads}: with model.mla every query "
            f"head has keys of its own; set it to model.num_attention_heads="
            f"{model.num_attention_heads}"
        )
    for name, instead in {
        "head_dim": "set the head dims of model.mla",
        "partial_rotary_factor": "set model.mla.qk_rope_head_dim",
        "query_pre_attn_scalar": "the scale follows from the head dims",
        "qk_norm": "the latents have norms",
        "attention_sinks": "no model has both",
    }.items():
        value = getattr(model, name)
        if value != ModelConfig.model_fields[name].default:
            yield f"model.{name}={value} is not supported with model.mla; remove it: {instead}"
    if "qkv" in model.biases:
        yield "model.biases lists qkv, which is not supported with model.mla; remove it"
    if mla.qk_rope_head_dim % 2:
        yield (
            f"model.mla.qk_rope_head_dim={mla.qk_rope_head_dim}: rope rotates pairs; use an even "
            "number"
        )


def _rope(model: ModelConfig) -> Iterator[str]:
    """Yield error messages about rotary embeddings."""
    if len(model.rope_layers) > model.num_hidden_layers:
        yield (
            f"model.rope_layers has {len(model.rope_layers)} entries, but model.num_hidden_layers="
            f"{model.num_hidden_layers}; remove the entries past the last layer"
        )
    if True not in model.rope_pattern:
        fields = ("rope_theta", "rope_local_theta", "rope_scaling", "partial_rotary_factor")
        for name in fields:
            value = getattr(model, name)
            if value != ModelConfig.model_fields[name].default:
                yield (
                    f"model.{name}={value} has no effect, because model.rope_layers leaves no "
                    f"layer with rope; remove {name}, or list a layer with true"
                )
        return
    layers = zip(model.layer_kinds, model.rope_pattern, strict=True)
    kinds = {kind for kind, has_rope in layers if has_rope}
    if model.rope_local_theta is not None and kinds == {"full_attention"}:
        yield (
            f"model.rope_local_theta={model.rope_local_theta} applies to sliding_attention and "
            "chunked_attention layers only, and this model has none with rope; remove it, or add "
            "such a layer to model.layer_types"
        )
    if model.rotary_size % 2 and model.partial_rotary_factor == 1:
        yield f"model.head_dim={model.head_size}: rope rotates pairs; use an even head_dim"
        return
    if model.rotary_size < 2 or model.rotary_size % 2:
        yield (
            f"model.partial_rotary_factor={model.partial_rotary_factor} rotates "
            f"{model.rotary_size} of {model.head_size} dimensions of a head, but rope rotates "
            "pairs; choose a factor that gives an even number"
        )
        return
    try:
        rope_frequencies(model.rotary_size, model.rope_theta, model.rope_scaling)
    except ValueError as error:
        yield f"model.rope_scaling: {error}"
