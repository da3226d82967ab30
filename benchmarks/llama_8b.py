"""The train step of an 8B decoder, for the command line: shapes only.

    planner inspect benchmarks/llama_8b.py --cluster h100:8x2
    planner verify benchmarks/llama_8b.py --cluster v5p:4x4x4

``LAYERS`` in the environment makes it shallower (default 32), as compilers take minutes for 32.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))

import decoders

train_step, _arguments = decoders.build(decoders.Llama(layers=int(os.environ.get("LAYERS", "32"))))


def example_args() -> tuple[Any, Any]:
    """Shapes of the state and of a batch of 64 sequences of 4,096 tokens."""
    return _arguments
