"""Plans of windows: every pair that a query sees is computed once, keys that nobody sees stay, and work is level."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from distca.baselines import at_home_step
from distca.cost.attention_time import AttentionTime, shipped_table
from distca.models import model_named
from distca.planning.balance import balance
from distca.planning.choose import plan_step
from distca.planning.plan import Plan, max_over_mean
from distca.planning.plan_bytes import plan_from_bytes, plan_to_bytes
from distca.planning.step import StepPlan
from distca.planning.windows import windowed, windows_by_depth, with_windows
from distca.workload.packing import pack
from tests.support.plans import LAYOUT_KINDS, LayoutKind, random_layout, random_lengths, random_speeds

LLAMA = model_named("llama3-8b")


def seen(plan: Plan, window: int) -> list[np.ndarray]:
    """[document] how often each pair of a window is computed, by counting."""
    counts = []
    for document, length in enumerate(plan.layout.lengths.tolist()):
        count = np.zeros((length, length), dtype=int)
        for row in np.flatnonzero(plan.tasks.document == document).tolist():
            tasks = plan.tasks
            count[tasks.q_start[row]:tasks.q_stop[row], tasks.kv_start[row]:tasks.kv_stop[row]] += 1
        visible = np.tril(np.ones_like(count)) - np.tril(np.ones_like(count), -window)
        counts.append(count * visible)
    return counts


def visible_pairs(length: int, window: int) -> int:
    return sum(min(query + 1, window) for query in range(length))


@settings(deadline=None, max_examples=80)
@given(st.integers(0, 10**5), st.sampled_from(LAYOUT_KINDS), st.integers(1, 4), st.integers(1, 300),
       st.sampled_from([1, 2, 7, 64, 130, 1000]), st.integers(0, 2))
def test_every_pair_of_a_window_is_computed_once(
    seed: int, kind: LayoutKind, ranks: int, tokens: int, window: int, dedicated: int
) -> None:
    layout = random_layout(seed, kind, ranks, tokens)
    causal = balance(layout, LLAMA, tolerance=0.05, speed=random_speeds(seed, ranks, dedicated))
    plan = windowed(causal, window)
    plan.validate()
    for length, count in zip(layout.lengths.tolist(), seen(plan, window), strict=True):
        assert count.max(initial=0) <= 1 and count.sum() == visible_pairs(length, window)
    expected = sum(visible_pairs(length, window) for length in layout.lengths.tolist())
    assert plan.work().sum() == expected
    assert (plan is causal) == (window >= layout.lengths.max())
    again = plan_from_bytes(plan_to_bytes(plan))
    assert again.window == plan.window and again.work().tolist() == plan.work().tolist()


def test_a_key_that_a_window_needs_is_missed() -> None:
    plan = windowed(balance(pack([1024, 1024], ranks=2), LLAMA), 100)
    at = int(np.flatnonzero(plan.tasks.q_start > 0)[0]) if (plan.tasks.q_start > 0).any() else 0
    short = plan.tasks.kv_start.copy()
    short[at] += 1
    with pytest.raises(ValueError, match="should follow"):
        replace(plan, tasks=replace(plan.tasks, kv_start=short)).validate()


def test_short_windows_are_level_at_home_and_move_only_their_halo() -> None:
    """Eight ranks share one long document: each gets the window before its part, for every rank but the first."""
    layout = pack([8 * 4096], ranks=8)
    causal = balance(layout, LLAMA, tolerance=0.05)
    plan = windowed(causal, 128)
    assert (plan.tasks.server == plan.tasks.home).all()
    assert max_over_mean(plan.work(), plan.speed) <= 1.05
    assert plan.summary().bytes_total == 7 * 127 * LLAMA.kv_token_bytes()
    assert plan.summary().bytes_total < causal.summary().bytes_total / 10


def test_long_windows_go_by_the_causal_plan() -> None:
    """One document of a rank, short ones on the others: at home the long one would do nearly all."""
    layout = pack([4096, *[128] * 96], ranks=4)
    plan = windowed(balance(layout, LLAMA, tolerance=0.05), 4000)
    at_home = np.array([visible_pairs(4096, 4000), *[32 * visible_pairs(128, 4000)] * 3], dtype=float)
    assert max_over_mean(plan.work(), plan.speed) < max_over_mean(at_home, np.ones(4)) / 2
    assert (plan.tasks.server != plan.tasks.home).any()


def test_seconds_of_a_window_are_its_share() -> None:
    cost = AttentionTime.of(shipped_table("h200"), LLAMA)
    causal = balance(pack([65536], ranks=2), LLAMA, cost=cost)
    plan = windowed(causal, 1024)
    whole = 65536 * 65537 // 2
    assert plan.work().sum() < causal.work().sum() * 3 * visible_pairs(65536, 1024) / whole


def mixed_step(windows: list[int | None], layers: list[int], *, shared: bool = True) -> StepPlan:
    documents = [random_lengths(seed, 4 * 600) for seed in range(3)]
    model = replace(LLAMA, num_layers=len(windows), windows=tuple(windows))
    step = plan_step(documents, model, num_data=4, layers=layers) if shared else at_home_step(
        documents, model, num_data=4, layers=layers)
    return with_windows(step, windows)


@pytest.mark.parametrize(("windows", "layers", "shared"), [
    ([None, 50, None, 50], [4], True), ([None, 50, None, 50], [2, 2], True), ([50] * 5, [3, 2], True),
    ([None, None, 50, 50], [2, 2], False)])
def test_a_step_has_each_layers_window(windows: list[int | None], layers: list[int], shared: bool) -> None:
    step = mixed_step(windows, layers, shared=shared)
    step.validate()
    first = np.cumsum(layers) - layers
    for stage, num_layers in enumerate(layers):
        for tick in np.flatnonzero(step.ticks.active[:, stage]).tolist():
            for depths in step.plans_of(stage)[tick]:
                assert [plan.window for plan in depths[:num_layers]] == windows[first[stage]:first[stage] + num_layers]
    assert len(step.plans) <= 2 * 2 * step.ticks.num_ticks * len(set(windows))
    summary = step.summary()
    assert summary.work_before >= 1.0 and summary.work_after >= 1.0


def test_windows_of_one_call_must_agree() -> None:
    with pytest.raises(ValueError, match=r"layer 2 \(number 0 of pipeline part 1\) has window 50 where number 0 of "
                                         "another part has None"):
        mixed_step([None, None, 50, 50], [2, 2])
    with pytest.raises(ValueError, match="windows are of 3 layers but the step has 4"):
        windows_by_depth([1, 2, 3], [2, 2], shared=True)
