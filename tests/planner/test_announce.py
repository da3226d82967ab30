"""Something that takes long is announced on a terminal, and nowhere else."""

from __future__ import annotations

import io
import time

import pytest
import rich.console

from planner import announce


def shown(monkeypatch: pytest.MonkeyPatch, terminal: bool, seconds: float) -> str:
    file = io.StringIO()
    console = rich.console.Console(file=file, force_terminal=terminal, width=80)
    monkeypatch.setattr(rich.console, "Console", lambda **_: console)
    monkeypatch.setattr(announce, "AFTER_S", 0.05)
    with announce.announced("planning for h100:8"):
        time.sleep(seconds)
    return file.getvalue()


@pytest.mark.long
def test_on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "planning for h100:8" in shown(monkeypatch, True, 0.6)


def test_nothing_of_what_is_over_in_a_moment(monkeypatch: pytest.MonkeyPatch) -> None:
    assert shown(monkeypatch, True, 0.0) == ""


def test_nothing_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    assert shown(monkeypatch, False, 0.3) == ""


def test_an_error_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(announce, "AFTER_S", 0.0)
    with pytest.raises(ValueError, match="inside"), announce.announced("planning"):
        raise ValueError("inside")
