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


def _object(required: str, **properties: Json) -> Json:
    return {
        "type": "object",
        "required": required.split(),
        "properties": properties,
        "additionalProperties": False,
    }


def _list(items: Json, least: int = 1) -> Json:
    return {"type": "array", "items": items, "minItems": least}


def _one_of(*values: str) -> Json:
    return {"enum": list(values)}


VARIABLE = {
    **_object(
        "name",
        name={"type": "string", "pattern": "^[A-Za-z_.-][A-Za-z0-9_.-]*$"},
        value=TEXT,
        valueFrom=_object("fieldRef", fieldRef=_object("fieldPath", fieldPath=TEXT)),
    ),
    "oneOf": [{"required": ["value"]}, {"required": ["valueFrom"]}],
}
CONTAINER = _object(
    "name image command env",
    name=NAME,
    image={"type": "string", "pattern": "^[^\\s]+$"},
    command=_list(TEXT),
    env=_list(VARIABLE),
    ports=_list(_object("containerPort", containerPort={**POSITIVE, "maximum": 65535})),
    resources=_object(
        "limits",
        limits={"type": "object", "additionalProperties": {"type": ["integer", "string"]}},
    ),
)
POD = _object(
    "restartPolicy containers",
    restartPolicy=_one_of("Never"),  # a pod failure policy demands it
    terminationGracePeriodSeconds=COUNT,
    containers=_list(CONTAINER),
)
FAILURE = _object(
    "action",
    action=_one_of("FailJob", "Ignore", "Count"),
    onExitCodes=_object(
        "operator values",
        containerName=NAME,
        operator=_one_of("In", "NotIn"),
        values=_list({"type": "integer"}),
    ),
    onPodConditions=_list(
        _object("type status", type=TEXT, status=_one_of("True", "False", "Unknown"))
    ),
)
JOB = _object(
    "parallelism completions completionMode backoffLimit template",
    parallelism=POSITIVE,
    completions=POSITIVE,
    completionMode=_one_of("Indexed"),
    backoffLimit=COUNT,
    podFailurePolicy=_object("rules", rules=_list(FAILURE)),
    template=_object("spec", spec=POD),
)
RESTART = _object(
    "name action",
    name={
        "type": "string",
        "pattern": "^[A-Za-z]([A-Za-z0-9_,:]*[A-Za-z0-9_])?$",
        "maxLength": 128,
    },
    action=_one_of("FailJobSet", "RestartJobSet", "RestartJobSetAndIgnoreMaxRestarts"),
    onJobFailureReasons=_list(
        _one_of(
            "BackoffLimitExceeded",
            "DeadlineExceeded",
            "FailedIndexes",
            "MaxFailedIndexesExceeded",
            "PodFailurePolicy",
        )
    ),
)
SCHEMA = _object(
    "apiVersion kind metadata spec",
    apiVersion=_one_of("jobset.x-k8s.io/v1alpha2"),
    kind=_one_of("JobSet"),
    metadata=_object("name", name=NAME),
    spec=_object(
        "replicatedJobs",
        network=_object(
            "enableDNSHostnames",
            enableDNSHostnames=YES_OR_NO,
            publishNotReadyAddresses=YES_OR_NO,
        ),
        failurePolicy=_object("maxRestarts", maxRestarts=COUNT, rules=_list(RESTART)),
        replicatedJobs=_list(
            _object(
                "name template",
                name=NAME,
                replicas=COUNT,
                template=_object("spec", spec=JOB),
            )
        ),
    ),
)
