"""What may be asked for, once for all doors, and what was asked for, parsed.

An option of a plan is one entry of `Options`: ``make_plan``, ``parallelize``, ``hybrid`` and the
command line read their keywords, defaults and flags from it.
"""

from __future__ import annotations

import dataclasses
import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from pathlib import Path
from typing import Annotated, Any, TypedDict, TypeVar, Unpack, get_args, get_type_hints

from costmodels import (
    AnalyticCostModel,
    Cluster,
    ClusterError,
    CostModel,
    parse_bytes,
    parse_cluster,
)
from costmodels.model import HOST_RESERVE
from planner.errors import RequestError
from planner.modes import (
    COMPILERS,
    DEFAULT_SEARCH,
    MODES,
    PROPAGATION,
    SHORT,
    ParallelMode,
    check_mode,
    get_parallel_mode,
)
from planner.request.compiler_options import parse_compiler_options
from planner.request.pins import check_rules
from planner.request.state import StateRequest, check_state_request
from planner.space.decisions import DECISIONS, parsed
from planner.spec import MeshSpec, parse_mesh


@dataclass(frozen=True)
class Flag:
    """An option on the command line.

    Attributes:
        help: one line.
        metavar: what stands for its value.
        type: makes the value out of the word.
        choices: the words allowed, if they can be listed; upper case.
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
    """What may be asked of a plan, besides its cluster; what is left out or None takes its default.

    mode: one of ``planner.modes.MODES``, or a name of ``SHORT`` ("dp",
        "fsdp", "tp", "fsdp+tp", "pp"); None takes ``set_parallel_mode``'s.
    search: a name of ``planner.search.SEARCHES`` or ``sharding_propagation``; None likewise.
    mesh: a fixed logical mesh (``"data=4,model=2"``); None takes that of the arguments'
        NamedShardings if it has that number of devices, else tries all up to three axes.
    memory: limit per device (``"80GB"`` or bytes); None takes the device's.
    host_memory: what of a host's memory a plan may use for each of its devices; None takes what
        the catalog knows of such hosts, less a reserve.
    shardings: ``{"regex over argument path": PartitionSpec(...)}``, kept or refused;
        ``PartitionSpec.UNCONSTRAINED`` leaves a dimension to the planner.
    logical_axis_rules: pairs of a logical name and mesh axes, for Flax metadata and
        ``nn.with_logical_constraint``; None takes those in force in Flax.
    zero: ZeRO level 0 to 3 along the data axes; None leaves it to the search.
    whole_below: arrays of the state of fewer bytes (``"64KB"``) are stored whole.
    never_fsdp: regular expressions over argument paths; what matches is stored as it is used.
    offload: regular expressions over argument paths; arrays of the state that match live in
        host memory between their uses. ``"auto"``: the search decides which, by what fits.
    time_limit_s: for the search, per mesh; 60 by default.
    microbatches: into how many parts the batch is cut, one after the other; their gradients are
        added up. Equal to the whole batch, or refused with the line that couples examples. None:
        1, or more where memory is short; ``"auto"``: the search decides.
    replicas: number of groups that the examples of each microbatch are split into. Each group
        accumulates its gradients over all microbatches, and they are summed once per step. If each
        group has its own devices, gradients are reduced once instead of in every microbatch, or in
        every turn of a loop over time. None: the number that is predicted fastest where there is
        such a loop; 1: a reduction in every turn.
    pad_batch: number of examples that the batch is filled up to, so that the devices divide it.
        Sums leave the added ones out, so results are equal; or refused with the line that couples
        examples. ``"auto"``: the next number that the devices divide, where that is predicted to
        be faster. Not together with microbatches, replicas or stages. None: as it is.
    statistics: whose the values are that examples make together (means of BatchNorm, a balance loss
        of experts): the whole batch's, ``"batch"`` (the default: microbatches are refused), or
        ``"per-microbatch"``: as if each microbatch were a batch of its own, whose losses and
        gradients are averaged, or added up where they are sums. Other numbers than the whole
        batch's; the plan says where. Not together with replicas, stages or pad_batch.
    remat: what the backward pass computes again: ``"none"``, ``"full"``, ``"dots"`` (all but
        products), ``"offload"`` (``"full"``, what is kept waits in host memory) or a number: what
        costs at most so many flop per byte that it frees. None: ``"none"``, or more where nothing
        else fits; ``"auto"``: the search decides.
    chunks: into how many parts the rows of products are cut whose result is much larger than what
        they multiply (scores of attention, logits): the scores of some rows live at a time. None:
        1, or more where memory is short; ``"auto"``: the search decides.
    stages: into how many pipeline stages the repeated layers are cut, each on devices of its own
        (the mesh axis ``stage``); microbatches pass through them (1F1B), four for each stage where
        ``microbatches`` says nothing. Equal to the plain step, or refused with the line. Manual:
        regular expressions over lines, or over paths of arrays of the state, and the stage that
        begins where the forward pass first meets one; implies ``schedule="1f1b"``.
    schedule: makes each stage a program of its own, which need not be like the others, and says in
        which order the passes run: ``"1f1b"``, ``"gpipe"``, ``"zb-h1"``, ``"zb-h2"``,
        ``"interleaved-2"`` (chunks per device), or the fastest of them (``"auto"``). None: all
        stages in one program, which takes equal ones.
    confirm: ``"tpu"`` or ``"gpu"``: compile the best few plans ahead of time for the cluster, and
        choose the fastest that fits.
    candidates: plans of different meshes to compile; 3 by default.
    confirm_limit_s: no compilation starts after these seconds; 90 by default.
    compiler_options: for XLA, as for ``jax.jit`` (or ``"NAME=VALUE"`` texts); the plan keeps them.
    dump_problem: a file for the optimisation problem of the chosen mesh, in the IOPDDL form;
        written also when no plan fits.
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
            "byte that it frees (default: none, more where memory is short)",
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
        str | None,
        Flag(
            "make each stage a program of its own and run their passes in this order: 1f1b, gpipe, "
            "zb-h1, zb-h2, interleaved-2 or auto (default: all stages in one program)",
            metavar="NAME",
            type=str.lower,
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
    """The options that the command line has, by name."""
    hints = get_type_hints(Options, include_extras=True)
    found = {name: get_args(hint) for name, hint in hints.items()}
    return {
        name: extra for name, args in found.items() for extra in args if isinstance(extra, Flag)
    }


_Function = TypeVar("_Function", bound=Callable[..., Any])


def takes_options(function: _Function) -> _Function:
    """Show the options in the signature of a function that takes ``**options``."""
    signature = inspect.signature(function)
    own = [p for p in signature.parameters.values() if p.kind is not inspect.Parameter.VAR_KEYWORD]
    hints = get_type_hints(Options)
    listed = [
        inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=hint)
        for name, hint in hints.items()
        if name not in signature.parameters
    ]
    function.__signature__ = signature.replace(parameters=[*own, *listed])  # type: ignore[attr-defined]
    return function


def given_options(door: str, options: Mapping[str, Any]) -> dict[str, Any]:
    """The options that are not None.

    Args:
        door: the function that took them, for the error.
        options: its keywords.

    Raises:
        TypeError: a keyword is no option; names the nearest.
    """
    for name in options:
        if name not in OPTIONS and name not in DECISIONS:
            near = get_close_matches(name, OPTIONS, 1)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            raise TypeError(f"{door}() got an unexpected keyword argument {name!r}{hint}")
    return {name: value for name, value in options.items() if value is not None}


@dataclass(frozen=True)
class Request:
    """What was asked for, parsed."""

    cluster: Cluster
    model: CostModel
    mode: str
    search: str
    mesh: MeshSpec | None
    limit_bytes: float
    time_limit_s: float
    effort_s: float = math.inf
    """Counted work of the searches that take an effort, in seconds: a plan must not depend on how
    busy the machine is."""
    state: StateRequest = field(default_factory=StateRequest)
    sequence: str = ""
    """A mesh axis over which the batch's second dimension stays split (sequence parallelism)."""
    decided: Mapping[str, Any] = field(default_factory=lambda: parsed({}))
    """What is asked of decisions besides shardings, by name."""
    tensor: str = ""
    """A mesh axis over which every parameter is split where it is read (tensor parallelism)."""
    device_bytes: float = 0.0
    """Memory of a device where the limit is that less a reserve; 0 where a limit was given."""
    shardings: Mapping[str, Any] = field(default_factory=dict)
    """Rules over argument paths."""
    dump_problem: str | Path | None = None
    """A file for the problem of the chosen mesh."""
    confirm: str = ""
    """The compiler that confirms the plan; empty for none."""
    candidates: int = 1
    """Plans of different meshes to compile."""
    confirm_limit_s: float = 90.0
    """No compilation starts after these seconds."""
    compiler_options: tuple[tuple[str, str], ...] = ()
    """XLA options."""
    stages: int = 1
    """Pipeline stages: the size of the mesh axis ``stage``."""
    staged: bool = False
    """Whether two stages or more are asked for, however many."""
    advice: bool = True
    """Whether to try what would help when no plan fits."""

    @property
    def spreads(self) -> bool:
        """Whether what is given is only completed, rather than all else searched."""
        return self.mode != "AUTO_PARALLEL" or self.search == PROPAGATION


def parse_request(cluster: str | Cluster, **options: Unpack[Options]) -> Request:
    """Check and parse the options of a plan.

    Args:
        cluster: its text or description.
        **options: all but ``logical_axis_rules``, which belong to the traced function: a caller
            that supports them applies them there.

    Raises:
        RequestError: an option that has no meaning here, or a value that it can't have.
        TypeError: a keyword is no option.
    """
    asked = Options(**given_options("make_plan", options))  # type: ignore[typeddict-item]
    if "logical_axis_rules" in asked:
        raise RequestError(
            "logical_axis_rules: not supported here; set them around the call with "
            "flax.linen.logical_axis_rules(...)"
        )
    mode, mesh, memory = asked.get("mode"), asked.get("mesh"), asked.get("memory")
    whole_below, host = asked.get("whole_below", 0.0) or 0.0, asked.get("host_memory")
    current = get_parallel_mode()
    if mode is None and current.update != "sync":
        raise RequestError(
            f"set_parallel_mode({current.mode!r}, update={current.update!r}) is in force: workers "
            "take steps of their own against parameter servers, so there is no one step of all "
            "devices to plan; call executor.parameter_server.train(loop, ...), or give mode= (or "
            "--mode) to plan a step all the same, as for the devices of one worker"
        )
    search = asked.get("search") or current.search
    chosen = check_mode(mode, search) if mode else dataclasses.replace(current, search=search)
    check_mode(chosen.mode, search)
    _check_short(chosen, mode or "in force", asked)
    zero = asked.get("zero")
    try:
        described = parse_cluster(cluster) if isinstance(cluster, str) else cluster
        limit = float(parse_bytes(memory)) if isinstance(memory, str) else memory
        host = float(parse_bytes(host)) if isinstance(host, str) else host
        small = float(parse_bytes(whole_below)) if isinstance(whole_below, str) else whole_below
    except ClusterError as error:
        raise RequestError(str(error)) from error
    if limit is not None and not limit > 0:
        raise RequestError(f"memory {memory!r}: expected a positive number of bytes per device")
    if host is not None:
        if not host > 0:
            raise RequestError(f"host_memory {host!r}: expected a positive number of bytes")
        described = dataclasses.replace(described, host_memory_bytes=host / (1.0 - HOST_RESERVE))
    if isinstance(mesh, str):
        mesh = parse_mesh(mesh)
    elif isinstance(mesh, Mapping):
        if not mesh or not all(isinstance(n, int) for n in mesh.values()):
            raise RequestError(f"mesh {dict(mesh)!r}: expected axis names with whole sizes")
        mesh = MeshSpec(tuple(mesh), tuple(mesh.values()))
    if chosen.mode == "STAND_ALONE":
        mesh = MeshSpec(("data",), (1,))
    elif chosen.tensor and mesh is not None and chosen.tensor not in mesh.names:
        raise RequestError(
            f"the mode {mode or 'in force'} splits matrices over the mesh axis {chosen.tensor}, "
            f"and mesh ({mesh}) has none; name it so, or leave mesh= out"
        )
    elif mesh is not None and mesh.num_devices != described.num_devices:
        raise RequestError(
            f"mesh ({mesh}) needs {mesh.num_devices} devices, cluster {described.text} has "
            f"{described.num_devices}; change one of them"
        )
    model = AnalyticCostModel(described)
    return Request(
        described,
        model,
        chosen.mode,
        chosen.search,
        None if mesh is None else mesh.slim(),
        float(model.memory_limit_bytes if limit is None else limit),
        asked.get("time_limit_s", 60.0),
        state=check_state_request(
            chosen.zero if zero is None else zero, small, asked.get("never_fsdp", ())
        ),
        decided=parsed(asked),
        shardings=check_rules(asked.get("shardings")),
        dump_problem=asked.get("dump_problem"),
        **_confirming(asked, described),
        compiler_options=parse_compiler_options(asked.get("compiler_options") or {}),
        device_bytes=float(described.device.memory_bytes) if limit is None else 0.0,
        tensor=chosen.tensor,
        staged=chosen.staged,
    )


def _check_short(chosen: ParallelMode, name: str, asked: Options) -> None:
    """Raises RequestError where an option contradicts what a mode's name says."""
    zero = asked.get("zero")
    if chosen.zero is not None and zero not in (None, chosen.zero):
        raise RequestError(
            f"zero={zero} contradicts the mode {name}, which is ZeRO level {chosen.zero}: leave "
            "one of them out"
        )


def _confirming(asked: Options, cluster: Cluster) -> dict[str, Any]:
    """Options of ``confirm``; raises RequestError."""
    confirm, count = asked.get("confirm"), asked.get("candidates")
    if confirm is None:
        for name in ("candidates", "confirm_limit_s"):
            if asked.get(name) is not None:
                raise RequestError(f"{name}: has a meaning with confirm= (--confirm) only; give it")
        return {}
    if confirm not in COMPILERS:
        raise RequestError(f"confirm={confirm!r}: expected one of {', '.join(COMPILERS)}")
    wanted = "tpu" if cluster.kind == "torus" else "gpu"
    if confirm != wanted or cluster.device.kind == "cpu":
        raise RequestError(
            f"confirm={confirm!r}: {cluster.text} has no {confirm.upper()}s; "
            + ("leave it out" if cluster.device.kind == "cpu" else f"write {wanted!r}")
        )
    if count is not None and (isinstance(count, bool) or not isinstance(count, int) or count < 1):
        raise RequestError(f"candidates={count!r}: expected a whole number from 1 on")
    return {
        "confirm": confirm,
        "candidates": 3 if count is None else count,
        "confirm_limit_s": asked.get("confirm_limit_s") or 90.0,
    }
