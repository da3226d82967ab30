"""Large models from steps that say nothing of memory: does a plan fit, and is it as fast as theirs?

    python benchmarks/large_models.py [NAME ...]

Each model is planned as it is written, without remat and without accumulation, at the batch of a
known recipe: microbatches and remat are the search's. Beside it stands a recipe of the kind that
such models are run with (FSDP, at 405B with tensor parallelism; what is computed again,
microbatches), predicted by the same cost model with memory unlimited: its peak says whether it
would fit. Attention is the plain one for both.

``cpu`` is the planner's processor time, tracing included; ``gap`` is against the bound on the
meshes of the recipe that was chosen. ``looks`` counts the recipes that were planned.
"""

from __future__ import annotations

import dataclasses
import re
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "examples"))

import decoders
import jax
import llama

from costmodels import parse_cluster
from planner import make_plan
from planner.errors import MemoryLimitError
from planner.plan.plan import Plan


@dataclasses.dataclass(frozen=True)
class Known:
    """A model on a cluster, and how it is usually run there.

    Attributes:
        model: sizes.
        cluster: devices.
        microbatches, remat: the usual recipe.
        mesh: its mesh; FSDP over all devices where it is empty.
    """

    model: llama.Config | decoders.GPT | decoders.Mixtral
    cluster: str
    microbatches: int
    remat: str
    mesh: str = ""


def gpt(layers: int, dim: int, heads: int, batch: int, vocab: int = 50368) -> decoders.GPT:
    """A decoder of MPT's or GPT-3's form."""
    return decoders.GPT(layers, dim, heads, vocab, batch, 2048, remat=False)


LLAMA2_70B = dataclasses.replace(llama.SIZES["70b"], vocab=32000)
KNOWN = {
    "llama3-8b, 64 v5p": Known(llama.SIZES["8b"], "v5p:4x4x4", 1, "full"),
    "llama2-70b, 256 v5p": Known(
        dataclasses.replace(LLAMA2_70B, batch=1024), "v5p:4x8x8", 1, "full"
    ),
    "llama3.1-70b, 256 v6e": Known(
        dataclasses.replace(llama.SIZES["70b"], seq=8192, batch=512), "v6e:16x16", 1, "offload"
    ),
    "llama3.1-405b, 16384 v5p": Known(
        llama.SIZES["405b"], "v5p:16x32x32", 1, "full", "fsdp=2048,model=8"
    ),
    "mpt-7b, 64 h100": Known(gpt(32, 4096, 32, 1024), "h100:8x8", 2, "none"),
    "mpt-30b, 64 h100": Known(gpt(48, 7168, 56, 1024), "h100:8x8", 2, "full"),
    "mpt-30b, 256 h100": Known(gpt(48, 7168, 56, 2048), "h100:8x32", 1, "full"),
    "mixtral-8x22b, 256 v6e": Known(
        decoders.Mixtral(), "v6e:16x16", 1, "offload", "fsdp=64,expert=4"
    ),
    "gpt3-175b, 256 v6e": Known(gpt(96, 12288, 96, 512, 50304), "v6e:16x16", 1, "full"),
}


def built(
    model: llama.Config | decoders.GPT | decoders.Mixtral,
) -> tuple[Any, tuple[Any, ...]]:
    """The step and the shapes of its arguments."""
    if not isinstance(model, llama.Config):
        return decoders.build(model)
    make_state, step, batch = llama.build(model)
    return step, (jax.eval_shape(make_state), batch)


def row(name: str, known: Known) -> list[str]:
    """One line of the table."""
    step, args = built(known.model)
    options: dict[str, Any] = {"cluster": known.cluster, "donate_argnums": 0}
    devices = parse_cluster(known.cluster).num_devices
    theirs = make_plan(
        step,
        *args,
        mesh=known.mesh or {"fsdp": devices},
        zero=3,
        microbatches=known.microbatches,
        remat=known.remat,
        memory="100TB",
        **options,
    ).prediction
    begun = time.process_time()
    try:
        plan: Plan | None = make_plan(step, *args, **options)
    except MemoryLimitError as error:
        print(f"{name}: {str(error).splitlines()[0]}", flush=True)
        plan = None
    cpu = time.process_time() - begun
    usual = [f"{theirs.step_s:.3g} s", f"{theirs.peak_bytes / 1e9:.3g} GB"]
    if plan is None:
        return [name, "no plan fits", *[""] * 5, *usual, "", f"{cpu:.1f} s", "", ""]
    found = plan.prediction
    looks = re.search(r"(\d+) of (\d+) recipes", " ".join(plan.notes))
    return [
        name,
        f"{found.step_s:.3g} s",
        f"{found.peak_bytes / 1e9:.3g} GB",
        str(plan.microbatches),
        str(plan.chunks),
        plan.remat,
        str(plan.mesh),
        *usual,
        f"{found.step_s / theirs.step_s:.3f}",
        f"{cpu:.1f} s",
        f"{100 * plan.search.gap:.2g} %",
        looks[1] if looks else "-",
    ]


def main() -> None:
    """Print a line as soon as it is known, then the table."""
    names = sys.argv[1:] or list(KNOWN)
    rows = []
    for name in names:
        rows.append(row(name, KNOWN[name]))
        print("  ".join(rows[-1]), flush=True)
    head = (
        "model,step,peak,microbatches,chunks,remat,mesh,usual step,usual peak,ratio,cpu,gap,looks"
    )
    lines = [head.split(","), *rows]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    print()
    for line in lines:
        print("  ".join(x.ljust(n) for x, n in zip(line, widths, strict=True)).rstrip())


if __name__ == "__main__":
    main()
