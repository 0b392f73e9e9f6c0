"""`ring`: attention over rows that are split over devices; keys and values travel, queries stay.

Each device of the sequence axis holds its own rows of q, k and v. In n stops the keys of all
devices pass every device, which attends to what is there while the next keys are on their way; a
block engine does the work of a stop, and skips what nobody sees. In the backward pass the keys
travel again, so nothing of the size of the whole row is ever kept. `zigzag_order` is the order of
rows in which causal work is even over the devices. It refuses bias and explicit masks, which have a
column for every key. Letters: B batch, L queries, T keys, H query heads, K kv heads, h head dim; n
devices on the ring, s this one. Source: Ring Attention (arXiv 2310.01889).
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from model.attention.blockwise import varying
from model.attention.flash import NATIVE, Engine
from model.attention.operation import RESULT_NAME, Capabilities, Feature, OperationRegistry
from model.attention.pallas_kernels import LANES
from model.attention.pallas_tpu import attend, attend_gradients
from model.attention.scores import Pattern, ScoreInputs, ScoreRule, with_sinks
from parallel.linear.ring import add_arriving, pcast_varying

# Rows per device from which a hop takes no longer than the work of a stop: at 1024 rows and four
# query heads per kv head of width 128, 5.8 us on a link of v5p (90 GB/s), 4.7 us at half its peak.
_LEAST_LENGTH = 1024

# Half of the keys of a stop are visible: on the diagonal, and at every stop in zigzag order.
_TPU = Engine(
    partial(attend, visible_share=0.5),
    partial(attend_gradients, visible_share=0.5),
)


def zigzag_order(length: int, n: int) -> np.ndarray:
    """Where the rows come from: row i of the new order is row `order[i]` of the natural one.

    Cut into 2 n chunks, device s of n holds chunks s and 2 n - 1 - s: an early and a late one, so
    that all devices see equally many keys. Source: Llama 3 (arXiv 2407.21783), section 3.3.2.
    Raises: ValueError unless 2 n divides length.
    """
    if length % (2 * n):
        raise ValueError(
            f"rows of {length} tokens do not make 2 x {n} equal chunks for zigzag order; use a "
            f"multiple of {2 * n}, or natural order"
        )
    chunks = np.arange(length, dtype=np.int32).reshape(2 * n, -1)
    return np.stack([chunks[:n], chunks[: n - 1 : -1]], axis=1).reshape(-1)


def zigzag_inverse(length: int, n: int) -> np.ndarray:
    """Where the rows went: row i of the natural order is row `inverse[i]` of the zigzag one."""
    return np.argsort(zigzag_order(length, n)).astype(np.int32)


def key_offsets(rule: ScoreRule, n: int, *, L: int, T: int) -> tuple[int, ...]:
    """How many devices back the keys lie that any device has to see, 0 first; static.

    L, T: rows of queries and of keys on one device. All n of them, unless rows lie in their natural
    order and window or chunk end the sight. A scan turns step by step, so it stops at every one
    before the last.
    """
    if not rule.contiguous:
        return tuple(range(n))
    query, key = np.arange(n)[:, None], np.arange(n)[None]
    q_low = query * L + n * (T - L)
    seen = _any_visible(rule.pattern, q_low, q_low + L - 1, key * T, key * T + T - 1)
    far = sorted({0, *((query - key) % n)[seen].tolist()})
    return tuple(range(far[-1] + 1)) if rule.scan else tuple(far)


def _any_visible(pattern: Pattern, *ranges: np.ndarray) -> np.ndarray:
    """The pattern's answer as numbers, though this runs inside a trace."""
    with jax.ensure_compile_time_eval():
        return np.asarray(pattern.any_visible(*ranges))


def ring_attention(
    q_BLHh: jax.Array,
    k_BTKh: jax.Array,
    v_BTKh: jax.Array,
    inputs: ScoreInputs,
    rule: ScoreRule,
    engine: Engine = NATIVE,
) -> jax.Array:
    """Attention over rows split on rule.sequence_axis: q `B L/n H h`, k, v `B T/n K h` -> as q.

    Differentiable by q, k, v and sinks; memory linear in L/n. Communication per device: n - 1 hops
    of k and v forward; backward n - 1 of k and v, and n - 1 of dk and dv in float32 (in a scan
    n + 1).
    """
    sinks_H, inputs = inputs.sinks_H, replace(inputs, sinks_H=None)
    axes = varying(q_BLHh, k_BTKh, v_BTKh, inputs)
    if rule.sequence_axis is not None:
        axes = tuple({*axes, rule.sequence_axis})
    arrays, inputs = jax.tree.map(
        lambda x: pcast_varying(x, axes), ((q_BLHh, k_BTKh, v_BTKh), inputs)
    )
    out_BLHh, lse_BHL = _ring(engine, rule, arrays, inputs)
    if sinks_H is not None:
        out_BLHh, _ = with_sinks(out_BLHh, lse_BHL, sinks_H.astype(jnp.float32))
    return out_BLHh.astype(q_BLHh.dtype)


_Arrays = tuple[jax.Array, jax.Array, jax.Array]
_Result = tuple[jax.Array, jax.Array]


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _ring(engine: Engine, rule: ScoreRule, arrays: _Arrays, inputs: ScoreInputs) -> _Result:
    """Result and logsumexp over the keys of all devices, float32, without sinks."""
    return _forward(engine, rule, arrays, inputs)[0]


def _forward(
    engine: Engine, rule: ScoreRule, arrays: _Arrays, inputs: ScoreInputs
) -> tuple[_Result, Any]:
    q_BLHh, k_BTKh, v_BTKh = arrays

    def attend_to(keys: "_Keys") -> tuple[_Result, None]:
        return engine.attend(q_BLHh, keys.k, keys.v, keys.beside(inputs), rule), None

    B, L, H, _ = q_BLHh.shape
    nothing = jnp.zeros(q_BLHh.shape, jnp.float32), jnp.full((B, H, L), -jnp.inf, jnp.float32)
    tour = _Tour.of(rule, L, k_BTKh.shape[1])
    own = _Keys(k_BTKh, v_BTKh, inputs.kv_index_BT, inputs.kv_segment_ids_BT)
    result, _ = tour.run(own, attend_to, merge_two, (nothing, None))
    out_BLHh, lse_BHL = checkpoint_name(result, RESULT_NAME)
    return (out_BLHh, lse_BHL), (arrays, inputs, out_BLHh.astype(q_BLHh.dtype), lse_BHL)


def _backward(
    engine: Engine, rule: ScoreRule, residuals: Any, cotangents: _Result
) -> tuple[_Arrays, None]:
    """The keys come back from the farthest to a device's own; sums of dk and dv come with them.

    So the last hop of the sums, which nothing later could hide, travels under the own keys' work.
    """
    arrays, inputs, out_BLHh, lse_BHL = residuals
    q_BLHh, k_BTKh, v_BTKh = arrays
    dout_BLHh, dlse_BHL = cotangents
    delta_BHL = jnp.sum(dout_BLHh * out_BLHh, axis=-1).transpose(0, 2, 1) - dlse_BHL
    dout_BLHh = dout_BLHh.astype(v_BTKh.dtype)

    def derive(keys: "_Keys") -> tuple[jax.Array, _Result]:
        dq, dk, dv = engine.attend_gradients(
            q_BLHh,
            keys.k,
            keys.v,
            keys.beside(inputs),
            rule,
            lse_BHL=lse_BHL,
            delta_BHL=delta_BHL,
            dout_BLHh=dout_BLHh,
        )[:3]
        return dq, (dk, dv)

    dq, dk, dv = (jnp.zeros(x.shape, jnp.float32) for x in arrays)
    tour = _Tour.of(rule, q_BLHh.shape[1], k_BTKh.shape[1]).back()
    own = _Keys(k_BTKh, v_BTKh, inputs.kv_index_BT, inputs.kv_segment_ids_BT)
    dq, (dk, dv) = tour.run(own, derive, add_arriving, (dq, (dk, dv)))
    dq, dk, dv = (g.astype(x.dtype) for g, x in zip((dq, dk, dv), arrays, strict=True))
    return (dq, dk, dv), None


_ring.defvjp(_forward, _backward)


def merge_two(one: _Result, other: _Result) -> _Result:
    """(out `B L H h`, lse `B H L`) over both sets of keys, from those over each."""
    lse_BHL = jnp.logaddexp(one[1], other[1])
    safe_BHL = jnp.where(lse_BHL == -jnp.inf, 0.0, lse_BHL)
    out_BLHh, more_BLHh = (
        out * jnp.exp(lse - safe_BHL).transpose(0, 2, 1)[..., None] for out, lse in (one, other)
    )
    return out_BLHh + more_BLHh, lse_BHL


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class _Keys:
    """What travels: the keys of a device, their values, indices and segments."""

    k: jax.Array
    v: jax.Array
    index_BT: jax.Array
    segment_ids_BT: jax.Array | None

    def beside(self, inputs: ScoreInputs) -> ScoreInputs:
        """The inputs of a device with these keys in place of its own."""
        return replace(inputs, kv_index_BT=self.index_BT, kv_segment_ids_BT=self.segment_ids_BT)


_Work = Callable[[_Keys], tuple[Any, Any]]
"""From the keys that are here to what stays here and what goes on with them."""


@dataclass(frozen=True)
class _Tour:
    """The order in which keys visit a device, by how many devices back their own one lies."""

    axis_name: str | None
    offsets: tuple[int, ...]
    scan: bool

    @classmethod
    def of(cls, rule: ScoreRule, L: int, T: int) -> "_Tour":
        """Own keys first, then those of the devices before, step by step."""
        n = 1 if rule.sequence_axis is None else lax.axis_size(rule.sequence_axis)
        offsets = key_offsets(rule, n, L=L, T=T)
        return cls(rule.sequence_axis, offsets, rule.scan and len(offsets) > 2)

    def back(self) -> "_Tour":
        """The same stops for keys with sums: own keys last, but in a scan.

        There no hop may stand before the loop: nothing would make it wait for the loop of the
        forward pass, and XLA:CPU (jax 0.10 to 0.12) mixes up hops inside and outside of a loop.
        """
        return self if self.scan else replace(self, offsets=self.offsets[::-1])

    def run(
        self, own: _Keys, work: _Work, fold: Callable[[Any, Any], Any], start: tuple[Any, Any]
    ) -> tuple[Any, Any]:
        """Works on the keys of every stop; what stays is folded, what goes is added on its way.

        start: what stays and goes when nothing was done yet; needed by a scan.
        """
        if self.scan:
            return self._run_in_scan(own, work, fold, start)
        here = own if self.offsets[0] == 0 else self._shift(own, self.offsets[0])
        stays, goes = None, None
        for stop, offset in enumerate(self.offsets):
            ahead, arriving = None, None
            if offset != self.offsets[-1]:
                following = self.offsets[stop + 1]
                ahead = own if following == 0 else self._shift(here, following - offset)
            if stop > 0:
                arriving = self._shift(goes, offset - self.offsets[stop - 1])
            ahead, arriving, (stay, go) = _pinned(ahead, arriving, work(here))
            stays = stay if stop == 0 else fold(stays, stay)
            goes = go if stop == 0 else jax.tree.map(add_arriving, arriving, go)
            here, stays = _pinned(ahead, stays)
        return stays, goes

    def _run_in_scan(
        self, own: _Keys, work: _Work, fold: Callable[[Any, Any], Any], start: tuple[Any, Any]
    ) -> tuple[Any, Any]:
        """`run` as a loop over all stops but the last; what goes is sent home after that.

        A small program, but that hop is exposed, and the loop begins with one of zeros.
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
        """Every leaf of x to the device that comes so many later on the ring."""
        assert self.axis_name is not None
        n = lax.axis_size(self.axis_name)
        pairs = [(j, (j + devices) % n) for j in range(n)]
        return jax.tree.map(lambda leaf: lax.ppermute(leaf, self.axis_name, pairs), x)


def _pinned(*now: Any) -> Any:
    """What is on its way may be used only when the work of this stop is done and folded.

    Without it libtpu sends everything first and computes while nothing travels, and folds at the
    end: the keys, and the results, of all devices would be here at once.
    """
    return lax.optimization_barrier(now)


_NATIVE_FEATURES: frozenset[Feature] = frozenset(
    {
        "bidirectional",
        "segment_ids",
        "window",
        "chunk",
        "prefix",
        "block_mask",
        "soft_cap",
        "sinks",
        "gqa",
        "dropout",
        "row_order",
        "sequence_parallel",
    }
)


@OperationRegistry.register(
    "ring",
    capabilities=Capabilities(features=_NATIVE_FEATURES, keys="own", least_length=_LEAST_LENGTH),
)
def ring(
    q_BLHh: jax.Array,
    k_BTKh: jax.Array,
    v_BTKh: jax.Array,
    inputs: ScoreInputs,
    rule: ScoreRule,
) -> jax.Array:
    """`ring_attention` by the blocks that run anywhere."""
    return ring_attention(q_BLHh, k_BTKh, v_BTKh, inputs, rule)


@OperationRegistry.register(
    "ring",
    form="tpu",
    capabilities=Capabilities(
        features=_NATIVE_FEATURES - {"block_mask", "dropout"},
        keys="own",
        least_length=_LEAST_LENGTH,
        length_multiple=LANES,
        head_dim_multiple=LANES,
        types_varying=False,
    ),
)
def ring_by_kernels(
    q_BLHh: jax.Array,
    k_BTKh: jax.Array,
    v_BTKh: jax.Array,
    inputs: ScoreInputs,
    rule: ScoreRule,
) -> jax.Array:
    """`ring_attention` by the Pallas kernels."""
    return ring_attention(q_BLHh, k_BTKh, v_BTKh, inputs, rule, _TPU)
