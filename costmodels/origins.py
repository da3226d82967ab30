"""Where the constants of a cluster come from: measured here, published, or assumed."""

from __future__ import annotations

import dataclasses
import re
import tomllib
from collections.abc import Iterable, Mapping
from importlib import resources
from typing import Any

from ._catalog import catalog_entry
from ._describe import described, parsed_file

_TABLE = re.compile(r"^\[(\w+)\]")
_SOURCE = re.compile(r"^(\w+) = .*#\s*source: (.*)$")
_ASSUMED = "assumption"
_WORDS = {
    "overlap": "overlap of collectives",
    "overlap_ahead": "overlap of collectives",
    "overlap_behind": "overlap of collectives",
    "combined_latency": "latency of joined collectives",
    "convolution_efficiency": "rate of convolutions",
    "attention_efficiency": "rate of fused attention",
    "matmul_efficiency": "rate of products",
    "matmul_store": "stores of products",
    "memory_efficiency": "rate of the memory",
    "memory_reserve": "reserve of memory",
    "kernel_latency_s": "start of a kernel",
    "step_latency_s": "start of a step",
    "fuses_operands": "fusion into products",
    "memory_bytes": "size of the memory",
    "memory_bytes_per_s": "rate of the memory",
    "vector_flops_per_s": "rate of elementwise work",
}
_LINKS = {
    "intra_node": "links in a node",
    "inter_node": "network between nodes",
    "torus": "links of the torus",
    "inter_slice": "network between slices",
    "host": "link to the host",
    "node": "devices of a node",
}


@dataclasses.dataclass(frozen=True)
class Origins:
    """Origins of the constants that determine times; constants are named in words.

    Attributes:
        profile: device and date of a file that `planner calibrate` wrote; empty if there is none.
        given: constants that another file replaces.
        kept: constants that the profile takes from the catalog.
        assumed: constants without a source.
    """

    profile: str
    given: tuple[str, ...]
    kept: tuple[str, ...]
    assumed: tuple[str, ...]

    def __str__(self) -> str:
        parts = ["published"]
        if self.profile:
            parts = [f"measured on {self.profile}"]
            if self.kept:
                parts.append(f"published: {', '.join(self.kept)}")
        if self.given:
            parts.append(f"from the file: {', '.join(self.given)}")
        if self.assumed:
            parts.append(f"assumed: {', '.join(self.assumed)}")
        return "; ".join(parts)


def origins(cluster: str) -> Origins:
    """Where a cluster's constants come from.

    Args:
        cluster: a cluster text or the path of a file, as for `parse_cluster`.

    Raises:
        ClusterError: the text or the file can't be read.
    """
    kind = described(cluster).entry["device"]["kind"]
    sources = _sources(kind)
    assumed = [key for key, source in sources.items() if source.startswith(_ASSUMED)]
    name, colon, size = cluster.strip().rpartition(":")
    path = name if colon and name.lower().endswith(".toml") and "/" not in size else cluster
    if not path.strip().lower().endswith(".toml"):
        return Origins("", (), (), _words(assumed))
    content = parsed_file(path.strip())
    profile = content.get("profile")
    replaced = [
        (table, key)
        for table, values in content.items()
        if table not in ("cluster", "profile") and isinstance(values, dict)
        for key in values
    ]
    if not isinstance(profile, dict):
        return Origins("", _words(replaced), (), _words(k for k in assumed if k not in replaced))
    unmeasured = [tuple(text.split(".", 1)) for text in _texts(profile.get("kept"))]
    measured = [key for key in replaced if key not in unmeasured]
    said = f"{profile.get('device_name', kind)}, {str(profile.get('date', ''))[:10]}"
    still = [key for key in assumed if key not in measured]
    unsure = _words(still)
    published = _words(key for key in unmeasured if key in sources)
    return Origins(said, (), tuple(w for w in published if w not in unsure), unsure)


def _texts(value: Any) -> list[str]:
    return [x for x in value if isinstance(x, str) and "." in x] if isinstance(value, list) else []


def _words(keys: Iterable[tuple[str, ...]]) -> tuple[str, ...]:
    """Names of constants in words, without duplicates."""
    return tuple(dict.fromkeys(_word(table, key) for table, key in keys))


def _word(table: str, key: str) -> str:
    if table == "peak_flops_per_s":
        return f"peak of {key}"
    return _LINKS.get(table) or _WORDS.get(key) or key


def _sources(kind: str) -> Mapping[tuple[str, str], str]:
    """Sources of the constants of a catalog file and its base kind, by table and key."""
    text = (resources.files(__package__) / "catalog" / f"{kind}.toml").read_text(encoding="utf-8")
    base = tomllib.loads(text).get("base")
    out = dict(_sources(base)) if base else {}
    table = ""
    for line in text.splitlines():
        if head := _TABLE.match(line):
            table = head[1]
        elif table and (match := _SOURCE.match(line)):
            out[table, match[1]] = match[2]
    known = catalog_entry(kind)
    return {key: source for key, source in out.items() if key[1] in known.get(key[0], {})}
