"""``planner compare model.py``, and ``planner compare --plan a.json b.json``."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import shtab

from costmodels import ClusterError
from costmodels.prices import load_prices
from planner.announce import announced
from planner.cli.commands import (
    Command,
    add_model_options,
    add_price_option,
    print_parts,
    requested_call,
    stay_on_cpu,
)
from planner.compare.difference import difference
from planner.compare.hardware import compare_hardware
from planner.compare.manual_plans import Comparison, compare
from planner.compare.offers_text import offers_json, offers_parts
from planner.compare.text import (
    comparison_json,
    comparison_parts,
    difference_json,
    difference_parts,
)
from planner.errors import RequestError
from planner.frontend.loading import Target, parse_target, user_environment
from planner.html.offers import write_offers
from planner.plan.plan import load_plan

COMPARED = 0

_MORE = """\
With a model: the chosen plan beside data parallel, ZeRO-1, FSDP, tensor parallel over every degree
that divides the devices, FSDP with tensor parallel, and the batch's second dimension split. All
are planned and priced alike; the options of planning but --cluster, --profile, --memory and
--time-limit are for the chosen plan alone.

With several --cluster, or with --batch: the chosen plan on each cluster with each batch: step time,
tokens (or examples) a second, model flop utilization, dollars, memory. --price replaces the
catalog's prices. Options of planning hold for all.

With --plan: what differs between two saved plans, in words.

examples:
  planner compare train.py --cluster h100:8x4
  planner compare model.py --cluster v5p:2x2x2 --memory 16GB --json
  planner compare model.py --cluster h100:8x4 --cluster v5p:4x4x4 --batch 256,512 --html out.html
  planner compare --plan before.json after.json

exit codes: 0 compared, 2 the request can't be met, 3 the model itself failed
"""


def add_compare(commands: Any, text: str) -> None:
    """Add the subcommand to ``argparse``'s subparsers."""
    parser = commands.add_parser(
        "compare",
        help=text,
        description="Compare ways to run a step, or two saved plans.",
        epilog=_MORE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_model_options(parser, needed=False, several=True)
    add = parser.add_argument
    add(
        "--batch",
        metavar="N,...",
        help="numbers of examples to compare; the step is traced again for each",
    )
    add_price_option(parser)
    page: Any = add(
        "--html", metavar="FILE", type=Path, help="write a page with a chart, of several clusters"
    )
    page.complete = shtab.FILE
    plans: Any = add(
        "--plan", nargs=2, metavar="FILE", type=Path, help="two saved plans, the older one first"
    )
    plans.complete = shtab.FILE
    add("--json", action="store_true", help="print one JSON object, nothing else")
    add("--no-color", action="store_true", help="plain text")


def run_compare(options: argparse.Namespace) -> int:
    """Compare and print; raises RequestError and ModelError."""
    if (options.model is None) == (options.plan is None):
        raise RequestError("compare wants a MODEL, or --plan with two files: one of them")
    if options.plan is not None:
        if options.batch or options.price or options.html or options.cluster:
            raise RequestError(
                "--cluster, --batch, --price and --html are for a MODEL, not for --plan"
            )
        before, after = options.plan
        changed = difference(load_plan(before), load_plan(after))
        data = difference_json(changed) if options.json else {}
        parts = difference_parts(changed, before.name, after.name)
    elif (options.cluster and len(options.cluster) > 1) or options.batch or options.price:
        return _run_offers(options)
    else:
        if options.html is not None:
            raise RequestError("--html is for several clusters or batches; see planner inspect")
        options.cluster = (options.cluster or [None])[0]
        stay_on_cpu()
        comparison = _compared(parse_target(options.model, options.arguments), options)
        data = comparison_json(comparison) if options.json else {}
        parts = comparison_parts(comparison)
    if options.json:
        print(json.dumps(data))
    else:
        print_parts(parts, options.no_color)
    sys.stdout.flush()
    return COMPARED


def _compared(target: Target, options: argparse.Namespace) -> Comparison:
    with user_environment(target):
        call, merged = requested_call(target, options)
        with announced(f"planning {target} for {merged['cluster']} ...") as say:

            def progress(name: str) -> None:
                say(f"planning {target} for {merged['cluster']}: {name} ...")

            return compare(call.function, *call.args, progress=progress, **merged)


def _run_offers(options: argparse.Namespace) -> int:
    """Compare clusters and batches, and print."""
    target = parse_target(options.model, options.arguments)
    batches = _batches(options.batch)
    if options.profile is not None:
        raise RequestError("--profile is of one cluster; write it as --cluster PROFILE.toml:8x4")
    try:
        prices = load_prices(options.price)
    except ClusterError as error:
        raise RequestError(str(error)) from error
    clusters, options.cluster = options.cluster, None
    stay_on_cpu()
    with user_environment(target):
        call, merged = requested_call(target, options)
        given = merged.pop("cluster")
        with announced(f"planning {target} ...") as say:

            def progress(name: str) -> None:
                say(f"planning {target} for {name} ...")

            try:
                offers = compare_hardware(
                    call.function,
                    *call.args,
                    clusters=clusters or [given],
                    batches=batches,
                    prices=prices,
                    progress=progress,
                    **merged,
                )
            except ClusterError as error:
                raise RequestError(str(error)) from error
    if options.html is not None:
        write_offers(offers, options.html, Path(options.model.split(":")[0]).name)
    if options.json:
        print(json.dumps(offers_json(offers)))
    else:
        print_parts(offers_parts(offers), options.no_color)
    sys.stdout.flush()
    return COMPARED


def _batches(text: str | None) -> list[int]:
    try:
        sizes = [int(part) for part in text.split(",")] if text else []
    except ValueError:
        sizes = [0]
    if any(size < 1 for size in sizes):
        raise RequestError(f"--batch {text}: expected numbers of examples, such as 256,512")
    return sizes


COMPARE = Command("compare", add_compare, run_compare, takes_arguments=True)
