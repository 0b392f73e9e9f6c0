"""A whole model in plain numpy, written from the published equations: the reference of the tests.

It shares no code with the packages under test. It reads the fields of a configuration and the tree
of parameters, a nested dict of arrays, and computes in the dtype of these arrays: tests give it
float64. Its functions also take arrays of jax, with which jax can differentiate them.

Letters: B batch, L and T length, D embed, H query heads, K kv heads, h head dim, E experts, V
vocabulary.
"""

import math
from types import SimpleNamespace
from typing import NamedTuple

import numpy as np


class Routing(NamedTuple):
    """What one layer does with its tokens, all `B L E`: weights, probabilities and the choice."""

    weights: object
    probs: object
    chosen: object
    logits: object


def fields_of(config):
    """Return the fields of a configuration with nested ones, but no property of its classes."""

    def space(value):
        if not isinstance(value, dict):
            return value
        return SimpleNamespace(**{name: space(part) for name, part in value.items()})

    return space(config.model_dump())


def numpy_of(x):
    """Return the module whose functions take this array: numpy, or jax.numpy."""
    return x.__array_namespace__()


def part_of(tree, index):
    """Return entry `index` of the first dim of every array of a tree."""
    if isinstance(tree, dict):
        return {name: part_of(leaf, index) for name, leaf in tree.items()}
    return tree[index]


def softmax(x):
    weights = numpy_of(x).exp(x)
    return weights / weights.sum(-1, keepdims=True)


def sigmoid(x):
    return 1 / (1 + numpy_of(x).exp(-x))


def capped(x, cap):
    """Gemma 2, arXiv 2408.00118, section 2."""
    return x if cap is None else cap * numpy_of(x).tanh(x / cap)


def rms_norm(x, weights, c, eps=None):
    """arXiv 1910.07467, equation 4; Gemma's offset."""
    mean = (x**2).mean(-1, keepdims=True)
    return x / (mean + (eps or c.rms_norm_eps)) ** 0.5 * (c.norm_offset + weights["scale"])


def linear(x, weights, name=None, bias="bias"):
    kernel, bias = weights["kernel"], weights.get(bias)
    if name is not None:
        kernel, bias = kernel[name], None if bias is None else bias[name]
    return x @ kernel if bias is None else x @ kernel + bias


def gated_mlp(c, weights, x):
    """SwiGLU and GEGLU, arXiv 2002.05202; clamped SwiGLU, the code released with gpt-oss."""
    xp = numpy_of(x)
    gate, up = (linear(x, weights["gate_up"], name) for name in ("gate", "up"))
    if c.hidden_act == "silu":
        inner = gate * sigmoid(gate) * up
    elif c.hidden_act == "gelu_tanh":
        cubic = math.sqrt(2 / math.pi) * (gate + 0.044715 * gate**3)
        inner = gate * (1 + xp.tanh(cubic)) / 2 * up
    elif c.hidden_act == "clamped_swiglu":
        gate = xp.where(gate > c.swiglu_limit, c.swiglu_limit, gate)
        up = xp.where(up > c.swiglu_limit, c.swiglu_limit, up)
        up = xp.where(up < -c.swiglu_limit, -c.swiglu_limit, up)
        inner = gate * sigmoid(1.702 * gate) * (up + 1)
    else:
        raise NotImplementedError(c.hidden_act)
    return linear(inner, weights["down"])


def frequencies(c, dims, layer_type):
    """Return the radians per position of every pair of `dims` dimensions, and a factor on both."""
    theta, scaling = c.rope_theta, c.rope_scaling
    if layer_type != "full_attention" and c.rope_local_theta is not None:
        theta, scaling = c.rope_local_theta, SimpleNamespace(type="default")
    plain = [theta ** (-2 * pair / dims) for pair in range(dims // 2)]  # arXiv 2104.09864
    if scaling.type == "default":
        return np.array(plain), 1.0
    s, original = scaling.factor, scaling.original_max_position_embeddings
    if scaling.type == "linear":  # arXiv 2306.15595
        return np.array(plain) / s, 1.0
    if scaling.type == "llama3":
        return np.array([llama3_frequency(scaling, f) for f in plain]), 1.0
    if scaling.type == "yarn":
        return yarn_frequencies(scaling, plain, theta)
    if scaling.type == "longrope":  # arXiv 2402.13753
        is_long = scaling.row_length is not None and scaling.row_length > original
        divisors = scaling.long_factor if is_long else scaling.short_factor
        factor = scaling.attention_factor or math.sqrt(1 + math.log(s) / math.log(original))
        return np.array([f / d for f, d in zip(plain, divisors, strict=True)]), factor
    raise NotImplementedError(scaling.type)


def llama3_frequency(scaling, frequency):
    """The function `apply_scaling` of the code released with Llama 3.1."""
    original, low, high = (
        scaling.original_max_position_embeddings,
        scaling.low_freq_factor,
        scaling.high_freq_factor,
    )
    wavelength = 2 * math.pi / frequency
    if wavelength < original / high:
        return frequency
    if wavelength > original / low:
        return frequency / scaling.factor
    smooth = (original / wavelength - low) / (high - low)
    return (1 - smooth) * frequency / scaling.factor + smooth * frequency


def yarn_frequencies(scaling, plain, theta):
    """arXiv 2309.00071, section 3.2, with the rounding of the ramp of its released code."""
    dims = 2 * len(plain)

    def dim_of(rotations):
        length = scaling.original_max_position_embeddings
        return dims * math.log(length / (rotations * 2 * math.pi)) / (2 * math.log(theta))

    low, high = dim_of(scaling.beta_fast), dim_of(scaling.beta_slow)
    if scaling.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dims - 1)
    high += 0.001 * (low == high)
    interpolated = [min(max((pair - low) / (high - low), 0), 1) for pair in range(dims // 2)]
    found = [f * (1 - share) + f / scaling.factor * share
             for f, share in zip(plain, interpolated, strict=True)]  # fmt: skip
    if scaling.mscale_all_dim is not None:
        both = (yarn_scale(scaling, m) for m in (scaling.mscale, scaling.mscale_all_dim))
        return np.array(found), next(both) / next(both)
    return np.array(found), scaling.attention_factor or yarn_scale(scaling, 1.0)


def yarn_scale(scaling, mscale):
    return 0.1 * mscale * math.log(scaling.factor) + 1


def rotated(x, positions, rope, *, interleaved=False):
    """Rotate pairs (i, i + r/2), or (2i, 2i + 1), of `B L H h` by complex numbers; r may be < h."""
    xp, (frequency, factor) = numpy_of(x), rope
    half = len(frequency)
    turn = factor * xp.exp(1j * positions[:, :, None, None] * frequency)
    if interleaved:
        turned = (x[..., 0::2] + 1j * x[..., 1::2]) * turn
        return xp.stack([turned.real, turned.imag], -1).reshape(x.shape)
    turned = (x[..., :half] + 1j * x[..., half : 2 * half]) * turn
    return xp.concatenate([turned.real, turned.imag, x[..., 2 * half :]], -1)


def grouped_qkv(c, weights, x, positions, layer_type, has_rope):
    """Return queries, keys and values `B L H h`, and the factor on their products."""
    H, K = c.num_attention_heads, c.num_key_value_heads
    h = c.head_dim or c.hidden_size // H

    def projected(name, heads, normed):
        y = linear(x, weights["qkv"], name)
        if normed and c.qk_norm_across_heads:
            y = rms_norm(y, weights[f"{name}_norm"], c)
        y = y.reshape(*y.shape[:2], heads, h)
        if normed and not c.qk_norm_across_heads:
            y = rms_norm(y, weights[f"{name}_norm"], c)
        return y

    q, k = projected("q", H, c.qk_norm), projected("k", K, c.qk_norm)
    if has_rope:
        rope = frequencies(c, int(h * c.partial_rotary_factor), layer_type)
        q, k = rotated(q, positions, rope), rotated(k, positions, rope)
    # Query head n uses key head n // (H / K): arXiv 2305.13245.
    serves = np.arange(H) // (H // K)
    v = projected("v", K, False)
    return q, k[:, :, serves], v[:, :, serves], 1 / math.sqrt(c.query_pre_attn_scalar or h)


def latent_qkv(c, weights, x, positions, layer_type, has_rope):
    """The same for latent attention. DeepSeek-V2, arXiv 2405.04434, equations 9 to 19."""
    xp, mla, H, (B, L, _) = numpy_of(x), c.mla, c.num_attention_heads, x.shape
    n, r = mla.qk_nope_head_dim, mla.qk_rope_head_dim

    def down(name):
        return x @ weights["down"]["kernel"][name]

    if mla.q_lora_rank is None:
        q = linear(x, weights["q"])
    else:
        q = linear(rms_norm(down("q_a"), weights["q_a_norm"], c, mla.norm_eps), weights["q_b"])
    q, kv_a = q.reshape(B, L, H, n + r), down("kv_a")
    latent, k_rope = kv_a[..., : mla.kv_lora_rank], kv_a[:, :, None, mla.kv_lora_rank :]
    kv = linear(rms_norm(latent, weights["kv_a_norm"], c, mla.norm_eps), weights["kv_b"])
    kv = kv.reshape(B, L, H, n + mla.v_head_dim)
    q_rope = q[..., n:]
    if has_rope:
        rope = frequencies(c, r, layer_type)
        q_rope, k_rope = (
            rotated(y, positions, rope, interleaved=mla.rope_interleave) for y in (q_rope, k_rope)
        )
    q = xp.concatenate([q[..., :n], q_rope], -1)
    k = xp.concatenate([kv[..., :n], xp.repeat(k_rope, H, axis=2)], -1)
    scale = 1 / math.sqrt(n + r)
    if c.rope_scaling.mscale_all_dim is not None:
        scale *= yarn_scale(c.rope_scaling, c.rope_scaling.mscale_all_dim) ** 2
    return q, k, kv[..., n:], scale


def visible(c, layer_type, positions, segments):
    """Return which keys every query sees, `B L T`."""
    index = np.arange(positions.shape[1])
    distance = index[:, None] - index
    seen = (distance >= 0) & (segments[:, :, None] == segments[:, None])
    if layer_type == "sliding_attention":
        seen = seen & (distance < c.sliding_window)
    if layer_type == "chunked_attention":
        chunk = positions // c.attention_chunk_size
        seen = seen & (chunk[:, :, None] == chunk[:, None])
    return seen


def attention(c, weights, x, positions, segments, layer):
    """arXiv 1706.03762, equation 1; sinks: gpt-oss, arXiv 2508.10925."""
    xp, layer_type = numpy_of(x), c.layer_types[layer % len(c.layer_types)]
    project = grouped_qkv if c.mla is None else latent_qkv
    has_rope = c.rope_layers[layer % len(c.rope_layers)]
    q, k, v, scale = project(c, weights, x, positions, layer_type, has_rope)
    scores = capped(xp.einsum("blhd,bthd->bhlt", q, k) * scale, c.attn_logit_softcapping)
    seen = visible(c, layer_type, positions, segments)[:, None]
    weight = xp.where(seen, xp.exp(scores), 0)
    total = weight.sum(-1, keepdims=True)
    if c.attention_sinks:
        total = total + xp.exp(weights["sinks"])[:, None, None]
    out = xp.einsum("bhlt,bthd->blhd", weight / total, v)
    return linear(out.reshape(*x.shape[:2], -1), weights["o"])


def largest(scores, count):
    """Mark the `count` largest along the last dim; of equal ones the first."""
    xp = numpy_of(scores)
    order = xp.argsort(-scores, axis=-1, stable=True)
    return xp.argsort(order, axis=-1, stable=True) < count


def in_best_groups(moe, scores, counted):
    """Replace scores outside of the best groups, ranked by the sum of their best scores."""
    xp = numpy_of(scores)
    groups = scores.reshape(*scores.shape[:-1], moe.n_group, -1)
    rank = xp.sort(groups, axis=-1)[..., -counted:].sum(-1)
    kept = largest(rank, moe.topk_group)[..., None]
    return xp.where(kept, groups, -np.inf).reshape(scores.shape)


def route(c, weights, x, valid):
    """Return the `Routing` of all tokens; those that are not valid get no expert."""
    xp, moe = numpy_of(x), c.moe
    logits, k = linear(x, weights, bias="logit_bias"), moe.num_experts_per_tok
    probs, name = softmax(logits), moe.router
    bias = 0 if moe.bias_update_speed == 0 and not moe.router_bias else weights["bias"]
    factors = probs
    if name == "softmax":  # DeepSeek-V2, section 2.2.2
        chosen = largest(in_best_groups(moe, probs + bias, 1), k)
    elif name == "topk_softmax":  # Mixtral, arXiv 2401.04088, section 2.1
        has_bias = moe.bias_update_speed > 0 or moe.router_bias
        chosen = largest(probs + bias if has_bias else logits, k)
    elif name == "switch":  # arXiv 2101.03961, section 2.1
        chosen = largest(probs + bias, 1)
    elif name == "sigmoid":  # DeepSeek-V3, arXiv 2412.19437, section 2.1.2
        factors = sigmoid(logits)
        probs = factors / factors.sum(-1, keepdims=True)
        chosen = largest(in_best_groups(moe, factors + bias, 2), k)
    elif name == "expert_choice":  # arXiv 2202.09368, section 3.2
        L, E = logits.shape[1:]
        scores = xp.where(valid[..., None], probs, -np.inf)
        taken = largest(xp.swapaxes(scores, 1, 2), min(math.ceil(L * k / E), L))
        chosen = xp.swapaxes(taken, 1, 2)
    else:
        raise NotImplementedError(name)
    chosen = chosen & valid[..., None]
    factors = factors * chosen
    if name == "topk_softmax" or (name in ("softmax", "sigmoid") and moe.norm_topk_prob):
        factors = factors / (factors.sum(-1, keepdims=True) + 1e-20)
    return Routing(moe.routed_scaling_factor * factors, probs, chosen, logits)


def experts(c, weights, x, valid):
    """Return the outputs of a mixture of experts, and its routing; every expert sees all tokens."""
    routing, y = route(c, weights["router"], x, valid), 0
    for e in range(c.moe.num_experts):
        own = part_of({name: weights[name] for name in ("gate_up", "down")}, e)
        y = y + routing.weights[..., e : e + 1] * gated_mlp(c, own, x)
    if c.moe.num_shared_experts:
        shared = gated_mlp(c, weights["shared"], x)
        if c.moe.shared_expert_gate:
            shared = shared * sigmoid(linear(x, weights["shared_gate"]))
        y = y + shared
    return y, routing


def is_sparse(c, layer):
    after = layer >= c.moe.first_k_dense_replace
    return c.moe.num_experts > 0 and after and (layer + 1) % c.moe.decoder_sparse_step == 0


def forward(config, params, tokens, positions, segments, observe=lambda kind, y: None):
    """Return the logits `B L V` of `B L` tokens, and the routing of every sparse layer.

    A token attends to earlier tokens of its segment. Tokens of negative segments are padding.
    observe: called with what every layer adds to the residual stream, and with that stream.
    """
    c = fields_of(config)
    x, routings = hidden_states(c, params, tokens, positions, segments, observe)
    return logits_of(c, params, x), routings


def hidden_states(c, params, tokens, positions, segments, observe=lambda kind, y: None):
    """Return the hidden states `B L D` after the final norm, and the routings."""
    routings, used = [], [0, 0]
    x = params["embed"]["table"][tokens] * c.embedding_multiplier
    for layer in range(c.num_hidden_layers):
        sparse = is_sparse(c, layer)
        own = part_of(params["sparse_layers" if sparse else "layers"], used[sparse])
        used[sparse] += 1
        x, routing = block(c, own, x, positions, segments, layer, observe, sparse=sparse)
        routings += [routing] if sparse else []
    return rms_norm(x, params["norm"], c), routings


def block(c, own, x, positions, segments, layer, observe=lambda kind, y: None, *, sparse=False):
    """Return the residual stream after a block, and its routing or None."""
    before, after = c.norm_placement != "post", c.norm_placement != "pre"
    y = rms_norm(x, own["attention_norm"], c) if before else x
    y = attention(c, own["attention"], y, positions, segments, layer)
    y = rms_norm(y, own["attention_post_norm"], c) if after else y
    x = x + y
    observe("attention", y)
    y, routing = rms_norm(x, own["mlp_norm"], c) if before else x, None
    if sparse:
        y, routing = experts(c, own["mlp"], y, segments >= 0)
    else:
        y = gated_mlp(c, own["mlp"], y)
    y = rms_norm(y, own["mlp_post_norm"], c) if after else y
    x = x + y
    observe("experts" if sparse else "mlp", y)
    observe("residual", x)
    return x, routing


def logits_of(c, params, x):
    """Return the logits `B L V` of hidden states."""
    tied = c.tie_word_embeddings
    kernel = params["embed"]["table"].T if tied else params["head"]["kernel"]
    return capped(x @ kernel, c.final_logit_softcapping)[..., : c.vocab_size]


def prediction_losses(config, params, batch):
    """Return the mean loss of every module of multi-token prediction.

    DeepSeek-V3, arXiv 2412.19437, equations 21 to 24, with a norm before the head.
    """
    c = fields_of(config)
    positions, segments = batch["positions"], batch["segment_ids"]
    x, _ = hidden_states(c, params, batch["tokens"], positions, segments)
    found = []
    for k in range(1, len(c.mtp_loss_weights) + 1):
        own, weights = part_of(params["mtp"], k - 1), np.zeros(segments.shape)
        tokens, targets = np.zeros_like(segments), np.zeros_like(segments)
        for row, place in np.ndindex(segments.shape):
            later = place + k
            if later < segments.shape[1] and segments[row, later] == segments[row, place]:
                tokens[row, place] = batch["targets"][row, later - 1]
                targets[row, place] = batch["targets"][row, later]
                weights[row, place] = batch["loss_mask"][row, later]
        embedded = params["embed"]["table"][tokens] * c.embedding_multiplier
        x = linear(rms_norm(x, own["hidden_norm"], c), own["hidden_projection"]) + linear(
            rms_norm(embedded, own["embedding_norm"], c), own["embedding_projection"]
        )
        x, _ = block(c, own["block"], x, positions, segments, c.num_hidden_layers - 1)
        losses = token_losses(logits_of(c, params, rms_norm(x, own["norm"], c)), targets)
        found.append((weights * losses).sum() / weights.sum())
    return found


def token_losses(logits, targets):
    """Return the cross-entropy `B L` of every token, in nats."""
    xp = numpy_of(logits)
    chosen = xp.take_along_axis(logits, targets[..., None], -1)[..., 0]
    return xp.log(xp.exp(logits).sum(-1)) - chosen


def auxiliary_loss(config, routings, valid):
    """Return the load-balancing loss (arXiv 2101.03961) plus the z-loss (arXiv 2202.08906)."""
    moe, total, count = fields_of(config).moe, 0, valid.sum()
    for routing in routings:
        load = routing.chosen.sum((0, 1))
        probs = (routing.probs * valid[..., None]).sum((0, 1)) / count
        balance = moe.num_experts * (load / load.sum() * probs).sum()
        log_norm = numpy_of(routing.logits).log(numpy_of(probs).exp(routing.logits).sum(-1))
        z = (log_norm**2 * valid).sum() / count
        total = total + moe.router_aux_loss_coef * balance + moe.router_z_loss_coef * z
    return total


def loss(config, params, batch):
    """Return the weighted cross-entropy of a batch, summed over all tokens."""
    rows = (batch[name] for name in ("tokens", "positions", "segment_ids"))
    logits, _ = forward(config, params, *rows)
    return (batch["loss_mask"] * token_losses(logits, batch["targets"])).sum()
