"""An optional training loop: checkpoints, resume, metrics, preemption.

It adds nothing to the step: metrics are fetched every few steps, checkpoints are written while the
next steps run, and a run that was stopped resumes at the exact batch where it stopped, under the
plan for the devices that are present then.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax
import numpy as np

from executor.data import Batches, Streams
from executor.processes.agreement.alike import compare_parts, compare_settings
from executor.processes.agreement.fingerprints import Fingerprint
from executor.processes.failure_detection import AGAIN
from executor.processes.meet import meet
from executor.processes.preemption import Stop
from executor.profile.record import record
from executor.train.metrics import Meter, NotFiniteError, named_scalars
from executor.train.speed import speed_of
from executor.train.state import arrays_of, with_arrays
from executor.train.writers import OnMetrics
from planner.errors import RequestError

if TYPE_CHECKING:
    from executor.checkpoint import Checkpoints

log = logging.getLogger("meshwright")


@dataclass(frozen=True)
class Trained:
    """What ``train`` returns.

    Attributes:
        state: the last state.
        step: number of steps that the state has had.
        metrics: metrics of the last step, by name; empty if no step was made.
        speed: ``step_s/median``, ``step_s/p90`` and ``step_s/max`` over log intervals, each
            interval counted by the mean of its steps, without the first interval;
            ``memory/peak_bytes`` of a device, if the back end counts them; and the plan's
            predictions (``step_s/planned``, ``memory/planned_bytes``). Empty before the second
            interval.
    """

    state: Any
    step: int
    metrics: Mapping[str, float]
    speed: Mapping[str, float] = field(default_factory=dict)


class PreemptedError(SystemExit):
    """SIGTERM came, and the state is saved. Uncaught, it ends the process with
    ``failure_detection.AGAIN``, which launchers take as "start again" (EX_TEMPFAIL)."""


def train(
    step: Callable[..., Any],
    state: Any,
    batches: Iterable[Any],
    *,
    steps: int,
    directory: str | Path | None = None,
    save_every: int = 100,
    keep: int | None = 3,
    log_every: int = 10,
    evaluate: Callable[[Any], Mapping[str, float]] | None = None,
    evaluate_every: int = 100,
    on_metrics: OnMetrics | Sequence[OnMetrics] | None = None,
    profile: tuple[int, int] | None = None,
    progress: bool = True,
) -> Trained:
    """Train until ``steps`` steps are done, resuming from the last checkpoint if there is one.

    Args:
        step: ``(state, batch) -> (state, metrics)``, metrics a pytree of scalars; from
            ``parallelize``, ``compile_plan`` or ``jax.jit``.
        state: the initial state; if there is a checkpoint, only its structure is used. Flax NNX
            objects in it are updated in place, also from the checkpoint; static leaves are not
            saved.
        batches: from ``shard``, which resumes at its position; from any other iterable, the batches
            of steps that were made before are drawn and dropped.
        steps: total number of steps, including those made before; fewer if the batches end.
        directory: folder of checkpoints (by step), ``metrics.jsonl`` and profiles, the same for all
            processes; None saves nothing, and SIGTERM then ends the process as usual.
        save_every: steps between checkpoints; the last step has one too.
        keep: how many checkpoints to keep; None keeps all.
        log_every: steps per log interval, after which the metrics are fetched.
        evaluate: state -> metrics, such as ``lambda s: mean_metrics(eval_step, s, held_out())``.
        evaluate_every: steps between evaluations; the last step has one too.
        on_metrics: called with (step, metrics), in every process, for training (with ``speed/...``
            and ``memory/...``) and for evaluation (names are prefixed ``eval/``); one function, or
            several, such as those of ``executor.train.writers``.
        profile: first and last step to trace by ``jax.profiler``, into ``directory/profile``.
        progress: whether process 0 shows the progress.

    Raises:
        NotFiniteError: the loss (or, if no metric is called loss, any) is NaN or infinite; names
            the step, and the arrays that are not finite. Nothing is saved after the step.
        ProcessMismatchError: the processes of the job have other settings, steps, states, data or
            options of ``train``; in all of them.
        PreemptedError: SIGTERM came to any of the processes; all have saved after the same step.
        CheckpointError: a checkpoint can't be written, or does not fit the state.
        FencedError: another job owns the directory, or took it over while this one was stopped.
        RequestError: ``steps``, ``save_every``, ``log_every`` or ``profile`` is invalid.
    """
    _check(steps, save_every, log_every, evaluate_every, profile, directory)
    if directory is not None:
        _check_state(state)
    folder = None if directory is None else Path(directory).absolute()
    with contextlib.ExitStack() as stack:
        stop = stack.enter_context(Stop(folder is not None))
        source = iter(batches)
        _compare(
            source,
            steps=steps,
            save_every=save_every,
            evaluate_every=evaluate_every,
            directory=folder is not None,
            evaluate=evaluate is not None,
        )
        source, shardings = _prepared(step, state, source)
        checkpoints = owner = None
        if folder is not None:
            from executor.checkpoint import Checkpoints

            checkpoints = stack.enter_context(_open(Checkpoints(folder, keep=keep)))
            owner = checkpoints.own()
        done = 0 if checkpoints is None else _done(checkpoints)
        if checkpoints is not None and done:
            state = _resumed(checkpoints, done, state, shardings, source)
            log.info("going on after step %d of %s", done, folder)
        meter = Meter(
            steps, done, folder, on_metrics, progress, owner, functools.partial(speed_of, step)
        )
        stack.enter_context(meter.opened())
        stack.callback(_close, source)
        trace = stack.enter_context(_Profile(profile, folder, step, done))
        step_number = done
        if step_number < steps and stop.reached(step_number):
            raise PreemptedError(AGAIN)
        for step_number, batch in enumerate(
            itertools.islice(source, max(0, steps - done)), done + 1
        ):
            trace.before(step_number, state)
            with jax.profiler.StepTraceAnnotation("train", step_num=step_number):
                state, metrics = _pair(step(state, batch))
            trace.after(step_number, state)
            meter.add(step_number, metrics, state)
            last = step_number == steps
            stopped = not last and stop.reached(step_number)
            saves = stopped or last or step_number % save_every == 0
            if saves or step_number % log_every == 0:
                meter.flush(state)
            if checkpoints is not None and saves:
                _save(checkpoints, step_number, state, step, source)
            if stopped:
                raise PreemptedError(AGAIN)
            if evaluate is not None and (last or step_number % evaluate_every == 0):
                meter.evaluated(step_number, evaluate(state))
        if step_number < steps:
            log.warning("the batches ended after step %d of %d", step_number, steps)
        if step_number < steps and jax.process_count() > 1:
            meet(f"end of the data after step {step_number}", None, len)
        meter.flush(state)
        if done < step_number < steps:  # the batches ended first
            if checkpoints is not None and step_number not in checkpoints.steps:
                _save(checkpoints, step_number, state, step, source)
            if evaluate is not None and step_number % evaluate_every:
                meter.evaluated(step_number, evaluate(state))
        return Trained(state, step_number, meter.latest, meter.conclude())


def mean_metrics(step: Callable[..., Any], state: Any, batches: Iterable[Any]) -> dict[str, float]:
    """The mean of the metrics of ``step(state, batch)`` over batches, by name.

    Raises:
        RequestError: there are no batches, or a metric is not a scalar.
    """
    batch_metrics = [
        named_scalars(m) for m in jax.device_get([step(state, batch) for batch in batches])
    ]
    if not batch_metrics:
        raise RequestError("no batches to evaluate on")
    return {name: float(np.mean([m[name] for m in batch_metrics])) for name in batch_metrics[0]}


def _check(
    steps: int,
    save_every: int,
    log_every: int,
    evaluate_every: int,
    profile: tuple[int, int] | None,
    directory: Any,
) -> None:
    intervals = {"save_every": save_every, "log_every": log_every, "evaluate_every": evaluate_every}
    for name, value in intervals.items():
        if value < 1:
            raise RequestError(f"{name}={value}: expected at least 1")
    if steps < 0:
        raise RequestError(f"steps={steps}: expected at least 0")
    if profile is not None and not 1 <= profile[0] <= profile[1]:
        raise RequestError(f"profile={profile}: expected (first, last), counted from 1")
    if profile is not None and directory is None:
        raise RequestError("profile= needs a directory to write to")
    if profile is not None and profile[0] > steps:
        raise RequestError(
            f"profile={profile}: the first step to trace is after the last step, steps={steps}"
        )


def _check_state(state: Any) -> None:
    """Refuse a state that no checkpoint can hold, before any step is made; raises RequestError."""
    if jax.tree_util.treedef_is_leaf(jax.tree_util.tree_structure(arrays_of(state))):
        raise RequestError(
            "directory=: the state is one bare array, which has no name in a checkpoint; expected "
            "a container, such as {'w': array}"
        )


def _compare(source: Iterator[Any], **options: Any) -> None:
    """Compare the options of the loop, and the data, between all processes.

    Raises:
        ProcessMismatchError: they differ; in all processes.
    """
    if jax.process_count() == 1:
        return
    compare_settings()
    fingerprints = [Fingerprint(f"{k}={v}", f"{k}={v} of train") for k, v in options.items()]
    compare_parts("train", {"train": fingerprints})
    if isinstance(source, Batches | Streams):
        source.compare()


@contextlib.contextmanager
def _open(checkpoints: Checkpoints) -> Iterator[Checkpoints]:
    """Close in the end, which waits for a pending save; but not after an error that the other
    processes do not have: the save waits for them, and they wait for this one."""
    try:
        yield checkpoints
    except (NotFiniteError, PreemptedError):
        checkpoints.close()
        raise
    except BaseException:
        if jax.process_count() == 1:
            checkpoints.close()
        checkpoints.disown()
        raise
    checkpoints.close()


def _prepared(step: Any, state: Any, source: Iterator[Any]) -> tuple[Iterator[Any], Any]:
    """Plan the step with the first batch if it is not planned; returns the batches, and the
    shardings of the state."""
    if not hasattr(step, "is_planned"):
        return source, None
    if not step.is_planned:
        if isinstance(source, Batches | Streams):
            position = source.position
            first = next(source, None)
            source.seek(position)
        else:
            first = next(source, None)
            source = itertools.chain([] if first is None else [first], source)
        if first is None:
            raise RequestError("there are no batches to plan the step with")
        step.prepare(state, first)
    return source, step.compiled.in_shardings[0]


def _done(checkpoints: Checkpoints) -> int:
    """The step of the last checkpoint, 0 if there is none; the same in every process."""
    last_step = checkpoints.steps[-1] if checkpoints.steps else 0
    if jax.process_count() == 1:
        return last_step
    from jax.experimental import multihost_utils

    from executor.checkpoint import CheckpointError

    last_steps = np.asarray(multihost_utils.process_allgather(np.asarray(last_step))).reshape(-1)
    if len(set(last_steps.tolist())) > 1:
        text = ", ".join(f"process {k}: {step}" for k, step in enumerate(last_steps.tolist()))
        raise CheckpointError(
            f"processes see different last checkpoints in {checkpoints.directory} ({text}); the "
            "folder must be the same for all, on a file system that they share"
        )
    return last_step


def _resumed(
    checkpoints: Checkpoints, done: int, state: Any, shardings: Any, source: Iterator[Any]
) -> Any:
    arrays = checkpoints.restore(arrays_of(state), shardings=shardings, step=done)
    position = (checkpoints.extra(done) or {}).get("position")
    if isinstance(source, Batches | Streams):
        if position is None:
            raise RequestError(
                f"the checkpoint of step {done} in {checkpoints.directory} has no position in the "
                "data: they were not from ``shard``; pass an iterator that begins anew"
            )
        source.seek(position)
    else:
        for _ in itertools.islice(source, done):
            pass
    return with_arrays(state, arrays)


def _save(
    checkpoints: Checkpoints, step_number: int, state: Any, step: Any, source: Iterator[Any]
) -> None:
    extra = {"position": asdict(source.position)} if isinstance(source, Batches | Streams) else {}
    plan = getattr(step, "plan", None)
    checkpoints.save(step_number, arrays_of(state), plan=plan, extra=extra)


def _pair(result: Any) -> tuple[Any, Any]:
    if not isinstance(result, tuple) or len(result) != 2:
        raise RequestError(
            f"the step returned {type(result).__name__}, expected (state, metrics); wrap it"
        )
    return result


class _Profile:
    """Traces a range of steps."""

    def __init__(
        self, wanted: tuple[int, int] | None, folder: Path | None, step: Any, done: int
    ) -> None:
        self.first, self.last = wanted or (0, 0)
        if wanted is not None and self.first <= done:
            log.warning("profile=%s: nothing is traced, step %d was made before", wanted, done)
        self.folder, self.step = folder, step
        self.running = False

    def before(self, step_number: int, state: Any) -> None:
        """Start the trace, if this is the first step to trace."""
        if step_number == self.first and self.folder is not None:
            jax.block_until_ready(state)
            jax.profiler.start_trace(str(self.folder / "profile"))
            self.running = True

    def after(self, step_number: int, state: Any) -> None:
        """Stop the trace, if this was the last."""
        if self.running and step_number == self.last:
            jax.block_until_ready(state)
            self.__exit__()

    def __enter__(self) -> _Profile:
        return self

    def __exit__(self, *_: object) -> None:
        if self.running:
            self.running = False
            jax.profiler.stop_trace()
            if self.folder is not None:
                record(self.step, self.folder / "profile")


def _close(source: Any) -> None:
    if isinstance(source, Batches | Streams):
        source.close()
