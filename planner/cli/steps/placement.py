"""``planner inspect model.py --placement auto``: which parameters would be on servers, and why."""

from __future__ import annotations

import argparse
import contextlib
import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import jax

from planner.announce import announced
from planner.cli.commands import asked_options, check_options
from planner.errors import RequestError
from planner.frontend.capture import CapturedCall
from planner.frontend.loading import Target, resolve_loss
from planner.frontend.loss import Loss, check_scalar
from planner.graph.lookups.tables import find_lookups
from planner.graph.trace import abstract
from planner.placement.case import AUTO, parse_placement
from planner.placement.choice import Placement, place_and_plan
from planner.planning import Planned
from planner.request.parsed import parse_request
from planner.spec import REWRITINGS

_RULE = re.compile(r"(.*?)=(\w+)(?:,|$)", re.DOTALL)


def placement_from_text(text: str) -> str | dict[str, str]:
    """Parse ``auto``, or rules such as ``embed=ps,head=ps_whole``, for ``parse_placement``.

    A rule ends with the first ``=place`` before a comma or the end, so its regular expression may
    contain commas and equals signs.

    Raises:
        RequestError: the text is neither.

    >>> placement_from_text("embed_[0-9]{1,2}=ps,=ps_whole")
    {'embed_[0-9]{1,2}': 'ps', '': 'ps_whole'}
    """
    if text == AUTO:
        return text
    matches = list(_RULE.finditer(text))
    if not matches or matches[-1].end() != len(text) or text.endswith(","):
        left = text[matches[-1].end() :] if matches else text
        raise RequestError(
            f"placement {text!r}: can't read {left!r}; expected auto, or REGEX=PLACE with commas "
            "between, such as embed=ps,head=ps_whole; PLACE is ps, ps_whole, spmd or auto"
        )
    rules: dict[str, str] = {}
    for pattern, place in (rule.groups() for rule in matches):
        if pattern in rules:
            raise RequestError(f"placement {text!r}: two rules for {pattern!r}; keep one")
        rules[pattern] = place
    return rules


@dataclass(frozen=True)
class PlacedTarget:
    """The result of ``--placement``.

    Attributes:
        placement: where parameters are.
        others: (path, bytes) of the parameters that it does not name, all under SPMD.
        planned: the plan of the step with the parameters under SPMD.
        call: that step.
        options: the options of ``make_plan`` for that step.
    """

    placement: Placement
    others: tuple[tuple[str, int], ...]
    planned: Planned
    call: CapturedCall
    options: dict[str, Any]


def place_target(target: Target, options: argparse.Namespace) -> PlacedTarget:
    """Place the parameters of the loss that a file gives; call it within ``user_environment``.

    Raises:
        RequestError: the file offers no loss; or the request can't be met.
        ModelError: the user's code failed.
    """
    placement = placement_from_text(options.placement)
    parse_placement(placement)  # fails before the user's code runs
    check_options(options)
    loss = resolve_loss(target)
    merged = asked_options(options)
    for name in REWRITINGS:
        if name in merged:
            raise RequestError(f"--placement plans several steps: --{name} is for a step alone")
    request = parse_request(**merged)
    with announced(f"placing the parameters of {target} for {merged['cluster']} ..."):
        lookups = find_lookups(loss.function, loss.params, loss.batch)
        name = getattr(loss.function, "__name__", "loss")
        check_scalar(lookups, f"{target.path}: {name}")  # so that the error names the file
        with _says_what_is_state():
            chosen_placement, planned, call = place_and_plan(
                lookups, loss.params, loss.batch, loss.optimizer, placement, request
            )
    return PlacedTarget(chosen_placement, _others(loss, chosen_placement), planned, call, merged)


@contextlib.contextmanager
def _says_what_is_state() -> Iterator[None]:
    try:
        yield
    except RequestError as error:
        if not str(error).startswith("offload"):
            raise
        raise RequestError(
            f"{error} (with --placement, a table on servers is no state of the step: place it as "
            "spmd, or leave it out here)"
        ) from error


def _others(loss: Loss, placement: Placement) -> tuple[tuple[str, int], ...]:
    named, _ = jax.tree_util.tree_flatten_with_path(abstract((loss.params,))[0])
    listed = {leaf.path for leaf in placement.leaves}
    sizes = ((jax.tree_util.keystr(p), math.prod(x.shape) * x.dtype.itemsize) for p, x in named)
    return tuple((path, nbytes) for path, nbytes in sizes if path not in listed)
