"""How a plan's shardings are said to the compiler.

A plan says which values have which shardings. A compiler's choice of collectives and layouts also
depends on where and in how many steps it is told so, and the same way is not the best everywhere:
decision 020 has the figures. So it is part of the plan.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

from costmodels import Cluster


@dataclass(frozen=True)
class Lowering:
    """What is said how; the step computes the same.

    Attributes:
        physical: an axis of the plan's mesh that spans several dimensions of a torus, or several
            nodes, is one axis of the jax mesh for each.
        staged: a change of sharding is said one axis of the jax mesh at a time.
        scattered: partial sums of products that become shards are reduce-scatters that the executor
            emits itself, one axis at a time; otherwise the compiler is left to find them.
    """

    physical: bool = False
    staged: bool = False
    scattered: bool = False

    def __str__(self) -> str:
        """
        >>> str(Lowering(physical=True, staged=True)), str(Lowering())
        ('physical staged', 'plain')
        """
        return " ".join(f.name for f in fields(self) if getattr(self, f.name)) or "plain"


PLAIN = Lowering()
STEP_BY_STEP = Lowering(staged=True, scattered=True)
SCATTERED = Lowering(physical=True, scattered=True)
BY_DIMENSION = Lowering(physical=True, staged=True, scattered=True)
"""Every collective along one dimension of the torus."""


def default_lowering(cluster: Cluster) -> Lowering:
    """What is best where nothing was compiled to find out (decision 020 has the figures).

    XLA:TPU has few collectives over several dimensions of a torus: of two it sums whole arrays in
    place of a reduce-scatter, of three it also sums padded ones in place of an all-gather
    (`costmodels._torus.reduces_instead`), which doubles what is
    sent. So there, what it lacks is said along one dimension at a time.

    XLA:GPU gathers a whole value where one constraint moves two axes; in two it is two all-to-alls.

    >>> from costmodels import parse_cluster
    >>> [str(default_lowering(parse_cluster(c))) for c in ("h100:8x2", "v5e:4x4")]
    ['staged scattered', 'physical scattered']
    """
    if cluster.kind != "torus":
        return PLAIN if cluster.device.kind == "cpu" else STEP_BY_STEP
    dimensions = sum(length > 1 for length in cluster.shape)
    return BY_DIMENSION if dimensions > 2 else SCATTERED if dimensions == 2 else PLAIN


def lowerings(cluster: Cluster) -> tuple[Lowering, ...]:
    """Those worth compiling for a cluster, to see which is best."""
    if cluster.kind == "torus":
        return (BY_DIMENSION, SCATTERED, PLAIN)
    return (STEP_BY_STEP, PLAIN)
