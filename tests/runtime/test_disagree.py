"""Ranks whose plans differ are told so, by rank, before anything is computed."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from distca.planning.balance import balance
from distca.planning.plan import Plan
from distca.planning.tasks import TaskTable
from distca.runtime.attention import CoreAttention
from distca.runtime.pool.transport import PoolTransport
from distca.runtime.prepared import Prepared, digest
from distca.runtime.transport import LoopbackWorld, TransportError
from distca.runtime.transport.c10d import C10dTransport
from distca.runtime.transport.loopback import LoopbackTransport
from distca.spec import ModelShape
from distca.workload.layout import layout_from_rows
from distca.workload.packing import pack
from tests.support.attention import on_fake_ranks, qkv_of, random_qkv, row_index
from tests.support.plans import misplaced_plan, scattered_plan
from tests.support.pools import server_pools
from tests.support.processes import run_processes

MODEL = ModelShape("tiny", 1, 32, 4, 2, 8, 64, 64)
ROWS = layout_from_rows([[8], [8], [8]])
SWAPPED = misplaced_plan(ROWS, 3, MODEL)
SWAPPED_THE_OTHER_WAY = misplaced_plan(ROWS, 3, MODEL, shift=2)


def attend_once(attend: CoreAttention, plan: Plan) -> torch.Tensor:
    row = [x[row_index(plan.layout, attend.transport.rank)].requires_grad_()
           for x in random_qkv(0, plan.layout.num_tokens)[:3]]
    out = attend(*qkv_of(row), plan)
    out.sum().backward()
    return out.detach()


def odd_one_out(transport: C10dTransport | LoopbackTransport, plans: list[Plan]) -> tuple[str, int]:
    """Each rank follows its own plan; returns what it was told."""
    attend = CoreAttention(transport=transport)
    computed = []
    prepare = attend.plans.prepared

    def watched(*args: Any) -> Prepared:
        computed.append(args)
        return prepare(*args)

    attend.plans.prepared = watched  # type: ignore[method-assign, assignment]
    try:
        attend_once(attend, plans[transport.rank])
    except ValueError as error:
        return str(error), len(computed)
    return "nothing was noticed", len(computed)


def check(told: list[tuple[str, int]]) -> None:
    assert [computed for _, computed in told] == [0, 0, 0]
    for (message, _), others in zip(told, ([2], [2], [0, 1]), strict=True):
        assert f"has another plan than ranks {others}; plan from the same lengths" in message
    assert [message.split(" has ")[0] for message, _ in told] == ["rank 0", "rank 1", "rank 2"]


def test_the_odd_rank_is_named_on_every_rank_before_anything_is_computed() -> None:
    plans = [SWAPPED, SWAPPED, SWAPPED_THE_OTHER_WAY]
    check(LoopbackWorld(3, timeout_seconds=10).run(lambda transport: odd_one_out(transport, plans)))


@pytest.mark.multiprocess
def test_the_odd_rank_is_named_between_processes() -> None:
    outcomes = run_processes(3, odd_one_out, [SWAPPED, SWAPPED, SWAPPED_THE_OTHER_WAY])
    check([outcome.value for outcome in outcomes])


def test_plans_that_were_expected_are_compared_once() -> None:
    gathered = []

    def body(transport: LoopbackTransport) -> None:
        attend = CoreAttention(transport=transport)
        gather = transport.gather

        def counted(*args: Any) -> list[int]:
            gathered.append(transport.rank)
            return gather(*args)

        transport.gather = counted  # type: ignore[method-assign, assignment]
        attend.expect([SWAPPED, SWAPPED_THE_OTHER_WAY], torch.device("cpu"))
        for plan in (SWAPPED, SWAPPED_THE_OTHER_WAY, SWAPPED):
            attend_once(attend, plan)

    LoopbackWorld(3, timeout_seconds=10).run(body)
    assert sorted(gathered) == [0, 1, 2]


def test_a_rank_that_expects_something_else_is_named() -> None:
    def body(transport: LoopbackTransport) -> str:
        plans = [SWAPPED, SWAPPED_THE_OTHER_WAY][::-1 if transport.rank == 2 else 1]
        try:
            CoreAttention(transport=transport).expect(plans, torch.device("cpu"))
        except ValueError as error:
            return str(error)
        return "nothing was noticed"

    told = LoopbackWorld(3, timeout_seconds=10).run(body)
    for message, others in zip(told, ([2], [2], [0, 1]), strict=True):
        assert f"has another plan than ranks {others}" in message


def test_equal_plans_need_not_be_one_object() -> None:
    """Every rank plans for itself, anew in every step or once: only what the plan says counts."""

    def body(transport: LoopbackTransport) -> list[torch.Tensor]:
        attend = CoreAttention(transport=transport)
        mine = misplaced_plan(layout_from_rows([[8], [8], [8]]), 3, MODEL)
        return [attend_once(attend, mine if transport.rank else misplaced_plan(ROWS, 3, MODEL)) for _ in range(3)]

    for first, second, third in LoopbackWorld(3, timeout_seconds=10).run(body):
        assert torch.equal(first, second) and torch.equal(first, third)  # one call three times over


def test_a_rank_one_step_behind_is_detected() -> None:
    """Both plans were agreed on before and move equally many bytes: only a digest can tell them apart."""
    one = misplaced_plan(layout_from_rows([[8], [8]]), 2, MODEL)
    other = misplaced_plan(layout_from_rows([[4, 4], [8]]), 2, MODEL)

    def body(transport: LoopbackTransport) -> None:
        attend = CoreAttention(transport=transport)
        attend_once(attend, one)
        attend_once(attend, other)
        with pytest.raises(ValueError, match="has another plan than ranks"):
            attend_once(attend, (one, other)[transport.rank])

    LoopbackWorld(2, timeout_seconds=10).run(body)


def only_one_moves_on(transport: C10dTransport | LoopbackTransport) -> None:
    attend = CoreAttention(transport=transport)
    one = misplaced_plan(layout_from_rows([[8], [8]]), 2, MODEL)
    attend_once(attend, one)
    attend_once(attend, misplaced_plan(layout_from_rows([[4, 4], [8]]), 2, MODEL) if transport.rank else one)


def test_a_plan_that_is_new_to_one_rank_only_is_not_computed_with() -> None:
    with pytest.raises((TransportError, ValueError), match="plan"):
        LoopbackWorld(2, timeout_seconds=1).run(only_one_moves_on)


@pytest.mark.multiprocess
def test_a_plan_that_is_new_to_one_rank_only_ends_within_the_timeout() -> None:
    for outcome in run_processes(2, only_one_moves_on, timeout_seconds=2, deadline_seconds=60):
        assert outcome.error is not None
        assert outcome.error.startswith(("TransportError: ", "UserError: ")) and "plan" in outcome.error
        assert outcome.exit_code == 0


def test_trainers_that_disagree_ask_nothing_of_a_dedicated_server() -> None:
    layout = layout_from_rows([[8], [8]])
    plans = [misplaced_plan(layout, 3, MODEL, shift=1), misplaced_plan(layout, 3, MODEL, shift=2)]
    told: dict[int, str] = {}

    def body(transport: LoopbackTransport) -> None:
        pool = PoolTransport(transport, pools[transport.rank])
        try:
            attend_once(CoreAttention(transport=pool), plans[transport.rank])
        except ValueError as error:
            told[transport.rank] = str(error)

    with server_pools(2, 1) as pools:
        LoopbackWorld(2, timeout_seconds=10).run(body)
        assert [pool.number for pool in pools] == [0, 0]
    assert told[0].startswith("rank 0 has another plan than ranks [1]")
    assert told[1].startswith("rank 1 has another plan than ranks [0]")


def test_the_digest_sees_every_column_and_nothing_else() -> None:
    plan = scattered_plan(0, pack([50, 30, 20], ranks=2), 2, MODEL)
    same = scattered_plan(0, pack([50, 30, 20], ranks=2), 2, MODEL)
    assert digest(plan) == digest(same) == digest(replace(plan, tolerance=0.3))
    changed = [replace(plan, speed=np.ones(3)), replace(plan, layout=pack([30, 50, 20], ranks=2))]
    for name in TaskTable.__slots__:
        column = getattr(plan.tasks, name).copy()
        column[-1] += 1
        changed.append(replace(plan, tasks=replace(plan.tasks, **{name: column})))
    changed.append(replace(plan, tasks=plan.tasks.take(np.arange(len(plan.tasks))[::-1])))  # another order on the wire
    assert len({digest(other) for other in [plan, *changed]}) == len(changed) + 1


def test_many_plans_in_turn_agree_and_are_forgotten() -> None:
    plans = [balance(layout_from_rows([[n + 1], [n + 2]]), MODEL) for n in range(40)]

    def body(attend: CoreAttention) -> list[torch.Tensor]:
        return [attend_once(attend, plan) for plan in plans + plans[::-1]]

    for outs in on_fake_ranks(plans[0], body):
        for out, again in zip(outs[:40], outs[:39:-1], strict=True):
            assert torch.equal(out, again)                       # prepared anew, the tables are equal
