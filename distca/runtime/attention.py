"""Disaggregated core attention: each rank gets the result of local attention, computed on the servers of the plan.

A call is three autograd nodes, so that two nano-batches can be interleaved, or one node with the same three phases:

    start    dispatch: homes send q, k, v to servers               backward: combine the gradients
    serve    servers compute and send results back                 backward: serve
    finish   combine: homes wait and merge                         backward: dispatch q, k, v, out, dout

Backward runs the nodes in reverse, and each node runs the mirrored phase of the backward call. Backward therefore
interleaves two calls in the reverse order of forward without extra code. Only tables are kept outside autograd's saved
tensors, so recomputation by activation checkpointing is an ordinary forward.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import wraps
from typing import Any, TypeVar, cast

import numpy as np
import torch
import torch.distributed as dist

from distca.kernels.interface import PLAIN, Scores, check_sinks, check_tensors, gradient_of_sinks, with_sinks
from distca.planning.plan import Plan
from distca.runtime.call import BackwardCall, Call, ForwardCall
from distca.runtime.pool.transport import PoolTransport
from distca.runtime.prepared import PlanCache, Shapes
from distca.runtime.recorder import Recorder
from distca.runtime.transport import Chosen, HierarchicalTransport, transport_for
from distca.validation import UserError, check_choice
from distca.workload.topology import Topology

STATES = ("resend", "keep")
Method = TypeVar("Method", bound=Callable[..., Any])
Inputs = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None]  # q, k, v and sinks


def not_compiled(method: Method) -> Method:
    """Make torch.compile break its graph here; unlike torch's decorator, keep the types."""
    outside: Method = torch.compiler.disable(
        method, reason="distca exchanges with other ranks, by lengths that change with every batch")
    return outside


def once_differentiable(backward: Method) -> Method:
    """Refuse gradients of gradients as torch's decorator does, but pay its overhead only if grad mode is on."""
    refusing = torch.autograd.function.once_differentiable(backward)

    @wraps(backward)
    def run(ctx: Any, *gradients: torch.Tensor) -> Any:
        return (refusing if torch.is_grad_enabled() else backward)(ctx, *gradients)

    return cast(Method, run)


class CoreAttention:
    """Attention over a process group. Call it with this rank's q, k, v and the plan that all ranks share.

    `state="resend"` sends q, k and v again for backward, so servers store nothing between calls; "keep" saves that
    traffic and costs memory on the servers. `kernel` is "auto" or a kernel's name; `transport` is "c10d", "flat",
    "symmetric", "auto", a Transport object or a function that makes one of the group. A `recorder` records waits and
    computation.
    """

    def __init__(
        self, group: dist.ProcessGroup | None = None, *, kernel: str = "auto", state: str = "resend",
        transport: Chosen = "c10d", recorder: Recorder | None = None,
    ) -> None:
        check_choice("state", state, STATES)
        self.transport = transport_for(transport, group)
        self.plans = PlanCache(self.transport, kernel)
        self.state, self.recorder = state, recorder

    @property
    def topology(self) -> Topology | None:
        """The nodes of the group's ranks, for planning, if exchanges may use two hops; otherwise None."""
        transport = self.transport
        return Topology(transport.node, np.zeros_like(transport.node)) if isinstance(
            transport, HierarchicalTransport) else None

    @not_compiled
    def __call__(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, plan: Plan, *, backward: Plan | None = None,
        scale: float | None = None, window: int | None = None, softcap: float | None = None,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Attend with this rank's row: q [tokens, heads, dim], k and v [tokens, kv_heads, dim] -> out like q.

        If the layout has key-only slices on this rank, append their keys and values to the row's. Backward follows
        the same plan, or `backward`. `softcap` c replaces each score by c * tanh(score / c). `sinks` [heads] add to
        each query one more score, of a key whose value is 0; they get gradients too.
        """
        pending = self._pending((q, k, v, sinks), plan, backward, Scores(scale, window, softcap))
        return _Whole.apply(pending, *pending.inputs)

    @not_compiled
    def start(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, plan: Plan, *, backward: Plan | None = None,
        scale: float | None = None, window: int | None = None, softcap: float | None = None,
        sinks: torch.Tensor | None = None,
    ) -> Pending:
        """Send this rank's queries, keys and values to their servers; takes the arguments of `__call__`."""
        pending = self._pending((q, k, v, sinks), plan, backward, Scores(scale, window, softcap))
        pending.token = _Start.apply(pending, q, k, v)
        return pending

    @not_compiled
    def serve(self, pending: Pending) -> None:
        """Wait for the inputs of this rank's tasks, compute the tasks and send the results back."""
        pending.token = _Serve.apply(pending, pending.token)

    @not_compiled
    def finish(self, pending: Pending) -> torch.Tensor:
        """Wait for the results of this rank's row and return them."""
        return _Finish.apply(pending, pending.token, *pending.inputs)

    def call(self, plan: Plan, shapes: Shapes, scores: Scores = PLAIN, backward: bool = False) -> Call:
        """Create one direction of a call. All ranks must begin the same calls in the same order.

        If the plan was made for a window and `scores` has none, the plan's window is used.
        """
        if scores.window is None and plan.window is not None:
            scores = replace(scores, window=plan.window)
        if plan.window not in (None, scores.window):
            raise UserError(f"window is {scores.window} but the plan is for a window of {plan.window}; give one of "
                            "them")
        carrier = None
        if plan.num_servers > plan.layout.num_ranks:
            if self.state == "keep":
                raise UserError("state is 'keep' but the plan has dedicated servers, which keep nothing; use 'resend'")
            if not isinstance(self.transport, PoolTransport):
                raise UserError(f"the plan has {plan.num_servers - plan.layout.num_ranks} dedicated servers but the "
                                "transport connects ranks with tokens only; give a PoolTransport")
            carrier = self.transport.call(plan, self.plans.facts(plan).digest, backward, shapes, scores)
        return (BackwardCall if backward else ForwardCall)(
            self.plans, plan, shapes, scores=scores, keep=self.state == "keep", recorder=self.recorder,
            carrier=carrier)

    def expect(self, plans: Iterable[Plan], device: torch.device) -> None:
        """Compare many plans, such as those of an optimizer step, with the other ranks at once, before their calls.

        Every rank must pass the same plans. Dedicated servers get them ahead of their calls.
        """
        plans = list(plans)
        self.plans.expect(plans, device)
        if isinstance(self.transport, PoolTransport):
            self.transport.pool.push(plans)

    def _pending(self, inputs: Inputs, plan: Plan, backward: Plan | None, scores: Scores) -> Pending:
        q, k, v, sinks = inputs
        check_sinks(sinks, q)
        shapes = self._shapes(q, k, v, plan)
        way_back = plan if backward is None else backward
        if way_back is not plan:
            self._shapes(q, k, v, way_back)
        if self.state == "keep" and self.plans.facts(way_back).digest != self.plans.facts(plan).digest:
            raise UserError("state is 'keep' but backward follows another plan, whose servers kept nothing; use "
                            "'resend'")
        return Pending(self.call(plan, shapes, scores), self.call(way_back, shapes, scores, backward=True), inputs)

    def _shapes(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, plan: Plan) -> Shapes:
        """Check once per set of shapes, dtypes and devices that tensors fit the plan; return their shapes."""
        about = q.shape, k.shape, v.shape, q.dtype, k.dtype, v.dtype, q.device, k.device, v.device
        checked = self.plans.facts(plan).checked
        found = checked.get(about)
        if found is None:
            self._check(q, k, v, plan)
            found = checked[about] = Shapes.of(q, k, v)
        return found

    def _check(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, plan: Plan) -> None:
        check_tensors(q, k, v)
        rank, size, layout = self.transport.rank, self.transport.size, plan.layout
        if plan.num_servers != size:
            raise UserError(f"the plan is for {plan.num_servers} servers but the group has {size} ranks; plan with "
                            "one speed per rank of the group")
        expected, keys = (0, 0) if rank >= layout.num_ranks else (
            int(layout.tokens_per_rank()[rank]), int(layout.key_tokens_per_rank()[rank]))
        if q.shape[0] != expected:
            raise UserError(f"rank {rank} has {q.shape[0]} tokens but the plan's layout puts {expected} there; pass "
                            "this rank's own row of the layout")
        if k.shape[0] != keys:
            only = f" and {keys - expected} that are keys only behind them" if keys > expected else ""
            raise UserError(f"rank {rank} has keys of {k.shape[0]} tokens but the plan's layout puts {expected}{only} "
                            "there; pass the keys and values of just these")


@dataclass(slots=True)
class Pending:
    """A call between its autograd nodes: the token orders the nodes, the last node saves the inputs."""

    forward: Call
    backward: Call
    inputs: Inputs
    token: torch.Tensor | None = None


class _Whole(torch.autograd.Function):
    """A call that is not interleaved: one node runs all three phases, for a third of the host's autograd overhead."""

    @staticmethod
    def forward(
        ctx: Any, pending: Pending, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, sinks: torch.Tensor | None
    ) -> torch.Tensor:
        ctx.call = pending.backward
        call = pending.forward
        call.dispatch(q, k, v)
        kept = call.serve()
        out, lse = _combined(call, sinks)
        ctx.save_for_backward(q, k, v, out, lse, sinks, *(kept if call.keep else ()))
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        q, k, v, out, lse, sinks, *kept = ctx.saved_tensors      # may recompute a forward: read before any phase
        call: Call = ctx.call
        call.dispatch(q, k, v, out, dout, lse)
        call.serve(*kept)
        return None, *call.combine(), None if sinks is None else gradient_of_sinks(dout, out, lse, sinks)


class _Start(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, pending: Pending, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        ctx.call = pending.backward
        pending.forward.dispatch(q, k, v)
        return q.new_zeros(())

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, _: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return None, *ctx.call.combine()


class _Serve(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, pending: Pending, token: torch.Tensor) -> torch.Tensor:
        ctx.call = pending.backward
        kept = pending.forward.serve()
        if pending.forward.keep:
            ctx.save_for_backward(*kept)
        return token.clone()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        kept = ctx.saved_tensors                                 # may recompute a forward: read before the phase
        ctx.call.serve(*kept)
        return None, grad


class _Finish(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, pending: Pending, token: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor,
        sinks: torch.Tensor | None,
    ) -> torch.Tensor:
        ctx.call = pending.backward
        out, lse = _combined(pending.forward, sinks)
        ctx.save_for_backward(q, k, v, out, lse, sinks)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        q, k, v, out, lse, sinks = ctx.saved_tensors             # may recompute a forward: read before the phase
        ctx.call.dispatch(q, k, v, out, dout, lse)
        dsinks = None if sinks is None else gradient_of_sinks(dout, out, lse, sinks)
        return None, dout.new_zeros(()), None, None, None, dsinks


def _combined(call: Call, sinks: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
    """Return out and lse of the row over all its keys; sinks are added once, after all parts are merged."""
    out, lse = call.combine()
    return (out, lse) if sinks is None else with_sinks(out, lse, sinks)
