"""Real ranks: processes that talk over gloo give the dense answer, forward and backward, to 1e-10."""

from functools import partial
from pathlib import Path

import pytest
import torch

from distca.baselines import at_home, head_tail_layout
from distca.planning.balance import balance
from distca.planning.plan import Plan
from distca.runtime.attention import STATES, CoreAttention
from distca.runtime.pool.server import Server
from distca.runtime.pool.transport import connect_servers
from distca.runtime.transport.c10d import C10dTransport
from distca.spec import ModelShape
from distca.workload.layout import layout_from_rows
from distca.workload.packing import pack
from tests.support.attention import dense_on_one, gradient, qkv_of, random_qkv, row_index
from tests.support.plans import misplaced_plan, scattered_plan
from tests.support.pools import SECRET, read_address, write_address
from tests.support.processes import run_processes, values

pytestmark = pytest.mark.multiprocess
MODEL = ModelShape("tiny", 1, 32, 4, 2, 8, 64, 64)
LENGTHS = [400, 40, 1, 55, 16]


def farthest(plan: Plan, rank: int, *row: torch.Tensor) -> float:
    """The largest difference of this rank's out, dq, dk and dv from the dense ones."""
    expected = dense_on_one(*random_qkv(0, plan.layout.num_tokens), plan.layout.lengths)
    index = row_index(plan.layout, rank)
    return max(float((got - want[index]).abs().max()) if len(index) else 0.0
               for got, want in zip(row, expected, strict=True))


def attend_and_compare(attend: CoreAttention, plan: Plan) -> float:
    tensors = random_qkv(0, plan.layout.num_tokens)
    index = row_index(plan.layout, attend.transport.rank)
    leaves = [x[index].requires_grad_() for x in tensors[:3]]
    out = attend(*qkv_of(leaves), plan)
    out.backward(tensors[3][index])
    return farthest(plan, attend.transport.rank, out.detach(), *map(gradient, leaves))


def in_place(transport: C10dTransport, plans: list[Plan]) -> list[float]:
    """Every rank trains and serves, over the default group."""
    errors = []
    for state in STATES:
        attend = CoreAttention(state=state)
        assert (attend.transport.rank, attend.transport.size) == (transport.rank, transport.size)
        errors += [attend_and_compare(attend, plan) for plan in (*plans, plans[0])]
    return errors


def dedicated(transport: C10dTransport | None, plans: list[Plan], where: str) -> int | list[float]:
    """Processes beyond the layout's ranks are in no group, and serve until the run ends."""
    if transport is None:
        return Server(partial(read_address, Path(where)), SECRET).run()
    plan = plans[0]
    pool = connect_servers(transport, roles=plan.num_servers - plan.layout.num_ranks, secret=SECRET)
    if transport.rank == 0:
        write_address(Path(where), pool.address)
    assert pool.wait_for_servers(plan.num_servers - plan.layout.num_ranks, 20)
    attend = CoreAttention(transport=pool)
    errors = [attend_and_compare(attend, plan) for plan in plans for _ in range(2)]
    pool.close()
    return errors


def interleaved(transport: C10dTransport, plan: Plan) -> list[float]:
    """Two nano-batches, both in flight at once."""
    attend = CoreAttention(transport=transport)
    tensors = random_qkv(0, plan.layout.num_tokens)
    index = row_index(plan.layout, transport.rank)
    rows = [[x[index].requires_grad_() for x in tensors[:3]] for _ in range(2)]
    pending = [attend.start(*qkv_of(row), plan) for row in rows]
    for one in pending:
        attend.serve(one)
    outs = [attend.finish(one) for one in pending]
    torch.autograd.backward(outs, [tensors[3][index]] * 2)
    return [farthest(plan, transport.rank, out.detach(), *map(gradient, row))
            for out, row in zip(outs, rows, strict=True)]


def all_plans(ranks: int) -> list[Plan]:
    layouts = [pack(LENGTHS, ranks=ranks), pack(LENGTHS, ranks=ranks, placement="balanced")]
    planned = [balance(layout, MODEL, tolerance=0.02) for layout in layouts]
    assert all(plan.summary().bytes_total > 0 for plan in planned)
    baselines = [at_home(head_tail_layout(layout_from_rows([LENGTHS]), ranks), MODEL), at_home(layouts[0], MODEL),
                 at_home(layout_from_rows([[30]] * ranks), MODEL)]
    wrong = [misplaced_plan(layouts[0], ranks, MODEL), scattered_plan(1, layouts[1], ranks, MODEL),
             scattered_plan(2, layout_from_rows([[20, 1]] + [[]] * (ranks - 1)), ranks, MODEL)]
    return planned + baselines + wrong


@pytest.mark.parametrize("ranks", [2, 4])
def test_in_place_servers_are_exact(ranks: int) -> None:
    plans = all_plans(ranks)
    for errors in values(run_processes(ranks, in_place, plans)):
        assert len(errors) == 2 * (1 + len(plans)) and max(errors) < 1e-10


@pytest.mark.parametrize(("trainers", "servers"), [(2, 1), (1, 2)])
def test_a_dedicated_pool_is_exact(trainers: int, servers: int, tmp_path: Path) -> None:
    layout = pack(LENGTHS, ranks=trainers)
    plans = [balance(layout, MODEL, tolerance=0.05, speed=[0.5] * trainers + [1.0] * servers),
             balance(layout, MODEL, speed=[0.0] * trainers + [1.0] * servers),
             scattered_plan(4, layout, trainers + servers, MODEL)]
    assert all((plan.tasks.server >= trainers).any() for plan in plans)
    answers = values(run_processes(trainers + servers, dedicated, plans, str(tmp_path / "address"), in_group=trainers))
    for errors in answers[:trainers]:
        assert len(errors) == 6 and max(errors) < 1e-10
    assert sum(answers[trainers:]) >= 6                          # every call has a role with tasks


def test_nano_batches_in_flight_are_exact() -> None:
    plan = scattered_plan(5, pack(LENGTHS, ranks=2), 2, MODEL)
    for errors in values(run_processes(2, interleaved, plan)):
        assert len(errors) == 2 and max(errors) < 1e-10


def much(transport: C10dTransport) -> bytes:
    return bytes(2**20)


def test_a_rank_may_say_more_than_a_pipe_holds() -> None:
    assert [outcome.value for outcome in run_processes(2, much, deadline_seconds=60)] == [bytes(2**20)] * 2
