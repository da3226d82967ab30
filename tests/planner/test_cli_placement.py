"""``planner inspect --placement``: what is printed, what a file must define, what is refused."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest

from planner import load_plan, make_placement
from planner.cli.main import main
from planner.cli.steps.placement import placement_from_text
from planner.errors import RequestError

ROOT = Path(__file__).resolve().parents[2]
EXAMPLE = str(ROOT / "examples" / "embedding_hybrid.py")
Writer = Callable[[str], str]

HEAD = """
import jax, jax.numpy as jnp, optax
print("noise from the model")
f = lambda *s, dtype=jnp.float32: jax.ShapeDtypeStruct(s, dtype)
"""
LOSS = """
def loss(params, ids, y):
    h = jnp.take(params["embed"], ids, axis=0).mean(axis=1) + params["bias"]
    return jnp.mean((h @ params["head"] - y) ** 2)
"""
PARTS = """
def example_params(): return {"embed": f(400_000, 32), "bias": f(32), "head": f(32)}
def example_batch(): return f(64, 8, dtype=jnp.int32), f(64)
optimizer = optax.adam(1e-3)
"""
STEP = """
def train_step(w, x): return w - x.sum(), x
def example_args(): return f(8, 16), f(8)
"""
LINEN = """
from flax import linen as nn
class Model(nn.Module):
    @nn.compact
    def __call__(self, ids, train):
        x = nn.Embed(1_000_000, 64, name="token")(ids).mean(1)
        %s
        return nn.Dense(8)(nn.Dropout(0.1, deterministic=not train)(x))
model = Model()
def example_inputs(): return f(256, 8, dtype=jnp.int32), True
"""
NNX = """
from flax import nnx
class Model(nnx.Module):
    def __init__(self, rngs):
        self.token, self.out = nnx.Embed(1_000_000, 64, rngs=rngs), nnx.Linear(64, 8, rngs=rngs)
        %s
    def __call__(self, ids): return self.out(self.token(ids).mean(1))
def make_model(): return Model(nnx.Rngs(0))
def example_inputs(): return f(256, 8, dtype=jnp.int32)
"""


@pytest.fixture(autouse=True)
def _clean(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    known = set(sys.modules)
    yield
    for name in set(sys.modules) - known:
        if name.startswith(("user_", "embedding_hybrid")):
            del sys.modules[name]


@pytest.fixture
def write(tmp_path: Path) -> Writer:
    def write(text: str) -> str:
        path = tmp_path / "user_model.py"
        path.write_text(HEAD + text)
        return str(path)

    return write


def inspect(*arguments: str) -> int:
    return main(["inspect", *arguments])


def placed(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    """The JSON of a placement on 8 H100."""
    assert inspect(*arguments, "--cluster", "h100:8", "--mesh", "data=8", "--json") == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


def test_json_is_what_the_function_says(write: Writer, capsys: pytest.CaptureFixture[str]) -> None:
    found = placed(capsys, write(LOSS + PARTS), "--placement", "embed=ps,head=ps_whole")

    def loss(params: Any, ids: Any, y: Any) -> Any:
        h = jnp.take(params["embed"], ids, axis=0).mean(axis=1) + params["bias"]
        return jnp.mean((h @ params["head"] - y) ** 2)

    f = jax.ShapeDtypeStruct
    params = {
        "embed": f((400_000, 32), jnp.float32),
        "bias": f((32,), jnp.float32),
        "head": f((32,), jnp.float32),
    }
    batch = f((64, 8), jnp.int32), f((64,), jnp.float32)
    expected = make_placement(
        loss, params, optax.adam(1e-3), *batch, cluster="h100:8", mesh="data=8",
        placement={"embed": "ps", "head": "ps_whole"},
    )  # fmt: skip
    fields = ("path", "place", "nbytes", "rows", "row_bytes", "served_s", "spmd_s", "reason")
    assert found["placement"] == [{k: getattr(x, k) for k in fields} for x in expected.leaves]
    assert [x["place"] for x in found["placement"]] == ["ps", "ps_whole"]
    assert [x["rows"] for x in found["placement"]] == [512, 0]
    assert [i["path"] for i in found["plan"]["inputs"]] == [x.path for x in expected.plan.inputs]


@pytest.mark.long
def test_text_has_the_prices_and_the_plan_of_the_rest(capsys: pytest.CaptureFixture[str]) -> None:
    (leaf,) = placed(capsys, EXAMPLE, "--placement", "auto")["placement"]
    assert leaf["place"] == "spmd" and leaf["served_s"] > leaf["spmd_s"]
    assert inspect(EXAMPLE, "--placement", "auto", "--cluster", "cpu:8") == 0
    text = capsys.readouterr().out
    first, plan = text.split("\n\nplan: AUTO_PARALLEL on cpu:8\n")
    assert first.startswith("placement: 1 of 3 parameters on parameter servers\n")
    row = next(line for line in first.splitlines() if "['embed']" in line)
    assert re.search(
        r"67\.1 MB  servers, by rows  1792  459 kB +\S+ ms +\S+ ms +\S+ ms a step", row
    )
    assert "the other 2 (590 kB) under SPMD" in first
    assert "['hidden']" in plan and "[1][\"['embed']\"]  f32[1792,64]" in plan
    assert "on parameter servers" not in plan


def test_all_under_spmd_is_the_plan_of_the_whole_step(
    write: Writer, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write(LOSS + PARTS)
    found = placed(capsys, path, "--placement", "embed=spmd")
    assert found["placement"] == []
    plain = placed(capsys, path)
    mine = {i["path"]: i["spec"] for i in found["plan"]["inputs"] if i["path"].startswith("[0]")}
    assert mine == {i["path"]: i["spec"] for i in plain["inputs"] if i["path"].startswith("[0]")}
    assert len(mine) == 10  # three parameters, their two moments, the count


@pytest.mark.long
def test_a_table_that_does_not_fit_has_no_price_under_spmd(
    write: Writer, capsys: pytest.CaptureFixture[str]
) -> None:
    (leaf,) = placed(capsys, write(LOSS + PARTS), "--placement", "auto", "--memory", "4MB")[
        "placement"
    ]
    assert (leaf["place"], leaf["spmd_s"]) == ("ps", None) and "no plan fits" in leaf["reason"]
    assert inspect(str(write(LOSS + PARTS)), "--placement", "embed=spmd", "--memory", "4MB") == 2
    assert "no plan fits" in capsys.readouterr().err


def test_a_loss_of_another_name_and_a_step_beside_it(
    write: Writer, capsys: pytest.CaptureFixture[str]
) -> None:
    text = LOSS + LOSS.replace("loss(", "other(").replace("** 2", "** 4") + PARTS + STEP
    path = write(text)
    (leaf,) = placed(capsys, path + ":other", "--placement", "embed=ps")["placement"]
    assert leaf["path"] == "['embed']"
    assert [i["shape"] for i in placed(capsys, path)["inputs"]] == [[8, 16], [8]]
    lone = write(LOSS.replace("loss(", "other(") + PARTS)
    assert "[0]['params']['embed']" in [
        i["path"] for i in placed(capsys, lone + ":other")["inputs"]
    ]


@pytest.mark.parametrize(
    ("text", "path"),
    [(LINEN % "", "['token']['embedding']"), (NNX % "", "['token']['embedding'].value")],
    ids=["linen", "nnx"],
)
def test_flax_model(
    text: str, path: str, write: Writer, capsys: pytest.CaptureFixture[str]
) -> None:
    found = placed(capsys, write(text), "--placement", "token=ps")
    (leaf,) = found["placement"]
    assert leaf["path"] == path and leaf["rows"] == 2048
    paths = [i["path"] for i in found["plan"]["inputs"]]
    assert any("kernel" in p for p in paths)
    assert not any("token" in p for p in paths if p.startswith("[0]"))


def test_files_are_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    names = {x: str(tmp_path / x) for x in ("plan.json", "page.html", "problem.json")}
    options = ("--save", names["plan.json"], "--html", names["page.html"])
    found = placed(
        capsys, EXAMPLE, "--placement", "embed=ps", *options,
        "--dump-problem", names["problem.json"],
    )  # fmt: skip
    saved = load_plan(names["plan.json"])
    assert json.loads(saved.to_json()) == found["plan"]
    assert any("['embed']: on parameter servers" in note for note in saved.notes)
    assert "on parameter servers, 1792 rows" in Path(names["page.html"]).read_text()
    nodes = json.loads(Path(names["problem.json"]).read_text())["problem"]["nodes"]
    assert len(nodes["intervals"]) > 10


BATCH_NORM = "x = nn.BatchNorm(use_running_average=not train)(x)"
REFUSED = {
    "unknown place": (LOSS + PARTS, "embed=cpu", "placement of 'embed': got 'cpu', expected 'ps'"),
    "no match": (LOSS + PARTS, "vocab=ps", "no parameter path matches 'vocab'; paths look like"),
    "no rule": (LOSS + PARTS, "ps", "can't read 'ps'; expected auto, or REGEX=PLACE"),
    "rest of a rule": (LOSS + PARTS, "embed=ps,head", "can't read 'head'"),
    "no regular expression": (LOSS + PARTS, "[=ps", "is no regular expression"),
    "not by rows": (LOSS + PARTS, "head=ps", "head.*dot_general at user_model.py:8 reads all"),
    "a step only": (STEP, "auto", "lacks loss, example_params, example_batch, optimizer"),
    "a part is missing": (
        LOSS + PARTS.replace("optimizer", "chosen"), "auto", r"\(the file lacks optimizer\)",
    ),
    "no optimizer": (
        LOSS + PARTS + "optimizer = 'adam'\n", "auto", "optimizer is a str; expected an optax",
    ),
    "batch is no tuple": (
        LOSS + PARTS + "def example_batch(): return f(8)\n",
        "auto",
        r"example_batch\(\) must return the tuple of what loss takes after the parameters, got Sha",
    ),
    "params is no function": (
        LOSS + PARTS + "example_params = {}\n", "auto", "example_params is a dict, not a function",
    ),
    "not a scalar": (
        LOSS.replace("jnp.mean(", "(") + PARTS, "auto", r"returns float32\[64\]; expected one scal",
    ),
    "a loss and an empty dict": (
        LOSS.replace("** 2)", "** 2), {}") + PARTS,
        "auto",
        r"user_model.py: loss\(params, \*batch\) returns float32\[\] in .*\(\*, \{\}\).*nothing b",
    ),
    "nothing": (LOSS + PARTS + "def loss(*given): return {}\n", "auto", "returns nothing in .*{}"),
    "a loss and more": (
        LOSS.replace("** 2)", "** 2), 1.0") + PARTS, "auto", "returns float32.*; expected one scal",
    ),
    "linen state": (LINEN % BATCH_NORM, "auto", r"such as \['batch_stats'\].*define one that does"),
    "nnx state": (
        NNX % "self.norm = nnx.BatchNorm(64, rngs=rngs)", "auto", r"besides its parameters.*'norm'",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_refused(case: str, write: Writer, capsys: pytest.CaptureFixture[str]) -> None:
    text, rules, message = REFUSED[case]
    assert inspect(write(text), "--placement", rules, "--json") == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert re.search(message, err), err


@pytest.mark.long
def test_a_table_on_servers_can_not_be_in_host_memory(
    write: Writer, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write(LOSS + PARTS)
    assert inspect(path, "--placement", "auto", "--offload", "embed") == 2
    err = capsys.readouterr().err
    assert "'embed'" in err and "with --placement" in err
    assert inspect(path, "--placement", "embed=ps", "--offload", "bias") == 0
    assert "host memory" in capsys.readouterr().out


def test_a_failing_loss_shows_the_users_frames(
    write: Writer, capsys: pytest.CaptureFixture[str]
) -> None:
    text = LOSS.replace('params["bias"]', "jnp.ones(7)") + PARTS
    assert inspect(write(text), "--placement", "auto") == 3
    err = capsys.readouterr().err
    assert "in loss" in err and err.splitlines()[-1].startswith("ValueError: Incompatible shapes")


def test_rules_from_text() -> None:
    assert placement_from_text("auto") == "auto"
    assert placement_from_text("a{1,2}=ps,b=c=spmd,=auto") == {
        "a{1,2}": "ps", "b=c": "spmd", "": "auto",
    }  # fmt: skip
    with pytest.raises(RequestError, match="two rules for 'a'"):
        placement_from_text("a=ps,a=spmd")


@pytest.mark.long
def test_it_starts_no_backend(tmp_path: Path) -> None:
    """With a platform that does not exist, starting a backend would fail."""
    command = ["-m", "planner.cli", "inspect", EXAMPLE, "--placement", "auto", "--json"]
    result = subprocess.run(
        [sys.executable, *command],
        env={**os.environ, "JAX_PLATFORMS": "nonesuch", "PYTHONPATH": str(ROOT)},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    assert [x["path"] for x in json.loads(result.stdout)["placement"]] == ["['embed']"]


@pytest.mark.parametrize("flag", [("--microbatches", "2"), ("--remat", "full")])
def test_recipes_are_for_one_step(
    flag: tuple[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    code = main(["inspect", EXAMPLE, "--placement", "auto", "--cluster", "cpu:8", *flag])
    assert code == 2 and f"{flag[0]} is for a step alone" in capsys.readouterr().err
