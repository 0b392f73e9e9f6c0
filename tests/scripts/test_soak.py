"""The soaks can fail, and short forms of them pass."""

import dataclasses
import json
import math
import random
import shutil
import subprocess
import sys
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import jax
import numpy as np
import pytest
from conftest import ROOT

sys.path.insert(0, str(ROOT / "scripts"))
from soaks import commands, corruptions, disk, kills, processes
from soaks.compare import CLOSE_BOUND, array_differences, metric_differences
from soaks.overhead import typical_seconds

from training.checkpoint import Checkpoints

LOSSES = {1: 5.5, 2: 4.25, 3: 1 / 3}


def metrics(directory: Path, losses: dict[int, float], **last: float) -> Path:
    """A run directory with these losses; `last` is added to the last line."""
    directory.mkdir()
    lines = [{"step": step, "loss": loss} for step, loss in losses.items()]
    lines[-1] |= last
    text = "".join(json.dumps(line) + "\n" for line in lines)
    (directory / "metrics.jsonl").write_text(text)
    return directory


@pytest.mark.parametrize(
    ("losses", "last", "law"),
    [
        (LOSSES, {"eval_loss": 2.0}, None),
        (LOSSES | {3: math.nextafter(1 / 3, 1)}, {"eval_loss": 2.0}, "step 3: loss"),
        (LOSSES, {}, "step 3: eval_loss None, not 2.0"),
        (LOSSES, {"eval_loss": 2.0, "grad_norm": 1.0}, "step 3: grad_norm 1.0, not None"),
        (LOSSES | {3: math.nan}, {"eval_loss": 2.0}, "step 3: loss nan"),
        ({1: 5.5, 3: 1 / 3}, {"eval_loss": 2.0}, "lost, repeated or out of order: [2]"),
        (LOSSES | {4: 1.0}, {"eval_loss": 2.0}, "lost, repeated or out of order: [4]"),
        ({1: 5.5, 3: 1 / 3, 2: 4.25}, {"eval_loss": 2.0}, "or out of order"),
    ],
)
def test_every_difference_between_two_runs_is_reported(tmp_path, losses, last, law):
    wanted = metrics(tmp_path / "wanted", LOSSES, eval_loss=2.0)
    found, _ = metric_differences(wanted, metrics(tmp_path / "found", losses, **last))
    assert (found == []) if law is None else (len(found) == 1 and law in found[0])


def test_a_repeated_step_is_reported(tmp_path):
    wanted, found = (metrics(tmp_path / name, LOSSES) for name in "ab")
    with open(found / "metrics.jsonl", "a") as file:
        file.write('{"step": 3, "loss": 0.1}\n')
    assert "[3]" in metric_differences(wanted, found)[0][0]


def test_on_another_mesh_a_loss_may_differ_by_the_bound_and_not_more(tmp_path):
    wanted = metrics(tmp_path / "wanted", LOSSES)
    for factor, count in ((1 + 0.9 * CLOSE_BOUND, 0), (1 + 1.1 * CLOSE_BOUND, 1), (math.nan, 1)):
        found = metrics(tmp_path / f"found-{factor}", LOSSES | {2: 4.25 * factor})
        assert len(metric_differences(wanted, found, CLOSE_BOUND)[0]) == count


def test_a_missing_reference_is_an_error_and_not_equality(tmp_path):
    with pytest.raises(processes.SoakError, match="no step"):
        metric_differences(tmp_path, tmp_path)
    with pytest.raises(processes.SoakError, match="no checkpoint 3"):
        array_differences(tmp_path / "a", tmp_path / "b", 3)


@pytest.mark.parametrize(
    ("result", "verdict"),
    [
        ({"step": 30, "wrong": "", "log": []}, "harmless"),
        ({"step": 20, "wrong": "", "log": ["checkpoint 30: a is not ..."]}, "detected"),
        ({"step": 20, "wrong": "", "log": ["checkpoint 300: a is not ..."]}, "silent fallback"),
        ({"step": 20, "wrong": "", "log": []}, "silent fallback"),
        ({"step": 20, "wrong": "a", "log": ["checkpoint 30: a is not ..."]}, "silently wrong"),
        ({"step": 30, "wrong": "a", "log": []}, "silently wrong"),
        ({"step": 0, "wrong": "everything", "log": []}, "silently wrong"),
        ({"crash": "KeyError", "log": []}, "crash"),
        ({"hang": 60.0}, "hang"),
    ],
)
def test_damage_is_classified(result, verdict):
    assert corruptions.classify(result, 30) == verdict


def test_each_kind_of_damage_does_what_its_name_says(tmp_path):
    original, rng, seen = bytes(range(100)), random.Random(0), {}
    for how in corruptions.DAMAGES:
        path = tmp_path / how
        path.write_bytes(original)
        corruptions.damage(path, how, rng)
        seen[how] = path.read_bytes() if path.exists() else None
    changed = [a ^ b for a, b in zip(original, seen["flip"], strict=True)]
    assert Counter(n.bit_count() for n in changed) == {0: 99, 1: 1}
    assert original.startswith(seen["truncate"]) and len(seen["truncate"]) < 100
    assert len(seen["garbage"]) == 100 and seen["garbage"] != original
    assert seen["empty"] == b"" and seen["delete"] is None


def test_a_disk_is_filled_except_for_the_requested_space(tmp_path, monkeypatch):
    free = [5 * 2**20 + 300, 4 * 2**20 + 300, 2**20 + 300, 300]
    usage = iter([SimpleNamespace(free=n) for n in free])
    monkeypatch.setattr(shutil, "disk_usage", lambda path: next(usage))
    assert disk.fill(tmp_path, 300).stat().st_size == 3 * 2**20


def test_a_single_slow_step_does_not_count_and_a_regular_one_does():
    turns = [[3.0, 1.0, 1.0], [3.0, 9.0, 1.0], [4.0, 1.0, 1.0]]
    assert typical_seconds(turns) == 5.0


LOST = "error: process 1 on here is lost: its connection closed; restart all processes\n"
MISSING = "error: 1 of 2 processes came within 30 s: 0 (here); missing: 1; look at their logs\n"
JAX = "Terminating process ... Failed to send RPC to coordination service."


@pytest.mark.parametrize(
    ("code", "stderr", "victim", "is_fine"),
    [
        (76, LOST, 1, True),
        (76, MISSING, 1, True),
        (76, f"a warning before it\n{LOST}", 1, True),
        (1, LOST, 1, False),
        (0, "", 1, False),
        (-6, LOST, 1, False),
        (76, "", 1, False),
        (76, LOST.replace("process 1", "process 10"), 1, False),
        (76, LOST.replace("process 1", "process 0"), 1, False),
        (76, LOST.removeprefix("error: "), 1, False),
        (-6, JAX, 0, True),  # jax itself may end a process that lost process 0, and no other
        (-6, JAX, 1, False),
    ],
)
def test_a_survivor_exits_with_76_and_names_the_killed_process(code, stderr, victim, is_fine):
    trainer = SimpleNamespace(codes=[code, code], errors=[stderr] * 2, directory=Path("run"))
    problems = kills.survivor_problems(trainer, 1 - victim, [victim])
    outlived = f"process {1 - victim} outlived {victim}: exit {code}"
    assert not problems if is_fine else outlived in problems[0]


@pytest.fixture
def trainer_of(tmp_path, monkeypatch):
    """Start two processes of a train.py with these lines, which know their `number`."""

    def start(lines: str) -> processes.TrainerProcesses:
        first = "import sys, time; number = int(sys.argv[sys.argv.index('--process-id') + 1])\n"
        (tmp_path / "train.py").write_text(first + lines)
        monkeypatch.setattr(processes, "ROOT", tmp_path)
        return processes.TrainerProcesses(tmp_path / "soak.yaml", tmp_path / "run", processes=2)

    return start


def new_kills() -> kills.Kills:
    return kills.Kills(
        Path(), processes.Limit(1), 9, random.Random(0), change_mesh=False, processes=2
    )


def test_a_run_finishes_with_its_last_process_and_the_first_failing_exit_code(trainer_of, tmp_path):
    wait = "import os\nwhile number and not os.path.exists('go'): time.sleep(0.01)\n"
    with trainer_of(f"{wait}print(number, file=sys.stderr); sys.exit(number)") as trainer:
        assert trainer.sleep(60) is False  # the end of one process is enough
        assert trainer.codes == [0, None]
        (tmp_path / "go").touch()
        assert trainer.finish() == 1
        assert trainer.errors == ["0\n", "1\n"] and trainer.err == "0\n1\n"


def test_a_process_that_outlives_a_killed_one_for_too_long_ends_the_soak(trainer_of, monkeypatch):
    monkeypatch.setattr(kills, "KILL_ALL", 0.0)
    monkeypatch.setattr(kills, "PEER_SECONDS", 0.2)
    with trainer_of("time.sleep(60)") as trainer:
        with pytest.raises(processes.SoakError, match=r"for 0 s"):
            new_kills().kill(trainer)
        assert trainer.codes == [-9, -9]  # no process is left


@pytest.mark.parametrize(
    ("share", "victims"), [(0.0, {"0 of 2", "1 of 2"}), (1.0, {"0 and 1 of 2"})]
)
def test_either_process_is_killed_or_both(trainer_of, monkeypatch, share, victims):
    found = new_kills()
    monkeypatch.setattr(kills, "KILL_ALL", share)
    while set(found.victims) != victims:
        assert found.victims.total() < 9
        # The survivor ends by itself.
        with trainer_of(
            "time.sleep(0.2); sys.exit(f'error: process {1 - number} is gone')"
        ) as trainer:
            found.kill(trainer)
    assert len(found.mismatches) == (0 if share else found.victims.total())  # 1, not 76


def worker_script(parent: str) -> str:
    """Lines of a train.py that starts a process, and then does what `parent` says."""
    return f"""
import subprocess
code = "import time; print('spawn_main', flush=True); time.sleep(60)"
child = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE)
child.stdout.readline()
print("parameters and optimizer:", flush=True)
{parent}
"""


def test_a_worker_that_outlives_its_killed_parent_is_a_mismatch_and_is_killed(
    trainer_of, monkeypatch
):
    monkeypatch.setattr(processes, "ORPHAN_SECONDS", 0.2)
    monkeypatch.setattr(kills, "KILL_ALL", 1.0)
    found = new_kills()
    with trainer_of(worker_script("time.sleep(60)")) as trainer:
        assert trainer.wait_until(lambda: "optimizer" in trainer.out)
        found.kill(trainer)
    assert found.with_workers == 1
    assert all("run: process" in line and "spawn_main" in line for line in found.mismatches)
    assert 1 <= len(found.mismatches) <= 2  # process 1 may not have begun
    for process in trainer.processes:
        assert not processes.group_members(process.pid)


def test_a_soak_that_waits_for_a_line_that_the_log_has_no_more_fails(trainer_of, monkeypatch):
    found = new_kills()
    monkeypatch.setattr(found, "start_run", lambda directory: trainer_of("print('no such line')"))
    monkeypatch.setattr(kills, "PLANS", ("steps",))
    with pytest.raises(processes.SoakError, match="no line to wait for: no such line"):
        found.one_run(Path("run"))


def test_a_run_that_is_killed_after_its_last_save_is_over(trainer_of, monkeypatch):
    found, line = new_kills(), "step 9 is the last: nothing left to train"
    monkeypatch.setattr(found, "start_run", lambda directory: trainer_of(f"print('{line}')"))
    monkeypatch.setattr(kills, "PLANS", ("steps",))
    found.one_run(Path("run"))
    assert not found.mismatches


# Writes a file in two parts, and finishes what a kill left.
TOY = """
import pathlib, sys, time
made = pathlib.Path(sys.argv[1])
made.mkdir(exist_ok=True)
for name in "ab":
    time.sleep(0.05)
    (made / name).write_text(name + {content})
{end}
"""


@pytest.fixture
def kill_toy(tmp_path):
    """Kill a script with these lines twice, and return the figures."""

    def kill(content: str = "''", end: str = "") -> dict:
        script, made = tmp_path / "toy.py", tmp_path / "made"
        script.write_text(TOY.format(content=content, end=end))
        job = commands.Job("toy", [str(script), str(made)], made)
        return commands.kill_jobs([job], tmp_path, processes.Limit(2), seed=0)

    return kill


def test_a_command_that_completes_what_a_kill_left_passes(kill_toy):
    result = kill_toy()
    assert result["ok"] and result["kills"] == 2 and result["toy"]["folders"] >= 1


@pytest.mark.parametrize(
    ("content", "end", "law"),
    [
        ("str(time.time())", "", "toy: a: differs"),
        ("''", "(made / str(time.time())).touch()", "missing or left over"),
    ],
)
def test_what_a_killed_command_leaves_wrong_is_reported(kill_toy, content, end, law):
    result = kill_toy(content, end)
    assert not result["ok"]
    assert any(law in line for line in result["mismatches"])


def test_a_folder_that_looks_complete_before_it_is_counts_as_wrong(tmp_path):
    for name in ("whole/a", "whole/b", "made/a"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    job = commands.Job("toy", [], tmp_path / "made", last="a")
    found = commands.CommandKills(job, tmp_path, random.Random(0), processes.Limit(1))
    found.one_folder(tmp_path / "whole")
    assert found.mismatches == ["toy: b: missing or left over"]


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> tuple[Path, Path]:
    """The configuration and the directory of a run with three checkpoints."""
    folder = tmp_path_factory.mktemp("soak")
    config = processes.write_config(
        folder,
        # Tests have their own cache of compiled programs.
        run={"dir": str(folder / "run"), "compilation_cache": None},
        checkpoint={"every": 10},
        training__steps=30,
    )
    processes.run_undisturbed(config, folder / "run")
    return config, folder / "run"


@pytest.fixture(scope="module")
def restorer(run) -> corruptions.Restorer:
    config, directory = run
    return corruptions.Restorer(config, directory / "checkpoints")


@pytest.mark.slow
def test_a_restored_state_with_one_changed_bit_is_silently_wrong(
    run, restorer, tmp_path, monkeypatch
):
    shutil.copytree(run[1] / "checkpoints", tmp_path / "copy")
    result = restorer.trial(tmp_path / "copy")
    assert corruptions.classify(result, 30) == "harmless"
    restore = Checkpoints.restore

    def changed(self, step, abstract_state):
        state = restore(self, step, abstract_state)
        mean = np.array(state.guard.loss_mean)
        mean.view(np.uint32)[...] ^= 1
        mean = jax.device_put(mean, state.guard.loss_mean.sharding)
        return dataclasses.replace(state, guard=dataclasses.replace(state.guard, loss_mean=mean))

    monkeypatch.setattr(Checkpoints, "restore", changed)
    result = restorer.trial(tmp_path / "copy")
    assert corruptions.classify(result, 30) == "silently wrong"
    assert result["wrong"] == "guard.loss_mean, guard.loss_mean"  # its bytes, and its fingerprint


@pytest.mark.slow
def test_damage_that_restoring_misses_is_silently_wrong(run, restorer, tmp_path, monkeypatch):
    """Without the trainer's own check of fingerprints."""
    checkpoints = run[1] / "checkpoints"
    recorded = Checkpoints.record(
        Checkpoints(checkpoints, restorer.config.checkpoint, read_only=True), 30
    )["fingerprints"]
    monkeypatch.setattr("training.checkpoint.fingerprints", lambda tree: recorded)
    verdicts: Counter[str] = Counter()
    for number in range(6):
        copy = tmp_path / str(number)
        shutil.copytree(checkpoints, copy)
        (data,) = (copy / "30" / "state" / "ocdbt.process_0" / "d").iterdir()
        corruptions.damage(data, "flip", random.Random(number))
        verdicts[corruptions.classify(restorer.trial(copy), 30)] += 1
    assert verdicts["silently wrong"] >= 3


@pytest.mark.slow
def test_a_changed_loss_is_a_mismatch_of_a_killed_run(run, tmp_path, monkeypatch):
    _, undisturbed = run

    def copy(config, directory, *overrides, processes=1):
        shutil.copytree(undisturbed, directory)

    def altered(self, directory):
        copy(None, directory)
        self.phases["steps"] += 1
        path = directory / "metrics.jsonl"
        lines = [json.loads(line) for line in path.read_text().splitlines()]
        lines[16]["loss"] = math.nextafter(lines[16]["loss"], 9)
        path.write_text("".join(json.dumps(line) + "\n" for line in lines))

    monkeypatch.setattr(kills, "run_undisturbed", copy)
    monkeypatch.setattr(kills.Kills, "one_run", altered)
    options = {"change_mesh": False, "processes": 1, "sparse": False, "workers": 0}
    result = kills.soak_kills(tmp_path, limit=processes.Limit(1), steps=30, seed=0, **options)
    assert not result["ok"] and len(result["mismatches"]) == 1
    assert "run-1: step 17: loss" in result["mismatches"][0]


def run_soak(*arguments: str) -> dict:
    """Run a soak that has to pass, and return its figures."""
    done = subprocess.run(
        [sys.executable, "scripts/soak.py", *arguments],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=900,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-2000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.slow
def test_a_run_that_is_killed_three_times_equals_an_undisturbed_one():
    result = run_soak("kills", "--times", "3", "--steps", "120")
    assert result["kills"] == 3 and result["greatest_difference"] == 0.0


@pytest.mark.slow
def test_two_processes_of_which_one_is_killed_continue_on_another_mesh():
    # tests/test_processes.py has the same mesh, where all bits are equal.
    options = "--times", "3", "--steps", "80", "--processes", "2", "--change-mesh"
    result = run_soak("kills", *options)
    assert result["kills"] == 3 and sum(result["by_victim"].values()) == 3


@pytest.mark.release
def test_experts_and_data_workers_survive_kills():
    options = "--times", "3", "--steps", "120", "--sparse", "--workers", "1"
    result = run_soak("kills", *options)
    assert result["kills"] == 3 and result["greatest_difference"] == 0.0


@pytest.mark.slow
def test_a_killed_preparation_makes_the_same_store():
    result = run_soak("prepare-kills", "--times", "3", "--seed", "1")
    assert result["kills"] == 3 and result["prepare"]["with_workers"] > 0


@pytest.mark.release
def test_killed_conversions_make_the_same_directories():
    result = run_soak("conversion-kills", "--times", "4")
    assert result["kills"] == 4 and result["to-hf"]["folders"] and result["from-hf"]["folders"]


@pytest.mark.slow
def test_twelve_corruptions_are_detected_or_harmless():
    result = run_soak("corruptions", "--times", "12")
    assert set(result["verdicts"]) == {"detected", "harmless"} and result["trials"] == 12


@pytest.mark.release
def test_a_run_survives_trouble_with_its_disk_and_loses_no_checkpoint():
    result = run_soak("disk")
    assert "skipped" not in result["scenarios"]["file_limit"]
