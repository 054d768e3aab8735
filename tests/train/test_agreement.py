"""Ranks that made different plans of the same documents follow rank 0's; of other documents, the run ends."""

from __future__ import annotations

import json
import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from distca.cost.attention_time import AttentionTime
from distca.cost.latency_table import LatencyTable, analytic_table
from distca.models import MODELS
from distca.planning.choose import plan_step
from distca.planning.plan_bytes import STEP_MAGIC, step_from_bytes, step_to_bytes
from distca.planning.step import StepPlan
from distca.planning.windows import with_windows
from distca.runtime.transport.c10d import C10dTransport
from distca.train.agreement import Agreement, StepDigests
from distca.train.launch import launch
from distca.train.settings import Settings
from distca.train.trainer import run
from distca.workload.topology import Topology
from tests.support import rank_mains as mains
from tests.support.processes import run_processes, values

TINY = MODELS["tiny"]
LENGTHS = [np.array([1500, 300, 200, 48]), np.array([900, 900, 248])]


def table(skew: float = 0.0) -> LatencyTable:
    """One whose rectangles of many keys take longer, so that plans by it are others."""
    made = analytic_table(TINY, 1e12, max_kv_len=4096)
    assert made.backward_seconds is not None
    factor = 1.0 + skew * (made.kv_len / 4096) / np.arange(1, len(made.q_len) + 1)[:, None]
    return replace(made, forward_seconds=made.forward_seconds * factor, backward_seconds=made.backward_seconds * factor)


def step_by(skew: float, lengths: list[np.ndarray] | None = None, **options: Any) -> StepPlan:
    return plan_step(lengths or LENGTHS, TINY, num_data=2, cost=AttentionTime.of(table(skew), TINY),
                     **{"layers": [TINY.num_layers], "tolerance": 0.02, **options})


def agree_twice(transport: C10dTransport, skews: list[float], lengths: list[list[np.ndarray]]) -> Any:
    """Digests of this rank's own plan and of those that it follows, and what it logged."""
    said: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("distca").addHandler(handler)
    agree = Agreement(Settings(), None)
    own = step_by(skews[transport.rank], lengths[transport.rank])
    found = [StepDigests.of(step) for step in (own, agree(own, StepDigests.of(own)), agree(own, StepDigests.of(own)))]
    return found, said


@pytest.mark.multiprocess
def test_all_follow_rank_0_and_hear_once_what_differs() -> None:
    outcomes = run_processes(3, agree_twice, [0.0, 9.0, 0.0], [LENGTHS] * 3)
    (first, said), (second, silent), (third, also_silent) = values(outcomes)
    assert second[0] != first[0] and second[0].data == first[0].data == third[0].data
    assert [*first, *second[1:], *third] == [first[0]] * 8
    assert len(said) == 1 and silent == also_silent == []
    assert said[0].startswith("ranks [1] made another plan than rank 0, and all follow rank 0's; rank 1 has "
                              "attention.cost ") and said[0].endswith("; give every host the same")


@pytest.mark.multiprocess
def test_ranks_with_other_documents_end() -> None:
    other = [LENGTHS[0], np.array([900, 800, 348])]
    outcomes = run_processes(2, agree_twice, [0.0, 0.0], [LENGTHS, other])
    for rank, outcome in enumerate(outcomes):
        assert outcome.error is not None
        assert outcome.error.startswith(f"UserError: rank {rank} has another plan than ranks [{1 - rank}]; plan from "
                                        "the same lengths")


@pytest.mark.parametrize("options", [
    {}, {"ping_pong": False, "placement": "given"}, {"layers": [1, 2, 1]},
    {"speed": [1.0, 0.5, 0.0, 1.0, 1.0, 2.0, 1.0], "layers": [2, 1, 1], "topology": Topology.regular(7, 2)},
])
@pytest.mark.parametrize("windows", [False, True])
def test_a_step_comes_back_as_it_went(options: dict[str, Any], windows: bool) -> None:
    first, own = (step_by(skew, **options) for skew in (0.0, 9.0))
    if windows:
        layers = sum(own.layers)
        first, own = (with_windows(step, [256] * layers) for step in (first, own))
    got = step_from_bytes(step_to_bytes(first), own)
    assert StepDigests.of(got) == StepDigests.of(first)
    assert got.summary().bytes_per_layer == first.summary().bytes_per_layer
    assert got.plans[0].cost is own.plans[0].cost


def test_bytes_that_are_no_such_step_are_refused() -> None:
    own = step_by(0.0)
    content = step_to_bytes(own)
    begin = len(STEP_MAGIC) + 8
    end = begin + int.from_bytes(content[len(STEP_MAGIC):begin], "little")
    header = json.loads(content[begin:end])

    def with_header(**values: Any) -> bytes:
        text = json.dumps(header | values).encode()
        return STEP_MAGIC + len(text).to_bytes(8, "little") + text + content[end:]

    wrong = (own.calls[:, ::-1], own.calls[:, :1], own.calls + 10**6, own.calls - 1, own.calls[:0])
    shorter = step_to_bytes(step_by(0.0, layers=[1]))
    for bad in (b"", content[:-8], with_header(tried=[1]), with_header(columns={}), shorter,
                *(step_to_bytes(replace(own, calls=calls)) for calls in wrong),
                step_to_bytes(step_by(0.0, [LENGTHS[1], LENGTHS[0]]))):
        with pytest.raises(ValueError):
            step_from_bytes(bad, own)


@pytest.mark.multiprocess
def test_a_run_with_a_tampered_table_trains_as_one_without(tmp_path: Path) -> None:
    for name, skew in (("own", 0.0), ("other", 9.0)):
        table(skew).save(tmp_path / f"{name}.json")
    losses = []
    for name, main in (("tampered", mains.train_with_another_table), ("alike", run)):
        chosen = Settings().with_values({
            "model.name": "tiny", "run.steps": 2, "run.ranks": 2, "run.dtype": "float64", "run.threads": 1,
            "run.device": "cpu", "run.timeout_seconds": 120, "batch.tokens_per_rank": 1024, "data.max_document": 1500,
            "eval.fraction": 0.3, "eval.every": 2, "eval.batches": 1, "attention.tolerance": 0.02,
            "attention.cost": str(tmp_path / "own.json"), "log.folder": str(tmp_path / name)})
        assert launch(chosen, main) == 0
        steps = [json.loads(line) for line in (tmp_path / name / "steps.jsonl").read_text().splitlines()]
        losses.append([*(step["loss"] for step in steps), steps[-1]["eval_loss"]])
    assert losses[0] == pytest.approx(losses[1], rel=1e-9)
    first, second = (json.loads((tmp_path / "tampered" / f"rank{rank}.json").read_text()) for rank in (0, 1))
    assert first["adopted"] == 0 and second["adopted"] > 0 and second["warnings"] == []
    assert [warning.split(";")[0] for warning in first["warnings"]] == [
        "ranks [1] made another plan than rank 0, and all follow rank 0's"]
    assert "other.json" in first["warnings"][0] and "own.json" in first["warnings"][0]
