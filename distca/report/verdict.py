"""What a comparison of strategies comes to: ours against the best baseline, in one sentence."""

from __future__ import annotations

from collections.abc import Sequence

from distca.report.figures import Spread, StrategyFigures
from distca.simulate.strategies import BOUND, STRATEGIES

OURS = "distca"
NO_GAIN = 1.005  # what rounds to 1.00 is no gain


def ours_and_best_baseline(
    strategies: Sequence[StrategyFigures],
) -> tuple[StrategyFigures | None, StrategyFigures | None]:
    """Our strategy, distca where it ran, and the fastest baseline; None where none ran."""
    known = [one for one in strategies if one.name in STRATEGIES]
    ours = [one for one in known if not STRATEGIES[one.name].is_baseline]
    baselines = [one for one in known if STRATEGIES[one.name].is_baseline]
    ours.sort(key=lambda one: one.name == OURS)
    return ours[-1] if ours else None, max(baselines, key=lambda one: one.tokens_per_second.mean, default=None)


def verdict(strategies: Sequence[StrategyFigures]) -> str:
    """One sentence, or nothing where there is nothing to compare."""
    ours, best = ours_and_best_baseline(strategies)
    if ours is None or best is None:
        return _alone(ours or best)
    ratio = ours.tokens_per_second.mean / best.tokens_per_second.mean
    gain = ours.speedup_over.get(best.name, Spread(ratio, ratio, ratio))
    spread = "" if gain.low == gain.high else f" ({gain.low:.2f} to {gain.high:.2f} over the batches)"
    speeds = f"{ours.tokens_per_second.mean:,.0f} tokens/s against {best.tokens_per_second.mean:,.0f}"
    bound = _bound_words(strategies, ours)
    if gain.mean >= NO_GAIN:
        return (f"{ours.name} trains {gain.mean:.2f}× as fast as {best.name}, the best baseline{spread}: {speeds}"
                f"{bound}.")
    return (f"{ours.name} gains nothing here: it trains {gain.mean:.2f}× as fast as {best.name}, the best baseline"
            f"{spread}, {speeds}{bound}.")


def _bound_words(strategies: Sequence[StrategyFigures], ours: StrategyFigures) -> str:
    floor = next((one for one in strategies if one.name == BOUND), None)
    if floor is None:
        return ""
    share = ours.tokens_per_second.mean / floor.tokens_per_second.mean
    return f", {share:.0%} of what no strategy can beat"


def _alone(one: StrategyFigures | None) -> str:
    if one is None:
        return ""
    kind = "baseline" if STRATEGIES[one.name].is_baseline else "strategy of ours"
    other = "strategy of ours" if kind == "baseline" else "baseline"
    return (f"{one.name}, the best {kind}, trains at {one.tokens_per_second.mean:,.0f} tokens/s; no {other} ran and "
            "fitted to compare it with.")
