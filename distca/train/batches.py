"""From documents to planned batches: documents → layouts → StepPlan → this rank's rows, one batch ahead of training.

Every rank plans for itself from the same lengths; `agree` compares the plans before a batch is used. The loader reads
the rows once the plan says where tokens live. All of it runs on a thread while the batch before trains.

An evaluation is the first batches of the held-out documents, in an order of their own: always the same batches, and no
document twice. They go through training's forward pass without gradients. Weights, optimizer, random state and
training's position in the data stay as they were.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist

from distca.baselines import at_home_step, per_document_cp_step
from distca.corpus.corpora import Corpus
from distca.cost.attention_time import AttentionTime
from distca.cost.mixed_pool import find_cost, time_of
from distca.cost.network import find_cluster
from distca.planning.choose import StepSeconds, plan_step
from distca.planning.schedule import layers_of_stages
from distca.planning.step import StepPlan, StepSummary
from distca.planning.windows import with_windows
from distca.simulate.execute import step_seconds
from distca.spec import ModelShape
from distca.train.agreement import StepDigests
from distca.train.data import Documents, Loader, Position, Row
from distca.train.groups import in_background
from distca.train.settings import Settings
from distca.validation import UserError
from distca.workload.topology import Topology

Agree = Callable[[StepPlan, StepDigests], StepPlan]  # this rank's plan -> the plan that all ranks follow


def step_plan(
    lengths: Sequence[np.ndarray], settings: Settings, model: ModelShape, num_data: int,
    cost: AttentionTime | None = None, topology: Topology | None = None, speed: np.ndarray | None = None,
) -> StepPlan:
    """Plan a step whose micro-batch m has documents of `lengths[m]` tokens, over `num_data` data ranks.

    `speed` is that of the pool's servers, by default all equal. The modes "home" and "per_document_cp" fix the
    placement of documents themselves and have no ping-pong.
    """
    attention, tp = settings.attention, settings.parallel.tensor
    layers = layers_of_stages(model.num_layers, settings.parallel.pipeline)
    if attention.mode == "home":
        step = at_home_step(lengths, model, num_data=num_data, layers=layers, tp=tp)
    elif attention.mode == "per_document_cp":
        step = per_document_cp_step(lengths, model, num_data=num_data, layers=layers, tp=tp)
    else:
        servers = len(layers) * num_data + attention.dedicated // tp  # with this rank's heads
        tolerance = attention.tolerance if isinstance(attention.tolerance, float) else _step_seconds(
            model, attention.cluster, tp, attention.cost)
        step = plan_step(lengths, model, num_data=num_data, layers=layers, tp=tp, ping_pong=settings.batch.ping_pong,
                         placement=attention.placement, tolerance=tolerance,
                         speed=np.ones(servers) if speed is None else speed, cost=cost, topology=topology)
    return with_windows(step, model.layer_windows)


@lru_cache(maxsize=4)
def _step_seconds(model: ModelShape, cluster: str, tp: int, cost: str) -> StepSeconds:
    """The step's predicted seconds, by which `attention.tolerance` "auto" chooses."""
    return step_seconds(model, find_cluster(cluster), tp, find_cost(cost))


def attention_time(settings: Settings, model: ModelShape) -> AttentionTime | None:
    """The model's attention seconds by the table `attention.cost`; None where plans balance causal pairs."""
    if not settings.attention.cost:
        return None
    return time_of(find_cost(settings.attention.cost), model, settings.parallel.tensor)


@dataclass(frozen=True, slots=True, eq=False)
class Batch:
    """What one rank trains on in one step."""

    micro_batches: tuple[tuple[Row, ...], ...]  # each one row, or ping and pong with as many tokens
    plan: StepPlan         # the same on all ranks
    summary: StepSummary   # of the plan
    plan_seconds: float    # spent on layouts and plans, ahead of the step
    wait_seconds: float    # spent waiting for this batch, within the step
    num_labels: int        # of all ranks and rows, the same on all ranks: a mean loss divides by it
    server_work: np.ndarray | None = None  # [servers] of the plan, where speeds are learnt from it

    @property
    def rows(self) -> list[Row]:
        return [row for rows in self.micro_batches for row in rows]


class _Draft(NamedTuple):
    """A batch by this rank's own plan, and what it takes to make it again by another rank's plan."""

    batch: Batch
    documents: Documents
    digests: StepDigests
    after: Position        # of the next batch


class Batches:
    """One data rank's planned batches, in the order of the loader's stream.

    `topology` describes the nodes of the pool's ranks. `speed` is that of the pool's servers; it takes effect in the
    batch after the next, since the next is already being made. A batch without a label is refused where `trains`.
    """

    speed: np.ndarray | None = None  # all equal

    def __init__(self, loader: Loader, *, topology: Topology | None = None, agree: Agree | None = None,
                 trains: bool = True) -> None:
        self.loader, self.settings, self.position = loader, loader.settings, loader.start
        self._topology, self._agree, self._trains = topology, agree, trains
        self._cost = attention_time(loader.settings, loader.model)
        self._ahead: Future[_Draft] | None = None

    def next(self) -> Batch:
        """The batch at the current position; raises what went wrong while it was made."""
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
        """Continue at a position, on this or another number of ranks.

        With as many tokens in a batch over all ranks, the same batches follow. With more or fewer, the stream still
        continues at the same token: nothing is skipped or seen twice.
        """
        self.close()
        self.position = self.loader.check(position)

    def close(self) -> None:
        """Wait for the batch in the making and drop it."""
        if self._ahead is not None:
            wait([self._ahead], timeout=self.settings.run.timeout_seconds)
            self._ahead = None

    def _draft(self, position: Position, speed: np.ndarray | None) -> _Draft:
        documents, after = self.loader.take(position)
        began = time.perf_counter()
        lengths = [np.array([piece.stop - piece.start for piece in pieces]) for pieces in documents]
        plan = step_plan(lengths, self.settings, self.loader.model, self.loader.world, self._cost, self._topology,
                         speed)
        batch = self._batch(plan, documents, time.perf_counter() - began)
        return _Draft(batch, documents, StepDigests.of(plan), after)

    def _batch(self, plan: StepPlan, documents: Documents, plan_seconds: float) -> Batch:
        """The documents as the plan's layouts place them."""
        num_labels = self.loader.num_labels(documents)
        if num_labels == 0 and self._trains:
            what = "documents of one token" if plan.num_labels == 0 else "tokens that are not in the loss"
            raise UserError(f"a step of {plan.num_tokens} tokens holds {what} only and nothing to predict; raise "
                            "batch.tokens_per_rank or batch.micro_batches, or give other documents")
        return Batch(self.loader.rows(plan.micro_batches, documents), plan, plan.summary(), plan_seconds, 0.0,
                     num_labels, plan.server_work() if self.settings.attention.adapt else None)


def batch_tokens(settings: Settings, num_data: int) -> int:
    """Tokens of a step over all data ranks."""
    return num_data * settings.batch.tokens_per_rank * settings.batch.micro_batches


def check_fills_a_batch(corpus: Corpus, settings: Settings, num_data: int) -> None:
    """Refuse to train on fewer tokens than a step takes."""
    tokens, needed = int(corpus.lengths().sum()), batch_tokens(settings, num_data)
    if tokens < needed:
        raise UserError(f"the corpus has {tokens} tokens but a step takes {needed} ({num_data} data ranks of "
                        f"batch.tokens_per_rank {settings.batch.tokens_per_rank}, batch.micro_batches "
                        f"{settings.batch.micro_batches}); give more documents, or fewer tokens a step")


class Evaluation:
    """The loss on held-out documents, every `eval.every` steps and after the last."""

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
        """Mean over the labels of all batches; `forward` returns the sum over this rank's labels of one batch."""
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
