"""Real processes of train.py over the loopback: same losses as one process, stops, failures."""

import json
import os
import re
import resource
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from conftest import ROOT, release
from runs import kept_signals, run

sys.path.insert(0, str(ROOT / "scripts"))
from soaks.compare import CLOSE_BOUND, array_differences, metric_differences, read_metrics
from soaks.processes import write_config

from configs.schema import load_config
from data.pipeline import Dataset

# Relative difference of losses when the same devices are in other processes: sixteen roundings of
# float32. With the same processes everything is bit-equal.
CLOSE = CLOSE_BOUND
SECONDS = 300.0  # that anything may take on a busy machine
HOST = socket.gethostname()
STEPS = 60
# Factorisations of eight devices; ep8 has mixture-of-experts layers.
MESHES = {"tp8": {"tp": 8}, "fsdp8": {"fsdp": 8}, "dp2-tp4": {"dp": 2, "tp": 4}}
MESHES |= {"ep8": {"ep": 8}, "sp2-tp4": {"sp": 2, "tp": 4}}
EXPERTS = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 16}

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")


class Command:
    """A running script and its output."""

    def __init__(self, folder: Path, *arguments: Any, **environment: str):
        number = len(list(folder.glob("*.err")))
        self._files = folder / f"{number}.out", folder / f"{number}.err"
        with open(self._files[0], "w") as out, open(self._files[1], "w") as err:
            self.process = subprocess.Popen(
                [sys.executable, *map(str, arguments)],
                cwd=ROOT,
                env={**os.environ, "JAX_PLATFORMS": "cpu", **environment},
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=err,
            )

    @property
    def out(self) -> str:
        return self._files[0].read_text()

    @property
    def err(self) -> str:
        return self._files[1].read_text()

    def until(self, condition: Callable[[], Any]) -> None:
        """Wait for a condition while the script runs."""
        limit = time.monotonic() + SECONDS
        while not condition():
            assert self.process.poll() is None, f"it exited: {self.out}\n{self.err}"
            assert time.monotonic() < limit, f"nothing happened: {self.out}\n{self.err}"
            time.sleep(0.002)

    def finish(self) -> int:
        return self.process.wait(SECONDS)

    def worker(self, number: int) -> int:
        """Return the operating-system id of process `number` of a launcher."""
        for folder in Path("/proc").glob("[0-9]*"):
            try:
                arguments = (folder / "cmdline").read_text().split("\0")
                parent = (folder / "stat").read_text().rpartition(")")[2].split()[1]
            except OSError:  # it has exited
                continue
            if int(parent) == self.process.pid and "--process-id" in arguments:
                if arguments[arguments.index("--process-id") + 1] == str(number):
                    return int(folder.name)
        raise AssertionError(f"no process {number}")


class Lab:
    """A folder with a configuration for four devices, and the commands started in it."""

    def __init__(self, folder: Path, **changes: Any):
        self.folder, self._commands = folder, list[Command]()
        settings = {"training__steps": STEPS, "training__eval_every": 10, "checkpoint__every": 10}
        # Processes are killed long after they have compiled, so none leaves a broken entry.
        settings["run__compilation_cache"] = str(ROOT / ".cache" / "xla-tests")
        self.config = write_config(folder, **(settings | changes))
        Dataset(load_config(self.config).data)  # fill the cache of the data

    def launch(
        self,
        name: str,
        *overrides: str,
        processes: int = 2,
        devices: int = 2,
        options: tuple[str, ...] = (),
    ) -> Command:
        """Start a launcher of run `name`."""
        given = ["--processes", processes, "--devices-per-process", devices, *options]
        rest = ["--config", self.config, f"run.dir={self.folder / name}", *overrides]
        return self._start("scripts/launch_local.py", *given, "--", *rest)

    def train(self, name: str, number: int, port: int, *overrides: str) -> Command:
        """Start process `number` of two."""
        cluster = ["--coordinator", f"127.0.0.1:{port}", "--num-processes", 2]
        rest = ["--config", self.config, f"run.dir={self.folder / name}", *overrides]
        return self._start("train.py", *cluster, "--process-id", number, *rest)

    def _start(self, *arguments: Any) -> Command:
        self._commands.append(Command(self.folder, *arguments))
        return self._commands[-1]

    def step(self, name: str) -> int:
        """Return the last step in the metrics of a run."""
        lines = read_metrics(self.folder / name)
        return int(lines[-1]["step"]) if lines else 0

    def differences(self, wanted: str, found: str, bound: float = 0.0) -> list[str]:
        return metric_differences(self.folder / wanted, self.folder / found, bound)[0]

    def log(self, name: str, number: int = 0) -> str:
        return (self.folder / name / ("log.txt" if not number else f"log.{number}.txt")).read_text()

    def record(self, name: str, step: int) -> dict[str, Any]:
        """Return the record of a checkpoint."""
        file = self.folder / name / "checkpoints" / str(step) / "_CHECKPOINT_METADATA"
        return json.loads(file.read_bytes())["custom_metadata"]["record"]

    def close(self) -> None:
        """Kill the launchers, and with them their processes."""
        for command in self._commands:
            command.process.kill()
            command.process.wait()


@pytest.fixture(scope="module")
def lab(tmp_path_factory):
    """A lab with a complete run `undisturbed` of two processes, and one `half` as long."""
    found = Lab(tmp_path_factory.mktemp("processes"))
    for name, steps in (("undisturbed", STEPS), ("half", STEPS // 2)):
        command = found.launch(name, f"training.steps={steps}")
        assert command.finish() == 0, command.err
    yield found
    found.close()


@pytest.fixture
def port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def compare_with_one_process(lab: Lab, devices: int) -> Command:
    """Train `one` in this process and `two` in two processes; compare their losses."""
    with kept_signals():
        assert run(str(lab.config), f"run.dir={lab.folder / 'one'}") == 0
    command = lab.launch("two", devices=devices // 2)
    assert command.finish() == 0, command.err
    assert lab.differences("one", "two", CLOSE) == []
    last = int(load_config(lab.config).training.steps)
    one, two = (lab.record(name, last) for name in ("one", "two"))
    assert one["order_hash"] == two["order_hash"] and (one["processes"], two["processes"]) == (1, 2)
    return command


def test_two_processes_train_like_one_and_only_process_0_prints(tmp_path):
    lab = Lab(tmp_path, training__steps=4, training__eval_every=4, checkpoint__every=4)
    command = compare_with_one_process(lab, 4)
    assert "step 4  eval loss" in command.out and command.out.count("saved step 4") == 1
    assert command.err == ""
    for number in range(2):
        assert "saved step 4" in lab.log("two", number)
        assert re.search(r"step +1/\d+  loss", lab.log("two", number))
    assert len(read_metrics(tmp_path / "two")) == 4


@pytest.mark.slow
@pytest.mark.parametrize("mesh", [x if x == "fsdp8" else release(x) for x in MESHES])
def test_two_processes_of_four_devices_train_like_one_of_eight(tmp_path, mesh):
    model = {"num_attention_heads": 8, "num_key_value_heads": 8}
    changes = {f"model__{key}": value for key, value in model.items()}
    if mesh == "ep8":
        changes["model__moe"] = EXPERTS
    lab = Lab(tmp_path, mesh=MESHES[mesh], training__steps=8, training__eval_every=4, **changes)
    compare_with_one_process(lab, 8)


@pytest.mark.slow
@pytest.mark.parametrize("processes", [release(1), 4])
def test_a_run_of_two_processes_resumes_on_any_number_with_the_same_data(lab, processes):
    name = f"on-{processes}"
    shutil.copytree(lab.folder / "half", lab.folder / name)
    command = lab.launch(name, processes=processes, devices=4 // processes)
    assert command.finish() == 0, command.err
    assert f"resumed from step {STEPS // 2}" in lab.log(name)
    assert lab.differences("undisturbed", name, CLOSE) == []
    record, wanted = lab.record(name, STEPS), lab.record("undisturbed", STEPS)
    assert record["order_hash"] == wanted["order_hash"]
    assert [entry["processes"] for entry in record["lineage"]] == [2]
    assert record["processes"] == processes


@pytest.mark.release
def test_two_processes_start_from_the_parameters_of_another_run_like_one(lab):
    stage = (f"training.init_from={lab.folder / 'half'}", "training.steps=10")
    with kept_signals():
        assert run(str(lab.config), f"run.dir={lab.folder / 'alone'}", *stage) == 0
    command = lab.launch("together", *stage)
    assert command.finish() == 0, command.err
    for number in range(2):
        assert f"from checkpoint {STEPS // 2} of {lab.folder / 'half'} in" in lab.log(
            "together", number
        )
    assert lab.differences("alone", "together", CLOSE) == []


INT8 = ("lora.rank=4", "lora.base_dtype=int8", "optimizer.learning_rate=1e-2", "mesh.fsdp=2")
DPO = ("training.objective=dpo", "data.packing=pairs", "data.sequence_length=80")
FINE_TUNING = {"int8": (*INT8, "mesh.dp=1"), "dpo": DPO}


@pytest.mark.slow
@pytest.mark.parametrize("name", [x if x == "dpo" else release(x) for x in FINE_TUNING])
def test_two_processes_fine_tune_like_one_and_resume_bit_equal(lab, name):
    pairs = ({"prompt": f"{n}?", "chosen": f"yes {n}", "rejected": f"no {n}"} for n in range(40))
    (lab.folder / "pairs.jsonl").write_text("\n".join(map(json.dumps, pairs)))
    options = [f"training.init_from={lab.folder / 'half'}", *FINE_TUNING[name]]
    if name == "dpo":
        options.append(f"data.files={lab.folder / 'pairs.jsonl'}")
    options += ["training.steps=8", "training.eval_every=4", "checkpoint.every=4"]
    with kept_signals():
        assert run(str(lab.config), f"run.dir={lab.folder / name}-alone", *options) == 0
    runs = {"whole": (), "resumed": ("training.steps=4",)}
    for suffix, more in (*runs.items(), ("resumed", ())):
        command = lab.launch(f"{name}-{suffix}", *options, *more)
        assert command.finish() == 0, command.err
    assert lab.differences(f"{name}-alone", f"{name}-whole", CLOSE) == []
    assert "resumed from step 4" in lab.log(f"{name}-resumed", 1)
    assert lab.differences(f"{name}-whole", f"{name}-resumed") == []
    folders = (lab.folder / f"{name}-{suffix}" for suffix in runs)
    assert array_differences(*folders, 8) == []


@pytest.mark.slow
@pytest.mark.parametrize("number", [0, release(1)])
def test_a_killed_process_is_named_by_the_other_and_the_run_resumes(lab, number):
    name = f"killed-{number}"
    command = lab.launch(name, options=("--restarts", "1"))
    command.until(lambda: lab.step(name) >= 25)
    os.kill(command.worker(number), signal.SIGKILL)
    began = time.monotonic()
    command.until(lambda: "restart 1 of 1" in command.err)
    assert time.monotonic() - began < 60
    lines = command.err.splitlines()
    assert f"launch_local: process {number} was killed by SIGKILL" in lines
    assert f"launch_local: process {1 - number} exited with code 76" in lines
    assert f"error: process {number} on {HOST} is lost: its connection closed" in command.err
    assert command.finish() == 0, command.err
    assert lab.differences("undisturbed", name) == []


@pytest.mark.slow
@pytest.mark.parametrize("number", [release(0), 1])
def test_a_save_that_fails_on_one_host_alone_is_skipped_by_all_and_nothing_is_lost(lab, number):
    name = f"full-{number}"
    command = lab.launch(name, "training.writers=[console]", "training.log_every=2")
    command.until(lambda: "saved step 10" in command.out)
    worker, log = command.worker(number), lab.folder / name / "log.txt"
    files = (log, log.with_name("log.1.txt"))
    # Room for log lines, not for the arrays of a checkpoint.
    size = max(file.stat().st_size for file in files) + 2**14
    resource.prlimit(worker, resource.RLIMIT_FSIZE, (size, resource.RLIM_INFINITY))
    began = time.monotonic()
    command.until(lambda: "was not saved" in command.out)
    assert time.monotonic() - began < 60
    unlimited = (resource.RLIM_INFINITY, resource.RLIM_INFINITY)
    resource.prlimit(worker, resource.RLIMIT_FSIZE, unlimited)
    assert command.finish() == 0, command.err
    (line, *_) = re.findall(r".* was not saved: .*", lab.log(name))
    assert f"was not saved: process {number} on {HOST}: " in line and "File too large" in line
    assert "training continues, next try after step" in line
    folders = (lab.folder / run_name for run_name in ("undisturbed", name))
    assert array_differences(*folders, STEPS) == []


SLOW_WRITER = """
import time
from training.writers.registry import MetricsWriter, register

@register("slow_writer")
class SlowWriter(MetricsWriter):
    def __init__(self, context):
        pass

    def close(self):
        time.sleep(25)
"""


@pytest.mark.slow
def test_a_writer_that_takes_longer_to_close_than_a_timeout_ends_no_process(
    lab, tmp_path, monkeypatch
):
    (tmp_path / "slow_writer.py").write_text(SLOW_WRITER)
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")
    writers = "training.writers=[jsonl, console, slow_writer]"
    command = lab.launch("upload", "plugins=[slow_writer]", writers, "cluster.peer_timeout=10")
    assert command.finish() == 0, command.err


@pytest.mark.slow
def test_a_frozen_process_is_named_by_the_other(lab):
    command = lab.launch("frozen", "cluster.peer_timeout=6", options=("--peer-grace", "1"))
    command.until(lambda: lab.step("frozen") >= 5)
    began = time.monotonic()
    os.kill(command.worker(1), signal.SIGSTOP)
    assert command.finish() == 76, command.err
    assert 5 < time.monotonic() - began < 60
    assert f"error: process 1 on {HOST} has sent no heartbeat for 6 s " in command.err
    assert "last phase" in command.err


@pytest.mark.slow
@pytest.mark.parametrize("processes", [release(1), 2])
def test_sigterm_to_the_launcher_stops_all_after_the_same_step_and_the_run_resumes(lab, processes):
    name = f"stopped-{processes}"
    # jax needs about a second to notice the signal; samples and saves make the run longer.
    slowly = ("checkpoint.every=1", "training.sample_every=1", "training.sample_tokens=32")
    command = lab.launch(name, *slowly, processes=processes, devices=4 // processes)
    command.until(lambda: lab.step(name) >= 3)
    command.process.terminate()
    assert command.finish() == 75, command.err
    check_stopped(lab, name, processes)
    command = lab.launch(name)
    assert command.finish() == 0, command.err
    assert lab.differences("undisturbed", name, 0.0 if processes == 2 else CLOSE) == []


@pytest.mark.slow
def test_sigterm_before_the_first_step_of_a_resumed_run_stops_all(lab):
    shutil.copytree(lab.folder / "half", lab.folder / "resumed")
    # Without the cache the first step is compiled for seconds, in which jax notices the signal.
    command = lab.launch("resumed", "run.compilation_cache=null", "training.sample_every=1")
    command.until(lambda: "resumed from" in lab.log("resumed", 1))
    command.process.terminate()
    assert command.finish() == 75, command.err
    check_stopped(lab, "resumed", 2)


def check_stopped(lab: Lab, name: str, processes: int) -> None:
    """Check that all processes stopped after one step, and that it was saved."""
    steps = [
        re.findall(r"stopped by SIGTERM after step (\d+)", lab.log(name, number))
        for number in range(processes)
    ]
    assert len(steps[0]) == 1 and steps == steps[:1] * processes
    assert lab.step(name) == int(steps[0][0]) < STEPS
    assert lab.record(name, int(steps[0][0]))


@pytest.mark.release
def test_a_signal_to_a_process_that_waits_for_others_stops_all_after_the_same_step(lab, port):
    early = lab.train("early", 1, port)

    def waits() -> bool:
        """Whether it handles SIGTERM yet."""
        status = Path(f"/proc/{early.process.pid}/status").read_text()
        caught = int(re.search(r"SigCgt:\s*(\w+)", status)[1], 16)
        return bool(caught & 1 << (signal.SIGTERM - 1))

    early.until(waits)
    early.process.terminate()
    first = lab.train("early", 0, port)
    assert [early.finish(), first.finish()] == [75, 75], early.err + first.err
    check_stopped(lab, "early", 2)


@pytest.mark.release
def test_sigusr1_saves_at_the_same_step_in_all_and_changes_nothing(lab):
    command = lab.launch("saved", "checkpoint.every=1000", "checkpoint.keep=9")
    command.until(lambda: lab.step("saved") >= 5)
    command.process.send_signal(signal.SIGUSR1)
    assert command.finish() == 0, command.err
    saved = [re.findall(r"saved step (\d+)", lab.log("saved", number)) for number in range(2)]
    assert saved[0] == saved[1] and len(saved[0]) == 2 and 5 <= int(saved[0][0]) < STEPS
    assert lab.record("saved", int(saved[0][0]))
    assert lab.differences("undisturbed", "saved") == []


@pytest.mark.release
def test_early_stopping_ends_all_processes_after_the_same_step(lab):
    stop = ("training.early_stop.patience=2", "training.early_stop.min_delta=100")
    for line in ("early stopping after step 30: eval_loss", "; nothing left to train"):
        command = lab.launch("early-stop", *stop)
        assert command.finish() == 0, command.err
        assert all(line in lab.log("early-stop", number) for number in range(2))
    assert lab.step("early-stop") == 30 and lab.record("early-stop", 30)


@pytest.mark.slow
def test_another_configuration_on_one_host_is_named_by_all(lab, port):
    commands = [lab.train("other", n, port, f"training.seed={7 * n}") for n in range(2)]
    assert [command.finish() for command in commands] == [2, 2]
    line = f"preflight: training.seed differs: process 1 on {HOST} has 7, process 0 has 0"
    for command in commands:
        assert line in command.err and "Traceback" not in command.err
    assert not (lab.folder / "other").exists()


@pytest.mark.slow
def test_a_missing_process_is_named(lab, port):
    command = lab.train("missing", 0, port, "cluster.start_timeout=5")
    assert command.finish() == 76
    assert command.err == (
        "error: 1 of 2 processes did not connect within 5 s (cluster.start_timeout); missing: 1; "
        f"connected: 0 ({HOST}); check the console output of the missing ones, or raise the "
        "timeout\n"
    )


@pytest.mark.release
def test_a_damaged_checkpoint_is_set_aside_and_the_run_resumes_from_the_one_before(lab):
    name, newest = "damaged", STEPS // 2
    shutil.copytree(lab.folder / "half", lab.folder / name)
    checkpoints = lab.folder / name / "checkpoints"
    files = [path for path in (checkpoints / f"{newest}" / "state").rglob("d/*") if path.is_file()]
    largest = max(files, key=lambda path: path.stat().st_size)
    data = bytearray(largest.read_bytes())
    data[len(data) // 2] ^= 1
    largest.write_bytes(data)
    command = lab.launch(name, options=("--restarts", "1"))
    assert command.finish() == 0, command.err
    assert f"error: checkpoint {newest}" in command.err and "it was set aside" in command.err
    assert re.search(r"process \d exited with code 76", command.err)
    assert (checkpoints / f"{newest}.damaged").is_dir()
    assert f"resumed from step {newest - 10}" in lab.log(name)
    assert lab.differences("undisturbed", name) == []


@pytest.mark.slow
def test_a_failure_of_one_process_ends_all_with_its_reason(lab):
    command = lab.launch("removed")
    command.until(lambda: lab.step("removed") >= 11)
    (lab.folder / "removed" / ".lock").unlink()
    began = time.monotonic()
    assert command.finish() == 1
    assert time.monotonic() - began < 60
    assert f"[1] error: process 0 on {HOST} failed: run.dir=" in command.err
    assert "was deleted during the run; nothing can be saved" in command.err
