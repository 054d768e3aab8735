"""Choose the placement by its plan: balanced, unless the loader's own order turns out to travel less.

Balanced placement saves bytes by keeping queries at home, which pays where short documents fill up the ranks of long
ones. Where nearly all documents are long there is nothing to fill up with: the slices of a document then have equal
work but unequal length, late ranks gather almost all of its keys, and moving a few rectangles out of the loader's
order is cheaper. No bound known before planning tells the two apart, so both are planned and the worse is dropped.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from distca.planning.balance import outline_of_nodes
from distca.planning.plan import Plan, server_work
from distca.planning.tasks import tasks_at_home
from distca.workload.layout import Layout


def plan_placed(placement: str, lay: Callable[[str], Layout], balance: Callable[[Layout], Plan]) -> tuple[Plan, str]:
    """The plan of a placement, and which one it is of: `given` where `balanced` was asked for and is worse.

    Worse are more bytes, in all or from the busiest sender. Where the pool has nodes these are the bytes between them,
    which are what everybody waits for, and the busiest node's.
    """
    plan = balance(lay(placement))
    if placement != "balanced":
        return plan, placement
    in_order, sent = lay("given"), _sent_bytes(plan)
    if _no_more(sent, _least_bytes(plan, in_order)):
        return plan, placement
    if plan.cost is None and plan.topology is not None and plan.topology.levels():
        outline = outline_of_nodes(in_order, plan.model, plan.topology, tolerance=plan.tolerance, speed=plan.speed,
                                   tp=plan.tp)
        return (plan, placement) if _no_more(sent, _sent_bytes(outline)) else (balance(in_order), "given")
    given = balance(in_order)
    return (plan, placement) if _no_more(sent, _sent_bytes(given)) else (given, "given")


def _sent_bytes(plan: Plan) -> tuple[float, float]:
    """In all and by the busiest: between nodes where the pool has levels, else between ranks."""
    crossing = plan.traffic_between_nodes() if plan.topology is not None and plan.topology.levels() else None
    sent = (plan.traffic() if crossing is None else crossing).sent_bytes(plan.model, plan.tp)
    return float(sent.sum()), float(sent.max())


def _no_more(mine: tuple[float, float], theirs: tuple[float, float]) -> bool:
    return mine[0] <= theirs[0] and mine[1] <= theirs[1]


def _least_bytes(plan: Plan, layout: Layout) -> tuple[float, float]:
    """Bytes that leave ranks, or nodes, in any plan of a layout that is as level: in all, and from the busiest.

    Work F leaves as a rectangle of queries and keys in at least 2 √(F·q·kv) bytes, of which its home sends all but the
    outputs. Zero where that cannot be said: a document in several places has keys in all of them, and seconds are no
    area.
    """
    levels = () if plan.topology is None else plan.topology.levels()
    group = levels[-1] if levels else np.arange(plan.num_servers)
    distinct = np.unique(layout.document * plan.num_servers + group[layout.rank])
    if plan.cost is not None or len(distinct) > layout.num_documents:
        return 0.0, 0.0
    load = np.bincount(group, weights=server_work(tasks_at_home(layout), plan.num_servers, None))
    cap = (1.0 + plan.tolerance) * load.sum() * np.bincount(group, weights=plan.speed) / plan.speed.sum()
    surplus = np.maximum(load - cap, 0.0)
    model, tp = plan.model, plan.tp
    q_bytes, out_bytes, kv_bytes = model.q_token_bytes(tp), model.out_token_bytes(tp), model.kv_token_bytes(tp)
    return (float(2.0 * np.sqrt(surplus * (q_bytes + out_bytes) * kv_bytes).sum()),
            float(2.0 * np.sqrt(surplus * q_bytes * kv_bytes).max()))
