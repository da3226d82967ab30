"""A plan as a card for a notebook: the summary, its inputs and, folded, the whole report.

One fragment of HTML that loads nothing and runs no script. Its colors are those of the notebook.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape

from planner.plan.plan import EQUAL_BLOCKS, Plan
from planner.report.fold import LeafRow, fold_leaves
from planner.report.sections.recipe import recipe_lines
from planner.report.table import plan_text
from planner.report.units import array_text, bytes_text, limit_text, percent_text, time_text
from planner.report.verdict import likely_text

_LINE = "1px solid rgba(128,128,128,.35)"
_CARD = (
    f"font:14px/1.45 system-ui,sans-serif;border:{_LINE};border-radius:8px;padding:12px 16px;"
    "max-width:860px;box-sizing:border-box;overflow-wrap:anywhere"
)
_LABEL = "text-align:left;vertical-align:top;white-space:nowrap;padding:2px 16px 2px 0;opacity:.7"
_CELL = "text-align:left;vertical-align:top;padding:2px 12px 2px 0"
_ROWS_SHOWN = 40


def card(plan: Plan) -> str:
    """The card of a plan."""
    rows = "".join(
        f'<tr><th scope="row" style="{_LABEL};font-weight:400">{escape(label)}</th>'
        f'<td style="{_CELL};width:100%">{escape(value)}</td></tr>'
        for label, value in _summary(plan)
    )
    title = f"{plan.mode} on {plan.cluster}"
    return (
        f'<div class="meshwright-plan" style="{_CARD}">'
        f'<div style="font-weight:600;margin-bottom:6px">{escape(title)}</div>'
        f'<table style="border-collapse:collapse;font:inherit">{rows}</table>'
        f"{_folded('inputs', _inputs(fold_leaves(plan.inputs)))}"
        f"{_folded('report', _pre(plan_text(plan)))}</div>"
    )


def one_line(plan: Plan) -> str:
    """A plan in one line."""
    p = plan.prediction
    strategy = f"{plan.strategy}; " if plan.strategy else ""
    return (
        f"<Plan on {plan.cluster}: {strategy}mesh {plan.mesh}; {time_text(p.step_s)} a step, "
        f"{bytes_text(p.peak_bytes)} per device>"
    )


def _summary(plan: Plan) -> Iterable[tuple[str, str]]:
    p = plan.prediction
    if plan.strategy:
        yield "strategy", plan.strategy
    if plan.idle:
        yield "idle", plan.idle
    yield "mesh", f"{plan.mesh} ({plan.mesh.num_devices} devices)"
    yield "step time", f"{time_text(p.step_s)} predicted"
    if likely := likely_text(plan):
        yield "likely", likely
    memory = f"{bytes_text(p.peak_bytes)} per device at the peak"
    if p.limit_bytes > 0:
        share = percent_text(p.peak_bytes / p.limit_bytes)
        memory += f", {share} of {limit_text(p.limit_bytes, p.device_bytes)}"
    yield "peak memory", memory
    yield from recipe_lines(plan)
    yield "gap", percent_text(plan.search.gap)
    if plan.fallbacks:
        yield "fallbacks", f"{len(plan.fallbacks)} operations without a rule; see the report"
    notes = [note for note in plan.notes if EQUAL_BLOCKS not in note]
    for note in notes[:3]:
        yield "note", note
    if len(notes) > 3:
        yield "note", f"{len(notes) - 3} more in the report"


def _inputs(rows: Sequence[LeafRow]) -> str:
    heads = ("path", "array", "stored as", "each", "count")
    largest = sorted(rows, key=lambda row: -row.nbytes)[:_ROWS_SHOWN]
    body = [
        (
            row.path,
            array_text(row.leaf.shape, row.leaf.dtype),
            str(row.leaf.spec),
            bytes_text(row.leaf.nbytes_per_device),
            str(row.count),
        )
        for row in largest
    ]
    cells = "".join(f'<th scope="col" style="{_CELL}">{h}</th>' for h in heads)
    lines = "".join(
        f'<tr>{"".join(f"""<td style="{_CELL}">{escape(x)}</td>""" for x in line)}</tr>'
        for line in body
    )
    left = len(rows) - len(body)
    more = f"<div>{left} more, all smaller; see the report</div>" if left else ""
    table = f'<table style="border-collapse:collapse;font:inherit"><tr>{cells}</tr>{lines}</table>'
    return f'<div style="overflow-x:auto">{table}{more}</div>'


def _pre(text: str) -> str:
    style = "font:12px/1.35 ui-monospace,monospace;overflow-x:auto;white-space:pre;margin:6px 0"
    return f'<pre style="{style}">{escape(text)}</pre>'


def _folded(title: str, content: str) -> str:
    style = "cursor:pointer;margin-top:6px"
    return f'<details><summary style="{style}">{title}</summary>{content}</details>'
