"""One step plan, made in one place: what a training run would execute is what the simulator times."""

from __future__ import annotations

from dataclasses import fields, is_dataclass, replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("torch")

from distca.cost.attention_time import shipped_table
from distca.models import MODELS
from distca.planning.orders import by_work
from distca.simulate.costs import Costs
from distca.simulate.setting import setting
from distca.simulate.strategies import STRATEGIES, PoolChoice, StepDocuments
from distca.spec import cluster_named
from distca.train.batches import attention_time, step_plan
from distca.train.settings import load_settings
from distca.workload.sequences import Source, batch_sequences
from distca.workload.topology import Topology


def differing(one: Any, other: Any, path: str = "step") -> list[str]:
    """Where two values differ: dataclasses field by field, arrays with their types, tuples entry by entry."""
    if type(one) is not type(other):
        return [f"{path}: {type(one).__name__} and {type(other).__name__}"]
    if isinstance(one, np.ndarray):
        same = one.dtype == other.dtype and np.array_equal(one, other, equal_nan=one.dtype.kind == "f")
        return [] if same else [path]
    if is_dataclass(one) and not hasattr(one, "shards"):         # an AttentionTime knows itself what equal is
        return [line for field in fields(one)
                for line in differing(getattr(one, field.name), getattr(other, field.name), f"{path}.{field.name}")]
    if isinstance(one, tuple):
        return [f"{path}: {len(one)} and {len(other)}"] if len(one) != len(other) else [
            line for at, pair in enumerate(zip(one, other, strict=True)) for line in differing(*pair, f"{path}[{at}]")]
    return [] if one == other else [f"{path}: {one!r} and {other!r}"]


@settings(max_examples=12, deadline=None)
@given(seed=st.integers(0, 100), num_data=st.sampled_from((1, 2, 4)), tp=st.sampled_from((1, 2, 8)),
       pp=st.sampled_from((1, 1, 2, 3)), context=st.sampled_from((8192, 32_768)), ping_pong=st.booleans(),
       tolerance=st.sampled_from((0.0, 0.05, 0.3)), name=st.sampled_from(("disaggregated", "distca")),
       nth=st.integers(0, 6))
def test_a_run_and_its_simulation_have_equal_step_plans(seed: int, num_data: int, tp: int, pp: int, context: int,
                                                        ping_pong: bool, tolerance: float, name: str,
                                                        nth: int) -> None:
    model, cluster = MODELS["llama3-8b"], replace(cluster_named("dgx-h200"), memory_bytes=1e15)
    where = setting(model, cluster, gpus=num_data * tp * pp, context=context, tp=tp, pp=pp, sequences=4 * pp,
                    micro_batches=2 * pp)
    batch = StepDocuments(tuple(batch_sequences(Source("prolong"), context, where.num_sequences, (seed,))))
    choices = STRATEGIES[name].choices(where, tolerance)
    choice = choices[nth % len(choices)]
    assert isinstance(choice, PoolChoice) and choice.tolerance == tolerance
    simulated = replace(choice, ping_pong=ping_pong).step_plan(
        where, Costs.of(model, cluster, tp, shipped_table("h200")), batch)
    run = load_settings(None, {
        "model.name": model.name, "parallel.tensor": str(tp), "parallel.pipeline": str(pp),
        "batch.ping_pong": str(ping_pong).lower(), "attention.placement": choice.placement,
        "attention.tolerance": str(tolerance), "attention.cost": "h200", "batch.micro_batches": str(2 * pp),
        "parallel.schedule": choice.order})
    topology = Topology.of_cluster(cluster, num_data * pp, tp)
    documents = batch.micro_batches(where)
    order = by_work(documents) if pp > 1 else range(len(documents))
    trained = step_plan([documents[number] for number in order], run, model, where.num_data,
                        attention_time(run, model), topology)
    assert differing(trained, simulated) == []
    trained.validate()


def test_differences_are_found() -> None:
    a, b = (np.arange(3), (1, np.ones(2))), (np.arange(3), (1, np.ones(2)))
    assert differing(a, b) == []
    b[1][1][1] = 2.0
    assert differing(a, b) == ["step[1][1]"]
    assert differing(np.arange(2), np.arange(2.0)) == ["step"]
