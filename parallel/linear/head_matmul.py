"""Matmuls whose product, or input, lies head by head in memory, as attention reads and writes it.

XLA writes a product `B L F` as one matrix. Where attention reads heads `B H L h`, it copies the
product, and the gradients on their way back. These matmuls name the heads, so that XLA writes them
in place. `scripts/bench.py model mesh.tp=1 mesh.fsdp=8 model.remat=attention` predicted 1760
instead of 1795 ms for a step of Llama-3-8B's shape (libtpu 0.0.42, 23 November 2026).

Letters: B batch, L length, D embed, H heads, h head dim, F = H h.
"""

from typing import Literal, NamedTuple

import jax
from jax import lax

from parallel.linear.local_matmul import dot, kernel_gradient, matmul, matmul_transposed
from parallel.linear.quantized import Operand, Precision, Product


class HeadMatmul(NamedTuple):
    """A matmul `B L D`, `D F` -> `B L F` to heads, or `B L F`, `F D` -> `B L D` from heads.

    width: h. side: whether the output (out) or the input (in) has heads; None: neither, and all
    matmuls are those of `local_matmul`.
    """

    width: int = 0
    side: Literal["out", "in"] | None = None

    def forward(self, x: jax.Array, w: Operand, precision: Precision = None) -> jax.Array:
        """Return x @ w."""
        if self.side == "out":
            return self._to_heads(x, w, 0, precision, "forward")
        if self.side == "in":
            return self._from_heads(x, w, (0, 1), precision, "forward")
        return matmul(x, w, precision)

    def dgrad(self, dy: jax.Array, w: Operand, precision: Precision = None) -> jax.Array:
        """Return dy @ w^T."""
        if self.side == "out":
            return self._from_heads(dy, w, (1, 2), precision, "dgrad")
        if self.side == "in":
            return self._to_heads(dy, w, 2, precision, "dgrad")
        return matmul_transposed(dy, w, precision)

    def wgrad(self, x: jax.Array, dy: jax.Array, precision: Precision = None) -> jax.Array:
        """Return x^T @ dy over all rows; D may be a part of the features of x, or of dy."""
        if self.side == "out":
            dw_DHh = dot(x, self._heads(dy), ((0, 1), (0, 2)), precision, "wgrad")
            return dw_DHh.reshape(x.shape[-1], -1)
        if self.side == "in":
            dw_HhD = dot(self._heads(x), dy, ((0, 2), (0, 1)), precision, "wgrad")
            return dw_HhD.reshape(-1, dy.shape[-1])
        return kernel_gradient(x, dy, precision)

    def _to_heads(
        self, x: jax.Array, w: Operand, axis: int, precision: Precision, product: Product
    ) -> jax.Array:
        y_BLHh = dot(x, self._kernel(w), ((2,), (axis,)), precision, product)
        # Otherwise XLA merges H and h into the columns of one matrix again.
        y_BHLh = lax.optimization_barrier(y_BLHh.transpose(0, 2, 1, 3))
        return y_BHLh.transpose(0, 2, 1, 3).reshape(*x.shape[:2], -1)

    def _from_heads(
        self,
        y: jax.Array,
        w: Operand,
        axes: tuple[int, int],
        precision: Precision,
        product: Product,
    ) -> jax.Array:
        return dot(self._heads(y), self._kernel(w), ((1, 3), axes), precision, product)

    def _heads(self, y_BLF: jax.Array) -> jax.Array:
        return y_BLF.reshape(*y_BLF.shape[:2], -1, self.width).transpose(0, 2, 1, 3)

    def _kernel(self, w: Operand) -> Operand:
        """Return a kernel, or its values and scales, as `D H h` or `H h D`."""
        return jax.tree.map(self._by_head, w)

    def _by_head(self, w: jax.Array) -> jax.Array:
        if self.side == "out":
            width = min(self.width, w.shape[1])  # 1: one scale for all columns
            return w.reshape(w.shape[0], -1, width)
        if w.shape[0] == 1:  # one scale for all rows
            return w.reshape(1, 1, w.shape[1])
        return w.reshape(-1, self.width, w.shape[1])


PLAIN = HeadMatmul()
"""Matmuls without heads."""
