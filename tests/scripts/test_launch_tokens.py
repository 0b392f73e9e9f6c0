"""Tokens of the launch scripts: one for each attempt, in no command line and no output."""

import re

import kubernetes_validate
from launch_scripts import TRAIN, run, script, write_program
from ruamel.yaml import YAML


def test_the_token_of_a_pod_has_the_secret_and_the_attempt(checkout) -> None:
    for name in ("gcloud", "kubectl", "python3"):
        write_program(checkout / "bin" / name, "[[ $* != *--filename=- ]] || cat > applied")
    command = [
        "gke.sh", "up", "--name", "n", "--image", "r/i:1", "--cluster", "c", "--location", "l",
        "--accelerator", "a", "--topology", "2x2x2", "--pvc", "p", "--no-plan", "--", *TRAIN,
    ]  # fmt: skip
    tokens = set()
    for _ in range(2):
        code, out, err = run(checkout, script(command[0]), *command[1:], system=True)
        assert code == 0, err
        secret, jobset = YAML(typ="safe").load_all((checkout / "applied").read_text())
        kubernetes_validate.validate(secret, kubernetes_validate.latest_version(), strict=True)
        token = secret["stringData"]["token"]
        assert re.fullmatch("[0-9a-f]{64}", token) and token not in out + err
        tokens.add(token)
    assert len(tokens) == 2
    (replicated,) = jobset["spec"]["replicatedJobs"]
    (container,) = replicated["template"]["spec"]["template"]["spec"]["containers"]
    secret_of, attempt_of, variable = container["env"]
    reference = {"name": secret["metadata"]["name"], "key": "token"}
    assert secret_of["valueFrom"] == {"secretKeyRef": reference}
    assert "restart-attempt" in attempt_of["valueFrom"]["fieldRef"]["fieldPath"]
    assert variable["name"] == "TORUS_RUN_TOKEN"
    assert variable["value"] == f"$({secret_of['name']})-$({attempt_of['name']})"


def test_xpk_gets_the_token_in_a_file_that_only_its_owner_can_read(checkout) -> None:
    keep = """for word in "$@"; do [[ $word != --env-file=* ]] || file=${word#--env-file=}; done
[[ ! $file ]] || { stat -c %a "$file"; cat "$file"; } > seen; exit "${CODE:-0}" """
    write_program(checkout / "bin" / "xpk", keep)
    write_program(checkout / "bin" / "python3", "exit 1")
    command = [
        "up", "--xpk", "--name", "n", "--image", "r/i:1", "--cluster", "c", "--location", "l",
        "--project", "p", "--tpu-type", "t", "--", *TRAIN,
    ]  # fmt: skip
    for wanted in ("0", "3"):
        code, out, err = run(checkout, script("gke.sh"), *command, system=True, CODE=wanted)
        assert code == int(wanted), err
        mode, line = (checkout / "seen").read_text().splitlines()
        found = re.fullmatch("TORUS_RUN_TOKEN=([0-9a-f]{64})", line)
        assert mode == "600" and found and found[1] not in out + err
        assert not (checkout / ".cache" / "torus.env").exists()


def test_the_tasks_of_a_batch_job_have_the_token_in_their_environment(checkout) -> None:
    write_program(checkout / "bin" / "srun", 'echo "$TORUS_RUN_TOKEN" "$@" >> srun')
    for _ in range(2):
        assert run(checkout, script("slurm.sbatch"), *TRAIN, system=True)[0] == 0
    first, second = (line.split() for line in (checkout / "srun").read_text().splitlines())
    for token, *arguments in (first, second):
        assert re.fullmatch("[0-9a-f]{64}", token)
        assert token not in arguments and "--export=ALL" in arguments
    assert first[0] != second[0]
