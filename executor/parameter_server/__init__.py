"""Training with parameter servers: synchronous, bounded-stale and asynchronous."""

from executor.parameter_server.jobs.hybrid import Hybrid, hybrid
from executor.parameter_server.jobs.job import Served
from executor.parameter_server.jobs.joined import join_devices
from executor.parameter_server.jobs.train import train
from executor.parameter_server.launch.roles import PsRole, ps_role
from executor.parameter_server.placement.layout import Layout, Piece, layout_of
from executor.parameter_server.placement.partition import (
    FixedShardsPartitioner,
    MaxSizePartitioner,
    MinSizePartitioner,
    Partitioner,
)
from executor.parameter_server.server.answers import Counts, LostError, WaitError
from executor.parameter_server.server.clock import Rule
from executor.parameter_server.worker.local_steps import LocalSteps
from executor.parameter_server.worker.worker import ParameterServer

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
