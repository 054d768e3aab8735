"""The step that no strategy can beat, whatever the table, the pipeline or the tolerance.

Two things every step must do, however it is planned. The ranks of a stage run the linear layers (and on the last stage
the head) of all tokens: on average so long, and the longest no shorter. And the whole pool runs these and all
attention: its mean is again a floor, with each document's attention at the best rate that its table knows for any
shape with no more keys than the document has. Links between ranks are free, attention may run in any bubble and be cut
anywhere, and rows may have any number of tokens: seconds of segments are proportional to tokens, so that how they are
dealt does not change the sum. The optimizer follows.
"""

from __future__ import annotations

import numpy as np

from distca.cost.work import causal_pairs
from distca.planning.pipeline_schedule import one_forward_one_backward
from distca.simulate.costs import Costs
from distca.simulate.execute import Step
from distca.simulate.memory import Memory, memory
from distca.simulate.setting import Setting


def bound(setting: Setting, costs: Costs, lengths: np.ndarray) -> Step:
    """The floor of a step that trains on documents of these lengths."""
    layers, tokens = np.array(setting.layers), np.full(1, float(lengths.sum()))
    pairs = causal_pairs(np.zeros_like(lengths), lengths) * setting.model.num_layers
    linear, attention = np.zeros(setting.pp), 0.0                # of all ranks; [stages]
    for backward in (False, True):
        linear += sum(float(part[0]) for part in costs.segment_seconds(tokens, backward)) * layers
        linear[-1] += float(costs.head_seconds(tokens, backward)[0])
        attention += costs.attention.least(pairs, backward, lengths)
    optimizer = costs.optimizer_seconds(setting.layers, setting.num_data)
    floor = max(float(linear.max()) / setting.num_data, (float(linear.sum()) + attention) / setting.num_pool)
    seconds = floor + float(optimizer.max())
    busy = ((float(linear.sum()) + attention) / setting.num_pool + float(optimizer.mean())) / seconds
    return Step(seconds, busy, np.full(setting.num_pool, attention / setting.num_pool), _least_memory(setting, costs))


def _least_memory(setting: Setting, costs: Costs) -> Memory:
    """Equal tokens of one micro-batch on every rank."""
    return memory(costs, setting.layers, one_forward_one_backward(setting.pp, 1),
                  np.full((1, setting.num_data), setting.tokens_per_rank))
