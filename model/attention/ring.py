"""`ring`: attention over rows that are split over devices; keys travel in a ring.

Each device of the sequence axis holds its own tokens of q, k and v. The keys and values of all n
devices pass every device in n steps; a device attends to those that are present while the next ones
are sent. A block engine does the work of a step and skips blocks in which no query sees a key. The
backward pass sends the keys again, so no array of the length of the whole row is kept.
`zigzag_order` balances causal work over the devices. Bias and mask arrays are not supported: they
have a column for every key of the row.

Letters: B batch, L queries, T keys, H query heads, K kv heads, h head dim; n devices in the ring.
Source: Ring Attention (arXiv 2310.01889).
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.ad_checkpoint import checkpoint_name

from model.attention.blockwise import OutputGradients, varying
from model.attention.flash import NATIVE, Engine
from model.attention.mask import AttentionInputs, AttentionSpec, MaskSpec, with_sinks
from model.attention.pallas_flash import KernelOptions, attend, attend_gradients
from model.attention.pallas_kernels import LANES
from model.attention.registry import ALL, RESULT_NAME, AttentionChoice, Capabilities, register
from model.config import LayerType, ModelConfig
from parallel.linear.ring import add_arriving, pcast_varying
from parallel.sharding.axes import QUERY_LENGTH
from parallel.sharding.partition import PartitionManager

# Half of the keys of a step are visible: on the diagonal, and at every step in zigzag order.
_OPTIONS = KernelOptions(visible_share=0.5)
_TPU = Engine(partial(attend, options=_OPTIONS), partial(attend_gradients, options=_OPTIONS))
# min_length: from here a hop takes no longer than the work of a step. At 1024 tokens and four query
# heads per kv head of width 128: 5.8 us on a link of v5p (90 GB/s), 4.7 us at half its peak.
_capabilities = partial(Capabilities, keys="local", min_length=1024, preference=80, blockwise=True)
_FEATURES = ALL - {"bias", "mask", "decode"}


def row_order(
    choices: Mapping[LayerType, AttentionChoice],
    config: ModelConfig,
    manager: PartitionManager,
    length: int,
) -> np.ndarray | None:
    """Return the zigzag order for training rows of `length` tokens; None for the natural order.

    The arguments are those of `wants_zigzag`. Rows also need 2 equal parts per device.
    """
    sp = manager.axis_size(QUERY_LENGTH)
    if length % (2 * sp) or not wants_zigzag(choices, config, manager, length):
        return None
    return zigzag_order(length, sp)


def wants_zigzag(
    choices: Mapping[LayerType, AttentionChoice],
    config: ModelConfig,
    manager: PartitionManager,
    length: int,
) -> bool:
    """Return whether zigzag order balances the attention of training rows.

    choices: the attention operations of all types of layers in training. Zigzag order needs ring
    attention over sp in one of them, and the feature row_order in all. Layers that see a part of
    the row are balanced in natural order, in which their keys take fewer hops: if all rings are of
    such layers, the order is natural.
    """
    if not config.zigzag or manager.axis_size(QUERY_LENGTH) == 1:
        return False
    rings = [
        choice.name == "ring" and config.reach(kind, length) == length
        for kind, choice in choices.items()
    ]
    reorders = ["row_order" in each.backend.capabilities.features for each in choices.values()]
    return any(rings) and all(reorders)


def zigzag_order(length: int, n: int) -> np.ndarray:
    """Return the zigzag order: token i of a row is token `order[i]` of the natural order.

    The row is split into 2 n chunks. Device s holds chunks s and 2 n - 1 - s, an early and a late
    one, so that all devices see equally many keys. Source: Llama 3 (arXiv 2407.21783),
    section 3.3.2.
    Raises: ValueError unless 2 n divides length.
    """
    if length % (2 * n):
        raise ValueError(
            f"rows of {length} tokens do not make 2 x {n} equal chunks for zigzag order; use a "
            f"multiple of {2 * n}, or natural order"
        )
    chunks = np.arange(length, dtype=np.int32).reshape(2 * n, -1)
    return np.stack([chunks[:n], chunks[: n - 1 : -1]], axis=1).reshape(-1)


def key_offsets(spec: AttentionSpec, n: int, *, L: int, T: int) -> tuple[int, ...]:
    """Return the distances in the ring over which some device sees keys, 0 first; static.

    L, T: queries and keys per device. All n distances, unless rows are in natural order and a
    window limits them. A scan includes every distance up to the last.
    """
    if not spec.contiguous:
        return tuple(range(n))
    query, key = np.arange(n)[:, None], np.arange(n)[None]
    q_low = query * L + n * (T - L)
    seen = _any_visible(spec.mask, q_low, q_low + L - 1, key * T, key * T + T - 1)
    far = sorted({0, *((query - key) % n)[seen].tolist()})
    return tuple(range(far[-1] + 1)) if spec.scan else tuple(far)


def _any_visible(mask: MaskSpec, *ranges: np.ndarray) -> np.ndarray:
    """Return the mask's answer as numpy, although this runs inside a trace."""
    with jax.ensure_compile_time_eval():
        return np.asarray(mask.any_visible(*ranges))


@register("ring", capabilities=_capabilities(features=_FEATURES))
def ring_attention(
    q_BLHh: Array,
    k_BTKh: Array,
    v_BTKh: Array,
    inputs: AttentionInputs,
    spec: AttentionSpec,
    engine: Engine = NATIVE,
) -> Array:
    """Return attention over rows split on spec.sequence_axis: q `B L/n H h`, k, v `B T/n K h`.

    Differentiable in q, k, v and sinks; memory is linear in L/n.
    Communication per device: n - 1 collective permutes of k and v forward; backward n - 1 of k and
    v, and n - 1 of dk and dv in float32 (n + 1 in a scan).
    """
    sinks_H, inputs = inputs.sinks_H, replace(inputs, sinks_H=None)
    axes = varying(q_BLHh, k_BTKh, v_BTKh, inputs)
    if spec.sequence_axis is not None:
        axes = tuple({*axes, spec.sequence_axis})
    arrays, inputs = jax.tree.map(
        lambda x: pcast_varying(x, axes), ((q_BLHh, k_BTKh, v_BTKh), inputs)
    )
    out_BLHh, lse_BHL = _ring(engine, spec, arrays, inputs)
    if sinks_H is not None:
        out_BLHh, _ = with_sinks(out_BLHh, lse_BHL, sinks_H.astype(jnp.float32))
    return out_BLHh.astype(q_BLHh.dtype)


_Arrays = tuple[Array, Array, Array]
_Result = tuple[Array, Array]


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _ring(engine: Engine, spec: AttentionSpec, arrays: _Arrays, inputs: AttentionInputs) -> _Result:
    """Return result and logsumexp over the keys of all devices, float32, without sinks."""
    return _forward(engine, spec, arrays, inputs)[0]


def _forward(
    engine: Engine, spec: AttentionSpec, arrays: _Arrays, inputs: AttentionInputs
) -> tuple[_Result, Any]:
    q_BLHh, k_BTKh, v_BTKh = arrays

    def attend_to(keys: "_Keys") -> tuple[_Result, None]:
        return engine.attend(q_BLHh, keys.k, keys.v, keys.beside(inputs), spec), None

    B, L, H, _ = q_BLHh.shape
    nothing = jnp.zeros(q_BLHh.shape, jnp.float32), jnp.full((B, H, L), -jnp.inf, jnp.float32)
    tour = _Tour.of(spec, L, k_BTKh.shape[1])
    own = _Keys(k_BTKh, v_BTKh, inputs.kv_index_BT, inputs.kv_segment_ids_BT)
    result, _ = tour.run(own, attend_to, merge_two, (nothing, None))
    out_BLHh, lse_BHL = checkpoint_name(result, RESULT_NAME)
    return (out_BLHh, lse_BHL), (arrays, inputs, out_BLHh.astype(q_BLHh.dtype), lse_BHL)


def _backward(
    engine: Engine, spec: AttentionSpec, residuals: Any, cotangents: _Result
) -> tuple[_Arrays, None]:
    """Return dq, dk, dv: keys arrive from the farthest to the own, sums of dk, dv with them.

    In this order the last hop of the sums is hidden under the work on the device's own keys.
    """
    arrays, inputs, out_BLHh, lse_BHL = residuals
    q_BLHh, k_BTKh, v_BTKh = arrays
    dout_BLHh, dlse_BHL = cotangents
    delta_BHL = jnp.sum(dout_BLHh * out_BLHh, axis=-1).transpose(0, 2, 1) - dlse_BHL
    output = OutputGradients(lse_BHL, delta_BHL, dout_BLHh.astype(v_BTKh.dtype))

    def derive(keys: "_Keys") -> tuple[Array, _Result]:
        dq, dk, dv = engine.attend_gradients(
            q_BLHh, keys.k, keys.v, keys.beside(inputs), spec, output
        )[:3]
        return dq, (dk, dv)

    dq, dk, dv = (jnp.zeros(x.shape, jnp.float32) for x in arrays)
    tour = _Tour.of(spec, q_BLHh.shape[1], k_BTKh.shape[1]).back()
    own = _Keys(k_BTKh, v_BTKh, inputs.kv_index_BT, inputs.kv_segment_ids_BT)
    dq, (dk, dv) = tour.run(own, derive, add_arriving, (dq, (dk, dv)))
    dq, dk, dv = (g.astype(x.dtype) for g, x in zip((dq, dk, dv), arrays, strict=True))
    return (dq, dk, dv), None


_ring.defvjp(_forward, _backward)


def merge_two(one: _Result, other: _Result) -> _Result:
    """Return (out `B L H h`, lse `B H L`) over both sets of keys, from those over each."""
    lse_BHL = jnp.logaddexp(one[1], other[1])
    safe_BHL = jnp.where(lse_BHL == -jnp.inf, 0.0, lse_BHL)
    out_BLHh, more_BLHh = (
        out * jnp.exp(lse - safe_BHL).transpose(0, 2, 1)[..., None] for out, lse in (one, other)
    )
    return out_BLHh + more_BLHh, lse_BHL


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class _Keys:
    """The keys of a device, with their values, row indices and segments: what is sent."""

    k: Array
    v: Array
    index_BT: Array
    segment_ids_BT: Array | None

    def beside(self, inputs: AttentionInputs) -> AttentionInputs:
        """Return the inputs of a device with these keys in place of its own."""
        return replace(inputs, kv_index_BT=self.index_BT, kv_segment_ids_BT=self.segment_ids_BT)


_Work = Callable[[_Keys], tuple[Any, Any]]
"""(keys) -> (part that this device accumulates, part that travels on with the keys)."""


@dataclass(frozen=True)
class _Tour:
    """The order in which keys visit a device, by the distance to the device that owns them."""

    axis_name: str | None
    offsets: tuple[int, ...]
    scan: bool

    @classmethod
    def of(cls, spec: AttentionSpec, L: int, T: int) -> "_Tour":
        """Return the forward tour: own keys first, then those of the devices before."""
        n = 1 if spec.sequence_axis is None else lax.axis_size(spec.sequence_axis)
        offsets = key_offsets(spec, n, L=L, T=T)
        return cls(spec.sequence_axis, offsets, spec.scan and len(offsets) > 2)

    def back(self) -> "_Tour":
        """Return the backward tour: own keys last, except in a scan.

        In a scan no hop may precede the loop: it would not wait for the loop of the forward pass,
        and XLA:CPU (jax 0.10 to 0.12) confuses hops inside and outside of a loop.
        """
        return self if self.scan else replace(self, offsets=self.offsets[::-1])

    def run(
        self, own: _Keys, work: _Work, fold: Callable[[Any, Any], Any], start: tuple[Any, Any]
    ) -> tuple[Any, Any]:
        """Apply `work` to the keys of every step; fold what stays, add up what travels.

        start: initial values of both parts, which a scan needs.
        """
        if self.scan:
            return self._run_in_scan(own, work, fold, start)
        here = own if self.offsets[0] == 0 else self._shift(own, self.offsets[0])
        stays, goes = None, None
        for step, offset in enumerate(self.offsets):
            ahead, arriving = None, None
            if offset != self.offsets[-1]:
                following = self.offsets[step + 1]
                ahead = own if following == 0 else self._shift(here, following - offset)
            if step > 0:
                arriving = self._shift(goes, offset - self.offsets[step - 1])
            ahead, arriving, (stay, go) = _pinned(ahead, arriving, work(here))
            stays = stay if step == 0 else fold(stays, stay)
            goes = go if step == 0 else jax.tree.map(add_arriving, arriving, go)
            here, stays = _pinned(ahead, stays)
        return stays, goes

    def _run_in_scan(
        self, own: _Keys, work: _Work, fold: Callable[[Any, Any], Any], start: tuple[Any, Any]
    ) -> tuple[Any, Any]:
        """Run as a loop over all steps but the last, then send the travelling part home.

        The program is smaller, but the last hop is exposed and the first one sends zeros.
        """
        assert self.offsets == tuple(range(len(self.offsets)))

        def turn(carry: Any, _: None) -> tuple[Any, None]:
            here, stays, goes = carry
            ahead, arriving = self._shift((here, goes), 1)
            ahead, arriving, (stay, go) = _pinned(ahead, arriving, work(here))
            return (ahead, fold(stays, stay), jax.tree.map(add_arriving, arriving, go)), None

        start = jax.tree.map(lambda x: pcast_varying(x, varying(own)), start)
        (here, stays, goes), _ = lax.scan(turn, (own, *start), length=len(self.offsets) - 1)
        arriving, (stay, go) = _pinned(self._shift(goes, 1), work(here))
        goes = jax.tree.map(add_arriving, arriving, go)
        return fold(stays, stay), self._shift(goes, -self.offsets[-1])

    def _shift(self, x: Any, devices: int) -> Any:
        """Send every leaf of x to the device that comes `devices` later in the ring."""
        assert self.axis_name is not None
        n = lax.axis_size(self.axis_name)
        pairs = [(j, (j + devices) % n) for j in range(n)]
        return jax.tree.map(lambda leaf: lax.ppermute(leaf, self.axis_name, pairs), x)


def _pinned(*now: Any) -> Any:
    """Make all values wait for each other: arriving keys and the finished work of this step.

    Without it libtpu sends all keys first and computes afterwards, so that nothing overlaps and the
    keys and results of all devices are held at once.
    """
    return lax.optimization_barrier(now)


ring_by_kernels = partial(ring_attention, engine=_TPU)
register(
    "ring",
    backend="tpu",
    capabilities=_capabilities(
        features=_FEATURES - {"block_mask", "dropout"},
        length_multiple=LANES,
        head_dim_multiple=LANES,
        check_vma=False,
    ),
)(ring_by_kernels)
