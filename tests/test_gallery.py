"""Models of published packages are planned, split, and give the unsharded step's numbers.

`make gallery` runs them at real size too. They need the extra ``gallery``.
"""

import importlib
from pathlib import Path
from typing import Any

import pytest

from tests.zoo.program import Program
from tests.zoo.running import outcome

GALLERY = Path(__file__).resolve().parents[1] / "examples" / "gallery"
NAMES = sorted(p.stem for p in GALLERY.glob("*.py") if p.stem != "training")
SLOW = frozenset(
    "diffusers_unet distrax_flow e3nn_potential haiku_resnet hf_bert hf_clip hf_llama hf_vit "
    "hf_wav2vec2 hf_whisper jax_md_potential numpyro_svi".split()
)

pytestmark = [pytest.mark.devices, pytest.mark.long]


@pytest.fixture(autouse=True)
def on_path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(GALLERY)


def tiny(name: str) -> Program:
    """A program of the gallery at its small size."""

    def build() -> tuple[Any, tuple[Any, ...]]:
        make_state, step, make_batch = importlib.import_module(name).build(False)
        return step, (make_state(), make_batch())

    return Program(name, name, build, 1e-4, "")


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=pytest.mark.slow if n in SLOW else ()) for n in NAMES]
)
def test_program_of_a_package(name: str) -> None:
    try:
        importlib.import_module(name)
    except ImportError as error:
        pytest.skip(f"the extra gallery is not installed: {error}")
    found = outcome(tiny(name), "recursive_programming")
    assert not found.fault, found
    assert not found.fallbacks, found


def test_every_program_says_where_it_would_run() -> None:
    from costmodels import parse_cluster

    for name in NAMES:
        text = (GALLERY / f"{name}.py").read_text(encoding="utf-8")
        cluster = next(x for x in text.splitlines() if x.startswith("CLUSTER = "))
        assert parse_cluster(cluster.split('"')[1]).num_devices >= 8, name
    assert len(NAMES) >= 20
