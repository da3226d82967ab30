"""Exported modules: on their own, and the plan's own collectives."""

from __future__ import annotations

import builtins
import dataclasses
import dis
import importlib
import itertools
import re
import subprocess
import sys
import types
from collections import Counter
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractMesh, AxisType
from jax.sharding import PartitionSpec as P

from executor import compile_plan
from executor.cli import main as cli
from executor.run.export import python_text
from executor.verify.hlo.collectives import read_module
from executor.verify.shardy import lower_abstractly, shardy_collectives
from planner import make_plan, shard
from planner.graph.trace import abstract, trace
from planner.plan.compiled.lowering import STEP_BY_STEP, Lowering
from planner.plan.plan import Plan, plan_from_json

pytestmark = pytest.mark.usefixtures("optimized")

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
ALL = ("mlp", "gpt", "gpt_linen_scan", "resnet", "moe", "lstm")
QUICK = {("mlp", "cpu:8"), ("mlp", "h100:8"), ("gpt_linen_scan", "h100:8"), ("moe", "cpu:8")}
"""Unrolled, scanned and routed; the others are left to ``make test-all``."""


def example(name: str, monkeypatch: pytest.MonkeyPatch) -> tuple[Any, Any]:
    monkeypatch.syspath_prepend(str(EXAMPLES))
    module = importlib.import_module(name)
    return module.train_step, module.example_args()


def exported(plan: Plan) -> dict[str, Any]:
    """The namespace of the module that a saved plan is exported as."""
    text = python_text(plan_from_json(plan.to_json()))
    assert not re.search(r"^\s*(from|import) (planner|executor|costmodels)", text, re.M)
    space: dict[str, Any] = {"__name__": "sharded"}
    exec(compile(text, "sharded.py", "exec"), space)
    return space


def global_names(code: types.CodeType) -> set[str]:
    """Global names that some code and the code inside it reads."""
    names = {i.argval for i in dis.get_instructions(code) if i.opname == "LOAD_GLOBAL"}
    inner = (c for c in code.co_consts if isinstance(c, types.CodeType))
    return names.union(*(global_names(c) for c in inner))


def test_the_module_lacks_no_name() -> None:
    x = jax.ShapeDtypeStruct((8, 8), np.float32)
    plan = make_plan(lambda x: x @ x, x, cluster="cpu:8", mesh="data=8")
    text, space = python_text(plan), exported(plan)
    missing = global_names(compile(text, "sharded.py", "exec")) - set(space) - set(dir(builtins))
    assert not missing


def by_shardy(lowered: Any) -> Counter[Any]:
    found: Counter[Any] = Counter()
    for item in shardy_collectives(lowered):
        found[item.kind, item.axes] += round(item.count * item.payload_bytes)
    return found


def both_by_shardy(step: Any, args: Any, plan: Plan) -> tuple[Counter[Any], Counter[Any]]:
    """Collectives of (the plan, its exported module)."""
    mesh = AbstractMesh(
        plan.mesh.sizes, plan.mesh.names, axis_types=(AxisType.Auto,) * len(plan.mesh.sizes)
    )
    ours = lower_abstractly(trace(step, abstract(args)), plan, donate_argnums=0)
    jitted = exported(plan)["shard_step"](step, *args, mesh=mesh, donate_argnums=0)
    return by_shardy(ours), by_shardy(jitted.trace(*args).lower(lowering_platforms=("cpu",)))


@pytest.mark.parametrize(
    ("name", "cluster"),
    [
        pytest.param(*pair, marks=() if pair in QUICK else pytest.mark.slow)
        for pair in itertools.product(ALL, ("cpu:8", "h100:8"))
    ],
)
def test_same_collectives_as_the_plan(
    name: str, cluster: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    step, args = example(name, monkeypatch)
    plan = make_plan(step, *args, cluster=cluster, search="recursive_programming")
    ours, theirs = both_by_shardy(step, args, plan)
    assert ours == theirs and sum(ours.values()) > 0


def test_shardings_of_arguments_alone_are_not_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    """Why the module carries the walk: without it the comparison above can fail."""
    step, args = example("mlp", monkeypatch)
    plan = make_plan(step, *args, cluster="cpu:8", search="recursive_programming")
    space = exported(plan)
    space["INSIDE"] = ()
    mesh = AbstractMesh(
        plan.mesh.sizes, plan.mesh.names, axis_types=(AxisType.Auto,) * len(plan.mesh.sizes)
    )
    bare = space["shard_step"](step, *args, mesh=mesh, donate_argnums=0)
    ours = by_shardy(lower_abstractly(trace(step, abstract(args)), plan, donate_argnums=0))
    assert ours != by_shardy(bare.trace(*args).lower(lowering_platforms=("cpu",)))


@pytest.mark.devices
@pytest.mark.parametrize(
    "name", ["mlp", *(pytest.param(name, marks=pytest.mark.slow) for name in ALL[1:])]
)
def test_compiled_module_has_the_same_collectives(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    step, args = example(name, monkeypatch)
    plan = make_plan(step, *args, cluster="cpu:8", search="recursive_programming")
    ours = compile_plan(step, plan, donate_argnums=0).prepare(*args).jitted.lower(*args)
    theirs = exported(plan)["shard_step"](step, *args, donate_argnums=0).lower(*args)
    found = [read_module(x.compile().as_text()).by_kind() for x in (ours, theirs)]
    assert found[0] == found[1] and found[0]


WITHOUT_US = """
import sys
for name in ("planner", "executor", "costmodels"):
    sys.modules[name] = None  # importing it fails
import jax, jax.numpy as jnp, numpy as np
import sharded

def step(w, x):
    def loss(w):
        def body(h, row):
            return jnp.tanh(h @ row), None
        h, _ = jax.lax.scan(body, x @ w["a"], w["layers"])
        return jnp.mean(jax.checkpoint(lambda h: jnp.sin(h @ w["b"]))(h) ** 2)
    value, g = jax.value_and_grad(loss)(w)
    return jax.tree.map(lambda p, d: p - 0.1 * d, w, g), value

key = jax.random.split(jax.random.key(0), 4)
w = {"a": jax.random.normal(key[0], (64, 256)), "b": jax.random.normal(key[1], (256, 64)),
     "layers": jax.random.normal(key[2], (3, 256, 256)) / 16}
x = jax.random.normal(key[3], (128, 64))
mesh = sharded.make_mesh()
run = sharded.shard_step(step, w, x, mesh=mesh)
got = run(*jax.device_put((w, x), sharded.in_shardings(mesh, w, x)))
want = jax.jit(step)(w, x)
for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want)):
    np.testing.assert_allclose(a, b, rtol=2e-5, atol=2e-5)
for a, s in zip(jax.tree.leaves(got), jax.tree.leaves(sharded.out_shardings(mesh, step, w, x))):
    assert a.sharding.is_equivalent_to(s, a.ndim), (a.sharding, s)
try:
    sharded.shard_step(lambda w, x: step(w, x * 2.0), w, x)(w, x)
except ValueError as error:
    assert "operation" in str(error) and "export" not in str(error), error
else:
    raise SystemExit("another step was taken")
print("equal")
"""


def _loop_step(w: Any, x: Any) -> Any:
    def loss(w: Any) -> Any:
        def body(h: Any, row: Any) -> Any:
            return jnp.tanh(h @ row), None

        h, _ = jax.lax.scan(body, x @ w["a"], w["layers"])
        return jnp.mean(jax.checkpoint(lambda h: jnp.sin(h @ w["b"]))(h) ** 2)

    value, g = jax.value_and_grad(loss)(w)
    return jax.tree.map(lambda p, d: p - 0.1 * d, w, g), value


@pytest.mark.devices
def test_runs_where_meshwright_is_not_installed(tmp_path: Path) -> None:
    def f(*shape: int) -> Any:
        return jax.ShapeDtypeStruct(shape, jnp.float32)

    w = {"a": f(64, 256), "b": f(256, 64), "layers": f(3, 256, 256)}
    pins = {r"layers": P(None, "data", "model"), r"\['a'\]": P(None, "model"), r"^\[1\]": P("data")}
    plan = make_plan(
        _loop_step, w, f(128, 64), cluster="cpu:8", mesh="data=4,model=2", shardings=pins
    )
    plan.save(tmp_path / "plan.json")
    out = tmp_path / "sharded.py"
    assert (
        cli.main(["export", str(tmp_path / "plan.json"), "--as", "python", "--out", str(out)]) == 0
    )
    (tmp_path / "use.py").write_text(WITHOUT_US)
    done = subprocess.run(
        [sys.executable, "use.py"], cwd=tmp_path, capture_output=True, text=True, timeout=240
    )
    assert done.stdout == "equal\n", done.stderr[-2000:]


def test_marks_become_constraints_of_jax() -> None:
    def marked(mark: Any) -> Any:
        return lambda w, x: jnp.tanh(mark(x @ w)) @ w.T

    args = (jax.ShapeDtypeStruct((64, 64), np.float32),) * 2
    ours = marked(lambda x: shard(x, "data"))
    plan = make_plan(ours, *args, cluster="cpu:8", mesh="data=8")
    space = exported(plan)
    assert "marks by planner.shard, 1 in" in space["__doc__"]
    mesh = AbstractMesh((8,), ("data",), axis_types=(AxisType.Auto,))
    sharding = jax.sharding.NamedSharding(mesh, P("data"))
    plain = marked(lambda x: jax.lax.with_sharding_constraint(x, sharding))
    step = space["shard_step"](plain, *args, mesh=mesh)
    lowered = step.trace(*args).lower(lowering_platforms=("cpu",))
    expected = lower_abstractly(trace(ours, args), plan)
    assert by_shardy(lowered) == by_shardy(expected)


def test_what_the_module_leaves_out_is_said() -> None:
    x = jax.ShapeDtypeStruct((8, 8), np.float32)
    plan = make_plan(lambda x: x @ x, x, cluster="cpu:8", mesh="data=8")
    assert "left out" not in exported(plan)["__doc__"]
    assert (
        "Transposes beside products stand where the program has them" in exported(plan)["__doc__"]
    )
    plain = dataclasses.replace(plan, lowering=Lowering())
    assert "Transposes" not in exported(plain)["__doc__"]
    options = (("xla_cpu_enable_fast_math", "true"),)
    other = dataclasses.replace(plan, lowering=STEP_BY_STEP, compiler_options=options)
    said = exported(other)["__doc__"]
    assert "lowering (staged scattered turned) is left out" in said
    assert "    xla_cpu_enable_fast_math=true\n" in said


def test_command_prints_and_refuses(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    x = jax.ShapeDtypeStruct((8, 8), np.float32)
    plan = make_plan(lambda x: x @ x, x, cluster="cpu:8", mesh="data=8")
    path = tmp_path / "plan.json"
    plan.save(path)
    for form in ("partition-specs", "logical-rules", "python"):
        assert cli.main(["export", str(path), "--as", form]) == 0
        compile(capsys.readouterr().out, form, "exec")
    assert cli.main(["export", str(tmp_path / "none.json"), "--as", "python"]) == 2
    assert "none.json" in capsys.readouterr().err
    assert cli.main(["export", str(path), "--as", "yaml"]) == 2
    assert "partition-specs" in capsys.readouterr().err
    missing = str(tmp_path / "no" / "x.py")
    assert cli.main(["export", str(path), "--as", "python", "--out", missing]) == 2
    assert "cannot write" in capsys.readouterr().err
