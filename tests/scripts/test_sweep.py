"""`scripts/sweep.py`: its search space, checks before the start, processes, and its report."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from conftest import ROOT
from PIL import Image
from runs import is_alive, kept_signals, losses, run, write_config

sys.path.insert(0, str(ROOT / "scripts"))
import sweep as script
from sweeps import processes
from sweeps.processes import Stopper, Supervisor
from sweeps.report import Row, check_varied, plot, ranked, table_lines, write_tables
from sweeps.space import grid_points, parse_space, random_points, varied_keys
from sweeps.trials import Objective, Result, make_trials, read_result, trial_name

from configs.schema import dump_config

LOSS = Objective("eval_loss", higher_is_better=False)
RATES = ["--grid", "optimizer.learning_rate=1e-3,1e-2"]
SHORT = ["training.steps=4", "training.eval_every=2", "training.sample_tokens=0"]


def test_a_grid_has_every_combination_and_commas_in_brackets_separate_nothing():
    space = parse_space(["a.x=1,2", "a.files=['b,c', d]", "a.w={0: 1, 5: 2},3"])
    assert varied_keys(space) == ["a.x", "a.w"]
    points = grid_points(space)
    assert [(point["a.x"], point["a.w"]) for point in points] == [
        ("1", "{0: 1, 5: 2}"),
        ("1", "3"),
        ("2", "{0: 1, 5: 2}"),
        ("2", "3"),
    ]
    assert {point["a.files"] for point in points} == {"['b,c', d]"}


def test_random_points_are_distinct_in_range_and_those_of_fewer_come_first():
    space = parse_space(["a=log:1e-4:1e-2", "b=uniform:-1:1", "c=int:2:3", "d=x,y"])
    points = random_points(space, 200, seed=3)
    assert points[:50] == random_points(space, 50, seed=3) != random_points(space, 50, seed=4)
    assert len({json.dumps(point) for point in points}) == 200
    found = {key: [point[key] for point in points] for key in "abcd"}
    assert all(1e-4 <= float(x) <= 1e-2 for x in found["a"])
    assert 70 < sum(float(x) < 1e-3 for x in found["a"]) < 130, "half of them by the logarithm"
    assert all(-1 <= float(x) <= 1 for x in found["b"])
    assert {*found["c"]} == {"2", "3"} and {*found["d"]} == {"x", "y"}
    assert len(random_points(parse_space(["c=int:2:3", "d=x,y"]), 9, seed=0)) == 4


def test_trials_have_distinct_names_that_are_file_names():
    assert (
        trial_name({"optimizer.learning_rate": "1e-3", "model.x": "2"}) == "learning_rate=1e-3,x=2"
    )
    assert trial_name({"a.x": "1", "b.x": "2"}) == "a.x=1,b.x=2"
    odd = [trial_name({"data.files": name}) for name in ("a/*.txt", "a/?.txt", "a" * 300)]
    assert len({*odd}) == 3 and not any(set("/*?[]") & {*name} or len(name) > 140 for name in odd)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["--grid", "optimizer.learning_rate=1e-3,x"],
            "trial learning_rate=x: optimizer.learning_rate='x': input should be a valid number",
        ),
        (["--grid", "optimizer.lr=1,2"], "optimizer.lr: unknown key; did you mean optimizer.learn"),
        (
            ["--grid", "model.hidden_size=32,33"],
            "trial hidden_size=33: model.hidden_size=33 is not divisible by",
        ),
        (["--grid", "a"], "--grid 'a': write section.key=VALUE,VALUE"),
        (["--grid", "a=1,,2"], "--grid 'a=1,,2': a value is empty"),
        (["--grid", "a=1,1"], "--grid 'a=1,1': a value is given twice"),
        (["--grid", "a=1", "a=2"], "--grid 'a=2': a is given twice"),
        (["--grid", "a=log:1:2"], "--grid a: a range has no end; add --random N"),
        (["--random", "2", "a=log:0:2"], "a logarithmic range must begin above 0; use uniform:"),
        (["--random", "2", "--grid", "a=int:0:1.5"], "both numbers must be whole"),
        (["--random", "2", "--grid", "a=log:2:1"], "the first number must be below the second"),
        (["--random", "2", "--grid", "a=log:x:1"], "x and 1 must be numbers"),
        (["--random", "0", *RATES], "--random 0: use at least 1 trial"),
        (["--parallel", "0", *RATES], "--parallel 0: use at least 1 trial at a time"),
        (["--seed", "1", *RATES], "--seed 1: use it with --random N"),
        ([], "nothing to search over: give --grid section.key=VALUE,VALUE"),
        ([*RATES, "run.dir=x"], "run.dir: every trial has a directory of its own, below --dir"),
        ([*RATES, "--metric", "los"], "--metric los: unknown metric; use one of eval_loss, "),
        ([*RATES, "data.eval_fraction=0"], "--metric eval_loss needs an evaluation, and there is"),
        ([*RATES, "--dir", "gs://b/x"], "--dir gs://b/x: a sweep is kept on a disk; give a direct"),
        ([*RATES, "training.writers=[console]"], "a sweep reads its results from metrics.jsonl;"),
        ([*RATES, "checkpoint.resume=never"], "checkpoint.resume=never: a sweep continues its tri"),
    ],
)
def test_a_mistake_is_refused_on_one_line_before_the_first_trial(
    tmp_path, capsys, arguments, message
):
    config = write_config(tmp_path)
    given = ["--config", config, "--dir", str(tmp_path / "sweep"), *arguments]
    assert script.main(given) == 2
    error = capsys.readouterr().err
    assert message in error and error.startswith("error: ") and error.count("\n") == 1
    assert not (tmp_path / "sweep").exists()


def test_a_sweep_over_other_keys_needs_another_directory(tmp_path, capsys):
    folder = tmp_path / "sweep"
    folder.mkdir()
    record = {"trials": [{"varied": {"optimizer.learning_rate": "1e-3"}}]}
    (folder / "sweep.json").write_text(json.dumps(record))
    check_varied(folder, ["optimizer.learning_rate"])
    given = ["--config", write_config(tmp_path), "--dir", str(folder), *RATES, "a=1,2"]
    assert script.main(given) == 2
    error = capsys.readouterr().err
    assert (
        "sweep over optimizer.learning_rate, and this one is over optimizer.learning_rate, a"
        in error
    )


FAKE = """
import pathlib, signal, sys, time
folder = pathlib.Path(next(x for x in sys.argv if x.startswith("run.dir=")).split('"')[1])
kind = next(x for x in sys.argv if x.startswith("run.compilation_cache=")).split("=")[1]
signal.signal(signal.SIGTERM, lambda *_: sys.exit(75))
(folder / f"began-{time.time()}").touch()
if kind == "fails":
    sys.exit("error: no such file; give another")
if kind == "hangs":
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
(folder / "ready").touch()
time.sleep(0.3 if kind[:4] == "done" else 60)
(folder / f"ended-{time.time()}").touch()
"""


@pytest.fixture
def supervise(tmp_path, monkeypatch):
    """Run trials that a stand-in of train.py executes; send signals when a trial is ready."""
    (tmp_path / "train.py").write_text(FAKE)
    monkeypatch.setattr(processes, "ROOT", tmp_path)
    config = write_config(tmp_path)

    def run(*kinds: str, parallel: int = 1, stop_at: str = "", signals: int = 0):
        lines: list[str] = []
        points = [{"run.compilation_cache": kind} for kind in kinds]
        trials = make_trials(config, tmp_path / "sweep", points, ["run.compilation_cache"], [])
        supervisor = Supervisor(
            config, parallel, lambda trial, state, why: lines.append(f"{state} {why}"), lines.append
        )

        def send() -> None:
            ready = tmp_path / "sweep" / trial_name({"run.compilation_cache": stop_at}) / "ready"
            for number in range(1, signals + 1):
                while not ready.exists() or sum("ing" in line for line in lines) < number - 1:
                    time.sleep(0.01)
                os.kill(os.getpid(), signal.SIGINT)
                time.sleep(3)  # signals within a second count as one

        with kept_signals():
            hangup = signal.getsignal(signal.SIGHUP)
            # A shell lets its background jobs ignore SIGINT, and then so does a sweep.
            signal.signal(signal.SIGINT, signal.default_int_handler)
            thread = threading.Thread(target=send, daemon=True)
            stopper = Stopper()
            thread.start()
            states = supervisor.run(trials, stopper)
            thread.join(timeout=60)
            assert not thread.is_alive(), lines
            signal.signal(signal.SIGHUP, hangup)
        return [*states.values()], lines

    return run


def test_a_failed_trial_is_reported_and_the_others_go_on(supervise, tmp_path):
    states, lines = supervise("fails", "done")
    assert states == ["failed", "finished"]
    output = tmp_path / "sweep" / "compilation_cache=fails" / "output.txt"
    line = f"failed exit code 1: no such file; give another; see {output}"
    assert lines == ["None ", line, "None ", "finished "]
    assert output.read_text() == "error: no such file; give another\n"


@pytest.mark.parametrize("parallel", [1, 3])
def test_as_many_trials_as_asked_run_at_a_time(supervise, tmp_path, parallel):
    states, _ = supervise("done1", "done2", "done3", parallel=parallel)
    assert states == ["finished"] * 3
    began, ended = (
        [float(path.name.partition("-")[2]) for path in tmp_path.glob(f"sweep/*/{kind}-*")]
        for kind in ("began", "ended")
    )
    most = max(sum(a <= time < b for a, b in zip(sorted(began), sorted(ended))) for time in began)  # noqa: B905
    assert (most == 1) == (parallel == 1)


def test_ctrl_c_stops_the_running_trial_and_starts_no_other(supervise):
    states, lines = supervise("waits", "done", stop_at="waits", signals=1)
    assert states == ["stopped", "waiting"]
    assert lines[1].startswith("stopping compilation_cache=waits after this step and saving; press")
    assert lines[2:] == ["stopped "]


def test_a_second_ctrl_c_kills_a_trial_that_does_not_stop(supervise):
    states, lines = supervise("hangs", "done", stop_at="hangs", signals=2)
    assert states == ["stopped", "waiting"] and lines[2:] == [
        "killing the running trials",
        "stopped ",
    ]


def test_signals_within_a_second_count_as_one():
    with kept_signals():
        hangup, stopper = signal.getsignal(signal.SIGHUP), Stopper()
        for pause in (0.0, 0.0, 1.1):
            time.sleep(pause)
            os.kill(os.getpid(), signal.SIGTERM)
        assert stopper.num_signals == 2
        signal.signal(signal.SIGHUP, hangup)


def test_a_trial_with_a_source_that_is_gone_is_not_taken_for_finished(tmp_path):
    config, folder = write_config(tmp_path), tmp_path / "sweep"
    both = f"data.sources={{a: {{files: {tmp_path}/a.txt}}, b: {{files: {tmp_path}/a.txt}}}}"
    one = f"data.sources={{a: {{files: {tmp_path}/a.txt}}}}"
    points, varied = [{"training.seed": "1"}], ["training.seed"]
    (trial,) = make_trials(config, folder, points, varied, ["data.files=null", both])
    trial.directory.mkdir(parents=True)
    (trial.directory / "config.yaml").write_text(dump_config(trial.config))
    make_trials(config, folder, points, varied, ["data.files=null", both])
    with pytest.raises(ValueError, match=r"has data\.sources\.b\..*, and this sweep asks for null"):
        make_trials(config, folder, points, varied, ["data.files=null", one])


def test_a_folder_may_have_any_name(tmp_path):
    folder = tmp_path / "😀 #1: {a}"
    (trial,) = make_trials(
        write_config(tmp_path), folder, [{"training.seed": "1"}], ["training.seed"], []
    )
    assert trial.config.run.dir == str(trial.directory) and trial.directory.parent == folder


def test_ctrl_c_while_trials_are_checked_is_one_line(tmp_path, capsys, monkeypatch):
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(script, "make_trials", interrupt)
    given = ["--config", write_config(tmp_path), "--dir", str(tmp_path / "sweep"), *RATES]
    assert script.main(given) == script.EXIT_STOPPED
    assert capsys.readouterr().err == "interrupted\n"


def test_a_sweep_under_nohup_goes_on_after_the_terminal_is_closed():
    with kept_signals():
        hangup = signal.signal(signal.SIGHUP, signal.SIG_IGN)
        stopper = Stopper()
        os.kill(os.getpid(), signal.SIGHUP)
        signal.signal(signal.SIGHUP, hangup)
    assert stopper.num_signals == 0


def test_trials_are_stopped_and_saved_when_the_terminal_is_gone(monkeypatch):
    read, write = os.pipe()
    os.close(read)
    with os.fdopen(write, "w") as gone:
        monkeypatch.setattr(sys, "stdout", gone)
        script.say("stopping")  # a broken pipe ends nothing
        monkeypatch.undo()
        with contextlib.suppress(OSError):
            gone.close()


def test_trials_do_not_outlive_a_sweep_that_is_killed(tmp_path):
    program = (
        "import sys; sys.path.insert(0, 'scripts'); import sweep\n"
        "from sweeps import processes\n"
        f"import pathlib; processes.ROOT = pathlib.Path({str(tmp_path)!r})\n"
        "sweep.main(sys.argv[1:])"
    )
    (tmp_path / "train.py").write_text(FAKE + "\n")
    given = ["--config", write_config(tmp_path), "--dir", tmp_path / "sweep"]
    given += ["--grid", "run.compilation_cache=hangs"]
    process = subprocess.Popen([sys.executable, "-c", program, *map(str, given)], cwd=ROOT)
    ready = tmp_path / "sweep" / "trial" / "ready"
    while not ready.exists():
        assert process.poll() is None
        time.sleep(0.01)
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    assert len(children) == 1
    process.kill()
    process.wait()
    limit = time.monotonic() + 60
    while is_alive(int(children[0])):
        assert time.monotonic() < limit
        time.sleep(0.01)


def write_metrics(folder: Path, losses: list[float]) -> None:
    folder.mkdir(parents=True)
    lines = [
        {"step": n, "tokens_per_second": 100.0 * n, "eval_loss": loss, "goodput/step": 2.0 * n}
        for n, loss in enumerate(losses, 1)
    ]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


@pytest.fixture
def rows(tmp_path) -> list[Row]:
    """Three trials with metrics, one of them diverged, and one without any."""
    keys = ["optimizer.learning_rate", "data.packing"]
    space = parse_space([f"{keys[0]}=1e-3,1e-2", f"{keys[1]}=split,best_fit"])
    points = grid_points(space)
    trials = make_trials(write_config(tmp_path), tmp_path / "sweep", points, keys, [])
    measured = ([3.0, 2.0, 2.5], [3.0, 1.5, 1.5], [4.0, float("nan"), float("inf")])
    for trial, values in zip(trials, measured, strict=False):
        write_metrics(trial.directory, values)
    states = ["finished", "finished", "failed", "waiting"]
    return [
        Row(trial, state, read_result(trial, LOSS))
        for trial, state in zip(trials, states, strict=True)
    ]


def test_a_result_is_the_best_finite_value_and_the_first_step_that_has_it(rows):
    one, two, three, none = (row.result for row in rows)
    assert (one.best, one.best_step, one.steps) == (2.0, 2, 3)
    assert (one.tokens_per_second, one.seconds) == (200.0, 6.0)
    assert (two.best, two.best_step, three.best, three.best_step) == (1.5, 2, 4.0, 1)
    assert none == Result({}, None, None, 0, None, 0)
    highest = Objective("eval_loss", higher_is_better=True)
    assert read_result(rows[0].trial, highest).best_step == 1


def test_the_table_is_sorted_by_the_metric_and_written_as_markdown_and_json(rows, tmp_path):
    varied = ["optimizer.learning_rate", "data.packing"]
    sorted_rows = ranked(rows, LOSS)
    lines = table_lines(sorted_rows, varied, LOSS)
    assert len({len(line) for line in lines}) == 1, "columns are aligned"
    cells = [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines]
    assert [cells[0], *cells[2:]] == [
        [
            "learning_rate",
            "packing",
            *"eval_loss,best step,steps,tokens/s,time (s),state".split(","),
        ],
        ["1e-3", "best_fit", "1.5000", "2", "3", "200", "6", "finished"],
        ["1e-3", "split", "2.0000", "2", "3", "200", "6", "finished"],
        ["1e-2", "split", "4.0000", "1", "3", "200", "6", "failed"],
        ["1e-2", "best_fit", "", "", "0", "", "0", "waiting"],
    ]
    write_tables(tmp_path, sorted_rows, varied, LOSS)
    assert "\n".join(lines) in (tmp_path / "sweep.md").read_text()
    record = json.loads((tmp_path / "sweep.json").read_text())
    assert [trial["best"] for trial in record["trials"]] == [1.5, 2.0, 4.0, None]
    assert record["trials"][0]["varied"] == {varied[0]: "1e-3", varied[1]: "best_fit"}


def test_the_plot_is_an_image_or_a_line_that_says_how_to_get_it(rows, tmp_path, monkeypatch):
    pytest.importorskip("matplotlib")
    varied = ["optimizer.learning_rate", "data.packing"]
    assert plot(tmp_path, ranked(rows, LOSS), varied, LOSS) == f"{tmp_path / 'sweep.png'} written"
    image = Image.open(tmp_path / "sweep.png")
    assert image.size == (1500, 400) and len(image.convert("RGB").getcolors(2**20)) > 50
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    line = plot(tmp_path, rows, varied, LOSS)
    assert line == "no plot: pip install matplotlib, and run the same command again"


@pytest.mark.release
def test_a_sweep_that_ctrl_c_has_stopped_continues_and_equals_undisturbed_runs(tmp_path, capsys):
    config, folder = write_config(tmp_path, str(ROOT / ".cache" / "xla-tests")), tmp_path / "sweep"
    steps = ["training.steps=60", "training.eval_every=30", "training.sample_tokens=0"]
    given = ["--config", config, "--dir", str(folder), *RATES, *steps]
    command = [sys.executable, "scripts/sweep.py", *given]
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
    first, second = (folder / f"learning_rate={rate}" for rate in ("1e-3", "1e-2"))
    while not (first / "metrics.jsonl").exists() or not losses(first):
        assert process.poll() is None
        time.sleep(0.01)
    process.send_signal(signal.SIGINT)
    out, _ = process.communicate()
    assert process.returncode == 75 and "stopped; run the same command to continue" in out
    assert 0 < len(losses(first)) < 60 and not second.exists()
    changed = [text.replace("steps=60", "steps=61") for text in given]
    assert script.main(changed) == 2
    error = capsys.readouterr().err
    assert "config.yaml has training.steps=60, and this sweep asks for 61" in error
    with kept_signals():
        assert script.main(given) == 0
    for rate, trial in (("1e-3", first), ("1e-2", second)):
        alone = [*steps, f"optimizer.learning_rate={rate}", f"run.dir={tmp_path / rate}"]
        with kept_signals():
            assert run(config, *alone) == 0
        assert losses(trial) == losses(tmp_path / rate)


@pytest.mark.slow
def test_a_sweep_runs_skips_finished_trials_and_resumes_a_killed_one(tmp_path, capsys):
    config, folder = write_config(tmp_path, str(ROOT / ".cache" / "xla-tests")), tmp_path / "sweep"
    given = ["--config", config, "--dir", str(folder), *RATES, *SHORT]
    with kept_signals():
        assert script.main(given) == 0
    out = capsys.readouterr().out
    assert "2 trials in" in out and "0 of them finished already" in out
    record = json.loads((folder / "sweep.json").read_text())
    assert [trial["state"] for trial in record["trials"]] == ["finished"] * 2
    assert record["trials"][0]["best"] < record["trials"][1]["best"]
    second = folder / "learning_rate=1e-2"
    found = losses(second)
    assert len(found) == 4
    (second / "checkpoints" / "4").rename(tmp_path / "gone")  # as if it had been killed after 2
    with kept_signals():
        assert script.main(given) == 0
    out = capsys.readouterr().out
    assert "1 of them finished already" in out and "learning_rate=1e-3: started" not in out
    assert "resumed from step 2" in (second / "output.txt").read_text()
    assert losses(second) == found
    assert (
        json.loads((folder / "sweep.json").read_text())["trials"][0]["best"]
        == (record["trials"][0]["best"])
    )
