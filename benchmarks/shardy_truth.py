"""Predicted bytes of every kind of collective beside those that Shardy itself puts in.

    python benchmarks/shardy_truth.py [MODEL ...] [--layers N]

Models: the six examples and N (2) layers of the Llama 8B decoder of ``decoders``. Each is planned
for H100s with the parameters and the batch pinned by hand (``pinned``): data parallel, FSDP,
tensor parallel over 2 and 8, both together on 8 and on 16 devices. Payload bytes per device, loops
multiplied out. Printed: predicted / Shardy's by kind, and the worst.
"""

from __future__ import annotations

import argparse
from collections import Counter

import common
import decoders
from pinned import pinned

from executor.verify.shardy import lower_abstractly, shardy_collectives
from planner import make_plan
from planner.graph.trace import abstract, trace

MODELS = (*common.EXAMPLES, "llama")
PLANS = (
    ("data", 8),
    ("fsdp", 8),
    ("tensor2", 8),
    ("tensor8", 8),
    ("mixed2", 8),
    ("mixed4", 16),
)


def bytes_by_kind(
    name: str, kind: str, devices: int, layers: int = 2
) -> tuple[Counter[str], Counter[str]]:
    """(predicted, Shardy's) payload bytes per device by kind of collective, of one model."""
    if name == "llama":
        step, args = decoders.build(decoders.Llama(layers=layers))
    else:
        module = common.example(name)
        step, args = module.train_step, module.example_args()
    mesh, pins = pinned("decoder" if name == "llama" else name, kind, args, devices)
    cluster = f"h100:8x{devices // 8}"
    plan = make_plan(step, *args, cluster=cluster, mesh=mesh, shardings=pins)
    lowered = lower_abstractly(trace(step, abstract(args)), plan, donate_argnums=0)
    predicted: Counter[str] = Counter()
    for row in plan.collectives:
        predicted[row.kind] += round(row.count * row.payload_bytes)
    found: Counter[str] = Counter()
    for item in shardy_collectives(lowered):
        found[item.kind] += round(item.count * item.payload_bytes)
    return predicted, found


def main() -> None:
    """Print a row a plan."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("models", nargs="*", default=MODELS, metavar="MODEL")
    parser.add_argument("--layers", type=int, default=2)
    options = parser.parse_args()
    worst = 0.0
    for name in options.models:
        for kind, devices in PLANS:
            predicted, found = bytes_by_kind(name, kind, devices, options.layers)
            ratios = {
                k: predicted[k] / found[k] if found[k] else float("inf")
                for k in sorted(predicted | found)
            }
            worst = max([worst, *(abs(r - 1.0) for r in ratios.values())])
            told = "  ".join(f"{k} {r:.3f}" for k, r in ratios.items())
            print(f"{name:15s} {kind:8s} {devices:3d} devices  {told}", flush=True)
    print(f"worst |ratio - 1|: {worst:.3f}")


if __name__ == "__main__":
    main()
