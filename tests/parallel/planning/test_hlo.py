"""Parsing of compiled programs: order, sizes, start and done, sums, refusals."""

import jax
import jax.numpy as jnp
import pytest
from hlo_text import (
    DOWN,
    MB,
    async_pairs,
    computation,
    matmul,
    permute_done,
    permute_start,
    program,
    unfused_adds,
    vector,
)

from parallel.planning.hlo import trip_count
from parallel.planning.hlo_parser import parse_hlo


def test_the_matmuls_between_a_start_and_its_done_hide_a_transfer() -> None:
    lines = (
        permute_start("s"),
        matmul("m", 700),
        permute_start("t", DOWN),
        vector("v", 40),
        permute_done("d", "s"),
        matmul("n", 300),
        permute_done("e", "t"),
    )
    found = parse_hlo(program(*lines))
    first, second = async_pairs(found)
    assert (first.start.name, first.done.name, first.matmul_cycles) == ("s", "d", 700)
    assert (second.start.name, second.done.name, second.matmul_cycles) == ("t", "e", 300)
    assert [x.name for x in first.between] == ["m", "t", "v"]
    assert async_pairs(found, "all-gather") == []
    assert [x.name for x in found.entry.instructions] == ["x", "s", "m", "t", "v", "d", "n", "e"]


def test_transfers_inside_of_loops_are_found() -> None:
    others = computation("body", permute_start("s"), permute_done("d", "s"))
    text = program(f"%w = {MB} while(%x), condition=%c, body=%body", others=others)
    assert [pair.matmul_cycles for pair in async_pairs(parse_hlo(text))] == [0]


def test_a_start_without_a_done_is_refused() -> None:
    with pytest.raises(ValueError, match="s has no done after it"):
        async_pairs(parse_hlo(program(permute_start("s"))))


def fused(name: str, *lines: str) -> str:
    body = "\n  ".join((f"%a = {MB} parameter(0)", f"%b = {MB} parameter(1)", *lines))
    return f"\n%{name} (a: f32[250000], b: f32[250000]) -> f32[250000] {{\n  {body}\n}}\n"


def test_unfused_adds_are_sums_of_arrays_outside_of_matmuls() -> None:
    others = (
        fused("sum", f"%h = {MB} negate(%b)", f"ROOT %s = {MB} subtract(%a, %h)")
        + fused("outer", f"ROOT %f = {MB} fusion(%a, %b), kind=kLoop, calls=%sum")
        + fused(
            "silu",
            "%one = bf16[] constant(1)",
            "%ones = bf16[250000]{0} broadcast(%one), dimensions={}",
            f"%wide = {MB} convert(%ones)",
            f"%e = {MB} exponential(%a)",
            f"ROOT %s = {MB} add(%e, %wide)",
        )
        + fused("index_sum", "%i = s32[] add(%j, %j)", f"ROOT %s = {MB} dynamic-slice(%a, %i)")
        + fused("matmul_sum", f"%c = {MB} convolution(%a, %b)", f"ROOT %s = {MB} add(%c, %b)")
    )
    text = program(
        vector("loop_sum", 9, "sum", "%x, %x"),
        vector("nested_sum", 9, "outer", "%x, %x"),
        vector("activation", 9, "silu", "%x, %x"),
        vector("indexing", 9, "index_sum", "%x, %x"),
        f"%in_matmul = {MB} fusion(%x, %x), kind=kOutput, calls=%matmul_sum",
        f"%bare = {MB} add(%x, %x)",
        "%small = s32[] add(%x, %x)",
        others=others,
    )
    found = parse_hlo(text)
    assert [x.name for x in unfused_adds(found, 1e6)] == ["loop_sum", "nested_sum", "bare"]
    assert unfused_adds(found, 1e6 + 1) == []


def test_the_size_of_every_dtype_is_known() -> None:
    shapes = "(bf16[3,5]{1,0:T(8,128)(2,1)S(1)}, pred[7], s4[6], f8e4m3fn[2], f32[], token[])"
    (made,) = parse_hlo(program(f"%t = {shapes} custom-call()")).entry.instructions[1:]
    assert [array.bytes for array in made.arrays] == [30, 7, 3, 2, 4]
    assert made.arrays[0].dims == (3, 5)


def test_a_program_compiled_by_jax_is_parsed() -> None:
    def step(x: jax.Array) -> jax.Array:
        return jax.lax.fori_loop(0, 6, lambda _, y: jnp.tanh(y @ x), x)

    compiled = jax.jit(step).lower(jnp.ones((16, 16))).compile()
    found = parse_hlo(compiled.as_text())
    (loop,) = [x for x in found.entry.instructions if x.opcode == "while"]
    assert trip_count(found, loop, found.entry) == 6
    assert found.entry.root.arrays[0].dims == (16, 16)


def test_a_program_out_of_schedule_order_is_refused() -> None:
    unscheduled = program(matmul("m", 1)).replace(", is_scheduled=true", "")
    with pytest.raises(ValueError, match=r"is not scheduled.*compiled\.as_text\(\)"):
        parse_hlo(unscheduled)


def test_a_program_cut_short_is_refused() -> None:
    with pytest.raises(ValueError, match="no ENTRY computation"):
        parse_hlo(program(matmul("m", 1))[:-4])
