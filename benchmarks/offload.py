"""State in host memory: predicted bytes beside the compilers'. Needs ``aot-tpu`` and ``aot-gpu``.

    python benchmarks/offload.py [--targets h100:8,v5p:2x2x2] [--sizes gpt,gpt_large]

``examples/gpt.py`` with Adam at two sizes, planned with nothing, the moments, and all of the state
in host memory, each stored in shards on one axis, and compiled ahead of time. Device memory is
argument + output + temp - alias of ``memory_analysis()``, host memory its ``host_argument``. The
seconds are predictions: no such link is in the machine.
"""

from __future__ import annotations

import argparse

import common
import jax

from costmodels import parse_cluster
from executor.verify.aot import CompilerAbsentError, compile_step
from planner import make_plan
from planner.graph.trace import trace

SIZES = {"gpt": (2, 1024, 16, 512, 64, 16384), "gpt_large": (8, 2048, 16, 512, 64, 32768)}
"""Layers, width, heads, sequence, batch, vocabulary."""
WAYS = {"nothing": (), "moments": r"\.?\b(mu|nu)\b", "state": r"^\[0\]"}


def main() -> None:
    """Print a row a plan."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--targets", default="h100:8,v5p:2x2x2")
    parser.add_argument("--sizes", default=",".join(SIZES))
    options = parser.parse_args()
    module = common.example("gpt")
    for size in options.sizes.split(","):
        make_state, step, batch = module.build(module.Config(*SIZES[size]))
        args = (jax.eval_shape(make_state), batch)
        traced = trace(step, args)
        for target in options.targets.split(","):
            asked = {"cluster": target, "mesh": "data=8", "zero": 3}
            for way, patterns in WAYS.items():
                plan = make_plan(step, *args, offload=patterns, **asked)
                try:
                    found = compile_step(traced, plan, parse_cluster(target), donate_argnums=0)
                except CompilerAbsentError as error:
                    print(f"{target}: {error}")
                    break
                p = plan.prediction
                print(
                    f"{target:10s} {size:9s} {way:8s} device {p.peak_bytes / 1e6:7.0f} MB, found "
                    f"{found.peak_bytes / 1e6:7.0f}  host {p.host_bytes / 1e6:7.1f} MB, found "
                    f"{found.host_argument_bytes / 1e6:7.1f}  step {1e3 * p.step_s:6.1f} ms, of it "
                    f"copies {1e3 * p.host_s:6.1f}",
                    flush=True,
                )


if __name__ == "__main__":
    main()
