"""Collectives of exported plans beside the plans' own, counted by Shardy.

    python benchmarks/exported.py [MODEL ...]

For the six examples, each under the plans chosen for 8 virtual CPU devices and 8 H100 and under
plans pinned by hand (``pinned``): whether the module that ``planner export --as python`` writes
has the same collectives as the plan (kind, axes, runs and bytes), and whether ``jax.jit`` with the
shardings of arguments and results alone has (kind and bytes).
"""

from __future__ import annotations

import argparse
from collections import Counter
from typing import Any

import common
import jax
from jax.sharding import AbstractMesh, AxisType
from pinned import kinds_for, pinned

from executor.run.export import python_text
from executor.verify.shardy import lower_abstractly, shardy_collectives
from planner import make_plan
from planner.graph.trace import abstract, trace
from planner.plan.plan import Plan, plan_from_json

CHOSEN = ("cpu:8", "h100:8")


def collectives(lowered: Any) -> Counter[Any]:
    """Payload bytes by kind, axes and runs of every collective."""
    found: Counter[Any] = Counter()
    for item in shardy_collectives(lowered):
        found[item.kind, item.axes, item.count] += round(item.count * item.payload_bytes)
    return found


def by_kind(found: Counter[Any]) -> Counter[str]:
    """The same by kind alone."""
    out: Counter[str] = Counter()
    for (kind, *_), nbytes in found.items():
        out[kind] += nbytes
    return out


def lowered(step: Any, args: Any, plan: Plan) -> tuple[Any, Any, Any]:
    """The step lowered under the plan, as the exported module, and with its shardings alone."""
    sizes, names = plan.mesh.sizes, plan.mesh.names
    mesh = AbstractMesh(sizes, names, axis_types=(AxisType.Auto,) * len(sizes))
    space: dict[str, Any] = {"__name__": "sharded"}
    text = python_text(plan_from_json(plan.to_json()))
    exec(compile(text, "sharded.py", "exec"), space)
    whole = space["shard_step"](step, *args, mesh=mesh, donate_argnums=0)
    bare = jax.jit(
        step,
        in_shardings=space["in_shardings"](mesh, *args),
        out_shardings=space["out_shardings"](mesh, step, *args),
        donate_argnums=0,
    )
    ours = lower_abstractly(trace(step, abstract(args)), plan, donate_argnums=0)
    others = [f.trace(*args).lower(lowering_platforms=("cpu",)) for f in (whole, bare)]
    return ours, others[0], others[1]


def main() -> None:
    """Print a row a plan, and how many are equal."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("models", nargs="*", default=common.EXAMPLES, metavar="MODEL")
    tally: Counter[str] = Counter()
    for name in parser.parse_args().models:
        module = common.example(name)
        step, args = module.train_step, module.example_args()
        for kind in (*CHOSEN, *kinds_for(8)):
            if kind in CHOSEN:
                plan = make_plan(step, *args, cluster=kind)
            else:
                mesh, pins = pinned(name, kind, args, 8)
                plan = make_plan(step, *args, cluster="h100:8", mesh=mesh, shardings=pins)
            ours, whole, bare = map(collectives, lowered(step, args, plan))
            same, alone = whole == ours, by_kind(bare) == by_kind(ours)
            tally.update(plans=1, module=same, shardings=alone)
            print(f"{name:15s} {kind:8s} module {same!s:5s}  shardings alone {alone}", flush=True)
    print(f"of {tally['plans']} plans: module {tally['module']}, alone {tally['shardings']}")


if __name__ == "__main__":
    main()
