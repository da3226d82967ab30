"""Clusters as people and clouds name them."""

from __future__ import annotations

import math
import re
from pathlib import Path

import pytest

from costmodels import ClusterError, parse_cluster, usual_sizes
from costmodels._catalog import catalog_entry
from costmodels._spelled import _CUBES, _INSTANCES, _SQUARES, meant, respelled

API = Path(__file__).resolve().parents[2] / "docs" / "reference" / "api.md"


@pytest.mark.parametrize(
    ("text", "same"),
    [
        ("8xH100", "h100:8"),
        ("8 x h100", "h100:8"),
        ("2x8xA100", "a100:8x2"),
        ("4x8xh200", "h200:8x4"),
        ("v5p-8", "v5p:2x2x1"),
        ("v5p-64", "v5p:2x4x4"),
        ("tpu-v4-32", "v4:2x2x4"),
        ("v5litepod-16", "v5e:4x4"),
        ("v5e-256+2", "v5e:16x16+2"),
        ("v5p:64", "v5p:4x4x4"),
        ("v5e:16+2", "v5e:4x4+2"),
        ("v5e:6", "v5e:6"),  # of no usual shape: a line
        ("V6E-8", "v6e:2x4"),
        ("p5.48xlarge", "h100:8"),
        ("4xp5.48xlarge", "h100:8x4"),
        ("2 x a3-ultragpu-8g", "h200:8x2"),
        ("a3-highgpu-8g", "h100:8"),
        ("Standard_ND96isr_H100_v5", "h100:8"),
        ("ND96isr_MI300X_v5", "mi300x:8"),
        ("2 x BM.GPU.MI300X.8", "mi300x:8x2"),
        ("4xp6-b300.48xlarge", "b300:8x4"),
        ("nvl72", "gb200:72"),
        ("2xnvl72", "gb200:72x2"),
        ("GB300-NVL72", "gb300:72"),
        ("nvl72:36", "gb200:36"),
        ("u-p6e-gb200x72", "gb200:72"),
        ("a4x-highgpu-4g", "gb200:4"),
        ("3xa4x-highgpu-4g", "gb200:12"),
        ("18xa4x-highgpu-4g", "gb200:72"),
        ("2xa3-megagpu-8g", "A3-megagpu-8g:8x2"),
        ("2xStandard_ND96asr_v4", "a100-40gb:8x2"),
        ("36xp6e-gb200.36xlarge", "gb200:72x2"),
        ("36xStandard_ND128isr_GB300_v6", "gb300:72x2"),
        ("trn2.48xlarge", "trn2:4x4"),
        ("4xtrn2.48xlarge", "trn2:4x4+4"),
        ("u-trn2x64", "trn2:4x4x4"),
        ("trn2:8", "trn2:2x4"),
        ("trn2:16+2", "trn2:4x4+2"),
        ("8xMI300X", "mi300x:8"),
        ("2x8xRTX-4090", "rtx4090:8x2"),
    ],
)
def test_is_the_cluster_that_is_meant(text: str, same: str) -> None:
    assert parse_cluster(text) == parse_cluster(same)


@pytest.mark.parametrize("text", ["h100:8x4", "v5p:4x4x8", "cpu:8", "some/profile.toml:8x4", "x"])
def test_other_texts_stay(text: str) -> None:
    assert respelled(text) == text


def test_slices_have_the_chips_that_they_are_listed_under() -> None:
    for shapes in (_CUBES, _SQUARES):
        assert all(math.prod(shape) == chips for chips, shape in shapes.items())
    for chips, shape in _CUBES.items():
        assert parse_cluster(f"v5p-{2 * chips}").num_devices == math.prod(shape)


@pytest.mark.parametrize(("name", "machine"), _INSTANCES.items(), ids=lambda value: str(value))
def test_a_machine_is_its_kind_and_size(name: str, machine: tuple[str, float, int, int]) -> None:
    kind, _, devices, _ = machine
    cluster = parse_cluster(name.upper())
    assert (cluster.device.kind, cluster.num_devices) == (kind, devices)
    assert parse_cluster(cluster.text) == cluster


@pytest.mark.parametrize(("name", "machine"), _INSTANCES.items(), ids=lambda value: str(value))
def test_many_machines_have_the_network_of_their_type(
    name: str, machine: tuple[str, float, int, int]
) -> None:
    kind, gbits, devices, domain = machine
    entry = catalog_entry(kind)
    network = entry["inter_node" if "node" in entry else "inter_slice"]
    text = f"{2 * domain}x{name}"
    cluster = parse_cluster(text)
    assert cluster.network is not None
    assert cluster.num_devices == 2 * domain * devices
    assert cluster.devices_per_node == domain * devices
    assert parse_cluster(cluster.text) == cluster
    assert cluster.network.bytes_per_s == pytest.approx(
        gbits * 0.125e9 * network["efficiency"], rel=0.01
    )


def test_the_reference_lists_every_machine() -> None:
    text = API.read_text(encoding="utf-8").lower()
    assert [name for name in _INSTANCES if f"`{name}`" not in text] == []


def test_usual_sizes_end_a_node_at_its_size() -> None:
    sizes = usual_sizes("gb200")
    assert sizes[6:9] == ("gb200:64", "gb200:72", "gb200:72x2")
    assert usual_sizes("mi300x")[:5] == (
        "mi300x:1",
        "mi300x:2",
        "mi300x:4",
        "mi300x:8",
        "mi300x:8x2",
    )
    assert usual_sizes("trn2")[-2:] == ("trn2:4x4", "trn2:4x4x4")
    for kind in ("gb200", "ascend910c", "trn2"):
        assert all(parse_cluster(text).text == text for text in usual_sizes(kind))


@pytest.mark.parametrize(
    ("text", "near"),
    [
        ("h100", "h100:8"),
        ("h100-8", "h100:8"),
        ("H100 x 8", "h100:8"),
        ("2x8A100", "a100:8x2"),
        ("A100-80GB", "a100:8"),
        ("v5p-64x2", "v5p:2x4x4+2"),
        ("ct5p-hightpu-4t", "v5p:2x2x1"),
        ("ironwood-8", "tpu7x:2x2x1x2"),
        ("p5.48xlargex2", "2xp5.48xlarge"),
    ],
)
def test_what_is_meant_is_a_cluster_and_is_proposed(text: str, near: str) -> None:
    assert meant(text) == near
    assert parse_cluster(near).num_devices > 0
    with pytest.raises(ClusterError, match=f"did you mean '{re.escape(near)}'"):
        parse_cluster(text)


@pytest.mark.parametrize("text", ["nonsense", "8", "9999999xH100", "1x2x3x4 h100"])
def test_nothing_is_proposed_where_it_can_not_be_told(text: str) -> None:
    assert meant(text) == ""


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("v5p-60", r"v5p slices of 60 cores have no usual shape.*v5p-32 and v5p-64.*v5p:2x4x4"),
        ("v5e-10", r"slices of 10 chips.*v5e-8 and v5e-16"),
        ("8xH10", r"unknown device 'h10'.*did you mean h100\?"),
        ("0x8xh100", "positive"),
        ("8xH100x2", r"unknown device 'h100x2'.*did you mean h100"),
        ("p5.96xlarge", r"cannot read cluster.*did you mean 'p5.48xlarge'\?.*h100:8"),
        ("2xa3-megagpu-8", r"did you mean 'a3-megagpu-8g'\?"),
        ("Standard_ND96isr_MI300_v5", r"did you mean 'nd96isr_mi300x_v5'\?"),
        ("20xa4x-highgpu-4g", r"no whole NVLink domains of 18; give a multiple of 18"),
        ("0xtrn2.48xlarge", "positive"),
        ("8xmi30x", r"unknown device 'mi30x'.*did you mean mi300x\?"),
        ("gb200:144", r"a gb200 node holds at most 72 devices, got 144; write gb200:72x2"),
    ],
)
def test_refused_with_what_to_do(text: str, said: str) -> None:
    with pytest.raises(ClusterError, match=said):
        parse_cluster(text)
