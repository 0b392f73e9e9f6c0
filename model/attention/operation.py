"""Attention by name: what an operation can do, and the registry that holds them.

An operation is a pure function on local blocks plus a record of what it can do. Naming one that
cannot do what is asked is an error, never a silent loss of a feature.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import jax


class AttentionFunction(Protocol):
    """q `B L H h`, k and v `B T K h` (H a multiple of K), row indices and segment ids -> `B L H h`.

    A query sees the keys of its own segment whose row index is not greater than its own.
    """

    def __call__(
        self,
        q_BLHh: jax.Array,
        k_BTKh: jax.Array,
        v_BTKh: jax.Array,
        *,
        q_index_L: jax.Array,
        kv_index_T: jax.Array,
        q_segment_ids_BL: jax.Array,
        kv_segment_ids_BT: jax.Array,
        softmax_scale: float,
    ) -> jax.Array: ...


@dataclass(frozen=True, kw_only=True)
class Capabilities:
    """What the attention layer must know of an operation."""

    needs_all_keys: bool
    """Over sp it is given all keys and values (an all-gather of both), not its own block."""
    splits_length: bool = True
    """It can work on a block of the queries of a row: sp may be larger than one."""
    length_multiple: int = 1
    """Rows have a multiple of this many tokens."""
    platforms: tuple[str, ...] = ("cpu", "gpu", "tpu")
    """Where it runs."""
    types_varying: bool = True
    """Its results are typed as varying over mesh axes; kernels in Pallas do not say (jax 0.12)."""


@dataclass(frozen=True)
class Operation:
    """A registered attention operation."""

    name: str
    function: AttentionFunction
    capabilities: Capabilities


_OPERATIONS: dict[str, Operation] = {}


class OperationRegistry:
    """Names to operations; filled when `model.attention` is imported. The first is the oracle."""

    @staticmethod
    def register(
        *names: str, capabilities: Capabilities
    ) -> Callable[[AttentionFunction], AttentionFunction]:
        """Decorator: registers a function under one or several names."""

        def decorate(function: AttentionFunction) -> AttentionFunction:
            for name in names:
                if name in _OPERATIONS:
                    raise ValueError(f"attention operation {name!r} is registered twice")
                _OPERATIONS[name] = Operation(name, function, capabilities)
            return function

        return decorate

    @staticmethod
    def get(name: str) -> Operation:
        """The operation of this name. Raises: ValueError listing the names."""
        if name not in _OPERATIONS:
            known = ", ".join(_OPERATIONS)
            raise ValueError(f"unknown attention operation {name!r}; registered: {known}")
        return _OPERATIONS[name]

    @staticmethod
    def list_implementations() -> list[str]:
        """All registered names, the oracle first."""
        return list(_OPERATIONS)
