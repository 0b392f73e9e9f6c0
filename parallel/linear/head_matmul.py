"""Matmuls whose product, or input, lies head by head in memory, as attention reads and writes it.

XLA writes a product `B L F` as one matrix. Where attention reads heads `B H L h`, it copies the
product, and the gradients on their way back. These matmuls name the heads, so that XLA writes them
in place. `scripts/bench.py model mesh.tp=1 mesh.fsdp=8 model.remat=attention` predicted 1760
instead of 1795 ms for a step of Llama-3-8B's shape (libtpu 0.0.42, 23 November 2026).

Letters: B batch, L length, D embed, H heads, h head dim, F = H h.
"""

from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from parallel.linear.local_matmul import kernel_gradient, matmul, matmul_transposed


class HeadMatmul(NamedTuple):
    """A matmul `B L D`, `D F` -> `B L F` to heads, or `B L F`, `F D` -> `B L D` from heads.

    width: h. side: whether the output (out) or the input (in) has heads; None: neither, and all
    matmuls are those of `local_matmul`.
    """

    width: int = 0
    side: Literal["out", "in"] | None = None

    def forward(self, x: jax.Array, w: jax.Array, precision: Any = None) -> jax.Array:
        """Return x @ w."""
        if self.side == "out":
            return self._to_heads(x, w, "BLD,DHh->BHLh", precision)
        if self.side == "in":
            return self._from_heads(x, w, "BHLh,HhD->BLD", precision)
        return matmul(x, w, precision)

    def dgrad(self, dy: jax.Array, w: jax.Array, precision: Any = None) -> jax.Array:
        """Return dy @ w^T."""
        if self.side == "out":
            return self._from_heads(dy, w, "BHLh,DHh->BLD", precision)
        if self.side == "in":
            return self._to_heads(dy, w, "BLD,HhD->BHLh", precision)
        return matmul_transposed(dy, w, precision)

    def wgrad(self, x: jax.Array, dy: jax.Array, precision: Any = None) -> jax.Array:
        """Return x^T @ dy over all rows; D may be a part of the features of x, or of dy."""
        if self.side == "out":
            dw = jnp.einsum("BLD,BHLh->DHh", x, self._heads(dy), precision=precision)
            return dw.reshape(x.shape[-1], -1)
        if self.side == "in":
            dw = jnp.einsum("BHLh,BLD->HhD", self._heads(x), dy, precision=precision)
            return dw.reshape(-1, dy.shape[-1])
        return kernel_gradient(x, dy, precision)

    def _to_heads(self, x: jax.Array, w: jax.Array, equation: str, precision: Any) -> jax.Array:
        y_BHLh = jnp.einsum(equation, x, self._kernel(w), precision=precision)
        # Otherwise XLA merges H and h into the columns of one matrix again.
        y_BHLh = lax.optimization_barrier(y_BHLh)
        return y_BHLh.transpose(0, 2, 1, 3).reshape(*x.shape[:2], -1)

    def _from_heads(self, y: jax.Array, w: jax.Array, equation: str, precision: Any) -> jax.Array:
        return jnp.einsum(equation, self._heads(y), self._kernel(w), precision=precision)

    def _heads(self, y_BLF: jax.Array) -> jax.Array:
        return y_BLF.reshape(*y_BLF.shape[:2], -1, self.width).transpose(0, 2, 1, 3)

    def _kernel(self, w: jax.Array) -> jax.Array:
        if self.side == "out":
            return w.reshape(w.shape[0], -1, self.width)
        return w.reshape(-1, self.width, w.shape[1])


PLAIN = HeadMatmul()
"""Matmuls without heads."""
