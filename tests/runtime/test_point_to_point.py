"""Neighbouring stages: what is sent one way arrives in that order; what does not arrive is an error that says so."""

import re

import pytest
import torch

from distca.runtime.transport import LoopbackPointToPoint, LoopbackWorld, TransportError
from distca.runtime.transport.loopback import LoopbackTransport

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
