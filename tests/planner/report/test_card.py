"""A plan in a notebook."""

from __future__ import annotations

import dataclasses
import sys
from html.parser import HTMLParser
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parent))

from report_cases import NASTY, deep, small


class Parsed(HTMLParser):
    """The tags in order, the text, and whether every tag is closed where it must be."""

    def __init__(self, html: str) -> None:
        super().__init__(convert_charrefs=True)
        self.open: list[str] = []
        self.tags: list[str] = []
        self.attributes: set[str] = set()
        self.words = ""
        self.feed(html)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.open.append(tag)
        self.attributes.update(name for name, _ in attrs)
        self.tags.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.words += data


@pytest.mark.long
def test_repr_is_one_line() -> None:
    plan = small().plan
    line = repr(plan)
    assert "\n" not in line and len(line) < 250
    assert plan.cluster in line and str(plan.mesh) in line


@pytest.mark.usefixtures("published_runs")
def test_the_card_says_what_the_report_says() -> None:
    plan = small().plan
    parsed = Parsed(plan._repr_html_())
    assert not parsed.open
    assert parsed.tags.count("details") == 2
    assert str(plan) in parsed.words
    for said in (plan.mode, plan.cluster, str(plan.mesh), "peak memory", "step time", "likely"):
        assert said in parsed.words


def test_the_card_stands_alone() -> None:
    plan = dataclasses.replace(small().plan, notes=(NASTY, "b", "c", "d"), strategy=f"data {NASTY}")
    html = plan._repr_html_()
    parsed = Parsed(html)
    assert not {"script", "link", "img", "style", "iframe"} & set(parsed.tags)
    assert not {"src", "href", "onload", "onclick"} & parsed.attributes
    assert NASTY in parsed.words and "1 more in the report" in parsed.words


@pytest.mark.long
def test_many_inputs_are_folded_and_the_rest_counted() -> None:
    plan = deep(24).plan
    html = plan._repr_html_()
    assert html.count("<tr>") < 80 and not Parsed(html).open
    leaf = plan.inputs[0]
    many = tuple(dataclasses.replace(leaf, path=f"[0]['{'ab' * (k + 1)}']") for k in range(60))
    assert "20 more, all smaller" in dataclasses.replace(plan, inputs=many)._repr_html_()


def test_repeated_layers_take_no_line_of_the_card() -> None:
    plan = dataclasses.replace(small().plan, notes=("operations 4 to 9: 2 equal blocks of 3", "b"))
    shown = plan._repr_html_().split("<details")[0]
    assert "equal blocks" not in shown and ">b<" in shown
