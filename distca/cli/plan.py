"""`distca plan`: what would balanced attention save on your lengths, before renting GPUs?"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import Annotated, Any

import numpy as np
import typer
from rich.console import Console

from distca.cli.batches import (
    COST_HELP,
    DEFAULT_BATCHES,
    DEFAULT_RANKS,
    DEFAULT_TOKENS_PER_RANK,
    SOURCE_HELP,
    BatchesAsked,
    DealtBatches,
    DocumentBatch,
    read_batches,
    without_spanning,
)
from distca.cli.options import (
    AUTO_HELP,
    COUNT,
    TOLERANCE,
    TOLERANCE_HELP,
    Column,
    Format,
    StepHeard,
    Tokenizer,
    count,
    one_source,
    page_writer,
    plot_writer,
    progress,
    tolerance_option,
)
from distca.corpus.lengths import Reading
from distca.cost.attention_time import AttentionTime
from distca.cost.mixed_pool import MixedTime, find_cost, time_of
from distca.cost.network import find_cluster
from distca.models import model_named
from distca.planning.choose import AUTO, DEFAULT_TOLERANCE, StepSeconds, plan_step
from distca.planning.plan import Plan
from distca.planning.step import StepPlan
from distca.planning.tasks import tasks_at_home
from distca.report.figures import PlannedBatch
from distca.report.planned_batches import PlannedBatches, print_batches
from distca.simulate.costs import TABLE_CLUSTER
from distca.simulate.execute import step_seconds
from distca.spec import ModelShape
from distca.validation import MAX_RANKS, UNITS_HELP, UserError, check_whole
from distca.workload.packing import pack
from distca.workload.topology import Topology


@dataclass(frozen=True, slots=True)
class PlanPool:
    """Who serves, and how their work is counted."""

    model: ModelShape
    tp: int
    tolerance: float | StepSeconds     # or what predicts a step's seconds, by which it is chosen for every batch
    dedicated: int
    cost: AttentionTime | None
    ranks_per_node: int | None = None  # None: unknown
    nodes_per_pod: int = 0

    def topology(self, ranks: int) -> Topology | None:
        """Dedicated servers fill nodes as ranks do."""
        return None if self.ranks_per_node is None else Topology.regular(
            ranks + self.dedicated, self.ranks_per_node, self.nodes_per_pod)

    def speed(self, ranks: int) -> np.ndarray:
        return np.ones(ranks + self.dedicated)

    def step(self, lengths: np.ndarray, ranks: int, placement: str) -> StepPlan:
        """One attention call, forward and backward, at the tolerance of the whole model's step in two halves."""
        plan = partial(plan_step, [lengths], self.model, num_data=ranks, tp=self.tp, placement=placement,
                       speed=self.speed(ranks), cost=self.cost, topology=self.topology(ranks))
        if not callable(self.tolerance):
            return plan(layers=(1,), ping_pong=False, tolerance=self.tolerance)
        has_halves = int(lengths.sum()) // ranks % 2 == 0
        whole = plan(layers=(self.model.num_layers,), ping_pong=has_halves, tolerance=self.tolerance)
        call = plan(layers=(1,), ping_pong=False, tolerance=whole.plans[0].tolerance)
        return replace(call, tried=whole.tried)


def plan_command(
    source: Annotated[list[str], typer.Argument(metavar="SOURCE", help=SOURCE_HELP)],
    model: Annotated[str, typer.Option(help="Named model, for the bytes of a token.")] = "llama3-8b",
    tolerance: Annotated[Any, typer.Option(
        parser=tolerance_option, metavar=TOLERANCE,
        help=f"{TOLERANCE_HELP}; auto: what makes the model's step quickest by --cost on --cluster, {AUTO_HELP}.",
    )] = DEFAULT_TOLERANCE,
    tp: Annotated[int, typer.Option(
        parser=count, metavar=COUNT, help="Tensor-parallel size: heads are divided by it.")] = 1,
    placement: Annotated[str, typer.Option(
        help="given: documents stay where the loader puts them; balanced: placement chooses.")] = "given",
    dedicated: Annotated[int, typer.Option(
        parser=count, metavar=COUNT, help="Servers that own no tokens, besides the ranks.")] = 0,
    ranks_per_node: Annotated[int | None, typer.Option(
        parser=count, metavar=COUNT,
        help="Ranks that share a node: work leaves a node only as far as the tolerance demands. Flat unless given.",
    )] = None,
    cluster: Annotated[str | None, typer.Option(
        help="Instead of --ranks-per-node: a cluster, by name or TOML file, whose nodes the ranks fill.")] = None,
    cost: Annotated[str | None, typer.Option(
        help=f"{COST_HELP} Work is then seconds instead of causal pairs.")] = None,
    ranks: Annotated[int | None, typer.Option(
        parser=count, metavar=COUNT,
        help=f"Ranks that own tokens; {DEFAULT_RANKS} unless SOURCE says. {UNITS_HELP}")] = None,
    tokens_per_rank: Annotated[int | None, typer.Option(
        parser=count, metavar=COUNT,
        help=f"Tokens of a rank in a batch; {DEFAULT_TOKENS_PER_RANK} unless given.")] = None,
    batches: Annotated[int | None, typer.Option(
        parser=count, metavar=COUNT,
        help=f"Batches to deal from a file, {DEFAULT_BATCHES}, or to sample, 1; the answer is their mean and the worst."
    )] = None,
    whole: Annotated[bool, typer.Option("--whole", help="Plan all documents of a file as one batch.")] = False,
    column: Column = None,
    format_: Format = None,
    tokenizer: Tokenizer = None,
    seed: Annotated[int | None, typer.Option(help="Of a sampler, or of a file's order; 0 unless given.")] = None,
    max_document: Annotated[int | None, typer.Option(
        parser=count, metavar=COUNT, help="Cut longer documents to this many tokens.")] = None,
    no_spanning: Annotated[bool, typer.Option(
        "--no-spanning", help="Cut documents at the ends of ranks; the parts do not attend to each other.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of the tables.")] = False,
    plot: Annotated[Path | None, typer.Option(
        help="Also draw work and bytes per rank into this file; of several batches the worst.")] = None,
    html: Annotated[Path | None, typer.Option(
        help="Also write a report page, which opens offline; of several batches the worst.")] = None,
) -> None:
    """Plan the core attention of batches and show it before and after."""
    check_whole("dedicated", dedicated, least=0, most=MAX_RANKS, why="as many servers as a plan has been tried with")
    asked = BatchesAsked(one_source(source), ranks, tokens_per_rank, seed, max_document, batches, whole,
                         Reading(format_, column, tokenizer))
    draw = plot_writer("plot", plot) if plot else None
    write_page = page_writer("html", html) if html else None
    shape = model_named(model)
    seconds = None if cost is None else time_of(find_cost(cost), shape, tp)
    if tolerance == AUTO:
        tolerance = _predicted(shape, tp, cost, ranks_per_node, cluster)
    pool = PlanPool(shape, tp, tolerance, dedicated, seconds, *_nodes(ranks_per_node, cluster, tp))
    if pool.cost is not None and pool.cost.note:
        print(f"distca: {pool.cost.note}", file=sys.stderr)
    _warm_up(pool, placement)
    planned = plan_asked(asked, pool, placement, no_spanning)
    if draw:
        draw(planned.shown)
    if write_page:
        write_page(planned.page())
    if as_json:
        print(json.dumps(planned.as_json()))
    else:
        print_batches(planned, Console())
        if plot:
            print(f"Drawn in {plot}.")
        if html:
            print(f"Written to {html}.")
    if not planned.are_valid:
        raise typer.Exit(1)


def plan_asked(asked: BatchesAsked, pool: PlanPool, placement: str, no_spanning: bool = False) -> PlannedBatches:
    """Read and plan what was asked for, and say meanwhile how far it is."""
    with progress(1 + 4 * (asked.batches or DEFAULT_BATCHES)) as step:
        step("reading documents")
        dealt = read_batches(asked, lambda number: step(f"{number:,} documents", 0))
        return PlannedBatches.of(_planned(dealt, pool, placement, no_spanning, step), dealt.source, note=dealt.note,
                                 corpus=dealt.corpus, is_dealt=dealt.is_dealt)


def _planned(
    dealt: DealtBatches, pool: PlanPool, placement: str, no_spanning: bool, step: StepHeard
) -> Iterator[PlannedBatch]:
    for batch in dealt.batches:
        yield plan_batch(without_spanning(batch) if no_spanning else batch, pool, placement, step)


def plan_batch(batch: DocumentBatch, pool: PlanPool, placement: str, step: StepHeard) -> PlannedBatch:
    """Plan, prove and measure. Only placing and balancing are timed."""
    cost = pool.cost
    if cost is not None:
        for one in cost.kinds if isinstance(cost, MixedTime) else (cost,):
            one.table.require(int(batch.lengths.max()))
    step("placing documents and balancing attention")
    begin = perf_counter()
    planned = pool.step(batch.lengths, batch.ranks, placement)
    plan_seconds = perf_counter() - begin
    plan, backward = planned.plans[0], planned.plans[-1]
    step("proving the plan")
    invalid = _failed_proof(plan) or _failed_proof(backward)
    step("counting bytes")
    in_order = pack(batch.lengths, ranks=batch.ranks, tokens_per_rank=batch.tokens_per_rank)
    topology = pool.topology(batch.ranks)
    speeds = np.ones(batch.ranks) if cost is None else cost.speeds(batch.ranks)
    before = Plan(in_order, tasks_at_home(in_order), speeds, plan.tolerance, pool.model, pool.tp, cost,
                  topology=None if topology is None else topology.first(batch.ranks))
    return PlannedBatch.of(plan, batch.source, before=before, backward=backward, placement=placement,
                           plan_seconds=plan_seconds, invalid=invalid, placement_used=planned.placement,
                           tried=planned.tried)


def _predicted(
    model: ModelShape, tp: int, cost: str | None, ranks_per_node: int | None, cluster: str | None
) -> StepSeconds:
    """What a step takes on the cluster, or on nodes of so many ranks with an H200's links."""
    if cost is None:
        raise UserError("tolerance is 'auto' but cost is not given; give --cost, the latency table it is chosen by")
    machines = find_cluster(cluster or TABLE_CLUSTER)
    if ranks_per_node is not None:
        machines = replace(machines, gpus_per_node=ranks_per_node * tp)
    return step_seconds(model, machines, tp, find_cost(cost))


def _nodes(ranks_per_node: int | None, cluster: str | None, tp: int) -> tuple[int | None, int]:
    """Ranks that share a node and nodes that share a pod, as the options say."""
    if cluster is None:
        if ranks_per_node is not None:
            check_whole("ranks_per_node", ranks_per_node, most=MAX_RANKS)
        return ranks_per_node, 0
    if ranks_per_node is not None:
        raise UserError(f"ranks_per_node is {ranks_per_node} and cluster {cluster!r}; give one of them")
    shape = find_cluster(cluster)
    return shape.ranks_per_node(tp), shape.nodes_per_pod


def _failed_proof(plan: Plan) -> str | None:
    try:
        plan.validate()
    except ValueError as error:
        return str(error)
    return None


def _warm_up(pool: PlanPool, placement: str) -> None:
    """Plan a thimbleful, so that first-call costs are not timed and wrong options are refused before long work."""
    if isinstance(pool.cost, MixedTime):
        pool = replace(pool, cost=pool.cost.kinds[0])            # for a pool of any size
    pool.step(np.array([3072, 512, 512]), 2, placement).plans[0].summary()
