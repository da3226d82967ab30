"""The work and the buffers of a step's groups as text."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from planner.debug.text.items import (
    factors_text,
    later_copies,
    layout_text,
    left_out,
    number,
    ranges,
    repeated_groups,
)
from planner.space.buffer import Buffer, Memory, Port
from planner.space.decisions.host_memory import Hosted
from planner.step.analysis import Analysis
from planner.step.facts import Facts
from planner.step.kernels.costs import Work


def analysis_text(analysis: Analysis, *, folded: bool = False) -> str:
    """Facts of the groups and buffers, one line per item.

    Args:
        analysis: the analysis of a whole step.
        folded: leave out items in later copies of repeated blocks.
    """
    graph, groups = analysis.graph, analysis.groups.groups
    repeated = repeated_groups(analysis.groups, graph) if folded else frozenset()
    later = later_copies(graph) if folded else frozenset()
    lines = [
        f"analysis: {len(groups)} groups, {len(analysis.buffers)} buffers, "
        f"{len(set(analysis.bundles))} edges; scalars take {number(analysis.scalar_bytes)} bytes"
    ]
    for group, facts in zip(groups, analysis.facts, strict=True):
        if group.index not in repeated:
            lines.append(f"  group {group.index}: {group.kind} {group.name}".rstrip())
            lines += [f"    {line}" for line in facts_lines(facts)]
    lines += left_out(len(repeated), "groups")
    donated = [
        i for i, given in zip(graph.inputs, analysis.scheduled.donated, strict=True) if given
    ]
    lines.append(f"  donated: {ranges(donated, '%') or 'nothing'}")
    shown = [b for b in analysis.buffers if b.value < 0 or graph.values[b.value].op not in later]
    lines += buffer_lines(shown, "group")
    lines += left_out(len(analysis.buffers) - len(shown), "buffers")
    return "\n".join(lines)


def facts_lines(facts: Facts) -> Iterator[str]:
    """The facts of a group: a line per kind of work, reduction, stored, hosted and fed array."""
    for work in facts.work:
        yield _work(work)
    for r in facts.reductions:
        yield (
            f"sum over {factors_text(r.over)} keeps {factors_text(r.kept)}: {number(r.nbytes)} "
            f"bytes, x{number(r.weight)}{', gradient' if r.gradient else ''}"
        )
    if facts.stored is not None:
        yield f"stored {layout_text(facts.stored[1])}: {number(facts.stored[0])} bytes"
    for name, decision_facts in facts.decided:
        for one in decision_facts if isinstance(decision_facts, tuple) else (decision_facts,):
            yield f"{name}: {_hosted(one) if isinstance(one, Hosted) else one}"
    for fed in facts.fed:
        yield f"fed, by {factors_text(fed.factors)}: {number(fed.share)} of the batch"


def _hosted(hosted: Hosted) -> str:
    """An array that is, or may be, copied between device and host."""
    return (
        f"{'on' if hosted.always else 'may be on'} the host: {number(hosted.nbytes)} bytes by "
        f"{factors_text(hosted.factors)}, copied x{number(hosted.copies)}"
    )


def _work(work: Work) -> str:
    """Work on one line: each number with the classes of factors that split it."""
    classes = [f"{{{' '.join(f'f{f}' for f in sorted(c))}}}" for c in work.classes]

    def by(which: Sequence[int]) -> str:
        return " ".join(classes[c] for c in which) or "nothing"

    parts = [f"{number(work.kernels)} kernels of {work.kind} {work.dtype}"]
    parts.append(f"{number(work.flops)} flop by {by(range(len(classes)))}")
    parts += [f"{number(nbytes)} bytes by {by(which)}" for nbytes, which in work.traffic]
    if work.result_bytes:
        parts.append(f"result of {number(work.result_bytes)} bytes by {by(work.result)}")
    if work.most:
        parts.append(f"in at most {' x '.join(map(number, work.most))} pieces")
    return ", ".join(parts)


def buffer_lines(
    buffers: Iterable[Buffer], what: str, moments: Sequence[int] = ()
) -> Iterator[str]:
    """One line per buffer.

    Args:
        buffers: the buffers.
        what: the word for their ``group``.
        moments: the operation of each moment, if moments are not operations.
    """
    for b in buffers:
        last = b.end - 1
        span = f"moment {b.start}" if b.start == last else f"moments {b.start} to {last}"
        if moments:
            first, last = moments[b.start], moments[last]
            span += f" (operation{'' if first == last else 's'} {first}"
            span += ")" if first == last else f" to {last})"
        value = f" %{b.value}" if b.value >= 0 else ""
        port = "" if b.port is Port.USE else f" {b.port}"
        pool = "" if b.pool is Memory.DEVICE else f", in {b.pool} memory"
        when = "" if b.when is None else f", if the state is in {b.when} memory"
        yield (
            f"  buffer{value} of {what} {b.group} {layout_text(b.layout)}{port}: {span}, "
            f"{number(b.nbytes)} bytes{pool}{when}"
        )
