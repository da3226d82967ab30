"""``import meshwright as mw``."""

import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

import meshwright as mw


def step(w: jax.Array, x: jax.Array) -> jax.Array:
    return w - 0.1 * jax.grad(lambda w: jnp.mean((x @ w) ** 2))(w)


ARGS = (jax.ShapeDtypeStruct((64, 64), jnp.float32), jax.ShapeDtypeStruct((32, 64), jnp.float32))


def test_every_name_is_the_packages_own() -> None:
    import executor
    import planner

    assert len(set(mw.__all__)) == len(mw.__all__)
    for name in set(mw.__all__) - {"__version__", "inspect"}:
        homes = [m for m in (planner, executor) if name in m.__all__]
        assert any(getattr(mw, name) is getattr(m, name) for m in homes), name
    assert mw.shard is planner.shard
    assert mw.__version__.count(".") >= 2
    assert set(mw.__all__) <= set(dir(mw))
    with pytest.raises(AttributeError, match="has no attribute 'paralelize'"):
        mw.paralelize  # noqa: B018


def test_inspect_prints_the_plan_and_returns_it(capsys: pytest.CaptureFixture[str]) -> None:
    plan = mw.inspect(step, *ARGS, cluster="h100:8")
    said = capsys.readouterr().out
    assert isinstance(plan, mw.Plan) and plan.cluster == "h100:8"
    assert said.strip() == str(plan).strip() and plan.strategy in said


def ran(code: str, *paths: Path) -> subprocess.CompletedProcess[str]:
    root = Path(__file__).resolve().parents[1]
    begin = f"import sys; sys.path[:0] = {[*map(str, paths), str(root)]!r}\n"
    return subprocess.run(
        [sys.executable, "-c", begin + code], capture_output=True, text=True, timeout=120
    )


def test_the_import_brings_nothing_along() -> None:
    code = "import meshwright\nprint(sorted({'jax','planner','executor'} & set(sys.modules)))"
    assert ran(code).stdout.strip() == "[]"


@pytest.mark.parametrize(
    ("name", "public"),
    [
        ("planner", "make_plan"),
        ("planner", "parallelize"),
        ("planner", "inspect"),
        ("executor", "train"),
        ("costmodels", "make_plan"),
    ],
)
def test_another_package_of_that_name_is_named(tmp_path: Path, name: str, public: str) -> None:
    (tmp_path / name).mkdir()
    (tmp_path / name / "__init__.py").write_text("")
    done = ran(f"import meshwright\nmeshwright.{public}", tmp_path)
    last = done.stderr.strip().splitlines()[-1]
    assert done.returncode == 1 and last.startswith("ImportError")
    assert f"import {name}: Python found {tmp_path / name}" in last and "uninstall" in last


def test_the_command_names_it_too(tmp_path: Path) -> None:
    (tmp_path / "planner.py").write_text("")
    code = "import planner_command\nsys.argv = ['planner', 'inspect', 'm.py']\n"
    done = ran(code + "sys.exit(planner_command.main())", tmp_path)
    assert done.returncode == 2 and len(done.stderr.splitlines()) == 1
    assert f"import planner: Python found {tmp_path / 'planner.py'}" in done.stderr


def test_files_written_over_by_another_distribution_are_named(tmp_path: Path) -> None:
    root = Path(__file__).resolve().parents[1]
    for name in ("meshwright", "executor", "costmodels"):
        (tmp_path / name).symlink_to(root / name)
    (tmp_path / "planner").mkdir()
    (tmp_path / "planner" / "__init__.py").write_text("")
    code = f"import meshwright.packages as p\np.HERE = p.Path({str(tmp_path)!r})\np.NAMES = ()\n"
    done = ran(code + "import meshwright\nmeshwright.make_plan", tmp_path)
    last = done.stderr.strip().splitlines()[-1]
    assert last.startswith(f"ImportError: {tmp_path / 'planner'}") and "written over" in last


@pytest.mark.parametrize("words", [["--help"], ["--version"], []])
def test_the_help_of_the_command_imports_neither_jax_nor_a_subcommand(words: list[str]) -> None:
    code = (
        f"import sys; sys.argv = ['planner', *{words!r}]\n"
        "from planner_command import main; main()\n"
        "heavy = {'jax', 'numpy', 'rich', 'executor', 'planner.cli.commands'}\n"
        "print(sorted(heavy & set(sys.modules)), file=sys.stderr)"
    )
    done = ran(code)
    assert done.stderr.strip().endswith("[]")
    if words != ["--version"]:
        assert "verify" in done.stdout + done.stderr and "MODEL is a" in done.stdout + done.stderr


def test_every_subcommand_is_what_the_table_says() -> None:
    from planner.cli.table import EXECUTOR, PLANNER

    for entry in (*PLANNER, *EXECUTOR):
        assert entry.load().name == entry.name


def test_every_public_name_of_the_planner_is_there() -> None:
    import planner

    assert set(planner.__all__) == set(planner._HOME_OF) <= set(dir(planner))
    for name in planner.__all__:
        assert getattr(planner, name) is not None
    with pytest.raises(AttributeError, match="has no attribute 'make_plans'"):
        planner.make_plans  # noqa: B018


def test_a_parallelized_step_is_planned_with_its_own_options() -> None:
    def step(w: jax.Array, x: jax.Array) -> jax.Array:
        return w - 0.1 * jax.grad(lambda w: jnp.mean((x @ w) ** 2))(w)

    args = jnp.ones((64, 64)), jnp.ones((8, 64))
    planned = mw.parallelize(step, mode="dp", mesh="data=4,model=2", cluster="cpu:8")
    for plan in (mw.make_plan(planned, *args), mw.inspect(planned, *args)):
        assert (plan.mode, plan.cluster, str(plan.mesh)) == (
            "DATA_PARALLEL",
            "cpu:8",
            "data=4,model=2",
        )
    assert mw.make_plan(planned, *args, cluster="h100:8").cluster == "h100:8"
    assert mw.make_plan(planned, *args, mode="fsdp").inputs[0].spec.axes
    assert not planned.is_planned and "not planned yet" in repr(planned)
    planned(*args)  # what has run is planned no other way
    again = mw.make_plan(planned, *args)
    assert again == planned.plan and repr(again) in repr(planned)
    with pytest.raises(mw.RequestError, match="make_plan: no cluster given"):
        mw.make_plan(step, *args)


def test_methods_and_followers_are_planned_with_their_options_too() -> None:
    class Trainer:
        @mw.parallelize(mode="dp", cluster="cpu:8")
        def step(self, w: jax.Array, x: jax.Array) -> jax.Array:
            return w - 0.1 * jax.grad(lambda w: jnp.mean((x @ w) ** 2))(w)

    args = jnp.ones((64, 64)), jnp.ones((8, 64))
    assert mw.make_plan(Trainer().step, *args).mode == "DATA_PARALLEL"
    leader = mw.parallelize(step, mode="fsdp", cluster="cpu:8")
    follower = mw.parallelize(lambda w, x: jnp.mean(x @ w), like=leader)
    with pytest.raises(mw.MeshwrightError, match="has not been called yet"):
        mw.make_plan(follower, *args)
    leader(*args)
    plan = mw.make_plan(follower, *args)
    assert plan.mode == "DATA_PARALLEL" and plan.inputs[0].spec == leader.plan.inputs[0].spec
