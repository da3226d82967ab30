"""Specs and logical rules as Python text that needs nothing but jax.

Whatever a plan's texts contain, they enter a module only as literals (`quoted`) or escaped in its
docstring (`in_docstring`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from planner.plan.contents.rows import Leaf
from planner.plan.plan import Plan
from planner.spec import MeshSpec, Sharding


def quoted(text: str) -> str:
    """A text as a Python literal in ASCII.

    >>> print(quoted('a"b'))
    "a\\"b"
    """
    return f'"{_escaped(text)}"'


def in_docstring(text: str) -> str:
    """A text escaped for a docstring: ASCII, on one line, without halves of surrogate pairs."""
    return _escaped(text.encode("utf-8", "replace").decode())  # Python 3.13 encodes docstrings


def _escaped(text: str) -> str:
    """A text escaped for use between double quotes, single or triple."""
    return ascii(text)[1:-1].replace('"', '\\"')


def heading(plan: Plan, what: str) -> str:
    """The origin of a file, as the first lines of its docstring."""
    return (
        f"{what} of a plan for {in_docstring(plan.cluster)}.\n\n"
        f"Plan {plan.digest[:16]}, mode {in_docstring(plan.mode)}, "
        f"mesh {in_docstring(str(plan.mesh))}, "
        f"{len(plan.inputs)} arguments."
    )


def spec_text(spec: Sharding, call: str = "P") -> str:
    """``P("data", None, ("a", "b"))``."""
    return f"{call}({', '.join(_plain(entry) for entry in spec.entries)})"


def mesh_text(mesh: MeshSpec) -> str:
    """``{"data": 4, "model": 2}``."""
    axes = zip(mesh.names, mesh.sizes, strict=True)
    return "{" + ", ".join(f"{quoted(name)}: {int(size)}" for name, size in axes) + "}"


def specs_text(name: str, leaves: Iterable[Leaf]) -> str:
    """A dict literal of specs by path."""
    return mapping_text(name, {leaf.path: spec_text(leaf.spec) for leaf in leaves})


def mapping_text(name: str, rows: Mapping[str, str]) -> str:
    """A dict literal, one row per line; keys are quoted, values are code."""
    body = "".join(f"    {quoted(key)}: {value},\n" for key, value in rows.items())
    return f"{name} = {{\n{body}}}\n" if body else f"{name} = {{}}\n"


def partition_specs_text(plan: Plan) -> str:
    """Python text: the mesh's axes, and the specs of arguments and results by path."""
    return (
        f'"""{heading(plan, "Shardings")}\n\n'
        "Keys are paths as jax.tree_util.keystr writes them; the leading [k] is the number of the\n"
        "argument, in OUT_SPECS the place in the result. What the plan says inside the step is\n"
        'left out: `planner export --as python` has it.\n"""\n\n'
        "from jax.sharding import PartitionSpec as P\n\n"
        f"MESH_AXES = {mesh_text(plan.mesh)}\n\n"
        f"{specs_text('IN_SPECS', plan.inputs)}\n"
        f"{specs_text('OUT_SPECS', plan.outputs)}" + _memory_text(plan)
    )


def _memory_text(plan: Plan) -> str:
    """A dict literal of the memory kinds of arguments by path, if any is not the device's."""
    kinds = {leaf.path: quoted(leaf.memory) for leaf in plan.inputs if leaf.memory != "device"}
    return "\n" + mapping_text("MEMORY_KINDS", kinds) if kinds else ""


def logical_rules_text(plan: Plan) -> str:
    """Python text: the mesh's axes, logical names by argument path, and the rules."""
    logical_axes = plan.as_logical_axis_rules()
    rules = "".join(f"    ({quoted(name)}, {_plain(axes)}),\n" for name, axes in logical_axes.rules)
    names = {path: _row(row) for path, row in logical_axes.names.items()}
    return (
        f'"""{heading(plan, "Logical axis rules")}\n\n'
        "LOGICAL_AXIS_RULES is what flax.linen.logical_axis_rules and MaxText's\n"
        "logical_axis_rules take; LOGICAL_AXES has the names of every argument by path. Equal\n"
        'names are dimensions of one size, split alike; None is not split.\n"""\n\n'
        f"MESH_AXES = {mesh_text(plan.mesh)}\n\n"
        f"LOGICAL_AXIS_RULES = (\n{rules})\n\n"
        f"{mapping_text('LOGICAL_AXES', names)}" + _memory_text(plan)
    )


def _row(entries: tuple[str | None, ...]) -> str:
    inside = ", ".join(_plain(entry) for entry in entries)
    return f"({inside},)" if len(entries) == 1 else f"({inside})"


def _plain(entry: str | tuple[str, ...] | None) -> str:
    if entry is None:
        return "None"
    return _row(entry) if isinstance(entry, tuple) else quoted(entry)
