"""Functions that all manifests for Kubernetes use: a check against a schema, YAML, kubectl."""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from executor.launch.job import LaunchError, need
from planner.files import MIB, read_text

Json = dict[str, Any]
LARGEST = 16 * MIB
"""Maximum size of a schema file, in bytes."""
DEEPEST = 200
MOST_PARTS = 1_000_000
MISSING = "--launcher k8s needs {} ({}); pip install 'meshwright[k8s]'"


@dataclass(frozen=True)
class Kind:
    """A kind of manifest.

    Attributes:
        name: name of the kind.
        version: version of its API.
        crd: the name of its CustomResourceDefinition in a cluster.
        schema: the part of its schema that is used here; fields that are not listed are refused.
        needs: what a cluster must have, for messages.
    """

    name: str
    version: str
    crd: str
    schema: Json
    needs: str


def check_name(name: str, longest: str, limit: int) -> None:
    """Check that Kubernetes accepts a name, and that ``longest``, the longest name made from it,
    has at most ``limit`` characters.

    Raises:
        LaunchError: the name is invalid or too long.
    """
    if not re.fullmatch("[a-z]([-a-z0-9]*[a-z0-9])?", name) or len(longest) > limit:
        raise LaunchError(
            f"--name {name}: expected lower-case letters, digits and dashes, a letter first, "
            f"so few that {longest} has at most {limit}"
        )


def strict(schema: Mapping[str, Any]) -> Json:
    """A schema that forbids unknown fields in objects that list their fields, with Kubernetes'
    int-or-string as a type of JSON Schema. Raises ValueError if it is too large or has a $ref.

    >>> strict({"type": "object", "properties": {"a": {}}})["additionalProperties"]
    False
    """

    seen = 0

    def walk(part: Any) -> Any:
        nonlocal seen
        seen += 1
        if seen > MOST_PARTS:  # YAML aliases can expand to any number
            raise ValueError(f"the schema has more than {MOST_PARTS} parts")
        if isinstance(part, list):
            return [walk(item) for item in part]
        if not isinstance(part, dict):
            return part
        if "$ref" in part:  # may refer to a file or an address; Kubernetes forbids it
            raise ValueError("the schema has a $ref, which Kubernetes does not allow")
        out = {key: walk(value) for key, value in part.items()}
        if out.get("x-kubernetes-int-or-string") is True:
            out.pop("type", None)
            out["type"] = ["integer", "string"]
        if isinstance(out.get("properties"), dict) and "additionalProperties" not in out:
            out["additionalProperties"] = False
        return out

    strict_schema: Json = walk(dict(schema))
    return strict_schema


def schema_of(crd: Any, source: str, kind: Kind) -> Json:
    """The strict schema of a kind, from the CustomResourceDefinition as parsed YAML.

    Raises:
        LaunchError: it has no schema of that version.
    """
    try:
        versions = crd["spec"]["versions"]
        (schema,) = [v["schema"]["openAPIV3Schema"] for v in versions if v["name"] == kind.version]
    except (KeyError, TypeError, ValueError) as error:
        raise LaunchError(
            f"{source}: no CustomResourceDefinition with {kind.version}; expected what "
            f"kubectl get crd {kind.crd} -o yaml prints"
        ) from error
    if not isinstance(schema, dict) or not isinstance(schema.get("properties"), dict):
        raise LaunchError(f"{source}: {kind.version} has no object with properties as its schema")
    properties = dict(schema["properties"])
    # Kubernetes itself defines the fields of metadata; a CRD only says "object".
    properties["metadata"] = kind.schema["properties"]["metadata"]
    return strict({**schema, "properties": properties})


def check_manifest(document: Json, schema: Json, source: str) -> None:
    """Check a manifest against a schema.

    Raises:
        LaunchError: the manifest does not fit (says where), or jsonschema is not installed.
    """
    try:
        from jsonschema import Draft202012Validator
    except ImportError as error:
        raise LaunchError(MISSING.format("jsonschema", error)) from error
    try:
        errors = list(Draft202012Validator(schema).iter_errors(document))
    except Exception as error:  # any error of the library, if the schema itself is invalid
        raise LaunchError(f"{source}: the schema can't be used: {_line(error)}") from error
    wrong = sorted(errors, key=lambda e: list(map(str, e.path)))
    if wrong:
        where = "/".join(str(part) for part in wrong[0].absolute_path) or "the manifest"
        raise LaunchError(f"{source} does not allow {where}: {_line(wrong[0].message)}")


def read_schema(path: Path | None, kind: Kind) -> tuple[Json, str]:
    """The schema of a file, or the built-in one, and its name for messages.

    Raises:
        LaunchError: the file can't be read, or is not of that kind.
    """
    if path is None:
        return kind.schema, f"the schema of {kind.name} {kind.version}"
    yaml = _yaml()
    try:
        return schema_of(_loaded(yaml, read_text(path, LARGEST)), str(path), kind), str(path)
    except OSError as error:
        raise LaunchError(f"cannot read {path}: {error.strerror}") from error
    except RecursionError as error:
        raise LaunchError(f"cannot read {path}: nested too deeply") from error
    except (ValueError, TypeError, yaml.YAMLError) as error:
        raise LaunchError(f"cannot read {path}: {_line(error)}") from error


def _loaded(yaml: Any, text: str) -> Any:
    """A YAML document as plain data; raises YAMLError if brackets are nested too deeply, since
    PyYAML's time grows with the square of the depth."""

    class Bounded(yaml.SafeLoader):  # type: ignore[misc]
        def fetch_flow_collection_start(self, token: Any) -> None:
            if self.flow_level >= DEEPEST:
                raise yaml.YAMLError(f"brackets are nested more than {DEEPEST} deep")
            super().fetch_flow_collection_start(token)

    return yaml.load(text, Loader=Bounded)


def _line(error: object) -> str:
    """The message of an error, on one line of bounded length."""
    text = " ".join(str(error).split()) or type(error).__name__
    return text if len(text) <= 300 else f"{text[:297]}..."


def text_of(document: Json) -> str:
    """A manifest as YAML."""
    text: str = _yaml().safe_dump(document, sort_keys=False)
    return text


def _yaml() -> Any:
    try:
        import yaml
    except ImportError as error:
        raise LaunchError(MISSING.format("PyYAML", error)) from error
    return yaml


def apply(document: Json, kind: Kind) -> str:
    """Apply a manifest to the cluster of kubectl's current context; returns kubectl's output.

    Raises:
        LaunchError: kubectl is not installed, or it failed.
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
            f"kubectl apply failed ({said}); is a cluster with {kind.needs} in "
            "kubectl's current context?"
        )
    return done.stdout.strip()
