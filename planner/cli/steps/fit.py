"""``planner fit model.py``: the smallest cluster of each kind of device."""

from __future__ import annotations

import argparse
import json
import sys
from typing import Any

from costmodels import ClusterError
from costmodels.prices import load_prices
from planner.announce import announced
from planner.cli.commands import (
    Command,
    add_planning_options,
    add_price_option,
    print_parts,
    requested_call,
    stay_on_cpu,
)
from planner.compare.fitting import KINDS, fit
from planner.compare.offers_text import fits_json, fits_parts
from planner.errors import RequestError
from planner.frontend.loading import parse_target, user_environment

FITTED = 0

_MORE = f"""\
Clusters are tried in the sizes that they are rented in, from the first that could hold the step's
state and batch. The batch at once is the largest that fits without microbatches, among the step's
own halved and doubled. Without --device: {", ".join(KINDS)}.

examples:
  planner fit train.py
  planner fit model.py --device v5p --device h100 --price prices.toml

exit codes: 0 done, 2 the request can't be met, 3 the model itself failed
"""


def add_fit(commands: Any, text: str) -> None:
    """Add the subcommand to ``argparse``'s subparsers."""
    parser = commands.add_parser(
        "fit",
        help=text,
        description="Find the smallest cluster of each kind of device that a step fits on.",
        epilog=_MORE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_planning_options(parser)
    add = parser.add_argument
    add("--device", metavar="KIND", action="append", help="a kind of device; may be repeated")
    add_price_option(parser)
    add("--json", action="store_true", help="print one JSON object, nothing else")
    add("--no-color", action="store_true", help="plain text")
    parser.set_defaults(cluster=None, profile=None)


def run_fit(options: argparse.Namespace) -> int:
    """Plan, print; raises RequestError and ModelError."""
    target = parse_target(options.model, options.arguments)
    stay_on_cpu()
    try:
        prices = load_prices(options.price)
        with user_environment(target):
            call, merged = requested_call(target, options)
            merged.pop("cluster")
            with announced(f"planning {target} ...") as say:

                def progress(name: str) -> None:
                    say(f"planning {target} for {name} ...")

                fits = fit(
                    call.function,
                    *call.args,
                    kinds=options.device or KINDS,
                    prices=prices,
                    progress=progress,
                    **merged,
                )
    except ClusterError as error:
        raise RequestError(str(error)) from error
    if options.json:
        print(json.dumps(fits_json(fits)))
    else:
        print_parts(fits_parts(fits), options.no_color)
    sys.stdout.flush()
    return FITTED


FIT = Command("fit", add_fit, run_fit, takes_arguments=True)
