"""A parameter-server job for Kubernetes: the manifest of a RayJob (KubeRay, ray.io/v1).

KubeRay starts a Ray cluster, a head and a pod per worker, runs the script on the head, and takes
the cluster away when it has ended. The script's ``train`` spreads workers and servers over the
pods. When the script fails, it is run again on a new cluster, as often as it may be.
"""

from __future__ import annotations

import re
from dataclasses import replace

from executor.launch.job import Job, LaunchError, shared
from executor.launch.kubernetes.jobset import Pods
from executor.launch.kubernetes.manifests import Json, Kind, check_name
from executor.parameter_server.launch.job import Servers
from executor.parameter_server.launch.rayjob_schema import SCHEMA

KIND = Kind("RayJob", "v1", "rayjobs.ray.io", SCHEMA, "KubeRay")
GROUP = "workers"
LONGEST = 47
"""Of a RayJob's name: KubeRay makes the names of its cluster and services of it."""
PLAIN = "[A-Za-z0-9_@%+=:,./-]+"
"""Words that two shells and Ray's joining of words leave as they are."""


def manifest(job: Job, pods: Pods, servers: Servers, max_restarts: int) -> Json:
    """The RayJob.

    Raises:
        LaunchError: the name is none that KubeRay takes, or a word of the command would not arrive
            as it is.
    """
    check_name(pods.name, pods.name, LONGEST)
    for word in job.command:
        if not re.fullmatch(PLAIN, word):
            raise LaunchError(
                f"{word!r}: KubeRay hands the command to a shell twice, which would change this "
                "word; expected letters, digits and _@%+=:,./- only; put it into a file, or into "
                "--env NAME=VALUE"
            )
    env = shared(job, 0)
    del env["MESHWRIGHT_RESTART"]  # KubeRay tells nobody which try it is
    head = {**env, **replace(servers, address="auto").variables}
    size = servers.workers
    return {
        "apiVersion": "ray.io/v1",
        "kind": "RayJob",
        "metadata": {"name": pods.name},
        "spec": {
            "entrypoint": " ".join(job.command),
            "shutdownAfterJobFinishes": True,
            "backoffLimit": max_restarts,
            "rayClusterSpec": {
                "headGroupSpec": {
                    "rayStartParams": {},
                    "template": _pod("ray-head", job, pods.resources(gpus=False), pods.image, head),
                },
                "workerGroupSpecs": [
                    {
                        "groupName": GROUP,
                        "replicas": size,
                        "minReplicas": size,
                        "maxReplicas": size,
                        "rayStartParams": {},
                        "template": _pod("ray-worker", job, pods.resources(), pods.image, env),
                    }
                ],
            },
        },
    }


def _pod(name: str, job: Job, resources: Json, image: str, environment: dict[str, str]) -> Json:
    """A pod; Ray counts its CPUs, so that one is asked for at least."""
    container: Json = {
        "name": name,
        "image": image,
        "env": [{"name": key, "value": value} for key, value in environment.items()],
        "resources": {**resources, "requests": {"cpu": 1, **resources.get("requests", {})}},
    }
    return {
        "spec": {
            "terminationGracePeriodSeconds": round(job.stop_s),
            "containers": [container],
        }
    }
