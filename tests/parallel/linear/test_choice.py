"""`auto` chooses what the compiled schedules favour, and `none` where a ring cannot win."""

import pytest

from parallel.linear.choice import RingShape, choose_fsdp_overlap, choose_overlap
from parallel.sharding.devices import CHIPS, Chip

V5P, V5E = CHIPS["TPU v5"], CHIPS["TPU v5 lite"]
V6E = CHIPS["TPU v6 lite"]


def block(rows: int, width: int, gather: int = 0, scatter: int = 0, **more) -> RingShape:
    return RingShape(
        rows=rows,
        width=width,
        block_bytes=2 * rows * width,
        gather_columns=gather,
        scatter_columns=scatter,
        **more,
    )


@pytest.mark.parametrize("chip", [V5P, V5E], ids=["v5p", "v5e"])
@pytest.mark.parametrize(
    ("shape", "best"),
    [
        # The blocks of `scripts/bench.py overlap`: 1024 rows per device are too few to halve.
        (block(1024, 8192, gather=3584, scatter=3584), "bidirectional"),
        (block(1024, 8192, gather=7168, scatter=3584), "bidirectional"),
        (block(1024, 8192, gather=1280), "bidirectional"),
        (block(1024, 8192, scatter=1024), "bidirectional"),
        # Llama-3-8B at two sequences per chip: an MLP bound by its links.
        (block(8192, 4096, gather=3584, scatter=1792), "split"),
        (block(8192, 4096, gather=3584, scatter=1792, halves=False), "bidirectional"),
        # A few rows: every partial matmul would read the whole kernel again.
        (block(16, 4096, gather=768), "none"),
    ],
)
def test_auto_takes_what_the_compiled_schedule_favours(chip: Chip, shape, best) -> None:
    choice = choose_overlap(shape, 8, chip)
    assert choice.overlap == best
    assert "estimated ms forward: none" in choice.reason


@pytest.mark.parametrize(
    ("shape", "n", "best"),
    [
        # Llama-3-8B at two sequences per chip: three links of a chip instead of two.
        (block(8192, 4096, gather=768), 8, "hypercube"),
        (block(8192, 4096, scatter=512), 8, "hypercube"),
        (block(8192, 4096, gather=3584, scatter=1792), 8, "hypercube"),
        (block(8192, 4096, gather=1536), 4, "hypercube"),
        (block(8192, 4096, gather=768), 2, "split"),  # one link
        (block(1024, 8192, gather=7168, scatter=3584), 8, "bidirectional"),  # bound by matmuls
        (block(8192, 4096, gather=768, scatter=384, kernels=16), 8, "split"),  # experts
        (block(2, 4096, gather=768), 8, "none"),
    ],
)
def test_a_cube_uses_its_links_where_they_are_the_limit(shape, n, best) -> None:
    assert choose_overlap(shape, n, V5P, hypercube=True).overlap == best
    assert choose_overlap(shape, n, V5P).overlap != "hypercube"


def test_without_a_ring_or_figures_nothing_is_chosen_and_the_reason_is_said() -> None:
    shape = block(1024, 8192, gather=3584)
    assert choose_overlap(shape, 1, V5P).overlap == "none"
    for chip in (None, CHIPS["NVIDIA H200"]):
        choice = choose_overlap(shape, 8, chip)
        assert choice.overlap == "none" and "link bandwidth unknown" in choice.reason


def test_two_devices_use_both_directions() -> None:
    # A whole block one way takes twice as long as its halves both ways.
    assert choose_overlap(block(8192, 4096, gather=512, scatter=512), 2, V5P).overlap == "split"


@pytest.mark.parametrize(
    ("width", "chip", "best", "why"),
    [
        (512, V5P, "bidirectional", "travel under matmuls"),
        (256, V5E, "bidirectional", "travel under matmuls"),
        (128, V5P, "none", "bound by memory below 146"),
        (512, V6E, "bidirectional", "travel under matmuls"),
        (256, V6E, "none", "bound by memory below 493"),
        (512, CHIPS["NVIDIA H200"], "none", "link bandwidth unknown"),
        (512, None, "none", "link bandwidth unknown"),
    ],
)
def test_fsdp_overlaps_unless_partial_matmuls_of_gradients_are_too_small(width, chip, best, why):
    choice = choose_fsdp_overlap(width, chip)
    assert choice.overlap == best and why in choice.reason
