"""``planner calibrate``: measuring gives a profile that loads, plans and says where it is from."""

import itertools
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from costmodels import parse_cluster
from costmodels.calibrate import KernelCount
from executor.calibrate import sampling
from executor.calibrate.collective_probes import CHAIN, TOGETHER, collective_probes
from executor.calibrate.probes import probes
from executor.calibrate.sampling import Sampled, kernel_counts, run_probes
from executor.cli import calibrate as cli_calibrate
from executor.cli.main import main
from planner import load_plan, make_plan
from planner.errors import RequestError
from tests.zoo.running import compiled_quickly

pytestmark = pytest.mark.devices

MODEL = """
import jax, jax.numpy as jnp
def train_step(w, x):
    g = jax.grad(lambda w: jnp.mean((jnp.tanh(x @ w["a"]) @ w["b"]) ** 2))(w)
    return jax.tree.map(lambda p, d: p - 0.1 * d, w, g), jnp.mean(x)
def example_args():
    f = lambda *s: jax.ShapeDtypeStruct(s, jnp.float32)
    return {"a": f(64, 32), "b": f(32, 16)}, f(512, 64)
"""
TINY = 1e-4
H100 = parse_cluster("h100:8").device


def few(found: Sequence[Any]) -> tuple[Any, ...]:
    """The first probe of each family, to compile no more than needed."""
    kinds: dict[Any, Any] = {}
    for probe in found:
        key = probe.collectives[0] if hasattr(probe, "collectives") else probe
        kinds.setdefault((key.kind, getattr(key, "combined", False)), probe)
    return tuple(kinds.values())


@pytest.fixture(scope="module")
@compiled_quickly()
def measured() -> Sampled:
    """A quick look at 8 devices with a program of each family."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sampling, "probes", lambda *a: few(probes(*a)))
        patch.setattr(sampling, "collective_probes", lambda *a: few(collective_probes(*a)))
        return run_probes(parse_cluster("cpu:8"), ("float32",), rounds=2, scale=TINY)


@pytest.fixture
def profile(tmp_path: Path, measured: Sampled, monkeypatch: pytest.MonkeyPatch) -> Path:
    """What the command writes, of the quick look."""
    path = tmp_path / "profile.toml"
    monkeypatch.setattr(cli_calibrate, "run_probes", lambda *args, **kwargs: measured)
    assert main(["calibrate", "--cluster", "cpu:8", "--out", str(path), "--rounds", "2"]) == 0
    return path


def test_samples_are_of_every_family(measured: Sampled) -> None:
    kinds = {s.kind for s in measured.samples}
    assert {"product", "elementwise", "reduction", "start", "convolution", "loop"} <= kinds
    assert {"all_gather", "reduce_scatter", "all_reduce", "all_to_all", "permute"} <= kinds
    assert all(s.seconds > 0 and (s.kernels or s.collectives) for s in measured.samples)


def test_samples_are_medians_of_the_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sampling, "probes", lambda *a: probes(*a)[-4:-2])
    ticks = itertools.accumulate(itertools.cycle([0.0, 3.0]))  # a run takes 3 s, always
    found = run_probes(
        parse_cluster("cpu:1"), ("float32",), rounds=3, scale=TINY, clock=lambda: next(ticks)
    )
    assert {s.seconds for s in found.samples} == {3.0}
    assert found.noise == 0.0


def test_a_profile_loads_and_plans(capsys: pytest.CaptureFixture[str], profile: Path) -> None:
    said = tomllib.loads(profile.read_text())["profile"]
    assert (said["device_name"], said["jax"]) == ("cpu", jax.__version__)
    assert said["date"].startswith("20") and said["residuals"]
    assert "worst" in capsys.readouterr().out
    model = profile.parent / "model.py"
    model.write_text(MODEL)
    files = [profile.parent / f"{k}.json" for k in range(3)]
    asked = (
        ["--profile", str(profile)],
        ["--cluster", str(profile)],
        ["--cluster", "cpu:8", "--profile", str(profile)],
    )
    for options, file in zip(asked, files, strict=True):
        assert main(["inspect", str(model), *options, "--save", str(file)]) == 0
    assert files[0].read_bytes() == files[1].read_bytes()  # the same profile, the same plan
    assert load_plan(files[2]).cluster == f"{profile}:8"
    assert load_plan(files[2]).prediction == load_plan(files[0]).prediction
    assert main(["verify", str(model), "--profile", str(profile), "--mesh", "data=8"]) == 0
    assert main(["inspect", str(model), "--profile", str(profile), "--cluster", "h100:8"]) == 2
    assert "is of cpu" in capsys.readouterr().err


def test_the_step_start_is_in_the_prediction(profile: Path) -> None:
    start = parse_cluster(str(profile)).device.step_latency_s
    x = jax.ShapeDtypeStruct((16, 16), "float32")
    plan = make_plan(lambda x: x, x, cluster=str(profile))
    assert plan.prediction.step_s == pytest.approx(start, rel=1e-3)


def test_kernel_counts_are_the_planners() -> None:
    x, w = jax.ShapeDtypeStruct((8, 32), "float32"), jax.ShapeDtypeStruct((32, 16), "float32")
    counts = kernel_counts(lambda x, w: jnp.tanh(x @ w), (x, w), H100)
    (product,) = [k for k in counts if k.kind == "matmul"]
    nbytes = 4.0 * (8 * 32 + 32 * 16 + 8 * 16)
    assert product == KernelCount("matmul", "float32", 2.0 * 8 * 32 * 16, nbytes, 4.0 * 8 * 16, 1.0)
    image, window = jax.ShapeDtypeStruct((2, 8, 8, 4), "float32"), (3, 3, 4, 8)
    counts = kernel_counts(
        lambda x, w: jax.lax.conv(x.transpose(0, 3, 1, 2), w.transpose(3, 2, 0, 1), (1, 1), "SAME"),
        (image, jax.ShapeDtypeStruct(window, "float32")),
        H100,
    )
    assert [k.flops for k in counts if k.kind == "convolution"] == [2.0 * 2 * 8 * 8 * 8 * 36]


def test_probes_grow_with_the_device() -> None:
    small, large = (parse_cluster(f"{kind}:8").device for kind in ("cpu", "h100"))
    for one, other in zip(probes(small, ["float32"]), probes(large, ["float32"]), strict=True):
        assert one.kind == other.kind
    assert (
        probes(large, ["float32"])[1].shapes[0].size
        > 100 * probes(small, ["float32"])[1].shapes[0].size
    )


@pytest.mark.parametrize(
    ("text", "groups"),
    [("cpu:1", []), ("cpu:7", [7]), ("cpu:8", [2, 4, 8]), ("v5p:2x2x4", [2, 8, 16])],
)
def test_groups_of_collectives(text: str, groups: list[int]) -> None:
    found = collective_probes(parse_cluster(text))
    assert sorted({p.mesh_shape[1] for p in found}) == groups
    for probe in found:
        (count,) = probe.collectives
        assert count.count == (TOGETHER if count.combined else CHAIN)
        assert count.payload_bytes % (4 * probe.mesh_shape[1]) == 0


def test_too_few_devices() -> None:
    with pytest.raises(RequestError, match="host_platform_device_count=16"):
        cli_calibrate.check_present(parse_cluster("cpu:16"))
    with pytest.raises(RequestError, match="--cluster cpu:8"):
        cli_calibrate.check_present(parse_cluster("h100:8"))


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (["--cluster", "cpu:0"], "positive"),
        (["--cluster", "nothing:8"], "unknown device"),
        (["--cluster", "cpu:64"], "64 devices, 8 are present"),
        (["--cluster", "v5p:2x2x2"], "--cluster cpu:8"),
        (["--out", "profile.json"], "ends in .toml"),
        (["--out", "no/such/folder/profile.toml"], "no folder"),
    ],
)
def test_requests_that_cannot_be_met(
    options: list[str], told: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    out = ["--out", str(tmp_path / "profile.toml")] if "--out" not in options else []
    assert main(["calibrate", *options, *out]) == 2
    assert told in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_rounds_below_two_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["calibrate", "--rounds", "1"]) == 2
    assert "--rounds" in capsys.readouterr().err


def test_an_interrupt_leaves_no_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(*args: object, **kwargs: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(cli_calibrate, "run_probes", interrupted)
    out = tmp_path / "profile.toml"
    assert main(["calibrate", "--cluster", "cpu:8", "--out", str(out)]) == 130
    assert list(tmp_path.iterdir()) == []
    assert "interrupted" in capsys.readouterr().err
