"""Values with a head dim of their own, as in multi-head latent attention: exact, and sent in as many bytes."""

import numpy as np
import pytest
import torch

from distca.kernels import kernel_named
from distca.kernels.interface import PLAIN
from distca.planning.plan import Plan
from distca.runtime.exchange import ALIGNMENT, STAMP_BYTES
from distca.runtime.prepared import Prepared, Shapes
from distca.runtime.transport import LoopbackTransport, LoopbackWorld
from distca.spec import ModelShape
from tests.support.attention import attend_on_fake_ranks, dense_on_one, random_qkv
from tests.support.plans import scattered_layout, scattered_plan

MODEL = ModelShape("tiny", 1, 32, 4, 2, 12, 64, 64, value_dim=8)
LENGTHS = np.array([40, 1, 33, 16])


def scattered(servers: int) -> Plan:
    plan = scattered_plan(5, scattered_layout(11, LENGTHS, ranks=3), servers, MODEL)
    assert (plan.tasks.home != plan.tasks.server).any()
    return plan


@pytest.mark.parametrize(("servers", "state"), [(3, "resend"), (3, "keep"), (4, "resend")])
@pytest.mark.parametrize("kernel", ["dense", "sdpa"])
def test_matches_dense(kernel: str, servers: int, state: str) -> None:
    """With four servers one is dedicated, and knows of the values' head dim from what is announced."""
    plan = scattered(servers)
    q, k, *_ = random_qkv(0, int(LENGTHS.sum()), dim=12)
    *_, v, dout = random_qkv(1, int(LENGTHS.sum()), dim=8)
    actual = attend_on_fake_ranks(q, k, v, dout, plan, kernel=kernel, state=state)
    for a, e in zip(actual, dense_on_one(q, k, v, dout, LENGTHS), strict=True):
        torch.testing.assert_close(a, e, rtol=1e-10, atol=1e-10)


def test_the_wire_carries_what_the_model_counts() -> None:
    plan, shapes = scattered(3), Shapes(4, 2, 12, torch.float32, torch.device("cpu"), 8)
    padding = 2 * (3 * ALIGNMENT + STAMP_BYTES)                  # to two peers, three fields
    for rank in range(3):
        transport = LoopbackTransport(LoopbackWorld(3), rank)
        prepared = Prepared(plan, 0, transport, kernel_named("dense"), shapes, PLAIN)
        queries, keys = (side.send.num_tokens for side in (prepared.tables.queries, prepared.tables.keys))
        counted = queries * MODEL.q_token_bytes(element_bytes=4) + keys * MODEL.kv_token_bytes(element_bytes=4)
        assert counted <= prepared.inputs.outer.leaving.num_bytes <= counted + padding
        back = prepared.tables.queries.receive.num_tokens
        counted = back * (MODEL.out_token_bytes(element_bytes=4) + MODEL.lse_token_bytes())
        assert counted <= prepared.outputs.outer.leaving.num_bytes <= counted + padding
