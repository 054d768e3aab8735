"""Dedicated servers in other trainers: the same results with them, without them, and when one dies within a step."""

from __future__ import annotations

import os
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from distca.integrations.packed import PackedAttention
from distca.models import model_named
from distca.runtime.pool.runner import Runner
from distca.runtime.pool.server import Server
from distca.runtime.pool.transport import connect_servers
from distca.runtime.transport.c10d import C10dTransport
from tests.support.attention import dense_on_one, gradient, qkv_of, random_qkv
from tests.support.pools import SECRET, read_address, write_address
from tests.support.processes import run_processes

ROWS = [[700, 30], [130]]                                        # documents of each rank, on which none spans ranks
BATCHES = 4


def serve_some(runs: int, where: Path) -> None:
    """Serve, and die in the middle of a role."""
    inner = Runner._run_if_complete

    def run(runner: Runner, *key: int) -> None:
        if runner.runs == runs:
            os._exit(17)
        inner(runner, *key)

    pytest.MonkeyPatch().setattr(Runner, "_run_if_complete", run)
    Server(partial(read_address, where), SECRET).run()


def attend(transport: C10dTransport | None, where: str, window: int | None) -> Any:
    if transport is None:
        return serve_some(3, Path(where))
    pool = connect_servers(transport, roles=1, secret=SECRET)
    write_address(Path(where), pool.address)
    assert pool.pool.wait_for_servers(1, 60)
    attention = PackedAttention(model=model_named("tiny"), tolerance=0.02, transport=pool)
    lengths, worst = ROWS[transport.rank], 0.0
    for seed in range(BATCHES):
        *tensors, dout = random_qkv(10 * seed + transport.rank, sum(lengths))
        leaves = [x.requires_grad_() for x in tensors]
        batch = attention.begin(lengths)
        assert batch.plan is not None and batch.plan.num_servers == 3
        out = attention.attend(*qkv_of(leaves), batch, window=window)
        out.backward(dout)
        for got, want in zip((out.detach(), *map(gradient, leaves)),
                             dense_on_one(*qkv_of(x.detach() for x in leaves), dout, torch.tensor(lengths).numpy(),
                                          None, window), strict=True):
            worst = max(worst, float((got - want).abs().max()))
    lost = pool.pool.take_faults().lost
    pool.close()
    return worst, lost


@pytest.mark.multiprocess
def test_packed_attention_survives_its_server(tmp_path: Path) -> None:
    *trainers, server = run_processes(3, attend, str(tmp_path / "address"), None, in_group=2)
    assert server.exit_code == 17
    for outcome in trainers:
        assert outcome.error is None
        worst, lost = outcome.value
        assert worst < 1e-10 and lost == 1
