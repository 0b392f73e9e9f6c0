"""Rows become longer or shorter at steps of a run."""

import numpy as np
import pytest
from test_pipeline import (
    assert_equal,
    letters_of,
    one_device,
    rows_in,
    single,
    steps,
    write_sources,
)

from data.config import DataConfig
from data.order_changes import explain_change, recorded_order
from data.pipeline import eval_batches


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_sources(tmp_path_factory.mktemp("texts"))


def test_shorter_rows_are_parts_of_longer_ones(folder):
    """Tokens, targets and masks in order; documents begin anew at a cut."""
    long, short = (
        steps(single(folder), 0, 3),
        steps(single(folder, sequence_length={0: 4, 6: 8}), 0, 6),
    )
    for name in ("tokens", "targets", "loss_mask"):
        whole = np.concatenate([batch[name].ravel() for batch in long])
        pieces = np.concatenate([batch[name].ravel() for batch in short])
        np.testing.assert_array_equal(whole, pieces)
    for batch in short:
        assert (batch["segment_ids"][..., 0] <= 0).all() and (batch["positions"][..., 0] == 0).all()
        new = batch["segment_ids"][..., 1:] != batch["segment_ids"][..., :-1]
        steps_of = np.diff(batch["positions"], axis=-1)
        assert (batch["positions"][..., 1:][new] == 0).all() and (steps_of[~new] == 1).all()


def test_longer_rows_begin_a_new_epoch_and_shorter_ones_go_on_where_they_stopped(folder):
    """Rows of 8 tokens, of 16 from step 4 on, and of 8 again from step 7 on."""
    lengths = {"sequence_length": {0: 8, 4: 16, 6: 8, 7: 8}, "repack_at": (4, 7)}
    rows = single(folder, **lengths)
    assert {source.row_length for sources in rows._sources.values() for source in sources} == {
        8,
        16,
    }
    batches, short, long = steps(rows, 0, 9), steps(single(folder), 0, 6), single(
        folder, sequence_length={0: 16, 2: 8}
    )  # fmt: skip
    # The last row of a long step may be read in part; steps of another length leave its rest out.
    assert_equal(batches, [*short[:4], *steps(long, 0, 3), *short[4:]])
    assert_equal(batches[5:9], steps(rows, 5, 9))  # as a resumed run reads them
    progress, at_4 = rows.progress(9), single(folder).progress(6)
    longer = long.progress(3)
    for name in progress:
        assert progress[name] == pytest.approx(at_4[name] + longer[name])
    counts = {n: single(folder, sequence_length=n).sources[0].num_items for n in (8, 16)}
    whole, *later = rows.summaries()
    assert f"; {counts[16]} training rows of 16 tokens (" in whole and " held-out row" in whole
    starts = [(0, 8), (4, 16), (7, 8)]
    for line, (step, length) in zip(later, starts, strict=True):
        assert line.startswith(
            f"data text: from step {step} on {counts[length]} training rows of {length} tokens ("
        )


def test_longer_rows_are_mixed_by_the_weights_of_their_steps(folder):
    rows = rows_in(folder, sequence_length={0: 8, 3: 16}, repack_at=(3,))
    batches = steps(rows, 0, 10)
    # Three of four rows are digits until step 5, then one of two.
    assert [letters_of(batch) for batch in batches] == [2] * 5 + [4] * 5
    assert_equal(batches[:3], steps(rows_in(folder), 0, 3))


def test_longer_rows_from_a_step_on_leave_the_order_before_it(folder):
    before, now = single(folder), single(folder, sequence_length={0: 8, 4: 16}, repack_at=(4,))
    assert before.order(4) == now.order(4)
    changed = explain_change(before.order(5), now.order(5))
    assert changed == "data.sequence_length was 8, is now {0: 8, 4: 16}"


def test_a_short_source_of_longer_rows_is_named_too(folder):
    at_16 = single(folder, sequence_length=16).sources[0].num_items
    rows = single(
        folder, sequence_length={0: 8, 4: 16}, repack_at=(4,), global_batch_size=at_16 + 1
    )
    (line,) = rows.repetitions()
    assert f"a batch takes {at_16 + 1} of its {at_16} training rows of 16 tokens" in line


def test_a_step_at_which_nothing_changes_is_no_part_of_the_order(folder):
    once = single(folder).order(6)
    repeated = {"sequence_length": {0: 8, 3: 8}, "global_batch_size": {0: 8, 4: 8}}
    assert single(folder, **repeated).order(6) == once
    as_recorded = {key: [[step, 8] for step in steps] for key, steps in repeated.items()}
    assert recorded_order({"order": once | as_recorded}) == once
    other = {"sequence_length": [[0, 8], [3, 4], [5, 4]]}
    assert recorded_order({"order": once | other})["sequence_length"] == [[0, 8], [3, 4]]


def test_evaluation_files_are_packed_at_the_largest_length_alone(folder, tmp_path):
    (tmp_path / "held.txt").write_text("held out text of its own " * 9)
    lengths = {"sequence_length": {0: 8, 4: 16}, "repack_at": (4,)}
    given = {"eval_files": str(tmp_path / "held.txt"), "cache_dir": str(tmp_path / "cache")}
    rows = single(folder, **lengths, **given)
    assert len([*(tmp_path / "cache" / "packs").iterdir()]) == 3
    assert_equal(evaluated(rows), evaluated(single(folder, sequence_length=16, **given)))


def evaluated(rows) -> list[dict]:
    (source,) = rows.sources
    batches = eval_batches(source, one_device(), batch_size=4, limit=3)
    return [{name: np.asarray(field) for name, field in batch.items()} for batch in batches]


def test_the_largest_batch_is_one_that_a_step_has():
    """Not the most rows times the longest ones; an evaluation has those of the longest rows."""
    lengths = {"sequence_length": {0: 4096, 4000: 32768}, "repack_at": (4000,)}
    config = DataConfig(global_batch_size={0: 64, 4000: 4, 5000: 2}, **lengths)
    assert config.batch_shapes == [(64, 4096), (4, 32768), (2, 32768)]
    assert config.largest_batch == (64, 4096) and config.longest_batch == (4, 32768)
    assert DataConfig(global_batch_size=8, sequence_length=16).largest_batch == (8, 16)
    equal = DataConfig(global_batch_size={0: 64, 4000: 8}, **lengths)
    assert equal.largest_batch == equal.longest_batch == (8, 32768)
