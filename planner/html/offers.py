"""A step on several clusters as one HTML file: a chart of throughput over cost, and the table."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Sequence
from html import escape
from pathlib import Path

from planner.compare.hardware import Offer, Offers
from planner.compare.offers_text import TIED, dollars_text, how_text, named, rate_text
from planner.errors import RequestError
from planner.html.page import asset
from planner.report.units import bytes_text, time_text

WIDTH, HEIGHT, LEFT, BELOW, ABOVE = 900, 420, 70, 48, 16
"""Units of the drawing, and its margins."""
LINE, LONG = 16, 180
"""Height of a label, and the assumed length of one."""
COLOURS = 4
"""Number of kinds of devices with distinct colors (``--axis-0`` and so on)."""


def write_offers(offers: Offers, path: str | os.PathLike[str], title: str = "") -> None:
    """Write the page.

    Raises:
        RequestError: the file can't be written.
    """
    try:
        Path(path).write_text(offers_html(offers, title), encoding="utf-8")
    except OSError as error:
        raise RequestError(f"cannot write {path}: {error.strerror}") from error


def offers_html(offers: Offers, title: str = "") -> str:
    """The page; it has no script and makes no network requests."""
    style = asset("page.css")
    head = escape(title or "the step")
    body = "\n".join((*_chart(offers), *_table(offers)))
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        '<meta name="color-scheme" content="light dark">\n'
        '<meta http-equiv="Content-Security-Policy" content="default-src \'none\'; '
        "style-src 'unsafe-inline'; img-src data:\">\n"
        f'<title>{head}: clusters compared</title>\n<link rel="icon" href="data:,">\n'
        f"<style>\n{style}\n{_STYLE}</style>\n</head>\n<body>\n"
        f"<header><h1>{head}: clusters compared</h1>\n"
        '<p class="soft">Predicted; a filled mark is beaten by no other in both throughput and '
        "cost.</p></header>\n"
        f"<main>\n{body}\n</main>\n</body>\n</html>\n"
    )


_STYLE = """\
.chart { width: 100%; height: auto; }
.chart text { fill: var(--soft); font-size: 13px; }
.chart .rule { stroke: var(--line); }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums; }
th, td { text-align: right; padding: 5px 10px; border-bottom: 1px solid var(--line); }
th { color: var(--soft); font-weight: 500; white-space: nowrap; }
th:first-child, td:first-child, th:last-child, td:last-child { text-align: left; }
td:not(:last-child) { white-space: nowrap; }
tr.best td { font-weight: 600; }
"""


def _points(offers: Offers) -> tuple[list[tuple[Offer, float, float]], str]:
    """Offers with their cost and throughput, and the unit of the cost."""
    planned = [o for o in offers.offers if o.plan is not None]
    unit = offers.unit
    if planned and all(o.price is not None for o in planned):
        return [(o, o.dollars_per_million, o.per_second) for o in planned], f"$ per million {unit}"
    cost = f"device seconds per million {unit}"
    return [(o, 1e6 * o.devices / o.per_second, o.per_second) for o in planned], cost


def _chart(offers: Offers) -> Iterator[str]:
    points, cost = _points(offers)
    if not points:
        return
    kinds = list(dict.fromkeys(o.kind for o in offers.offers))
    across, up = _ticks([p[1] for p in points]), _ticks([p[2] for p in points])

    def x(value: float) -> float:
        return LEFT + (WIDTH - LEFT - 20) * value / across[-1]

    def y(value: float) -> float:
        return HEIGHT - BELOW - (HEIGHT - BELOW - ABOVE) * value / up[-1]

    label = f"{offers.unit} per second over {cost}"
    yield f'<section class="card"><svg class="chart" viewBox="0 0 {WIDTH} {HEIGHT}" role="img" '
    yield f'aria-label="{escape(label)}">'
    for value in across:
        text = dollars_text(value) if cost.startswith("$") else rate_text(value)
        yield (
            f'<line class="rule" x1="{x(value):.1f}" x2="{x(value):.1f}" y1="{ABOVE}" '
            f'y2="{HEIGHT - BELOW}"/><text x="{x(value):.1f}" y="{HEIGHT - BELOW + 18}" '
            f'text-anchor="middle">{escape(text)}</text>'
        )
    for value in up:
        yield (
            f'<line class="rule" x1="{LEFT}" x2="{WIDTH - 20}" y1="{y(value):.1f}" '
            f'y2="{y(value):.1f}"/><text x="{LEFT - 8}" y="{y(value) + 4:.1f}" '
            f'text-anchor="end">{escape(rate_text(value))}</text>'
        )
    middle = (LEFT + WIDTH) / 2
    yield f'<text x="{middle}" y="{HEIGHT - 8}" text-anchor="middle">{escape(cost)}</text>'
    yield (
        f'<text transform="translate(14 {(HEIGHT - BELOW) / 2}) rotate(-90)" text-anchor="middle">'
        f"{escape(offers.unit)} per second</text>"
    )
    labels: list[tuple[float, float]] = []
    for offer, price, speed in points:
        colour = f"var(--axis-{kinds.index(offer.kind) % COLOURS})"
        fill = colour if offer.pareto else "none"
        side = "end" if x(price) > WIDTH * 0.7 else "start"
        away = -11 if side == "end" else 11
        labels.append(_free(x(price), y(speed) + 4, labels))
        yield (
            f'<circle cx="{x(price):.1f}" cy="{y(speed):.1f}" r="7" fill="{fill}" '
            f'stroke="{colour}" stroke-width="2"><title>{escape(named(offer))}: '
            f"{escape(time_text(offer.step_s))} a step, {escape(how_text(offer))}</title></circle>"
            f'<text x="{x(price) + away:.1f}" y="{labels[-1][1]:.1f}" text-anchor="{side}">'
            f"{escape(named(offer))}</text>"
        )
    yield "</svg></section>"


def _free(x: float, y: float, taken: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """The nearest position for a label, up or down, where it overlaps no other label."""
    for k in range(2 * len(taken) + 1):
        at = y + LINE * ((k + 1) // 2) * (-1) ** k
        if all(abs(x - a) > LONG or abs(at - b) >= LINE for a, b in taken):
            return x, at
    return x, y


def _ticks(values: Sequence[float]) -> list[float]:
    """From 0 to the first round number above all values."""
    most = max(values, default=0.0)
    if not most > 0 or not math.isfinite(most):
        return [0.0, 1.0]
    size = 10 ** math.floor(math.log10(most / 4))
    step = next(size * k for k in (1, 2, 5, 10) if size * k * 5 >= most)
    return [step * k for k in range(math.ceil(most / step) + 1)]


def _table(offers: Offers) -> Iterator[str]:
    unit, ties = offers.unit, offers.tied_fastest
    yield '<section class="card scroll"><table><thead><tr>'
    for name in ("cluster", "batch", "step", f"{unit}/s", "MFU", "$/step", f"$/M {unit}", "memory"):
        yield f"<th>{escape(name)}</th>"
    yield "<th>how</th></tr></thead><tbody>"
    for o in offers.offers:
        cells = [o.cluster, str(o.examples or "-"), *["-"] * 6]
        if o.plan is not None:
            cells[2:] = [
                time_text(o.step_s),
                f"{rate_text(o.per_second)} (tied)" if o in ties else rate_text(o.per_second),
                f"{100 * o.mfu:.1f} %",
                dollars_text(o.dollars_per_step),
                dollars_text(o.dollars_per_million),
                bytes_text(o.plan.prediction.peak_bytes),
            ]
        row = "".join(f"<td>{escape(cell)}</td>" for cell in (*cells, how_text(o)))
        yield f'<tr class="{"best" if o.pareto else ""}">{row}</tr>'
    yield "</tbody></table>"
    if ties:
        yield f'<p class="soft">tied: {escape(TIED)}.</p>'
    yield "</section>"
