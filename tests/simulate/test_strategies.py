"""No strategy in any batch is faster than the bound, whatever the table, the pipeline, the data or the tolerance."""

from __future__ import annotations

import numpy as np
from hypothesis import example, given, settings
from hypothesis import strategies as st

from distca.cost.attention_time import shipped_table
from distca.cost.latency_table import LatencyTable, analytic_table
from distca.models import model_named
from distca.simulate.bounds import bound
from distca.simulate.costs import Costs
from distca.simulate.outcomes import Figures
from distca.simulate.setting import setting
from distca.simulate.strategies import NAMES
from distca.simulate.sweep import Question, batch_figures
from distca.spec import cluster_named
from distca.workload.sequences import Source

MODEL = model_named("llama3-8b")
CLUSTER = cluster_named("dgx-h200")


def table(seed: int) -> LatencyTable:
    """Seconds that follow no rule: cut shapes may be cheaper than whole documents, and backward than forward."""
    if seed == 0:
        return shipped_table("h200")
    rng = np.random.default_rng(seed)
    base = analytic_table(MODEL, 550e12)
    assert base.backward_seconds is not None
    forward, backward = (seconds * np.exp(rng.normal(0.0, 0.7, seconds.shape))
                         for seconds in (base.forward_seconds, base.backward_seconds))
    return LatencyTable("random", base.q_len, base.kv_len, forward, backward, base.peak_pairs_per_second,
                        base.metadata)


@settings(max_examples=6, deadline=None)
@given(seed=st.integers(0, 50), number=st.integers(0, 3), ranks=st.sampled_from((1, 2, 4, 6)),
       pp=st.sampled_from((1, 1, 2, 3, 5)), context=st.sampled_from((15_360, 61_440, 122_880)),
       tolerance=st.sampled_from((0.0, 0.05, 1.0)), data=st.sampled_from(("prolong", "pretrain", "lognormal")))
@example(seed=0, number=0, ranks=2, pp=1, context=131_072, tolerance=0.05, data="prolong")  # 16 GPUs with TP 8
def test_nothing_beats_the_bound(seed: int, number: int, ranks: int, pp: int, context: int, tolerance: float,
                                 data: str) -> None:
    where = setting(MODEL, CLUSTER, gpus=8 * ranks * pp, context=context, pp=pp, micro_batches=pp)
    question = Question((where,), NAMES, Source(data), table(seed), tolerance, 1, number)
    found = batch_figures(question, 0)
    (floor,) = (figures.seconds for (_, name, _), figures in found.items()
                if name == "bound" and isinstance(figures, Figures))
    others = {key[1:]: figures.seconds for key, figures in found.items()
              if isinstance(figures, Figures) and key[1] != "bound"}  # what was left out is above another of them
    assert len(others) >= 5
    for key, seconds in others.items():
        assert seconds >= floor * (1 - 1e-9), key


@settings(max_examples=30, deadline=None)
@given(st.lists(st.floats(1.0, 1e6), min_size=1, max_size=8), st.sampled_from((1, 2, 8)), st.booleans())
def test_how_tokens_are_dealt_does_not_change_the_sum_of_linear_seconds(tokens: list[float], tp: int,
                                                                        backward: bool) -> None:
    costs = Costs.of(MODEL, CLUSTER, tp, shipped_table("h200"))
    rows, total = np.array(tokens), np.array([sum(tokens)])
    of_rows, of_all = ((*costs.segment_seconds(one, backward), costs.head_seconds(one, backward))
                       for one in (rows, total))
    for parts, whole in zip(of_rows, of_all, strict=True):
        np.testing.assert_allclose(parts.sum(), whole[0])


def test_the_bound_is_no_lower_than_its_two_floors() -> None:
    lengths = np.array([65_536, *[4096] * 16])
    deep = setting(MODEL, CLUSTER, gpus=64, context=131_072, pp=4)
    flat = setting(MODEL, CLUSTER, gpus=64, context=131_072)
    costs = Costs.of(MODEL, CLUSTER, 8, shipped_table("h200"))
    assert bound(deep, costs, lengths).seconds >= bound(flat, costs, lengths).seconds  # the head is on one stage
    found = bound(flat, costs, lengths)
    assert found.work_max_over_mean == 1.0 and 0.99 < found.busy_share <= 1.0
