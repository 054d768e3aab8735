"""One attention call on one rank: three phases forward, and the same three backward.

    dispatch   homes send the servers what they need: q, k and v; in backward also out, its gradient and log-sum-exp
    serve      servers wait for it, run the kernel and send the results back
    combine    homes wait for their results; the parts of a token that several servers computed are merged or summed

A rank is a home and a server at once, or one of them with nothing to do as the other. A call holds only what is under
way: it is empty before dispatch and after combine. Backward is a call of its own, which may follow another plan, since
nothing of the forward stays with its servers unless they `keep` their inputs.
"""

from __future__ import annotations

import importlib.util
import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from enum import Enum
from functools import cache, cached_property, partial
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch

from distca.dispatch.build import build, travels
from distca.dispatch.hops import build_hops
from distca.kernels import Kernel, TaskRows
from distca.kernels.interface import PLAIN, BackwardInputs, Scores, accumulation_dtype
from distca.planning.plan import Plan
from distca.planning.traffic import two_hops_pay
from distca.runtime.exchange_torch import Combine, Dispatch, Exchange, Stamp, Tensors, WireLayout
from distca.runtime.hops import Hops, Leg, UnderWay, relayed
from distca.runtime.recorder import Recorder
from distca.runtime.transport import Handle, HierarchicalTransport
from distca.validation import UserError

if TYPE_CHECKING:
    from distca.runtime.registry import PlanRegistry


class Phase(Enum):
    """What a call does in one direction, in this order."""

    DISPATCH = "dispatch"
    SERVE = "serve"
    COMBINE = "combine"


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
    def q_bytes(self) -> int:
        return self.num_heads * self.head_dim * self.dtype.itemsize

    @property
    def k_bytes(self) -> int:
        return self.num_kv_heads * self.head_dim * self.dtype.itemsize

    @property
    def v_bytes(self) -> int:
        return self.num_kv_heads * (self.value_dim or self.head_dim) * self.dtype.itemsize

    @property
    def out_bytes(self) -> int:
        return self.num_heads * (self.value_dim or self.head_dim) * self.dtype.itemsize

    @property
    def lse_dtype(self) -> torch.dtype:
        return accumulation_dtype(self.dtype)

    @property
    def lse_bytes(self) -> int:
        return self.num_heads * self.lse_dtype.itemsize

    @property
    def fields(self) -> tuple[tuple[str, int], ...]:
        """Whose tokens they belong to and the bytes of one token: of q, k, v, out and lse."""
        return (("q", self.q_bytes), ("k", self.k_bytes), ("k", self.v_bytes), ("q", self.out_bytes),
                ("q", self.lse_bytes))

    def empty_row(self) -> tuple[torch.Tensor, ...]:
        """q, k, v, out and lse of no tokens."""
        q, k = (torch.empty(0, heads, self.head_dim, dtype=self.dtype, device=self.device)
                for heads in (self.num_heads, self.num_kv_heads))
        v, out = (x.new_empty(0, x.shape[1], self.value_dim or self.head_dim) for x in (k, q))
        return q, k, v, out, torch.empty(0, self.num_heads, dtype=self.lse_dtype, device=self.device)


class Prepared:
    """A plan made ready for one rank, one set of shapes and one kernel, so that layers only copy, send and compute.

    Where everything lies on the wire is worked out by the first call that sends it.
    """

    def __init__(
        self, plan: Plan, digest: int, rank: int, kernel: Kernel, shapes: Shapes, scores: Scores,
        node: np.ndarray | None = None,
    ) -> None:
        """`node` [servers] where the transport has two levels."""
        self.digest, self.kernel, self.shapes = digest, kernel, shapes
        self.travels = travels(plan)                             # False: no rank of this plan sends anything
        self.queries_travel = bool((plan.tasks.home != plan.tasks.server).any())  # False: only keys, if anything
        self.passes = False                                      # some rank sends to another of its node, in a hop
        in_hops = node is not None and self.travels and two_hops_pay(plan.layout, plan.tasks, node, plan.model, plan.tp)
        self._tables = [] if in_hops else [build(plan, rank)]
        if in_hops:
            assert node is not None
            hops = build_hops(plan, rank, node)
            self._tables, self.travels, self.passes = [hops.outer, hops.inner], hops.crosses, hops.passes
        self.tables = self._tables[-1]                           # of the hop that ends at servers
        rows = TaskRows(*(getattr(self.tables, name) for name in ("q_begin", "q_end", "k_begin", "k_end", "q_offset")))
        self.rows = kernel.prepare(rows, shapes.device, scores)  # the kernel's own form of the tasks

    @cached_property
    def inputs(self) -> Hops[Dispatch]:
        """q, k and v, stamped."""
        q, k, v, *_ = self.shapes.fields
        return self._dispatch([q, k, v], Stamp.of(self.digest, self.shapes.device))

    @cached_property
    def outputs(self) -> Hops[Combine]:
        """out and lse."""
        *_, out, lse = self.shapes.fields
        return self._combine([out, lse], merged_heads=self.shapes.num_heads)

    @cached_property
    def backward_inputs(self) -> Hops[Dispatch]:
        """q, k, v, out, dout and lse."""
        q, k, v, out, lse = self.shapes.fields
        return self._dispatch([q, k, v, out, out, lse])

    @cached_property
    def kept_backward_inputs(self) -> Hops[Dispatch]:
        """out, dout and lse, where servers keep q, k and v."""
        *_, out, lse = self.shapes.fields
        return self._dispatch([out, out, lse])

    @cached_property
    def gradients(self) -> Hops[Combine]:
        """dq, dk and dv."""
        q, k, v, *_ = self.shapes.fields
        return self._combine([q, k, v])

    def _dispatch(self, fields: Sequence[tuple[str, int]], stamp: Stamp | None = None) -> Hops[Dispatch]:
        return Hops(*(self._on_device(Dispatch.of(tables, fields, stamp)) for tables in self._tables))

    def _combine(self, fields: Sequence[tuple[str, int]], merged_heads: int | None = None) -> Hops[Combine]:
        return Hops(*(self._on_device(Combine.of(tables, fields, merged_heads)) for tables in self._tables))

    def _on_device(self, exchange: Exchange) -> Exchange:
        return packed_on(self.shapes.device, exchange)


def packed_on(device: torch.device, exchange: Exchange) -> Exchange:
    """The exchange packed in one launch on a GPU where triton is installed; elsewhere as it is, by torch's copies."""
    if device.type != "cuda" or not _has_triton():
        return exchange
    from distca.runtime.exchange_triton import with_triton

    return with_triton(exchange, device)


@cache
def _has_triton() -> bool:
    found = importlib.util.find_spec("triton") is not None
    if not found:
        logging.getLogger("distca").warning("triton is not installed, so torch copies around attention, in many "
                                            "launches; pip install triton")
    return found


def different_plans(rank: int, others: list[int]) -> ValueError:
    return UserError(f"rank {rank} has another plan than ranks {others}; plan from the same lengths, tolerance, "
                     "cost and versions on every rank, and make the same calls in the same order")


class Call(ABC):
    """One direction of a call. `announce` tells dedicated servers of each phase before this rank runs it."""

    def __init__(
        self,
        plans: PlanRegistry,
        plan: Plan,
        shapes: Shapes,
        *,
        scores: Scores = PLAIN,
        keep: bool = False,
        recorder: Recorder | None = None,
        announce: Callable[[Phase], None] | None = None,
    ) -> None:
        self.plans, self.plan, self.shapes = plans, plan, shapes
        self.scores, self.keep, self.recorder, self.announce = scores, keep, recorder, announce
        self._prepared: Prepared | None = None
        self._staying: Tensors = ()  # what was sent; this rank's own share of it does not travel
        self._handle: Handle | None = None
        self._second_hop: Callable[[], UnderWay] | None = None

    @abstractmethod
    def dispatch(self, *row: torch.Tensor) -> None:
        """Home: begin, and send this row's tensors to the servers."""

    @abstractmethod
    def serve(self, *kept: torch.Tensor) -> Tensors:
        """Server: compute its tasks and send the results back."""

    @abstractmethod
    def combine(self) -> Tensors:
        """Home: the results of this row."""

    @abstractmethod
    def empty_row(self) -> Tensors:
        """What a rank without tokens dispatches."""

    def run_without_tokens(self, phase: Phase) -> None:
        """The phase of a rank that brings no tokens: a dedicated server, or a stage that would idle."""
        if phase is Phase.DISPATCH:
            self.dispatch(*self.empty_row())
        elif phase is Phase.SERVE:
            self.serve()
        else:
            self.combine()

    def _enter(self, phase: Phase) -> Prepared:
        if self.announce is not None:
            self.announce(phase)
        if phase is Phase.DISPATCH:
            self._prepared = self.plans.begin(self.plan, self.shapes, self.scores)
        assert self._prepared is not None, "dispatch comes first"
        return self._prepared

    def _send(
        self, tensors: Tensors, hops: Hops[Dispatch] | Hops[Combine], stamp: Stamp | None = None
    ) -> None:
        assert self._prepared is not None
        if hops.inner is not None:
            self._second_hop = self._relayed(tensors, hops, stamp)
            return
        exchange = hops.outer
        self._staying = exchange.ready(tensors)
        if self._prepared.queries_travel or (self._prepared.travels and exchange.moves_keys):
            self._handle = self.plans.transport.exchange(
                exchange.pack(self._staying), exchange.leaving.splits, exchange.arriving.splits)

    def _receive(self, hops: Hops[Dispatch] | Hops[Combine], stamp: Stamp | None = None) -> Tensors:
        """What arrived and what stayed, unpacked; raises where a split does not carry the stamp."""
        second_hop, self._second_hop = self._second_hop, None
        if second_hop is not None:
            with self._noted("exchange", "wait", hops.leaving.num_bytes + hops.arriving.num_bytes):
                return second_hop().arrived(partial(self._check, stamp))
        handle, self._handle = self._handle, None
        staying, self._staying = self._staying, ()
        exchange = hops.outer
        if handle is None:
            return exchange.unpack(None, staying)
        with self._noted("exchange", "wait", exchange.leaving.num_bytes + exchange.arriving.num_bytes):
            wire = handle.wait()
        self._check(stamp, wire, exchange.arriving)
        return exchange.unpack(wire, staying)

    def _relayed(
        self, tensors: Tensors, hops: Hops[Dispatch] | Hops[Combine], stamp: Stamp | None
    ) -> Callable[[], UnderWay]:
        """Between nodes and then inside them; results come together in the node before they cross."""
        prepared, transport = self._prepared, self.plans.transport
        assert prepared is not None and hops.inner is not None and isinstance(transport, HierarchicalTransport)
        way = transport.going if isinstance(hops.outer, Dispatch) else transport.coming
        outer, inner = Leg(hops.outer, way.outer, prepared.travels), Leg(hops.inner, way.inner, prepared.passes)
        first, second = (outer, inner) if isinstance(hops.outer, Dispatch) else (inner, outer)
        return relayed(first, second, tensors, partial(self._check, stamp), way.relay)

    def _check(self, stamp: Stamp | None, wire: torch.Tensor, arriving: WireLayout) -> None:
        if stamp is not None and (others := stamp.mismatched(wire, arriving)):
            raise different_plans(self.plans.transport.rank, others)

    def _noted(self, name: str, lane: str, num_bytes: int = 0) -> AbstractContextManager[None]:
        return nullcontext() if self.recorder is None else self.recorder.span(name, lane, num_bytes)


class ForwardCall(Call):
    """q, k, v -> out and log-sum-exp."""

    _stamp: Stamp | None = None  # to look for on what arrives

    def dispatch(self, *row: torch.Tensor) -> None:
        """The row's q, k and v."""
        inputs = self._enter(Phase.DISPATCH).inputs
        is_new = self.plans.comes_up_anew(self.plan)
        self._stamp = inputs.stamp if is_new or self.shapes.device.type == "cpu" else None  # looking waits for a GPU
        self._send(row, inputs, self._stamp)

    def serve(self, *kept: torch.Tensor) -> Tensors:
        """Gives this server's q, k and v, for those who keep them."""
        prepared = self._enter(Phase.SERVE)
        q, k, v = self._receive(prepared.inputs, self._stamp)
        with self._noted("attention forward", "attention"):
            results = prepared.kernel.forward(q, k, v, prepared.rows, self.scores.scale)
        self._send(results, prepared.outputs)
        return q, k, v

    def combine(self) -> Tensors:
        """The row's out and lse."""
        return self._receive(self._enter(Phase.COMBINE).outputs)

    def empty_row(self) -> Tensors:
        return self.shapes.empty_row()[:3]


class BackwardCall(Call):
    """q, k, v, out, its gradient and log-sum-exp -> dq, dk, dv."""

    def dispatch(self, *row: torch.Tensor) -> None:
        """The row's q, k, v, out, dout and lse; where servers keep q, k and v, these stay."""
        prepared = self._enter(Phase.DISPATCH)
        self._send(row[3:] if self.keep else row, self._inputs(prepared))

    def serve(self, *kept: torch.Tensor) -> Tensors:
        """`kept` are the q, k and v that this server's forward gave, where it keeps them."""
        prepared = self._enter(Phase.SERVE)
        q, k, v, out, dout, lse = *kept, *self._receive(self._inputs(prepared))
        with self._noted("attention backward", "attention"):
            results = prepared.kernel.backward(BackwardInputs(dout, q, k, v, out, lse), prepared.rows,
                                               self.scores.scale)
        self._send(results, prepared.gradients)
        return ()

    def combine(self) -> Tensors:
        """The row's dq, dk and dv."""
        return self._receive(self._enter(Phase.COMBINE).gradients)

    def empty_row(self) -> Tensors:
        q, k, v, out, lse = self.shapes.empty_row()
        return q, k, v, out, out, lse

    def _inputs(self, prepared: Prepared) -> Hops[Dispatch]:
        return prepared.kept_backward_inputs if self.keep else prepared.backward_inputs
