"""Every difference between jax versions, in one place (jax 0.10.2 up to 0.12).

jax 0.11 merged ``Jaxpr`` and ``ClosedJaxpr`` and moved names out of ``jax.core``. The rest of the
project uses them through this module.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.experimental.compute_on import compute_on
from jax.extend import core as jex_core
from jax.extend import source_info_util


def knows_devices() -> bool:
    """Whether JAX has initialized its devices. There is no public query; this tests whether the
    number of CPU devices can still be set."""
    name = "jax_num_cpu_devices"
    value = getattr(jax.config, name)
    try:
        jax.config.update(name, value + 1)
    except RuntimeError:
        return True
    jax.config.update(name, value)
    return False


def make_jaxpr(function: Callable[..., Any], args: Sequence[Any]) -> tuple[Any, Any]:
    """Trace ``function(*args)``; returns (closed jaxpr, pytree of output ShapeDtypeStructs)."""
    return jax.make_jaxpr(function, return_shape=True)(*args)


def body(jaxpr: Any) -> Any:
    """The open jaxpr (``eqns``, ``invars``, ``outvars``, ``constvars``) of any jaxpr."""
    return getattr(jaxpr, "jaxpr", jaxpr)


def consts(jaxpr: Any) -> tuple[Any, ...]:
    """The constants of a closed jaxpr; none for an open one."""
    return tuple(getattr(jaxpr, "consts", ()) or ())


def all_consts(jaxpr: Any) -> Iterator[Any]:
    """The constants of a jaxpr and of all bodies in it."""
    yield from consts(jaxpr)
    for eqn in body(jaxpr).eqns:
        for value in eqn.params.values():
            for inner in value if isinstance(value, tuple | list) else (value,):
                if hasattr(body(inner), "eqns"):
                    yield from all_consts(inner)


def with_consts(jaxpr: Any, contents: Sequence[Any]) -> Any:
    """A closed jaxpr from an open one and its constants; newer jax has one kind for both."""
    if hasattr(jaxpr, "with_consts"):
        return jaxpr.with_consts(list(contents))
    return jex_core.ClosedJaxpr(jaxpr, contents)


def variable_like(variable: Any, shape: Sequence[int]) -> Any:
    """A new variable of a jaxpr, of another shape."""
    return jex_core.Var(variable.aval.update(shape=tuple(shape)))


def is_literal(atom: Any) -> bool:
    """Whether a jaxpr operand is a literal."""
    return isinstance(atom, jex_core.Literal)


def dtype_name(aval: Any) -> str:
    """dtype as text; random keys and other extended types keep their own names."""
    return _name_of(getattr(aval, "dtype", "token"))


@functools.lru_cache(maxsize=1024)
def _name_of(dtype: Any) -> str:
    return str(dtype)


def aval_shape(aval: Any) -> tuple[int, ...]:
    """Shape of an abstract value, ``()`` for tokens and the like."""
    return tuple(map(int, getattr(aval, "shape", ())))


def itemsize(aval: Any) -> int:
    """Bytes per element (16 for a threefry key's two words and their padding, 0 for tokens)."""
    dtype = getattr(aval, "dtype", None)
    if dtype is None:
        return 0
    return int(getattr(dtype, "itemsize", 8))


def is_ref(aval: Any) -> bool:
    """Whether an abstract value is a reference to an array, as ``jax.new_ref`` makes."""
    return hasattr(aval, "inner_aval")


def draws_alike(key: str) -> bool:
    """Whether keys of a dtype give the same numbers under every sharding."""
    return key == "key<fry>" and bool(getattr(jax.config, "jax_threefry_partitionable", True))


def in_host_memory(aval: Any) -> bool:
    """Whether an abstract value lies in host memory."""
    return getattr(aval, "memory_space", None) is jax.memory.Space.Host


def to_memory(value: Any, sharding: jax.sharding.NamedSharding, host: bool) -> Any:
    """A traced value in host or in device memory, under ``sharding`` before and after."""
    space = jax.memory.Space.Host if host else jax.memory.Space.Device
    if host:
        return jax.device_put(jax.lax.with_sharding_constraint(value, sharding), space)
    return jax.lax.with_sharding_constraint(jax.device_put(value, space), sharding)


def rebuild(like: Any, closed: Any) -> Any:
    """Give a traced jaxpr the form (closed or open) that ``like`` has."""
    if hasattr(like, "jaxpr") or not hasattr(closed, "jaxpr"):
        return closed
    if consts(closed):
        raise ValueError("an open jaxpr can't carry constants")
    return closed.jaxpr


def frames(eqn: Any) -> tuple[tuple[str, int, str], ...]:
    """The Python frames of an equation, innermost first: (file, line, function)."""
    traceback = getattr(eqn.source_info, "traceback", None)
    if traceback is None:
        return ()
    return tuple((f.file_name, f.line_num, f.function_name) for f in traceback.frames)


def as_struct(aval: Any) -> jax.ShapeDtypeStruct:
    """An abstract value as an argument to trace with, with its weak type."""
    return jax.ShapeDtypeStruct(
        aval.shape, aval.dtype, weak_type=bool(getattr(aval, "weak_type", False))
    )


def placed_struct(aval: Any) -> jax.ShapeDtypeStruct:
    """``as_struct`` that preserves host memory, for the body of an equation."""
    if not in_host_memory(aval):
        return as_struct(aval)
    there = jax.sharding.NamedSharding(
        aval.sharding.mesh, aval.sharding.spec, memory_kind="pinned_host"
    )
    return jax.ShapeDtypeStruct(aval.shape, aval.dtype, sharding=there)


def marks_places() -> bool:
    """Whether ``compute_on`` marks the operations under it; in newer jax it is an operation."""
    return "out_memory_spaces" not in inspect.signature(compute_on).parameters


class Origin(NamedTuple):
    """Where an operation comes from: the equation with its source line, and those with its names,
    outermost first."""

    line: Any
    names: tuple[Any, ...]


def provenance(eqn: Any) -> AbstractContextManager[Any]:
    """A context in which new operations carry the source line and names of an equation or of an
    ``Origin``."""
    origin = eqn if isinstance(eqn, Origin) else Origin(eqn, (eqn,))
    names = source_info_util.current_name_stack()
    for named in origin.names:
        names += named.source_info.name_stack
    return source_info_util.user_context(origin.line.source_info.traceback, name_stack=names)


def computed_on(eqn: Any) -> AbstractContextManager[Any]:
    """A context in which new operations run where a ``compute_on`` around ``eqn`` places them. In
    newer jax that is an operation with a body, and the context does nothing."""
    place = getattr(getattr(eqn, "ctx", None), "compute_type", None)
    if place is None or not marks_places():
        return contextlib.nullcontext()
    marked: AbstractContextManager[Any] = compute_on(place)
    return marked


def evaluate_equation(eqn: Any, values: Sequence[Any], origin: Origin | None = None) -> list[Any]:
    """Evaluate one equation on ``values`` as ``jax.core.eval_jaxpr`` would; ``origin``: where it
    comes from, if not ``eqn`` itself."""
    bind_params = eqn.primitive.get_bind_params(eqn.params)
    functions, params = bind_params if isinstance(bind_params, tuple) else ((), bind_params)
    given = [_of_no_mesh(x) if isinstance(x, np.ndarray) else x for x in values]
    with provenance(origin or eqn), computed_on(eqn):
        result = eqn.primitive.bind(*functions, *given, **params)
    return list(result) if eqn.primitive.multiple_results else [result]


def _of_no_mesh(x: Any) -> Any:
    """A literal without the mesh under which it was traced: some operations compare it with the
    mesh under which they run."""
    aval = getattr(x, "aval", None)
    mesh = getattr(getattr(aval, "sharding", None), "mesh", None)
    if aval is None or mesh is None or mesh.empty:
        return x
    plain = np.asarray(x)
    usual = (
        plain.dtype == jax.dtypes.canonicalize_dtype(type(plain.item())) if x.size == 1 else False
    )
    return plain.item() if aval.weak_type and usual else plain


def expanded(eqn: Any) -> Any:
    """The body of a primitive that newer jax expands only at compilation, such as
    ``SearchSorted``; None for other primitives, or if there is no traceable body."""
    hi_primitive = eqn.params.get("_prim")
    expand = getattr(hi_primitive, "expand", None)
    if eqn.primitive.name != "call_hi_primitive" or expand is None:
        return None
    structs = [as_struct(v.aval) for v in eqn.invars]
    try:
        return make_jaxpr(expand, structs)[0]
    except Exception:  # raised by the library: arguments that are no plain list of arrays
        return None


def evaluate_body(jaxpr: Any, values: Sequence[Any]) -> list[Any]:
    """Evaluate the body of an equation, closed or open, that has no constants."""
    closed = jaxpr if hasattr(jaxpr, "jaxpr") else with_consts(jaxpr, ())
    return list(jex_core.jaxpr_as_fun(closed)(*values))


def scan_counts(eqn: Any) -> tuple[int, int]:
    """(constants, carries) among the operands of a ``scan``.

    Newer jax keeps them in a private structure, so they are derived from the shapes: an array that
    is scanned over has one more dimension outside than in the body.
    """
    inner = body(eqn.params["jaxpr"])

    def scanned(outside: Sequence[Any], inside: Sequence[Any]) -> int:
        pairs = zip(outside, inside, strict=True)
        return sum(len(aval_shape(a.aval)) > len(aval_shape(b.aval)) for a, b in pairs)

    carries = len(eqn.outvars) - scanned(eqn.outvars, inner.outvars)
    return len(eqn.invars) - carries - scanned(eqn.invars, inner.invars), carries


def row_major(x: Any) -> Any:
    """``x`` in the default layout, whatever layout its neighbors would give it; ``x`` unchanged if
    this jax has no layout constraints."""
    try:
        from jax.experimental.layout import Layout, with_layout_constraint
    except ImportError:
        return x
    return with_layout_constraint(x, Layout(tuple(range(x.ndim))))
