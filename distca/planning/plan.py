"""A plan: the tasks of one attention call over the whole pool, with their servers.

A plan is frozen and holds its inputs; it can validate itself and summarize its costs. Dispatch, runtime, simulator and
report read plans and never change them.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import numpy as np

from distca.columns import Positions, freeze, spread
from distca.cost.attention_time import AttentionTime
from distca.cost.work import backward_bytes, causal_pairs
from distca.planning.tasks import TILE, TaskTable, tasks_at_home
from distca.planning.traffic import Traffic, traffic, traffic_between_nodes
from distca.spec import ModelShape
from distca.validation import UserError, check_whole
from distca.workload.layout import Layout
from distca.workload.packing import check_pool, check_tolerance
from distca.workload.topology import Topology, check_topology


@dataclass(frozen=True, slots=True)
class PlanSummary:
    """Costs of one attention call under a plan. Bytes are those that cross ranks, for one layer in bf16."""

    num_tasks: int
    num_moved: int                # tasks whose server is not their home
    smallest_shard: int           # queries of the smallest task, except for short ends of documents and slices
    work: np.ndarray              # [servers] pairs, or seconds if the cost is known
    work_max_over_mean: float     # largest work / speed over its mean
    work_max_over_mean_at_home: float
    bytes_sent: np.ndarray        # [servers] Q and KV as a home, O as a server
    bytes_received: np.ndarray    # [servers]
    bytes_total: int
    lse_bytes_total: int          # log-sum-exp that returns with O
    backward_bytes_total: int     # with `resend`: Q, KV, O and dO are sent to servers, dQ and dKV back
    bytes_all_gather: int         # bytes if every document's keys were gathered on all its ranks
    seconds: float | None         # attention of the slowest server, if the cost is known
    bytes_sent_by_node: np.ndarray | None  # [nodes] to other nodes, each token once per node; None: topology unknown
    bytes_sent_by_pod: np.ndarray | None   # [pods] the part to nodes of other pods

    @property
    def bytes_between_nodes(self) -> int | None:
        """Bytes that cross nodes, each key, query and output once per node that needs or made it."""
        return None if self.bytes_sent_by_node is None else int(self.bytes_sent_by_node.sum())

    @property
    def bytes_between_nodes_max(self) -> int | None:
        """Bytes that the busiest node sends."""
        return None if self.bytes_sent_by_node is None else int(self.bytes_sent_by_node.max())

    @property
    def bytes_between_pods(self) -> int | None:
        """The part of the bytes between nodes that also crosses pods."""
        return None if self.bytes_sent_by_pod is None else int(self.bytes_sent_by_pod.sum())

    @property
    def bytes_between_pods_max(self) -> int | None:
        """Bytes that the busiest pod sends."""
        return None if self.bytes_sent_by_pod is None else int(self.bytes_sent_by_pod.max())


@dataclass(frozen=True, slots=True, eq=False, weakref_slot=True)
class Plan:
    """Tasks with their servers. Ranks 0 … layout.num_ranks-1 own tokens; servers beyond them are dedicated."""

    layout: Layout
    tasks: TaskTable
    speed: np.ndarray             # [servers] relative; a server of speed 0 serves nothing
    tolerance: float
    model: ModelShape
    tp: int = 1
    cost: AttentionTime | None = None  # None: work is causal pairs
    limit: str | None = None      # why max/mean is above 1 + tolerance, if it is
    backward: bool = False        # work is backward seconds; pairs are the same in both phases
    window: int | None = None     # keys that a query sees, including its own; None: the whole prefix
    topology: Topology | None = None  # which servers share a node; None: unknown
    _work: np.ndarray | None = field(default=None, init=False, repr=False)  # once it was asked for

    def __post_init__(self) -> None:
        freeze(self, ("speed",), np.float64)

    @property
    def num_servers(self) -> int:
        return len(self.speed)

    def work(self) -> np.ndarray:
        """[servers] Return the work; work / speed is the time that a server takes."""
        if self._work is None:
            self._keep(server_work(self.tasks, self.num_servers, self.cost, self.backward, self.window))
        assert self._work is not None
        return self._work

    def _keep(self, work: np.ndarray) -> None:
        work.setflags(write=False)
        object.__setattr__(self, "_work", work)

    def renumbered(self, layout: Layout, number: np.ndarray) -> Plan:
        """Return the plan on servers of other numbers, for a layout with these; equal speeds are assumed."""
        tasks = replace(self.tasks, home=number[self.tasks.home], server=number[self.tasks.server])
        plan = replace(self, layout=layout, tasks=tasks)
        plan._keep(self.work()[np.argsort(number)])
        return plan

    def traffic(self) -> Traffic:
        return traffic(self.layout, self.tasks, self.num_servers)

    def traffic_between_nodes(self) -> Traffic | None:
        """Return the traffic between nodes (its ranks are nodes); None if the topology is unknown."""
        return None if self.topology is None else traffic_between_nodes(self.layout, self.tasks, self.topology.node)

    def validate(self) -> None:
        """Prove exact coverage, existing servers, correct homes and tile-sized shards; else raise ValueError."""
        self.layout.validate()
        check_pool(self.speed, self.layout.num_ranks)
        check_tolerance(self.tolerance)
        check_topology(self.topology, self.num_servers)
        self.model.kv_heads_per_rank(self.tp)
        if self.window is not None:
            check_whole("window", self.window, remedy="give at least 1 key, the query's own, or None for all")
        if self.cost is not None:
            self.cost.check_servers(self.num_servers)
        _check_tasks(self)
        _check_coverage(self)

    def summary(self) -> PlanSummary:
        moved, q_len = self.traffic(), self.tasks.q_len
        counted = (q_len >= TILE) | (self.tasks.q_stop != self.layout.stop[_slice_of_task(self)])
        q_tokens, kv_tokens = int(moved.q_tokens.sum()), int(moved.kv_tokens.sum())
        work = self.work()
        home_work = server_work(tasks_at_home(self.layout), self.num_servers, self.cost, self.backward, self.window)
        sent = moved.sent_bytes(self.model, self.tp)
        others = self.layout.ranks_per_document() - 1
        crossing, by_pod = self.traffic_between_nodes(), None
        if crossing is not None and self.topology is not None and self.topology.num_pods > 1:
            pod = self.topology.pod_of_node()
            by_pod = np.bincount(pod, weights=crossing.between(pod).sent_bytes(self.model, self.tp))
        return PlanSummary(
            num_tasks=len(self.tasks),
            num_moved=int((self.tasks.home != self.tasks.server).sum()),
            smallest_shard=int((q_len[counted] if counted.any() else q_len).min()),
            work=work if self.cost is None else work / self.cost.speeds(self.num_servers),
            work_max_over_mean=max_over_mean(work, self.speed),
            work_max_over_mean_at_home=max_over_mean(home_work, self.speed),
            bytes_sent=sent,
            bytes_received=moved.received_bytes(self.model, self.tp),
            bytes_total=int(sent.sum()),
            lse_bytes_total=q_tokens * self.model.lse_token_bytes(self.tp),
            backward_bytes_total=int(backward_bytes(q_tokens, kv_tokens, self.model, self.tp)),
            bytes_all_gather=int((others * self.layout.lengths).sum()) * self.model.kv_token_bytes(self.tp),
            seconds=float((work / np.where(self.speed > 0, self.speed, 1)).max()) if self.cost else None,
            bytes_sent_by_node=None if crossing is None else crossing.sent_bytes(self.model, self.tp),
            bytes_sent_by_pod=by_pod,
        )


def server_work(
    tasks: TaskTable, num_servers: int, cost: AttentionTime | None, backward: bool = False, window: int | None = None
) -> np.ndarray:
    """[servers] Return the work: visible pairs, or the seconds of the server's call, including waves and launches.

    `cost` predicts causal tasks; for a window, seconds are scaled by the share of pairs that are visible.
    """
    causal = causal_pairs(tasks.q_start, tasks.q_stop, tasks.kv_start, tasks.kv_stop)
    pairs = causal if window is None else causal - causal_pairs(
        tasks.q_start - window, tasks.q_stop - window, tasks.kv_start, tasks.kv_stop)
    work = np.bincount(tasks.server, weights=pairs, minlength=num_servers)
    if cost is None:
        return work
    some = tasks.take(tasks.kv_stop > tasks.kv_start)
    seconds = cost.servers(some.q_len, some.kv_len, some.server, num_servers, backward,
                           aligned=some.kv_stop == some.q_stop, document=some.document, kv_start=some.kv_start)
    if window is None:
        return seconds
    whole = np.bincount(tasks.server, weights=causal, minlength=num_servers)
    return seconds * work / np.maximum(whole, 1)


def max_over_mean(work: np.ndarray, speed: np.ndarray) -> float:
    """Return the largest time over that of perfectly divided work; infinite if a server of speed 0 has work."""
    mean = work.sum() / speed.sum()
    if mean == 0:
        return 1.0
    with np.errstate(divide="ignore", invalid="ignore"):
        time = np.where(work > 0, work / speed, 0.0)
    return float(time.max() / mean)


def _first(bad: np.ndarray) -> int | None:
    return int(bad.argmax()) if bad.any() else None


def _check_tasks(plan: Plan) -> None:
    """Check that servers exist and serve, queries are inside one slice of their home, and cuts are on the tile grid."""
    layout, tasks, server, owner = plan.layout, plan.tasks, plan.tasks.server, _slice_of_task(plan)
    if (i := _first((server < 0) | (server >= plan.num_servers))) is not None:
        raise UserError(f"task {i} names server {server[i]} but the pool has {plan.num_servers}; use 0 to "
                        f"{plan.num_servers - 1}")
    if (i := _first((plan.speed[server] == 0) & (tasks.kv_stop > tasks.kv_start))) is not None:
        raise UserError(f"task {i} is on server {server[i]}, whose speed is 0; give it to a server that serves")
    if (i := _first((layout.document[owner] != tasks.document) | (layout.rank[owner] != tasks.home)
                    | (tasks.q_start < layout.start[owner]) | (tasks.q_stop > layout.stop[owner])
                    | (tasks.q_start >= tasks.q_stop))) is not None:
        raise UserError(f"task {i}, queries [{tasks.q_start[i]}, {tasks.q_stop[i]}) of document {tasks.document[i]}, "
                        f"is not inside one slice of its home {tasks.home[i]}; cut tasks at slice ends")
    if (i := _first((tasks.q_len % TILE != 0) & (tasks.q_stop != layout.stop[owner]))) is not None:
        raise UserError(f"task {i} has {tasks.q_len[i]} queries, which is not a multiple of {TILE} and does not "
                        "end its slice; cut on the tile")


def _check_coverage(plan: Plan) -> None:
    """Check that each visible pair is covered once, by cutting a document's queries wherever a task begins or ends."""
    tasks, lengths = plan.tasks, plan.layout.lengths
    ends_right = (tasks.kv_stop == tasks.q_stop) | (tasks.kv_stop <= tasks.q_start)
    if (i := _first(~ends_right | (tasks.kv_start < 0) | (tasks.kv_start > tasks.kv_stop))) is not None:
        remedy = "end its keys at its last query or before its first" if not ends_right[i] else (
            "begin its keys at 0 or later, and not behind their end")
        raise UserError(f"task {i} reads keys [{tasks.kv_start[i]}, {tasks.kv_stop[i]}) for queries "
                        f"[{tasks.q_start[i]}, {tasks.q_stop[i]}); {remedy}")
    span = int(lengths.max()) + 1
    base = tasks.document * span
    edges = np.unique(np.concatenate([base + tasks.q_start, base + tasks.q_stop, base + tasks.kv_start,
                                      base + np.minimum(tasks.kv_stop, lengths[tasks.document])]))
    first = np.searchsorted(edges, base + tasks.q_start)
    task, nth = spread(np.searchsorted(edges, base + tasks.q_stop) - first)
    cell = first[task] + nth                                     # index of a run of queries between edges
    order = np.lexsort((tasks.kv_start[task], cell))
    task, cell = task[order], cell[order]
    q_start, q_stop = edges[cell] - base[task], edges[cell + 1] - base[task]
    first = np.zeros_like(q_start) if plan.window is None else np.maximum(q_start - plan.window + 1, 0)
    kv_start = np.clip(tasks.kv_start[task], first, q_stop)      # drop keys before the window or past the run's end
    kv_stop = np.minimum(tasks.kv_stop[task], q_stop)
    seen = kv_stop > kv_start
    task, cell, q_start, q_stop, kv_start, kv_stop, first = (
        column[seen] for column in (task, cell, q_start, q_stop, kv_start, kv_stop, first))
    opens = np.ones(len(cell), dtype=bool)
    opens[1:] = cell[1:] != cell[:-1]
    closes = np.roll(opens, -1)
    expected = np.where(opens, first, np.roll(kv_stop, 1))
    if (i := _first((kv_start != expected) | (closes & (kv_stop != q_stop)))) is not None:
        raise UserError(f"document {tasks.document[task[i]]}: queries [{q_start[i]}, {q_stop[i]}) see keys "
                        f"[{kv_start[i]}, {kv_stop[i]}) where [{expected[i]}, {q_stop[i]}) should follow; every "
                        "causal pair must be covered exactly once")
    covered = int((q_stop - q_start)[opens].sum())
    if covered != plan.layout.num_tokens:
        raise UserError(f"the tasks cover {covered} of {plan.layout.num_tokens} queries; every query needs its keys")


def _slice_of_task(plan: Plan) -> np.ndarray:
    layout, tasks = plan.layout, plan.tasks
    return Positions.of(layout.document, layout.start, layout.lengths).holding(tasks.document, tasks.q_start)
