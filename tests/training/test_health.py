"""Expert load: metrics, bars, images and warnings against cases computed by hand."""

import math
from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from training.health import HealthLimits, HealthWatch, heat_map, heat_strip, load_metrics

WHITE, BLUE, RED, BLACK = (255, 255, 255), (0, 64, 192), (192, 0, 0), (0, 0, 0)
# The mean is 4 in the first layer, 2 in the second.
LOAD_NE = np.array([[4, 2, 6, 4], [8, 0, 0, 0]], np.float32)


def arrays(load_NE, dropped_N=None, bias_NE=None) -> dict[str, np.ndarray]:
    """Return the arrays of a step with these loads and unremarkable values otherwise."""
    load_NE = np.asarray(load_NE, np.float32)
    count = len(load_NE)
    given = {
        "load_NE": load_NE,
        "dropped_N": np.zeros(count) if dropped_N is None else dropped_N,
        "entropy_N": np.arange(1, count + 1) / 2,
        "balance_N": np.arange(1, count + 1) * 1.0,
        "z_N": np.arange(1, count + 1) * 10.0,
        "bias_NE": bias_NE,
    }
    return {
        name: np.asarray(value, np.float32) for name, value in given.items() if value is not None
    }


def cells(image: np.ndarray, pixels: int) -> list[list[tuple[int, int, int]]]:
    """Return the colour of each cell; all of its pixels have it."""
    small = image[::pixels, ::pixels]
    np.testing.assert_array_equal(image, small.repeat(pixels, 0).repeat(pixels, 1))
    return [[tuple(int(part) for part in cell) for cell in row] for row in small]


def test_metrics_equal_the_hand_computed_ones():
    bias_NE = [[0.5, -0.25, 0.0, 0.0], [-1.0, 0.0, 0.0, 1.0]]
    assert load_metrics(arrays(LOAD_NE, [0.25, 0.5], bias_NE), [3, 11]) == {
        "moe/load_max_over_mean": 4.0,
        "moe/dead_experts": 3.0,
        "moe/entropy": 0.75,
        "moe/dropped": (0.25 * 16 + 0.5 * 8) / 24,
        "moe/balance_loss": 1.5,
        "moe/z_loss": 15.0,
        "moe/bias_range": 2.0,
        "moe/layer_03/load_max_over_mean": 1.5,
        "moe/layer_03/dead_experts": 0.0,
        "moe/layer_03/entropy": 0.5,
        "moe/layer_03/dropped": 0.25,
        "moe/layer_03/bias_range": 0.75,
        "moe/layer_11/load_max_over_mean": 4.0,
        "moe/layer_11/dead_experts": 3.0,
        "moe/layer_11/entropy": 1.0,
        "moe/layer_11/dropped": 0.5,
        "moe/layer_11/bias_range": 2.0,
    }


@pytest.mark.parametrize(
    "layers, labels", [([1, 3], ["1", "3"]), ([9, 10], ["09", "10"]), ([7, 100], ["007", "100"])]
)
def test_layers_are_named_by_their_index_with_leading_zeros(layers, labels):
    metrics = load_metrics(arrays(LOAD_NE), layers)
    assert not [name for name in metrics if "bias" in name], "the router has no bias"
    assert {name.split("/")[1] for name in metrics if name.count("/") == 2} == {
        f"layer_{label}" for label in labels
    }
    assert [line.split()[1] for line in heat_strip(LOAD_NE, layers)] == labels


def test_counts_beyond_float32_precision_are_exact():
    large = 2.0**24
    metrics = load_metrics(arrays([[large, 1, 1, 3], [0, 0, 0, 1]], [0.5, 1.0]), [0, 1])
    assert metrics["moe/layer_0/load_max_over_mean"] == large / ((large + 5) / 4)
    assert metrics["moe/dropped"] == (0.5 * (large + 5) + 1.0) / (large + 6)


@settings(max_examples=50, deadline=None)
@given(
    st.integers(1, 6).flatmap(
        lambda num_experts: st.lists(
            st.lists(st.integers(0, 9), min_size=num_experts, max_size=num_experts), min_size=1
        )
    )
)
def test_metrics_are_finite_and_equal_plain_loops_for_any_loads(loads):
    metrics = load_metrics(arrays(loads), range(len(loads)))
    worst = [max(row) * len(row) / sum(row) if sum(row) else 0.0 for row in loads]
    assert all(math.isfinite(value) for value in metrics.values())
    assert metrics["moe/load_max_over_mean"] == pytest.approx(max(worst), rel=1e-15)
    assert metrics["moe/dead_experts"] == sum(row.count(0) for row in loads)
    heat_strip(np.array(loads), range(len(loads)))
    heat_map(np.array(loads))


def test_bars_show_the_load_of_every_expert():
    # One token is an empty bar, none is a dot.
    load_NE = [[8, 4, 12, 9, 7, 8, 15, 1, 0, 16], [8] * 10, [80] + 9 * [0]]
    assert heat_strip(np.array(load_NE), [2, 9, 10]) == [
        "layer 02 |▄▂▆▅▄▄█▁·█| max/mean  2.00  dead 1 of 10",
        "layer 09 |▄▄▄▄▄▄▄▄▄▄| max/mean  1.00  dead 0 of 10",
        "layer 10 |█·········| max/mean 10.00  dead 9 of 10",
    ]


def test_of_many_layers_the_least_even_are_shown_in_order():
    load_NE = np.full((48, 2), 50)
    for layer in (40, 3, 17, 21, 22, 30, 31, 47):
        load_NE[layer] += [1, -1]
    load_NE[5] += [40, -40]
    heading, *lines = heat_strip(load_NE, range(48))
    assert heading == "the 8 least even of 48 layers"
    # Ties go to the first layers.
    assert [line.split()[1] for line in lines] == ["03", "05", "17", "21", "22", "30", "31", "40"]


def test_a_bar_of_several_experts_is_their_maximum():
    load_NE = np.array([[0, 0, 0, 4, 4, 4, 4, 8, 12, 4]])
    assert heat_strip(load_NE, [0], width=4) == [
        "a bar is the maximum of 3 experts",
        "layer 0 |·▄█▄| max/mean 3.00  dead 3 of 10",
    ]
    heading, line = heat_strip(np.ones((1, 384)), [0])
    assert heading == "a bar is the maximum of 6 experts"
    assert line.split("|")[1] == 64 * "▄"


def test_the_image_is_white_at_the_mean_blue_below_red_above_black_without_tokens():
    load_NE = np.array([[32, 8, 128, 16, 0, 8], [32, 32, 32, 32, 32, 32]])
    half_way = tuple((white + blue) // 2 for white, blue in zip(WHITE, BLUE, strict=True))
    image = heat_map(load_NE)
    assert image.dtype == np.uint8 and image.shape == (2 * 32, 6 * 32, 3)
    first, second = cells(image, 32)
    assert first == [WHITE, BLUE, RED, (128, 160, 224), BLACK, BLUE]
    assert np.abs(np.subtract(first[3], half_way)).max() <= 1
    assert second == 6 * [WHITE]


def test_the_image_of_several_steps_shows_their_sum():
    steps = [np.array([[2, 0, 1]]), np.array([[0, 0, 5]]), np.array([[2, 0, 2]])]
    np.testing.assert_array_equal(heat_map(steps), heat_map(np.array([[4, 0, 8]])))
    (row,) = cells(heat_map(steps), 32)
    assert row[0] == WHITE and row[1] == BLACK and row[2][0] > row[2][1]


@pytest.mark.parametrize(
    "num_layers, num_experts, pixels, shape",
    [(2, 8, 32, (2, 8)), (48, 32, 10, (48, 32)), (61, 384, 8, (61, 384)), (3, 1025, 8, (3, 342))],
)
def test_cells_have_at_least_8_pixels_and_the_image_is_bounded(
    num_layers, num_experts, pixels, shape
):
    load_NE = np.random.default_rng(0).integers(0, 9, (num_layers, num_experts))
    image = heat_map(load_NE)
    assert image.shape == (shape[0] * pixels, shape[1] * pixels, 3)
    assert pixels >= 8 and max(image.shape) <= 512 * 8
    cells(image, pixels)


def test_a_cell_of_several_experts_is_their_maximum():
    load_E = np.zeros(1024)
    load_E[6:8] = [1, 5000]
    load_E[9] = 1
    (row,) = cells(heat_map(load_E[None]), 8)
    assert row == 3 * [BLACK] + [RED, BLUE] + 507 * [BLACK]


def test_without_tokens_metrics_are_finite_and_there_is_no_warning():
    load_NE = np.zeros((2, 3))
    metrics = load_metrics(arrays(load_NE), [0, 1])
    assert metrics["moe/load_max_over_mean"] == metrics["moe/dropped"] == 0
    assert metrics["moe/dead_experts"] == 6
    assert heat_strip(load_NE, [0, 1])[1] == "layer 1 |···| max/mean 0.00  dead 3 of 3"
    assert cells(heat_map(load_NE), 32) == 2 * [3 * [BLACK]]
    assert HealthWatch([0, 1], HealthLimits()).warnings(arrays(load_NE)) == []


def test_a_diverged_router_is_still_reported():
    warned = arrays(LOAD_NE, [math.nan, 0.5])
    warned["entropy_N"][:] = math.nan
    assert math.isnan(load_metrics(warned, [0, 1])["moe/layer_1/entropy"])
    (line,) = HealthWatch([0, 1], HealthLimits(max_dead=1.0)).warnings(warned)
    assert "layer 1: fraction of assignments dropped is 0.5" in line


def test_a_warning_names_layer_value_limit_and_remedy():
    load_NE = np.array([[5, 1, 0], [9, 0, 0], [2, 2, 2]])
    watch = HealthWatch([8, 9, 10], HealthLimits(max_load=2.0, max_dropped=0.125, max_dead=0.25))
    balance = "raise model.moe.router_aux_loss_coef or model.moe.bias_update_speed"
    assert watch.warnings(arrays(load_NE, [0.5, 0.25, 0.125])) == [
        "layer 09: largest over mean expert load is 3, above training.health.max_load=2 "
        f"(worst of 2 such layers among 3 MoE layers); {balance}",
        "layer 09: fraction of experts without a token is 0.6667, above "
        "training.health.max_dead=0.25 "
        f"(worst of 2 such layers among 3 MoE layers); {balance}",
        "layer 08: fraction of assignments dropped is 0.5, above "
        "training.health.max_dropped=0.125 "
        "(worst of 2 such layers among 3 MoE layers); raise model.moe.capacity_factor",
    ]


def test_a_value_equal_to_its_limit_is_accepted():
    limits = HealthLimits(max_load=2.0, max_dropped=0.5, max_dead=0.25)
    load_NE = np.array([[8, 4, 4, 0]])
    assert HealthWatch([0], limits).warnings(arrays(load_NE, [0.5])) == []
    tighter = HealthLimits(max_load=1.99, max_dropped=0.49, max_dead=0.24)
    assert len(HealthWatch([0], tighter).warnings(arrays(load_NE, [0.5]))) == 3


def warned_steps(faulty: set[int], steps: int) -> list[int]:
    """Return the steps with a warning for a fault that exists in the given steps."""
    watch = HealthWatch([0], HealthLimits(max_dead=1.0, max_load=2.0))
    even, uneven = arrays([[2, 2, 2]]), arrays([[6, 0, 0]])
    warned = Counter[int]()
    for step in range(1, steps + 1):
        warned[step] = len(watch.warnings(uneven if step in faulty else even))
    return sorted(warned.elements())


def test_a_lasting_fault_is_reported_every_hundred_steps():
    assert warned_steps(set(range(7, 300)), 400) == [7, 107, 207]


@pytest.mark.parametrize("steps_without, again", [(1, False), (19, False), (20, True), (90, True)])
def test_a_fault_that_reappears_is_reported_after_twenty_steps_without_it(steps_without, again):
    back = 11 + steps_without
    assert warned_steps({10, back}, 120) == ([10, back] if again else [10])


def test_an_intermittent_fault_is_reported_every_hundred_steps():
    assert warned_steps(set(range(5, 300, 3)), 400) == [5, 107, 209]
