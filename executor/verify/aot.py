"""Ahead-of-time compilation: the production compilers, without their devices in the machine.

TPU: libtpu's compiler and its description of a slice (``jax.experimental.topologies``). GPU: the
compiler in jax's CUDA plugin and our description of the GPU (`executor.verify.gpu_targets`). Both
are extras of the package; without them `devices_of` says what to install.
"""

from __future__ import annotations

import contextlib
import math
import os
import re
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from importlib import metadata
from typing import Any

import jax
import numpy as np
from jax.experimental import topologies

from costmodels import Cluster
from executor.run.compile import CompiledStep
from executor.run.mesh import in_order
from executor.verify.gpu_targets import GPU_TARGETS, target_config
from executor.verify.hlo.collectives import Module, read_module
from planner import compat
from planner.errors import RequestError
from planner.graph.trace import Traced
from planner.plan.plan import Plan

_TPU_NAMES = {"v4": "v4", "v5e": "v5e", "v5p": "v5p", "v6e": "v6e", "tpu7x": "tpu7x"}
_TPU_ENVIRONMENT = {
    "TPU_SKIP_MDS_QUERY": "1",  # do not query a metadata server for the machine type
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "true",  # no device is opened, so none needs a lock
}


# TensorCore clock. Sources: peak bfloat16 flop/s of Google Cloud's TPU pages, divided by the flops
# of the matrix units per cycle (jax-ml scaling book, "How to Think About TPUs": four 128x128 per
# core, two cores on v4 and v5p; four 256x256 on v6e, and four in each half of a tpu7x).
TPU_CLOCK_HZ = {"v4": 1.05e9, "v5e": 1.5e9, "v5p": 1.75e9, "v6e": 1.75e9, "tpu7x": 2.2e9}


class CompilerAbsentError(RequestError):
    """The compiler for a cluster is not installed; the text says how to install it."""


@dataclass(frozen=True)
class Compiled:
    """A compiled step; bytes are those of one device.

    ``argument_bytes`` and ``output_bytes`` are the step's arguments and results, ``alias_bytes``
    the memory that results take over from donated arguments, ``temp_bytes`` everything else,
    ``code_bytes`` the program, ``moment_bytes`` the compiler's own count of what is alive at once
    (``peak_memory_in_bytes``). ``host_argument_bytes`` and ``host_temp_bytes`` lie in the host's
    memory; the others count device memory alone.
    """

    module: Module
    text: str
    argument_bytes: int
    output_bytes: int
    alias_bytes: int
    temp_bytes: int
    code_bytes: int
    host_argument_bytes: int
    host_temp_bytes: int
    moment_bytes: int = 0

    @property
    def allocated_bytes(self) -> int:
        """argument + output + temp - alias."""
        return self.argument_bytes + self.output_bytes + self.temp_bytes - self.alias_bytes

    @property
    def peak_bytes(self) -> int:
        """The memory that the step needs on a device, as a plan's ``prediction.peak_bytes``
        predicts it.

        On GPU and CPU, these are the allocated bytes. On XLA:TPU, ``temp_bytes`` are up to 1.3
        times what its buffer assignment allots and what it compares with the device's memory
        (docs/explanation/memory.md), and ``moment_bytes`` at times twice that where results take
        the place of arguments; the smaller of the two is at most 7 % below it.
        """
        if not self.module.cycles or not self.moment_bytes:
            return self.allocated_bytes
        return min(self.allocated_bytes, self.moment_bytes)


def compile_step(
    traced: Traced,
    plan: Plan,
    cluster: Cluster,
    *,
    donate_argnums: int | Sequence[int] = (),
) -> Compiled:
    """Compile a step under a plan for ``cluster``; runs nothing.

    Args:
        traced: the step, as ``planner.graph.trace.trace`` returns it.
        plan: its plan.
        cluster: the cluster whose compiler and devices to use; `devices_of` says which are known.
        donate_argnums: as for ``jax.jit``.

    Raises:
        CompilerAbsentError: the compiler's package is not installed.
        RequestError: the cluster's devices can't be described, or the compiler refused the step
            (such as out of memory); the text has the compiler's message.
    """
    step = CompiledStep(traced, plan, donate_argnums=donate_argnums, devices=devices_of(cluster))
    shapes = [compat.as_struct(aval) for aval in traced.jaxpr.in_avals]
    args = jax.tree_util.tree_unflatten(traced.in_tree, shapes)
    return _read(lambda: step.compile(*args), cluster)


def compile_function(jitted: Any, args: Sequence[Any], cluster: Cluster) -> Compiled:
    """Compile a jitted function of ShapeDtypeStructs with shardings on ``devices_of(cluster)``.

    Raises:
        RequestError: the compiler refused it; the text has the compiler's message.
    """
    return _read(lambda: jitted.lower(*args).compile(), cluster)


def _read(compile_it: Callable[[], jax.stages.Compiled], cluster: Cluster) -> Compiled:
    with _quiet():
        try:
            compiled = compile_it()
        except jax.errors.JaxRuntimeError as error:
            raise RequestError(
                f"the compiler for {cluster.text} refused the step: {first_lines(str(error))}"
            ) from error
        return read_compiled(compiled)


def read_compiled(compiled: Any) -> Compiled:
    """The text and memory sizes of a ``jax.stages.Compiled``; sizes are those of one device."""
    text, memory = compiled.as_text(), compiled.memory_analysis()
    return Compiled(
        module=read_module(text),
        text=text,
        argument_bytes=memory.argument_size_in_bytes,
        output_bytes=memory.output_size_in_bytes,
        alias_bytes=memory.alias_size_in_bytes,
        temp_bytes=memory.temp_size_in_bytes,
        code_bytes=memory.generated_code_size_in_bytes,
        host_argument_bytes=memory.host_argument_size_in_bytes,
        host_temp_bytes=memory.host_temp_size_in_bytes,
        moment_bytes=memory.peak_memory_in_bytes,
    )


def tpu_seconds(cycles: float, cluster: Cluster) -> float:
    """Seconds of a TPU compiler's ``estimated_cycles``; raises KeyError for other kinds."""
    return cycles / TPU_CLOCK_HZ[cluster.device.kind]


def link_seconds(module: Module, cluster: Cluster, *, exposed: bool = False) -> float:
    """Wire bytes of a module over the links of a torus, without latency.

    A group uses one link in one direction per torus dimension in which its members differ, and two
    where it spans a dimension that wraps around (``cluster.wrap_multiple``); a permute uses one. A
    group that spans slices uses the network. ``exposed``: subtract the compute between the start
    and the end of each collective.
    """
    seconds = 0.0
    for collective in module.collectives:
        links = 1
        if collective.groups:
            members = np.asarray(collective.groups[0])
            inside = members % math.prod(cluster.shape)
            at = np.unravel_index(inside, cluster.shape)
            spans = [len(set(place.tolist())) for place in at]
            links = sum(
                2 if span == size and size % cluster.wrap_multiple == 0 else 1
                for span, size in zip(spans, cluster.shape, strict=True)
                if span > 1
            )
        rate = max(1, links) * cluster.link.bytes_per_s
        if collective.groups and len(set((members // math.prod(cluster.shape)).tolist())) > 1:
            rate = (cluster.network or cluster.link).bytes_per_s
        once = collective.wire_bytes / rate
        hidden = tpu_seconds(collective.beside_cycles, cluster) if exposed else 0.0
        seconds += collective.count * max(0.0, once - hidden)
    return seconds


def devices_of(cluster: Cluster) -> list[Any]:
    """jax devices of a cluster that a step can be compiled for, in the cost model's numbering.

    Devices of TPUs and GPUs are descriptions: nothing can run on them. Device i of a torus is at
    the coordinates that i has in row-major order over ``cluster.shape``, slice after slice; device
    i of GPU nodes is in node i // devices per node. ``cpu`` gives the (virtual) CPU devices of the
    process.

    Raises:
        CompilerAbsentError: the compiler's package is not installed.
        RequestError: an unknown kind, a shape that the compiler does not support, or too few CPU
            devices.
    """
    kind = cluster.device.kind
    if kind == "cpu":
        return _cpu_devices(cluster)
    if kind in _TPU_NAMES:
        return _tpu_devices(cluster)
    if kind in GPU_TARGETS:
        return _gpu_devices(cluster)
    known = ", ".join(("cpu", *_TPU_NAMES, *GPU_TARGETS))
    raise RequestError(f"no compiler is known for device kind {kind!r}; there is one for: {known}")


def _cpu_devices(cluster: Cluster) -> list[Any]:
    devices = jax.devices("cpu")
    if len(devices) < cluster.num_devices:
        raise RequestError(
            f"compiling for {cluster.text} needs {cluster.num_devices} virtual CPU devices, this "
            f"process has {len(devices)}; set "
            f"XLA_FLAGS=--xla_force_host_platform_device_count={cluster.num_devices}"
        )
    return list(devices[: cluster.num_devices])


def _tpu_devices(cluster: Cluster) -> list[Any]:
    wanted = _asked_by_jax("libtpu")
    _need("libtpu", lambda version: _fits(version, wanted), wanted, "aot-tpu", cluster)
    for name, value in _TPU_ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    chips = cluster.shape
    if cluster.device.kind == "tpu7x":  # a device is half a chip, the last dimension
        *most, halves = cluster.shape
        chips = tuple(most)
        if halves != 2 or not chips:
            raise RequestError(
                f"{cluster.text}: the last dimension of a tpu7x is the two halves of a chip, got "
                f"{halves}; write a shape such as tpu7x:2x2x1x2"
            )
    shape = (*chips, 1, 1)[: max(3, len(chips))]
    host = [2, 2, 1] if shape[0] % 2 == shape[1] % 2 == 0 else [1, 1, 1]
    devices = _described(
        cluster,
        platform="tpu",
        topology_name=f"{_TPU_NAMES[cluster.device.kind]}:{'x'.join(map(str, shape))}",
        chips_per_host_bounds=host,
        **({"num_slices": cluster.slices} if cluster.slices > 1 else {}),
    )
    return in_order(devices)


def _gpu_devices(cluster: Cluster) -> list[Any]:
    for package in ("jax-cuda12-plugin", "jax-cuda12-pjrt"):
        wanted = jax.__version__
        _need(package, lambda version, w=wanted: version == w, wanted, "aot-gpu", cluster)  # type: ignore[misc]
    os.environ.setdefault("JAX_SKIP_CUDA_CONSTRAINTS_CHECK", "1")  # no CUDA libraries are needed
    per_node, nodes = cluster.shape
    devices = _described(
        cluster,
        platform="cuda",
        topology_name=cluster.device.kind,
        target_config=target_config(cluster.device),
        topology=f"1x{nodes}x{per_node}",
    )
    return sorted(devices, key=lambda d: d.id)


def _described(cluster: Cluster, **description: Any) -> list[Any]:
    with _quiet():
        try:
            devices = list(topologies.get_topology_desc(**description).devices)
        except (jax.errors.JaxRuntimeError, RuntimeError, NotImplementedError) as error:
            raise RequestError(
                f"the compiler knows no {cluster.text}: {first_lines(str(error))}; "
                "choose another shape"
            ) from error
    if len(devices) != cluster.num_devices:
        raise RequestError(
            f"{cluster.text} has {cluster.num_devices} devices, the compiler's description of it "
            f"{len(devices)}; choose another device kind"
        )
    return devices


def _need(
    package: str, fits: Callable[[str], bool], wanted: str, extra: str, cluster: Cluster
) -> None:
    try:
        version = metadata.version(package)
    except metadata.PackageNotFoundError:
        version = "none"
    if not fits(version):
        what = f"meshwright[{extra}]" if _is_for_this_jax(extra) else f"{package}=={wanted}"
        raise CompilerAbsentError(
            f"compiling for {cluster.text} needs {package} {wanted} beside jax {jax.__version__}, "
            f"found {version}; run: pip install '{what}'"
        )


def _is_for_this_jax(extra: str) -> bool:
    """Whether an extra of meshwright leaves the installed jax as it is."""
    try:
        texts = metadata.requires("meshwright") or ()
    except metadata.PackageNotFoundError:
        return False
    return any(extra in text and text.startswith(f"jax=={jax.__version__};") for text in texts)


def _asked_by_jax(package: str) -> str:
    """The version of a package that the installed jax requires in its extras, such as
    ``0.0.42.*``."""
    for text in metadata.requires("jax") or ():
        match = re.match(rf"{package}==([\w.*]+)", text)
        if match:
            return match.group(1)
    return "as its extra says"


def _fits(version: str, wanted: str) -> bool:
    return f"{version}.".startswith(wanted.removesuffix("*"))


def first_lines(text: str, most: int = 400) -> str:
    """The beginning of a compiler's message, without its dumps."""
    head = text.strip().split("\n\n")[0]
    return head if len(head) <= most else head[:most] + " ..."


_quieting = threading.Lock()
_quieted: list[tuple[int, Any]] = []  # stderr as it was, and the log; one entry per open `_quiet`


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Hide what native libraries write to stderr (their logs). Several threads may be in it: the
    first one in redirects stderr, the last one out restores it."""
    with _quieting:
        if not _quieted:
            sys.stderr.flush()
            log = tempfile.TemporaryFile()  # noqa: SIM115 (closed by the last one out)
            _quieted.append((os.dup(2), log))
            os.dup2(log.fileno(), 2)
        else:
            _quieted.append(_quieted[0])
    try:
        yield
    finally:
        with _quieting:
            saved_fd, log = _quieted.pop()
            if not _quieted:
                sys.stderr.flush()
                os.dup2(saved_fd, 2)
                os.close(saved_fd)
                log.close()
