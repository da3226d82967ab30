"""Damaged input files end in an answer, or in one line and exit code 2; nothing else is touched."""

from __future__ import annotations

import gzip
import json
import os
import sys
import tracemalloc
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "benchmarks"))

import mutated_files as mutated  # noqa: E402

from costmodels import MOST_DEVICES, ClusterError, parse_cluster  # noqa: E402
from executor.cli import main as cli  # noqa: E402
from executor.launch.hosts.hostfile import parse_hosts  # noqa: E402
from executor.launch.job import LaunchError  # noqa: E402
from executor.launch.kubernetes import jobset, manifests  # noqa: E402
from planner import PlanFormatError, load_plan  # noqa: E402
from planner.files import MIB, gunzipped, read_bytes  # noqa: E402
from planner.plan.plan import plan_from_json  # noqa: E402
from planner.search import iopddl, read_iopddl  # noqa: E402

pytest.importorskip("yaml", reason="needs PyYAML: pip install 'meshwright[k8s]'")


@pytest.mark.parametrize("kind", mutated.READERS)
def test_damaged_files(kind: str, tmp_path: Path) -> None:
    outcome = mutated.cases(kind, 100, 16, tmp_path)
    assert not outcome.failures
    assert outcome.counts["refused"] > 20 and outcome.counts["answer"] > 0


@pytest.mark.slow
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("kind", mutated.READERS)
def test_a_thousand_damaged_files(kind: str, tmp_path: Path) -> None:
    assert not mutated.cases(kind, 1000, 1, tmp_path).failures


def test_what_a_case_does_wrong_is_seen(tmp_path: Path) -> None:
    def writes() -> int:
        (tmp_path / "elsewhere").write_text("x")
        return 0

    def talks() -> int:
        print("planner: error: a\nb", file=sys.stderr)
        return 2

    with mutated._watched(tmp_path / "out"):
        assert mutated.ended(writes)[0] == "answer"
    assert any("elsewhere" in line for line in mutated._touched)
    assert mutated.ended(talks)[0] == "not one line"
    assert mutated.ended(lambda: 1 // 0)[0] == "traceback"
    assert mutated.ended(lambda: 7)[0] == "exit code 7"


@pytest.fixture(scope="module")
def raw(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A plan's JSON with all rows, parsed; the mesh is the only one tried."""
    text = mutated.seeds_in(tmp_path_factory.mktemp("seeds"))["plan"][0]
    found = json.loads(plan_from_json(text.decode()).to_json())
    found["meshes"] = [row for row in found["meshes"] if row["verdict"] == "chosen"]
    return found


def refused(words: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    assert cli.main(words) == 2
    said = capsys.readouterr().err
    assert said.startswith("planner: error: ") and said.count("\n") == 1
    return said


def test_what_is_no_regular_file_is_not_waited_for(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    mutated.seeds_in(tmp_path)
    good = tmp_path / "good.json"
    for ending in (".json", ".toml", ".gz", ".txt"):
        os.mkfifo(tmp_path / f"pipe{ending}")
        (tmp_path / f"folder{ending}").mkdir()
        (tmp_path / f"zero{ending}").symlink_to("/dev/zero")
    step = str(tmp_path / "step.py")
    for name in ("pipe", "folder", "zero", "none"):
        path = str(tmp_path / name)
        refused(["compare", "--plan", str(good), f"{path}.json"], capsys)
        refused(["export", f"{path}.json", "--as", "python"], capsys)
        refused(["verify", step, "--plan", f"{path}.json"], capsys)
        refused(["inspect", step, "--cluster", f"{path}.toml"], capsys)
        refused(["inspect", step, "--profile", f"{path}.toml"], capsys)
        refused(["search", f"{path}.json"], capsys)
        refused(["search", f"{path}.gz"], capsys)
        refused(["launch", "--launcher", "ssh", "--hosts", f"{path}.txt", "-n", "2", step], capsys)


def test_a_file_that_may_not_be_read(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    path.write_text("{}")
    path.chmod(0)
    if os.access(path, os.R_OK):
        pytest.skip("this user may read everything")
    with pytest.raises(PlanFormatError, match="Permission denied"):
        load_plan(path)


def test_a_small_gzip_file_takes_no_large_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "bomb.json.gz"
    path.write_bytes(gzip.compress(b" " * (64 * MIB)))
    assert path.stat().st_size < MIB
    monkeypatch.setattr(iopddl, "LARGEST", 4 * MIB)
    tracemalloc.start()
    with pytest.raises(ValueError, match="larger than 4 MiB"):
        read_iopddl(path)
    assert tracemalloc.get_traced_memory()[1] < 16 * MIB
    tracemalloc.stop()
    assert "larger than 4 MiB" in refused(["search", str(path)], capsys)
    assert gunzipped(gzip.compress(b"ab"), 2) == b"ab"
    with pytest.raises(OSError, match="larger than"):
        read_bytes(path, 10)


def test_the_largest_cluster(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (tmp_path / "step.py").write_text(mutated.STEP)
    for text in ("h100:8x1000000000", "v5p:1024x1024x1024", "cpu:99999999999", "v5e:16x16+99999"):
        said = refused(["inspect", str(tmp_path / "step.py"), "--cluster", text], capsys)
        assert f"at most {MOST_DEVICES}" in said
    with pytest.raises(ClusterError, match="bad shape"):
        parse_cluster("h100:" + "9" * 5000)
    assert parse_cluster("h100:8x131072").num_devices == MOST_DEVICES
    refused(["inspect", str(tmp_path / "step.py"), "--mesh", "data=²"], capsys)
    refused(["inspect", str(tmp_path / "step.py"), "--mesh", "data=" + "9" * 5000], capsys)


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"mode": "FAST"}, "mode is 'FAST', expected one of STAND_ALONE"),
        ({"mesh": {"data": True}}, "mesh, an axis, is True, expected a whole number"),
        ({"mesh": {"a b": 8}}, "expected the name of a mesh axis"),
        ({"mesh": {"data": 16}}, "mesh: 16 devices, cpu:8 has 8"),
        ({"mesh": {"other": 8}}, "no axis"),
        ({"extra": 1}, "no field 'extra' in it"),
        ({"op_index": [0]}, "op_inputs: "),
        ({"notes": ["a\x1b[2J"]}, r"without '\x1b'"),
        ({"notes": [1]}, "notes[0] is 1, expected a text of one line"),
        ({"notes": 10**400}, "notes is a number beyond 2**63, expected a list"),
        ({"meshes": []}, ""),
        ({"cluster": "h100:8x1000000000"}, ""),
    ],
)
def test_a_plan_says_which_field_is_wrong(
    change: dict[str, Any], told: str, raw: Any, tmp_path: Path
) -> None:
    path = tmp_path / "plan.json"
    path.write_text(json.dumps({**raw, **change}))
    if not told:
        load_plan(path)
        return
    with pytest.raises(PlanFormatError) as error:
        load_plan(path)
    assert told in str(error.value)


@pytest.mark.parametrize(
    ("field", "change", "told"),
    [
        ("inputs", {"spec": ["data", "data"]}, "uses a mesh axis for two dimensions"),
        ("inputs", {"spec": [None, None, "data"]}, "names 3 dimensions"),
        ("inputs", {"shape": [63, 127], "spec": ["data"]}, "do not divide"),
        ("inputs", {"memory": "disk"}, "expected one of device"),
        ("inputs", {"tied": 1}, "inputs[0].tied is 1, expected true or false"),
        ("inputs", {"nbytes_per_device": 1.5}, "expected a whole number"),
        ("inputs", {"shape": [-1]}, "inputs[0].shape[0] is -1"),
        ("constraints", {"slot": "inside"}, "expected one of from, in"),
        ("constraints", {"op": 10**6}, "constraints[0]: operation 1000000 of"),
        ("constraints", {"slot": "in", "position": 99}, "operand 99 of"),
        ("constraints", {"spec": ["nosuch"]}, "has no axis 'nosuch'"),
        ("meshes", {"verdict": "chosen "}, "expected one of chosen, slower"),
        ("meshes", {"cost_s": float("nan")}, "NaN is no number in JSON"),
        ("meshes", {"cost_s": "1"}, "expected a finite number"),
    ],
)
def test_a_plan_says_which_part_of_a_list_is_wrong(
    field: str, change: dict[str, Any], told: str, raw: Any, tmp_path: Path
) -> None:
    path = tmp_path / "plan.json"
    row = (raw[field] or [{"op": 0, "slot": "in", "position": 0, "spec": []}])[0]
    path.write_text(json.dumps({**raw, field: [{**row, **change}, *raw[field][1:]]}))
    with pytest.raises(PlanFormatError) as error:
        load_plan(path)
    assert told in str(error.value)


def test_a_key_twice_and_deep_nesting_are_no_json(tmp_path: Path) -> None:
    for text in ('{"a": 1, "a": 2}', "[" * 100_000, '{"a": NaN}', "9" * 5000):
        path = tmp_path / "plan.json"
        path.write_text(text)
        with pytest.raises(PlanFormatError, match="is not JSON") as error:
            load_plan(path)
        assert len(str(error.value).splitlines()) == 1


def test_a_host_file_names_no_option_of_ssh() -> None:
    for line in ("-oProxyCommand=x@host", "host user=-oProxyCommand=x", "host user=$(x)", "a;b"):
        with pytest.raises(LaunchError, match="line 1"):
            parse_hosts(line, "hosts")
    assert parse_hosts(r"host user=D\ann", "hosts")[0].user == r"D\ann"


def test_a_schema_fetches_and_multiplies_nothing(tmp_path: Path) -> None:
    def crd(schema: str) -> Path:
        head = "kind: CustomResourceDefinition\nspec:\n  versions:\n  - name: v1alpha2\n"
        path = tmp_path / "crd.yaml"
        path.write_text(f"{head}    schema:\n      openAPIV3Schema: {schema}\n")
        return path

    laughs = "x:\n- &a0 [1]\n" + "".join(
        f"- &a{k + 1} [{', '.join([f'*a{k}'] * 10)}]\n" for k in range(9)
    )
    path = crd("{properties: {spec: *a9}}")
    path.write_text(laughs + path.read_text())
    with pytest.raises(LaunchError, match="more than 1000000 parts"):
        manifests.read_schema(path, jobset.KIND)
    with pytest.raises(LaunchError, match="nested more than"):
        manifests.read_schema(crd("[" * 50_000), jobset.KIND)
    with pytest.raises(LaunchError, match=r"a \$ref"):
        path = crd('{properties: {spec: {$ref: "http://127.0.0.1:9/x"}}}')
        manifests.read_schema(path, jobset.KIND)
