"""Attention in blocks on TPU: Pallas kernels over rows in any order, told by their indices.

`attend` gives the result over these keys alone and its logsumexp, `attend_gradients` the
derivatives through them: flash attention is one call, ring attention one per block of keys. Pairs
of blocks in which nothing is seen are not in the grid: no step, no fetch; only pairs that are seen
in part are masked. No buffer is as large as L x T. Refuses rows that are no multiple of 128, bias,
explicit masks, block masks and dropout.

Letters: B batch, L queries, T keys, H query heads, K kv heads, G = H / K, h head dim.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from model.attention.pallas_kernels import (
    LANES,
    LOG2E,
    ScoreLaw,
    forward_kernel,
    key_gradients_kernel,
    query_gradient_kernel,
    step_at,
)
from model.attention.pallas_steps import NOTHING, Steps, Visibility, row_facts, steps_of
from model.attention.scores import ScoreInputs, ScoreRule

# A pair of 512 x 1024 rows (v5p, heads of 128) is 2284 instructions forward and 4685 backward by
# libtpu 0.0.42.1, November 2026; its matmuls take 2048 and 5120 cycles at peak. Larger blocks gain
# nothing and skip less.
_MAX_BLOCK_Q, _MAX_BLOCK_K = 512, 1024
# Chips with at least 64 MiB of VMEM per core, by jax's device_kind; TPU v4 has 16 (jax 0.10.2,
# pallas.tpu.get_tpu_info). dq of up to 16 MiB, twice because an output has two buffers, and the 7
# that a step needs fit into 48 MiB, which leave 16 to XLA.
_LARGE_VMEM = frozenset({"TPU v5 lite", "TPU v5", "TPU v6 lite", "TPU7x"})
_MAX_DQ_BYTES, _VMEM_BYTES = 16 << 20, 48 << 20


def attend(
    q_BLHh: jax.Array,
    k_BTKh: jax.Array,
    v_BTKh: jax.Array,
    inputs: ScoreInputs,
    rule: ScoreRule,
    *,
    interpret: Any = False,
    visible_share: float = 1.0,
) -> tuple[jax.Array, jax.Array]:
    """Attention over these keys alone, without sinks: out `B L H h`, logsumexp `B H L`, float32.

    A query that sees nothing gets zeros and -inf. visible_share: of L x T, told to schedulers.
    interpret: as pallas_call's, to run anywhere, slowly.
    Source: FlashAttention-2 (arXiv 2307.08691), algorithm 1.
    Raises: ValueError for rows or blocks that are no multiple of 128.
    """
    job = _Job.of(q_BLHh, k_BTKh, inputs, rule, interpret=interpret, visible_share=visible_share)
    facts = row_facts(inputs, rule.pattern)
    steps = steps_of(job.kinds(*facts))
    query, key = job.places_by_query(steps.stride)
    B, H, L, h = job.B, job.H, job.L, job.h
    out_BHLh, lse_BH1L = job.launch(
        "flash_forward",
        forward_kernel,
        steps,
        grid=(B, H, steps.count),
        inputs=[
            (facts[0], query.facts(3)),
            (facts[1], key.facts(2)),
            (_heads_first(q_BLHh), query.rows(h)),
            (_heads_first(k_BTKh), key.rows(h)),
            (_heads_first(v_BTKh), key.rows(h)),
        ],
        outputs=[((B, H, L, h), query.rows(h)), ((B, H, 1, L), query.stats())],
        scratch=[
            pltpu.VMEM((3, job.block_q, LANES), jnp.int32),
            pltpu.VMEM((job.block_q, LANES), jnp.float32),
            pltpu.VMEM((job.block_q, LANES), jnp.float32),
        ],
        matmuls=2,
    )
    return _heads_first(out_BHLh), lse_BH1L[:, :, 0]


def attend_gradients(
    q_BLHh: jax.Array,
    k_BTKh: jax.Array,
    v_BTKh: jax.Array,
    inputs: ScoreInputs,
    rule: ScoreRule,
    *,
    lse_BHL: jax.Array,
    delta_BHL: jax.Array,
    dout_BLHh: jax.Array,
    interpret: Any = False,
    visible_share: float = 1.0,
    dq_stays: bool | None = None,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Derivatives of q, k and v through these keys, float32, in their shapes.

    lse: over all keys of all blocks, and the sinks. delta: the sum over h of dout * out of the
    whole result. dout enters matmuls in v's dtype. dq_stays: dq of all queries of a kv head stays
    in VMEM, and one kernel with 5 matmuls does the work of two with 7; None: if the chip that the
    mesh names has room. Source: arXiv 2307.08691, algorithm 2.
    Raises: ValueError for rows or blocks that are no multiple of 128.
    """
    job = _Job.of(q_BLHh, k_BTKh, inputs, rule, interpret=interpret, visible_share=visible_share)
    facts = row_facts(inputs, rule.pattern)
    kinds_BQK = job.kinds(*facts)
    # A query without keys has no weight to derive: any finite norm will do.
    lse_BHL = jnp.where(jnp.isneginf(lse_BHL), 0.0, lse_BHL * LOG2E)
    arrays = (
        *facts,
        *(_heads_first(x) for x in (q_BLHh, k_BTKh, v_BTKh, dout_BLHh.astype(v_BTKh.dtype))),
        lse_BHL[:, :, None],
        delta_BHL.astype(jnp.float32)[:, :, None],
    )
    by_key = steps_of(kinds_BQK.transpose(0, 2, 1))
    if job.has_room_for_dq() if dq_stays is None else dq_stays:
        dk_BKTh, dv_BKTh, dq_BHLh = _key_gradients(job, arrays, by_key, dq_stays=True)
    else:
        dk_BKTh, dv_BKTh = _key_gradients(job, arrays, by_key, dq_stays=False)
        dq_BHLh = _query_gradient(job, arrays, steps_of(kinds_BQK))
    return _heads_first(dq_BHLh), _heads_first(dk_BKTh), _heads_first(dv_BKTh)


def _query_gradient(job: "_Job", arrays: Sequence[jax.Array], steps: Steps) -> jax.Array:
    query, key = job.places_by_query(steps.stride)
    (dq_BHLh,) = job.launch(
        "flash_dq",
        query_gradient_kernel,
        steps,
        grid=(job.B, job.H, steps.count),
        inputs=list(zip(arrays, job.gradient_specs(query, key), strict=True)),
        outputs=[((job.B, job.H, job.L, job.h), query.rows(job.h))],
        scratch=[
            pltpu.VMEM((3, job.block_q, LANES), jnp.int32),
            pltpu.VMEM((2, job.block_q, LANES), jnp.float32),
        ],
        matmuls=3,
    )
    return dq_BHLh


def _key_gradients(
    job: "_Job", arrays: Sequence[jax.Array], steps: Steps, *, dq_stays: bool
) -> Sequence[jax.Array]:
    """dk and dv `B K T h`, summed over the query heads of a kv head; if it stays, dq `B H L h`."""
    query, key = job.places_by_key(steps.stride)
    shape, G = (job.B, job.K, job.T, job.h), job.H // job.K
    outputs = [(shape, key.rows(job.h)), (shape, key.rows(job.h))]
    if dq_stays:
        all_rows = pl.BlockSpec((None, G, job.L, job.h), lambda b, head, *_: (b, head, 0, 0))
        outputs.append(((job.B, job.H, job.L, job.h), all_rows))
    return job.launch(
        "flash_dkv_dq" if dq_stays else "flash_dkv",
        key_gradients_kernel,
        steps,
        grid=(job.B, job.K, steps.count, G),
        inputs=list(zip(arrays, job.gradient_specs(query, key), strict=True)),
        outputs=outputs,
        scratch=[pltpu.VMEM((2, job.block_k, LANES), jnp.int32)],
        matmuls=5 if dq_stays else 4,
        vmem_bytes=_VMEM_BYTES if dq_stays else None,
    )


def _heads_first(x_BLHh: jax.Array) -> jax.Array:
    """`B L H h -> B H L h`, and back."""
    return x_BLHh.transpose(0, 2, 1, 3)


@dataclass(frozen=True)
class _Place:
    """Where a step finds its block among the rows of queries, or of keys.

    at: from grid indices and steps to (row of the batch, head, block). shared: one set of facts
    for the whole batch.
    """

    at: Callable[..., tuple[Any, Any, Any]]
    size: int
    shared: bool

    def rows(self, h: int) -> pl.BlockSpec:
        """Of an array `B H L h`."""
        return pl.BlockSpec((None, None, self.size, h), lambda *grid: (*self.at(*grid), 0))

    def stats(self) -> pl.BlockSpec:
        """Of an array `B H 1 L`."""

        def where(*grid: Any) -> tuple[Any, ...]:
            b, head, block = self.at(*grid)
            return b, head, 0, block

        return pl.BlockSpec((None, None, 1, self.size), where)

    def facts(self, num: int) -> pl.BlockSpec:
        """Of an array `B num L`, or `1 num L`."""

        def where(*grid: Any) -> tuple[Any, ...]:
            b, _, block = self.at(*grid)
            return 0 if self.shared else b, 0, block

        return pl.BlockSpec((None, num, self.size), where)


@dataclass(frozen=True, kw_only=True)
class _Job:
    """Shapes, blocks and law of one call; static."""

    B: int
    L: int
    T: int
    H: int
    K: int
    h: int
    block_q: int
    block_k: int
    law: ScoreLaw
    visible_share: float
    interpret: Any

    @classmethod
    def of(
        cls,
        q_BLHh: jax.Array,
        k_BTKh: jax.Array,
        inputs: ScoreInputs,
        rule: ScoreRule,
        **how: Any,
    ) -> "_Job":
        assert inputs.bias_BHLT is None and inputs.mask_BHLT is None and not rule.dropout
        (B, L, H, h), (T, K) = q_BLHh.shape, k_BTKh.shape[1:3]
        law = ScoreLaw(
            scale=rule.scale,
            soft_cap=rule.soft_cap,
            visibility=Visibility.of(inputs, rule.pattern),
        )
        block_q = _block("block_q", rule.block_q, L, _MAX_BLOCK_Q)
        block_k = _block("block_k", rule.block_k, T, _MAX_BLOCK_K)
        return cls(B=B, L=L, T=T, H=H, K=K, h=h, block_q=block_q, block_k=block_k, law=law, **how)

    def kinds(self, query_facts_B3L: jax.Array, key_facts_B2T: jax.Array) -> jax.Array:
        """How much of every pair of blocks is seen: queries by keys."""
        queries = query_facts_B3L.reshape(-1, 3, self.L // self.block_q, self.block_q)
        keys = key_facts_B2T.reshape(-1, 2, self.T // self.block_k, self.block_k)
        return self.law.visibility.kinds(queries, keys)

    def places_by_query(self, stride: int) -> tuple[_Place, _Place]:
        """Of queries and keys, on a grid B, H, steps."""

        def query(b: Any, head: Any, index: Any, words: Any) -> tuple[Any, Any, Any]:
            return b, head, step_at(words, stride, b, index).outer

        def key(b: Any, head: Any, index: Any, words: Any) -> tuple[Any, Any, Any]:
            return b, lax.div(head, self.H // self.K), step_at(words, stride, b, index).inner

        return _Place(query, self.block_q, not stride), _Place(key, self.block_k, not stride)

    def places_by_key(self, stride: int) -> tuple[_Place, _Place]:
        """Of queries and keys, on a grid B, K, steps, G."""
        G = self.H // self.K

        def query(b: Any, head: Any, index: Any, g: Any, words: Any) -> tuple[Any, Any, Any]:
            step = step_at(words, stride, b, index)
            # A step that does nothing stays at the last head, which is here already.
            return b, head * G + jnp.where(step.kind == NOTHING, G - 1, g), step.inner

        def key(b: Any, head: Any, index: Any, _: Any, words: Any) -> tuple[Any, Any, Any]:
            return b, head, step_at(words, stride, b, index).outer

        return _Place(query, self.block_q, not stride), _Place(key, self.block_k, not stride)

    def has_room_for_dq(self) -> bool:
        """Whether dq of the queries of one kv head can stay in VMEM; False on an unknown chip."""
        device = jax.sharding.get_abstract_mesh().abstract_device
        lanes = -(-self.h // LANES) * LANES
        size = self.H // self.K * self.L * lanes * 4
        return device is not None and device.device_kind in _LARGE_VMEM and size <= _MAX_DQ_BYTES

    def gradient_specs(self, query: _Place, key: _Place) -> list[pl.BlockSpec]:
        """Of the arrays that gradients are made of, in their order."""
        rows = [query.rows(self.h), key.rows(self.h), key.rows(self.h), query.rows(self.h)]
        return [query.facts(3), key.facts(2), *rows, query.stats(), query.stats()]

    def launch(
        self,
        name: str,
        kernel: Callable[..., None],
        steps: Steps,
        *,
        grid: tuple[Any, ...],
        inputs: Sequence[tuple[jax.Array, pl.BlockSpec]],
        outputs: Sequence[tuple[tuple[int, ...], pl.BlockSpec]],
        scratch: Sequence[Any],
        matmuls: int,
        vmem_bytes: int | None = None,
    ) -> Sequence[jax.Array]:
        """Runs a kernel over a grid whose third dim are the steps; all outputs are float32."""
        shapes = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape, _ in outputs]
        arrays = [array for array, _ in inputs]
        scores = self.B * self.H * self.L * self.T * self.visible_share
        inner: list[Any] = ["arbitrary"] * (len(grid) - 2)
        return pl.pallas_call(
            partial(kernel, law=self.law, stride=steps.stride),
            out_shape=shapes,
            grid_spec=pltpu.PrefetchScalarGridSpec(
                num_scalar_prefetch=1,
                grid=grid,
                in_specs=[spec for _, spec in inputs],
                out_specs=[spec for _, spec in outputs],
                scratch_shapes=scratch,
            ),
            compiler_params=pltpu.CompilerParams(
                dimension_semantics=("parallel", "parallel", *inner), vmem_limit_bytes=vmem_bytes
            ),
            cost_estimate=pl.CostEstimate(
                flops=round(2 * matmuls * self.h * scores),
                transcendentals=round(scores * (1 if self.law.soft_cap is None else 2)),
                bytes_accessed=sum(math.prod(x.shape) * x.dtype.itemsize for x in arrays + shapes),
            ),
            interpret=self.interpret,
            name=name,
        )(steps.words, *arrays)


def _block(name: str, asked: int | None, length: int, largest: int) -> int:
    """Rows of a block: as asked, or the largest that divides. Raises: ValueError if none does."""
    if length % LANES:
        raise ValueError(
            f"attention on TPU over {length} rows per device: they must be a multiple of {LANES}; "
            "pad them, or use another operation"
        )
    if asked is None:
        sizes = range(min(largest, length), 0, -LANES)
        return next(size for size in sizes if length % size == 0)
    size = min(asked, length)
    if size % LANES or length % size:
        raise ValueError(
            f"attention {name}={asked} over {length} rows per device: it must divide them and be a "
            f"multiple of {LANES}; leave it out"
        )
    return size
