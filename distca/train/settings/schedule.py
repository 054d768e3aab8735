"""Choose the order of a pipeline's work: as `parallel.schedule` says, or the fastest by prediction that fits.

The choice depends on settings and model alone, so that every rank makes the same one, in every step and after a resume.
The prediction is the simulator's, for a pool of two data ranks per stage whose rows are one document each.
"""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache

import numpy as np

from distca.cost.mixed_pool import MixedPool, find_cost
from distca.cost.network import find_cluster
from distca.planning.choose import plan_step
from distca.planning.orders import ONE_FORWARD_ONE_BACKWARD, SAME_PHASE, order_named, orders
from distca.planning.schedule import Ticks, layers_of_stages
from distca.planning.windows import windows_by_depth
from distca.simulate.costs import Costs
from distca.simulate.execute import execute
from distca.simulate.memory import memory
from distca.simulate.setting import LEAST_BYTES
from distca.spec import ModelShape
from distca.train.settings import Settings, num_roles
from distca.validation import UserError

AUTO = "auto"
DATA_RANKS = 2            # of the predicted pool, per stage
TABLE = "h200"            # the latency table if attention.cost names none


@lru_cache(maxsize=16)
def pipeline_ticks(settings: Settings, model: ModelShape, tied: bool = False) -> Ticks:
    """Return the order of a step's work, the same in every step. A `tied` head is the embedding, on all stages."""
    stages, name, count = settings.parallel.pipeline, settings.parallel.schedule, settings.batch.micro_batches
    if stages == 1:
        return order_named(SAME_PHASE, 1, count)
    splits = not (settings.model.tile_tokens or settings.model.offload)  # these keep no inputs of weight gradients
    listed = orders(stages, count, model.num_layers, splits)
    if name == AUTO and settings.attention.mode != "disaggregated":
        name = ONE_FORWARD_ONE_BACKWARD
    if name == AUTO:
        return _fastest(settings, model, {name: ticks for name, ticks in listed.items()
                                          if _is_usable(ticks, settings, model, tied)} or listed)
    ticks = order_named(name, stages, count, splits)
    if ticks.num_parts > model.num_layers:
        raise UserError(f"parallel.schedule is {name!r} but model {model.name!r} has {model.num_layers} layers on "
                        f"{stages} stages (parallel.pipeline); give at most {model.num_layers // stages} parts")
    if ticks.splits and not splits:
        raise UserError(f"parallel.schedule is {name!r}, which computes weight gradients apart, but model.tile_tokens "
                        f"is {settings.model.tile_tokens} and model.offload {settings.model.offload:g}, which keep no "
                        "inputs for that; set both to 0, or parallel.schedule to 'auto'")
    for field in ("dedicated", "roles", "adapt"):
        value = settings.value(f"attention.{field}")
        if value and not ticks.same_phase:
            raise UserError(f"parallel.schedule is {name!r}, in which attention stays within a stage, but "
                            f"attention.{field} is {value}; set parallel.schedule to 'auto', or attention.{field} to "
                            f"{type(value)()}")
    if tied and not ticks.spreads_head:
        remedy = (f"parallel.schedule to {AUTO!r}" if name == settings.parallel.schedule else
                  "attention.mode to 'disaggregated'")
        raise UserError(f"parallel.pipeline is {stages} but the output layer of model {model.name!r} is its embedding "
                        f"(model.tied), which another stage holds; set {remedy}, untie them (model.untied), or use "
                        "one stage")
    return ticks


def _fastest(settings: Settings, model: ModelShape, listed: dict[str, Ticks]) -> Ticks:
    """Return the order with the shortest predicted step among those that keep no more than `parallel.memory`."""
    most, attention, count = settings.parallel.memory, settings.attention, settings.batch.micro_batches
    cluster, cost = find_cluster(attention.cluster), find_cost(attention.cost or TABLE)
    costs = replace(Costs.of(model, cluster, settings.parallel.tensor, cost.first if isinstance(cost, MixedPool) else
                             cost), recompute="offload" if settings.model.offload else settings.model.recompute)
    if 0 < most < LEAST_BYTES:
        kept = {name: float(ticks.peak_live().max()) for name, ticks in listed.items()}
    else:
        tokens = np.full((count, DATA_RANKS), settings.batch.tokens_per_rank)
        kept = {name: memory(costs, layers_of_stages(model.num_layers, ticks.num_parts), ticks, tokens).peak
                for name, ticks in listed.items()}
    least = min(kept, key=lambda name: kept[name])
    fitting = [name for name, needed in kept.items() if needed <= (most or cluster.memory_bytes)]
    if most and not fitting:
        raise UserError(f"parallel.memory is {most:g} but every order of {settings.parallel.pipeline} stages and "
                        f"{count} micro-batches keeps more, {least!r} the least: {kept[least]:.4g} "
                        f"{'micro-batches' if most < LEAST_BYTES else 'bytes'}; raise it to that")
    seconds = {name: _seconds(settings, model, costs, listed[name]) for name in fitting}
    return listed[min(seconds, key=lambda name: seconds[name], default=least)]


def _is_usable(ticks: Ticks, settings: Settings, model: ModelShape, tied: bool) -> bool:
    """Return whether a stage has all that the order asks of it: the head, servers, and windows that agree."""
    attention = settings.attention
    if (tied and not ticks.spreads_head) or ((num_roles(settings) or attention.adapt) and not ticks.same_phase):
        return False
    try:
        windows_by_depth(model.layer_windows, layers_of_stages(model.num_layers, ticks.num_parts),
                         shared=ticks.same_phase)
    except UserError:
        return False
    return True


def _seconds(settings: Settings, model: ModelShape, costs: Costs, ticks: Ticks) -> float:
    tp, tokens = settings.parallel.tensor, settings.batch.tokens_per_rank
    lengths = [np.full(DATA_RANKS, tokens)] * settings.batch.micro_batches
    step = plan_step(lengths, model, num_data=DATA_RANKS, layers=layers_of_stages(model.num_layers, ticks.num_parts),
                     ticks=ticks, tp=tp, ping_pong=settings.batch.ping_pong, cost=costs.attention)
    return execute(step, costs).seconds
