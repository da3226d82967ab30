"""Shared code of the subcommands of ``planner``: their type, and the options that name a step.

A subcommand is a `Command`, listed in `planner.cli.table`.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import shtab
from rich.console import Console, RenderableType

from costmodels import ClusterError, parse_cluster, with_profile
from planner.errors import RequestError
from planner.frontend.capture import CapturedCall
from planner.frontend.loading import Target, find_step
from planner.report.layout import plain_text, show
from planner.request.options import flags
from planner.request.parsed import parse_request
from planner.spec import parse_mesh

DEFAULT_CLUSTER = "cpu:8"
PLAIN_WIDTH = 80
"""Width in columns of text that does not go to a terminal, if ``COLUMNS`` is not set."""


@dataclass(frozen=True)
class Command:
    """A subcommand.

    ``add`` adds it to ``argparse``'s subparsers under ``name`` with a line of help; ``run`` runs it
    and returns the exit code, or raises RequestError or ModelError. ``takes_arguments``: words
    after ``--`` are arguments of the model, in ``options.arguments``.
    """

    name: str
    add: Callable[[Any, str], None]
    run: Callable[[argparse.Namespace], int]
    takes_arguments: bool = False


def add_model_options(
    parser: argparse.ArgumentParser, *, needed: bool = True, several: bool = False
) -> None:
    """Add the arguments that name a step (``needed``: it must be named) and say how to plan it;
    ``several``: on more than one cluster."""
    add_planning_options(parser, needed=needed)
    add = parser.add_argument
    add(
        "--cluster",
        action="append" if several else "store",
        help="such as h100:8x4, v5p:4x4x8, cpu:8 or a .toml file (default: what the script asks "
        f"for, else {DEFAULT_CLUSTER})" + ("; may be repeated" if several else ""),
    )
    add(
        "--profile",
        metavar="FILE",
        help="constants that planner calibrate measured; with --cluster for a cluster of that size",
    )


def add_planning_options(parser: argparse.ArgumentParser, *, needed: bool = True) -> None:
    """Add the same arguments without the cluster."""
    add = parser.add_argument
    model: Any = add(
        "model",
        metavar="MODEL[:FUNCTION]",
        nargs=None if needed else "?",
        help="a Python file, or a function in it",
    )
    model.complete = shtab.FILE
    for name, flag in flags().items():
        more: dict[str, Any] = {"action": "append"} if flag.repeated else {"type": flag.type}
        add(
            "--" + name.removesuffix("_s").replace("_", "-"),
            dest=name,
            metavar=flag.metavar,
            choices=flag.choices or None,
            help=flag.help,
            **more,
        )


def add_price_option(parser: argparse.ArgumentParser) -> None:
    """Add the option for a file of prices."""
    prices: Any = parser.add_argument(
        "--price",
        metavar="FILE",
        type=Path,
        help="a TOML file of dollars per device and hour, such as h100 = 2.50, in place of the "
        "catalog's",
    )
    prices.complete = shtab.FILE


def requested_call(
    target: Target, options: argparse.Namespace
) -> tuple[CapturedCall, dict[str, Any]]:
    """The call of the step, and the options of ``make_plan``; the command line takes precedence.

    Call it within ``planner.frontend.loading.user_environment``.

    Raises:
        RequestError, ModelError: as ``planner.frontend.loading.find_step``.
    """
    check_options(options)
    call = find_step(target)
    return call, {**call.options, **asked_options(options, call.options.get("cluster"))}


def check_options(options: argparse.Namespace) -> None:
    """Reject invalid options of the command line before the user's code runs.

    Raises:
        RequestError: as ``planner.request.parsed.parse_request``.
    """
    given = asked_options(options)
    if options.cluster is None and options.profile is None and "mesh" in given:
        # its size depends on the cluster, which the script sets
        parse_mesh(given.pop("mesh").replace("-1", "1"))
    parse_request(**given)


def asked_options(
    options: argparse.Namespace, default_cluster: str | None = None
) -> dict[str, Any]:
    """The options of ``make_plan`` that are given on the command line, a cluster among them.

    Raises:
        RequestError: as ``asked_cluster``.
    """
    given = {name: getattr(options, name) for name in flags()}
    given["cluster"] = asked_cluster(options) or default_cluster or DEFAULT_CLUSTER
    return {name: value for name, value in given.items() if value is not None}


def asked_cluster(options: argparse.Namespace) -> str | None:
    """The cluster text that ``--cluster`` and ``--profile`` specify; None when neither is given.

    Raises:
        RequestError: the profile can't be read, or its kind differs from the cluster's.
    """
    cluster: str | None = options.cluster
    if options.profile is None:
        return cluster
    try:
        return with_profile(options.profile, cluster)
    except ClusterError as error:
        raise RequestError(str(error)) from error


MOST_DEVICES = 1024
"""Maximum number of virtual CPU devices for a model."""


def stay_on_cpu(cluster: str | None = None) -> None:
    """Keep jax from looking for accelerators: planning needs none. A model that builds a mesh of
    ``jax.devices()`` sees one virtual device per device of the cluster."""
    if os.environ.setdefault("JAX_PLATFORMS", "cpu") != "cpu":
        return
    import jax

    if not getattr(jax.config, "jax_platforms", None):  # jax read the variable before this call
        jax.config.update("jax_platforms", "cpu")
    if cluster is None or "xla_force_host_platform_device_count" in os.environ.get("XLA_FLAGS", ""):
        return
    with contextlib.suppress(ClusterError, RuntimeError):  # reported later; jax has started
        count = parse_cluster(cluster).num_devices
        if 1 < count <= MOST_DEVICES:
            jax.config.update("jax_num_cpu_devices", count)


def print_parts(parts: Iterable[RenderableType], no_color: bool) -> None:
    """Print a report: colored and as wide as the window on a terminal, else plain and 80 columns
    wide."""
    if sys.stdout.isatty():
        show(parts, Console(no_color=no_color or None))
    else:
        print(plain_text(parts, plain_width(PLAIN_WIDTH)))


def plain_width(default: int) -> int:
    """Width of text that does not go to a terminal: ``COLUMNS`` of the environment, if set."""
    text = os.environ.get("COLUMNS", "")
    return min(max(int(text), 40), 1000) if text.isdecimal() else default
