"""Cost models: how long ops and collectives take on a described cluster, without running them.

Times are in seconds, sizes in bytes, rates in flop/s and bytes/s, all SI decimal.
"""

from ._describe import MOST_DEVICES
from ._spelled import usual_sizes
from .collectives import Collective, collective_coefficients
from .compute import Kernel, attention_drag, op_time_s
from .hardware import (
    Cluster,
    ClusterError,
    Device,
    Link,
    find_kind,
    known_kinds,
    parse_bytes,
    parse_cluster,
    part_of,
    with_memory,
    with_profile,
)
from .model import AnalyticCostModel, CostModel
from .origins import Origins, origins

__all__ = [
    "MOST_DEVICES",
    "AnalyticCostModel",
    "Cluster",
    "ClusterError",
    "Collective",
    "CostModel",
    "Device",
    "Kernel",
    "Link",
    "Origins",
    "attention_drag",
    "collective_coefficients",
    "find_kind",
    "known_kinds",
    "op_time_s",
    "origins",
    "parse_bytes",
    "parse_cluster",
    "part_of",
    "usual_sizes",
    "with_memory",
    "with_profile",
]
