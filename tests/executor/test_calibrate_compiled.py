"""``planner calibrate --compiler``: constants from estimated cycles, nothing run."""

from __future__ import annotations

import dataclasses
import tomllib
from pathlib import Path
from typing import Any

import jax
import pytest

from costmodels import parse_cluster
from costmodels.calibrate import fit, predicted_s
from executor.calibrate import compiled as compiled_probes
from executor.calibrate.probes import Probe, gelu, products, softmax
from executor.cli import calibrate as cli_calibrate
from executor.cli.main import main
from executor.verify.aot import TPU_CLOCK_HZ
from planner.errors import RequestError

pytestmark = pytest.mark.usefixtures("optimized")

V5E = parse_cluster("v5e:2x2")
FEW = (products(256, 512, 512, "bfloat16"), gelu(64, 512), gelu(512, 512), softmax(256, 512))


@dataclasses.dataclass(frozen=True)
class _Module:
    cycles: float
    unpriced_bytes: float = 0.0


@dataclasses.dataclass(frozen=True)
class _Compiled:
    module: _Module


@pytest.fixture
def estimates(monkeypatch: pytest.MonkeyPatch) -> list[_Module]:
    """A compiler that estimates what the test says, one program after the other."""
    given: list[_Module] = []

    def few(device: Any, dtypes: Any, scale: float) -> tuple[Probe, ...]:
        return FEW

    monkeypatch.setattr(compiled_probes, "probes", few)
    monkeypatch.setattr(compiled_probes, "devices_of", lambda cluster: jax.devices("cpu"))
    monkeypatch.setattr(compiled_probes, "compile_function", lambda *_: _Compiled(given.pop(0)))
    return given


def test_seconds_are_cycles_over_the_clock(estimates: list[_Module]) -> None:
    estimates += [_Module(1.5e6), _Module(3e6), _Module(1e6, unpriced_bytes=1.0), _Module(6e6)]
    samples = compiled_probes.compile_probes(V5E).samples
    assert TPU_CLOCK_HZ["v5e"] == 1.5e9
    assert [s.seconds for s in samples] == [1e-3, 2e-3, 4e-3]  # the one with gathers is left out
    assert [s.kind for s in samples] == ["product", "elementwise", "reduction"]


def test_the_fit_comes_closer_and_leaves_what_is_untold(estimates: list[_Module]) -> None:
    estimates += [_Module(c) for c in (4e6, 1.1e6, 8e6, 9e6)]
    samples = compiled_probes.compile_probes(V5E).samples
    twice = [dataclasses.replace(s, seconds=2 * predicted_s(V5E, s)) for s in samples]
    found = fit("v5e:2x2", twice, compiled_probes.UNTOLD)  # a device of half the speed
    assert all(r.worst < 0.02 for r in found.residuals)
    assert not {key for _, key, _ in found.constants} & compiled_probes.UNTOLD


def test_the_command_writes_a_profile(
    estimates: list[_Module],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    estimates += [_Module(c) for c in (4e6, 1.1e6, 8e6, 9e6)]
    known = cli_calibrate.metadata.version
    monkeypatch.setattr(
        cli_calibrate.metadata, "version", lambda name: "9.9" if name == "libtpu" else known(name)
    )
    out = tmp_path / "v5e.toml"
    assert main(["calibrate", "--compiler", "--cluster", "v5e:2x2", "--out", str(out)]) == 0
    profile = tomllib.loads(out.read_text())["profile"]
    assert profile["rounds"] == 0 and "libtpu 9.9" in profile["device_name"]
    assert parse_cluster(str(out)).device.kind == "v5e"
    assert "noise" not in capsys.readouterr().out


def test_refusals(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(RequestError, match="h100 estimates no times"):
        compiled_probes.compile_probes(parse_cluster("h100:8"))
    out = str(tmp_path / "x.toml")
    assert main(["calibrate", "--compiler", "--out", out]) == 2
    assert "--compiler wants --cluster" in capsys.readouterr().err
    assert main(["calibrate", "--compiler", "--cluster", "h100:8", "--out", out]) == 2
    assert "leave --compiler out" in capsys.readouterr().err
