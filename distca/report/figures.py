"""Figures that pages, plots and tables show: a batch before and after planning, strategies, timelines, a run.

One type per thing, shared by the report and the command line. A page leaves out sections without figures.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from distca.cost.network import MeasuredNetwork
from distca.planning.plan import Plan, PlanSummary
from distca.planning.tasks import tasks_at_home
from distca.simulate.memory import Memory
from distca.simulate.outcomes import Comparison
from distca.simulate.strategies import BOUND, STRATEGIES
from distca.trace import RankFigures, StepTrace
from distca.validation import UserError, check_name, check_number, short

OURS = "distca"
NO_GAIN = 1.005  # a speedup that rounds to 1.00 is no gain
_UNITS = ((1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB"))


@dataclass(frozen=True, slots=True, eq=False)
class PlannedBatch:
    """A batch before planning (documents in order, queries computed on their home ranks) and after."""

    source: str           # where the documents come from, to be printed
    placement: str        # as the user asked
    plan: Plan
    before: PlanSummary   # over the ranks that own tokens
    after: PlanSummary    # over all servers: the ranks, then the dedicated ones
    backward: PlanSummary  # of the backward plan if work is in seconds, else of the forward plan
    plan_seconds: float = 0.0
    invalid: str | None = None  # why the plan failed validation
    placement_used: str | None = None  # `given` if `balanced` was asked for and would send more
    tried: tuple[tuple[float, float], ...] = ()  # candidate tolerances with the step's seconds

    @classmethod
    def of(
        cls, plan: Plan, source: str, *, before: Plan | None = None, backward: Plan | None = None,
        placement: str = "given", invalid: str | None = None,
    ) -> PlannedBatch:
        """Summarize every plan once; by default `before` computes each query of `plan` on its home rank."""
        if before is None:
            ranks = plan.layout.num_ranks
            speed = np.ones(ranks) if plan.cost is None else plan.cost.speeds(ranks)
            before = replace(plan, tasks=tasks_at_home(plan.layout), speed=speed, limit=None)
        after = plan.summary()
        return cls(source, placement, plan, before.summary(), after,
                   after if backward is None or backward is plan else backward.summary(), invalid=invalid)

    @property
    def num_ranks(self) -> int:
        return self.plan.layout.num_ranks

    @property
    def num_servers(self) -> int:
        return len(self.after.work)

    @property
    def tokens_per_rank(self) -> int:
        return int(self.plan.layout.tokens_per_rank()[0])

    @property
    def exchange_seconds(self) -> float | None:
        """Forward exchange of the busiest rank at the profile's measured bandwidth; None if no network was measured."""
        network = None if self.plan.cost is None else MeasuredNetwork.of(self.plan.cost.table)
        busiest = float(max(self.after.bytes_sent.max(), self.after.bytes_received.max()))
        return None if network is None else network.seconds(busiest)

    @property
    def pool_text(self) -> str:
        dedicated = self.num_servers - self.num_ranks
        servers = f" and {count_text(dedicated, 'dedicated server')}" if dedicated else ""
        topology = self.plan.topology
        nodes = "" if topology is None else (
            f" in {count_text(topology.num_nodes, 'node')} of up to {topology.ranks_per_node}"
            + (f" and {topology.num_pods} pods" if topology.num_pods > 1 else ""))
        return (f"{count_text(self.num_ranks, 'rank')} of {self.tokens_per_rank:,} tokens{servers}{nodes}, "
                f"{count_text(self.plan.layout.num_documents, 'document')}")

    @property
    def options_text(self) -> str:
        tp = f", tp {self.plan.tp}" if self.plan.tp > 1 else ""
        kept = "" if self.placement_used in (None, self.placement) else f" ({self.placement_used}, which sends less)"
        used, seconds = self.plan.tolerance, dict(self.tried)
        others = ", ".join(f"{1e3 * value:.4g} at {one:g}" for one, value in self.tried if one != used)
        why = f" (a step of {1e3 * seconds[used]:.4g} ms, {others})" if seconds else ""
        return f"{self.plan.model.name}{tp}, {self.placement} placement{kept}, tolerance {used:g}{why}"

    def as_json(self) -> dict[str, object]:
        plan, after, backward, topology = self.plan, self.after, self.backward, self.plan.topology
        return {
            "ranks": self.num_ranks, "servers": self.num_servers, "tokens_per_rank": self.tokens_per_rank,
            "documents": plan.layout.num_documents, "model": plan.model.name, "tp": plan.tp,
            "placement": self.placement, "placement_used": self.placement_used or self.placement,
            "tasks": after.num_tasks, "valid": self.invalid is None, "tolerance": plan.tolerance,
            "step_seconds_by_tolerance": {f"{one:g}": seconds for one, seconds in self.tried} or None,
            "work_max_over_mean_before": self.before.work_max_over_mean,
            "work_max_over_mean": after.work_max_over_mean, "limit": plan.limit,
            "bytes_total": after.bytes_total, "bytes_sent_max": int(after.bytes_sent.max()),
            "bytes_received_max": int(after.bytes_received.max()),
            "ranks_per_node": None if topology is None else topology.ranks_per_node,
            "bytes_between_nodes": after.bytes_between_nodes, "bytes_between_nodes_max": after.bytes_between_nodes_max,
            "bytes_between_pods": after.bytes_between_pods, "bytes_between_pods_max": after.bytes_between_pods_max,
            "bytes_all_gather": after.bytes_all_gather, "bytes_backward_total": after.backward_bytes_total,
            "smallest_shard": after.smallest_shard, "plan_seconds": self.plan_seconds,
            "attention_seconds": after.seconds, "attention_seconds_backward": backward.seconds,
            "work_max_over_mean_backward": backward.work_max_over_mean, "exchange_seconds": self.exchange_seconds,
        }


@dataclass(frozen=True, slots=True)
class Spread:
    """A mean, and the range over the batches."""

    mean: float
    low: float
    high: float


@dataclass(frozen=True, slots=True, eq=False)
class StrategyFigures:
    """One strategy of a comparison; shares are of the step's time."""

    name: str
    tokens_per_second: Spread
    step_seconds: float
    idle_share: float
    exposed_communication_share: float
    peak_memory_bytes: float
    work_max_over_mean: float
    speedup_over: dict[str, Spread] = field(default_factory=dict)  # by the name of another strategy of the comparison

    @classmethod
    def from_json(cls, name: str, content: Any, num_tokens: float | None) -> StrategyFigures:
        """Read a strategy as `distca simulate --json` prints it; `num_tokens` per step gives the range of speeds."""
        where = f"strategies.{check_name('the name of a strategy', name)}"
        one = _object(where, content)

        def number(key: str) -> float:
            return check_number(f"{where}.{key}", one.get(key))

        speed = number("tokens_per_second")
        spread = Spread(speed, speed, speed)
        if num_tokens is not None and "step_seconds_range" in one:
            fastest, slowest = _range(f"{where}.step_seconds_range", one["step_seconds_range"], above=0)
            spread = Spread(speed, num_tokens / slowest, num_tokens / fastest)
        ratios, ranges = (_object(f"{where}.{key}", one.get(key, {})) for key in ("speedup_over", "speedup_range_over"))
        return cls(
            name, spread, number("step_seconds"), number("idle_share"), number("exposed_communication_share"),
            1e9 * number("peak_memory_gb"), number("work_max_over_mean"),
            {other: Spread(check_number(f"{where}.speedup_over.{other}", ratio),
                           *_range(f"{where}.speedup_range_over.{other}", ranges.get(other, [ratio, ratio])))
             for other, ratio in ratios.items()})


def strategies_from_json(content: Any) -> tuple[StrategyFigures, ...]:
    """Read the strategies that `distca simulate --json` printed; a UserError names the field that is wrong."""
    tokens = content.get("tokens_per_step")
    if tokens is not None:
        tokens = check_number("tokens_per_step", tokens)
    found = tuple(StrategyFigures.from_json(name, one, tokens)
                  for name, one in _object("strategies", content["strategies"]).items())
    unknown = {name for one in found for name in one.speedup_over} - {one.name for one in found}
    if unknown or not found:
        what = f"are compared with {short(min(unknown))}, which is none of them" if unknown else "are empty"
        raise UserError(f"strategies {what}; give what distca simulate --json printed")
    return found


def _object(field: str, value: Any) -> Mapping[str, Any]:
    if not isinstance(value, dict):
        raise UserError(f"{field} is {short(value)}; give an object of names and values")
    return value


def _range(field: str, value: Any, above: float = -np.inf) -> tuple[float, float]:
    if not isinstance(value, list) or len(value) != 2:
        raise UserError(f"{field} is {short(value)}; give the smallest and the largest")
    low, high = (check_number(field, one, above=above) for one in value)
    return low, high


@dataclass(frozen=True, slots=True, eq=False)
class Timeline:
    """Traces of one step on all ranks, measured or predicted."""

    title: str
    traces: tuple[StepTrace, ...]


@dataclass(frozen=True, slots=True, eq=False)
class BatchColumns:
    """Figures of several planned batches; work is the slowest server's, relative to the mean."""

    documents: np.ndarray  # [batches]
    before: np.ndarray     # [batches]
    after: np.ndarray      # [batches]
    num_bytes: np.ndarray  # [batches] a layer, forward
    shown: int             # number, from 1, of the batch that the page shows in full


@dataclass(frozen=True, slots=True, eq=False)
class RunFigures:
    """Figures of a run's steps; NaN where a step has none."""

    step: np.ndarray                             # [steps]
    series: tuple[tuple[str, np.ndarray], ...]   # label with its unit, [steps]
    name: str = "this run"


@dataclass(frozen=True, slots=True)
class Wait:
    """One of a rank's waits in a step."""

    rank: int
    waits_for: str       # the rank that began to send last, or what else held it up
    seconds: float
    start_seconds: float
    num_bytes: int


@dataclass(frozen=True, slots=True, eq=False)
class ReportData:
    """Content of a report page. `work`, `transfers` and so on come from `plan`, or else from `ranks`."""

    title: str
    subtitle: str = ""
    facts: tuple[tuple[str, str], ...] = ()      # name and value, for the top of the page
    comparison: tuple[StrategyFigures, ...] = ()
    batches: BatchColumns | None = None
    detail: tuple[str, str, tuple[tuple[str, str], ...]] | None = None  # title, text and facts of the batch or step
    plan: PlannedBatch | None = None             # that is shown in full
    ranks: RankFigures | None = None
    timelines: tuple[Timeline, ...] = ()
    waits: tuple[Wait, ...] | None = None        # the largest, of the first timeline
    memory: Memory | None = None
    memory_capacity_bytes: float | None = None   # per rank
    runs: tuple[RunFigures, ...] = ()            # one, or two to compare
    sides: tuple[tuple[str, ...], ...] = ()      # name of a fact and its value in each of two runs
    settings: tuple[tuple[str, ...], ...] = ()   # name and the value in each run
    verdict: str = ""                            # the result in a sentence or two, at the top of the page


def strategies_of(comparison: Comparison) -> tuple[StrategyFigures, ...]:
    """Figures of every strategy and of the bound, each compared with all others."""
    return tuple(StrategyFigures.from_json(one.name, one.as_json(comparison.entries), one.setting.num_tokens)
                 for one in comparison.entries)


def comparison_page(comparison: Comparison) -> ReportData:
    setting = comparison.setting
    known = {"model": setting.model.name, "cluster": setting.cluster.name, "gpus": f"{setting.gpus:,}",
             "tp": setting.tp, **({} if setting.model.experts is None else {"ep": setting.ep}), "pp": setting.pp,
             "context": f"{setting.context:,}", "data": comparison.source, "batches": comparison.num_batches,
             "tolerance": comparison.tolerance}
    strategies = strategies_of(comparison)
    return ReportData(
        "Strategies on the same documents", ", ".join(f"{name} {value}" for name, value in known.items()),
        comparison=strategies, verdict=verdict(strategies))


def ours_and_best_baseline(
    strategies: Sequence[StrategyFigures],
) -> tuple[StrategyFigures | None, StrategyFigures | None]:
    """Return our strategy (distca if it ran) and the fastest baseline; None for either that did not run."""
    known = [one for one in strategies if one.name in STRATEGIES]
    ours = [one for one in known if not STRATEGIES[one.name].is_baseline]
    baselines = [one for one in known if STRATEGIES[one.name].is_baseline]
    ours.sort(key=lambda one: one.name == OURS)
    return ours[-1] if ours else None, max(baselines, key=lambda one: one.tokens_per_second.mean, default=None)


def verdict(strategies: Sequence[StrategyFigures]) -> str:
    """Compare our strategy with the best baseline in one sentence; empty if no strategy ran."""
    ours, best = ours_and_best_baseline(strategies)
    if ours is None or best is None:
        if (one := ours or best) is None:
            return ""
        kind, other = ("baseline", "strategy of ours") if ours is None else ("strategy of ours", "baseline")
        return (f"{one.name}, the best {kind}, trains at {one.tokens_per_second.mean:,.0f} tokens/s; no {other} ran "
                "and fitted to compare it with.")
    ratio = ours.tokens_per_second.mean / best.tokens_per_second.mean
    gain = ours.speedup_over.get(best.name, Spread(ratio, ratio, ratio))
    spread = "" if gain.low == gain.high else f" ({gain.low:.2f} to {gain.high:.2f} over the batches)"
    speeds = f"{ours.tokens_per_second.mean:,.0f} tokens/s against {best.tokens_per_second.mean:,.0f}"
    floor = next((one for one in strategies if one.name == BOUND), None)
    if floor is not None:
        speeds += f", {ours.tokens_per_second.mean / floor.tokens_per_second.mean:.0%} of what no strategy can beat"
    trains = f"trains {gain.mean:.2f}× as fast as {best.name}, the best baseline{spread}"
    memory = (f"A GPU holds at most {byte_text(ours.peak_memory_bytes)}, against {byte_text(best.peak_memory_bytes)} "
              f"with {best.name}.")
    if gain.mean >= NO_GAIN:
        return f"{ours.name} {trains}: {speeds}. {memory}"
    return f"{ours.name} gains nothing here: it {trains}, {speeds}. {memory}"


def byte_text(count: float) -> str:
    for unit, name in _UNITS:
        if count >= unit:
            return f"{count / unit:.3g} {name}" if count < 1000 * unit else f"{count / unit:,.0f} {name}"
    return f"{count:.0f} B"


def seconds_text(seconds: float) -> str:
    return f"{seconds:.2f} s" if seconds >= 1 else f"{seconds * 1e3:.3g} ms"


def count_text(number: int, noun: str, several: str = "") -> str:
    return f"{number:,} {noun if number == 1 else several or f'{noun}s'}"


def over_mean(values: np.ndarray) -> np.ndarray:
    """Divide values by their mean; return ones if all are zero."""
    mean = values.mean()
    return values / mean if mean > 0 else np.ones_like(values)
