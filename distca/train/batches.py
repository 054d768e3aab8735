"""Plan and read the next batch in the background (`Batches`), evaluate (`Evaluation`), compute a stage (`StageWork`).

Every rank plans on its own from the same document lengths, and `agree` compares the plans before a batch is used. The
loader then reads the tokens that the plan places on this rank.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, wait
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from distca.baselines import at_home_step, per_document_cp_step
from distca.corpus.corpora import Corpus
from distca.cost.attention_time import AttentionTime
from distca.cost.mixed_pool import find_cost, time_of
from distca.cost.network import find_cluster
from distca.planning.choose import StepSeconds, plan_step
from distca.planning.orders import by_work
from distca.planning.plan import Plan
from distca.planning.schedule import Ticks, layers_of_stages
from distca.planning.step import StepPlan, StepSummary
from distca.planning.windows import with_windows
from distca.runtime.attention import CoreAttention
from distca.runtime.ping_pong import forward_segments
from distca.runtime.pipeline import Send
from distca.runtime.prepared import Shapes
from distca.runtime.transport import Handle
from distca.simulate.execute import step_seconds
from distca.spec import ModelShape
from distca.train.agreement import StepDigests
from distca.train.data import Documents, Loader, Position, TrainingRow
from distca.train.groups import in_background
from distca.train.model.decoder import Decoder
from distca.train.model.loss import chunked_cross_entropy
from distca.train.model.parallel import accumulating
from distca.train.model.segment_runs import Offload
from distca.train.model.weight_gradients import WeightGradients, WeightUnit
from distca.train.settings import Settings, num_roles
from distca.train.settings.schedule import pipeline_ticks
from distca.validation import UserError
from distca.workload.topology import Topology

RowPlans = Sequence[Sequence[Plan]]  # [row][depth]
Agree = Callable[[StepPlan, StepDigests], StepPlan]  # this rank's plan -> the plan that all ranks follow


def step_plan(
    lengths: Sequence[np.ndarray], settings: Settings, model: ModelShape, num_data: int,
    cost: AttentionTime | None = None, topology: Topology | None = None, speed: np.ndarray | None = None,
    ticks: Ticks | None = None,
) -> StepPlan:
    """Plan a step whose micro-batch m has documents of `lengths[m]` tokens, over `num_data` data ranks.

    `speed` holds the relative speed of every attention server; None means equal speeds. `ticks` order the work; None
    means as the settings choose for an untied model. The modes "home" and
    "per_document_cp" choose the placement themselves and run without ping-pong.
    """
    attention, tp = settings.attention, settings.parallel.tensor
    if ticks is None:
        ticks = pipeline_ticks(settings.with_values({"batch.micro_batches": len(lengths)}), model)
    layers = layers_of_stages(model.num_layers, ticks.num_parts)
    if attention.mode == "home":
        step = at_home_step(lengths, model, num_data=num_data, layers=layers, tp=tp, ticks=ticks)
    elif attention.mode == "per_document_cp":
        step = per_document_cp_step(lengths, model, num_data=num_data, layers=layers, tp=tp, ticks=ticks)
    else:
        servers = ticks.num_stages * num_data + num_roles(settings) // tp  # of this rank's tensor index
        tolerance = attention.tolerance if isinstance(attention.tolerance, float) else _step_seconds(
            model, attention.cluster, tp, attention.cost)
        step = plan_step(lengths, model, num_data=num_data, layers=layers, tp=tp, ping_pong=settings.batch.ping_pong,
                         placement=attention.placement, tolerance=tolerance,
                         speed=np.ones(servers) if speed is None else speed, cost=cost, topology=topology, ticks=ticks)
    return with_windows(step, model.layer_windows)


@lru_cache(maxsize=4)
def _step_seconds(model: ModelShape, cluster: str, tp: int, cost: str) -> StepSeconds:
    """Return the function that predicts a step's seconds, which `attention.tolerance` "auto" minimizes."""
    return step_seconds(model, find_cluster(cluster), tp, find_cost(cost))


def attention_time(settings: Settings, model: ModelShape) -> AttentionTime | None:
    """Return the attention cost model of the table `attention.cost`; None if plans balance causal pairs instead."""
    if not settings.attention.cost:
        return None
    return time_of(find_cost(settings.attention.cost), model, settings.parallel.tensor)


@dataclass(frozen=True, slots=True, eq=False)
class Batch:
    """One rank's rows of one step, and the plan of that step."""

    micro_batches: tuple[tuple[TrainingRow, ...], ...]  # one row each, or ping and pong of equal length
    plan: StepPlan         # the same on all ranks
    summary: StepSummary   # of the plan
    plan_seconds: float    # time to make layouts and plans, before the step
    wait_seconds: float    # time that the step waited for this batch
    num_labels: int        # over all ranks and rows: the divisor of the mean loss
    server_work: np.ndarray | None = None  # [servers] planned work, if server speeds are measured (attention.adapt)

    @property
    def rows(self) -> list[TrainingRow]:
        return [row for rows in self.micro_batches for row in rows]


class _Draft(NamedTuple):
    """A batch that follows this rank's plan, and the documents, to rebuild the batch if rank 0's plan is used."""

    batch: Batch
    documents: Documents
    digests: StepDigests
    after: Position        # start of the next batch


class Batches:
    """One data rank's planned batches, in the order of the loader's stream.

    A new `speed` takes effect in the batch after the next one, because the next one is already being planned. A batch
    without labels is an error if `trains`.
    """

    speed: np.ndarray | None = None  # [servers] relative speeds; None: equal

    def __init__(self, loader: Loader, ticks: Ticks | None = None, *, topology: Topology | None = None,
                 agree: Agree | None = None, trains: bool = True) -> None:
        self.loader, self.settings, self.position, self._ticks = loader, loader.settings, loader.start, ticks
        self._topology, self._agree, self._trains = topology, agree, trains
        self._cost = attention_time(loader.settings, loader.model)
        self._ahead: Future[_Draft] | None = None

    def next(self) -> Batch:
        """Return the batch at the current position, or raise the error that occurred while it was read and planned."""
        began = time.perf_counter()
        ahead = self._ahead or in_background(self._draft, self.position, self.speed)
        self._ahead = None
        seconds = self.settings.run.timeout_seconds
        if not wait([ahead], timeout=seconds).done:
            raise TimeoutError(f"the next batch was not read and planned within {seconds} s (run.timeout_seconds)")
        draft = ahead.result()
        batch = replace(draft.batch, wait_seconds=time.perf_counter() - began)
        plan = batch.plan if self._agree is None else self._agree(batch.plan, draft.digests)
        if plan is not batch.plan:
            batch = replace(self._batch(plan, draft.documents, batch.plan_seconds), wait_seconds=batch.wait_seconds)
        self.position = draft.after
        self._ahead = in_background(self._draft, self.position, self.speed)
        return batch

    def load(self, position: Mapping[str, Any]) -> None:
        """Continue at a saved position, also one saved by another number of ranks.

        The stream continues at the same token: no token is skipped or repeated. If a batch also has the same number of
        tokens over all ranks, the same batches follow.
        """
        self.close()
        self.position = self.loader.check(position)

    def close(self) -> None:
        """Wait for the batch that is being prepared, and drop it."""
        if self._ahead is not None:
            wait([self._ahead], timeout=self.settings.run.timeout_seconds)
            self._ahead = None

    def _draft(self, position: Position, speed: np.ndarray | None) -> _Draft:
        documents, after = self.loader.take(position)
        began = time.perf_counter()
        lengths = [np.array([piece.stop - piece.start for piece in pieces]) for pieces in documents]
        order = by_work(lengths) if self.settings.parallel.pipeline > 1 else range(len(lengths))
        documents, lengths = [documents[number] for number in order], [lengths[number] for number in order]
        plan = step_plan(lengths, self.settings, self.loader.model, self.loader.world, self._cost, self._topology,
                         speed, self._ticks)
        batch = self._batch(plan, documents, time.perf_counter() - began)
        return _Draft(batch, documents, StepDigests.of(plan), after)

    def _batch(self, plan: StepPlan, documents: Documents, plan_seconds: float) -> Batch:
        """Build the batch whose rows hold the documents as the plan's layouts place them."""
        num_labels = self.loader.num_labels(documents)
        if num_labels == 0 and self._trains:
            what = "documents of one token" if plan.num_labels == 0 else "tokens that are not in the loss"
            raise UserError(f"a step of {plan.num_tokens} tokens holds {what} only and nothing to predict; raise "
                            "batch.tokens_per_rank or batch.micro_batches, or give other documents")
        return Batch(self.loader.rows(plan.micro_batches, documents), plan, plan.summary(), plan_seconds, 0.0,
                     num_labels, plan.server_work() if self.settings.attention.adapt else None)


def batch_tokens(settings: Settings, num_data: int) -> int:
    """Return the tokens of a step over all data ranks."""
    return num_data * settings.batch.tokens_per_rank * settings.batch.micro_batches


def check_fills_a_batch(corpus: Corpus, settings: Settings, num_data: int) -> None:
    """Raise a UserError if the corpus has fewer tokens than one step."""
    tokens, needed = int(corpus.lengths().sum()), batch_tokens(settings, num_data)
    if tokens < needed:
        raise UserError(f"the corpus has {tokens} tokens but a step takes {needed} ({num_data} data ranks of "
                        f"batch.tokens_per_rank {settings.batch.tokens_per_rank}, batch.micro_batches "
                        f"{settings.batch.micro_batches}); give more documents, or fewer tokens a step")


class Evaluation:
    """Computes the loss on held-out documents every `eval.every` steps and after the last step.

    Every evaluation uses the same batches, and no document twice. It runs training's forward pass without gradients,
    and leaves weights, optimizer, random state and training's data position unchanged.
    """

    def __init__(self, batches: Batches) -> None:
        settings, loader = batches.settings, batches.loader
        tokens, needed = int(loader.corpus.lengths().sum()), batch_tokens(settings, loader.world)
        if tokens < needed:
            remedy = "give more at eval.path" if settings.eval.path else "raise eval.fraction"
            raise UserError(f"the held-out documents have {tokens} tokens but a batch takes {needed}; {remedy}, or "
                            "take fewer tokens a step")
        self._batches, self._num_batches = batches, min(settings.eval.batches, tokens // needed)
        self._every, self._last = settings.eval.every, settings.run.steps

    def is_due(self, step: int) -> bool:
        return step % self._every == 0 or step == self._last

    @torch.no_grad()
    def loss(self, forward: Callable[[Batch], torch.Tensor], pool: dist.ProcessGroup) -> float:
        """Return the mean loss over all labels; `forward` returns the summed loss of this rank's labels of a batch."""
        self._batches.load(self._batches.loader.start)
        totals, num_labels = [], 0
        for _ in range(self._num_batches):
            batch = self._batches.next()
            totals.append(forward(batch))
            num_labels += batch.num_labels
        self._batches.close()
        if num_labels == 0:
            raise UserError("the held-out documents have no token in the loss; hold out others, or more of them")
        total = torch.stack(totals).sum()
        dist.all_reduce(total, group=pool)
        return float(total) / num_labels


class StageWork:
    """Runs this rank's parts of a pipeline on one batch after another; `total` is the summed loss of its labels."""

    def __init__(
        self, decoder: Decoder, attention: CoreAttention, *, tensor: int, dtype: torch.dtype, device: torch.device,
        loss_chunk_tokens: int, compiled: bool = False, offload: Offload | None = None,
        gradients: WeightGradients | None = None, spreads_head: bool = False,
    ) -> None:
        self.decoder, self.attention, self.loss_chunk_tokens = decoder, attention, loss_chunk_tokens
        self.compiled, self.offload = compiled, offload
        self.device, self.tensor = device, tensor
        self.gradients, self.spreads_head = gradients, spreads_head
        self.units: dict[tuple[int, int], WeightUnit] = {}       # by part and micro-batch
        model = decoder.shape.model
        self.shapes = Shapes(model.num_heads // tensor, model.num_kv_heads // tensor, model.head_dim, dtype, device)

    def begin(self, batch: Batch) -> None:
        self.num_labels = batch.num_labels
        self.rows = [[(row.tokens.to(self.device), row.labels.to(self.device), row.positions.to(self.device))
                      for row in rows] for rows in batch.micro_batches]
        self.reads = [[row.reads for row in rows] for rows in batch.micro_batches]
        self.total = torch.zeros((), dtype=torch.float64, device=self.device)
        if self.spreads_head and self.gradients is not None:
            self.gradients.gather_head()

    def num_layers(self, part: int) -> int:
        return len(self.decoder.parts[part]) - 1

    def activations(self, micro_batch: int) -> list[torch.Size]:
        """Return the shape of each row's x on this rank; tensor parallelism shards and pads the tokens."""
        return [torch.Size((-(-num_tokens // self.tensor), hidden)) for num_tokens, hidden in self.hidden(micro_batch)]

    def hidden(self, micro_batch: int) -> list[torch.Size]:
        return [torch.Size((len(tokens), self.decoder.shape.model.hidden)) for tokens, _, _ in self.rows[micro_batch]]

    def empty(self) -> torch.Tensor:
        return torch.empty(0, dtype=self.shapes.dtype, device=self.device)

    def forward(
        self, part: int, micro_batch: int, received: Sequence[Handle], send: Send, plans: RowPlans,
        backward_plans: RowPlans,
    ) -> list[torch.Tensor]:
        rows = self.rows[micro_batch]

        def run(decoder: Decoder) -> list[torch.Tensor]:
            first, *middle, last = decoder.parts[part]
            has_loss = last.norm is not None and not self.spreads_head
            segments = [first if first.embed is not None else lambda row, rotary: first(row.wait(), rotary), *middle,
                        last if has_loss else lambda x, out: send(last(x, out))]
            inputs = [(tokens,) for tokens, _, _ in rows] if first.embed is not None else [(row,) for row in received]
            rotaries = [decoder.rotary(positions) for _, _, positions in rows]
            with nullcontext() if self.offload is None else self.offload.keeping():
                states = forward_segments(segments, inputs, rotaries, plans, self.attention, backward_plans,
                                          self.reads[micro_batch])
            if not has_loss:
                return states
            return [self.loss(_joined(states), decoder.head_weight, _joined([labels for _, labels, _ in rows]))]

        return self.decoder(run)

    def loss(self, hidden: torch.Tensor, head_weight: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """Return some tokens' contribution to the mean loss over all labels of all ranks."""
        total, _ = chunked_cross_entropy(hidden, head_weight, labels, self.loss_chunk_tokens, self.compiled)
        self.total += total.detach()
        return total / self.num_labels

    def head(self, micro_batch: int, hidden: torch.Tensor, begin: int) -> torch.Tensor | None:
        labels = _joined([labels for _, labels, _ in self.rows[micro_batch]])[begin:begin + len(hidden)]
        trains = torch.is_grad_enabled()
        hidden, weight = (x.detach().requires_grad_(trains) for x in (hidden, self.decoder.head_weight))
        loss = self.loss(hidden, weight, labels)
        if not trains:
            return None
        assert self.gradients is not None
        gradient, of_weight = torch.autograd.grad(loss, (hidden, weight))
        self.gradients.total(self.decoder.output).add_(
            of_weight.to_local() if isinstance(of_weight, DTensor) else of_weight)
        return gradient

    def backward(
        self, part: int, micro_batch: int, outputs: Sequence[torch.Tensor], gradients: Sequence[torch.Tensor] | None,
        *, last: bool, apart: bool,
    ) -> None:
        last = last and self.gradients is None                   # whose units, and the head of all stages, come later
        with self.accumulate(last), nullcontext() if self.gradients is None or not apart else (
                self.gradients.collecting()) as unit:
            torch.autograd.backward(outputs, gradients)
        if unit is not None:
            self.units[part, micro_batch] = unit

    def accumulate(self, last: bool) -> AbstractContextManager[None]:
        return accumulating(self.decoder, last=last)

    def weigh(self, part: int, micro_batch: int, segment: int, *, last: bool) -> None:
        unit = self.units[part, micro_batch]
        unit.run(self.decoder.parts[part][segment], last)
        if not unit.pairs:
            self.units.pop((part, micro_batch))

    def finish(self) -> None:
        if self.gradients is not None:
            if torch.is_grad_enabled():
                self.gradients.deliver()
            if self.spreads_head:
                self.gradients.release_head()


def _joined(rows: Sequence[torch.Tensor]) -> torch.Tensor:
    return rows[0] if len(rows) == 1 else torch.cat(list(rows))
