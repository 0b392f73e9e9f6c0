"""A resume with other data says which keys let the run go on, and these keys do."""

import re
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st
from ruamel.yaml import YAML

from data.config import DataConfig
from data.order_changes import explain_change, remedy_of_change

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


def test_longer_rows_need_another_run() -> None:
    short, config = ({"row_length": length} for length in (128, 256)), DataConfig(files="x")
    remedy = remedy_of_change(*short, 5, config)
    assert remedy == "restore the former value (other rows need a new run, with training.init_from)"


def test_a_batch_size_and_a_source_may_change_together() -> None:
    config = DataConfig(sources={n: {"files": n} for n in ("code", "books")}, global_batch_size=16)
    before = order_of(config_of({"code": 1}), 5) | {"global_batch_size": [[0, 8]]}
    now = order_of(config, 5) | {"global_batch_size": [[0, 16]]}
    assert remedy_of_change(before, now, 5, config) == (
        "restore the former values, or, to change them only from step 5 on, set "
        "data.global_batch_size='{0: 8, 5: 16}' data.sources.books.weight='{0: 0, 5: 1}'"
    )
