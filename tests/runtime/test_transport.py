"""One suite for every transport: loopback and gloo here, symmetric memory among the GPU tests.

Then transports by name or by object, and messages between neighbouring stages.
"""

import re
import threading
from collections.abc import Callable, Iterator
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist

from distca.runtime.attention import CoreAttention
from distca.runtime.transport import (
    C10dTransport,
    LoopbackPointToPoint,
    LoopbackTransport,
    LoopbackWorld,
    TransportError,
    transport_for,
)
from tests.support.processes import run_processes

CPU = torch.device("cpu")


def on_loopback(size: int, check: Callable[..., Any]) -> list[tuple[int, int] | None]:
    return LoopbackWorld(size, timeout_seconds=20).run(check)


def on_gloo(size: int, check: Callable[..., Any]) -> list[tuple[int, int] | None]:
    outcomes = run_processes(size, check)
    assert [outcome.error for outcome in outcomes] == [None] * size
    assert [outcome.exit_code for outcome in outcomes] == [0] * size
    return [outcome.value for outcome in outcomes]


TRANSPORTS = [pytest.param(on_loopback, id="loopback"),
              pytest.param(on_gloo, id="gloo", marks=pytest.mark.multiprocess)]


def segment(source: int, destination: int, length: int, salt: int = 0) -> torch.Tensor:
    """Bytes that tell where they come from, where they go and where in the segment they stand."""
    return (torch.arange(length) * 7 + source * 31 + destination * 57 + salt).to(torch.uint8)


def begin(transport: C10dTransport | LoopbackTransport, lengths: Callable[..., Any], salt: int = 0) -> Any:
    """Start an exchange in which `lengths(source, destination)` bytes travel."""
    me, everyone = transport.rank, range(transport.size)
    send = torch.cat([segment(me, other, lengths(me, other), salt) for other in everyone])
    return transport.exchange(send, [lengths(me, other) for other in everyone],
                              [lengths(other, me) for other in everyone])


def expected(transport: C10dTransport | LoopbackTransport, lengths: Callable[..., Any], salt: int = 0) -> torch.Tensor:
    me = transport.rank
    return torch.cat([segment(other, me, lengths(other, me), salt) for other in range(transport.size)])


def exchanges(transport: C10dTransport | LoopbackTransport, lengths: Callable[..., Any]) -> None:
    arrived = begin(transport, lengths).wait()
    assert arrived.dtype == torch.uint8 and torch.equal(arrived, expected(transport, lengths))


def knows_its_rank(transport: C10dTransport | LoopbackTransport) -> tuple[int, int]:
    carries_unequal_splits(transport)
    return transport.rank, transport.size


def carries_unequal_splits(transport: C10dTransport | LoopbackTransport) -> None:
    exchanges(transport, lambda source, destination: 1 + 3 * source + 11 * destination)


def carries_zero_splits(transport: C10dTransport | LoopbackTransport) -> None:
    exchanges(transport, lambda source, destination: 0 if (source + destination) % 2 else 5 + source)


def carries_from_one_rank_alone(transport: C10dTransport | LoopbackTransport) -> None:
    exchanges(transport, lambda source, destination: 9 if (source, destination) == (1, 0) else 0)


def carries_nothing_at_all(transport: C10dTransport | LoopbackTransport) -> None:
    exchanges(transport, lambda source, destination: 0)


def carries_megabytes(transport: C10dTransport | LoopbackTransport) -> None:
    exchanges(transport, lambda source, destination: 3_000_001 + source if source != destination else 0)


def carries_the_bytes_of_any_dtype(transport: C10dTransport | LoopbackTransport) -> None:
    for dtype in (torch.float64, torch.float32, torch.bfloat16, torch.int64):
        values = torch.arange(4 * transport.size).view(transport.size, 4).to(dtype) + transport.rank
        raw = values.flatten().view(torch.uint8)
        splits = [4 * dtype.itemsize] * transport.size
        arrived = transport.exchange(raw, splits, splits).wait().view(dtype).view(transport.size, 4)
        wanted = torch.stack([torch.arange(4 * transport.rank, 4 * transport.rank + 4).to(dtype) + other
                              for other in range(transport.size)])
        assert torch.equal(arrived, wanted)


def keeps_several_exchanges_in_flight(transport: C10dTransport | LoopbackTransport) -> None:
    shapes = [lambda s, d: 3 + s, lambda s, d: 0, lambda s, d: 1000 * d, lambda s, d: 2]
    handles = [begin(transport, lengths, salt) for salt, lengths in enumerate(shapes)]
    for salt, (handle, lengths) in enumerate(zip(handles, shapes, strict=True)):
        assert torch.equal(handle.wait(), expected(transport, lengths, salt))


def waits_in_any_order(transport: C10dTransport | LoopbackTransport) -> None:
    handles = [begin(transport, lambda s, d: 40 + s + d, salt) for salt in range(3)]
    for salt in (2, 0, 1):
        assert torch.equal(handles[salt].wait(), expected(transport, lambda s, d: 40 + s + d, salt))


def gathers(transport: C10dTransport | LoopbackTransport) -> None:
    values = [-2**63, 2**63 - 1, 17, 0]
    assert transport.gather(values[transport.rank], CPU) == values[:transport.size]


def gathers_while_an_exchange_travels(transport: C10dTransport | LoopbackTransport) -> None:
    handle = begin(transport, lambda s, d: 12 + d)
    assert transport.gather(transport.rank * 10, CPU) == [10 * rank for rank in range(transport.size)]
    assert torch.equal(handle.wait(), expected(transport, lambda s, d: 12 + d))


def hands_over_memory_of_its_own(transport: C10dTransport | LoopbackTransport) -> None:
    """Writing into what arrived changes nobody else's bytes, nor what this rank sends next."""
    for _ in range(2):
        arrived = begin(transport, lambda s, d: 64).wait()
        assert torch.equal(arrived, expected(transport, lambda s, d: 64))
        arrived.zero_()


CHECKS = [carries_unequal_splits, carries_zero_splits, carries_from_one_rank_alone, carries_nothing_at_all,
          carries_megabytes, carries_the_bytes_of_any_dtype, keeps_several_exchanges_in_flight, waits_in_any_order,
          gathers, gathers_while_an_exchange_travels, hands_over_memory_of_its_own]


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_loopback(check: Callable[..., Any]) -> None:
    on_loopback(3, check)


def all_checks(transport: C10dTransport) -> None:
    for check in CHECKS:
        check(transport)


@pytest.mark.multiprocess
def test_gloo() -> None:
    on_gloo(3, all_checks)


@pytest.mark.parametrize("on", TRANSPORTS)
@pytest.mark.parametrize("size", [1, 2, 4])
def test_groups_of_any_size(on: Callable[..., Any], size: int) -> None:
    assert on(size, knows_its_rank) == [(rank, size) for rank in range(size)]


def test_the_suite_can_fail() -> None:
    """A transport that delivers one rank's bytes to another does not pass."""

    def wrong(transport: LoopbackTransport) -> None:
        inner = transport.exchange
        transport.exchange = (  # type: ignore[method-assign]
            lambda send, send_splits, recv_splits: inner(send.flip(0), send_splits, recv_splits))
        carries_zero_splits(transport)

    with pytest.raises(AssertionError):
        on_loopback(3, wrong)


def test_loopback_names_ranks_that_do_not_come() -> None:
    def body(transport: LoopbackTransport) -> None:
        if transport.rank != 1:
            begin(transport, lambda s, d: 1).wait()

    with pytest.raises(TransportError, match=r"ranks \[1\] did not come to exchange 0 within 0.3 s"):
        LoopbackWorld(3, timeout_seconds=0.3).run(body)


def test_loopback_names_splits_that_do_not_match() -> None:
    def body(transport: LoopbackTransport) -> None:
        splits = [2, 2] if transport.rank else [1, 1]
        transport.exchange(torch.zeros(sum(splits), dtype=torch.uint8), splits, [2, 2]).wait()

    with pytest.raises(TransportError, match=r"expected \[2, 2\] bytes from each rank and got \[1, 2\]"):
        LoopbackWorld(2, timeout_seconds=5).run(body)


@pytest.mark.parametrize("wait", ["exchange", "gather"])
def test_a_rank_that_fails_ends_the_others_at_once(wait: str) -> None:
    """The first failure is what the caller sees; nobody waits out the clock for a rank that is gone."""
    ends = []

    def body(transport: LoopbackTransport) -> None:
        if transport.rank == 0:
            raise ZeroDivisionError("the first failure")
        try:
            if wait == "exchange":
                begin(transport, lambda s, d: 1).wait()
            else:
                transport.gather(1, CPU)
        except TransportError as error:
            ends.append(str(error))
            raise

    timer = threading.Timer(10, lambda: ends.append("too late"))
    timer.start()
    with pytest.raises(ZeroDivisionError, match="the first failure"):
        LoopbackWorld(3, timeout_seconds=30).run(body)
    timer.cancel()
    assert len(ends) == 2 and all("the first failure" in end for end in ends)


def test_loopback_leaves_nothing_posted() -> None:
    world = LoopbackWorld(3, timeout_seconds=5)
    world.run(keeps_several_exchanges_in_flight)
    assert not world.posted and not world.readers


@pytest.fixture
def alone() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def test_an_object_is_taken_as_it_is() -> None:
    mine = LoopbackTransport(LoopbackWorld(1), 0)
    assert CoreAttention(transport=mine).transport is mine


def test_c10d_is_the_default_and_what_auto_is_without_nccl(alone: None) -> None:
    for attention in (CoreAttention(), CoreAttention(transport="c10d"), CoreAttention(transport="auto")):
        assert type(attention.transport) is C10dTransport and attention.transport.size == 1


def test_an_unknown_name_lists_those_there_are(alone: None) -> None:
    with pytest.raises(ValueError, match="transport is 'nccl'; choose one of: c10d, flat, symmetric, auto, or give a"):
        transport_for("nccl")


def test_symmetric_memory_without_gpus_is_refused(alone: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    with pytest.raises(ValueError, match="symmetric memory needs GPUs and torch finds none; use C10dTransport"):
        CoreAttention(transport="symmetric")


@pytest.mark.parametrize(("nodes", "gpus", "expected"), [
    ([1, 1, 1], [4, 5, 6], True), ([1, 2, 1], [4, 5, 6], False), ([1, 1, 1], [4, 4, 6], False)])
def test_auto_asks_for_one_node_and_a_gpu_each(nodes: list[int], gpus: list[int], expected: bool,
                                               monkeypatch: pytest.MonkeyPatch) -> None:
    from distca.runtime import transport as package
    from distca.runtime.transport import symmetric

    class Group:
        size, group = 3, None

    monkeypatch.setattr(dist, "get_backend_config", lambda group: "cpu:gloo,cuda:nccl")
    monkeypatch.setattr("torch.cuda.current_device", lambda: 0)
    monkeypatch.setattr(symmetric, "nodes_and_gpus", lambda *_: (nodes, gpus))
    assert package._on_one_node(cast(Any, Group())) is expected


LIKE = torch.empty(0, dtype=torch.float64)


def number(value: int, size: int = 3) -> torch.Tensor:
    return torch.full((size,), float(value), dtype=torch.float64)


def test_each_way_keeps_its_order_whatever_the_other_does() -> None:
    """Both send all they have before either receives; sent tensors may change afterwards."""
    def body(transport: LoopbackTransport) -> list[float]:
        ends = LoopbackPointToPoint(world, [0, 1], transport.rank)
        other = 1 - ends.stage
        tensor = number(0)
        for value in range(4):
            ends.send(tensor.fill_(10 * ends.stage + value), other).wait()
        tensor.fill_(-1)
        handles = [ends.receive((3,), LIKE, other) for _ in range(4)]
        return [handle.wait()[0].item() for handle in handles]

    world = LoopbackWorld(2, timeout_seconds=20)
    assert world.run(body) == [[10, 11, 12, 13], [0, 1, 2, 3]]


@pytest.mark.parametrize(("sent", "match"), [
    (None, r"stage 1 of 2: stage 0 failed: nothing came within 0.2 s"),
    (number(1, size=4), r"stage 1: expected \(3,\) from stage 0 and got \(4,\); the stages do not follow the same"),
    (ZeroDivisionError("gone"), r"stage 1 of 2: stage 0 failed: gone"),
])
def test_what_does_not_arrive_is_said(sent: ZeroDivisionError | torch.Tensor | None, match: str) -> None:
    world, errors = LoopbackWorld(2, timeout_seconds=0.2), []

    def body(transport: LoopbackTransport) -> None:
        ends = LoopbackPointToPoint(world, [0, 1], transport.rank)
        if ends.stage == 0 and isinstance(sent, Exception):
            raise sent
        if ends.stage == 0 and isinstance(sent, torch.Tensor):
            ends.send(sent, 1)
        if ends.stage == 1:
            try:
                ends.receive((3,), LIKE, 0).wait()
            except TransportError as error:
                errors.append(str(error))
                raise

    with pytest.raises((TransportError, ZeroDivisionError)):
        world.run(body)
    assert len(errors) == 1 and re.match(match, errors[0])
