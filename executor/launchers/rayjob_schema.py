"""The part of KubeRay's RayJob v1 and of Pod that `rayjob.manifest` uses, as JSON Schema; fields
that are not listed are refused. Names and types are those of KubeRay's and Kubernetes' API."""

from __future__ import annotations

from executor.launchers.jobset_schema import (
    COUNT,
    NAME,
    POSITIVE,
    QUANTITIES,
    TEXT,
    VARIABLE,
    YES_OR_NO,
    Json,
    list_of,
    object_of,
    one_of,
)

CONTAINER = object_of(
    "name image env resources",
    name=NAME,
    image={"type": "string", "pattern": "^[^\\s]+$"},
    env=list_of(VARIABLE),
    resources=object_of("requests", requests=QUANTITIES, limits=QUANTITIES),
)
TEMPLATE = object_of(
    "spec",
    spec=object_of(
        "containers", containers=list_of(CONTAINER), terminationGracePeriodSeconds=COUNT
    ),
)
PARAMETERS: Json = {"type": "object", "additionalProperties": TEXT}
SCHEMA = object_of(
    "apiVersion kind metadata spec",
    apiVersion=one_of("ray.io/v1"),
    kind=one_of("RayJob"),
    metadata=object_of("name", name={**NAME, "maxLength": 47}),
    spec=object_of(
        "entrypoint rayClusterSpec",
        entrypoint=TEXT,
        shutdownAfterJobFinishes=YES_OR_NO,
        backoffLimit=COUNT,
        rayClusterSpec=object_of(
            "headGroupSpec workerGroupSpecs",
            headGroupSpec=object_of("template", rayStartParams=PARAMETERS, template=TEMPLATE),
            workerGroupSpecs=list_of(
                object_of(
                    "groupName minReplicas maxReplicas template",
                    groupName=NAME,
                    replicas=POSITIVE,
                    minReplicas=POSITIVE,
                    maxReplicas=POSITIVE,
                    rayStartParams=PARAMETERS,
                    template=TEMPLATE,
                )
            ),
        ),
    ),
)
