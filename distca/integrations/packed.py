"""Plan and compute attention over packed documents for any trainer, which knows only the tokens of its rank.

Once per forward, before the first layer, ranks exchange the starts and lengths of their slices in one small collective.
Every rank then computes the same plan, and all layers use it. `torch.compile` breaks its graph here, because lengths
are host values that change with every batch. If no document spans ranks, evaluation, generation and sliding windows are
computed locally, without communication.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache, lru_cache, partial
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.utils.weak import WeakTensorKeyDictionary

from distca.cost.attention_time import AttentionTime
from distca.cost.latency_table import LatencyTable
from distca.integrations.document_lengths import PackedEdges, RowSlices, from_positions, whole_documents
from distca.integrations.row_exchange import Rows, RowTable, join_slices, spans
from distca.kernels.interface import check_tensors
from distca.planning.balance import balance
from distca.planning.plan import Plan
from distca.planning.tasks import tasks_at_home
from distca.runtime.attention import CoreAttention, not_compiled
from distca.runtime.prepared import PLANS_KEPT, Shapes
from distca.runtime.recorder import Recorder
from distca.runtime.transport import Chosen, LoopbackTransport, LoopbackWorld
from distca.spec import ModelShape
from distca.validation import UserError
from distca.workload.packing import check_tolerance

_OPTIONS = ("group", "model", "tolerance", "kernel", "state", "transport", "cost")
Qkv = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


@dataclass(slots=True)                                           # frozen, torch 2.11 compiles anew for every plan in it
class PackedBatch:
    """A micro-batch of packed documents. Keep it for all layers, and until recomputation has replayed them."""

    slices: RowSlices             # this rank's slices, in the order of its tokens
    plan: Plan | None             # plan of the whole group; None: everything is computed locally
    backward: Plan | None = None  # plan of backward, if it differs
    rows: Rows = ()               # slices of every rank, if there is a plan

    @property
    def spans(self) -> bool:
        """Whether any document is on several ranks."""
        return self.plan is not None and spans(self.plan.layout)

    def leaves_home(self, window: int | None) -> bool:
        """Return whether a layer with this window uses the plan: only if the window covers the longest document."""
        return self.plan is not None and (window is None or window >= int(self.plan.layout.lengths.max()))


class PackedAttention:
    """Attention over this rank's slices of packed documents, computed on the servers of the group's plan.

    `group` None is the default group, or this process alone if torch.distributed is not initialized. `model` gives
    the bytes of a token's query and keys; None takes them from the first call. `kernel`, `state`, `transport` and
    `recorder` are passed to CoreAttention; a transport of `connect_servers` brings dedicated servers. `speed` may be
    set between batches, to the same values on every rank.
    """

    def __init__(
        self, group: dist.ProcessGroup | None = None, *, model: ModelShape | None = None, tolerance: float = 0.05,
        kernel: str = "auto", state: str = "resend", transport: Chosen = "c10d",
        cost: LatencyTable | None = None, recorder: Recorder | None = None,
    ) -> None:
        check_tolerance(tolerance)
        self.group, self.kernel, self.state, self.transport = group, kernel, state, transport
        self.model, self.tolerance, self.cost, self.recorder = model, tolerance, cost, recorder
        self.latest: Plan | None = None                          # plan of the last batch
        self._layout = lru_cache(PLANS_KEPT)(join_slices)
        self._plan = lru_cache(PLANS_KEPT)(self._balanced)
        self._unmoved = lru_cache(PLANS_KEPT)(self._at_home)
        self._pool: CoreAttention | None = None                  # built once torch.distributed is initialized
        self._table: RowTable | None = None                      # built together with _pool
        self._home = CoreAttention(transport=LoopbackTransport(LoopbackWorld(1), 0), kernel=kernel, state=state)
        self._speed: Sequence[float] | None = None
        self._begun = WeakTensorKeyDictionary()                  # tensor -> _Begun

    def __deepcopy__(self, memo: dict[int, Any]) -> PackedAttention:
        """Return an attention with the same group and options, without batches."""
        return PackedAttention(**{name: getattr(self, name) for name in _OPTIONS})

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle without the group, which is bound to its process: an unpickled copy uses the default group."""
        return partial(PackedAttention, **{name: getattr(self, name) for name in _OPTIONS if name != "group"}), ()

    @property
    def speed(self) -> Sequence[float] | None:
        """Relative speeds of the group's ranks for later batches, as in `plan`; None: all equal."""
        return self._speed

    @speed.setter
    def speed(self, speed: Sequence[float] | None) -> None:
        self._speed = speed
        self._plan.cache_clear()

    def record(self, recorder: Recorder | None) -> None:
        """Record the waits and attention of later calls that use the pool."""
        self.recorder = recorder
        if self._pool is not None:
            self._pool.recorder = recorder

    @not_compiled
    def __call__(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, position_ids: torch.Tensor, *,
        document_ids: torch.Tensor | None = None, layer: int | None = None, scale: float | None = None,
        window: int | None = None, softcap: float | None = None, sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Attend q [tokens, heads, dim] to k, v [tokens, kv_heads, dim] at positions [tokens]; return out like q.

        Tensors may also be [rows, tokens, heads, dim] with positions [rows, tokens]. Position 0 begins a document; a
        row that begins past 0 continues the document of the previous row or rank. If a loader uses another order,
        `document_ids`, shaped like positions, number the documents of all ranks. All ranks of the group must call this.

        Each call reads positions and exchanges lengths, because a buffer may have been refilled. With `layer`, which
        counts up from the model's first layer in every forward, only the first layer does so for all layers that pass
        the same tensors. `scale`, `window`, `softcap` and `sinks` are passed to CoreAttention.
        """
        def read() -> RowSlices:
            if q.shape[:-2] != position_ids.shape:
                raise UserError(f"q has shape {tuple(q.shape)} and position_ids {tuple(position_ids.shape)}; give a "
                                "position for each token")
            return from_positions(position_ids, document_ids)

        qkv = (q, k, v)
        if q.ndim != 3:                                          # otherwise no view, which adds an autograd node
            qkv = tuple(x.flatten(0, 1) if x.ndim == 4 else x for x in qkv)  # type: ignore[assignment]
        batch = self.begin_once(position_ids, read, qkv, layer=layer, beside=document_ids)
        out = self.attend(*qkv, batch, scale=scale, window=window, softcap=softcap, sinks=sinks)
        return out if q.ndim == 3 else out.unflatten(0, q.shape[:2])

    def begin_edges(self, given: PackedEdges, qkv: Qkv, *, training: bool, layer: int | None = None) -> PackedBatch:
        """Return the batch of the cumulative lengths that every layer of a forward gets.

        Only training uses the pool, because ranks may evaluate different numbers of batches.
        """
        return self.begin_once(given.edges, partial(given.slices, len(qkv[0])), qkv, layer=layer,
                               beside=given.positions, in_pool=training and self.group is not None,
                               lasting=given.lasting)

    def begin_once(
        self, key: torch.Tensor, read: Callable[[], RowSlices], qkv: Qkv, *, layer: int | None,
        beside: torch.Tensor | None, in_pool: bool = True, lasting: bool = False,
    ) -> PackedBatch:
        """Return the batch of the tensors `key` and `beside`, read once for all layers of a forward.

        The same tensor object may have new contents: torch does not count writes in inference mode, through `.data`,
        numpy or a CUDA graph, and another rank's contents may have changed while this rank's did not. So a batch is
        reused only if every rank can know that the call belongs to the same forward: it has the next `layer`, it is a
        replay in backward, or the tensor is `lasting` (never refilled).
        """
        begun = self._begun.get(key)
        replayed = torch._C._current_graph_task_id() != -1
        if begun is None or begun.in_pool != in_pool or begun.beside is not beside or not (
                lasting or replayed or (layer is not None and begun.layer is not None and layer == begun.layer + 1)):
            slices, shapes = _read(read, *qkv)
            if self.model is None and shapes is not None:
                self.model = _shape_of(shapes)
            batch = self.begin(slices, qkv[0].device, shapes) if in_pool else self.at_home(slices)
            begun = self._begun[key] = _Begun(batch, in_pool, beside, layer)
        elif not replayed:
            begun.layer = layer
        return begun.batch

    @not_compiled
    def begin(
        self, slices: RowSlices | Sequence[int] | ValueError, device: torch.device | str = "cpu",
        shapes: Shapes | None = None,
    ) -> PackedBatch:
        """Exchange slices and plan; every rank calls this once per forward. The exchange uses tensors on `device`.

        Plain lengths are whole documents on this rank; an error means that this rank has no valid batch. All ranks
        raise the same ValueError if any rank passes an error, shapes differ, or slices do not form whole documents.
        """
        mine = slices if isinstance(slices, RowSlices | ValueError) else whole_documents(slices)
        rows = self._exchange(mine, torch.device(device), shapes)
        assert isinstance(mine, RowSlices)
        if not any(row.start for row in rows):
            return PackedBatch(mine, None)
        self.latest = self._plan(rows, False)
        two_plans = self.cost is not None and self.state == "resend"  # "keep": one plan for both
        return PackedBatch(mine, self.latest, self._plan(rows, True) if two_plans else None, rows)

    @not_compiled
    def at_home(self, slices: RowSlices | Sequence[int] | ValueError) -> PackedBatch:
        """Return a batch without communication, for evaluation: ranks may run different numbers of batches."""
        if isinstance(slices, ValueError):
            raise slices
        mine = slices if isinstance(slices, RowSlices) else whole_documents(slices)
        if mine.start and mine.start[0] > 0 and mine.document is None:
            raise UserError(f"position_ids begin with {mine.start[0]}, in a document whose beginning is on another "
                            "rank, and this forward does not communicate; begin it on every rank (Transformers: "
                            "enable(model, evaluation='pool')), or give whole documents")
        return PackedBatch(mine, None)

    @not_compiled
    def attend(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, batch: PackedBatch, *,
        scale: float | None = None, window: int | None = None, softcap: float | None = None,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Attend q [tokens, heads, dim] to k, v [tokens, kv_heads, dim] of this rank's slices; return out like q."""
        scores: dict[str, Any] = {"scale": scale, "softcap": softcap, "sinks": sinks}
        pool = self._pool or self._home
        if batch.leaves_home(window):
            assert batch.plan is not None
            return pool(q, k, v, batch.plan, backward=batch.backward, **scores)
        if batch.spans:                                          # queries stay; keys inside the window are sent
            return pool(q, k, v, self._unmoved(batch.rows, window, pool.transport.size), window=window, **scores)
        if not batch.slices.start:
            every = sum(x.sum() for x in (q, k, v, sinks) if x is not None)
            return v.new_empty(*q.shape[:2], v.shape[2]) + every  # no tokens, but zero gradients
        return self._home(q, k, v, self._unmoved((batch.slices,), None, 1), window=window, **scores)

    def _exchange(self, mine: RowSlices | ValueError, device: torch.device, shapes: Shapes | None) -> Rows:
        if self._pool is None and dist.is_initialized():
            self._pool = CoreAttention(self.group, kernel=self.kernel, state=self.state, transport=self.transport,
                                       recorder=self.recorder)
            self._table = RowTable(self.group)
        if self._table is not None:
            return self._table.exchange(mine, device, shapes)
        if isinstance(mine, ValueError):
            raise mine
        return (mine,)

    def _balanced(self, rows: Rows, backward: bool) -> Plan:
        model = self._shape()
        time = None if self.cost is None else AttentionTime.of(self.cost, model)
        speed = np.ones(self._pool.transport.size) if self.speed is None and self._pool is not None else self.speed
        return balance(self._layout(rows), model, tolerance=self.tolerance, speed=speed, cost=time,
                       backward=backward, topology=None if self._pool is None else self._pool.topology)

    def _at_home(self, rows: Rows, window: int | None, num_servers: int) -> Plan:
        """Return a plan with every query on its home rank; with a window, only keys inside it are sent."""
        layout = self._layout(rows)
        tasks = tasks_at_home(layout)
        if window is not None:
            tasks = replace(tasks, kv_start=np.maximum(tasks.q_start - window + 1, 0))
        return Plan(layout, tasks, np.ones(num_servers), 0.0, self._shape())

    def _shape(self) -> ModelShape:
        if self.model is None:
            raise UserError("model is not given and no call has shown q and k yet; give PackedAttention(group, "
                            "model=ModelShape(…)), or call it with q, k, v and position_ids")
        return self.model


@dataclass(slots=True)
class _Begun:
    """The batch of a tensor at its last read, and the last layer that used the batch."""

    batch: PackedBatch
    in_pool: bool
    beside: torch.Tensor | None
    layer: int | None


def _read(
    read: Callable[[], RowSlices], q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
) -> tuple[RowSlices | ValueError, Shapes | None]:
    """Return this rank's slices and the shapes of its tensors, or the error."""
    try:
        slices = read()
        check_tensors(q, k, v)
        if sum(slices.length) != q.shape[0] or k.shape[0] != q.shape[0]:
            raise UserError(f"q has {q.shape[0]} tokens, k {k.shape[0]} and the documents {sum(slices.length)}; give "
                            "the queries, keys and values of just these")
    except ValueError as error:
        return error, None
    return slices, Shapes.of(q, k, v)


def _shape_of(shapes: Shapes) -> ModelShape:
    """Return a model for planning, which only needs the bytes of a token's query and keys."""
    heads, kv_heads, dim = shapes[:3]
    return ModelShape(name="packed", num_layers=1, hidden=heads * dim, num_heads=heads, num_kv_heads=kv_heads,
                      head_dim=dim, ffn=heads * dim, vocab=1, value_dim=shapes.value_dim)


def shared_attention(group: dist.ProcessGroup | None, **options: Any) -> PackedAttention:
    """Return the attention shared by all layers with the same pool and options, so that they plan once.

    Its group is None if the pool is this process alone.
    """
    return _shared(None if group is None or dist.get_world_size(group) == 1 else group, **options)


_shared = cache(PackedAttention)
_PLANNED: dict[int, Any] = {}                                    # by id of a config that several models share
_FIELD = "_distca_planned"


def attach(owner: object, planned: Any) -> None:
    """Attach the planner of a module (copied with the module), or of all models that share a config."""
    if isinstance(owner, torch.nn.Module):
        setattr(owner, _FIELD, planned)
        return
    if id(owner) not in _PLANNED:
        weakref.finalize(owner, _PLANNED.pop, id(owner), None)
    _PLANNED[id(owner)] = planned


def attached(owner: object) -> Any:
    return getattr(owner, _FIELD, None) if isinstance(owner, torch.nn.Module) else _PLANNED.get(id(owner))


def latest_plan(model: torch.nn.Module) -> Plan:
    """Return the plan of a model's last training forward, under any trainer; its `summary()` reports the balance."""
    modules = list(model.modules())
    for owner in (*modules, *(getattr(module, "config", None) for module in modules)):
        planned = attached(owner)
        if planned is not None and planned.latest is not None:
            return planned.latest
    raise UserError(f"model is a {type(model).__name__} whose attention has not been planned; enable it, and train it "
                    "for a step")
