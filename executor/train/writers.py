"""Writes metrics to TensorBoard, Weights & Biases and CLU, through their libraries.

Each function returns an ``on_metrics`` for ``train``, which also takes a list of them. Only process
0 writes. The libraries are extras: ``meshwright[tensorboard]``, ``[wandb]``, ``[clu]``.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax

from planner.errors import RequestError

OnMetrics = Callable[[int, Mapping[str, float]], None]


def tensorboard(directory: str | Path) -> OnMetrics:
    """Write event files for TensorBoard with ``tensorboardX``.

    Args:
        directory: directory of the event files.

    Raises:
        RequestError: the library is not installed.
    """
    if jax.process_index():
        return _nothing
    writer = _library("tensorboardX", "tensorboard").SummaryWriter(str(directory))

    def write(step: int, metrics: Mapping[str, float]) -> None:
        for name, value in metrics.items():
            writer.add_scalar(name, value, step)
        writer.flush()

    return write


def wandb(run: Any = None, **settings: Any) -> OnMetrics:
    """Log to a run of Weights & Biases.

    Args:
        run: what ``wandb.init`` returned; None starts one.
        **settings: arguments of ``wandb.init``, such as ``project``.

    Raises:
        RequestError: the library is not installed, or both a run and settings are given.
    """
    if run is not None and settings:
        raise RequestError(
            f"wandb: got a run and {', '.join(settings)}; give wandb.init() these, or no run"
        )
    if jax.process_index():
        return _nothing
    active_run = _library("wandb", "wandb").init(**settings) if run is None else run

    def write(step: int, metrics: Mapping[str, float]) -> None:
        active_run.log(dict(metrics), step=step)

    return write


def clu(writer: Any) -> OnMetrics:
    """Write with a CLU metric writer (``clu.metric_writers.create_default_writer(...)``), which
    decides when to flush.

    Args:
        writer: anything with ``write_scalars(step, scalars)``.

    Raises:
        RequestError: ``writer`` is something else.
    """
    if not callable(getattr(writer, "write_scalars", None)):
        raise RequestError(
            f"clu: got {type(writer).__name__}, expected a writer of clu.metric_writers, which has "
            "write_scalars(step, scalars)"
        )
    if jax.process_index():
        return _nothing
    return lambda step, metrics: writer.write_scalars(step, dict(metrics))


def _nothing(step: int, metrics: Mapping[str, float]) -> None:
    """Write nothing, in processes other than 0."""


def _library(name: str, extra: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise RequestError(
            f"{extra}: the package {name} is not installed: pip install 'meshwright[{extra}]'"
        ) from error
