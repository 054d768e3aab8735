"""Choose the placement by its plans: balanced, unless the loader's own order turns out to travel less.

Balanced placement saves bytes by keeping queries at home, which pays where short documents fill up the ranks of long
ones. Where nearly all documents are long there is nothing to fill up with: the slices of a document then have equal
work but unequal length, late ranks gather almost all of its keys, and moving a few rectangles out of the loader's
order is cheaper. No bound known before planning tells the two apart in general. So both are planned, unless a look at
the given order that takes a small part of the time says enough.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import numpy as np

from distca.planning.balance import balance, outline_of_nodes
from distca.planning.plan import Plan, server_work
from distca.planning.tasks import tasks_at_home
from distca.workload.layout import Layout

Planner = Callable[[Layout], Plan]


def sends_no_more(plans: Sequence[Plan], in_order: Callable[[Planner], Sequence[Plan]]) -> bool | None:
    """Whether a step's calls send no more than the same calls with documents in the given order would.

    More are more bytes, in all or from each call's busiest sender. Where the pool has nodes these are the bytes between
    them, which are what everybody waits for, and the busiest node's. `in_order` gives the calls of the given order by a
    planner of its own. In seconds those of causal pairs do, which send about as much and take a tenth of the time to
    make. None where only real plans can tell.
    """
    one, sent = plans[0], _sent(plans)
    has_levels = one.topology is not None and len(one.topology.levels()) > 0

    def at_home(layout: Layout) -> Plan:
        return Plan(layout, tasks_at_home(layout), one.speed, one.tolerance, one.model, one.tp)

    def in_pairs(layout: Layout) -> Plan:
        if one.topology is None or not has_levels:
            return balance(layout, one.model, tolerance=one.tolerance, speed=one.speed, tp=one.tp)
        return outline_of_nodes(layout, one.model, one.topology, tolerance=one.tolerance, speed=one.speed, tp=one.tp)

    if one.cost is None:
        if _no_more(sent, _sum(_least_bytes(one, plan.layout) for plan in in_order(at_home))):
            return True
        return _no_more(sent, _sent(in_order(in_pairs))) if has_levels else None
    return _no_more(sent, _sent(in_order(in_pairs))) or None


def is_no_more(plans: Sequence[Plan], others: Sequence[Plan]) -> bool:
    """The same of two ways to plan a step's calls."""
    return _no_more(_sent(plans), _sent(others))


def _sent(plans: Iterable[Plan]) -> tuple[float, float]:
    """Of all calls together, in all and by the busiest of each: between nodes where the pool has levels, else ranks."""
    return _sum(_sent_bytes(plan) for plan in plans)


def _sum(calls: Iterable[tuple[float, float]]) -> tuple[float, float]:
    total, busiest = np.sum(list(calls), axis=0).tolist()
    return total, busiest


def _sent_bytes(plan: Plan) -> tuple[float, float]:
    crossing = plan.traffic_between_nodes() if plan.topology is not None and plan.topology.levels() else None
    sent = (plan.traffic() if crossing is None else crossing).sent_bytes(plan.model, plan.tp)
    return float(sent.sum()), float(sent.max())


def _no_more(mine: tuple[float, float], theirs: tuple[float, float]) -> bool:
    return mine[0] <= theirs[0] and mine[1] <= theirs[1]


def _least_bytes(plan: Plan, layout: Layout) -> tuple[float, float]:
    """Bytes that leave ranks, or nodes, in any plan of a layout that is as level: in all, and from the busiest.

    Work F leaves as a rectangle of queries and keys in at least 2 √(F·q·kv) bytes, of which its home sends all but the
    outputs. Zero where that cannot be said: a document in several places has keys in all of them.
    """
    levels = () if plan.topology is None else plan.topology.levels()
    group = levels[-1] if levels else np.arange(plan.num_servers)
    distinct = np.unique(layout.document * plan.num_servers + group[layout.rank])
    if len(distinct) > layout.num_documents:
        return 0.0, 0.0
    load = np.bincount(group, weights=server_work(tasks_at_home(layout), plan.num_servers, None))
    cap = (1.0 + plan.tolerance) * load.sum() * np.bincount(group, weights=plan.speed) / plan.speed.sum()
    surplus = np.maximum(load - cap, 0.0)
    model, tp = plan.model, plan.tp
    q_bytes, out_bytes, kv_bytes = model.q_token_bytes(tp), model.out_token_bytes(tp), model.kv_token_bytes(tp)
    return (float(2.0 * np.sqrt(surplus * (q_bytes + out_bytes) * kv_bytes).sum()),
            float(2.0 * np.sqrt(surplus * q_bytes * kv_bytes).max()))
