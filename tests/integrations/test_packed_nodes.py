"""Integrations find nodes from the ranks' hosts, for two hops and plans by levels; "flat" forces one hop."""

from __future__ import annotations

import platform

import pytest
import torch

from distca.integrations.packed import PackedAttention
from distca.runtime.transport import C10dTransport
from tests.support.attention import dense_on_one, random_qkv
from tests.support.processes import run_processes

TOKENS, HOSTS = 300, ["a", "a", "b", "b"]


def packed_call(transport: C10dTransport, hosts: list[str], chosen: str) -> tuple[str, bool, float]:
    """One document over all ranks: the transport that carried it, whether the plan has nodes, and the error."""
    platform.node = lambda: hosts[transport.rank]
    attend = PackedAttention(transport=chosen)
    tensors = random_qkv(1, 4 * TOKENS)
    mine = slice(transport.rank * TOKENS, (transport.rank + 1) * TOKENS)
    leaves = [x[mine].clone().requires_grad_() for x in tensors[:3]]
    positions = torch.arange(4 * TOKENS)[mine]
    out = attend(leaves[0], leaves[1], leaves[2], positions)
    out.backward(tensors[3][mine])
    found = out.detach(), *(leaf.grad for leaf in leaves if leaf.grad is not None)
    expected = dense_on_one(*tensors, lengths=torch.tensor([4 * TOKENS]).numpy())
    error = max(float((got - want[mine]).abs().max()) for got, want in zip(found, expected, strict=True))
    assert attend.latest is not None and attend._pool is not None
    topology = attend.latest.topology
    return type(attend._pool.transport).__name__, topology is not None and bool(topology.levels()), error


@pytest.mark.multiprocess
@pytest.mark.parametrize(("hosts", "chosen", "expected"), [
    (HOSTS, "c10d", ("HierarchicalTransport", True)), (HOSTS, "flat", ("C10dTransport", False)),
    (["a"] * 4, "c10d", ("C10dTransport", False))])
def test_nodes_are_found_and_flat_is_forced(hosts: list[str], chosen: str, expected: tuple[str, bool]) -> None:
    for outcome in run_processes(4, packed_call, hosts, chosen):
        assert outcome.error is None
        name, has_levels, error = outcome.value
        assert (name, has_levels) == expected
        assert error < 1e-10
