"""Checkpoints that fit any plan: sharded, asynchronous saves, restored under other shardings.

``Checkpoints`` is for a run. ``open_state``, ``write_orbax`` and ``write_tensors`` work on what is
on disk, on one machine and without devices: `planner checkpoint` is made of them.
"""

from executor.checkpoint.common import CheckpointError
from executor.checkpoint.manager import Checkpoints
from executor.checkpoint.owner import FencedError

__all__ = ["CheckpointError", "Checkpoints", "FencedError"]
