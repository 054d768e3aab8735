"""What a step plan's fields and calls must be before its plans are proven one by one.

A step can come from another rank or from a user's own code. A field out of range, or a call that one nano-batch has
and the other has not, would end as an index error in the middle of a step, or as attention that is quietly wrong.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from distca.planning.plan import Plan
from distca.spec import unknown_name
from distca.validation import UserError, check_number, check_whole
from distca.workload.packing import PLACEMENTS, check_tolerance

if TYPE_CHECKING:
    from distca.planning.step import StepPlan


def check_fields(step: StepPlan) -> None:
    """Fields in range, and micro-batches that are cut and laid alike."""
    for number_of_layers in step.layers:
        check_whole("layers of a stage", number_of_layers)
    step.model.kv_heads_per_rank(step.tp)
    shapes = {(len(one.nano_batches), one.layouts[0].num_ranks) for one in step.micro_batches}
    if len(shapes) != 1:
        raise UserError(f"micro-batches have (nano-batches, ranks) {sorted(shapes)}; cut and lay all alike")
    if step.num_data % check_whole("gather_ranks", step.gather_ranks):
        raise UserError(f"gather_ranks is {step.gather_ranks}, which does not divide {step.num_data} data ranks; give "
                        "groups of equal size")
    if step.placement not in (None, *PLACEMENTS):
        raise unknown_name("placement", step.placement, PLACEMENTS)
    for tolerance, seconds in step.tried:
        check_tolerance(tolerance)
        check_number("seconds of a tolerance that was tried", seconds, least=0)


def check_calls(step: StepPlan) -> None:
    """Every stage, tick and nano-batch has as many plans as layers run there, all for one pool, and each layer for one
    window."""
    if step.is_shared and not step.ticks.same_phase:
        raise UserError("ticks mix forward with backward but stages share attention; use same_phase_ticks")
    depths = np.where(step.ticks.active, np.array(step.layers), 0)  # [ticks, stages]
    if step.is_shared:
        depths = np.broadcast_to(depths.max(axis=1, keepdims=True), depths.shape)
    if (len(step.by_stage), {len(ticks) for ticks in step.by_stage}) != (step.num_stages, {step.ticks.num_ticks}):
        raise UserError(f"by_stage has {[*map(len, step.by_stage)]} ticks of its stages but there are "
                        f"{step.ticks.num_ticks} of {step.num_stages} stages; plan every tick of each")
    if step.is_shared and step.by_stage != step.by_stage[:1] * step.num_stages:
        raise UserError("by_stage differs between stages that share attention; give them the same plans")
    for (tick, stage), depth in np.ndenumerate(depths):
        found, expected = [*map(len, step.by_stage[stage][tick])], [int(depth)] * step.num_nano_batches
        if found != expected and (depth or found):
            raise UserError(f"tick {tick} of stage {stage} has {found} plans for its nano-batches but runs {expected} "
                            "layers; plan every layer")
    first = step.plans()[0]
    for plan in step.plans():
        if (plan.model, plan.tp, plan.num_servers) != (step.model, step.tp, first.num_servers):
            raise UserError(f"a plan is for {plan.num_servers} servers, {plan.model.name!r} and tp {plan.tp} but the "
                            f"step for {first.num_servers}, {step.model.name!r} and {step.tp}; plan for one pool")
    _check_windows(step)


def _check_windows(step: StepPlan) -> None:
    """Calls of a layer have one window; a plan whose documents fit into it may be without."""
    by_layer: dict[tuple[int, int], list[Plan]] = {}
    for stage, ticks in enumerate(step.by_stage[:1 if step.is_shared else None]):
        for rows in ticks:
            for row in rows:
                for depth, plan in enumerate(row):
                    by_layer.setdefault((stage, depth), []).append(plan)
    for (stage, depth), plans in by_layer.items():
        window = min((plan.window for plan in plans if plan.window is not None), default=None)
        for plan in plans:
            hides = window is not None and window < plan.layout.lengths.max(initial=0)
            if plan.window != window and (plan.window is not None or hides):
                raise UserError(f"layer {depth} of stage {stage} has window {window} in one call and {plan.window} in "
                                "another; plan a layer's calls for one window")
