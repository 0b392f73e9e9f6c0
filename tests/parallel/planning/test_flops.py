"""FLOPs of matmuls and kernels of small programs equal those computed by hand."""

import pytest
from hlo_text import FIVE_TIMES, MB, computation, loop_body, program

from parallel.planning.timeline import predict
from parallel.sharding.devices import Chip

CHIP = Chip(peak_flops=1e12, hbm_bandwidth=1e9, ici_bandwidth=1e9, clock_hz=1e6)


def flops(*lines: str, others: str = "") -> float:
    return predict(program(*lines, others=others), CHIP).matmul_flops


def arrays(lhs: str, rhs: str) -> tuple[str, str]:
    return f"%a = bf16[{lhs}] parameter(1)", f"%b = bf16[{rhs}] parameter(2)"


@pytest.mark.parametrize(
    ("lhs", "rhs", "out", "attributes", "expected"),
    [
        # Plain matmuls, the first operand or the second transposed.
        ("8,16", "16,32", "8,32", "dim_labels=bf_io->bf", 2 * 8 * 16 * 32),
        ("16,8", "16,32", "8,32", "dim_labels=fb_io->bf", 2 * 8 * 16 * 32),
        ("8,16", "32,16", "8,32", "dim_labels=bf_oi->bf", 2 * 8 * 16 * 32),
        # A spatial dimension of one row per position of the output.
        ("4,8,16", "16,32,1", "4,8,32", "window={size=1}, dim_labels=0bf_io0->0bf", 4 * 8192),
        # It is contracted: one position of the output sees all of it.
        ("2,16,8", "2,16,32", "8,32,1", "window={size=2}, dim_labels=0fb_0io->bf0", 2 * 8192),
        # The kernel has rows: of two positions of the window one meets an input, one padding.
        (
            "16,8,1",
            "2,32,16",
            "2,32,8",
            "window={size=2 pad=1_1 rhs_reversal=1}, dim_labels=fb0_0oi->0fb",
            2 * 8192,
        ),
        # Half of the rows are cut off by negative padding.
        ("4,8,16", "16,32,1", "2,8,32", "window={size=1 pad=0_-2}, dim_labels=0bf_io0->0bf", 16384),
        ("4,8,16", "16,32,1", "2,8,32", "window={size=1 pad=-2_0}, dim_labels=0bf_io0->0bf", 16384),
        (
            "4,2,16,8",
            "4,2,16,32",
            "8,32,1,1",
            "window={size=4x2}, dim_labels=01fb_01io->bf01",
            8 * 8192,
        ),
    ],
)
def test_flops_of_the_convolutions_that_libtpu_writes(lhs, rhs, out, attributes, expected) -> None:
    line = f"%c = bf16[{out}] convolution(%a, %b), {attributes}"
    assert flops(*arrays(lhs, rhs), line) == expected


def test_flops_of_a_batched_dot() -> None:
    dims = "lhs_batch_dims={0}, lhs_contracting_dims={2}, rhs_batch_dims={0}"
    line = f"%c = f32[4,8,32] dot(%a, %b), {dims}, rhs_contracting_dims={{1}}"
    assert flops(*arrays("4,8,16", "4,16,32"), line) == 4 * 2 * 8 * 16 * 32


def test_a_loop_multiplies_the_flops_of_the_fusions_in_it() -> None:
    inner = computation(
        "inner",
        "%m = f32[500,500] bitcast(%x)",
        "ROOT %c = f32[500,500] dot(%m, %m), lhs_contracting_dims={1}, rhs_contracting_dims={0}",
    )
    body = loop_body(f"ROOT %f = {MB} fusion(%x), kind=kOutput, calls=%inner")
    assert flops(FIVE_TIMES, others=inner + body) == 5 * 2 * 500**3


def test_kernels_count_apart() -> None:
    q = "%q = bf16[4,128,64] parameter(1)"
    call = 'custom_call_target="tpu_custom_call"'
    found = predict(
        program(
            q,
            f"%splash_mha_fwd = bf16[4,128,64] custom-call(%q, %q, %q), {call}",
            f'%other = {MB} custom-call(%x), {call}, backend_config={{"flops":"1000"}}',
        ),
        CHIP,
    )
    assert found.matmul_flops == 0
    assert found.kernel_flops == 4 * 4 * 128 * 64 * 128 / 2 + 1000
