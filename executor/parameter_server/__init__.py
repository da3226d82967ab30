"""Training with parameter servers: synchronous, bounded-stale and asynchronous."""

from executor.parameter_server.answers import Counts, LostError, WaitError
from executor.parameter_server.clock import Rule
from executor.parameter_server.hybrid import Hybrid, hybrid
from executor.parameter_server.job import Served
from executor.parameter_server.joined import join_devices
from executor.parameter_server.layout import Layout, Piece, layout_of
from executor.parameter_server.local_steps import LocalSteps
from executor.parameter_server.partition import (
    FixedShardsPartitioner,
    MaxSizePartitioner,
    MinSizePartitioner,
    Partitioner,
)
from executor.parameter_server.train import train
from executor.parameter_server.worker import ParameterServer
from executor.ps_roles import PsRole, ps_role

__all__ = [
    "Counts",
    "FixedShardsPartitioner",
    "Hybrid",
    "Layout",
    "LocalSteps",
    "LostError",
    "MaxSizePartitioner",
    "MinSizePartitioner",
    "ParameterServer",
    "Partitioner",
    "Piece",
    "PsRole",
    "Rule",
    "Served",
    "WaitError",
    "hybrid",
    "join_devices",
    "layout_of",
    "ps_role",
    "train",
]
