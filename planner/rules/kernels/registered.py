"""Rules that users register for kernels, FFI calls and primitives unknown to the planner."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from planner.errors import RequestError
from planner.rules.factor import FactorRule, canonical_rule
from planner.rules.kernels.pallas.work import Work
from planner.rules.key import EqnKey, Shape

KINDS = ("attention", "matmul", "vector")
"""What a kernel does (``costmodels.compute.Kernel``)."""

Dims = tuple[tuple[str, ...], ...]
"""The letters of each dimension of one array, major first."""

_TOKEN = re.compile(r"\(([^()]*)\)|([A-Za-z_]\w*|1)")


@dataclass(frozen=True)
class Registered:
    """A rule that a user registered.

    Attributes:
        name: the kernel, FFI target or primitive.
        text: the rule as written.
        operands, results: letters of its operands and results.
        whole: letters that are not split.
        cost: flop from the shapes of the operands.
        kind: what the kernel does.
        local: what runs on shards in place of the call, or None.
    """

    name: str
    text: str
    operands: tuple[Dims, ...]
    results: tuple[Dims, ...]
    whole: frozenset[str]
    cost: Callable[..., float] | None
    kind: str
    local: Callable[..., Any] | None

    @property
    def letters(self) -> tuple[str, ...]:
        """The letters that may be split, in order."""
        sides = (*self.operands, *self.results)
        every = dict.fromkeys(x for dims in sides for dim in dims for x in dim)
        result_letters = {x for dims in self.results for dim in dims for x in dim}
        return tuple(x for x in every if x in result_letters - self.whole)

    def rule(self, eqn: EqnKey) -> FactorRule:
        """The factor rule of a call.

        Raises:
            RequestError: it does not fit the call's arrays.
        """
        ins, outs = eqn.in_shapes, eqn.out_shapes
        sizes = self._sizes(ins, outs)
        ids = {x: n for n, x in enumerate(sizes)}

        def mapped(sides: Sequence[Dims]) -> list[list[list[int]]]:
            return [[[ids[x] for x in dim] for dim in dims] for dims in sides]

        return canonical_rule(
            mapped(self.operands),
            mapped(self.results),
            list(sizes.values()),
            ins,
            outs,
            replicated=[n for x, n in ids.items() if x not in self.letters],
            origin="registered",
        )

    def _sizes(self, ins: Sequence[Shape], outs: Sequence[Shape]) -> dict[str, int]:
        """The size of each letter; raises RequestError if arrays do not fit."""
        sizes: dict[str, int] = {}
        sides = (("operand", self.operands, ins), ("result", self.results, outs))
        open_dims: list[tuple[tuple[str, ...], int, str]] = []
        for what, rows, shapes in sides:
            if len(rows) != len(shapes):
                raise self._unfit(f"{len(rows)} {what}s, the call has {len(shapes)}")
            for k, (dims, shape) in enumerate(zip(rows, shapes, strict=True)):
                if len(dims) != len(shape):
                    raise self._unfit(f"{what} {k} has {len(shape)} dimensions, not {len(dims)}")
                for dim, n in zip(dims, shape, strict=True):
                    if len(dim) == 1:
                        if sizes.setdefault(dim[0], n) != n:
                            raise self._unfit(
                                f"{dim[0]} is {sizes[dim[0]]} and, in {what} {k}, {n}"
                            )
                    elif dim:
                        open_dims.append((dim, n, f"{what} {k}"))
        for dim, n, where in open_dims:
            missing = [x for x in dim if x not in sizes]
            product = 1
            for x in dim:
                product *= sizes.get(x, 1)
            if len(missing) > 1 or n % product:
                raise self._unfit(f"({' '.join(dim)}) of {where} has {n} elements")
            if missing:
                sizes[missing[0]] = n // product
            elif product != n:
                raise self._unfit(f"({' '.join(dim)}) of {where} has {n} elements, not {product}")
        return sizes

    def _unfit(self, why: str) -> RequestError:
        return RequestError(f"register_rule({self.name!r}, {self.text!r}): {why}")

    def work(self, eqn: EqnKey) -> Work:
        """The work of a call."""
        flops = 0.0 if self.cost is None else float(self.cost(*eqn.in_shapes))
        return ((self.kind, flops, 0.0),)


_REGISTERED: dict[str, Registered] = {}
_WATCHERS: list[Callable[[], None]] = []


def when_registered(forget: Callable[[], None]) -> None:
    """Call ``forget`` whenever a rule is registered."""
    _WATCHERS.append(forget)


def register_rule(
    name: str,
    rule: str,
    *,
    whole: str | Iterable[str] = (),
    cost: Callable[..., float] | None = None,
    kind: str = "vector",
    local: Callable[..., Any] | None = None,
) -> None:
    """Declare along which dimensions a kernel may be split.

    Under a plan, the kernel runs on shards. Pallas kernels need no rule for dimensions of their
    grid (docs/how-to/bring-your-own-kernel.md).

    Args:
        name: the ``name`` of a ``pallas_call``, the target of a ``jax.ffi.ffi_call``, or the name
            of a primitive.
        rule: a letter or word for each dimension: ``"b h s d, b h t d, b h t d -> b h s d"``.
            ``(k r)`` is a dimension with two letters, ``1`` a dimension that is not split. A letter
            that occurs only in operands is not split.
        whole: letters that stay whole, as ``"s d"`` or a sequence.
        cost: flop of a call, from the shapes of its operands.
        kind: kind of its work: "matmul", "attention" or "vector".
        local: a function of the operands' shards that makes the results' shards. Without one, the
            call itself runs on shards: an FFI call with smaller results, a primitive with the same
            parameters, a Pallas kernel with a shorter grid.

    Raises:
        RequestError: the rule can't be read.

    >>> register_rule("my_norm", "b d, d -> b d", whole="d")
    """
    left, arrow, right = rule.partition("->")
    if not arrow or not right.strip():
        raise RequestError(
            f"register_rule({name!r}): {rule!r} has no results: expected '... -> ...'"
        )
    if kind not in KINDS:
        raise RequestError(f"register_rule({name!r}): kind={kind!r}: expected {', '.join(KINDS)}")
    held = frozenset(whole.split() if isinstance(whole, str) else whole)
    operands, results = _arrays(name, left), _arrays(name, right)
    used = {x for dims in (*operands, *results) for dim in dims for x in dim}
    if held - used:
        raise RequestError(
            f"register_rule({name!r}): whole has {', '.join(sorted(held - used))}, which "
            f"{rule!r} does not name"
        )
    for dims in (*operands, *results):
        flat = [x for dim in dims for x in dim]
        twice = next((x for x in flat if flat.count(x) > 1), None)
        if twice:
            raise RequestError(f"register_rule({name!r}): {twice} stands twice in one array")
    _REGISTERED[name] = Registered(name, rule, operands, results, held, cost, kind, local)
    for forget in _WATCHERS:
        forget()


def _arrays(name: str, text: str) -> tuple[Dims, ...]:
    """The letters of arrays separated by commas."""
    out = []
    for part in text.split(",") if text.strip() else ():
        left = _TOKEN.sub("", part).strip()
        if left:
            raise RequestError(f"register_rule({name!r}): can't read {left!r} in {part.strip()!r}")
        dims = []
        for group, word in _TOKEN.findall(part):
            dims.append(tuple(group.split()) if group else () if word == "1" else (word,))
        out.append(tuple(dims))
    return tuple(out)


def registered(eqn: Any) -> Registered | None:
    """The rule registered for a call, if any."""
    if not _REGISTERED:
        return None
    params = eqn.params
    said = params.get("name") or params.get("target_name") or ""
    return _REGISTERED.get(str(said)) or _REGISTERED.get(str(eqn.primitive.name))
