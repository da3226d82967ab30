"""A job that was frozen wakes up in a run directory that another job took over."""

from __future__ import annotations

import random
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "benchmarks"))

import zombies  # noqa: E402

pytestmark = [pytest.mark.slow, pytest.mark.devices]


def test_the_directory_is_as_if_the_frozen_job_had_not_come_back(tmp_path: Path) -> None:
    calm = zombies.undisturbed(tmp_path / "calm", 1)
    for seed, wake in enumerate(zombies.WAKES):
        round_ = zombies.disturbed(tmp_path / wake, 1, random.Random(seed), calm, wake)
        assert round_.good, (round_, round_.text)
