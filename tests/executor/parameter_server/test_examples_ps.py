"""The examples on parameter servers learn; the figures of convergence are those of real runs."""

from __future__ import annotations

import functools
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from executor.parameter_server import Rule

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture
def modules(monkeypatch: pytest.MonkeyPatch) -> Any:
    pytest.importorskip("sklearn")
    for folder in ("examples", "benchmarks"):
        monkeypatch.syspath_prepend(str(ROOT / folder))
    kept = set(sys.modules)
    import mnist_like_async
    import ps_convergence
    import word2vec_ps

    yield mnist_like_async, word2vec_ps, ps_convergence
    for name in set(sys.modules) - kept:
        if name in ("mnist_like_async", "word2vec_ps", "ps_convergence"):
            del sys.modules[name]


def test_digits_are_learned_in_another_order_by_each_worker(modules: Any) -> None:
    digits, _, _ = modules
    data, test = digits.prepare()
    steps = digits.per_epoch(data, 3)
    seen = [[digits.batch(data, rank, 3, k)["x"] for k in range(steps)] for rank in range(3)]
    rows = np.concatenate([x for own in seen for x in own])
    assert len(np.unique(rows, axis=0)) > 0.97 * len(rows)  # each digit once an epoch (some alike)
    done = digits.run(data, 8, 3.0, workers=3, mode="ssp", staleness=4, backend="local")
    assert digits.accuracy(done.params, test) > 0.8
    assert done.returned[0] == 8 * steps
    assert done.returned[0] - done.returned[2] <= 5  # the slow one is not left further behind


def test_word_vectors_get_better(modules: Any) -> None:
    _, words, _ = modules
    data = words.prepare()
    assert data.words[0] == "the" and len(data.words) > 1500 and len(data.pairs) > 10**5
    before = words.held_loss(data, functools.partial(words.of_tables, words.fresh(len(data.words))))
    done = words.run(data, 20, workers=2, servers=2, mode="sync", backend="local")
    after = words.held_loss(data, functools.partial(words.of_tables, done.tables))
    assert after < 0.9 * before
    assert all(c.applied == 40 and c.updates == 20 for c in done.counts)


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["local", "ray"])
def test_words_of_one_kind_are_near(modules: Any, backend: str) -> None:
    if backend == "ray":
        pytest.importorskip("ray")
    _, words, _ = modules
    data = words.prepare()
    done = words.run(data, 250, workers=4, servers=2, mode="async", backend=backend)
    near = {word: words.nearest(data, done.tables, word, 8) for word in words.SHOWN}
    assert {"day", "week", "year"} & set(near["month"])
    assert any(w.endswith("error") or w.startswith("exc") for w in near["raise"])
    assert {"ssl", "client", "port", "connect", "connection", "host"} & set(near["socket"])


def test_the_pace_of_workers_changes_time_alone_where_they_wait_for_all(modules: Any) -> None:
    *_, convergence = modules
    job = convergence.of_digits()
    run = functools.partial(convergence.trained, job, rounds=10)
    alike, uneven = (run(Rule("sync"), slow=slow) for slow in (1.0, 3.0))
    assert [p.loss for p in alike] == [p.loss for p in uneven]
    assert [p.steps for p in alike] == [p.steps for p in uneven] == [0, 5, 10]
    assert uneven[-1].time > 2 * alike[-1].time
    stale = run(Rule("async"), slow=3.0)
    assert stale[-1].time < 0.6 * uneven[-1].time and stale[-1].steps == 10
    longer = run(Rule("async"), slow=1.0, goal=-1.0)  # never reached: to the bound, no further
    assert longer[-1].steps == 15 and convergence.reached(longer, -1.0) is None
    middle = (alike[1].loss + alike[2].loss) / 2
    if alike[0].loss > alike[1].loss > alike[2].loss:
        assert convergence.reached(alike, middle).steps == pytest.approx(7.5)


class Asked(Exception):
    """What an example asks of ``train``."""


def test_a_launch_says_how_many_where_the_command_line_does_not(
    modules: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def run(*args: Any, workers: int, servers: int, backend: str, **options: Any) -> None:
        raise Asked(workers, servers, backend)

    def asked(module: Any, *words: str) -> tuple[Any, ...]:
        monkeypatch.setattr(module, "run", run)
        monkeypatch.setattr(sys, "argv", ["example.py", *words])
        with pytest.raises(Asked) as found:
            module.main()
        return found.value.args

    digits, words, _ = modules
    assert asked(digits) == (3, 1, "local") and asked(words) == (4, 2, "local")
    for name, value in {"WORKERS": "5", "SERVERS": "3", "BACKEND": "ray"}.items():
        monkeypatch.setenv(f"MESHWRIGHT_PS_{name}", value)
    assert asked(digits) == asked(words) == (5, 3, "ray")
    assert asked(digits, "--workers", "2") == (2, 3, "ray")  # which train refuses


def test_every_worker_has_a_batch_of_digits(
    modules: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def run(*args: Any, workers: int, **options: Any) -> None:
        raise Asked(workers)

    digits, *_ = modules
    monkeypatch.setattr(digits, "run", run)
    monkeypatch.setattr(sys, "argv", ["example.py", "--workers", "45"])
    with pytest.raises(SystemExit):
        digits.main()
    said = capsys.readouterr().err
    assert "--workers 45: a worker's share of the 1437 digits" in said and "at most 44" in said
    monkeypatch.setattr(sys, "argv", ["example.py", "--workers", "44"])
    with pytest.raises(Asked):
        digits.main()
