"""Run every strategy on the same batches and compare them, each with its best choice.

The sweep covers pipeline degrees and numbers of micro-batches, and for baselines all replicas and context parallelism.
The choice with the best mean over all batches is kept, because a training run cannot change it. Our strategies, whose
plans take longest to make, choose on the first batches only. A choice that does not fit the memory in some batch is
dropped; where it does not fit, it is tried with more recomputation, and last with offloading.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import cache
from math import inf
from typing import TYPE_CHECKING

from distca.cost.mixed_pool import Cost
from distca.planning.choose import asked_tolerance
from distca.planning.step import StepPlan
from distca.simulate.bounds import bound
from distca.simulate.calls import PlanCosts
from distca.simulate.costs import Costs
from distca.simulate.execute import Step, execute
from distca.simulate.fitting import check_pool
from distca.simulate.memory import check_fits, check_memory
from distca.simulate.outcomes import Comparison, Figures, Outcome
from distca.simulate.setting import Setting
from distca.simulate.strategies import (
    BOUND,
    STRATEGIES,
    Choice,
    GroupChoice,
    StepDocuments,
    check_names,
    our_orders,
)
from distca.validation import UserError
from distca.workload.sequences import Source, batch_sequences

if TYPE_CHECKING:
    from concurrent.futures import ProcessPoolExecutor

BATCHES_TO_CHOOSE_ON = 3  # by our strategies


@dataclass(frozen=True, slots=True, eq=False)
class Question:
    """A comparison to make: settings that differ only in their pipeline, strategies, and the source of documents."""

    settings: tuple[Setting, ...]
    strategies: tuple[str, ...]
    source: Source
    table: Cost
    tolerance: float | str     # of our strategies; auto: distca chooses it on the first batches
    num_batches: int
    seed: int = 0

    def __post_init__(self) -> None:
        object.__setattr__(self, "strategies", check_names(self.strategies))
        object.__setattr__(self, "tolerance", asked_tolerance(self.tolerance))
        if self.num_batches < 1:
            raise UserError(f"batches is {self.num_batches}; give at least 1")
        self.table.require(self.settings[0].context)
        for setting in self.settings:
            check_pool(setting, self.table)
            self.source.check_context(setting.context)
            check_fits(setting, self.costs(setting))
            check_memory(setting, self.costs(setting), our_orders(setting))

    def costs(self, setting: Setting, choice: Choice | None = None) -> Costs:
        """Costs of a setting, and of a choice with what it recomputes."""
        found = replace(Costs.of(setting.model, setting.cluster, setting.tp, self.table), ep=setting.ep)
        return found if choice is None else replace(found, recompute=choice.recompute, gather_ranks=choice.cp)

    def batch(self, setting: Setting, number: int) -> StepDocuments:
        return StepDocuments(tuple(batch_sequences(
            self.source, setting.context, setting.num_sequences, (self.seed, number))))


Key = tuple[int, str, Choice | None]       # setting, strategy, choice
Found = dict[Key, Figures | float | None]  # see batch_figures
Documents = Callable[[int, int], StepDocuments]  # (setting, batch) -> documents, which keep the plans made of them


def compare(question: Question, *, workers: int = 1, update: Callable[[str], None] = lambda _: None) -> Comparison:
    """Run every strategy over all batches; `update` is the progress callback, called after each batch."""
    done: dict[int, Found] = {}
    documents = _documents_of(question)
    count, workers = question.num_batches, min(workers, question.num_batches)
    with _processes(workers) as pool:
        for numbers in (range(count)[:BATCHES_TO_CHOOSE_ON], range(count)[BATCHES_TO_CHOOSE_ON:]):
            chosen = _chosen(question, [done[number] for number in sorted(done)], documents)
            for number, found in _run(question, documents, numbers, chosen, pool):
                done[number] = found
                update(f"batch {len(done)} of {count}")
    ordered = [done[number] for number in sorted(done)]
    best = {name: _best_outcome(question, documents, name, ordered) for name in question.strategies}
    floor = best.pop(BOUND, None)
    too_large = [name for name, outcome in best.items() if outcome is None]
    outcomes = [_with_free_links(question, outcome) for outcome in best.values() if outcome is not None]
    if not outcomes and too_large:
        setting = question.settings[0]
        raise UserError(
            f"a step of {setting.num_tokens} tokens does not fit {setting.gpus} GPUs of "
            f"{setting.cluster.memory_bytes / 1e9:.0f} GB with any of: {', '.join(too_large)}; give fewer --sequences, "
            "more --gpus, or a larger --tp or --pp")
    return Comparison(question.source.name, question.settings[0], count, question.tolerance, tuple(outcomes), floor,
                      tuple(too_large))


def _processes(workers: int) -> AbstractContextManager[ProcessPoolExecutor | None]:
    """Start processes for several workers, else none: a browser has no processes, and one worker runs there too."""
    if workers <= 1:
        return nullcontext()
    import multiprocessing
    from concurrent.futures import ProcessPoolExecutor

    return ProcessPoolExecutor(workers, multiprocessing.get_context("spawn"))


def replay(question: Question, outcome: Outcome) -> Step:
    """Run the first batch again under an outcome's choice, and record one trace per pool rank."""
    if outcome.choice is None:
        raise UserError(f"{outcome.name!r} has no timeline; choose a strategy")
    return execute(_plan_again(question, outcome, 0), question.costs(outcome.setting, outcome.choice), record=True)


def _plan_again(question: Question, outcome: Outcome, number: int) -> StepPlan:
    setting = outcome.setting
    assert outcome.choice is not None, "the bound has no plan"
    plan = outcome.choice.step_plan(setting, question.costs(setting, outcome.choice), question.batch(setting, number))
    assert plan is not None, "the choice fitted in the sweep"
    return plan


def _documents_of(question: Question) -> Documents:
    return cache(lambda at, number: question.batch(question.settings[at], number))


def _run(
    question: Question, documents: Documents, numbers: Sequence[int], chosen: frozenset[Key] | None,
    pool: ProcessPoolExecutor | None,
) -> Iterator[tuple[int, Found]]:
    """Run batches in this process or in the pool's, and yield each as it is done."""
    if pool is None:
        yield from ((number, batch_figures(question, number, chosen, documents)) for number in numbers)
        return
    from concurrent.futures import as_completed

    waiting = {pool.submit(batch_figures, question, number, chosen): number for number in numbers}
    try:
        for future in as_completed(waiting):
            yield waiting[future], future.result()
    except UserError:
        pool.shutdown(cancel_futures=True)
        raise


def _chosen(question: Question, batches: Sequence[Found], documents: Documents) -> frozenset[Key] | None:
    """Return the choices to run on later batches; None before the first ones have run.

    For ours it is the best choice; for baselines, whose plans are quick to make, the best in each of their two best
    orders, and that for each way to pack rows.
    """
    if not batches:
        return None
    found: list[Key | None] = []
    for name in question.strategies:
        for packing in sorted({key[2].packing for key in batches[0] if key[1] == name and key[2] is not None}):
            found.append(best := _best_key(question, documents, name, batches, packing))
            if best is not None and best[2] is not None and STRATEGIES[name].is_baseline:
                found.append(_best_key(question, documents, name, batches, packing, best[2].order))
    return frozenset(key for key in found if key is not None)


def batch_figures(question: Question, number: int, chosen: frozenset[Key] | None = None,
                  documents: Documents | None = None) -> Found:
    """Run all strategies on one batch with all their choices, and with the variants of the best one.

    If `chosen` is given, our strategies run only these, and variants only if these name them. A choice that does not
    fit the memory maps to None. A choice that was skipped maps to a lower bound on its seconds, which may be infinite.
    """
    found: Found = {}
    documents = documents or _documents_of(question)
    places = [(setting, question.costs(setting), documents(at, number), _Done())
              for at, setting in enumerate(question.settings)]
    for name in question.strategies:
        if name == BOUND:
            for at, (setting, costs, batch, _) in enumerate(places):
                floor = bound(setting, costs, batch.lengths())
                found[at, name, None] = Figures.of(floor, floor.seconds)
            continue
        strategy, tried = STRATEGIES[name], dict[tuple[int, str, Choice], float]()
        for at, (setting, costs, batch, _) in enumerate(places):
            if strategy.is_baseline or chosen is None:
                tried |= {(at, name, choice): choice.floor(setting, costs, batch)
                          for choice in strategy.choices(setting, question.tolerance)}
        for key in sorted(tried, key=lambda key: tried[key]):    # the most promising first
            _attempt(question, key, *places[key[0]][2:], found)
        for again in (key for key in chosen or () if key[1] == name):
            if not isinstance(found.get(again), Figures):
                found[again] = _try(question, again, *places[again[0]][2:])
        for at, best in [] if chosen is not None else _best_of_packings(found, name):
            for variant in strategy.variants(places[at][0], best, question.tolerance, *places[at][1:3]):
                _attempt(question, (at, name, variant), *places[at][2:], found, skips=False)
    return found


def _best_of_packings(found: Found, name: str) -> list[tuple[int, Choice]]:
    """Return the best setting and choice of a strategy for each way to pack rows, as they may suit other orders."""
    best: dict[str, tuple[int, Choice]] = {}
    for at, _, choice in sorted((key for key in found if key[1] == name), key=lambda key: _seconds(found[key])):
        if choice is not None:
            best.setdefault(choice.packing, (at, choice))
    return list(best.values())


def _attempt(
    question: Question, key: tuple[int, str, Choice], batch: StepDocuments, done: _Done, found: Found, *,
    skips: bool = True,
) -> None:
    """Run a choice with the least recomputation that fits and record its figures.

    What is slower than another choice, by its floor or because it recomputes more than needed, is skipped.
    """
    at, name, choice = key
    setting, enough = question.settings[at], 0.0
    best = min((_seconds(figures) for other, figures in found.items()
                if other[1] == name and isinstance(figures, Figures)), default=inf)
    for one in choice.savings(setting.modes):
        least = max(enough, one.floor(setting, question.costs(setting, one), batch) if skips else 0.0)
        if (at, name, one) not in found:
            found[at, name, one] = least if enough or least >= best else _try(question, (at, name, one), batch, done)
        enough = max(enough, 0.0 if found[at, name, one] is None else _seconds(found[at, name, one]))


class _Done:
    """Figures of baselines' plans, and costs of their calls, which do not depend on their order."""

    def __init__(self) -> None:
        self.figures: dict[tuple[bytes, str, int, str], Figures | None] = {}
        self.calls: dict[bytes, PlanCosts] = {}


def _try(question: Question, key: Key, batch: StepDocuments, done: _Done) -> Figures | None:
    """Run one choice on a batch."""
    at, _, choice = key
    setting = question.settings[at]
    costs = question.costs(setting, choice)
    plan = None if choice is None else choice.step_plan(setting, costs, batch)
    if plan is None:
        return None
    if not isinstance(choice, GroupChoice):
        return _figures(plan, costs, PlanCosts(plan, costs.attention), setting.max_bytes, free=True)
    digest = _digest(plan)
    order = digest, choice.order, choice.moved, choice.recompute
    if order not in done.figures:
        calls = done.calls.setdefault(digest, PlanCosts(plan, costs.attention))
        done.figures[order] = _figures(plan, costs, calls, setting.cluster.memory_bytes, free=False)
    return done.figures[order]


def _digest(plan: StepPlan) -> bytes:
    """Digest of the placement of a baseline's tokens, in which alone baselines' plans of one order differ."""
    digest = hashlib.blake2b(plan.gather_ranks.to_bytes(4, "little"), digest_size=16)
    for micro_batch in plan.micro_batches:
        for layout in micro_batch.layouts:
            for column in (layout.lengths, layout.document, layout.start, layout.stop, layout.rank):
                digest.update(column.tobytes() + b"|")
    return digest.digest()


def _figures(plan: StepPlan, costs: Costs, calls: PlanCosts, most_bytes: float, *, free: bool) -> Figures | None:
    step = execute(plan, costs, plan_costs=calls)
    if step.memory.peak > most_bytes:
        return None
    return Figures.of(step, execute(plan, costs.without_network(), plan_costs=calls).seconds if free else step.seconds)


def _with_free_links(question: Question, outcome: Outcome) -> Outcome:
    """Plan a baseline's steps again and time them with free links, which the sweep of its many choices leaves out."""
    if not STRATEGIES[outcome.name].is_baseline:
        return outcome
    costs = question.costs(outcome.setting, outcome.choice).without_network()
    return replace(outcome, figures=tuple(
        replace(found, free_seconds=execute(_plan_again(question, outcome, number), costs).seconds)
        for number, found in enumerate(outcome.figures)))


def _best_outcome(question: Question, documents: Documents, name: str, batches: Sequence[Found]) -> Outcome | None:
    key = _best_key(question, documents, name, batches)
    return None if key is None else Outcome(name, question.settings[key[0]], key[2], tuple(
        figures for found in batches if isinstance(figures := found[key], Figures)))


def _best_key(question: Question, documents: Documents, name: str, batches: Sequence[Found],
              packing: str | None = None, not_order: str = "") -> Key | None:
    """Return the choice with the best mean, of a packing and in other orders if asked; batches that skipped it run it.

    A variant that the first batches did not all try is tried by all of them.
    """
    for number, found in enumerate(batches):
        for key in {key: None for other in batches for key in other if key not in found}:
            found[key] = 0.0 if number < BATCHES_TO_CHOOSE_ON else inf
    keys = [key for key in batches[0] if key[1] == name and (
        packing is None or (key[2] is not None and key[2].packing == packing and key[2].order != not_order))]
    while keys := [key for key in keys if all(found[key] is not None for found in batches)]:
        best = min(keys, key=lambda key: sum(_seconds(found[key]) for found in batches))
        skipped = next((number for number, found in enumerate(batches) if isinstance(found[best], float)), None)
        if skipped is None:
            return best
        batches[skipped][best] = _try(question, best, documents(best[0], skipped), _Done())
    return None


def _seconds(figures: Figures | float | None) -> float:
    return figures.seconds if isinstance(figures, Figures) else inf if figures is None else figures
