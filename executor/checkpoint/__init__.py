"""Checkpoints that fit any plan: sharded, asynchronous saves, restored under other shardings.

``Checkpoints`` is for a training run. ``saved.open_state`` and ``saved.write_state`` work on saved
states on disk, on one machine and without devices; `planner checkpoint` uses them.
"""

from executor.checkpoint.common import CheckpointError
from executor.checkpoint.manager import Checkpoints
from executor.checkpoint.owner import FencedError

__all__ = ["CheckpointError", "Checkpoints", "FencedError"]
