"""Union-find over factors: which values share one decision (see ``groups``)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from planner.rules.factor import FactorRule

LAYOUT_NONE = -1
"""A dimension that has no factor (size one, or not shardable)."""

Layout = tuple[int, ...]
"""The factor of each dimension of a value."""


Placed = tuple[list[Layout], list[Layout]]
"""Layouts of an operation's operands and results."""


@dataclass
class Fusion:
    """Factors (atoms) and groups, each with a union-find forest."""

    parent: list[int] = field(default_factory=list)
    size: list[int] = field(default_factory=list)
    blocked: list[bool] = field(default_factory=list)
    gparent: list[int] = field(default_factory=list)
    gkind: list[str] = field(default_factory=list)
    gname: list[str] = field(default_factory=list)
    gops: list[list[int]] = field(default_factory=list)
    gatoms: list[list[int]] = field(default_factory=list)
    glayouts: list[set[Layout]] = field(default_factory=list)
    greduce: list[set[int]] = field(default_factory=list)
    gheld: list[dict[int, frozenset[str]]] = field(default_factory=list)
    """Per group and factor, the mesh axes that pins require; see ``hold``."""
    home: dict[int, tuple[int, Layout]] = field(default_factory=dict)
    adopted: dict[tuple[int, Layout, int, int], tuple[Placed, FactorRule]] = field(
        default_factory=dict
    )

    def find(self, atom: int) -> int:
        """The representative of an atom."""
        while self.parent[atom] != atom:
            self.parent[atom] = self.parent[self.parent[atom]]
            atom = self.parent[atom]
        return atom

    def gfind(self, group: int) -> int:
        """The representative of a group."""
        while self.gparent[group] != group:
            self.gparent[group] = self.gparent[self.gparent[group]]
            group = self.gparent[group]
        return group

    def new_group(self, kind: str, name: str) -> int:
        """Create a group."""
        index = len(self.gparent)
        self.gparent.append(index)
        self.gkind.append(kind)
        self.gname.append(name)
        self.gops.append([])
        self.gatoms.append([])
        self.glayouts.append(set())
        self.greduce.append(set())
        self.gheld.append({})
        return index

    def hold(self, group: int, layout: Layout, axes: Sequence[frozenset[str] | None]) -> None:
        """Record the mesh axes that a pin requires for a value's dimensions; dimensions beyond
        ``axes`` must be unsharded, and None allows any sharding."""
        whole: tuple[frozenset[str] | None, ...] = (frozenset(),) * (len(layout) - len(axes))
        for atom, pinned_axes in zip(layout, (*axes, *whole), strict=False):
            if atom != LAYOUT_NONE and pinned_axes is not None:
                self.gheld[self.gfind(group)].setdefault(self.find(atom), pinned_axes)

    def _held_together(
        self, groups: Iterable[int], root: Callable[[int], int]
    ) -> dict[int, frozenset[str]] | None:
        """The axes that pins require for the factors of merged groups; None if pins contradict."""
        out: dict[int, frozenset[str]] = {}
        for group in groups:
            for atom, pinned_axes in self.gheld[group].items():
                if out.setdefault(root(atom), pinned_axes) != pinned_axes:
                    return None
        named = [axis for axes in out.values() for axis in axes]
        return out if len(set(named)) == len(named) else None

    def new_atom(self, group: int, size: int, blocked: bool = False) -> int:
        """Create a factor in a group."""
        atom = len(self.parent)
        self.parent.append(atom)
        self.size.append(size)
        self.blocked.append(blocked)
        self.gatoms[group].append(atom)
        return atom

    def fresh(self, group: int, shape: Sequence[int]) -> Layout:
        """A layout of new factors, one per dimension above size one."""
        layout = tuple(LAYOUT_NONE if n <= 1 else self.new_atom(group, n) for n in shape)
        self.glayouts[group].add(layout)
        return layout

    def instantiate(self, group: int, rule: FactorRule) -> Placed:
        """The rule's factors as atoms of ``group``; layouts of operands and results."""
        atoms = [self.new_atom(group, n, f in rule.replicated) for f, n in enumerate(rule.sizes)]

        def side(values: Iterable[tuple[tuple[int, ...], ...]]) -> list[Layout]:
            return [
                tuple(LAYOUT_NONE if not dim else atoms[dim[0]] for dim in dims) for dims in values
            ]

        for f in rule.reduction:
            self.greduce[group].add(atoms[f])
        # a minor factor of a merged dimension can't be sharded by itself
        for values in (rule.operands, rule.results):
            for dims in values:
                for dim in dims:
                    for f in dim[1:]:
                        self.blocked[atoms[f]] = True
        ins, outs = side(rule.operands), side(rule.results)
        self.glayouts[group].update(layout for layout in (*ins, *outs) if layout)
        return ins, outs

    def _has_more(self, group: int, shared: set[int]) -> bool:
        """Whether the group has factors beyond ``shared``."""
        roots = {self.find(a) for a in shared if a != LAYOUT_NONE}
        roots.add(LAYOUT_NONE)
        return any(
            a not in roots and self.find(a) not in roots
            for layout in self.glayouts[group]
            for a in layout
        )

    def adopt(
        self, group: int, operand_layout: Layout, rule: FactorRule, operand: int
    ) -> Placed | None:
        """Place a rule in the group of one of its operands, whose layout is ``operand_layout``.

        The same as ``instantiate`` in a new group and ``try_union`` along that operand,
        without creating the group. Dimensions of the rule have one factor at most.

        Returns:
            Layouts of operands and results, or None (nothing changed) if ``try_union``
            would return False.
        """
        group = self.gfind(group)
        key = (group, operand_layout, id(rule), operand)
        if key in self.adopted:
            return self.adopted[key][0]
        rule_dims = rule.operands[operand]
        atoms: list[int] = [LAYOUT_NONE] * len(rule.sizes)
        for dim, atom in zip(rule_dims, operand_layout, strict=True):
            if (not dim) != (atom == LAYOUT_NONE):
                return None
            if dim:
                root = self.find(atom)
                if self.size[root] != rule.sizes[dim[0]]:
                    return None
                atoms[dim[0]] = root
        values = (*rule.operands, *rule.results)
        spans = all(atoms[dim[0]] != LAYOUT_NONE for dims in values for dim in dims if dim)
        if not spans:
            if self._has_more(group, set(operand_layout)):
                return None
            for f, (size, atom) in enumerate(zip(rule.sizes, atoms, strict=True)):
                if atom == LAYOUT_NONE:
                    atoms[f] = self.new_atom(group, size)
        for f in rule.replicated:
            self.blocked[atoms[f]] = True
        self.greduce[group].update([atoms[f] for f in rule.reduction])
        layouts = [
            tuple([atoms[dim[0]] if dim else LAYOUT_NONE for dim in dims]) for dims in values
        ]
        self.glayouts[group].update([layout for layout in layouts if layout])
        placed = layouts[: len(rule.operands)], layouts[len(rule.operands) :]
        if spans:  # no new factor: the next equal operation gets the same layouts
            self.adopted[key] = (placed, rule)
        return placed

    def try_union(self, group: int, layout: Layout, other: int, other_layout: Layout) -> bool:
        """Unify two groups along matching layouts.

        Returns False (nothing changed) if a value would clash, if pins in the two groups require
        different shardings, or if both groups have further factors: a small value (a bias, a mean)
        is no reason to tie two large ones.
        """
        group, other = self.gfind(group), self.gfind(other)
        if group == other and layout == other_layout:
            return True
        merged: dict[int, int] = {}

        def root(atom: int) -> int:
            atom = self.find(atom)
            while atom in merged:
                atom = merged[atom]
            return atom

        for group_atom, their in zip(layout, other_layout, strict=True):
            if LAYOUT_NONE in (group_atom, their):
                if group_atom != their:
                    return False
                continue
            x, y = root(group_atom), root(their)
            if x == y:
                continue
            if self.size[x] != self.size[y]:
                return False
            merged[max(x, y)] = min(x, y)
        if group == other and not merged:
            return True
        if group != other:
            shared = set(other_layout) | set(layout)
            if all(self._has_more(g, shared) for g in (group, other)):
                return False
        held = self._held_together({group, other}, root)
        if held is None:
            return False
        renamed = set()
        for old in self.glayouts[group] | self.glayouts[other]:
            new = tuple(LAYOUT_NONE if a == LAYOUT_NONE else root(a) for a in old)
            named = [a for a in new if a != LAYOUT_NONE]
            if len(set(named)) != len(named):
                return False
            renamed.add(new)
        for src, dst in merged.items():
            self.parent[self.find(src)] = self.find(dst)
            self.blocked[self.find(dst)] = self.blocked[self.find(dst)] or self.blocked[src]
        keep, gone = min(group, other), max(group, other)
        self.glayouts[keep] = renamed
        self.gheld[keep] = held
        if keep != gone:
            self.gparent[gone] = keep
            self.gops[keep] += self.gops[gone]
            self.gatoms[keep] += self.gatoms[gone]
            self.greduce[keep] |= self.greduce[gone]
        return True
