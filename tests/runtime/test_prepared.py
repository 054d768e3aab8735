"""What a rank remembers of plans: a digest is computed once, tables are evicted by use, turns are noticed."""

import gc

import pytest
import torch

from distca.kernels.interface import Scores
from distca.planning.plan import Plan
from distca.runtime import prepared
from distca.runtime.attention import CoreAttention
from distca.runtime.prepared import LRU, PLANS_KEPT, PlanCache, Shapes
from distca.runtime.transport import LoopbackTransport, LoopbackWorld
from distca.spec import ModelShape
from distca.workload.layout import layout_from_rows
from tests.support.attention import qkv_of, random_qkv
from tests.support.plans import misplaced_plan

MODEL = ModelShape("tiny", 1, 32, 4, 2, 8, 64, 64)
SHAPES = Shapes(4, 2, 8, torch.float64, torch.device("cpu"))


def alone() -> LoopbackTransport:
    return LoopbackTransport(LoopbackWorld(1), 0)


def plans_of(count: int) -> list[Plan]:
    return [misplaced_plan(layout_from_rows([[4 + n]]), 1, MODEL) for n in range(count)]


def test_a_cache_evicts_what_was_not_asked_for_the_longest() -> None:
    cache: LRU[str, str] = LRU(2)
    for key in "abc":
        cache.put(key, key.upper())
        cache.get("a")
    assert [cache.get(key) for key in "abc"] == ["A", None, "C"]
    cache.put("a", "again")
    assert cache.get("a") == "again" and cache.get("c") == "C"


def test_a_digest_is_computed_once_for_all_calls_both_ways(monkeypatch: pytest.MonkeyPatch) -> None:
    computed, digest = [], prepared.digest

    def counted(plan: Plan) -> int:
        computed.append(plan)
        return digest(plan)

    monkeypatch.setattr(prepared, "digest", counted)
    attend, (plan,) = CoreAttention(transport=alone()), plans_of(1)
    attend.expect([plan], SHAPES.device)
    for _ in range(3):
        row = [x.requires_grad_() for x in random_qkv(0, 4)[:3]]
        attend(*qkv_of(row), plan).sum().backward()
    assert computed == [plan]


def test_tables_of_the_latest_plans_stay_and_others_are_made_again() -> None:
    known, plans = PlanCache(alone()), plans_of(PLANS_KEPT + 1)
    made = [known.begin(plan, SHAPES) for plan in plans]
    assert known.begin(plans[1], SHAPES) is made[1]
    assert known.begin(plans[0], SHAPES) is not made[0]
    same = misplaced_plan(plans[-1].layout, 1, MODEL)            # another object that says the same
    assert known.begin(same, SHAPES) is made[-1]
    assert known.begin(same, SHAPES, Scores(window=3)) is not made[-1]


def test_facts_of_a_plan_end_with_it() -> None:
    known, plans = PlanCache(alone()), plans_of(3)
    assert len({known.facts(plan).digest for plan in plans}) == 3
    del plans[:2]
    gc.collect()
    assert len(known._facts) == 1


def test_nano_batches_that_alternate_come_up_anew_once() -> None:
    known, (ping, pong, later) = PlanCache(alone()), plans_of(3)
    turns = [known.comes_up_anew(plan) for plan in (ping, pong, ping, pong, later, later, later, later, ping)]
    assert turns == [True, True, False, False, True, False, False, False, True]
