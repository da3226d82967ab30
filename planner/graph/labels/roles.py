"""The role of every value in a train step: parameter, moment, batch, gradient, activation, ...

Inputs that come back as results are *state*. State that the loss or the passes read is a parameter
if it has a gradient, else a statistic (running means, a cache, a counter); if there is such state,
other state is a moment (optimizer state, averages). Random keys are recognized by their type or by
the operations that read them. Other inputs are frozen if they are in one argument with state, else
they are the batch; without state the two can't be distinguished.

The search for a parameter's gradients starts at its next value: it goes back through the update,
along values of the parameter's dimensions, to values of the backward pass. There it continues,
along views and sums of equal dimensions, to the products and reductions that make the gradients.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterator, Mapping, Sequence

from planner.graph.ir import SCALAR, Graph, Op, Phase, Role, Value
from planner.graph.labels.phases import step_loops

KEY_READERS = frozenset({"random_wrap", "threefry2x32"})
"""Operations that read raw random keys."""

KEY_BORDERS = frozenset("loop_const loop_carry loop_xs branch_in reshape squeeze slice".split())

SLICES = frozenset({"loop_xs", "loop_ys"})
"""Borders at which a value loses or gains the dimension of a loop."""

VIEWS = frozenset({"reshape"})
"""Operations that do not change elements, such as a split of layers into pipeline stages."""

SUMS = frozenset({"reduce_sum", "reduce_max"})
"""Reductions in an update: means of gradients per example, and statistics that moments store."""

MAKES = frozenset("dot_general conv_general_dilated ragged_dot scatter-add scatter_add".split())
"""Products that make gradients: their operands are not gradients."""

REACH = 100_000
"""Maximum number of values to visit in one search for the gradients of an input."""

Dims = tuple[int, ...]


def roles_of(graph: Graph, phases: Sequence[Phase]) -> tuple[Value, ...]:
    """The values of a step with their roles.

    Args:
        graph: the step.
        phases: per operation.

    Complexity: O(operations) if the updates of parameters are separate.
    """
    gradients = _Gradients(graph, phases)
    state = [v for v in graph.state if graph.next_values[v] not in (SCALAR, v)]
    read = _read(graph, phases)
    nearest: dict[int, tuple[int, int]] = {}  # per gradient, (steps, its input)
    for index in state:
        for g, steps in gradients.of(index).items() if index in read else ():
            nearest[g] = min((steps, index), nearest.get(g, (steps, index)))
    parameter_of = {g: index for g, (_, index) in nearest.items()}
    trained = set(parameter_of.values())
    owner = {
        index: next((parameter_of[g] for g in gradients.of(index) if g in parameter_of), -1)
        for index in state
        if index not in trained and graph.values[index].shape
    }
    inputs = _inputs(graph, trained, read)
    gradient_owner = gradients.made(parameter_of)
    new = {o: i for i, o in graph.next_values.items() if o not in (SCALAR, i)}
    out = []
    for value in graph.values:
        if value.op < 0:
            role = inputs.get(value.index, Role.CONSTANT)
            carried = value.index in graph.next_values
            of = owner.get(value.index, -1) if role is Role.MOMENT else -1
            out.append(value.labelled(role, of, carried))
            continue
        phase, of = phases[value.op], -1
        if value.index in gradient_owner:
            role, of = Role.GRADIENT, gradient_owner[value.index]
        elif value.index in new:
            role, of = Role.NEXT, new[value.index]
        elif phase is Phase.BACKWARD:
            role = Role.COTANGENT
        else:
            role = Role.ACTIVATION if phase is Phase.FORWARD else Role.UPDATE
        plain = role is Role.ACTIVATION
        out.append(value if plain else value.labelled(role, of, value.carried))
    return tuple(out)


def _read(graph: Graph, phases: Sequence[Phase]) -> set[int]:
    """What the forward and the backward pass read, and what results besides the state depend on.
    Reports of the update (a norm of the moments, a learning rate) do not count. In a loop over
    whole train steps only one step counts: the next one reads what the moments made."""
    wanted = set()
    for v in graph.reports:
        producer = graph.values[v].op
        if producer < 0 or phases[producer] is not Phase.UPDATE:
            wanted.add(v)
    if Phase.BACKWARD in phases:
        passes = [op for op in graph.ops if phases[op.index] is not Phase.UPDATE]
        borders = ("loop_", "branch_")
        wanted.update(i for op in passes if not op.kind.startswith(borders) for i in op.inputs)
    return graph.needed_for(wanted, once=step_loops(graph, phases))[0]


def _inputs(graph: Graph, trained: set[int], read: set[int]) -> dict[int, Role]:
    """The roles of the inputs."""
    keys = _keys(graph)
    arguments = [path.partition("]")[0] for path in graph.input_paths]
    stateful = {arguments[i] for i, _ in graph.ties}
    trains = not read.isdisjoint(graph.state)
    out = {}
    for value, argument in zip(graph.inputs, arguments, strict=True):
        if value in keys:
            out[value] = Role.KEY
        elif value in graph.next_values:
            known = Role.PARAMETER if value in trained else Role.STATISTIC
            out[value] = known if value in read or not trains else Role.MOMENT
        elif not stateful:
            out[value] = Role.ARGUMENT
        else:
            out[value] = Role.FROZEN if argument in stateful else Role.BATCH
    return out


def _keys(graph: Graph) -> set[int]:
    """Inputs that are random keys: by type, or raw arrays that are read as keys."""
    inputs = set(graph.inputs)
    out = {v for v in inputs if graph.values[v].dtype.startswith("key<")}
    origin = {v: v for v in inputs if graph.values[v].dtype == "uint32"}
    for op in graph.ops:
        first = op.inputs[0] if op.inputs else SCALAR
        if first not in origin:
            continue
        if op.kind in KEY_READERS:
            out.add(origin[first])
        elif op.kind in KEY_BORDERS:
            origin[op.outputs[0]] = origin[first]
    return out


def dims_of(value: Value) -> Dims:
    """Dimensions of more than one element, sorted: a gradient may be transposed."""
    return tuple(sorted(n for n in value.shape if n > 1))


def _within(part: Dims, dims: Dims) -> bool:
    """Whether some dimensions are among others (gradients per example have one more)."""
    return not Counter(part) - Counter(dims)


def sums_gradient(graph: Graph, value: int) -> bool:
    """Whether a value is a gradient: by its role, or as a sum in the update over groups of examples
    whose gradients no loop adds up."""
    known = graph.values[value]
    if known.role is Role.GRADIENT or known.op < 0:
        return known.role is Role.GRADIENT
    op = graph.ops[known.op]
    if op.kind != "reduce_sum" or op.phase is not Phase.UPDATE:
        return False
    group = _unscaled(graph, op.inputs[0])
    return group.role is Role.GRADIENT and not graph.ops[group.op].kind.startswith("loop_")


SCALED = 8
"""Maximum number of operations between a gradient per example and the sum over the examples."""


def _unscaled(graph: Graph, value: int) -> Value:
    """The gradient that a value of the update scales or clips; the value itself if none."""
    first = at = graph.values[value]
    for _ in range(SCALED):
        if at.role is Role.GRADIENT or at.op < 0 or graph.ops[at.op].phase is not Phase.UPDATE:
            break
        if graph.ops[at.op].kind.startswith("loop_"):
            break
        same = [graph.values[v] for v in graph.ops[at.op].inputs if v != SCALAR]
        same = [v for v in same if v.shape == at.shape]
        if not same:
            break
        at = max(same, key=lambda v: v.role is Role.GRADIENT)
    return at if at.role is Role.GRADIENT else first


class _Gradients:
    """Finds gradients; see the module's docstring."""

    def __init__(self, graph: Graph, phases: Sequence[Phase]) -> None:
        self.graph, self.phases = graph, phases
        self.dims = [dims_of(v) for v in graph.values]
        self.backs: dict[int, list[int]] = {}
        for op in graph.ops:
            if op.kind == "loop_back" and op.inputs[0] != SCALAR:
                self.backs.setdefault(op.inputs[1], []).append(op.inputs[0])
        self.known: dict[int, dict[int, int]] = {}

    def of(self, index: int) -> Mapping[int, int]:
        """Values of the backward pass that the next value of an input depends on, and in how many
        steps, nearest first."""
        if index not in self.known:
            start = self.graph.next_values[index]
            distances = dict(self._reached(start, index, equal=True))
            if not distances and Phase.BACKWARD in self.phases:
                distances = dict(self._reached(start, index, equal=False))
            self.known[index] = distances
        return self.known[index]

    def _reached(self, start: int, index: int, equal: bool) -> Iterator[tuple[int, int]]:
        """Backward values that a next value depends on, with their distances. ``equal``: along
        operands of equal dimensions (of more, where they are summed), else along all."""
        wanted = self.dims[index]
        queue, seen = deque([(start, 0)]), {start}
        while queue and len(seen) < REACH:
            value, steps = queue.popleft()
            producer = self.graph.values[value].op
            if producer < 0:
                continue
            op = self.graph.ops[producer]
            if self.phases[producer] is Phase.BACKWARD:
                if equal or _within(wanted, self.dims[value]):
                    yield value, steps
                    if not wanted:  # a norm of all gradients has the dimensions of every scalar
                        return
                continue
            if self.phases[producer] is Phase.FORWARD and not self._is_border(op):
                continue
            for i in self._sources(op, value):
                if i not in seen and (not equal or self._alike(op, i, value)):
                    seen.add(i)
                    queue.append((i, steps + 1))

    def _is_border(self, op: Op) -> bool:
        return op.kind.startswith(("loop_", "branch_"))

    def _sources(self, op: Op, value: int) -> Iterator[int]:
        """The operands of an operation, and what a loop carries back to its result."""
        yield from (i for i in op.inputs if i != SCALAR)
        yield from self.backs.get(value, ())

    def _alike(self, op: Op, operand: int, result: int) -> bool:
        """Whether an operand has the dimensions of the result, up to those that a loop border, a
        view or a sum changes."""
        a, b = self.dims[operand], self.dims[result]
        return a == b or op.kind in SLICES | VIEWS | SUMS

    def made(self, parameter_of: dict[int, int]) -> dict[int, int]:
        """Per gradient, its parameter: those of ``parameter_of``, and the values that they are
        views and sums of, back to the products and reductions that make them."""
        out = dict(parameter_of)
        stack = list(parameter_of)
        while stack:
            value = stack.pop()
            op = self.graph.ops[self.graph.values[value].op]
            if op.kind in MAKES:
                continue
            for i in self._sources(op, value):
                home = self.graph.values[i].op
                back = home >= 0 and self.phases[home] is Phase.BACKWARD
                same = self.dims[i] == self.dims[value] or op.kind in SLICES
                if back and same and i not in out:
                    out[i] = out[value]
                    stack.append(i)
        return out
