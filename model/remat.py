"""Rematerialisation policies by name: what a layer keeps for its backward pass.

Add a policy with `register_remat_policy`, from this package or from a plugin module.
"""

from collections.abc import Callable
from typing import Any

import jax

from model.attention.registry import RESULT_NAME
from parallel.experts.expert import SAVED_NAMES

RematPolicy = Callable[..., Any]
"""A policy of `jax.checkpoint`."""

_POLICIES: dict[str, RematPolicy | None] = {}


def register_remat_policy(name: str, policy: RematPolicy | None) -> None:
    """Add a policy under a name for `model.remat`; None stores everything.

    Raises:
        ValueError: The name is taken.
    """
    if name in _POLICIES:
        raise ValueError(f"remat policy {name!r} is registered twice")
    _POLICIES[name] = policy


def remat_policy(name: str) -> RematPolicy | None:
    """Return the policy of this name.

    Raises:
        ValueError: The name is unknown.
    """
    if name not in _POLICIES:
        raise ValueError(f"unknown remat policy {name!r}; use one of {', '.join(_POLICIES)}")
    return _POLICIES[name]


def remat_policies() -> list[str]:
    """Return the names of all policies."""
    return list(_POLICIES)


register_remat_policy("none", None)
register_remat_policy(
    "dots",
    # The products of experts have a batch dimension and blockwise attention is a loop, so both
    # are saved by name.
    jax.checkpoint_policies.save_from_both_policies(
        jax.checkpoint_policies.dots_with_no_batch_dims_saveable,
        jax.checkpoint_policies.save_only_these_names(*SAVED_NAMES, RESULT_NAME),
    ),
)
register_remat_policy("full", jax.checkpoint_policies.nothing_saveable)
