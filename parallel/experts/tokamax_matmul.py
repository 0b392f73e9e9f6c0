"""Grouped matmul by tokamax's kernels for NVIDIA GPUs; the package is optional.

Source: https://github.com/openxla/tokamax, version 0.0.17.
"""

import importlib
from typing import Any

import jax
from jax import Array, lax

from parallel.experts.grouped_matmul import RaggedDot, register_grouped_matmul
from parallel.linear.ring import pcast_varying


@register_grouped_matmul("tokamax")
class TokamaxRaggedDot(RaggedDot):
    """`tokamax.ragged_dot_general`: the first of its implementations that supports the call.

    On compute capability 9 that is a Mosaic kernel for y, dx and dw in bfloat16 and float16. On
    others the kernel for dw is missing, unless `jax-triton` is installed; XLA then computes it, in
    the time of one matmul of all rows per expert. On a CPU all are XLA's.
    """

    platforms = ("gpu",)
    package = "tokamax"

    def _dot(
        self, x: Array, y: Array, spans_E: Array, numbers: lax.RaggedDotDimensionNumbers
    ) -> Array:
        tokamax: Any = importlib.import_module("tokamax")
        product = tokamax.ragged_dot_general(x, y, spans_E, numbers, preferred_element_type=x.dtype)
        # The kernel's result does not say over which mesh axes it varies.
        return pcast_varying(product, tuple(sorted(jax.typeof(x).manual_axis_type.varying)))
