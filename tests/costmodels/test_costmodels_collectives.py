"""Collective costs: hand arithmetic on small clusters, and laws on many."""

from __future__ import annotations

import dataclasses
import itertools
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from costmodels import Cluster, ClusterError, Link, collective_coefficients, parse_cluster
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
    cluster = parse_cluster("v5p:" + "x".join(map(str, dims)))
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
        # One member in each of 4 nodes; an all-reduce goes up and down a tree of 2 levels.
        ("all_gather", (4, 4), (0,), 15.0, 0.75 / 10),
        ("all_reduce", (4, 4), (0,), 20.0, 1.5 / 10),
        # All 16: 12 steps inside, 3 across; a node's 4 links carry what enters it, 15/16.
        ("all_gather", (4, 4), (0, 1), 27.0, 15 / 16 / 40),
        ("all_gather", (16,), (0,), 27.0, 15 / 16 / 40),
        ("all_reduce", (16,), (0,), 26.0, 30 / 16 / 40),
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


SWITCH_ADDS = dataclasses.replace(TWO_LEVEL, link=Link(100.0, 1.0, 2.0, 90.0))
DIRECT = dataclasses.replace(TWO_LEVEL, link=Link(90.0, 1.0, 2.0, peers=3))
SLICES = dataclasses.replace(
    parse_cluster("v5e:4x16+2"), link=Link(10.0, 1.0), network=Link(2.0, 50.0)
)


@pytest.mark.parametrize(
    ("cluster", "kind", "mesh_shape", "axes", "alpha_s", "beta"),
    [
        # The switch adds: each device sends its bytes once and the sum of its own part.
        (SWITCH_ADDS, "all_reduce", (4, 4), (1,), 8.0, 1.25 / 90),
        (SWITCH_ADDS, "all_gather", (4, 4), (1,), 5.0, 0.75 / 100),
        # Too few members for it to pay: a ring.
        (SWITCH_ADDS, "all_reduce", (8, 2), (1,), 4.0, 1.0 / 100),
        # Between nodes the network is slower than either.
        (SWITCH_ADDS, "all_reduce", (16,), (0,), 28.0, 30 / 16 / 40),
        # Links to single peers: 1 of 3 for a pair, all of them for four.
        (DIRECT, "all_gather", (8, 2), (1,), 3.0, 0.5 / 30),
        (DIRECT, "all_gather", (4, 4), (1,), 5.0, 0.75 / 90),
        (DIRECT, "all_to_all", (4, 4), (1,), 4.0, 0.75 / 90),
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


@given(cases())
def test_all_reduce_costs_at_most_reduce_scatter_and_all_gather(
    case: tuple[Cluster, tuple[int, ...], tuple[int, ...]],
) -> None:
    whole = collective_coefficients(case[0], "all_reduce", *case[1:])
    scatter = collective_coefficients(case[0], "reduce_scatter", *case[1:])
    gather = collective_coefficients(case[0], "all_gather", *case[1:])
    assert scatter == gather
    for total, first, second in zip(whole, scatter, gather, strict=True):
        assert total <= (first + second) * (1 + 1e-12)
    assert whole[1] >= gather[1]


@given(st.sampled_from(["h100:8x64", "a100:8x64", "v5e:16x16+4"]), st.sampled_from(KINDS[:4]))
def test_more_members_never_cost_less(text: str, kind: Collective) -> None:
    cluster = parse_cluster(text)
    sizes = [2**k for k in range(1, cluster.num_devices.bit_length())]
    costs = [
        collective_coefficients(cluster, kind, (cluster.num_devices // n, n), (1,)) for n in sizes
    ]
    for small, large in itertools.pairwise(costs):
        assert small[0] <= large[0]


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
        cluster, link=Link(cluster.link.bytes_per_s * 2, cluster.link.latency_s / 2)
    )
    base = collective_coefficients(cluster, kind, mesh, axes)
    better = collective_coefficients(faster, kind, mesh, axes)
    assert better[0] <= base[0]
    assert better[1] <= base[1]


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
