"""One operation on one mesh: lays the arrays out, splits them over devices, calls a form.

The only island of attention: whatever an operation is, its arguments are laid out by the rules of
`OperationMetadata.get_shardings` and it works on local blocks. Letters: B batch, L queries, T keys,
H query heads, K kv heads, h head dim.
"""

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from model.attention.arguments import (
    as_bias,
    as_bthd,
    as_rows,
    check_inputs,
    check_shapes,
    dropout_draws,
    from_bthd,
    sink_logits,
)
from model.attention.capabilities import Feature, Form, Layout, Request, choose_form, features_of
from model.attention.metadata import AttnShardingRules, OperationMetadata
from model.attention.scores import BlockMask, PagedInputs, Pattern, ScoreInputs, ScoreRule
from parallel.linear.ring import all_gather
from parallel.sharding.axes import GENERATION_MODES, MODE_DECODE, MODE_TRAIN, RUNTIME_MODE_TYPES
from parallel.sharding.specs import mesh_axes_of

_HEADS, _LENGTH = 2, 1


class BoundOperation:
    """A registered operation on the mesh of its metadata; call it on whole (global) arrays."""

    def __init__(self, name: str, forms: Sequence[Form], metadata: OperationMetadata):
        self.name, self.forms, self.metadata = name, tuple(forms), metadata
        if metadata.runtime_softmax_dtype != jnp.float32:
            raise ValueError(
                f"runtime_softmax_dtype={metadata.runtime_softmax_dtype.name}: every operation "
                "computes its softmax in float32; leave it out"
            )
        if metadata.blocksize_b is not None:
            raise ValueError(
                f"blocksize_b={metadata.blocksize_b}: no operation works in blocks of sequences; "
                "leave it out"
            )

    def get_mode(self, query: jax.Array) -> str:
        """MODE_DECODE for rows `B L H h` of a single query, else MODE_TRAIN."""
        return MODE_DECODE if query.shape[_LENGTH] == 1 else MODE_TRAIN

    def forward_native(self, *args: Any, **options: Any) -> jax.Array:
        """`__call__` by the form that runs on every platform."""
        return self._only("native")(*args, **options)

    def forward_cpu(self, *args: Any, **options: Any) -> jax.Array:
        """`__call__` by the form for CPU, which is the native one."""
        return self._only("native")(*args, **options)

    def forward_gpu(self, *args: Any, **options: Any) -> jax.Array:
        """`__call__` by the form for GPU, or the native one if there is none."""
        return self._only("gpu")(*args, **options)

    forward_cuda = forward_gpu
    forward_rocm = forward_native  # the forms for GPU are cuDNN's

    def forward_tpu(self, *args: Any, **options: Any) -> jax.Array:
        """`__call__` by the form for TPU, or the native one if there is none."""
        return self._only("tpu")(*args, **options)

    def _only(self, name: str) -> "BoundOperation":
        named = [form for form in self.forms if form.name == name]
        return BoundOperation(self.name, named or self.forms[-1:], self.metadata)

    def __call__(
        self,
        query: jax.Array,
        key: jax.Array,
        value: jax.Array,
        *,
        mode: RUNTIME_MODE_TYPES = MODE_TRAIN,
        layout: Layout = "bthd",
        causal: bool = True,
        sliding_window: int | None = None,
        chunk_size: int | None = None,
        prefix: int = 0,
        block_mask: BlockMask | None = None,
        q_index: jax.Array | None = None,
        kv_index: jax.Array | None = None,
        q_segment_ids: jax.Array | None = None,
        kv_segment_ids: jax.Array | None = None,
        bias: jax.Array | None = None,
        mask: jax.Array | None = None,
        softmax_aux: jax.Array | None = None,
        logits_soft_cap: float | None = None,
        dropout_key: jax.Array | None = None,
    ) -> jax.Array:
        """Attention of `B L H h` queries over `B T K h` keys and values -> `B L H h`.

        mode: in which the rules lay the arrays out. layout: order of dims of query, key, value and
        the result; `thd` has no batch. A query sees the keys that `causal`, `sliding_window`,
        `chunk_size`, `prefix`, `block_mask` (see `Pattern`), the segment ids (`B L`, `B T`; `kv`
        defaults to `q`'s) and `mask` (booleans, `B|1 H|1 L T`) all let it see.
        q_index, kv_index: row indices (`B|1 L`, `B|1 T`); default: 0 .. T - 1, the queries last;
        more queries than keys that are not causal: both from 0.
        bias: added to the scores, `B|1 H|1 L T`; -1.2e38 and below hide a key. softmax_aux: sinks,
        logits `H`, or `S K` for S of them per kv head. logits_soft_cap: scores become
        cap * tanh(scores / cap).
        dropout_key: drops weights with the metadata's dropout_prob; None: none are dropped.
        Outside of `jax.jit` every call compiles anew.
        Communication: what the chosen form needs over sp; nothing over the other axes.
        Raises: ValueError, before tracing anything, for what the operation cannot do.
        """
        check_shapes(query, key, value, layout)
        dtype = self.metadata.runtime_dtype
        q, k, v = (as_bthd(y, layout).astype(dtype) for y in (query, key, value))
        batched = layout != "thd"
        q_ids = None if q_segment_ids is None else as_rows(q_segment_ids)
        L, T = q.shape[_LENGTH], k.shape[_LENGTH]
        # A query below row 0 sees nothing: right where no key is before it, else it would be blind.
        first = T - L if causal else max(T - L, 0)
        default_q = jnp.arange(first, first + L, dtype=jnp.int32)[None]
        default_kv = jnp.arange(T, dtype=jnp.int32)[None]
        if self.metadata.dropout_prob == 0:
            dropout_key = None
        inputs = ScoreInputs(
            q_index_BL=default_q if q_index is None else as_rows(q_index),
            kv_index_BT=default_kv if kv_index is None else as_rows(kv_index),
            q_segment_ids_BL=q_ids,
            kv_segment_ids_BT=q_ids if kv_segment_ids is None else as_rows(kv_segment_ids),
            bias_BHLT=as_bias(bias if bias is None or batched else bias[None]),
            mask_BHLT=mask if mask is None or batched else mask[None],
            sinks_H=sink_logits(softmax_aux, q.shape[_HEADS], k.shape[_HEADS]),
            **dropout_draws(dropout_key, q),
        )
        rule = ScoreRule(
            scale=self.metadata.scale_of(q.shape[-1]),
            pattern=Pattern(
                causal=causal,
                window=sliding_window,
                chunk=chunk_size,
                prefix=prefix,
                blocks=block_mask,
            ),
            soft_cap=logits_soft_cap,
            dropout=0.0 if dropout_key is None else self.metadata.dropout_prob,
            contiguous=q_index is None and kv_index is None and first == T - L,
            scan=self.metadata.scan_ring_attention,
        )
        check_inputs(inputs, q, k)
        out = self.attend(q, k, v, inputs, rule, mode=mode, layout=layout)
        return from_bthd(out, layout)

    def attend_pages(
        self,
        query: jax.Array,
        pages: jax.Array,
        inputs: PagedInputs,
        *,
        sliding_window: int | None = None,
        chunk_size: int | None = None,
        prefix: int = 0,
        logits_soft_cap: float | None = None,
    ) -> jax.Array:
        """Queries `T H h` of all sequences over keys and values in pages `P S 2K h` -> `T H h`.

        inputs: whose pages are whose, and whose queries; see `PagedInputs`. Heads lie over tp.
        Raises: ValueError if the operation does not work on pages, or lacks something.
        """
        head_axis = self.metadata.get_shardings(MODE_DECODE, "thd").query[1]
        pattern = Pattern(window=sliding_window, chunk=chunk_size, prefix=prefix)
        kv_heads, tp = pages.shape[2] // 2, self.metadata.mesh.shape.get(head_axis, 1)
        if query.shape[1] % kv_heads or kv_heads % tp:
            raise ValueError(
                f"{query.shape[1]} query heads over pages of {kv_heads} kv heads on {head_axis}="
                f"{tp}: query heads are a multiple of kv heads, and these of {head_axis}; repeat "
                f"kv heads, or use another {head_axis}"
            )
        config = self.metadata.get_operation_config(self.name)
        rule = ScoreRule(
            scale=self.metadata.scale_of(query.shape[-1]),
            pattern=pattern,
            soft_cap=logits_soft_cap,
            block_q=(config and config.block_q) or self.metadata.blocksize_q,
            block_k=(config and config.block_k) or self.metadata.blocksize_k,
        )
        asked = features_of(None, rule, heads_per_key=2 * query.shape[1] // pages.shape[2])
        more: list[Feature] = ["decode", "paged"]
        more += ["mixed"] if inputs.query_starts is not None else []
        more += ["sinks"] if inputs.sinks_H is not None else []
        request = Request(
            features=asked.union(more),
            platform=str(self.metadata.platform),
            dtype=str(query.dtype),
            length=1,
            head_dim=query.shape[-1],
            heads=query.shape[1],
            layout="thd",
        )
        form = choose_form(self.name, self.forms, request)
        whole = dataclasses.replace(inputs, sinks_H=None)
        specs: Any = jax.tree.map(lambda x: P(*[None] * x.ndim), whole)
        if inputs.sinks_H is not None:
            specs = dataclasses.replace(specs, sinks_H=P(head_axis))
        in_specs = P(None, head_axis, None), P(None, None, head_axis, None), specs
        island = jax.shard_map(
            lambda q, pages, inputs: form.function(q, pages, inputs, rule),
            mesh=self.metadata.mesh,
            in_specs=in_specs,
            out_specs=P(None, head_axis, None),
            check_vma=form.capabilities.types_varying,
        )
        return _on_mesh(island, self.metadata.mesh, in_specs, (query, pages, inputs))

    def attend(
        self,
        q: jax.Array,
        k: jax.Array,
        v: jax.Array,
        inputs: ScoreInputs,
        rule: ScoreRule,
        *,
        mode: RUNTIME_MODE_TYPES = MODE_TRAIN,
        layout: Layout = "bthd",
    ) -> jax.Array:
        """`__call__` on bthd arrays whose inputs and rule are put together; its laws hold here.

        layout: of the arrays that the caller was given; `thd` rows are not split over a batch.
        """
        place = _Place.of(self.metadata, mode, batched=layout != "thd")
        request = place.request(q, k, inputs, rule, mode, layout)
        form = choose_form(self.name, self.forms, request)
        heads, kv_heads = q.shape[_HEADS], k.shape[_HEADS]
        can, config = form.capabilities, self.metadata.get_operation_config(self.name)
        merging = place.keys_split_alone and can.merges_keys
        rule = dataclasses.replace(
            rule,
            block_q=(config and config.block_q) or self.metadata.blocksize_q,
            block_k=(config and config.block_k) or self.metadata.blocksize_k,
            sequence_axis=place.length_axis if place.queries_split and can.keys == "own" else None,
            merge_axis=place.length_axis if merging else None,
        )
        q_spec, kv_spec, specs = place.specs(k, inputs, keys_whole=not merging)
        _check_division(self.metadata.mesh, q, k, q_spec, kv_spec)
        body = partial(
            _attend_body,
            form=form,
            rule=rule,
            head_axis=place.head_axis,
            heads_per_key=heads // kv_heads if kv_heads % place.tp else None,
            gather_axis=place.length_axis if place.queries_split and can.keys != "own" else None,
        )
        in_specs = (q_spec, kv_spec, kv_spec, specs)
        island = jax.shard_map(
            body,
            mesh=self.metadata.mesh,
            in_specs=in_specs,
            out_specs=q_spec,
            check_vma=can.types_varying,
        )

        return _on_mesh(island, self.metadata.mesh, in_specs, (q, k, v, inputs))


def _on_mesh(island: Any, mesh: Any, specs: Any, arrays: Any) -> jax.Array:
    """The island on these arrays, laid out as its specs say."""

    def laid_out(*arrays: Any) -> jax.Array:
        shardings = jax.tree.map(
            lambda spec: NamedSharding(mesh, spec), specs, is_leaf=lambda leaf: isinstance(leaf, P)
        )
        return island(*jax.tree.map(jax.sharding.reshard, arrays, shardings))

    # Outside of jit a shard_map would run, and compile, operation by operation.
    traced = isinstance(arrays[0], jax.core.Tracer)
    return laid_out(*arrays) if traced else jax.jit(laid_out)(*arrays)


@dataclass(frozen=True, kw_only=True)
class _Place:
    """Where the rules put the arrays of a call."""

    rules: AttnShardingRules
    batch: Any
    head_axis: str | None
    length_axis: str
    tp: int
    sp: int
    platform: str

    @classmethod
    def of(cls, metadata: OperationMetadata, mode: RUNTIME_MODE_TYPES, batched: bool) -> "_Place":
        rules = metadata.get_shardings(mode, "bthd")
        head_axes = mesh_axes_of(rules.query[_HEADS])
        if len(head_axes) > 1:
            raise ValueError(
                f"the rules put query heads on {rules.query[_HEADS]}; use one mesh axis for HEAD"
            )
        head_axis = head_axes[0] if head_axes else None
        sizes = metadata.mesh.shape
        return cls(
            rules=rules,
            batch=rules.query[0] if batched else None,
            head_axis=head_axis,
            length_axis=metadata.sequence_axis_name,
            tp=1 if head_axis is None else sizes[head_axis],
            sp=sizes.get(metadata.sequence_axis_name, 1),
            platform=str(metadata.platform),
        )

    @property
    def queries_split(self) -> bool:
        """Whether rows of queries are split over the sequence axis."""
        return self.length_axis in mesh_axes_of(self.rules.query[_LENGTH])

    @property
    def keys_split_alone(self) -> bool:
        """Whether keys are split where every device has all queries: decoding over sp."""
        split = self.length_axis in mesh_axes_of(self.rules.key[_LENGTH])
        return split and not self.queries_split and self.sp > 1

    def request(
        self,
        q: jax.Array,
        k: jax.Array,
        inputs: ScoreInputs,
        rule: ScoreRule,
        mode: RUNTIME_MODE_TYPES,
        layout: Layout,
    ) -> Request:
        heads, kv_heads = q.shape[_HEADS], k.shape[_HEADS]
        if heads % self.tp:
            raise ValueError(
                f"{heads} query heads are not divisible by {self.head_axis}={self.tp}; use a "
                f"{self.head_axis} that divides them"
            )
        features = features_of(inputs, rule, heads_per_key=heads // kv_heads)
        if mode in GENERATION_MODES:
            features |= {"decode"}
        elif not rule.contiguous or not _are_own_keys(q, k, inputs):
            features |= {"row_order"}
        sp = self.sp if self.queries_split else 1
        return Request(
            features=features | ({"sequence_parallel"} if sp > 1 else set()),
            platform=self.platform,
            dtype=str(q.dtype),
            length=q.shape[_LENGTH] // sp,
            head_dim=q.shape[-1],
            heads=heads // self.tp,
            sp=sp,
            layout=layout,
        )

    def specs(
        self, k: jax.Array, inputs: ScoreInputs, keys_whole: bool
    ) -> tuple[P, P, ScoreInputs]:
        """Of q, of k and v, and of the inputs that there are.

        keys_whole: where keys are split alone, every device gets all of them. Kv heads that tp does
        not divide are whole on every device.
        """
        rules, batch = self.rules, self.batch
        kv_length = rules.key[_LENGTH] if self.queries_split or not keys_whole else None
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
                # A dim of one stands for all: it is never split.
                dims = zip(array.shape, spec, strict=True)
                present[name] = P(*(None if size == 1 else axes for size, axes in dims))
        q_spec = P(batch, *rules.query[1:])
        kv_spec = P(batch, kv_length, kv_heads, rules.key[-1])
        return q_spec, kv_spec, ScoreInputs(**present)


def _check_division(mesh: Any, q: jax.Array, k: jax.Array, q_spec: P, kv_spec: P) -> None:
    """Raises: ValueError for a batch, or rows, that the mesh cannot split."""
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


def _are_own_keys(q: jax.Array, k: jax.Array, inputs: ScoreInputs) -> bool:
    """Whether keys may be taken for the rows of the queries themselves: as many, same segments."""
    same_segments = inputs.kv_segment_ids_BT is inputs.q_segment_ids_BL
    return q.shape[_LENGTH] == k.shape[_LENGTH] and same_segments


def _attend_body(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    inputs: ScoreInputs,
    *,
    form: Form,
    rule: ScoreRule,
    head_axis: str | None,
    heads_per_key: int | None,
    gather_axis: str | None,
) -> jax.Array:
    """q `B L/sp H/tp h`, k and v `B T/sp K/tp h` -> `B L/sp H/tp h`.

    heads_per_key: k and v have all heads on every device, which takes those of its queries.
    Communication: over gather_axis an all-gather of k, v, their indices and their segment ids.
    """
    heads = q.shape[_HEADS]
    first = 0 if head_axis is None else lax.axis_index(head_axis) * heads
    if heads_per_key is not None:
        own = (first + jnp.arange(heads)) // heads_per_key
        k, v = (jnp.take(y, own, axis=_HEADS) for y in (k, v))
    if gather_axis is not None:
        k, v = (all_gather(y, gather_axis, _LENGTH) for y in (k, v))
        ids = inputs.kv_segment_ids_BT
        inputs = dataclasses.replace(
            inputs,
            kv_index_BT=all_gather(inputs.kv_index_BT, gather_axis, _LENGTH),
            kv_segment_ids_BT=None if ids is None else all_gather(ids, gather_axis, _LENGTH),
        )

    def own_part(y_BHLT: jax.Array | None) -> jax.Array | None:
        if y_BHLT is None:
            return None
        if y_BHLT.shape[1] not in (1, heads):
            y_BHLT = lax.dynamic_slice_in_dim(y_BHLT, first, heads, axis=1)
        if rule.merge_axis is not None and y_BHLT.shape[3] > 1:
            start = lax.axis_index(rule.merge_axis) * k.shape[_LENGTH]
            y_BHLT = lax.dynamic_slice_in_dim(y_BHLT, start, k.shape[_LENGTH], axis=3)
        return y_BHLT

    bias, mask = own_part(inputs.bias_BHLT), own_part(inputs.mask_BHLT)
    inputs = dataclasses.replace(inputs, bias_BHLT=bias, mask_BHLT=mask)
    return form.function(q, k, v, inputs, rule)
