"""A batch is a function of text, weights, seed and step, on any hosts and after any resume."""

import dataclasses
import hashlib
import json
import math
import os
import socket
import subprocess
import sys
import textwrap
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import jax
import numpy as np
import pytest
from conftest import ROOT, release
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import Mesh, NamedSharding, SingleDeviceSharding
from jax.sharding import PartitionSpec as P

from data.batch import FIELDS
from data.config import DataConfig
from data.order_changes import explain_change
from data.pipeline import (
    Dataset,
    _ReadLocalRows,
    eval_batches,
    local_rows,
    make_global_batch,
    train_batches,
)

LENGTH, BATCH = 8, 8


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_sources(tmp_path_factory.mktemp("texts"))


def write_sources(folder):
    """Two sources: one of letters, one of digits."""
    (folder / "a.txt").write_text("".join(f"{n:07d} " for n in range(61)))
    lines = [json.dumps({"text": "abcdefgh"[n % 8] * (1 + n * 7 % 23)}) for n in range(90)]
    (folder / "b.jsonl").write_text("\n".join(lines))
    return folder


def rows_in(folder, **changes) -> Dataset:
    values = {
        "sources": {
            "digits": {"files": str(folder / "a.txt"), "weight": {0: 3.0, 5: 1.0}},
            "letters": {"files": str(folder / "b.jsonl")},
        },
        "sequence_length": LENGTH,
        "global_batch_size": BATCH,
        "eval_fraction": 0.1,
        "cache_dir": str(folder / "cache"),
    }
    return Dataset(DataConfig(**{**values, **changes}))


def single(folder, **changes) -> Dataset:
    return rows_in(folder, **{"sources": {}, "files": str(folder / "a.txt"), **changes})


def one_device() -> SingleDeviceSharding:
    return SingleDeviceSharding(jax.devices()[0])


def eight_devices() -> NamedSharding:
    """Rows over four, tokens over two; both dims of a row's device grid."""
    mesh = Mesh(np.array(jax.devices()).reshape(4, 2), ("rows", "tokens"))
    return NamedSharding(mesh, P(None, "rows", "tokens"))


def rows_over_eight() -> NamedSharding:
    return NamedSharding(Mesh(np.array(jax.devices()), ("rows",)), P(None, "rows"))


@dataclasses.dataclass
class OfHost:
    """The sharding as one of several processes sees it: its own devices are addressable."""

    sharding: NamedSharding
    host: int
    num_hosts: int

    def addressable_devices_indices_map(self, shape):
        every = self.sharding.devices_indices_map(shape)
        count = len(every) // self.num_hosts
        own = jax.devices()[self.host * count : (self.host + 1) * count]
        return {device: every[device] for device in own}


def steps(rows: Dataset, start: int, stop: int, accumulation: int = 1) -> list[dict]:
    batches = train_batches(rows, one_device(), start=start, stop=stop, accumulation=accumulation)
    return [{name: np.asarray(field) for name, field in batch.items()} for batch in batches]


def assert_equal(left, right):
    assert len(left) == len(right)
    for one, other in zip(left, right, strict=True):
        assert set(one) == set(other) == set(FIELDS)
        for name in FIELDS:
            assert one[name].shape == other[name].shape
            assert one[name].tobytes() == other[name].tobytes()


def digests(batches) -> list[str]:
    return [
        hashlib.sha256(b"".join(np.asarray(batch[name]).tobytes() for name in FIELDS)).hexdigest()
        for batch in batches
    ]


# Everything at once: two sources, changing weights, changing batches and lengths.
CHANGING = {
    "global_batch_size": {0: 8, 20: 16, 60: 8},
    "sequence_length": {0: 2, 10: 4, 40: 8},
}


@pytest.mark.parametrize("packing", ["split", "best_fit"])
@pytest.mark.parametrize("num_hosts", [1, 2, 4, 8])
def test_hosts_together_hold_the_bytes_of_the_batch(folder, packing, num_hosts):
    rows = rows_in(folder, packing=packing, **CHANGING)
    whole = steps(rows, 0, 201)
    for step, batch in enumerate(whole):
        phase = rows.schedule.at(step)
        shape = (1, phase.batch_size, phase.length)
        found = {}
        for host in range(num_hosts):
            held = local_rows(OfHost(rows_over_eight(), host, num_hosts), shape)
            assert len(held) == phase.batch_size // num_hosts
            _, fields = _ReadLocalRows(rows, {phase.batch_size: held})(step)
            found |= {
                int(row): {name: fields[name][n] for name in FIELDS} for n, row in enumerate(held)
            }
        assert sorted(found) == list(range(phase.batch_size))
        for name in FIELDS:
            together = np.stack([found[row][name] for row in range(phase.batch_size)])
            assert together.tobytes() == batch[name].tobytes()


@settings(max_examples=10)
@given(seed=st.integers(0, 2**31), start=st.integers(0, 70))
def test_a_resumed_order_equals_the_undisturbed_one(folder, seed, start):
    whole = steps(rows_in(folder, seed=seed, **CHANGING), 0, start + 2)
    assert_equal(steps(rows_in(folder, seed=seed, **CHANGING), start, start + 2), whole[start:])


def python(code: str, *args) -> subprocess.Popen:
    """A fresh process that knows this file's names."""
    paths = [str(ROOT / part) for part in ("", "tests", "tests/data")]
    main = (
        f"from test_pipeline import *\nif __name__ == '__main__':\n{textwrap.indent(code, '    ')}"
    )
    script = Path(args[0]) / f"{hashlib.sha256(main.encode()).hexdigest()}.py"
    if not script.exists():  # else a process that was started before reads it half written
        script.write_text(main)
    return subprocess.Popen(
        [sys.executable, script, *map(str, args)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths), "JAX_PLATFORMS": "cpu"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def lines_of(process: subprocess.Popen) -> list[str]:
    out, err = process.communicate()
    assert process.returncode == 0, err[-2000:]
    return out.split()


FRESH = """
rows = rows_in(Path(sys.argv[2]), num_workers=int(sys.argv[3]), **CHANGING)
start = int(sys.argv[4])
batches = train_batches(rows, one_device(), start=start, stop=201, accumulation=1)
print(*digests(batches), sep="\\n")
"""


@pytest.mark.slow
@pytest.mark.parametrize(("workers", "start"), [(2, 0), release(0, 0), release(2, 77)])
def test_a_fresh_process_with_any_workers_reads_the_same_bytes(folder, tmp_path, workers, start):
    process = python(FRESH, tmp_path, folder, workers, start)
    assert lines_of(process) == digests(steps(rows_in(folder, **CHANGING), start, 201))


HOST = """
port, host, num_hosts = map(int, sys.argv[3:])
jax.config.update("jax_num_cpu_devices", 8 // num_hosts)
jax.distributed.initialize(f"127.0.0.1:{port}", num_hosts, host)
rows = rows_in(Path(sys.argv[2]), **CHANGING)
sharding = rows_over_eight()
for step, batch in enumerate(train_batches(rows, sharding, start=0, stop=201, accumulation=1)):
    for name in FIELDS:
        for shard in batch[name].addressable_shards:
            place = shard.index[1].start or 0
            print(f"{step}/{name}/{place}/{np.asarray(shard.data).tobytes().hex()}")
"""


@pytest.mark.slow
@pytest.mark.parametrize("num_hosts", [2, release(4), release(8)])
def test_real_processes_together_hold_the_bytes_of_the_batch(folder, tmp_path, num_hosts):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    hosts = [python(HOST, tmp_path, folder, port, host, num_hosts) for host in range(num_hosts)]
    with ThreadPoolExecutor(num_hosts) as pool:
        expected_text = {
            line for lines in pool.map(lines_of, hosts) for line in lines if "/" in line
        }
    wanted = {
        f"{step}/{name}/{place}/{batch[name][:, place : place + size].tobytes().hex()}"
        for step, batch in enumerate(steps(rows_in(folder, **CHANGING), 0, 201))
        for name in FIELDS
        for size in [batch[name].shape[1] // 8]
        for place in range(0, batch[name].shape[1], size)
    }
    assert expected_text == wanted


def test_batches_are_the_rows_that_the_mixture_names_one_after_another(folder):
    rows = rows_in(folder)
    for step, batch in enumerate(steps(rows, 0, 9)):
        for b in range(BATCH):
            source, index = rows.rows_of(step)[0].locate(step * BATCH + b)
            wanted = rows.sources[source].train_row(index)
            for name in FIELDS:
                np.testing.assert_array_equal(batch[name][0, b], wanted[name])


def letters_of(batch) -> int:
    """Rows of the second source, which holds no digit."""
    tokens = batch["tokens"][0]
    return int(((tokens >= ord("a")) & (tokens <= ord("h"))).any(axis=1).sum())


def test_rows_follow_the_weights_of_their_step(folder):
    batches = steps(rows_in(folder), 0, 10)
    assert sum(letters_of(batch) for batch in batches[:5]) == 10
    assert sum(letters_of(batch) for batch in batches[5:]) == 20


def test_progress_counts_the_tokens_and_epochs_of_every_source(folder):
    rows = rows_in(folder)
    progress = rows.progress(10)
    # But for padding, of which only the last row of an epoch has some.
    assert progress["data/letters/tokens"] == pytest.approx(30 * LENGTH, rel=0.02)
    assert progress["data/digits/tokens"] == pytest.approx(50 * LENGTH, rel=0.02)
    num_rows = rows.sources[0].packed.train.num_rows
    assert progress["data/digits/epoch"] == pytest.approx(50 / num_rows)
    assert f"digits {50 / num_rows:.3g}, letters " in rows.describe_epochs(10)
    assert set(rows.progress(0).values()) == {0}


def test_every_epoch_visits_every_row_once_in_an_order_of_its_own(folder):
    source = single(folder).sources[0]
    count = source.packed.train.num_rows
    epochs = [
        [source.train_row(e * count + n)["tokens"].tobytes() for n in range(count)]
        for e in range(3)
    ]
    assert all(sorted(epoch) == sorted(epochs[0]) for epoch in epochs)
    assert epochs[0] != epochs[1] != epochs[2] != epochs[0]


def test_every_source_has_an_order_of_its_own(folder):
    rows = rows_in(folder, sources={n: {"files": str(folder / "a.txt")} for n in "ab"}).sources
    orders = [[s.train_row(n)["tokens"].tolist() for n in range(s.num_items)] for s in rows]
    assert sorted(orders[0]) == sorted(orders[1]) and orders[0] != orders[1]


def test_another_seed_gives_another_order_of_the_same_rows(folder):
    one, two = single(folder, seed=1).sources[0], single(folder, seed=2).sources[0]
    count = one.packed.train.num_rows
    first, second = ([s.train_row(n)["tokens"].tobytes() for n in range(count)] for s in (one, two))
    assert first != second and sorted(first) == sorted(second)


def test_training_and_held_out_rows_are_disjoint_and_together_all(folder):
    source = single(folder).sources[0]
    tokens = [
        row["tokens"][row["segment_ids"] >= 0]
        for read, count in (
            (source.train_row, source.packed.train.num_rows),
            (source.eval_row, source.num_eval),
        )
        for row in map(read, range(count))
    ]
    assert sorted(np.concatenate(tokens)) == sorted(source.store.tokens[:])


def test_the_held_out_rows_do_not_depend_on_seed_or_weights(folder):
    def held_out(rows):
        return [rows.sources[1].eval_row(n)["tokens"].tobytes() for n in range(3)]

    assert held_out(rows_in(folder, seed=1)) == held_out(rows_in(folder, seed=2))


@pytest.mark.parametrize("accumulation", [1, 2, 4])
def test_accumulation_cuts_the_same_rows_in_the_same_order(folder, accumulation):
    whole = steps(rows_in(folder), 3, 5)
    parts = steps(rows_in(folder), 3, 5, accumulation)
    for batch, cut in zip(whole, parts, strict=True):
        for name in FIELDS:
            assert cut[name].shape == (accumulation, BATCH // accumulation, LENGTH)
            np.testing.assert_array_equal(cut[name].reshape(1, BATCH, LENGTH), batch[name])


@pytest.mark.parametrize("shape", [(1, 8, LENGTH), (2, 4, LENGTH), (3, 4, LENGTH)])
def test_a_batch_holds_the_same_numbers_on_many_devices_as_on_one(shape):
    count = shape[0] * shape[1]
    fields = {
        name: (1000 * n + np.arange(count * LENGTH)).reshape(count, LENGTH).astype(np.int32)
        for n, name in enumerate(FIELDS)
    }
    for sharding in (eight_devices(), one_device()):
        held = local_rows(sharding, shape)
        placed = make_global_batch(fields, held, shape, sharding)
        for name in FIELDS:
            assert placed[name].sharding == sharding
            np.testing.assert_array_equal(placed[name], fields[name].reshape(shape))


@pytest.mark.parametrize("host", range(4))
def test_a_host_reads_only_the_rows_that_its_devices_hold(host):
    held = local_rows(OfHost(eight_devices(), host, 4), (2, 8, LENGTH))
    assert held.tolist() == [2 * host, 2 * host + 1, 8 + 2 * host, 8 + 2 * host + 1]


def test_a_short_evaluation_batch_is_filled_up_with_rows_that_do_not_count(folder):
    source = rows_in(folder).sources[1]
    count = source.num_eval
    assert count % 5
    batches = list(eval_batches(source, one_device(), batch_size=5, limit=99))
    assert [batch["tokens"].shape for batch in batches] == [(1, 5, LENGTH)] * math.ceil(count / 5)
    mask = np.concatenate([np.asarray(batch["loss_mask"])[0] for batch in batches])
    tokens = np.concatenate([np.asarray(batch["tokens"])[0] for batch in batches])
    for index in range(count):
        np.testing.assert_array_equal(mask[index], source.eval_row(index)["loss_mask"])
        np.testing.assert_array_equal(tokens[index], source.eval_row(index)["tokens"])
    assert mask[:count].any() and not mask[count:].any()


@pytest.mark.parametrize("limit", [1, 2])
def test_evaluation_stops_at_the_limit(folder, limit):
    source = rows_in(folder).sources[1]
    assert len(list(eval_batches(source, one_device(), batch_size=2, limit=limit))) == limit


def test_without_held_out_rows_there_is_no_evaluation_batch(folder):
    source = single(folder, eval_fraction=0.0).sources[0]
    assert list(eval_batches(source, one_device(), batch_size=2, limit=4)) == []


def test_equal_orders_have_equal_hashes_for_any_folder_of_the_text(folder, tmp_path):
    (tmp_path / "a.txt").write_text((folder / "a.txt").read_text())
    assert single(folder).order_hash(7) == single(tmp_path).order_hash(7)
    assert_equal(steps(single(folder), 0, 9), steps(single(tmp_path), 0, 9))


@pytest.mark.parametrize(
    ("changes", "expected_text"),
    [
        ({"seed": 1}, "data.seed was 0, is now 1"),
        ({"packing": "best_fit"}, "data.packing was 'split', is now 'best_fit'"),
        ({"eval_fraction": 0.2}, "data.eval_fraction was 0.1, is now 0.2"),
        ({"global_batch_size": 16}, "data.global_batch_size was 8, is now 16"),
        ({"sequence_length": 4}, "data.sequence_length was 8, is now 4"),
    ],
)
def test_another_order_has_another_hash_and_says_what_changed(folder, changes, expected_text):
    before, now = rows_in(folder), rows_in(folder, **changes)
    assert before.order_hash(3) != now.order_hash(3)
    assert expected_text in explain_change(before.order(3), now.order(3))
    order = before.order(3)
    assert explain_change(order, order) == ""
    assert explain_change(order | {"x": 1}, order) == "data.x was 1, is now None"


def test_the_source_that_changed_is_named(folder, tmp_path):
    def order(step=3, **sources):
        return rows_in(folder, sources=sources).order(step)

    text, lines = {"files": str(folder / "a.txt")}, {"files": str(folder / "b.jsonl")}
    (tmp_path / "a.txt").write_text((folder / "a.txt").read_text().replace("33 ", "3! "))
    changed = {"files": str(tmp_path / "a.txt")}
    base = order(one=text, two=lines)
    assert explain_change(base, order(one=changed, two=lines)) == (
        "the text of source 'one' has changed"
    )
    assert explain_change(base, order(one=text)) == "source 'two' was removed"
    assert explain_change(order(one=text), base) == "source 'two' was added"
    heavier = order(one={**text, "weight": 2.0}, two=lines)
    assert explain_change(base, heavier).startswith("weight of data.sources was {'one': '1/2'")
    doubled = {"one": {**text, "weight": 2.0}, "two": {**lines, "weight": {0: 2.0, 1: 2.0}}}
    assert order(**doubled) == base


def test_the_order_in_which_sources_are_written_means_nothing(folder):
    def rows(*names):
        files = {"one": folder / "a.txt", "two": folder / "b.jsonl"}
        return rows_in(folder, sources={name: {"files": str(files[name])} for name in names})

    one, two = rows("one", "two"), rows("two", "one")
    assert one.order_hash(5) == two.order_hash(5)
    assert_equal(steps(one, 0, 5), steps(two, 0, 5))


def test_progress_does_not_count_padding(folder):
    rows = single(folder, files=str(folder / "b.jsonl"), packing="best_fit")
    num_rows = rows.sources[0].packed.train.num_rows
    rows = single(
        folder, files=str(folder / "b.jsonl"), packing="best_fit", global_batch_size=num_rows
    )
    (batch,) = steps(rows, 0, 1)
    tokens = int((batch["segment_ids"] >= 0).sum())
    assert rows.progress(1)["data/text/tokens"] == tokens < num_rows * LENGTH


def test_what_begins_to_hold_later_may_change_before_a_resume(folder):
    text, lines = {"files": str(folder / "a.txt")}, {"files": str(folder / "b.jsonl")}
    before = rows_in(folder, sources={"one": text})
    later = {
        "sources": {"two": {**lines, "weight": {0: 0.0, 6: 2.0}}, "one": text},
        "global_batch_size": {0: 8, 7: 16},
    }
    now = rows_in(folder, **later)
    assert before.order(6) == now.order(6) and before.order(7) != now.order(7)
    assert_equal(steps(before, 0, 6), steps(now, 0, 6))
    assert letters_of(steps(now, 6, 7)[0]) > 0


def test_files_and_sources_exclude_each_other(folder):
    with pytest.raises(ValueError, match=r"data.files and data.sources are both given; leave one"):
        rows_in(folder, files=str(folder / "a.txt"))


def test_a_run_needs_a_source_with_weight_at_every_step(folder):
    sources = {"one": {"files": str(folder / "a.txt"), "weight": {0: 1.0, 9: 0.0}}}
    with pytest.raises(ValueError, match=r"every weight is 0 from step 9 on; give at least"):
        rows_in(folder, sources=sources)


def test_sources_with_fewer_rows_than_a_batch_takes_are_named(folder):
    digits = rows_in(folder).sources[0].num_items
    # Until step 5, three of four rows are digits.
    parts = digits // 3
    assert rows_in(folder, global_batch_size={0: 4 * parts, 5: 4}).repetitions() == []
    assert rows_in(folder, global_batch_size={0: 4 * parts + 4, 5: 4}).repetitions() == [
        f"data digits: a batch takes {3 * parts + 3} of its {digits} training rows of 8 tokens, "
        "so rows repeat within a step; give more data, or lower data.global_batch_size"
    ]


def test_few_conversations_are_held_out_whole_and_an_earlier_split_is_not_resumed(tmp_path):
    path = tmp_path / "a.jsonl"
    answers = ("tea", "a long way home" * 9, "sea")
    turns = (
        [{"role": "user", "content": "Say"}, {"role": "assistant", "content": a}] for a in answers
    )
    path.write_text("".join(json.dumps({"text": messages}) + "\n" for messages in turns))
    rows = single(tmp_path, files=str(path), eval_fraction=0.1)
    source, now = rows.sources[0], rows.order(3)
    starts = (
        np.concatenate([part.spans(row).start for row in range(part.num_rows)])
        for part in (source.packed.train, source.packed.held_out)
    )
    trained, held = ({*np.searchsorted(source.store.ends[:], s, side="right")} for s in starts)
    assert (len(held), len(trained)) == (1, 2) and held.isdisjoint(trained)
    assert source.summary.endswith(" (1 of 3 conversations); conversations in chatml")
    earlier = {key: value for key, value in now.items() if key != "undivided"}
    assert explain_change(earlier, now) == (
        "conversations of source 'text' are now held out whole; an earlier version of this program "
        "held out parts of them"
    )
    assert explain_change(now, now) == ""
    assert "undivided" not in single(tmp_path, files=str(path), eval_fraction=0).order(3)
