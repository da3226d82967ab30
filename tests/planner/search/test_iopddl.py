"""The contest form: what is read, what is refused, and that writing loses nothing."""

from __future__ import annotations

import gzip
import json
import math
import tempfile
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from planner.search import Problem, evaluate, read_iopddl, verify, write_iopddl
from tests.planner.search.search_cases import random_problem

SHARED = Path(__file__).resolve().parents[4] / "shared" / "iopddl"


def example() -> dict:
    """Two nodes and an edge."""
    return {
        "problem": {
            "name": "two",
            "nodes": {
                "intervals": [[0, 4], [4, 6]],
                "costs": [[1, 2], [3, 4, 5]],
                "usages": [[10, 20], [30, 40, 50]],
            },
            "edges": {"nodes": [[0, 1]], "costs": [[0, 1, 2, 3, 4, 5]]},
            "usage_limit": 60,
        }
    }


def written(folder: Path, body: object) -> Path:
    path = folder / "case.json"
    path.write_text(body if isinstance(body, str) else json.dumps(body))
    return path


def aliased(first: Problem, again: Problem, choice: list[int]) -> list[int]:
    """The choice of a problem read back: alias nodes follow the node that they stand for."""
    longer = choice + [-1] * (len(again.names) - len(choice))
    for edge in again.edges:
        if edge.b >= len(first.names):
            longer[edge.b] = longer[edge.a]
    return longer


@pytest.mark.long
@settings(max_examples=100, deadline=None)
@given(st.integers(0, 10_000), st.sampled_from([".json", ".json.gz"]))
def test_round_trip_keeps_cost_peak_and_limit_of_every_choice(seed: int, suffix: str) -> None:
    problem = random_problem(seed, tight=bool(seed % 2), forbidden=0.1)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / f"case{suffix}"
        write_iopddl(problem, path)
        again = read_iopddl(path)
        write_iopddl(again, Path(folder) / f"again{suffix}")
        third = read_iopddl(Path(folder) / f"again{suffix}")
    assert again.limit_bytes == third.limit_bytes == problem.limit_bytes
    rng = np.random.default_rng(seed)
    for _ in range(20):
        choice = [int(rng.integers(0, cost.size)) for cost in problem.cost_s]
        longer = aliased(problem, again, choice)
        cost, peak, moment = evaluate(problem, choice)
        assert evaluate(again, longer)[:2] == (cost, peak)
        assert peak == 0 or evaluate(again, longer)[2] == moment
        assert evaluate(third, longer) == evaluate(again, longer)


def test_an_alias_that_leaves_its_node_is_forbidden() -> None:
    seen = 0
    for seed in range(20):
        problem = random_problem(seed)
        with tempfile.TemporaryDirectory() as folder:
            write_iopddl(problem, Path(folder) / "case.json")
            again = read_iopddl(Path(folder) / "case.json")
        choice = aliased(problem, again, [0] * len(problem.names))
        for edge in again.edges:
            if edge.b >= len(problem.names) and edge.cost_s.shape[0] > 1:
                choice[edge.b] = 1
                assert math.isinf(evaluate(again, choice)[0])
                choice[edge.b], seen = 0, seen + 1
    assert seen > 5


def test_usage_counts_from_start_up_to_but_not_at_end(tmp_path: Path) -> None:
    problem = read_iopddl(written(tmp_path, example()))
    assert evaluate(problem, [1, 2]) == (2 + 5 + 5, 50.0, 4)  # 20, then 50: never both
    body = example()
    body["problem"]["nodes"]["intervals"][1][0] = 3
    assert evaluate(read_iopddl(written(tmp_path, body)), [1, 2])[1:] == (70.0, 3)


def test_equal_lists_become_one_array(tmp_path: Path) -> None:
    body = example()
    part = body["problem"]
    part["edges"] = {"nodes": [[0, 1], [0, 1], [1, 0]], "costs": [[0, 1, 2, 3, 4, 5]] * 3}
    problem = read_iopddl(written(tmp_path, body))
    one, two, three = (edge.cost_s for edge in problem.edges)
    assert one is two and one.shape == (2, 3)
    assert three.tolist() == [[0, 1], [2, 3], [4, 5]]


def test_brackets_in_a_string_and_an_edge_of_one_node(tmp_path: Path) -> None:
    body = example()
    part = body["problem"]
    part["name"] = 'a[0] and ] and ["]"'
    part["edges"] = {"nodes": [[1]], "costs": [[10, 20, 30]]}
    del part["usage_limit"]
    problem = read_iopddl(written(tmp_path, body))
    assert problem.cost_s[1].tolist() == [13, 24, 35]
    assert problem.edges == () and math.isinf(problem.limit_bytes)


def change(path: str, value: object) -> dict:
    """The example with the value at a dotted path replaced; None deletes it."""
    body = example()
    *steps, last = (int(s) if s.isdigit() else s for s in path.split("."))
    part = body
    for step in steps:
        part = part[step]
    if value is None:
        del part[last]
    else:
        part[last] = value
    return body


EMPTY = {"intervals": [], "costs": [], "usages": []}
MALFORMED = {
    "not json": ("{nonsense", "not JSON: Expecting property name"),
    "cut off": (json.dumps(example())[:-5], "not JSON"),
    "nothing": ("", "not JSON"),
    "deep": ("[" * 100_000, "not JSON"),
    "a list": ([[1, 2]], "holds a list of 1 things that are no numbers, expected an object"),
    "no problem": ({"a": 1}, "no 'problem' where there is an object with 'a'"),
    "no nodes": (change("problem.nodes", None), "no 'nodes' where there is an object with 'name'"),
    "no edges": (change("problem.edges", None), "no 'edges'"),
    "no usages": (change("problem.nodes.usages", None), "no 'usages'"),
    "costs no list": (change("problem.nodes.costs", 3), "'costs' is 3, expected a list"),
    "nodes no object": (change("problem.nodes", [1]), r"'nodes' is \[1\], expected an object"),
    "empty": (change("problem.nodes", EMPTY), "nodes: there are none"),
    "lengths": (change("problem.nodes.costs", [[1]]), "2, 1, 2 intervals, costs and usages"),
    "no strategy": (change("problem.nodes.costs.1", []), "node n?1: "),
    "text": (change("problem.nodes.costs.1", [1, "x", 2]), "node 1: costs are .* numbers"),
    "number": (change("problem.nodes.costs.1", 7), "node 1: costs are 7, expected a list"),
    "null": (change("problem.nodes.costs.0", [1, True]), r"node 0: costs are \[1, true\]"),
    "huge": (change("problem.nodes.costs.0", [1, 10**400]), "node 0: costs hold a number"),
    "nan cost": (change("problem.nodes.costs.0", [1, math.nan]), "node n0: a cost is NaN"),
    "usage shape": (change("problem.nodes.usages.1", [1, 2]), "node 1: 2 usages, expected 3"),
    "negative": (change("problem.nodes.usages.1", [1, -2, 3]), "node n1: -2 bytes"),
    "nan": (change("problem.nodes.usages.0", [1, math.nan]), "node n0: nan bytes"),
    "infinite": (change("problem.nodes.usages.0", [1, math.inf]), "node n0: inf bytes"),
    "interval": (change("problem.nodes.intervals.1", [5, 3]), r"node 1: interval \[5, 3\]"),
    "interval size": (change("problem.nodes.intervals.1", [5]), r"node 1: interval \[5\]"),
    "interval kind": (change("problem.nodes.intervals.1", [5, 6.5]), "node 1: interval"),
    "edge count": (change("problem.edges.nodes", []), "edges: 0 nodes and 1 costs"),
    "edge node": (change("problem.edges.nodes.0", [0, 9]), r"edge 0: nodes \[0, 9\], .* 0 to 1"),
    "edge -1": (change("problem.edges.nodes.0", [0, -1]), r"edge 0: nodes \[0, -1\]"),
    "edge loop": (change("problem.edges.nodes.0", [1, 1]), "expected two different ones"),
    "edge three": (change("problem.edges.nodes.0", [0, 1, 1]), "expected one or two node"),
    "edge kind": (change("problem.edges.nodes.0", [0, 1.0]), r"edge 0: nodes \[0, 1.0\]"),
    "edge shape": (
        change("problem.edges.costs.0", [1, 2]),
        r"edge 0 \[0, 1\]: 2 costs, expected 6 \(2 x 3\)",
    ),
    "edge nan": (change("problem.edges.costs.0", [math.nan] * 6), "edge n0 - n1: a cost is NaN"),
    "limit": (change("problem.usage_limit", "lots"), "'usage_limit' is \"lots\", expected a num"),
    "negative limit": (change("problem.usage_limit", -1), "the memory limit is -1"),
}


@pytest.mark.parametrize("case", MALFORMED)
def test_malformed_instances_are_named(case: str, tmp_path: Path) -> None:
    body, message = MALFORMED[case]
    path = written(tmp_path, body)
    with pytest.raises(ValueError, match=message) as error:
        read_iopddl(path)
    assert str(error.value).startswith(f"{path}: ")
    assert "\n" not in str(error.value) and "\\u0001" not in str(error.value)


@pytest.mark.parametrize("raw", [b"{}", b"", gzip.compress(b"{}", mtime=0)[:-3]])
def test_not_gzip(raw: bytes, tmp_path: Path) -> None:
    path = tmp_path / "case.json.gz"
    path.write_bytes(raw)
    with pytest.raises(ValueError, match=r"case.json.gz: (not a gzip file|not JSON)"):
        read_iopddl(path)


@pytest.mark.skipif(not SHARED.is_dir(), reason=f"no instances at {SHARED}")
@pytest.mark.parametrize("name", ["example.json", "asplos-2025-iopddl-B.json.gz"])
def test_real_instances_are_read_as_they_stand(name: str) -> None:
    path = SHARED / name
    raw = gzip.decompress(path.read_bytes()) if name.endswith(".gz") else path.read_bytes()
    body = json.loads(raw)["problem"]
    problem = read_iopddl(path)
    verify(problem)
    assert [cost.tolist() for cost in problem.cost_s] == body["nodes"]["costs"]
    assert [[e.a, e.b] for e in problem.edges] == body["edges"]["nodes"]
    assert [e.cost_s.ravel().tolist() for e in problem.edges] == body["edges"]["costs"]
    assert problem.limit_bytes == body["usage_limit"]
    kept = {u.node: [u.start, u.end, u.bytes.tolist()] for u in problem.usages}
    for node, (start, end) in enumerate(body["nodes"]["intervals"]):
        taken = body["nodes"]["usages"][node]
        assert kept.get(node) == ([start, end, taken] if start < end and any(taken) else None)
