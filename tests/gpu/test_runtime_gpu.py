"""Four ranks that share one GPU, over gloo and over symmetric memory: bytes arrive, and attention is exact.

"Exact": in bf16, as far from float64 as rounding explains (tests.support.accuracy), and no farther.
"""

import os

import numpy as np
import pytest
import torch

from distca.kernels import TaskRows
from distca.planning.balance import balance
from distca.planning.step import MicroBatch
from distca.runtime.attention import CoreAttention
from distca.runtime.ping_pong import taken
from distca.runtime.transport import Handle, Transport, TransportError
from distca.runtime.transport.c10d import C10dTransport
from distca.spec import ModelShape
from distca.workload.packing import pack, pack_ping_pong
from tests.support.accuracy import expected_attention
from tests.support.attention import gradient, qkv_of, random_qkv, row_index
from tests.support.batches import nano_index
from tests.support.plans import scattered_plan
from tests.support.processes import run_processes, values

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.multiprocess,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU; torch.cuda.is_available() is False"),
]

RANKS = 4
Started = tuple[Handle, list[tuple[int, int]], int]  # an exchange under way: what is expected of whom, and its number
TRANSPORTS = ["gloo", "symmetric"]
MODEL = ModelShape("small", 1, 512, 8, 2, 128, 1024, 64)
LENGTHS = [2900, 1, 127, 700, 1300, 513, 651]                    # 6192 = 4 x 1548, cut anywhere by the ranks


def on_this_gpu(transport: C10dTransport, kind: str) -> Transport:
    torch.cuda.set_device(0)
    if kind == "gloo":
        return transport
    os.environ["TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES"] = "1"
    from distca.runtime.transport.symmetric import SymmetricTransport

    return SymmetricTransport(transport.group, timeout_seconds=60.0)


def in_bfloat16(seed: int, num_tokens: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    q, k, v, dout = (x.to(torch.bfloat16).cuda() for x in random_qkv(seed, num_tokens, 8, 2, 128, torch.float32))
    return q, k, v, dout


def attends(joined: C10dTransport, kind: str, kernel: str) -> bool:
    """Checks out, dq, dk, dv in this rank's row; two calls are interleaved."""
    transport = on_this_gpu(joined, kind)
    attend = CoreAttention(kernel=kernel, transport=transport)
    layout = pack(LENGTHS, ranks=RANKS)
    plans = balance(layout, MODEL, tolerance=0.05), scattered_plan(1, layout, RANKS, MODEL)
    assert all((plan.tasks.home != plan.tasks.server).any() for plan in plans)
    index = row_index(layout, transport.rank).cuda()
    batches = [in_bfloat16(seed, layout.num_tokens) for seed in (0, 1)]
    rows = [[x[index].requires_grad_() for x in batch[:3]] for batch in batches]
    pending = [attend.start(*qkv_of(row), plan) for row, plan in zip(rows, plans, strict=True)]
    for call in pending:
        attend.serve(call)
    outs = [attend.finish(call) for call in pending]
    torch.autograd.backward(outs, [batch[3][index] for batch in batches])
    for batch, row, out in zip(batches, rows, outs, strict=True):
        expected = expected_attention(*batch, TaskRows.documents(layout.lengths))
        for whole, got in zip([expected[0], *expected[2:]], (out.detach(), *map(gradient, row)), strict=True):
            assert got.dtype == torch.bfloat16
            whole.at(index).check(got)
    return True


@pytest.mark.parametrize("kernel", ["varlen", "auto"])
@pytest.mark.parametrize("kind", TRANSPORTS)
def test_attention_is_exact(kind: str, kernel: str) -> None:
    outcomes = run_processes(RANKS, attends, kind, kernel, timeout_seconds=90.0, deadline_seconds=240.0)
    assert values(outcomes) == [True] * RANKS


def attends_to_a_shared_document(joined: C10dTransport, kind: str) -> bool:
    """The same of one document that lies in ping and pong, whose queries read ping's keys."""
    transport = on_this_gpu(joined, kind)
    attend, lengths = CoreAttention(transport=transport), np.array([6192])
    both = MicroBatch(lengths, pack_ping_pong(lengths, ranks=RANKS))
    plans = [balance(layout, MODEL, tolerance=0.05) for layout in both.layouts]
    batch = in_bfloat16(2, 6192)
    index = [nano_index(both, nano, transport.rank).cuda() for nano in range(2)]
    (q1, k1, v1), (q2, k2, v2) = rows = [[x[at].requires_grad_() for x in batch[:3]] for at in index]
    runs = both.key_runs(1, transport.rank)
    first = attend.start(q1, k1, v1, plans[0])
    keys, values = (torch.cat([own, *taken(before, runs)]) for own, before in ((k2, k1), (v2, v1)))
    second = attend.start(q2, keys, values, plans[1])
    for call in (first, second):
        attend.serve(call)
    outs = [attend.finish(call) for call in (first, second)]
    torch.autograd.backward(outs, [batch[3][at] for at in index])
    expected = expected_attention(*batch, TaskRows.documents(lengths))
    for row, out, at in zip(rows, outs, index, strict=True):
        for whole, got in zip([expected[0], *expected[2:]], (out.detach(), *map(gradient, row)), strict=True):
            whole.at(at).check(got)
    return len(runs) > 0


@pytest.mark.parametrize("kind", TRANSPORTS)
def test_a_document_in_both_nano_batches_is_one(kind: str) -> None:
    outcomes = run_processes(RANKS, attends_to_a_shared_document, kind, timeout_seconds=90.0, deadline_seconds=240.0)
    assert values(outcomes) == [True] * RANKS


def pattern(source: int, target: int, number: int, length: int) -> torch.Tensor:
    """Bytes that tell who sent them, to whom and when."""
    return (torch.arange(length, device="cuda") * 7 + 31 * source + 57 * target + 101 * number).to(torch.uint8)


def sizes(number: int, most: int) -> list[list[int]]:
    """[source, target] bytes of exchange `number`: uneven, some of them 0, one rank that sends nothing."""
    generator = torch.Generator().manual_seed(number)
    size = torch.randint(0, most, (RANKS, RANKS), generator=generator) * torch.randint(0, 2, (RANKS, RANKS),
                                                                                      generator=generator)
    size[number % RANKS] = 0
    return size.tolist()


def start_one(transport: Transport, number: int, most: int) -> Started:
    rank, size = transport.rank, sizes(number, most)
    sent = [size[rank][peer] for peer in range(RANKS)]
    expected = [size[peer][rank] for peer in range(RANKS)]
    send = torch.cat([pattern(rank, peer, number, length) for peer, length in enumerate(sent)])
    handle = transport.exchange(send, sent, expected)
    return handle, [(peer, length) for peer, length in enumerate(expected)], number


def arrives(transport: Transport, started: Started) -> bool:
    handle, expected, number = started
    whole = torch.cat([pattern(peer, transport.rank, number, length) for peer, length in expected])
    return torch.equal(handle.wait(), whole)


def carries(joined: C10dTransport, kind: str) -> bool:
    transport = on_this_gpu(joined, kind)
    nothing = transport.exchange(torch.empty(0, dtype=torch.uint8, device="cuda"), [0] * RANKS, [0] * RANKS)
    empty = nothing.wait().numel() == 0
    one_by_one = [arrives(transport, start_one(transport, number, 5000)) for number in range(4)]
    flight = [start_one(transport, number, 100_000) for number in range(10, 16)]
    last_first = [arrives(transport, started) for started in reversed(flight)]
    before = start_one(transport, 20, 1000)
    growing = [start_one(transport, 21 + step, most) for step, most in enumerate((2**20, 2**23, 2**24))]
    grown = [arrives(transport, started) for started in (*growing, before)]
    busy = []
    for number in range(30, 90):
        torch.cuda._sleep(200_000 * ((number * 5 + transport.rank * 3) % 7))  # ranks reach exchanges at other times
        busy.append(start_one(transport, number, 20_000))
    landed = [arrives(transport, started) for started in busy]
    gathered = transport.gather(10 + transport.rank, torch.device("cuda"))
    return all((*one_by_one, empty, *last_first, *grown, *landed)) and gathered == [10, 11, 12, 13]


@pytest.mark.parametrize("kind", TRANSPORTS)
def test_what_is_sent_arrives(kind: str) -> None:
    assert values(run_processes(RANKS, carries, kind, timeout_seconds=90.0, deadline_seconds=240.0)) == [True] * RANKS


def disagrees(joined: C10dTransport) -> str | None:
    transport = on_this_gpu(joined, "symmetric")
    splits = [16, 16] if transport.rank == 0 else [32, 16]       # rank 0 expects 16 from rank 1
    try:
        transport.exchange(torch.zeros(sum(splits), dtype=torch.uint8, device="cuda"), splits, [16, 16]).wait()
    except TransportError as error:
        return str(error)
    return None


def test_splits_that_do_not_match_are_named() -> None:
    for message in values(run_processes(2, disagrees, timeout_seconds=60.0, deadline_seconds=180.0)):
        assert "32" in message and "same plan" in message


def shares_by_accident(transport: C10dTransport) -> str | None:
    from distca.runtime.transport.symmetric import SymmetricTransport

    os.environ.pop("TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES", None)
    try:
        SymmetricTransport(transport.group)
    except ValueError as error:
        return str(error)
    return None


def test_sharing_a_gpu_must_be_meant() -> None:
    for message in values(run_processes(2, shares_by_accident, timeout_seconds=60.0, deadline_seconds=180.0)):
        assert "ranks [0, 1]" in message and "TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES=1" in message
