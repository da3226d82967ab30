"""A parameter-server job for Kubernetes: the manifest of a RayJob (KubeRay, ray.io/v1).

KubeRay starts a Ray cluster (a head, and one pod per worker), runs the script on the head, and
deletes the cluster when the script has ended. The script's ``train`` spreads workers and servers
over the pods. If the script fails, it runs again on a new cluster, up to the maximum of restarts.
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
"""Maximum length of a RayJob's name: KubeRay derives names of its cluster and services from it."""
PLAIN = "[A-Za-z0-9_@%+=:,./-]+"
"""Words that two shells and Ray's joining of words do not change."""


def manifest(job: Job, pods: Pods, servers: Servers, max_restarts: int) -> Json:
    """The manifest of the RayJob.

    Raises:
        LaunchError: KubeRay does not accept the name, or a word of the command would be changed.
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
    del env["MESHWRIGHT_RESTART"]  # KubeRay does not pass the number of the try
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
    """A pod. It requests one CPU unless ``resources`` sets another number: Ray counts its CPUs."""
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
