"""The parts of a step that were considered for rematerialization, and the outcome for each."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax

from planner.graph.flat import Call, FlatJaxpr
from planner.graph.jaxpr.places import user_lines
from planner.remat.frontier import WHOLE, Block, Cut, InChunks, cut, is_product
from planner.remat.policy import Policy


@dataclass(frozen=True, eq=False)
class Site:
    """Equal blocks that store the same values.

    Attributes:
        what: which blocks, with their line.
        count: number of blocks, or of iterations of the loop.
        block: one of them.
        cut: what it stores.
    """

    what: str
    count: int
    block: Block
    cut: Cut


@dataclass(eq=False)
class Sites:
    """Cuts blocks under one policy and records the sites; equal blocks are cut once."""

    policy: Policy
    chunks: Callable[[FlatJaxpr], InChunks] = lambda flat: WHOLE
    """The parts of a program that run in chunks."""
    found: list[Site] = field(default_factory=list)
    known: dict[Any, tuple[Block, Cut]] = field(default_factory=dict)

    def cut(self, block: Block) -> Cut:
        """``frontier.cut`` under the policy; reuses the cut of an equal block if there is one."""
        key = block.key
        if key not in self.known:
            self.known[key] = block, cut(block, self.policy)
        like, known_cut = self.known[key]
        if like is block:
            return known_cut
        names = dict(zip(_numbers(like), _numbers(block), strict=True))
        return Cut(
            frozenset(names[v] for v in known_cut.kept),
            known_cut.again,
            known_cut.kept_bytes,
            known_cut.flop,
        )


def _numbers(block: Block) -> list[int]:
    """The values of a block in the order in which its operations name them."""
    named = (v for c in block.calls for v in (*c.ins, *c.outs) if isinstance(v, int))
    return list(dict.fromkeys(itertools.chain(named, sorted(block.entries))))


def pays(block: Block, block_cut: Cut) -> bool:
    """Whether a cut frees anything."""
    return block_cut.kept_bytes < block.bytes_now and bool(block_cut.again)


def site_text(site: Site) -> str:
    """What a block stores and what it recomputes."""
    block, block_cut = site.block, site.cut
    products = [k for k, c in enumerate(block.calls) if is_product(c.eqn)]
    again = len(set(products) & set(block_cut.again))
    size, unit = next((u for u in _UNITS if u[0] <= block.bytes_now), _UNITS[-1])
    return (
        f"{site.what}: stores {block_cut.kept_bytes / size:.3g} of {block.bytes_now / size:.3g} "
        f"{unit} of residuals for the backward pass (x{site.count}, before sharding); recomputes "
        f"{again} of {len(products)} products and {len(block_cut.again) - again} other operations"
    )


_UNITS = ((1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB"), (1.0, "B"))


def common_line(calls: Sequence[Call]) -> str:
    """The innermost line of the user's code from which all these operations are called."""
    common: list[str] | None = None
    for call in calls:
        lines = user_lines(call.eqn)
        if not lines:
            continue
        same = lines if common is None else common
        pairs = zip(same, lines, strict=False)
        common = [a for a, _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs)]
    return common[-1] if common else "an unknown line"


def to_host(value: Any) -> Any:
    """A value in host memory."""
    return jax.device_put(value, jax.memory.Space.Host)


def to_device(value: Any) -> Any:
    """A value in device memory."""
    return jax.device_put(value, jax.memory.Space.Device)
