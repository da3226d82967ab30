"""Plans beside the modules that the production compilers make of them: peak memory, bytes, compute.

    python benchmarks/compiled_truth.py [MODEL ...] [--targets v5p:2x2x2,h100:8] [--keep FOLDER]

Needs the extras ``aot-tpu`` and ``aot-gpu``. Models: the six examples, made larger so that
activations weigh something, and two layers of the Llama 8B decoder of ``decoders``. Each is planned
for each cluster in five ways: data parallel, FSDP, tensor parallel, both (``pinned``), and the plan
that AUTO_PARALLEL chooses. Batches grow with the number of devices. Per plan, predicted over found:

- ``peak``: ``argument + output + temp - alias`` of ``memory_analysis()``; without a program's code;
- ``moment``: its ``peak_memory_in_bytes``, most bytes that are alive at once;
- ``wire``: bytes that a device sends a step, all kinds together, then each kind planned / found in
  MB;
- ``compute`` (TPU): the compiler's estimated cycles over the clock, with gathers and scatters at
  HBM speed.

Last, per compiler: median and worst errors, and how many kinds of collectives are within 5 %.
``--keep`` holds what was found, by plan, so that only plans that have changed are compiled again.
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

from costmodels import Cluster, parse_cluster
from executor.verify.aot import CompilerAbsentError, compile_step, devices_of, tpu_seconds
from executor.verify.hlo.collectives import read_module
from executor.verify.predictions import planned_wire
from planner import make_plan
from planner.errors import RequestError
from planner.graph.trace import trace
from planner.plan.plan import Plan

MODELS = (*common.EXAMPLES, "llama")
TARGETS = ("v5p:2x2x2", "h100:8")
FAR = ("h100:8x8", "v5e:16x16", "h100:8x64")
FIELDS = ("mesh", "inputs", "outputs", "constraints", "op_table", "lowering", "apart")
"""What of a plan decides how it compiles."""
FAR_MODELS = ("mlp", "gpt_linen_scan")
"""Models that the large clusters are tried with."""


@dataclasses.dataclass(frozen=True)
class Found:
    """What a compiled module needs: bytes of memory by both counters, its text."""

    peak: float
    moment: float
    text: str


@dataclasses.dataclass(frozen=True)
class Row:
    """One plan: (predicted, found) pairs; ``kinds`` are bytes sent per kind of collective."""

    model: str
    kind: str
    target: str
    peak: tuple[float, float]
    moment: tuple[float, float]
    compute: tuple[float, float]
    kinds: dict[str, tuple[float, float]]

    @property
    def wire(self) -> tuple[float, float]:
        """Bytes sent, all kinds."""
        return sum(p for p, _ in self.kinds.values()), sum(f for _, f in self.kinds.values())

    def __str__(self) -> str:
        peak = f"peak {self.peak[0] / 1e6:6.0f}/{self.peak[1] / 1e6:6.0f} MB {ratio(self.peak):.3f}"
        rest = f"moment {ratio(self.moment):.3f}  wire {ratio(self.wire):.3f}"
        if self.compute[1]:
            rest += f"  compute {ratio(self.compute):.3f}"
        kinds = ", ".join(f"{k} {p / 1e6:.2f}/{f / 1e6:.2f}" for k, (p, f) in self.kinds.items())
        return f"{self.target:8s} {self.model:14s} {self.kind:7s} {peak}  {rest}  {kinds}"


def ratio(pair: tuple[float, float]) -> float:
    """Predicted over found; 1 where both are zero."""
    predicted, found = pair
    return predicted / found if found else float("inf") if predicted else 1.0


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


def found(traced: Any, plan: Plan, target: str, keep: Path | None) -> Found:
    """What the compiler makes of a plan, or what is kept of the same plan."""
    told = dataclasses.asdict(plan)
    decided = {k: told[k] for k in FIELDS}
    text = json.dumps([jax.__version__, target, decided, plan.op_index], sort_keys=True)
    name = hashlib.sha256(text.encode()).hexdigest()[:24]
    if keep and (keep / f"{name}.json").exists():
        with gzip.open(keep / f"{name}.hlo.gz", "rt") as file:
            return Found(**json.loads((keep / f"{name}.json").read_text()), text=file.read())
    compiled = compile_step(traced, plan, parse_cluster(target), donate_argnums=0)
    sizes = {"peak": compiled.peak_bytes, "moment": compiled.moment_bytes}
    if keep:
        keep.mkdir(exist_ok=True)
        with gzip.open(keep / f"{name}.hlo.gz", "wt") as file:
            file.write(compiled.text)
        (keep / f"{name}.json").write_text(json.dumps(sizes))
    return Found(**sizes, text=compiled.text)


def row(name: str, kind: str, plan: Plan, cluster: Cluster, seen: Found) -> Row:
    """A plan and what was found."""
    module, predicted = read_module(seen.text), plan.prediction
    planned = {k: sent for k, (_, sent) in planned_wire(plan).items()}
    sent = {k: t.wire_bytes for k, t in module.by_kind().items()}
    seconds = 0.0
    if module.cycles:
        seconds = tpu_seconds(module.cycles, cluster)
        seconds += module.unpriced_bytes / cluster.device.memory_bytes_per_s
    return Row(
        name,
        kind,
        cluster.text,
        (predicted.peak_bytes, seen.peak),
        (predicted.peak_bytes, seen.moment),
        (predicted.compute_s, seconds),
        {k: (planned.get(k, 0.0), sent.get(k, 0.0)) for k in sorted({*planned, *sent})},
    )


def rows(name: str, target: str, only: tuple[str, ...], keep: Path | None) -> Iterator[Row]:
    """The plans of a model on a cluster; says what the compiler refused."""
    cluster = parse_cluster(target)
    step, args = larger(name, cluster.num_devices)
    traced = trace(step, args)
    for kind in only or kinds(cluster.num_devices):
        plan = planned(name, kind, target, step, args)
        try:
            seen = found(traced, plan, target, keep)
        except RequestError as error:
            print(f"{target} {name} {kind}: {error}", flush=True)
            continue
        yield row(name, kind, plan, cluster, seen)


def summary(results: list[Row], compiler: str) -> str:
    """A line per quantity on the rows of a compiler."""
    lines = [f"{compiler}: {len(results)} plans"]
    for what in ("peak", "moment", "wire", "compute"):
        ratios = [ratio(getattr(r, what)) for r in results if getattr(r, what)[1]]
        if not ratios:
            continue
        errors = [abs(r - 1) for r in ratios]
        lines.append(
            f"  {what}: median error {statistics.median(errors):.1%}, worst {max(errors):.1%}, "
            f"most under {max(0.0, 1 - min(ratios)):.1%}, most over {max(0.0, max(ratios) - 1):.1%}"
        )
    kinds_found = [pair for r in results for pair in r.kinds.values() if max(pair) > 1e6]
    close = sum(abs(ratio(pair) - 1) <= 0.05 for pair in kinds_found)
    lines.append(
        f"  kinds of collectives of 1 MB and more within 5 %: {close} of {len(kinds_found)}"
    )
    return "\n".join(lines)


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
            only = tuple(filter(None, options.kinds.split(",")))
            for one in rows(name, target, only, options.keep):
                print(one, flush=True)
                results[compiler].append(one)
    for compiler, seen in results.items():
        if seen:
            print(summary(seen, compiler))


if __name__ == "__main__":
    main()
