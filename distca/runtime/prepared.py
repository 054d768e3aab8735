"""Prepare plans for one rank and cache them: digests, agreements with other ranks, and tables on the device.

Plans are not broadcast, so ranks compare digests before they run a new plan. Ranks make the same calls in the same
order, so all of them find a plan new at the same call and evict the same plans.
"""

from __future__ import annotations

import hashlib
import importlib.util
import logging
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable
from functools import cache, cached_property, partial
from math import prod
from typing import Generic, NamedTuple, TypeVar
from weakref import WeakKeyDictionary

import numpy as np
import torch

from distca.dispatch import HopTables, RankTables, build, build_hops, travels
from distca.kernels import Kernel, TaskRows, choose
from distca.kernels.interface import PLAIN, Scores, accumulation_dtype
from distca.planning.plan import Plan
from distca.planning.traffic import two_hops_pay
from distca.runtime.exchange import STAMP_BYTES, Combine, Dispatch, Exchange, Fields, Hop, Packing, different_plans
from distca.runtime.transport import HierarchicalTransport, Transport

PLANS_KEPT = 16         # prepared plans
AGREEMENTS_KEPT = 4096  # compared digests, one integer each
PLANS_IN_TURN = 4       # plans between which the calls of one optimizer step may alternate

Key = TypeVar("Key")
Value = TypeVar("Value")


class Shapes(NamedTuple):
    """Shapes, dtype and device of the tensors that a plan is run with."""

    num_heads: int
    num_kv_heads: int
    head_dim: int         # of queries and keys
    dtype: torch.dtype
    device: torch.device
    value_dim: int = 0    # of a head's values; 0: head_dim

    @classmethod
    def of(cls, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Shapes:
        value_dim = 0 if v.shape[2] == q.shape[2] else v.shape[2]
        return cls(q.shape[1], k.shape[1], q.shape[2], q.dtype, q.device, value_dim)

    @property
    def tensors(self) -> tuple[tuple[str, tuple[int, ...], torch.dtype], ...]:
        """For q, k, v, out and lse: "q" or "k" (query or key tokens), the shape of a token, the dtype."""
        heads, kv_heads, dim, dtype, _, value_dim = self
        value_dim = value_dim or dim
        return (("q", (heads, dim), dtype), ("k", (kv_heads, dim), dtype), ("k", (kv_heads, value_dim), dtype),
                ("q", (heads, value_dim), dtype), ("q", (heads,), accumulation_dtype(dtype)))

    @property
    def fields(self) -> tuple[tuple[str, int], ...]:
        """For q, k, v, out and lse: "q" or "k" (query or key tokens) and the bytes of a token."""
        return tuple((side, prod(shape) * dtype.itemsize) for side, shape, dtype in self.tensors)

    def empty_row(self) -> tuple[torch.Tensor, ...]:
        """Return q, k, v, out and lse with no tokens."""
        return tuple(torch.empty(0, *shape, dtype=dtype, device=self.device) for _, shape, dtype in self.tensors)


class Prepared:
    """A plan prepared for one rank, one set of shapes and one kernel, so that layers only copy, send and compute.

    Each exchange is laid out by the first call that uses it.
    """

    def __init__(
        self, plan: Plan, digest: int, transport: Transport, kernel: Kernel, shapes: Shapes, scores: Scores
    ) -> None:
        self.digest, self.transport, self.kernel, self.shapes = digest, transport, kernel, shapes
        self.hops: HopTables | None = None
        self._travels = travels(plan)                            # whether any rank sends anything
        self._queries_travel = bool((plan.tasks.home != plan.tasks.server).any())
        if self._travels and isinstance(transport, HierarchicalTransport) and two_hops_pay(
                plan.layout, plan.tasks, transport.node, plan.model, plan.tp):
            self.hops = build_hops(plan, transport.rank, transport.node)
        self.tables = build(plan, transport.rank) if self.hops is None else self.hops.inner  # hop to servers
        rows = TaskRows(*(getattr(self.tables, name) for name in ("q_begin", "q_end", "k_begin", "k_end", "q_offset")))
        self.rows = kernel.prepare(rows, shapes.device, scores)  # the tasks in the kernel's format

    @cached_property
    def inputs(self) -> Exchange:
        """Dispatch of q, k and v, with stamps."""
        q, k, v, *_ = self.shapes.fields
        return self._exchange([q, k, v], partial(Dispatch.of, stamp=stamp_of(self.digest, self.shapes.device)))

    @cached_property
    def outputs(self) -> Exchange:
        """Combine of out and lse."""
        *_, out, lse = self.shapes.fields
        return self._exchange([out, lse], partial(Combine.of, merged_heads=self.shapes.num_heads), back=True)

    @cached_property
    def backward_inputs(self) -> Exchange:
        """Dispatch of q, k, v, out, dout and lse."""
        q, k, v, out, lse = self.shapes.fields
        return self._exchange([q, k, v, out, out, lse], Dispatch.of)

    @cached_property
    def kept_backward_inputs(self) -> Exchange:
        """Dispatch of out, dout and lse, for servers that keep q, k and v."""
        *_, out, lse = self.shapes.fields
        return self._exchange([out, out, lse], Dispatch.of)

    @cached_property
    def gradients(self) -> Exchange:
        """Combine of dq, dk and dv."""
        q, k, v, *_ = self.shapes.fields
        return self._exchange([q, k, v], Combine.of, back=True)

    def _exchange(
        self, fields: Fields, packing: Callable[[RankTables, Fields], Packing], back: bool = False
    ) -> Exchange:
        """Build the exchange of these fields, to servers or `back` to homes."""
        transport, hops, device = self.transport, self.hops, self.shapes.device
        everyone = range(transport.size)
        if hops is None:
            one = packed_on(device, packing(self.tables, fields))
            moves = self._queries_travel or (self._travels and any(name == "k" for name, _ in fields))
            return Exchange((Hop(one, transport, moves, everyone),), one)
        assert isinstance(transport, HierarchicalTransport)
        way = transport.coming if back else transport.going
        outer, inner = (packed_on(device, packing(tables, fields)) for tables in (hops.outer, hops.inner))
        here = np.flatnonzero(transport.node == transport.node[transport.rank]).tolist()
        between = Hop(outer, way.outer, hops.crosses, everyone)
        inside = Hop(inner, way.inner, hops.passes, here)
        return Exchange((inside, between) if back else (between, inside), outer, way.relay)


def packed_on(device: torch.device, packing: Packing) -> Packing:
    """Return packing by one triton launch on a GPU, if triton is installed; otherwise `packing`, which uses torch."""
    if device.type != "cuda" or not _has_triton():
        return packing
    from distca.runtime.exchange_triton import with_triton

    return with_triton(packing, device)


@cache
def _has_triton() -> bool:
    found = importlib.util.find_spec("triton") is not None
    if not found:
        logging.getLogger("distca").warning("triton is not installed, so torch copies around attention, in many "
                                            "launches; pip install triton")
    return found


class PlanFacts(NamedTuple):
    """Cached facts about a plan that every call needs."""

    digest: int
    checked: dict[tuple[object, ...], Shapes]  # shapes, dtypes and devices of tensors that fit


class PlanCache:
    """Cache of one rank's plans, run with the named kernel or, for "auto", the fastest that fits."""

    def __init__(self, transport: Transport, kernel: str = "auto") -> None:
        self.transport, self.kernel = transport, kernel
        self._facts: WeakKeyDictionary[Plan, PlanFacts] = WeakKeyDictionary()
        self._agreed: LRU[int, bool] = LRU(AGREEMENTS_KEPT)
        self._prepared: LRU[tuple[int, Shapes, int | None, float | None], Prepared] = LRU(PLANS_KEPT)
        self._turns: deque[int] = deque(maxlen=PLANS_IN_TURN)

    def facts(self, plan: Plan) -> PlanFacts:
        found = self._facts.get(plan)
        if found is None:
            found = self._facts[plan] = PlanFacts(digest(plan), {})
        return found

    def expect(self, plans: Iterable[Plan], device: torch.device) -> None:
        """Compare many plans, such as those of an optimizer step, at once, so that their calls need not."""
        expected = [self.facts(plan).digest for plan in plans]
        together = hashlib.blake2b(repr(expected).encode(), digest_size=8).digest()
        self._compare(int.from_bytes(together, "little", signed=True), device)
        for one in expected:
            self._agreed.put(one, True)

    def begin(self, plan: Plan, shapes: Shapes, scores: Scores = PLAIN) -> Prepared:
        """Return the prepared plan of a call that begins, after comparing a new plan with the other ranks."""
        found = self.facts(plan).digest
        if not self._agreed.get(found):
            self._compare(found, shapes.device)
            self._agreed.put(found, True)
        return self.prepared(plan, shapes, scores)

    def prepared(self, plan: Plan, shapes: Shapes, scores: Scores = PLAIN) -> Prepared:
        """Return the plan prepared for these shapes; calls with different scales share it."""
        key = self.facts(plan).digest, shapes, scores.window, scores.softcap
        prepared = self._prepared.get(key)
        if prepared is None:
            kernel = choose(shapes.device, shapes.dtype, shapes.head_dim, scores.window, self.kernel,
                            shapes.value_dim or None, scores.softcap)
            prepared = Prepared(plan, key[0], self.transport, kernel, shapes, scores)
            self._prepared.put(key, prepared)
        return prepared

    def comes_up_anew(self, plan: Plan) -> bool:
        """Return whether none of the latest calls followed this plan, and record this call."""
        found = self.facts(plan).digest
        is_new = found not in self._turns
        self._turns.append(found)
        return is_new

    def _compare(self, mine: int, device: torch.device) -> None:
        others = [rank for rank, other in enumerate(self.transport.gather(mine, device)) if other != mine]
        if others:
            raise different_plans(self.transport.rank, others)


def digest(plan: Plan) -> int:
    """Return a hash of the plan, for ranks to compare."""
    state = hashlib.blake2b(digest_size=8)
    layout = plan.layout
    columns = [getattr(table, name) for table, names in (
        (layout, ("lengths", "document", "start", "stop", "rank")), (layout.key_only, layout.key_only.__slots__),
        (plan.tasks, plan.tasks.__slots__)) for name in names]
    for column in (*columns, np.array([layout.num_ranks, plan.num_servers, plan.window or 0,
                                        *map(len, columns)])):
        state.update(column.tobytes())
    return int.from_bytes(state.digest(), "little", signed=True)


def stamp_of(digest: int, device: torch.device) -> torch.Tensor:
    """Return a digest as uint8 [STAMP_BYTES]; it is sent in every split, so that ranks detect different plans."""
    content = digest.to_bytes(STAMP_BYTES, "little", signed=True)
    return torch.frombuffer(bytearray(content), dtype=torch.uint8).to(device)


class LRU(Generic[Key, Value]):
    """Cache that evicts the least recently used entry: ranks that make equal calls evict equal entries."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self._entries: OrderedDict[Key, Value] = OrderedDict()

    def get(self, key: Key) -> Value | None:
        value = self._entries.get(key)
        if value is not None:
            self._entries.move_to_end(key)
        return value

    def put(self, key: Key, value: Value) -> None:
        self._entries[key] = value
        self._entries.move_to_end(key)
        if len(self._entries) > self.capacity:
            self._entries.popitem(last=False)
