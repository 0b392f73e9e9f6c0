"""Order in which an exchange sends its blocks on a torus, with chips that are only coordinates."""

import itertools
from functools import partial
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from model import moe_backend
from model.config import ModelConfig, MoEConfig
from model.moe_backend import choose_experts, sending_order
from parallel.experts import grouped_kernels as kernels


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
    config = ModelConfig(moe=MoEConfig(num_experts=16, **settings))
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
        choose_experts(ModelConfig(moe=moe), manager, dropless=dropless)
        for dropless in (False, True)
    )
    assert (training.exchange, evaluation.exchange) == ("alltoall", "ragged")


@pytest.mark.parametrize(
    ("kind", "sizes", "dtype", "name", "block"),
    [
        ("TPU v5", (4096, 14336), "bfloat16", "pallas", 512),
        ("TPU v5", (4096, 14336), "float32", "pallas", 256),
        ("TPU v5", (6144, 32768), "bfloat16", "pallas", 128),
        ("TPU v4", (2048, 768), "bfloat16", "pallas", 512),
        ("TPU v4", (4096, 7168), "bfloat16", "pallas", 256),
        ("TPU v4", (4096, 14336), "bfloat16", "ragged_dot", 128),
    ],
)
def test_kernels_that_do_not_fit_into_vmem_get_smaller_blocks_or_are_not_chosen(
    monkeypatch, kind, sizes, dtype, name, block
) -> None:
    hidden, expert = sizes
    chips = mesh(kind, (2, 2, 2), ep=8)
    manager = SimpleNamespace(mesh=chips, axis_size=lambda _: 1, resolve=lambda _: ("ep",))
    moe = MoEConfig(num_experts=8, moe_intermediate_size=expert)
    config = ModelConfig(hidden_size=hidden, dtype=dtype, moe=moe)
    choice = choose_experts(config, manager, dropless=True)
    assert (choice.grouped_matmul, choice.block) == (name, block)
    assert ("do not fit" in choice.reason) == (name == "ragged_dot")
    if name == "ragged_dot":
        return
    monkeypatch.setattr(kernels, "_vmem_bytes", lambda: kernels._vmem_of(kind))
    steps = kernels.GridSteps(block, *[jnp.zeros(1, jnp.int32)] * 3)
    rows = [jax.ShapeDtypeStruct((block, width), dtype) for width in sizes]
    for (x, g), shape in ((rows, sizes), (rows[::-1], sizes[::-1])):
        w = jax.ShapeDtypeStruct((1, *shape), dtype)
        for transpose_w in (False, True):
            given = g if transpose_w else x
            jax.eval_shape(partial(kernels.gmm, steps=steps, transpose_w=transpose_w), given, w)
        jax.eval_shape(partial(kernels.tgmm, steps=steps, num_groups=1), x, g)


def test_kernels_that_are_asked_for_and_do_not_fit_are_refused() -> None:
    manager = SimpleNamespace(mesh=mesh("TPU v4", (1,), ep=1), axis_size=lambda _: 1)
    moe = MoEConfig(num_experts=8, moe_intermediate_size=14336, grouped_matmul="pallas")
    with pytest.raises(ValueError, match="pallas kernels for 4096 x 14336 values of an expert"):
        choose_experts(ModelConfig(hidden_size=4096, moe=moe), manager, dropless=True)


def test_an_absent_package_is_refused_with_the_extra_that_has_it(monkeypatch) -> None:
    gpu = SimpleNamespace(device_kind="NVIDIA H100", platform="gpu", compute_capability="9.0")
    chips = SimpleNamespace(devices=np.array([gpu]), axis_names=("ep",))
    manager = SimpleNamespace(mesh=chips, axis_size=lambda _: 1)
    config = ModelConfig(moe=MoEConfig(num_experts=16, grouped_matmul="tokamax"))
    monkeypatch.setattr(moe_backend, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r"grouped_matmul=tokamax needs tokamax.*\[gpu\]"):
        choose_experts(config, manager)
    monkeypatch.setattr(moe_backend, "find_spec", lambda name: True)
    assert choose_experts(config, manager).grouped_matmul == "tokamax"
