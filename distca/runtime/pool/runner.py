"""Run roles: a server's work, and that of a home when no server is left.

A runner keeps nothing between calls but plans and their tables. It runs a role once all inputs are there, whoever was
meant to, because that can only give the same results again.
"""

from __future__ import annotations

import atexit
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import astuple
from queue import SimpleQueue
from typing import Any

import torch

from distca.kernels.interface import Scores
from distca.planning.plan import Plan
from distca.planning.plan_bytes import plan_from_bytes
from distca.runtime.call import BackwardCall, ForwardCall, Phase
from distca.runtime.liveness import TRIM_CALLS, return_freed_memory
from distca.runtime.pool.protocol import Message, RoleInputs
from distca.runtime.prepared import LRU, PlanCache, Shapes
from distca.runtime.transport import Handle, TransportError

DTYPES = {str(dtype).removeprefix("torch."): dtype
          for dtype in (torch.float64, torch.float32, torch.bfloat16, torch.float16)}
PLANS_KNOWN = 512
CALLS_MEASURED = 8  # roles after which a runner knows its speed

Send = Callable[[int, Message, torch.Tensor | None], None]


def describe(digest: int, backward: bool, shapes: Shapes, scores: Scores) -> Message:
    """Return what a runner needs to know of a call, as plain values."""
    heads, kv_heads, head_dim, dtype, _, value_dim = shapes
    return {"digest": digest, "backward": backward, "sizes": [heads, kv_heads, head_dim, value_dim],
            "dtype": str(dtype).removeprefix("torch."), "scores": astuple(scores)}


def settle(tensor: torch.Tensor) -> None:
    """Wait until a tensor is complete, because other threads and processes will read it."""
    if tensor.is_cuda:
        torch.cuda.current_stream(tensor.device).synchronize()


def joined(parts: Sequence[torch.Tensor], device: torch.device) -> torch.Tensor:
    """Return payloads as one tensor; their memory is kept until the current stream has read them."""
    for part in parts:
        if part.is_cuda:
            part.record_stream(torch.cuda.current_stream(part.device))
    return torch.cat([part.to(device) for part in parts])


class Runner:
    """Runs the roles of one pool; `offer` may be called by any thread, everything else by one."""

    def __init__(
        self, homes: Sequence[int], num_roles: int, send: Send, *, device: torch.device, kernel: str = "auto"
    ) -> None:
        self.homes, self.num_roles, self.send, self.kernel = list(homes), num_roles, send, kernel
        self.device = torch.empty(0, device=device).device       # with its number, for other threads
        self.offered: SimpleQueue[tuple[int, Message, torch.Tensor | None] | None] = SimpleQueue()
        self.inputs, self.plans = RoleInputs(), LRU[int, Plan](PLANS_KNOWN)
        self.caches: dict[int, PlanCache] = {}                   # one per role
        self.served = self.runs = 0                              # forward roles; and those with backward ones
        self.running_since = 0.0
        self.work = self.seconds = 0.0                           # of the forward roles so far, but each plan's first
        self._about: dict[tuple[int, int], Message] = {}

    def offer(self, sender: int, message: Message, payload: torch.Tensor | None) -> None:
        """Take inputs or a plan; None from outside ends a wait."""
        self.offered.put((sender, message, payload))

    def run_next(self) -> bool:
        """Wait for the next offer and run the role that it completes; return False if it was an empty one."""
        offer = self.offered.get()
        if offer is None:
            return False
        sender, message, payload = offer
        if message["kind"] == "plan":
            assert payload is not None
            self.plans.put(int(message["digest"]), plan_from_bytes(payload.numpy().tobytes()))
            ready = [key for key, about in self._about.items() if about["digest"] == message["digest"]]
        else:
            ready = [(int(message["call"]), int(message["role"]))]
            self.inputs.add(*ready[0], sender, payload, int(message["oldest"]))
            self._about = {key: about for key, about in self._about.items() if key in self.inputs.waiting}
            self._about[ready[0]] = message
            if self.plans.get(int(message["digest"])) is None:
                self.send(sender, {"kind": "want", "digest": message["digest"]}, None)
        for key in ready:
            self._run_if_complete(*key)
        return True

    @property
    def running_seconds(self) -> float:
        """How long the role that is running has been; 0 if none is."""
        since = self.running_since
        return time.monotonic() - since if since else 0.0

    @property
    def speed(self) -> float:
        """Work per second, once enough roles have run to tell."""
        return self.work / self.seconds if self.served >= CALLS_MEASURED and self.seconds else 0.0

    def _run_if_complete(self, number: int, role: int) -> None:
        about = self._about[number, role]
        plan = self.plans.get(int(about["digest"]))
        if plan is None:
            return
        if not 0 <= role < self.num_roles or plan.num_servers != len(self.homes) + self.num_roles:
            raise TransportError(f"role {role} of a plan for {plan.num_servers} servers was sent to a pool of "
                                 f"{len(self.homes)} homes and {self.num_roles} roles; run the same distca everywhere")
        heads, kv_heads, head_dim, value_dim = map(int, about["sizes"])
        shapes = Shapes(heads, kv_heads, head_dim, DTYPES[about["dtype"]], self.device, value_dim)
        scores, at = Scores(*about["scores"]), len(self.homes) + role
        cache = self.caches.setdefault(role, PlanCache(_Place(at, plan.num_servers), self.kernel))
        prepared = cache.prepared(plan, shapes, scores)
        splits = (prepared.backward_inputs if about["backward"] else prepared.inputs).outer.arriving.splits
        found = self.inputs.complete(number, role, [
            rank for rank, size in zip(self.homes, splits[:len(self.homes)], strict=True) if size])
        if found is None:
            return
        del self._about[number, role]
        self.running_since = began = time.monotonic()
        call = (BackwardCall if about["backward"] else ForwardCall)(
            cache, plan, shapes, scores=scores, carrier=_RoleCarrier(self, number, role, found, began))
        with torch.no_grad():
            for phase in Phase:
                call.run_without_tokens(phase)
        self.running_since = 0.0
        self.served += not about["backward"]
        if not about["backward"] and self.served > 1:
            self.work += float(plan.work()[at])
            self.seconds += time.monotonic() - began
        self.runs += 1
        if self.device.type == "cpu" and self.runs % TRIM_CALLS == 0:
            return_freed_memory()


class StandIn:
    """Runs roles in a training rank, on a thread that starts with the first one, until `end` or the program's end."""

    def __init__(self, runner: Runner, on_failure: Callable[[Exception], None]) -> None:
        self.runner, self.on_failure = runner, on_failure
        self.num_threads = torch.get_num_threads()               # per thread, and results depend on the number
        self._thread: threading.Thread | None = None
        self._ends = threading.Event()
        atexit.register(self.end)                                # also if an error in a call ends the program

    def offer(self, sender: int, message: Message, payload: torch.Tensor | None) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="distca-roles", daemon=True)
            self._thread.start()
        self.runner.offer(sender, message, payload)

    def end(self, seconds: float | None = None) -> None:
        """End after the role that runs now: Python aborts if it ends while a thread is in torch."""
        self._ends.set()
        self.runner.offered.put(None)
        if self._thread is not None:
            self._thread.join(seconds)
        if self._thread is None or not self._thread.is_alive():
            atexit.unregister(self.end)

    def _run(self) -> None:
        torch.set_num_threads(self.num_threads)
        if self.runner.device.type == "cuda":
            torch.cuda.set_device(self.runner.device)
        try:
            while not self._ends.is_set() and self.runner.run_next():
                pass
        except Exception as error:
            self.on_failure(error)
            raise


class _Place:
    """A role's place in a pool, for its tables: it exchanges nothing by itself."""

    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size = rank, size

    def exchange(self, send: torch.Tensor, send_splits: list[int], recv_splits: list[int]) -> Handle:
        raise AssertionError("a role's exchanges go through its carrier")

    def gather(self, value: int, device: torch.device) -> list[int]:
        return [value] * self.size                               # homes have compared their plans


class _Done:
    """A handle whose tensor is there."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor

    def wait(self) -> torch.Tensor:
        return self.tensor


class _RoleCarrier:
    """Carries one call of a role: its inputs, which have arrived, and its results, to the homes."""

    def __init__(self, runner: Runner, number: int, role: int, inputs: Sequence[Any], began: float) -> None:
        self.runner, self.number, self.role, self.inputs, self.began = runner, number, role, inputs, began

    def begin(self, expected: Sequence[int]) -> None:
        """A role expects no results."""

    def exchange(self, send: torch.Tensor, send_splits: list[int], recv_splits: list[int]) -> Handle:
        if any(recv_splits):
            arrived = [len(one) for one in self.inputs]
            if arrived != [size for size in recv_splits if size]:
                raise TransportError(f"role {self.role} expected {recv_splits} bytes from the homes and got {arrived}; "
                                     "they do not follow the same plan")
            return _Done(joined(self.inputs, send.device))
        settle(send)
        about = {"kind": "result", "call": self.number, "role": self.role}
        for home, part in zip(self.runner.homes, send.split(send_splits)[:len(self.runner.homes)], strict=True):
            if len(part):
                self.runner.send(home, {**about, "seconds": time.monotonic() - self.began}, part)
        return _Done(send.new_empty(0))
