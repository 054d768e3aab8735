"""What a rank knows of the plans it runs: their digests, that all ranks share them, and what is prepared for them.

Nobody broadcasts a plan, so ranks compare digests before they follow a new one. Ranks make the same calls in the same
order: all find a plan new at the same call, and all evict identically.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict, deque
from collections.abc import Iterable
from typing import Generic, NamedTuple, TypeVar
from weakref import WeakKeyDictionary

import numpy as np
import torch

from distca.kernels import choose, sparing
from distca.kernels.interface import PLAIN, Scores
from distca.planning.plan import Plan
from distca.runtime.call import Prepared, Shapes, different_plans
from distca.runtime.transport import HierarchicalTransport, Transport
from distca.validation import UserError

PLANS_KEPT = 16         # whose tables stay prepared
AGREEMENTS_KEPT = 4096  # digests, a number each
PLANS_IN_TURN = 4       # that calls of one optimizer step may alternate between

Key = TypeVar("Key")
Value = TypeVar("Value")


class PlanFacts(NamedTuple):
    """What this rank asks of a plan in every call."""

    digest: int
    row_tokens: int      # at home on this rank
    key_row_tokens: int  # these, and behind them tokens that are keys only
    checked: dict[tuple[object, ...], Shapes]  # tensors that were found to fit, by what was looked at


class PlanRegistry:
    """The plans of one rank of a transport's group, run with the kernel of that name or the fastest that fits."""

    def __init__(self, transport: Transport, kernel: str = "auto", spare_multiprocessors: int = 0) -> None:
        self.transport, self.kernel, self.spare_multiprocessors = transport, kernel, spare_multiprocessors
        self._facts: WeakKeyDictionary[Plan, PlanFacts] = WeakKeyDictionary()
        self._agreed: LatestUsed[int, bool] = LatestUsed(AGREEMENTS_KEPT)
        self._prepared: LatestUsed[tuple[int, Shapes, int | None, float | None], Prepared] = LatestUsed(PLANS_KEPT)
        self._turns: deque[int] = deque(maxlen=PLANS_IN_TURN)

    def facts(self, plan: Plan) -> PlanFacts:
        found = self._facts.get(plan)
        if found is None:
            rank, layout = self.transport.rank, plan.layout
            row, keys = (0, 0) if rank >= layout.num_ranks else (
                int(layout.tokens_per_rank()[rank]), int(layout.key_tokens_per_rank()[rank]))
            found = self._facts[plan] = PlanFacts(digest(plan), row, keys, {})
        return found

    def expect(self, plans: Iterable[Plan], device: torch.device) -> None:
        """Compare many plans at once, those of an optimizer step for example, so that their calls need not stop."""
        expected = []
        for plan in plans:
            if plan.num_servers > plan.layout.num_ranks:
                raise UserError(f"a plan has {plan.num_servers - plan.layout.num_ranks} dedicated servers, which hear "
                                "of it only when it is called; call it without expecting it")
            expected.append(self.facts(plan).digest)
        together = hashlib.blake2b(repr(expected).encode(), digest_size=8).digest()
        self._compare(int.from_bytes(together, "little", signed=True), device)
        for one in expected:
            self._agreed.put(one, True)

    def begin(self, plan: Plan, shapes: Shapes, scores: Scores = PLAIN) -> Prepared:
        """What a call that begins needs of its plan; ranks that hold different plans must not compute."""
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
            kernel = sparing(kernel, self.spare_multiprocessors)
            node = self.transport.node if isinstance(self.transport, HierarchicalTransport) else None
            prepared = Prepared(plan, key[0], self.transport.rank, kernel, shapes, scores, node)
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
    """A number that differs between plans that differ, for ranks to compare."""
    state = hashlib.blake2b(digest_size=8)
    layout = plan.layout
    columns = [getattr(table, name) for table, names in (
        (layout, ("lengths", "document", "start", "stop", "rank")), (layout.key_only, layout.key_only.__slots__),
        (plan.tasks, plan.tasks.__slots__)) for name in names]
    for column in (*columns, np.array([layout.num_ranks, plan.num_servers, plan.window or 0,
                                        *map(len, columns)])):
        state.update(column.tobytes())
    return int.from_bytes(state.digest(), "little", signed=True)


class LatestUsed(Generic[Key, Value]):
    """A cache that evicts what was not asked for the longest."""

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
