"""What a runtime keeps of a device's memory is no room for a plan."""

import types

import jax
import jax.numpy as jnp
import pytest

from costmodels import AnalyticCostModel, ClusterError, known_kinds, parse_cluster
from executor.run.mesh import detected_memory
from planner import make_plan
from planner.errors import RequestError
from planner.plan.plan import plan_from_json

SHAPES = [jax.ShapeDtypeStruct(s, jnp.float32) for s in ((1024, 1024), (4096, 1024))]


def plan(**options):
    return make_plan(lambda w, x: jnp.tanh(x @ w), *SHAPES, **options)


@pytest.mark.parametrize(
    ("cluster", "limit", "device"),
    [("h100:8", 60e9, 80e9), ("v5p:2x2x1", 91.2e9, 95e9), ("cpu:8", 2e9, 2e9)],
)
def test_the_default_limit_leaves_the_reserve(cluster, limit, device):
    found = plan(cluster=cluster).prediction
    assert (found.limit_bytes, found.device_bytes) == (limit, device)


def test_the_plan_shows_the_reserve():
    assert "60.0 GB (80.0 GB less a reserve of 25.0 %)" in " ".join(
        str(plan(cluster="h100:8")).split()
    )
    assert "reserve" not in str(plan(cluster="cpu:8"))


def test_a_given_limit_is_taken_as_given():
    found = plan(cluster="h100:8", memory="79GB")
    assert (found.prediction.limit_bytes, found.prediction.device_bytes) == (79e9, 0.0)
    assert "reserve" not in str(found)
    assert plan_from_json(found.to_json()) == found


@pytest.mark.parametrize("kind", known_kinds())
def test_every_kind_has_a_reserve_of_less_than_half(kind):
    device = parse_cluster(f"{kind}:1").device
    assert (
        0.5 * device.memory_bytes < AnalyticCostModel(parse_cluster(f"{kind}:1")).memory_limit_bytes
    )
    assert device.usable_bytes <= device.memory_bytes


def test_a_profile_may_say_another_reserve(tmp_path):
    file = tmp_path / "own.toml"
    file.write_text('[cluster]\ndevice = "h100"\n[device]\nmemory_reserve = 0.1\n')
    assert parse_cluster(str(file)).device.usable_bytes == 72_000_000_000
    file.write_text('[cluster]\ndevice = "h100"\n[device]\nmemory_reserve = 1.0\n')
    with pytest.raises(ClusterError, match="memory_reserve must be at least 0 and below 1"):
        parse_cluster(str(file))


GPU = [types.SimpleNamespace(platform="gpu")]


@pytest.mark.parametrize("name", ["XLA_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_MEM_FRACTION"])
def test_the_share_that_jax_is_given_is_the_limit(monkeypatch, name):
    monkeypatch.setenv(name, "0.9")
    assert detected_memory("h100:8", GPU) == pytest.approx(72e9)
    assert detected_memory("cpu:8") is None
    monkeypatch.setenv(name, "90%")
    with pytest.raises(RequestError, match=f"{name}='90%'"):
        detected_memory("h100:8", GPU)


def test_without_the_variable_the_catalog_decides(monkeypatch):
    monkeypatch.delenv("XLA_CLIENT_MEM_FRACTION", raising=False)
    monkeypatch.delenv("XLA_PYTHON_CLIENT_MEM_FRACTION", raising=False)
    assert detected_memory("h100:8", GPU) is None
