"""Figures of strategies: the verdict that compares ours with the best baseline."""

from __future__ import annotations

from dataclasses import replace

from distca.report.figures import Spread, StrategyFigures, ours_and_best_baseline, verdict


def _strategy(name: str, speed: float, **ratios: float) -> StrategyFigures:
    return StrategyFigures(name, Spread(speed, speed, speed), 1.0, 0.1, 0.1, 1e9, 1.0, {
        other: Spread(ratio, 0.9 * ratio, 1.1 * ratio) for other, ratio in ratios.items()})


def test_ours_is_told_against_the_best_baseline() -> None:
    rows = [_strategy("fixed_packing", 500), replace(_strategy("wlb_ideal", 800), peak_memory_bytes=42.1e9),
            replace(_strategy("distca", 1000, wlb_ideal=1.25), peak_memory_bytes=67.5e9),
            _strategy("disaggregated", 1100, wlb_ideal=1.4), _strategy("bound", 1250)]
    ours, best = ours_and_best_baseline(rows)
    assert ours is not None and best is not None and (ours.name, best.name) == ("distca", "wlb_ideal")
    assert verdict(rows) == (
        "distca trains 1.25× as fast as wlb_ideal, the best baseline (1.12 to 1.38 over the batches): 1,000 tokens/s "
        "against 800, 80% of what no strategy can beat. A GPU holds at most 67.5 GB, against 42.1 GB with wlb_ideal.")


def test_no_gain_is_called_none() -> None:
    rows = [_strategy("wlb_ideal", 1000), _strategy("distca", 990, wlb_ideal=0.99)]
    assert verdict(rows).startswith("distca gains nothing here: it trains 0.99× as fast as wlb_ideal, the best base")


def test_what_has_nothing_beside_it_says_so() -> None:
    assert "no baseline ran and fitted" in verdict([_strategy("distca", 990)])
    assert "no strategy of ours ran and fitted" in verdict([_strategy("wlb_ideal", 990), _strategy("bound", 1000)])
    assert verdict([_strategy("bound", 1000)]) == verdict([_strategy("theirs", 1000)]) == verdict([]) == ""
