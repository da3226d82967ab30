"""Parses cluster texts and cluster files into descriptions, from which a `Cluster` is built."""

from __future__ import annotations

import dataclasses
import errno
import math
import os
import re
import stat
import tomllib
from collections.abc import Mapping, Sequence
from typing import Any

from ._catalog import ClusterError, Table, catalog_entry, known_kinds, merge_overrides, shown
from ._spelled import meant, network_of, respelled

_FORMS = (
    "'h100:8x4' (devices per node x nodes), 'v5p:4x4x8' (torus), 'v5e:16x16+4' (4 slices of a "
    "torus), 'cpu:8', a .toml path, or one with a size, 'profile.toml:8x4'; or a count or a "
    "cloud's name: '2x8xH100', 'v5p-64', 'p5.48xlarge'"
)


MOST_DEVICES = 2**20
"""Maximum number of devices in a cluster. Planning lists the factorizations of the number."""
_LARGEST_FILE = 2**20
"""Maximum size of a cluster file, in bytes."""


@dataclasses.dataclass(frozen=True)
class Description:
    """A parsed cluster text or file: its constants (a table of tables) and sizes."""

    text: str
    entry: Table
    shape: tuple[int, ...]
    slices: int = 1

    def __post_init__(self) -> None:
        count = math.prod(self.shape) * self.slices
        if count > MOST_DEVICES:
            raise ClusterError(
                f"{self.text}: {count} devices; a cluster has at most {MOST_DEVICES} here; give a "
                "smaller size"
            )

    def with_constants(self, constants: Mapping[str, Mapping[str, float]]) -> Description:
        """A copy with some constants replaced; raises ClusterError for an invalid one."""
        return dataclasses.replace(self, entry=merge_overrides(self.entry, constants, self.text))


def described(text: str) -> Description:
    """The description from which `parse_cluster` builds a cluster; raises the same ClusterError."""
    text = text.strip()
    if text.lower().endswith(".toml"):
        return _read_file(text)
    text = respelled(text)
    name, colon, shape_text = text.rpartition(":")
    if not name or not colon:
        near = meant(text)
        hint = f"did you mean {near!r}?" if near else "give both parts"
        raise ClusterError(f"cannot read cluster {text!r}; expected {_FORMS}; {hint}")
    file = name.lower().endswith(".toml")
    machine = network_of(name)
    entry = _read_file(name).entry if file else catalog_entry(machine[0] if machine else name)
    kind = name if file else entry["device"]["kind"]
    if machine:
        entry = merge_overrides(entry, {"inter_node": {"bytes_per_s": machine[1]}}, text)
        kind = name.strip().lower().removeprefix("standard_")
    shape_text, plus, slices_text = shape_text.partition("+")
    where = f"cluster {text!r}"
    shape = _shape(_split(shape_text, text), entry, where)
    slices = _slices(_split(slices_text, text)[0] if plus else 1, entry, where)
    sizes = shape[:1] if "node" in entry and shape[1] == 1 else shape
    plain = f"{kind}:{'x'.join(map(str, sizes))}" + (f"+{slices}" if slices > 1 else "")
    return Description(plain, entry, shape, slices)


def with_profile(profile: str, cluster: str | None = None) -> str:
    """A cluster text with the constants of a profile and the size of a cluster.

    Args:
        profile: path of a .toml file, as written by `planner calibrate`.
        cluster: a cluster text of the profile's device kind; None takes the size in the profile.

    Raises:
        ClusterError: the profile is not a readable .toml file, or the cluster has another device
            kind.
    """
    if not profile.strip().lower().endswith(".toml"):
        raise ClusterError(
            f"profile {profile!r} is not a .toml file; give one that planner calibrate wrote"
        )
    from_profile = described(profile)
    if cluster is None:
        return from_profile.text
    from_cluster = described(cluster)
    kind, got = from_profile.entry["device"]["kind"], from_cluster.entry["device"]["kind"]
    if cluster.strip().lower().endswith(".toml") or kind != got:
        raise ClusterError(
            f"profile {profile} is of {kind}, cluster {cluster!r} is "
            f"{'a file' if kind == got else f'of {got}'}; give a size of {kind}, or leave it out"
        )
    return described(f"{from_profile.text}:{from_cluster.text.rpartition(':')[2]}").text


def _split(shape_text: str, text: str) -> list[int]:
    parts = shape_text.strip().lower().split("x")
    if not all(re.fullmatch(r"-?[0-9]{1,18}", part) for part in parts):
        raise ClusterError(
            f"bad shape {shape_text!r} in cluster {text!r}; expected whole numbers joined by x; "
            f"write {_FORMS}"
        )
    return [int(part) for part in parts]


def _shape(sizes: Sequence[int], entry: Table, where: str) -> tuple[int, ...]:
    """Check sizes against the topology; returns (devices per node, nodes) or the torus shape."""
    kind, given = entry["device"]["kind"], "x".join(map(str, sizes))
    if any(size <= 0 for size in sizes):
        raise ClusterError(f"{where}: sizes must be positive, got {given}; use 1 or more")
    if "torus" in entry:
        most = int(entry["torus"]["max_dims"])
        if not 1 <= len(sizes) <= most:
            raise ClusterError(
                f"{where}: a {kind} torus has 1 to {most} dimensions, got {given}; "
                f"write a shape such as {kind}:4x4x8"
            )
        return tuple(sizes)
    if not 1 <= len(sizes) <= 2:
        raise ClusterError(
            f"{where}: {kind} takes devices per node x nodes, got {given}; "
            f"write a shape such as {kind}:8x4"
        )
    per_node, nodes = sizes[0], sizes[1] if len(sizes) == 2 else 1
    most = int(entry["node"]["devices_per_node"])
    if per_node > most and not entry["device"]["shared_cores"]:
        raise ClusterError(
            f"{where}: a {kind} node holds at most {most} devices, got {per_node}; "
            f"write {kind}:{most}x{-(-per_node * nodes // most)}, or raise devices_per_node in "
            "the [node] table of a cluster .toml"
        )
    return per_node, nodes


def _slices(count: int, entry: Table, where: str) -> int:
    """Check the number of slices of a cluster."""
    if count <= 0:
        raise ClusterError(f"{where}: slices must be positive, got {count}; use 1 or more")
    if count > 1 and "inter_slice" not in entry:
        kind = entry["device"]["kind"]
        raise ClusterError(
            f"{where}: only a torus has slices, got {count} of {kind}; write devices per node x "
            f"nodes, such as {kind}:8x4"
        )
    return count


def parsed_file(path: str) -> Table:
    """Parse a TOML file; raises ClusterError unless it is a valid regular file of bounded size."""
    try:
        handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        try:
            if not stat.S_ISREG(os.fstat(handle).st_mode):
                raise OSError(errno.EINVAL, "it is no regular file")
            with open(handle, "rb", closefd=False) as file:
                raw = file.read(_LARGEST_FILE + 1)
        finally:
            os.close(handle)
        if len(raw) > _LARGEST_FILE:
            raise OSError(errno.EFBIG, f"it is larger than {_LARGEST_FILE} bytes")
    except OSError as error:
        reason = error.strerror or "unreadable"
        raise ClusterError(f"cannot read cluster file {path!r}: {reason}; check the path") from None
    except ValueError as error:  # a null byte
        raise ClusterError(f"cannot read cluster file {path!r}: {error}; check the path") from None
    try:
        return tomllib.loads(raw.decode("utf-8"))
    except (ValueError, RecursionError) as error:
        reason = "nested too deeply" if isinstance(error, RecursionError) else str(error)
        raise ClusterError(f"{path}: not valid TOML: {reason}; correct the file") from None


def _read_file(path: str) -> Description:
    """Read a cluster file. [cluster] names device and size, [profile] says where the constants come
    from (it is not read), and all other tables replace constants."""
    content = parsed_file(path)
    head = content.pop("cluster", None)
    content.pop("profile", None)
    if not isinstance(head, dict) or not isinstance(head.get("device"), str):
        raise ClusterError(
            f"{path}: expected a [cluster] table with device = one of "
            f"{', '.join(known_kinds())}; got {shown(head)}; add it"
        )
    entry = merge_overrides(catalog_entry(head["device"]), content, where=path)
    allowed = (
        {"device", "shape", "slices"}
        if "torus" in entry
        else {"device", "devices_per_node", "nodes"}
    )
    for key in head:
        if key not in allowed:
            raise ClusterError(
                f"{path}: unknown key {shown(key)} in [cluster]; expected one of: "
                f"{', '.join(sorted(allowed))}; rename or drop it"
            )
    sizes: Any
    if "torus" in entry:
        sizes = head.get("shape")
    else:
        per_node = head.get("devices_per_node", int(entry["node"]["devices_per_node"]))
        sizes = [per_node, head.get("nodes", 1)]
    slices = head.get("slices", 1)
    if not isinstance(sizes, list) or not all(type(size) is int for size in (*sizes, slices)):
        raise ClusterError(
            f"{path}: sizes in [cluster] must be whole numbers, got {shown(sizes)}"
            f"{'' if slices == 1 else f' and slices = {shown(slices)}'}; write "
            "devices_per_node = 8 and nodes = 4, or shape = [4, 4, 8] and slices = 2 for a torus"
        )
    shape = _shape(sizes, entry, where=path)
    return Description(path, entry, shape, _slices(slices, entry, where=path))
