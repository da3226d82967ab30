"""Flax's own partitioning metadata and logical axis rules -> pins.

*Logical axis rules* map logical names (``"embed"``, ``"mlp"``) to mesh axes. They are pairs of a
name and its mesh axes, in order of precedence, as in Flax and MaxText.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
from jax.sharding import AbstractMesh, AxisType, NamedSharding

from planner import compat
from planner.annotate import FLAX, LOGICAL, Pin
from planner.errors import RequestError
from planner.spec import MOST_AXES, Entry, MeshSpec

Rules = tuple[tuple[str, Any], ...]
"""Logical axis rules: (logical name, mesh axis or a tuple of them or None)."""


def check_rules(rules: Sequence[Any]) -> Rules:
    """The rules as tuples.

    Raises:
        RequestError: a rule is not a pair of a name and mesh axes; the message shows it.

    >>> check_rules([("mlp", "model"), ["batch", ["data", "fsdp"]]])
    (('mlp', 'model'), ('batch', ('data', 'fsdp')))
    """
    out = []
    for rule in rules:
        pair = tuple(rule) if isinstance(rule, tuple | list) else ()
        axes = pair[1] if len(pair) == 2 else 0
        axes = tuple(axes) if isinstance(axes, list) else axes
        each = axes if isinstance(axes, tuple) else () if axes is None else (axes,)
        if not pair or not isinstance(pair[0], str) or not all(isinstance(a, str) for a in each):
            raise RequestError(
                f"logical_axis_rules: got {rule!r}, expected a pair of a logical name and a mesh "
                'axis, a tuple of mesh axes or None, as ("mlp", "model")'
            )
        out.append((pair[0], axes))
    return tuple(out)


def ambient_rules() -> Rules:
    """The rules that are in force in Flax (``nn.logical_axis_rules``); none if Flax is unused."""
    import sys

    spmd = sys.modules.get("flax.core.spmd")
    return tuple(spmd.get_logical_axis_rules()) if spmd is not None else ()


def rules_of(function: Callable[..., Any] | None) -> Rules:
    """The rules that ``with_logical_axis_rules`` attached to a function."""
    rules: Rules = getattr(function, "logical_axis_rules", ())
    return rules


def with_logical_axis_rules(
    function: Callable[..., Any], rules: Sequence[Any] | None = None
) -> Callable[..., Any]:
    """Make ``function`` trace with logical axis rules, so that ``nn.with_logical_constraint`` marks
    shardings. Without ``rules``, those in force in Flax apply, unless the function has rules.

    Raises:
        RequestError: as ``check_rules``.
    """
    if rules is None and rules_of(function):
        return function
    checked = check_rules(ambient_rules() if rules is None else rules)
    names: dict[str, None] = {}
    for _, axes in checked:
        for name in axes if isinstance(axes, tuple) else (axes,) if axes else ():
            names.setdefault(name)
    if not names:
        return function
    # size 1 divides anything: only the names matter before there is a plan
    every = (*names, LOGICAL)
    mesh = AbstractMesh((1,) * len(every), every, axis_types=(AxisType.Auto,) * len(every))

    @functools.wraps(function)
    def traced(*args: Any, **keywords: Any) -> Any:
        from flax.core import spmd

        around = jax.sharding.get_abstract_mesh()  # the user's, under jax.set_mesh
        if not around.empty:
            with spmd.logical_axis_rules(checked):
                return function(*args, **keywords)

        def under(ambient: AbstractMesh) -> Any:
            with spmd.logical_axis_rules(checked), jax.sharding.use_abstract_mesh(ambient):
                return function(*args, **keywords)

        try:
            return under(mesh)
        except ValueError:  # such as a shard_map region on the user's mesh
            with spmd.logical_axis_rules(checked):
                region_mesh = _only_mesh(function, args, keywords)
            if region_mesh is None:
                raise
        return under(region_mesh)

    traced.logical_axis_rules = checked  # type: ignore[attr-defined]
    return traced


def _only_mesh(
    function: Callable[..., Any], args: Sequence[Any], keywords: Mapping[str, Any]
) -> AbstractMesh | None:
    """The mesh of a function's ``shard_map`` regions, traced under no mesh; None if there is not
    exactly one, or if tracing fails."""
    try:
        traced = jax.make_jaxpr(function)(*args, **keywords)
    except Exception:  # the caller raises its first error again
        return None
    meshes = {getattr(m, "abstract_mesh", m) for m in _meshes_in(compat.body(traced))}
    return meshes.pop() if len(meshes) == 1 else None


def _meshes_in(jaxpr: Any) -> Iterator[Any]:
    for eqn in jaxpr.eqns:
        for value in eqn.params.values():
            bodies = value if isinstance(value, tuple) else (value,)
            for body in (compat.body(b) for b in bodies):
                if hasattr(body, "eqns"):
                    yield from _meshes_in(body)
        if eqn.primitive.name == "shard_map":
            yield eqn.params["mesh"]


def _is_boxed(x: Any) -> bool:
    """Whether ``x`` is a Flax box with partitioning metadata (Linen Partitioned, NNX Variable)."""
    if hasattr(x, "names") and hasattr(x, "get_partition_spec"):
        return True
    return hasattr(x, "get_metadata") and hasattr(x, "get_value")


@dataclass(frozen=True)
class _Names:
    """The names of an array's dimensions in its box, the box's rules, and whether the names are
    certainly logical (Linen's ``LogicallyPartitioned``)."""

    names: tuple[Any, ...]
    rules: Rules
    logical: bool


def _names(box: Any) -> _Names | None:
    """The names of a box. None if it has none, or if its array is already split over a mesh: that
    sharding says the same."""
    names, rules = getattr(box, "names", None), None
    logical = hasattr(box, "rules")  # Linen's LogicallyPartitioned
    if names is None:
        meta = box.get_metadata()
        names = meta.get("out_sharding", meta.get("sharding_names", meta.get("sharding")))
        rules = meta.get("sharding_rules")
    elif logical:
        rules = box.rules
    if names is None or not isinstance(names, tuple) or not any(names):
        return None
    (array,) = jax.tree_util.tree_leaves(box)
    placed = getattr(array, "sharding", None)
    if isinstance(placed, NamedSharding) and placed.mesh.size > 1 and any(placed.spec):
        return None
    return _Names(names, tuple(rules or ()), logical)


def _boxes(args: Sequence[Any]) -> Iterator[tuple[int, _Names]]:
    """The boxes that hold one array and have names, with the array's position among the leaves."""
    position = 0
    for node in jax.tree_util.tree_leaves(tuple(args), is_leaf=_is_boxed):
        count = len(jax.tree_util.tree_leaves(node)) if _is_boxed(node) else 1
        names = _names(node) if _is_boxed(node) and count == 1 else None
        if names is not None:
            yield position, names
        position += count


def names_without_axes(
    args: Sequence[Any], rules: Rules = (), mesh: MeshSpec | None = None
) -> tuple[str, ...]:
    """Names in Flax metadata that have no rule and are no mesh axes: they count as None.

    Flax takes a name without a rule for a mesh axis. Here it is not one in two cases: if other
    names have rules, and the given mesh (without a mesh, the rules) has no such axis; or if there
    are no rules and no mesh, and more such names than a mesh may have axes.
    """
    boxes = [box for _, box in _boxes(args)]
    known = [*rules, *(rule for box in boxes for rule in box.rules)]
    ruled = {name for name, _ in known}
    named = [n for box in boxes if not box.logical for n in box.names if isinstance(n, str)]
    left = tuple(dict.fromkeys(n for n in named if n not in ruled))
    if not known:
        return left if mesh is None and len(left) > MOST_AXES else ()
    if mesh is not None:
        axes = {*mesh.names, *mesh.ones}
    else:
        axes = {a for _, to in known if to for a in (to if isinstance(to, tuple) else (to,))}
    return tuple(n for n in left if n not in axes)


def metadata_notes(
    args: Sequence[Any], rules: Rules = (), mesh: MeshSpec | None = None
) -> tuple[str, ...]:
    """A note on the names in Flax metadata that are ignored, if any."""
    names = names_without_axes(args, rules, mesh)
    if not names:
        return ()
    some = ", ".join(names[:6]) + (f" and {len(names) - 6} more" if len(names) > 6 else "")
    hint = "" if rules else "; if they are logical names, pass logical_axis_rules"
    return (f"Flax metadata: {some}: no rule and no mesh axis of that name, ignored{hint}",)


def _entries(box: _Names, rules: Rules, ignored: Collection[str]) -> tuple[Entry, ...] | None:
    """PartitionSpec entries of a box, or None if no dimension is split. A logical name without a
    rule splits nothing."""
    known = (*box.rules, *rules)
    ruled = {name for name, _ in known}
    axes: Sequence[Entry] = (None,) * len(box.names)
    if known:
        from flax.linen import spmd

        axes = spmd.logical_to_mesh_axes(tuple(n if n in ruled else None for n in box.names), known)
    entries = tuple(axes)
    if not box.logical:  # a name without a rule is a mesh axis
        entries = tuple(
            e if n in ruled or n in ignored else n for n, e in zip(box.names, axes, strict=True)
        )
    return entries if any(entries) else None


def metadata_pins(
    args: Sequence[Any],
    inputs: Sequence[int],
    paths: Sequence[str],
    rules: Rules = (),
    mesh: MeshSpec | None = None,
) -> tuple[Pin, ...]:
    """Pins from Flax's own partitioning metadata in the arguments.

    Args:
        args: the step's arguments.
        inputs: the graph value of every leaf.
        paths: the path of every leaf.
        rules: logical axis rules; a box's own rules take precedence.
        mesh: the given mesh, if any.
    """
    ignored = frozenset(names_without_axes(args, rules, mesh))
    pins: list[Pin] = []
    for position, box in _boxes(args):
        entries = _entries(box, rules, ignored)
        if entries is not None:
            origin = f"Flax metadata at {paths[position]}"
            pins.append(Pin(inputs[position], entries, origin, rule=FLAX))
    return tuple(pins)
