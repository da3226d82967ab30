"""The part of JobSet v1alpha2, Job and Pod that `jobset.manifest` uses, as JSON Schema; fields that
are not listed are refused. Names and types are those of the Kubernetes API."""

from __future__ import annotations

from typing import Any

Json = dict[str, Any]
TEXT: Json = {"type": "string"}
NAME: Json = {"type": "string", "pattern": "^[a-z0-9]([-a-z0-9]*[a-z0-9])?$", "maxLength": 63}
COUNT: Json = {"type": "integer", "minimum": 0}
POSITIVE: Json = {"type": "integer", "minimum": 1}
YES_OR_NO: Json = {"type": "boolean"}
QUANTITIES: Json = {"type": "object", "additionalProperties": {"type": ["integer", "string"]}}


def object_schema(required: str, **properties: Json) -> Json:
    """An object with only these fields; ``required`` names required ones, separated by spaces."""
    return {
        "type": "object",
        "required": required.split(),
        "properties": properties,
        "additionalProperties": False,
    }


def list_of(items: Json, least: int = 1) -> Json:
    """A list of at least ``least`` items."""
    return {"type": "array", "items": items, "minItems": least}


def enum_of(*values: str) -> Json:
    """One of these strings."""
    return {"enum": list(values)}


VARIABLE = {
    **object_schema(
        "name",
        name={"type": "string", "pattern": "^[A-Za-z_.-][A-Za-z0-9_.-]*$"},
        value=TEXT,
        valueFrom={
            "oneOf": [
                object_schema("fieldRef", fieldRef=object_schema("fieldPath", fieldPath=TEXT)),
                object_schema(
                    "secretKeyRef",
                    secretKeyRef=object_schema(
                        "name key", name=TEXT, key=TEXT, optional={"type": "boolean"}
                    ),
                ),
            ]
        },
    ),
    "oneOf": [{"required": ["value"]}, {"required": ["valueFrom"]}],
}
CONTAINER = object_schema(
    "name image command env",
    name=NAME,
    image={"type": "string", "pattern": "^[^\\s]+$"},
    command=list_of(TEXT),
    env=list_of(VARIABLE),
    ports=list_of(object_schema("containerPort", containerPort={**POSITIVE, "maximum": 65535})),
    resources=object_schema("", requests=QUANTITIES, limits=QUANTITIES),
)
POD = object_schema(
    "restartPolicy containers",
    restartPolicy=enum_of("Never"),  # required by a pod failure policy
    terminationGracePeriodSeconds=COUNT,
    containers=list_of(CONTAINER),
)
FAILURE = object_schema(
    "action",
    action=enum_of("FailJob", "Ignore", "Count"),
    onExitCodes=object_schema(
        "operator values",
        containerName=NAME,
        operator=enum_of("In", "NotIn"),
        values=list_of({"type": "integer"}),
    ),
    onPodConditions=list_of(
        object_schema("type status", type=TEXT, status=enum_of("True", "False", "Unknown"))
    ),
)
JOB = object_schema(
    "parallelism completions completionMode backoffLimit template",
    parallelism=POSITIVE,
    completions=POSITIVE,
    completionMode=enum_of("Indexed"),
    backoffLimit=COUNT,
    podFailurePolicy=object_schema("rules", rules=list_of(FAILURE)),
    template=object_schema("spec", spec=POD),
)
RESTART = object_schema(
    "name action",
    name={
        "type": "string",
        "pattern": "^[A-Za-z]([A-Za-z0-9_,:]*[A-Za-z0-9_])?$",
        "maxLength": 128,
    },
    action=enum_of("FailJobSet", "RestartJobSet", "RestartJobSetAndIgnoreMaxRestarts"),
    onJobFailureReasons=list_of(
        enum_of(
            "BackoffLimitExceeded",
            "DeadlineExceeded",
            "FailedIndexes",
            "MaxFailedIndexesExceeded",
            "PodFailurePolicy",
        )
    ),
)
SCHEMA = object_schema(
    "apiVersion kind metadata spec",
    apiVersion=enum_of("jobset.x-k8s.io/v1alpha2"),
    kind=enum_of("JobSet"),
    metadata=object_schema("name", name=NAME),
    spec=object_schema(
        "replicatedJobs",
        network=object_schema(
            "enableDNSHostnames",
            enableDNSHostnames=YES_OR_NO,
            publishNotReadyAddresses=YES_OR_NO,
        ),
        failurePolicy=object_schema("maxRestarts", maxRestarts=COUNT, rules=list_of(RESTART)),
        replicatedJobs=list_of(
            object_schema(
                "name template",
                name=NAME,
                replicas=COUNT,
                template=object_schema("spec", spec=JOB),
            )
        ),
    ),
)
