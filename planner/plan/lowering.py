"""How a plan's shardings are said to the compiler.

A plan says which values have which shardings. A compiler's choice of collectives and layouts also
depends on where and in how many steps it is told so, and the same way is not the best everywhere:
decision 020 has the figures. So it is part of the plan.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

from costmodels import Cluster, reduces_instead
from planner.spec import MeshSpec


@dataclass(frozen=True)
class Lowering:
    """What is said how; the step computes the same.

    Attributes:
        behind: the sharding of a product that a transpose alone reads is said behind the transpose,
            where compilers join the two, and not in between.
        physical: an axis of the plan's mesh that spans several dimensions of a torus, or several
            nodes, is one axis of the jax mesh for each.
        staged: a change of sharding is said one axis of the jax mesh at a time.
        scattered: partial sums of products that become shards are reduce-scatters that the executor
            emits itself, one axis at a time; otherwise the compiler is left to find them.
    """

    behind: bool = False
    physical: bool = False
    staged: bool = False
    scattered: bool = False

    def __str__(self) -> str:
        """
        >>> str(Lowering(behind=True, staged=True)), str(Lowering())
        ('behind staged', 'plain')
        """
        return " ".join(f.name for f in fields(self) if getattr(self, f.name)) or "plain"


PLAIN = Lowering()
BEHIND = Lowering(behind=True)
BY_DIMENSION = Lowering(behind=True, physical=True, staged=True, scattered=True)
"""Every collective along one dimension of the torus."""


def default_lowering(cluster: Cluster, mesh: MeshSpec) -> Lowering:
    """What is best where nothing was compiled to find out.

    Over a whole slice, XLA:TPU has no reduce-scatter on a square torus, and on one of three
    dimensions no all-gather either: it sums whole or padded arrays instead, which doubles what is
    sent (`costmodels.reduces_instead`). There, collectives along one dimension each are said.

    >>> from costmodels import parse_cluster
    >>> mesh = MeshSpec(("fsdp",), (16,))
    >>> str(default_lowering(parse_cluster("v5e:4x4"), mesh))
    'behind physical scattered'
    """
    if cluster.kind != "torus":
        return PLAIN

    def lacks(kind: str) -> bool:
        axes = range(len(mesh.sizes))
        return any(reduces_instead(cluster, kind, mesh.sizes, (k,)) for k in axes)

    scattered, staged = lacks("reduce_scatter"), lacks("all_gather")
    return Lowering(True, scattered or staged, staged, scattered)


def lowerings(cluster: Cluster) -> tuple[Lowering, ...]:
    """Those worth compiling for a cluster, to see which is best."""
    if cluster.kind == "torus":
        return (BEHIND, Lowering(behind=True, physical=True, staged=True), BY_DIMENSION)
    return (PLAIN, BEHIND, Lowering(behind=True, staged=True))
