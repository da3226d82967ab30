"""Recomputes parts of a step's forward pass in the backward pass.

The result is the program that ``jax.checkpoint`` around the body of each ``lax.scan``, or around
each equal block of an unrolled model, would give. It is made from the step's jaxpr, so the user's
code does not change:

* A forward scan whose stacked results are read only by a later scan of the same length: it stacks
  the stored values instead, and the later scan recomputes the rest.
* Equal blocks of forward operations: values that only the backward pass reads are recomputed before
  the first operation that reads them. Blocks are cut where the fewest bytes cross.

Bodies that the program itself rematerializes (``jax.checkpoint``) are left unchanged. What a block
stores is a minimum cut under a policy (``frontier``, ``policy``).
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax

from planner.graph.flat import FlatJaxpr, Run, execute, flatten, looped
from planner.graph.shapes import by_shapes
from planner.graph.trace import Traced, trace
from planner.remat.blocks import repeated_blocks
from planner.remat.frontier import InChunks, cut
from planner.remat.policy import FULL, NONE, OFFLOAD, ON_HOST, PRICES, Policy, parse_policy
from planner.remat.scans import paired_scans
from planner.remat.sites import Site, Sites, pays, site_text

KEEP_NOTHING = parse_policy(FULL)


@dataclass(frozen=True, eq=False)
class Rematerialized:
    """A step that recomputes parts of its forward pass.

    Attributes:
        sites: the blocks and what each stores, including blocks that recompute nothing.
        function: the step, with the same arguments and results.
    """

    sites: tuple[Site, ...]
    function: Callable[..., Any]

    @property
    def what(self) -> str:
        """Which parts are recomputed."""
        return " and ".join(dict.fromkeys(s.what for s in self.sites if pays(s.block, s.cut)))

    @property
    def lines(self) -> tuple[str, ...]:
        """For each kind of block, what it stores and what it recomputes."""
        return tuple(dict.fromkeys(site_text(s) for s in self.sites if pays(s.block, s.cut)))


Chunks = Callable[[FlatJaxpr], InChunks]
"""Determines the parts of a program that run in chunks after the rewrite."""


def recomputed(
    traced: Traced, policy: Policy = KEEP_NOTHING, chunks: Chunks | None = None
) -> Rematerialized | None:
    """The step under a policy; None if no loop body or block has anything to recompute.

    Args:
        traced: the step.
        policy: what is recomputed.
        chunks: what runs in chunks afterwards and is therefore recomputed under every policy.
    """
    sites = Sites(policy) if chunks is None else Sites(policy, chunks)
    run = _rewritten(traced.flat, sites)
    if not any(pays(s.block, s.cut) for s in sites.found):
        return None

    def step(*args: Any) -> Any:
        return jax.tree_util.tree_unflatten(traced.out_tree, run(jax.tree_util.tree_leaves(args)))

    return Rematerialized(tuple(sites.found), step)


def rematerialized(
    function: Callable[..., Any],
    traced: Traced,
    args: Sequence[Any],
    policy: str,
    chunks: Chunks | None = None,
) -> tuple[Callable[..., Any], tuple[str, ...]]:
    """A step that computes what ``function`` does and recomputes parts of it under a policy.

    Args:
        function: a step of pytrees of arrays.
        traced: its trace for ``args``.
        args: its arguments, or ShapeDtypeStructs.
        policy: see ``planner.remat.policy``.
        chunks: what runs in chunks afterwards and is therefore recomputed under every policy.

    Returns:
        A function of the same arguments (which is rewritten again for other shapes), and one line
        per kind of block that it recomputes.

    Raises:
        RequestError: there is no such policy.
    """
    parsed_policy = parse_policy(policy)
    if policy == NONE and chunks is None:
        return function, ()

    def under_policy(traced: Traced) -> Rematerialized:
        return recomputed(traced, parsed_policy, chunks) or Rematerialized((), function)

    first = under_policy(traced)
    if not first.lines:
        return function, ()
    step = by_shapes(
        function, args, first.function, lambda args: under_policy(trace(function, args)).function
    )
    return step, first.lines


def policies(
    traced: Traced, chunks: Chunks | None = None, *, on_host: bool = False
) -> tuple[str, ...]:
    """Policies that store different values, from the one that frees least to ``FULL``; empty if
    nothing can be recomputed. ``on_host``: whether stored values are in host memory; the last
    policy is then ``OFFLOAD``.

    The prices in between are those of ``PRICES`` at which some block changes what it stores.
    """
    parsed_policy = parse_policy(NONE)
    sites = Sites(parsed_policy) if chunks is None else Sites(parsed_policy, chunks)
    _rewritten(traced.flat, sites)
    blocks = [s.block for s in sites.found]

    def bytes_under(policy: str) -> tuple[int, ...]:
        cuts = [cut(b, parse_policy(policy)) for b in blocks]
        pairs = zip(blocks, cuts, strict=True)
        return tuple(c.kept_bytes if pays(b, c) else b.bytes_now for b, c in pairs)

    prefix, last = (ON_HOST, OFFLOAD) if on_host else ("", FULL)
    names = [NONE, *(f"{prefix}{price:g}" for price in PRICES), last]
    bytes_of = {name: bytes_under(name) for name in names}
    first: dict[tuple[int, ...], str] = {}
    for name in (NONE, last, *names):
        first.setdefault(bytes_of[name], name)
    return tuple(n for n in names if n != NONE and n in first.values())


def _rewritten(flat: FlatJaxpr, sites: Sites) -> Run:
    """A program with parts of it recomputed."""
    flat, paired = paired_scans(flat.live(), sites)
    calls = list(flat.calls)
    for at, call in enumerate(calls):
        if call.kind == "scan" and at not in paired:
            before = len(sites.found)
            inner = _rewritten(flatten(call.eqn.params["jaxpr"]), sites)
            if any(pays(s.block, s.cut) for s in sites.found[before:]):
                calls[at] = call.running(looped(call.eqn, inner))
    if any(a is not b for a, b in zip(calls, flat.calls, strict=True)):
        flat = dataclasses.replace(flat, calls=tuple(calls))
    flat = repeated_blocks(flat, sites, paired)
    return functools.partial(execute, flat)
