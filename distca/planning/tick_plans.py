"""One plan per tick over the ranks of all stages.

Attention has no weights, so a stage's tasks are as good as any other's: the pool of a tick is every rank of every
stage. Active stages bring the documents of their micro-batches, idle stages bring none and serve, and the work of a
tick is level over all of them. Backward ticks have plans of their own, as other stages are idle in them and backward's
seconds are not forward's.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import groupby

import numpy as np

from distca.cost.attention_time import AttentionTime
from distca.planning.balance import balance
from distca.planning.plan import Plan, max_over_mean
from distca.planning.schedule import IDLE, Ticks
from distca.spec import ModelShape
from distca.validation import UserError, check_whole
from distca.workload.layout import KeySlices, Layout
from distca.workload.packing import check_pool
from distca.workload.topology import Topology

Placing = tuple[int, ...]  # [stages] the micro-batch that each stage brings to a plan, -1 for none


def layers_of_stages(num_layers: int, num_stages: int) -> tuple[int, ...]:
    """Layers of each stage, as even as possible.

    The last stage also has the head, and a stage keeps the more micro-batches alive the earlier it is, so the layers
    that are left over go to the stages right before the last.
    """
    for field, value in (("num_layers", num_layers), ("num_stages", num_stages)):
        check_whole(field, value)
    if num_stages > num_layers:
        raise UserError(f"num_stages is {num_stages} but the model has {num_layers} layers; use at most {num_layers} "
                        "stages, so that each has a layer")
    each, left = divmod(int(num_layers), int(num_stages))
    return tuple(each + (num_stages - 1 - left <= stage < num_stages - 1) for stage in range(num_stages))


def plan_ticks(
    ticks: Ticks,
    layouts: Sequence[Layout],
    model: ModelShape,
    *,
    layers: Sequence[int],
    tolerance: float = 0.05,
    tp: int = 1,
    speed: Sequence[float] | np.ndarray | None = None,
    cost: AttentionTime | None = None,
    topology: Topology | None = None,
) -> list[tuple[Plan, ...]]:
    """For every tick one plan per depth, the index of a layer inside its stage.

    `layouts[m]` lays micro-batch m over the data ranks of a stage, and `layers` names every stage's layers. The plan of
    depth d holds the active stages that have more than d layers, over ranks stage * data ranks + data; depths that hold
    the same stages share one Plan. Its documents are numbered micro-batch after micro-batch. `speed` names the pool as
    in `balance`: the ranks of all stages first, dedicated servers after them. Where `cost` knows seconds, a backward
    tick balances backward's; pairs are the same both ways. `topology` names the nodes of the pool.
    """
    pool = check_pool(speed, ticks.num_stages * _check_inputs(ticks, layouts, layers))
    known: dict[tuple[bool, tuple[int, ...]], tuple[Placing, Plan]] = {}  # by micro-batches, whatever their stages

    def plan(placing: Placing, layout: Layout, backward: bool) -> Plan:
        together = backward, tuple(sorted(placing))
        made = _on_other_stages(*known[together], placing, layout) if together in known else None
        if made is None:
            made = balance(layout, model, tolerance=tolerance, speed=pool, tp=tp, cost=cost, backward=backward,
                           topology=topology)
            known.setdefault(together, (placing, made))
        return made

    return _each_depth(ticks, layouts, layers, plan, phases_differ=cost is not None)


def plan_ticks_by(
    planner: Callable[[Layout], Plan], ticks: Ticks, layouts: Sequence[Layout], *, layers: Sequence[int]
) -> list[tuple[Plan, ...]]:
    """The plans of `plan_ticks` by another planner, such as attention at home."""
    _check_inputs(ticks, layouts, layers)
    return _each_depth(ticks, layouts, layers, lambda placing, layout, backward: planner(layout), phases_differ=False)


def tick_layout(placing: Sequence[int], layouts: Sequence[Layout]) -> Layout:
    """The layout over the ranks of all stages when stage s holds micro-batch placing[s], or nothing where it is -1.

    Documents are numbered micro-batch after micro-batch, so that their numbers do not depend on the stages.
    """
    num_data = layouts[0].num_ranks
    here = sorted(micro_batch for micro_batch in placing if micro_batch != IDLE)
    counts = np.array([layouts[micro_batch].num_documents for micro_batch in here])
    first = dict(zip(here, (np.cumsum(counts) - counts).tolist(), strict=True))  # number of its first document
    parts = [(stage, micro_batch, layouts[micro_batch]) for stage, micro_batch in enumerate(placing)
             if micro_batch != IDLE]
    return Layout(
        lengths=np.concatenate([layouts[micro_batch].lengths for micro_batch in here]),
        document=np.concatenate([layout.document + first[micro_batch] for _, micro_batch, layout in parts]),
        start=np.concatenate([layout.start for *_, layout in parts]),
        stop=np.concatenate([layout.stop for *_, layout in parts]),
        rank=np.concatenate([layout.rank + stage * num_data for stage, _, layout in parts]),
        num_ranks=len(placing) * num_data,
        key_only=KeySlices(
            np.concatenate([layout.key_only.document + first[micro_batch] for _, micro_batch, layout in parts]),
            np.concatenate([layout.key_only.start for *_, layout in parts]),
            np.concatenate([layout.key_only.stop for *_, layout in parts]),
            np.concatenate([layout.key_only.rank + stage * num_data for stage, _, layout in parts])),
    )


def served_in_bubbles(ticks: Ticks, plans: Sequence[Sequence[Plan]]) -> float:
    """The share of all attention work that ranks of idle stages did; dedicated servers are no bubbles."""
    served = total = 0.0
    for active, depths in zip(ticks.active, plans, strict=True):
        for plan, num_layers in _runs(depths):
            work = num_layers * plan.work()
            of_ranks = work[:plan.layout.num_ranks].reshape(ticks.num_stages, -1)  # [stages, data ranks]
            served += float(of_ranks[~active].sum())
            total += float(work.sum())
    return served / total if total else 0.0


def work_over_ticks(plans: Sequence[Sequence[Plan]]) -> tuple[float, float]:
    """The largest work of any server and the mean over the pool, per unit of speed, each summed over all layers."""
    largest = mean = 0.0
    for depths in plans:
        for plan, num_layers in _runs(depths):
            work = num_layers * plan.work()
            level = float(work.sum() / plan.speed.sum())
            largest += level * max_over_mean(work, plan.speed)
            mean += level
    return largest, mean


def _runs(depths: Sequence[Plan]) -> list[tuple[Plan, int]]:
    """Plans with the number of consecutive depths that share them."""
    runs = [list(run) for _, run in groupby(depths, key=id)]
    return [(run[0], len(run)) for run in runs]


def _check_inputs(ticks: Ticks, layouts: Sequence[Layout], layers: Sequence[int]) -> int:
    """The data ranks of a stage."""
    ticks.validate()
    if not ticks.same_phase:
        raise UserError("ticks mix forward with backward, which cannot share attention; use same_phase_ticks")
    if len(layouts) != ticks.num_micro_batches:
        raise UserError(f"layouts has {len(layouts)} micro-batches but ticks has {ticks.num_micro_batches}; give one "
                        "layout per micro-batch")
    for number, layout in enumerate(layouts):
        if layout.num_ranks != layouts[0].num_ranks:
            raise UserError(f"layouts[{number}] has {layout.num_ranks} ranks but layouts[0] has "
                            f"{layouts[0].num_ranks}; lay every micro-batch over the same data ranks")
    whole = all(isinstance(count, int | np.integer) and not isinstance(count, bool) for count in layers)
    if len(layers) != ticks.num_stages or not whole or min(layers) < 1:
        raise UserError(f"layers is {tuple(layers)} but there are {ticks.num_stages} stages; give each stage a whole "
                        "number of at least 1, as layers_of_stages does")
    return layouts[0].num_ranks


def _each_depth(
    ticks: Ticks, layouts: Sequence[Layout], layers: Sequence[int], plan: Callable[[Placing, Layout, bool], Plan], *,
    phases_differ: bool,
) -> list[tuple[Plan, ...]]:
    """For every tick and depth the plan of the stages that are active and so deep, made once for each such set."""
    deep = np.asarray(layers)
    made: dict[tuple[Placing, bool], Plan] = {}
    found: list[tuple[Plan, ...]] = []
    for tick, micro_batch in enumerate(ticks.micro_batch):
        backward = phases_differ and ticks.phase(tick)
        depths: list[Plan] = []
        for depth in range(deep[micro_batch != IDLE].max(initial=0)):
            placing: Placing = tuple(np.where(deep > depth, micro_batch, IDLE).tolist())
            if (placing, backward) not in made:
                made[placing, backward] = plan(placing, tick_layout(placing, layouts), backward)
            depths.append(made[placing, backward])
        found.append(tuple(depths))
    return found


def _on_other_stages(before: Placing, plan: Plan, after: Placing, layout: Layout) -> Plan | None:
    """A plan for the same micro-batches on other stages, as servers of equal speed are interchangeable.

    None where the speeds differ, where ranks that shared a node would not, or where the plan has a limit: its text
    names ranks.
    """
    num_data = layout.num_ranks // len(after)
    moves_to = np.empty(len(after), dtype=np.int64)              # [stages] idle stages follow in order
    moves_to[np.argsort(before, kind="stable")] = np.argsort(after, kind="stable")
    rank = np.arange(plan.num_servers)
    rank[:layout.num_ranks] = (moves_to[:, None] * num_data + np.arange(num_data)).ravel()
    if plan.limit is not None or (plan.speed[rank] != plan.speed).any():
        return None
    if plan.topology is not None and not _same_nodes(plan.topology, rank):
        return None
    tasks = replace(plan.tasks, home=rank[plan.tasks.home], server=rank[plan.tasks.server])
    return replace(plan, layout=layout, tasks=tasks)


def _same_nodes(topology: Topology, rank: np.ndarray) -> bool:
    """Whether servers share nodes and pods after each moved to `rank` exactly where they did before."""
    return all(len(np.unique(np.stack([group, group[rank]]), axis=1).T) == int(group.max()) + 1
               for group in (topology.node, topology.pod))
