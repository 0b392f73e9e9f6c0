"""`scripts/launch_local.py` with tiny programs instead of train.py: exits, signals, restarts."""

import json
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from conftest import ROOT
from runs import is_alive

sys.path.insert(0, str(ROOT / "scripts"))
import launch_local

SECONDS = 60.0  # that anything may take on a busy machine
SCRIPT = ROOT / "scripts" / "launch_local.py"
# Runs `launch`, then prints what it leaves behind: children, open files, threads.
DRIVER = """
import json, os, sys, threading
sys.path.insert(0, sys.argv[1])
import launch_local
before = os.listdir("/dev/fd")
code = launch_local.launch(**json.loads(sys.argv[2]))
try:
    left = [os.waitpid(-1, os.WNOHANG)]
except ChildProcessError:
    left = []
left += sorted(set(os.listdir("/dev/fd")) - set(before)) + threading.enumerate()[1:]
if left:
    print("LEFT", left, file=sys.stderr)
sys.exit(code)
"""
PROLOGUE = """
import json, os, signal, subprocess, sys, time
from pathlib import Path
index = int(sys.argv[sys.argv.index("--process-id") + 1])
folder = Path(sys.argv[-1])
def note(name, text=""):
    (folder / f"{name}.part{index}").write_text(str(text))
    os.rename(folder / f"{name}.part{index}", folder / name)
def until(name):
    while not (folder / name).exists():
        time.sleep(0.01)
def count(number, frame=None):
    with open(folder / f"{signal.Signals(number).name}-{index}", "a") as file:
        file.write("x")
"""
# Counts the signals that arrive.
TRAPS = """
for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1):
    signal.signal(number, count)
note(f"ready-{index}", os.getpid())
"""
HANGS = TRAPS + "time.sleep(100)"
STOPS = TRAPS + "until(f'SIGTERM-{index}'); time.sleep(0.2); sys.exit(75)"

Launch = Callable[..., subprocess.Popen]


def wait_until(condition: Callable[[], bool]) -> None:
    limit = time.monotonic() + SECONDS
    while not condition():
        assert time.monotonic() < limit, "nothing happened"
        time.sleep(0.01)


@pytest.fixture
def launch(tmp_path: Path) -> Iterator[Launch]:
    """Start a launcher of `program`; the last argument of each process is the test's folder."""
    started = []

    def start(program: str, *arguments: str, processes: int = 2, **options) -> subprocess.Popen:
        options |= {
            "program": [sys.executable, "-S", "-c", PROLOGUE + program],
            "arguments": [*arguments, str(tmp_path)],
            "processes": processes,
            "devices": 4,
        }
        command = [sys.executable, "-c", DRIVER, str(SCRIPT.parent), json.dumps(options)]
        pipe = subprocess.PIPE
        started.append(subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True))
        return started[-1]

    yield start
    for launcher in started:
        launcher.kill()
        launcher.wait()
        launcher.stdout.close()
        launcher.stderr.close()


def finish(launcher: subprocess.Popen) -> tuple[int, str, str]:
    """Return the exit code, stdout and stderr; check that nothing is left behind."""
    out, err = launcher.communicate(timeout=SECONDS)
    assert "LEFT" not in err, err
    return launcher.returncode, out, err


def wait_ready(folder: Path, processes: int = 2) -> list[int]:
    """Wait until all processes have their handlers; return their ids."""
    files = [folder / f"ready-{index}" for index in range(processes)]
    wait_until(lambda: all(file.exists() for file in files))
    return [int(file.read_text()) for file in files]


def launcher_lines(err: str) -> list[str]:
    """Return the lines of the launcher itself."""
    prefix = "launch_local: "
    return [line.removeprefix(prefix) for line in err.splitlines() if line.startswith(prefix)]


def test_each_process_gets_its_process_id_and_the_arguments(launch, tmp_path):
    program = """
names = ["JAX_PLATFORMS", "JAX_NUM_CPU_DEVICES"]
environment = [os.environ[name] for name in names]
leads = os.getsid(0) == os.getpid()
note(str(index), json.dumps([sys.argv[1:-1], environment, os.getcwd(), leads]))
"""
    code, out, err = finish(launch(program, "--config", "a b.yaml", "x=[1, 2]", processes=3))
    assert (code, out, err) == (0, "", "")
    ports = set()
    for index in range(3):
        arguments, environment, folder, leads_session = json.loads(
            (tmp_path / f"{index}").read_text()
        )
        assert arguments[0] == "--coordinator"
        host, port = arguments[1].split(":")
        assert host == "127.0.0.1" and 1024 <= int(port) < 65536
        ports.add(port)
        assert arguments[2:] == [
            *("--num-processes", "3", "--process-id", str(index)),
            *("--config", "a b.yaml", "x=[1, 2]"),
        ]
        assert environment == ["cpu", "4"]
        assert Path(folder) == Path.cwd()
        assert leads_session
    assert len(ports) == 1


def test_all_processes_of_an_attempt_have_one_secret_token(launch, tmp_path):
    program = """
with open(folder / f"tokens-{index}", "a") as file:
    file.write(os.environ["TORUS_RUN_TOKEN"] + "\\n")
sys.exit(76)
"""
    _, out, err = finish(launch(program, restarts=1))
    first, second = ((tmp_path / f"tokens-{index}").read_text().split() for index in range(2))
    assert first == second and len(set(first)) == 2 and {len(token) for token in first} == {64}
    assert not any(token in out + err for token in first)


def test_process_0_has_the_console_and_no_line_of_the_others_is_lost(launch):
    program = """
for line in range(3000):
    print(f"line {line} of {index}", flush=line % 7 == 0)
sys.stderr.write("to stderr\\n")  # at once: two processes write there
if index:
    os.write(1, b"caf\\xc3\\xa9 \\xff")
"""
    code, out, err = finish(launch(program))
    lines = [f"line {line}" for line in range(3000)]
    assert code == 0
    assert out.splitlines() == [f"{x} of 0" for x in lines]
    words = ["to stderr"]
    of_0 = [line for line in err.splitlines() if not line.startswith("[1] ")]
    of_1 = [line.removeprefix("[1] ") for line in err.splitlines() if line.startswith("[1] ")]
    assert of_0 == words
    assert [line for line in of_1 if line not in words] == [
        *(f"{x} of 1" for x in lines),
        "café \\xff",
    ]
    assert [line for line in of_1 if line in words] == words


def test_a_killed_process_does_not_take_its_last_lines_with_it(launch):
    program = "print('last words')\nif index: os.kill(os.getpid(), signal.SIGKILL)"
    code, _, err = finish(launch(program))
    assert code == 137
    assert "[1] last words" in err.splitlines()
    assert launcher_lines(err) == ["process 1 was killed by SIGKILL"]


# How process 0 exits and then, half a second later, process 1.
@pytest.mark.parametrize(
    ("first", "second", "code", "lines"),
    [
        ("0", "0", 0, []),
        (
            "75",
            "75",
            75,
            ["process 0 exited with code 75", "process 1 exited with code 75"],
        ),
        ("0", "3", 3, ["process 1 exited with code 3"]),
        ("3", "5", 3, ["process 0 exited with code 3", "process 1 exited with code 5"]),
        ("75", "5", 5, ["process 0 exited with code 75", "process 1 exited with code 5"]),
        (
            "kill",
            "76",
            137,
            ["process 0 was killed by SIGKILL", "process 1 exited with code 76"],
        ),
        ("1", "kill", 1, ["process 0 exited with code 1", "process 1 was killed by SIGKILL"]),
    ],
)
@pytest.mark.costly
def test_the_exit_code_is_that_of_the_first_failure(launch, first, second, code, lines):
    program = f"""
end = {[first, second]}[index]
if index:
    until("gone")
    time.sleep(0.5)
else:
    note("gone")
if end == "kill":
    os.kill(os.getpid(), signal.SIGKILL)
sys.exit(int(end))
"""
    found, _, err = finish(launch(program))
    assert (found, launcher_lines(err)) == (code, lines)


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_a_process_that_lost_a_peer_is_never_the_first_failure(launch, tmp_path):
    program = TRAPS + "until('go'); index or sys.exit(76); os.kill(os.getpid(), signal.SIGKILL)"
    launcher = launch(program)
    pids = wait_ready(tmp_path)
    launcher.send_signal(signal.SIGSTOP)  # so that it sees both exits in one poll
    (tmp_path / "go").touch()
    wait_until(lambda: not any(map(is_alive, pids)))
    launcher.send_signal(signal.SIGCONT)
    code, _, err = finish(launcher)
    assert code == 137
    assert launcher_lines(err) == [
        "process 1 was killed by SIGKILL",
        "process 0 exited with code 76",
    ]


def test_processes_that_hang_after_a_failure_are_killed_after_peer_grace(launch):
    program = "if index == 1: until('ready-0'); until('ready-2'); sys.exit(76)\n" + HANGS
    code, _, err = finish(launch(program, processes=3, peer_grace=0.3))
    assert code == 76
    assert launcher_lines(err) == [
        "process 1 exited with code 76",
        "process 0 did not exit within 0.3 s of process 1; killing it",
        "process 2 did not exit within 0.3 s of process 1; killing it",
    ]


def test_after_a_stopped_process_the_others_have_grace_to_save(launch):
    program = "if index == 1: until('ready-0'); sys.exit(75)\n" + HANGS
    code, _, err = finish(launch(program, grace=0.3, peer_grace=1000))
    assert code == 1
    assert launcher_lines(err) == [
        "process 1 exited with code 75",
        "process 0 did not exit within 0.3 s of process 1; killing it",
    ]


def test_processes_that_exit_within_peer_grace_are_not_killed(launch, tmp_path):
    program = "if index: sys.exit(1)\ntime.sleep(1); note('done'); sys.exit(76)"
    code, _, err = finish(launch(program, peer_grace=30))
    assert code == 1 and (tmp_path / "done").exists()
    assert "killing" not in err


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_stops_all_once_and_nothing_starts_again(launch, tmp_path, number):
    launcher = launch(STOPS, restarts=3)
    wait_ready(tmp_path)
    launcher.send_signal(number)
    assert finish(launcher) == (75, "", "")
    counted = {path.name: path.read_text() for path in tmp_path.glob("SIG*")}
    assert counted == {"SIGTERM-0": "x", "SIGTERM-1": "x"}


def test_a_failure_after_a_stop_does_not_restart(launch, tmp_path):
    launcher = launch(STOPS.replace("75", "index and 75 or 9"), restarts=3)
    wait_ready(tmp_path)
    launcher.terminate()
    code, _, err = finish(launcher)
    assert (code, launcher_lines(err)) == (9, ["process 0 exited with code 9"])


def test_a_second_signal_kills_at_once(launch, tmp_path):
    launcher = launch(HANGS, restarts=3, grace=1000)
    wait_ready(tmp_path)
    launcher.terminate()
    wait_until(lambda: len(list(tmp_path.glob("SIGTERM-*"))) == 2)
    launcher.terminate()
    code, _, err = finish(launcher)
    assert code == 1
    assert launcher_lines(err) == [
        f"process {n} did not exit before the second signal; killing it" for n in "01"
    ]


def test_two_signals_at_once_count_as_one(launch, tmp_path):
    launcher = launch(STOPS)
    wait_ready(tmp_path)
    for number in (signal.SIGSTOP, signal.SIGTERM, signal.SIGINT, signal.SIGCONT):
        launcher.send_signal(number)
    assert finish(launcher) == (75, "", "")


def test_a_process_that_ignores_sigterm_is_killed_after_grace(launch, tmp_path):
    launcher = launch(HANGS, grace=0.3)
    wait_ready(tmp_path)
    launcher.terminate()
    code, _, err = finish(launcher)
    assert code == 1
    assert launcher_lines(err) == [
        f"process {n} did not exit within 0.3 s of SIGTERM; killing it" for n in "01"
    ]


def test_sigusr1_goes_to_process_0_alone(launch, tmp_path):
    launcher = launch(TRAPS + "until('SIGUSR1-0'); time.sleep(0.2)")
    wait_ready(tmp_path)
    launcher.send_signal(signal.SIGUSR1)
    assert finish(launcher) == (0, "", "")
    assert [path.name for path in tmp_path.glob("SIG*")] == ["SIGUSR1-0"]


# Records each start with its port; the nth exits with the nth code.
COUNTS = """
starts = folder / f"starts-{index}"
with open(starts, "a") as file:
    file.write(sys.argv[sys.argv.index("--coordinator") + 1] + "\\n")
sys.exit(CODES[len(starts.read_text().splitlines()) - 1])
"""


@pytest.mark.parametrize(
    ("codes", "restarts", "starts"),
    [
        ([1, 76, 0], 3, 3),  # until success
        ([76, 1, 76], 2, 3),  # up to the limit
        ([1], 0, 1),
        ([2], 3, 1),  # bad input would fail again
        ([1, 75], 3, 2),  # stopped from outside
    ],
)
def test_a_failure_restarts_all_processes_up_to_the_limit(
    launch, tmp_path, codes, restarts, starts
):
    code, _, err = finish(launch(f"CODES = {codes}\n{COUNTS}", restarts=restarts))
    assert code == codes[-1]
    ports = [(tmp_path / f"starts-{index}").read_text().splitlines() for index in range(2)]
    assert ports[0] == ports[1]
    assert len(ports[0]) == starts
    assert all(one != other for one, other in zip(ports[0], ports[0][1:], strict=False))
    restarted = [line for line in launcher_lines(err) if line.startswith("restart")]
    assert restarted == [f"restart {n} of {restarts}" for n in range(1, starts)]


@pytest.mark.skipif(sys.platform != "linux", reason="prctl is Linux's")
def test_a_killed_launcher_leaves_no_process(launch, tmp_path):
    launcher = launch(HANGS)
    pids = wait_ready(tmp_path)
    assert all(map(is_alive, pids))
    launcher.kill()
    wait_until(lambda: not any(map(is_alive, pids)))


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_the_children_of_a_process_that_exited_are_killed(launch, tmp_path):
    program = """
worker = subprocess.Popen([sys.executable, "-S", "-c", "import time; time.sleep(100)"])
note(f"worker-{index}", worker.pid)
os._exit(0)
"""
    assert finish(launch(program)) == (0, "", "")
    workers = [int((tmp_path / f"worker-{index}").read_text()) for index in range(2)]
    wait_until(lambda: not any(map(is_alive, workers)))


def test_a_program_that_cannot_start_leaves_no_process(tmp_path):
    options = {"program": [str(tmp_path / "absent")], "arguments": [], "processes": 2, "devices": 1}
    command = [sys.executable, "-c", DRIVER, str(SCRIPT.parent), json.dumps(options)]
    found = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS)
    assert found.returncode == 1
    assert found.stderr.splitlines()[-1].startswith("FileNotFoundError")


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["--processes", "0"], "error: --processes=0 is too low; give 1 or more"),
        (
            ["--devices-per-process", "-4"],
            "error: --devices-per-process=-4 is too low; give 1 or more",
        ),
        (["--restarts", "-1"], "error: --restarts=-1 is too low; give 0 or more"),
        (["--peer-grace", "nan"], "error: --peer-grace=nan is too low; give 0 or more"),
        (
            ["--"],
            "error: nothing for train.py; put the arguments of train.py after --, as in -- "
            "--config configs/tp8.yaml",
        ),
        (
            ["first", "--", "--config", "a.yaml"],
            "error: first is no option; put the arguments of train.py after --, as in -- "
            "--config configs/tp8.yaml",
        ),
    ],
)
def test_a_bad_argument_is_one_line_and_2(capsys, arguments, line):
    rest = [] if "--" in arguments else ["--", "--config", "a.yaml"]
    given = ["--processes", "2", "--devices-per-process", "4", *arguments, *rest]
    assert launch_local.main(given) == 2
    assert capsys.readouterr().err == f"{line}\n"


@pytest.mark.parametrize("where", ["file", "override"])
def test_restarts_of_a_run_that_starts_over_are_refused(capsys, tmp_path, where):
    config = tmp_path / "config.yaml"
    config.write_text("checkpoint: {resume: never}" if where == "file" else "{}")
    overrides = [] if where == "file" else ["checkpoint.resume=never"]
    given = ["--processes", "1", "--devices-per-process", "1", "--restarts", "1", "--"]
    assert launch_local.main([*given, "--config", str(config), *overrides]) == 2
    assert "would start over each time" in capsys.readouterr().err


@pytest.mark.parametrize(
    "given",
    [
        ["--processes", "2", "--", "--config", "a.yaml"],
        ["--processes", "two", "--devices-per-process", "4", "--", "--config", "a.yaml"],
        ["--processes", "2", "--devices-per-process", "4", "--config", "a.yaml"],
    ],
)
def test_what_the_parser_does_not_know_ends_with_2(capsys, given):
    with pytest.raises(SystemExit) as ended:
        launch_local.main(given)
    assert ended.value.code == 2
    assert "error:" in capsys.readouterr().err.splitlines()[-1]


def test_what_follows_the_dashes_goes_to_train_py_untouched(monkeypatch):
    calls = []
    monkeypatch.setattr(launch_local, "launch", lambda *a, **k: calls.append((a, k)) or 76)
    rest = ["--config", "a.yaml", "--processes", "9", "x=1", "--", "y=2"]
    given = ["--processes", "2", "--devices-per-process", "4", "--restarts", "5", "--grace", "7"]
    assert launch_local.main([*given, "--", *rest]) == 76
    options = {"processes": 2, "devices": 4, "restarts": 5, "grace": 7.0, "peer_grace": 60.0}
    assert calls == [(([sys.executable, str(ROOT / "train.py")], rest), options)]


def test_the_launcher_starts_at_once_without_jax():
    heavy = "{'jax', 'numpy', 'flax', 'grain'} & set(sys.modules)"
    code = f"import sys; sys.path.insert(0, sys.argv[1]); import launch_local; print({heavy})"
    command = [sys.executable, "-c", code, str(SCRIPT.parent)]
    found = subprocess.run(command, capture_output=True, text=True)
    assert found.stdout == "set()\n", found.stderr
