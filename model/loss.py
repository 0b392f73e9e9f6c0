"""Cross-entropy over a vocabulary split over tp, computed in chunks of tokens.

The logits of the whole batch never exist at once. `_loss_and_dlogits` holds the formula and its
derivative; every term of the loss that reads logits belongs there.

Letters: N tokens of one device, M chunks, C tokens of a chunk, D embed, V vocabulary.
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec as P

from model.config import ModelConfig
from parallel.linear.config import TensorParallelConfig
from parallel.linear.ring import all_gather, pcast_varying
from parallel.linear.sharded_matmul import gather_kernel
from parallel.sharding.axes import ColumnWise
from parallel.sharding.specs import SplitDim, split_dim


def cross_entropy_sum(
    x_BLD: jax.Array,
    kernel_DV: jax.Array,
    targets_BL: jax.Array,
    mask_BL: jax.Array,
    *,
    config: ModelConfig,
    tp: TensorParallelConfig,
) -> jax.Array:
    """Return the masked cross-entropy summed over all tokens, float32, in nats.

    The loss of a token is mask * (logsumexp(x @ kernel) - logit of its target). At most
    `config.loss_chunk` tokens per device have logits at a time, so they take loss_chunk * V / tp
    floats instead of B * L * V. Gradients are computed in the forward pass, while the logits of a
    chunk exist, and scaled in the backward pass: three matmuls per chunk in all.

    Args:
        x_BLD: hidden states in any residual layout.
        kernel_DV: kernel of the head, sharded ColumnWise.
        targets_BL: token ids.
        mask_BL: weight of every token, float32; 0 leaves a token out.
        config: read for the chunk size.
        tp: mesh and axis over which the vocabulary is split.

    Communication: one all-gather of x over tp; per chunk one all-reduce (max) and two all-reduces
    (sum) of C floats over tp; one all-reduce of the scalar over the other axes.
    """
    spec = jax.typeof(x_BLD).sharding.spec
    token_spec = jax.typeof(targets_BL).sharding.spec
    kernel_spec = tp.manager.resolve(ColumnWise)
    body = partial(_loss_body, dim=split_dim(spec, tp.axis_name), config=config, tp=tp)
    mapped = jax.shard_map(
        body,
        mesh=tp.manager.mesh,
        in_specs=(spec, kernel_spec, token_spec, token_spec),
        out_specs=P(),
    )
    return mapped(x_BLD, kernel_DV, targets_BL, mask_BL)


def _loss_body(
    x: jax.Array,
    kernel: jax.Array,
    targets: jax.Array,
    mask: jax.Array,
    *,
    dim: SplitDim | None,
    config: ModelConfig,
    tp: TensorParallelConfig,
) -> jax.Array:
    """Sum the loss of local blocks: x, kernel `D/fsdp V/tp`, tokens `B L` -> scalar."""
    axes = tp.manager.mesh.axis_names
    if dim is not None:
        x = all_gather(x, tp.axis_name, dim)
    kernel_spec = tp.manager.resolve(ColumnWise)
    kernel = gather_kernel(kernel, kernel_spec, keep=tp.axis_name, dtype=x.dtype, like=x)
    # Varying over all axes: the result of a custom derivative must have the type of its input. The
    # transpose of this cast sums the gradients over the axes that hold copies of the input.
    x, kernel = (pcast_varying(y, axes) for y in (x, kernel))
    tokens_ND = x.reshape(-1, x.shape[-1])
    rows: tuple[jax.Array, ...] = (tokens_ND, targets.reshape(-1), mask.reshape(-1))
    chunk = min(config.loss_chunk, tokens_ND.shape[0])
    if padding := -tokens_ND.shape[0] % chunk:  # masked tokens fill the last chunk
        rows = tuple(jnp.pad(y, [(0, padding)] + [(0, 0)] * (y.ndim - 1)) for y in rows)
    x_MCD, targets_MC, mask_MC = (y.reshape(-1, chunk, *y.shape[1:]) for y in rows)
    total = _sum_chunks(x_MCD, kernel, targets_MC, mask_MC, tp.axis_name)
    return lax.psum(total, tuple(name for name in axes if name != tp.axis_name))


def _loss_and_dlogits(
    logits_CV: jax.Array, targets_C: jax.Array, mask_C: jax.Array, axis_name: str
) -> tuple[jax.Array, jax.Array]:
    """Return the masked losses `C` and their gradient with respect to the logits `C V/tp`.

    Both are float32. The gradient is softmax(logits) - one_hot(targets), times the mask.
    """
    columns = logits_CV.shape[1]
    ids_V = lax.axis_index(axis_name) * columns + jnp.arange(columns)
    is_target_CV = targets_C[:, None] == ids_V[None, :]
    max_C = lax.pmax(logits_CV.max(axis=1), axis_name)
    exp_CV = jnp.exp(logits_CV - max_C[:, None])
    norm_C = lax.psum(exp_CV.sum(axis=1), axis_name)
    target_C = lax.psum(jnp.where(is_target_CV, logits_CV, 0).sum(axis=1), axis_name)
    losses_C = jnp.log(norm_C) + max_C - target_C
    weight_C = mask_C / norm_C
    dlogits_CV = exp_CV * weight_C[:, None] - jnp.where(is_target_CV, mask_C[:, None], 0)
    return losses_C * mask_C, dlogits_CV


def _scan_chunks(
    x_MCD: jax.Array,
    kernel_DV: jax.Array,
    targets_MC: jax.Array,
    mask_MC: jax.Array,
    *,
    axis_name: str,
    with_gradients: bool,
) -> tuple[jax.Array, tuple[jax.Array, jax.Array] | None]:
    """Return the summed loss, and on request the gradients of x `M C D` and kernel `D V/tp`."""

    def body(dkernel_DV: Any, chunk: tuple[jax.Array, ...]) -> tuple[Any, Any]:
        x_CD, targets_C, mask_C = chunk
        logits_CV = jnp.matmul(x_CD, kernel_DV, preferred_element_type=jnp.float32)
        losses_C, dlogits_CV = _loss_and_dlogits(logits_CV, targets_C, mask_C, axis_name)
        if not with_gradients:
            return None, (jnp.sum(losses_C), None)
        dlogits_CV = dlogits_CV.astype(x_CD.dtype)
        dx_CD = jnp.matmul(dlogits_CV, kernel_DV.T)
        dkernel_DV += jnp.matmul(x_CD.T, dlogits_CV, preferred_element_type=jnp.float32)
        return dkernel_DV, (jnp.sum(losses_C), dx_CD)

    zero_DV = None
    if with_gradients:
        varying = tuple(jax.typeof(kernel_DV).manual_axis_type.varying)
        zero_DV = pcast_varying(jnp.zeros_like(kernel_DV, jnp.float32), varying)
    dkernel_DV, (sums_M, dx_MCD) = lax.scan(body, zero_DV, (x_MCD, targets_MC, mask_MC))
    if dkernel_DV is None:
        return jnp.sum(sums_M), None
    return jnp.sum(sums_M), (dx_MCD, dkernel_DV.astype(kernel_DV.dtype))


@partial(jax.custom_vjp, nondiff_argnums=(4,))
def _sum_chunks(
    x_MCD: jax.Array,
    kernel_DV: jax.Array,
    targets_MC: jax.Array,
    mask_MC: jax.Array,
    axis_name: str,
) -> jax.Array:
    chunks = (x_MCD, kernel_DV, targets_MC, mask_MC)
    return _scan_chunks(*chunks, axis_name=axis_name, with_gradients=False)[0]


def _sum_chunks_forward(*args: Any) -> tuple[jax.Array, Any]:
    *chunks, axis_name = args
    return _scan_chunks(*chunks, axis_name=axis_name, with_gradients=True)


def _sum_chunks_backward(axis_name: str, gradients: Any, cotangent: jax.Array) -> tuple[Any, ...]:
    scale = cotangent.astype(jnp.float32)
    dx_MCD, dkernel_DV = ((y * scale).astype(y.dtype) for y in gradients)
    return dx_MCD, dkernel_DV, None, None


_sum_chunks.defvjp(_sum_chunks_forward, _sum_chunks_backward)
