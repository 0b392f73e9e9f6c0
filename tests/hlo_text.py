"""Small scheduled HLO programs written by hand, and questions that tests ask of a schedule."""

from collections.abc import Iterator
from dataclasses import dataclass

from parallel.planning.hlo import Computation, HloModule, Instruction

MB = "f32[250000]{0}"
UP = "source_target_pairs={{0,1},{1,2},{2,3},{3,0}}"
DOWN = "source_target_pairs={{0,3},{1,0},{2,1},{3,2}}"

INNER = f"""
%matmul (a: f32[250000]) -> f32[250000] {{
  %a = {MB} parameter(0)
  %m = f32[500,500]{{1,0}} bitcast(%a)
  %c = f32[500,500]{{1,0}} convolution(%m, %m), dim_labels=bf_io->bf
  ROOT %r = {MB} bitcast(%c)
}}
"""


def program(*lines: str, others: str = "") -> str:
    """Return a scheduled module of eight partitions; %x is a parameter of one megabyte."""
    body = "\n".join(f"  {line}" for line in (f"%x = {MB} parameter(0)", *lines))
    return (
        "HloModule step, is_scheduled=true, num_partitions=8\n"
        f"{INNER}{others}\nENTRY %main (x: f32[250000]) -> f32[250000] {{\n{body}\n}}\n"
    )


def computation(name: str, *lines: str) -> str:
    """Return a computation for `others`; its parameter is %x, of one megabyte."""
    body = "\n  ".join((f"%x = {MB} parameter(0)", *lines))
    return f"\n%{name} (x: f32[250000]) -> f32[250000] {{\n  {body}\n}}\n"


FIVE_TIMES = (
    f"%loop = {MB} while(%x), condition=%condition, body=%body, "
    'backend_config={"known_trip_count":{"n":"5"}}'
)
"""A loop over the computations of `loop_body`."""


def loop_body(*lines: str) -> str:
    """Return the body and the condition of `FIVE_TIMES`."""
    return computation("body", *lines) + computation("condition", "ROOT %y = pred[] constant(true)")


def matmul(name: str, cycles: int) -> str:
    """Return a fusion around a matmul."""
    return (
        f"%{name} = {MB} fusion(%x), kind=kOutput, calls=%matmul, "
        f'metadata={{op_name="layer/{name}"}}, '
        f'backend_config={{"window_config":{{"estimated_cycles":"{cycles}"}}}}'
    )


def vector(name: str, cycles: int, calls: str = "none", operands: str = "%x") -> str:
    """Return a fusion without a matmul."""
    return (
        f"%{name} = {MB} fusion({operands}), kind=kLoop, calls=%{calls}, "
        f'backend_config={{"estimated_cycles":"{cycles}"}}'
    )


def permute_start(name: str, pairs: str = UP) -> str:
    """Return the start of a permute of %x to a neighbour."""
    return (
        f"%{name} = ({MB}, {MB}, u32[], u32[]) collective-permute-start(%x), channel_id=1, {pairs}"
    )


def permute_done(name: str, start: str) -> str:
    """Return the done of the permute `start`."""
    return f"%{name} = {MB} collective-permute-done(%{start})"


@dataclass(frozen=True)
class AsyncPair:
    """A transfer that runs beside the instructions scheduled between its two ends."""

    start: Instruction
    done: Instruction
    between: tuple[Instruction, ...]

    @property
    def matmul_cycles(self) -> int:
        """The compiler's estimate of the matmuls that hide it, without those in loops."""
        return sum(x.cycles or 0 for x in self.between if x.is_matmul)


def scheduled(module: HloModule) -> Iterator[Computation]:
    """Yield the entry and every loop body, call and branch under it: what runs line by line."""
    seen: set[str] = set()
    pending = [module.entry.name]
    while pending:
        name = pending.pop(0)
        if name in seen:
            continue
        seen.add(name)
        yield module.computations[name]
        called = [
            name
            for x in module.computations[name].instructions
            if x.opcode in ("while", "call", "conditional")
            for name in (x.calls("body"), x.calls("to_apply"), *x.branches)
            if name is not None
        ]
        pending = [*called, *pending]


def async_pairs(module: HloModule, kind: str = "collective-permute") -> list[AsyncPair]:
    """Return all transfers of this kind that have a start and a done, in schedule order.

    Those that libtpu hides in asynchronous collective fusions are not among them.
    """
    found = []
    for computation in scheduled(module):
        for index, x in enumerate(computation.instructions):
            collective = module.collective_of(x, computation)
            if x.opcode.endswith("-start") and collective is not None and collective.kind == kind:
                found.append(_pair(computation.instructions, index))
    return found


def _pair(instructions: tuple[Instruction, ...], index: int) -> AsyncPair:
    start = instructions[index]
    name = start.name
    for end in range(index + 1, len(instructions)):
        x = instructions[end]
        if name in x.operands and x.opcode.endswith("-done"):
            return AsyncPair(start, x, instructions[index + 1 : end])
        if name in x.operands and x.opcode == "async-update":
            name = x.name
    raise ValueError(f"{start.name} has no done after it in its computation")


def unfused_adds(module: HloModule, min_bytes: float) -> list[Instruction]:
    """Return sums and differences of two arrays outside of any matmul, of at least this size.

    Adding a constant or a broadcast scalar does not count; a fusion counts if there is such a sum
    anywhere in it.
    """
    found = []
    for computation in scheduled(module):
        for x in computation.instructions:
            if not x.is_matmul and x.bytes >= min_bytes:
                nested = module.nested(x.calls()) if x.opcode == "fusion" else ()
                if any(
                    _adds_arrays(part, owner) and part.bytes >= min_bytes
                    for owner, part in ((computation, x), *nested)
                ):
                    found.append(x)
    return found


def _adds_arrays(x: Instruction, computation: Computation) -> bool:
    """Whether this is a sum or difference of two arrays, neither of them one repeated value."""
    return x.opcode in ("add", "subtract") and not any(
        computation.source(operand).opcode in ("constant", "broadcast")
        for operand in computation.operands(x)
    )
