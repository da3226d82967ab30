"""Clusters as people and clouds name them."""

from __future__ import annotations

import math

import pytest

from costmodels import ClusterError, parse_cluster
from costmodels._spelled import _CUBES, _INSTANCES, _SQUARES, respelled


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


def test_every_machine_has_eight_devices() -> None:
    for machine in _INSTANCES:
        assert parse_cluster(machine).num_devices == 8


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("v5p-60", r"v5p slices of 60 cores have no usual shape.*v5p-32 and v5p-64.*v5p:2x4x4"),
        ("v5e-10", r"slices of 10 chips.*v5e-8 and v5e-16"),
        ("8xH10", r"unknown device 'h10'.*did you mean h100\?"),
        ("0x8xh100", "positive"),
        ("2xa3-megagpu-8g", r"200 Gbit/s per GPU.*h100 400; write a .toml.*bytes_per_s = 2.5e\+10"),
        ("8xH100x2", r"unknown device 'h100x2'.*did you mean h100"),
        ("p5.96xlarge", r"cannot read cluster.*'p5.48xlarge'"),
    ],
)
def test_refused_with_what_to_do(text: str, said: str) -> None:
    with pytest.raises(ClusterError, match=said):
        parse_cluster(text)
