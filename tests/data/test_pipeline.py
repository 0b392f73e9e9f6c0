"""A batch is a pure function of files, seed and step; it is the same on one device and on many."""

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import Mesh, NamedSharding, SingleDeviceSharding
from jax.sharding import PartitionSpec as P

from data.packing import FIELDS
from data.pipeline import DataConfig, Rows, eval_batches, global_batch, train_batches

LENGTH, BATCH = 8, 4


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A text of 61 rows, no two alike, and a second file to change."""
    folder = tmp_path_factory.mktemp("texts")
    (folder / "a.txt").write_text("".join(f"{n:07d} " for n in range(61)))
    return folder


def rows_in(folder, **changes) -> Rows:
    values = {
        "files": str(folder / "*.txt"),
        "sequence_length": LENGTH,
        "global_batch_size": BATCH,
        "eval_fraction": 0.1,
        "cache_dir": str(folder / "cache"),
    }
    return Rows(DataConfig(**{**values, **changes}))


def one_device() -> SingleDeviceSharding:
    return SingleDeviceSharding(jax.devices()[0])


def eight_devices() -> NamedSharding:
    """Rows over four, tokens over two; both dims of a row's device grid."""
    mesh = Mesh(np.array(jax.devices()).reshape(4, 2), ("rows", "tokens"))
    return NamedSharding(mesh, P(None, "rows", "tokens"))


def steps(rows: Rows, start: int, stop: int, accumulation: int = 1) -> list[dict]:
    batches = train_batches(rows, one_device(), start=start, stop=stop, accumulation=accumulation)
    return [{name: np.asarray(field) for name, field in batch.items()} for batch in batches]


def assert_equal(left, right):
    assert len(left) == len(right)
    jax.tree.map(np.testing.assert_array_equal, left, right)


def names_of(row_of, count: int, start: int = 0) -> list[bytes]:
    """Rows told apart by their tokens."""
    return [row_of(index)["tokens"].tobytes() for index in range(start, start + count)]


def numbered_row(index: int) -> dict[str, np.ndarray]:
    """Row whose fields say which row, which field and which place they are."""
    places = np.arange(LENGTH)
    return {name: 1000 * index + 100 * f + places for f, name in enumerate(FIELDS)}


def test_fresh_rows_give_the_same_batches_wherever_the_store_lies(folder, tmp_path):
    moved = rows_in(folder, cache_dir=str(tmp_path))
    assert_equal(steps(rows_in(folder), 0, 20), steps(moved, 0, 20))


@settings(max_examples=10, deadline=None)
@given(seed=st.integers(0, 2**31), start=st.integers(0, 30))
def test_a_resumed_order_equals_the_undisturbed_one(folder, seed, start):
    whole = steps(rows_in(folder, seed=seed), 0, start + 2)
    assert_equal(steps(rows_in(folder, seed=seed), start, start + 2), whole[start:])


def test_batches_are_the_rows_of_the_order_one_after_another(folder):
    rows = rows_in(folder)
    for step, batch in enumerate(steps(rows, 0, 3)):
        wanted = [rows.train_row(step * BATCH + b) for b in range(BATCH)]
        for name in FIELDS:
            np.testing.assert_array_equal(batch[name], np.stack([r[name] for r in wanted])[None])


def test_another_seed_gives_another_order_of_the_same_rows(folder):
    one, two = rows_in(folder, seed=1), rows_in(folder, seed=2)
    first, second = (names_of(rows.train_row, rows.num_train) for rows in (one, two))
    assert first != second and sorted(first) == sorted(second)


@pytest.mark.parametrize("fraction", [0.0, 0.01, 0.1, 0.5, 0.98])
def test_training_and_held_out_rows_are_disjoint_and_together_all(folder, fraction):
    rows = rows_in(folder, eval_fraction=fraction)
    train = names_of(rows.train_row, rows.num_train)
    held_out = names_of(rows.eval_row, rows.num_eval)
    every = {np.array(list(b"%07d " % n), np.int32).tobytes() for n in range(61)}
    assert len(train) + len(held_out) == 61
    assert {*train, *held_out} == every
    assert len(held_out) == (max(1, round(61 * fraction)) if fraction else 0)


@pytest.mark.parametrize("epoch", range(3))
def test_no_epoch_trains_on_a_held_out_row(folder, epoch):
    rows = rows_in(folder)
    train = names_of(rows.train_row, rows.num_train, epoch * rows.num_train)
    assert not {*train} & {*names_of(rows.eval_row, rows.num_eval)}


def test_the_held_out_rows_do_not_depend_on_the_seed(folder):
    one, two = rows_in(folder, seed=1), rows_in(folder, seed=2)
    assert names_of(one.eval_row, one.num_eval) == names_of(two.eval_row, two.num_eval)


def test_every_epoch_visits_every_row_once_in_an_order_of_its_own(folder):
    rows = rows_in(folder)
    epochs = [names_of(rows.train_row, rows.num_train, e * rows.num_train) for e in range(3)]
    assert all(len(set(epoch)) == rows.num_train for epoch in epochs)
    assert all(set(epoch) == set(epochs[0]) for epoch in epochs)
    assert epochs[0] != epochs[1] != epochs[2] != epochs[0]
    assert rows.epoch_tokens == rows.num_train * LENGTH


@pytest.mark.parametrize("shape", [(1, 8, LENGTH), (2, 4, LENGTH), (3, 4, LENGTH)])
def test_a_batch_holds_the_same_numbers_on_many_devices_as_on_one(shape):
    many = global_batch(numbered_row, 5, shape, eight_devices())
    one = global_batch(numbered_row, 5, shape, one_device())
    for name in FIELDS:
        assert many[name].shape == shape and many[name].sharding == eight_devices()
        assert np.asarray(many[name]).tobytes() == np.asarray(one[name]).tobytes()


@pytest.mark.parametrize("accumulation", [1, 2, 4])
def test_accumulation_cuts_the_same_rows_in_the_same_order(folder, accumulation):
    whole = steps(rows_in(folder), 3, 5)
    parts = steps(rows_in(folder), 3, 5, accumulation)
    for batch, cut in zip(whole, parts, strict=True):
        for name in FIELDS:
            assert cut[name].shape == (accumulation, BATCH // accumulation, LENGTH)
            np.testing.assert_array_equal(cut[name].reshape(1, BATCH, LENGTH), batch[name])


def test_a_row_is_read_once_however_many_devices_and_fields_show_it():
    reads = []

    def read(row):
        reads.append(row)
        return numbered_row(row)

    global_batch(read, 40, (2, 4, LENGTH), eight_devices())
    assert sorted(reads) == list(range(40, 48))


@pytest.mark.parametrize("device", range(8))
def test_a_host_reads_only_the_rows_that_its_device_holds(monkeypatch, device):
    shape, reads = (2, 8, LENGTH), []

    def read(row):
        reads.append(row)
        return numbered_row(row)

    def on_one_device(shape, sharding, callback):
        return callback(sharding.devices_indices_map(shape)[jax.devices()[device]])

    monkeypatch.setattr(jax, "make_array_from_callback", on_one_device)
    block = global_batch(read, 0, shape, eight_devices())
    own, half = device // 2 * 2, device % 2 * LENGTH // 2
    assert sorted(reads) == [own, own + 1, 8 + own, 8 + own + 1]
    wanted = [[numbered_row(8 * a + own + b)["targets"] for b in range(2)] for a in range(2)]
    np.testing.assert_array_equal(
        block["targets"], np.array(wanted)[..., half : half + LENGTH // 2]
    )


def test_a_short_evaluation_batch_is_filled_up_with_rows_that_do_not_count(folder):
    rows = rows_in(folder)
    assert rows.num_eval == 6
    batches = list(eval_batches(rows, one_device(), batch_size=4, limit=9))
    assert [batch["tokens"].shape for batch in batches] == [(1, 4, LENGTH)] * 2
    mask = np.concatenate([np.asarray(batch["loss_mask"])[0] for batch in batches])
    tokens = np.concatenate([np.asarray(batch["tokens"])[0] for batch in batches])
    for index in range(6):
        np.testing.assert_array_equal(mask[index], rows.eval_row(index)["loss_mask"])
        np.testing.assert_array_equal(tokens[index], rows.eval_row(index)["tokens"])
    assert mask[:6].any(axis=1).all() and not mask[6:].any()


@pytest.mark.parametrize(("limit", "count"), [(1, 1), (2, 2), (3, 3), (4, 3)])
def test_evaluation_stops_at_the_limit_or_at_the_last_held_out_row(folder, limit, count):
    batches = eval_batches(rows_in(folder), one_device(), batch_size=2, limit=limit)
    assert len(list(batches)) == count


def test_without_held_out_rows_there_is_no_evaluation_batch(folder):
    rows = rows_in(folder, eval_fraction=0.0)
    assert list(eval_batches(rows, one_device(), batch_size=2, limit=4)) == []


def test_equal_orders_have_equal_hashes_and_different_ones_do_not(folder, tmp_path):
    base = rows_in(folder).order_hash
    assert base == rows_in(folder, cache_dir=str(tmp_path / "elsewhere")).order_hash
    (tmp_path / "a.txt").write_text((folder / "a.txt").read_text())
    assert base == rows_in(tmp_path).order_hash
    (tmp_path / "a.txt").write_text((folder / "a.txt").read_text().replace("33 ", "3! "))
    others = [
        rows_in(tmp_path).order_hash,
        rows_in(folder, seed=1).order_hash,
        rows_in(folder, sequence_length=4).order_hash,
        rows_in(folder, eval_fraction=0.2).order_hash,
    ]
    assert len({base, *others}) == 5


def test_equal_hashes_give_equal_batches(folder):
    """The promise of `order_hash`: step n of another batch size is made of other rows."""
    one, two = rows_in(folder), rows_in(folder, global_batch_size=2 * BATCH)
    assert steps(one, 3, 4)[0]["tokens"].shape != steps(two, 3, 4)[0]["tokens"].shape
    assert one.order_hash != two.order_hash
