"""The options of a plan, defined once for all entry points.

An option of a plan is one entry of ``Options``: ``make_plan``, ``parallelize``, ``hybrid`` and the
command line read their keywords, defaults and flags from it.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Annotated, Any, TypedDict, TypeVar, get_args, get_type_hints

from costmodels.orders import Order
from planner.modes import (
    COMPILERS,
    DEFAULT_SEARCH,
    MODES,
    SHORT,
)
from planner.space.decisions import DECISIONS
from planner.spec import MeshSpec


@dataclass(frozen=True)
class Flag:
    """An option on the command line.

    Attributes:
        help: one line.
        metavar: placeholder for its value.
        type: converts the word to the value.
        choices: the allowed words, if they can be listed; upper case.
        repeated: whether it may be given several times.
    """

    help: str
    metavar: str | None = None
    type: Callable[[str], Any] = str
    choices: tuple[str, ...] = ()
    repeated: bool = False


def positive_seconds(text: str) -> float:
    """Seconds above 0; raises ValueError."""
    value = float(text)
    if not value > 0:
        raise ValueError(text)
    return value


class Options(TypedDict, total=False):
    """The options of a plan, besides its cluster; one that is missing or None takes its default.

    mode: one of ``planner.modes.MODES``, or a name of ``SHORT`` ("dp",
        "fsdp", "tp", "fsdp+tp", "pp"); None takes ``set_parallel_mode``'s.
    search: a name of ``planner.search.SEARCHES`` or ``sharding_propagation``; None likewise.
    mesh: a fixed logical mesh (``"data=4,model=2"``); None takes that of the arguments'
        NamedShardings if it has the cluster's device count, else tries all up to three axes.
    memory: limit per device (``"80GB"`` or bytes); None takes the device's.
    host_memory: memory of its host that a plan may use for each device; None takes the memory of
        such hosts in the catalog, less a reserve.
    shardings: ``{"regex over argument path": PartitionSpec(...)}``, honored or refused;
        ``PartitionSpec.UNCONSTRAINED`` leaves a dimension to the planner.
    logical_axis_rules: pairs of a logical name and mesh axes, for Flax metadata and
        ``nn.with_logical_constraint``; None takes those in force in Flax.
    zero: ZeRO level 0 to 3 along the data axes; None leaves it to the search.
    whole_below: arrays of the state with fewer bytes (``"64KB"``) are stored whole.
    never_fsdp: regular expressions over argument paths; matching arrays are stored as they are
        used.
    offload: regular expressions over argument paths; matching arrays of the state are stored in
        host memory between their uses. ``"auto"``: the search decides which, by what fits.
    time_limit_s: seconds for the search, per mesh; 60 by default.
    microbatches: number of parts of the batch that run one after the other; their gradients are
        added up. Results equal those of the whole batch, or the step is refused with the line that
        couples examples. None: 1, or more if memory is short; ``"auto"``: the search decides.
    replicas: number of groups that the examples of each microbatch are split into. Each group
        accumulates its gradients over all microbatches, and they are summed once per step. If each
        group has its own devices, gradients are reduced once instead of in every microbatch, or in
        every iteration of a loop over time. None: the number that is predicted fastest if there is
        such a loop; 1: a reduction in every iteration.
    pad_batch: number of examples that the batch is padded to, so that the devices divide it. Sums
        exclude the padding, so results are equal, or the step is refused with the line that couples
        examples. ``"auto"``: the next number that the devices divide, if that is predicted to be
        faster. Not together with microbatches, replicas or stages. None: no padding.
    statistics: whether statistics over examples (means of BatchNorm, a load-balancing loss of
        experts) are those of the whole batch, ``"batch"`` (the default: microbatches are refused),
        or ``"per-microbatch"``. In the latter case each microbatch counts as a batch; losses and
        gradients are averaged, or added up if they are sums. Results differ from those of the whole
        batch; the plan says where. Not together with replicas, stages or pad_batch.
    remat: what the backward pass recomputes: ``"none"``, ``"full"``, ``"dots"`` (all but products),
        ``"offload"`` (``"full"``, with stored values in host memory), a number (what costs at most
        this many FLOPs per byte that it frees), or ``"offload:512"`` (likewise, with stored values
        in host memory). None: ``"none"``, or more if nothing else fits; ``"auto"``: the search
        decides.
    chunks: number of parts of the rows of products whose result is much larger than their operands
        (attention scores, logits); only some rows of the result are in memory at a time. None: 1,
        or more if memory is short; ``"auto"``: the search decides.
    stages: number of pipeline stages that the repeated layers are cut into, each on its own devices
        (the mesh axis ``stage``). Microbatches pass through them (1F1B), four per stage unless
        ``microbatches`` is set. Results equal those of the plain step, or it is refused with the
        line. Manual: regular expressions over lines, or over paths of arrays of the state, and the
        stage that begins at the first match in the forward pass; implies ``schedule="1f1b"``.
    schedule: makes each stage a separate program, which may differ from the others, and sets the
        order of the passes: ``"1f1b"``, ``"gpipe"``, ``"zb-h1"``, ``"zb-h2"``, ``"zb-v"``,
        ``"interleaved-2"`` (chunks per device), or the fastest of them (``"auto"``). A file that
        you write (``costmodels.orders.write_order``), or an ``Order``, also sets the numbers of
        stages and microbatches. None: all stages in one program, which requires equal stages.
    confirm: ``"tpu"`` or ``"gpu"``: compile the best few plans ahead of time for the cluster, and
        choose the fastest that fits.
    candidates: number of plans of different meshes to compile; 3 by default.
    confirm_limit_s: no compilation starts after this many seconds; 90 by default.
    compiler_options: for XLA, as for ``jax.jit`` (or ``"NAME=VALUE"`` texts); stored in the plan.
    dump_problem: a file for the optimization problem of the chosen mesh, in the IOPDDL form;
        written also if no plan fits.
    """

    mode: Annotated[
        str | None,
        Flag(
            f"{', '.join(MODES)}; or {', '.join(map(str.lower, SHORT))}",
            metavar="MODE",
            type=str.upper,
            choices=(*MODES, *SHORT),
        ),
    ]
    search: Annotated[str | None, Flag(f"search algorithm (default: {DEFAULT_SEARCH})")]
    mesh: Annotated[
        str | Mapping[str, int] | MeshSpec | None,
        Flag("a fixed logical mesh, such as data=4,model=2 (default: try them all)"),
    ]
    memory: Annotated[
        str | float | None, Flag("memory per device that the plan may use, such as 80GB")
    ]
    host_memory: Annotated[
        str | float | None,
        Flag("memory of its host that the plan may use for each device, such as 200GB"),
    ]
    shardings: Mapping[str, Any] | None
    logical_axis_rules: Sequence[Any] | None
    zero: Annotated[
        int | None, Flag("ZeRO level 0 to 3 along the data axes", metavar="LEVEL", type=int)
    ]
    whole_below: Annotated[
        str | float | None,
        Flag(
            "arrays of the training state that are smaller are stored whole, such as 64KB",
            metavar="BYTES",
        ),
    ]
    never_fsdp: Annotated[
        str | Sequence[str] | None,
        Flag(
            "arguments whose path matches are stored as they are used; may be repeated",
            metavar="REGEX",
            repeated=True,
        ),
    ]
    offload: Annotated[
        str | Sequence[str] | None,
        Flag(
            "arrays of the training state whose path matches live in host memory between their "
            "uses; may be repeated; 'auto' lets the search decide",
            metavar="REGEX",
            repeated=True,
        ),
    ]
    time_limit_s: Annotated[
        float | None,
        Flag("for the search, per mesh (default: 60)", metavar="SECONDS", type=positive_seconds),
    ]
    microbatches: Annotated[
        int | str | None,
        Flag(
            "cut the batch into so many parts, added up; 'auto' lets the search decide "
            "(default: 1, more where memory is short)",
            metavar="N",
        ),
    ]
    replicas: Annotated[
        int | str | None,
        Flag(
            "accumulate gradients in N groups of examples and reduce them once per step, not in "
            "every microbatch or time step (default: the number that is predicted fastest)",
            metavar="N",
        ),
    ]
    pad_batch: Annotated[
        int | str | None,
        Flag(
            "fill the batch up to so many examples that no sum has; 'auto': to what the devices "
            "divide, where that is faster (default: as it is)",
            metavar="N",
        ),
    ]
    statistics: Annotated[
        str | None,
        Flag(
            "batch, or per-microbatch: where examples depend on each other (BatchNorm, balance "
            "losses), each microbatch stands for itself (default: batch)",
            metavar="WHOSE",
            type=str.lower,
        ),
    ]
    remat: Annotated[
        str | float | None,
        Flag(
            "what the backward pass computes again: auto, none, full, dots, offload, or flop per "
            "byte that it frees, such as 512, or offload:512 (default: none, more where memory "
            "is short)",
            metavar="POLICY",
        ),
    ]
    chunks: Annotated[
        int | str | None,
        Flag(
            "compute the rows of attention scores and logits in so many parts, one after the "
            "other; 'auto' lets the search decide (default: 1, more where memory is short)",
            metavar="N",
        ),
    ]
    stages: Annotated[
        int | str | Mapping[str, int] | None,
        Flag(
            "cut the layers into so many pipeline stages, on the devices of a mesh axis 'stage'; "
            "'auto' compares some; 'encoder=0,decoder=1' says by patterns over paths or lines "
            "where stages begin (default: 1, more where a network between nodes makes that faster)",
            metavar="N",
        ),
    ]
    schedule: Annotated[
        str | Path | Order | None,
        Flag(
            "make each stage a program of its own and run their passes in this order: 1f1b, gpipe, "
            "zb-h1, zb-h2, zb-v, interleaved-2, auto, or a JSON file of yours (default: all stages "
            "in one program)",
            metavar="NAME",
        ),
    ]
    confirm: Annotated[
        str | None,
        Flag(
            "compile the best few plans ahead of time and choose the fastest that fits: "
            + " or ".join(COMPILERS),
            metavar="COMPILER",
            type=str.lower,
        ),
    ]
    candidates: Annotated[
        int | None,
        Flag(
            "plans of different meshes that --confirm compiles (default: 3)", metavar="N", type=int
        ),
    ]
    confirm_limit_s: Annotated[
        float | None,
        Flag(
            "--confirm starts no compilation after this time (default: 90)",
            metavar="SECONDS",
            type=positive_seconds,
        ),
    ]
    compiler_options: Annotated[
        Mapping[str, str | bool | int | float] | Sequence[str] | None,
        Flag("XLA option, as for jax.jit; may be repeated", metavar="NAME=VALUE", repeated=True),
    ]
    dump_problem: str | Path | None


OPTIONS = tuple(Options.__annotations__)
"""The names of all options."""


def flags() -> dict[str, Flag]:
    """The flags of the command line, by option name."""
    hints = get_type_hints(Options, include_extras=True)
    hint_args = {name: get_args(hint) for name, hint in hints.items()}
    return {
        name: extra for name, args in hint_args.items() for extra in args if isinstance(extra, Flag)
    }


_Function = TypeVar("_Function", bound=Callable[..., Any])


def takes_options(function: _Function) -> _Function:
    """Show the options in the signature of a function that takes ``**options``."""
    signature = inspect.signature(function)
    named = [
        p for p in signature.parameters.values() if p.kind is not inspect.Parameter.VAR_KEYWORD
    ]
    hints = get_type_hints(Options)
    listed = [
        inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=hint)
        for name, hint in hints.items()
        if name not in signature.parameters
    ]
    function.__signature__ = signature.replace(parameters=[*named, *listed])  # type: ignore[attr-defined]
    return function


def given_options(door: str, options: Mapping[str, Any]) -> dict[str, Any]:
    """The options that are not None.

    Args:
        door: the function that received them, for the error message.
        options: its keywords.

    Raises:
        TypeError: a keyword is not an option; names the nearest.
    """
    for name in options:
        if name not in OPTIONS and name not in DECISIONS:
            near = get_close_matches(name, [*OPTIONS, "cluster", "donate_argnums"], 1)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            raise TypeError(f"{door}() got an unexpected keyword argument {name!r}{hint}")
    return {name: value for name, value in options.items() if value is not None}
