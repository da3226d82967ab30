"""Predicted peak memory beside what XLA allocates. Needs the extras ``aot-tpu`` and ``aot-gpu``.

    python benchmarks/memory_truth.py [MODEL ...] [--targets v5p:2x2x2,h100:8] [--keep FOLDER]

Models: the six examples, made larger so that activations weigh something, and two layers of the
Llama 8B decoder of ``decoders``. Each is planned for each cluster in five ways: data parallel,
FSDP, tensor parallel, both (``pinned``), and the plan that AUTO_PARALLEL chooses. Found is
``argument + output + temp - alias`` of ``memory_analysis()`` of the module that the cluster's
compiler makes of the planned step, ahead of time; a program's code is not in it. Batches grow with
the number of devices. Printed: a row a plan, and per compiler the median and the worst of
|predicted / found - 1| and the largest shortfall. ``--keep`` holds what was found, by plan, so that
only plans that have changed are compiled again.
"""

from __future__ import annotations

import argparse
import dataclasses
import gzip
import hashlib
import json
import statistics
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import common
import jax
from larger import larger
from pinned import pinned

from costmodels import parse_cluster
from executor.verify.aot import CompilerAbsentError, compile_step, devices_of
from planner import make_plan
from planner.errors import RequestError
from planner.graph.trace import trace
from planner.plan.plan import Plan

MODELS = (*common.EXAMPLES, "llama")
TARGETS = ("v5p:2x2x2", "h100:8")
FAR = ("h100:8x8", "v5e:16x16", "h100:8x64")
FIELDS = ("mesh", "inputs", "outputs", "constraints", "op_table", "lowering")
"""What of a plan decides how it compiles."""
FAR_MODELS = ("mlp", "gpt_linen_scan")
"""Models that the large clusters are tried with."""


@dataclasses.dataclass(frozen=True)
class Row:
    """One plan: predicted and found bytes on a device."""

    model: str
    kind: str
    target: str
    predicted: float
    found: float

    @property
    def ratio(self) -> float:
        """Predicted over found."""
        return self.predicted / self.found

    def __str__(self) -> str:
        sizes = f"{self.predicted / 1e6:9.0f} MB  found {self.found / 1e6:9.0f} MB"
        return f"{self.target:10s} {self.model:15s} {self.kind:8s} {sizes}  ratio {self.ratio:.3f}"


def kinds(devices: int) -> tuple[str, ...]:
    """The plans of a model."""
    return ("data", "fsdp", "tensor4", "mixed2" if devices == 8 else "mixed4", "chosen")


def planned(name: str, kind: str, target: str, step: Any, args: tuple[Any, Any]) -> Plan:
    """The plan of a kind, however much memory it needs."""
    if kind == "chosen":
        return make_plan(step, *args, cluster=target, donate_argnums=0)
    devices = parse_cluster(target).num_devices
    key = "decoder" if name == "llama" else name
    mesh, pins = pinned(key, kind, args, devices)
    return make_plan(
        step, *args, cluster=target, mesh=mesh, shardings=pins, memory=1e15, donate_argnums=0
    )


def found_bytes(traced: Any, plan: Plan, target: str, keep: Path | None) -> float:
    """Compiled peak, or the one that is kept for the same plan."""
    told = dataclasses.asdict(plan)
    decided = {k: told[k] for k in FIELDS}
    text = json.dumps([jax.__version__, target, decided, plan.op_index], sort_keys=True)
    name = hashlib.sha256(text.encode()).hexdigest()[:24]
    if keep and (keep / name).exists():
        return float((keep / name).read_text())
    compiled = compile_step(traced, plan, parse_cluster(target), donate_argnums=0)
    if keep:
        keep.mkdir(exist_ok=True)
        with gzip.open(keep / f"{name}.hlo.gz", "wt") as file:
            file.write(compiled.text)
        (keep / name).write_text(str(compiled.peak_bytes))
    return compiled.peak_bytes


def rows(name: str, target: str, only: tuple[str, ...], keep: Path | None) -> Iterator[Row]:
    """The plans of a model on a cluster; says what the compiler refused."""
    devices = parse_cluster(target).num_devices
    step, args = larger(name, devices)
    traced = trace(step, args)
    for kind in only or kinds(devices):
        plan = planned(name, kind, target, step, args)
        try:
            found = found_bytes(traced, plan, target, keep)
        except RequestError as error:
            print(f"{target} {name} {kind}: {error}", flush=True)
            continue
        yield Row(name, kind, target, plan.prediction.peak_bytes, found)


def summary(results: list[Row], compiler: str) -> str:
    """One line on the rows of a compiler."""
    errors = [abs(row.ratio - 1) for row in results]
    least = min(row.ratio for row in results)
    return (
        f"{compiler}: {len(results)} plans, median error {statistics.median(errors):.1%}, "
        f"worst {max(errors):.1%}, most under {max(0.0, 1 - least):.1%}"
    )


def main() -> None:
    """Print the comparison."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("models", nargs="*", default=list(MODELS))
    parser.add_argument("--targets", default="", help="clusters, with commas between")
    parser.add_argument("--kinds", default="", help="plans, with commas between")
    parser.add_argument("--keep", type=Path, help="what was compiled, and is not compiled again")
    options = parser.parse_args()
    targets = options.targets.split(",") if options.targets else [*TARGETS, *FAR]
    results: dict[str, list[Row]] = {"XLA:TPU": [], "XLA:GPU": []}
    for target in targets:
        cluster = parse_cluster(target)
        try:
            devices_of(cluster)
        except CompilerAbsentError as error:
            print(f"{target} left out: {error}")
            continue
        compiler = "XLA:GPU" if cluster.device.kind == "h100" else "XLA:TPU"
        for name in options.models:
            if not options.targets and target in FAR and name not in FAR_MODELS:
                continue
            for row in rows(
                name, target, tuple(filter(None, options.kinds.split(","))), options.keep
            ):
                print(row, flush=True)
                results[compiler].append(row)
    for compiler, found in results.items():
        if found:
            print(summary(found, compiler))


if __name__ == "__main__":
    main()
