"""A job for Kubernetes: the manifest of a JobSet (jobset.sigs.k8s.io), checked against a schema.

One indexed Job whose pods know each other by name (a headless service); the pod's index is the
process's number. When a pod fails, the whole JobSet is started again, as often as it may be.
"""

from __future__ import annotations

import copy
import json
import re
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from executor.launchers.job import AGAIN, Job, LaunchError, need, shared
from executor.launchers.jobset_schema import SCHEMA
from executor.roles import PORT

Json = dict[str, Any]
GROUP = "workers"
MISSING = "--launcher k8s needs {} ({}); pip install 'meshwright[k8s]'"
ATTEMPT = "metadata.annotations['jobset.sigs.k8s.io/restart-attempt']"
LONGEST = 63
"""Of a host name."""


@dataclass(frozen=True)
class Pods:
    """What the pods of a job are.

    Attributes:
        name: of the JobSet.
        image: of the container; it has the script and Python.
        gpus: of each pod; None asks for none.
    """

    name: str
    image: str
    gpus: int | None = None


def manifest(job: Job, pods: Pods, max_restarts: int) -> Json:
    """The JobSet.

    Raises:
        LaunchError: the name is none that Kubernetes takes.
    """
    told = shared(job, 0)
    del told["MESHWRIGHT_RESTART"]
    told |= {
        "MESHWRIGHT_PROCESSES": str(job.processes),
        "MESHWRIGHT_COORDINATOR": f"{_host(pods.name, 0)}.{pods.name}:{PORT}",
    }
    longest = _host(pods.name, job.processes - 1)
    if not re.fullmatch("[a-z]([-a-z0-9]*[a-z0-9])?", pods.name) or len(longest) > LONGEST:
        raise LaunchError(
            f"--name {pods.name}: expected lower-case letters, digits and dashes, a letter first, "
            f"so few that {longest} has at most {LONGEST}"
        )
    environment: list[Json] = [{"name": name, "value": value} for name, value in told.items()]
    environment.append(
        {"name": "MESHWRIGHT_RESTART", "valueFrom": {"fieldRef": {"fieldPath": ATTEMPT}}}
    )
    container: Json = {
        "name": "worker",
        "image": pods.image,
        "command": list(job.command),
        "env": environment,
        "ports": [{"containerPort": PORT}],
    }
    if pods.gpus is not None:
        container["resources"] = {"limits": {"nvidia.com/gpu": pods.gpus}}
    return {
        "apiVersion": "jobset.x-k8s.io/v1alpha2",
        "kind": "JobSet",
        "metadata": {"name": pods.name},
        "spec": {
            "network": {"enableDNSHostnames": True, "publishNotReadyAddresses": True},
            "failurePolicy": _failures(max_restarts),
            "replicatedJobs": [
                {
                    "name": GROUP,
                    "replicas": 1,
                    "template": {"spec": _indexed(job, container)},
                }
            ],
        },
    }


def _host(name: str, process: int) -> str:
    """The host name that JobSet gives a pod: set, group, Job of the group, index."""
    return f"{name}-{GROUP}-0-{process}"


def _failures(max_restarts: int) -> Json:
    """All over again, whatever failed; what asked for it is named apart."""
    asked = {
        "name": "asked",
        "action": "RestartJobSet",
        "onJobFailureReasons": ["PodFailurePolicy"],
    }
    return {"maxRestarts": max_restarts, "rules": [asked]}


def _indexed(job: Job, container: Json) -> Json:
    """A Job that fails with its first pod: the others can't go on without it."""
    asked = {
        "action": "FailJob",
        "onExitCodes": {"containerName": "worker", "operator": "In", "values": [AGAIN]},
    }
    evicted = {
        "action": "FailJob",
        "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}],
    }
    return {
        "parallelism": job.processes,
        "completions": job.processes,
        "completionMode": "Indexed",
        "backoffLimit": 0,
        "podFailurePolicy": {"rules": [asked, evicted]},
        "template": {
            "spec": {
                "restartPolicy": "Never",
                "terminationGracePeriodSeconds": round(job.stop_s),
                "containers": [container],
            }
        },
    }


def strict(schema: Mapping[str, Any]) -> Json:
    """A schema with unknown fields forbidden wherever it lists some, and with Kubernetes' words
    for "a number or a text" put into JSON Schema's.

    >>> strict({"type": "object", "properties": {"a": {}}})["additionalProperties"]
    False
    """

    def walk(part: Any) -> Any:
        if isinstance(part, list):
            return [walk(item) for item in part]
        if not isinstance(part, dict):
            return part
        out = {key: walk(value) for key, value in part.items()}
        if out.get("x-kubernetes-int-or-string") is True:
            out.pop("type", None)
            out["type"] = ["integer", "string"]
        if isinstance(out.get("properties"), dict) and "additionalProperties" not in out:
            out["additionalProperties"] = False
        return out

    found: Json = walk(copy.deepcopy(dict(schema)))
    return found


def schema_of(crd: Any, source: str) -> Json:
    """The strict schema of a JobSet, from the CustomResourceDefinition as parsed YAML.

    Raises:
        LaunchError: it has no schema of v1alpha2.
    """
    try:
        versions = crd["spec"]["versions"]
        (found,) = [v["schema"]["openAPIV3Schema"] for v in versions if v["name"] == "v1alpha2"]
    except (KeyError, TypeError, ValueError) as error:
        raise LaunchError(
            f"{source}: no CustomResourceDefinition with v1alpha2; expected what "
            "kubectl get crd jobsets.jobset.x-k8s.io -o yaml prints"
        ) from error
    found = dict(found)
    properties = dict(found["properties"])
    # Kubernetes itself knows what stands in metadata; a CRD says "object" only.
    properties["metadata"] = SCHEMA["properties"]["metadata"]
    return strict({**found, "properties": properties})


def check(document: Json, schema: Json, source: str) -> None:
    """Whether a manifest fits a schema.

    Raises:
        LaunchError: it does not (says where), or jsonschema is not installed.
    """
    try:
        from jsonschema import Draft202012Validator
    except ImportError as error:
        raise LaunchError(MISSING.format("jsonschema", error)) from error
    wrong = sorted(Draft202012Validator(schema).iter_errors(document), key=lambda e: list(e.path))
    if wrong:
        where = "/".join(str(part) for part in wrong[0].absolute_path) or "the manifest"
        raise LaunchError(f"{source} does not allow {where}: {wrong[0].message}")


def read_schema(path: Path | None) -> tuple[Json, str]:
    """The schema of a file, or the one that is built in; and what to call it.

    Raises:
        LaunchError: the file can't be read, or is no JobSet's.
    """
    if path is None:
        return SCHEMA, "the schema of JobSet v1alpha2"
    yaml = _yaml()
    try:
        return schema_of(yaml.safe_load(path.read_text(encoding="utf-8")), str(path)), str(path)
    except (OSError, yaml.YAMLError) as error:
        raise LaunchError(f"cannot read {path}: {error}") from error


def text_of(document: Json) -> str:
    """As YAML."""
    text: str = _yaml().safe_dump(document, sort_keys=False)
    return text


def _yaml() -> Any:
    try:
        import yaml
    except ImportError as error:
        raise LaunchError(MISSING.format("PyYAML", error)) from error
    return yaml


def apply(document: Json) -> str:
    """Hand a manifest to the cluster of kubectl's current context; returns what kubectl said.

    Raises:
        LaunchError: there is no kubectl, or it failed.
    """
    done = subprocess.run(
        [need("kubectl", "kubernetes-client"), "apply", "-f", "-"],
        input=json.dumps(document),
        capture_output=True,
        text=True,
    )
    if done.returncode:
        said = (done.stderr.strip() or "it said nothing").splitlines()[-1]
        raise LaunchError(
            f"kubectl apply failed ({said}); is a cluster with JobSet in kubectl's current context?"
        )
    return done.stdout.strip()
