"""``planner verify model.py``: compares a plan's predictions with the compiled step."""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from costmodels import Cluster, ClusterError, parse_cluster
from executor.run.mesh import make_cpu_devices
from executor.verify.compiled import climb
from executor.verify.predictions import Row, Rung, Tolerances, Verification
from planner.announce import announced
from planner.arguments.metadata import with_logical_axis_rules
from planner.cli.commands import (
    DEFAULT_CLUSTER,
    Command,
    add_model_options,
    asked_cluster,
    requested_call,
    stay_on_cpu,
)
from planner.errors import RequestError
from planner.frontend.capture import CapturedCall
from planner.frontend.loading import parse_target, user_environment
from planner.graph.trace import abstract, trace
from planner.plan.plan import Plan, load_plan
from planner.planning import make_plan
from planner.recipes import rewritten
from planner.report.units import bytes_text, time_text

WITHIN, MISSED = 0, 1

_MORE = """\
Compares what the plan predicts with what compilers make of the step, on this machine, without
accelerators: first Shardy, jaxlib's partitioner, then the production compiler of the cluster's
devices. Its package is an extra: pip install 'meshwright[aot-tpu]' or 'meshwright[aot-gpu]'.

A tolerance is a fraction: 0.2 passes what is found up to 20 % above or below the prediction.
Without one nothing is judged, only shown.

examples:
  planner verify train.py --cluster v5p:2x2x2
  planner verify train.py --plan plan.json --tolerance-memory 0.2 --tolerance-communication 0.3
  planner verify model.py --cluster h100:8 --require-compiled --json

exit codes: 0 within every stated tolerance, 1 a tolerance was passed, 2 the request can't be met,
3 the model itself failed
"""


def add_verify(commands: Any, text: str) -> None:
    """Add the subcommand to ``argparse``'s subparsers."""
    parser = commands.add_parser(
        "verify",
        help=text,
        description="Compare a plan's predictions with what compilers make of the step.",
        epilog=_MORE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_model_options(parser)
    add = parser.add_argument
    add("--plan", metavar="FILE", type=Path, help="verify this plan instead of making one")
    for name in ("memory", "communication", "compute"):
        add(
            f"--tolerance-{name}",
            metavar="FRACTION",
            type=_fraction,
            help=f"largest difference in {name} that passes (default: not judged)",
        )
    add(
        "--require-compiled",
        action="store_true",
        help="exit with 2 when the production compiler is not available",
    )
    add("--json", action="store_true", help="print one JSON object, nothing else")


def run_verify(options: argparse.Namespace) -> int:
    """Make or read the plan, run the rungs, and print.

    Args:
        options: the parsed options of ``add_verify``.

    Returns:
        0 within every stated tolerance, 1 if one was exceeded.

    Raises:
        RequestError: the request can't be met, for example because a required compiler is missing.
        ModelError: the user's model failed.
    """
    stay_on_cpu()
    target = parse_target(options.model, options.arguments)
    plan = None if options.plan is None else load_plan(options.plan)
    cluster = _cluster(asked_cluster(options) or (plan.cluster if plan else DEFAULT_CLUSTER))
    if cluster.device.kind == "cpu":
        make_cpu_devices(cluster.num_devices)
    with user_environment(target):
        call, merged = requested_call(target, options)
        with announced(f"verifying {target} ..."):
            verification = _climb(call, merged, plan, options)
    if options.json:
        print(json.dumps(verification_json(verification)))
    else:
        print(verification_text(verification))
    sys.stdout.flush()
    return WITHIN if verification.passed else MISSED


def _climb(
    call: CapturedCall, merged: dict[str, Any], plan: Plan | None, options: argparse.Namespace
) -> Verification:
    if plan is None:
        plan = make_plan(call.function, *call.args, **merged)
        cluster = _cluster(merged["cluster"])
    else:
        for name in ("mesh", "mode", "search", "memory"):
            if getattr(options, name) is not None:
                raise RequestError(f"--{name} is for making a plan; leave it out with --plan")
        cluster = _cluster(asked_cluster(options) or plan.cluster)
    return climb(
        trace(_cut(call, plan), abstract(call.args)),
        plan,
        cluster,
        donate_argnums=call.options.get("donate_argnums"),
        tolerances=Tolerances(
            options.tolerance_memory, options.tolerance_communication, options.tolerance_compute
        ),
        require_compiled=options.require_compiled,
    )


def _cut(call: CapturedCall, plan: Plan) -> Any:
    """The step under the plan's recipe: its microbatches and rematerialization."""
    function = with_logical_axis_rules(call.function)
    return rewritten(function, call.args, plan.recipe)


def _cluster(text: str | Cluster) -> Cluster:
    try:
        return parse_cluster(text) if isinstance(text, str) else text
    except ClusterError as error:
        raise RequestError(str(error)) from error


def _fraction(text: str) -> float:
    value = float(text)
    if not 0 <= value < math.inf:
        raise ValueError(text)
    return value


def verification_json(verification: Verification) -> dict[str, Any]:
    """The verification as plain data; an infinite difference is null."""

    def row(row: Row) -> dict[str, Any]:
        return {
            "quantity": row.quantity.strip(),
            "unit": row.unit,
            "predicted": row.predicted,
            "found": row.found,
            "difference": row.difference if math.isfinite(row.difference) else None,
            "predicted_count": row.predicted_count,
            "found_count": row.found_count,
            "tolerance": row.tolerance,
            "passed": row.passed,
        }

    return {
        "cluster": verification.plan.cluster,
        "mesh": str(verification.plan.mesh),
        "plan": verification.plan.digest,
        "passed": verification.passed,
        "rungs": [
            {
                "name": rung.name,
                "climbed": not rung.absent,
                "absent": rung.absent or None,
                "notes": list(rung.notes),
                "rows": [row(r) for r in rung.rows],
            }
            for rung in verification.rungs
        ],
    }


def verification_text(verification: Verification) -> str:
    """A table per rung, and the verdict."""
    lines = [
        f"plan on {verification.plan.cluster}, mesh {verification.plan.mesh}; per device and step"
    ]
    for rung in verification.rungs:
        lines += ["", *_rung_lines(rung)]
    judged = [row for rung in verification.rungs for row in rung.rows if row.tolerance is not None]
    missed = [row for row in judged if not row.passed]
    if not judged:
        verdict = "no tolerance was stated, so nothing was judged"
    elif missed:
        verdict = f"NOT within tolerance: {', '.join(row.quantity for row in missed)}"
    else:
        verdict = f"within tolerance: {', '.join(row.quantity for row in judged)}"
    return "\n".join([*lines, "", verdict])


MANY_TIMES = 10.0
"""A relative difference above this is shown as a factor."""


def _rung_lines(rung: Rung) -> list[str]:
    if rung.absent:
        return [f"{rung.name}: skipped: {rung.absent}"]
    head = ("", "predicted", "found", "difference", "runs", "")
    cells = [head, *map(_cells, rung.rows)]
    widths = [max(len(row[i]) for row in cells) for i in range(len(head))]
    lines = [f"{rung.name}:"]
    for row in cells:
        texts = [row[0].ljust(widths[0])]
        texts += [c.rjust(w) for c, w in zip(row[1:], widths[1:], strict=True)]
        lines.append("  " + "  ".join(texts).rstrip())
    return lines + [f"  note: {note}" for note in rung.notes]


def _cells(row: Row) -> Sequence[str]:
    text = bytes_text if row.unit == "bytes" else time_text
    percent = f"{row.difference:+.0%}" if math.isfinite(row.difference) else "new"
    if math.isfinite(row.difference) and row.difference > MANY_TIMES:
        percent = f"{1 + row.difference:.3g}x"
    runs = ""
    if row.predicted_count is not None and row.found_count is not None:
        runs = f"{row.predicted_count:g} -> {row.found_count:g}"
    verdict = "" if row.tolerance is None else ("ok" if row.passed else "MISSED")
    return row.quantity, text(row.predicted), text(row.found), percent, runs, verdict


VERIFY = Command("verify", add_verify, run_verify, takes_arguments=True)
