"""Ranks that made different plans of the same documents follow rank 0's; of other documents, the run ends."""

from __future__ import annotations

import json
import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from distca.cli.report import read_log
from distca.cost.attention_time import AttentionTime
from distca.cost.latency_table import LatencyTable, analytic_table
from distca.models import MODELS
from distca.planning.choose import plan_step
from distca.planning.plan_bytes import STEP_MAGIC, step_from_bytes, step_to_bytes
from distca.planning.step import StepPlan
from distca.planning.windows import with_windows
from distca.runtime.transport.c10d import C10dTransport
from distca.train import agreement, trainer
from distca.train.agreement import Agreement, ServerSpeeds, StepDigests
from distca.train.display import plain_line, server_speeds
from distca.train.run_log import StepRecord, as_json, figures
from distca.train.settings import Settings
from distca.train.settings.checks import check_settings
from distca.workload.topology import Topology
from tests.support.processes import run_processes, values
from tests.support.training import logged, small_run, train, train_each

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


def train_with_other_tables(transport: C10dTransport, runs: tuple[Settings, Settings]) -> tuple[list[str], int]:
    """Train twice; in the first run rank 1 plans by the table beside the one that the settings name.

    Returns the warnings, and how often this rank took another plan than its own.
    """
    warnings: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: warnings.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("distca").addHandler(handler)
    adopted: list[StepPlan] = []
    read = vars(agreement)["step_from_bytes"]

    def adopt(content: bytes, own: StepPlan) -> StepPlan:
        adopted.append(own)
        return read(content, own)

    vars(agreement)["step_from_bytes"] = adopt
    tampered, plain = runs
    if transport.rank == 1:
        tampered = tampered.with_values({"attention.cost": tampered.attention.cost.replace("own", "other")})
    train_each(transport, (tampered, plain))
    return warnings, len(adopted)


@pytest.mark.multiprocess
def test_a_run_with_a_tampered_table_trains_as_one_without(tmp_path: Path) -> None:
    for name, skew in (("own", 0.0), ("other", 9.0)):
        table(skew).save(tmp_path / f"{name}.json")
    (first, none), (second, adopted) = train(*(small_run(
        tmp_path / name, 2, tokens=2048, run__steps=2, data__max_document=1500, eval__fraction=0.3, eval__every=2,
        eval__batches=1, attention__tolerance=0.02, attention__cost=str(tmp_path / "own.json"))
        for name in ("tampered", "alike")), body=train_with_other_tables)
    for name in ("loss", "eval_loss"):
        one, other = (logged(tmp_path / run, name) for run in ("tampered", "alike"))
        assert one[-1] == pytest.approx(other[-1], rel=1e-9) and one[-1] is not None
    assert none == 0 and adopted > 0 and second == []
    assert [warning.split(";")[0] for warning in first] == [
        "ranks [1] made another plan than rank 0, and all follow rank 0's"]
    assert "other.json" in first[0] and "own.json" in first[0]


# ---- attention.adapt: every rank learns the same speeds, a slower one gets less, and the loss stays what it was

RECORD = StepRecord(step=3, loss=2.5, lr=1e-3, grad_norm=1.0, tokens=100, seconds=1.0, tokens_per_second=100.0,
                    work_before=2.0, work_after=1.0, bytes_per_layer=10.0, exposed_seconds=0.0, host_seconds=0.0,
                    memory_bytes=10, plan_seconds=0.0, attention_seconds_max=0.5, server_speed=(1.0, 0.52))


@pytest.mark.parametrize(("values", "message"), [
    ({"attention.mode": "home"}, "attention.adapt is true but attention.mode is 'home', .*; use 'disaggregated'"),
    ({"attention.dedicated": 1}, "attention.adapt is true but attention.dedicated is 1, .*; set attention.adapt to f"),
])
def test_what_cannot_adapt_is_refused(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        check_settings(Settings().with_values({"attention.adapt": True, **values}))


def test_the_log_the_display_and_the_page_show_each_servers_speed(tmp_path: Path) -> None:
    assert as_json(RECORD)["server_speed"] == [1.0, 0.52]
    assert figures(RECORD)["server_speed/1"] == 0.52
    assert "speeds 0.52–1.00" in plain_line(RECORD, 10) and "rank 1 of the pool" in server_speeds((1.0, 0.52))
    log = tmp_path / "steps.jsonl"
    log.write_text("".join(json.dumps({**as_json(RECORD), "step": step}) + "\n" for step in (1, 2)))
    run = read_log(log).figures
    assert run is not None
    curves = dict(run.series)
    assert curves["speed of server 1, × the median"].tolist() == [0.52, 0.52]
    assert curves["attention of the slowest rank, seconds"].tolist() == [0.5, 0.5]
    log.write_text(json.dumps({**as_json(RECORD), "server_speed": ["fast", None]}) + "\n")
    with pytest.raises(ValueError, match=r"steps.jsonl: server_speed is 'fast'"):
        read_log(log)


def train_with_a_slow_rank(transport: C10dTransport, runs: tuple[Settings, Settings]) -> list[list[float]]:
    """Train twice; in the first run the last server reports twice the seconds that its work would take.

    Returns the work of every server, step by step.
    """
    class Watched(ServerSpeeds):
        def learn(self, work: np.ndarray, own_seconds: float) -> None:
            seen.append(work.tolist())
            super().learn(work, float(work[self.rank]) * (2 if self.rank == len(work) - 1 else 1))

    seen: list[list[float]] = []
    vars(trainer)["ServerSpeeds"] = Watched
    train_each(transport, runs)
    return seen


@pytest.mark.multiprocess
@pytest.mark.parametrize("grid", [
    {"run__ranks": 2},
    pytest.param({"run__ranks": 4, "parallel__tensor": 2}, marks=pytest.mark.slow),
    pytest.param({"run__ranks": 4, "parallel__pipeline": 2, "batch__micro_batches": 2}, marks=pytest.mark.slow),
])
def test_a_slow_rank_gets_less_and_the_loss_does_not_notice(grid: dict[str, Any], tmp_path: Path) -> None:
    """Ranks whose plans differ would fail."""
    ranks = grid["run__ranks"]
    runs = (small_run(tmp_path / name, ranks, tokens=2048, run__steps=8, **values, **grid) for name, values in (
        ("adapt", {"attention__adapt": True}), ("home", {"attention__mode": "home"})))
    seen = train(*runs, body=train_with_a_slow_rank)
    assert logged(tmp_path / "adapt", "loss") == pytest.approx(logged(tmp_path / "home", "loss"), rel=1e-9)
    speed = logged(tmp_path / "adapt", "server_speed")[-1]
    assert speed[:-1] == pytest.approx([1.0] * (len(speed) - 1), abs=1e-3)
    assert speed[-1] == pytest.approx(0.5, abs=0.5 * 0.7**8 + 1e-3)
    assert all(work == seen[0] for work in seen)                 # the same plans everywhere
    share = np.array(seen[0])                                    # [steps, servers]
    share = share[:, -1] / share[:, :-1].mean(axis=1)
    assert (share[:2] > 0.9).all()                               # planned before the first step was measured
    assert (share[-3:] < 0.65).all()                             # 0.5 and what 700-token documents leave uneven
