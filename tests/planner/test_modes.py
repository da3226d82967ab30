"""What the process-wide mode takes for a staleness."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from planner.errors import RequestError
from planner.modes import get_parallel_mode, set_parallel_mode


@pytest.mark.parametrize("value", ["4", 2.5, True, None])
def test_a_staleness_is_a_whole_number(value: Any) -> None:
    before = get_parallel_mode()
    kind = type(value).__name__
    with pytest.raises(RequestError, match=f"staleness={value!r}: got {kind}, expected a whole"):
        set_parallel_mode("DATA_PARALLEL", update="ssp", staleness=value)
    assert get_parallel_mode() == before


def test_numpys_numbers_are_pythons() -> None:
    before = set_parallel_mode("DATA_PARALLEL", update="ssp", staleness=np.int64(4))  # type: ignore[arg-type]
    try:
        found = get_parallel_mode().staleness
        assert found == 4 and type(found) is int
    finally:
        set_parallel_mode(
            before.mode, search=before.search, update=before.update, staleness=before.staleness
        )
