"""The planner's interface to costs, and its closed-form implementation."""

from __future__ import annotations

import dataclasses
import math
from typing import Protocol, overload, runtime_checkable

from ._torus import reduces_instead
from .collectives import Collective, collective_coefficients
from .compute import Array, Kernel, op_time_s
from .hardware import Cluster

HOST_RESERVE = 0.2
"""Share of a host's memory that the system, Python and data loading use: an assumption."""


@runtime_checkable
class CostModel(Protocol):
    """Costs of ops and collectives on one cluster; times in seconds, sizes in bytes."""

    @property
    def cluster(self) -> Cluster:
        """The cluster that the costs are for."""
        ...

    def __hash__(self) -> int:
        """Cost models are values: tables computed from one are cached with it as the key."""
        ...

    @property
    def op_overhead_s(self) -> float:
        """Seconds to start one kernel on a device, on top of `compute_s`."""
        ...

    @property
    def memory_limit_bytes(self) -> int:
        """Memory of one device in bytes that programs may use."""
        ...

    @property
    def host_memory_limit_bytes(self) -> float:
        """Memory of its host in bytes that programs may use for one device; infinite where it is
        not known."""
        ...

    @property
    def overlap(self) -> tuple[float, float, float]:
        """Shares of collectives that hide under compute, 0 to 1: of those that compute waits for,
        of those that run ahead of their use (gathers of parameters), of those that little waits
        for (reductions of gradients)."""
        ...

    @property
    def combined_latency(self) -> float:
        """Share of its latency that a collective of parameters or gradients retains, 0 to 1."""
        ...

    @property
    def step_latency_s(self) -> float:
        """Seconds that a step takes before its first kernel."""
        ...

    @property
    def host_latency_s(self) -> float:
        """Seconds to start one copy between a device and its host."""
        ...

    @property
    def host_s_per_byte(self) -> float:
        """Seconds per byte of such a copy, one way."""
        ...

    @overload
    def compute_s(
        self,
        flops: float,
        bytes_moved: float,
        dtype: str,
        kind: Kernel = "vector",
        result_bytes: float = 0.0,
    ) -> float: ...

    @overload
    def compute_s(
        self,
        flops: Array,
        bytes_moved: float | Array,
        dtype: str,
        kind: Kernel = "vector",
        result_bytes: float | Array = 0.0,
    ) -> Array: ...

    @overload
    def compute_s(
        self,
        flops: float | Array,
        bytes_moved: Array,
        dtype: str,
        kind: Kernel = "vector",
        result_bytes: float | Array = 0.0,
    ) -> Array: ...

    def compute_s(
        self,
        flops: float | Array,
        bytes_moved: float | Array,
        dtype: str,
        kind: Kernel = "vector",
        result_bytes: float | Array = 0.0,
    ) -> float | Array:
        """Seconds of one kernel after its start; see `costmodels.op_time_s` for the arguments.

        It must grow with every count, and n times smaller counts must take at least an n-th of
        the time: the planner's bounds rely on both.
        """
        ...

    def collective_coefficients(
        self, kind: Collective, mesh_shape: tuple[int, ...], axes: tuple[int, ...]
    ) -> tuple[float, float]:
        """(alpha_s, beta_s_per_byte) of a collective over mesh axes."""
        ...


@dataclasses.dataclass(frozen=True)
class AnalyticCostModel:
    """Roofline ops (Williams et al. 2009), ring collectives (Thakur et al. 2005).

    All constants come from the cluster: no measurement is taken. Implements `CostModel`.
    """

    cluster: Cluster

    @property
    def op_overhead_s(self) -> float:
        """Seconds to start one kernel on a device, on top of `compute_s`."""
        return self.cluster.device.kernel_latency_s

    @property
    def memory_limit_bytes(self) -> int:
        """Memory of one device in bytes, less what its runtime reserves (`memory_reserve`)."""
        return self.cluster.device.usable_bytes

    @property
    def host_memory_limit_bytes(self) -> float:
        """A device's share of its host's memory, less what the system and data loading use
        (`HOST_RESERVE`); infinite where it is not known."""
        known = self.cluster.host_memory_bytes
        return (1.0 - HOST_RESERVE) * known if known else math.inf

    @property
    def overlap(self) -> tuple[float, float, float]:
        """Shares of collectives that hide under compute, from 0 to 1: of those that compute waits
        for, those ahead of their use, those behind (`costmodels.schedule.Place`).

        These are catalog constants of the device kind: 0 for cpu, where compute and communication
        use the same cores; read from scheduled modules for TPUs; assumptions for GPUs.
        """
        device = self.cluster.device
        return device.overlap, device.overlap_ahead, device.overlap_behind

    @property
    def combined_latency(self) -> float:
        """Share of its latency that a collective of parameters or gradients retains, from 0 to 1:
        compilers combine most of them."""
        return self.cluster.device.combined_latency

    @property
    def step_latency_s(self) -> float:
        """Seconds that a step takes before its first kernel."""
        return self.cluster.device.step_latency_s

    @property
    def host_latency_s(self) -> float:
        """Seconds to start one copy between a device and its host."""
        return 0.0 if self.cluster.host is None else self.cluster.host.latency_s

    @property
    def host_s_per_byte(self) -> float:
        """Seconds per byte of such a copy, one way; infinite where the link is not known."""
        return math.inf if self.cluster.host is None else 1.0 / self.cluster.host.bytes_per_s

    @overload
    def compute_s(
        self,
        flops: float,
        bytes_moved: float,
        dtype: str,
        kind: Kernel = "vector",
        result_bytes: float = 0.0,
    ) -> float: ...

    @overload
    def compute_s(
        self,
        flops: Array,
        bytes_moved: float | Array,
        dtype: str,
        kind: Kernel = "vector",
        result_bytes: float | Array = 0.0,
    ) -> Array: ...

    @overload
    def compute_s(
        self,
        flops: float | Array,
        bytes_moved: Array,
        dtype: str,
        kind: Kernel = "vector",
        result_bytes: float | Array = 0.0,
    ) -> Array: ...

    def compute_s(
        self,
        flops: float | Array,
        bytes_moved: float | Array,
        dtype: str,
        kind: Kernel = "vector",
        result_bytes: float | Array = 0.0,
    ) -> float | Array:
        """Seconds of one kernel; see `op_time_s`."""
        device = self.cluster.device
        return op_time_s(device, flops, bytes_moved, dtype, kind, result_bytes)  # type: ignore[arg-type]

    def collective_coefficients(
        self, kind: Collective, mesh_shape: tuple[int, ...], axes: tuple[int, ...]
    ) -> tuple[float, float]:
        """(alpha_s, beta_s_per_byte); see `costmodels.collectives.collective_coefficients`.

        Collectives that compilers run as an all-reduce cost an all-reduce: a reduce-scatter on
        devices without a native one, and the cases that `costmodels._torus.reduces_instead` lists.

        Raises:
            ClusterError: the kind, mesh or axes do not fit the cluster.
        """
        lacking = kind == "reduce_scatter" and not self.cluster.device.native_reduce_scatter
        if lacking or reduces_instead(self.cluster, kind, mesh_shape, axes):
            kind = "all_reduce"
        return collective_coefficients(self.cluster, kind, mesh_shape, axes)
