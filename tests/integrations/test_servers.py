"""Dedicated servers in other trainers: the same results with them, without them, and when one dies within a step."""

from __future__ import annotations

import os
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from distca.integrations.packed import PackedAttention, _shared
from distca.models import model_named
from distca.runtime.pool.runner import Runner
from distca.runtime.pool.server import Server
from distca.runtime.pool.transport import connect_servers
from distca.runtime.transport.c10d import C10dTransport
from tests.support import pools
from tests.support.attention import dense_on_one, gradient, qkv_of, random_qkv
from tests.support.pools import SECRET, pool_of, read_address, write_address
from tests.support.processes import run_processes
from tests.support.trainers import rows_of_tokens, total_loss

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
    Server(partial(read_address, where), SECRET, patience_seconds=200.0).run()


def attend(transport: C10dTransport | None, where: str, window: int | None) -> Any:
    if transport is None:
        return serve_some(3, Path(where))
    pool = connect_servers(transport, roles=1, secret=SECRET)
    if transport.rank == 0:
        write_address(Path(where), pool.address)
    assert pool.wait_for_servers(1, 60)
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


def steps_of(trainer: str) -> Any:
    """A small model of a trainer's, with `pool_of`; what computes a rank's loss over packed documents."""
    if trainer == "transformers":
        from distca.integrations.huggingface import enable
        from tests.integrations.test_huggingface import small

        model = small("llama").train()
        enable(model, transport=pool_of)
        return model, lambda documents: model(
            torch.cat([one[:-1] for one in documents])[None],
            position_ids=torch.cat([torch.arange(len(one) - 1) for one in documents])[None]).logits[0]
    if trainer == "megatron":
        from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec

        from distca.integrations.megatron_core import enable as enable_spec
        from tests.integrations.test_megatron_core import cpu_megatron, gpt, packed

        cpu_megatron()
        model = gpt(enable_spec(get_gpt_layer_local_spec(), transport=pool_of))
        return model, lambda documents: packed(model, documents)[0]
    from tests.integrations.test_torchtitan import packed, replicated

    model = replicated(2, transport="tests.support.pools.pool_of")
    return model, lambda documents: packed(model, documents)


def train_twice(transport: C10dTransport | None, trainer: str, where: str) -> Any:
    """Losses and gradients of the same steps without any server, and with one that is lost in the first backward."""
    if transport is None:
        return serve_some(3, Path(where))
    found, lost = [], 0
    for served in (False, True):
        pools.POOL.append(pool := connect_servers(transport, roles=1, secret=SECRET))
        _shared.cache_clear()
        if served:
            if transport.rank == 0:
                write_address(Path(where), pool.address)
            assert pool.wait_for_servers(1, 60)
        model, logits = steps_of(trainer)
        for seed in range(2):
            documents = rows_of_tokens([[length + seed for length in row] for row in ROWS], 60)[transport.rank]
            loss = total_loss(logits(documents), documents)
            loss.backward()
            found.append(torch.cat([loss.detach().view(1), *(x.grad.flatten() for x in model.parameters())]))
        lost = pool.pool.take_faults().lost
        pool.close()
    return lost, [torch.equal(found[at], found[at + 2]) for at in range(2)], [bool(x.norm() > 0) for x in found]


@pytest.mark.multiprocess
@pytest.mark.parametrize(("trainer", "module"), [
    ("transformers", "transformers"), ("megatron", "megatron.core"), ("torchtitan", "torchtitan")])
def test_trainers_survive_their_server(trainer: str, module: str, tmp_path: Path) -> None:
    """Bit for bit: shares of the attention do not depend on who computes them, and every process has one thread."""
    pytest.importorskip(module)
    *trainers, server = run_processes(3, train_twice, trainer, str(tmp_path / "address"), in_group=2,
                                      timeout_seconds=120.0, deadline_seconds=250.0)
    assert server.exit_code == 17
    assert [(one.error, one.value) for one in trainers] == [(None, (1, [True] * 2, [True] * 4))] * 2


@pytest.mark.multiprocess
def test_packed_attention_survives_its_server(tmp_path: Path) -> None:
    *trainers, server = run_processes(3, attend, str(tmp_path / "address"), None, in_group=2)
    assert server.exit_code == 17
    for outcome in trainers:
        assert outcome.error is None
        worst, lost = outcome.value
        assert worst < 1e-10 and lost == 1
