"""The JobSet: what stands in it, that wrong ones are refused, and the cluster's own schema."""

from __future__ import annotations

import copy
import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from executor.cli.main import main
from executor.launch.job import Job, LaunchError
from executor.processes.roles import Role, read_role

pytest.importorskip("jsonschema", reason="needs jsonschema: pip install 'meshwright[k8s]'")
yaml = pytest.importorskip("yaml", reason="needs PyYAML: pip install 'meshwright[k8s]'")

from executor.launch.kubernetes import jobset, manifests  # noqa: E402

JOB = Job(("python", "train.py", "--x"), 4, 2, {"A": "b"}, stop_s=90)
PODS = jobset.Pods("train", "registry/image:1", 8)


def document() -> Any:
    return jobset.manifest(JOB, PODS, 3)


def pod(found: Any) -> Any:
    return found["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]["spec"]


def test_the_pods_know_who_they_are() -> None:
    container = pod(document())["containers"][0]
    env = {entry["name"]: entry.get("value") for entry in container["env"]}
    env = {name: value for name, value in env.items() if value is not None}
    assert env["A"] == "b" and env["JAX_NUM_CPU_DEVICES"] == "2"
    role = read_role({**env, "JOB_COMPLETION_INDEX": "3"})
    assert role == Role(4, 3, "train-workers-0-0.train:8476", source="planner launch")
    assert container["command"] == ["python", "train.py", "--x"]
    assert container["resources"] == {"limits": {"nvidia.com/gpu": 8}}


def test_what_pods_ask_for() -> None:
    asked = jobset.Pods("train", "i", 8, "500m", "32Gi")
    found = jobset.manifest(JOB, asked, 0)
    manifests.check_manifest(found, *manifests.read_schema(None, jobset.KIND))
    assert pod(found)["containers"][0]["resources"] == {
        "requests": {"cpu": "500m", "memory": "32Gi"},
        "limits": {"nvidia.com/gpu": 8, "memory": "32Gi"},
    }
    bare = jobset.manifest(JOB, jobset.Pods("train", "i"), 0)
    assert "resources" not in pod(bare)["containers"][0]
    for right in ("1e9", "12E6", "32Gi", "32G", "5.", ".5Ti", "100k"):
        jobset.manifest(JOB, jobset.Pods("t", "i", memory=right), 0)
    cpus = [jobset.Pods("t", "i", cpu=text) for text in ("many", "-1", "")]
    for wrong in (*cpus, *(jobset.Pods("t", "i", memory=x) for x in ("32 GB", "32ki", "500m"))):
        with pytest.raises(LaunchError, match="expected a quantity of Kubernetes, such as"):
            jobset.manifest(JOB, wrong, 0)


def test_a_failure_starts_all_again() -> None:
    spec = document()["spec"]
    job = spec["replicatedJobs"][0]["template"]["spec"]
    assert spec["failurePolicy"]["maxRestarts"] == 3
    assert spec["failurePolicy"]["rules"][0]["action"] == "RestartJobSet"
    assert job["podFailurePolicy"]["rules"][0] == {
        "action": "FailJob",
        "onExitCodes": {"containerName": "worker", "operator": "In", "values": [75]},
    }
    assert (job["parallelism"], job["completions"], job["backoffLimit"]) == (4, 4, 0)
    assert pod(document())["terminationGracePeriodSeconds"] == 90


def change_at(found: Any, path: str, value: Any) -> Any:
    """A copy with a value put in; ``path`` by names and numbers."""
    out = copy.deepcopy(found)
    at = out
    *parts, last = [int(part) if part.isdecimal() else part for part in path.split("/")]
    for part in parts:
        at = at[part]
    at[last] = value
    return out


INDEXED = "spec/replicatedJobs/0/template/spec"
CONTAINER = f"{INDEXED}/template/spec/containers/0"
WRONG = [
    ("spec/unknown", 1),
    ("spec/network/enableDnsHostnames", True),
    ("spec/failurePolicy/maxRestarts", "3"),
    ("spec/failurePolicy/rules/0/action", "Restart"),
    (f"{INDEXED}/parallelism", "4"),
    (f"{INDEXED}/podFailurePolicy/rules/0/onExitCodes/values", 75),
    (f"{INDEXED}/template/spec/restart", "Never"),
    (f"{CONTAINER}/gpus", 8),
    (f"{CONTAINER}/env/0/val", "x"),
    (f"{CONTAINER}/command", "python"),
]


def refused_by(schema: Any) -> list[str]:
    """Which of the wrong manifests a schema refuses."""
    out = []
    for path, value in WRONG:
        try:
            manifests.check_manifest(change_at(document(), path, value), schema, "it")
        except LaunchError:
            out.append(path)
    return out


def test_the_built_in_schema_takes_it_and_refuses_wrong_ones() -> None:
    schema, name = manifests.read_schema(None, jobset.KIND)
    manifests.check_manifest(document(), schema, name)
    assert refused_by(schema) == [path for path, _ in WRONG]
    with pytest.raises(LaunchError, match=r"does not allow spec/failurePolicy/maxRestarts: '3'"):
        manifests.check_manifest(
            change_at(document(), "spec/failurePolicy/maxRestarts", "3"), schema, name
        )


def test_the_clusters_schema_takes_it_and_refuses_wrong_ones() -> None:
    path = os.environ.get("MESHWRIGHT_JOBSET_CRD")
    if path is None:
        pytest.skip("MESHWRIGHT_JOBSET_CRD does not name the JobSet CRD (a YAML file)")
    schema, name = manifests.read_schema(Path(path), jobset.KIND)
    manifests.check_manifest(document(), schema, name)
    assert refused_by(schema) == [path for path, _ in WRONG]


def test_a_schema_that_is_none(tmp_path: Path) -> None:
    path = tmp_path / "crd.yaml"
    path.write_text("spec: {versions: [{name: v1}]}")
    with pytest.raises(LaunchError, match="no CustomResourceDefinition with v1alpha2"):
        manifests.read_schema(path, jobset.KIND)
    path.write_text("{")
    with pytest.raises(LaunchError, match="cannot read"):
        manifests.read_schema(path, jobset.KIND)


@pytest.mark.parametrize("name", ["Train", "1st", "a_b", "x" * 60, ""])
def test_names_that_kubernetes_does_not_take(name: str) -> None:
    with pytest.raises(LaunchError, match=f"--name {name}: expected lower-case"):
        jobset.manifest(JOB, jobset.Pods(name, "i"), 0)


def test_the_command_writes_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["launch", "--launcher", "k8s", "-n", "4", "--image", "registry/image:1"]
    assert main([*words, "src/Train_It.py", "--x"]) == 0
    shown = yaml.safe_load(capsys.readouterr().out)
    assert shown["metadata"]["name"] == "train-it"
    assert pod(shown)["containers"][0]["command"] == ["python", "src/Train_It.py", "--x"]
    path = tmp_path / "job.yaml"
    assert main([*words, "--out", str(path), "src/Train_It.py", "--x"]) == 0
    assert capsys.readouterr().out == ""
    assert yaml.safe_load(path.read_text()) == shown


def test_what_the_command_refuses(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    words = ["launch", "--launcher", "k8s", "-n", "1"]
    assert main([*words, "t.py"]) == 2
    assert "needs --image" in capsys.readouterr().err
    assert main([*words, "--image", "a b", "t.py"]) == 2
    assert "containers/0/image" in capsys.readouterr().err
    assert main(["launch", "-n", "1", "--image", "x", "t.py"]) == 2
    assert "--image is for --launcher k8s, this is local" in capsys.readouterr().err
    monkeypatch.setenv("PATH", str(tmp_path))
    assert main([*words, "--image", "x", "--apply", "t.py"]) == 2
    assert "no kubectl on this host" in capsys.readouterr().err


def test_kubectl_without_a_cluster(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    if shutil.which("kubectl") is None:
        pytest.skip("no kubectl here (Debian: kubernetes-client)")
    (tmp_path / "config").write_text("")
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "config"))
    words = ["launch", "--launcher", "k8s", "-n", "1", "--image", "x", "--apply", "t.py"]
    assert main(words) == 2
    told = capsys.readouterr().err
    assert "kubectl apply failed (" in told and "is a cluster with JobSet in" in told


def test_a_stand_in_for_kubectl_gets_the_manifest(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    kubectl = tmp_path / "kubectl"
    kubectl.write_text(f'#!/bin/sh\ncat > {tmp_path}/got\necho "$@"\n')
    kubectl.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    words = ["launch", "--launcher", "k8s", "-n", "1", "--image", "x", "--apply", "t.py"]
    assert main(words) == 0
    assert capsys.readouterr().out == "apply -f -\n"
    assert yaml.safe_load((tmp_path / "got").read_text())["kind"] == "JobSet"
