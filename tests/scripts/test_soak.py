"""Short forms of `scripts/soak.py`, and that it can fail: a harness that always passes is none."""

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
import soak
import soak_corruptions
import soak_disk
import soak_run

from training.checkpoint import Checkpoints


def metrics(directory: Path, losses: dict[int, float], **last: float) -> Path:
    """A run directory with these lines; `last` is in the last line alone."""
    directory.mkdir()
    lines = [{"step": step, "loss": loss} for step, loss in losses.items()]
    lines[-1] |= last
    text = "".join(json.dumps(line) + "\n" for line in lines)
    (directory / "metrics.jsonl").write_text(text)
    return directory


LOSSES = {1: 5.5, 2: 4.25, 3: 1 / 3}


@pytest.mark.parametrize(
    ("losses", "last", "law"),
    [
        (LOSSES, {"eval_loss": 2.0}, None),
        (LOSSES | {3: math.nextafter(1 / 3, 1)}, {"eval_loss": 2.0}, "step 3: loss"),
        (LOSSES, {}, "step 3: eval_loss None, not 2.0"),
        (LOSSES, {"eval_loss": 2.0, "grad_norm": 1.0}, "step 3: grad_norm 1.0, not None"),
        (LOSSES | {3: math.nan}, {"eval_loss": 2.0}, "step 3: loss nan"),
        ({1: 5.5, 3: 1 / 3}, {"eval_loss": 2.0}, "lost or repeated, or out of order: [2]"),
        (LOSSES | {4: 1.0}, {"eval_loss": 2.0}, "lost or repeated, or out of order: [4]"),
        ({1: 5.5, 3: 1 / 3, 2: 4.25}, {"eval_loss": 2.0}, "or out of order"),
    ],
)
def test_every_difference_between_two_runs_is_told(tmp_path, losses, last, law):
    wanted = metrics(tmp_path / "wanted", LOSSES, eval_loss=2.0)
    told, _ = soak_run.differences(wanted, metrics(tmp_path / "found", losses, **last))
    assert (told == []) if law is None else (len(told) == 1 and law in told[0])


def test_a_repeated_step_is_told(tmp_path):
    wanted, found = (metrics(tmp_path / name, LOSSES) for name in "ab")
    with open(found / "metrics.jsonl", "a") as file:
        file.write('{"step": 3, "loss": 0.1}\n')
    assert "[3]" in soak_run.differences(wanted, found)[0][0]


def test_on_other_meshes_a_loss_may_differ_by_the_bound_and_not_more(tmp_path):
    wanted = metrics(tmp_path / "wanted", LOSSES)
    bound = soak_run.CLOSE_BOUND
    for factor, count in ((1 + 0.9 * bound, 0), (1 + 1.1 * bound, 1), (math.nan, 1)):
        found = metrics(tmp_path / f"found-{factor}", LOSSES | {2: 4.25 * factor})
        assert len(soak_run.differences(wanted, found, bound)[0]) == count


def test_nothing_to_compare_with_is_an_error_and_not_equality(tmp_path):
    with pytest.raises(soak_run.SoakError, match="no step"):
        soak_run.differences(tmp_path, tmp_path)
    with pytest.raises(soak_run.SoakError, match="no checkpoint 3"):
        soak_run.other_arrays(tmp_path / "a", tmp_path / "b", 3)


@pytest.mark.parametrize(
    ("result", "verdict"),
    [
        ({"step": 30, "wrong": "", "told": []}, "harmless"),
        ({"step": 20, "wrong": "", "told": ["checkpoint 30: a is not ..."]}, "detected"),
        ({"step": 20, "wrong": "", "told": ["checkpoint 300: a is not ..."]}, "silent fallback"),
        ({"step": 20, "wrong": "", "told": []}, "silent fallback"),
        ({"step": 20, "wrong": "a", "told": ["checkpoint 30: a is not ..."]}, "silently wrong"),
        ({"step": 30, "wrong": "a", "told": []}, "silently wrong"),
        ({"step": 0, "wrong": "everything", "told": []}, "silently wrong"),
        ({"crash": "KeyError", "told": []}, "crash"),
        ({"hang": 60.0}, "hang"),
    ],
)
def test_only_detected_and_harmless_are_called_so(result, verdict):
    assert soak_corruptions.classify(result, 30) == verdict


def test_damage_does_what_it_is_called(tmp_path):
    original, rng, seen = bytes(range(100)), random.Random(0), {}
    for how in soak_corruptions.DAMAGES:
        path = tmp_path / how
        path.write_bytes(original)
        soak_corruptions.damage(path, how, rng)
        seen[how] = path.read_bytes() if path.exists() else None
    changed = [a ^ b for a, b in zip(original, seen["flip"], strict=True)]
    assert Counter(n.bit_count() for n in changed) == {0: 99, 1: 1}
    assert original.startswith(seen["truncate"]) and len(seen["truncate"]) < 100
    assert len(seen["garbage"]) == 100 and seen["garbage"] != original
    assert seen["empty"] == b"" and seen["delete"] is None


def test_a_disk_is_filled_but_for_the_room_that_is_asked_for(tmp_path, monkeypatch):
    free = [5 * 2**20 + 300, 4 * 2**20 + 300, 2**20 + 300, 300]
    usage = iter([SimpleNamespace(free=n) for n in free])
    monkeypatch.setattr(shutil, "disk_usage", lambda path: next(usage))
    assert soak_disk.fill(tmp_path, 300).stat().st_size == 3 * 2**20


def test_a_hiccup_does_not_count_and_what_every_turn_has_does():
    turns = [[3.0, 1.0, 1.0], [3.0, 9.0, 1.0], [4.0, 1.0, 1.0]]
    assert soak.usual_seconds(turns) == 5.0


LOST = "error: process 1 on here is gone: its connection closed; start all processes again\n"
MISSING = "error: 1 of 2 processes came within 30 s: 0 (here); missing: 1; look at their logs\n"


@pytest.mark.parametrize(
    ("code", "said", "is_fine"),
    [
        (76, LOST, True),
        (76, MISSING, True),
        (76, f"a warning before it\n{LOST}", True),
        (1, LOST, False),
        (0, "", False),
        (-6, LOST, False),
        (76, "", False),
        (76, LOST.replace("process 1", "process 10"), False),
        (76, LOST.replace("process 1", "process 0"), False),
        (76, LOST.removeprefix("error: "), False),
    ],
)
def test_who_outlives_a_killed_process_ends_with_76_and_names_it(code, said, is_fine):
    trainer = SimpleNamespace(codes=[code, -9], errors=[said, ""], directory=Path("run"))
    problems = soak.survivor_problems(trainer, 0, [1])
    assert not problems if is_fine else f"process 0 outlived 1: exit {code}" in problems[0]


@pytest.mark.parametrize("victim", [0, 1])
def test_jax_may_be_the_one_that_ends_who_lost_process_0_but_no_other(victim):
    said = "Terminating process ... Failed to send RPC to coordination service."
    trainer = SimpleNamespace(codes=[-6, -6], errors=[said, said], directory=Path("run"))
    assert bool(soak.survivor_problems(trainer, 1 - victim, [victim])) == (victim == 1)


@pytest.fixture
def trainer_of(tmp_path, monkeypatch):
    """Two processes of a train.py of these lines, which know their `number`."""

    def start(lines: str) -> soak_run.Trainer:
        first = "import sys, time; number = int(sys.argv[sys.argv.index('--process-id') + 1])\n"
        (tmp_path / "train.py").write_text(first + lines)
        monkeypatch.setattr(soak_run, "ROOT", tmp_path)
        return soak_run.Trainer(tmp_path / "soak.yaml", tmp_path / "run", processes=2)

    return start


def test_several_processes_have_ended_with_the_last_and_well_if_all_did(trainer_of, tmp_path):
    wait = "import os\nwhile number and not os.path.exists('go'): time.sleep(0.01)\n"
    with trainer_of(f"{wait}print(number, file=sys.stderr); sys.exit(number)") as trainer:
        assert trainer.sleep(60) is False  # one is enough
        assert trainer.codes == [0, None]
        (tmp_path / "go").touch()
        assert trainer.finish() == 1
        assert trainer.errors == ["0\n", "1\n"] and trainer.err == "0\n1\n"


def test_a_process_that_outlives_a_killed_one_for_too_long_ends_the_soak(trainer_of, monkeypatch):
    kills = soak.Kills(Path(), 1, 9, random.Random(0), change_mesh=False, processes=2)
    monkeypatch.setattr(soak, "KILL_ALL", 0.0)
    monkeypatch.setattr(soak, "PEER_SECONDS", 0.2)
    with trainer_of("time.sleep(60)") as trainer:
        with pytest.raises(soak_run.SoakError, match=r"for 0 s"):
            kills.kill(trainer)
        assert trainer.codes == [-9, -9]  # nothing stays


@pytest.mark.parametrize(
    ("share", "victims"), [(0.0, {"0 of 2", "1 of 2"}), (1.0, {"0 and 1 of 2"})]
)
def test_either_process_is_killed_or_both(trainer_of, monkeypatch, share, victims):
    kills = soak.Kills(Path(), 1, 9, random.Random(0), change_mesh=False, processes=2)
    monkeypatch.setattr(soak, "KILL_ALL", share)
    while set(kills.victims) != victims:
        assert kills.victims.total() < 9
        # Its end must not depend on the other: it waits for nobody.
        with trainer_of(
            "time.sleep(0.2); sys.exit(f'error: process {1 - number} is gone')"
        ) as trainer:
            kills.kill(trainer)
    assert len(kills.mismatches) == (0 if share else kills.victims.total())  # 1, not 76


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> tuple[Path, Path]:
    """The configuration and the directory of a run with three checkpoints."""
    folder = tmp_path_factory.mktemp("soak")
    config = soak_run.write_config(
        folder,
        # Tests have their own cache of compiled programs.
        run={"dir": str(folder / "run"), "compilation_cache": None},
        checkpoint={"every": 10},
        training__steps=30,
    )
    soak_run.run_undisturbed(config, folder / "run")
    return config, folder / "run"


@pytest.mark.slow
def test_a_restored_state_with_one_changed_bit_is_silently_wrong(run, tmp_path, monkeypatch):
    config, directory = run
    restorer = soak_corruptions.Restorer(config, directory / "checkpoints")
    shutil.copytree(directory / "checkpoints", tmp_path / "copy")
    result = restorer.trial(tmp_path / "copy")
    assert soak_corruptions.classify(result, 30) == "harmless"
    restore = Checkpoints.restore

    def changed(self, step, abstract_state):
        state = restore(self, step, abstract_state)
        mean = np.array(state.guard.loss_mean)
        mean.view(np.uint32)[...] ^= 1
        mean = jax.device_put(mean, state.guard.loss_mean.sharding)
        return dataclasses.replace(state, guard=dataclasses.replace(state.guard, loss_mean=mean))

    monkeypatch.setattr(Checkpoints, "restore", changed)
    result = restorer.trial(tmp_path / "copy")
    assert soak_corruptions.classify(result, 30) == "silently wrong"
    assert result["wrong"] == "guard.loss_mean, guard.loss_mean"  # by its bytes, and fingerprint


@pytest.mark.slow
def test_damage_that_restoring_does_not_notice_is_silently_wrong(run, tmp_path, monkeypatch):
    """The trainer's own check of fingerprints taken away."""
    config, directory = run
    restorer = soak_corruptions.Restorer(config, directory / "checkpoints")
    recorded = Checkpoints.record(
        Checkpoints(directory / "checkpoints", restorer.config.checkpoint, read_only=True), 30
    )["fingerprints"]
    monkeypatch.setattr("training.checkpoint.fingerprints", lambda tree: recorded)
    verdicts: Counter[str] = Counter()
    for number in range(6):
        copy = tmp_path / str(number)
        shutil.copytree(directory / "checkpoints", copy)
        (data,) = (copy / "30" / "state" / "ocdbt.process_0" / "d").iterdir()
        soak_corruptions.damage(data, "flip", random.Random(number))
        verdicts[soak_corruptions.classify(restorer.trial(copy), 30)] += 1
    assert verdicts["silently wrong"] >= 3


@pytest.mark.slow
def test_an_altered_loss_is_a_mismatch_of_a_killed_run(run, tmp_path, monkeypatch):
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

    monkeypatch.setattr(soak, "run_undisturbed", copy)
    monkeypatch.setattr(soak.Kills, "one_run", altered)
    args = SimpleNamespace(times=1, steps=30, seed=0, change_mesh=False, processes=1)
    result = soak.soak_kills(tmp_path, args)
    assert not result["ok"] and len(result["mismatches"]) == 1
    assert "run-1: step 17: loss" in result["mismatches"][0]


def run_soak(*arguments: str) -> dict:
    """The figures of a soak that went well."""
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
def test_a_run_that_is_killed_three_times_is_as_if_nothing_had_happened():
    result = run_soak("kills", "--times", "3", "--steps", "120")
    assert result["kills"] == 3 and result["greatest_difference"] == 0.0


@pytest.mark.slow
def test_two_processes_of_which_one_is_killed_go_on_with_another_mesh_as_if_nothing_had_happened():
    # On the same mesh, to the bit: tests/test_processes.py.
    options = "--times", "3", "--steps", "80", "--processes", "2", "--change-mesh"
    result = run_soak("kills", *options)
    assert result["kills"] == 3 and sum(result["by_victim"].values()) == 3


@pytest.mark.slow
def test_twelve_corruptions_are_detected_or_harmless():
    result = run_soak("corruptions", "--times", "12")
    assert set(result["verdicts"]) == {"detected", "harmless"} and result["trials"] == 12


@pytest.mark.slow
def test_a_disk_in_trouble_ends_no_healthy_run_and_costs_no_checkpoint():
    result = run_soak("disk")
    assert "skipped" not in result["scenarios"]["file_limit"]
