"""Ticks against tables written by hand, against their closed forms, and against every same-phase order there is."""

from collections.abc import Callable
from dataclasses import replace
from itertools import product
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from distca.planning.orders import one_forward_one_backward, same_phase_ticks
from distca.planning.schedule import Ticks

Order = Callable[[int, int], Ticks]
BOTH: tuple[Order, ...] = (same_phase_ticks, one_forward_one_backward)
numbers = st.integers(1, 12)

BY_HAND: dict[tuple[Order, int, int], str] = {  # one line per stage, one column per tick
    (same_phase_ticks, 1, 2): """
        F0 B0 F1 B1""",
    (same_phase_ticks, 2, 2): """
        F0 F1 .  .  B0 B1
        .  F0 B0 F1 B1 .""",
    (same_phase_ticks, 3, 1): """
        F0 .  .  .  .  B0
        .  F0 .  .  B0 .
        .  .  F0 B0 .  .""",
    (same_phase_ticks, 3, 2): """
        F0 F1 .  .  .  .  B0 B1
        .  F0 F1 .  .  B0 B1 .
        .  .  F0 B0 F1 B1 .  .""",
    (same_phase_ticks, 4, 6): """
        F0 F1 F2 F3 .  F4 .  F5 .  .  B0 .  B1 .  B2 B3 B4 B5
        .  F0 F1 F2 .  F3 .  F4 B0 F5 B1 .  B2 .  B3 B4 B5 .
        .  .  F0 F1 .  F2 B0 F3 B1 F4 B2 F5 B3 .  B4 B5 .  .
        .  .  .  F0 B0 F1 B1 F2 B2 F3 B3 F4 B4 F5 B5 .  .  .""",
    (one_forward_one_backward, 1, 2): """
        F0 B0 F1 B1""",
    (one_forward_one_backward, 2, 2): """
        F0 F1 .  B0 .  B1
        .  F0 B0 F1 B1 .""",
    (one_forward_one_backward, 3, 2): """
        F0 F1 .  .  .  B0 .  B1
        .  F0 F1 .  B0 .  B1 .
        .  .  F0 B0 F1 B1 .  .""",
    (one_forward_one_backward, 4, 6): """
        F0 F1 F2 F3 .  .  .  B0 F4 B1 F5 B2 .  B3 .  B4 .  B5
        .  F0 F1 F2 .  .  B0 F3 B1 F4 B2 F5 B3 .  B4 .  B5 .
        .  .  F0 F1 .  B0 F2 B1 F3 B2 F4 B3 F5 B4 .  B5 .  .
        .  .  .  F0 B0 F1 B1 F2 B2 F3 B3 F4 B4 F5 B5 .  .  .""",
}
PEAKS_BY_HAND = {(same_phase_ticks, 4, 6): [6, 5, 3, 1], (one_forward_one_backward, 4, 6): [4, 3, 2, 1],
                 (same_phase_ticks, 3, 2): [2, 2, 1], (one_forward_one_backward, 3, 2): [2, 2, 1],
                 (same_phase_ticks, 2, 2): [2, 1], (same_phase_ticks, 1, 2): [1], (same_phase_ticks, 3, 1): [1, 1, 1]}


def cells(ticks: Ticks) -> list[list[str]]:
    """One list per stage, as in the tables."""
    return [[f"{'B' if back else 'F'}{number}" if number >= 0 else "."
             for number, back in zip(ticks.micro_batch[:, stage], ticks.backward[:, stage], strict=True)]
            for stage in range(ticks.num_stages)]


@pytest.mark.parametrize("case", BY_HAND, ids=lambda case: f"{case[0].__name__}-{case[1]}-{case[2]}")
def test_the_order_is_the_one_written_by_hand(case: tuple[Order, int, int]) -> None:
    order, num_stages, num_micro_batches = case
    ticks = order(num_stages, num_micro_batches)
    ticks.validate()
    assert cells(ticks) == [line.split() for line in BY_HAND[case].strip().splitlines()]
    if case in PEAKS_BY_HAND:
        assert ticks.peak_live().tolist() == PEAKS_BY_HAND[case]


@settings(max_examples=80, deadline=None)
@given(st.sampled_from(BOTH), numbers, numbers)
def test_every_stage_runs_everything_once_and_after_its_input(order: Order, num_stages: int,
                                                              num_micro_batches: int) -> None:
    ticks = order(num_stages, num_micro_batches)
    ticks.validate()
    done: dict[tuple[int, int, bool], int] = {}
    for tick, (row, backward) in enumerate(zip(ticks.micro_batch.tolist(), ticks.backward.tolist(), strict=True)):
        for stage in range(num_stages):
            if row[stage] >= 0:
                assert done.setdefault((stage, row[stage], backward[stage]), tick) == tick
    assert len(done) == 2 * num_stages * num_micro_batches
    for (stage, number, backward), tick in done.items():
        if backward:
            assert done[stage, number, False] < tick
            assert stage == num_stages - 1 or done[stage + 1, number, True] < tick
        else:
            assert stage == 0 or done[stage - 1, number, False] < tick


@settings(max_examples=80, deadline=None)
@given(numbers, numbers)
def test_counts_memory_and_bubbles_have_closed_forms(num_stages: int, num_micro_batches: int) -> None:
    same, mixed = (order(num_stages, num_micro_batches) for order in BOTH)
    from_last = num_stages - np.arange(num_stages)
    assert same.same_phase
    assert mixed.same_phase == (num_stages == 1 or num_micro_batches == 1)
    for ticks in (same, mixed):
        assert ticks.num_ticks == 2 * (num_micro_batches + num_stages - 1)
        assert ticks.num_stages == num_stages
        assert ticks.bubble_share() == pytest.approx((num_stages - 1) / (num_micro_batches + num_stages - 1))
    assert same.peak_live().tolist() == np.minimum(num_micro_batches, 2 * from_last - 1).tolist()
    assert mixed.peak_live().tolist() == np.minimum(num_micro_batches, from_last).tolist()
    for tick in range(same.num_ticks):
        assert (same.backward[tick] == same.phase(tick)).all()   # idle stages too


@settings(max_examples=50, deadline=None)
@given(numbers, numbers)
def test_1f1b_warms_up_and_then_alternates(num_stages: int, num_micro_batches: int) -> None:
    ticks = one_forward_one_backward(num_stages, num_micro_batches)
    for stage in range(num_stages):
        active = ticks.micro_batch[:, stage] >= 0
        phases = ticks.backward[active, stage].tolist()
        warm_up = min(num_stages - 1 - stage, num_micro_batches)
        turns = [False, True] * (num_micro_batches - warm_up)
        assert phases == [False] * warm_up + turns + [True] * warm_up


def fewest_ticks(num_stages: int, num_micro_batches: int, capped_stage: int | None = None, cap: int = 0) -> int | None:
    """Breadth-first over all same-phase orders, micro-batches in any order; None where no order keeps to the cap.

    A state tells for each stage which micro-batches are new (0), have run forward (1) and backward (2).
    """
    count = range(num_micro_batches)
    begin = ((0,) * num_micro_batches,) * num_stages
    end = ((2,) * num_micro_batches,) * num_stages
    seen, edge, ticks = {begin}, [begin], 0
    while edge:
        ticks += 1
        reached = []
        for state in edge:
            for phase in (0, 1):
                options = []
                for stage in range(num_stages):
                    source = stage - 1 if phase == 0 else stage + 1
                    free = 0 <= source < num_stages
                    options.append([None, *(m for m in count if state[stage][m] == phase
                                            and (not free or state[source][m] > phase))])
                for choice in product(*options):
                    after = tuple(state[s] if m is None else (*state[s][:m], phase + 1, *state[s][m + 1:])
                                  for s, m in enumerate(choice))
                    if after in seen or (capped_stage is not None and after[capped_stage].count(1) > cap):
                        continue
                    if after == end:
                        return ticks
                    seen.add(after)
                    reached.append(after)
        edge = reached
    return None


@pytest.mark.parametrize("num_stages, num_micro_batches",
                         [(1, 3), (2, 1), (2, 2), (2, 3), (2, 5), (3, 1), (3, 2), (3, 3), (4, 2)])
def test_no_same_phase_order_is_shorter_or_as_short_in_less_memory(num_stages: int, num_micro_batches: int) -> None:
    ticks = same_phase_ticks(num_stages, num_micro_batches)
    assert fewest_ticks(num_stages, num_micro_batches) == ticks.num_ticks
    for stage, peak in enumerate(ticks.peak_live().tolist()):
        assert fewest_ticks(num_stages, num_micro_batches, stage, peak) == ticks.num_ticks
        if peak > 1:
            fewest = fewest_ticks(num_stages, num_micro_batches, stage, peak - 1)
            assert fewest is not None and fewest > ticks.num_ticks


@settings(max_examples=120, deadline=None)
@given(st.sampled_from(BOTH), st.integers(1, 5), st.integers(1, 5), st.data())
def test_validate_rejects_any_one_change(order: Order, num_stages: int, num_micro_batches: int,
                                         data: st.DataObject) -> None:
    ticks = order(num_stages, num_micro_batches)
    tick = data.draw(st.integers(0, ticks.num_ticks - 1))
    stage = data.draw(st.integers(0, num_stages - 1))
    micro_batch, backward = ticks.micro_batch.copy(), ticks.backward.copy()
    if data.draw(st.booleans()) and micro_batch[tick, stage] >= 0:
        backward[tick, stage] ^= True
    else:
        others = [number for number in range(-1, num_micro_batches) if number != micro_batch[tick, stage]]
        micro_batch[tick, stage] = data.draw(st.sampled_from(others))
    with pytest.raises(ValueError, match="exactly once"):
        replace(ticks, micro_batch=micro_batch, backward=backward).validate()


@pytest.mark.parametrize("order", BOTH)
def test_validate_rejects_work_before_its_input(order: Order) -> None:
    ticks = order(3, 4)
    reverse = Ticks(ticks.micro_batch[::-1], ticks.backward[::-1], 4)
    with pytest.raises(ValueError, match=r"^part 1 runs micro-batch 0 forward in tick \d+ but the part before it"):
        reverse.validate()
    mirrored = Ticks(ticks.micro_batch[::-1], ~ticks.backward[::-1], 4)  # backward in time and in phase: an order again
    mirrored.validate()
    both_in_a_tick = Ticks(np.array([[0, 0], [-1, 0], [0, -1]]), np.array([[0, 0], [1, 1], [1, 1]]), 1)
    with pytest.raises(ValueError, match="part 1 runs micro-batch 0 forward in tick 0 but the part before it is in"):
        both_in_a_tick.validate()
    early_backward = Ticks(np.array([[0, -1], [-1, 0], [0, -1], [-1, 0]]),
                           np.array([[0, 0], [0, 0], [1, 1], [1, 1]]), 1)
    with pytest.raises(ValueError, match="part 0 runs micro-batch 0 backward in tick 2 but the part behind it is in"):
        early_backward.validate()
    before_forward = Ticks(np.array([[0, -1], [-1, 0], [-1, 0], [0, -1]]),
                           np.array([[0, 0], [1, 1], [0, 0], [1, 1]]), 1)
    with pytest.raises(ValueError, match="part 1 runs micro-batch 0 backward in tick 1 but its head or forward is"):
        before_forward.validate()


@pytest.mark.parametrize("value", [0, -1, 2.0, True, "3", None])
@pytest.mark.parametrize("order", BOTH)
def test_bad_counts_are_named(order: Order, value: Any) -> None:
    for field, arguments in (("num_stages", (value, 2)), ("num_micro_batches", (2, value))):
        with pytest.raises(ValueError, match=rf"^{field} is {value!r}; give a whole number of at least 1$"):
            order(*arguments)


def test_bad_tables_are_named() -> None:
    with pytest.raises(ValueError, match=r"^micro_batch has shape \(2,\) and backward \(1, 2\); give both"):
        Ticks(np.array([0, 0]), np.array([[False, True]]), 1).validate()
    with pytest.raises(ValueError, match=r"^micro_batch names 5 but num_micro_batches is 1; use 0 to 0, or -1"):
        Ticks(np.array([[5], [0]]), np.array([[False], [True]]), 1).validate()
    with pytest.raises(ValueError, match=r"^tick 3 mixes forward with backward and has no phase"):
        one_forward_one_backward(2, 2).phase(3)


def test_ticks_are_frozen() -> None:
    with pytest.raises(ValueError, match="read-only"):
        same_phase_ticks(2, 2).micro_batch[0, 0] = 1
