"""Measure with our simulator and planner what the DistCA paper measured: one row for every point of its figures.

Nothing here knows what the paper found: `claims` puts its figures beside ours.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict
from functools import cache
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np

from distca.cost.attention_time import shipped_table
from distca.cost.latency_table import LatencyTable
from distca.cost.work import attention_backward_flops, attention_flops, pairs_of_shard
from distca.models import model_named
from distca.planning.choose import AUTO, DEFAULT_TOLERANCE
from distca.planning.step import StepPlan
from distca.simulate.calls import PlanCosts
from distca.simulate.costs import Costs
from distca.simulate.execute import execute
from distca.simulate.memory import check_fits
from distca.simulate.outcomes import Outcome
from distca.simulate.setting import Setting
from distca.simulate.strategies import GroupChoice, PoolChoice, StepDocuments
from distca.simulate.sweep import Question, compare
from distca.spec import ClusterShape, ModelShape, cluster_named
from distca.workload.sequences import Source
from paper.cases import CLUSTER, REPLICA_RANKS, TP, Case, cases

TABLE = "h200"
TOLERANCES = (0.0, 0.02, 0.05, 0.1, 0.15, 0.3, 0.5, 1.0)
SHARD_KV_LEN = 65_536      # keys of the shards whose throughput is looked up

Row = dict[str, Any]


def measure_all(
    figures: Sequence[str], *, quick: bool, num_batches: int, workers: int, step: Callable[[str], None],
    kept: Path | None = None,
) -> dict[str, list[Row]]:
    """Rows by figure, in the order of the cases; `step` is called after each case.

    `kept` is a file of cases that were measured: those in it are not measured again, and others are appended to it, so
    that a run which was interrupted goes on where it was.
    """
    wanted = [case for figure in figures for case in cases(figure, quick)]
    done = _read(kept, num_batches)
    missing = [case for case in wanted if _key(case) not in done]
    for case in wanted:
        if _key(case) in done:
            step(case.figure)
    for at, found in _measured(missing, num_batches, workers):
        case = missing[at]
        done[_key(case)] = found
        if kept is not None:
            with kept.open("a") as file:
                file.write(json.dumps({"case": asdict(case), "batches": num_batches, "rows": found}) + "\n")
        step(case.figure)
    return {figure: [row for case in wanted if case.figure == figure for row in done[_key(case)]] for figure in figures}


def _key(case: Case) -> str:
    return json.dumps(asdict(case))


def _read(kept: Path | None, num_batches: int) -> dict[str, list[Row]]:
    """Return the rows of the cases in the file, by case, if they are of as many batches."""
    lines = kept.read_text().splitlines() if kept is not None and kept.exists() else []
    entries = [json.loads(line) for line in lines]
    return {json.dumps(entry["case"]): entry["rows"] for entry in entries if entry["batches"] == num_batches}


def _measured(wanted: Sequence[Case], num_batches: int, workers: int) -> Iterator[tuple[int, list[Row]]]:
    if workers <= 1:
        for at, case in enumerate(wanted):
            yield at, measure(case, num_batches)
        return
    with ProcessPoolExecutor(workers, get_context("spawn")) as pool:
        largest_first = sorted(range(len(wanted)), key=lambda at: -wanted[at].nodes * len(wanted[at].pipelines))
        waiting = {pool.submit(measure, wanted[at], num_batches): at for at in largest_first}
        for future in as_completed(waiting):
            yield waiting[future], future.result()


def measure(case: Case, num_batches: int) -> list[Row]:
    return _MEASURES[case.figure](case, num_batches)


@cache
def _table() -> LatencyTable:
    return shipped_table(TABLE)


def _question(case: Case, num_batches: int, strategies: tuple[str, ...] = ("disaggregated",)) -> Question:
    fitting = tuple(filter(_holds, case.settings()))
    return Question(fitting, strategies, Source(case.data), _table(), AUTO, num_batches)


def _holds(where: Setting) -> bool:
    """Whether a pipeline is a choice at all: some schedule of it fits the memory."""
    try:
        check_fits(where, Costs.of(where.model, where.cluster, where.tp, _table()))
    except ValueError:
        return False
    return True


def _batches(case: Case, num_batches: int) -> tuple[Setting, Costs, list[StepDocuments]]:
    question = _question(case, num_batches)
    where = question.settings[0]
    return where, question.costs(where), [question.batch(where, number) for number in range(num_batches)]


def _ours(placement: str, where: Setting, costs: Costs, batch: StepDocuments, tolerance: float = DEFAULT_TOLERANCE,
          ping_pong: bool = True) -> StepPlan:
    plan = PoolChoice(placement, tolerance, ping_pong).step_plan(where, costs, batch)
    assert plan is not None, "ours plans whatever it needs; whether it fits is not asked here"
    return plan


def _gathered_keys(case: Case, num_batches: int) -> list[Row]:
    """Per-document context parallelism over all nodes: what gathering keys takes of the step and of the memory.

    The shares are of a step that waits for its keys; beside them what is still waited for where chunks hide the rest.
    """
    where, costs, batches = _batches(case, num_batches)
    shares = []
    for batch in batches:
        plan = GroupChoice(where.num_data, "fixed", "document").step_plan(where, costs, batch)
        assert plan is not None, "64K tokens a rank are no dust"
        known = PlanCosts(plan, costs.attention)
        waits = execute(plan, costs, plan_costs=PlanCosts(plan, costs.attention, hides=False), record=True)
        hides, free = (execute(plan, links, plan_costs=known).seconds for links in (costs, costs.without_network()))
        spans, held = waits.traces[-1].spans, waits.memory
        shares.append([sum(span.seconds for span in spans if span.name == name) / waits.seconds
                       for name in ("gather keys", "scatter key gradients")]
                      + [held.gathered_kv[-1] / held.total[-1], 1 - free / hides])
    gather, scatter, memory, exposed = np.mean(shares, axis=0).tolist()
    return [{**case.facts, "gather_share": gather, "gather_and_scatter_share": gather + scatter,
             "kv_memory_share": memory, "exposed_share_of_chunks": exposed}]


def _variable_chunks(case: Case, num_batches: int) -> list[Row]:
    """Variable-length chunks over replicas: attention that waits for the longest, and how far memory diverges."""
    where, costs, batches = _batches(case, num_batches)
    found = []
    for batch in batches:
        plan = GroupChoice(REPLICA_RANKS, "variable", "document").step_plan(where, costs, batch)
        if plan is not None:
            done = execute(plan, costs, plan_costs=PlanCosts(plan, costs.attention, hides=False))
            held = done.memory.activations
            found.append((1 - 1 / done.work_max_over_mean, float(held.max() / held.mean())))
    idle, memory = np.mean(found, axis=0).tolist() if found else (None, None)
    return [{**case.facts, "dp": case.nodes // REPLICA_RANKS, "attention_idle_share": idle,
             "activations_max_over_mean": memory, "batches_that_fit": len(found), "batches": num_batches}]


def _throughput(case: Case, num_batches: int) -> list[Row]:
    """Attention of shards with a long prefix, from the measured table."""
    table, model = _table(), model_named(case.model)
    q_len = table.q_len[table.q_len <= SHARD_KV_LEN].astype(np.float64)
    pairs = pairs_of_shard(q_len, np.full_like(q_len, SHARD_KV_LEN))
    forward = attention_flops(pairs, model) / table.seconds(q_len, SHARD_KV_LEN)
    backward = attention_backward_flops(pairs, model) / table.seconds(q_len, SHARD_KV_LEN, backward=True)
    return [{"q_len": int(q), "kv_len": SHARD_KV_LEN, "forward_tflops": float(f) / 1e12,
             "backward_tflops": float(b) / 1e12, "forward_of_peak": float(f / forward.max()),
             "backward_of_peak": float(b / backward.max())}
            for q, f, b in zip(q_len, forward, backward, strict=True)]


def _speed(case: Case, num_batches: int) -> list[Row]:
    """Ours over WLB-ideal and over the bound, each with the pipeline, grid and micro-batches that suit it best."""
    names = ("wlb_ideal", "disaggregated", "distca", "bound")
    question = _question(case, num_batches, names)
    by_name = {outcome.name: outcome for outcome in compare(question).entries}
    row: Row = {**case.facts, "too_large": [name for name in names if name not in by_name]}
    for outcome in by_name.values():
        row |= {f"{outcome.name}_seconds": outcome.step_seconds, f"{outcome.name}_choice": outcome.describe()}
    for name in ("disaggregated", "distca"):
        row[name] = row[f"{name}_range"] = None
        if name in by_name and "wlb_ideal" in by_name:
            row[name], *row[f"{name}_range"] = by_name[name].speedup_over(by_name["wlb_ideal"])
    row["wlb_ideal_exposed_share"] = None
    if "wlb_ideal" in by_name:
        baseline = by_name["wlb_ideal"]
        row["wlb_ideal_exposed_share"] = 1 - float(baseline.column("free_seconds").mean()) / baseline.step_seconds
    row["distca_of_bound"] = row["one_byte_of_bound"] = row["free_links_of_bound"] = None
    if "distca" in by_name:
        ours, floor = by_name["distca"], by_name["bound"].step_seconds
        row["distca_of_bound"] = floor / ours.step_seconds
        row["one_byte_of_bound"] = floor / _one_byte_seconds(question, ours)
        row["free_links_of_bound"] = floor / float(ours.column("free_seconds").mean())
    return [row]


def _one_byte_seconds(question: Question, outcome: Outcome) -> float:
    """Mean step of an outcome if attention's own transfers were one byte long."""
    where, choice = outcome.setting, outcome.choice
    assert choice is not None, "the bound has no plan"
    costs = question.costs(where, choice)
    plans = [choice.step_plan(where, costs, question.batch(where, number)) for number in range(question.num_batches)]
    return float(np.mean([execute(plan, costs.with_one_byte()).seconds for plan in plans if plan is not None]))


def _overlap(case: Case, num_batches: int) -> list[Row]:
    """Ping-pong against waiting for every exchange, and against messages of one byte."""
    where, costs, batches = _batches(case, num_batches)
    rows = []
    for placement in ("given", "balanced"):
        seconds = []
        for batch in batches:
            plan = _ours(placement, where, costs, batch)
            known = PlanCosts(plan, costs.attention)
            alone = _ours(placement, where, costs, batch, ping_pong=False)
            seconds.append([execute(plan, costs, plan_costs=known).seconds, execute(alone, costs).seconds,
                            execute(plan, costs.with_one_byte(), plan_costs=known).seconds])
        overlapped, alone_seconds, one_byte = np.mean(seconds, axis=0).tolist()
        rows.append({**case.facts, "placement": placement, "ping_pong_seconds": overlapped,
                     "single_stream_over": alone_seconds / overlapped, "one_byte_over": one_byte / overlapped})
    return rows


def _tolerances(case: Case, num_batches: int) -> list[Row]:
    """Bytes and step time as the scheduler is allowed more imbalance."""
    where, costs, batches = _batches(case, num_batches)
    rows: list[Row] = []
    for placement in ("given", "balanced"):
        found = []
        for tolerance in TOLERANCES:
            steps = [execute(_ours(placement, where, costs, batch, tolerance), costs) for batch in batches]
            found.append(np.mean([(TP * step.sent_bytes, step.seconds) for step in steps], axis=0))
        rows += [{**case.facts, "placement": placement, "tolerance": tolerance, "gigabytes": float(one[0]) / 1e9,
                  "bytes_over": float(one[0] / found[0][0]), "seconds_over": float(one[1] / found[0][1])}
                 for tolerance, one in zip(TOLERANCES, found, strict=True)]
    return rows


def hidden_shards_bound(model: ModelShape, cluster: ClusterShape, tp: int = 1) -> float:
    """Return the shards into which a document may be cut while its communication still hides behind linear layers.

    Appendix A of the DistCA paper. Cut into s equal shards that all move, a token costs h_q bytes for its query and
    (s + 1) / 2 * h_kv for its key and value, as shard i needs i / s of the document's keys. Hidden means that this is
    at most t * B: what the NIC carries while one layer's linear part computes that token. Hence
    s <= 2 (t B - h_q) / h_kv - 1; below 1, not even a whole document can move unseen.

    t counts the weights of a layer without grouped-query attention, 4 hidden² + 3 hidden * ffn, at the GPU's peak: the
    published reading. `linear_flops` at the rate that GEMMs reach gives about a sixth more.
    """
    token_flops = 2 * (4 * model.hidden**2 + 3 * model.hidden * model.ffn) / tp
    hideable_bytes = token_flops / cluster.peak_flops_per_second * cluster.inter_node_bandwidth
    return 2 * (hideable_bytes - model.q_token_bytes(tp)) / model.kv_token_bytes(tp) - 1


def _hidden_shards(case: Case, num_batches: int) -> list[Row]:
    return [{"model": name, "tp": tp,
             "shards": hidden_shards_bound(model_named(name), cluster_named(CLUSTER), tp)}
            for name in ("llama3-8b", "llama-34b") for tp in (1, TP)]


def _held(case: Case, num_batches: int) -> list[Row]:
    """What ours holds on every rank: activations, and the buffers of its exchanges beside them."""
    where, costs, (batch,) = _batches(case, 1)
    rows = []
    for name, placement in (("disaggregated", "given"), ("distca", "balanced")):
        held = execute(_ours(placement, where, costs, batch), costs).memory
        stages = held.activations.reshape(where.pp, -1)
        rows.append({**case.facts, "pp": where.pp, "strategy": name,
                     "activations_max_over_min": float((stages.max(axis=1) / stages.min(axis=1)).max()),
                     "activations_gb": float(held.activations.max()) / 1e9,
                     "buffers_of_activations": float(held.buffers.max() / held.activations.max())})
    return rows


_MEASURES: dict[str, Callable[[Case, int], list[Row]]] = {
    "fig3": _gathered_keys, "fig4": _variable_chunks, "fig5": _throughput, "fig9": _speed, "fig10": _speed,
    "fig11": _overlap, "fig12": _tolerances, "appA": _hidden_shards, "memory": _held,
}
