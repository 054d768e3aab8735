"""What a step gives to its ranks: every query of every document, all work, and the bytes that its plans count."""

import json
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from distca.baselines import at_home_step
from distca.models import MODELS
from distca.planning.choose import plan_step
from distca.planning.step import StepPlan
from distca.trace import RankFigures
from distca.train.report_files import rank_figures
from distca.validation import UserError

LLAMA = MODELS["llama3-8b"]
LENGTHS = [np.array([12_000, 2_000, 2_384]), np.array([9_000, 384, 7_000])]


def steps() -> dict[str, StepPlan]:
    shared: dict[str, Any] = {"num_data": 4, "layers": (2, 3)}
    return {
        "shared": plan_step(LENGTHS, LLAMA, placement="balanced", **shared),
        "dedicated": plan_step(LENGTHS, LLAMA, speed=np.ones(9), ping_pong=False, **shared),
        "one stage": plan_step(LENGTHS, LLAMA, num_data=4, layers=(5,)),
        "at home": at_home_step(LENGTHS, LLAMA, num_data=4, layers=(2, 3)),
    }


STEPS = steps()


@pytest.mark.parametrize("name", STEPS)
def test_every_query_is_somewhere_and_all_work_is_counted(name: str) -> None:
    step = STEPS[name]
    found = rank_figures(step, 7, [100, 200])
    lengths = np.concatenate(LENGTHS)
    assert found.step == 7 and found.lengths.tolist() == lengths.tolist() and found.memory_bytes.tolist() == [100, 200]
    for document, length in enumerate(lengths.tolist()):
        covered = np.zeros(length, dtype=bool)
        for at in np.flatnonzero(found.document == document).tolist():
            covered[found.q_start[at]:found.q_stop[at]] = True
        assert covered.all(), document
    pairs = 5 * (lengths * (lengths + 1) // 2).sum()             # of five layers
    assert found.work_after.sum() == found.work_before.sum() == pairs
    ranks = step.num_stages * 4
    assert (len(found.work_before), len(found.work_after)) == (ranks, 9 if name == "dedicated" else ranks)
    assert found.server.max() < len(found.work_after) and found.home.max() < len(found.work_before)
    again = RankFigures.from_json(json.loads(json.dumps(found.to_json())))
    assert again.to_json() == found.to_json()


def test_work_at_home_is_that_of_documents_in_order() -> None:
    """Rows of 4,096 tokens: the first document fills three ranks but for 288 tokens, and a rank's work is on paper."""
    found = rank_figures(plan_step(LENGTHS[:1], LLAMA, num_data=4, layers=(5,)), 1, [1])

    def pairs(start: int, stop: int) -> int:
        return sum(range(start + 1, stop + 1))

    expected = [pairs(0, 4096), pairs(4096, 8192), pairs(8192, 12_000) + pairs(0, 288),
                pairs(288, 2000) + pairs(0, 2384)]
    assert found.work_before.tolist() == [5 * one for one in expected]


@pytest.mark.parametrize("name", ["shared", "one stage"])
def test_bytes_are_those_of_the_plans_of_all_layers(name: str) -> None:
    step = STEPS[name]
    found = rank_figures(step, 1, [1])
    forward = step.calls[0, step.ticks.forward_ticks()]
    sent = [step.plans[at].traffic().sent_bytes(LLAMA).sum() for at in forward[forward >= 0]]
    assert found.num_bytes.sum() == sum(sent) > 0
    assert (found.source != found.destination).all() and (found.num_bytes > 0).all()


BAD = [("step", -1), ("step", 1.5), ("unit", ""), ("unit", 5), ("tolerance", "x"), ("work_after", []),
       ("work_after", 3), ("lengths", [1, True]), ("source", [99]), ("server", [0.5, 99]), ("document", [10**6]),
       ("home", [-1]), ("num_bytes", [float("nan")]), ("q_start", []), ("memory_bytes", []), ("memory_bytes", ["1"])]


@pytest.mark.parametrize(("field", "value"), BAD, ids=lambda one: str(one)[:12])
def test_what_no_run_wrote_is_refused(field: str, value: object) -> None:
    content = rank_figures(STEPS["one stage"], 1, [1]).to_json()
    with pytest.raises(UserError, match=field):
        RankFigures.from_json(content | {field: value})
    with pytest.raises(UserError, match=field):
        RankFigures.from_json({name: one for name, one in content.items() if name != field})


def test_windows_lessen_the_work_at_home() -> None:
    short = replace(LLAMA, num_layers=2, windows=(128, None))
    found = rank_figures(at_home_step([np.array([512, 512])], short, num_data=2, layers=(2,)), 1, [1])
    seen = sum(min(query + 1, 128) for query in range(512)) + sum(range(1, 513))
    assert found.work_before.tolist() == [seen, seen]
