"""Cross-entropy over a vocabulary split over tp, computed in chunks of tokens.

The logits of the whole batch never exist at once. `_loss_and_gradients` holds the formula and its
derivative; every term of the loss that reads logits belongs there.

Where tp splits the hidden states and the head has an overlap method, each chunk travels around the
tp ring: the logits of a block are computed while the next block arrives, and the gradient of a
block returns under the matmuls of the others. The hidden states are then never gathered.

Letters: N tokens of one device, n devices of tp, M chunks, C tokens of a chunk, D embed, V
vocabulary.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec as P

from model.config import ModelConfig
from model.loss_chunk import tokens_per_chunk
from parallel.linear.collective_matmul import Overlap, gather_matmul_blocks
from parallel.linear.config import TensorParallelConfig
from parallel.linear.ring import all_gather, pcast_varying
from parallel.linear.stored_kernel import gather_kernel
from parallel.sharding.axes import DEFAULT_MASK_VALUE, ColumnWise
from parallel.sharding.specs import ROWS, SplitDim, split_dim


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

    The loss of a token is mask * (logsumexp(logits) - logit of its target), over the first
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

    Communication: x over tp, once around the ring in every chunk, or in one all-gather without an
    overlap method; its gradient likewise. Per chunk one all-reduce (max) and two all-reduces (sum)
    of C floats over tp; one all-reduce of the scalar over the other axes.
    """
    return _map_over_mesh(
        _sum_body, P(), x_BLD, kernel_DV, targets_BL, mask_BL, config=config, tp=tp
    )


def token_losses(
    x_BLD: jax.Array,
    kernel_DV: jax.Array,
    targets_BL: jax.Array,
    *,
    config: ModelConfig,
    tp: TensorParallelConfig,
) -> jax.Array:
    """Return the cross-entropy of every token `B L`, float32, in nats, sharded as the targets.

    The arguments are those of `cross_entropy_sum`. The weight of a token in the loss may depend on
    other tokens, so gradients wait for the backward pass, which computes the logits of each chunk
    again: four matmuls per chunk in all. Without derivatives there is one.

    Communication: that of `cross_entropy_sum` in the forward and again in the backward pass,
    without the all-reduce of the scalar.
    """
    out_specs = jax.typeof(targets_BL).sharding.spec
    return _map_over_mesh(
        _token_body, out_specs, x_BLD, kernel_DV, targets_BL, config=config, tp=tp
    )


def _map_over_mesh(
    body: Callable[..., jax.Array],
    out_specs: P,
    x_BLD: jax.Array,
    kernel_DV: jax.Array,
    *tokens_BL: jax.Array,
    config: ModelConfig,
    tp: TensorParallelConfig,
) -> jax.Array:
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
) -> jax.Array:
    """Sum the loss of local blocks: x, kernel `D/fsdp V/tp`, tokens `B L` -> scalar."""
    x_MCD, kernel, chunks, settings = _cut_into_chunks(x, kernel, dim=dim, config=config, tp=tp)
    total = _sum_chunks(x_MCD, kernel, chunks.join(targets), chunks.join(mask), settings)
    axes = tp.manager.mesh.axis_names
    return lax.psum(total, tuple(name for name in axes if name != tp.axis_name))


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
) -> tuple[jax.Array, jax.Array, "_Chunks", "_Settings"]:
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
    settings = _Settings(axis, dim, tp.overlap, config.vocab_size, cap)
    return chunks.split_rows(x), kernel, chunks, settings


class _Settings(NamedTuple):
    """Static settings of a chunk: what is gathered and how, the vocabulary, the cap on logits."""

    axis_name: str
    dim: SplitDim | None
    overlap: Overlap
    vocab_size: int
    cap: float | None


def soft_cap(logits: jax.Array, cap: float | None) -> jax.Array:
    """Return cap * tanh(logits / cap); None: the logits as they are."""
    return logits if cap is None else cap * jnp.tanh(logits / cap)


def _uncapped_gradient(gradient: jax.Array, capped: jax.Array, cap: float | None) -> jax.Array:
    """Return the gradient with respect to logits from that with respect to the capped logits.

    The derivative of the cap is 1 - tanh^2, and tanh is capped / cap.
    """
    if cap is None:
        return gradient
    # Columns that pad the vocabulary hold a huge negative number instead of a capped logit.
    return gradient * (1 - jnp.square(jnp.clip(capped / cap, -1, 1)))


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


def _loss_and_gradients(
    x: jax.Array,
    kernel_DV: jax.Array,
    targets_C: jax.Array,
    settings: _Settings,
) -> tuple[jax.Array, Callable[[jax.Array], tuple[jax.Array, jax.Array]]]:
    """Return the losses C of a chunk, and a function that computes gradients (dx, dkernel).

    It takes a weight for every token, such as the mask. The gradient with respect to the logits is
    softmax(logits) - one_hot(targets), times the weight, and times the derivative of the cap.
    Columns that pad the vocabulary have no probability. Lists hold blocks of rows, c of them each.
    """
    axis_name, columns = settings.axis_name, kernel_DV.shape[1]
    ids_V = lax.axis_index(axis_name) * columns + jnp.arange(columns)
    is_padded = columns * lax.axis_size(axis_name) > settings.vocab_size

    def cap_and_max(logits_cV: jax.Array) -> tuple[jax.Array, jax.Array]:
        logits_cV = soft_cap(logits_cV, settings.cap)
        if is_padded:
            logits_cV = jnp.where(ids_V < settings.vocab_size, logits_cV, DEFAULT_MASK_VALUE)
        return logits_cV, logits_cV.max(axis=1, keepdims=True)

    product = gather_matmul_blocks(
        x, kernel_DV, cap_and_max, axis_name=axis_name, dim=settings.dim, overlap=settings.overlap
    )
    logits, maxima = zip(*product.results, strict=True)
    max_C1 = lax.pmax(product.unshard(list(maxima)), axis_name)
    targets = product.shard(targets_C[:, None])

    def exponentials(logits_cV: jax.Array, max_c1: jax.Array) -> jax.Array:
        return jnp.exp(logits_cV - max_c1)

    def total(blocks: Iterable[jax.Array]) -> jax.Array:
        sums = [jnp.sum(block, axis=1, keepdims=True) for block in blocks]
        return lax.psum(product.unshard(sums), axis_name)

    norm_C1 = total(map(exponentials, logits, product.shard(max_C1)))
    hits = zip(logits, targets, strict=True)
    target_C1 = total(jnp.where(target == ids_V, block, 0) for block, target in hits)
    losses_C1 = jnp.log(norm_C1) + max_C1 - target_C1

    def gradients(mask_C: jax.Array) -> tuple[jax.Array, jax.Array]:
        rows = (max_C1, mask_C[:, None] / norm_C1, mask_C[:, None])
        blocks = zip(logits, targets, *map(product.shard, rows), strict=True)
        return product.pullback(
            [
                _uncapped_gradient(
                    exponentials(logits_cV, max_c1) * weight_c1
                    - jnp.where(target_c1 == ids_V, mask_c1, 0),
                    logits_cV,
                    settings.cap,
                )
                for logits_cV, target_c1, max_c1, weight_c1, mask_c1 in blocks
            ]
        )

    return losses_C1[:, 0], gradients


def _scan_chunks(
    x_MCD: jax.Array,
    kernel_DV: jax.Array,
    targets_MC: jax.Array,
    mask_MC: jax.Array,
    *,
    settings: _Settings,
    with_gradients: bool,
) -> tuple[jax.Array, tuple[jax.Array, jax.Array] | None]:
    """Return the summed loss, and on request the gradients of x and of the kernel `D V/tp`.

    x: `M C/n D` if its rows are gathered, `M C D/n` if its features are, else `M C D`.
    """

    def body(dkernel_DV: Any, chunk: tuple[jax.Array, ...]) -> tuple[Any, Any]:
        x, targets_C, mask_C = chunk
        losses_C, gradients = _loss_and_gradients(x, kernel_DV, targets_C, settings)
        loss = jnp.sum(losses_C * mask_C)
        if not with_gradients:
            return None, (loss, None)
        dx, chunk_DV = gradients(mask_C)
        return dkernel_DV + chunk_DV, (loss, dx)

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
    settings: _Settings,
) -> jax.Array:
    chunks = (x_MCD, kernel_DV, targets_MC, mask_MC)
    return _scan_chunks(*chunks, settings=settings, with_gradients=False)[0]


def _sum_chunks_forward(*args: Any) -> tuple[jax.Array, Any]:
    *chunks, settings = args
    return _scan_chunks(*chunks, settings=settings, with_gradients=True)


def _sum_chunks_backward(
    settings: _Settings, gradients: Any, cotangent: jax.Array
) -> tuple[Any, ...]:
    scale = cotangent.astype(jnp.float32)
    dx_MCD, dkernel_DV = ((y * scale).astype(y.dtype) for y in gradients)
    return dx_MCD, dkernel_DV, None, None


_sum_chunks.defvjp(_sum_chunks_forward, _sum_chunks_backward)


@partial(jax.custom_vjp, nondiff_argnums=(3,))
def _losses_of_chunks(
    x_MCD: jax.Array, kernel_DV: jax.Array, targets_MC: jax.Array, settings: _Settings
) -> jax.Array:
    """Return the loss of every token `M C`."""

    def body(_: None, chunk: tuple[jax.Array, jax.Array]) -> tuple[None, jax.Array]:
        x, targets_C = chunk
        return None, _loss_and_gradients(x, kernel_DV, targets_C, settings)[0]

    return lax.scan(body, None, (x_MCD, targets_MC))[1]


def _losses_forward(*args: Any) -> tuple[jax.Array, Any]:
    x_MCD, kernel_DV, targets_MC, _ = args
    return _losses_of_chunks(*args), (x_MCD, kernel_DV, targets_MC)


def _losses_backward(settings: _Settings, chunks: Any, weights_MC: jax.Array) -> tuple[Any, ...]:
    x_MCD, kernel_DV, targets_MC = chunks
    _, gradients = _scan_chunks(
        x_MCD, kernel_DV, targets_MC, weights_MC, settings=settings, with_gradients=True
    )
    assert gradients is not None
    return *gradients, None


_losses_of_chunks.defvjp(_losses_forward, _losses_backward)
