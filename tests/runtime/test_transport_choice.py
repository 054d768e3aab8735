"""A transport by name or by object; what cannot be is refused in one line."""

from collections.abc import Iterator
from typing import Any, cast

import pytest
import torch.distributed as dist

from distca.runtime.attention import CoreAttention
from distca.runtime.transport import C10dTransport, LoopbackTransport, LoopbackWorld, transport_for


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
