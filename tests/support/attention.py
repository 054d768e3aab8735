"""Attention over a plan on fake ranks, which are threads of one process, and the dense formula to compare it with.

Tensors hold documents laid end to end; `row_index` and `from_rows` convert to ranks' rows and back. Real ranks are in
tests.support.processes, error bounds in tests.support.accuracy.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import numpy as np
import torch

from distca.kernels import dense_attention
from distca.kernels.interface import TaskRows
from distca.planning.plan import Plan
from distca.runtime.attention import CoreAttention
from distca.runtime.pool.transport import PoolTransport
from distca.runtime.transport import HierarchicalTransport, LoopbackTransport, LoopbackWorld, Transport
from distca.workload.layout import Layout
from tests.support.pools import server_pools

Result = TypeVar("Result")


def random_qkv(
    seed: int, num_tokens: int, heads: int = 4, kv_heads: int = 2, dim: int = 8, dtype: torch.dtype | None = None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """q, k, v and dout of documents laid end to end, float64 by default."""
    generator = torch.Generator().manual_seed(seed)
    shapes = ((heads, dim), (kv_heads, dim), (kv_heads, dim), (heads, dim))
    q, k, v, dout = (torch.randn(num_tokens, *shape, generator=generator, dtype=dtype or torch.float64)
                     for shape in shapes)
    return q, k, v, dout


def qkv_of(row: Iterable[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Queries, keys and values as a call takes them: three, where a list could hold any number."""
    q, k, v = row
    return q, k, v


def gradient(leaf: torch.Tensor) -> torch.Tensor:
    """What backward left in a leaf; it has to have left something."""
    assert leaf.grad is not None, "backward did not reach this leaf"
    return leaf.grad


def greedy(logits: torch.Tensor, off: float = 1e-5) -> torch.Tensor:
    """The best token of each row of logits, which any rounding picks: the next best is out of its reach.

    Two runs whose logits are off by rounding, each by at most `off` of itself and of 1, choose the same token only if
    the best logit leads by more than both can be off. Checked, so that a comparison of tokens holds on any machine.
    """
    best, tokens = logits.topk(2)
    assert (best[..., 0] - best[..., 1] > 2 * off * (1 + best.abs().amax(-1))).all(), "rounding decides the best token"
    return tokens[..., 0]


def task_rows(*columns: Sequence[int]) -> TaskRows:
    """TaskRows of columns written by hand."""
    return TaskRows(*(np.array(column) for column in columns))


def row_index(layout: Layout, rank: int) -> torch.Tensor:
    """Where each token of a rank's row stands when all documents are laid end to end."""
    tokens = layout.tokens(rank)
    begin = np.cumsum(layout.lengths) - layout.lengths
    return torch.from_numpy(begin[tokens.document] + tokens.position)


def from_rows(rows: Sequence[torch.Tensor], layout: Layout) -> torch.Tensor:
    """Every rank's row, put back into documents laid end to end."""
    whole = rows[0].new_empty((layout.num_tokens, *rows[0].shape[1:]))
    for rank, row in enumerate(rows):
        whole[row_index(layout, rank)] = row
    return whole


def on_fake_ranks(
    plan: Plan, body: Callable[[CoreAttention], Result], *, node: Sequence[int] | None = None, **options: Any
) -> list[Result]:
    """Run `body` on a thread per rank of the layout, while the pool's dedicated servers serve until all are done.

    `node` of every rank makes exchanges go in two hops, if there are no dedicated servers.
    """
    homes, roles = plan.layout.num_ranks, plan.num_servers - plan.layout.num_ranks
    if roles:
        with server_pools(homes, roles, kernel=options.get("kernel", "auto")) as pools:
            return LoopbackWorld(homes, timeout_seconds=20.0).run(lambda loopback: body(CoreAttention(
                transport=PoolTransport(loopback, pools[loopback.rank]), **options)))
    worlds = {} if node is None else {one: LoopbackWorld(list(node).count(one), timeout_seconds=20.0) for one in node}

    def one(loopback: LoopbackTransport) -> Any:
        transport: Transport = loopback
        if node is not None:
            here = node[loopback.rank]
            inner = LoopbackTransport(worlds[here], list(node[:loopback.rank]).count(here))
            transport = HierarchicalTransport(loopback, inner, node)
        return body(CoreAttention(transport=transport, **options))

    return LoopbackWorld(homes, timeout_seconds=20.0).run(one)


def attend_on_fake_ranks(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, dout: torch.Tensor, plan: Plan, *,
    scale: float | None = None, window: int | None = None, softcap: float | None = None,
    sinks: torch.Tensor | None = None, **options: Any,
) -> tuple[torch.Tensor, ...]:
    """out, dq, dk, dv of documents laid end to end, computed where the plan says; options are CoreAttention's.

    With `sinks` their gradient follows.
    """

    def body(attend: CoreAttention) -> tuple[torch.Tensor, ...]:
        index = row_index(plan.layout, attend.transport.rank)
        row = qkv_of(x.detach()[index].requires_grad_() for x in (q, k, v))
        own = None if sinks is None else sinks.detach().clone().requires_grad_()
        out = attend(*row, plan, scale=scale, window=window, softcap=softcap, sinks=own)
        out.backward(dout[index])
        return out.detach(), *map(gradient, row), *(() if own is None else (gradient(own),))

    out, dq, dk, dv, *dsinks = zip(*on_fake_ranks(plan, body, **options), strict=True)
    return *(from_rows(field, plan.layout) for field in (out, dq, dk, dv)), *(sum(each) for each in dsinks)


def dense_on_one(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, dout: torch.Tensor, lengths: np.ndarray,
    scale: float | None = None, window: int | None = None, softcap: float | None = None,
    sinks: torch.Tensor | None = None,
) -> tuple[torch.Tensor, ...]:
    """out, dq, dk, dv by the formula, in one piece; with `sinks` their gradient follows."""
    leaves = [x.detach().requires_grad_() for x in (q, k, v, sinks) if x is not None]
    out = dense_attention(*qkv_of(leaves[:3]), lengths.tolist(), scale, window, softcap, *leaves[3:])
    return out.detach(), *torch.autograd.grad(out, leaves, dout)


@contextmanager
def determinism(wanted: bool = True) -> Iterator[None]:
    """torch's deterministic algorithms inside, or not; outside it is as it was."""
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(wanted)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before)
