"""Rematerialisation policies by name: what a layer keeps for its backward pass.

To add a policy, add one `REMAT_POLICIES[...] = ...` line, here or in a plugin module; `model.remat`
then accepts its name.
"""

from collections.abc import Callable
from typing import Any

import jax

from model.attention.registry import INPUTS_NAME, OUTPUT_NAME, RESULT_NAME
from parallel.experts.expert_mlp import SAVED_NAMES
from parallel.linear import low_rank, quantized
from registry import Registry

RematPolicy = Callable[..., Any]
"""A policy of `jax.checkpoint`."""

AUTO = "auto"
"""Not a policy: `configs/memory.py` chooses one that fits the device memory."""
REMAT_POLICIES: Registry[RematPolicy | None] = Registry("remat policy")
"""None stores everything."""
REMAT_POLICIES["none"] = None
_ATTENTION = (INPUTS_NAME, RESULT_NAME, OUTPUT_NAME)
# Without SAVED_NAMES of experts: these arrays are several times as large.
REMAT_POLICIES["attention"] = jax.checkpoint_policies.save_only_these_names(
    *_ATTENTION, *low_rank.SAVED_NAMES
)
# The products of experts have a batch dimension, blockwise attention is a loop, and 8-bit matmuls
# have sums of 32 bits, so all of them are saved by name.
_PRODUCTS = (*SAVED_NAMES, *_ATTENTION, quantized.RESULT_NAME)


def _has_8_bits(primitive: Any, arguments: Any) -> bool:
    return primitive.name == "dot_general" and any(x.dtype.itemsize == 1 for x in arguments)


def _dots(primitive: Any, *arguments: Any, **params: Any) -> Any:
    policy = jax.checkpoint_policies.dots_with_no_batch_dims_saveable
    return not _has_8_bits(primitive, arguments) and policy(primitive, *arguments, **params)


REMAT_POLICIES["dots"] = jax.checkpoint_policies.save_from_both_policies(
    _dots, jax.checkpoint_policies.save_only_these_names(*_PRODUCTS, *low_rank.SAVED_NAMES)
)
_OFFLOAD = {"offload_src": "device", "offload_dst": "pinned_host"}
_OFFLOADED_DOTS = jax.checkpoint_policies.offload_dot_with_no_batch_dims(**_OFFLOAD)
_OFFLOADED_NAMES = jax.checkpoint_policies.save_and_offload_only_these_names(
    names_which_can_be_saved=[*low_rank.SAVED_NAMES],
    names_which_can_be_offloaded=[*_PRODUCTS],
    **_OFFLOAD,
)


def _offload(primitive: Any, *arguments: Any, **params: Any) -> Any:
    """Keep what `dots` keeps, but in the memory of the host."""
    by_name = primitive.name == "name" or _has_8_bits(primitive, arguments)
    policy = _OFFLOADED_NAMES if by_name else _OFFLOADED_DOTS
    return policy(primitive, *arguments, **params)


REMAT_POLICIES["offload"] = _offload
REMAT_POLICIES["full"] = jax.checkpoint_policies.save_only_these_names(*low_rank.SAVED_NAMES)
