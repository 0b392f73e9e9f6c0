"""Groups of operations that XLA schedules together, so that a transfer runs under computation.

XLA's scheduler for TPUs starts a permute as late as its own estimate of the transfer time allows,
and that estimate is about a third of what one link needs. In a group it first starts the transfers,
then computes, and then waits.
"""

import itertools
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar

from jax.experimental.xla_metadata import set_xla_metadata

_numbers: ContextVar[Iterator[int] | None] = ContextVar("scheduling_groups", default=None)


@contextmanager
def scheduling_groups(enabled: bool = True) -> Iterator[None]:
    """Give XLA the groups of all rings that are traced in this context, numbered from 1.

    Trace the whole program in one context: a number may name only one group. For the same reason
    the program must not call a jitted function that contains rings twice: both calls share one
    trace, and so their numbers. libtpu refuses to compile such a program.
    """
    token = _numbers.set(itertools.count(1) if enabled else None)
    try:
        yield
    finally:
        _numbers.reset(token)


def scheduled_together() -> AbstractContextManager[None]:
    """Return a context whose operations are one group; outside of `scheduling_groups` it is empty.

    The computation of a group must not use the results of its transfers.
    """
    numbers = _numbers.get()
    return (
        nullcontext() if numbers is None else set_xla_metadata(_scheduling_group_id=next(numbers))
    )
