"""Predicted collectives beside published measurements: bands per machine, group and size."""

from __future__ import annotations

import statistics
from pathlib import Path

import pytest

from benchmarks.collectives_truth import TABLES, Row, table_rows

SHARED = Path(__file__).resolve().parents[3] / "shared" / "published"


@pytest.fixture(scope="module")
def rows() -> list[Row]:
    """Every row of the tables that can be priced."""
    if not SHARED.is_dir():
        pytest.skip(f"the tables of published measurements are not at {SHARED}")
    tables = (table_rows(SHARED, table) for table in (*TABLES, "deepep"))
    return [row for table in tables for row in table if row is not None]


BANDS = {
    # (collective, device, per node x nodes): predicted / measured at 64 MiB and more, in the median
    ("all_reduce", "a100", "8x1"): (0.95, 1.05),
    ("all_reduce", "a100", "4x1"): (0.85, 1.1),
    ("all_reduce", "a100", "2x1"): (0.75, 1.1),
    ("all_reduce", "v100", "8x1"): (0.95, 1.05),
    ("all_reduce", "v100", "4x1"): (0.9, 1.1),
    ("all_reduce", "v100", "2x1"): (0.95, 1.05),
    ("all_reduce", "h100", "8x1"): (0.9, 1.05),
    ("all_reduce", "h200", "8x1"): (0.9, 1.05),
    ("all_reduce", "h200", "5x1"): (0.95, 1.05),
    ("all_reduce", "b200, EFA", "8x1"): (0.8, 1.05),
    ("all_gather", "h200", "8x1"): (0.95, 1.05),
    ("reduce_scatter", "h200", "8x1"): (0.95, 1.05),
    # rings and trees across nodes
    ("all_reduce", "a100-40gb", "8x2"): (0.9, 1.1),
    ("all_reduce", "h100, EFA", "8x2"): (0.6, 1.05),
    ("all_reduce", "h100", "8x12"): (0.9, 1.1),
    ("all_reduce", "h100, EFA", "8x16"): (0.9, 1.1),
    ("all_reduce", "b200, EFA", "8x4"): (0.9, 1.1),
    ("all_gather", "h100, 8x200 Gb TCPXO", "8x2"): (0.9, 1.1),
    ("all_gather", "h200", "8x2"): (0.85, 1.1),
    ("all_to_all", "h800", "8x4"): (0.85, 1.1),
    ("all_gather", "tpu7x", "2x2"): (0.95, 1.05),
}


@pytest.mark.long
@pytest.mark.parametrize(
    ("case", "band"), BANDS.items(), ids=lambda value: " ".join(map(str, value))
)
def test_large_messages(
    rows: list[Row], case: tuple[str, str, str], band: tuple[float, float]
) -> None:
    large = [
        row.ratio
        for row in rows
        if (row.kind, row.device, row.group) == case and row.size_class == "64 MiB and more"
    ]
    assert large
    assert band[0] <= statistics.median(large) <= band[1]


@pytest.mark.parametrize("size", ["under 1 MiB", "1 to 64 MiB"])
def test_small_messages_inside_a_node_are_within_a_factor_of_two(
    rows: list[Row], size: str
) -> None:
    ratios = [row.ratio for row in rows if row.size_class == size and row.group.endswith("x1")]
    near = [ratio for ratio in ratios if 0.5 <= ratio <= 2.0]
    assert len(near) >= 0.75 * len(ratios) > 0
