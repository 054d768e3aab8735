"""Nano-batches and pool plans: same pairs, equal tokens, balanced work."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from distca.cost.latency_table import analytic_table
from distca.cost.work import causal_pairs
from distca.simulate.costs import Costs
from distca.simulate.nano import Nano, ping_pong, plan_pool
from distca.spec import cluster_named, model_named

MODEL = model_named("llama3-8b")
COSTS = Costs.of(MODEL, cluster_named("dgx-h200"), 8, analytic_table(MODEL, 550e12))


def _pairs(nano: Nano) -> int:
    own = ~nano.earlier
    return int(causal_pairs(nano.start[own], nano.stop[own]).sum())


@settings(max_examples=40, deadline=None)
@given(st.lists(st.integers(1, 5000), min_size=1, max_size=30), st.sampled_from((1, 2, 4)),
       st.sampled_from(("given", "balanced")))
def test_halves_keep_every_pair_and_equal_tokens(lengths, ranks, placement):
    lengths = np.array([*lengths, 1])
    lengths[-1] = 2 * ranks - lengths[:-1].sum() % (2 * ranks)
    halves = ping_pong(lengths, ranks, placement, 0.05)
    assert sum(_pairs(nano) for nano in halves) == int(causal_pairs(0 * lengths, lengths).sum())
    for nano in halves:
        assert (nano.tokens(ranks) == lengths.sum() / (2 * ranks)).all()
    assert not halves[0].earlier.any()  # ping never waits for keys of pong


def test_one_document_that_fills_the_batch_is_balanced_in_both_halves():
    lengths = np.array([131072])
    for placement in ("given", "balanced"):
        for nano in ping_pong(lengths, 4, placement, 0.05):
            served = plan_pool([(0, nano)], 4, 4, 0.05, COSTS)
            assert served.forward_seconds.max() <= 1.06 * served.forward_seconds.mean()
            flops = 4 * 4 * 128 * _pairs(nano)
            assert served.forward_seconds.sum() == pytest.approx(flops / 550e12, rel=0.01)  # all of it, once
        assert nano.earlier.any()


def test_idle_stages_serve_and_backward_is_mirrored():
    lengths = np.full(8, 8192)
    nano = ping_pong(lengths, 2, "given", 0.05)[0]
    served = plan_pool([(0, nano)], 2, 6, 0.05, COSTS)
    assert served.forward_seconds.max() <= 1.06 * served.forward_seconds.mean()
    assert served.forward_seconds[2:].min() > 0
    assert served.going[0].sent_bytes[:2].min() > 0 and served.going[0].sent_bytes[2:].max() == 0
    assert served.going[1].sent_bytes[4:].min() > 0 and served.going[1].sent_bytes[:4].max() == 0
    ratio = served.backward_seconds.reshape(3, 2)[::-1].ravel() / served.forward_seconds
    assert ratio == pytest.approx(np.full(6, 2.5), rel=0.05)
