"""Tests over all programs of the zoo."""

from __future__ import annotations

from collections.abc import Set
from typing import Any

import pytest

from tests.zoo.running import load


def names(first: Set[str]) -> list[Any]:
    """Parameters of such a test: those in ``first`` run always, the others with ``slow``."""
    return [pytest.param(n, marks=() if n in first else pytest.mark.slow) for n in sorted(load())]
