"""How far predictions are off: the file of residuals, which runs count for what, and ties."""

from __future__ import annotations

import math
from importlib import resources

import pytest

from costmodels import ClusterError
from costmodels.residuals import (
    LEAST_ROWS,
    Interval,
    Quantiles,
    Residuals,
    interval_of,
    published,
    read_residuals,
    tied,
)

TEXT = """
[h100.data]
rows = 59
low = 0.96
high = 1.21
[order]
pairs = 1234
within = 0.06
"""


def injected(monkeypatch: pytest.MonkeyPatch, table: Residuals) -> None:
    monkeypatch.setattr("costmodels.residuals.published", lambda: table)


def test_a_file_is_read() -> None:
    found = read_residuals(TEXT, "a file")
    assert found == Residuals({"h100": {"data": Quantiles(59, 0.96, 1.21)}}, 1234, 0.06)
    assert read_residuals(TEXT.replace("0.96", "1"), "a file").of["h100"]["data"].low == 1.0


def test_the_file_of_the_package_is_read_and_is_installed() -> None:
    text = resources.files("costmodels").joinpath("residuals.toml").read_text(encoding="utf-8")
    assert read_residuals(text, "residuals.toml") == published()
    assert published().of["all"]


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("rows = 59", "rows = 0", r"\[h100.data\] rows must be a whole number from 1 on, got 0"),
        ("rows = 59", "rows = 59.0", r"\[h100.data\] rows must be a whole number"),
        ("rows = 59", "rows = true", r"\[h100.data\] rows must be a whole number"),
        ("rows = 59\n", "", r"\[h100.data\] has no rows"),
        ("rows = 59", "rows = 59\nmean = 1", r"\[h100.data\] has an unknown key 'mean'"),
        ("low = 0.96", "low = 0", r"\[h100.data\] low must be a number above 0, got 0"),
        ("low = 0.96", 'low = "a"', r"\[h100.data\] low must be a number above 0, got 'a'"),
        ("high = 1.21", "high = inf", r"\[h100.data\] high must be a number above 0, got inf"),
        ("high = 1.21", "high = nan", r"\[h100.data\] high must be a number above 0, got nan"),
        ("low = 0.96", "low = 1.3", r"\[h100.data\] low must be at most high, got 1.3 and 1.21"),
        ("h100.data", "h10.data", r"unknown table \[h10\]"),
        ("h100.data", "h100.tensor", r"unknown table \[h100.tensor\]; expected one of: data, "),
        ("[h100.data]", "[h100]\ndata = 3\n[gpu.data]", r"\[h100.data\] must be a table"),
        ("[h100.data]", "h100 = 3\n[gpu.data]", "h100 must be a table, got 3"),
        ("[order]", "[all.model]", r"\[order\] must be a table with pairs, within; got nothing"),
        ("pairs = 1234\n", "", r"\[order\] has no pairs"),
        ("pairs = 1234", "pairs = -1", r"\[order\] pairs must be a whole number"),
        ("within = 0.06", "within = 1.5", r"\[order\] within must be below 1, got 1.5"),
        ("within = 0.06", "within = 0.06\nof = 3", r"\[order\] has an unknown key 'of'"),
        ("[h100.data]", "[h100.data", "a file: "),
    ],
)
def test_wrong_content_is_refused_in_one_line(old: str, new: str, said: str) -> None:
    assert old in TEXT
    with pytest.raises(ClusterError, match=said) as caught:
        read_residuals(TEXT.replace(old, new), "a file")
    assert str(caught.value).startswith("a file: ") and "\n" not in str(caught.value)


def quantiles(rows: int, low: float) -> Quantiles:
    return Quantiles(rows, low, 2 * low)


def test_own_runs_then_those_of_the_family_then_all(monkeypatch: pytest.MonkeyPatch) -> None:
    few = LEAST_ROWS - 1
    table = Residuals(
        {
            "h100": {"data": quantiles(LEAST_ROWS, 0.1), "model": quantiles(few, 0.2)},
            "gpu": {
                "data": quantiles(100, 0.3),
                "model": quantiles(101, 0.4),
                "stages": quantiles(few, 0.5),
            },
            "all": {
                "data": quantiles(200, 0.6),
                "model": quantiles(201, 0.7),
                "stages": quantiles(202, 0.8),
            },
        },
        10,
        0.06,
    )
    injected(monkeypatch, table)
    own = interval_of("h100", "data")
    assert own == Interval(0.1, 0.2, LEAST_ROWS, "8 published data parallel runs on h100")
    family = interval_of("h100", "model")
    assert family == Interval(0.4, 0.8, 101, "101 published model parallel runs on GPUs")
    assert interval_of("a100", "model") == family
    every = interval_of("h100", "stages")
    assert every == Interval(0.8, 1.6, 202, "202 published pipeline runs on GPUs and TPUs")
    assert interval_of("v5e", "data") is None, "no TPU has a run"
    assert interval_of("cpu", "data") is None
    assert interval_of("mychip", "data") is None and interval_of("", "data") is None


def test_tpus_are_a_family_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    table = Residuals(
        {
            "gpu": {"data": quantiles(100, 0.3)},
            "tpu": {"data": quantiles(10, 0.4)},
            "all": {"data": quantiles(110, 0.5)},
        },
        10,
        0.06,
    )
    injected(monkeypatch, table)
    found = interval_of("v5e", "data")
    assert found is not None and found.of == "10 published data parallel runs on TPUs"
    assert interval_of("v5e", "stages") is None, "no run has stages"


def test_ties(monkeypatch: pytest.MonkeyPatch) -> None:
    injected(monkeypatch, Residuals({}, 10, 0.06))
    assert tied(1.0, 1.059) and tied(1.059, 1.0) and tied(2.0, 2.0) and tied(0.0, 0.0)
    assert not tied(1.0, 1.061) and not tied(1.061, 1.0)
    for unknown in (-1.0, math.inf, math.nan):
        assert not tied(unknown, 1.0) and not tied(1.0, unknown) and not tied(unknown, unknown)
