"""The arrays of an attention are placed by the rules, in every mode and layout."""

from typing import get_args

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import tensor_parallel
from jax.sharding import PartitionSpec as P
from test_metadata import BATCH, metadata

from model.attention.sharded import AttnShardingRules, Layout, local_kv_heads
from parallel.sharding import axes as ax
from parallel.sharding.mesh import MeshConfig
from parallel.sharding.partition import PartitionAxis
from parallel.sharding.residual import residual_rules

MODES = get_args(ax.RUNTIME_MODE_TYPES)

# By layout: query | key | bias | mask | ids of queries | ids of keys; L: the queries' axis.
GOLDEN = {
    "bthd": "B L tp - | B sp tp - | B - L - | B - L - | B L | B sp",
    "bhtd": "B tp L - | B tp sp - | B - L - | B - L - | B L | B sp",
    "thd": "L tp - | sp tp - | - L - | - L - | L | sp",
}


@pytest.mark.parametrize("residual", ["default", "hidden", "sequence", "replicated"])
@pytest.mark.parametrize("layout", get_args(Layout))
@pytest.mark.parametrize("mode", MODES)
def test_shardings_of_every_array_in_every_mode(mode: str, layout: Layout, residual: str) -> None:
    rules = PartitionAxis() if residual == "default" else residual_rules(residual)
    length = None if mode in ax.GENERATION_MODES else "sp"  # one token cannot be split
    entries = {"B": BATCH, "L": length, "-": None, "tp": "tp", "sp": "sp"}
    query, key, bias, mask, q_ids, kv_ids = (
        P(*(entries[letter] for letter in text.split())) for text in GOLDEN[layout].split("|")
    )
    filled = metadata(partition_axis=rules)
    expected = AttnShardingRules(
        query3d=P(BATCH, "tp", None),
        query=query,
        key=key,
        value=key,
        bias=bias,
        mask=mask,
        output=query,
        q_segment_ids=q_ids,
        kv_segment_ids=kv_ids,
        softmax_aux=None,
    )
    assert filled.get_shardings(mode, layout) == expected
    if layout == "bthd":
        assert filled.get_shardings(mode) == expected


def test_keys_with_all_heads_are_placed_as_queries() -> None:
    rules = PartitionAxis()
    for name, rule in ((ax.KV_HEAD, None), (ax.HEAD_DIM, "ep"), (ax.BATCH, "dp")):
        rules = rules.register(name, rule, override=True)
    for layout, grouped, whole in (
        ("bthd", P("dp", "sp", None, None), P("dp", "sp", "tp", "ep")),
        ("bhtd", P("dp", None, "sp", None), P("dp", "tp", "sp", "ep")),
        ("thd", P("sp", None, None), P("sp", "tp", "ep")),
    ):
        filled = metadata(partition_axis=rules)
        ours = filled.get_shardings(ax.MODE_TRAIN, layout)
        theirs = filled.get_shardings(ax.MODE_TRAIN, layout, qkv_mni_sharding=True)
        assert (ours.key, ours.value) == (grouped, grouped)
        assert (theirs.key, theirs.value) == (whole, whole)
        assert theirs._replace(key=grouped, value=grouped) == ours


@pytest.mark.parametrize("mode", MODES)
def test_softmax_aux_is_placed_by_its_rank(mode: str) -> None:
    rules = PartitionAxis().register(ax.HEAD, ("tp", "sp"), override=True)
    filled = metadata(partition_axis=rules.register(ax.QUERY_LENGTH, None, override=True))

    def spec(shape: tuple[int, ...]):
        array = jax.ShapeDtypeStruct(shape, jnp.float32)
        return filled.get_shardings(mode, "bthd", False, array).softmax_aux

    assert spec((8,)) == P(("tp", "sp"))
    assert spec((2, 4)) == P(None, "tp")
    assert filled.get_shardings(mode, softmax_aux=jnp.zeros(4)).softmax_aux == P(("tp", "sp"))
    for shape in ((), (2, 3, 4)):
        with pytest.raises(ValueError, match=r"softmax_aux of shape .*one number per head \(H\)"):
            spec(shape)


def test_modes_and_layouts_that_do_not_exist_are_refused() -> None:
    with pytest.raises(ValueError, match=r"mode 'train' is unknown; use __autoregressive__, __pre"):
        metadata().get_shardings("train")
    with pytest.raises(ValueError, match=r"layout 'tbhd' is unknown; use bthd, bhtd, thd"):
        metadata().get_shardings(ax.MODE_TRAIN, "tbhd")


@pytest.mark.parametrize(("tp", "heads", "kv_heads"), [(4, 8, 2), (8, 8, 1), (8, 24, 3), (2, 6, 3)])
def test_every_query_head_finds_its_kv_head_where_devices_hold_all_of_them(tp, heads, kv_heads):
    manager = tensor_parallel(MeshConfig(tp=tp)).manager
    found = jax.jit(
        jax.shard_map(
            lambda: local_kv_heads("tp", heads // tp, heads // kv_heads),
            mesh=manager.mesh,
            in_specs=(),
            out_specs=P("tp"),
        )
    )()
    np.testing.assert_array_equal(found, np.repeat(np.arange(kv_heads), heads // kv_heads))
