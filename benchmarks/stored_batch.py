"""How the batch is stored, and what the strategy is called: six examples and three large decoders.

Per program: the batch as the plan stores it, bytes of the batch on a device beside those of the
whole batch, and the plan's strategy.

    python benchmarks/stored_batch.py
"""

from __future__ import annotations

import argparse
from math import prod

import common
import decoders
import jax
import numpy as np

from planner import make_plan

LLAMA_70B = decoders.Llama(80, 8192, 64, 8, 28672, batch=256, scan=True)
LARGE = {
    "llama-8b": (decoders.Llama(scan=True), "h100:8x4"),
    "llama-70b": (LLAMA_70B, "v5p:256"),
    "gpt-175b": (decoders.GPT(layers=12), "h100:8x64"),
}
"""12 of the 96 layers of the 175B model."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="*", default=[*common.EXAMPLES, "gpt-h100", *LARGE])
    for name in parser.parse_args().only:
        if name in LARGE:
            sizes, cluster = LARGE[name]
            step, args = decoders.build(sizes)
        else:
            module = common.example(name.removesuffix("-h100"))
            step, args = module.train_step, module.example_args()
            cluster = "h100:8x4" if name.endswith("-h100") else "cpu:8"
        plan = make_plan(step, *args, cluster=cluster)
        count = len(jax.tree.leaves(args[0]))
        batch = [leaf for leaf in plan.inputs[count:] if leaf.shape]
        whole = sum(prod(leaf.shape) * np.dtype(leaf.dtype).itemsize for leaf in batch)
        stored = sum(leaf.nbytes_per_device for leaf in batch)
        specs = ", ".join(sorted({str(leaf.spec) for leaf in batch}))
        print(f"| {name} | {cluster} | {specs} | {whole:,} | {stored:,} | {plan.strategy} |")


if __name__ == "__main__":
    main()
