"""Part of the model that each instruction of a compiled program belongs to.

The parts follow from the scopes of `jax.named_scope` in the `op_name` of instructions. Which scope
is which part is for the caller to say: see `training.parts.STEP_PARTS`.
"""

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

from parallel.planning.hlo import Computation, HloModule, Instruction

UNATTRIBUTED = "unattributed"
_FARTHEST = 6  # instructions between one without a scope and the one whose part it takes
_SUMS = ("all-reduce", "reduce-scatter")


class PartPattern(NamedTuple):
    """The part of the instructions whose scope path matches a regular expression."""

    path: str
    part: str
    is_fallback: bool = False
    """Whether it counts only if neither the instruction nor one near it matches another pattern."""


PartTable = Sequence[PartPattern]
"""The first pattern that matches a path counts."""


@dataclass(frozen=True)
class Scope:
    """The part of the model that an instruction belongs to."""

    part: str
    is_recomputed: bool
    """Whether it repeats forward work during the backward pass, as `jax.checkpoint` asks."""

    @property
    def is_known(self) -> bool:
        """Whether the instruction belongs to a part."""
        return self.part != UNATTRIBUTED


_NONE = Scope(UNATTRIBUTED, False)


class PartFinder:
    """Finds the part of instructions.

    An instruction takes the first part that matches: of the matmul in it, of its own path, of the
    instructions in it from the largest on, of those that use its result, and of those whose results
    it uses. Copies, slices and prefetches have no scope of their own; they belong to the
    instruction that they serve. Sums over devices belong to the instruction that made the terms.
    """

    def __init__(self, module: HloModule, table: PartTable):
        self._module = module
        self._patterns = [
            (re.compile(pattern.path), pattern.part, pattern.is_fallback) for pattern in table
        ]
        self._match = lru_cache(maxsize=None)(self._match_uncached)
        self._known: dict[tuple[str, str], Scope] = {}

    def scope(self, x: Instruction, computation: Computation) -> Scope:
        """Return the scope of an instruction of this computation."""
        key = computation.name, x.name
        if key not in self._known and self._patterns:
            around = [computation.users, computation.operands]
            if x.opcode.startswith(_SUMS):
                around.reverse()
            self._known[key] = (
                self._own(x)
                or self._nearest(x, around[0])
                or self._nearest(x, around[1])
                or self._own(x, with_fallback=True)
                or _NONE
            )
        return self._known.get(key, _NONE)

    def _own(self, x: Instruction, *, with_fallback: bool = False) -> Scope | None:
        found = (self._match(path, with_fallback) for path in self._paths(x) if path)
        return next((scope for scope in found if scope is not None), None)

    def _paths(self, x: Instruction) -> Iterator[str | None]:
        """Yield the scope paths in and of an instruction, the most telling first."""
        inside = [part for _, part in self._module.nested(x.calls())]
        yield from (part.scope_path for part in inside if part.opcode in ("convolution", "dot"))
        yield x.scope_path
        yield from (part.scope_path for part in sorted(inside, key=lambda part: -part.bytes))

    def _nearest(
        self, x: Instruction, step: Callable[[Instruction], Sequence[Instruction]]
    ) -> Scope | None:
        """Return the scope of the nearest instruction in one direction that has one."""
        near, seen = {x.name: x}, {x.name}
        for _ in range(_FARTHEST):
            near = {y.name: y for x in near.values() for y in step(x) if y.name not in seen}
            seen.update(near)
            for y in near.values():
                if (scope := self._own(y)) is not None:
                    return scope
        return None

    def _match_uncached(self, path: str, with_fallback: bool) -> Scope | None:
        for pattern, part, is_fallback in self._patterns:
            if is_fallback <= with_fallback and pattern.search(path):
                return Scope(part, "rematted_computation" in path)
        return None
