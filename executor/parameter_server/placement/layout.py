"""The layout of arrays over servers: large arrays are split, small ones packed, bytes balanced.

The layout depends only on the shapes, the number of servers and the partitioner, so that every
worker and every server knows it without communication. On a server, all pieces of one dtype lie in
one flat array: one message carries them, and one pass updates them.
"""

from __future__ import annotations

import heapq
import itertools
import math
import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jax
import numpy as np
from numpy.typing import NDArray

from executor.parameter_server.placement.partition import MaxSizePartitioner, Partitioner
from executor.parameter_server.server.clock import is_integer
from planner.errors import RequestError

SPLIT_BYTES = 4 * 2**20
"""Default size of the pieces that larger arrays are cut into, in bytes."""

Array = NDArray[Any]
Flat = dict[str, Array]
"""The 1-D arrays that a server holds, by the name of the dtype."""


@dataclass(frozen=True)
class Piece:
    """A run of elements of one array, and its place on a server.

    Attributes:
        leaf: index of the array, in the order of the pytree.
        begin, end: elements of the flattened array, [begin, end).
        server: the server that holds it.
        offset: where it begins in that server's flat array of the dtype.
    """

    leaf: int
    begin: int
    end: int
    server: int
    offset: int

    @property
    def size(self) -> int:
        """Number of elements."""
        return self.end - self.begin


@dataclass(frozen=True)
class Layout:
    """The layout of a pytree of arrays over servers.

    Attributes:
        servers: number of servers.
        shapes: shapes of the arrays.
        dtypes: dtype names of the arrays.
        paths: paths of the arrays in the pytree.
        pieces: every element of every array is in exactly one piece.
        tree: structure of the pytree.
    """

    servers: int
    shapes: tuple[tuple[int, ...], ...]
    dtypes: tuple[str, ...]
    paths: tuple[str, ...]
    pieces: tuple[Piece, ...]
    tree: Any

    @cached_property
    def of_server(self) -> tuple[tuple[Piece, ...], ...]:
        """The pieces of every server, in the order of their offsets."""
        held: list[list[Piece]] = [[] for _ in range(self.servers)]
        for piece in self.pieces:
            held[piece.server].append(piece)
        return tuple(tuple(sorted(x, key=lambda p: p.offset)) for x in held)

    @cached_property
    def sizes(self) -> tuple[dict[str, int], ...]:
        """Number of elements of every server's flat arrays, by dtype."""
        by_server: list[dict[str, int]] = []
        for pieces in self.of_server:
            sizes: dict[str, int] = {}
            for piece in pieces:
                dtype = self.dtypes[piece.leaf]
                sizes[dtype] = sizes.get(dtype, 0) + piece.size
            by_server.append(dict(sorted(sizes.items())))
        return tuple(by_server)

    def busy(self, *, tables: bool) -> tuple[int, ...]:
        """The servers that take part in pushes and pulls: those that hold something. Rows of
        ``tables`` are on all of them."""
        if tables:
            return tuple(range(self.servers))
        return tuple(k for k, held in enumerate(self.of_server) if held) or (0,)

    @property
    def about(self) -> dict[str, Any]:
        """The layout without the pytree structure, as JSON data; ``layout_from`` reads it."""
        pieces = [[p.leaf, p.begin, p.end, p.server, p.offset] for p in self.pieces]
        return {
            "servers": self.servers,
            "shapes": [list(s) for s in self.shapes],
            "dtypes": list(self.dtypes),
            "paths": list(self.paths),
            "pieces": pieces,
        }

    @property
    def like(self) -> Any:
        """The pytree, as ShapeDtypeStructs."""
        leaves = [
            jax.ShapeDtypeStruct(s, np.dtype(d))
            for s, d in zip(self.shapes, self.dtypes, strict=True)
        ]
        return jax.tree_util.tree_unflatten(self.tree, leaves)

    @property
    def bytes_of_server(self) -> tuple[int, ...]:
        """Number of bytes that every server holds."""
        return tuple(
            sum(n * np.dtype(d).itemsize for d, n in sizes.items()) for sizes in self.sizes
        )

    def scatter(self, tree: Any, into: list[Flat] | None = None) -> list[Flat]:
        """Split a pytree into flat arrays for every server.

        Args:
            tree: a pytree of arrays with this structure.
            into: result of an earlier call, to be overwritten; None allocates new arrays.

        Raises:
            RequestError: another structure, shape or dtype, or no array; names the leaf.
        """
        leaves = [np.asarray(x).reshape(-1) for x in self._leaves(tree)]
        flats = into or [{d: np.empty(n, np.dtype(d)) for d, n in s.items()} for s in self.sizes]
        for p in self.pieces:
            flats[p.server][self.dtypes[p.leaf]][p.offset : p.offset + p.size] = leaves[p.leaf][
                p.begin : p.end
            ]
        return flats

    def gather(self, flats: Sequence[Mapping[str, Array]], *, copy: bool = False) -> Any:
        """Assemble the servers' flat arrays into a pytree of read-only arrays.

        Args:
            flats: flat arrays of every server; floating-point ones may have a narrower dtype.
            copy: copy all arrays; otherwise an array that is in one piece is a view of ``flats``.
        """
        leaves: list[Array | None] = [None] * len(self.shapes)
        for p in self.pieces:
            name, shape = self.dtypes[p.leaf], self.shapes[p.leaf]
            held = flats[p.server][name][p.offset : p.offset + p.size]
            whole = p.size == math.prod(shape)
            if whole and not copy and str(held.dtype) == name:
                leaves[p.leaf] = held
                continue
            array = leaves[p.leaf]
            if array is None:
                array = leaves[p.leaf] = np.empty(math.prod(shape), np.dtype(name))
            widen(held, array[p.begin : p.end])
        shaped = [
            (np.empty(0, np.dtype(d)) if x is None else x).reshape(s)
            for x, s, d in zip(leaves, self.shapes, self.dtypes, strict=True)
        ]
        for x in shaped:
            x.flags.writeable = False
        return jax.tree_util.tree_unflatten(self.tree, shaped)

    def _leaves(self, tree: Any) -> list[Any]:
        leaves, form = jax.tree_util.tree_flatten(tree)
        if form != self.tree:
            raise RequestError(f"got a pytree of the form {form}, expected {self.tree}")
        for leaf, path, shape, dtype in zip(
            leaves, self.paths, self.shapes, self.dtypes, strict=True
        ):
            wanted = f"expected {dtype}{list(shape)}"
            if not hasattr(leaf, "dtype") or isinstance(leaf, jax.ShapeDtypeStruct):
                raise RequestError(f"{path}: got {type(leaf).__name__}, {wanted}, an array")
            got = (tuple(np.shape(leaf)), str(leaf.dtype))
            if got != (shape, dtype):
                raise RequestError(f"{path}: got {got[1]}{list(got[0])}, {wanted}")
        return leaves


def widen(narrow: Array, out: Array) -> None:
    """Write values that may have been sent in bfloat16 to an array of their original dtype."""
    if narrow.dtype == jax.numpy.bfloat16 and out.dtype == np.float32:
        # a bfloat16 is the upper half of a float32
        np.left_shift(narrow.view(np.uint16), np.uint32(16), out=out.view(np.uint32), dtype="u4")
    else:
        out[...] = narrow


def layout_of(
    tree: Any,
    servers: int,
    *,
    split_bytes: int = SPLIT_BYTES,
    partition: Partitioner | None = None,
) -> Layout:
    """Distribute a pytree over servers.

    Pieces are placed from the largest to the smallest, each on the server that holds the fewest
    bytes so far (Graham, Bounds on multiprocessing timing anomalies, 1969: the fullest server has
    at most 4/3 of the optimum). One server is used for every 4 MiB (or ``split_bytes``, if that is
    less) of the total size, because a message to another server costs more than its bytes. With a
    ``partition``, all servers are used.

    Args:
        tree: arrays or ShapeDtypeStructs.
        servers: number of servers.
        split_bytes: arrays are cut into pieces of at most this size.
        partition: gives the number of equal pieces of an array, instead of ``split_bytes``.

    Raises:
        RequestError: ``servers`` or ``split_bytes`` is not a whole number of at least 1,
            ``partition`` is not a partitioner, or a leaf is not an array of numbers.

    >>> shape = jax.ShapeDtypeStruct((1000, 300), np.float32)
    >>> layout_of({"w": shape, "b": shape}, 2, split_bytes=600_000).bytes_of_server
    (1200000, 1200000)
    >>> layout_of({"w": shape, "b": shape}, 2).bytes_of_server
    (2400000, 0)
    """
    if not (is_integer(servers) and is_integer(split_bytes) and servers >= 1 and split_bytes >= 1):
        raise RequestError(
            f"servers={servers!r}, split_bytes={split_bytes!r}: expected whole numbers of at least "
            "1"
        )
    servers, split_bytes = int(servers), int(split_bytes)  # JSON does not accept NumPy's
    if partition is not None and (isinstance(partition, type) or not hasattr(partition, "pieces")):
        raise RequestError(
            f"partition={partition!r}: expected a partitioner, such as FixedShardsPartitioner(4), "
            "MinSizePartitioner(2**18, max_shards=4) or MaxSizePartitioner(2**18)"
        )
    cut = partition or MaxSizePartitioner(split_bytes)
    named, form = jax.tree_util.tree_flatten_with_path(tree)
    shapes, dtypes, paths, cuts = [], [], [], []
    for number, (path, leaf) in enumerate(named):
        name = jax.tree_util.keystr(path)
        if not hasattr(leaf, "dtype") or jax.numpy.issubdtype(leaf.dtype, jax.dtypes.extended):
            raise RequestError(
                f"{name or 'the parameters'}: got {type(leaf).__name__}, expected an array of "
                f"numbers{_by_value(type(leaf))}"
            )
        check_width(name, leaf.dtype)
        shapes.append(tuple(leaf.shape))
        dtypes.append(str(leaf.dtype))
        paths.append(name)
        size, width = math.prod(leaf.shape), np.dtype(leaf.dtype).itemsize
        count = max(1, operator.index(cut.pieces(size, width)))
        edges = [size * k // count for k in range(count + 1)]
        cuts += [(width * (e - b), number, b, e) for b, e in itertools.pairwise(edges) if e > b]
    whole = sum(nbytes for nbytes, *_ in cuts)
    worth = min(split_bytes, SPLIT_BYTES)
    used = servers if partition else min(servers, max(1, -(-whole // worth)))
    loads = [(0, k) for k in range(used)]
    fill: list[dict[str, int]] = [{} for _ in range(servers)]
    pieces = []
    for nbytes, leaf, begin, end in sorted(cuts, key=lambda c: (-c[0], c[1], c[2])):
        load, server = heapq.heappop(loads)
        heapq.heappush(loads, (load + nbytes, server))
        offset = fill[server].get(dtypes[leaf], 0)
        fill[server][dtypes[leaf]] = offset + end - begin
        pieces.append(Piece(leaf, begin, end, server, offset))
    return Layout(servers, tuple(shapes), tuple(dtypes), tuple(paths), tuple(pieces), form)


def _by_value(kind: type) -> str:
    """A hint for a pytree class whose registration does not reach other processes."""
    if kind.__module__ != "__main__":
        return ""
    return (
        "; if the script registers it as a pytree, that does not reach Ray's processes: define it "
        "in a module that the script imports"
    )


def check_width(name: str, dtype: Any) -> None:
    """Raises RequestError for a 64-bit array that JAX would cut to 32 bits."""
    computed = jax.dtypes.canonicalize_dtype(dtype)
    if computed != dtype:
        raise RequestError(
            f"{name}: got {dtype}, which JAX computes as {computed}; cast it, or set jax_enable_x64"
        )


def layout_from(about: Mapping[str, Any]) -> Layout:
    """The layout of a list of arrays, from ``Layout.about``."""
    return Layout(
        about["servers"],
        tuple(tuple(s) for s in about["shapes"]),
        tuple(about["dtypes"]),
        tuple(about["paths"]),
        tuple(Piece(*p) for p in about["pieces"]),
        jax.tree_util.tree_structure(list(range(len(about["shapes"])))),
    )
