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


def object_of(required: str, **properties: Json) -> Json:
    """An object with these fields and no other; ``required`` names some, with spaces."""
    return {
        "type": "object",
        "required": required.split(),
        "properties": properties,
        "additionalProperties": False,
    }


def list_of(items: Json, least: int = 1) -> Json:
    """A list of so many at least."""
    return {"type": "array", "items": items, "minItems": least}


def one_of(*values: str) -> Json:
    """One of these texts."""
    return {"enum": list(values)}


VARIABLE = {
    **object_of(
        "name",
        name={"type": "string", "pattern": "^[A-Za-z_.-][A-Za-z0-9_.-]*$"},
        value=TEXT,
        valueFrom={
            "oneOf": [
                object_of("fieldRef", fieldRef=object_of("fieldPath", fieldPath=TEXT)),
                object_of(
                    "secretKeyRef",
                    secretKeyRef=object_of(
                        "name key", name=TEXT, key=TEXT, optional={"type": "boolean"}
                    ),
                ),
            ]
        },
    ),
    "oneOf": [{"required": ["value"]}, {"required": ["valueFrom"]}],
}
CONTAINER = object_of(
    "name image command env",
    name=NAME,
    image={"type": "string", "pattern": "^[^\\s]+$"},
    command=list_of(TEXT),
    env=list_of(VARIABLE),
    ports=list_of(object_of("containerPort", containerPort={**POSITIVE, "maximum": 65535})),
    resources=object_of("", requests=QUANTITIES, limits=QUANTITIES),
)
POD = object_of(
    "restartPolicy containers",
    restartPolicy=one_of("Never"),  # a pod failure policy demands it
    terminationGracePeriodSeconds=COUNT,
    containers=list_of(CONTAINER),
)
FAILURE = object_of(
    "action",
    action=one_of("FailJob", "Ignore", "Count"),
    onExitCodes=object_of(
        "operator values",
        containerName=NAME,
        operator=one_of("In", "NotIn"),
        values=list_of({"type": "integer"}),
    ),
    onPodConditions=list_of(
        object_of("type status", type=TEXT, status=one_of("True", "False", "Unknown"))
    ),
)
JOB = object_of(
    "parallelism completions completionMode backoffLimit template",
    parallelism=POSITIVE,
    completions=POSITIVE,
    completionMode=one_of("Indexed"),
    backoffLimit=COUNT,
    podFailurePolicy=object_of("rules", rules=list_of(FAILURE)),
    template=object_of("spec", spec=POD),
)
RESTART = object_of(
    "name action",
    name={
        "type": "string",
        "pattern": "^[A-Za-z]([A-Za-z0-9_,:]*[A-Za-z0-9_])?$",
        "maxLength": 128,
    },
    action=one_of("FailJobSet", "RestartJobSet", "RestartJobSetAndIgnoreMaxRestarts"),
    onJobFailureReasons=list_of(
        one_of(
            "BackoffLimitExceeded",
            "DeadlineExceeded",
            "FailedIndexes",
            "MaxFailedIndexesExceeded",
            "PodFailurePolicy",
        )
    ),
)
SCHEMA = object_of(
    "apiVersion kind metadata spec",
    apiVersion=one_of("jobset.x-k8s.io/v1alpha2"),
    kind=one_of("JobSet"),
    metadata=object_of("name", name=NAME),
    spec=object_of(
        "replicatedJobs",
        network=object_of(
            "enableDNSHostnames",
            enableDNSHostnames=YES_OR_NO,
            publishNotReadyAddresses=YES_OR_NO,
        ),
        failurePolicy=object_of("maxRestarts", maxRestarts=COUNT, rules=list_of(RESTART)),
        replicatedJobs=list_of(
            object_of(
                "name template",
                name=NAME,
                replicas=COUNT,
                template=object_of("spec", spec=JOB),
            )
        ),
    ),
)
