"""The vocabulary equals the published one, to the letter."""

import copy
import pickle

import numpy as np
import pytest

from parallel.sharding import axes as ax

BATCH, QUERY, KV = "__BATCH__", "__QUERY_LENGTH__", "__KV_LENGTH__"
DP, FSDP = "__DATA_PARALLEL__", "__FULLY_SHARDED_DATA_PARALLEL__"
TP, EP, SP = "__TENSOR_PARALLEL__", "__EXPERT_PARALLEL__", "__SEQUENCE_PARALLEL__"
TRAIN = "__train__"

FAMILY = {
    "HiddenStateSharding": ([BATCH, QUERY, "__EMBED__"], 1),
    "AttnQSharding": ([BATCH, QUERY, "__HEAD__", "__HEAD_DIM__"], 1),
    "AttnKVSharding": ([BATCH, KV, "__KV_HEAD__", "__KV_HEAD_DIM__"], 1),
    "ColumnWise": ([[FSDP, SP], TP], TRAIN),
    "RowWise": ([TP, [FSDP, SP]], TRAIN),
    "SColumnWise": ([[FSDP, SP]], TRAIN),
    "SRowWise": ([TP], TRAIN),
    "Replicated": (["_"], TRAIN),
    "ExpertColumnWise": ([EP, FSDP, TP], TRAIN),
    "ExpertRowWise": ([EP, TP, FSDP], TRAIN),
    "ExpertColumnWiseAlt": ([EP, [FSDP, SP], TP], TRAIN),
    "ExpertRowWiseAlt": ([EP, TP, [FSDP, SP]], TRAIN),
    "UnifiedExpertColumnWise": ([[FSDP, SP, EP], "_", TP], TRAIN),
    "UnifiedExpertRowWise": ([[FSDP, SP, EP], TP, "_"], TRAIN),
    "ExpertActivations": ([DP, SP, EP, TP], TRAIN),
    "ExpertActivationsAlt": ([DP, SP, [TP, FSDP]], TRAIN),
    "ExpertTensorParallel": ([TP, "_", "_"], TRAIN),
}


@pytest.mark.parametrize("name", FAMILY)
def test_sharding_classes_carry_the_documented_axes_and_mode(name: str) -> None:
    cls = getattr(ax, name)
    assert issubclass(cls, ax.DynamicShardingAxes)
    assert (cls.axes, cls.mode) == FAMILY[name]


def test_dynamic_sharding_axes_is_a_named_tuple_of_axes_and_mode() -> None:
    axes, mode = ax.DynamicShardingAxes([ax.BATCH, None], ax.MODE_PREFILL)
    assert (axes, mode) == ([BATCH, None], "__prefill__")


def test_modes_and_mask_value_are_the_documented_ones() -> None:
    assert ax.MODE_DECODE == "__autoregressive__"
    assert ax.MODE_INSERT == "__insert__"
    assert ax.GENERATION_MODES == {"__autoregressive__", "__insert__"}
    assert ax.DEFAULT_MASK_VALUE == -2.381976426469702e38
    assert np.isfinite(np.float32(ax.DEFAULT_MASK_VALUE))


def test_the_sentinel_is_recognised_by_identity() -> None:
    assert isinstance(ax.NOT_GIVEN, ax.EMPTY_VAL)
    for same in (copy.copy, copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))):
        assert same(ax.NOT_GIVEN) is ax.NOT_GIVEN
        assert same([ax.NOT_GIVEN])[0] is ax.NOT_GIVEN
        assert isinstance(same(ax.EMPTY_VAL()), ax.EMPTY_VAL)
    assert ax.NOT_GIVEN is not ax.EMPTY_VAL()
