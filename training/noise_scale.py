"""Gradient noise scale: the batch size, in tokens, at which noise and gradient are equally large.

Batches far below it waste little of their tokens; batches far above it need more tokens for the
same progress. It is estimated from gradients of two sizes of batch, microbatches and their sum.
Source: arXiv 1812.06162, appendix A.1, here for microbatches with different numbers of tokens.
"""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp


def part_terms(grads: Any, tokens: jax.Array, count: jax.Array) -> dict[str, jax.Array]:
    """Return what `noise_terms` needs of a microbatch; to be summed over microbatches.

    A microbatch without tokens in the loss counts for nothing. Communication: an all-reduce of a
    number.

    Args:
        grads: Gradients of the microbatch's part of the loss, a mean over all tokens of the batch.
        tokens: Tokens in the loss of the microbatch.
        count: Those of the batch.
    """
    is_used = tokens > 0
    safe = jnp.maximum(tokens, 1.0)
    return {
        "square": jnp.where(is_used, _square(grads) * (count / safe) ** 2, 0.0),
        "inverse_tokens": jnp.where(is_used, 1.0 / safe, 0.0),
        "parts": is_used.astype(jnp.float32),
    }


def noise_terms(
    parts: Mapping[str, jax.Array], grads: Any, count: jax.Array
) -> dict[str, jax.Array]:
    """Return unbiased estimates of one step: noisy by themselves, to be averaged over steps.

    They are `noise_trace`, the trace of the covariance of the gradient of a token, and
    `noise_signal`, the squared norm of the gradient without noise. Both are 0 with fewer than two
    microbatches that have tokens.
    """
    # A mean over t tokens has the expected squared norm signal + trace / t.
    number = jnp.maximum(parts["parts"], 1.0)
    small, large = parts["square"] / number, _square(grads)
    difference = parts["inverse_tokens"] / number - 1.0 / count
    is_known = (parts["parts"] > 1) & (difference > 0)
    trace = (small - large) / jnp.where(is_known, difference, 1.0)
    trace = jnp.where(is_known, trace, 0.0)
    return {
        "noise_trace": trace,
        "noise_signal": jnp.where(is_known, large - trace / count, 0.0),
    }


def _square(tree: Any) -> jax.Array:
    squares = (jnp.sum(jnp.square(x.astype(jnp.float32))) for x in jax.tree.leaves(tree))
    return sum(squares, start=jnp.float32(0))


class NoiseScale:
    """The noise scale over the steps since the last line of the console; of finite steps."""

    def __init__(self) -> None:
        self._trace = self._signal = 0.0

    def add(self, metrics: Mapping[str, float]) -> None:
        """Add a step, if it has both estimates and they are finite."""
        trace, signal = (metrics.get(name, 0.0) for name in ("noise_trace", "noise_signal"))
        if abs(trace) < float("inf") and abs(signal) < float("inf"):  # False for NaN
            self._trace, self._signal = self._trace + trace, self._signal + signal

    def take(self) -> dict[str, float]:
        """Return the metric `noise_scale`, and begin anew; nothing if noise hides the gradient."""
        trace, signal = self._trace, self._signal
        self._trace = self._signal = 0.0
        return {"noise_scale": trace / signal} if trace > 0 and signal > 0 else {}
