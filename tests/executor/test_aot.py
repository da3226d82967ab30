"""Compiling for devices that are not there."""

import os
from importlib import metadata
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from costmodels import Cluster, parse_cluster
from executor.verify import aot
from executor.verify.aot import Compiled, CompilerAbsentError, compile_step, devices_of
from executor.verify.gpu_targets import GPU_TARGETS, target_config
from planner import make_plan
from planner.errors import RequestError
from planner.graph.trace import trace
from planner.plan.plan import Plan

pytestmark = pytest.mark.usefixtures("optimized")


def installed(package: str) -> bool:
    try:
        metadata.version(package)
    except metadata.PackageNotFoundError:
        return False
    return True


needs_tpu = pytest.mark.skipif(not installed("libtpu"), reason="extra aot-tpu is not installed")
needs_gpu = pytest.mark.skipif(
    not installed("jax-cuda12-plugin"), reason="extra aot-gpu is not installed"
)

SHAPES = (
    jax.ShapeDtypeStruct((512, 256), jnp.float32),
    jax.ShapeDtypeStruct((256, 512), jnp.float32),
)


def step(x: jax.Array, w: jax.Array) -> jax.Array:
    """One step of least squares."""
    return w - 1e-3 * jax.grad(lambda w: jnp.sum(jnp.tanh(x @ w) ** 2))(w)


def compiled_for(cluster: str, mesh: str) -> tuple[Plan, Compiled]:
    plan = make_plan(step, *SHAPES, cluster=cluster, mesh=mesh, mode="DATA_PARALLEL")
    return plan, compile_step(trace(step, SHAPES), plan, parse_cluster(cluster))


def check_data_parallel(cluster: str) -> Compiled:
    """x is split eight ways, so the gradient of w is summed over all devices."""
    plan, compiled = compiled_for(cluster, "data=8")
    assert plan.inputs[0].spec.entries[0] == "data"
    (collective,) = compiled.module.collectives
    assert collective.kind == "all_reduce"
    assert collective.payload_bytes == 256 * 512 * 4
    assert collective.groups == (tuple(range(8)),)
    assert compiled.argument_bytes == (512 * 256 // 8 + 256 * 512) * 4
    assert compiled.output_bytes == 256 * 512 * 4
    assert compiled.peak_bytes >= compiled.argument_bytes + compiled.output_bytes
    return compiled


@pytest.mark.devices
def test_cpu() -> None:
    check_data_parallel("cpu:8")


def test_too_few_cpu_devices() -> None:
    with pytest.raises(RequestError, match="needs 512 virtual CPU devices"):
        devices_of(parse_cluster("cpu:512"))


@needs_tpu
def test_tpu_devices_stand_in_row_major_order() -> None:
    devices = devices_of(parse_cluster("v5p:2x4x4"))
    where = [tuple(d.coords) for d in devices]
    assert where == [(x, y, z) for x in range(2) for y in range(4) for z in range(4)]


@needs_tpu
@pytest.mark.parametrize("cluster", ["v5p:8", "v5p:2x4"])
def test_a_torus_of_fewer_dimensions(cluster: str) -> None:
    assert len(devices_of(parse_cluster(cluster))) == 8


@needs_tpu
def test_halves_of_a_chip_and_slices() -> None:
    halves = devices_of(parse_cluster("tpu7x:2x2x1x2"))
    assert [d.core_on_chip for d in halves] == [0, 1] * 4
    slices = devices_of(parse_cluster("v5e:2x4+2"))
    assert [d.slice_index for d in slices] == [0] * 8 + [1] * 8
    with pytest.raises(RequestError, match="two halves of a chip, got 4"):
        devices_of(parse_cluster("tpu7x:4x4x4"))


@needs_tpu
def test_tpu_step(capfd: pytest.CaptureFixture[str]) -> None:
    compiled = check_data_parallel("v5p:2x2x2")
    assert compiled.module.cycles > 0
    assert "Logging before" not in capfd.readouterr().err


@needs_gpu
def test_gpu_step(capfd: pytest.CaptureFixture[str]) -> None:
    check_data_parallel("h100:4x2")
    assert "cuda drivers" not in capfd.readouterr().err


@needs_gpu
def test_gpu_devices_fill_nodes() -> None:
    devices = devices_of(parse_cluster("a100:4x2"))
    assert [d.process_index for d in devices] == [0] * 4 + [1] * 4


@pytest.mark.parametrize(
    ("cluster", "extra", "package"),
    [("v5p:2x2x2", "aot-tpu", "libtpu"), ("h100:8", "aot-gpu", "jax-cuda12-plugin")],
)
def test_absent_compiler_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, cluster: str, extra: str, package: str
) -> None:
    def version(name: str) -> str:
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(aot.metadata, "version", version)
    with pytest.raises(CompilerAbsentError) as error:
        devices_of(parse_cluster(cluster))
    pinned = jax.__version__ == "0.10.2"  # by the extra
    what = f"meshwright[{extra}]'" if pinned else f"{package}=="
    assert f"pip install '{what}" in str(error.value)
    assert f"needs {package} " in str(error.value)
    assert "found none" in str(error.value)


def test_another_version_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(aot.metadata, "version", lambda name: "0.0.1")
    with pytest.raises(CompilerAbsentError, match=r"found 0\.0\.1"):
        devices_of(parse_cluster("v5p:2x2x2"))


def test_unknown_kind_names_the_known_ones() -> None:
    cluster = parse_cluster("h100:8")
    device: Any = type("Device", (), {"kind": "abacus"})()
    with pytest.raises(RequestError, match=r"abacus.*v5p.*h100"):
        devices_of(Cluster("abacus:8", device, cluster.shape, "hierarchy", cluster.link))


def test_gpu_targets_take_memory_from_the_cluster() -> None:
    for kind in set(GPU_TARGETS) & {"a100", "h100"}:
        device = parse_cluster(f"{kind}:8").device
        text = target_config(device)
        assert f"device_memory_size: {device.memory_bytes}\n" in text
        assert f"memory_bandwidth: {int(device.memory_bytes_per_s)}\n" in text


def test_quiet_keeps_native_logs_off_stderr(capfd: pytest.CaptureFixture[str]) -> None:
    with aot._quiet():
        os.write(2, b"noise from a library\n")
    os.write(2, b"ours\n")
    assert capfd.readouterr().err == "ours\n"
