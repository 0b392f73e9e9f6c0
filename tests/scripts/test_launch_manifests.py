"""Manifests of gke.sh: valid for Kubernetes, without privileges, and with the hosts of a slice."""

import re
from pathlib import Path

import kubernetes_validate
import pytest
from conftest import ROOT
from launch_scripts import LAUNCH, STRANGE, TRAIN, run, script
from ruamel.yaml import YAML


def read_manifests(text: str) -> list[dict]:
    """Return the Secret and the JobSet."""
    (filled,) = re.findall(r"<<'EOF'\n(.*)\nEOF\n", text, re.DOTALL)
    assert not re.search("__[A-Z_]+__", filled)
    return list(YAML(typ="safe").load_all(filled))


def golden_manifests(name: str) -> list[dict]:
    return read_manifests((Path(__file__).parent / "golden" / f"{name}.txt").read_text())


def golden_manifest() -> dict:
    return golden_manifests("gke_up")[1]


def validate(job: dict) -> None:
    job = {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": "slice"}} | job
    kubernetes_validate.validate(job, kubernetes_validate.latest_version(), strict=True)


def test_the_job_of_a_slice_satisfies_the_schema_of_kubernetes() -> None:
    (replicated,) = golden_manifest()["spec"]["replicatedJobs"]
    validate(replicated["template"])
    broken = replicated["template"]
    broken["spec"]["template"]["spec"]["containers"][0]["argument"] = []
    with pytest.raises(kubernetes_validate.ValidationError, match="argument"):
        validate(broken)


def test_the_jobset_restarts_all_slices_but_not_after_bad_input_or_a_device_fault() -> None:
    manifest = golden_manifest()
    assert (manifest["apiVersion"], manifest["kind"]) == ("jobset.x-k8s.io/v1alpha2", "JobSet")
    policy = manifest["spec"]["failurePolicy"]
    assert policy["maxRestarts"] == 20
    assert policy["rules"] == [
        {"action": "FailJobSet", "onJobFailureReasons": ["PodFailurePolicy"]}
    ]
    (replicated,) = manifest["spec"]["replicatedJobs"]
    job = replicated["template"]["spec"]
    pod = job["template"]["spec"]
    (rule,) = job["podFailurePolicy"]["rules"]
    assert rule["onExitCodes"]["values"] == [2, 77]
    assert rule["onExitCodes"]["containerName"] == pod["containers"][0]["name"]
    # Kubernetes applies podFailurePolicy to no other; a lone host cannot be replaced.
    assert (pod["restartPolicy"], job["backoffLimit"]) == ("Never", 0)


def test_a_slice_has_the_hosts_of_its_topology(checkout) -> None:
    (replicated,) = golden_manifest()["spec"]["replicatedJobs"]
    job = replicated["template"]["spec"]
    pod = job["template"]["spec"]
    (container,) = pod["containers"]
    chips = container["resources"]["limits"]["google.com/tpu"]
    assert job["parallelism"] == job["completions"] == 16 // chips
    assert pod["nodeSelector"]["cloud.google.com/gke-tpu-topology"] == "4x4"
    assert replicated["replicas"] == 2
    mounted = {mount["name"] for mount in container["volumeMounts"]}
    assert mounted == {volume["name"] for volume in pod["volumes"]}


def test_arguments_reach_the_container_as_they_were_given(checkout) -> None:
    code, out, _ = run(
        checkout, script("gke.sh"), "up", "--dry-run", "--name", "n", "--image", "r/i:1",
        "--cluster", "c", "--location", "l", "--accelerator", "a", "--topology", "2x2x2",
        "--pvc", "p", "--", *TRAIN, *STRANGE,
    )  # fmt: skip
    assert code == 0
    (replicated,) = read_manifests(out)[1]["spec"]["replicatedJobs"]
    (container,) = replicated["template"]["spec"]["template"]["spec"]["containers"]
    assert container["args"] == ["--distributed", *TRAIN, *STRANGE]


def test_the_templates_are_yaml_before_they_are_filled() -> None:
    names = ("jobset", "prepare", "prepare_nodes")
    texts = [(LAUNCH / f"gke_{name}.yaml").read_text() for name in names]
    found = [document["kind"] for text in texts for document in YAML(typ="safe").load_all(text)]
    assert found == ["Secret", "JobSet", "Job", "Secret", "JobSet"]


def pod_of(job: dict) -> dict:
    """Return the pod of a Job, or of the Jobs of a JobSet."""
    if job["kind"] == "JobSet":
        ((job),) = (each["template"] for each in job["spec"]["replicatedJobs"])
    return job["spec"]["template"]["spec"]


def breaches(pod: dict) -> list[str]:
    """Return what the Pod Security Standard `restricted` of Kubernetes forbids in a pod."""
    found = [key for key in ("hostNetwork", "hostPID", "hostIPC") if pod.get(key)]
    allowed = {"configMap", "emptyDir", "persistentVolumeClaim", "projected", "secret"}
    found += [volume["name"] for volume in pod["volumes"] if not allowed & set(volume)]
    for container in pod["containers"]:
        security = pod.get("securityContext", {}) | container.get("securityContext", {})
        found += ["privileged"] * security.get("privileged", False)
        found += ["allowPrivilegeEscalation"] * security.get("allowPrivilegeEscalation", True)
        found += ["capabilities"] * (security["capabilities"].get("drop") != ["ALL"])
        found += ["root"] * (not security.get("runAsNonRoot") or security.get("runAsUser") == 0)
        found += ["seccomp"] * (security.get("seccompProfile") != {"type": "RuntimeDefault"})
        found += [f"port {port}" for port in container.get("ports", []) if "hostPort" in port]
    return found


def golden_pods() -> dict[str, dict]:
    names = ("gke_up", "gke_up_one_slice", "gke_prepare")
    return {name: pod_of(golden_manifests(name)[-1]) for name in names}


def test_pods_have_no_privileges() -> None:
    pods = golden_pods()
    assert breaches(pods["gke_prepare"]) == []
    assert breaches(pods["gke_up"]) == ["hostNetwork"]  # between two slices
    # This one was started with --root.
    assert breaches(pods["gke_up_one_slice"]) == ["capabilities", "root"]
    assert all(pod["automountServiceAccountToken"] is False for pod in pods.values())


def test_shared_memory_has_a_size() -> None:
    volumes = {volume["name"]: volume for volume in golden_pods()["gke_up"]["volumes"]}
    assert volumes["memory"]["emptyDir"] == {"medium": "Memory", "sizeLimit": "8Gi"}


def test_the_job_that_prepares_data_satisfies_the_schema_of_kubernetes() -> None:
    (job,) = golden_manifests("gke_prepare")
    kubernetes_validate.validate(job, kubernetes_validate.latest_version(), strict=True)
    (container,) = pod_of(job)["containers"]
    assert (ROOT / container["command"][1]).is_file()
    assert container["args"][:2] == ["--config", "configs/tp8.yaml"]


def test_several_nodes_prepare_data_as_one_cluster_without_privileges() -> None:
    secret, manifest = golden_manifests("gke_prepare_nodes")
    head, others = manifest["spec"]["replicatedJobs"]
    assert manifest["spec"]["successPolicy"]["targetReplicatedJobs"] == [head["name"]] == ["head"]
    assert (head["template"]["spec"]["completions"], others["template"]["spec"]["completions"]) == (
        1,
        2,
    )
    for job in (head, others):
        validate(job["template"])
        pod = pod_of(job["template"] | {"kind": "Job"})
        assert breaches(pod) == [] and pod["automountServiceAccountToken"] is False
        (container,) = pod["containers"]
        mode, token = container["env"]
        assert mode == {"name": "RAY_AUTH_MODE", "value": "token"}
        key = token["valueFrom"]["secretKeyRef"]
        assert secret["metadata"]["name"] == key["name"] and key["key"] in secret["stringData"]
    name = manifest["metadata"]["name"]
    address = f"--address={name}-head-0-0.{name}:6379"  # JobSet gives pods these names
    assert pod_of(others["template"] | {"kind": "Job"})["containers"][0]["command"][-1] == address
