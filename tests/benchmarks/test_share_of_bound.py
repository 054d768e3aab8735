"""Benchmarks of simulated steps: what is lost to the bound adds up, and only the order of micro-batches differs."""

from __future__ import annotations

from dataclasses import replace

import micro_batch_order
import pytest
import share_of_bound as benchmark
from paper.cases import Case

from distca.cost.attention_time import shipped_table
from distca.models import model_named
from distca.planning.orders import orders
from distca.simulate.bounds import bound
from distca.simulate.costs import Costs
from distca.simulate.setting import setting
from distca.simulate.strategies import PoolChoice, StepDocuments
from distca.spec import cluster_named
from distca.workload.sequences import Source, batch_sequences

LLAMA, CLUSTER = model_named("llama3-8b"), cluster_named("dgx-h200")


def test_what_is_lost_is_told_apart() -> None:
    case = Case("fig9", nodes=2, context=32_768, sequences=4)
    where = setting(LLAMA, CLUSTER, gpus=16, context=case.context, tp=4, sequences=case.sequences)
    row = benchmark.measure(case, (where,), 1, "0.05")
    assert 0.5 < row.share <= row.with_free_links * (1 + 1e-9) <= row.ceiling_of_tasks * (1 + 1e-9) <= 1 + 2e-9
    assert row.ceiling_of_pipeline == pytest.approx(1.0)         # without stages nothing fills or drains
    other = replace(row, share=0.96, tp=8)
    summary = benchmark.summarize([replace(row, share=0.98), other])
    assert summary["fig9, TP 4"]["part_with_97"] == 1.0
    assert summary["fig9, TP 8"]["part_with_97"] == 0.0 and summary["fig9, TP 8"]["part_with_95"] == 1.0


@pytest.mark.parametrize(("pp", "micro_batches"), [(1, 1), (2, 4), (4, 4)])
def test_stages_fill_and_drain(pp: int, micro_batches: int) -> None:
    """Never below the bound; with stages above it by at most the ticks that are not full, of which there are pp - 1."""
    where = setting(LLAMA, CLUSTER, gpus=32, context=32_768, tp=4, pp=pp, sequences=micro_batches,
                    micro_batches=micro_batches)
    costs = Costs.of(LLAMA, CLUSTER, where.tp, shipped_table("h200"))
    batch = StepDocuments(tuple(batch_sequences(Source("prolong"), where.context, micro_batches, (0,))))
    least = bound(where, costs, batch.lengths()).seconds
    for order in orders(pp, micro_batches, LLAMA.num_layers):
        found = PoolChoice("given", order=order).floor(where, costs, batch)
        assert found >= least * (1 - 1e-9)
        assert found == pytest.approx(least) if pp == 1 else found < least * 1.6 * (1 + (pp - 1) / micro_batches)


def test_steps_differ_in_the_order_of_micro_batches_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    where = setting(LLAMA, CLUSTER, gpus=16, context=16_384, tp=4, pp=2, sequences=4, micro_batches=4)
    one = micro_batch_order.measure(where, "pretrain", "interleaved_2", 1)
    assert one.gain == pytest.approx(one.drawn_seconds / one.sorted_seconds) and one.bytes_ratio != 1.0
    monkeypatch.setattr(micro_batch_order, "by_work", lambda documents: range(len(documents)))
    same = micro_batch_order.measure(where, "pretrain", "interleaved_2", 1)
    assert same.gain == same.bytes_ratio == 1.0 and same.drawn_seconds == one.drawn_seconds
