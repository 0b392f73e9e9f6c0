"""Cross-entropy over a vocabulary split over tp, computed in chunks of tokens.

The logits of the whole batch never exist at once. `model/loss_formula.py` has the loss of one chunk
and its derivative.

Where tp splits the hidden states and the head has an overlap method, each chunk travels around the
tp ring: the logits of a block are computed while the next block arrives, and the gradient of a
block returns under the matmuls of the others. The hidden states are then never gathered.

Letters: N tokens of one device, n devices of tp, M chunks, C tokens of a chunk, D embed, V
vocabulary.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec as P

from model.config import ModelConfig
from model.loss_chunk import tokens_per_chunk
from model.loss_formula import (
    CROSS_ENTROPY,
    ChunkSettings,
    LossSums,
    LossTerms,
    loss_and_gradients,
)
from parallel.linear.config import TensorParallelConfig
from parallel.linear.ring import all_gather, pcast_varying
from parallel.linear.stored_kernel import gather_kernel
from parallel.sharding.axes import ColumnWise
from parallel.sharding.specs import ROWS, SplitDim, split_dim


def loss_sums(
    x_BLD: jax.Array,
    kernel_DV: jax.Array,
    targets_BL: jax.Array,
    mask_BL: jax.Array,
    *,
    config: ModelConfig,
    tp: TensorParallelConfig,
    terms: LossTerms = CROSS_ENTROPY,
) -> LossSums:
    """Return the masked objective and cross-entropy, summed over all tokens.

    The cross-entropy of a token is mask * (logsumexp(logits) - logit of its target), over the first
    `config.vocab_size` columns: the others are padding. The logits are x @ kernel, capped if
    `config.final_logit_softcapping` says so. The logits of `tokens_per_chunk`
    tokens exist at a time, so they take this number * V / tp floats instead of B * L * V.
    Gradients are computed in the forward pass, while the logits of a chunk exist, and scaled in the
    backward pass: three matmuls per chunk in all.

    Args:
        x_BLD: hidden states in any residual layout.
        kernel_DV: kernel of the head, sharded ColumnWise.
        targets_BL: token ids.
        mask_BL: weight of every token, float32; 0 leaves a token out.
        config: read for the size of the vocabulary and of a chunk, and for the cap.
        tp: mesh, axis over which the vocabulary is split, and overlap method.
        terms: terms beside the cross-entropy.

    Communication: x over tp, once around the ring in every chunk, or in one all-gather without an
    overlap method; its gradient likewise. Per chunk one all-reduce (max) and two all-reduces (sum;
    three with label smoothing) of C floats over tp; one all-reduce of the scalars over the other
    axes.
    """
    body = partial(_sum_body, terms=terms)
    sums = _map_over_mesh(body, P(), x_BLD, kernel_DV, targets_BL, mask_BL, config=config, tp=tp)
    return LossSums(sums[0], lax.stop_gradient(sums[-1]))


def token_losses(
    x_BLD: jax.Array,
    kernel_DV: jax.Array,
    targets_BL: jax.Array,
    *,
    config: ModelConfig,
    tp: TensorParallelConfig,
) -> jax.Array:
    """Return the cross-entropy of every token `B L`, float32, in nats, sharded as the targets.

    The arguments are those of `loss_sums`. The weight of a token in the loss may depend on
    other tokens, so gradients wait for the backward pass, which computes the logits of each chunk
    again: four matmuls per chunk in all. Without derivatives there is one.

    Communication: that of `loss_sums` in the forward and again in the backward pass,
    without the all-reduce of the scalar.
    """
    out_specs = jax.typeof(targets_BL).sharding.spec
    return _map_over_mesh(
        _token_body, out_specs, x_BLD, kernel_DV, targets_BL, config=config, tp=tp
    )


def _map_over_mesh(
    body: Callable[..., Any],
    out_specs: P,
    x_BLD: jax.Array,
    kernel_DV: jax.Array,
    *tokens_BL: jax.Array,
    config: ModelConfig,
    tp: TensorParallelConfig,
) -> Any:
    """Apply a body to the local blocks of hidden states, kernel and arrays of tokens."""
    spec = jax.typeof(x_BLD).sharding.spec
    token_specs = [jax.typeof(y_BL).sharding.spec for y_BL in tokens_BL]
    mapped = jax.shard_map(
        partial(body, dim=split_dim(spec, tp.axis_name), config=config, tp=tp),
        mesh=tp.manager.mesh,
        in_specs=(spec, tp.manager.resolve(ColumnWise), *token_specs),
        out_specs=out_specs,
    )
    return mapped(x_BLD, kernel_DV, *tokens_BL)


def _sum_body(
    x: jax.Array,
    kernel: jax.Array,
    targets: jax.Array,
    mask: jax.Array,
    *,
    dim: SplitDim | None,
    config: ModelConfig,
    tp: TensorParallelConfig,
    terms: LossTerms,
) -> tuple[jax.Array, ...]:
    """Sum the losses of local blocks: x, kernel `D/fsdp V/tp`, tokens `B L` -> scalars.

    They are (objective, cross-entropy), or one scalar if both are the same.
    """
    x_MCD, kernel, chunks, settings = _cut_into_chunks(
        x, kernel, dim=dim, config=config, tp=tp, terms=terms
    )
    sums = _sum_chunks(x_MCD, kernel, chunks.join(targets), chunks.join(mask), settings)
    axes = tp.manager.mesh.axis_names
    return lax.psum(sums, tuple(name for name in axes if name != tp.axis_name))


def _token_body(
    x: jax.Array,
    kernel: jax.Array,
    targets: jax.Array,
    *,
    dim: SplitDim | None,
    config: ModelConfig,
    tp: TensorParallelConfig,
) -> jax.Array:
    """Return the loss of every token of local blocks: x, kernel, tokens `B L` -> `B L`."""
    x_MCD, kernel, chunks, settings = _cut_into_chunks(x, kernel, dim=dim, config=config, tp=tp)
    losses_MC = _losses_of_chunks(x_MCD, kernel, chunks.join(targets), settings)
    return chunks.part(losses_MC, *targets.shape)


def _cut_into_chunks(
    x: jax.Array,
    kernel: jax.Array,
    *,
    dim: SplitDim | None,
    config: ModelConfig,
    tp: TensorParallelConfig,
    terms: LossTerms = CROSS_ENTROPY,
) -> tuple[jax.Array, jax.Array, "_Chunks", "ChunkSettings"]:
    """Return hidden states by chunk, the gathered kernel `D V/tp`, and how tokens are cut."""
    axes, axis = tp.manager.mesh.axis_names, tp.axis_name
    if tp.overlap == "none" and dim is not None:
        x, dim = all_gather(x, axis, dim), None
    kernel_spec = tp.manager.resolve(ColumnWise)
    kernel = gather_kernel(kernel, kernel_spec, keep=axis, dtype=x.dtype, like=x)
    # Varying over all axes: the result of a custom derivative must have the type of its input. The
    # transpose of this cast sums the gradients over the axes that hold copies of the input.
    x, kernel = (pcast_varying(y, axes) for y in (x, kernel))
    n = lax.axis_size(axis) if dim == ROWS else 1
    chunks = _Chunks(rows=_rows_per_chunk(config, tp, x.size // x.shape[-1], n), parts=n)
    cap = config.final_logit_softcapping
    settings = ChunkSettings(axis, dim, tp.overlap, config.vocab_size, cap, terms)
    return chunks.split_rows(x), kernel, chunks, settings


def _rows_per_chunk(config: ModelConfig, tp: TensorParallelConfig, rows: int, n: int) -> int:
    """Return the rows that one device adds to a chunk; even if an overlap method halves them."""
    most = min(max(tokens_per_chunk(config, tp.manager) // n, 1), rows)
    return most + most % 2 if tp.overlap == "split" else most


@dataclass(frozen=True)
class _Chunks:
    """Cuts the rows of a device into chunks, and the tokens of all devices of tp to match.

    rows: tokens of one device in a chunk. parts: devices that share the tokens of a row; block i of
    a row belongs to device i. Masked tokens fill the last chunk.
    """

    rows: int
    parts: int

    def split_rows(self, x: jax.Array) -> jax.Array:
        """Cut the hidden states of this device: `B L D` -> `M rows D`."""
        tokens_ND = x.reshape(-1, x.shape[-1])
        padded = jnp.pad(tokens_ND, ((0, -tokens_ND.shape[0] % self.rows), (0, 0)))
        return padded.reshape(-1, self.rows, x.shape[-1])

    def join(self, y_BL: jax.Array) -> jax.Array:
        """Return targets or mask by chunk, in the order of gathered rows: `M parts*rows`."""
        B, L = y_BL.shape
        y_nN = y_BL.reshape(B, self.parts, L // self.parts).swapaxes(0, 1).reshape(self.parts, -1)
        y_nN = jnp.pad(y_nN, ((0, 0), (0, -y_nN.shape[1] % self.rows)))
        return (
            y_nN.reshape(self.parts, -1, self.rows)
            .swapaxes(0, 1)
            .reshape(-1, self.parts * self.rows)
        )

    def part(self, y_MC: jax.Array, B: int, L: int) -> jax.Array:
        """Return values by chunk in the order of the tokens: the inverse of `join`."""
        y_nN = y_MC.reshape(-1, self.parts, self.rows).swapaxes(0, 1).reshape(self.parts, -1)
        y_nBL = y_nN[:, : B * L // self.parts].reshape(self.parts, B, L // self.parts)
        return y_nBL.swapaxes(0, 1).reshape(B, L)


def _scan_chunks(
    x_MCD: jax.Array,
    kernel_DV: jax.Array,
    targets_MC: jax.Array,
    mask_MC: jax.Array,
    *,
    settings: ChunkSettings,
    with_gradients: bool,
) -> tuple[tuple[jax.Array, ...], tuple[jax.Array, jax.Array] | None]:
    """Return the summed losses, and on request the gradients of x and of the kernel `D V/tp`.

    x: `M C/n D` if its rows are gathered, `M C D/n` if its features are, else `M C D`.
    """

    def body(dkernel_DV: Any, chunk: tuple[jax.Array, ...]) -> tuple[Any, Any]:
        x, targets_C, mask_C = chunk
        losses, gradients = loss_and_gradients(x, kernel_DV, targets_C, settings)
        sums = tuple(jnp.sum(losses_C * mask_C) for losses_C in losses)
        if not with_gradients:
            return None, (sums, None)
        dx, chunk_DV = gradients(mask_C)
        return dkernel_DV + chunk_DV, (sums, dx)

    zero_DV = None
    if with_gradients:
        varying = tuple(jax.typeof(kernel_DV).manual_axis_type.varying)
        zero_DV = pcast_varying(jnp.zeros_like(kernel_DV, jnp.float32), varying)
    dkernel_DV, (by_chunk, dx_MCD) = lax.scan(body, zero_DV, (x_MCD, targets_MC, mask_MC))
    sums = tuple(map(jnp.sum, by_chunk))
    if dkernel_DV is None:
        return sums, None
    return sums, (dx_MCD, dkernel_DV.astype(kernel_DV.dtype))


@partial(jax.custom_vjp, nondiff_argnums=(4,))
def _sum_chunks(
    x_MCD: jax.Array,
    kernel_DV: jax.Array,
    targets_MC: jax.Array,
    mask_MC: jax.Array,
    settings: ChunkSettings,
) -> tuple[jax.Array, ...]:
    """Return the summed losses; the first has the gradients, the others have none."""
    chunks = (x_MCD, kernel_DV, targets_MC, mask_MC)
    return _scan_chunks(*chunks, settings=settings, with_gradients=False)[0]


def _sum_chunks_forward(*args: Any) -> tuple[tuple[jax.Array, ...], Any]:
    *chunks, settings = args
    return _scan_chunks(*chunks, settings=settings, with_gradients=True)


def _sum_chunks_backward(
    settings: ChunkSettings, gradients: Any, cotangents: tuple[jax.Array, ...]
) -> tuple[Any, ...]:
    scale = cotangents[0].astype(jnp.float32)
    dx_MCD, dkernel_DV = ((y * scale).astype(y.dtype) for y in gradients)
    return dx_MCD, dkernel_DV, None, None


_sum_chunks.defvjp(_sum_chunks_forward, _sum_chunks_backward)


@partial(jax.custom_vjp, nondiff_argnums=(3,))
def _losses_of_chunks(
    x_MCD: jax.Array, kernel_DV: jax.Array, targets_MC: jax.Array, settings: ChunkSettings
) -> jax.Array:
    """Return the loss of every token `M C`."""

    def body(_: None, chunk: tuple[jax.Array, jax.Array]) -> tuple[None, jax.Array]:
        x, targets_C = chunk
        return None, loss_and_gradients(x, kernel_DV, targets_C, settings)[0][0]

    return lax.scan(body, None, (x_MCD, targets_MC))[1]


def _losses_forward(*args: Any) -> tuple[jax.Array, Any]:
    x_MCD, kernel_DV, targets_MC, _ = args
    return _losses_of_chunks(*args), (x_MCD, kernel_DV, targets_MC)


def _losses_backward(
    settings: ChunkSettings, chunks: Any, weights_MC: jax.Array
) -> tuple[Any, ...]:
    x_MCD, kernel_DV, targets_MC = chunks
    _, gradients = _scan_chunks(
        x_MCD, kernel_DV, targets_MC, weights_MC, settings=settings, with_gradients=True
    )
    assert gradients is not None
    return *gradients, None


_losses_of_chunks.defvjp(_losses_forward, _losses_backward)
