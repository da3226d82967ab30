"""A step on several clusters as text for people and as plain data."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

from rich.console import RenderableType
from rich.padding import Padding
from rich.text import Text

from planner.compare.fitting import Fit
from planner.compare.hardware import Offer, Offers
from planner.compare.text import range_json
from planner.report.layout import add_row, new_table, pairs, section
from planner.report.units import bytes_text, listed, time_text
from planner.spec import PLAIN


def rate_text(number: float) -> str:
    """``189769.0`` as ``190k``."""
    if not math.isfinite(number):
        return "-"
    for size, letter in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if number >= size:
            return f"{number / size:.3g}{letter}"
    return f"{number:.3g}"


def dollars_text(dollars: float) -> str:
    """``0.1869`` as ``$0.187``; "-" where there is no price."""
    if math.isnan(dollars):
        return "-"
    if 0 < dollars < 1e-3:
        return f"${dollars:.{1 - math.floor(math.log10(dollars))}f}"
    return f"${dollars:,.0f}" if dollars >= 1000 else f"${dollars:.3g}"


TIED = "could be as fast as the fastest, by the likely ranges of both predictions"
"""The meaning of the mark "tied" of an offer."""


def _tied_text(ties: Sequence[Offer]) -> str:
    return f"; tied with {listed([named(o) for o in ties])}" if ties else ""


def how_text(offer: Offer) -> str:
    """The strategy of the plan, and its recipe."""
    plan = offer.plan
    if plan is None:
        return offer.refused
    return plan.strategy if plan.recipe == PLAIN else f"{plan.strategy}; {plan.recipe}"


def named(offer: Offer) -> str:
    """The cluster and the batch."""
    return f"{offer.cluster}, batch {offer.examples}" if offer.examples else offer.cluster


def offers_parts(offers: Offers) -> Iterable[RenderableType]:
    """The parts of a report: a table of figures, each offer's strategy, the sources of prices."""
    yield Text("the step on each cluster, predicted", style="bold")
    yield ""
    fastest, cheapest, ties = offers.fastest, offers.cheapest, offers.tied_fastest
    best = "no plan fits" if fastest is None else named(fastest)
    rows = [("fastest", best + _tied_text(ties))]
    if cheapest is not None:
        rows.append(
            (
                "cheapest",
                f"{named(cheapest)}: {dollars_text(cheapest.dollars_per_million)} per million "
                f"{offers.unit}" + _tied_text(offers.tied_cheapest),
            )
        )
    yield Padding(pairs(rows), (0, 0, 0, 2), expand=False)
    yield ""
    unit = offers.unit
    table = new_table(
        "<cluster",
        ">batch",
        ">step",
        f">{unit}/s",
        ">MFU",
        ">$/step",
        f">$/M {unit}",
        ">memory",
        "",
    )
    for one in offers.offers:
        batch = str(one.examples) if one.examples else "-"
        if one.plan is None:
            add_row(table, one.cluster, batch, *["-"] * 6, "no plan", style="red")
            continue
        add_row(
            table,
            one.cluster,
            batch,
            time_text(one.step_s),
            f"tied {rate_text(one.per_second)}" if one in ties else rate_text(one.per_second),
            f"{100 * one.mfu:.1f} %",
            dollars_text(one.dollars_per_step),
            dollars_text(one.dollars_per_million),
            bytes_text(one.plan.prediction.peak_bytes),
            "*" if one.pareto else "",
            style="green" if one.pareto else "",
        )
    yield Padding(table, (0, 0, 0, 2), expand=False)
    yield Padding(
        Text(
            f"* no other is faster at no more cost per {unit.removesuffix('s')}, or cheaper and as "
            "fast, by over 1 % (without a price: on the same kind of device, in device time)",
            style="dim",
        ),
        (0, 0, 0, 2),
    )
    if ties:
        yield Padding(Text(f"tied: {TIED}", style="dim"), (0, 0, 0, 2))
    yield from section("how", pairs([(named(o), how_text(o)) for o in offers.offers]))
    yield from section("prices, per device and hour", pairs(_prices(offers.offers)))


def fits_parts(fits: Sequence[Fit]) -> Iterable[RenderableType]:
    """The parts of a report: the smallest cluster of each kind, its strategy, the sources of
    prices."""
    yield Text("the smallest cluster of each kind that the step fits on, predicted", style="bold")
    yield ""
    table = new_table(
        "<cluster", ">devices", ">memory", ">step", ">MFU", ">$/step", ">batch at once"
    )
    for one in fits:
        best = one.offer
        if best is None or best.plan is None:
            add_row(table, one.kind, "-", "no plan", *["-"] * 4, style="red")
            continue
        add_row(
            table,
            best.cluster,
            str(best.devices),
            bytes_text(best.plan.prediction.peak_bytes),
            time_text(best.step_s),
            f"{100 * best.mfu:.1f} %",
            dollars_text(best.dollars_per_step),
            str(one.at_once or "-"),
        )
    yield Padding(table, (0, 0, 0, 2), expand=False)
    how = [(f.kind, how_text(f.offer) if f.offer is not None else f.refused) for f in fits]
    yield from section("how", pairs(how))
    offers = tuple(f.offer for f in fits if f.offer is not None)
    if offers:
        yield from section("prices, per device and hour", pairs(_prices(offers)))


def fits_json(fits: Sequence[Fit]) -> dict[str, Any]:
    """The fits as plain data."""
    out = []
    for one in fits:
        row: dict[str, Any] = {"kind": one.kind, "batch_at_once": one.at_once}
        if one.offer is None:
            out.append({**row, "refused": one.refused})
        else:
            out.append({**row, **_offer_json(one.offer)})
    return {"fits": out}


def _prices(offers: Sequence[Offer]) -> Iterable[tuple[str, str]]:
    for kind in dict.fromkeys(o.kind for o in offers):
        price = next(o.price for o in offers if o.kind == kind)
        if price is None:
            yield kind, f"not known: give it in a file, {kind} = DOLLARS, by --price FILE"
        else:
            yield kind, f"{dollars_text(price.dollars_per_hour)}: {price.source}"


def offers_json(offers: Offers) -> dict[str, Any]:
    """The offers as plain data; unknown numbers are null. "tied": whether an offer ties with the
    fastest one; false for the fastest one."""
    ties = offers.tied_fastest
    rows = [{**_offer_json(o), **({"tied": o in ties} if o.plan else {})} for o in offers.offers]
    return {"unit": offers.unit, "offers": rows}


def _offer_json(o: Offer) -> dict[str, Any]:
    price = None
    if o.price is not None:
        price = {"dollars_per_hour": o.price.dollars_per_hour, "source": o.price.source}
    out: dict[str, Any] = {
        "cluster": o.cluster,
        "devices": o.devices,
        "batch": o.examples,
        "tokens": o.tokens,
        "price": price,
    }
    if o.plan is None:
        return {**out, "refused": o.refused}
    return {
        **out,
        "step_s": o.step_s,
        **range_json(o.plan),
        "per_second": o.per_second,
        "mfu": o.mfu,
        "dollars_per_step": _number(o.dollars_per_step),
        "dollars_per_million": _number(o.dollars_per_million),
        "peak_bytes": o.plan.prediction.peak_bytes,
        "mesh": str(o.plan.mesh),
        "strategy": o.plan.strategy,
        "recipe": str(o.plan.recipe) if o.plan.recipe != PLAIN else "",
        "pareto": o.pareto,
        "plan": o.plan.digest,
    }


def _number(value: float) -> float | None:
    return value if math.isfinite(value) else None
