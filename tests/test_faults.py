"""Processes whose devices hang or hold wrong bits: all of them end, with one line that says why."""

import json
import re
import socket
import sys

import pytest
from test_processes import Lab

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(sys.platform != "linux", reason="test_processes reads /proc"),
]

HOST = socket.gethostname()
# Compiling may take long on a busy machine, so the timeout is short only once the run hangs, and
# once every process is known to have ended compiling.
HANG = """
import threading
import time

import jax

from training.runner import StepRunner
from training.step import Program

compute, run = Program.step_gradients, StepRunner.run
may_hang = False


def wait_for_ever(loss):
    if may_hang:
        threading.Event().wait()


def compute_and_hang(*arguments):
    means, report, grads = compute(*arguments)
    if ON_DEVICE:
        jax.debug.callback(wait_for_ever, means["loss"])
    return means, report, grads


def peers(group):
    return group._monitor._peers.values() if group.process_id == 0 else ()


def run_and_hang(runner, step, state):
    global may_hang
    if step == 4:
        while not all((peer.phase.name or "").startswith("step") for peer in peers(runner._group)):
            time.sleep(0.1)
        object.__setattr__(runner._group.config, "stall_timeout", 15)
        may_hang = True
        if not ON_DEVICE and runner._group.process_id == 1:
            threading.Event().wait()
    return run(runner, step, state)


Program.step_gradients, StepRunner.run = compute_and_hang, run_and_hang
"""


def lab_with(plugin: str, folder, monkeypatch) -> Lab:
    """Return a lab whose processes import a module with this text."""
    (folder / "fault.py").write_text(plugin)
    monkeypatch.setenv("PYTHONPATH", str(folder))
    lab = Lab(folder)
    settings = json.loads(lab.config.read_text())
    lab.config.write_text(json.dumps({**settings, "plugins": ["fault"]}))
    return lab


LIMIT = r"no progress for 15 s \(cluster\.stall_timeout\): "


def test_a_device_that_hangs_ends_a_process_that_runs_alone(tmp_path, monkeypatch):
    lab = lab_with(HANG.replace("ON_DEVICE", "True"), tmp_path, monkeypatch)
    command = lab._start("train.py", "--config", lab.config, f"run.dir={tmp_path}/run")
    assert command.finish() == 76, command.err
    (line,) = [line for line in command.err.splitlines() if "error" in line]
    assert re.match(rf"error: {LIMIT}process 0 on {HOST}: step [45] for \d+ s; the stacks", line)
    assert line.split(" ", 1)[1] in lab.log("run")
    stacks = (tmp_path / "run" / "stacks.txt").read_text()
    main = stacks.partition("thread MainThread:")[2].partition("\nthread ")[0]
    assert "in _train_steps" in main, "the main thread dispatches a step, or waits for its metrics"
    assert "in wait_for_ever" in stacks


def test_a_process_that_hangs_ends_all_and_each_writes_its_stacks(tmp_path, monkeypatch):
    lab = lab_with(HANG.replace("ON_DEVICE", "False"), tmp_path, monkeypatch)
    command = lab.launch("run")
    assert command.finish() == 76, command.err
    assert re.search(rf"error: {LIMIT}process \d on {HOST}: step [345] for", command.err)
    for number, ending in enumerate(("txt", "1.txt")):
        stacks = (tmp_path / "run" / f"stacks.{ending}").read_text()
        assert re.search(rf" {LIMIT}process \d on {HOST}", stacks)
        main = stacks.partition("thread MainThread:")[2].partition("\nthread ")[0]
        assert "in _train_steps" in main
        assert ("Event().wait()" in main) == (number == 1)


FLIP = """
import jax
import numpy as np

from training.runner import StepRunner

run = StepRunner.run


def flip(path, x):
    if jax.tree_util.keystr(path, simple=True, separator=".") != "params.embed.table":
        return x
    blocks = [shard.data for shard in x.addressable_shards]
    block = np.array(blocks[1])
    block.view(np.uint32).flat[0] ^= 1
    blocks[1] = jax.device_put(block, x.addressable_shards[1].device)
    return jax.make_array_from_single_device_arrays(x.shape, x.sharding, blocks)


def run_and_flip(runner, step, state):
    state, metrics = run(runner, step, state)
    if step == 3 and runner._group.process_id == 1:
        state = jax.tree_util.tree_map_with_path(flip, state)
    return state, metrics


StepRunner.run = run_and_flip
"""


def test_a_replica_that_differs_ends_all_processes_and_names_its_process(tmp_path, monkeypatch):
    lab = lab_with(FLIP, tmp_path, monkeypatch)
    options = ("mesh.dp=4", "mesh.tp=1", "training.guard.recheck_every=2")
    command = lab.launch("run", *options, options=("--restarts", "3"))
    assert command.finish() == 77, command.err
    lines = [line for line in command.err.splitlines() if "recheck before step 4: " in line]
    pattern = (
        r"params\.embed\.table differs between devices that hold the same shard: "
        rf"device \S+ of process 1 on {HOST}; the last recheck passed after step 1, "
    )
    assert lines and all(re.search(pattern, line) for line in lines), command.err
    assert "restart" not in command.err.replace("restart all", "")
    assert lab.step("run") == 3
