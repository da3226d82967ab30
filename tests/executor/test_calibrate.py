"""``planner calibrate``: measuring gives a profile that loads, plans and says where it is from."""

import dataclasses
import itertools
import json
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from costmodels import parse_cluster
from costmodels.calibrate import KernelCount, Sample, predicted_s
from executor.calibrate import sampling
from executor.calibrate.collective_probes import CHAIN, TOGETHER, collective_probes
from executor.calibrate.probes import fused_attention, launches, probes
from executor.calibrate.resume import Rounds, compiled_in, forget
from executor.calibrate.sampling import Sampled, kernel_counts, run_probes
from executor.cli import calibrate as cli_calibrate
from executor.cli.main import main
from planner import load_plan, make_plan
from planner.errors import RequestError

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


def test_what_gpus_run_besides() -> None:
    assert [p.kind for p in fused_attention(H100)] == ["fused attention"] * 4
    chain = launches(5)
    counts = kernel_counts(chain.function, chain.shapes, H100)
    assert sum(k.kernels for k in counts) == 5 and {k.kind for k in counts} == {"matmul"}


def test_programs_no_longer_than_their_start_are_left_out() -> None:
    samples = [Sample("start", f"{s}", s) for s in (1.0, 1.4, 1.6, 9.0)]
    kept, short = sampling.long_enough(samples)
    assert [s.seconds for s in kept] == [1.6, 9.0]
    assert short == [f"start {s}: {sampling.TOO_SHORT}" for s in (1.0, 1.4)]


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


@pytest.fixture
def few_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sampling, "probes", lambda *a: probes(*a)[-4:-2])
    monkeypatch.setattr(sampling, "collective_probes", lambda *a: ())


class Stopped(Exception):
    """The run ends here."""


@pytest.mark.usefixtures("few_programs")
def test_it_goes_on_where_it_was_interrupted(tmp_path: Path) -> None:
    folder, cluster = tmp_path / "profile.toml.part", parse_cluster("cpu:1")

    def run(rounds: int, until: int = 1000) -> tuple[Sampled, int]:
        ticks = itertools.accumulate(itertools.cycle([0.0, 3.0]))
        calls = itertools.count()

        def clock() -> float:
            if next(calls) >= until:
                raise Stopped
            return next(ticks)

        found = run_probes(
            cluster, ("float32",), rounds=rounds, scale=TINY, clock=clock, folder=folder
        )
        return found, next(calls)

    each = 2 * 2  # two readings for each of two programs
    with compiled_in(folder):
        with pytest.raises(Stopped):
            run(4, until=(sampling.WARMUP + 2) * each + 1)
        kept = json.loads((folder / "rounds.json").read_text())
        assert len(kept["rounds"]) == 2
        found, calls = run(4)
    assert calls == (sampling.WARMUP + 2) * each and {s.seconds for s in found.samples} == {3.0}
    assert any((folder / "compiled").iterdir())
    assert run(5)[1] == (sampling.WARMUP + 1) * each  # one more round of the same request
    cluster = parse_cluster("cpu:2")
    assert run(4)[1] == (sampling.WARMUP + 4) * each  # another request starts anew
    (folder / "rounds.json").write_text("{")
    assert Rounds(folder, {"programs": []}).done == []
    forget(folder)
    assert not folder.exists()


@pytest.mark.usefixtures("few_programs")
def test_programs_that_are_refused_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    one, other = probes(parse_cluster("cpu:1").device, ["float32"], TINY)[-4:-2]

    def broken(*args: Any) -> Any:
        raise ValueError("no such kernel\nhere")

    bad = dataclasses.replace(one, name="bad", function=broken)
    monkeypatch.setattr(sampling, "probes", lambda *a: (bad, other))
    found = run_probes(parse_cluster("cpu:1"), ("float32",), rounds=2, scale=TINY)
    assert [s.name for s in found.samples] == [other.name]
    assert len(found.left_out) == 1 and "no such kernel" in found.left_out[0]


def test_a_check_writes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    known = parse_cluster("cpu:8")
    work = KernelCount("vector", "float32", 0.0, 1e9)
    right = Sample("elementwise", "x", 1.0, (work,))
    right = dataclasses.replace(right, seconds=predicted_s(known, right))
    far = dataclasses.replace(right, kind="loop", seconds=3 * right.seconds)
    for samples, code in (((right,), 0), ((right, far), 1)):
        sampled = Sampled(samples, 0.0, ("gather y: too short",))
        monkeypatch.setattr(cli_calibrate, "run_probes", lambda *a, s=sampled, **k: s)
        out = tmp_path / "profile.toml"
        assert main(["calibrate", "--cluster", "cpu:8", "--check", "--out", str(out)]) == code
        said = capsys.readouterr().out
        assert "1.00" in said and "left out: gather y: too short" in said
        assert ("more than 50% off: loop" in said) == bool(code)
    assert list(tmp_path.iterdir()) == []
    assert main(["calibrate", "--cluster", "v5e:2x2", "--check", "--compiler"]) == 2
    assert "--compiler runs nothing" in capsys.readouterr().err


def test_the_measured_h100_is_a_cluster() -> None:
    path = Path(__file__).parents[2] / "benchmarks" / "profiles" / "h100-80gb-hbm3.toml"
    device = parse_cluster(f"{path}:8").device
    assert 2e12 < device.memory_bytes_per_s < 3.35e12  # below what the chip has
    assert device.matmul_flops_per_s("bfloat16") * device.matmul_efficiency < 9.89e14
    assert tomllib.loads(path.read_text())["profile"]["device_name"] == "NVIDIA H100 80GB HBM3"
