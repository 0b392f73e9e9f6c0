"""Attention in blocks on TPU: Pallas kernels for rows in any order.

`attend` returns the result over the given keys and its logsumexp, `attend_gradients` the
derivatives through them. Flash attention is one call of each, ring attention one per hop. The grid
holds only pairs of blocks in which a query sees a key, found from row indices; only partially
visible pairs are masked. No buffer has the size L x T. Rows must be a multiple of 128 tokens; bias,
mask arrays, block masks and dropout are not supported.

Letters: B batch, L queries, T keys, H query heads, K kv heads, G = H / K, h head dim.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from model.attention.blockwise import OutputGradients
from model.attention.mask import AttentionInputs, AttentionSpec
from model.attention.pallas_kernels import (
    HIDDEN,
    LANES,
    LOG2E,
    ScoreSettings,
    Steps,
    Visibility,
    forward_kernel,
    key_gradients_kernel,
    query_gradient_kernel,
    row_facts,
    step_at,
    steps_of,
)

# A pair of 512 x 1024 tokens (v5p, heads of 128) has 2284 instructions forward and 4685 backward
# with libtpu 0.0.42.1, November 2026; its matmuls take 2048 and 5120 cycles at peak. Larger blocks
# are not faster and skip less.
MAX_BLOCK_Q, MAX_BLOCK_K = 512, 1024
# Chips with at least 64 MiB of VMEM per core, by jax's device_kind; TPU v4 has 16 (jax 0.10.2,
# pallas.tpu.get_tpu_info). dq of up to 16 MiB, doubled because an output has two buffers, and 7 MiB
# for a step fit into 48 MiB, which leaves 16 MiB to XLA.
_LARGE_VMEM = frozenset({"TPU v5 lite", "TPU v5", "TPU v6 lite", "TPU7x"})
_MAX_DQ_BYTES, _VMEM_BYTES = 16 << 20, 48 << 20


def dq_fits(group: int, length: int, head_dim: int) -> bool:
    """Return whether dq of a kv head's queries fits in the VMEM of chips other than v4.

    group: Query heads per kv head.
    """
    lanes = -(-head_dim // LANES) * LANES
    return 4 * group * length * lanes <= _MAX_DQ_BYTES


@dataclass(frozen=True, kw_only=True)
class KernelOptions:
    """Settings of the kernels.

    visible_share: visible fraction of L x T, for XLA's cost estimate. interpret: as in pallas_call,
    to run on any platform, slowly. dq_stays: in the backward pass, dq of all queries of a kv head
    stays in VMEM, and one kernel with 5 matmuls replaces two with 7; None: if the mesh's chip has
    room.
    """

    visible_share: float = 1.0
    interpret: Any = False
    dq_stays: bool | None = None


_DEFAULT_OPTIONS = KernelOptions()


def attend(
    q_BLHh: Array,
    k_BTKh: Array,
    v_BTKh: Array,
    inputs: AttentionInputs,
    spec: AttentionSpec,
    options: KernelOptions = _DEFAULT_OPTIONS,
) -> tuple[Array, Array]:
    """Return attention over these keys without sinks: (out `B L H h`, lse `B H L`), float32.

    A query that sees nothing gets out 0 and lse -inf.
    Source: FlashAttention-2 (arXiv 2307.08691), algorithm 1.
    Raises: ValueError for rows or blocks that are no multiple of 128.
    """
    call = _Call.of(q_BLHh, k_BTKh, inputs, spec, options)
    facts = row_facts(inputs, spec.mask)
    steps = steps_of(call.kinds(*facts))
    query, key = call.specs_by_query(steps.stride)
    B, H, L, h = call.B, call.H, call.L, call.h
    out_BHLh, lse_BH1L = call.launch(
        _Kernel(
            name="flash_forward",
            body=forward_kernel,
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
                pltpu.VMEM((3, call.block_q, LANES), jnp.int32),
                pltpu.VMEM((call.block_q, LANES), jnp.float32),
                pltpu.VMEM((call.block_q, LANES), jnp.float32),
            ],
            matmuls=2,
        ),
        steps,
    )
    return _heads_first(out_BHLh), lse_BH1L[:, :, 0]


def attend_gradients(
    q_BLHh: Array,
    k_BTKh: Array,
    v_BTKh: Array,
    inputs: AttentionInputs,
    spec: AttentionSpec,
    output: OutputGradients,
    options: KernelOptions = _DEFAULT_OPTIONS,
) -> tuple[Array, Array, Array]:
    """Return the derivatives of q, k and v through these keys, float32.

    dout enters matmuls in v's dtype. Source: arXiv 2307.08691, algorithm 2.
    Raises: ValueError for rows or blocks that are no multiple of 128.
    """
    call = _Call.of(q_BLHh, k_BTKh, inputs, spec, options)
    lse_BHL, delta_BHL, dout_BLHh = output
    facts = row_facts(inputs, spec.mask)
    kinds_BQK = call.kinds(*facts)
    # A query that sees nothing has no weight to derive, so any finite norm is correct.
    lse_BHL = jnp.where(jnp.isneginf(lse_BHL), 0.0, lse_BHL * LOG2E)
    arrays = (
        *facts,
        *(_heads_first(x) for x in (q_BLHh, k_BTKh, v_BTKh, dout_BLHh.astype(v_BTKh.dtype))),
        lse_BHL[:, :, None],
        delta_BHL.astype(jnp.float32)[:, :, None],
    )
    by_key = steps_of(kinds_BQK.transpose(0, 2, 1))
    if call.has_room_for_dq() if options.dq_stays is None else options.dq_stays:
        dk_BKTh, dv_BKTh, dq_BHLh = _key_gradients(call, arrays, by_key, dq_stays=True)
    else:
        dk_BKTh, dv_BKTh = _key_gradients(call, arrays, by_key, dq_stays=False)
        dq_BHLh = _query_gradient(call, arrays, steps_of(kinds_BQK))
    return _heads_first(dq_BHLh), _heads_first(dk_BKTh), _heads_first(dv_BKTh)


def _query_gradient(call: "_Call", arrays: Sequence[Array], steps: Steps) -> Array:
    query, key = call.specs_by_query(steps.stride)
    (dq_BHLh,) = call.launch(
        _Kernel(
            name="flash_dq",
            body=query_gradient_kernel,
            grid=(call.B, call.H, steps.count),
            inputs=list(zip(arrays, call.gradient_specs(query, key), strict=True)),
            outputs=[((call.B, call.H, call.L, call.h), query.rows(call.h))],
            scratch=[
                pltpu.VMEM((3, call.block_q, LANES), jnp.int32),
                pltpu.VMEM((2, call.block_q, LANES), jnp.float32),
            ],
            matmuls=3,
        ),
        steps,
    )
    return dq_BHLh


def _key_gradients(
    call: "_Call", arrays: Sequence[Array], steps: Steps, *, dq_stays: bool
) -> Sequence[Array]:
    """Return dk and dv `B K T h`, summed over the query heads of a kv head, and dq if it stays."""
    query, key = call.specs_by_key(steps.stride)
    shape, G = (call.B, call.K, call.T, call.h), call.H // call.K
    outputs = [(shape, key.rows(call.h)), (shape, key.rows(call.h))]
    if dq_stays:
        all_rows = pl.BlockSpec((None, G, call.L, call.h), lambda b, head, *_: (b, head, 0, 0))
        outputs.append(((call.B, call.H, call.L, call.h), all_rows))
    return call.launch(
        _Kernel(
            name="flash_dkv_dq" if dq_stays else "flash_dkv",
            body=key_gradients_kernel,
            grid=(call.B, call.K, steps.count, G),
            inputs=list(zip(arrays, call.gradient_specs(query, key), strict=True)),
            outputs=outputs,
            scratch=[pltpu.VMEM((2, call.block_k, LANES), jnp.int32)],
            matmuls=5 if dq_stays else 4,
            vmem_bytes=_VMEM_BYTES if dq_stays else None,
        ),
        steps,
    )


def _heads_first(x_BLHh: Array) -> Array:
    """`B L H h -> B H L h`, and back."""
    return x_BLHh.transpose(0, 2, 1, 3)


@dataclass(frozen=True)
class _BlockSpecs:
    """BlockSpecs of arrays of queries, or of keys, in a step of the grid.

    at: (grid indices, steps) -> (row of the batch, head, block). size: tokens in a block. shared:
    one set of facts for the whole batch.
    """

    at: Callable[..., tuple[Any, Any, Any]]
    size: int
    shared: bool

    def rows(self, h: int) -> pl.BlockSpec:
        """Return the spec of an array `B H L h`."""
        return pl.BlockSpec((None, None, self.size, h), lambda *grid: (*self.at(*grid), 0))

    def stats(self) -> pl.BlockSpec:
        """Return the spec of an array `B H 1 L`."""

        def index(*grid: Any) -> tuple[Any, ...]:
            b, head, block = self.at(*grid)
            return b, head, 0, block

        return pl.BlockSpec((None, None, 1, self.size), index)

    def facts(self, num: int) -> pl.BlockSpec:
        """Return the spec of an array `B num L`, or `1 num L`."""

        def index(*grid: Any) -> tuple[Any, ...]:
            b, _, block = self.at(*grid)
            return 0 if self.shared else b, 0, block

        return pl.BlockSpec((None, num, self.size), index)


@dataclass(frozen=True, kw_only=True)
class _Call:
    """Shapes, block sizes and settings of one call; static."""

    B: int
    L: int
    T: int
    H: int
    K: int
    h: int
    block_q: int
    block_k: int
    settings: ScoreSettings
    options: KernelOptions

    @classmethod
    def of(
        cls,
        q_BLHh: Array,
        k_BTKh: Array,
        inputs: AttentionInputs,
        spec: AttentionSpec,
        options: KernelOptions,
    ) -> "_Call":
        assert inputs.bias_BHLT is None and inputs.mask_BHLT is None and not spec.dropout
        (B, L, H, h), (T, K) = q_BLHh.shape, k_BTKh.shape[1:3]
        settings = ScoreSettings(
            scale=spec.scale,
            soft_cap=spec.soft_cap,
            visibility=Visibility.of(inputs, spec.mask),
        )
        block_q = _block("block_q", spec.block_q, L, MAX_BLOCK_Q)
        block_k = _block("block_k", spec.block_k, T, MAX_BLOCK_K)
        blocks = {"block_q": block_q, "block_k": block_k}
        return cls(B=B, L=L, T=T, H=H, K=K, h=h, settings=settings, options=options, **blocks)

    def kinds(self, query_facts_B3L: Array, key_facts_B2T: Array) -> Array:
        """Return the visibility of every pair of blocks: queries by keys."""
        queries = query_facts_B3L.reshape(-1, 3, self.L // self.block_q, self.block_q)
        keys = key_facts_B2T.reshape(-1, 2, self.T // self.block_k, self.block_k)
        return self.settings.visibility.kinds(queries, keys)

    def specs_by_query(self, stride: int) -> tuple[_BlockSpecs, _BlockSpecs]:
        """Return the specs of queries and of keys on a grid B, H, steps."""

        def query(b: Any, head: Any, index: Any, words: Any) -> tuple[Any, Any, Any]:
            return b, head, step_at(words, stride, b, index).outer

        def key(b: Any, head: Any, index: Any, words: Any) -> tuple[Any, Any, Any]:
            return b, lax.div(head, self.H // self.K), step_at(words, stride, b, index).inner

        return _BlockSpecs(query, self.block_q, not stride), _BlockSpecs(
            key, self.block_k, not stride
        )

    def specs_by_key(self, stride: int) -> tuple[_BlockSpecs, _BlockSpecs]:
        """Return the specs of queries and of keys on a grid B, K, steps, G."""
        G = self.H // self.K

        def query(b: Any, head: Any, index: Any, g: Any, words: Any) -> tuple[Any, Any, Any]:
            step = step_at(words, stride, b, index)
            # An idle step stays at the last head, which is in VMEM already.
            return b, head * G + jnp.where(step.kind == HIDDEN, G - 1, g), step.inner

        def key(b: Any, head: Any, index: Any, _: Any, words: Any) -> tuple[Any, Any, Any]:
            return b, head, step_at(words, stride, b, index).outer

        return _BlockSpecs(query, self.block_q, not stride), _BlockSpecs(
            key, self.block_k, not stride
        )

    def has_room_for_dq(self) -> bool:
        """Return whether dq of one kv head's queries fits in VMEM; False on an unknown chip."""
        device = jax.sharding.get_abstract_mesh().abstract_device
        fits = dq_fits(self.H // self.K, self.L, self.h)
        return device is not None and device.device_kind in _LARGE_VMEM and fits

    def gradient_specs(self, query: _BlockSpecs, key: _BlockSpecs) -> list[pl.BlockSpec]:
        """Return the specs of the inputs of gradient kernels, in their order."""
        rows = [query.rows(self.h), key.rows(self.h), key.rows(self.h), query.rows(self.h)]
        return [query.facts(3), key.facts(2), *rows, query.stats(), query.stats()]

    def launch(self, kernel: "_Kernel", steps: Steps) -> Sequence[Array]:
        """Run a kernel over a grid whose third dim is the steps; return float32 outputs."""
        shapes = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape, _ in kernel.outputs]
        arrays = [array for array, _ in kernel.inputs]
        scores = self.B * self.H * self.L * self.T * self.options.visible_share
        inner: list[Any] = ["arbitrary"] * (len(kernel.grid) - 2)
        return pl.pallas_call(
            partial(kernel.body, settings=self.settings, stride=steps.stride),
            out_shape=shapes,
            grid_spec=pltpu.PrefetchScalarGridSpec(
                num_scalar_prefetch=1,
                grid=kernel.grid,
                in_specs=[spec for _, spec in kernel.inputs],
                out_specs=[spec for _, spec in kernel.outputs],
                scratch_shapes=kernel.scratch,
            ),
            compiler_params=pltpu.CompilerParams(
                dimension_semantics=("parallel", "parallel", *inner),
                vmem_limit_bytes=kernel.vmem_bytes,
            ),
            cost_estimate=pl.CostEstimate(
                flops=round(2 * kernel.matmuls * self.h * scores),
                transcendentals=round(scores * (1 if self.settings.soft_cap is None else 2)),
                bytes_accessed=sum(math.prod(x.shape) * x.dtype.itemsize for x in arrays + shapes),
            ),
            interpret=self.options.interpret,
            name=kernel.name,
        )(steps.words, *arrays)


@dataclass(frozen=True, kw_only=True)
class _Kernel:
    """A kernel with its arrays and their specs; matmuls: per pair of blocks."""

    name: str
    body: Callable[..., None]
    grid: tuple[Any, ...]
    inputs: Sequence[tuple[Array, pl.BlockSpec]]
    outputs: Sequence[tuple[tuple[int, ...], pl.BlockSpec]]
    scratch: Sequence[Any]
    matmuls: int
    vmem_bytes: int | None = None


def _block(name: str, asked: int | None, length: int, largest: int) -> int:
    """Return the tokens of a block: as asked, or the most that divide the row.

    Raises: ValueError if none does.
    """
    if length % LANES:
        raise ValueError(
            f"attention on TPU over {length} tokens per device: use a multiple of {LANES}; "
            "pad the rows, or use another operation"
        )
    if asked is None:
        sizes = range(min(largest, length), 0, -LANES)
        return next(size for size in sizes if length % size == 0)
    size = min(asked, length)
    if size % LANES or length % size:
        raise ValueError(
            f"attention {name}={asked} must divide the {length} tokens per device and be a "
            f"multiple of {LANES}; change it, or remove it for the default"
        )
    return size
