"""`distca plan`: what would balanced attention save on your lengths, before renting GPUs?"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import Annotated

import numpy as np
import typer
from rich.console import Console

from distca.cli.batches import (
    COST_HELP,
    DEFAULT_RANKS,
    DEFAULT_TOKENS_PER_RANK,
    STANDARD_LIBRARY,
    DocumentBatch,
    read_batch,
    without_spanning,
)
from distca.cli.outputs import page_writer, plot_writer
from distca.cli.progress import progress
from distca.cost.attention_time import AttentionTime
from distca.cost.cluster_file import find_cluster
from distca.cost.shipped_tables import find_table
from distca.models import model_named
from distca.planning.balance import balance
from distca.planning.placed import plan_placed
from distca.planning.plan import Plan
from distca.planning.step import work_of_documents
from distca.planning.tasks import tasks_at_home
from distca.report.figures import PlannedBatch, plan_page
from distca.report.render import print_plan
from distca.spec import ModelShape
from distca.validation import MAX_RANKS, check_whole
from distca.workload.documents import SAMPLERS
from distca.workload.layout import Layout
from distca.workload.packing import check_tolerance, pack, pack_workload
from distca.workload.topology import Topology


@dataclass(frozen=True, slots=True)
class PlanPool:
    """Who serves, and how their work is counted."""

    model: ModelShape
    tp: int
    tolerance: float
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

    def balanced(self, layout: Layout, backward: bool = False) -> Plan:
        return balance(layout, self.model, tolerance=self.tolerance, speed=self.speed(layout.num_ranks), tp=self.tp,
                       cost=self.cost, backward=backward, topology=self.topology(layout.num_ranks))


def plan_command(
    source: Annotated[str, typer.Argument(metavar="SOURCE", help=(
        f"A workload file, a lengths file, a sampler ({', '.join(SAMPLERS)}), or {STANDARD_LIBRARY} for the files of "
        "Python's own library. A bare sampler name is the sampler; write ./NAME for a file called so."))],
    model: Annotated[str, typer.Option(help="Named model, for the bytes of a token.")] = "llama3-8b",
    tolerance: Annotated[float, typer.Option(help="How far above the mean the largest work may be, 0 to 1.")] = 0.05,
    tp: Annotated[int, typer.Option(help="Tensor-parallel size: heads are divided by it.")] = 1,
    placement: Annotated[str, typer.Option(
        help="given: documents stay where the loader puts them; balanced: placement chooses.")] = "given",
    dedicated: Annotated[int, typer.Option(help="Servers that own no tokens, besides the ranks.")] = 0,
    ranks_per_node: Annotated[int | None, typer.Option(
        help="Ranks that share a node: work leaves a node only as far as the tolerance demands. Flat unless given.",
    )] = None,
    cluster: Annotated[str | None, typer.Option(
        help="Instead of --ranks-per-node: a cluster, by name or TOML file, whose nodes the ranks fill.")] = None,
    cost: Annotated[str | None, typer.Option(
        help=f"{COST_HELP} Work is then seconds instead of causal pairs.")] = None,
    ranks: Annotated[int | None, typer.Option(
        help=f"Ranks that own tokens; {DEFAULT_RANKS} unless SOURCE says.")] = None,
    tokens_per_rank: Annotated[int | None, typer.Option(
        help=f"{DEFAULT_TOKENS_PER_RANK} for a sampler, all that a lengths file fills.")] = None,
    seed: Annotated[int | None, typer.Option(help="Seed of a sampler; 0 unless given.")] = None,
    max_document: Annotated[int | None, typer.Option(help="Cut longer documents to this many tokens.")] = None,
    no_spanning: Annotated[bool, typer.Option(
        "--no-spanning", help="Cut documents at the ends of ranks; the parts do not attend to each other.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of the tables.")] = False,
    plot: Annotated[Path | None, typer.Option(help="Also draw work and bytes per rank into this file.")] = None,
    html: Annotated[Path | None, typer.Option(help="Also write a report page, which opens offline.")] = None,
) -> None:
    """Plan one batch's core attention and show it before and after."""
    check_tolerance(tolerance)
    if max_document is not None:
        check_whole("max_document", max_document)
    check_whole("dedicated", dedicated, least=0, most=MAX_RANKS, why="as many servers as a plan has been tried with")
    draw = plot_writer("plot", plot) if plot else None
    write_page = page_writer("html", html) if html else None
    shape = model_named(model)
    seconds = None if cost is None else AttentionTime.of(find_table(cost), shape, tp)
    pool = PlanPool(shape, tp, tolerance, dedicated, seconds, *_nodes(ranks_per_node, cluster, tp))
    if pool.cost is not None and pool.cost.note:
        print(f"distca: {pool.cost.note}", file=sys.stderr)
    _warm_up(pool, placement)
    with progress() as step:
        step("reading documents")
        batch = read_batch(source, ranks, tokens_per_rank, seed, max_document)
        if no_spanning:
            batch = without_spanning(batch)
        planned = plan_batch(batch, pool, placement, step)
    if draw:
        draw(planned)
    if write_page:
        write_page(plan_page(planned))
    if as_json:
        print(json.dumps(planned.as_json()))
    else:
        print_plan(planned, Console())
        if plot:
            print(f"Drawn in {plot}.")
        if html:
            print(f"Written to {html}.")
    if planned.invalid is not None:
        raise typer.Exit(1)


def plan_batch(batch: DocumentBatch, pool: PlanPool, placement: str, step: Callable[[str], None]) -> PlannedBatch:
    """Plan, prove and measure. Only placing and balancing are timed."""
    cost = pool.cost
    if cost is not None:
        cost.table.require(int(batch.lengths.max()))
    step("placing documents and balancing attention")
    begin = perf_counter()
    plan, used = plan_placed(placement, partial(_layout, batch, pool), pool.balanced)
    backward = plan if cost is None else pool.balanced(plan.layout, backward=True)
    plan_seconds = perf_counter() - begin
    step("proving the plan")
    invalid = _failed_proof(plan) or _failed_proof(backward)
    step("counting bytes")
    in_order = pack(batch.lengths, ranks=batch.ranks, tokens_per_rank=batch.tokens_per_rank)
    topology = pool.topology(batch.ranks)
    before = Plan(in_order, tasks_at_home(in_order), np.ones(batch.ranks), pool.tolerance, pool.model, pool.tp, cost,
                  topology=None if topology is None else topology.first(batch.ranks))
    return PlannedBatch.of(plan, batch.source, before=before, backward=backward, placement=placement,
                           plan_seconds=plan_seconds, invalid=invalid, placement_used=used)


def _nodes(ranks_per_node: int | None, cluster: str | None, tp: int) -> tuple[int | None, int]:
    """Ranks that share a node and nodes that share a pod, as the options say."""
    if cluster is None:
        if ranks_per_node is not None:
            check_whole("ranks_per_node", ranks_per_node, most=MAX_RANKS)
        return ranks_per_node, 0
    if ranks_per_node is not None:
        raise ValueError(f"ranks_per_node is {ranks_per_node} and cluster {cluster!r}; give one of them")
    shape = find_cluster(cluster)
    return shape.ranks_per_node(tp), shape.nodes_per_pod


def _layout(batch: DocumentBatch, pool: PlanPool, placement: str) -> Layout:
    speed = pool.speed(batch.ranks)
    work, wave_tokens = work_of_documents(pool.cost), 1 if pool.cost is None else pool.cost.wave_tokens
    topology = pool.topology(batch.ranks)
    if batch.workload is not None:
        return pack_workload(batch.workload, placement=placement, tolerance=pool.tolerance, speed=speed,
                             document_work=work, wave_tokens=wave_tokens, topology=topology)
    return pack(batch.lengths, ranks=batch.ranks, tokens_per_rank=batch.tokens_per_rank, placement=placement,
                tolerance=pool.tolerance, speed=speed, document_work=work, wave_tokens=wave_tokens, topology=topology)


def _failed_proof(plan: Plan) -> str | None:
    try:
        plan.validate()
    except ValueError as error:
        return str(error)
    return None


def _warm_up(pool: PlanPool, placement: str) -> None:
    """Plan a thimbleful, so that first-call costs are not timed and wrong options are refused before long work."""
    batch = DocumentBatch("warm-up", np.array([3072, 512, 512]), 2, 2048)
    pool.balanced(_layout(batch, pool, placement)).summary()
