"""Rates: what strategies cost on several meshes at once is what each mesh alone gives."""

from __future__ import annotations

import numpy as np
import pytest

from costmodels import AnalyticCostModel, parse_cluster
from planner.cost.rates import Rates
from planner.space.strategies import StrategySet


def test_masks_and_sizes_multiply_the_axes_that_split_the_factors() -> None:
    table = np.array([[-1, -1], [0, -1], [0, 0], [0, 1], [2, 1]])
    rates = Rates.of([(4, 3)], AnalyticCostModel(parse_cluster("cpu:12")))

    def parts(factors: set[int]) -> list[float]:
        return rates.size[0][rates.masks(table, frozenset(factors))].tolist()

    assert parts({0, 1}) == [1, 4, 12, 12, 3]
    assert parts(set()) == [1] * 5
    assert StrategySet(table, table, np.zeros(5, bool)).count == 5


@pytest.mark.parametrize("cluster", ["h100:8x2", "v5p:4x4", "cpu:16"])
def test_meshes_together_cost_what_each_costs_alone(cluster: str) -> None:
    model = AnalyticCostModel(parse_cluster(cluster))
    meshes = [(2, 2, 4), (4, 2, 2), (2, 4, 2)]
    joint = Rates.of(meshes, model)
    for k, mesh in enumerate(meshes):
        alone = Rates.of([mesh], model)
        for name in ("size", "alpha_s", "beta_s_per_byte"):
            assert np.array_equal(getattr(joint, name)[k], getattr(alone, name)[0])
        for name in ("alpha_s", "combined_alpha_s", "beta_s_per_byte"):
            assert np.array_equal(getattr(joint.costs, name)[k], getattr(alone.costs, name)[0])
