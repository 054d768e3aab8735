"""Core attention, disaggregated: every rank gets what attention at home would have given, computed where the plan says.

One call has three steps, each of them an autograd node, so that two nano-batches can be interleaved:

    start   homes pack q, k, v and send them to servers
    serve   servers wait for them, run the kernel and send out and log-sum-exp back
    finish  homes wait and merge

Backward runs the same three in reverse: finish sends q, k, v, out, dout again (servers keep nothing, unless `keep`),
serve computes gradients and sends them back, start waits and sums them. Whatever order forward interleaves two calls
in, backward mirrors it for free. It may follow another plan, since nothing of the forward stays with its servers.
Nothing but tables lives outside autograd's saved tensors, so replay by activation checkpointing is an ordinary forward.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from distca.kernels import Kernel, choose
from distca.planning.plan import Plan
from distca.runtime.call import Call, another_plan
from distca.runtime.prepared import Prepared, Shapes, digest, prepare
from distca.runtime.recorder import RecordedKernel, RecordedTransport, Recorder
from distca.runtime.roles import PLANS_REMEMBERED, Announcement, Announcer, Plans, Steps, say_nothing
from distca.runtime.transport import C10dTransport, Transport

STATES = ("resend", "keep")
AGREED_REMEMBERED = 4096  # digests, a number each


class CoreAttention:
    """Attention over a process group. Call it with a rank's own q, k, v and the plan that all ranks share.

    `state="resend"` sends q, k and v again for backward, so that servers hold nothing between calls; "keep" trades
    the servers' memory for that traffic. `kernel` is "auto" or a kernel's name. A `recorder` notes waits and computing.
    """

    def __init__(
        self,
        group: dist.ProcessGroup | None = None,
        *,
        kernel: str = "auto",
        state: str = "resend",
        transport: Transport | None = None,
        recorder: Recorder | None = None,
    ) -> None:
        if state not in STATES:
            raise ValueError(f"state is {state!r}; choose one of: {', '.join(STATES)}")
        carrier = C10dTransport(group) if transport is None else transport
        self.transport: Transport = carrier if recorder is None else RecordedTransport(carrier, recorder)
        self.recorder = recorder
        self.kernel_name, self.state = kernel, state
        self._prepared: OrderedDict[tuple[Any, ...], tuple[Kernel, Prepared]] = OrderedDict()
        self._digests: OrderedDict[int, tuple[Plan, int]] = OrderedDict()  # by id, which the plan kept here holds
        self._latest_plan: int | None = None                     # on a GPU, stamps are looked at when the plan changes
        self._calls = 0
        self._told = Plans()                                     # plans that dedicated servers know
        self._agreed: OrderedDict[int, None] = OrderedDict()     # digests of plans that all ranks were seen to share

    @torch.compiler.disable
    def __call__(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        plan: Plan,
        *,
        backward: Plan | None = None,
        scale: float | None = None,
        window: int | None = None,
    ) -> torch.Tensor:
        """q [tokens, heads, dim], k and v [tokens, kv_heads, dim], this rank's row of the layout -> out like q.

        Where the layout has key-only slices on this rank, their keys and values stand behind its own. Gradients go by
        the same plan, or by `backward`.
        """
        pending = self.start(q, k, v, plan, backward=backward, scale=scale, window=window)
        self.serve(pending)
        return self.finish(pending)

    @torch.compiler.disable
    def start(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        plan: Plan,
        *,
        backward: Plan | None = None,
        scale: float | None = None,
        window: int | None = None,
    ) -> Pending:
        """Send this rank's queries, keys and values on their way; `backward` names another plan for the gradients'."""
        way_back = plan if backward is None else backward
        for one in (plan, way_back):
            _check_tensors(q, k, v, one, self.transport)
        if self.state == "keep" and way_back is not plan and self._digest(way_back) != self._digest(plan):
            raise ValueError("state is 'keep' but backward follows another plan, whose servers kept nothing; use "
                             "'resend'")
        shapes = Shapes(q.shape[1], k.shape[1], q.shape[2], q.dtype, q.device)
        pending = Pending(self.steps(plan, shapes, scale, window), self.steps(way_back, shapes, scale, window),
                          self.state == "keep", (q, k, v))
        pending.token = _Start.apply(pending, q, k, v)
        return pending

    @torch.compiler.disable
    def serve(self, pending: Pending) -> None:
        """Wait for the tasks this rank serves, compute them, send the results back."""
        pending.token = _Serve.apply(pending, pending.token)

    @torch.compiler.disable
    def finish(self, pending: Pending) -> torch.Tensor:
        """Wait for this rank's own results."""
        return _Finish.apply(pending, pending.token, *pending.inputs)

    def steps(
        self, plan: Plan, shapes: Shapes, scale: float | None = None, window: int | None = None
    ) -> Steps:
        """The three steps of a forward or a backward that has not begun."""
        return Steps(partial(self.begin, plan, shapes, scale, window), self._announcer(plan, shapes, scale, window))

    def begin(self, plan: Plan, shapes: Shapes, scale: float | None, window: int | None) -> Call:
        """A call whose forward or backward begins; all ranks begin the same calls in the same order."""
        self._agree(plan, shapes.device)
        return self.call(plan, shapes, scale, window)

    def call(self, plan: Plan, shapes: Shapes, scale: float | None, window: int | None) -> Call:
        kernel, prepared = self._prepare(plan, shapes, window)
        number = self._digest(plan)
        check, self._latest_plan = shapes.device.type == "cpu" or number != self._latest_plan, number
        return Call(self.transport, kernel, prepared, scale, self.state == "keep", check)

    def _announcer(
        self, plan: Plan, shapes: Shapes, scale: float | None, window: int | None
    ) -> Callable[[str], None]:
        """The first trainer tells dedicated servers which step comes next; nobody else says anything."""
        dedicated = range(plan.layout.num_ranks, plan.num_servers)
        if dedicated and self.state == "keep":
            raise ValueError("state is 'keep' but the plan has dedicated servers, which keep nothing; use 'resend'")
        if not dedicated or self.transport.rank != 0:
            return say_nothing
        self._calls += 1
        about = Announcement("", self._calls, self._digest(plan), None, shapes, scale, window)
        return Announcer(self.transport, dedicated, self._told, plan, about)

    def _prepare(self, plan: Plan, shapes: Shapes, window: int | None) -> tuple[Kernel, Prepared]:
        key = (self._digest(plan), shapes, window)
        if key not in self._prepared:
            kernel = choose(shapes.device, shapes.dtype, shapes.head_dim, window, self.kernel_name)
            if self.recorder is not None:
                kernel = RecordedKernel(kernel, self.recorder)
            self._prepared[key] = kernel, prepare(plan, self.transport.rank, kernel, shapes, window)
        return _latest(self._prepared, key)

    def _digest(self, plan: Plan) -> int:
        if id(plan) not in self._digests:
            self._digests[id(plan)] = plan, digest(plan)
        return _latest(self._digests, id(plan))[1]

    def expect(self, plans: Iterable[Plan], device: torch.device) -> None:
        """Compare many plans at once, those of a step for example, so that their calls need not stop for it.

        Every rank calls this with the same plans; a pool with dedicated servers compares them call by call.
        """
        new = []
        for plan in plans:
            if plan.num_servers > plan.layout.num_ranks:
                raise ValueError(f"a plan has {plan.num_servers - plan.layout.num_ranks} dedicated servers, which hear "
                                 "of it only when it is called; call it without expecting it")
            new.append(self._digest(plan))
        together = hashlib.blake2b(repr(new).encode(), digest_size=8).digest()
        mine = int.from_bytes(together, "little", signed=True)
        differing = [rank for rank, other in enumerate(self.transport.gather(mine, device)) if other != mine]
        if differing:
            raise another_plan(self.transport.rank, differing)
        self._agreed.update(dict.fromkeys(new))

    def _agree(self, plan: Plan, device: torch.device) -> None:
        """Compare digests when a plan is new: ranks that hold different plans must not compute.

        Ranks make the same calls in the same order, so all find a plan new at the same call, and all compare.
        """
        mine = self._digest(plan)
        if mine not in self._agreed:
            digests = self.transport.gather(mine, device)
            differing = [rank for rank, other in enumerate(digests) if other != mine]
            if differing:
                raise another_plan(self.transport.rank, differing)
            self._agreed[mine] = None
        _latest(self._agreed, mine, AGREED_REMEMBERED)


@dataclass(slots=True)
class Pending:
    """A call between its steps, as autograd sees it: the token orders the steps, the inputs wait for the last one."""

    forward: Steps
    backward: Steps
    keep: bool
    inputs: tuple[torch.Tensor, torch.Tensor, torch.Tensor]
    token: torch.Tensor | None = None


class _Start(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, pending: Pending, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        ctx.steps = pending.backward
        pending.forward.take("start_forward", q, k, v)
        return q.new_zeros(())

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, _: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return None, *ctx.steps.take("start_backward")


class _Serve(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, pending: Pending, token: torch.Tensor) -> torch.Tensor:
        ctx.steps = pending.backward
        kept = pending.forward.take("serve_forward")
        if pending.keep:
            ctx.save_for_backward(*kept)
        return token.clone()

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        kept = ctx.saved_tensors                                 # may replay a forward, so before the step
        ctx.steps.take("serve_backward", kept)
        return None, grad


class _Finish(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, pending: Pending, token: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
    ) -> torch.Tensor:
        ctx.steps = pending.backward
        out, lse = pending.forward.take("finish_forward")
        ctx.save_for_backward(q, k, v, out, lse)
        return out

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, dout: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        q, k, v, out, lse = ctx.saved_tensors                    # may replay a forward, so before the step
        ctx.steps.take("finish_backward", q, k, v, out, dout, lse)
        return None, dout.new_zeros(()), None, None, None


def _latest(remembered: OrderedDict[Any, Any], key: Any, most: int = PLANS_REMEMBERED) -> Any:
    """The entry, which becomes the last to be forgotten."""
    remembered.move_to_end(key)
    while len(remembered) > most:
        remembered.popitem(last=False)
    return remembered[key]


def _check_tensors(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, plan: Plan, transport: Transport) -> None:
    if q.ndim != 3 or k.ndim != 3 or k.shape != v.shape or q.shape[2] != k.shape[2]:
        raise ValueError(f"q has shape {tuple(q.shape)}, k {tuple(k.shape)}, v {tuple(v.shape)}; give q [tokens, "
                         "heads, dim], k and v [tokens, kv_heads, dim] with the same tokens and dim")
    if k.shape[1] == 0 or q.shape[1] % k.shape[1]:
        raise ValueError(f"q has {q.shape[1]} heads and k, v have {k.shape[1]}; give heads that kv_heads divides")
    if not q.dtype == k.dtype == v.dtype:
        raise ValueError(f"q is {q.dtype}, k {k.dtype}, v {v.dtype}; convert them to one dtype")
    if not q.device == k.device == v.device:
        raise ValueError(f"q is on {q.device}, k on {k.device}, v on {v.device}; move them to one device")
    if plan.num_servers != transport.size:
        raise ValueError(f"the plan is for {plan.num_servers} servers but the group has {transport.size} ranks; plan "
                         "with one speed per rank of the group")
    rank, layout = transport.rank, plan.layout
    owns = rank < layout.num_ranks
    expected = int(layout.tokens_per_rank()[rank]) if owns else 0
    if q.shape[0] != expected:
        raise ValueError(f"rank {rank} has {q.shape[0]} tokens but the plan's layout puts {expected} there; pass this "
                         "rank's own row of the layout")
    keys = int(layout.key_tokens_per_rank()[rank]) if owns and len(layout.key_only) else expected
    if k.shape[0] != keys:
        only = f" and {keys - expected} that are keys only behind them" if keys > expected else ""
        raise ValueError(f"rank {rank} has keys of {k.shape[0]} tokens but the plan's layout puts {expected}{only} "
                         "there; pass the keys and values of just these")
