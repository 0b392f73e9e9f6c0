"""A resume with other data says which keys let the run go on, and these keys do."""

import itertools
import re
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st
from ruamel.yaml import YAML

from data.config import DataConfig, values_by_step
from data.order_changes import explain_change, remedy_of_change, without_repetitions

NAMES = "books", "chat", "code"
WEIGHTS = st.sampled_from([0, 0, 0.1, 0.3, 0.7, 1, 2.5])
CHANGING = st.builds(
    lambda *args: {0: args[0], args[1]: args[2]}, WEIGHTS, st.integers(1, 9), WEIGHTS
)
SCHEDULES = WEIGHTS | CHANGING
MIXTURES = st.dictionaries(st.sampled_from(NAMES), SCHEDULES, min_size=1)


def order_of(config: DataConfig, step: int) -> dict:
    """Return the parts of the order of a run that name sources."""
    shares = [[s, now] for s, now in config.shares.items() if s < step]
    used = {name for _, now in shares for name in now}
    return {
        "seed": 0,
        "sources": {name: f"digest of {name}" for name in sorted(used)},
        "weight": [[s, {name: str(w) for name, w in now.items()}] for s, now in shares],
    }


def config_of(weights: dict) -> DataConfig:
    """Return the configuration of sources; raise ValueError if every weight is 0 at some step."""
    return DataConfig(sources={name: {"files": name, "weight": w} for name, w in weights.items()})


def advised(remedy: str) -> dict:
    """Return the weights that a remedy says to set."""
    found = re.findall(r"data\.sources\.(\w+)\.weight='([^']+)'", remedy)
    return {name: YAML(typ="safe", pure=True).load(text) for name, text in found}


def shares_at(config: DataConfig, step: int) -> dict[str, Fraction]:
    return config.shares[max(s for s in config.shares if s <= step)]


@given(before=MIXTURES, now=MIXTURES, number=st.integers(1, 8))
def test_advised_weights_keep_the_past_and_change_the_rest(before, now, number) -> None:
    try:
        old, new = config_of(before), config_of(now)
    except ValueError:
        return
    past, other = order_of(old, number), order_of(new, number)
    if past == other:
        return
    weights = advised(remedy_of_change(past, other, number, new))
    assert weights, "something must be set"
    settled = config_of({**now, **weights})
    assert order_of(settled, number) == past
    for step in range(number, 12):
        assert shares_at(settled, step) == shares_at(new, step)


@pytest.mark.parametrize(
    ("before", "now", "wanted"),
    [
        (
            {"code": 1},
            {"code": 0.7, "books": 0.3},
            "only from step 5 on, set data.sources.books.weight='{0: 0, 5: 0.3}'",
        ),
        (
            {"code": 2, "books": 1},
            {"code": 1, "books": {0: 1, 9: 3}},
            "set data.sources.code.weight='{0: 2, 5: 1}'",
        ),
        (
            {"code": {0: 0.5, 2: 0.2}, "books": 0.5},
            {"code": 1},
            "keep the sections of books and set data.sources.books.weight='{0: 1, 2: 5, 5: 0}' "
            "data.sources.code.weight='{0: 1, 2: 2, 5: 1}'",
        ),
    ],
    ids=["joins", "weighs less", "leaves"],
)
def test_sources_join_and_leave_at_the_resume(before, now, wanted) -> None:
    past, other = (order_of(config_of(weights), 5) for weights in (before, now))
    assert remedy_of_change(past, other, 5, config_of(now)).endswith(wanted)


def test_no_weight_helps_where_the_text_has_changed() -> None:
    config = config_of({"code": 1, "books": 1})
    past = order_of(config_of({"code": 1}), 5)
    changed = order_of(config, 5)
    changed["sources"]["code"] = "another digest"
    assert explain_change(past, changed).startswith("source 'books' was added; the text of source")
    assert remedy_of_change(past, changed, 5, config) == "restore that data"
    thirds = config_of({"code": 0.9523809523809523, "books": 0.0476190476190476, "chat": 0.1})
    even = config_of(dict.fromkeys(NAMES, 1))
    remedy = remedy_of_change(order_of(thirds, 5), order_of(even, 5), 5, even)
    assert remedy == "restore the former values"  # no floats have the ratios of these shares
    split = order_of(config, 5) | {"eval_files": {"code": "digest of a split"}}
    assert remedy_of_change(past, split, 5, config) == "restore that data"
    short = order_of(DataConfig(files="x"), 5)  # its weight cannot be set
    assert remedy_of_change(past, short, 5, DataConfig(files="x")) == "restore that data"


@pytest.mark.parametrize(
    ("sizes", "advised"),
    [
        (16, "{0: 8, 2: 12, 5: 16}"),
        ({0: 16, 4: 24, 9: 32}, "{0: 8, 2: 12, 5: 24, 9: 32}"),
        ({0: 16, 5: 24}, "{0: 8, 2: 12, 5: 24}"),
    ],
)
def test_another_batch_size_may_begin_at_the_resume(sizes, advised):
    def order(value):
        steps = value.items() if isinstance(value, dict) else [(0, value)]
        return {"seed": 0, "global_batch_size": [[s, size] for s, size in steps if s < 5]}

    before, config = order({0: 8, 2: 12}), DataConfig(files="x", global_batch_size=sizes)
    remedy = remedy_of_change(before, order(sizes), 5, config)
    assert remedy.endswith(f"only from step 5 on, set data.global_batch_size='{advised}'")
    other = order(sizes) | {"seed": 1}
    assert remedy_of_change(before, other, 5, config) == "restore the former values"


LENGTHS = st.lists(st.sampled_from([8, 16, 32]), min_size=1, max_size=3)


@st.composite
def row_lengths(draw) -> DataConfig:
    """Draw a configuration of row lengths that may change, some of them with new rows."""
    lengths = draw(LENGTHS)
    steps = sorted(draw(st.sets(st.integers(1, 9), min_size=2, max_size=2)))
    repack_at = draw(st.sets(st.sampled_from(steps)))
    scheduled = dict(zip([0, *steps], lengths, strict=False))
    try:
        return DataConfig(files="x", sequence_length=scheduled, repack_at=tuple(sorted(repack_at)))
    except ValueError:  # steps without new rows
        return DataConfig(files="x", sequence_length=scheduled)


def order_of_lengths(config: DataConfig, number: int) -> dict:
    """Return the parts of the order of a run that name row lengths."""
    packed = [[s, n] for s, n in config.row_lengths.items() if s < number]
    lengths = without_repetitions(values_by_step(config.sequence_length)).items()
    return {
        "row_length": packed if len(packed) > 1 else packed[0][1],
        "sequence_length": [[s, n] for s, n in lengths if s < number],
    }


@given(before=row_lengths(), now=row_lengths(), number=st.integers(1, 8))
def test_advised_row_lengths_keep_the_past_and_change_the_rest(before, now, number) -> None:
    past, other = (order_of_lengths(config, number) for config in (before, now))
    if past == other:
        return
    remedy = remedy_of_change(past, other, number, now)
    found = dict(re.findall(r"data\.(sequence_length|repack_at)='([^']+)'", remedy))
    read = YAML(typ="safe", pure=True)
    if not found:
        assert remedy == "restore the former values"
        assert not has_continuation(past, now, number)
        return
    keys = {key: read.load(text) for key, text in found.items()}
    settled = DataConfig.model_validate(now.model_dump() | keys)
    kept = order_of_lengths(settled, number)
    assert kept["row_length"] == past["row_length"]
    for step in range(12):
        config = before if step < number else now
        assert length_at(settled, step) == length_at(config, step)


def has_continuation(past: dict, now: DataConfig, number: int) -> bool:
    """Return whether any steps of repack_at keep the rows of the past, by trying all of them."""
    later = {s: n for s, n in values_by_step(now.sequence_length).items() if s > number}
    lengths = {**dict(past["sequence_length"]), number: length_at(now, number), **later}
    packed = past["row_length"]
    packed = dict(packed) if isinstance(packed, list) else {0: packed}
    for count in range(len(later) + 2):
        for steps in itertools.combinations([number, *later], count):
            repack_at = tuple(sorted({*packed, *steps} - {0}))
            keys = {"sequence_length": lengths, "repack_at": repack_at}
            rows = now.model_copy(update=keys).row_lengths
            if {s: n for s, n in rows.items() if s < number} == packed:
                return True
    return False


def length_at(config: DataConfig, step: int) -> int:
    lengths = values_by_step(config.sequence_length)
    return lengths[max(s for s in lengths if s <= step)]


@pytest.mark.parametrize(
    ("before", "now", "keys"),
    [
        (
            {},
            {"sequence_length": 256},
            "data.sequence_length='{0: 128, 5: 256}' data.repack_at='[5]'",
        ),
        # Rows are packed anew where they become longer, not at the resume.
        ({}, {"sequence_length": {0: 128, 9: 256}}, "data.repack_at='[9]'"),
        ({}, {"sequence_length": 64}, "data.sequence_length='{0: 128, 5: 64}'"),
        (
            {},
            {"sequence_length": 192},
            "data.sequence_length='{0: 128, 5: 192}' data.repack_at='[5]'",
        ),
        # Five batches of three rows are no multiple of 256, so planned longer rows begin anew.
        (
            {"sequence_length": {0: 128, 8: 256}, "global_batch_size": 3},
            {"sequence_length": 256, "global_batch_size": 3},
            None,
        ),
    ],
)
def test_other_rows_may_begin_at_the_resume(before, now, keys) -> None:
    shared = {"files": "x", "sequence_length": 128, "global_batch_size": 8}
    old, new = (DataConfig(**{**shared, **changes}) for changes in (before, now))
    remedy = remedy_of_change(order_of_lengths(old, 5), order_of_lengths(new, 5), 5, new)
    rest = ", or, to change them only from step 5 on, set "
    assert remedy == "restore the former values" + (rest + keys if keys else "")


def test_longer_rows_of_pairs_need_another_run() -> None:
    pairs = {"files": "x", "packing": "pairs"}
    short, long = (DataConfig(sequence_length=length, **pairs) for length in (128, 256))
    orders = order_of_lengths(short, 5), order_of_lengths(long, 5)
    remedy = "restore the former value (other rows need a new run, with training.init_from)"
    assert remedy_of_change(*orders, 5, long) == remedy


def test_a_batch_size_and_a_source_may_change_together() -> None:
    config = DataConfig(sources={n: {"files": n} for n in ("code", "books")}, global_batch_size=16)
    before = order_of(config_of({"code": 1}), 5) | {"global_batch_size": [[0, 8]]}
    now = order_of(config, 5) | {"global_batch_size": [[0, 16]]}
    assert remedy_of_change(before, now, 5, config) == (
        "restore the former values, or, to change them only from step 5 on, set "
        "data.global_batch_size='{0: 8, 5: 16}' data.sources.books.weight='{0: 0, 5: 1}'"
    )
