"""Data for a plan: every process reads only its share, and all make the same batches.

``shard`` is the one door. What is numbered (arrays, memory maps, files, random-access sources)
becomes ``Batches``: any process can find any row, so nothing has to be sent and a restart goes on
exactly with any number of processes. What is only walked through (Grain's iterable datasets)
becomes ``Streams``.
"""

from executor.data.agree import agreed_steps, own_files
from executor.data.batches import Batches
from executor.data.common import POLICIES, DataError, Position
from executor.data.door import shard
from executor.data.streams import Streams

__all__ = [
    "POLICIES",
    "Batches",
    "DataError",
    "Position",
    "Streams",
    "agreed_steps",
    "own_files",
    "shard",
]
