"""Cluster texts and files, sizes, and the catalog behind them."""

from __future__ import annotations

import contextlib
import dataclasses
import re
import string
import tomllib
from importlib import resources
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from costmodels import (
    Cluster,
    ClusterError,
    find_kind,
    known_kinds,
    parse_bytes,
    parse_cluster,
    with_memory,
)

HIERARCHIES = st.builds(
    lambda kind, per_node, nodes: f"{kind}:{per_node}x{nodes}",
    st.sampled_from(["a100", "h100", "cpu"]),
    st.integers(1, 8),
    st.integers(1, 64),
)
TORUSES = st.builds(
    lambda dims, end: "v5p:" + "x".join(map(str, dims)) + end,
    st.lists(st.integers(1, 16), min_size=1, max_size=3),
    st.integers(1, 8).map(lambda slices: f"+{slices}" if slices > 1 else ""),
)


def write(folder: Path, text: str) -> str:
    path = folder / "cluster.toml"
    path.write_text(text, encoding="utf-8")
    return str(path)


def test_known_kinds() -> None:
    assert " ".join(known_kinds()) == (
        "a100 a100-40gb a800 ascend910b ascend910c b200 b300 cpu gb200 gb300 h100 h20 h200 h800 "
        "l4 l40s mi300x mi325x mi355x rtx4090 rtx5090 tpu7x trn2 v100 v100-32gb v4 v5e v5p v6e"
    )


@pytest.mark.parametrize("kind", known_kinds())
def test_every_catalog_constant_has_a_source(kind: str) -> None:
    text = (resources.files("costmodels") / "catalog" / f"{kind}.toml").read_text("utf-8")
    lines = [line for line in text.splitlines() if re.match(r"\w+\s*=", line)]
    assert len(lines) > (12 if "base =" not in text else 3)
    for line in lines:
        assert re.search(r"# source: \S.{8,}", line), line


@pytest.mark.parametrize("kind", known_kinds())
def test_every_kind_makes_a_cluster(kind: str) -> None:
    cluster = parse_cluster(f"{kind}:4x2")
    assert cluster.num_devices == 8
    assert cluster.device.kind == kind
    assert cluster.device.matmul_flops_per_s("bfloat16") > 0
    assert parse_cluster(cluster.text) == cluster


def test_a_kind_on_a_base_changes_only_what_it_names() -> None:
    base, other = parse_cluster("v100:8x2"), parse_cluster("v100-32gb:8x2")
    assert other.device.memory_bytes == 2 * base.device.memory_bytes
    assert (other.link, other.network) == (base.link, base.network)
    changed = dataclasses.replace(base.device, kind="v100-32gb", memory_bytes=32 * 10**9)
    assert other.device == changed


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("NVIDIA A100-SXM4-40GB", "a100-40gb"),
        ("NVIDIA A100-SXM4-80GB", "a100"),
        ("NVIDIA H100 80GB HBM3", "h100"),
        ("NVIDIA H200", "h200"),
        ("NVIDIA B200", "b200"),
        ("Tesla V100-SXM2-16GB", "v100"),
        ("Tesla V100-SXM2-32GB", "v100-32gb"),
        ("NVIDIA L4", "l4"),
        ("NVIDIA L40S", "l40s"),
        ("NVIDIA L40", None),
        ("NVIDIA A800-SXM4-80GB", "a800"),
        ("NVIDIA H800", "h800"),
        ("NVIDIA H20", "h20"),
        ("NVIDIA B300 SXM6 AC", "b300"),
        ("NVIDIA GB200", "gb200"),
        ("NVIDIA GB300", "gb300"),
        ("NVIDIA GB200 NVL72", "gb200"),
        ("NVIDIA GB300 NVL72", "gb300"),
        ("NVIDIA GH200 480GB", None),
        ("NVIDIA GeForce RTX 4090", "rtx4090"),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", None),
        ("NVIDIA GeForce RTX 5090", "rtx5090"),
        ("NVIDIA RTX 4000 Ada Generation", None),
        ("AMD Instinct MI300X", "mi300x"),
        ("AMD Instinct MI300X OAM", "mi300x"),
        ("AMD Instinct MI300A", None),
        ("AMD Instinct MI325X", "mi325x"),
        ("AMD Instinct MI355X", "mi355x"),
        ("AWS Trainium2", "trn2"),
        ("Ascend910B", "ascend910b"),
        ("Ascend910_9392", "ascend910c"),
        ("TPU v4", "v4"),
        ("TPU v5 lite", "v5e"),
        ("TPU v5", "v5p"),
        ("TPU v5p", "v5p"),
        ("TPU v6 lite", "v6e"),
        ("TPU7x", "tpu7x"),
        ("Quadro K620", None),
    ],
)
def test_kind_of_a_driver_name(name: str, kind: str | None) -> None:
    assert find_kind(name) == kind


def test_no_two_kinds_share_a_name() -> None:
    names: dict[frozenset[str], str] = {}
    for kind in known_kinds():
        text = (resources.files("costmodels") / "catalog" / f"{kind}.toml").read_text("utf-8")
        for name in (kind, *tomllib.loads(text)["device"]["aliases"]):
            words = frozenset(re.findall(r"[a-z0-9]+", name))
            assert names.setdefault(words, kind) == kind, name
            assert find_kind(name) == kind
            assert parse_cluster(f"{name}:4").device.kind == kind


def test_the_reference_lists_every_kind() -> None:
    text = (Path(__file__).resolve().parents[2] / "docs/reference/api.md").read_text("utf-8")
    assert [kind for kind in known_kinds() if f"`{kind}`" not in text] == []


def test_a_node_of_gb200_is_the_nvlink_domain() -> None:
    one, two = parse_cluster("nvl72:72"), parse_cluster("gb200:72x2")
    assert (one.text, one.shape, two.shape) == ("gb200:72", (72, 1), (72, 2))
    assert two.network is not None
    assert two.network.bytes_per_s == pytest.approx(5.0e10 * 0.94)
    assert one.link.bytes_per_s > 10 * two.network.bytes_per_s


def test_a_kind_of_another_link_keeps_the_rest() -> None:
    for slow, fast in (("a800", "a100"), ("h800", "h100")):
        ours, theirs = parse_cluster(f"{slow}:8x2"), parse_cluster(f"{fast}:8x2")
        assert ours.link.bytes_per_s < 0.7 * theirs.link.bytes_per_s
        assert (ours.network, ours.host) == (theirs.network, theirs.host)
        assert ours.device.memory_bytes == theirs.device.memory_bytes
        assert ours.device.matmul_flops_per_s("bfloat16") == theirs.device.matmul_flops_per_s(
            "bfloat16"
        )


def test_slices() -> None:
    cluster = parse_cluster("v5e:16x16+4")
    assert (cluster.shape, cluster.slices, cluster.num_devices) == ((16, 16), 4, 1024)
    assert cluster.devices_per_node == 256
    assert cluster.network is not None
    assert cluster.network.bytes_per_s == pytest.approx(3.125e9 * 0.8)
    one = parse_cluster("v5e:16x16+1")
    assert (one.text, one.network) == ("v5e:16x16", None)


def test_h100_constants() -> None:
    cluster = parse_cluster("h100:8x4")
    assert (cluster.num_devices, cluster.devices_per_node, cluster.shape) == (32, 8, (8, 4))
    assert cluster.kind == "hierarchy"
    device = cluster.device
    assert device.matmul_flops_per_s("bfloat16") == 9.89e14
    assert device.matmul_flops_per_s("float8_e4m3fn") == 1.979e15
    assert device.memory_bytes == 80_000_000_000
    assert cluster.link.bytes_per_s == pytest.approx(4.5e11 * 0.82)
    assert cluster.network is not None
    assert cluster.network.bytes_per_s == pytest.approx(5.0e10 * 0.94)


def test_torus() -> None:
    cluster = parse_cluster("v5p:4x4x8")
    assert (cluster.kind, cluster.shape, cluster.num_devices) == ("torus", (4, 4, 8), 128)
    assert cluster.devices_per_node == 128
    assert cluster.network is None


def test_cpu_devices_share_the_host() -> None:
    one, eight = parse_cluster("cpu:1").device, parse_cluster("cpu:8").device
    for dtype in ("float32", "bfloat16", "float64"):
        assert eight.matmul_flops_per_s(dtype) * 8 == one.matmul_flops_per_s(dtype)
    assert eight.memory_bytes_per_s * 8 == one.memory_bytes_per_s
    assert eight.memory_bytes * 8 == one.memory_bytes
    assert eight.overlap == 0.0


@pytest.mark.parametrize(
    ("kind", "dtype", "flops_per_s"),
    [
        ("a100", "float8_e5m2", 3.12e14),  # no float8 unit: widened to bfloat16
        ("v5p", "float16", 4.59e14),
        ("v5p", "float64", 1.4e13),  # no float64 unit: vector rate
        ("a100", "int32", 1.56e14),
        ("a100", "uint8", 6.24e14),
        ("h100", "complex128", 6.7e13),
    ],
)
def test_dtypes_without_their_own_peak(kind: str, dtype: str, flops_per_s: float) -> None:
    assert parse_cluster(f"{kind}:1").device.matmul_flops_per_s(dtype) == flops_per_s


@given(HIERARCHIES | TORUSES)
def test_text_round_trip(text: str) -> None:
    cluster = parse_cluster(text)
    assert parse_cluster(cluster.text) == cluster
    assert hash(parse_cluster(cluster.text)) == hash(cluster)


def test_text_is_canonical() -> None:
    assert parse_cluster(" H100-SXM-80GB:8x1 ").text == "h100:8"
    assert parse_cluster("tpu-v5p:4x4X8").text == "v5p:4x4x8"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("b900:8", r"unknown device 'b900'; known devices: a100, a100-40gb, a800, ascend910b,"),
        ("h100", r"cannot read cluster 'h100'; expected 'h100:8x4'"),
        (":8", r"cannot read cluster ':8'"),
        ("h100:8y4", r"bad shape '8y4'"),
        ("h100:8x", r"bad shape '8x'"),
        ("h100:", r"bad shape ''"),
        ("h100:0x4", r"sizes must be positive, got 0x4"),
        ("v5p:4x-1", r"sizes must be positive, got 4x-1"),
        ("h100:2x2x2", r"takes devices per node x nodes, got 2x2x2"),
        ("h100:16", r"holds at most 8 devices, got 16; write h100:8x2"),
        ("v5p:2x2x2x2", r"1 to 3 dimensions, got 2x2x2x2"),
        ("v5e:4x4+0", r"slices must be positive, got 0"),
        ("v5e:4x4+x", r"bad shape 'x' in cluster"),
        ("v5e:4x4+", r"bad shape '' in cluster"),
        ("h100:8x4+2", r"only a torus has slices, got 2 of h100; write .* h100:8x4"),
        ("no/such.toml", r"cannot read cluster file 'no/such.toml': No such file"),
    ],
)
def test_bad_texts(text: str, message: str) -> None:
    with pytest.raises(ClusterError, match=message):
        parse_cluster(text)


def test_file_with_overrides(tmp_path: Path) -> None:
    path = write(
        tmp_path,
        '[cluster]\ndevice = "h100"\ndevices_per_node = 4\nnodes = 3\n'
        "[device]\nmemory_bytes = 94_000_000_000\n"
        "[inter_node]\nbytes_per_s = 1e11\nefficiency = 1.0\n"
        "[peak_flops_per_s]\nbfloat16 = 8e14\n",
    )
    cluster = parse_cluster(path)
    assert cluster.shape == (4, 3)
    assert cluster.device.memory_bytes == 94_000_000_000
    assert cluster.device.matmul_flops_per_s("bfloat16") == 8e14
    assert cluster.network is not None
    assert cluster.network.bytes_per_s == 1e11
    assert cluster.link == parse_cluster("h100:4").link
    assert parse_cluster(cluster.text) == cluster


def test_file_without_overrides_is_the_catalog(tmp_path: Path) -> None:
    torus = parse_cluster(write(tmp_path, '[cluster]\ndevice = "v5p"\nshape = [4, 4, 8]\n'))
    assert torus.device == parse_cluster("v5p:4x4x8").device
    assert torus.shape == (4, 4, 8)
    many = '[cluster]\ndevice = "v5e"\nshape = [16, 16]\nslices = 4\n'
    assert parse_cluster(write(tmp_path, many)).network == parse_cluster("v5e:16x16+4").network
    node = parse_cluster(write(tmp_path, '[cluster]\ndevice = "a100"\n'))
    assert node.shape == (8, 1)


def test_larger_nodes_need_an_override(tmp_path: Path) -> None:
    head = '[cluster]\ndevice = "h100"\ndevices_per_node = 32\n'
    with pytest.raises(ClusterError, match="at most 8 devices, got 32"):
        parse_cluster(write(tmp_path, head))
    cluster = parse_cluster(write(tmp_path, head + "[node]\ndevices_per_node = 32\n"))
    assert cluster.shape == (32, 1)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[cluster]\nnodes = 2\n", r"expected a \[cluster\] table with device"),
        ("nodes = 2\n", r"expected a \[cluster\] table with device"),
        ("[cluster\n", r"not valid TOML"),
        ('[cluster]\ndevice = "b900"\n', r"unknown device 'b900'"),
        ('[cluster]\ndevice = "h100"\nnode = 2\n', r"unknown key 'node' in \[cluster\]"),
        ('[cluster]\ndevice = "h100"\nnodes = 1.5\n', r"must be whole numbers, got \[8, 1.5\]"),
        ('[cluster]\ndevice = "h100"\nnodes = 0\n', r"sizes must be positive, got 8x0"),
        ('[cluster]\ndevice = "v5p"\n', r"must be whole numbers, got None"),
        ('[cluster]\ndevice = "v5e"\nshape = [4]\nslices = 0\n', r"slices must be positive"),
        ('[cluster]\ndevice = "v5e"\nshape = [4]\nslices = "2"\n', r"slices = '2'; write"),
        ('[cluster]\ndevice = "h100"\nslices = 2\n', r"unknown key 'slices'"),
        ('[cluster]\ndevice = "h100"\n[intra_node]\nwires = 1\n', r"a symmetric matrix"),
        (
            '[cluster]\ndevice = "h100"\n[intra_node]\nwires = [[0, 1], [2, 0]]\n',
            r"wires must be \[\] or a symmetric matrix of link counts",
        ),
        (
            '[cluster]\ndevice = "h100"\n[intra_node]\nwires = [[0, 1], [1, 0]]\n',
            r"wires has 2 rows for 8 devices per node",
        ),
        ('[cluster]\ndevice = "h100"\n[gpu]\nx = 1\n', r"unknown table \[gpu\]"),
        ('link = 3\n[cluster]\ndevice = "h100"\n', r"unknown table \[link\]"),
        ('device = 3\n[cluster]\ndevice = "h100"\n', r"device must be a table, got 3"),
        ('[cluster]\ndevice = "h100"\n[device]\nkind = "x"\n', r"unknown key 'kind'"),
        ('[cluster]\ndevice = "h100"\n[device]\noverlap = 1.5\n', r"overlap must be between 0"),
        ('[cluster]\ndevice = "h100"\n[device]\nmemory_bytes = 0\n', r"must be positive, got 0"),
        ('[cluster]\ndevice = "h100"\n[device]\nmemory_bytes = 1.5\n', r"a whole number"),
        ('[cluster]\ndevice = "h100"\n[device]\nmemory_bytes = "1"\n', r"a number, got '1'"),
        ('[cluster]\ndevice = "h100"\n[intra_node]\nbytes_per_s = inf\n', r"a finite number"),
        ('[cluster]\ndevice = "h100"\n[intra_node]\nlatency_s = -1.0\n', r"zero or positive"),
        ('[cluster]\ndevice = "h100"\n[intra_node]\nefficiency = 0\n', r"above 0 and at most 1"),
        ('[cluster]\ndevice = "h100"\n[device]\nshared_cores = 1\n', r"must be true or false"),
    ],
)
def test_bad_files(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(ClusterError, match=message):
        parse_cluster(write(tmp_path, text))


@pytest.mark.parametrize(
    ("text", "size_bytes"),
    [
        ("80GB", 80_000_000_000),
        ("16GiB", 17_179_869_184),
        ("500MB", 500_000_000),
        ("1.5 kb", 1500),
        ("0.5GiB", 536_870_912),
        ("1024", 1024),
        ("2TiB", 2 * 2**40),
    ],
)
def test_parse_bytes(text: str, size_bytes: int) -> None:
    assert parse_bytes(text) == size_bytes


@given(st.integers(1, 10**18))
def test_parse_bytes_round_trip(size_bytes: int) -> None:
    assert parse_bytes(f"{size_bytes}") == parse_bytes(f"{size_bytes}B") == size_bytes


@given(st.text(string.ascii_letters + string.digits + " .-", max_size=8))
def test_parse_bytes_fails_in_one_way(text: str) -> None:
    with contextlib.suppress(ClusterError):
        assert parse_bytes(text) > 0


@pytest.mark.parametrize("text", ["", "GB", "8 XB", "-3GB", "1e9", "1..5GB"])
def test_bad_sizes(text: str) -> None:
    with pytest.raises(ClusterError, match=r"cannot read size .*; expected a number and one of"):
        parse_bytes(text)


def test_zero_size() -> None:
    with pytest.raises(ClusterError, match="size must be positive, got '0GB'"):
        parse_bytes("0GB")


def test_with_memory() -> None:
    cluster: Cluster = parse_cluster("h100:8")
    smaller = with_memory(cluster, parse_bytes("16GB"))
    assert smaller.device.memory_bytes == 16_000_000_000
    assert with_memory(smaller, cluster.device.memory_bytes) == cluster
    with pytest.raises(ClusterError, match="device memory must be positive, got 0 bytes"):
        with_memory(cluster, 0)
