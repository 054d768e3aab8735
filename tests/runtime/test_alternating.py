"""What is prepared once per plan never goes stale: plans, dtypes, gradients and modes take turns, all stay exact."""

from __future__ import annotations

from itertools import product
from typing import Any

import numpy as np
import pytest
import torch

from distca.baselines import at_home
from distca.kernels import TaskRows, kernel_named
from distca.kernels.interface import BackwardInputs
from distca.planning.plan import Plan
from distca.runtime.attention import CoreAttention
from distca.runtime.transport import LoopbackTransport, LoopbackWorld
from distca.spec import ModelShape
from distca.workload.layout import layout_from_rows
from distca.workload.packing import pack
from tests.support.attention import dense_on_one, gradient, random_qkv, row_index
from tests.support.plans import scattered_layout, scattered_plan

MODEL = ModelShape("tiny", 1, 32, 4, 2, 8, 64, 64)
LENGTHS = np.array([40, 7, 23])
TOLERANCE = {torch.float64: 1e-10, torch.float32: 1e-4}


def cases() -> list[tuple[Plan, torch.dtype, tuple[bool, bool, bool], bool]]:
    """Plan, dtype, which of q, k and v want gradients, and whether any are recorded; each plan comes up many times."""
    plans = [scattered_plan(seed, scattered_layout(seed, LENGTHS, 2), 2, MODEL) for seed in (3, 8)]
    assert all((plan.tasks.home != plan.tasks.server).any() for plan in plans)
    wanted = [(True, True, True), (True, False, False), (False, True, False), (False, False, True)]
    turns = list(product(plans, (torch.float64, torch.float32), wanted, (True, False)))
    order = np.random.default_rng(0).permutation(len(turns))
    return [turns[i] for i in order]


@pytest.mark.parametrize("state", ["resend", "keep"])
def test_plans_dtypes_and_modes_in_turn_are_exact(state: str) -> None:
    def body(transport: LoopbackTransport) -> None:
        attend = CoreAttention(transport=transport, state=state)
        for seed, (plan, dtype, wanted, records) in enumerate(cases()):
            tensors = random_qkv(seed, int(LENGTHS.sum()))
            index = row_index(plan.layout, transport.rank)
            dense = [x[index] for x in dense_on_one(*tensors, LENGTHS)]
            *row, dout = (x[index].to(dtype) for x in tensors)
            row = [x.requires_grad_(wants) for x, wants in zip(row, wanted, strict=True)]
            with torch.set_grad_enabled(records):
                out = attend(row[0], row[1], row[2], plan)
            torch.testing.assert_close(out.double(), dense[0], rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])
            assert out.requires_grad == records
            if records:
                out.backward(dout)
                for x, wants, grad in zip(row, wanted, dense[1:], strict=True):
                    assert (x.grad is not None) == wants
                    if x.grad is not None:
                        torch.testing.assert_close(x.grad.double(), grad, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])

    LoopbackWorld(2, timeout_seconds=60).run(body)


def test_two_calls_of_one_plan_in_flight_keep_their_own_tensors() -> None:
    """Both are dispatched before either is served, and backward mirrors that."""
    plan = cases()[0][0]

    def body(transport: LoopbackTransport) -> None:
        attend, index = CoreAttention(transport=transport), row_index(plan.layout, transport.rank)
        drawn = [random_qkv(seed, int(LENGTHS.sum())) for seed in (1, 2)]
        rows = [[x[index].requires_grad_() for x in tensors[:3]] for tensors in drawn]
        calls = [attend.start(q, k, v, plan) for q, k, v in rows]
        for call in calls:
            attend.serve(call)
        outs = [attend.finish(call) for call in calls]
        torch.autograd.backward(outs, [tensors[3][index] for tensors in drawn])
        for tensors, row, out in zip(drawn, rows, outs, strict=True):
            for actual, dense in zip([out.detach(), *map(gradient, row)], dense_on_one(*tensors, LENGTHS), strict=True):
                torch.testing.assert_close(actual, dense[index], rtol=1e-10, atol=1e-10)

    LoopbackWorld(2, timeout_seconds=60).run(body)


@pytest.mark.parametrize("num_tokens", [70, 75])  # parts tile all tokens, or leave some without a key
def test_the_cpu_kernel_hands_over_tensors_of_its_own(num_tokens: int) -> None:
    """Writing into what it gave changes nothing that it was given, nor what it gives next; other shapes are checked."""
    kernel = kernel_named("sdpa")
    prepared = kernel.prepare(TaskRows.documents([40, 30]), torch.device("cpu"))
    q, k, v, dout = random_qkv(0, num_tokens)
    before = [x.clone() for x in (q, k, v, dout)]
    out, lse = kernel.forward(q, k, v, prepared)
    first = [x.clone() for x in (out, lse, *kernel.backward(BackwardInputs(dout, q, k, v, out, lse), prepared))]
    for x in (out, lse):
        x.fill_(7.0)
    again = kernel.forward(q, k, v, prepared)
    grads = kernel.backward(BackwardInputs(dout, q, k, v, *again), prepared)
    for actual, wanted in zip([*again, *grads], first, strict=True):
        assert torch.equal(actual, wanted)                       # the same call of the same tensors
    assert all(map(torch.equal, (q, k, v, dout), before))
    assert not first[0][70:].any() and torch.isinf(first[1][70:]).all()
    with pytest.raises(ValueError, match="tokens; give the rows of these buffers"):
        kernel.forward(q[:60], k[:60], v[:60], prepared)


@pytest.mark.parametrize(("state", "counts"), [("resend", (1, 2)), ("keep", (1, 1))])
def test_what_no_rank_sends_is_not_exchanged(state: str, counts: tuple[int, int]) -> None:
    """Where only keys travel, results stay where they are computed: they and the gradient of out are not exchanged."""
    plan = at_home(layout_from_rows([[24, 6], [30]]), MODEL)
    spanning = at_home(pack([60], ranks=2), MODEL)

    def body(transport: LoopbackTransport) -> list[int]:
        exchanged, plain = [], transport.exchange

        def counted(*args: Any) -> Any:
            exchanged.append(1)
            return plain(*args)

        pytest.MonkeyPatch().setattr(transport, "exchange", counted)
        attend, found = CoreAttention(transport=transport, state=state), []
        for one in (plan, spanning):
            tensors, index = random_qkv(5, 60), row_index(one.layout, transport.rank)
            row = [x[index].requires_grad_() for x in tensors[:3]]
            out = attend(row[0], row[1], row[2], one)
            found.append(len(exchanged))
            out.backward(tensors[3][index])
            found.append(len(exchanged))
            for actual, dense in zip([out.detach(), *map(gradient, row)],
                                     dense_on_one(*tensors, one.layout.lengths), strict=True):
                torch.testing.assert_close(actual, dense[index], rtol=1e-10, atol=1e-10)
        return found

    forward, backward = counts
    assert LoopbackWorld(2, timeout_seconds=60).run(body) == [[0, 0, forward, forward + backward]] * 2
