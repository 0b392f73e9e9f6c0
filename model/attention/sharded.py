"""Attention operations on a mesh: one shard_map around a backend.

The arrays are laid out by the rules of `OperationMetadata.get_shardings`; the backend works on
local blocks. Letters: B batch, L queries, T keys, H query heads, K kv heads, h head dim.
"""

import math
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from model.attention.mask import AttentionInputs, AttentionSpec
from model.attention.metadata import AttnShardingRules, OperationMetadata
from model.attention.registry import Backend, Request, features_of
from parallel.linear.ring import all_gather
from parallel.sharding.axes import GENERATION_MODES, RUNTIME_MODE_TYPES
from parallel.sharding.specs import mesh_axes_of

_HEADS, _LENGTH = 2, 1


@dataclass(frozen=True, kw_only=True)
class Placement:
    """Shardings of the arrays of a call in one runtime mode."""

    rules: AttnShardingRules
    mesh: Any
    platform: str
    decoding: bool
    head_axis: str | None
    length_axis: str

    @classmethod
    def of(cls, metadata: OperationMetadata, mode: RUNTIME_MODE_TYPES) -> "Placement":
        """Return the placement under the metadata's rules.

        Raises: ValueError if the rules put query heads on several mesh axes.
        """
        rules = metadata.get_shardings(mode)
        head_axes = mesh_axes_of(rules.query[_HEADS])
        if len(head_axes) > 1:
            raise ValueError(
                f"the rules put query heads on {rules.query[_HEADS]}; use one mesh axis for HEAD"
            )
        return cls(
            rules=rules,
            mesh=metadata.mesh,
            platform=str(metadata.platform),
            decoding=mode in GENERATION_MODES,
            head_axis=head_axes[0] if head_axes else None,
            length_axis=metadata.sequence_axis_name,
        )

    @property
    def tp(self) -> int:
        """Devices over which heads are split."""
        return 1 if self.head_axis is None else self.mesh.shape[self.head_axis]

    @property
    def sp(self) -> int:
        """Devices over which rows of queries are split."""
        return self._length_devices if self._queries_are_split else 1

    @property
    def _length_devices(self) -> int:
        return self.mesh.shape.get(self.length_axis, 1)

    @property
    def _queries_are_split(self) -> bool:
        return self.length_axis in mesh_axes_of(self.rules.query[_LENGTH])

    @property
    def _only_keys_are_split(self) -> bool:
        """Whether every device has all queries and a part of the keys: decoding over sp."""
        split = self.length_axis in mesh_axes_of(self.rules.key[_LENGTH])
        return split and not self._queries_are_split and self._length_devices > 1

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
            [name for name, array in vars(inputs).items() if array is not None],
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
        local_keys, merging = can.keys == "local", self._only_keys_are_split and can.merges_keys
        spec = replace(
            spec,
            sequence_axis=self.length_axis if self._queries_are_split and local_keys else None,
            merge_axis=self.length_axis if merging else None,
        )
        q_spec, kv_spec, specs = self._specs(k, inputs, keys_whole=not merging)
        _check_division(self.mesh, q, k, q_spec, kv_spec)
        gathers = self._queries_are_split and not local_keys
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
        kv_length = rules.key[_LENGTH] if self._queries_are_split or not keys_whole else None
        kv_heads = rules.key[_HEADS] if k.shape[_HEADS] % self.tp == 0 else None
        q_length = rules.query[_LENGTH]
        wanted = {
            "q_index_BL": P(batch, q_length),
            "kv_index_BT": P(batch, kv_length),
            "q_segment_ids_BL": P(batch, q_length),
            "kv_segment_ids_BT": P(batch, kv_length),
            "bias_BHLT": P(batch, *rules.bias[1:]),
            "mask_BHLT": P(batch, *rules.mask[1:]),
            "sinks_H": P(self.head_axis),
            "dropout_seed": P(None),
            "row_ids_B": P(batch),
            "head_ids_H": P(self.head_axis),
        }
        present: dict[str, Any] = {}
        for name, spec in wanted.items():
            if (array := getattr(inputs, name)) is not None:
                # A dim of size one is shared by all devices.
                dims = zip(array.shape, spec, strict=True)
                present[name] = P(*(None if size == 1 else axes for size, axes in dims))
        q_spec = P(batch, *rules.query[1:])
        kv_spec = P(batch, kv_length, kv_heads, rules.key[-1])
        return q_spec, kv_spec, AttentionInputs(**present)


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
    if heads_per_key is not None:
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
