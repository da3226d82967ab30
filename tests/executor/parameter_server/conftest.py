"""Small arrays are spread over all servers here, as large ones are; Ray finds the tests."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from executor.parameter_server import ParameterServer, train

SPREAD_BYTES = 16
HERE = Path(__file__).resolve().parent
EXAMPLES = HERE.parents[2] / "examples"


@pytest.fixture(autouse=True)
def spread(monkeypatch: pytest.MonkeyPatch) -> None:
    for called in (train, ParameterServer.__init__):
        assert called.__kwdefaults__ is not None
        monkeypatch.setitem(called.__kwdefaults__, "split_bytes", SPREAD_BYTES)


@pytest.fixture(autouse=True)
def found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", f"{HERE}{os.pathsep}{EXAMPLES}", prepend=os.pathsep)
