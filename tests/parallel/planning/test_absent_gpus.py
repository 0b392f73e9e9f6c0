"""Collectives of programs that were compiled for GPUs: kinds, mesh axes, counts and bytes."""

from hlo_text import FIVE_TIMES, MB, loop_body, program

from parallel.planning.absent_gpus import Sent, collectives

MEGABYTE = 1e6
MESH = {"dp": 2, "tp": 4}
TP = "replica_groups={{0,1,2,3},{4,5,6,7}}"
DP = "replica_groups={{0,4},{1,5},{2,6},{3,7}}"


def gather(name: str, groups: str) -> str:
    return f"%{name} = f32[1000000]{{0}} all-gather(%x), {groups}, dimensions={{0}}"


def reduce(name: str, groups: str) -> str:
    return f"%{name} = {MB} all-reduce(%x), {groups}, to_apply=%add"


def test_collectives_are_counted_by_kind_and_mesh_axis() -> None:
    text = program(gather("a", TP), gather("b", TP), reduce("c", TP), reduce("d", DP))
    assert set(collectives(text, MESH)) == {
        Sent("all-gather", "tp", 2, 2 * MEGABYTE),
        Sent("all-reduce", "tp", 1, MEGABYTE),
        Sent("all-reduce", "dp", 1, MEGABYTE),
    }


def test_a_loop_counts_its_collectives_as_often_as_it_runs() -> None:
    text = program(FIVE_TIMES, reduce("e", DP), others=loop_body(reduce("c", DP)))
    assert collectives(text, MESH) == [Sent("all-reduce", "dp", 6, 6 * MEGABYTE)]


def test_collectives_are_sorted_by_bytes_and_asynchronous_ones_count_once() -> None:
    text = program(
        reduce("a", DP),
        f"%s = ({MB}, f32[1000000]{{0}}) all-gather-start(%x), {TP}, dimensions={{0}}",
        "%g = f32[1000000]{0} all-gather-done(%s)",
        gather("h", TP),
    )
    assert [(sent.kind, sent.count) for sent in collectives(text, MESH)] == [
        ("all-gather", 2),
        ("all-reduce", 1),
    ]
