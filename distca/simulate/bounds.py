"""What no step can beat: a lower bound for any strategy, and one for the steps of an order.

`bound` is a lower bound on the step time of any strategy. Linear layers, head and attention take at least the mean over
the pool, with each document's attention at the table's best rate for shapes with no more keys than the document has.
Nothing is recomputed, links between ranks are free, work may run in any bubble and on any stage, and attention may be
cut anywhere. Seconds of segments are proportional to tokens, so how tokens are divided over ranks does not change their
sum. The optimizer's seconds are added, as if all stages had equal shares of the weights.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from distca.cost.work import causal_pairs
from distca.planning.orders import one_forward_one_backward
from distca.planning.schedule import IDLE, Ticks
from distca.simulate.costs import Costs
from distca.simulate.execute import Step
from distca.simulate.memory import memory
from distca.simulate.setting import Setting


def bound(setting: Setting, costs: Costs, lengths: np.ndarray) -> Step:
    """Return a lower bound on a step that trains on documents of these lengths."""
    num_layers, tokens = setting.model.num_layers, np.full(1, float(lengths.sum()))
    pairs = causal_pairs(np.zeros_like(lengths), lengths) * num_layers
    linear = attention = 0.0                                     # of all ranks
    for backward in (False, True):
        linear += sum(float(part[0]) for part in costs.segment_seconds(tokens, backward)) * num_layers
        linear += float(costs.head_seconds(tokens, backward)[0])
        attention += costs.attention.least(pairs, backward, lengths)
    optimizer = float(costs.optimizer_seconds(setting.layers, setting.num_data).mean())
    seconds = (linear + attention) / setting.num_pool + optimizer
    equal_tokens = memory(costs, setting.layers, one_forward_one_backward(setting.pp, 1),
                          np.full((1, setting.num_data), setting.tokens_per_rank))  # of one micro-batch
    return Step(seconds, 1.0, np.full(setting.num_pool, attention / setting.num_pool), equal_tokens)


def least_attention(costs: Costs, micro_batches: Sequence[np.ndarray]) -> np.ndarray:
    """[forward and backward, micro-batches] Least seconds of a layer's attention, over all ranks."""
    return np.array([[costs.attention.least(causal_pairs(np.zeros_like(lengths), lengths), backward, lengths)
                      for lengths in micro_batches] for backward in (False, True)])


def ticks_seconds(
    setting: Setting, costs: Costs, ticks: Ticks, layers: Sequence[int], attention: np.ndarray
) -> float:
    """Return the seconds of an order's ticks with free links and attention that divides evenly over ranks.

    `attention` is that of a layer, as `least_attention` returns it.
    If stages share attention, a tick takes as long as its busiest stage's linear layers, and at least the mean of all
    its work over the pool. Otherwise each stage runs its units one after the other and waits for their inputs.
    """
    tokens, parts = np.full(1, float(setting.tokens_per_rank)), np.array(layers)

    def linear(backward: bool, weights: bool | None = None) -> float:
        return sum(float(segment[0]) for segment in costs.segment_seconds(tokens, backward, weights))

    own = parts[ticks.part] * np.where(ticks.backward, linear(True, False if ticks.splits else None), linear(False))
    seconds = own * ticks.active + parts[ticks.weight_part] * (ticks.weight != IDLE) * linear(True, True)
    head = np.array([float(costs.head_seconds(tokens, backward)[0]) for backward in (False, True)])
    if ticks.spreads_head:
        seconds[ticks.head != IDLE] = head.sum() / setting.pp
    else:
        seconds += head[ticks.backward.astype(int)] * (ticks.active & (ticks.part == len(layers) - 1))
    shared = ticks.active * parts[ticks.part] * attention[ticks.backward.astype(int), ticks.micro_batch]
    work = seconds + shared / setting.num_data                   # [ticks, stages] of a rank
    found = (float(np.maximum(seconds.max(axis=1), work.mean(axis=1)).sum()) if ticks.same_phase else
             follow(ticks, work))
    of_stages = np.bincount(ticks.stage_of, weights=parts)
    return found + float(costs.optimizer_seconds(of_stages, setting.num_data).max())


def follow(ticks: Ticks, seconds: np.ndarray) -> float:
    """Run the units of [ticks, stages] seconds in each stage's order, without waiting for anything but their inputs."""
    ready = np.zeros((2, ticks.num_parts + 2, ticks.num_micro_batches))  # input of each part, from one to the other end
    free = np.zeros(ticks.num_stages)
    for tick, running in enumerate(ticks.micro_batch.tolist()):
        ended = free.copy()
        for stage, number in enumerate(running):
            phase, part = int(ticks.backward[tick, stage]), int(ticks.part[tick, stage]) + 1
            begin = free[stage] if number == IDLE else max(free[stage], ready[phase, part, number])
            ended[stage] = begin + seconds[tick, stage]
            if number != IDLE:
                ready[phase, part + (-1 if phase else 1), number] = ended[stage]
                if part == ticks.num_parts and not phase:
                    ready[1, part, number] = ended[stage]
        free = ended
    return float(free.max())
