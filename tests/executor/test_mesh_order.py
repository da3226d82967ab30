"""Devices of a torus stand in the mesh where the cost model has them."""

from __future__ import annotations

import itertools
import random
from types import SimpleNamespace
from typing import Any

import pytest

from executor import detect_cluster
from executor.run.mesh import in_order


def chips(*shape: int, slices: int = 1, cores: int = 1, kind: str = "TPU v5e") -> list[Any]:
    """Descriptions of TPUs in random order."""
    sizes = (*shape, *(1,) * (3 - len(shape)))
    places = itertools.product(range(slices), *(range(n) for n in sizes), range(cores))
    devices = [
        SimpleNamespace(
            platform="tpu", device_kind=kind, slice_index=s, coords=at, core_on_chip=c,
            process_index=0,
        )
        for s, *at, c in places
    ]  # fmt: skip
    random.Random(0).shuffle(devices)
    return devices


def test_tpus_are_numbered_by_their_coordinates() -> None:
    ordered: list[Any] = in_order(chips(2, 4, slices=2, cores=2))
    places = [(d.slice_index, *d.coords, d.core_on_chip) for d in ordered]
    assert places == sorted(places) and len(set(places)) == 32
    others: list[Any] = [SimpleNamespace(platform="gpu", id=k) for k in (2, 0, 1)]
    assert in_order(others) == others


@pytest.mark.parametrize(
    "devices, text",
    [
        (chips(4, 4), "v5e:4x4"),
        (chips(2, 2, 1, kind="TPU v5p"), "v5p:2x2"),
        (chips(2, 2, 4, kind="TPU v5p"), "v5p:2x2x4"),
        (chips(4, 4, slices=2), "v5e:4x4+2"),
        (chips(2, 2, 1, cores=2, kind="TPU7x"), "tpu7x:2x2x1x2"),
        (chips(1), "v5e:1"),
    ],
)
def test_the_shape_of_a_torus_is_detected(devices: list[Any], text: str) -> None:
    assert detect_cluster(devices) == text


def test_part_of_a_slice_is_no_torus() -> None:
    assert detect_cluster(chips(4, 4)[:5]) == "v5e:5"
