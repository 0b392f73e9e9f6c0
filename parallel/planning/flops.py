"""FLOPs of instructions: matmuls by their dimensions, kernels by what they state or compute."""

import math
import re

import numpy as np

from parallel.planning.hlo import Computation, HloModule, Instruction


def matmul_flops(x: Instruction, computation: Computation, module: HloModule) -> float:
    """Return the FLOPs of the matmuls that an instruction is or contains, two per product."""
    inside = [(computation, x), *module.nested(x.calls())]
    return sum(_own_flops(y, owner) for owner, y in inside)


def _own_flops(x: Instruction, computation: Computation) -> float:
    if x.opcode == "dot":
        return _dot_flops(x, computation)
    return _convolution_flops(x, computation) if x.opcode == "convolution" else 0.0


def _dot_flops(x: Instruction, computation: Computation) -> float:
    lhs = computation.operands(x)[0].arrays[0].dims
    contracted = (x.find(r"lhs_contracting_dims=\{([\d,]*)\}") or "").split(",")
    return 2.0 * math.prod(x.arrays[0].dims) * math.prod(lhs[int(i)] for i in contracted if i)


def _convolution_flops(x: Instruction, computation: Computation) -> float:
    """Return the FLOPs of a convolution, without the products with padding and between dilations.

    libtpu writes matmuls as convolutions: a batch dimension becomes a spatial one whose window
    meets one input position per output position.
    """
    labels = x.find(r"dim_labels=([\w?]+_[\w?]+->[\w?]+)")
    assert labels is not None, x
    inputs, kernel, output = re.split(r"_|->", labels)
    lhs, rhs = (operand.arrays[0].dims for operand in computation.operands(x)[:2])
    out = x.arrays[0].dims
    batch = lhs[inputs.index("b")] / int(x.find(r"batch_group_count=(\d+)") or 1)
    features = rhs[kernel.index("i")] * out[output.index("f")]
    positions = math.prod(
        _window_positions(x, number, lhs[inputs.index(label)], out[output.index(label)])
        for number, label in enumerate(sorted(label for label in output if label.isdigit()))
    )
    return 2.0 * batch * features * positions


def _window_positions(x: Instruction, dim: int, size: int, outputs: int) -> int:
    """Return how many pairs of output and window positions meet an input along one spatial dim.

    dim: number of the dimension. size, outputs: length of input and output along it.
    """

    def listed(name: str, default: str) -> list[str]:
        found = x.find(rf"window=\{{[^}}]*\b{name}=([\dx_-]+)")
        return (found or default).split("x")

    def number(name: str) -> int:
        values = listed(name, "")
        return int(values[dim]) if values != [""] else 1

    low = int(listed("pad", "")[dim].split("_")[0]) if listed("pad", "") != [""] else 0
    window = np.arange(number("size")) * number("rhs_dilate")
    at = np.arange(outputs)[:, None] * number("stride") + window - low
    spread = number("lhs_dilate")
    return int(np.sum((at >= 0) & (at <= (size - 1) * spread) & (at % spread == 0)))


def kernel_flops(x: Instruction, computation: Computation) -> float:
    """Return the FLOPs of a custom call: as stated, or of an attention or grouped matmul.

    Splash attention does not state its FLOPs: they are 4 per query, key and feature forward, 8 for
    dk and dv, 6 for dq, and the causal half of that. A grouped matmul T D, E D F -> T F has
    2 T D F.
    """
    if x.opcode != "custom-call":
        return 0.0
    if x.ragged_tiling is not None:
        rows, weights = (operand.arrays[0].dims for operand in computation.operands(x)[-2:])
        return 2.0 * math.prod(rows) * weights[-1]
    flops = float(x.find(r'"flops":"?(\d+)') or 0)
    if "splash_m" in x.name or ("flash_" in x.name and not flops):
        # The first float operand is the query; the mask tables before it hold integers.
        floats = [
            array.dims
            for operand in computation.operands(x)
            for array in operand.arrays
            if array.dtype.startswith(("bf", "f")) and len(array.dims) > 2
        ]
        if floats:
            query = max(floats, key=len)
            each = 8 if "dkv" in x.name else 6 if "dq" in x.name else 4
            flops = each * math.prod(query) * query[-2] / 2
    return flops


def is_attention(x: Instruction) -> bool:
    """Whether a custom call is one of the attention kernels."""
    return "splash_m" in x.name or "flash_" in x.name
