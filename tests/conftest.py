"""All tests see 8 virtual CPU devices and plan with every stage checked; the parallel mode is put
back after each."""

import os

FLAG = "--xla_force_host_platform_device_count=8"
if FLAG not in os.environ.get("XLA_FLAGS", "").split():
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {FLAG}".strip()
os.environ["JAX_PLATFORMS"] = "cpu"
os.environ.setdefault("MESHWRIGHT_VERIFY", "1")
FEW = "JAX_DISABLE_MOST_OPTIMIZATIONS"
os.environ[FEW] = "1"  # XLA partitions as ever
os.environ.pop("COLUMNS", None)  # pytest-xdist sets it; reports would be as wide

import pytest  # noqa: E402


@pytest.fixture(autouse=True)
def _parallel_mode():
    """Puts the process-wide parallel mode back."""
    from planner.modes import get_parallel_mode, set_parallel_mode

    before = get_parallel_mode()
    yield
    set_parallel_mode(before.mode, search=before.search)


@pytest.fixture(scope="module")
def optimized():
    """XLA optimizes as it does for users, here and in processes that are started."""
    import jax

    os.environ.pop(FEW, None)
    jax.config.update("jax_disable_most_optimizations", False)
    yield
    os.environ[FEW] = "1"
    jax.config.update("jax_disable_most_optimizations", True)


@pytest.fixture
def published_runs(monkeypatch: pytest.MonkeyPatch):
    """A table of residuals that does not change: texts of h100 and v5e in tests are by this one."""
    from costmodels import residuals

    gpu, tpu = residuals.Quantiles(59, 0.96, 1.21), residuals.Quantiles(20, 0.9, 1.1)
    split = residuals.Quantiles(12, 0.8, 1.5)
    table = residuals.Residuals(
        {
            "h100": {"data": gpu, "model": split, "stages": split},
            "gpu": {"data": gpu},
            "tpu": {"data": tpu},
            "all": {"data": gpu, "model": split},
        },
        1234,
        0.06,
    )
    monkeypatch.setattr(residuals, "published", lambda: table)
