"""Writes docs/reference/primitives.md: where the rule of each primitive comes from.

python -m tests.zoo.primitives
"""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=8")

import jax

from planner import compat
from planner.annotate import MARKS
from planner.graph.jaxpr.walk import CALLS, REGIONS
from planner.graph.trace import trace
from planner.rules.sources.fallback import ELEMENTWISE, HAND_WRITTEN, IDENTITY
from tests.zoo.program import Program
from tests.zoo.running import load

PAGE = Path(__file__).resolve().parents[2] / "docs" / "reference" / "primitives.md"
TITLE = "# Primitives and their rules, jax "
ORIGINS = {
    "elementwise": "elementwise",
    "shardy": "Shardy",
    "composed": "composed",
    "fallback": "planner",
    "declared": "declared",
    "registered": "declared",
    "grid": "its grid",
    "region": "its specs",
    "opaque": "replicated",
}
HEAD = """
Where the planner's knowledge of each JAX primitive comes from. Written by `python -m
tests.zoo.primitives` from the programs of `tests/zoo/` and the planner's own tables.

- **Shardy**: one rule of Shardy's registry, read from the lowered operation.
- **composed**: lowering makes several operations of it; their rules are composed.
- **elementwise**: recognized by name and shapes.
- **planner**: a rule written here, where Shardy gives none.
- **declared**: the user's `custom_partitioning` says it (`sharding_rule`); without one, replicated.
- **its grid**: a Pallas kernel is split along dimensions of its grid, where its index maps and its
  body show that this is right (`planner.rules.kernels`); elsewhere it is replicated.
- **its specs**: a `shard_map` stays as it is; the plan takes its mesh and meets its specs.
- **walked through**: a call; its body stands in its place.
- **region**: a loop, a branch or a rematerialized body, planned inside.
- **pin**: a mark that fixes a sharding.
- **replicated**: no rule. The operation runs whole on every device, and the plan lists it under
  fallbacks. So does every primitive that is not on this page.

Several words: it depends on shapes and parameters. The last column counts the programs of the
zoo that have it; a dash marks rules that no program of the zoo asks for.

| primitive | rule | programs |
|---|---|---|
"""


STRUCTURE = {
    **dict.fromkeys(CALLS, "walked through"),
    **dict.fromkeys(REGIONS, "region"),
    **dict.fromkeys(MARKS, "pin"),
}
"""Primitives that are not operations of the graph, or not asked for a rule."""


def primitives_of(jaxpr: Any) -> set[str]:
    """The names of all primitives in a jaxpr and in those inside it."""
    names = set()
    for eqn in compat.body(jaxpr).eqns:
        names.add(eqn.primitive.name)
        for value in eqn.params.values():
            for item in value if isinstance(value, tuple | list) else (value,):
                if hasattr(item, "eqns") or hasattr(item, "jaxpr"):
                    names |= primitives_of(item)
    return names


def met(programs: Iterable[Program]) -> dict[str, dict[str, set[str]]]:
    """Per primitive and origin of its rule, the programs in which it stands."""
    found: dict[str, dict[str, set[str]]] = defaultdict(lambda: defaultdict(set))
    for program in programs:
        step, args = program.build()
        traced = trace(step, args)
        for name in primitives_of(traced.jaxpr) & set(STRUCTURE):
            found[name][STRUCTURE[name]].add(program.name)
        for op, eqn, rule in zip(traced.graph.ops, traced.eqns, traced.rules, strict=True):
            if eqn is not None and op.kind not in MARKS:
                found[op.kind][ORIGINS[rule.origin]].add(program.name)
    return found


def rows(found: Mapping[str, Mapping[str, set[str]]]) -> list[tuple[str, str, str]]:
    """(primitive, rule, number of programs), sorted by primitive."""
    known = {
        **dict.fromkeys(HAND_WRITTEN, "planner where Shardy has none"),
        **dict.fromkeys((*ELEMENTWISE, *IDENTITY), "elementwise"),
        **STRUCTURE,
    }
    table = {name: (name, rule, "-") for name, rule in known.items()}
    for name, origins in found.items():
        words = ", ".join(sorted(origins, key=lambda o: (-len(origins[o]), o)))
        table[name] = (name, words, str(len(set().union(*origins.values()))))
    return sorted(table.values())


def page() -> str:
    """The text of the page."""
    lines = [f"| `{name}` | {rule} | {count} |" for name, rule, count in rows(met(load().values()))]
    return f"{TITLE}{jax.__version__}\n{HEAD}" + "\n".join(lines) + "\n"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
