"""Worker processes: what happens when one dies, and when the start of one is interrupted."""

import multiprocessing
import os
import subprocess
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from functools import partial

import pytest
from conftest import ROOT

from data.config import DataConfig
from data.engine import run_tasks
from data.prepare import build
from data.store_job import store_job
from data.tokenizers.byte_level import ByteTokenizer

READ = """
import multiprocessing, os, signal, sys
import jax
from jax.sharding import SingleDeviceSharding
from data.config import DataConfig
from data.files import DataError
from data.pipeline import Dataset, train_batches

if __name__ == "__main__":
    folder = sys.argv[1]
    sizes = {"sequence_length": 8, "global_batch_size": 8, "num_workers": 2}
    config = DataConfig(files=f"{folder}/a.txt", cache_dir=f"{folder}/cache", **sizes)
    place = SingleDeviceSharding(jax.devices()[0])
    batches = train_batches(Dataset(config), place, start=0, stop=10**9, accumulation=1)
    next(batches)
    os.kill(multiprocessing.active_children()[0].pid, signal.SIGKILL)
    try:
        for _ in batches:
            pass
    except DataError as error:
        print(error)
"""


@pytest.mark.slow
def test_a_dead_worker_ends_the_run_with_a_line(tmp_path):
    (tmp_path / "a.txt").write_text("".join(f"{n:07d} " for n in range(61)))
    script = tmp_path / "read.py"
    script.write_text(READ)
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"}
    command = [sys.executable, str(script), str(tmp_path)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.startswith("rows cannot be read: Worker process was terminated")


def test_an_interrupt_while_workers_start_leaves_no_process(tmp_path, monkeypatch):
    def interrupted(pool):
        """Start a process that the pool does not know yet."""
        multiprocessing.get_context("spawn").Process(target=time.sleep, args=(600,)).start()
        raise KeyboardInterrupt

    (tmp_path / "a.txt").write_text("hello")
    job = store_job("text", DataConfig(files=f"{tmp_path}/a.txt"), ByteTokenizer())
    monkeypatch.setattr(ProcessPoolExecutor, "_spawn_process", interrupted)
    with pytest.raises(KeyboardInterrupt):
        build(job, tmp_path / "store", engine=partial(run_tasks, workers=1))
    assert not multiprocessing.active_children()
