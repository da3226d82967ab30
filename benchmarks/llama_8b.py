"""The train step of an 8B decoder, for the command line: shapes only.

    planner inspect benchmarks/llama_8b.py --cluster h100:8x2
    planner verify benchmarks/llama_8b.py --cluster v5p:4x4x4

Its 32 layers are scanned, so that compilers see one.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))

import decoders

train_step, _arguments = decoders.build(decoders.Llama(scan=True))


def example_args() -> tuple[Any, Any]:
    """Shapes of the state and of a batch of 64 sequences of 4,096 tokens."""
    return _arguments
