"""Attention operations on a mesh: one shard_map around a backend.

The arrays are laid out by the rules of `OperationMetadata.get_shardings`; the backend works on
local blocks. Letters: B batch, L queries, T keys, H query heads, K kv heads, h head dim.
"""

import math
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal, NamedTuple, get_args

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from model.attention.mask import AttentionInputs, AttentionSpec
from model.attention.registry import Backend, Request, features_of
from parallel.linear.ring import all_gather, pcast_varying
from parallel.sharding import axes as ax
from parallel.sharding.axes import GENERATION_MODES, RUNTIME_MODE_TYPES
from parallel.sharding.devices import compute_capability
from parallel.sharding.partition import PartitionManager
from parallel.sharding.specs import mesh_axes_of

_HEADS, _LENGTH = 2, 1


Layout = Literal["bthd", "bhtd", "thd"]
"""Dims of q, k, v and the output: batch, t queries or keys, heads, head dim."""


class AttnShardingRules(NamedTuple):
    """PartitionSpecs of all arrays of an attention.

    query3d: queries without their length, `B H h`. query, key, value, output: in the requested
    layout. bias, mask: `B H L T`, in thd `H L T`. q_segment_ids, kv_segment_ids: `B L` and `B T`,
    in thd `L` and `T`. softmax_aux: None if there is none.
    """

    query3d: P
    query: P
    key: P
    value: P
    bias: P
    mask: P
    output: P
    q_segment_ids: P
    kv_segment_ids: P
    softmax_aux: P | None


def attention_shardings(
    manager: PartitionManager,
    mode: RUNTIME_MODE_TYPES,
    layout: Layout = "bthd",
    qkv_mni_sharding: bool = False,
    softmax_aux: Any | None = None,
) -> AttnShardingRules:
    """Return `OperationMetadata.get_shardings` by these rules on their mesh."""
    for name, value, legal in (
        ("mode", mode, get_args(RUNTIME_MODE_TYPES)),
        ("layout", layout, get_args(Layout)),
    ):
        if value not in legal:
            raise ValueError(f"attention {name} {value!r} is unknown; use {', '.join(legal)}")
    batch = () if layout == "thd" else (ax.BATCH,)

    def rows(length: str, head: str, dim: str) -> P:
        inner = (head, length, dim) if layout == "bhtd" else (length, head, dim)
        return manager.resolve((*batch, *inner), mode)

    query = rows(ax.QUERY_LENGTH, ax.HEAD, ax.HEAD_DIM)
    heads = (ax.HEAD, ax.HEAD_DIM) if qkv_mni_sharding else (ax.KV_HEAD, ax.KV_HEAD_DIM)
    key = rows(ax.KV_LENGTH, *heads)
    scores = (ax.QUERY_LENGTH, ax.BIAS_KV_SEQ)
    ranks = {1: (ax.HEAD,), 2: (ax.EMPTY, ax.KV_HEAD)}
    if softmax_aux is not None and len(softmax_aux.shape) not in ranks:
        raise ValueError(
            f"softmax_aux of shape {softmax_aux.shape}: give one number per head (H), or rows of "
            "one per kv head (X K)"
        )
    return AttnShardingRules(
        query3d=manager.resolve((ax.BATCH, ax.HEAD, ax.HEAD_DIM), mode),
        query=query,
        key=key,
        value=key,
        bias=manager.resolve((*batch, ax.BIAS_HEAD_SEQ, *scores), mode),
        mask=manager.resolve((*batch, None, *scores), mode),
        output=query,
        q_segment_ids=manager.resolve((*batch, ax.QUERY_LENGTH), mode),
        kv_segment_ids=manager.resolve((*batch, ax.KV_LENGTH), mode),
        softmax_aux=(
            None if softmax_aux is None else manager.resolve(ranks[len(softmax_aux.shape)], mode)
        ),
    )


@dataclass(frozen=True, kw_only=True)
class Placement:
    """Shardings of the arrays of a call in one runtime mode.

    tp, sp: devices over which heads and rows of queries are split. queries_split: over length_axis.
    only_keys_split: every device has all queries and a part of the keys, in decoding over sp.
    """

    rules: AttnShardingRules
    mesh: Any
    platform: str
    decoding: bool
    head_axis: str | None
    length_axis: str
    tp: int
    sp: int
    queries_split: bool
    only_keys_split: bool

    @classmethod
    def of(cls, manager: PartitionManager, platform: str, mode: RUNTIME_MODE_TYPES) -> "Placement":
        """Return the placement by these rules.

        Raises: ValueError if they put query heads on several mesh axes.
        """
        rules, sizes = attention_shardings(manager, mode), manager.mesh.shape
        head_axes = mesh_axes_of(rules.query[_HEADS])
        if len(head_axes) > 1:
            raise ValueError(
                f"the rules put query heads on {rules.query[_HEADS]}; use one mesh axis for HEAD"
            )
        axis = manager.partition_axis.sequence_parallel_axis
        queries, keys = (axis in mesh_axes_of(x[_LENGTH]) for x in (rules.query, rules.key))
        return cls(
            rules=rules,
            mesh=manager.mesh,
            platform=platform,
            decoding=mode in GENERATION_MODES,
            head_axis=head_axes[0] if head_axes else None,
            length_axis=axis,
            tp=math.prod(sizes[name] for name in head_axes),
            sp=sizes.get(axis, 1) if queries else 1,
            queries_split=queries,
            only_keys_split=keys and not queries and sizes.get(axis, 1) > 1,
        )

    def request(self, q: Array, k: Array, inputs: AttentionInputs, spec: AttentionSpec) -> Request:
        """Return what this call asks of a backend.

        Raises: ValueError for query heads that the mesh cannot split.
        """
        heads, kv_heads = q.shape[_HEADS], k.shape[_HEADS]
        if heads % self.tp:
            raise ValueError(
                f"{heads} query heads are not divisible by {self.head_axis}={self.tp}; use a "
                f"{self.head_axis} that divides them"
            )
        same_segments = inputs.kv_segment_ids_BT is inputs.q_segment_ids_BL
        own_keys = q.shape[_LENGTH] == k.shape[_LENGTH] and same_segments
        features = features_of(
            replace(spec, contiguous=spec.contiguous and own_keys),
            [name for name, *_ in inputs.present()],
            grouped=heads > kv_heads,
            decoding=self.decoding,
            sp=self.sp,
        )
        return Request(
            features=features,
            platform=self.platform,
            dtype=str(q.dtype),
            length=q.shape[_LENGTH] // self.sp,
            head_dim=q.shape[-1],
            heads=heads // self.tp,
            sp=self.sp,
            compute_capability=compute_capability(self.mesh.devices.flat[0]),
        )

    def run(
        self,
        backend: Backend,
        qkv: tuple[Array, Array, Array],
        inputs: AttentionInputs,
        spec: AttentionSpec,
    ) -> Array:
        """Return the backend's result on the mesh, in the layout of the queries.

        Raises: ValueError for a batch, or rows, that the mesh cannot split.
        """
        (q, k, _), can = qkv, backend.capabilities
        heads, kv_heads = q.shape[_HEADS], k.shape[_HEADS]
        local_keys, merging = can.keys == "local", self.only_keys_split and can.merges_keys
        spec = replace(
            spec,
            sequence_axis=self.length_axis if self.queries_split and local_keys else None,
            merge_axis=self.length_axis if merging else None,
        )
        q_spec, kv_spec, specs = self._specs(k, inputs, keys_whole=not merging)
        _check_division(self.mesh, q, k, q_spec, kv_spec)
        gathers = self.queries_split and not local_keys
        body = partial(
            _attend_body,
            backend=backend,
            spec=spec,
            head_axis=self.head_axis,
            heads_per_key=heads // kv_heads if kv_heads % self.tp else None,
            gather_axis=self.length_axis if gathers else None,
        )
        in_specs = ((q_spec, kv_spec, kv_spec), specs)
        island = jax.shard_map(
            body, mesh=self.mesh, in_specs=in_specs, out_specs=q_spec, check_vma=can.check_vma
        )

        def laid_out(*arrays: Any) -> Array:
            shardings = jax.tree.map(
                lambda spec: NamedSharding(self.mesh, spec),
                in_specs,
                is_leaf=lambda leaf: isinstance(leaf, P),
            )
            return island(*jax.tree.map(jax.sharding.reshard, arrays, shardings))

        # Outside of jit a shard_map would run, and compile, operation by operation.
        traced = isinstance(q, jax.core.Tracer)
        return laid_out(qkv, inputs) if traced else jax.jit(laid_out)(qkv, inputs)

    def _specs(
        self, k: Array, inputs: AttentionInputs, keys_whole: bool
    ) -> tuple[P, P, AttentionInputs]:
        """Return the specs of q, of k and v, and of the inputs that are present.

        keys_whole: every device gets all keys where only keys would be split. Kv heads that tp does
        not divide are whole on every device.
        """
        rules, batch = self.rules, self.rules.query[0]
        kv_length = rules.key[_LENGTH] if self.queries_split or not keys_whole else None
        kv_heads = rules.key[_HEADS] if k.shape[_HEADS] % self.tp == 0 else None
        q_length = rules.query[_LENGTH]
        axes = {"B": batch, "L": q_length, "T": kv_length, "H": self.head_axis}
        scores = {"bias_BHLT": rules.bias[1:], "mask_BHLT": rules.mask[1:]}
        specs: dict[str, Any] = {}
        for name, dims, array in inputs.present():
            spec = (batch, *scores[name]) if name in scores else [axes[d] for d in dims] or [None]
            # A dim of size one is shared by all devices.
            split = zip(array.shape, spec, strict=True)
            specs[name] = P(*(None if size == 1 else names for size, names in split))
        q_spec = P(batch, *rules.query[1:])
        kv_spec = P(batch, kv_length, kv_heads, rules.key[-1])
        return q_spec, kv_spec, AttentionInputs(**specs)


def _check_division(mesh: Any, q: Array, k: Array, q_spec: P, kv_spec: P) -> None:
    """Raise ValueError for a batch, or rows, that the mesh cannot split."""
    for what, size, axes in (
        ("sequences", q.shape[0], q_spec[0]),
        ("queries", q.shape[_LENGTH], q_spec[_LENGTH]),
        ("keys", k.shape[_LENGTH], kv_spec[_LENGTH]),
    ):
        names = mesh_axes_of(axes)
        parts = math.prod(mesh.shape[name] for name in names)
        if size % parts:
            raise ValueError(
                f"attention over {size} {what}: not divisible by {' * '.join(names)}={parts}; pad "
                "them, or use another mesh"
            )


def local_kv_heads(head_axis: str | None, heads: int, heads_per_key: int) -> Array:
    """Return the kv head of each of this device's query heads, where it holds all kv heads."""
    first = 0 if head_axis is None else lax.axis_index(head_axis) * heads
    return (first + jnp.arange(heads)) // heads_per_key


def _attend_body(
    qkv: tuple[Array, Array, Array],
    inputs: AttentionInputs,
    *,
    backend: Backend,
    spec: AttentionSpec,
    head_axis: str | None,
    heads_per_key: int | None,
    gather_axis: str | None,
) -> Array:
    """Return the backend's result on one device.

    q `B L/sp H/tp h`, k and v `B T/sp K/tp h` -> `B L/sp H/tp h`.
    heads_per_key: query heads per kv head if every device holds all kv heads, and takes those of
    its query heads.
    Communication: an all-gather of k, v, their indices and segment ids over gather_axis.
    """
    q, k, v = qkv
    heads = q.shape[_HEADS]
    if heads_per_key is not None and spec.shared_values:
        k = v = pcast_varying(k, mesh_axes_of(head_axis))  # one head, which serves all
    elif heads_per_key is not None:
        own = local_kv_heads(head_axis, heads, heads_per_key)
        k, v = (jnp.take(y, own, axis=_HEADS) for y in (k, v))
    if gather_axis is not None:
        k, v = (all_gather(y, gather_axis, _LENGTH) for y in (k, v))
        ids = inputs.kv_segment_ids_BT
        inputs = replace(
            inputs,
            kv_index_BT=all_gather(inputs.kv_index_BT, gather_axis, _LENGTH),
            kv_segment_ids_BT=None if ids is None else all_gather(ids, gather_axis, _LENGTH),
        )

    def local_part(y_BHLT: Array | None) -> Array | None:
        if y_BHLT is None:
            return None
        if y_BHLT.shape[1] not in (1, heads):
            first = 0 if head_axis is None else lax.axis_index(head_axis) * heads
            y_BHLT = lax.dynamic_slice_in_dim(y_BHLT, first, heads, axis=1)
        if spec.merge_axis is not None and y_BHLT.shape[3] > 1:
            start = lax.axis_index(spec.merge_axis) * k.shape[_LENGTH]
            y_BHLT = lax.dynamic_slice_in_dim(y_BHLT, start, k.shape[_LENGTH], axis=3)
        return y_BHLT

    bias, mask = local_part(inputs.bias_BHLT), local_part(inputs.mask_BHLT)
    inputs = replace(inputs, bias_BHLT=bias, mask_BHLT=mask)
    return backend.function(q, k, v, inputs, spec)
