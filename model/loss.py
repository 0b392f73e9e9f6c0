"""Cross-entropy that never holds the logits: chunked over tokens, vocabulary split over tp.

Letters: N tokens of this device, D embed, V vocabulary, C tokens of one chunk.
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec as P

from parallel.linear.layout import TensorParallelConfig, layout_of
from parallel.linear.projection import gather_kernel
from parallel.linear.ring import all_gather, vary
from parallel.sharding.axes import ColumnWise


def cross_entropy_sum(
    x_BLD: jax.Array,
    kernel_DV: jax.Array,
    targets_BL: jax.Array,
    mask_BL: jax.Array,
    *,
    tp: TensorParallelConfig,
    chunk: int,
) -> jax.Array:
    """Sum over tokens of mask * (logsumexp(x @ kernel) - logit of the target), float32, in nats.

    x_BLD: hidden states in any residual layout. kernel_DV: ColumnWise. chunk: tokens per device
    whose logits exist at a time: memory is chunk * V / tp floats instead of B L V.
    The gradients are computed in the forward pass, from the logits while they exist (three matmuls
    per chunk in all, none recomputed), and scaled in the backward pass.
    Communication: one gather of x over tp; per chunk an all-max and two all-sums of C floats.
    """
    spec = jax.typeof(x_BLD).sharding.spec
    token_spec = jax.typeof(targets_BL).sharding.spec
    kernel_spec = tp.manager.resolve(ColumnWise)
    body = partial(
        _loss_body,
        kernel_spec=kernel_spec,
        layout=layout_of(spec, tp.axis_name),
        axis_name=tp.axis_name,
        mesh_axes=tp.manager.mesh.axis_names,
        chunk=chunk,
    )
    island = jax.shard_map(
        body,
        mesh=tp.manager.mesh,
        in_specs=(spec, kernel_spec, token_spec, token_spec),
        out_specs=P(),
    )
    return island(x_BLD, kernel_DV, targets_BL, mask_BL)


def _loss_body(
    x: jax.Array,
    kernel: jax.Array,
    targets: jax.Array,
    mask: jax.Array,
    *,
    kernel_spec: P,
    layout: str,
    axis_name: str,
    mesh_axes: tuple[str, ...],
    chunk: int,
) -> jax.Array:
    """`B L/tp D` or `B L D/tp` or `B L D`, kernel `D/fsdp V/tp`, tokens `B L` -> scalar."""
    if layout != "replicated":
        x = all_gather(x, axis_name, 1 if layout == "sequence" else 2)
    kernel = gather_kernel(kernel, kernel_spec, keep=axis_name, dtype=x.dtype, like=x)
    # Varying over all axes: what a custom derivative returns must have the type of its input, and
    # the transpose of this cast is the all-sum of the gradients over the axes that repeat it.
    x, kernel = (vary(y, mesh_axes) for y in (x, kernel))
    tokens_ND = x.reshape(-1, x.shape[-1])
    rows: tuple[jax.Array, ...] = (tokens_ND, targets.reshape(-1), mask.reshape(-1))
    chunk = min(chunk, tokens_ND.shape[0])
    if missing := -tokens_ND.shape[0] % chunk:  # the last chunk is filled up with masked tokens
        rows = tuple(jnp.pad(y, [(0, missing)] + [(0, 0)] * (y.ndim - 1)) for y in rows)
    total = _chunked_sum(rows[0], kernel, *rows[1:], axis_name, chunk)
    return lax.psum(total, tuple(name for name in mesh_axes if name != axis_name))


def _token_losses(
    x_CD: jax.Array, kernel_DV: jax.Array, targets_C: jax.Array, axis_name: str
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """Losses (C,), and what their derivative needs: exp of shifted logits, their sum, one-hot."""
    logits_CV = jnp.matmul(x_CD, kernel_DV, preferred_element_type=jnp.float32)
    columns = logits_CV.shape[1]
    own_V = lax.axis_index(axis_name) * columns + jnp.arange(columns)
    hit_CV = targets_C[:, None] == own_V[None, :]
    top_C = lax.pmax(logits_CV.max(axis=1), axis_name)
    exp_CV = jnp.exp(logits_CV - top_C[:, None])
    norm_C = lax.psum(exp_CV.sum(axis=1), axis_name)
    target_C = lax.psum(jnp.where(hit_CV, logits_CV, 0).sum(axis=1), axis_name)
    return jnp.log(norm_C) + top_C - target_C, exp_CV, norm_C, hit_CV


def _chunks(chunk: int, *arrays: jax.Array) -> tuple[jax.Array, ...]:
    return tuple(a.reshape(-1, chunk, *a.shape[1:]) for a in arrays)


@partial(jax.custom_vjp, nondiff_argnums=(4, 5))
def _chunked_sum(
    x_ND: jax.Array,
    kernel_DV: jax.Array,
    targets_N: jax.Array,
    mask_N: jax.Array,
    axis_name: str,
    chunk: int,
) -> jax.Array:
    def body(args: tuple[jax.Array, ...]) -> jax.Array:
        x_CD, targets_C, mask_C = args
        return jnp.sum(_token_losses(x_CD, kernel_DV, targets_C, axis_name)[0] * mask_C)

    return jnp.sum(lax.map(body, _chunks(chunk, x_ND, targets_N, mask_N)))


def _chunked_sum_forward(
    x_ND: jax.Array,
    kernel_DV: jax.Array,
    targets_N: jax.Array,
    mask_N: jax.Array,
    axis_name: str,
    chunk: int,
) -> tuple[jax.Array, Any]:
    def body(dkernel_DV: jax.Array, args: tuple[jax.Array, ...]) -> tuple[jax.Array, Any]:
        x_CD, targets_C, mask_C = args
        losses_C, exp_CV, norm_C, hit_CV = _token_losses(x_CD, kernel_DV, targets_C, axis_name)
        weight_C = mask_C / norm_C
        dlogits_CV = exp_CV * weight_C[:, None] - jnp.where(hit_CV, mask_C[:, None], 0)
        dlogits_CV = dlogits_CV.astype(x_CD.dtype)
        dx_CD = jnp.matmul(dlogits_CV, kernel_DV.T)
        dkernel_DV += jnp.matmul(x_CD.T, dlogits_CV, preferred_element_type=jnp.float32)
        return dkernel_DV, (jnp.sum(losses_C * mask_C), dx_CD)

    zero_DV = jnp.zeros_like(kernel_DV, jnp.float32)
    varying = tuple(jax.typeof(kernel_DV).manual_axis_type.varying)
    dkernel_DV, (sums, dx) = lax.scan(
        body, vary(zero_DV, varying), _chunks(chunk, x_ND, targets_N, mask_N)
    )
    return jnp.sum(sums), (dx.reshape(x_ND.shape), dkernel_DV.astype(kernel_DV.dtype))


def _chunked_sum_backward(
    axis_name: str, chunk: int, gradients: Any, cotangent: jax.Array
) -> tuple[Any, ...]:
    dx_ND, dkernel_DV = gradients
    scale = cotangent.astype(jnp.float32)
    dx_ND, dkernel_DV = ((y * scale).astype(y.dtype) for y in (dx_ND, dkernel_DV))
    return dx_ND, dkernel_DV, None, None


_chunked_sum.defvjp(_chunked_sum_forward, _chunked_sum_backward)
