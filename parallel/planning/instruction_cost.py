"""Time for which one instruction of a TPU program keeps its device busy, without transfers."""

import math

from parallel.planning.flops import is_attention, kernel_flops
from parallel.planning.hlo import Computation, HloModule, Instruction
from parallel.sharding.devices import Chip

_MATMUL_EFFICIENCY = 0.88  # of peak: the compiler's own estimate of a bfloat16 matmul of side 8192
_ATTENTION_EFFICIENCY = 0.5  # of peak; Pallas attention has no estimate of its own

# Views, constants and bookkeeping take no time.
_FREE_OPCODES = frozenset(
    "parameter constant get-tuple-element tuple bitcast after-all partition-id replica-id iota "
    "opt-barrier add-dependency".split()
)
# Custom calls that only name memory: `lax.empty`, and XLA's view of slices fetched side by side
# (memory_space_assignment: CreateBitcastConcat).
_FREE_TARGETS = frozenset({"AllocateBuffer", "ConcatBitcast"})


class InstructionCost:
    """Prices instructions: the compiler's cycles, else HBM traffic and FLOPs over the chip's rates.

    The compiler gives no cycles for custom calls and some copies. These prices are assumptions.
    """

    def __init__(self, module: HloModule, chip: Chip):
        self._module, self._chip = module, chip

    def is_assumed(self, x: Instruction) -> bool:
        """Whether the price of this instruction is not the compiler's."""
        return (
            x.cycles is None
            and x.opcode not in _FREE_OPCODES
            and x.custom_call_target not in _FREE_TARGETS
            # The links write the result of these in place; they only begin or wait.
            and self._module.fusion_role(x) not in ("start", "done")
        )

    def seconds(self, x: Instruction, computation: Computation) -> float:
        """Return how long an instruction of this computation runs."""
        if x.cycles is not None:
            seconds = x.cycles / self._chip.clock_hz
            if x.opcode == "broadcast":
                # libtpu's estimate of a plain fill is far above the time of writing it.
                seconds = min(seconds, x.bytes / self._chip.hbm_bandwidth)
            return seconds
        if not self.is_assumed(x):
            return 0.0
        if x.ragged_tiling is not None and x.opcode == "custom-call":
            return self._ragged_dot_seconds(x, x.ragged_tiling, computation)
        if x.opcode == "custom-call":
            return self._kernel_seconds(x, computation)
        traffic = _hbm_traffic(x, computation) - self._unread_bytes(x, computation)
        return traffic / self._chip.hbm_bandwidth

    def _unread_bytes(self, x: Instruction, computation: Computation) -> float:
        """Return the bytes of operands that gathers in this instruction do not read.

        A gather reads as many bytes as it returns, though its operand may be larger.
        """
        if x.is_in_vmem:
            return 0.0
        inner = self._module.computations.get(x.calls() or "")
        if x.opcode == "gather":
            operands, pairs = computation.operands(x), [(0, x)]
        elif x.opcode == "fusion" and inner is not None:
            operands, pairs = computation.operands(x), _gathered_parameters(inner)
        else:
            return 0.0
        sizes = ((operands[n].bytes, found.bytes) for n, found in pairs if n < len(operands))
        return sum(max(size - read, 0.0) for size, read in sizes)

    def _kernel_seconds(self, x: Instruction, computation: Computation) -> float:
        """Return the time of a custom call: its HBM traffic, or its FLOPs if they take longer.

        Attention kernels run at a fraction of peak.
        """
        traffic = x.bytes + computation.operand_bytes(x)
        rate = self._chip.peak_flops * (_ATTENTION_EFFICIENCY if is_attention(x) else 1.0)
        flops = kernel_flops(x, computation)
        return max(traffic / self._chip.hbm_bandwidth, flops / rate)

    def _ragged_dot_seconds(
        self, x: Instruction, tiling: tuple[int, int, int], computation: Computation
    ) -> float:
        """Return the time of libtpu's kernel for `lax.ragged_dot`, T D, E D F -> T F.

        The kernel computes whole tiles. For each tile of F it steps over tiles of rows, and for
        each of those over tiles of D; a group that ends within a tile of rows takes one more step.
        If D is one tile, rows are read once for each tile of F and weights once. Otherwise every
        step reads both again. The derivative for the rows is such a kernel too. The derivative for
        the weights is a masked matmul of all rows for each group, with cycles.
        """
        rows, weights = computation.operands(x)[-2:]
        T, D = rows.arrays[0].dims
        E, _, F = weights.arrays[0].dims
        per_t, per_d, per_f = tiling
        steps = math.ceil(T / per_t) + E - 1
        d_tiles, f_tiles = math.ceil(D / per_d), math.ceil(F / per_f)
        is_one_tile = d_tiles == 1
        reads_of_rows = f_tiles * (1 if is_one_tile else steps * per_t / T)
        reads_of_weights = 1 if is_one_tile else steps / E
        traffic = reads_of_rows * _hbm_bytes(rows) + reads_of_weights * _hbm_bytes(weights)
        flops = 2 * steps * per_t * d_tiles * per_d * f_tiles * per_f
        return max(
            (traffic + _hbm_bytes(x)) / self._chip.hbm_bandwidth,
            flops / (self._chip.peak_flops * _MATMUL_EFFICIENCY),
        )


def _gathered_parameters(computation: Computation) -> list[tuple[int, Instruction]]:
    """Return (number of a parameter, gather that reads it) of those that only one gather reads."""
    found = []
    for x in computation.instructions:
        operands = computation.operands(x) if x.opcode == "gather" else ()
        if (
            operands
            and operands[0].opcode == "parameter"
            and len(computation.users(operands[0])) == 1
        ):
            found.append((int(operands[0].arguments.strip("()")), x))
    return found


def _hbm_traffic(x: Instruction, computation: Computation) -> float:
    """Return the bytes that an instruction reads from and writes to HBM."""
    if x.is_in_vmem:
        return 0.0
    operands = computation.operands(x)
    if x.opcode == "dynamic-update-slice" and len(operands) > 1:
        return 2 * operands[1].bytes  # in place
    return x.bytes + computation.operand_bytes(x)


def _hbm_bytes(x: Instruction) -> float:
    return 0.0 if x.is_in_vmem else x.bytes
