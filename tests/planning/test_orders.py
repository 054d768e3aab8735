"""The orders that a step may run in: every one is proven, and keeps to the length and the memory that it claims."""

import numpy as np
import pytest

from distca.planning.orders import interleaved_ticks, one_forward_one_backward, orders

STAGES, MICRO_BATCHES, CHUNKS = range(2, 7), range(1, 13), (1, 2, 3)


@pytest.mark.parametrize("num_stages", STAGES)
@pytest.mark.parametrize("chunks", CHUNKS)
def test_interleaved_orders_keep_their_claims(num_stages: int, chunks: int) -> None:
    for num_micro_batches in MICRO_BATCHES:
        ticks = interleaved_ticks(num_stages, num_micro_batches, chunks)
        ticks.validate()
        assert ticks.same_phase
        assert ticks.splits
        assert ticks.spreads_head
        least = (3 * chunks + 1) * num_micro_batches + num_stages - 1  # with a head tick for every micro-batch
        assert ticks.num_ticks >= least
        assert ticks.num_ticks == least or num_micro_batches < 2 * num_stages
        peak = ticks.peak_live().max()
        groups = max(1, num_micro_batches // num_stages)
        size = max(-(-num_micro_batches // groups), num_stages)  # micro-batches of the largest group
        assert peak <= min(num_micro_batches, size + num_stages / chunks) + 1e-9


@pytest.mark.parametrize("num_stages", STAGES)
def test_listed_orders_are_valid_and_one_keeps_no_more_than_1f1b(num_stages: int) -> None:
    for num_micro_batches in MICRO_BATCHES:
        found = orders(num_stages, num_micro_batches, 24)
        assert next(iter(found)) == "same_phase"
        assert list(found)[-2:] == ["1f1b", "zb_h1"]
        for ticks in found.values():
            ticks.validate()
            assert ticks.num_parts <= 24
            assert ticks.num_micro_batches == num_micro_batches
        in_turns = one_forward_one_backward(num_stages, num_micro_batches).peak_live()
        np.testing.assert_array_equal(found["1f1b"].peak_live(), in_turns)
        assert found["zb_h1"].peak_live().max() <= in_turns.max()
        assert list(orders(num_stages, num_micro_batches, 24, splits=False))[-1] == "1f1b"


def test_more_parts_a_stage_keep_less_and_nearly_as_little_as_1f1b() -> None:
    found = orders(4, 8, 32)
    peaks = [found[f"interleaved_{chunks}"].peak_live().max() for chunks in (1, 2, 4, 8)]
    assert peaks == [8, 6, 5, 4.5]
    assert found["1f1b"].peak_live().max() == 4


@pytest.mark.parametrize(("num_stages", "num_layers", "chunks"), [
    (4, 32, [1, 2, 4, 8]), (4, 48, [1, 2, 3, 4, 6]), (3, 32, [1, 2, 4, 8]), (4, 4, [1]), (2, 5, [1, 2]), (1, 32, [])])
def test_parts_divide_the_layers_evenly_or_are_powers_of_two(
    num_stages: int, num_layers: int, chunks: list[int]
) -> None:
    found = orders(num_stages, 6, num_layers)
    assert [int(name.split("_")[1]) for name in found if name.startswith("interleaved")] == chunks
