"""Flax's own partitioning metadata and logical axis rules -> pins.

Logical names (``"embed"``, ``"mlp"``) become mesh axes by *logical axis rules*, pairs of a name and
the mesh axes it lies on, in order of precedence: Flax's form, and MaxText's.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.sharding import AbstractMesh, AxisType

from planner.annotate import LOGICAL, Pin
from planner.errors import RequestError
from planner.spec import Entry

Rules = tuple[tuple[str, Any], ...]
"""Logical axis rules: (logical name, mesh axis or a tuple of them or None)."""


def check_rules(rules: Sequence[Any]) -> Rules:
    """The rules as tuples.

    Raises:
        RequestError: a rule is not a pair of a name and mesh axes; says which.

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
    """The rules that are in force in Flax (``nn.logical_axis_rules``), none if Flax is unused."""
    import sys

    spmd = sys.modules.get("flax.core.spmd")
    return tuple(spmd.get_logical_axis_rules()) if spmd is not None else ()


def rules_of(function: Callable[..., Any] | None) -> Rules:
    """The rules that ``with_logical_axis_rules`` gave a function."""
    found: Rules = getattr(function, "logical_axis_rules", ())
    return found


def with_logical_axis_rules(
    function: Callable[..., Any], rules: Sequence[Any] | None = None
) -> Callable[..., Any]:
    """``function``, traced with these logical axis rules: ``nn.with_logical_constraint`` in it is a
    mark. Without rules those in force in Flax count, unless it was given some before.

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
    # of sizes that divide anything: only the names matter before there is a plan
    every = (*names, LOGICAL)
    mesh = AbstractMesh((1,) * len(every), every, axis_types=(AxisType.Auto,) * len(every))

    @functools.wraps(function)
    def traced(*args: Any, **keywords: Any) -> Any:
        from flax.core import spmd

        around = jax.sharding.get_abstract_mesh()  # the user's, under jax.set_mesh
        with (
            spmd.logical_axis_rules(checked),
            jax.sharding.use_abstract_mesh(mesh if around.empty else around),
        ):
            return function(*args, **keywords)

    traced.logical_axis_rules = checked  # type: ignore[attr-defined]
    return traced


def _is_boxed(x: Any) -> bool:
    """A Flax box that carries partitioning metadata (Linen Partitioned, NNX Variable)."""
    if hasattr(x, "names") and hasattr(x, "get_partition_spec"):
        return True
    return hasattr(x, "get_metadata") and hasattr(x, "get_value")


def _box_entries(box: Any, rules: Rules) -> tuple[Entry, ...] | None:
    """PartitionSpec entries of a box; logical names without rules say nothing."""
    names, own = getattr(box, "names", None), None
    logical = hasattr(box, "rules")  # Linen's LogicallyPartitioned
    if names is None:
        meta = box.get_metadata()
        names = meta.get("out_sharding", meta.get("sharding_names", meta.get("sharding")))
        own = meta.get("sharding_rules")
    elif logical:
        own = box.rules
    if names is None or not isinstance(names, tuple) or not any(names):
        return None
    known = (*(own or ()), *rules)
    if not known:
        return None if logical else tuple(names)
    from flax.linen import spmd

    ruled = {name for name, _ in known}
    axes = spmd.logical_to_mesh_axes(tuple(n if n in ruled else None for n in names), known)
    entries = tuple(axes)
    if not logical:  # a name without a rule is a mesh axis
        entries = tuple(e if n in ruled else n for n, e in zip(names, axes, strict=True))
    return entries if any(entries) else None


def metadata_pins(
    args: Sequence[Any], inputs: Sequence[int], paths: Sequence[str], rules: Rules = ()
) -> tuple[Pin, ...]:
    """Pins from Flax's own partitioning metadata found in the arguments.

    Args:
        args: the step's arguments.
        inputs: the graph value of every leaf.
        paths: and its path.
        rules: logical axis rules; a box's own come first.
    """
    pins: list[Pin] = []
    position = 0
    for node in jax.tree_util.tree_leaves(tuple(args), is_leaf=_is_boxed):
        count = len(jax.tree_util.tree_leaves(node)) if _is_boxed(node) else 1
        entries = _box_entries(node, rules) if _is_boxed(node) and count == 1 else None
        if entries is not None:
            origin = f"Flax metadata at {paths[position]}"
            pins.append(Pin(inputs[position], entries, origin, rule="Flax metadata"))
        position += count
    return tuple(pins)
