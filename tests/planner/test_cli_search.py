"""``planner search``: what it prints and writes, what it refuses, and Ctrl-C."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from planner.cli.main import main
from planner.cli.search import progress as watch
from planner.report.search import progress_text
from planner.search import SEARCHES, Edge, Problem, Solution, evaluate, read_iopddl, write_iopddl
from planner.search.problem import make_solution
from planner.search.progress import SearchProgress, current, time_is_up
from tests.planner.search.search_cases import random_problem

ROOT = Path(__file__).resolve().parents[2]
EXAMPLE = {
    "problem": {
        "name": "example",
        "nodes": {
            "intervals": [[0, 4], [2, 6]],
            "costs": [[1, 2], [3, 4, 5]],
            "usages": [[10, 20], [30, 40, 50]],
        },
        "edges": {"nodes": [[0, 1]], "costs": [[9, 1, 9, 9, 9, 9]]},
        "usage_limit": 60,
    }
}


@pytest.fixture
def problem(tmp_path: Path) -> Path:
    path = tmp_path / "problem.json"
    path.write_text(json.dumps(EXAMPLE))
    return path


def test_text_and_choice(problem: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "choice.json"
    assert main(["search", str(problem), "--out", str(out)]) == 0
    text, err = capsys.readouterr()
    rows = dict(re.split(r"  +", line, maxsplit=1) for line in text.splitlines())
    assert rows["nodes"] == "2" and rows["edges"] == "1"
    assert rows["strategies"] == "5, at most 3 of a node"
    assert rows["cost"] == rows["lower bound"] == "6" and rows["gap"] == "0 %"
    assert rows["peak usage"] == "50 B of 60 B (83.3 %) at moment 2"
    assert rows["feasible"] == rows["proved optimal"] == "yes"
    assert rows["search"] == "auto:brute" and rows["choice"] == str(out)
    assert err == ""
    assert json.loads(out.read_text()) == [0, 1]


@pytest.mark.long
@pytest.mark.parametrize("search", sorted(SEARCHES))
def test_json_says_what_the_evaluator_says(
    search: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path, out = tmp_path / "case.json.gz", tmp_path / "choice.json"
    write_iopddl(random_problem(7, tight=True), path)
    arguments = ["--search", search, "--time-limit", "5", "--json", "--out", str(out)]
    code = main(["search", str(path), *arguments])
    found = json.loads(capsys.readouterr().out)
    again = read_iopddl(path)
    choice = json.loads(out.read_text())
    assert evaluate(again, choice) == (found["cost"], found["peak_usage"], found["peak_moment"])
    assert found["feasible"] == (found["peak_usage"] <= found["usage_limit"] == again.limit_bytes)
    assert code == (0 if found["feasible"] else 4)
    assert found["nodes"] == len(again.names) and not found["interrupted"]
    assert found["search"].startswith(search)


def test_nothing_feasible(problem: Path, capsys: pytest.CaptureFixture[str]) -> None:
    body = json.loads(problem.read_text())
    body["problem"]["usage_limit"] = 39
    problem.write_text(json.dumps(body))
    assert main(["search", str(problem), "--json"]) == 4
    found = json.loads(capsys.readouterr().out)
    assert not found["feasible"] and found["gap"] is None
    assert found["peak_usage"] == 40
    assert main(["search", str(problem)]) == 4
    text = capsys.readouterr().out
    assert re.search(r"^feasible +no$", text, re.M) and re.search(r"^gap +unknown$", text, re.M)


def edge_to_nowhere(problem: Path) -> None:
    body = json.loads(problem.read_text())
    body["problem"]["edges"]["nodes"] = [[0, 7]]
    problem.write_text(json.dumps(body))


REFUSED = {
    "no such file": (["absent.json"], "cannot read absent.json: No such file"),
    "a directory": (["/"], "cannot read /: it is a directory, expected a regular file"),
    "search": (["P", "--search", "guess"], "unknown search 'guess'; one of auto, "),
    "no out": (["P", "--out", "no/choice.json"], "cannot write no/choice.json: No such file"),
    "out a directory": (["P", "--out", "/"], "cannot write /: Is a directory"),
    "limit 0": (["P", "--time-limit", "0"], "--time-limit 0: expected a number of seconds above"),
    "limit -1": (["P", "--time-limit", "-1"], "--time-limit -1"),
    "limit nan": (["P", "--time-limit", "nan"], "--time-limit nan"),
    "limit inf": (["P", "--time-limit", "inf"], "--time-limit inf"),
    "limit text": (["P", "--time-limit", "long"], "--time-limit long"),
    "seed": (["P", "--seed", "x"], "--seed x: expected a whole number, at least 0"),
    "threads": (["P", "--threads", "0"], "--threads 0: expected a whole number, at least 1"),
    "no seed": (["P", "--search", "brute", "--seed", "1"], "--seed: search brute takes none"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused(
    case: str,
    problem: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    arguments, message = REFUSED[case]
    assert main(["search", *(str(problem) if a == "P" else a for a in arguments)]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("planner: error: ") and err.count("\n") == 1
    assert message in err


def test_bad_files_and_too_large_for_brute(
    problem: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    edge_to_nowhere(problem)
    out = tmp_path / "choice.json"
    assert main(["search", str(problem), "--out", str(out)]) == 2
    expected = f"planner: error: {problem}: edge 0: nodes [0, 7], expected 0 to 1\n"
    assert capsys.readouterr() == ("", expected)
    cost = np.zeros(100)
    write_iopddl(Problem(("a",) * 5, (cost,) * 5, (), (), 1.0), problem)
    assert main(["search", str(problem), "--search", "brute", "--out", str(out)]) == 2
    assert "search brute: 10000000000 combinations" in capsys.readouterr().err
    assert not out.exists()


def test_out_that_is_there_is_kept_when_the_request_is_refused(
    problem: Path, tmp_path: Path
) -> None:
    out = tmp_path / "choice.json"
    out.write_text("[1, 1]")
    edge_to_nowhere(problem)
    assert main(["search", str(problem), "--out", str(out)]) == 2
    assert out.read_text() == "[1, 1]"


def test_seed_and_threads_go_to_a_search_that_takes_them(
    problem: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def random(problem: Problem, *, time_limit_s: float, seed: int, threads: int) -> Solution:
        assert 3.0 < time_limit_s < 3.5  # reading is off the limit
        reason = f"seed {seed}, threads {threads}"
        return make_solution(problem, [0, 0], -1.0, "random", reason, time.monotonic())

    monkeypatch.setitem(SEARCHES, "random", random)
    options = ["--search", "random", "--seed", "7", "--threads", "2", "--time-limit", "3.5"]
    assert main(["search", str(problem), "--json", *options]) == 0
    assert json.loads(capsys.readouterr().out)["reason"] == "seed 7, threads 2"


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """A search that reports, and waits until it is asked to stop."""
    waiting = threading.Event()

    def patient(problem: Problem, *, time_limit_s: float) -> Solution:
        begun = time.monotonic()
        current().report(SearchProgress(0.0, 13.0, 4.0, True, "waiting"))
        waiting.set()
        while not time_is_up(begun + 60):
            time.sleep(0.01)
        return make_solution(problem, [0, 0], 4.0, "patient", "was asked", begun)

    monkeypatch.setitem(SEARCHES, "patient", patient)
    yield waiting


def test_interrupted_search_gives_the_best_so_far(
    patient: threading.Event, problem: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupt() -> None:
        patient.wait(30)
        os.kill(os.getpid(), signal.SIGINT)

    threading.Thread(target=interrupt).start()
    out, before = tmp_path / "choice.json", signal.getsignal(signal.SIGINT)
    assert main(["search", str(problem), "--search", "patient", "--out", str(out)]) == 130
    text = capsys.readouterr().out
    assert json.loads(out.read_text()) == [0, 0]
    assert re.search(r"^stopped because +interrupted; was asked$", text, re.M)
    assert re.search(r"^cost +13$", text, re.M) and re.search(r"^gap +69.2 %$", text, re.M)
    assert signal.getsignal(signal.SIGINT) is before


@pytest.mark.long
def test_limit_asks_to_stop_and_lines_come_now_and_then(
    patient: threading.Event,
    problem: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(watch, "LINE_EVERY_S", 0.3)
    assert main(["search", str(problem), "--search", "patient", "--time-limit", "1", "--json"]) == 0
    out, err = capsys.readouterr()
    assert not json.loads(out)["interrupted"]
    lines = err.splitlines()
    assert 1 <= len(lines) <= 3
    assert lines[0].endswith(" s of 1 s, best 13, bound 4, gap 69.2 %, waiting")


STUBBORN = """
import sys, time
from planner.cli.main import main
from planner.search import SEARCHES
def stubborn(problem, *, time_limit_s):
    print("begun", flush=True)
    while True:
        time.sleep(0.01)
SEARCHES["stubborn"] = stubborn
sys.exit(main(["search", sys.argv[1], "--search", "stubborn", "--out", sys.argv[2]]))
"""


@pytest.mark.long
def test_second_interrupt_ends_at_once_and_writes_nothing(problem: Path, tmp_path: Path) -> None:
    out = tmp_path / "choice.json"
    process = subprocess.Popen(
        [sys.executable, "-c", STUBBORN, str(problem), str(out)],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "begun\n"
    process.send_signal(signal.SIGINT)
    time.sleep(0.02)
    process.send_signal(signal.SIGINT)  # the same one, passed on
    time.sleep(1.0)
    assert process.poll() is None
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=10)
    assert process.returncode == 130
    assert err == "planner: interrupted\n"
    assert not out.exists()


@pytest.mark.long
def test_the_limit_counts_reading(
    patient: threading.Event,
    problem: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    given: list[float] = []

    def brief(problem: Problem, *, time_limit_s: float) -> Solution:
        given.append(time_limit_s)
        return make_solution(problem, [0, 0], 4.0, "brief", "", time.monotonic())

    def slow(path: Path) -> Problem:
        time.sleep(0.5)
        return read_iopddl(path)

    monkeypatch.setitem(SEARCHES, "brief", brief)
    monkeypatch.setattr("planner.cli.search.read_iopddl", slow)
    options = ["--search", "brief", "--json", "--time-limit"]
    assert main(["search", str(problem), *options, "30"]) == 0
    assert main(["search", str(problem), *options, "0.2"]) == 0
    assert 20.0 < given[0] <= 29.5 and 0 < given[1] <= 0.1
    capsys.readouterr()


LINGERING = """
import sys, threading, time
from planner.cli.main import main
from planner.search import SEARCHES
from planner.search.anytime import leftover
from planner.search.problem import make_solution
def lingering(problem, *, time_limit_s):
    import numpy as np
    from planner.search.anytime.rounds import Walker
    from planner.search.relax.dual import Dual
    from planner.search.relax.flat import flatten
    from planner.search.anytime.incumbent import Incumbent
    from planner.search.progress import current
    from planner.search.exact.reduction import reduce_problem
    from planner.search.relax.trws import Messages
    solve = leftover.solve_integer
    def deaf(*args, stopped, **more):  # as HiGHS is inside its presolve
        begun.set()
        return solve(*args, stopped=lambda: False, **more)
    leftover.solve_integer, begun = deaf, threading.Event()
    reduction = reduce_problem(problem, keep_memory=True)
    flat = flatten(reduction.problem)
    best, messages = Incumbent(flat, time.monotonic(), current()), Messages(flat)
    messages.sweep(4)
    dual = Dual(messages.bound(), np.zeros(flat.unary.size), 0.0, (), "")
    program = leftover.Program(best, reduction, messages, dual, time.monotonic() + 20)
    program.start()
    assert begun.wait(20)
    time.sleep(4)  # in its tree by now, where it calls back often
    program.close()
    return make_solution(problem, [0] * len(problem.names), dual.value, "lingering", "", 0.0)
class Slow:  # shutting down takes a while, as it does with much in memory
    def __del__(self, sleep=time.sleep):
        sleep(1)
kept = Slow()
SEARCHES["lingering"] = lingering
sys.exit(main(["search", sys.argv[1], "--search", "lingering", "--out", sys.argv[2]]))
"""


@pytest.mark.long
def test_a_solver_that_still_runs_does_not_abort_the_process(tmp_path: Path) -> None:
    rng, count = np.random.default_rng(0), 60
    pairs = [(i, j) for i in range(count) for j in range(i + 1, count) if rng.random() < 0.3]
    edges = tuple(Edge(i, j, rng.random((6, 6))) for i, j in pairs)
    costs = tuple(rng.random(6) for _ in range(count))
    path, out = tmp_path / "hard.json", tmp_path / "choice.json"
    write_iopddl(Problem(tuple(map(str, range(count))), costs, edges, (), 1e9), path)
    run = subprocess.run(
        [sys.executable, "-c", LINGERING, str(path), str(out)],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert run.returncode == 0, run.stderr
    assert len(json.loads(out.read_text())) == count and "cost" in run.stdout


@pytest.mark.parametrize(
    ("progress", "text"),
    [
        (None, "3 s of 60 s"),
        (
            SearchProgress(3.0, float("inf"), -float("inf"), False, ""),
            "3 s of 60 s, best -, bound -, gap unknown",
        ),
        (
            SearchProgress(3.0, 49928460991.0, 4.9e10, True, "block 3"),
            "3 s of 60 s, best 49928460991, bound 49000000000, gap 1.86 %, block 3",
        ),
        (
            SearchProgress(3.0, 0.0123456789012, 0.0, False, ""),
            "3 s of 60 s, best 0.0123456789 (infeasible), bound 0, gap 100 %",
        ),
    ],
)
def test_progress_line(progress: SearchProgress | None, text: str) -> None:
    assert progress_text(progress, 3.2, 60.0) == text


STEP = """
import jax, jax.numpy as jnp
def train_step(w, x):
    g = jax.grad(lambda w: jnp.mean((jnp.tanh(x @ w["a"]) @ w["b"]) ** 2))(w)
    return jax.tree.map(lambda p, d: p - 0.1 * d, w, g), jnp.mean(x)
def example_args():
    f = lambda *s: jax.ShapeDtypeStruct(s, jnp.float32)
    return {"a": f(16, 32), "b": f(32, 16), "scale": f()}, f(64, 16)
"""


@pytest.mark.long
@pytest.mark.parametrize("memory", ["80GB", "9kB"])
def test_dumped_problem_has_the_plans_cost_and_peak(
    memory: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model, dumped = tmp_path / "user_model.py", tmp_path / "problem.json.gz"
    model.write_text(STEP)
    options = ["--mesh", "data=4,model=2", "--search", "ilp", "--memory", memory]
    step = f"{model}:train_step"
    assert main(["inspect", step, *options, "--dump-problem", str(dumped), "--json"]) == 0
    plan = json.loads(capsys.readouterr().out)
    assert main(["search", str(dumped), "--search", "ilp", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["proved"]
    assert found["cost"] == pytest.approx(plan["search"]["cost_s"])
    scalar = 4
    assert found["usage_limit"] + scalar == plan["prediction"]["limit_bytes"]
    if memory == "9kB":  # the limit binds: without it the plan is another
        assert plan["prediction"]["peak_bytes"] <= 9000 < 2 * found["peak_usage"]


def test_problem_is_dumped_when_no_plan_fits(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model, dumped = tmp_path / "user_model.py", tmp_path / "problem.json"
    model.write_text(STEP)
    options = ["--mesh", "data=8", "--memory", "1kB", "--dump-problem", str(dumped)]
    assert main(["inspect", f"{model}:train_step", *options]) == 2
    assert "no plan fits" in capsys.readouterr().err
    assert read_iopddl(dumped).limit_bytes == 996
    assert main(["inspect", str(model), "--dump-problem", str(tmp_path / "no" / "p.json")]) == 2
    assert "its directory does not exist" in capsys.readouterr().err
