"""Orders of baselines: proven in order, and as long and as large as their papers say."""

from __future__ import annotations

import numpy as np
import pytest

from distca.planning.orders import local_order, local_orders

GRID = [(stages, count) for stages in range(2, 7) for count in range(1, 13)]


@pytest.mark.parametrize(("stages", "count"), GRID)
def test_every_order_is_proven_and_has_its_length_and_memory(stages: int, count: int) -> None:
    for name in local_orders(stages, 48):
        ticks = local_order(name, stages, count)
        ticks.validate()
        peak = ticks.peak_live()
        if name.startswith("interleaved"):
            chunks = int(name[-1])
            if count >= stages:
                assert ticks.num_ticks == 2 * chunks * count + 2 * (stages - 1)
            group = -(-count // max(count // stages, 1))
            most = 2 * (stages - 1 - np.arange(stages)) + (chunks - 1) * group + 1
            assert (peak * chunks <= most + 1).all()
        elif name == "zb_h1":
            assert (peak == min(stages, count)).all()            # as 1F1B's first stage
            if count >= stages:
                assert ticks.num_ticks == 3 * count + stages - 1
        elif name == "zbv":
            assert (peak <= stages).all()
            if count >= 2 * stages - 1:
                assert ticks.num_ticks == 6 * count + stages - 1
                assert ticks.stage_of.tolist() == [*range(stages), *reversed(range(stages))]


def test_two_stages_by_hand() -> None:
    """ZB-H1 of three micro-batches: F0 F1 B0 W0 F2 B1 W1 . B2 W2 on the first stage, the second a tick later."""
    ticks = local_order("zb_h1", 2, 3)
    assert ticks.micro_batch.T.tolist() == [[0, 1, -1, 0, -1, 2, 1, -1, 2, -1], [-1, 0, 0, 1, 1, -1, 2, 2, -1, -1]]
    assert ticks.weight.T.tolist() == [[-1, -1, -1, -1, 0, -1, -1, 1, -1, 2], [-1, -1, -1, -1, -1, 0, -1, -1, 1, 2]]


def test_few_layers_have_few_orders() -> None:
    assert local_orders(1, 32) == ("1f1b",)
    assert local_orders(4, 4) == ("1f1b", "zb_h1")
    assert local_orders(4, 8) == ("1f1b", "interleaved_1f1b_2", "zb_h1", "zbv")
