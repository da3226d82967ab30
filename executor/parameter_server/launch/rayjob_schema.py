"""The part of KubeRay's RayJob v1 and of Pod that `rayjob.manifest` uses, as JSON Schema; fields
that are not listed are refused. Names and types are those of KubeRay's and Kubernetes' API."""

from __future__ import annotations

from executor.launch.kubernetes.jobset_schema import (
    COUNT,
    NAME,
    POSITIVE,
    QUANTITIES,
    TEXT,
    VARIABLE,
    YES_OR_NO,
    Json,
    enum_of,
    list_of,
    object_schema,
)

CONTAINER = object_schema(
    "name image env resources",
    name=NAME,
    image={"type": "string", "pattern": "^[^\\s]+$"},
    env=list_of(VARIABLE),
    resources=object_schema("requests", requests=QUANTITIES, limits=QUANTITIES),
)
TEMPLATE = object_schema(
    "spec",
    spec=object_schema(
        "containers", containers=list_of(CONTAINER), terminationGracePeriodSeconds=COUNT
    ),
)
PARAMETERS: Json = {"type": "object", "additionalProperties": TEXT}
SCHEMA = object_schema(
    "apiVersion kind metadata spec",
    apiVersion=enum_of("ray.io/v1"),
    kind=enum_of("RayJob"),
    metadata=object_schema("name", name={**NAME, "maxLength": 47}),
    spec=object_schema(
        "entrypoint rayClusterSpec",
        entrypoint=TEXT,
        shutdownAfterJobFinishes=YES_OR_NO,
        backoffLimit=COUNT,
        rayClusterSpec=object_schema(
            "headGroupSpec workerGroupSpecs",
            headGroupSpec=object_schema("template", rayStartParams=PARAMETERS, template=TEMPLATE),
            workerGroupSpecs=list_of(
                object_schema(
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
