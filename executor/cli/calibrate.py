"""``planner calibrate --cluster cpu:8 --out profile.toml``: measure the devices present."""

from __future__ import annotations

import argparse
import datetime
import platform
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from importlib import metadata
from pathlib import Path
from typing import Any

import jax
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from costmodels import Cluster, ClusterError, find_kind, parse_cluster
from costmodels.calibrate import Calibration, Residual, fit, residuals
from costmodels.files import write_whole
from costmodels.profile import Origin, profile_text
from executor.calibrate.compiled import UNTOLD, compile_probes
from executor.calibrate.resume import compiled_in, folder_of, forget
from executor.calibrate.sampling import Progress as Told
from executor.calibrate.sampling import Sampled, run_probes
from executor.run.mesh import detect_cluster, make_cpu_devices
from planner.cli.commands import DEFAULT_CLUSTER, Command, stay_on_cpu
from planner.cli.main import version
from planner.errors import RequestError

MEASURED, OFF = 0, 1
DTYPES = ("float32", "bfloat16")
NOISY = 0.25
"""Above this noise, the report says that the machine was not quiet."""
FAR = 0.5
"""A family of programs with a larger median error is reported, and fails ``--check``."""

_MORE = """\
Runs small programs on all devices present: products, elementwise work, convolutions, loops, and
collectives of several sizes in several groups. Fits the constants of the cost model to their times
and writes them as a cluster file. Close what else runs: other work on the devices, or on the cores
of a CPU, ends up in the constants.

examples:
  planner calibrate --cluster cpu:8 --out profile.toml
  planner calibrate --cluster v5e:2x2 --compiler --out v5e.toml
  planner calibrate --check
  planner inspect train.py --profile profile.toml --cluster cpu:4

An interrupted calibration goes on with the same command: what it has so far is in FILE.part.

exit codes: 0 measured (and written), 1 --check: a family of programs is more than 50 % off, 2 the
request can't be met, 130 interrupted
"""


def add_calibrate(commands: Any, text: str) -> None:
    """Add the subcommand to ``argparse``'s subparsers."""
    parser = commands.add_parser(
        "calibrate",
        help=text,
        description="Measure the devices present and write the cost model's constants to a file.",
        epilog=_MORE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add(
        "--cluster",
        help="what the devices present are, such as cpu:8 or h100:8 (default: detected; 8 virtual "
        "devices on a CPU)",
    )
    add("--out", metavar="FILE", type=Path, default=Path("profile.toml"), help="the file to write")
    add(
        "--rounds", metavar="N", type=_rounds, default=15, help="runs of each program (default: 15)"
    )
    add(
        "--compiler",
        action="store_true",
        help="run nothing: fit the kernels to what the TPU compiler estimates, ahead of time",
    )
    add(
        "--check",
        action="store_true",
        help="write nothing: say how far the constants of --cluster (of the catalog, or of a "
        "profile) are from what is measured",
    )


def run_calibrate(options: argparse.Namespace) -> int:
    """Measure, fit, write, print.

    Args:
        options: the parsed options of ``add_calibrate``.

    Returns:
        0 when the profile is written; with ``--check``, 1 if a family of programs is more than
        ``FAR`` off, else 0.

    Raises:
        RequestError: the cluster can't be read or does not match the devices present, or the file
            can't be written.
    """
    out: Path = options.out
    _check_options(options)
    text = options.cluster or _present()
    try:
        cluster = parse_cluster(text)
    except ClusterError as error:
        raise RequestError(f"--cluster: {error}") from error
    if cluster.device.kind == "cpu":
        stay_on_cpu()
        make_cpu_devices(cluster.num_devices)
    console, part = Console(), folder_of(out)
    if options.compiler:
        stay_on_cpu()
        with _progress() as progress:
            sampled = compile_probes(cluster, DTYPES, progress=progress)
        libtpu = metadata.version("libtpu")
        name = f"{cluster.device.kind}, as its compiler estimates (libtpu {libtpu})"
    else:
        check_present(cluster)
        keep = None if options.check else part
        with _progress() as progress, compiled_in(part) if keep else nullcontext():
            sampled = run_probes(
                cluster, DTYPES, rounds=options.rounds, progress=progress, folder=keep
            )
        name = jax.devices()[0].device_kind
    if options.check:
        left = residuals(cluster, sampled.samples)
        render_residuals(left, f"the constants of {text}, and what was measured", console)
        _render_rest(sampled, left, console)
        return OFF if any(r.median > FAR for r in left) else MEASURED
    untold = UNTOLD if options.compiler or sampled.follow else frozenset[str]()
    calibration = fit(text, sampled.samples, untold)
    origin = Origin(
        device_name=name,
        host_name=platform.processor() or platform.machine(),
        date=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        versions={
            "meshwright": version(),
            "jax": jax.__version__,
            "jaxlib": metadata.version("jaxlib"),
            "python": platform.python_version(),
        },
        rounds=0 if options.compiler else options.rounds,
        noise=sampled.noise,
        left_out=sampled.left_out,
    )
    try:
        write_whole(out, profile_text(text, calibration, origin, out.name, sampled.samples))
    except OSError as error:
        raise RequestError(f"--out {out}: {error.strerror or error}; name another file") from error
    forget(part)
    render_calibration(calibration, sampled, console)
    console.print(f"written: {out}", soft_wrap=True)
    sys.stdout.flush()
    return MEASURED


def _check_options(options: argparse.Namespace) -> None:
    """Raise RequestError for options that do not go together, or a file that can't be written."""
    out: Path = options.out
    if options.compiler and options.check:
        raise RequestError("--check measures, --compiler runs nothing; leave one of them out")
    if options.compiler and not options.cluster:
        raise RequestError("--compiler wants --cluster: which TPU, such as v5e:2x2")
    if out.suffix.lower() != ".toml":
        raise RequestError(
            f"--out {out}: a profile is a .toml file; give a name that ends in .toml"
        )
    if not out.parent.is_dir():
        raise RequestError(f"--out {out}: no folder {out.parent}; make it or name another")


def check_present(cluster: Cluster) -> None:
    """Raise RequestError unless JAX sees the devices that a cluster has."""
    devices = jax.devices()
    kind, count = cluster.device.kind, cluster.num_devices
    platform_name, name = devices[0].platform, devices[0].device_kind
    seen = "cpu" if platform_name == "cpu" else find_kind(name)
    if seen is not None and seen != kind:
        raise RequestError(
            f"the devices present are {name!r} ({seen}), the cluster {cluster.text} is of {kind}; "
            f"name them: --cluster {seen}:{len(devices)}"
        )
    if len(devices) < count:
        hint = (
            f"set XLA_FLAGS=--xla_force_host_platform_device_count={count}"
            if platform_name == "cpu"
            else f"measure those that are there: --cluster {kind}:{len(devices)}, and name another "
            "size when planning: --profile FILE --cluster SIZE"
        )
        raise RequestError(
            f"cluster {cluster.text} has {count} devices, {len(devices)} are present "
            f"({platform_name}); {hint}"
        )


def render_calibration(calibration: Calibration, sampled: Sampled, console: Console) -> None:
    """Print the residuals of each family, the fitted constants, the names of those that were not
    measured, and the noise."""
    render_residuals(calibration.residuals, "what the fit leaves", console)
    constants = Table(title="constants (achieved rates, SI)")
    for column in ("table", "constant", "value"):
        constants.add_column(column, justify="right" if column == "value" else "left")
    for name, key, value in calibration.constants:
        constants.add_row(name, key, f"{value:.4g}")
    console.print(constants)
    if calibration.kept:
        console.print(f"not measured, as in the catalog: {', '.join(calibration.kept)}")
    _render_rest(sampled, calibration.residuals, console)


def render_residuals(left: Sequence[Residual], title: str, console: Console) -> None:
    """Print how far predictions are from each family of programs."""
    table = Table(title=f"{title}: predicted / measured")
    for column in ("programs", "count", "mean", "median off", "worst off", "of"):
        table.add_column(column, justify="left" if column in ("programs", "of") else "right")
    for r in left:
        shares = (f"{r.ratio:.2f}", f"{r.median:.0%}", f"{r.worst:.0%}")
        table.add_row(r.kind, str(r.samples), *shares, r.worst_name)
    console.print(table)


def _render_rest(sampled: Sampled, left: Sequence[Residual], console: Console) -> None:
    for line in sampled.left_out:
        console.print(f"left out: {line}", soft_wrap=True)
    far = [r.kind for r in left if r.median > FAR]
    if far:
        console.print(f"more than {FAR:.0%} off: {', '.join(far)}; trust steps made of them less")
    if sampled.noise:
        near = f"{sampled.noise:.0%} of its median"
        console.print(f"noise: half of a program's runs lie within {near}")
    if sampled.noise > NOISY:
        console.print("the machine was not quiet; measure again when it is")


def _present() -> str:
    """The cluster text of the devices that JAX sees. On a CPU, the number of virtual devices is
    that of the default cluster, unless JAX is configured with another number."""
    make_cpu_devices(parse_cluster(DEFAULT_CLUSTER).num_devices)
    return detect_cluster()


@contextmanager
def _progress() -> Iterator[Told]:
    """A progress bar on stderr if that is a terminal."""
    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    with Progress(
        *columns, console=console, transient=True, disable=not console.is_terminal
    ) as bar:
        task = bar.add_task("starting", total=1.0)
        yield lambda doing, share: bar.update(task, description=doing, completed=share)


def _rounds(text: str) -> int:
    value = int(text)
    if value < 2:
        raise ValueError(text)
    return value


CALIBRATE = Command("calibrate", add_calibrate, run_calibrate)
