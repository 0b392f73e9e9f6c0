"""Names of semantic axes, runtime modes, and the semantic axes of each kind of tensor.

Three vocabularies, each with its own typography:

| vocabulary     | typography        | examples                      | term            |
|----------------|-------------------|-------------------------------|-----------------|
| mesh axes      | lowercase         | dp fsdp tp sp ep              | "axis"          |
| semantic axes  | UPPERCASE         | BATCH LENGTH EMBED HEAD VOCAB | "semantic axis" |
| array dims     | one-letter suffix | x_BLD, kernel_DF, logits_BLV  | "dim"           |

Letters: B batch, L length (T of keys), D embed, H query heads, K kv heads, h head dim, F MLP
intermediate, V vocab, E expert. Only `partition.py` maps semantic axes to mesh axes. Constants and
classes are those of the published reference `eformer.common_types`, unless marked "Ours".
"""

from collections.abc import Sequence
from typing import Any, ClassVar, Final, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

Array = jnp.ndarray
PRNGKey = jnp.ndarray
DType = jnp.dtype
Shape = Sequence[int]
Mesh = jax.sharding.Mesh
AxisNames = tuple[str, ...]
AxisIdxes = tuple[int, ...]
AxisType = tuple[str, ...] | str | Any | None

BATCH: Final = "__BATCH__"
LENGTH: Final = "__LENGTH__"
KV_LENGTH: Final = "__KV_LENGTH__"
QUERY_LENGTH: Final = "__QUERY_LENGTH__"
EMBED: Final = "__EMBED__"
HEAD: Final = "__HEAD__"
KV_HEAD: Final = "__KV_HEAD__"
HEAD_DIM: Final = "__HEAD_DIM__"
KV_HEAD_DIM: Final = "__KV_HEAD_DIM__"
MLP_INTERMEDIATE: Final = "__MLP_INTERMEDIATE__"
VOCAB: Final = "__VOCAB__"
EXPERT: Final = "__EXPERT__"
EXPERT_GATE: Final = "__EXPERT_GATE__"
BIAS_HEAD_SEQ: Final = "__BIAS_HEAD_SEQ__"
BIAS_KV_SEQ: Final = "__BIAS_KV_SEQ__"
EMPTY: Final = "_"
DATA_PARALLEL: Final = "__DATA_PARALLEL__"
FULLY_SHARDED_DATA_PARALLEL: Final = "__FULLY_SHARDED_DATA_PARALLEL__"
TENSOR_PARALLEL: Final = "__TENSOR_PARALLEL__"
EXPERT_PARALLEL: Final = "__EXPERT_PARALLEL__"
SEQUENCE_PARALLEL: Final = "__SEQUENCE_PARALLEL__"
DP: Final = DATA_PARALLEL
FSDP: Final = FULLY_SHARDED_DATA_PARALLEL
TP: Final = TENSOR_PARALLEL
EP: Final = EXPERT_PARALLEL
SP: Final = SEQUENCE_PARALLEL

MODE_DECODE: Final = "__autoregressive__"
MODE_PREFILL: Final = "__prefill__"
MODE_TRAIN: Final = "__train__"
MODE_INSERT: Final = "__insert__"
RUNTIME_MODE_TYPES = Literal["__autoregressive__", "__prefill__", "__train__", "__insert__"]
GENERATION_MODES: Final = {MODE_DECODE, MODE_INSERT}

DEFAULT_MASK_VALUE: Final = -0.7 * float(np.finfo(np.float32).max)


class _Empty:
    """Sentinel for an omitted argument; compare with `is` or `isinstance`, never with `==`."""

    def __repr__(self) -> str:
        return "<not given>"

    def __reduce__(self) -> Any:
        # copy and pickle take a string for the name of a global: NOT_GIVEN stays one object.
        return "NOT_GIVEN" if self is NOT_GIVEN else (_Empty, ())


EMPTY_VAL: Final = _Empty
NOT_GIVEN: Final = _Empty()


class DynamicShardingAxes(NamedTuple):
    """Semantic axes of one tensor and the runtime mode in which they are resolved.

    axes: One entry per dim: a semantic axis, None or "_" (replicated), or a list of them.
    mode: A MODE_* constant, or the index of a dim: size 1 of that dim means decoding.
    Subclasses have both as class variables and are passed as classes.
    """

    axes: Sequence[Any]
    mode: Any


class HiddenStateSharding(DynamicShardingAxes):
    """Hidden states (B, L, D)."""

    axes: ClassVar = [BATCH, QUERY_LENGTH, EMBED]
    mode: ClassVar = 1


class ResidualSharding(DynamicShardingAxes):
    """The residual stream (B, L, D), in the layout of `residual.residual_rules`.

    Ours: the reference has one layout, `hidden`, and no LENGTH here.
    """

    axes: ClassVar = [BATCH, LENGTH, EMBED]
    mode: ClassVar = MODE_TRAIN


class TokenSharding(DynamicShardingAxes):
    """Token ids, targets, positions, segment ids and loss masks (B, L). Ours."""

    axes: ClassVar = [BATCH, QUERY_LENGTH]
    mode: ClassVar = MODE_TRAIN


class AttnQSharding(DynamicShardingAxes):
    """Attention queries (B, L, H, h)."""

    axes: ClassVar = [BATCH, QUERY_LENGTH, HEAD, HEAD_DIM]
    mode: ClassVar = 1


class AttnKVSharding(DynamicShardingAxes):
    """Attention keys and values (B, T, K, h)."""

    axes: ClassVar = [BATCH, KV_LENGTH, KV_HEAD, KV_HEAD_DIM]
    mode: ClassVar = 1


class ColumnWise(DynamicShardingAxes):
    """Kernel (in, out) of a column-parallel linear: outputs over tp."""

    axes: ClassVar = [[FSDP, SP], TP]
    mode: ClassVar = MODE_TRAIN


class RowWise(DynamicShardingAxes):
    """Kernel (in, out) of a row-parallel linear: inputs over tp."""

    axes: ClassVar = [TP, [FSDP, SP]]
    mode: ClassVar = MODE_TRAIN


class TokenWise(DynamicShardingAxes):
    """Kernel (in, out) of a token-parallel linear: whole over tp. Ours."""

    axes: ClassVar = [[FSDP, SP], EMPTY]
    mode: ClassVar = MODE_TRAIN


class EmbeddingTable(DynamicShardingAxes):
    """Embedding table (V, D), its features over all axes but dp. Ours."""

    axes: ClassVar = [EMPTY, [TP, FSDP, SP, EP]]
    mode: ClassVar = MODE_TRAIN


class EmbeddingTableWithoutEP(DynamicShardingAxes):
    """The same if ep does not divide what is left of the features: equal copies over ep. Ours."""

    axes: ClassVar = [EMPTY, [TP, FSDP, SP]]
    mode: ClassVar = MODE_TRAIN


class SColumnWise(DynamicShardingAxes):
    """One-dimensional parameter over fsdp and sp. A column-parallel bias is SRowWise instead."""

    axes: ClassVar = [[FSDP, SP]]
    mode: ClassVar = MODE_TRAIN


class SRowWise(DynamicShardingAxes):
    """One-dimensional parameter over tp: the bias of a column-parallel linear (width out)."""

    axes: ClassVar = [TP]
    mode: ClassVar = MODE_TRAIN


class Replicated(DynamicShardingAxes):
    """One-dimensional parameter that every device holds whole."""

    axes: ClassVar = [EMPTY]
    mode: ClassVar = MODE_TRAIN


class ExpertColumnWise(DynamicShardingAxes):
    """Expert kernels (E, D, F): experts over ep, embed over fsdp, intermediate over tp."""

    axes: ClassVar = [EP, FSDP, TP]
    mode: ClassVar = MODE_TRAIN


class ExpertRowWise(DynamicShardingAxes):
    """Expert kernels (E, F, D): experts over ep, intermediate over tp, embed over fsdp."""

    axes: ClassVar = [EP, TP, FSDP]
    mode: ClassVar = MODE_TRAIN


class ExpertColumnWiseAlt(DynamicShardingAxes):
    """ExpertColumnWise with the embed dim over fsdp and sp."""

    axes: ClassVar = [EP, [FSDP, SP], TP]
    mode: ClassVar = MODE_TRAIN


class ExpertRowWiseAlt(DynamicShardingAxes):
    """ExpertRowWise with the embed dim over fsdp and sp."""

    axes: ClassVar = [EP, TP, [FSDP, SP]]
    mode: ClassVar = MODE_TRAIN


class UnifiedExpertColumnWise(DynamicShardingAxes):
    """Expert kernels (E, D, F): experts over fsdp, sp and ep together, intermediate over tp."""

    axes: ClassVar = [[FSDP, SP, EP], EMPTY, TP]
    mode: ClassVar = MODE_TRAIN


class UnifiedExpertRowWise(DynamicShardingAxes):
    """Expert kernels (E, F, D): experts over fsdp, sp and ep together, intermediate over tp."""

    axes: ClassVar = [[FSDP, SP, EP], TP, EMPTY]
    mode: ClassVar = MODE_TRAIN


class ExpertColumnBias(DynamicShardingAxes):
    """Biases (E, F) of a column-parallel expert linear: experts over ep, outputs over tp. Ours."""

    axes: ClassVar = [EP, TP]
    mode: ClassVar = MODE_TRAIN


class ExpertRowBias(DynamicShardingAxes):
    """Biases (E, D) of a row-parallel expert linear: experts over ep. Ours."""

    axes: ClassVar = [EP, EMPTY]
    mode: ClassVar = MODE_TRAIN


class UnifiedExpertColumnBias(DynamicShardingAxes):
    """ExpertColumnBias with experts over fsdp, sp and ep together. Ours."""

    axes: ClassVar = [[FSDP, SP, EP], TP]
    mode: ClassVar = MODE_TRAIN


class UnifiedExpertRowBias(DynamicShardingAxes):
    """ExpertRowBias with experts over fsdp, sp and ep together. Ours."""

    axes: ClassVar = [[FSDP, SP, EP], EMPTY]
    mode: ClassVar = MODE_TRAIN


class GateKernel(DynamicShardingAxes):
    """Kernel (D, E) of a router. Ours."""

    axes: ClassVar = [EMPTY, EXPERT_GATE]
    mode: ClassVar = MODE_TRAIN


class GateBias(DynamicShardingAxes):
    """Bias (E,) on the routing scores or on the logits of a router. Ours."""

    axes: ClassVar = [EXPERT_GATE]
    mode: ClassVar = MODE_TRAIN


class ExpertActivations(DynamicShardingAxes):
    """Expert activations (B, L, E, D)."""

    axes: ClassVar = [DP, SP, EP, TP]
    mode: ClassVar = MODE_TRAIN


class ExpertActivationsAlt(DynamicShardingAxes):
    """Expert activations after routing (B, L, D)."""

    axes: ClassVar = [DP, SP, [TP, FSDP]]
    mode: ClassVar = MODE_TRAIN


class ExpertTensorParallel(DynamicShardingAxes):
    """Expert kernels (E, D, F): experts over tp, each expert whole."""

    axes: ClassVar = [TP, EMPTY, EMPTY]
    mode: ClassVar = MODE_TRAIN
