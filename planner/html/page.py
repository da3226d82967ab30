"""The report as one HTML file with data, style and script inside; makes no network requests."""

from __future__ import annotations

import dataclasses
import json
import math
import os
import re
from html import escape
from importlib import resources
from pathlib import Path
from typing import Any

from planner.compare.manual_plans import Comparison
from planner.errors import RequestError
from planner.html.data import ReportData, report_data
from planner.planning import Planned

__all__ = ["write_report"]

SCRIPTS = ("base.js", "tables.js", "mesh.js", "graph.js", "time.js", "page.js")
"""Pieces of the page's script, in order; they share one scope."""
DIGITS = 6
"""Significant digits of figures in the file."""


def write_report(
    planned: Planned,
    path: str | os.PathLike[str],
    title: str = "",
    comparison: Comparison | None = None,
) -> None:
    """Write the report of a plan.

    Args:
        planned: from ``planner.planning.plan_step``.
        path: the file.
        title: what was planned, such as the model's file.
        comparison: of the same step, from ``planner.compare.manual_plans.compare``.

    Raises:
        RequestError: the file can't be written.
    """
    text = html(report_data(planned, title, comparison))
    try:
        Path(path).write_text(text, encoding="utf-8")
    except OSError as error:
        raise RequestError(f"cannot write {path}: {error.strerror}") from error


def html(data: ReportData) -> str:
    """The page. Nothing in ``data`` is read as markup or script."""
    page = asset("page.html")
    script = "\n".join(asset(name) for name in SCRIPTS)
    parts = {
        "title": escape(f"{data.title or 'plan'}: {data.mesh} on {data.cluster}"),
        "style": asset("page.css"),
        "script": f'"use strict";\n(() => {{\n{script}\n}})();',
        "data": embedded(data),
    }
    return re.sub(r"\{\{(\w+)\}\}", lambda match: parts[match[1]], page)


def embedded(data: ReportData) -> str:
    """The data as JSON that can stand inside a script element."""
    text = json.dumps(_plain(data), separators=(",", ":"), allow_nan=False)
    # escaped, "<" can't end an element or begin a comment, nor the separators end a script line
    for mark in ("<", ">", "&", "\u2028", "\u2029"):
        text = text.replace(mark, f"\\u{ord(mark):04x}")
    return text


def _plain(value: Any) -> Any:
    """Dataclasses as objects, floats shortened, non-finite floats as null."""
    if isinstance(value, float):
        if not math.isfinite(value):
            return None
        short = float(f"{value:.{DIGITS}g}")
        return int(short) if short.is_integer() and abs(short) < 2**53 else short
    if isinstance(value, tuple | list):
        return [_plain(v) for v in value]
    if isinstance(value, dict):
        return {name: _plain(v) for name, v in value.items()}
    if dataclasses.is_dataclass(value):
        return {f.name: _plain(getattr(value, f.name)) for f in dataclasses.fields(value)}
    return value


def asset(name: str) -> str:
    return resources.files("planner.html").joinpath("assets", name).read_text("utf-8")
