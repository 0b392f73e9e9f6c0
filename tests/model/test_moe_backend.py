"""Order in which an exchange sends its blocks on a torus, with chips that are only coordinates."""

import itertools
from types import SimpleNamespace

import numpy as np
import pytest

from model import moe_backend
from model.config import MoEConfig
from model.moe_backend import choose_experts, sending_order


def mesh(kind: str, sides: tuple[int, ...], **sizes: int) -> SimpleNamespace:
    """Return a mesh of the chips of a slice in row-major order, as far as `sending_order` reads."""
    places = itertools.product(*map(range, sides))
    chips = np.array(
        [SimpleNamespace(device_kind=kind, coords=place, platform="tpu") for place in places]
    )
    return SimpleNamespace(devices=chips.reshape(*sizes.values()), axis_names=tuple(sizes))


def test_blocks_that_share_no_link_follow_one_another() -> None:
    order = sending_order(mesh("TPU v5", (2, 2, 4), ep=16), ["ep"])
    # Ranks are places: distance 8 goes along x, 4 along y, 1 to 3 along z. Two of these travel at
    # once unless one takes all links.
    assert order == (14, 6, 8, 10, 4, 13, 3, 15, 1, 2, 12, 5, 11, 7, 9)


@pytest.mark.parametrize("axes", [["ep"], ["fsdp", "ep"]], ids="-".join)
@pytest.mark.parametrize(
    "sizes", [{"fsdp": 2, "ep": 8}, {"ep": 4, "fsdp": 4}, {"fsdp": 4, "ep": 4}]
)
def test_every_distance_comes_once_whatever_the_other_axes_are(sizes, axes) -> None:
    n = np.prod([sizes[name] for name in axes])
    order = sending_order(mesh("TPU v5", (2, 2, 4), **sizes), axes)
    assert sorted(order) == list(range(1, n))


def test_devices_without_known_links_have_no_order() -> None:
    assert sending_order(mesh("cpu", (2, 2), ep=4), ["ep"]) == ()


@pytest.mark.parametrize(
    ("settings", "dropless", "has_order"),
    [
        ({"exchange_chunks": 4}, False, True),
        ({"exchange_chunks": 4, "capacity_factor": None}, False, True),
        ({"exchange_chunks": 4}, True, False),
        ({"exchange_chunks": 1}, False, False),
        ({"exchange": "ragged"}, False, False),
    ],
    ids=str,
)
def test_only_an_exchange_in_chunks_has_an_order(settings, dropless, has_order) -> None:
    chips = mesh("TPU v5", (2, 2, 4), ep=16)
    manager = SimpleNamespace(mesh=chips, axis_size=lambda _: 16, resolve=lambda _: ("ep",))
    config = SimpleNamespace(moe=MoEConfig(num_experts=16, **settings))
    choice = choose_experts(config, manager, dropless=dropless)
    assert choice.distances == (sending_order(chips, ["ep"]) if has_order else ())
    assert ("collective permutes during" in choice.reason) == has_order


@pytest.mark.parametrize("chunks", [1, 4])
def test_evaluation_sends_only_assigned_rows_whatever_training_does(chunks) -> None:
    """With 16 experts and 2 per token, buffers without a capacity hold 8 times the rows."""
    chips = mesh("TPU v5", (2, 2, 4), ep=16)
    manager = SimpleNamespace(mesh=chips, axis_size=lambda _: 16, resolve=lambda _: ("ep",))
    moe = MoEConfig(num_experts=16, exchange_chunks=chunks, capacity_factor=1.25)
    training, evaluation = (
        choose_experts(SimpleNamespace(moe=moe), manager, dropless=dropless)
        for dropless in (False, True)
    )
    assert (training.exchange, evaluation.exchange) == ("alltoall", "ragged")


def test_an_absent_package_is_refused_with_the_extra_that_has_it(monkeypatch) -> None:
    gpu = SimpleNamespace(device_kind="NVIDIA H100", platform="gpu", compute_capability="9.0")
    chips = SimpleNamespace(devices=np.array([gpu]), axis_names=("ep",))
    manager = SimpleNamespace(mesh=chips, axis_size=lambda _: 1)
    config = SimpleNamespace(moe=MoEConfig(num_experts=16, grouped_matmul="tokamax"))
    monkeypatch.setattr(moe_backend, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r"grouped_matmul=tokamax needs tokamax.*\[gpu\]"):
        choose_experts(config, manager)
    monkeypatch.setattr(moe_backend, "find_spec", lambda name: True)
    assert choose_experts(config, manager).grouped_matmul == "tokamax"
