"""Calls of attention operations on global arrays.

`attend` runs a backend that the plan has chosen: this is what the model calls. `OperationRegistry`
and `ShardedAttention` are the reference API's way to call an operation by name. Both
check arguments and fill in defaults; `model/attention/sharded.py` distributes the call over a mesh.

Letters: B batch, L queries, T keys, H query heads, K kv heads, S sinks, h head dim.
"""

from collections.abc import Sequence
from dataclasses import replace
from functools import partialmethod
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from model.attention.mask import AttentionInputs, AttentionSpec, MaskSpec
from model.attention.metadata import OperationMetadata
from model.attention.registry import (
    Backend,
    backends_of,
    choose_backend,
    operation_names,
    register,
)
from model.attention.sharded import Placement
from parallel.sharding.axes import (
    DEFAULT_MASK_VALUE,
    MODE_DECODE,
    MODE_TRAIN,
    RUNTIME_MODE_TYPES,
)

_LENGTH, _HEADS = 1, 2
_NO_INPUTS, _CAUSAL = AttentionInputs(), MaskSpec()


class ShardedAttention:
    """One attention operation on one mesh. Call it with global arrays; it splits them."""

    def __init__(self, name: str, backends: Sequence[Backend], metadata: OperationMetadata):
        self.name, self.backends, self.metadata = name, tuple(backends), metadata

    def get_mode(self, query: Array) -> str:
        """Return MODE_DECODE for rows `B L H h` of a single query, else MODE_TRAIN."""
        return MODE_DECODE if query.shape[_LENGTH] == 1 else MODE_TRAIN

    def _forward(self, backend: str, *args: Any, **options: Any) -> Array:
        """Call the backend of this name, or the native one if there is none."""
        named = [found for found in self.backends if found.name == backend]
        only = ShardedAttention(self.name, named or self.backends[-1:], self.metadata)
        return only(*args, **options)

    forward_native = forward_cpu = partialmethod(_forward, "native")
    forward_gpu = forward_cuda = partialmethod(_forward, "gpu")
    forward_rocm = forward_native  # the backends for GPU are cuDNN's
    forward_tpu = partialmethod(_forward, "tpu")

    def __call__(
        self,
        query: Array,
        key: Array,
        value: Array,
        *,
        inputs: AttentionInputs = _NO_INPUTS,
        mask: MaskSpec = _CAUSAL,
        soft_cap: float | None = None,
        mode: RUNTIME_MODE_TYPES = MODE_TRAIN,
    ) -> Array:
        """Return the attention of `B L H h` queries over `B T K h` keys and values -> `B L H h`.

        inputs: as `AttentionInputs`, all optional. Row indices and segment ids may be `L`, one row
            for the batch; kv_segment_ids default to q_segment_ids. Without indices, keys count from
            0 and the queries are the last of them; if not causal and there are more queries than
            keys, both count from 0. A bias of -1.2e38 and below hides a key. Sinks are `H`, or
            `S K` for S of them per kv head. dropout_seed is a key of jax.random; without it, or
            with a dropout_prob of 0, nothing is dropped.
        mask, soft_cap: as in `AttentionSpec`; its other fields come from the metadata.
        mode: runtime mode whose sharding rules apply.
        Every call outside of `jax.jit` compiles again.
        Communication: that of the backend over sp; none over the other axes.
        Raises: ValueError, before anything is traced, for what the operation cannot do.
        """
        spec = AttentionSpec(
            scale=self.metadata.softmax_scale or query.shape[-1] ** -0.5,
            mask=mask,
            soft_cap=soft_cap,
            dropout=self.metadata.dropout_prob,
            scan=self.metadata.scan_ring_attention,
        )
        return attend(self.backends, (query, key, value), inputs, spec, self.metadata, mode)


def attend(
    backends: Sequence[Backend],
    qkv: tuple[Array, Array, Array],
    inputs: AttentionInputs,
    spec: AttentionSpec,
    metadata: OperationMetadata,
    mode: RUNTIME_MODE_TYPES = MODE_TRAIN,
) -> Array:
    """Run the first of an operation's backends that can serve this call -> `B L H h`.

    Shapes and defaults of `inputs` are as in `ShardedAttention.__call__`. Block sizes that `spec`
    leaves out come from the metadata.
    Raises: ValueError if the arrays do not fit or ask for more than the backends can do.
    """
    _check_shapes(*qkv)
    q, k, v = (y.astype(metadata.runtime_dtype) for y in qkv)
    inputs, spec = _filled_in(inputs, spec, q, k)
    _check_inputs(inputs, q, k)
    name = backends[0].operation
    block_q, block_k = metadata.block_sizes(name)
    spec = replace(spec, block_q=spec.block_q or block_q, block_k=spec.block_k or block_k)
    placement = Placement.of(metadata.manager, str(metadata.platform), mode)
    backend = choose_backend(name, backends, placement.request(q, k, inputs, spec))
    return placement.run(backend, (q, k, v), inputs, spec)


class OperationRegistry:
    """The registry of operations under the names of the reference API."""

    register = staticmethod(register)
    get = staticmethod(backends_of)

    @staticmethod
    def create(name: str, metadata: OperationMetadata) -> ShardedAttention:
        """Return the operation on the mesh of `metadata`. Raises: ValueError as `get`."""
        return ShardedAttention(name, backends_of(name), metadata)

    @staticmethod
    def list_implementations() -> list[str]:
        """Return all registered names, most preferred first."""
        return list(operation_names())


def _filled_in(
    inputs: AttentionInputs, spec: AttentionSpec, q: Array, k: Array
) -> tuple[AttentionInputs, AttentionSpec]:
    """Return inputs and spec with every default in place."""
    (B, L, H, _), (T, K) = q.shape, k.shape[_LENGTH:-1]
    q_ids = None if inputs.q_segment_ids_BL is None else _as_rows(inputs.q_segment_ids_BL)
    # A query before row 0 sees no key. So queries that are not causal never start before it.
    first = T - L if spec.mask.causal else max(T - L, 0)
    natural = inputs.q_index_BL is None and inputs.kv_index_BT is None and first == T - L
    q_index, kv_index = inputs.q_index_BL, inputs.kv_index_BT
    if q_index is None:
        q_index = jnp.arange(first, first + L, dtype=jnp.int32)
    if kv_index is None:
        kv_index = jnp.arange(T, dtype=jnp.int32)
    filled = replace(
        inputs,
        q_index_BL=_as_rows(q_index),
        kv_index_BT=_as_rows(kv_index),
        q_segment_ids_BL=q_ids,
        kv_segment_ids_BT=(
            q_ids if inputs.kv_segment_ids_BT is None else _as_rows(inputs.kv_segment_ids_BT)
        ),
        bias_BHLT=_hiding_bias(inputs.bias_BHLT),
        sinks_H=_sink_logits(inputs.sinks_H, H, K),
        dropout_seed=None,
    )
    seed = inputs.dropout_seed if spec.dropout else None
    if seed is not None:
        filled = replace(
            filled,
            dropout_seed=jax.random.key_data(seed).ravel()[-2:],
            row_ids_B=jnp.arange(B, dtype=jnp.int32),
            head_ids_H=jnp.arange(H, dtype=jnp.int32),
        )
    dropout = 0.0 if seed is None else spec.dropout
    return filled, replace(spec, dropout=dropout, contiguous=natural)


def _as_rows(y: Array) -> Array:
    """Return indices or ids of one row for all, `L`, as `1 L`."""
    return jnp.asarray(y if y.ndim == 2 else y[None], jnp.int32)


def _hiding_bias(bias: Array | None) -> Array | None:
    """Return the bias with -inf for keys that it hides (finfo.min, half the mask value or less).

    A query whose keys are all hidden then sees nothing, instead of all of them equally.
    """
    if bias is None:
        return None
    hidden = bias.astype(jnp.float32) <= 0.5 * DEFAULT_MASK_VALUE
    return jnp.where(hidden, -jnp.inf, bias)


def _sink_logits(sinks: Array | None, heads: int, kv_heads: int) -> Array | None:
    """Return one float32 logit per query head; several sinks equal one of their logsumexp."""
    if sinks is None:
        return None
    if sinks.shape == (heads,):
        return sinks.astype(jnp.float32)
    if sinks.ndim != 2 or sinks.shape[1] != kv_heads:
        raise ValueError(
            f"attention sinks {sinks.shape}: give logits ({heads},) of the query heads, or "
            f"(sinks, {kv_heads}) of the kv heads"
        )
    per_key_K = jax.nn.logsumexp(sinks.astype(jnp.float32), axis=0)
    return jnp.repeat(per_key_K, heads // kv_heads)


def _check_shapes(q: Array, k: Array, v: Array) -> None:
    """Raise ValueError for q, k, v that do not belong together."""
    for name, y in (("query", q), ("key", k), ("value", v)):
        if y.ndim != 4:
            raise ValueError(f"{name} {y.shape}: give 4 dims (batch, length, heads, head_dim)")
    if k.shape != v.shape or (q.shape[0], q.shape[-1]) != (k.shape[0], k.shape[-1]):
        raise ValueError(
            f"query {q.shape}, key {k.shape}, value {v.shape} (batch, length, heads, head_dim) do "
            "not fit: they share batch and head_dim, and key and value share all"
        )
    if 0 in (*q.shape, *k.shape):
        raise ValueError(f"query {q.shape} and key {k.shape}: every dim must be at least 1")
    if q.shape[_HEADS] % k.shape[_HEADS]:
        raise ValueError(
            f"{q.shape[_HEADS]} query heads are not a multiple of {k.shape[_HEADS]} kv heads"
        )


def _check_inputs(inputs: AttentionInputs, q: Array, k: Array) -> None:
    """Raise ValueError for an array that does not belong to q `B L H h` and k `B T K h`."""
    (B, L, H, _), T = q.shape, k.shape[_LENGTH]
    if inputs.q_segment_ids_BL is None and inputs.kv_segment_ids_BT is not None:
        raise ValueError(
            "kv_segment_ids are given without q_segment_ids: no query has a segment to see; give "
            "both, or q_segment_ids alone if queries and keys are the same tokens"
        )
    if inputs.mask_BHLT is not None and inputs.mask_BHLT.dtype != bool:
        raise ValueError(
            f"attention mask of {inputs.mask_BHLT.dtype}: give booleans, False where a key is not "
            "seen; to add numbers to the scores, give bias"
        )
    sizes = {"B": B, "H": H, "L": L, "T": T}
    for field, dims, array in inputs.present():
        if "L" not in dims and "T" not in dims:
            continue
        wanted = tuple(sizes[dim] for dim in dims)
        # Batch and heads may have size 1, shared by all.
        shared = len(dims) // 2
        fits = array.ndim == len(dims) and all(
            size == want or (dim < shared and size == 1)
            for dim, (size, want) in enumerate(zip(array.shape, wanted, strict=True))
        )
        if not fits:
            name = field.rpartition("_")[0]
            raise ValueError(
                f"attention {name} {array.shape} does not have the shape {wanted}, whose first "
                f"{shared} dims may be 1"
            )
