"""Launch scripts ask the planner first; a run that it refuses reaches no cloud and no process."""

import pytest
from launch_scripts import (
    RECORD,
    TRAIN,
    UP,
    run,
    script,
    write_program,
)

PLANNER = """
echo "$*" >> "$STAND_INS/record"
if [[ $1 == -c ]]; then exit "$(cat "$STAND_INS/packages")"; fi
read -r code < "$STAND_INS/answer"
((code == 0)) || echo "error: the planner says no" >&2
exit "$code"
"""
GKE = ["gke.sh", "up", "--name", "n", "--image", "r/i:1", "--cluster", "c", "--location", "l",
       "--accelerator", "tpu-v5-lite-podslice", "--topology", "4x4", "--pvc", "p"]  # fmt: skip
LAUNCHES = {
    "tpu": (["tpu_pod.sh", *UP, "--slices", "2"], "v5litepod-16*2"),
    "gke": (GKE, "tpu-v5-lite-podslice:4x4"),
    "xpk": (
        [*GKE[:10], "--project", "p", "--xpk", "--tpu-type", "v5p-16"],
        "v5p-16",
    ),
}


def ask(checkout, launch: list[str], *options: str, packages: int, answer: int):
    """Launch beside a planner; return (exit code, its calls, was a cloud called, stderr)."""
    for name in ("gcloud", "kubectl", "xpk", "git", "srun", "sleep"):
        write_program(checkout / "bin" / name, RECORD.replace("record", "cloud"))
    for name in ("python", "python3"):
        write_program(checkout / "bin" / name, PLANNER)
    (checkout / "packages").write_text(str(packages))
    (checkout / "answer").write_text(f"{answer}\n")
    name, *arguments = launch
    end = () if name == "slurm.sbatch" else ("--",)
    words = [*arguments, *options, *end, *TRAIN, "--process-id", "1"]
    code, _, err = run(checkout, script(name), *words, system=True)
    lines = (checkout / "record").read_text().splitlines()
    return code, lines[1:], (checkout / "cloud").exists(), err


@pytest.mark.parametrize("name", LAUNCHES)
def test_a_launch_that_the_planner_refuses_calls_no_cloud(checkout, name) -> None:
    launch, topology = LAUNCHES[name]
    plan = f"scripts/plan.py {' '.join(TRAIN)} --topology {topology}"
    for answer in (1, 2):
        code, asked, called, err = ask(checkout, launch, packages=0, answer=answer)
        assert (code, called) == (2, False) and "the planner says no" in err
        assert ("--no-plan" in err) == (answer == 1)
        assert asked == [plan]
        (checkout / "record").unlink()
    code, asked, called, _ = ask(checkout, launch, "--no-plan", packages=0, answer=0)
    assert (code, called, asked) == (0, True, [f"{plan} --check-mesh"])


@pytest.mark.parametrize("name", LAUNCHES)
def test_what_a_machine_cannot_check_is_said_and_left_to_the_hosts(checkout, name) -> None:
    launch, _ = LAUNCHES[name]
    code, asked, called, err = ask(checkout, launch, packages=3, answer=0)
    assert (code, called, len(asked)) == (0, True, 1)
    assert asked[0].endswith("--check-mesh") and "memory is not checked" in err
    (checkout / "record").unlink()
    code, asked, called, err = ask(checkout, launch, packages=1, answer=2)
    assert (code, called, asked) == (0, True, [])
    assert err.count("# not checked: python3 cannot import Torus") == 1


def test_a_job_that_the_planner_refuses_starts_no_process(checkout) -> None:
    plan = f"scripts/plan.py {' '.join(TRAIN)} --topology"
    code, asked, called, _ = ask(checkout, ["slurm.sbatch"], packages=3, answer=2)
    assert (code, called, asked) == (2, False, [f"{plan} h100-8*2 --check-mesh"])
    (checkout / "record").unlink()
    launch = ["slurm.sbatch", "--gpu", "a100"]
    code, asked, called, _ = ask(checkout, launch, packages=3, answer=0)
    assert (code, called, asked) == (0, True, [f"{plan} a100-8*2"])


DRY = {
    "tpu": (["tpu_pod.sh", "up", "--dry-run", *UP[1:]], "v5litepod-16"),
    "gke": (["gke.sh", "up", "--dry-run", *GKE[2:]], "tpu-v5-lite-podslice:4x4"),
    "slurm": (["slurm.sbatch", "--dry-run"], "h100-8*2"),
}


@pytest.mark.parametrize("name", DRY)
def test_a_dry_run_checks_the_mesh_and_needs_no_libtpu(checkout, name) -> None:
    launch, topology = DRY[name]
    for packages, answer in ((0, 2), (3, 0)):
        code, asked, called, err = ask(checkout, launch, packages=packages, answer=answer)
        assert (code, called) == (answer, False) and ("the planner says no" in err) == (answer == 2)
        assert asked == [f"scripts/plan.py {' '.join(TRAIN)} --topology {topology} --check-mesh"]
        (checkout / "record").unlink()


def test_gpus_that_the_planner_does_not_know_are_named_and_the_job_starts(checkout) -> None:
    launch = ["slurm.sbatch", "--gpu", "b7"]
    code, asked, called, err = ask(checkout, launch, packages=3, answer=0)
    assert (code, called) == (0, True) and asked[0].endswith("--topology h100-8*2 --check-mesh")
    assert err.startswith("# memory is not checked: scripts/plan.py knows a100, h100 and h200, not")
    (checkout / "record").unlink()
    write_program(checkout / "bin" / "srun", RECORD)
    job = {"SLURM_NTASKS_PER_NODE": "16"}
    code, _, err = run(checkout, script("slurm.sbatch"), *TRAIN, system=True, **job)
    assert code == 0 and "srun" in (checkout / "record").read_text()
    assert err == "# not checked: scripts/plan.py knows nodes of 1 to 8 GPUs, not of 16\n"
