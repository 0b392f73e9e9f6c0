"""Predictions of small hand-written schedules equal the time computed by hand."""

import dataclasses
import math

import pytest
from hlo_text import (
    DOWN,
    FIVE_TIMES,
    MB,
    UP,
    computation,
    loop_body,
    matmul,
    permute_done,
    permute_start,
    program,
    vector,
)
from hypothesis import given
from hypothesis import strategies as st

from parallel.planning.prediction import Prediction
from parallel.planning.timeline import predict
from parallel.sharding.devices import CHIPS, Chip

# One cycle is a microsecond; a megabyte takes a millisecond over HBM or one link one way.
CHIP = Chip(peak_flops=1e12, hbm_bandwidth=1e9, ici_bandwidth=1e9, clock_hz=1e6)
HOP = 1e-6  # latency
MS = 1e-3
EIGHT = "replica_groups={{0,1,2,3,4,5,6,7}}"


def time_of(*lines: str, others: str = "", torus: tuple[int, ...] = ()) -> Prediction:
    found = predict(program(*lines, others=others), CHIP, torus)
    parts = found.matmul + found.other + found.kernels + found.exposed + found.dma_wait
    assert parts == pytest.approx(found.total), "the parts do not add up to the total"
    assert sum(found.top.values()) == pytest.approx(found.total), "top misses some time"
    return found


def close(seconds: float) -> object:
    return pytest.approx(seconds, rel=1e-9, abs=1e-12)


def test_a_matmul_takes_its_cycles() -> None:
    found = time_of(matmul("m", 2000))
    assert found.total == found.matmul == close(2 * MS)
    assert found.communication == found.other == found.kernels == 0
    assert dict(found.top) == {"fusion layer/m": close(2 * MS)}
    assert not found.assumed


def test_vector_work_is_not_matmul() -> None:
    found = time_of(matmul("m", 2000), vector("v", 500))
    assert (found.matmul, found.other) == (close(2 * MS), close(0.5 * MS))
    assert list(found.top) == ["fusion layer/m", "fusion v"]


@pytest.mark.parametrize(("cycles", "exposed"), [(2000, 0.0), (500, 0.5 * MS + HOP)])
def test_a_permute_is_exposed_for_what_no_matmul_hides(cycles: int, exposed: float) -> None:
    found = time_of(permute_start("s"), matmul("m", cycles), permute_done("d", "s"))
    assert found.exposed == found.exposed_by["collective-permute"] == close(exposed)
    assert found.total == close(cycles * 1e-6 + exposed)
    assert found.communication == close(MS + HOP)
    assert found.bytes_by == {"collective-permute": 1e6}
    assert found.counts == {"collective-permute": 1}


def test_a_matmul_after_the_done_hides_nothing() -> None:
    found = time_of(permute_start("s"), permute_done("d", "s"), matmul("m", 2000))
    assert found.exposed == close(MS + HOP)
    assert list(found.top) == ["fusion layer/m", "EXPOSED collective-permute-done d"]


@pytest.mark.parametrize(("second", "transfers"), [(DOWN, 1), (UP, 2)])
def test_opposite_directions_run_at_once_and_one_direction_queues(
    second: str, transfers: int
) -> None:
    found = time_of(
        permute_start("s"),
        permute_start("t", second),
        matmul("m", 500),
        permute_done("d", "s"),
        permute_done("e", "t"),
    )
    assert found.total == close(transfers * (MS + HOP))
    assert found.communication == close(2 * (MS + HOP))


def test_a_permute_to_itself_moves_nothing() -> None:
    start = permute_start("s", "source_target_pairs={{0,0},{1,1}}")
    assert time_of(start, permute_done("d", "s")).total == 0


def loop(condition: str, annotation: str = "", first: int = 0, step: int = 1) -> Prediction:
    """Predict a loop around a permute half hidden under a matmul: 1.001 ms an iteration."""
    carried = f"(s32[], {MB})"
    others = f"""
%body (p: (s32[], f32[250000])) -> (s32[], f32[250000]) {{
  %p = {carried} parameter(0)
  %i = s32[] get-tuple-element(%p), index=0
  %x = {MB} get-tuple-element(%p), index=1
  {permute_start("s")}
  {matmul("m", 500)}
  {permute_done("d", "s")}
  %step = s32[] constant({step})
  %next = s32[] add(%i, %step), backend_config={{"estimated_cycles":"0"}}
  ROOT %out = {carried} tuple(%next, %d)
}}

%condition (q: (s32[], f32[250000])) -> pred[] {{
  %q = {carried} parameter(0)
  %j = s32[] get-tuple-element(%q), index=0
  {condition}
}}
"""
    return time_of(
        f"%first = s32[] constant({first})",
        '%copied = s32[] copy(%first), backend_config={"estimated_cycles":"0"}',
        f"%start = {carried} tuple(%copied, %x)",
        f"%loop = {carried} while(%start), condition=%condition, body=%body{annotation}",
        others=others,
    )


BELOW_8 = "%n = s32[] constant(8)\n  ROOT %less = pred[] compare(%j, %n), direction=LT"
ANNOTATED = ', backend_config={"known_trip_count":{"n":"5"}}'


@pytest.mark.parametrize(
    ("kwargs", "count"),
    [
        ({}, 8),
        ({"step": 2}, 4),
        ({"first": 2}, 6),
        ({"first": 1, "step": 3}, 3),
        ({"annotation": ANNOTATED}, 5),
    ],
)
def test_a_loop_runs_its_body_trip_count_times(kwargs: dict, count: int) -> None:
    found = loop(BELOW_8, **kwargs)
    assert found.total == close(count * (MS + HOP))
    assert found.matmul == close(count * 0.5 * MS)
    assert found.exposed == close(count * (0.5 * MS + HOP))
    assert found.counts == {"collective-permute": count}
    assert found.bytes_by == {"collective-permute": count * 1e6}
    assert not found.assumed


def test_a_loop_with_an_unknown_trip_count_runs_once_and_is_assumed() -> None:
    found = loop("ROOT %less = pred[] compare(%j, %j), direction=LT")
    assert found.total == close(MS + HOP)
    assert found.assumed == {"while without trip count": close(MS + HOP)}


def test_a_transfer_around_a_loop_hides_under_all_its_iterations() -> None:
    found = time_of(
        permute_start("s"),
        FIVE_TIMES,
        permute_done("d", "s"),
        permute_start("t"),
        permute_done("e", "t"),
        others=loop_body(matmul("m", 300)),
    )
    assert found.matmul == close(1.5 * MS)
    # The second transfer finds the link free: the first ended inside the loop.
    assert found.exposed == close(MS + HOP)


def test_a_loop_may_leave_a_link_busy_after_its_last_iteration() -> None:
    found = time_of(
        FIVE_TIMES,
        permute_start("t"),
        permute_done("e", "t"),
        others=loop_body(permute_start("s"), matmul("m", 100)),
    )
    left_behind = 4 * 0.1 * MS + MS + HOP  # from the start of the fifth iteration
    assert found.total == close(left_behind + MS + HOP)


def all_gather(opcode: str = "all-gather", attributes: str = EIGHT) -> str:
    return f"%g = f32[2000000]{{0}} {opcode}(%x), channel_id=2, {attributes}, dimensions={{0}}"


RING_8 = 7 / 2 * MS + 7 * HOP  # seven megabytes over both directions of a ring of eight


def test_a_synchronous_all_gather_is_fully_exposed() -> None:
    found = time_of(matmul("m", 9000), all_gather(), matmul("n", 9000))
    assert found.communication == close(RING_8)
    assert found.exposed == close(RING_8)
    assert found.exposed_by == {"all-gather (sync)": close(RING_8)}
    assert found.bytes_by == {"all-gather": 7e6}
    assert found.top["EXPOSED all-gather g"] == close(RING_8)


@pytest.mark.parametrize(
    ("kind", "sent", "carried"),
    [
        ("reduce-scatter", 7 / 8, 7 / 8),
        ("all-reduce", 14 / 8, 14 / 8),
        ("all-to-all", 7 / 8, 2.0),  # blocks pass through other devices of the ring
    ],
)
def test_bytes_and_time_of_a_collective(kind: str, sent: float, carried: float) -> None:
    found = time_of(f"%r = {MB} {kind}(%x), {EIGHT}")
    assert found.bytes_by == {kind: close(sent * 1e6)}
    assert found.total == close(carried / 2 * MS + 7 * HOP)


def test_asynchronous_collectives_are_hidden_in_every_form() -> None:
    wrapped = computation("wrapped", f"ROOT {all_gather()}")
    pair = (
        f"%s = ({MB}, f32[2000000]{{0}}) all-gather-start(%x), {EIGHT}",
        matmul("m", 3000),
        "%d = f32[2000000]{0} all-gather-done(%s)",
    )
    wrapper = (
        f"%s = (({MB}), f32[2000000]{{0}}, u32[]) async-start(%x), calls=%wrapped",
        matmul("m", 1000),
        f"%u = (({MB}), f32[2000000]{{0}}, u32[]) async-update(%s)",
        matmul("n", 2000),
        "%d = f32[2000000]{0} async-done(%u)",
    )
    for found in (time_of(*pair), time_of(*wrapper, others=wrapped)):
        assert found.exposed_by == {"all-gather": close(RING_8 - 3 * MS)}
        assert found.total == close(RING_8)


def test_a_fusion_with_a_collective_is_exposed_beyond_its_own_compute() -> None:
    carrying = f"""
%all-reduce-scatter.1 (a: f32[250000]) -> f32[31250] {{
  %a = {MB} parameter(0)
  %r = {MB} all-reduce(%a), channel_id=3, {EIGHT}
  ROOT %k = f32[31250]{{0}} dynamic-slice(%r), dynamic_slice_sizes={{31250}}
}}
"""
    transfer = 7 / 16 * MS + 7 * HOP  # each keeps a slice: a reduce-scatter
    for cycles in (100, 900):
        found = time_of(vector("f", cycles, "all-reduce-scatter.1"), others=carrying)
        assert found.other == close(cycles * 1e-6)
        assert found.total == close(max(transfer, cycles * 1e-6))
        assert found.communication == close(transfer)
        assert found.bytes_by == {"reduce-scatter": close(7e6 / 8)}
        assert found.counts == {"reduce-scatter (fused)": 1}


def test_an_asynchronous_collective_fusion_progresses_under_the_matmuls_between() -> None:
    def part(name: str, root: str) -> str:
        return computation(name, all_gather(), root)

    others = (
        part("begin", 'ROOT %b = u32[] custom-call(%g), custom_call_target="AsyncCollectiveStart"')
        + part("async_collective_fusion.1", f"ROOT %c = {MB} dot(%x, %x), lhs_batch_dims={{0}}")
        + part("end", 'ROOT %e = u32[] custom-call(%g), custom_call_target="AsyncCollectiveDone"')
    )
    cycles = 'backend_config={"estimated_cycles":"3000"}'
    found = time_of(
        f"%s = ({MB}, f32[2000000]{{0}}) fusion(%x), kind=kCustom, calls=%begin",
        f"%m = {MB} fusion(%s), kind=kOutput, calls=%async_collective_fusion.1, {cycles}",
        "%d = f32[2000000]{0} fusion(%m), kind=kCustom, calls=%end",
        others=others,
    )
    assert (found.matmul, found.other) == (close(3 * MS), 0)
    assert found.exposed_by == {"all-gather": close(RING_8 - 3 * MS)}
    assert found.counts == {"all-gather": 1}, "three fusions contain one collective"


@pytest.mark.parametrize(
    ("groups", "size"),
    [
        ("{{0,1,2,3},{4,5,6,7}}", 4),
        ("[2,4]<=[8]", 4),
        ("[4,2]<=[2,4]T(1,0)", 2),
        ("{}", 8),
        ("mesh['data'=2,'model'=4] {'model'}", 4),
        ("mesh['data'=2,'model'=4] {'data','model'}", 8),
        ("mesh['data'=2,'model'=4], device_ids=([4,2]T(1,0)) {'data'}", 2),
        ("mesh['all'=8] {'all':(2)4}", 4),
        ("mesh['data'=2,'one'=1] {'one'}", 1),
    ],
)
def test_every_printed_form_of_replica_groups_is_understood(groups: str, size: int) -> None:
    found = time_of(f"%r = {MB} all-reduce(%x), replica_groups={groups}, to_apply=%add")
    moved = 2e6 * (size - 1) / size
    assert found.bytes_by == {"all-reduce": close(moved)}
    assert found.total == close(moved / 2e9 + (size - 1) * HOP)


def test_an_unknown_form_of_replica_groups_is_refused() -> None:
    with pytest.raises(ValueError, match=r"r has replica_groups='<new>.*extend parallel/planning"):
        time_of(f"%r = {MB} all-reduce(%x), replica_groups=<new>")


@pytest.mark.parametrize(
    ("attributes", "torus", "rings"),
    [
        ('"emitter":"1DAllGather"', (2, 2, 2), 1.0),
        ('"emitter":"3DAllGather"', (2, 2, 2), 1.5),
        ('"emitter":"3DAllGather"', (4, 4, 1), 2.0),
        ('"emitter":"3DAllGather"', (), 1.0),
        ("dim_sizes:2,4", (), 1.5),
        ("dim_sizes:2", (4, 4), 1.0),
    ],
)
def test_a_collective_uses_the_links_of_every_side(
    attributes: str, torus: tuple[int, ...], rings: float
) -> None:
    found = time_of(all_gather(attributes=f"{EIGHT}, {attributes}"), torus=torus)
    assert found.total == close(7 / 2 / rings * MS + 7 * HOP)


def copy_start(name: str) -> str:
    return f"%{name} = ({MB}, {MB}, u32[]) copy-start(%x)"


def test_prefetches_share_one_dma_engine_and_are_no_communication() -> None:
    found = time_of(
        copy_start("s"),
        copy_start("t"),
        matmul("m", 500),
        f"%d = {MB} copy-done(%s)",
        f"%e = {MB} copy-done(%t)",
    )
    assert found.total == close(2 * MS)
    assert found.dma_wait == close(1.5 * MS)
    assert (found.exposed, found.communication) == (0, 0)
    assert found.counts == {"dma": 2}
    assert found.top["DMA WAIT copy-done d"] == close(0.5 * MS)


def test_a_sliced_prefetch_moves_its_slice() -> None:
    start = f"%s = (({MB}), f32[25000]{{0:S(1)}}, s32[]) slice-start(%x), slice={{[0:25000]}}"
    found = time_of(start, "%d = f32[25000]{0:S(1)} slice-done(%s)")
    assert found.total == found.dma_wait == close(0.1 * MS)


def test_a_conditional_takes_its_longest_branch_alone() -> None:
    def branch(name: str, cycles: int) -> str:
        lines = (permute_start(f"s{name}"), matmul(f"m{name}", cycles))
        done = permute_done(f"d{name}", f"s{name}")
        return computation(name, *lines, f"ROOT {done}")

    others = branch("short", 200) + branch("long", 3000)
    for listed in (
        "branch_computations={%long, %short}",
        "branch_computations={%short, %long}",
        "true_computation=%short, false_computation=%long",
    ):
        found = time_of(f"%c = {MB} conditional(%x, %x, %x), {listed}", others=others)
        assert found.total == found.matmul == close(3 * MS)
        assert found.counts == {"collective-permute": 1}


def test_a_transfer_started_in_a_branch_keeps_its_link_busy() -> None:
    found = time_of(
        f"%c = {MB} conditional(%x, %x), branch_computations={{%one}}",
        permute_start("t"),
        permute_done("d", "t"),
        others=computation("one", permute_start("s")),
    )
    assert found.total == close(2 * (MS + HOP))


def test_a_call_runs_in_place() -> None:
    called = computation("f", matmul("m", 700))
    lines = (permute_start("s"), f"%c = {MB} call(%x), to_apply=%f", permute_done("d", "s"))
    found = time_of(*lines, others=called)
    assert (found.total, found.exposed) == (close(MS + HOP), close(0.3 * MS + HOP))


def splash(name: str, query: str, keys: str, tables: str = "s8[32,64,64]{2,1,0}") -> Prediction:
    call = "custom-call(%t, %q, %k, %k), custom_call_target=" + '"tpu_custom_call"'
    return time_of(
        f"%t = {tables} parameter(1)",
        f"%q = bf16[{query}]{{0}} parameter(2)",
        f"%k = bf16[{keys}]{{0}} parameter(3)",
        f"%{name}.1 = bf16[8]{{0}} {call}",
    )


@pytest.mark.parametrize(
    ("name", "each"),
    [("splash_mha_fwd_residuals", 4), ("splash_mha_dkv", 8), ("splash_mqa_dq", 6)],
)
@pytest.mark.parametrize("keys", ["32,4096,128", "8,4096,128"])
def test_attention_kernels_take_causal_flops_at_half_of_peak(
    name: str, each: int, keys: str
) -> None:
    found = splash(name, "32,4096,128", keys)
    flops = each * 32 * 4096 * 4096 * 128 / 2
    assert found.total == found.kernels == close(flops / (0.5 * CHIP.peak_flops))
    assert found.assumed == {"tpu_custom_call": close(found.total)}


def test_other_kernels_take_their_traffic_or_their_stated_flops() -> None:
    call = f'%k = {MB} custom-call(%x), custom_call_target="tpu_custom_call"'
    assert time_of(call).kernels == close(2 * MS)
    assert time_of(call + ', cost={"flops":"5000000000"}').kernels == close(5 * MS)


@pytest.mark.parametrize("target", ["AllocateBuffer", "ConcatBitcast"])
def test_custom_calls_that_only_name_memory_are_free(target: str) -> None:
    assert time_of(f'%a = {MB} custom-call(), custom_call_target="{target}"').total == 0


def test_without_cycles_an_operation_takes_its_traffic_and_is_assumed() -> None:
    one = "f32[25000]{0}"
    update = (f"%u = {one} parameter(1)", f"%d = {MB} dynamic-update-slice(%x, %u)")
    assert time_of(f"%t = {MB} transpose(%x)").assumed == {"transpose": close(2 * MS)}
    assert time_of(*update).total == close(0.2 * MS), "an update is in place"
    assert time_of("%t = f32[250000]{0:S(1)} transpose(%x)").total == 0, "the result is in VMEM"


def test_a_fill_takes_no_longer_than_its_write() -> None:
    fill = f'%b = {MB} broadcast(%x), backend_config={{"estimated_cycles":"9000"}}'
    assert time_of(fill).other == close(MS)


def test_cycles_are_found_after_multi_line_metadata() -> None:
    line = f"%k = {MB} custom-call(%x), frontend_attributes={{kernel_metadata={{"
    tail = '"xprof":"{}"\n}}, backend_config={"estimated_cycles":"400"}'
    assert time_of(line + "\n " + tail).kernels == close(0.4 * MS)


@given(st.lists(st.tuples(st.sampled_from("ud"), st.integers(0, 3000)), min_size=1, max_size=8))
def test_a_schedule_takes_between_its_compute_and_the_sum_of_everything(
    steps: list[tuple[str, int]],
) -> None:
    lines = []
    for index, (way, cycles) in enumerate(steps):
        lines += [permute_start(f"s{index}", UP if way == "u" else DOWN), matmul("m", cycles)]
    lines += [permute_done(f"d{index}", f"s{index}") for index in range(len(steps))]
    found = time_of(*lines)
    compute = sum(cycles for _, cycles in steps) * 1e-6
    assert found.matmul == close(compute)
    assert max(compute, MS + HOP) <= found.total * (1 + 1e-9)
    assert found.total <= (compute + len(steps) * (MS + HOP)) * (1 + 1e-9)


def test_the_table_shows_the_parts_and_the_longest_operations() -> None:
    found = time_of(permute_start("s"), matmul("m", 500), permute_done("d", "s"), all_gather())
    lines = found.table(rows=2).splitlines()
    assert lines[0].split() == ["total", "4.508", "ms"]
    assert ["exposed", "4.008", "ms", "88.9%"] in [line.split() for line in lines]
    assert any("all-gather (sync)" in line and "3.507 ms exposed" in line for line in lines)
    assert [line.split()[2] for line in lines[-2:]] == ["EXPOSED", "EXPOSED"]
    assert max(map(len, lines)) <= 100


ROWS = "offset_dims={1}, collapsed_slice_dims={0}, start_index_map={0}, slice_sizes={1,1}"


def test_a_gather_reads_as_much_as_it_returns() -> None:
    """A quarter of a megabyte is read and written; the indices are a tenth of one."""
    indices = "%i = s32[25000]{0} iota()"
    plain = f"%g = f32[62500]{{0}} gather(%x, %i), {ROWS}"
    assert time_of(indices, plain).other == close((0.25 + 0.25 + 0.1) * MS)
    fused = computation("fused", "%j = s32[25000]{0} parameter(1)", f"ROOT {plain}").replace(
        "(%x, %i)", "(%x, %j)"
    )
    call = "%f = f32[62500]{0} fusion(%x, %i), kind=kLoop, calls=%fused"
    assert time_of(indices, call, others=fused).other == close((0.25 + 0.25 + 0.1) * MS)
    # Read a second time, as a whole.
    also = fused.replace("  ROOT", f"  %n = {MB} negate(%x)\n  ROOT")
    assert time_of(indices, call, others=also).other == close((1 + 0.25 + 0.1) * MS)


@pytest.mark.parametrize("field", ["clock_hz", "ici_bandwidth", "hbm_bandwidth"])
def test_a_chip_without_links_or_clock_is_refused(field: str) -> None:
    with pytest.raises(ValueError, match="has no clock or no links"):
        predict(program(matmul("m", 1)), dataclasses.replace(CHIP, **{field: 0.0}))


@pytest.mark.parametrize("kind", CHIPS)
def test_the_clock_of_a_chip_is_its_peak_over_whole_matrix_units(kind: str) -> None:
    chip = CHIPS[kind]
    assert chip.hbm_bandwidth > 1e11
    assert bool(chip.clock_hz) == bool(chip.ici_bandwidth) == kind.startswith("TPU")
    if chip.clock_hz:
        units = chip.peak_flops / (2 * 128 * 128 * chip.clock_hz)
        assert math.isclose(units, round(units), rel_tol=0.01)


def test_offloaded_arrays_pass_the_link_to_the_host() -> None:
    host = "f32[8,250000]{1,0:S(5)}"
    text = program(
        f'%h = {host} custom-call(), custom_call_target="AllocateBuffer"',
        f"%s = (({host}, {MB}), {host}, u32[]) dynamic-update-slice-start(%h, %x)",
        matmul("m", 2000),
        f"%d = {host} dynamic-update-slice-done(%s)",
    )
    assert predict(text, CHIP).dma_wait == 0
    slow = dataclasses.replace(CHIP, host_bandwidth=1e8)
    assert predict(text, slow).dma_wait == close(10 * MS - 2 * MS)
