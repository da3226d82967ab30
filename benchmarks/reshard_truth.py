"""Planned and compiled collectives of every transition between shardings, ahead of time.

    python benchmarks/reshard_truth.py [--targets v5e:4x4,h100:8x2] [--axes 1,2] [--rows]

For each target and each number of mesh axes, an array of 32 MiB goes through every pattern of
``planner.cost.routes.all_patterns`` without partial sums (those are emitted explicitly, see
``executor.run.lowered.Scatter``), constrained in the stages of the target's default lowering.
Printed per target: how many transitions send the planned bytes within 5 %, by kind and in total.
``--rows`` prints those that do not. Needs the extras ``aot-tpu`` and ``aot-gpu``; runs nothing.
"""

from __future__ import annotations

import argparse
import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import common  # noqa: F401
import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding

from costmodels import AnalyticCostModel, Cluster, parse_cluster
from executor.run.local.specs import partition_spec
from executor.run.lowered import stages
from executor.run.mesh import build_mesh, physical_axes
from executor.verify.aot import devices_of, read_compiled
from executor.verify.hlo.collectives import wire_bytes
from planner.cost.reshard import reshard_steps
from planner.cost.routes import PARTIAL, Pattern, all_patterns
from planner.errors import RequestError
from planner.plan.compiled.lowering import Lowering, default_lowering
from planner.spec import MeshSpec

TARGETS = ("v4:2x2x4", "v5e:4x4", "v5p:2x2x4", "v6e:4x4", "tpu7x:2x2x2x2", "h100:8x2", "b200:8x2")
MESHES = {1: (16,), 2: (4, 4), 3: (2, 2, 4)}
LENGTHS = {1: 2**24, 2: 2**12, 3: 2**8, 4: 2**6, 5: 2**5, 6: 2**4}
"""By rank, the length of each dimension of an array of 32 MiB (five dimensions: 64 MiB)."""
WITHIN = 0.05
"""The relative difference that counts as equal."""


@dataclass(frozen=True)
class Row:
    """One transition: wire bytes of a device by kind, planned and compiled."""

    pattern: Pattern
    planned: dict[str, float]
    found: dict[str, float]

    def equal(self, kinds: Sequence[str] | None = None) -> bool:
        """Whether each of ``kinds`` (None: the sum over all) is within the limit."""
        if kinds is None:
            return _near(sum(self.planned.values()), sum(self.found.values()))
        return all(_near(self.planned.get(k, 0.0), self.found.get(k, 0.0)) for k in kinds)


def _near(planned: float, found: float) -> bool:
    return abs(planned - found) <= WITHIN * max(planned, found)


def planned_bytes(pattern: Pattern, sizes: tuple[int, ...], cluster: Cluster) -> dict[str, float]:
    """Bytes that a device sends, by kind."""
    rank = max(max(pair) for pair in pattern)
    nbytes = 2.0 * LENGTHS[rank] ** rank
    src, dst = ([pair[end] for pair in pattern] for end in (0, 1))
    sums: dict[str, float] = defaultdict(float)
    for step in reshard_steps(src, dst, rank, nbytes, sizes, AnalyticCostModel(cluster)):
        members = math.prod(sizes[a] for a in step.axes)
        sums[step.kind] += wire_bytes(step.kind, step.payload_bytes, members)
    return dict(sums)


def compiled_bytes(
    pattern: Pattern, sizes: tuple[int, ...], cluster: Cluster, how: Lowering
) -> dict[str, float]:
    """The same of the compiled module."""
    names = tuple("abc"[: len(sizes)])
    spec = MeshSpec(names, sizes)
    axes = physical_axes(spec, how.dimensions) if how.dimensions else None
    mesh = build_mesh(spec, devices_of(cluster), axes)
    rank = max(max(pair) for pair in pattern)

    def sharding(end: int) -> NamedSharding:
        dims: list[tuple[str, ...]] = [()] * rank
        for name, pair in zip(names, pattern, strict=True):
            if pair[end]:
                parts = tuple(x for x, _ in axes[name]) if axes else (name,)
                dims[pair[end] - 1] += parts
        return NamedSharding(mesh, partition_spec(tuple(dims)))

    before, after = sharding(0), sharding(1)
    joined = [tuple(x for x, _ in p) for p in axes.values()] if axes and how.joined else []
    x = jax.ShapeDtypeStruct((LENGTHS[rank],) * rank, jnp.bfloat16, sharding=before)

    def change(x: Any) -> Any:
        for stage in stages(before, after, x.shape, joined) if how.staged else [after]:
            x = jax.lax.with_sharding_constraint(x, stage)
        return x

    module = read_compiled(jax.jit(change, out_shardings=after).lower(x).compile()).module
    return {kind: total.wire_bytes for kind, total in module.by_kind().items()}


def rows(cluster: Cluster, count: int) -> Iterator[Row]:
    """Every transition that sends something."""
    sizes, how = MESHES[count], default_lowering(cluster)
    for pattern in all_patterns(count):
        if any(PARTIAL in pair for pair in pattern) or not any(map(any, pattern)):
            continue
        planned = planned_bytes(pattern, sizes, cluster)
        if planned:
            yield Row(pattern, planned, compiled_bytes(pattern, sizes, cluster, how))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--targets", default=",".join(TARGETS))
    parser.add_argument("--axes", default="1,2")
    parser.add_argument("--rows", action="store_true")
    options = parser.parse_args()
    print(
        "| target | mesh axes | transitions | bytes equal | bytes equal by kind | sent / planned |"
    )
    print("|---|---:|---:|---:|---:|---:|")
    for target in options.targets.split(","):
        cluster = parse_cluster(target)
        for count in map(int, options.axes.split(",")):
            try:
                found = list(rows(cluster, count))
            except RequestError as error:
                print(f"| {target} | {count} | {error} | | | |", flush=True)
                continue
            whole = sum(r.equal() for r in found)
            kinds = sum(r.equal([*r.planned, *r.found]) for r in found)
            sent = sum(sum(r.found.values()) for r in found)
            ratio = sent / sum(sum(r.planned.values()) for r in found)
            print(
                f"| {target} | {count} | {len(found)} | {whole} | {kinds} | {ratio:.2f} |",
                flush=True,
            )
            for r in found if options.rows else ():
                if not r.equal([*r.planned, *r.found]):
                    print(f"    {r.pattern} planned {r.planned} found {r.found}")


if __name__ == "__main__":
    main()
