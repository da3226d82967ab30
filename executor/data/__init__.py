"""Data for a plan: every process reads only its share, and all make the same batches.

``shard`` is the entry point. Sources with numbered rows (arrays, memory maps, files, random-access
sources) become ``Batches``: any process can read any row, so nothing has to be sent, and a restart
continues exactly with any number of processes. Iterators (Grain's iterable datasets) become
``Streams``.
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
