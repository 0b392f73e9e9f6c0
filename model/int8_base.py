"""Trees of parameters whose frozen kernels are stored as int8: `lora.base_dtype: int8`.

Every such kernel has its scales beside it, under the name `kernel_scale`.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from model.lora import sibling_path
from parallel.linear.int8_kernel import SCALE, Int8Kernel, quantize


def is_scale(name: str) -> bool:
    """Return whether a dotted path is that of the scales of a kernel."""
    return SCALE in name.split(".")


def scale_path(kernel: str) -> str:
    """Return the dotted path of the scales of the kernel with a dotted path."""
    return sibling_path(kernel, SCALE)


def without_scales(params: Mapping[str, Any]) -> dict[str, Any]:
    """Return the tree of parameters without scales."""
    return {
        name: without_scales(value) if isinstance(value, Mapping) else value
        for name, value in params.items()
        if name != SCALE
    }


def quantized_as(params: Mapping[str, Any], wanted: Mapping[str, Any]) -> dict[str, Any]:
    """Return parameters with the kernels as int8 that have scales in the tree `wanted`.

    The kernels are deleted. Kernels that have scales already stay as they are.
    """
    found: dict[str, Any] = {}
    for name, value in params.items():
        if name == "kernel" and SCALE in wanted and SCALE not in params:
            if isinstance(value, Mapping):
                found[name], found[SCALE] = {}, {}
                for output, kernel in value.items():
                    found[name][output], found[SCALE][output] = quantize_array(kernel)
            else:
                found[name], found[SCALE] = quantize_array(value)
        elif isinstance(value, Mapping):
            found[name] = quantized_as(value, wanted.get(name, {}))
        else:
            found[name] = value
    return found


def quantize_array(kernel: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return (int8 values, scales) of a kernel with the layout that it has; it is deleted."""
    sharding: Any = kernel.sharding
    with jax.set_mesh(sharding.mesh):
        found = _quantize(kernel)
    kernel.delete()  # donation keeps it: no result has its size
    return found.values, found.scale


_quantize: Callable[[jax.Array], Int8Kernel] = jax.jit(quantize)


def block_floats(block: np.ndarray, start: Sequence[int], scales: np.ndarray) -> np.ndarray:
    """Return a block of an int8 kernel `... D F` in float32.

    start: index of the first element of the block in the kernel. scales: of the whole kernel.
    """
    *lead, _, columns = map(slice, start, np.add(start, block.shape))
    return block.astype(np.float32) * scales[(*lead, slice(None), columns)]
