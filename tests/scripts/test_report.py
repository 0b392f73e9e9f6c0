"""scripts/report.py: the figures of a report are those of the run, also of a broken or old run."""

import base64
import importlib.util
import io
import itertools
import json
import re
import sys
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest
from conftest import ROOT
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image
from runs import read_lines, run

from training.writers.registry import WriterContext, begun
from training.writers.tensorboard import TensorBoardWriter

sys.path.insert(0, str(ROOT / "scripts"))
import report as script
from reporting.curves import reduce_series, smooth, spread
from reporting.page import read_meanings
from reporting.run_log import read_log
from reporting.run_record import Series, distinct_names, read_runs

STORED = ROOT / "tests" / "stored_run" / "jax_0.10"


class Page(HTMLParser):
    """A parsed report: its figures, its charts, the text of its elements with an id."""

    def __init__(self, path: Path):
        super().__init__()
        self.charts: list[list[str]] = []
        self.sources: list[str] = []
        self.goodput: dict[str, float] = {}
        self.text, self._in_figures = "", False
        self.content = path.read_text()
        self.feed(self.content)

    def handle_starttag(self, tag, attrs):
        given = dict(attrs)
        if "data-metrics" in given:
            self.charts.append(json.loads(given["data-metrics"]))
        if "data-seconds" in given:
            self.goodput[given["data-label"]] = float(given["data-seconds"])
        self.sources += [given[name] for name in ("src", "href") if name in given]
        self._in_figures = given.get("id") == "report"

    def handle_data(self, data):
        if self._in_figures:
            self.figures = json.loads(data)
            self._in_figures = False
        else:
            self.text += data + "\n"


def write_run(directory: Path, entries: list[dict], config: str = "", log: str = "") -> Path:
    directory.mkdir(parents=True)
    lines = [json.dumps({"step": step, **entry}) + "\n" for step, entry in enumerate(entries, 1)]
    (directory / "metrics.jsonl").write_text("".join(lines))
    if config:
        (directory / "config.yaml").write_text(config)
    if log:
        (directory / "log.txt").write_text(log)
    return directory


@pytest.fixture
def made(tmp_path, capsys):
    def make(*runs: Path) -> Page:
        output = tmp_path / "report.html"
        assert script.main([*map(str, runs), "--output", str(output)]) == 0
        assert "report.html written" in capsys.readouterr().out
        return Page(output)

    return make


def test_the_figures_are_those_of_a_real_run(made, undisturbed):
    directory = undisturbed / "run"
    page, lines = made(directory), read_lines(undisturbed / "run" / "metrics.jsonl")
    (figures,) = page.figures["runs"]
    for name in ("loss", "grad_norm", "learning_rate", "tokens_per_second", "eval_loss"):
        given = [(line["step"], line[name]) for line in lines if name in line]
        steps, values = figures["curves"][name]
        assert list(zip(steps, values, strict=True)) == [
            (step, pytest.approx(value, rel=1e-7)) for step, value in given
        ]
    assert figures["lastStep"] == 6
    assert figures["axes"]["tokens"][-1] == pytest.approx(6 * 8 * 32)
    hours = sum(line["step_time"] for line in lines) / 3600
    assert figures["axes"]["hours"][-1] == pytest.approx(hours)
    assert ["loss", "eval_loss"] in page.charts and ["grad_norm"] in page.charts
    goodput = json.loads((directory / "goodput.json").read_text())
    assert page.goodput == {label: y for label, y in goodput.items() if y} and goodput["step"] > 0
    assert sum(goodput.values()) > sum(lines[-1][f"goodput/{label}"] for label in goodput)
    assert f"{lines[-1]['loss']:.4f}" in page.text and "jax 0." in page.text
    assert "torus 0." in page.text and "6 of 6" in page.text
    assert f"python train.py --config {undisturbed}/tiny.yaml" in page.text
    sample = read_log(directory / "log.txt").samples[-1]
    assert sample[0] == 6 and sample[1] and sample[1] in page.text


def test_the_report_loads_nothing_from_elsewhere(made, undisturbed):
    page = made(undisturbed / "run")
    assert all(source.startswith(("#", "data:")) for source in page.sources), page.sources
    without_names = page.content.replace("http://www.w3.org/2000/svg", "")
    assert not re.search(r"https?://|@import|url\(", without_names.partition('id="report"')[0])
    assert "default-src 'none'" in page.content


def test_a_run_of_an_older_version_is_shown(made):
    page = made(STORED)
    (figures,) = page.figures["runs"]
    assert figures["curves"]["loss"][1][0] == pytest.approx(5.571099281311035)
    assert figures["heat"]["entropy"]["layers"] == ["1", "2"]
    assert figures["heat"]["entropy"]["steps"] == [1, 2, 3]
    assert figures["heat"]["load_max_over_mean"]["values"] == [
        [1.273, 1.75, 1.367],
        [1.352, 1.672, 1.852],
    ]
    assert not any(name.startswith("moe/layer") for name in figures["curves"])


def test_runs_are_overlaid_and_their_configurations_compared(made, tmp_path):
    config = "optimizer:\n  learning_rate: {}\ntraining:\n  steps: 3\nrun:\n  dir: {}\n"
    entries = [{"loss": 3.0}, {"loss": 2.0}]
    one = write_run(tmp_path / "a" / "run", entries, config.format("0.01", "a"))
    two = write_run(tmp_path / "b" / "run", entries * 2, config.format("0.03", "b"))
    page = made(one, two)
    assert [run["name"] for run in page.figures["runs"]] == ["a/run", "b/run"]
    assert [len(run["curves"]["loss"][0]) for run in page.figures["runs"]] == [2, 4]
    table = page.content.partition('id="differences"')[2].partition("<details>")[0]
    assert re.findall(r'<td class="name">(.*?)</td>', table) == ["optimizer.learning_rate"]
    assert re.findall(r'<td class="value[^>]*>(.*?)</td>', table) == ["0.01", "0.03"]


def test_a_key_that_an_older_run_lacks_is_a_difference_unless_it_is_null(made, tmp_path):
    entries = [{"loss": 3.0}]
    old = write_run(tmp_path / "old", entries, "training:\n  steps: 3\n")
    new = write_run(tmp_path / "new", entries, "training:\n  steps: 3\n  seed: 0\n  new: null\n")
    table = made(old, new).content.partition('id="differences"')[2].partition("<details>")[0]
    assert re.findall(r'<td class="value[^>]*>(.*?)</td>', table) == ["-", "0"]


BROKEN = [
    b"",
    b'{"step": 4, "lo',
    b"\xff\xfe\n[]\n\0\n",
    b'{"step": 4, "loss": "high", "a": null}\n',
]


@pytest.mark.parametrize("torn", BROKEN)
def test_a_killed_run_is_shown_up_to_its_last_complete_line(made, tmp_path, torn):
    directory = write_run(tmp_path / "run", [{"loss": loss} for loss in (3.0, float("nan"), 2.0)])
    with open(directory / "metrics.jsonl", "ab") as file:
        file.write(torn)
    (directory / "config.yaml").write_text("training: {steps: 10")
    (directory / "log.txt").write_bytes(b"2026-11-24 10:00:00,123 resumed from st\xff")
    figures = made(directory).figures["runs"][0]
    assert figures["curves"]["loss"] == [[1, 2, 3], [3, None, 2]]


def test_a_run_without_a_step_is_shown(made, tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "config.yaml").write_text("training:\n  steps: 10\n")
    page = made(tmp_path / "run")
    assert page.figures["runs"][0]["curves"] == {} and page.charts == []
    assert "no step yet" in page.text


LOG = """\
2026-11-24 10:00:00,100 command: python train.py --config old.yaml
2026-11-24 10:00:01,100 model    13,000 parameters, mesh dp2
2026-11-24 10:00:02,100 step 1/9  loss 5.0  grad 1.00
2026-11-24 10:00:03,100 sample at step 2 (the model ended it at once):
a </script> & a
second line
2026-11-24 10:00:04,100 stopped by SIGTERM after step 3; run again to resume
2026-11-24 11:00:00,100 command: python train.py --config new.yaml
2026-11-24 11:00:00,200 versions: torus 0.1.0, jax 0.10.2
2026-11-24 11:00:01,100 model    14,000 parameters, mesh dp4
2026-11-24 11:00:02,100 resumed from step 3 in 0.2 s; peak host memory rose by 1 MiB
2026-11-24 11:00:03,100 step 4: loss 50, grad norm 9: 8.0 and 1.0 standard deviations above their \
means; the update was skipped
2026-11-24 11:00:04,100 back to step 3; batches 3 to 3 are left out
2026-11-24 11:00:04,200 resumed from step 3 in 0.1 s
2026-11-24 11:00:05,100 step 9/9  loss 2.0  grad 1.00
2026-11-24 11:00:06,100 sample:
the end
"""


def test_restarts_skips_and_samples_come_from_the_log(made, tmp_path):
    entries = [{"loss": 2.0, "loss_z": 0.0, "bad_steps": 0.0} for _ in range(9)]
    entries[3] |= {"loss": 50.0, "loss_z": 8.0, "bad_steps": 1.0}
    entries[6] |= {"loss": 9.0, "loss_z": 7.0}
    page = made(write_run(tmp_path / "run", entries, log=LOG))
    marks = [(mark["kind"], mark["step"]) for mark in page.figures["runs"][0]["marks"]]
    assert sorted(marks) == [("restart", 3), ("rollback", 3), ("skipped", 4), ("spike", 7)]
    assert [step for step, _ in read_log(tmp_path / "run" / "log.txt").samples] == [2, 9]
    for text in ("a </script> & a\nsecond line", "the end", "jax 0.10.2", "new.yaml", "14,000"):
        assert text in page.text
    assert "old.yaml" not in page.text and "13,000" not in page.text


@pytest.mark.parametrize(
    "text",
    [
        "checkpoint 100 is damaged (params/embed: fingerprint mismatch); resuming from 50",
        "checkpoint 100 cannot be read: no array; renamed to 100.damaged; resuming from 50",
        "checkpoint 100 has no record: ended early; renamed to 100.damaged; resuming from 50",
    ],
)
def test_every_damage_of_a_checkpoint_is_an_event(tmp_path, text):
    (tmp_path / "log.txt").write_text(f"2026-11-24 11:00:05,100 {text}\n")
    (event,) = read_log(tmp_path / "log.txt").events
    assert (event.kind, event.step) == ("damage", 100)


def test_names_that_a_page_could_execute_are_shown_as_text(made, tmp_path):
    name = "data/</script><b>{{style}}/tokens"
    directory = write_run(tmp_path / "<i>", [{"loss": 1.0, name: 5.0}])
    page = made(directory)
    assert [name] in page.charts and page.figures["runs"][0]["curves"][name] == [[1], [5]]
    assert "<b>" not in page.content.partition('id="report"')[0]
    assert page.content.count("</script>") == 2


def test_a_long_run_keeps_its_extremes_in_a_small_file(made, tmp_path):
    rng, steps = np.random.default_rng(0), 20_000
    losses = 2 + 8 / (1 + np.arange(steps) / 100) + rng.normal(0, 0.1, steps)
    losses[12_345], losses[7_000] = 40.0, -3.0
    page = made(write_run(tmp_path / "run", [{"loss": float(loss)} for loss in losses]))
    steps_shown, shown, mean_steps, means = page.figures["runs"][0]["curves"]["loss"]
    assert len(shown) <= 1002 and len(means) == 500 and len(page.content) < 100_000
    assert shown[steps_shown.index(12_346)] == 40.0 and shown[steps_shown.index(7_001)] == -3.0
    assert steps_shown[0] == 1 and steps_shown[-1] == 20_000
    assert shown == pytest.approx([losses[step - 1] for step in steps_shown], rel=1e-7)
    assert np.mean(means) == pytest.approx(losses.mean(), rel=1e-7) and mean_steps[0] == 21


VALUES = st.lists(st.floats(-1e6, 1e6) | st.just(float("nan")), min_size=1, max_size=200)


@given(VALUES, st.integers(1, 20))
def test_every_interval_keeps_its_smallest_and_largest_value(values, intervals):
    given = np.array(values)
    curve = reduce_series(Series(np.arange(len(given)), given), intervals)
    assert len(curve.points.steps) <= 2 * intervals + 2
    np.testing.assert_array_equal(curve.points.values, given[curve.points.steps])
    edges = np.linspace(0, len(given), intervals + 1).astype(int)
    for begin, end in itertools.pairwise(edges):
        part = given[begin:end][np.isfinite(given[begin:end])]
        if len(part):
            inside = (curve.points.steps >= begin) & (curve.points.steps < end)
            kept = curve.points.values[inside]
            assert (np.nanmin(kept), np.nanmax(kept)) == (part.min(), part.max())


def test_smoothing_weights_values_by_their_distance():
    steps, values = np.array([0, 1, 4, 10]), np.array([1.0, 5.0, 2.0, -3.0])
    found = smooth(Series(steps, values), 2.0)
    weights = np.exp(-np.abs(steps[:, None] - steps) / 2.0)
    np.testing.assert_allclose(found.values, weights @ values / weights.sum(axis=1))
    flat = smooth(Series(steps, np.full(4, 7.0)), 2.0)
    np.testing.assert_allclose(flat.values, 7.0)


def test_images_of_the_expert_load_come_from_the_event_files(made, tmp_path):
    directory = write_run(tmp_path / "run", [{"loss": 1.0}])
    images = {step: np.full((8, 16, 3), step, np.uint8) for step in (1, 20, 30)}
    writer = TensorBoardWriter(WriterContext(directory, 30))
    with begun(writer, 0):
        for step in range(1, 31):
            writer.write(step, {"loss": 1.0})
            if step in images:
                writer.write_image(step, "moe/load", images[step])
                writer.write_image(step, "another", images[step])
    (events,) = (directory / "tensorboard").iterdir()
    events.write_bytes(events.read_bytes() + b"\x90\0\0\0\0\0\0\0torn")
    shown = made(directory).figures["runs"][0]["images"]
    assert [step for step, _ in shown] == [1, 20, 30]
    for step, source in shown:
        content = base64.b64decode(source.partition(",")[2])
        with Image.open(io.BytesIO(content)) as image:
            np.testing.assert_array_equal(np.asarray(image), images[step])


def test_spread_keeps_the_first_and_the_last():
    assert spread(range(100), 4) == [0, 33, 66, 99]
    assert spread([5, 6], 4) == [5, 6] and spread([5, 6], 1) == [6]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["FOLDER/empty"], r"empty has no metrics.jsonl; give a run directory of train.py"),
        (["FOLDER/none"], r"none is no directory; give a run directory of train.py"),
        (["FOLDER/run", "FOLDER/run"], r"run is given twice; give every run once"),
        (["FOLDER/run", "--output", "FOLDER/a.pdf"], r"a.pdf: .*name ending in .html"),
        (
            ["FOLDER/run", "--output", "FOLDER/no/a.html"],
            r"no/a.html: the folder does not exist; create it",
        ),
        (["FOLDER/run", "--ouput", "a.html"], r"--ouput: unknown option; did you mean --output"),
        ([], r"required: RUN"),
    ],
)
def test_what_is_no_report_is_refused_on_one_line(tmp_path, capsys, arguments, message):
    write_run(tmp_path / "run", [{"loss": 1.0}])
    (tmp_path / "empty").mkdir()
    given = [text.replace("FOLDER", str(tmp_path)) for text in arguments]
    try:
        code = script.main(given)
    except SystemExit as end:
        code = end.code
    assert code == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ") and error.count("\n") == 1
    assert re.search(message, error)


def test_runs_of_one_name_are_told_apart_by_their_folders():
    paths = [Path("/a/x/run"), Path("/b/x/run"), Path("/b/y/run")]
    assert distinct_names(paths) == ["a/x/run", "b/x/run", "b/y/run"]
    assert distinct_names(paths[1:]) == ["x/run", "y/run"]
    assert distinct_names(paths[:1]) == ["run"]


def test_of_a_step_that_occurs_twice_the_later_line_counts(tmp_path):
    directory = write_run(tmp_path / "run", [{"loss": 3.0}, {"loss": 2.0}])
    with open(directory / "metrics.jsonl", "a") as file:
        file.write('{"step": 2, "loss": 9.0}\n')
    (record,) = read_runs([directory])
    assert record.metrics["loss"].values.tolist() == [3.0, 9.0]


def test_charts_have_the_unit_and_the_meaning_of_the_metrics_page(made, tmp_path):
    meanings = read_meanings((ROOT / "docs" / "metrics.md").read_text())
    assert meanings["step_time"][0] == "seconds" and len(meanings) > 40
    page = made(write_run(tmp_path / "run", [{"step_time": 1.0, "data/web/tokens": 5.0}]))
    assert meanings["data/SOURCE/tokens"][1] in page.content


@pytest.mark.slow  # the extra is installed in the slow stage
@pytest.mark.skipif(importlib.util.find_spec("matplotlib") is None, reason="needs matplotlib")
def test_images_are_written_beside_the_report(made, undisturbed, tmp_path):
    made(undisturbed / "run", STORED)
    names = sorted(path.name for path in tmp_path.glob("report_*.png"))
    charts = ("goodput", "grad_norm", "learning_rate", "loss", "tokens_per_second")
    assert names == [f"report_{chart}.png" for chart in charts]
    for name in names:
        with Image.open(tmp_path / name) as image:
            assert image.size[0] > 900 and len(image.convert("RGB").getcolors(2**20)) > 5


def test_without_matplotlib_the_report_is_written_and_one_line_says_so(
    undisturbed, tmp_path, capsys, monkeypatch
):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert script.main([str(undisturbed / "run"), "--output", str(tmp_path / "a.html")]) == 0
    written, images = capsys.readouterr().out.splitlines()
    assert "a.html written" in written and 'pip install -e ".[report]"' in images
    assert (tmp_path / "a.html").exists() and not [*tmp_path.glob("*.png")]


def test_a_run_that_stopped_and_resumed_shows_its_restart(made, half):
    assert run(half) == 0
    page = made(Path(half).parent / "run")
    kinds = [(mark["kind"], mark["step"]) for mark in page.figures["runs"][0]["marks"]]
    assert kinds == [("restart", 3)]
    assert "resumed from step 3" in page.text
