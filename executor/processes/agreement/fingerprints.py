"""Fingerprints to compare between processes: programs, arrays, settings. Pure functions.

The text of a program must be the same in processes that run the same script: variables are numbered
in order of appearance, sets are sorted, and addresses and process-local devices are left out.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
import hashlib
import os
import re
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import jax
import numpy as np

from planner import compat
from planner.graph.jaxpr.places import user_line

CHUNK = 1 << 23
"""Bytes that one thread hashes at a time."""
ADDRESS = r"0x[0-9a-f]{6,}"
SHOWN = 80
"""Maximum number of characters of a value in a message."""


@dataclass(frozen=True)
class Fingerprint:
    """One thing to compare.

    Attributes:
        value: the same text in processes that agree.
        shown: what it is, for a message that says "process 1 has ...".
        array: an array whose values are shown after that; None: nothing.
    """

    value: str
    shown: str
    array: Any = field(default=None, repr=False, compare=False)

    @property
    def text(self) -> str:
        """The text for messages."""
        return self.shown if self.array is None else f"{self.shown} = {array_summary(self.array)}"


def hash_of(text: str) -> str:
    """The hash of a text, 64 hexadecimal digits."""
    return hashlib.sha256(text.encode()).hexdigest()


def array_hash(array: Any) -> str:
    """The hash of bytes, dtype and shape, 32 hexadecimal digits, computed by several threads."""
    host = np.ascontiguousarray(np.asarray(array))
    total = hashlib.sha256(f"{host.dtype}{np.shape(array)}".encode())
    if host.dtype.hasobject:
        total.update(repr(host.tolist()).encode())
        return total.hexdigest()[:32]
    data = host.reshape(-1).view(np.uint8)
    parts = [data[k : k + CHUNK] for k in range(0, data.size, CHUNK)]
    if len(parts) < 2:
        digests: Iterator[bytes] = map(_digest, parts)
        total.update(b"".join(digests))
    else:
        with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:
            total.update(b"".join(pool.map(_digest, parts)))
    return total.hexdigest()[:32]


def _digest(part: Any) -> bytes:
    return hashlib.sha256(memoryview(part)).digest()


def array_summary(array: Any) -> str:
    """A short text for an array: dtype, shape and, if there are few, its values; else its norm.

    >>> array_summary(np.float32(0.001)), array_summary(np.arange(3))
    ('0.001', 'int64[3] [0, 1, 2]')
    """
    host = np.asarray(array)
    if host.ndim == 0:
        return short(str(host))
    head = f"{host.dtype}{list(host.shape)}"
    if host.size <= 4:
        return short(f"{head} {host.tolist()}")
    try:
        return f"{head} of norm {float(np.linalg.norm(host.astype(np.float64).ravel())):.9g}"
    except (TypeError, ValueError):
        return head


def short(text: str) -> str:
    """A text, shortened for a message."""
    text = " ".join(text.split())
    return text if len(text) <= SHOWN else text[: SHOWN - 3] + "..."


def program(jaxpr: Any) -> tuple[Fingerprint, ...]:
    """A traced program: its operations, their parameters, literals and constants, in order."""
    return _Program().walk(jaxpr, "")


class _Program:
    """Makes the fingerprints of a program; a body that is used several times is processed once."""

    def __init__(self) -> None:
        self.bodies: dict[tuple[int, str], tuple[Any, tuple[Fingerprint, ...]]] = {}

    def walk(self, jaxpr: Any, outer_line: str) -> tuple[Fingerprint, ...]:
        """All entries of a body; ``outer_line`` is where it is used."""
        known = self.bodies.get((id(jaxpr), outer_line))
        if known is None:
            known = (jaxpr, tuple(self._walk(jaxpr, outer_line)))
            self.bodies[id(jaxpr), outer_line] = known
        return known[1]

    def _walk(self, jaxpr: Any, outer_line: str) -> Iterator[Fingerprint]:
        inner = compat.body(jaxpr)
        numbers: dict[Any, int] = {}
        for var in (*inner.constvars, *inner.invars):
            numbers[var] = len(numbers)
        for var in inner.invars:
            yield Fingerprint(f"in {var.aval}", f"an input {short(str(var.aval))}")
        for k, const in enumerate(compat.consts(jaxpr)):
            line = _first_use(inner, inner.constvars[k]) or outer_line
            yield Fingerprint(
                f"const {stable_text(const)}",
                f"a captured constant {_shown_value(const)}{_at(line)}",
            )
        for eqn in inner.eqns:
            line = user_line(eqn) or outer_line
            names = []
            for atom in eqn.invars:
                if compat.is_literal(atom):
                    names.append("literal")
                    yield Fingerprint(
                        f"literal {stable_text(atom.val)} {atom.aval}",
                        f"literal {_shown_value(atom.val)}{_at(line)}",
                    )
                else:
                    names.append(str(numbers.get(atom, -1)))
            for var in eqn.outvars:
                numbers[var] = len(numbers)
            name = eqn.primitive.name
            outs = ",".join(str(var.aval) for var in eqn.outvars)
            yield Fingerprint(
                f"{name} {' '.join(names)} -> {outs}", f"{name} -> {short(outs)}{_at(line)}"
            )
            yield from self._params(eqn, line)
        results = [
            stable_text(v.val) if compat.is_literal(v) else str(numbers.get(v, -1))
            for v in inner.outvars
        ]
        yield Fingerprint(f"out {' '.join(results)}", f"{len(results)} results{_at(outer_line)}")

    def _params(self, eqn: Any, line: str) -> Iterator[Fingerprint]:
        for name, value in sorted(eqn.params.items()):
            bodies = value if isinstance(value, tuple | list) else (value,)
            if bodies and all(_is_jaxpr(b) for b in bodies):
                for body in bodies:
                    yield from self.walk(body, line)
            else:
                text = stable_text(value)
                what = (
                    f"{name}={short(_plain_text(value, text))} of {eqn.primitive.name}{_at(line)}"
                )
                yield Fingerprint(f"{name}={text}", what)


def _plain_text(value: Any, text: str) -> str:
    """A parameter as Python writes it, or ``text`` if that contains an address."""
    written = str(value)
    return text if re.search(ADDRESS, written) else written


def _is_jaxpr(value: Any) -> bool:
    return hasattr(compat.body(value), "eqns") and hasattr(compat.body(value), "invars")


def _first_use(inner: Any, var: Any) -> str:
    for eqn in inner.eqns:
        if any(atom is var for atom in eqn.invars):
            return user_line(eqn)
    return ""


def _at(line: str) -> str:
    return f" at {line}" if line else ""


def _shown_value(value: Any) -> str:
    if isinstance(value, jax.Array) and not value.is_fully_addressable:
        return f"{value.dtype}{list(value.shape)}"
    return array_summary(_host(value)) if hasattr(value, "shape") else short(str(value))


def _host(value: Any) -> Any:
    """An array of this process as a NumPy array; random keys as their key data."""
    if jax.numpy.issubdtype(getattr(value, "dtype", np.int32), jax.dtypes.prng_key):
        value = jax.random.key_data(value)
    return np.asarray(value)


PLAIN = (str, bytes, bool, int, float, complex, type(None), np.dtype, type(Ellipsis))


def stable_text(value: Any) -> str:
    """A value as text that does not depend on the process: arrays by their content, functions by
    their names, sets sorted, devices left out."""
    if isinstance(value, jax.Array) and not value.is_fully_addressable:
        return f"array {value.dtype}{value.shape}"
    if isinstance(value, np.ndarray | np.generic | jax.Array):
        return f"array {array_hash(_host(value))}"
    if isinstance(value, enum.Enum):
        return f"{type(value).__name__}.{value.name}"
    if isinstance(value, PLAIN):
        return f"{type(value).__name__} {value!r}"
    if isinstance(value, type):
        return f"{value.__module__}.{value.__qualname__}"
    if isinstance(value, Mapping):
        items = [f"{stable_text(k)}: {stable_text(v)}" for k, v in value.items()]
        return f"{{{', '.join(sorted(items))}}}"
    if isinstance(value, frozenset | set):
        return f"{{{', '.join(sorted(stable_text(v) for v in value))}}}"
    if isinstance(value, tuple | list):
        return f"{type(value).__name__}({', '.join(stable_text(v) for v in value)})"
    if _is_jaxpr(value):
        return " | ".join(entry.value for entry in program(value))
    return _object_text(value)


def _object_text(value: Any) -> str:
    kind = f"{type(value).__module__}.{type(value).__qualname__}"
    if isinstance(value, jax.Device | jax.sharding.SingleDeviceSharding):
        return kind
    if isinstance(value, functools.partial):
        return f"partial({stable_text(value.func)}, {stable_text(value.args)})"
    if isinstance(value, types.MethodType | types.FunctionType | types.BuiltinFunctionType):
        return f"{kind} {value.__module__}.{value.__qualname__}"
    if dataclasses.is_dataclass(value):
        fields = {f.name: getattr(value, f.name, None) for f in dataclasses.fields(value)}
        return f"{kind}{stable_text(fields)}"
    text = repr(value)
    return kind if re.search(ADDRESS, text) else f"{kind} {text}"


def arguments(args: Any, shardings: Any, whole: Callable[[int], bool]) -> tuple[Fingerprint, ...]:
    """Fingerprints of the arguments of a step: their form, and their content where processes must
    agree. A part that this process does not hold has an entry without a value.

    Args:
        args: a pytree of arrays.
        shardings: the sharding of each leaf, a pytree of the same structure.
        whole: leaf number -> whether the content must be equal even if no two processes hold the
            same part of it: so for a state, but not for a batch.
    """
    leaves = jax.tree_util.tree_leaves_with_path(args)
    places = jax.tree_util.tree_leaves(shardings)
    entries: list[Fingerprint] = []
    for k, ((path, x), sharding) in enumerate(zip(leaves, places, strict=True)):
        entries += _argument(f"argument {jax.tree_util.keystr(path)}", x, sharding, whole(k))
    return tuple(entries)


def _argument(name: str, x: Any, sharding: Any, whole: bool) -> list[Fingerprint]:
    here = jax.process_count() > 1 and getattr(x, "sharding", None) == sharding
    if isinstance(x, jax.Array) and (here or not x.is_fully_addressable):
        # already placed; a stage may be on devices of this process only
        sharding, whole = x.sharding, False
        form = f"{name} is {x.dtype}{list(x.shape)} over all devices"
        layout = f"{form} as {getattr(sharding, 'spec', type(sharding).__name__)}"
        shards = {str(_cut(s.index, x.shape)): s.data for s in x.addressable_shards}
        parts = {
            str(index): (index, shards.get(str(index))) for index in _shared(sharding, x.shape)
        }
        form = layout
    else:
        host = _host(x)
        form = f"{name} is {host.dtype}{list(host.shape)}"
        held = {str(_cut(i, host.shape)) for i in _own(sharding, host.shape)}
        parts = {
            str(index): (index, host[index] if str(index) in held else None)
            for index in _shared(sharding, host.shape)
        }
        if whole:
            parts = {"": ((), host)}
    return [
        Fingerprint(form, form),
        *(
            Fingerprint("", "") if part is None else _content(f"{name}{_bounds(index, x)}", part)
            for index, part in parts.values()
        ),
    ]


def _content(name: str, host: Any) -> Fingerprint:
    array = _host(host)
    return Fingerprint(f"{name} {array_hash(array)}", name, array)


def _bounds(index: tuple[slice, ...], whole: Any) -> str:
    """A part of an array in Python's notation for slices; empty for the whole array.

    >>> _bounds((slice(0, 4), slice(0, 8)), np.zeros((16, 8)))
    '[0:4, 0:8]'
    """
    if all(p == slice(0, n) for p, n in zip(index, np.shape(whole), strict=False)):
        return ""
    return f"[{', '.join(f'{p.start}:{p.stop}' for p in index)}]"


def _cut(index: Sequence[slice], shape: Sequence[int]) -> tuple[slice, ...]:
    """An index with explicit bounds. A shard of random keys has more slices than keys have
    dimensions: JAX adds one for the words of a key."""
    return tuple(slice(*p.indices(n)[:2]) for p, n in zip(index, shape, strict=False))


@functools.lru_cache(4096)
def _shared(sharding: Any, shape: tuple[int, ...]) -> tuple[tuple[slice, ...], ...]:
    """The parts of an array that devices of several processes hold; the same in every process."""
    return _parts(sharding, shape, 2)


def _parts(sharding: Any, shape: tuple[int, ...], least: int = 1) -> tuple[tuple[slice, ...], ...]:
    """The parts of an array that devices of at least ``least`` processes hold."""
    holders: dict[str, tuple[tuple[slice, ...], set[int]]] = {}
    for device, index in sharding.devices_indices_map(shape).items():
        part = _cut(index, shape)
        holders.setdefault(str(part), (part, set()))[1].add(device.process_index)
    return tuple(part for part, processes in holders.values() if len(processes) >= least)


def _own(sharding: Any, shape: tuple[int, ...]) -> Sequence[tuple[slice, ...]]:
    """The parts of an array that devices of this process hold."""
    return list(sharding.addressable_devices_indices_map(shape).values())
