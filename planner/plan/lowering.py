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

    XLA:TPU has no gather over more than one dimension of a torus with three: it sums padded parts
    instead, which doubles what is sent (`costmodels.reduces_instead`). There, collectives
    along one dimension each are said.

    >>> from costmodels import parse_cluster
    >>> str(default_lowering(parse_cluster("v5e:4x4"), MeshSpec(("fsdp",), (16,))))
    'behind'
    """
    if cluster.kind != "torus":
        return PLAIN
    axes = range(len(mesh.sizes))
    if any(reduces_instead(cluster, "all_gather", mesh.sizes, (k,)) for k in axes):
        return BY_DIMENSION
    return BEHIND


def lowerings(cluster: Cluster) -> tuple[Lowering, ...]:
    """Those worth compiling for a cluster, to see which is best."""
    if cluster.kind == "torus":
        return (BEHIND, BY_DIMENSION, PLAIN)
    return (PLAIN, BEHIND, Lowering(behind=True, staged=True))
