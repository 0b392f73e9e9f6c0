"""The loss of a chunk of tokens from its logits, and its derivative.

Every term of the loss that reads logits belongs here; it then costs no further matmul.

Letters: C tokens of a chunk, c tokens of one block of it, V columns of the vocabulary.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from parallel.linear.collective_matmul import Overlap, gather_matmul_blocks
from parallel.sharding.axes import DEFAULT_MASK_VALUE
from parallel.sharding.specs import SplitDim


@dataclass(frozen=True)
class LossTerms:
    """Terms of the loss of training beside the cross-entropy.

    label_smoothing: the target is one_hot(target) * (1 - label_smoothing), plus label_smoothing / V
        for every token of the vocabulary (arXiv 1512.00567).
    z_loss: factor of logsumexp(logits)^2, which keeps the logits from drifting (arXiv 2204.02311).
    """

    label_smoothing: float = 0.0
    z_loss: float = 0.0

    def __bool__(self) -> bool:
        """Return whether a term other than the cross-entropy is set."""
        return self != CROSS_ENTROPY


CROSS_ENTROPY = LossTerms()
"""No further term."""


class LossSums(NamedTuple):
    """Losses summed over tokens, float32, in nats.

    objective: the loss to minimise, the cross-entropy plus the terms of `LossTerms`.
    cross_entropy: for reports alone; it has no gradient.
    others: other losses that the objective contains, for reports alone, by name.
    """

    objective: jax.Array
    cross_entropy: jax.Array
    others: Mapping[str, jax.Array] | None = None


class ChunkSettings(NamedTuple):
    """Static settings of a chunk: what is gathered and how, the vocabulary, the cap, the terms."""

    axis_name: str
    dim: SplitDim | None
    overlap: Overlap
    vocab_size: int
    cap: float | None
    terms: LossTerms


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


@dataclass(frozen=True)
class _Columns:
    """The columns V of the vocabulary that this device holds: their ids, and which are tokens."""

    ids_V: jax.Array
    settings: ChunkSettings
    is_padded: bool

    def is_token_V(self) -> jax.Array:
        return self.ids_V < self.settings.vocab_size

    def capped(self, logits_cV: jax.Array) -> jax.Array:
        """Return the capped logits; columns that pad the vocabulary get no probability."""
        logits_cV = soft_cap(logits_cV, self.settings.cap)
        if self.is_padded:
            logits_cV = jnp.where(self.is_token_V(), logits_cV, DEFAULT_MASK_VALUE)
        return logits_cV

    def gradient(
        self,
        capped_cV: jax.Array,
        target_c1: jax.Array,
        max_c1: jax.Array,
        weight_c1: jax.Array,
        mask_c1: jax.Array,
    ) -> jax.Array:
        """Return the gradient with respect to logits; weight: of the exponentials."""
        difference_cV = jnp.exp(capped_cV - max_c1) * weight_c1 - self._labels(target_c1, mask_c1)
        return _uncapped_gradient(difference_cV, capped_cV, self.settings.cap)

    def _labels(self, target_c1: jax.Array, mask_c1: jax.Array) -> jax.Array:
        """Return the probabilities (c, V) that the targets ask for, times the mask."""
        smoothing = self.settings.terms.label_smoothing
        hit_cV = jnp.where(target_c1 == self.ids_V, (1 - smoothing) * mask_c1, 0)
        if not smoothing:
            return hit_cV
        share_c1 = smoothing / self.settings.vocab_size * mask_c1
        return hit_cV + jnp.where(self.is_token_V(), share_c1, 0)


def loss_and_gradients(
    x: jax.Array,
    kernel_DV: jax.Array,
    targets_C: jax.Array,
    settings: ChunkSettings,
) -> tuple[tuple[jax.Array, ...], Callable[[jax.Array], tuple[jax.Array, jax.Array]]]:
    """Return the losses C of a chunk, and a function that computes gradients (dx, dkernel).

    The losses are (objective, cross-entropy), or (cross-entropy,) without further terms. The
    function takes a weight for every token, such as the mask. The gradient with respect to the
    logits is softmax(logits) - labels, times the weight, and times the derivative of the cap. A
    z-loss z adds 2 * z * logsumexp(logits) * softmax(logits). Lists hold blocks of rows, c of them
    each.
    """
    terms, size = settings.terms, settings.vocab_size
    axis_name, width = settings.axis_name, kernel_DV.shape[1]
    ids_V = lax.axis_index(axis_name) * width + jnp.arange(width)
    columns = _Columns(ids_V, settings, width * lax.axis_size(axis_name) > size)

    def cap_and_max(logits_cV: jax.Array) -> tuple[jax.Array, jax.Array]:
        logits_cV = columns.capped(logits_cV)
        return logits_cV, logits_cV.max(axis=1, keepdims=True)

    product = gather_matmul_blocks(
        x, kernel_DV, cap_and_max, axis_name=axis_name, dim=settings.dim, overlap=settings.overlap
    )
    logits, maxima = zip(*product.results, strict=True)
    max_C1 = lax.pmax(product.unshard(list(maxima)), axis_name)
    targets = product.shard(targets_C[:, None])

    def total(blocks: Iterable[jax.Array]) -> jax.Array:
        sums = [jnp.sum(block, axis=1, keepdims=True) for block in blocks]
        return lax.psum(product.unshard(sums), axis_name)

    shifts = zip(logits, product.shard(max_C1), strict=True)
    norm_C1 = total(jnp.exp(block - shift) for block, shift in shifts)
    hits = zip(logits, targets, strict=True)
    target_C1 = total(jnp.where(target == ids_V, block, 0) for block, target in hits)
    log_sum_C1 = jnp.log(norm_C1) + max_C1
    losses: tuple[jax.Array, ...] = (log_sum_C1 - target_C1,)
    if terms:
        objective_C1 = losses[0] + terms.z_loss * jnp.square(log_sum_C1)
        if terms.label_smoothing:
            all_C1 = total(jnp.where(columns.is_token_V(), block, 0) for block in logits)
            objective_C1 += terms.label_smoothing * (target_C1 - all_C1 / size)
        losses = (objective_C1, *losses)

    def gradients(mask_C: jax.Array) -> tuple[jax.Array, jax.Array]:
        mask_C1 = mask_C[:, None]
        scale_C1 = mask_C1 * (1 + 2 * terms.z_loss * log_sum_C1) if terms.z_loss else mask_C1
        rows = (max_C1, scale_C1 / norm_C1, mask_C1)
        blocks = zip(logits, targets, *map(product.shard, rows), strict=True)
        return product.pullback([columns.gradient(*block) for block in blocks])

    return tuple(losses_C1[:, 0] for losses_C1 in losses), gradients
