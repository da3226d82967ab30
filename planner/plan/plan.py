"""The Plan: plain, printable, diffable JSON. No jax.

Everything in a plan is decided by the step, the shapes, the cluster and the request, so
every host that computes it gets the same text. Wall times are kept apart (``planning_s``
is not saved and does not count for equality).
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from costmodels.files import write_whole
from planner.errors import PlanFormatError, PlanMismatchError
from planner.files import MIB, parsed_json, read_text
from planner.graph.ir import SCALAR, Graph
from planner.plan.canonical import canonical
from planner.plan.compiled.confirmed import Confirmation
from planner.plan.compiled.lowering import PLAIN, Lowering
from planner.plan.contents.compute import ComputeRow
from planner.plan.contents.folded import unfold_plan
from planner.plan.contents.json_text import json_text, plain
from planner.plan.contents.rows import (
    Activation,
    CollectiveRow,
    Constraint,
    DecisionRow,
    Leaf,
    MeshRow,
    PinRow,
    Prediction,
    SearchReport,
)
from planner.plan.specs.logical_rules import LogicalAxes, logical_axes
from planner.spec import REWRITINGS, WHOLE, MeshSpec, Recipe

FORMAT = "meshwright-plan-1"
LARGEST = 256 * MIB
"""Bytes of the largest plan file that is read."""
LARGE = "of memory"
"""How the line of an operation ends that no rule splits and that takes much memory."""
EQUAL_BLOCKS = "equal blocks"
"""In a note: which operations repeat, a detail that summaries leave out."""
LITERAL = "literal"
"""The dtype that a plan writes for a result that is a constant of the program."""


@dataclass(frozen=True)
class Plan:
    """How one train step runs on one cluster."""

    mode: str
    cluster: str
    mesh: MeshSpec
    inputs: tuple[Leaf, ...]
    outputs: tuple[Leaf, ...]
    constraints: tuple[Constraint, ...]
    collectives: tuple[CollectiveRow, ...]
    activations: tuple[Activation, ...]
    fallbacks: tuple[str, ...]
    notes: tuple[str, ...]
    meshes: tuple[MeshRow, ...]
    prediction: Prediction
    search: SearchReport
    op_table: tuple[str, ...]
    op_index: tuple[int, ...]
    op_inputs: tuple[tuple[int, ...], ...]
    pins: tuple[PinRow, ...] = ()
    strategy: str = ""
    """What the plan does, in the field's words; empty in plans of older versions."""
    idle: str = ""
    """Says so where devices repeat each other's work."""
    lowering: Lowering = PLAIN
    """How its shardings are said to the compiler."""
    confirmed: Confirmation | None = None
    """What the compiler said of it; None where it was not asked."""
    compiler_options: tuple[tuple[str, str], ...] = ()
    """What the compiler is asked for, names and values."""
    decisions: tuple[DecisionRow, ...] = ()
    apart: tuple[int, ...] = ()
    """Products whose result is kept apart from the update that reads it. Left out of the JSON where
    there are none, as the three above."""
    microbatches: int = 1
    """Parts of the batch that run one after the other; left out of the JSON where it is 1."""
    replicas: int = 1
    """Groups of examples whose gradients are joined behind the last microbatch; left out of the
    JSON where it is 1."""
    pad_batch: int = 0
    """Examples that the batch is padded to; left out of the JSON where it is not."""
    examples: int = 0
    """Examples that the batch has without padding; left out of the JSON where it is not padded."""
    statistics: str = WHOLE
    """Whose the values are that examples make together: ``planner.spec.Recipe``."""
    coupled: tuple[str, ...] = ()
    """Where they are those of each microbatch: lines of the user's code. Both are left out where
    they are the whole batch's."""
    remat: str = "none"
    """The policy of what is computed again in the backward pass (``planner.remat.policy``)."""
    recomputed: tuple[str, ...] = ()
    """What that is, a line for each kind of block. Both are left out where there is nothing."""
    chunks: int = 1
    """Parts of the rows of large products that are computed one after the other."""
    chunked: tuple[str, ...] = ()
    """Which products, a line for each. Both are left out where there are none."""
    stages: int = 1
    """Pipeline stages, the size of the mesh axis ``stage``."""
    staged: tuple[str, ...] = ()
    """What a stage is. Both are left out where there are none."""
    schedule: str = ""
    """The order of the passes of stages that are programs of their own; left out where all stages
    are one program."""
    cuts: tuple[int, ...] = ()
    """Of such stages, the operation that each one's forward pass begins with."""
    order: tuple[str, ...] = ()
    """Where ``schedule`` is the user's own: per group of devices, its passes in order."""
    compute: tuple[ComputeRow, ...] = ()
    """The lines that take longest to compute; left out where stages are programs of their own."""
    planning_s: float = field(default=0.0, compare=False)
    device: str = field(default="", compare=False)
    """Kind of device, where the plan was made and not read: as ``planning_s`` it is not saved."""

    @property
    def recipe(self) -> Recipe:
        """How the step is rewritten."""
        given = {name: getattr(self, name) for name in REWRITINGS}
        return Recipe(**given, cuts=self.cuts, order=self.order)

    @property
    def digest(self) -> str:
        """SHA-256 of the JSON text."""
        return hashlib.sha256(self.to_json().encode()).hexdigest()

    @property
    def canonical_digest(self) -> str:
        """SHA-256 of what a review is about (``planner.plan.canonical``): plans with the same one
        differ at most in files and lines, and in what was tried."""
        text = json.dumps(canonical(self._body()), sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()

    def to_json(self, *, folded: bool = False) -> str:
        """The plan as JSON text, one item of each list a line, so that it diffs well.

        Args:
            folded: whether equal layers are written once, as in files (``save``).
        """
        return json_text({"format": FORMAT, **self._body()}, folded=folded)

    def _body(self) -> dict[str, Any]:
        return {f.name: plain(getattr(self, f.name)) for f in dataclasses.fields(self) if f.compare}

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the JSON atomically, equal layers once: the file is whole or not there."""
        write_whole(Path(path), self.to_json(folded=True))

    def as_partition_specs(self, *args: Any) -> Any:
        """The ``jax.sharding.PartitionSpec`` of every argument.

        Args:
            *args: the step's arguments (arrays or ShapeDtypeStructs), or nothing.

        Returns:
            With arguments a tuple like them, a spec for every array; else a dict by path.

        Raises:
            PlanMismatchError: the plan is for other arguments.
        """
        from planner.plan.specs.partition_specs import partition_specs, specs_like

        specs = partition_specs(self.inputs)
        return specs_like(specs, args) if args else specs

    def as_logical_axis_rules(self) -> LogicalAxes:
        """Logical names of every argument's dimensions, and rules from names to mesh axes."""
        return logical_axes(self.inputs)

    def __str__(self) -> str:
        from planner.report.table import plan_text

        return plan_text(self)

    def __repr__(self) -> str:
        from planner.html.card import one_line

        return one_line(self)

    def _repr_html_(self) -> str:
        """What a notebook shows."""
        from planner.html.card import card

        return card(self)

    def check_matches(self, graph: Graph) -> None:
        """Raise PlanMismatchError, naming the first difference, unless made for ``graph``."""
        inputs = [
            (p, graph.values[v]) for p, v in zip(graph.input_paths, graph.inputs, strict=True)
        ]
        for leaf, (path, value) in zip(self.inputs, inputs, strict=False):
            got = (path, value.shape, value.dtype)
            expected = (leaf.path, leaf.shape, leaf.dtype)
            if got != expected:
                raise PlanMismatchError(
                    f"this plan is for another step: argument {path} is {value}, the plan has "
                    f"{leaf.path} of {leaf.dtype}{list(leaf.shape)}; plan again for these arguments"
                )
        if len(inputs) != len(self.inputs):
            raise PlanMismatchError(
                f"this plan is for another step: got {len(inputs)} array arguments, "
                f"expected {len(self.inputs)}"
            )
        for op, index in zip(graph.ops, self.op_index, strict=False):
            text = graph.op_text(op)
            if text != self.op_table[index]:
                raise PlanMismatchError(
                    f"this plan is for another step: operation {op.index} "
                    f"({op.source or 'no line'}) "
                    f"is {text}, the plan has {self.op_table[index]}"
                )
        for op, reads in zip(graph.ops, self.op_inputs, strict=False):
            if op.inputs != reads:
                raise PlanMismatchError(
                    f"this plan is for another step: operation {op.index} "
                    f"({op.source or 'no line'}), {graph.op_text(op)}, reads values "
                    f"{list(op.inputs)}, in the plan {list(reads)}"
                )
        if len(graph.ops) != len(self.op_index):
            raise PlanMismatchError(
                f"this plan is for another step: got {len(graph.ops)} operations, expected "
                f"{len(self.op_index)}"
            )
        self._check_results(graph)

    def _check_results(self, graph: Graph) -> None:
        """As ``check_matches``, for the results and the places of constraints."""
        got = [
            (path, (), LITERAL)
            if v == SCALAR
            else (path, graph.values[v].shape, graph.values[v].dtype)
            for path, v in zip(graph.output_paths, graph.outputs, strict=True)
        ]
        expected = [(leaf.path, leaf.shape, leaf.dtype) for leaf in self.outputs]
        if got != expected:
            unlike = [pair for pair in zip(got, expected, strict=False) if pair[0] != pair[1]]
            here, there = unlike[0] if unlike else (f"{len(got)}", f"{len(expected)}")
            raise PlanMismatchError(
                f"this plan is for another step: results are {here}, in the plan {there}; plan "
                "again for this step"
            )
        for row in self.decisions:
            outs = graph.ops[row.op].outputs
            if row.position >= len(outs) or str(graph.values[outs[row.position]]) != row.value:
                raise PlanMismatchError(
                    f"this plan is for another step: it decides {row.decision!r} for result "
                    f"{row.position} of operation {row.op}, {row.value}, which is "
                    f"{graph.op_text(graph.ops[row.op])}"
                )
        for c in self.constraints:
            op = graph.ops[c.op]
            values = op.inputs if c.slot in ("in", "from") else op.outputs
            at = values[c.position] if c.position < len(values) else -1
            if at < 0 or len(c.spec.dims) > len(graph.values[at].shape):
                raise PlanMismatchError(
                    f"this plan is for another step: it has {c.spec} for {c.slot!r} "
                    f"{c.position} of operation {c.op}, {graph.op_text(op)}"
                )


def load_plan(path: str | os.PathLike[str]) -> Plan:
    """Read a plan that ``Plan.save`` wrote.

    Raises:
        PlanFormatError: the file can't be read or is larger than ``LARGEST``; or as
            ``plan_from_json``.
    """
    try:
        text = read_text(path, LARGEST)
    except OSError as error:
        raise PlanFormatError(f"cannot read plan {path}: {error.strerror}") from error
    return plan_from_json(text, str(path))


def plan_from_json(text: str, where: str = "plan") -> Plan:
    """Parse the text of ``Plan.to_json``.

    Raises:
        PlanFormatError: not JSON, another format, or not what ``planner.plan.schema`` allows; one
            line that says where.
    """
    from planner.plan.schema import read_plan

    try:
        raw = parsed_json(text)
    except ValueError as error:
        raise PlanFormatError(f"{where} is not JSON: {error}") from error
    got = raw.pop("format", None) if isinstance(raw, dict) else type(raw).__name__
    if got != FORMAT:
        newer = re.fullmatch(r"meshwright-plan-(\d{1,6})", got) if isinstance(got, str) else None
        hint = ""
        if newer is not None and int(newer[1]) > int(FORMAT.rpartition("-")[2]):
            hint = "; a newer meshwright wrote it: upgrade, or save the plan again with this one"
        raise PlanFormatError(f"{where}: got format {ascii(got)[:60]}, expected {FORMAT!r}{hint}")
    try:
        return read_plan(unfold_plan(raw))
    except ValueError as error:
        raise PlanFormatError(
            f"{where}: field missing or malformed: {error}; save the plan again"
        ) from error
