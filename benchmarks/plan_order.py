"""Does the prediction order plans as XLA's TPU compiler does? Needs the extra ``aot-tpu``.

For each model six plans on eight v5p chips: data parallel, FSDP, Megatron-style tensor parallel on
2 and on 4, tensor parallel on 2 with FSDP over the rest, and the plan that AUTO_PARALLEL chose. The
plans by hand pin every argument; what happens inside is searched, as for a user who pins. Each is
priced by the planner and compiled for the TPU; the compiled module's time is

    seconds = estimated_cycles / clock
            + sum over collectives of wire bytes / (link bytes/s * links)

with the compiler's own ``estimated_cycles`` (loops multiplied out), the clock of
`executor.verify.aot.TPU_CLOCK_HZ`, wire bytes as in `executor.verify.hlo`; for ``links`` one
link, one way, per torus dimension that the group spans (two where it wraps around), one for a
permute. Nothing overlaps in this figure and a collective has no latency. Printed: both times,
Kendall's tau between the two orders (tau-b, Kendall 1945), and the chosen plan's compiled time
over the best one's.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import re
from pathlib import Path
from typing import Any

import common
import decoders
import jax
from jax.sharding import PartitionSpec
from larger import larger
from rich.console import Console
from rich.table import Table
from scipy.stats import kendalltau

from costmodels import parse_cluster
from costmodels.schedule import StageSeconds, step_seconds
from executor.verify.aot import compile_step, link_seconds, tpu_seconds
from planner import make_plan
from planner.graph.trace import abstract, trace
from planner.plan.plan import Plan

CLUSTER = "v5p:2x2x2"
LARGE = "-large"
"""Ending of the name of an example at the sizes of ``larger``."""
MESHES = {
    "data": "data=8",
    "fsdp": "data=8",
    "tensor2": "data=4,model=2",
    "tensor4": "data=2,model=4",
    "mixed": "data=4,model=2",
}
LLAMA = decoders.Llama(
    layers=2, dim=2048, heads=16, kv_heads=8, ffn=8192, vocab=16384, batch=16, seq=1024
)
LLAMA_RULES = {
    r"\['[qkv]'\]$": 1,
    r"\['o'\]": 0,
    r"\['(gate|up)'\]": 1,
    r"\['down'\]": 0,
    r"\['embed'\]": 1,
    r"\['head'\]": 1,
}


def model(name: str) -> tuple[Any, tuple[Any, Any]]:
    """The step and the shapes of its arguments (state, batch)."""
    if name == "llama":
        return decoders.build(LLAMA)
    if name.endswith(LARGE):
        return larger(name.removesuffix(LARGE), 8)
    module = common.example(name)
    state = jax.eval_shape(module.make_state)
    return module.train_step, (state, abstract((next(iter(module.batches())),))[0])


def spec_of(name: str, kind: str, path: str, shape: tuple[int, ...]) -> PartitionSpec:
    """How a plan by hand shards a part of the state."""
    if kind == "data":
        return PartitionSpec()
    if kind == "fsdp":
        return common.fsdp_spec(shape, 8, "data")
    size = int(MESHES[kind].rpartition("=")[2])
    rules = LLAMA_RULES if name == "llama" else common.TENSOR_RULES[name.removesuffix(LARGE)]
    entries: list[Any] = [None] * len(shape)
    for pattern, dim in rules.items():
        if re.search(pattern, path) and len(shape) > dim and shape[dim] % size == 0:
            entries[dim] = "model"
            break
    if kind == "mixed" and "model" in entries:
        free = [d for d, e in enumerate(entries) if e is None and shape[d] % 4 == 0]
        if free and shape[max(free, key=lambda d: shape[d])] >= 64:
            entries[max(free, key=lambda d: shape[d])] = "data"
    return PartitionSpec(*entries)


def plan_by_hand(name: str, kind: str, step: Any, args: tuple[Any, Any]) -> Plan:
    pins: dict[str, Any] = {}
    for path, leaf in jax.tree_util.tree_flatten_with_path(args)[0]:
        text = jax.tree_util.keystr(path)
        spec = PartitionSpec("data") if text.startswith("[1]") else None
        pins[f"^{re.escape(text)}$"] = spec or spec_of(name, kind, text, leaf.shape)
    return make_plan(
        step, *args, cluster=CLUSTER, mesh=MESHES[kind], shardings=pins, donate_argnums=0
    )


def measured(name: str, kind: str, kept: dict[str, Any]) -> dict[str, Any]:
    """Predicted and compiled figures of one plan; compiled ones are taken from ``kept`` where that
    is the same plan."""
    step, args = model(name)
    if kind == "chosen":
        plan = make_plan(step, *args, cluster=CLUSTER, donate_argnums=0)
    else:
        plan = plan_by_hand(name, kind, step, args)
    p = plan.prediction
    found = {
        "mesh": str(plan.mesh),
        "sharding": hashlib.sha256(
            repr((plan.mesh, [x.spec for x in plan.inputs], plan.constraints)).encode()
        ).hexdigest(),
        "predicted_s": p.step_s,
        "predicted_compute_s": p.compute_s,
        "predicted_communication_s": p.communication_s,
        "predicted_peak_bytes": p.peak_bytes,
    }
    if kept.get("sharding") == found["sharding"]:
        return kept | found
    cluster = parse_cluster(CLUSTER)
    compiled = compile_step(trace(step, args), plan, cluster, donate_argnums=0)
    return found | {
        "cycles_s": tpu_seconds(compiled.module.cycles, cluster),
        "wire_s": link_seconds(compiled.module, cluster),
        "kinds": {k: [t.count, t.wire_bytes] for k, t in compiled.module.by_kind().items()},
        "peak_bytes": compiled.peak_bytes,
    }


def report(results: dict[str, dict[str, dict[str, Any]]]) -> None:
    table = Table(title=f"predicted / compiled step time on {CLUSTER} (us)")
    for column in ("model", *MESHES, "chosen", "mesh", "tau", "chosen / best"):
        table.add_column(column, justify="right")
    for name, plans in results.items():
        compiled = {
            k: step_seconds((StageSeconds(r["cycles_s"], waited_s=r["wire_s"]),)).step_s
            for k, r in plans.items()
        }
        predicted = [r["predicted_s"] for r in plans.values()]
        tau = kendalltau(predicted, list(compiled.values())).statistic
        table.add_row(
            name,
            *(f"{1e6 * r['predicted_s']:.0f} / {1e6 * compiled[k]:.0f}" for k, r in plans.items()),
            plans["chosen"]["mesh"],
            f"{tau:.2f}",
            f"{compiled['chosen'] / min(compiled.values()):.2f}",
        )
    Console(width=170).print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--save",
        type=Path,
        help="keep the figures here; a plan that is there is not compiled again",
    )
    parser.add_argument(
        "models",
        nargs="*",
        default=[*common.EXAMPLES, *(n + LARGE for n in common.EXAMPLES), "llama"],
    )
    options = parser.parse_args()
    kept: dict[str, Any] = {}
    if options.save and options.save.exists():
        kept = json.loads(options.save.read_text())
    for name in options.models:
        plans = kept.setdefault(name, {})
        for kind in (*MESHES, "chosen"):
            plans[kind] = measured(name, kind, plans.get(kind, {}))
            print(name, kind, plans[kind], flush=True)
            if options.save:
                options.save.write_text(json.dumps(kept, indent=1))
    report({name: kept[name] for name in options.models})


if __name__ == "__main__":
    main()
