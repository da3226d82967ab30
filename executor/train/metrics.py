"""Metrics of a run: written to a file, shown as progress, checked for bad values.

Metrics stay on the devices until they are fetched, so that the steps in between do not wait.
"""

from __future__ import annotations

import contextlib
import functools
import json
import logging
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np

from executor.train.speed import Speed, peak_memory
from executor.train.writers import OnMetrics
from planner.errors import RequestError
from planner.report.units import bytes_text, time_text

if TYPE_CHECKING:
    from rich.progress import Progress

    from executor.checkpoint.owner import Owner

log = logging.getLogger("meshwright")
FILE, EVALUATIONS = "metrics.jsonl", "evaluations.jsonl"


class NotFiniteError(RequestError):
    """A metric became NaN or infinite; names it, its step, and the arrays that are not finite."""


class Meter:
    """The metrics of a run.

    Args:
        steps: total number of steps of the run.
        done: number of steps made before.
        directory: folder of the metrics file, one JSON object per step; None writes no file.
        on_metrics: called with (step, metrics) of the latest step whenever metrics are fetched; one
            function, or several.
        show: whether to draw a bar (on a terminal) or print lines (elsewhere).
        owner: the lock of ``directory``; checked before every write, and named in every line.
        speed: returns the predicted speed of the step, once it is planned.
    """

    def __init__(
        self,
        steps: int,
        done: int,
        directory: Path | None,
        on_metrics: OnMetrics | Sequence[OnMetrics] | None,
        show: bool,
        owner: Owner | None = None,
        speed: Callable[[], Speed | None] = lambda: None,
    ) -> None:
        self.owner, self._speed = owner, functools.cache(speed)
        self.steps, self.done = steps, done
        self.told: tuple[OnMetrics, ...] = ()
        if isinstance(on_metrics, Sequence):
            self.told = tuple(on_metrics)
        elif on_metrics is not None:
            self.told = (on_metrics,)
        self._step_s: list[float] = []
        first = jax.process_index() == 0
        self.path = directory / FILE if directory is not None and first else None
        self.show = show and first
        self.latest: dict[str, float] = {}
        self.bar: Progress | None = None
        self.evaluations = None if self.path is None else self.path.with_name(EVALUATIONS)
        self._warned: set[str] = set()
        self._pending: list[tuple[int, Any]] = []
        self._first: float | None = None
        self._lowest = math.inf
        self._worse = False
        self._clock = (time.perf_counter(), done)

    @contextlib.contextmanager
    def opened(self) -> Iterator[Meter]:
        """Draw the bar; drop the lines of the file whose steps are made again."""
        if self.path is not None and self.evaluations is not None:
            rows = [m for m in self._keep(self.path) if _number(m.get("loss"))]
            if rows:
                self._first = float(rows[0]["loss"])
                self._lowest = min(float(m["loss"]) for m in rows)
            self._keep(self.evaluations)
        if not self.show:
            yield self
            return
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TimeRemainingColumn

        console = Console()
        columns = (BarColumn(), MofNCompleteColumn(), TimeRemainingColumn(), "{task.fields[note]}")
        if not console.is_terminal:
            yield self
            return
        with Progress(*columns, console=console) as self.bar:
            self.bar.add_task("train", total=self.steps, completed=self.done, note="")
            yield self

    def add(self, step: int, metrics: Any, state: Any) -> None:
        """Record the metrics of a step, a pytree of scalars; waits for nothing. Metrics that are
        also arrays of the state are copied: the next step may take the state's memory."""
        held = {id(x) for x in jax.tree_util.tree_leaves(state)}
        copied = jax.tree.map(lambda x: jnp.copy(x) if id(x) in held else x, metrics)
        self._pending.append((step, copied))

    def flush(self, state: Any) -> None:
        """Fetch, write and show the recorded metrics.

        Raises:
            NotFiniteError: some metric of some step is NaN or infinite.
        """
        pending, self._pending = jax.device_get(self._pending), []
        if not pending:
            return
        lines = [(step, named_scalars(metrics)) for step, metrics in pending]
        bad = next(((s, n) for s, m in lines for n in _guarded(m) if not math.isfinite(m[n])), None)
        self._write([line for line in lines if bad is None or line[0] <= bad[0]])
        if bad is not None:
            step, name = bad
            value = dict(lines)[step][name]
            raise NotFiniteError(
                f"{name} became {value:g} at step {step}" + _where(state, pending[-1][0])
            )
        step, self.latest = lines[-1]
        self._look(lines)
        self._tell(step)

    def evaluated(self, step: int, metrics: Mapping[str, float]) -> None:
        """Write and show the metrics of an evaluation."""
        scalars = {f"eval/{name}": float(value) for name, value in metrics.items()}
        if self.evaluations is not None:
            self._append(self.evaluations, [(step, scalars)])
        for tell in self.told:
            tell(step, scalars)
        if self.show:
            text = "  ".join(f"{n} {v:.5g}" for n, v in scalars.items())
            print(f"step {step}  {text}", flush=True)

    def _write(self, lines: list[tuple[int, dict[str, float]]]) -> None:
        if self.path is not None:
            self._append(self.path, lines)

    def _append(self, path: Path, lines: list[tuple[int, dict[str, float]]]) -> None:
        """Append lines. The file is opened before the check: a new owner replaces the file by
        another one, which then has nothing that is written after the check."""
        with open(path, "a", encoding="utf-8") as file:
            owner = "" if self.owner is None else str(self.owner.me)
            if self.owner is not None:
                self.owner.check()
            file.write("".join(_line(s, m, owner) for s, m in lines))

    def _keep(self, path: Path) -> list[dict[str, Any]]:
        """Drop the lines of steps that are made again. Removes an earlier owner's unfinished file
        first, so that it can't replace the metrics file."""
        for other in path.parent.glob(f"{path.stem}.*.tmp"):
            other.unlink(missing_ok=True)
        if self.owner is None:
            return _keep_until(path, self.done, path.with_suffix(".0.tmp"))
        fresh = path.with_suffix(f".{self.owner.me.number}.tmp")
        return _keep_until(path, self.done, fresh, self.owner.check)

    def _tell(self, step: int) -> None:
        now = time.perf_counter()
        rate = (step - self._clock[1]) / max(now - self._clock[0], 1e-9)
        self._clock = (now, step)
        self._step_s.append(1.0 / rate)
        speed, peak = self._speed(), peak_memory()
        if self.told:
            metrics = {**self.latest, "speed/steps_per_s": rate}
            metrics |= {} if speed is None else speed.scalars(rate)
            metrics |= {"memory/peak_bytes": peak} if peak else {}
            for tell in self.told:
                tell(step, metrics)
        if not self.show:
            return
        note = "  ".join(f"{n} {v:.5g}" for n, v in self.latest.items())
        note += f"  {rate:.3g} steps/s"
        if speed is not None and (more := speed.text(rate)):
            note += f"  {more}"
        if peak:
            planned = "" if speed is None else f" (planned {bytes_text(speed.peak_bytes)})"
            note += f"  memory {bytes_text(peak)}{planned}"
        if self.bar is not None:
            self.bar.update(self.bar.task_ids[0], completed=step, note=note)
        else:
            print(f"step {step}/{self.steps}  {note}", flush=True)

    def summary(self) -> dict[str, float]:
        """Step times and memory of the run: quantiles over log intervals, each counted by the mean
        of its steps, without the first, in which the step is compiled; empty before the second
        interval."""
        if len(self._step_s) < 2:
            return {}
        times = np.asarray(self._step_s[1:])
        scalars = {
            "step_s/median": float(np.median(times)),
            "step_s/p90": float(np.quantile(times, 0.9)),
            "step_s/max": float(times.max()),
        }
        if (speed := self._speed()) is not None:
            scalars["step_s/planned"] = speed.predicted_s
            scalars["memory/planned_bytes"] = speed.peak_bytes
        if peak := peak_memory():
            scalars["memory/peak_bytes"] = peak
        return scalars

    def conclude(self) -> dict[str, float]:
        """The summary, which is also printed if the run is shown."""
        scalars = self.summary()
        if self.show and scalars:
            median, p90, most = (scalars[f"step_s/{name}"] for name in ("median", "p90", "max"))
            text = f"step time {time_text(median)} median, {time_text(p90)} 90th percentile, "
            text += f"{time_text(most)} at most"
            if "step_s/planned" in scalars:
                text += f" (planned {time_text(scalars['step_s/planned'])})"
            if "memory/peak_bytes" in scalars:
                text += f"; memory {bytes_text(scalars['memory/peak_bytes'])} at the peak"
            print(text, flush=True)
        return scalars

    def _look(self, lines: list[tuple[int, dict[str, float]]]) -> None:
        """Warn, in process 0 and once each, of metrics that are not finite, and when the loss rises
        above its start by as much as it had fallen."""
        if jax.process_index():
            return
        for step, metrics in lines:
            for name in metrics.keys() - self._warned:
                if not math.isfinite(metrics[name]):
                    self._warned.add(name)
                    log.warning("%s is %g at step %d", name, metrics[name], step)
        losses = [m["loss"] for _, m in lines if "loss" in m]
        if not losses:
            return
        mean = float(np.mean(losses))
        if self._first is None:
            self._first = losses[0]
        self._lowest = min(self._lowest, mean)
        worse = self._lowest < self._first and mean > 2 * self._first - self._lowest
        if worse and not self._worse:
            log.warning(
                "the loss diverges: %.5g at step %d; it began at %.5g and was %.5g at its lowest",
                mean,
                lines[-1][0],
                self._first,
                self._lowest,
            )
        self._worse = worse


def _guarded(metrics: Mapping[str, float]) -> list[str]:
    """The metrics that must be finite: those called loss or, if there are none, all."""
    losses = [name for name in metrics if name.rpartition("/")[2] == "loss"]
    return losses or list(metrics)


def _number(x: Any) -> bool:
    return isinstance(x, float) and math.isfinite(x)


def _line(step: int, metrics: Mapping[str, float], owner: str) -> str:
    """One line of JSON; null stands for NaN and infinity, which JSON lacks."""
    fields = {name: value if math.isfinite(value) else None for name, value in metrics.items()}
    return json.dumps({"step": step, **({"owner": owner} if owner else {}), **fields}) + "\n"


def named_scalars(metrics: Any) -> dict[str, float]:
    """A pytree of scalars as numbers by name; a single one is the loss.

    >>> named_scalars((1.5, {"accuracy": np.float32(0.5)}))
    {'0': 1.5, '1/accuracy': 0.5}

    Raises:
        RequestError: a leaf is not a scalar, not a real number, or has the name of another.
    """
    scalars: dict[str, float] = {}
    for path, leaf in jax.tree_util.tree_leaves_with_path(metrics):
        name = jax.tree_util.keystr(path, simple=True, separator="/") or "loss"
        if np.size(leaf) != 1:
            raise RequestError(
                f"metric {name} has shape {np.shape(leaf)}, expected a scalar; let the step return "
                "(state, metrics) with metrics a pytree of scalars"
            )
        if name in scalars or np.iscomplexobj(leaf):
            why = "there is another of that name" if name in scalars else "it is complex"
            raise RequestError(f"metric {name}: {why}; expected real scalars of different names")
        scalars[name] = float(np.asarray(leaf, np.float64).reshape(()))
    return scalars


def _where(state: Any, step: int) -> str:
    """Which arrays of a state are not finite, as text."""
    leaves = [
        (jax.tree_util.keystr(path), leaf)
        for path, leaf in jax.tree_util.tree_leaves_with_path(state)
        if jnp.issubdtype(getattr(leaf, "dtype", np.int32), jnp.inexact)
    ]
    fine = jax.device_get([jnp.isfinite(leaf).all() for _, leaf in leaves])
    bad = [name for (name, _), is_fine in zip(leaves, fine, strict=True) if not is_fine]
    if not bad:
        return f"; all {len(leaves)} arrays of the state are finite (checked after step {step})"
    more = f" and {len(bad) - 3} more" if len(bad) > 3 else ""
    return (
        f"; not finite in the state after step {step}: {len(bad)} of {len(leaves)} arrays, "
        f"{', '.join(bad[:3])}{more}"
    )


def _keep_until(
    path: Path, done: int, fresh: Path, check: Callable[[], None] = lambda: None
) -> list[dict[str, Any]]:
    """Drop the lines of steps after ``done``, and return the others; the file is replaced as a
    whole, by ``fresh``, after a check."""
    if not path.exists():
        return []
    rows = []
    for line in path.read_text(encoding="utf-8").splitlines():
        with contextlib.suppress(ValueError, KeyError, TypeError):  # cut off by a kill
            metrics = json.loads(line)
            if metrics["step"] <= done:
                rows.append(metrics)
    fresh.write_text("".join(json.dumps(m) + "\n" for m in rows), encoding="utf-8")
    check()
    fresh.replace(path)
    return rows
