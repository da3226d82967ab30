"""The Plan: plain, printable, diffable JSON. No jax.

The step, the shapes, the cluster and the request determine everything in a plan, so every host
computes the same text. Wall times are excluded (``planning_s`` is not saved and does not count for
equality).
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
"""End of the line on an operation without a sharding rule that takes much memory."""
EQUAL_BLOCKS = "equal blocks"
"""Text in a note on repeated operations, a detail that summaries leave out."""
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
    """The kinds of parallelism, in standard terms; empty in plans of older versions."""
    idle: str = ""
    """A text if devices repeat each other's work; empty otherwise."""
    lowering: Lowering = PLAIN
    """How its shardings are passed to the compiler."""
    confirmed: Confirmation | None = None
    """The compiled candidates of the plan; None without ``confirm=``."""
    compiler_options: tuple[tuple[str, str], ...] = ()
    """XLA options, names and values."""
    decisions: tuple[DecisionRow, ...] = ()
    apart: tuple[int, ...] = ()
    """Products that are not fused with the update that reads their result. Left out of the JSON if
    there are none, like the three above."""
    microbatches: int = 1
    """Parts of the batch that run one after the other; left out of the JSON where it is 1."""
    replicas: int = 1
    """Groups of examples whose gradients are combined after the last microbatch; left out of the
    JSON where it is 1."""
    pad_batch: int = 0
    """Number of examples that the batch is padded to; left out of the JSON if it is not padded."""
    examples: int = 0
    """Number of examples of the batch without padding; left out of the JSON if it is not padded."""
    statistics: str = WHOLE
    """Whether statistics are those of the batch or of each microbatch: ``planner.spec.Recipe``."""
    coupled: tuple[str, ...] = ()
    """Lines of the user's code with per-microbatch statistics. Both are left out if statistics are
    those of the whole batch."""
    remat: str = "none"
    """The rematerialization policy (``planner.remat.policy``)."""
    recomputed: tuple[str, ...] = ()
    """What is rematerialized, one line per kind of block. Both are left out if nothing is."""
    chunks: int = 1
    """Parts of the rows of large products that are computed one after the other."""
    chunked: tuple[str, ...] = ()
    """These products, one line each. Both are left out if there are none."""
    stages: int = 1
    """Pipeline stages, the size of the mesh axis ``stage``."""
    staged: tuple[str, ...] = ()
    """What the stages contain. Both are left out if there are none."""
    schedule: str = ""
    """The order of the passes of stages that are separate programs; left out if all stages are one
    program."""
    cuts: tuple[int, ...] = ()
    """The first operation of the forward pass of each of these stages."""
    order: tuple[str, ...] = ()
    """For a user-defined ``schedule``: the passes of each group of devices, in order."""
    compute: tuple[ComputeRow, ...] = ()
    """The lines that take longest to compute; left out if stages are separate programs."""
    planning_s: float = field(default=0.0, compare=False)
    device: str = field(default="", compare=False)
    """Kind of device if the plan was computed, not loaded; like ``planning_s``, it is not saved."""

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
        """SHA-256 of the parts that a review covers (``planner.plan.canonical``). Plans with equal
        digests differ at most in files and lines, and in what was tried."""
        text = json.dumps(canonical(self._body()), sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()

    def to_json(self, *, folded: bool = False) -> str:
        """The plan as JSON text with one list item per line, so that it diffs well.

        Args:
            folded: whether equal layers are written once, as in files (``save``).
        """
        return json_text({"format": FORMAT, **self._body()}, folded=folded)

    def _body(self) -> dict[str, Any]:
        return {f.name: plain(getattr(self, f.name)) for f in dataclasses.fields(self) if f.compare}

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the JSON atomically: the file is complete or absent. Equal layers are written
        once."""
        write_whole(Path(path), self.to_json(folded=True))

    def as_partition_specs(self, *args: Any) -> Any:
        """The ``jax.sharding.PartitionSpec`` of every argument.

        Args:
            *args: the step's arguments (arrays or ShapeDtypeStructs), or nothing.

        Returns:
            With arguments, a tuple of their structure with a spec for every array; else a dict by
            path.

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
        """The HTML that a notebook shows."""
        from planner.html.card import card

        return card(self)

    def check_matches(self, graph: Graph) -> None:
        """Raise PlanMismatchError, which names the first difference, unless the plan is for
        ``graph``."""
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
        """Like ``check_matches``, for the results and the places of constraints."""
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
