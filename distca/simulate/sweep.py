"""Run every strategy on the same batches and say how they compare, each with the choice that suits it best.

A baseline's grid of replicas and context parallelism is swept, and for all strategies alike the pipeline degrees and
numbers of micro-batches that are asked for. The choice with the best mean over all batches is kept, as one would fix it
for a run; ours, whose plans take longest to make, are chosen on the first batches alone. A choice that does not fit the
memory in some batch is out.
"""

from __future__ import annotations

import hashlib
import multiprocessing
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import contextmanager
from dataclasses import dataclass, replace
from math import inf
from typing import Any

from distca.cost.mixed_pool import Cost, MixedPool
from distca.planning.choose import asked_tolerance
from distca.planning.step import StepPlan
from distca.simulate.calls import PlanCosts
from distca.simulate.costs import Costs, check_holds_model, check_holds_step
from distca.simulate.execute import Step, execute
from distca.simulate.outcomes import Comparison, Figures, Outcome
from distca.simulate.setting import Setting
from distca.simulate.strategies import BOUND, STRATEGIES, Choice, StepDocuments, Strategy, bound, check_names
from distca.validation import UserError
from distca.workload.sequences import Source, batch_sequences

BATCHES_TO_CHOOSE_ON = 3  # of our own strategies


@dataclass(frozen=True, slots=True, eq=False)
class Question:
    """What is compared: settings that differ in their pipeline, strategies, and where documents come from."""

    settings: tuple[Setting, ...]
    strategies: tuple[str, ...]
    source: Source
    table: Cost
    tolerance: float | str     # a number for all of ours, or auto: distca chooses it on the first batches
    num_batches: int
    seed: int = 0

    def __post_init__(self) -> None:
        object.__setattr__(self, "strategies", check_names(self.strategies))
        object.__setattr__(self, "tolerance", asked_tolerance(self.tolerance))
        if self.num_batches < 1:
            raise UserError(f"batches is {self.num_batches}; give at least 1")
        self.table.require(self.settings[0].context)
        for setting in self.settings:
            if isinstance(self.table, MixedPool):
                _check_mixed(self.table, setting)
            self.source.check_context(setting.context)
            check_holds_model(setting, self.costs(setting))
            check_holds_step(setting, self.costs(setting))

    def costs(self, setting: Setting) -> Costs:
        return Costs.of(setting.model, setting.cluster, setting.tp, self.table)

    def batch(self, setting: Setting, number: int) -> StepDocuments:
        return StepDocuments(tuple(batch_sequences(self.source, setting.context, setting.num_sequences,
                                                   (self.seed, number))))


def _check_mixed(pool: MixedPool, setting: Setting) -> None:
    """Refuse stages, which would all have the first ranks' seconds, and pools of another size."""
    if setting.pp > 1:
        raise UserError(f"pp is {setting.pp} but cost names servers that differ, which are simulated without a "
                        "pipeline; give --pp 1, or one latency table")
    pool.time(setting.model, setting.tp).check_servers(setting.num_pool)


Key = tuple[int, str, Choice | None]  # setting, strategy, choice
Found = dict[Key, Figures | float | None]  # see batch_figures


def compare(question: Question, *, workers: int = 1, step: Callable[[str], None] = lambda _: None) -> Comparison:
    """Every strategy over all batches; `step` hears of each finished batch."""
    rows: dict[int, Found] = {}
    with _pool(min(workers, question.num_batches)) as run:
        for numbers in (range(BATCHES_TO_CHOOSE_ON), range(BATCHES_TO_CHOOSE_ON, question.num_batches)):
            chosen = _chosen(question, rows)
            for number, found in run(question, numbers[:question.num_batches], chosen):
                rows[number] = found
                step(f"batch {len(rows)} of {question.num_batches}")
    ordered = [rows[number] for number in sorted(rows)]
    best = {name: _best(question, name, ordered) for name in question.strategies}
    floor = best.pop(BOUND, None)
    too_large = [name for name, outcome in best.items() if outcome is None]
    outcomes = [_with_free_links(question, outcome) for outcome in best.values() if outcome is not None]
    if not outcomes and too_large:
        setting = question.settings[0]
        raise UserError(
            f"a step of {setting.num_tokens} tokens does not fit {setting.gpus} GPUs of "
            f"{setting.cluster.memory_bytes / 1e9:.0f} GB with any of: {', '.join(too_large)}; give fewer --sequences, "
            "more --gpus, or a larger --tp or --pp")
    return Comparison(question.source.name, question.settings[0], question.num_batches, question.tolerance,
                      tuple(outcomes), floor, tuple(too_large))


def replay(question: Question, outcome: Outcome, number: int = 0) -> Step:
    """One batch once more under an outcome's choice, with its timeline: one trace per pool rank."""
    setting = outcome.setting
    if outcome.choice is None:
        raise UserError(f"{outcome.name!r} has no timeline; choose a strategy")
    costs = question.costs(setting)
    plan = STRATEGIES[outcome.name].step_plan(outcome.choice, setting, costs, question.batch(setting, number))
    assert plan is not None, "it fitted in the sweep"
    return execute(plan, costs, record=True)


Run = Callable[[Question, Sequence[int], frozenset[Key] | None], Iterator[tuple[int, Found]]]


@contextmanager
def _pool(workers: int) -> Iterator[Run]:
    """What runs batches, here or in several processes."""
    if workers <= 1:
        yield lambda question, numbers, chosen: (
            (number, batch_figures(question, number, chosen)) for number in numbers)
        return
    with ProcessPoolExecutor(workers, multiprocessing.get_context("spawn")) as pool:
        def run(
            question: Question, numbers: Sequence[int], chosen: frozenset[Key] | None
        ) -> Iterator[tuple[int, Found]]:
            waiting = {pool.submit(_figures_or_refusal, question, number, chosen): number for number in numbers}
            for future in as_completed(waiting):
                found = future.result()
                if isinstance(found, str):
                    pool.shutdown(cancel_futures=True)
                    raise UserError(found)
                yield waiting[future], found

        yield run


def _figures_or_refusal(question: Question, number: int, chosen: frozenset[Key] | None) -> Found | str:
    """In a process of its own: a refusal travels as its words, for an exception would arrive as an accident there."""
    try:
        return batch_figures(question, number, chosen)
    except UserError as error:
        return str(error)


def _chosen(question: Question, rows: dict[int, Found]) -> frozenset[Key] | None:
    """What our own strategies keep to after the first batches; None before them."""
    if not rows:
        return None
    ordered = [rows[number] for number in sorted(rows)]
    best = [_best_key(question, name, ordered) for name in question.strategies
            if name != BOUND and not STRATEGIES[name].is_baseline]
    return frozenset(key for key in best if key is not None)


def batch_figures(question: Question, number: int, chosen: frozenset[Key] | None = None) -> Found:
    """All strategies on one batch with all their choices, of ours those that were chosen where some were.

    None where one does not fit the memory; a number for one that was left out: seconds that it is not below, or an
    infinity.
    """
    found: Found = {}
    best = dict.fromkeys(question.strategies, inf)
    for at, setting in enumerate(question.settings):
        costs, batch = question.costs(setting), question.batch(setting, number)
        done: dict[bytes, Figures | None] = {}                   # baselines often choose the same
        for name in question.strategies:
            if name == BOUND:
                floor = bound(setting, costs, batch.lengths())
                found[at, name, None] = Figures.of(floor, floor.seconds)
                continue
            for least, choice in _by_floor(STRATEGIES[name], setting, costs, question.tolerance):
                key = at, name, choice
                is_tried = chosen is None or key in chosen or STRATEGIES[name].is_baseline
                floor_seconds = least if is_tried else inf
                figures = _one(question, key, batch, done) if floor_seconds < best[name] else floor_seconds
                found[key] = figures
                if isinstance(figures, Figures):
                    best[name] = min(best[name], figures.seconds)
    return found


def _by_floor(
    strategy: Strategy[Any], setting: Setting, costs: Costs, tolerance: float | str
) -> list[tuple[float, Choice]]:
    """The most promising choices first."""
    return sorted(((strategy.floor(choice, setting, costs), choice) for choice in strategy.choices(setting, tolerance)),
                  key=lambda one: one[0])


def _one(question: Question, key: Key, batch: StepDocuments, done: dict[bytes, Figures | None]) -> Figures | None:
    at, name, choice = key
    strategy, setting = STRATEGIES[name], question.settings[at]
    costs = question.costs(setting)
    plan = strategy.step_plan(choice, setting, costs, batch)
    if plan is None or not strategy.is_baseline:
        return None if plan is None else _figures(plan, setting, costs, free=True)
    digest = _rows(plan)
    if digest not in done:
        done[digest] = _figures(plan, setting, costs, free=False)
    return done[digest]


def _rows(plan: StepPlan) -> bytes:
    """A digest of where every token of a baseline's step is, which says everything that differs between them."""
    digest = hashlib.blake2b(plan.gather_ranks.to_bytes(4, "little"), digest_size=16)
    for micro_batch in plan.micro_batches:
        for layout in micro_batch.layouts:
            for column in (layout.lengths, layout.document, layout.start, layout.stop, layout.rank):
                digest.update(column.tobytes() + b"|")
    return digest.digest()


def _figures(plan: StepPlan, setting: Setting, costs: Costs, *, free: bool) -> Figures | None:
    known = PlanCosts(plan, costs.attention)
    step = execute(plan, costs, plan_costs=known)
    if step.memory.peak > setting.cluster.memory_bytes:
        return None
    seconds = execute(plan, costs.without_network(), plan_costs=known).seconds if free else step.seconds
    return Figures.of(step, seconds)


def _with_free_links(question: Question, outcome: Outcome) -> Outcome:
    """A baseline's steps with free links, which the sweep leaves out: its plans are many and soon made again."""
    strategy, setting = STRATEGIES[outcome.name], outcome.setting
    if not strategy.is_baseline:
        return outcome
    costs = question.costs(setting).without_network()
    figures = []
    for number, found in enumerate(outcome.figures):
        plan = strategy.step_plan(outcome.choice, setting, question.costs(setting), question.batch(setting, number))
        assert plan is not None, "it fitted in the sweep"
        figures.append(replace(found, free_seconds=execute(plan, costs).seconds))
    return replace(outcome, figures=tuple(figures))


def _best(question: Question, name: str, rows: Sequence[Found]) -> Outcome | None:
    key = _best_key(question, name, rows)
    return None if key is None else Outcome(name, question.settings[key[0]], key[2], tuple(
        figures for row in rows if isinstance(figures := row[key], Figures)))


def _best_key(question: Question, name: str, rows: Sequence[Found]) -> Key | None:
    """The choice with the best mean; where it might be one that batches left out, they run it now."""
    keys = [key for key in rows[0] if key[1] == name]
    while keys := [key for key in keys if all(row[key] is not None for row in rows)]:
        best = min(keys, key=lambda key: sum(_seconds(row[key]) for row in rows))
        left_out = next((number for number, row in enumerate(rows) if isinstance(row[best], float)), None)
        if left_out is None:
            return best
        batch = question.batch(question.settings[best[0]], left_out)
        rows[left_out][best] = _one(question, best, batch, {})
    return None


def _seconds(figures: Figures | float | None) -> float:
    return figures.seconds if isinstance(figures, Figures) else inf if figures is None else figures
