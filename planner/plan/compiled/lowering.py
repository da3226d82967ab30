"""How the executor lowers a plan's shardings.

The same shardings compile to different collectives and layouts, depending on where constraints
stand and how many mesh axes each one changes. No choice wins everywhere (decision 020), so the
choice is part of the plan.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from costmodels import Cluster


@dataclass(frozen=True)
class Lowering:
    """Options of lowering; they do not change the result of a step.

    Attributes:
        dimensions: dimensions of the torus, slices first; a mesh axis that spans several of them
            becomes one jax mesh axis per dimension. Empty: mesh axes stay as they are.
        staged: each constraint changes the sharding along one jax mesh axis; a permutation of
            shards stays one constraint.
        joined: the jax mesh axes of one mesh axis change together.
        scattered: products whose partial sums become shards are followed by explicit
            reduce-scatters, one per jax mesh axis, instead of constraints.
        turned: transposes beside products are moved to the smallest of the product's arrays.
    """

    dimensions: tuple[int, ...] = ()
    staged: bool = False
    joined: bool = False
    scattered: bool = False
    turned: bool = False

    @property
    def as_written(self) -> bool:
        """Whether every sharding is one constraint."""
        return dataclasses.replace(self, turned=False) == Lowering()

    def __str__(self) -> str:
        """
        >>> str(Lowering((1, 4, 4), staged=True)), str(Lowering())
        ('physical staged', 'plain')
        """
        staged = "joined" if self.joined else "staged"
        given = {
            "physical": self.dimensions,
            staged: self.staged,
            "scattered": self.scattered,
            "turned": self.turned,
        }
        return " ".join(name for name, value in given.items() if value) or "plain"


PLAIN = Lowering()
PLAIN_TURNED = Lowering(turned=True)
STEP_BY_STEP = Lowering(staged=True, scattered=True, turned=True)


def by_dimension(cluster: Cluster) -> Lowering:
    """All resharding along one torus dimension at a time."""
    return Lowering((cluster.slices, *cluster.shape), staged=True, scattered=True)


def by_axis(cluster: Cluster) -> Lowering:
    """Resharding along one mesh axis at a time, reduce-scatters along one torus dimension."""
    dimensions = (cluster.slices, *cluster.shape)
    return Lowering(dimensions, staged=True, joined=True, scattered=True)


def default_lowering(cluster: Cluster) -> Lowering:
    """The lowering of a plan that is not confirmed by a compiler (figures: decision 020).

    XLA:TPU replaces collectives over several torus dimensions: a reduce-scatter over two becomes an
    all-reduce and a slice; over three, an all-gather becomes an all-reduce of padded shards as well
    (`costmodels._torus.reduces_instead`). XLA:GPU all-gathers the whole value where one constraint
    moves two mesh axes; two constraints become two all-to-alls.

    XLA:GPU and XLA:CPU transpose an array in memory between a product and its reader; XLA:TPU does
    not (decision 036).

    >>> from costmodels import parse_cluster
    >>> [str(default_lowering(parse_cluster(c))) for c in ("h100:8x2", "v5e:4x4")]
    ['staged scattered turned', 'physical joined scattered']
    """
    if cluster.kind != "torus":
        return PLAIN_TURNED if cluster.device.kind == "cpu" else STEP_BY_STEP
    count = sum(length > 1 for length in cluster.shape)
    return by_dimension(cluster) if count > 2 else by_axis(cluster) if count == 2 else PLAIN


def on_named_axes(how: Lowering) -> Lowering:
    """``how`` with unchanged mesh axes, because a ``shard_map`` of the user names them."""
    return dataclasses.replace(how, dimensions=(), joined=False)


def lowerings(cluster: Cluster, named: bool = False) -> tuple[Lowering, ...]:
    """Lowerings that ``confirm`` compiles; ``named``: with unchanged mesh axes."""
    if named:
        return tuple(dict.fromkeys(map(on_named_axes, lowerings(cluster))))
    if cluster.kind == "torus":
        return (by_dimension(cluster), by_axis(cluster), PLAIN)
    return (STEP_BY_STEP, PLAIN_TURNED)
