"""The mesh axes of collectives follow from their groups, in every form that XLA prints."""

import math

import numpy as np
import pytest
from hlo_text import MB, program
from hypothesis import given
from hypothesis import strategies as st

from parallel.planning.device_groups import (
    BETWEEN_SLICES,
    NO_AXES,
    ONE_DEVICE,
    MeshAxes,
    device_groups,
)
from parallel.planning.hlo import Instruction
from parallel.planning.hlo_parser import parse_hlo
from parallel.planning.timeline import predict
from parallel.sharding.devices import Chip

SIZES = {"dp": 2, "fsdp": 2, "ep": 1, "tp": 2}


def collective(attributes: str) -> Instruction:
    return parse_hlo(program(f"%r = {MB} all-reduce(%x), {attributes}")).entry.root


def label(attributes: str, sizes: dict[str, int] = SIZES, num_partitions: int = 8) -> str:
    return MeshAxes(sizes, num_partitions).label(collective(attributes), num_partitions)


@pytest.mark.parametrize(
    ("groups", "expected"),
    [
        ("{{0,1},{2,3},{4,5},{6,7}}", "tp"),
        ("{{0,2},{1,3},{4,6},{5,7}}", "fsdp"),
        ("{{0,4},{1,5},{2,6},{3,7}}", "dp"),
        ("{{0,1,2,3},{4,5,6,7}}", "fsdp+tp"),
        ("{{0,1,4,5},{2,3,6,7}}", "dp+tp"),
        ("{}", "dp+fsdp+tp"),
        ("{{0},{1},{2},{3},{4},{5},{6},{7}}", ONE_DEVICE),
        ("{{0,3},{1,2},{4,7},{5,6}}", "part of fsdp+tp"),
        ("{{0,1},{2,4},{3,5},{6,7}}", NO_AXES),
        ("[4,2]<=[8]", "tp"),
        ("[4,2]<=[2,2,2]T(0,2,1)", "fsdp"),
        ("[4,2]<=[2,4]T(1,0)", "dp"),
        ("[1,8]<=[8]", "dp+fsdp+tp"),
        ("mesh['a'=2,'b'=4] {'b'}", "fsdp+tp"),
        ("mesh['a'=2,'b'=4] {'b':(1)2}", "fsdp"),
        ("mesh['a'=2,'b'=4] {'b':(2)2}", "tp"),
        ("mesh['a'=2,'b'=4] {'a','b':(2)2}", "dp+tp"),
        ("mesh['a'=2,'b'=4], device_ids=([4,2]T(1,0)) {'a'}", "tp"),
        ("mesh['a'=2,'b'=4], device_ids=(0,2,4,6,1,3,5,7) {'a'}", "tp"),
        ("mesh['a'=8]", "dp+fsdp+tp"),
    ],
)
def test_the_axes_of_every_printed_form(groups: str, expected: str) -> None:
    assert label(f"replica_groups={groups}, metadata={{op_name=\"a{{'b'}}\"}}") == expected


@pytest.mark.parametrize(
    ("pairs", "expected"),
    [
        ("{{0,1},{1,0},{2,3},{3,2},{4,5},{5,4},{6,7},{7,6}}", "tp"),
        ("{{0,3},{3,0}}", "fsdp+tp"),
        ("{{0,0},{1,1}}", ONE_DEVICE),
    ],
)
def test_the_axes_of_a_permute_are_those_that_messages_cross(pairs: str, expected: str) -> None:
    assert label(f"source_target_pairs={pairs}") == expected


def test_within_a_slice_the_outermost_axis_is_shorter() -> None:
    sizes = {"dp": 4, "tp": 2}
    assert label("replica_groups={{0,2},{1,3}}", sizes, 4) == "dp"
    assert label("replica_groups={{0,1},{2,3}}", {"dp": 2, "tp": 4}, 4) == "part of tp"
    with pytest.raises(ValueError, match="no whole slices of 3 devices"):
        MeshAxes(sizes, 3)


@given(
    st.lists(st.integers(1, 3), min_size=1, max_size=4),
    st.data(),
)
def test_groups_along_any_axes_are_named_by_them(sizes: list[int], data: st.DataObject) -> None:
    names = [f"a{index}" for index in range(len(sizes))]
    chosen = data.draw(st.sets(st.sampled_from(range(len(sizes))), min_size=1))
    grid = np.moveaxis(
        np.arange(math.prod(sizes)).reshape(sizes), sorted(chosen), range(-len(chosen), 0)
    )
    groups = grid.reshape(-1, math.prod(sizes[axis] for axis in chosen))
    text = ",".join("{" + ",".join(map(str, group)) + "}" for group in groups.tolist())
    used = [names[axis] for axis in sorted(chosen) if sizes[axis] > 1]
    found = label(
        f"replica_groups={{{text}}}", dict(zip(names, sizes, strict=True)), math.prod(sizes)
    )
    assert found == ("+".join(used) or ONE_DEVICE)


def test_a_program_of_jax_has_groups_of_its_mesh() -> None:
    instruction = collective("replica_groups=mesh['x'=2,'y'=2,'z'=2] {'x','z'}")
    mesh = np.arange(8).reshape(2, 2, 2)
    assert device_groups(instruction, 8) == tuple(
        tuple(mesh[:, y, :].reshape(-1).tolist()) for y in range(2)
    )


def test_collectives_are_listed_by_kind_axes_and_part() -> None:
    chip = Chip(1e12, 1e9, 1e9, 1e6, dcn_bandwidth=0.5e9)
    cross = (
        "%k = token[] after-all()",
        f"%s = ({MB}, u32[], token[]) send(%x, %k), is_host_transfer=true, frontend_attributes="
        '{_xla_host_transfer_rendezvous="a",_xla_megascale_target="{0,1}",'
        '_xla_megascale_transfer_type="ALL_REDUCE"}',
        f"%v = ({MB}, u32[], token[]) recv(%k), is_host_transfer=true, frontend_attributes="
        '{_xla_host_transfer_rendezvous="a",_xla_megascale_target="{0,1}",'
        '_xla_megascale_transfer_type="ALL_REDUCE"}',
        "%e = token[] send-done(%s)",
        f"%d = ({MB}, token[]) recv-done(%v)",
    )
    text = program(
        f"%r = {MB} all-reduce(%x), replica_groups={{{{0,1}},{{2,3}},{{4,5}},{{6,7}}}}",
        f"%q = {MB} all-reduce(%x), replica_groups={{{{0,4}},{{1,5}},{{2,6}},{{3,7}}}}",
        *cross,
    )
    found = predict(text, chip, axes={"dp": 4, "fsdp": 2, "tp": 2})
    listed = {(x.kind, x.axes): x for x in found.collectives}
    between = f"all-reduce {BETWEEN_SLICES}"
    assert set(listed) == {
        ("all-reduce", "tp"),
        ("all-reduce", "dp"),
        (between, BETWEEN_SLICES),
    }
    assert listed["all-reduce", "tp"].bytes == 1e6
    assert sum(x.seconds for x in found.collectives) == pytest.approx(found.communication)
    assert sum(x.exposed for x in found.collectives) == pytest.approx(found.exposed)
    assert sum(x.bytes for x in found.collectives) == sum(found.bytes_by.values())
    assert sum(x.count for x in found.collectives) == sum(found.counts.values())
