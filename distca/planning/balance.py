"""Balance attention across servers by moving query shards.

Attention cost is quadratic in document length, so equal tokens are unequal work. Only the largest load costs time, so
the tolerance is spent on saving bytes: servers move just the work above their cap, in few and large shards (levels.py).

Servers may differ in speed: a hot GPU, an older one, or one that shares its host gets less work. Speeds are learnt from
measured seconds and from work that does not include speeds, which avoids feedback. The update uses only operations that
every processor rounds the same way, so ranks that start from the same numbers plan with the same speeds.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache

import numpy as np

from distca.cost.attention_time import AttentionTime
from distca.cost.work import causal_pairs, pairs_of_shard
from distca.planning.levels import Dealer, Mover, keys_at_home, shed
from distca.planning.plan import Plan, max_over_mean
from distca.planning.prefix_split import share_prefixes
from distca.planning.shard_cut import Measure, Prices
from distca.planning.tasks import TaskTable, tasks_at_home
from distca.spec import ModelShape
from distca.workload.layout import Layout
from distca.workload.packing import check_pool, check_tolerance
from distca.workload.topology import Topology, check_topology

_PASSES = 6         # most passes in seconds
_AIM = 0.98         # part of the tolerance that servers may keep when they shed, as the tails of other servers change
_MORE_BYTES = 2.0   # most bytes over those of the plan in pairs, in total and from the busiest sender
_QUICKER = 0.99     # a pass is in vain if it takes more than this part of the best time
_PATIENCE = 3       # passes in vain in a row end the search
_SMOOTHING = 0.3    # weight of a step in the moving average of speeds
_OUTLIER = 2.0      # a measured speed is clipped to this factor around the previous one
LEAST, MOST = 0.25, 4.0  # bounds on speeds, relative to the pool's median
_EQUAL = 0.03       # speeds this close to 1 are planned as 1, so that noise does not change plans


def balance(
    layout: Layout, model: ModelShape, *, tolerance: float = 0.05, speed: Sequence[float] | np.ndarray | None = None,
    tp: int = 1, cost: AttentionTime | None = None, backward: bool = False, topology: Topology | None = None,
) -> Plan:
    """Assign every query's attention to a server so that max/mean work is at most 1 + tolerance, with few bytes sent.

    `speed` defines the pool: one relative speed per server, the layout's ranks first, then dedicated servers; a rank of
    speed 0 serves nothing. With `cost`, forward or `backward` seconds are balanced, else causal pairs; if `cost` has
    speeds per server, `speed` multiplies them. If `topology` has nodes of several servers, work leaves a node only if
    the tolerance requires it. Ranks that call this with the same arguments get the same plan.
    """
    check_tolerance(tolerance)
    pool = check_pool(speed, layout.num_ranks)
    check_topology(topology, len(pool))
    if cost is not None:
        cost.check_servers(len(pool))
        pool = pool * cost.speeds(len(pool))
    at_home = Plan(layout, tasks_at_home(layout), pool, tolerance, model, tp, topology=topology)
    if cost is None:
        return _in_pairs(at_home)
    return _in_seconds(replace(at_home, cost=cost, backward=backward), cost)


def outline_of_nodes(
    layout: Layout, model: ModelShape, topology: Topology, *, tolerance: float = 0.05,
    speed: Sequence[float] | np.ndarray | None = None, tp: int = 1,
) -> Plan:
    """Run `balance` in causal pairs down to nodes: each node's first rank gets all tasks that the node gets."""
    pool = check_pool(speed, layout.num_ranks)
    levels = check_topology(topology, len(pool))
    at_home = Plan(layout, tasks_at_home(layout), pool, tolerance, model, tp, topology=topology)
    dealer = Dealer(layout, levels, caps(at_home.work(), pool, tolerance), tolerance, _prices(at_home, pairs_of_shard),
                    _pairs_of_tasks, is_outline=True)
    return replace(at_home, tasks=dealer.deal(at_home.tasks)[0])


def caps(work: np.ndarray, speed: np.ndarray, tolerance: float) -> np.ndarray:
    """[servers] Return the cap on the work of each: its share by speed, plus the tolerance."""
    return (1.0 + tolerance) * work.sum() * speed / speed.sum()


def _prices(plan: Plan, measure: Measure) -> Prices:
    return Prices(plan.model.q_token_bytes(plan.tp) + plan.model.out_token_bytes(plan.tp),
                  plan.model.kv_token_bytes(plan.tp), measure)


def _in_pairs(at_home: Plan) -> Plan:
    load, pool, tolerance = at_home.work(), at_home.speed, at_home.tolerance
    tasks, limit = _moved(at_home, load, caps(load, pool, tolerance), _prices(at_home, pairs_of_shard), _pairs_of_tasks)
    plan = replace(at_home, tasks=tasks)
    return plan if max_over_mean(plan.work(), pool) <= 1.0 + tolerance else replace(plan, limit=limit)


def _in_seconds(at_home: Plan, cost: AttentionTime) -> Plan:
    """Balance by seconds, which are not a sum over tasks: cutting changes them, and a call has a launch and a tail.

    The first pass deals tasks by their own seconds. Each further pass starts from the plan before it, and servers whose
    whole call takes too long shed the surplus (`levels.shed`). The quickest plan is returned; the plan in causal pairs
    and attention at home are candidates too. A pass that sends more than twice the bytes of the plan in pairs is
    discarded: attention that waits for bytes gains nothing.
    """
    pool, tolerance, backward = at_home.speed, at_home.tolerance, at_home.backward

    def seconds_of_tasks(tasks: TaskTable) -> np.ndarray:
        return cost.tasks(tasks.q_len, tasks.kv_len, tasks.kv_stop == tasks.q_stop, backward)

    def load_of(tasks: TaskTable) -> np.ndarray:
        some = tasks.take(tasks.kv_stop > tasks.kv_start)
        return np.bincount(some.server, weights=seconds_of_tasks(some), minlength=len(pool))

    prices = _prices(at_home, cache(lambda q_len, kv_len: cost.shard(q_len, max(kv_len, q_len), backward)))
    in_pairs = _in_pairs(replace(at_home, cost=None, backward=False))
    load = load_of(at_home.tasks)
    best = replace(at_home, tasks=in_pairs.tasks)
    work = best.work()
    if _slowest(load, pool) < _slowest(work, pool):              # else at_home cannot win: calls add to tasks
        best, work = min((best, work), (at_home, at_home.work()), key=lambda one: _slowest(one[1], pool))
    before: tuple[Plan, np.ndarray] | None = None                # the plan that a pass starts from, and its work
    in_vain = 0
    for _ in range(_PASSES):
        if max_over_mean(work, pool) <= 1.0 + tolerance or in_vain == _PATIENCE:
            break
        tasks = (_moved(at_home, load, caps(load, pool, tolerance), prices, seconds_of_tasks)[0] if before is None else
                 shed(before[0].tasks, before[1], caps(before[1], pool, _AIM * tolerance), prices,
                      _nodes(at_home)))
        plan = replace(at_home, tasks=tasks)
        taken = plan.work()
        part = _slowest(taken, pool) / _slowest(work, pool)
        is_better = part < 1 and _sends_no_more(plan, in_pairs)
        in_vain = 0 if is_better and part <= _QUICKER else in_vain + 1
        if is_better:
            best, work = plan, taken
        before = (best, work) if before is None else (plan, taken)
    if max_over_mean(work, pool) <= 1.0 + tolerance:
        return best
    server = int(np.argmax(work / np.where(pool > 0, pool, 1.0)))
    alone = float(load_of(best.tasks)[server])
    return replace(best, limit=f"the slowest server takes {work[server]:.3g} s, of which {work[server] - alone:.2g} s "
                               "are the launch and the tail of its work, and no cut that was tried is quicker")


def _sends_no_more(plan: Plan, than: Plan) -> bool:
    mine, theirs = (one.traffic().sent_bytes(one.model, one.tp) for one in (plan, than))
    return bool(mine.sum() <= _MORE_BYTES * theirs.sum() and mine.max() <= _MORE_BYTES * theirs.max())


def _slowest(work: np.ndarray, pool: np.ndarray) -> float:
    return max_over_mean(work, pool) * float(work.sum())


def _moved(
    at_home: Plan, load: np.ndarray, cap: np.ndarray, prices: Prices, task_work: Callable[[TaskTable], np.ndarray]
) -> tuple[TaskTable, str | None]:
    """Move tasks until no server is over its cap; return them, and the reason if a server still is."""
    layout, levels = at_home.layout, () if at_home.topology is None else at_home.topology.levels()
    if levels:
        tasks, load, limit = Dealer(layout, levels, cap, at_home.tolerance, prices, task_work).deal(at_home.tasks)
    else:
        tasks, load, limit = Mover(at_home.tasks, load, cap, keys_at_home(layout), prices).run()
    return share_prefixes(layout, tasks, load, cap, prices, _nodes(at_home)), limit


def _nodes(plan: Plan) -> np.ndarray | None:
    """[servers] Return the node of each server; None if nodes have one server each or there is one node."""
    levels = () if plan.topology is None else plan.topology.levels()
    return levels[-1] if levels else None


def _pairs_of_tasks(tasks: TaskTable) -> np.ndarray:
    return causal_pairs(tasks.q_start, tasks.q_stop, tasks.kv_start, tasks.kv_stop)


def learnt_speeds(speed: np.ndarray, work: np.ndarray, seconds: np.ndarray) -> np.ndarray:
    """Return the speeds [servers] after a step in which `work` [servers] took `seconds` [servers]; the median is 1.

    The median is the upper one: of two servers the slower is below 1. A server without work or without a measurement
    keeps its speed.
    """
    known = (work > 0) & (seconds > 0) & np.isfinite(seconds)
    if not known.any():
        return speed
    rate = np.divide(work, seconds, out=np.zeros(len(speed)), where=known)
    measured = rate / np.sort(rate[known])[known.sum() // 2]
    measured = np.clip(np.clip(measured, speed / _OUTLIER, speed * _OUTLIER), LEAST, MOST)
    return np.where(known, speed + _SMOOTHING * (measured - speed), speed)


def rounded_speeds(speed: np.ndarray) -> np.ndarray:
    """Round speeds for planning: to hundredths, and to 1 if close to it."""
    return np.where(np.abs(speed - 1.0) <= _EQUAL, 1.0, np.round(speed, 2))
