"""The fit finds constants that are known, and its file is a cluster that has them."""

import dataclasses
import tomllib
from pathlib import Path

import numpy as np
import pytest

from costmodels import ClusterError, parse_cluster, with_profile
from costmodels.calibrate import (
    Calibration,
    CollectiveCount,
    CopyCount,
    KernelCount,
    Residual,
    Sample,
    fit,
    predicted_s,
    residuals,
)
from costmodels.files import write_whole
from costmodels.profile import Origin, profile_text

KINDS = ("all_gather", "all_reduce", "all_to_all", "permute")
ORIGIN = Origin('NVIDIA "H100"', "x86", "2026-01-02T03:04:05+00:00", {"jax": "0.10.2"}, 15, 0.0123)


def programs(count: int) -> list[Sample]:
    """Products, elementwise work, starts, and collectives over 2 and all devices."""
    out = []
    for side in (64, 256, 512, 1024):
        for inner in (side // 4, side):
            for dtype in ("float32", "bfloat16"):
                flops, out_bytes = 2.0 * side * side * inner, 4.0 * side * side
                work = KernelCount("matmul", dtype, flops, 2 * out_bytes, out_bytes)
                out.append(Sample("product", f"{side} {inner} {dtype}", 0.0, (work,) * 4))
        bound = KernelCount("vector", "float32", 1e2 * side, 64.0 * side * side)
        heavy = KernelCount("vector", "float32", 64.0 * side * side, 4.0 * side * side)
        out.append(Sample("elementwise", f"{side} bytes", 0.0, (bound,)))
        out.append(Sample("elementwise", f"{side} flop", 0.0, (heavy,)))
        image = KernelCount("convolution", "float32", 2e3 * side * side, 4.0 * side * side)
        out.append(Sample("convolution", f"{side}", 0.0, (image,)))
    for starts in (1.0, 40.0, 160.0):
        tiny = KernelCount("vector", "float32", 0.0, 0.0, kernels=starts)
        out.append(Sample("start", f"{starts}", 0.0, (tiny,)))
    for group in sorted({2, count}):
        for nbytes in (4e3, 1e5, 4e6):
            for kind in KINDS:
                one = CollectiveCount(kind, (count // group, group), (1,), nbytes, 4)  # type: ignore[arg-type]
                out.append(Sample(kind, f"{nbytes} in {group}", 0.0, (), (one,)))
            many = CollectiveCount("all_reduce", (count // group, group), (1,), nbytes, 24, True)
            out.append(Sample("all_reduce", f"24 of {nbytes} in {group}", 0.0, (), (many,)))
    return out


def truth_of(text: str, tmp_path: Path) -> str:
    """A cluster file with other constants than the catalog's."""
    kind, _, count = text.partition(":")
    path = tmp_path / "truth.toml"
    path.write_text(
        f'[cluster]\ndevice = "{kind}"\ndevices_per_node = {count}\n'
        "[device]\nmemory_bytes_per_s = 3.1e10\nvector_flops_per_s = 4.3e10\n"
        "matmul_efficiency = 1.0\nmemory_efficiency = 1.0\nconvolution_efficiency = 0.35\n"
        "matmul_store = 2.5\nkernel_latency_s = 2.3e-5\nstep_latency_s = 4.1e-4\n"
        "combined_latency = 0.6\n"
        "[peak_flops_per_s]\nfloat32 = 9.1e10\nbfloat16 = 6.3e10\n"
        "[intra_node]\nbytes_per_s = 4.7e8\nefficiency = 1.0\nlatency_s = 1.3e-5\n"
        "startup_s = 7.1e-5\nin_switch_efficiency = 0.0\n"
    )
    return str(path)


def timed(cluster: str, samples: list[Sample], noise: float) -> list[Sample]:
    """The programs with the times of a cluster, each off by a random factor."""
    rng, known = np.random.default_rng(0), parse_cluster(cluster)
    return [
        dataclasses.replace(s, seconds=predicted_s(known, s) * float(np.exp(noise * x)))
        for s, x in zip(samples, rng.standard_normal(len(samples)), strict=True)
    ]


FITTED = (
    [("device", key) for key in "memory_bytes_per_s vector_flops_per_s matmul_store".split()]
    + [("device", key) for key in "kernel_latency_s step_latency_s combined_latency".split()]
    + [("device", "convolution_efficiency")]
    + [("peak_flops_per_s", dtype) for dtype in ("float32", "bfloat16")]
    + [("intra_node", key) for key in ("bytes_per_s", "latency_s", "startup_s")]
)


@pytest.mark.parametrize(("noise", "within"), [(0.0, 2e-2), (0.03, 0.15)])
def test_known_constants_are_found(noise: float, within: float, tmp_path: Path) -> None:
    truth = truth_of("cpu:8", tmp_path)
    expected = tomllib.loads(Path(truth).read_text())
    found = fit("cpu:8", timed(truth, programs(8), noise)).tables()
    for table, key in FITTED:
        assert found[table][key] == pytest.approx(expected[table][key], rel=within), key


def test_residuals_are_those_of_the_noise(tmp_path: Path) -> None:
    samples = timed(truth_of("cpu:8", tmp_path), programs(8), 0.05)
    found = fit("cpu:8", samples)
    assert [r.kind for r in found.residuals] == list(dict.fromkeys(s.kind for s in samples))
    assert sum(r.samples for r in found.residuals) == len(samples)
    assert max(r.median for r in found.residuals) < 0.1
    assert all(0.0 < r.median <= r.worst < 0.4 for r in found.residuals)


def test_one_wild_sample_bends_little(tmp_path: Path) -> None:
    truth = truth_of("cpu:8", tmp_path)
    samples = timed(truth, programs(8), 0.0)
    samples[0] = dataclasses.replace(samples[0], seconds=20 * samples[0].seconds)
    found = fit("cpu:8", samples).tables()
    assert found["peak_flops_per_s"]["float32"] == pytest.approx(9.1e10, rel=0.02)


def test_what_no_sample_tells_stays_or_moves_along(tmp_path: Path) -> None:
    products = [
        s for s in timed(truth_of("cpu:8", tmp_path), programs(8), 0.0) if not s.collectives
    ]
    found = fit("cpu:8", products).tables()
    assert "intra_node" not in found  # achieved already
    assert found["inter_node"] == {"bytes_per_s": 1e9, "efficiency": 1.0}  # as in the catalog
    peaks = found["peak_flops_per_s"]
    moved = np.sqrt(peaks["float32"] / 1.6e11 * peaks["bfloat16"] / 0.8e11)
    assert peaks["float64"] == pytest.approx(0.8e11 * moved, rel=1e-3)


def test_residuals_by_hand() -> None:
    cluster = parse_cluster("h100:8")
    one = KernelCount("vector", "float32", 0.0, 0.0, kernels=1.0)
    start = cluster.device.kernel_latency_s
    samples = [Sample("a", "x", 2 * start, (one,)), Sample("a", "y", start / 4, (one,))]
    assert residuals(cluster, samples) == (Residual("a", 2, pytest.approx(2**0.5), 1.75, 3.0, "y"),)


@pytest.mark.parametrize("seconds", [0.0, -1.0, float("inf"), float("nan")])
def test_times_must_be_positive(seconds: float) -> None:
    work = KernelCount("vector", "float32", 1.0, 1.0)
    with pytest.raises(ValueError, match="positive"):
        fit("cpu:8", [Sample("a", "x", seconds, (work,))])
    with pytest.raises(ValueError, match="without collectives"):
        fit("cpu:8", [])


@pytest.mark.long
@pytest.mark.parametrize("text", ["cpu:8", "h100:8", "v5p:2x2x2", "v5e:2x4+2"])
def test_a_profile_is_a_cluster_with_the_fitted_constants(text: str, tmp_path: Path) -> None:
    samples = timed(truth_of("cpu:8", tmp_path), programs(8), 0.02)
    found = fit(text, samples)
    path = tmp_path / "profile.toml"
    write_whole(path, profile_text(text, found, ORIGIN, path.name))
    cluster = parse_cluster(str(path))
    assert residuals(cluster, samples) == found.residuals
    given = parse_cluster(text)
    assert (cluster.shape, cluster.slices) == (given.shape, given.slices)
    said = tomllib.loads(path.read_text())["profile"]
    assert said["device_name"] == ORIGIN.device_name and said["date"] == ORIGIN.date
    assert (said["jax"], said["rounds"], said["noise"]) == ("0.10.2", 15, 0.012)
    assert [r["kind"] for r in said["residuals"]] == [r.kind for r in found.residuals]


def test_other_sizes_of_a_profile(tmp_path: Path) -> None:
    truth = truth_of("cpu:8", tmp_path)
    assert with_profile(truth) == truth
    other = with_profile(truth, "cpu:4")
    assert other == f"{truth}:4"
    four, eight = parse_cluster(other), parse_cluster(truth)
    assert (four.num_devices, four.text) == (4, other)
    assert four.device.vector_flops_per_s == 2 * eight.device.vector_flops_per_s
    assert four.link == eight.link
    assert parse_cluster(f"{truth}:4x2").shape == (4, 2)


def test_profiles_that_do_not_fit(tmp_path: Path) -> None:
    truth = truth_of("cpu:8", tmp_path)
    for profile, cluster, told in (
        (truth, "h100:8", "is of cpu"),
        (truth, truth, "a file"),
        ("h100:8", None, "not a .toml file"),
        (str(tmp_path / "none.toml"), None, "cannot read"),
    ):
        with pytest.raises(ClusterError, match=told):
            with_profile(profile, cluster)
    with pytest.raises(ClusterError, match="bad shape"):
        parse_cluster(f"{truth}:4xtwo")


def test_an_interrupted_write_leaves_what_was_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "profile.toml"
    write_whole(path, "before")

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("costmodels.files.os.replace", interrupt)
    with pytest.raises(KeyboardInterrupt):
        write_whole(path, "after")
    assert [p.name for p in tmp_path.iterdir()] == ["profile.toml"]
    assert path.read_text() == "before"


def test_constants_by_table() -> None:
    found = Calibration((("device", "a", 1.0), ("torus", "b", 2.0), ("device", "c", 3.0)), ())
    assert found.tables() == {"device": {"a": 1.0, "c": 3.0}, "torus": {"b": 2.0}}


def test_constants_that_are_hardly_told_stay_near_the_catalogs() -> None:
    """Programs bound by memory alone leave the start of a kernel open."""
    cluster = parse_cluster("h100:8")
    known = dataclasses.replace(cluster.device, memory_bytes_per_s=2.5e12, memory_efficiency=1.0)
    samples = []
    for nbytes in (1e9, 3e9, 1e10):
        work = KernelCount("vector", "float32", 0.0, nbytes)
        samples.append(Sample("elementwise", f"{nbytes}", nbytes / 2.5e12, (work,)))
    found = fit("h100:8", samples, frozenset({"step_latency_s"}))
    constants = {(table, key): value for table, key, value in found.constants}
    assert constants["device", "memory_bytes_per_s"] == pytest.approx(2.5e12, rel=0.02)
    start = constants.get(("device", "kernel_latency_s"), known.kernel_latency_s)
    assert start == pytest.approx(known.kernel_latency_s, rel=0.5)
    assert "device.overlap" in found.kept and "device.step_latency_s" in found.kept
    assert "device.memory_bytes_per_s" not in found.kept


def test_copies_to_the_host_tell_its_link() -> None:
    copies = [
        Sample("host", f"{n}", 2e-5 + n / 4e10, copies=(CopyCount(n),)) for n in (1e5, 1e7, 1e9)
    ]
    work = KernelCount("vector", "float32", 0.0, 1e9)
    samples = [*copies, Sample("elementwise", "x", 4e-4, (work,))]
    found = fit("h100:1", samples, frozenset({"step_latency_s"})).tables()["host"]
    assert found["bytes_per_s"] == pytest.approx(4e10, rel=0.02)
    assert found["latency_s"] == pytest.approx(2e-5, rel=0.05)
    with pytest.raises(ValueError, match="without collectives"):
        fit("h100:1", copies)
