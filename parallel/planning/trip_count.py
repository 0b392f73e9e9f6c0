"""Trip counts of the `while` loops of a compiled program."""

from parallel.planning.hlo import Computation, HloModule, Instruction


def trip_count(module: HloModule, loop: Instruction, computation: Computation) -> int | None:
    """Return how often a `while` of this computation runs; None if the text does not say.

    XLA may annotate the count; libtpu does not. Otherwise it is (bound - start) / step: the bound
    is the largest constant in the condition, the counter is the tuple element that the condition
    reads.
    """
    annotated = loop.find(r'known_trip_count[":{\s]+n"?:"?(\d+)')
    if annotated:
        return int(annotated)
    condition = module.computations[loop.calls("condition") or ""]
    constants = [x.constant for _, x in module.nested(condition.name)]
    bound = max((value for value in constants if value is not None), default=0)
    reads = [x.find(r"index=(\d+)") for x in condition.instructions]
    counters = [int(index) for index in reads if index is not None]
    if bound <= 0 or not counters:
        return None
    body = module.computations[loop.calls("body") or ""]
    initial = _tuple_element(computation, computation.operands(loop)[0], counters[-1])
    start = (computation.source(initial).constant if initial else None) or 0
    step = _step(module, body, _tuple_element(body, body.root, counters[-1]))
    return max(0, -(-(bound - start) // step))


def _step(module: HloModule, body: Computation, update: Instruction | None) -> int:
    """Return what one iteration adds to the counter; 1 if the text does not say."""
    if update is not None and update.opcode == "fusion":
        body = module.computations[update.calls() or ""]
        update = body.root
    if update is None or update.opcode != "add":
        return 1
    return next((x.constant for x in body.operands(update) if x.constant), 1)


def _tuple_element(computation: Computation, x: Instruction, index: int) -> Instruction | None:
    """Return the instruction that produces one element of a tuple."""
    if x.opcode != "tuple" or index >= len(x.operands):
        return None
    return computation.by_name.get(x.operands[index])
