"""How the executor lowers a plan's shardings.

The same shardings compile to different collectives and layouts, depending on where constraints
stand and how many mesh axes each one changes. No choice wins everywhere (decision 020), so the
choice is part of the plan.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

from costmodels import Cluster


@dataclass(frozen=True)
class Lowering:
    """Options of lowering; they do not change the result of a step.

    Attributes:
        physical: a mesh axis that spans several torus dimensions (or nodes) becomes one jax mesh
            axis per dimension.
        staged: each constraint changes the sharding along one jax mesh axis.
        scattered: products whose partial sums become shards are followed by explicit
            reduce-scatters, one per jax mesh axis, instead of constraints.
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
"""Every collective runs along one torus dimension."""


def default_lowering(cluster: Cluster) -> Lowering:
    """The lowering of a plan that is not confirmed by a compiler (figures: decision 020).

    XLA:TPU replaces collectives over several torus dimensions: a reduce-scatter over two becomes an
    all-reduce and a slice; over three, an all-gather becomes an all-reduce of padded shards as well
    (`costmodels._torus.reduces_instead`). XLA:GPU all-gathers the whole value where one constraint
    moves two mesh axes; two constraints become two all-to-alls.

    >>> from costmodels import parse_cluster
    >>> [str(default_lowering(parse_cluster(c))) for c in ("h100:8x2", "v5e:4x4")]
    ['staged scattered', 'physical scattered']
    """
    if cluster.kind != "torus":
        return PLAIN if cluster.device.kind == "cpu" else STEP_BY_STEP
    dimensions = sum(length > 1 for length in cluster.shape)
    return BY_DIMENSION if dimensions > 2 else SCATTERED if dimensions == 2 else PLAIN


def lowerings(cluster: Cluster) -> tuple[Lowering, ...]:
    """Lowerings that ``confirm`` compiles."""
    if cluster.kind == "torus":
        return (BY_DIMENSION, SCATTERED, PLAIN)
    return (STEP_BY_STEP, PLAIN)
