"""Collective costs: hand arithmetic on small clusters, and laws on many."""

from __future__ import annotations

import dataclasses
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from costmodels import (
    AnalyticCostModel,
    Cluster,
    ClusterError,
    Link,
    collective_coefficients,
    parse_cluster,
)
from costmodels._nodes import REFERENCE_BYTES
from costmodels.collectives import Collective

# Round numbers for hand arithmetic: 100 and 10 bytes/s, 1 and 5 seconds a step.
TWO_LEVEL = dataclasses.replace(
    parse_cluster("h100:4x4"), link=Link(100.0, 1.0), network=Link(10.0, 5.0)
)
KINDS: list[Collective] = ["all_gather", "reduce_scatter", "all_reduce", "all_to_all", "permute"]
CLUSTERS = [
    parse_cluster(text)
    for text in (
        *("h100:8x8", "a100:8x4", "h100:4x3", "v100:8x2", "l4:4x2", "cpu:8", "cpu:4x2"),
        *("v5p:4x4x8", "v5p:2x2x4", "v5e:4x16+3"),
    )
]


def torus(*dims: int) -> Cluster:
    cluster = dataclasses.replace(parse_cluster("v5p:4x4x4"), shape=dims)  # a ring of one, too
    return dataclasses.replace(cluster, link=Link(10.0, 1.0))


@st.composite
def cases(draw: st.DrawFn) -> tuple[Cluster, tuple[int, ...], tuple[int, ...]]:
    cluster = draw(st.sampled_from(CLUSTERS))
    mesh: list[int] = []
    room = cluster.num_devices
    for _ in range(draw(st.integers(1, 4))):
        mesh.append(draw(st.integers(1, max(1, room))))
        room //= mesh[-1]
    axes = draw(st.lists(st.integers(0, len(mesh) - 1), unique=True))
    return cluster, tuple(mesh), tuple(axes)


@pytest.mark.parametrize(
    ("kind", "mesh_shape", "axes", "alpha_s", "beta"),
    [
        # 4 members in one node: 3 steps of a ring, 3/4 of the bytes on the fast link.
        ("all_gather", (4, 4), (1,), 3.0, 0.75 / 100),
        ("reduce_scatter", (4, 4), (1,), 3.0, 0.75 / 100),
        ("all_reduce", (4, 4), (1,), 6.0, 1.5 / 100),
        # One member in each of 4 nodes.
        ("all_gather", (4, 4), (0,), 15.0, 0.75 / 10),
        ("all_reduce", (4, 4), (0,), 30.0, 1.5 / 10),
        # All 16: 12 steps inside, 3 across; a node's 4 links carry what enters it, 15/16.
        ("all_gather", (4, 4), (0, 1), 27.0, 15 / 16 / 40),
        ("all_gather", (16,), (0,), 27.0, 15 / 16 / 40),
        # A tree would take 26 s and 2 / 40: slower for many bytes.
        ("all_reduce", (16,), (0,), 54.0, 30 / 16 / 40),
        # Two nodes: in a tree each sends every byte to the other once, a ring almost twice.
        ("all_reduce", (2, 4), (0, 1), 16.0, 1 / 40),
        # 2 inside, 4 across: stride 2 in nodes of 4.
        ("all_gather", (8, 2), (0,), 19.0, 7 / 8 / 20),
        # 16 peers: 3 of 16 parts stay inside, 12 leave, at the same time.
        ("all_to_all", (16,), (0,), 12.0, 12 / 16 / 10),
        ("all_to_all", (4, 4), (1,), 2.0, 0.75 / 100),
        ("permute", (4, 4), (1,), 1.0, 1 / 100),
        ("permute", (16,), (0,), 5.0, 1 / 10),
        # Groups of 3 in nodes of 4: node boundaries cut them, so all bytes use the network.
        ("all_gather", (4, 3), (1,), 10.0, 2 / 3 / 10),
        # A mesh that leaves devices idle.
        ("all_gather", (2, 2), (0, 1), 3.0, 0.75 / 100),
    ],
)
def test_two_level_by_hand(
    kind: Collective,
    mesh_shape: tuple[int, ...],
    axes: tuple[int, ...],
    alpha_s: float,
    beta: float,
) -> None:
    got = collective_coefficients(TWO_LEVEL, kind, mesh_shape, axes)
    assert got == pytest.approx((alpha_s, beta))


SWITCH_ADDS = dataclasses.replace(
    TWO_LEVEL, link=Link(100.0, 1.0, 2.0, reduce_bytes_per_s=90.0, reduce_latency_s=7.0)
)
# A square 0-1-3-2 with double links along 0-1 and 2-3: 3 links a device.
SQUARE = ((0, 2, 1, 0), (2, 0, 0, 1), (1, 0, 0, 2), (0, 1, 2, 0))
DIRECT = dataclasses.replace(TWO_LEVEL, link=Link(90.0, 1.0, 2.0, wires=SQUARE))
SLICES = dataclasses.replace(
    parse_cluster("v5e:4x16+2"), link=Link(10.0, 1.0), network=Link(2.0, 50.0)
)


@pytest.mark.parametrize(
    ("cluster", "kind", "mesh_shape", "axes", "alpha_s", "beta"),
    [
        # The switch adds: each device sends its bytes once and the sum of its own part.
        (SWITCH_ADDS, "all_reduce", (4, 4), (1,), 7.0, 1.25 / 90),
        (SWITCH_ADDS, "all_gather", (4, 4), (1,), 5.0, 0.75 / 100),
        # Too few members for it to pay: a ring.
        (SWITCH_ADDS, "all_reduce", (8, 2), (1,), 4.0, 1.0 / 100),
        # Between nodes the network is slower than either.
        (SWITCH_ADDS, "all_reduce", (16,), (0,), 56.0, 30 / 16 / 40),
        (SWITCH_ADDS, "all_reduce", (2, 4), (0, 1), 17.0, 1 / 40),
        # Links to single devices: 2 of 3 for the pair 0-1, 1 of 3 for 0-2, all for the four.
        (DIRECT, "all_gather", (8, 2), (1,), 3.0, 0.5 / 60),
        (DIRECT, "all_gather", (4, 2, 2), (1,), 3.0, 0.5 / 30),
        (DIRECT, "all_gather", (4, 4), (1,), 5.0, 0.75 / 90),
        (DIRECT, "all_to_all", (4, 4), (1,), 4.0, 0.75 / 90),
        (DIRECT, "permute", (8, 2), (1,), 3.0, 1 / 60),
        # 1-2 have no link of their own: one, through a third device.
        (DIRECT, "permute", (4, 4), (1,), 3.0, 1 / 30),
        # Slices: a line of 4 and a ring of 16 inside (3 links), then a 64th between the two.
        (SLICES, "all_gather", (2, 64), (1,), 11.0, 63 / 64 / 30),
        (SLICES, "all_gather", (2, 64), (0,), 50.0, 0.5 / 2),
        (SLICES, "all_gather", (128,), (0,), 61.0, 63 / 64 / 30 + 1 / 128 / 2),
        (SLICES, "all_reduce", (128,), (0,), 122.0, 2 * (63 / 64 / 30 + 1 / 128 / 2)),
        # Half of a shard stays: a quarter of 16 crosses each of 2 links; the other half leaves.
        (SLICES, "all_to_all", (128,), (0,), 61.0, 0.5 * 4 / 20 + 0.5 / 2),
        (SLICES, "permute", (2, 64), (0,), 50.0, 1 / 2),
        # Groups of 3 chips, cut by the slice's end: all of it between slices.
        (SLICES, "all_gather", (42, 3), (1,), 100.0, 2 / 3 / 2),
    ],
)
def test_links_of_other_kinds_by_hand(
    cluster: Cluster,
    kind: Collective,
    mesh_shape: tuple[int, ...],
    axes: tuple[int, ...],
    alpha_s: float,
    beta: float,
) -> None:
    got = collective_coefficients(cluster, kind, mesh_shape, axes)
    assert got == pytest.approx((alpha_s, beta))


@pytest.mark.parametrize(
    ("cluster", "kind", "mesh_shape", "axes", "alpha_s", "beta"),
    [
        # A ring of 8: 4 hops to the far side, two links.
        (torus(4, 4, 8), "all_gather", (16, 8), (1,), 4.0, 7 / 8 / 20),
        (torus(4, 4, 8), "all_reduce", (16, 8), (1,), 8.0, 7 / 4 / 20),
        # Two rings of 4 at once: four links, 2 + 2 hops.
        (torus(4, 4, 8), "all_gather", (16, 8), (0,), 4.0, 15 / 16 / 40),
        (torus(4, 4, 8), "all_gather", (4, 4, 8), (0, 1), 4.0, 15 / 16 / 40),
        (torus(4, 4, 8), "all_gather", (4, 4, 8), (0, 2), 6.0, 31 / 32 / 40),
        # No wrap-around below 4: a line of 2.
        (torus(2, 2, 4), "all_gather", (2, 8), (0,), 1.0, 0.5 / 10),
        # Half of a ring of 8: a line of 4.
        (
            torus(
                8,
            ),
            "all_gather",
            (2, 4),
            (1,),
            3.0,
            0.75 / 10,
        ),
        # Every fourth chip of a ring of 8: 4 groups share the two links.
        (
            torus(
                8,
            ),
            "all_gather",
            (2, 4),
            (0,),
            4.0,
            0.5 / (20 / 4),
        ),
        # All-to-all on a ring of 8: n / 8 of the shard crosses each link (n^2 / 4 / n / 2).
        (
            torus(
                8,
            ),
            "all_to_all",
            (8,),
            (0,),
            4.0,
            1.0 / 10,
        ),
        # On a line of 2 half of the shard crosses the link.
        (
            torus(
                2,
            ),
            "all_to_all",
            (2,),
            (0,),
            1.0,
            0.5 / 10,
        ),
        (
            torus(
                8,
            ),
            "permute",
            (8,),
            (0,),
            1.0,
            1 / 10,
        ),
        (
            torus(
                2,
            ),
            "permute",
            (2,),
            (0,),
            1.0,
            1 / 10,
        ),
        (
            torus(
                8,
            ),
            "permute",
            (2, 4),
            (0,),
            4.0,
            4 / 10,
        ),
        # 3 of a ring of 8 does not divide it: one line.
        (
            torus(
                8,
            ),
            "all_gather",
            (2, 3),
            (1,),
            2.0,
            2 / 3 / 10,
        ),
    ],
)
def test_torus_by_hand(
    cluster: Cluster,
    kind: Collective,
    mesh_shape: tuple[int, ...],
    axes: tuple[int, ...],
    alpha_s: float,
    beta: float,
) -> None:
    got = collective_coefficients(cluster, kind, mesh_shape, axes)
    assert got == pytest.approx((alpha_s, beta))


@given(cases(), st.sampled_from(KINDS))
def test_costs_are_positive_unless_the_group_is_one_device(
    case: tuple[Cluster, tuple[int, ...], tuple[int, ...]], kind: Collective
) -> None:
    cluster, mesh, axes = case
    alpha_s, beta = collective_coefficients(cluster, kind, mesh, axes)
    if math.prod(mesh[axis] for axis in axes) == 1:
        assert (alpha_s, beta) == (0.0, 0.0)
    else:
        # beta above zero makes the time grow with the payload
        assert alpha_s > 0.0
        assert beta > 0.0
        assert math.isfinite(alpha_s + beta)


def seconds(
    cluster: Cluster, kind: Collective, mesh: tuple[int, ...], axes: tuple[int, ...]
) -> float:
    """Time of a 64 MiB collective."""
    alpha_s, beta = collective_coefficients(cluster, kind, mesh, axes)
    return alpha_s + beta * REFERENCE_BYTES


@given(cases())
def test_all_reduce_costs_at_most_reduce_scatter_and_all_gather(
    case: tuple[Cluster, tuple[int, ...], tuple[int, ...]],
) -> None:
    whole, scatter, gather = (
        seconds(case[0], kind, *case[1:]) for kind in ("all_reduce", "reduce_scatter", "all_gather")
    )
    assert scatter == gather
    assert whole <= (scatter + gather) * (1 + 1e-12)


def test_a_large_group_takes_a_tree() -> None:
    # 1024 nodes: a ring would take 2 * (7 * 1024 * 1.9e-6 + 1023 * 1.4e-5) = 56 ms of steps.
    cluster = parse_cluster("a100:8x1024")
    alpha_s, beta = collective_coefficients(cluster, "all_reduce", (8192,), (0,))
    assert alpha_s == pytest.approx(3e-5 + 2e-5 + 2 * (7 * 1.9e-6 + 10 * 1.4e-5))
    assert beta == pytest.approx(2 / (8 * 2.5e10 * 0.94))


@given(st.sampled_from(["a100:8x64", "v100:8x64", "v5e:16x16+4"]), st.sampled_from(KINDS[:4]))
def test_more_members_never_cost_less(text: str, kind: Collective) -> None:
    cluster = parse_cluster(text)
    count = cluster.num_devices
    sizes = [2**k for k in range(1, count.bit_length())]
    alphas = [collective_coefficients(cluster, kind, (count // n, n), (1,))[0] for n in sizes]
    if kind != "all_reduce":  # a ring that becomes a tree has fewer steps
        assert alphas == sorted(alphas)
    if text == "a100:8x64":  # more links, or both directions of a ring, open with more members
        costs = [seconds(cluster, kind, (count // n, n), (1,)) for n in sizes]
        assert costs == sorted(costs)


@given(cases(), st.sampled_from(KINDS))
def test_order_of_axes_does_not_matter(
    case: tuple[Cluster, tuple[int, ...], tuple[int, ...]], kind: Collective
) -> None:
    cluster, mesh, axes = case
    assert collective_coefficients(cluster, kind, mesh, axes) == collective_coefficients(
        cluster, kind, mesh, axes[::-1]
    )


@given(cases(), st.sampled_from(KINDS))
def test_axes_of_size_one_do_not_matter(
    case: tuple[Cluster, tuple[int, ...], tuple[int, ...]], kind: Collective
) -> None:
    cluster, mesh, axes = case
    shifted = (0, *(axis + 1 for axis in axes))
    assert collective_coefficients(cluster, kind, (1, *mesh), shifted) == (
        collective_coefficients(cluster, kind, mesh, axes)
    )


@given(
    st.sampled_from(["h100:8x8", "a100:8x8", "cpu:8x8"]), st.integers(2, 8), st.sampled_from(KINDS)
)
def test_inside_a_node_is_never_dearer(text: str, size: int, kind: Collective) -> None:
    cluster = parse_cluster(text)
    inside = collective_coefficients(cluster, kind, (size,), (0,))
    across = collective_coefficients(cluster, kind, (size, 8), (0,))
    assert inside[0] <= across[0]
    assert inside[1] <= across[1]


@given(cases(), st.sampled_from(KINDS))
def test_faster_links_never_cost_more(
    case: tuple[Cluster, tuple[int, ...], tuple[int, ...]], kind: Collective
) -> None:
    cluster, mesh, axes = case
    faster = dataclasses.replace(
        cluster,
        link=dataclasses.replace(
            cluster.link,
            bytes_per_s=cluster.link.bytes_per_s * 2,
            latency_s=cluster.link.latency_s / 2,
        ),
    )
    assert seconds(faster, kind, mesh, axes) <= seconds(cluster, kind, mesh, axes)


@pytest.mark.parametrize(
    ("kind", "mesh_shape", "axes", "message"),
    [
        ("gossip", (4, 4), (0,), r"unknown collective 'gossip'; expected one of: all_gather"),
        ("all_gather", (4, 8), (0,), r"needs 32 devices, but cluster h100:4x4 has 16"),
        ("all_gather", (4, 0), (0,), r"mesh sizes must be positive, got \(4, 0\)"),
        ("all_gather", (4, 4), (2,), r"bad mesh axes \(2,\); expected distinct .* 0 to 1"),
        ("all_gather", (4, 4), (-1,), r"bad mesh axes \(-1,\)"),
        ("all_gather", (4, 4), (0, 0), r"bad mesh axes \(0, 0\)"),
    ],
)
def test_bad_requests(
    kind: Collective, mesh_shape: tuple[int, ...], axes: tuple[int, ...], message: str
) -> None:
    with pytest.raises(ClusterError, match=message):
        collective_coefficients(TWO_LEVEL, kind, mesh_shape, axes)


@pytest.mark.parametrize(
    ("text", "mesh", "axes", "scatter", "gather"),
    [
        ("v5p:2x2x2", (8,), (0,), True, False),
        ("v5p:2x2x2", (4, 2), (0, 1), True, False),
        ("v5p:2x2x2", (4, 2), (0,), False, False),
        ("v5p:4x4x4", (64,), (0,), True, True),
        ("v5p:4x4x4", (16, 4), (0,), False, False),
        ("v5e:4x4", (16,), (0,), True, False),
        ("v5e:2x4", (8,), (0,), False, False),
        ("v5e:2x2", (4,), (0,), False, False),
        ("v5e:4x8", (32,), (0,), False, False),
        ("h100:8x2", (16,), (0,), False, False),
    ],
)
def test_what_tpu_compilers_run_as_an_all_reduce_costs_one(
    text: str, mesh: tuple[int, ...], axes: tuple[int, ...], scatter: bool, gather: bool
) -> None:
    model = AnalyticCostModel(parse_cluster(text))
    of = {k: model.collective_coefficients(k, mesh, axes) for k in KINDS}  # type: ignore[arg-type]
    assert (of["reduce_scatter"] == of["all_reduce"]) is scatter
    assert (of["all_gather"] == of["all_reduce"]) is gather


@pytest.mark.parametrize("kind", ["all_gather", "reduce_scatter"])
def test_a_whole_slice_of_several_costs_what_a_single_one_does(kind: Collective) -> None:
    """XLA:TPU sums instead, in each slice; not over a group that lies across slices."""
    one, two = (AnalyticCostModel(parse_cluster(c)) for c in ("v5p:4x4x4", "v5p:4x4x4+2"))
    inside = two.collective_coefficients(kind, (2, 64), (1,))
    assert inside == one.collective_coefficients(kind, (64,), (0,))
    assert inside == two.collective_coefficients("all_reduce", (2, 64), (1,))
    across = two.collective_coefficients(kind, (64, 2), (0,))
    assert across != two.collective_coefficients("all_reduce", (64, 2), (0,))
