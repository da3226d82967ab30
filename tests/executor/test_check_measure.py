"""``check``: differences and collectives; ``measure``: a median."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from executor import check, compile_plan, measure, parallelize
from executor.verify.hlo.collectives import text_counts
from planner import make_plan
from tests.executor.executor_steps import batch_of, large_args, plain_state, plain_step

pytestmark = [pytest.mark.devices, pytest.mark.usefixtures("optimized")]
P = jax.sharding.PartitionSpec

CANNED = """\
HloModule jit_step, entry_computation_layout={(f32[4]{0})->f32[4]{0}}

%region_0.1 (a: f32[], b: f32[]) -> f32[] {
  ROOT %add.9 = f32[] add(%a, %b)
}

%body (p: (s32[], f32[4])) -> (s32[], f32[4]) {
  %all-gather.3 = f32[8,4]{1,0} all-gather(%x), channel_id=1, dimensions={0}
}

ENTRY %main {
  %all-reduce.1 = (f32[], f32[4]{0}, f32[4]{0}, f32[2]{0}, f32[2]{0}, /*index=5*/f32[8]{0}) \
all-reduce(%a, %b, %c, %d, %e, /*index=5*/%f), channel_id=2, to_apply=%region_0.1
  %gte = f32[] get-tuple-element(%all-reduce.1), index=0
  %all-reduce-start.2 = f32[4]{0} all-reduce-start(%gte), to_apply=%region_0.1
  %all-reduce-done.2 = f32[4]{0} all-reduce-done(%all-reduce-start.2)
  %ag-start = (f32[1]{0}, f32[8]{0}) all-gather-start(%y), dimensions={0}
  %ag-done = f32[8]{0} all-gather-done(%ag-start)
  %reduce-scatter.7 = f32[2]{0} reduce-scatter(%z), dimensions={0}, to_apply=%region_0.1
  %all-to-all.8 = (f32[1,4]{1,0}, /*index=1*/f32[1,4]{1,0}) all-to-all(%u, %v)
  %collective-permute.1 = f32[4]{0} collective-permute(%w), source_target_pairs={{0,1}}
  %not-one = f32[4]{0} add(%all-reduce.1, %all-gather.3)
  ROOT %fusion = f32[4]{0} fusion(%not-one), kind=kLoop, calls=%all-reduce-computation
}
"""


def test_collectives_of_a_module_text():
    assert text_counts(CANNED) == {
        "all_gather": 2,
        "all_reduce": 2,
        "all_to_all": 1,
        "permute": 1,
        "reduce_scatter": 1,
    }
    assert text_counts("ENTRY %main {\n  ROOT %a = f32[] add(%b, %c)\n}\n") == {}


def test_data_parallel_has_all_reduces_only():
    args = large_args()
    plan = make_plan(plain_step, *args, cluster="cpu:8", mode="DATA_PARALLEL")
    report = check(plain_step, plan, *args)
    assert report.max_abs_difference < 1e-5 and report.max_rel_difference < 1e-5
    assert set(report.planned) == set(report.compiled) == {"all_reduce"}


def test_column_then_row_parallel_has_all_reduces_only():
    args = large_args()
    pins = {"'up'": P(None, "model"), "'down'": P("model"), "'[xy]'": P("data")}
    plan = make_plan(plain_step, *args, cluster="cpu:8", mesh="data=4,model=2", shardings=pins)
    report = check(plain_step, plan, *args)
    assert report.max_abs_difference < 1e-5
    assert set(report.planned) == set(report.compiled) == {"all_reduce"}
    over_model = [r for r in plan.collectives if r.axes == ("model",)]
    assert len(over_model) == 1  # after the second matmul; its transpose needs none


def test_stand_alone_has_none():
    args = (plain_state(), batch_of())
    report = check(
        plain_step, make_plan(plain_step, *args, cluster="cpu:8", mode="STAND_ALONE"), *args
    )
    assert report.planned == report.compiled == {}
    assert report.max_abs_difference == report.max_rel_difference == 0.0


def test_arguments_survive():
    args = (plain_state(), jax.tree.map(jnp.asarray, batch_of()))
    check(plain_step, make_plan(plain_step, *args, cluster="cpu:8"), *args)
    assert not any(x.is_deleted() for x in jax.tree.leaves(args))


def test_reports_no_difference_for_keys_integers_and_shared_nans():
    def step(state, batch):
        return {"key": state["key"], "n": state["n"] + 1}, jnp.log(batch["x"] * 0 - 1)

    args = ({"key": jax.random.key(0), "n": jnp.int32(1)}, batch_of())
    report = check(step, make_plan(step, *args, cluster="cpu:8"), *args)
    assert report.max_abs_difference == 0.0


@pytest.fixture
def spoilt(monkeypatch):
    """Makes the sharded run return something else."""

    def spoil(change):
        from executor.run.interpret import ConstrainedStep

        right = ConstrainedStep.run
        depth = []

        def wrong(self, jaxpr, args):
            depth.append(1)
            outs = right(self, jaxpr, args)
            depth.pop()
            return outs if depth else [change(x) for x in outs]

        monkeypatch.setattr(ConstrainedStep, "run", wrong)

    return spoil


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("change", [1.0, np.nan, np.inf], ids=["one", "nan", "inf"])
def test_differences_are_seen(spoilt, dtype, change):
    def step(x):
        return x * 2

    x = jnp.ones((16, 8), dtype)
    plan = make_plan(step, x, cluster="cpu:8")
    spoilt(lambda y: y + jnp.asarray(change, dtype))
    report = check(step, plan, x)
    expected = 1.0 if change == 1.0 else np.inf
    assert report.max_abs_difference == expected
    assert report.max_rel_difference == expected / 2


def test_measure():
    args = (plain_state(), batch_of())
    plan = make_plan(plain_step, *args, cluster="cpu:8", mode="DATA_PARALLEL")
    calls = []
    step = compile_plan(plain_step, plan, donate_argnums=0)

    def counted(state, batch):
        calls.append(1)
        return step(state, batch)

    seconds, state = measure(counted, *args, steps=3, warmup=2)
    assert 0 < seconds < 10 and len(calls) == 5
    expected = plain_state()
    for _ in range(5):
        expected, _ = jax.jit(plain_step)(expected, args[1])
    np.testing.assert_allclose(np.asarray(state["up"]), np.asarray(expected["up"]), rtol=1e-4)


def test_measure_a_parallelized_step():
    seconds, state = measure(parallelize(plain_step), plain_state(), batch_of(), steps=1, warmup=1)
    assert seconds > 0
    assert set(state) == {"up", "down"}
