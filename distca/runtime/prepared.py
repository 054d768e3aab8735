"""Plans made ready for one rank, and the cache of them: digests, what was compared, and prepared tables.

Nobody broadcasts a plan, so ranks compare digests before they follow a new one. Ranks make the same calls in the same
order: all find a plan new at the same call, and all evict identically.
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
from distca.validation import UserError

PLANS_KEPT = 16         # prepared
AGREEMENTS_KEPT = 4096  # digests that were compared, a number each
PLANS_IN_TURN = 4       # plans that calls of one optimizer step may alternate between

Key = TypeVar("Key")
Value = TypeVar("Value")


class Shapes(NamedTuple):
    """The tensors a plan is run with."""

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
        """Of q, k, v, out and lse: whose tokens they belong to ("q" or "k"), the shape of a token and the dtype."""
        heads, kv_heads, dim, dtype, _, value_dim = self
        value_dim = value_dim or dim
        return (("q", (heads, dim), dtype), ("k", (kv_heads, dim), dtype), ("k", (kv_heads, value_dim), dtype),
                ("q", (heads, value_dim), dtype), ("q", (heads,), accumulation_dtype(dtype)))

    @property
    def fields(self) -> tuple[tuple[str, int], ...]:
        """Of q, k, v, out and lse: whose tokens they belong to and the bytes of a token."""
        return tuple((side, prod(shape) * dtype.itemsize) for side, shape, dtype in self.tensors)

    def empty_row(self) -> tuple[torch.Tensor, ...]:
        """q, k, v, out and lse of no tokens."""
        return tuple(torch.empty(0, *shape, dtype=dtype, device=self.device) for _, shape, dtype in self.tensors)


class Prepared:
    """A plan made ready for one rank, one set of shapes and one kernel, so that layers only copy, send and compute.

    Where everything lies on the wire is worked out by the first call that sends it.
    """

    def __init__(
        self, plan: Plan, digest: int, transport: Transport, kernel: Kernel, shapes: Shapes, scores: Scores
    ) -> None:
        self.digest, self.transport, self.kernel, self.shapes = digest, transport, kernel, shapes
        self.hops: HopTables | None = None
        self._travels = travels(plan)                            # anything of any rank
        self._queries_travel = bool((plan.tasks.home != plan.tasks.server).any())
        if self._travels and isinstance(transport, HierarchicalTransport) and two_hops_pay(
                plan.layout, plan.tasks, transport.node, plan.model, plan.tp):
            self.hops = build_hops(plan, transport.rank, transport.node)
        self.tables = build(plan, transport.rank) if self.hops is None else self.hops.inner  # of the hop to servers
        rows = TaskRows(*(getattr(self.tables, name) for name in ("q_begin", "q_end", "k_begin", "k_end", "q_offset")))
        self.rows = kernel.prepare(rows, shapes.device, scores)  # the kernel's own form of the tasks

    @cached_property
    def inputs(self) -> Exchange:
        """q, k and v, stamped."""
        q, k, v, *_ = self.shapes.fields
        return self._exchange([q, k, v], partial(Dispatch.of, stamp=stamp_of(self.digest, self.shapes.device)))

    @cached_property
    def outputs(self) -> Exchange:
        """out and lse."""
        *_, out, lse = self.shapes.fields
        return self._exchange([out, lse], partial(Combine.of, merged_heads=self.shapes.num_heads), back=True)

    @cached_property
    def backward_inputs(self) -> Exchange:
        """q, k, v, out, dout and lse."""
        q, k, v, out, lse = self.shapes.fields
        return self._exchange([q, k, v, out, out, lse], Dispatch.of)

    @cached_property
    def kept_backward_inputs(self) -> Exchange:
        """out, dout and lse, where servers keep q, k and v."""
        *_, out, lse = self.shapes.fields
        return self._exchange([out, out, lse], Dispatch.of)

    @cached_property
    def gradients(self) -> Exchange:
        """dq, dk and dv."""
        q, k, v, *_ = self.shapes.fields
        return self._exchange([q, k, v], Combine.of, back=True)

    def _exchange(
        self, fields: Fields, packing: Callable[[RankTables, Fields], Packing], back: bool = False
    ) -> Exchange:
        """The exchange of these fields, to servers or `back` to homes."""
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
    """Packing in one launch on a GPU where triton is installed; elsewhere as it is, by torch's copies."""
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
    """What every call needs to know of its plan."""

    digest: int
    checked: dict[tuple[object, ...], Shapes]  # shapes, dtypes and devices of tensors that were found to fit


class PlanCache:
    """The plans that one rank runs, with the kernel of that name or the fastest that fits."""

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
        """Compare many plans at once, those of an optimizer step for example, so that their calls need not stop."""
        expected = []
        for plan in plans:
            if plan.num_servers > plan.layout.num_ranks:
                raise UserError(f"a plan has {plan.num_servers - plan.layout.num_ranks} dedicated servers, which get "
                                "it only when it is called; call it without expecting it")
            expected.append(self.facts(plan).digest)
        together = hashlib.blake2b(repr(expected).encode(), digest_size=8).digest()
        self._compare(int.from_bytes(together, "little", signed=True), device)
        for one in expected:
            self._agreed.put(one, True)

    def begin(self, plan: Plan, shapes: Shapes, scores: Scores = PLAIN) -> Prepared:
        """The prepared plan of a call that begins; a plan that is new here is compared with the other ranks' first."""
        found = self.facts(plan).digest
        if not self._agreed.get(found):
            self._compare(found, shapes.device)
            self._agreed.put(found, True)
        return self.prepared(plan, shapes, scores)

    def prepared(self, plan: Plan, shapes: Shapes, scores: Scores = PLAIN) -> Prepared:
        """The plan prepared for these tensors; calls of different scales share it."""
        key = self.facts(plan).digest, shapes, scores.window, scores.softcap
        prepared = self._prepared.get(key)
        if prepared is None:
            kernel = choose(shapes.device, shapes.dtype, shapes.head_dim, scores.window, self.kernel,
                            shapes.value_dim or None, scores.softcap)
            prepared = Prepared(plan, key[0], self.transport, kernel, shapes, scores)
            self._prepared.put(key, prepared)
        return prepared

    def comes_up_anew(self, plan: Plan) -> bool:
        """Whether none of the latest calls followed this plan."""
        found = self.facts(plan).digest
        is_new = found not in self._turns
        self._turns.append(found)
        return is_new

    def _compare(self, mine: int, device: torch.device) -> None:
        others = [rank for rank, other in enumerate(self.transport.gather(mine, device)) if other != mine]
        if others:
            raise different_plans(self.transport.rank, others)


def digest(plan: Plan) -> int:
    """A hash of the plan, for ranks to compare."""
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
    """A plan's digest as uint8 [STAMP_BYTES], for every split: a rank notices when another follows a different plan."""
    content = digest.to_bytes(STAMP_BYTES, "little", signed=True)
    return torch.frombuffer(bytearray(content), dtype=torch.uint8).to(device)


class LRU(Generic[Key, Value]):
    """A cache that evicts the least recently used entry; a cache of as many entries elsewhere evicts the same ones."""

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
