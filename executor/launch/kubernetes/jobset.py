"""A job for Kubernetes: the manifest of a JobSet (jobset.sigs.k8s.io), checked against a schema.

It has one indexed Job whose pods reach each other by name (a headless service); the pod's index is
the process's number. When a pod fails, the whole JobSet restarts, up to a maximum number of times.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from executor.launch.job import AGAIN, Job, LaunchError, shared
from executor.launch.kubernetes.jobset_schema import SCHEMA
from executor.launch.kubernetes.manifests import Json, Kind, check_name
from executor.processes.hello import SECRET
from executor.processes.roles import PORT

KIND = Kind("JobSet", "v1alpha2", "jobsets.jobset.x-k8s.io", SCHEMA, "JobSet")
GROUP = "workers"
ATTEMPT = "metadata.annotations['jobset.sigs.k8s.io/restart-attempt']"
SECRET_KEY = "meshwright"
"""Key of the secret that all pods share, in the Secret with the job's name, if there is one."""
LONGEST = 63
"""Largest length of a host name."""
QUANTITY = r"\+?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][+-]?[0-9]+|[KMGTPE]i|[kMGTPE]{})?"
"""Quantities that Kubernetes accepts; for CPUs, suffixes for thousandths and less are added."""


@dataclass(frozen=True)
class Pods:
    """The pods of a job.

    Attributes:
        name: name of the JobSet.
        image: image of the container; it has the script and Python.
        gpus: GPUs of each pod; None requests none.
        cpu, memory: CPUs and memory of each pod, as Kubernetes writes quantities ("8", "500m";
            "32Gi"); None sets nothing. Both are requests, and memory is also a limit.
    """

    name: str
    image: str
    gpus: int | None = None
    cpu: str | None = None
    memory: str | None = None

    def resources(self, *, gpus: bool = True) -> Json:
        """The resource requests and limits of a container; empty if there are none.

        Raises:
            LaunchError: a quantity is malformed.
        """
        requests: Json = {}
        limits: Json = {"nvidia.com/gpu": self.gpus} if gpus and self.gpus is not None else {}
        for name, quantity in (("cpu", self.cpu), ("memory", self.memory)):
            if quantity is None:
                continue
            if not re.fullmatch(QUANTITY.format("|[num]" if name == "cpu" else ""), quantity):
                raise LaunchError(
                    f"--pod-{name} {quantity}: expected a quantity of Kubernetes, such as "
                    f"{'8 or 500m' if name == 'cpu' else '32Gi'}"
                )
            requests[name] = quantity
            if name == "memory":
                limits[name] = quantity
        parts = {"requests": requests, "limits": limits}
        return {name: part for name, part in parts.items() if part}


def manifest(job: Job, pods: Pods, max_restarts: int) -> Json:
    """The JobSet.

    Raises:
        LaunchError: Kubernetes does not accept the name.
    """
    variables = shared(job, 0)
    del variables["MESHWRIGHT_RESTART"]
    variables |= {
        "MESHWRIGHT_PROCESSES": str(job.processes),
        "MESHWRIGHT_COORDINATOR": f"{_host(pods.name, 0)}.{pods.name}:{PORT}",
    }
    check_name(pods.name, _host(pods.name, job.processes - 1), LONGEST)
    environment: list[Json] = [{"name": name, "value": value} for name, value in variables.items()]
    environment.append(
        {"name": "MESHWRIGHT_RESTART", "valueFrom": {"fieldRef": {"fieldPath": ATTEMPT}}}
    )
    key = {"name": pods.name, "key": SECRET_KEY, "optional": True}
    environment.append({"name": SECRET, "valueFrom": {"secretKeyRef": key}})
    container: Json = {
        "name": "worker",
        "image": pods.image,
        "command": list(job.command),
        "env": environment,
        "ports": [{"containerPort": PORT}],
    }
    if resources := pods.resources():
        container["resources"] = resources
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
    """Restart the JobSet after any failure; a named rule covers failures by pod failure policy."""
    restart_rule = {
        "name": "asked",
        "action": "RestartJobSet",
        "onJobFailureReasons": ["PodFailurePolicy"],
    }
    return {"maxRestarts": max_restarts, "rules": [restart_rule]}


def _indexed(job: Job, container: Json) -> Json:
    """A Job that fails when the first of its pods fails: the others can't continue without it."""
    restart_rule = {
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
        "podFailurePolicy": {"rules": [restart_rule, evicted]},
        "template": {
            "spec": {
                "restartPolicy": "Never",
                "terminationGracePeriodSeconds": round(job.stop_s),
                "containers": [container],
            }
        },
    }
