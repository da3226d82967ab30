"""Meshes and shardings as plain data; no jax.

A ``MeshSpec`` is an ordered tuple of named axes over devices numbered row-major (last
axis fastest). A ``Sharding`` names, per tensor dimension, the mesh axes that split it,
major to minor, as ``jax.sharding.PartitionSpec`` does.

Invariants: an axis splits at most one dimension; the product of the axes of a dimension
divides that dimension.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from planner.errors import RequestError

AXIS_NAME = r"[^\W\d][\w.-]{0,99}"
"""Pattern of the names of mesh axes, which appear in files, code and command lines."""


@dataclass(frozen=True)
class MeshSpec:
    """A logical mesh: axis names and sizes, slowest axis first; ``ones`` are the names of omitted
    axes of size 1."""

    names: tuple[str, ...]
    sizes: tuple[int, ...]
    ones: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if len(self.names) != len(self.sizes) or len(set(self.names)) != len(self.names):
            raise RequestError(
                f"mesh axes need distinct names, one per size: got names {list(self.names)}, "
                f"sizes {list(self.sizes)}"
            )
        odd = [name for name in self.names if not re.fullmatch(AXIS_NAME, name)]
        if odd:
            raise RequestError(
                f"mesh axis {odd[0]!r}: expected letters, digits, _, - and dots, a letter or _ "
                "first; give the axis another name"
            )
        if any(size < 1 for size in self.sizes):
            raise RequestError(f"mesh axis sizes must be at least 1, got {self}")

    @property
    def num_devices(self) -> int:
        """Number of devices in the mesh."""
        return math.prod(self.sizes)

    @property
    def num_axes(self) -> int:
        """Number of axes of size 2 or more; 1 for a mesh of one device."""
        return max(1, sum(n > 1 for n in self.sizes))

    def __str__(self) -> str:
        return ",".join(f"{n}={s}" for n, s in zip(self.names, self.sizes, strict=True))

    def size(self, name: str) -> int:
        """Size of the axis called ``name``; raises RequestError if there is none."""
        if name in self.ones:
            return 1
        if name not in self.names:
            raise RequestError(f"mesh ({self}) has no axis {name!r}; its axes are {self.names}")
        return self.sizes[self.names.index(name)]

    def slim(self) -> MeshSpec:
        """The same mesh without its axes of size 1, if it has more than three axes: the search
        enumerates the uses of each axis."""
        axes = list(zip(self.names, self.sizes, strict=True))
        if len(axes) <= MOST_AXES:
            return self
        slim_axes = [(n, k) for n, k in axes if k > 1] or axes[:1]
        names, sizes = zip(*slim_axes, strict=True)
        left_out = tuple(n for n in self.names if n not in names)
        return MeshSpec(names, sizes, (*self.ones, *left_out))


MOST_AXES = 3
"""Maximum number of mesh axes that a search uses."""


_MAXTEXT = re.compile(r"(?:(dcn|ici)_)?(\w+?)_parallelism")
"""MaxText's names of axes over the network (dcn) and within a slice or a node (ici)."""


def parse_mesh(text: str, devices: int | None = None) -> MeshSpec:
    """Parse ``"data=4,model=2"``, also with MaxText's axis names. If an axis is given for both
    networks, its sizes are multiplied.

    Args:
        text: axes, separated by commas or spaces.
        devices: the total number; one size may then be -1, for the remaining devices.

    Raises:
        RequestError: the text is not a mesh; the message gives the expected form.

    >>> parse_mesh("data=4,model=-1", 8).num_devices
    8
    >>> str(parse_mesh("dcn_data_parallelism=2 ici_fsdp_parallelism=4"))
    'data=2,fsdp=4'
    """
    sizes: dict[str, int] = {}
    networks: dict[str, set[str]] = {}
    plain = re.sub(r"\s*([=:])\s*", r"\1", text.strip())
    for part in re.split(r"\s*,\s*|\s+", plain):
        name, sign, size = re.match(r"([^=:]*)([=:]?)(.*)", part, re.DOTALL).groups()  # type: ignore[union-attr]
        if not name.isidentifier() or not re.fullmatch("0*[1-9][0-9]{0,17}|-1", size):
            raise RequestError(
                f"mesh {text!r}: got {part!r}, expected name=size as in data=4,model=2"
            )
        if sign == ":":
            raise RequestError(f"mesh {text!r}: write {name}={size} for {part}")
        maxtext = _MAXTEXT.fullmatch(name)
        network, axis = (maxtext[1] or "", maxtext[2]) if maxtext else ("", name)
        seen = networks.setdefault(axis, set())
        if (seen and not (network and "" not in seen)) or network in seen:
            raise RequestError(f"mesh {text!r}: the axis {axis} is there twice; give it one size")
        seen.add(network)
        sizes[axis] = sizes.get(axis, 1) * int(size)
    return MeshSpec(tuple(sizes), tuple(_filled(text, sizes, devices)))


def _filled(text: str, sizes: Mapping[str, int], devices: int | None) -> list[int]:
    """The sizes, with the remaining devices in place of a size of -1."""
    unknown = [axis for axis, size in sizes.items() if size < 0]
    if not unknown:
        return list(sizes.values())
    rest = -math.prod(sizes.values())
    if devices is None or len(unknown) > 1 or rest < 1 or devices % rest:
        raise RequestError(
            f"mesh {text!r}: -1 stands for the devices that are left"
            + ("" if devices is None else f" of {devices}")
            + f", for one axis and where the others divide them; give {unknown[-1]} its size"
        )
    return [devices // rest * -size if size < 0 else size for size in sizes.values()]


Entry = str | tuple[str, ...] | None


@dataclass(frozen=True)
class Sharding:
    """Mesh axes per dimension, major to minor; the empty tuple means replicated.

    >>> mesh = MeshSpec(("data", "model"), (4, 2))
    >>> split = Sharding.of([None, ("data", "model")])
    >>> split.local_shape((16, 64), mesh), split.shards(mesh)
    ((16, 8), 8)
    """

    dims: tuple[tuple[str, ...], ...]

    @staticmethod
    def of(entries: Sequence[Entry], rank: int | None = None) -> Sharding:
        """Build from PartitionSpec-like entries, padded with None up to ``rank``."""
        dims = tuple(() if e is None else (e,) if isinstance(e, str) else tuple(e) for e in entries)
        if rank is not None:
            dims += ((),) * (rank - len(dims))
        return Sharding(dims)

    @property
    def axes(self) -> tuple[str, ...]:
        """All axes in use."""
        return tuple(a for dim in self.dims for a in dim)

    @property
    def entries(self) -> tuple[Entry, ...]:
        """PartitionSpec entries, trailing ``None`` dropped."""
        out: list[Entry] = [None if not d else d[0] if len(d) == 1 else d for d in self.dims]
        while out and out[-1] is None:
            out.pop()
        return tuple(out)

    def shards(self, mesh: MeshSpec) -> int:
        """Number of shards of the tensor."""
        return math.prod(mesh.size(a) for a in self.axes)

    def local_shape(self, shape: Sequence[int], mesh: MeshSpec) -> tuple[int, ...]:
        """Shape of one shard; raises RequestError if a dimension doesn't divide."""
        self.check(shape, mesh)
        return tuple(
            n // math.prod(mesh.size(a) for a in d) for n, d in zip(shape, self.dims, strict=True)
        )

    def check(self, shape: Sequence[int], mesh: MeshSpec) -> None:
        """Raise RequestError if this sharding is invalid for ``shape`` on ``mesh``."""
        if len(self.dims) > len(shape):
            raise RequestError(
                f"{self} names {len(self.dims)} dimensions, the value has shape {tuple(shape)}"
            )
        if len(set(self.axes)) != len(self.axes):
            raise RequestError(f"{self} uses a mesh axis for two dimensions")
        for i, (n, dim) in enumerate(zip(shape, self.dims, strict=False)):
            parts = math.prod(mesh.size(a) for a in dim)
            if n % parts:
                raise RequestError(
                    f"{self}: dimension {i} has size {n}, which {parts} devices of "
                    f"{'x'.join(dim)} do not divide; pad it, pin another dimension or "
                    "choose another mesh"
                )

    def __str__(self) -> str:
        return "P(" + ", ".join(repr(e) for e in self.entries) + ")"


AXIS_NAMES: Mapping[int, tuple[str, ...]] = {
    1: ("data",),
    2: ("data", "model"),
    3: ("data", "fsdp", "model"),
}


def factorizations(n: int, parts: int) -> Iterator[tuple[int, ...]]:
    """All ordered ways to write ``n`` as ``parts`` factors, each at least 2 (1 allowed if n=1).

    >>> list(factorizations(12, 2))
    [(2, 6), (3, 4), (4, 3), (6, 2)]
    """
    if parts == 1:
        yield (n,)
        return
    for first in range(2, n // 2 + 1):
        if n % first == 0:
            for rest in factorizations(n // first, parts - 1):
                if rest[0] >= 2:
                    yield (first, *rest)


def enumerate_meshes(num_devices: int, max_axes: int = 3) -> tuple[MeshSpec, ...]:
    """Logical meshes of up to ``max_axes`` axes over ``num_devices`` devices.

    Any count works, powers of two or not; a prime has the one-axis mesh only.

    >>> [str(mesh) for mesh in enumerate_meshes(6)]
    ['data=6', 'data=2,model=3', 'data=3,model=2']
    """
    out = []
    for k in range(1, max_axes + 1):
        for sizes in factorizations(num_devices, k):
            out.append(MeshSpec(AXIS_NAMES[k], sizes))
    return tuple(out)


WHOLE, PER_MICROBATCH = "batch", "per-microbatch"


@dataclass(frozen=True)
class Recipe:
    """The rewriting of a step; the default leaves it unchanged.

    Attributes:
        microbatches: number of parts of the batch that run one after the other.
        replicas: number of groups of examples whose gradients are added up separately over all
            microbatches, and joined once.
        remat: the rematerialization policy, as in ``planner.remat.policy.policy_text``.
        chunks: number of parts of the rows of large products (attention scores, logits) that are
            computed one after the other.
        stages: number of groups of layers, each on separate devices, that microbatches pass
            through.
        schedule: the order of their passes, if each stage is a separate program; empty: all stages
            in one program, tick by tick.
        pad_batch: number of examples that the batch is padded to; 0: no padding. Not together with
            microbatches, replicas or stages.
        statistics: whether values computed over several examples, such as means over the batch,
            cover the whole batch (``WHOLE``) or each microbatch (``PER_MICROBATCH``).
        manual: (pattern, stage): where stages begin; empty: so that they take about equally long.
            A plan stores the positions (``Plan.cuts``), not the patterns.
        cuts: the positions, in a plan; empty: to be chosen.
        order: per group of devices, its passes in order, if ``schedule`` is user-defined
            (``costmodels.orders.rows_of``).
    """

    microbatches: int = 1
    remat: str = "none"
    chunks: int = 1
    stages: int = 1
    schedule: str = ""
    replicas: int = 1
    pad_batch: int = 0
    statistics: str = WHOLE
    manual: tuple[tuple[str, int], ...] = ()
    cuts: tuple[int, ...] = ()
    order: tuple[str, ...] = ()

    def __str__(self) -> str:
        parts = [
            f"{self.microbatches} microbatches" if self.microbatches > 1 else "",
            f"{self.replicas} replicas" if self.replicas > 1 else "",
            f"batch padded to {self.pad_batch}" if self.pad_batch else "",
            f"remat {self.remat}" if self.remat != "none" else "",
            f"{self.chunks} chunks" if self.chunks > 1 else "",
            f"{self.stages} stages" if self.stages > 1 else "",
            f"schedule {self.schedule}" if self.schedule else "",
            f"statistics {self.statistics}" if self.statistics != WHOLE else "",
        ]
        return ", ".join(filter(None, parts))


PLAIN = Recipe()

STAGE = "stage"
"""The mesh axis of pipeline stages."""

_PLACES = ("manual", "cuts", "order")
REWRITINGS = tuple(f.name for f in dataclasses.fields(Recipe) if f.name not in _PLACES)
"""The options that make up a recipe."""
