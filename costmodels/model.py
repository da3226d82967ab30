"""The interface through which a planner asks for costs, and its closed-form implementation."""

from __future__ import annotations

import dataclasses
from typing import Protocol, overload, runtime_checkable

from .collectives import Collective, collective_coefficients
from .compute import Array, op_time_s
from .hardware import Cluster


@runtime_checkable
class CostModel(Protocol):
    """Costs of ops and collectives on one cluster; times in seconds, sizes in bytes."""

    @property
    def cluster(self) -> Cluster:
        """The cluster the costs are for."""
        ...

    def __hash__(self) -> int:
        """Cost models are values: tables made from one are kept under it."""
        ...

    @property
    def op_overhead_s(self) -> float:
        """Fixed cost of starting one op on a device, in seconds."""
        ...

    @property
    def memory_limit_bytes(self) -> int:
        """Memory of one device in bytes."""
        ...

    @property
    def overlap(self) -> float:
        """Fraction of communication that hides under compute, from 0 to 1."""
        ...

    @overload
    def compute_s(self, flops: float, bytes_moved: float, dtype: str, matmul: bool) -> float: ...

    @overload
    def compute_s(
        self, flops: Array, bytes_moved: float | Array, dtype: str, matmul: bool
    ) -> Array: ...

    @overload
    def compute_s(
        self, flops: float | Array, bytes_moved: Array, dtype: str, matmul: bool
    ) -> Array: ...

    def compute_s(
        self, flops: float | Array, bytes_moved: float | Array, dtype: str, matmul: bool
    ) -> float | Array:
        """Seconds of one op with `flops` flop and `bytes_moved` bytes of memory traffic."""
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
        """Fixed cost of starting one op on a device, in seconds."""
        return self.cluster.device.kernel_latency_s

    @property
    def memory_limit_bytes(self) -> int:
        """Memory of one device in bytes; nothing is set aside for the runtime."""
        return self.cluster.device.memory_bytes

    @property
    def overlap(self) -> float:
        """Fraction of communication that hides under compute, from 0 to 1.

        One stated constant per device kind in the catalog: 0 for cpu, where both use the same
        cores; for accelerators an assumption, not a measurement.
        """
        return self.cluster.device.overlap

    @overload
    def compute_s(self, flops: float, bytes_moved: float, dtype: str, matmul: bool) -> float: ...

    @overload
    def compute_s(
        self, flops: Array, bytes_moved: float | Array, dtype: str, matmul: bool
    ) -> Array: ...

    @overload
    def compute_s(
        self, flops: float | Array, bytes_moved: Array, dtype: str, matmul: bool
    ) -> Array: ...

    def compute_s(
        self, flops: float | Array, bytes_moved: float | Array, dtype: str, matmul: bool
    ) -> float | Array:
        """Seconds of one op; see `op_time_s`."""
        return op_time_s(self.cluster.device, flops, bytes_moved, dtype, matmul)

    def collective_coefficients(
        self, kind: Collective, mesh_shape: tuple[int, ...], axes: tuple[int, ...]
    ) -> tuple[float, float]:
        """(alpha_s, beta_s_per_byte); see `costmodels.collectives.collective_coefficients`.

        Where the device has no reduce-scatter of its own it costs an all-reduce.

        Raises:
            ClusterError: the kind, mesh or axes do not fit the cluster.
        """
        if kind == "reduce_scatter" and not self.cluster.device.native_reduce_scatter:
            kind = "all_reduce"
        return collective_coefficients(self.cluster, kind, mesh_shape, axes)
