"""`distca plan`: show what balanced attention saves on your lengths, without a GPU."""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import Annotated, Any

import numpy as np
import typer
from rich.console import Console

from distca.cli import options
from distca.cli.batches import (
    COST_HELP,
    DEFAULT_BATCHES,
    DEFAULT_RANKS,
    DEFAULT_TOKENS_PER_RANK,
    MAX_TOKENS,
    SOURCE_HELP,
    BatchesAsked,
    DealtBatches,
    read_batches,
)
from distca.corpus.files import STDIN
from distca.corpus.lengths import Reading
from distca.cost.attention_time import AttentionTime
from distca.cost.mixed_pool import MixedTime, find_cost, time_of
from distca.cost.network import find_cluster
from distca.models import model_named
from distca.planning.choose import DEFAULT_TOLERANCE, StepSeconds, plan_step
from distca.planning.plan import Plan
from distca.planning.step import StepPlan
from distca.planning.tasks import tasks_at_home
from distca.report.figures import PlannedBatch
from distca.report.planned_batches import PlannedBatches
from distca.report.render import print_batches
from distca.simulate.costs import TABLE_CLUSTER
from distca.simulate.execute import step_seconds
from distca.simulate.fitting import DEFAULT_CONTEXT, StepAsked, fitting_context, fitting_settings
from distca.spec import ModelShape
from distca.validation import MAX_RANKS, UNITS_HELP, UserError, check_whole
from distca.workload.documents import SAMPLERS
from distca.workload.packing import PLACEMENTS, pack
from distca.workload.topology import Topology

SIMULATED_BATCHES = 2  # in the command for whole steps, which then takes seconds
TABLE = "h200"
DEFAULTS = (("data", "prolong"), ("model", "llama3-8b"), ("seed", 0))  # of distca simulate


def plan_command(
    source: Annotated[list[str], typer.Argument(metavar="SOURCE", help=SOURCE_HELP)],
    model: Annotated[str, typer.Option(help="Named model, for the bytes of a token.")] = "llama3-8b",
    tolerance: Annotated[Any, options.tolerance_option(
        f"what makes the model's step quickest by --cost on --cluster, {options.AUTO_HELP}.")] = DEFAULT_TOLERANCE,
    tp: Annotated[int, options.number("Tensor-parallel size: heads are divided by it.")] = 1,
    placement: Annotated[str, typer.Option(
        help="; ".join(f"{name}: {one.help}" for name, one in PLACEMENTS.items()) + ".")] = "balanced",
    dedicated: Annotated[int, options.number("Servers that own no tokens, besides the ranks.")] = 0,
    ranks_per_node: Annotated[int | None, options.number(
        "Ranks that share a node: work leaves a node only as far as the tolerance demands. Flat unless given.")] = None,
    cluster: Annotated[str | None, typer.Option(
        help="Instead of --ranks-per-node: a cluster, by name or TOML file, whose nodes the ranks fill.")] = None,
    cost: Annotated[str | None, typer.Option(
        help=f"{COST_HELP} Work is then seconds instead of causal pairs.")] = None,
    ranks: Annotated[int | None, options.number(
        f"Ranks that own tokens; {DEFAULT_RANKS} unless SOURCE says. {UNITS_HELP}")] = None,
    tokens_per_rank: Annotated[int | None, options.number(
        f"Tokens of a rank in a batch; {DEFAULT_TOKENS_PER_RANK} unless given.")] = None,
    batches: Annotated[int | None, options.number(
        f"Batches to deal from a file, {DEFAULT_BATCHES}, or to sample, 1; the answer is their mean and the worst."
    )] = None,
    whole: Annotated[bool, typer.Option("--whole", help="Plan all documents of a file as one batch.")] = False,
    column: options.Column = None,
    format_: options.Format = None,
    tokenizer: options.Tokenizer = None,
    split: options.Split = None,
    seed: Annotated[int | None, typer.Option(help="Of a sampler, or of a file's order; 0 unless given.")] = None,
    max_document: Annotated[int | None, options.number("Cut longer documents to this many tokens.")] = None,
    no_spanning: Annotated[bool, typer.Option(
        "--no-spanning", help="Cut documents at the ends of ranks; the parts do not attend to each other.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of the tables.")] = False,
    plot: Annotated[Path | None, typer.Option(
        help="Also draw work and bytes per rank into this file; of several batches the worst.")] = None,
    html: Annotated[Path | None, typer.Option(
        help="Also write a report page, which opens offline; of several batches the worst.")] = None,
) -> None:
    """Say how much faster balancing makes attention, over no balancing, and what has to travel for it."""
    check_whole("dedicated", dedicated, least=0, most=MAX_RANKS, why="as many servers as a plan has been tried with")
    asked = BatchesAsked(options.one_source(source), ranks, tokens_per_rank, seed, max_document, batches, whole,
                         no_spanning, Reading(format_, column, tokenizer, split))
    draw, write_page = options.plot_writer("plot", plot), options.page_writer("html", html)
    pool = plan_pool(model, tp, tolerance, dedicated, placement, cost, ranks_per_node, cluster)
    planned = plan_asked(asked, pool)
    draw(planned.shown)
    write_page(planned.page())
    whole_step = simulate_line(asked, pool, planned, {"model": model, "cluster": cluster, "cost": cost})
    if as_json:
        print(json.dumps(planned.as_json() | {"next": whole_step}))
    else:
        print_batches(planned, Console())
        print(f"\nNext: whole steps on the same lengths, against the best baselines:\n  {whole_step}")
        if plot:
            print(f"Drawn in {plot}.")
        if html:
            print(f"Written to {html}.")
    if not planned.are_valid:
        raise typer.Exit(1)


@dataclass(frozen=True, slots=True)
class PlanPool:
    """The servers of a plan, how documents are placed on them, and how their work is counted."""

    model: ModelShape
    tp: int = 1
    tolerance: float | StepSeconds = DEFAULT_TOLERANCE  # or a prediction of a step's seconds, for auto
    dedicated: int = 0
    placement: str = "given"
    cost: AttentionTime | None = None
    ranks_per_node: int | None = None  # None: unknown
    nodes_per_pod: int = 0

    def topology(self, ranks: int) -> Topology | None:
        """Return the topology: ranks fill the nodes first, then dedicated servers."""
        return None if self.ranks_per_node is None else Topology.regular(
            ranks + self.dedicated, self.ranks_per_node, self.nodes_per_pod)

    def step(self, lengths: np.ndarray, ranks: int) -> StepPlan:
        """Plan one attention call, forward and backward; `auto` chooses the tolerance for the whole model's step."""
        plan = partial(plan_step, [lengths], self.model, num_data=ranks, tp=self.tp, placement=self.placement,
                       speed=np.ones(ranks + self.dedicated), cost=self.cost, topology=self.topology(ranks))
        if not callable(self.tolerance):
            return plan(layers=(1,), ping_pong=False, tolerance=self.tolerance)
        has_halves = int(lengths.sum()) // ranks % 2 == 0
        whole = plan(layers=(self.model.num_layers,), ping_pong=has_halves, tolerance=self.tolerance)
        call = plan(layers=(1,), ping_pong=False, tolerance=whole.plans[0].tolerance)
        return replace(call, tried=whole.tried)


def plan_pool(
    model: str, tp: int, tolerance: float | str, dedicated: int, placement: str, cost: str | None,
    ranks_per_node: int | None, cluster: str | None,
) -> PlanPool:
    """Make the pool that the options describe, and plan a tiny batch to warm caches and to validate the options."""
    shape = model_named(model)
    seconds = None if cost is None else time_of(find_cost(cost), shape, tp)
    chosen: float | StepSeconds
    if isinstance(tolerance, str):
        if cost is None:
            raise UserError("tolerance is 'auto' but cost is not given; give --cost, the latency table it is chosen by")
        machines = find_cluster(cluster or TABLE_CLUSTER)
        if ranks_per_node is not None:
            machines = replace(machines, gpus_per_node=ranks_per_node * tp)
        chosen = step_seconds(shape, machines, tp, find_cost(cost))
    else:
        chosen = tolerance
    pool = PlanPool(shape, tp, chosen, dedicated, placement, seconds, *_nodes(ranks_per_node, cluster, tp))
    if seconds is not None and seconds.note:
        print(f"distca: {seconds.note}", file=sys.stderr)
    tiny = replace(pool, cost=seconds.kinds[0]) if isinstance(seconds, MixedTime) else pool  # MixedTime fixes the size
    tiny.step(np.array([3072, 512, 512]), 2).plans[0].summary()
    return pool


def _nodes(ranks_per_node: int | None, cluster: str | None, tp: int) -> tuple[int | None, int]:
    """Return ranks per node (None if unknown) and nodes per pod."""
    if cluster is None:
        if ranks_per_node is not None:
            check_whole("ranks_per_node", ranks_per_node, most=MAX_RANKS)
        return ranks_per_node, 0
    if ranks_per_node is not None:
        raise UserError(f"ranks_per_node is {ranks_per_node} and cluster {cluster!r}; give one of them")
    shape = find_cluster(cluster)
    return shape.ranks_per_node(tp), shape.nodes_per_pod


def plan_asked(asked: BatchesAsked, pool: PlanPool) -> PlannedBatches:
    """Read and plan the batches, with progress on stderr."""
    with options.progress(1 + 4 * (asked.batches or DEFAULT_BATCHES)) as update:
        update("reading documents")
        dealt = read_batches(asked, lambda read: update(f"{read:,} documents", 0))
        source = f"{dealt.source}, cut at ranks" if asked.no_spanning else dealt.source
        planned = (plan_batch(lengths, source, dealt, pool, update) for lengths in dealt.batches)
        return PlannedBatches.of(planned, dealt.source, note=dealt.note, corpus=dealt.corpus, is_dealt=dealt.is_dealt)


def plan_batch(
    lengths: np.ndarray, source: str, dealt: DealtBatches, pool: PlanPool, update: options.OnProgress
) -> PlannedBatch:
    """Plan, validate and summarize one batch; only placement and balancing are timed."""
    cost, ranks = pool.cost, dealt.ranks
    if cost is not None:
        for one in cost.kinds if isinstance(cost, MixedTime) else (cost,):
            one.table.require(int(lengths.max()))
    update("placing documents and balancing attention")
    begin = perf_counter()
    planned = pool.step(lengths, ranks)
    plan_seconds = perf_counter() - begin
    plan, backward = planned.plans[0], planned.plans[-1]
    update("validating the plan")
    invalid = _validation_error(plan) or _validation_error(backward)
    update("counting bytes")
    in_order = pack(lengths, ranks=ranks, tokens_per_rank=dealt.tokens_per_rank)
    topology = pool.topology(ranks)
    speeds = np.ones(ranks) if cost is None else cost.speeds(ranks)
    before = Plan(in_order, tasks_at_home(in_order), speeds, plan.tolerance, pool.model, pool.tp, cost,
                  topology=None if topology is None else topology.first(ranks))
    found = PlannedBatch.of(plan, source, before=before, backward=backward, placement=pool.placement, invalid=invalid)
    return replace(found, plan_seconds=plan_seconds, placement_used=planned.placement, tried=planned.tried)


def simulate_line(
    asked: BatchesAsked, pool: PlanPool, planned: PlannedBatches, names: Mapping[str, str | None]
) -> str:
    """Return the `distca simulate` command for whole steps on the same lengths, on as many ranks if one fits there."""
    source, shown, reading = asked.source, planned.shown, asked.reading
    words: dict[str, Any] = {"data": source, **names, **asdict(reading), "seed": asked.seed}
    context = DEFAULT_CONTEXT
    if source not in SAMPLERS:
        longest = shown.plan.layout.lengths.max() if planned.corpus is None else planned.corpus.longest
        context = words["context"] = fitting_context(min(int(longest), asked.max_document or MAX_TOKENS))
    each = None if shown.tokens_per_rank == DEFAULT_TOKENS_PER_RANK else max(round(shown.tokens_per_rank / context), 1)
    sequences = None if each is None else each * shown.num_ranks  # None: as many as simulate takes by itself
    machines, table = find_cluster(names["cluster"] or TABLE_CLUSTER), find_cost(names["cost"] or TABLE)
    gpus = shown.num_ranks * pool.tp
    alone = StepAsked(gpus, context=context)
    for tried in (replace(alone, tp=pool.tp, sequences=sequences), replace(alone, tp=pool.tp), alone):
        with suppress(UserError):
            fitting_settings(pool.model, machines, table, tried)
            words |= {"gpus": tried.gpus, "tp": tried.tp, "sequences": tried.sequences}
            break
    words["batches"] = SIMULATED_BATCHES
    given = [(name, value) for name, value in words.items() if value is not None and (name, value) not in DEFAULTS]
    line = " ".join(["distca simulate", *(f"--{name} {shlex.quote(str(value))}" for name, value in given)])
    return f"… | {line}" if source == STDIN else line


def _validation_error(plan: Plan) -> str | None:
    try:
        plan.validate()
    except ValueError as error:
        return str(error)
    return None
