"""Operations of an installed model point at the model's line, not at the user's call."""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from planner.graph.jaxpr import places
from planner.graph.trace import trace

MODEL = """
import jax.numpy as jnp

def attend(x):
    return jnp.tanh(x) * 2
"""


def installed(folder: Path, package: str) -> Any:
    """A module of an installed package."""
    file = folder / package / "llama.py"
    file.parent.mkdir()
    file.write_text(MODEL)
    spec = importlib.util.spec_from_file_location(f"{package}.llama", file)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(("package", "file"), [("models", "llama.py:5"), ("haiku", "test_places")])
def test_lines_of_installed_models(
    package: str, file: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = os.path.realpath(tmp_path) + os.sep
    others = places._installed()
    monkeypatch.setattr(places, "_installed", lambda: (here, *others))
    monkeypatch.setattr(places, "_user_code", {})
    model = installed(tmp_path, package)
    traced = trace(lambda x: model.attend(x), (jax.ShapeDtypeStruct((8,), jnp.float32),))
    assert {op.source.startswith(file) for op in traced.graph.ops} == {True}
