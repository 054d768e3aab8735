"""From a corpus to one rank's rows: the same documents in the same order, wherever and whenever the run continues.

A batch is a run of tokens from one endless stream of shuffled documents, so a position in the stream says all there is
to save, and it means the same on any number of ranks. Every rank takes the same pieces, makes the same plan from
their lengths, and reads only the tokens of its own slices. The next batch is made while this one trains.

A document that does not fit into a micro-batch is cut, and its rest opens the next as a document of its own; so is one
longer than `max_document`. Nothing is attended to or predicted across such a cut; where ping and pong share a document
it stays one. A corpus that runs out begins anew in another order, within a batch too, so it may be smaller than one.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
import torch

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
from distca.spec import ModelShape, unknown_name
from distca.train.agreement import StepDigests
from distca.train.background import in_background
from distca.train.settings import MODES, Settings
from distca.validation import UserError
from distca.workload.documents import IGNORED
from distca.workload.packing import NanoBatch
from distca.workload.topology import Topology


class TextPiece(NamedTuple):
    """Tokens [start, stop) of a corpus document: a document of its own to the model."""

    document: int
    start: int
    stop: int


class Stream:
    """The documents of a corpus end to end, epoch after epoch, each epoch in an order of its own.

    Documents longer than `max_document` are cut into documents of their own, each with its own place in the order.
    """

    def __init__(self, lengths: np.ndarray, *, seed: int, max_document: int = 0) -> None:
        for field, value in (("data.seed", seed), ("data.max_document", max_document)):
            if isinstance(value, bool) or not isinstance(value, int) or value < 0:
                raise UserError(f"{field} is {value!r}; give a whole number of at least 0")
        self._lengths = np.ascontiguousarray(lengths, dtype=np.int64)
        if not self._lengths.any():
            raise UserError(f"the corpus has {len(lengths)} documents and no token; give at least one document")
        longest = max_document or int(self._lengths.max())
        count = -(-self._lengths // longest)                     # pieces of each document
        self._document = np.repeat(np.arange(len(count)), count)
        self._begin = (np.arange(len(self._document)) - np.repeat(np.cumsum(count) - count, count)) * longest
        self._end = np.minimum(self._begin + longest, self._lengths[self._document])
        self._about: dict[str, int | str] = {
            "seed": seed,
            "max_document": max_document,
            "num_documents": len(self._lengths),
            "num_tokens": int(self._lengths.sum()),
            "lengths_digest": hashlib.blake2b(self._lengths.tobytes(), digest_size=8).hexdigest(),
        }
        self._seed = seed
        self._taken = 0  # tokens since the beginning
        self._epoch, self._index, self._offset = -1, 0, 0
        self._enter(0)

    def take(self, num_tokens: int) -> list[TextPiece]:
        """The next pieces, exactly `num_tokens` tokens in all."""
        pieces: list[TextPiece] = []
        left = num_tokens
        while left > 0:
            at = int(self._order[self._index])
            start, end = int(self._begin[at]) + self._offset, int(self._end[at])
            stop = min(start + left, end)
            pieces.append(TextPiece(int(self._document[at]), start, stop))
            left -= stop - start
            self._offset += stop - start
            if stop == end:
                self._index, self._offset = self._index + 1, 0
                if self._index == len(self._order):
                    self._enter(self._epoch + 1)
        self._taken += num_tokens
        return pieces

    def state(self) -> dict[str, int | str]:
        """Where the next token comes from, as plain values; `load` of a stream over the same corpus continues there."""
        return {**self._about, "epoch": self._epoch, "index": self._index, "offset": self._offset,
                "tokens": self._taken}

    def load(self, state: Mapping[str, Any]) -> None:
        epoch, index, offset, taken = (_whole(state, name) for name in ("epoch", "index", "offset", "tokens"))
        self._check_same_data(state)
        if epoch != self._epoch:
            self._enter(epoch)
        if index >= len(self._order) or offset >= (self._end - self._begin)[self._order[index]]:
            raise UserError(f"the saved data position, document {index} of the epoch at token {offset}, is outside "
                            "the corpus; use another checkpoint")
        self._index, self._offset, self._taken = index, offset, taken

    def _enter(self, epoch: int) -> None:
        self._order = np.random.default_rng([self._seed, epoch]).permutation(len(self._document))
        self._epoch, self._index, self._offset = epoch, 0, 0

    def _check_same_data(self, state: Mapping[str, Any]) -> None:
        seed = _whole(state, "seed")
        if seed != self._seed:
            raise UserError(f"data.seed is {self._seed} but the checkpoint's is {seed}, so the order would change; "
                            f"set data.seed to {seed}")
        if any(state.get(name) != value for name, value in self._about.items()):
            raise UserError(
                f"the checkpoint's corpus has {state.get('num_documents')} documents of {state.get('num_tokens')} "
                f"tokens, this one {self._about['num_documents']} of {self._about['num_tokens']}, or others than "
                "those; give the same [data], or begin anew from the weights alone with model.load")


@dataclass(frozen=True, slots=True, eq=False)
class Row:
    """One rank's part of a micro-batch, or of its ping or pong."""

    tokens: torch.Tensor     # [tokens] int64
    labels: torch.Tensor     # [tokens] int64: the document's next token, wherever that lives; -100 at its end, and
                             # where the next token is not in the loss
    positions: torch.Tensor  # [tokens] int64: position in the document
    reads: tuple[tuple[int, int], ...] = ()  # tokens [start, stop) of ping's row whose keys pong's queries read


@dataclass(frozen=True, slots=True, eq=False)
class Batch:
    """What one rank trains on in one step."""

    micro_batches: tuple[tuple[Row, ...], ...]  # each one row, or ping and pong with as many tokens
    plan: StepPlan         # the same on all ranks
    summary: StepSummary   # of the plan
    plan_seconds: float    # spent on layouts and plans, ahead of the step
    wait_seconds: float    # spent waiting for this batch, within the step
    num_labels: int        # of all ranks and rows, the same on all ranks; what a mean loss divides by
    server_work: np.ndarray | None = None  # [servers] of the plan, where speeds are learnt from it

    @property
    def rows(self) -> list[Row]:
        return [row for rows in self.micro_batches for row in rows]


class _Draft(NamedTuple):
    """A batch before it is tensors, and the position behind it."""

    columns: list[list[tuple[np.ndarray, np.ndarray, np.ndarray]]]  # [micro-batch][row] tokens, labels, positions
    plan: StepPlan
    summary: StepSummary
    plan_seconds: float
    num_labels: int
    position: dict[str, int | str]
    server_work: np.ndarray | None
    pieces: list[list[TextPiece]]  # [micro-batch]
    digests: StepDigests


Agree = Callable[[StepPlan, StepDigests], StepPlan]  # the step that all ranks follow, given this rank's


class Loader:
    """One data rank's batches. Loaders that differ in `rank` alone give the other rows of the same batches.

    `model` is the decoder's shape, whose vocabulary must hold every token and whose heads tell what moving one costs;
    `topology` the nodes of the pool's ranks. A batch without a label is refused unless `trains` is false. `speed` is of
    the pool's servers, for the batches whose making begins after it was set: that behind the next one. `next` calls
    `agree` with every batch's plan; where that returns another, it is the batch's.
    """

    speed: np.ndarray | None = None  # all equal

    def __init__(
        self, corpus: Corpus, settings: Settings, *, rank: int, world: int, model: ModelShape,
        topology: Topology | None = None, trains: bool = True, agree: Agree | None = None,
    ) -> None:
        if not 0 <= rank < world:
            raise UserError(f"rank is {rank} of {world} data ranks; give 0 to {world - 1}")
        if settings.attention.mode not in MODES:
            raise unknown_name("attention.mode", settings.attention.mode, MODES)
        if corpus.vocab is not None and corpus.vocab > model.vocab:
            raise UserError(f"the corpus has {corpus.vocab} different tokens but model {model.name!r} knows "
                            f"{model.vocab}; choose a data.tokenizer and a model that agree")
        lengths = corpus.lengths()
        if settings.data.max_document == 1 or lengths.max(initial=0) == 1:
            raise UserError("every document is one token long and leaves nothing to predict; give longer documents, "
                            "or raise data.max_document")
        self._corpus, self._settings, self._model = corpus, settings, model
        self._cost = attention_time(settings, model)
        self._rank, self._world, self._topology, self._trains = rank, world, topology, trains
        self._agree = agree
        self._stream = Stream(lengths, seed=settings.data.seed, max_document=settings.data.max_document)
        self._position = self._stream.state()
        self._ahead: Future[_Draft] | None = None

    def next(self) -> Batch:
        """The batch at the current position. What went wrong while it was made is raised here."""
        begin = time.perf_counter()
        ahead = self._ahead or in_background(self._draft, self._position, self.speed)
        self._ahead = None
        draft = self._wait(ahead)
        wait_seconds = time.perf_counter() - begin
        plan = draft.plan if self._agree is None else self._agree(draft.plan, draft.digests)
        if plan is not draft.plan:
            draft = self._drafted(plan, draft.plan_seconds, draft.pieces, draft.position)
        self._position = draft.position
        self._ahead = in_background(self._draft, self._position, self.speed)
        micro_batches = tuple(
            tuple(Row(torch.from_numpy(tokens), torch.from_numpy(labels), torch.from_numpy(positions),
                      micro_batch.key_runs(nano, self._rank)) for nano, (tokens, labels, positions) in enumerate(rows))
            for micro_batch, rows in zip(draft.plan.micro_batches, draft.columns, strict=True))
        return Batch(micro_batches, draft.plan, draft.summary, draft.plan_seconds, wait_seconds, draft.num_labels,
                     draft.server_work)

    def state(self) -> dict[str, int | str]:
        """The position of the batch that `next` gives next, whatever is already being made behind it."""
        return dict(self._position)

    def load(self, state: Mapping[str, Any]) -> None:
        """Continue where `state` was taken, on this or another number of ranks.

        With as many tokens in a batch over all ranks, the same batches follow. With more or fewer, the stream still
        continues at the same token, so nothing is skipped or seen twice.
        """
        self.close()
        self._stream.load(state)
        self._position = self._stream.state()

    def close(self) -> None:
        """Wait for the batch in the making and forget it."""
        if self._ahead is not None:
            wait([self._ahead], timeout=self._settings.run.timeout_seconds)
            self._ahead = None

    def _wait(self, ahead: Future[_Draft]) -> _Draft:
        seconds = self._settings.run.timeout_seconds
        if not wait([ahead], timeout=seconds).done:
            raise TimeoutError(f"the next batch was not read and planned within {seconds} s (run.timeout_seconds)")
        return ahead.result()

    def _draft(self, position: dict[str, int | str], speed: np.ndarray | None) -> _Draft:
        self._stream.load(position)
        micro_batches = [self._stream.take(self._world * self._settings.batch.tokens_per_rank)
                         for _ in range(self._settings.batch.micro_batches)]
        after = self._stream.state()
        begin = time.perf_counter()
        plan = step_plan([np.array([piece.stop - piece.start for piece in pieces]) for pieces in micro_batches],
                         self._settings, self._model, self._world, self._cost, self._topology, speed)
        return self._drafted(plan, time.perf_counter() - begin, micro_batches, after)

    def _drafted(
        self, plan: StepPlan, plan_seconds: float, micro_batches: list[list[TextPiece]], position: dict[str, int | str]
    ) -> _Draft:
        """The batch of these pieces as the plan lays them out."""
        num_labels = sum(self._num_labels(piece) for pieces in micro_batches for piece in pieces)
        if num_labels == 0 and self._trains:
            what = "documents of one token" if plan.num_labels == 0 else "tokens that are not in the loss"
            raise UserError(f"a step of {plan.num_tokens} tokens holds {what} only and nothing to predict; raise "
                            "batch.tokens_per_rank or batch.micro_batches, or give other documents")
        columns = [[self._columns(nano, pieces) for nano in micro_batch.nano_batches]
                   for micro_batch, pieces in zip(plan.micro_batches, micro_batches, strict=True)]
        return _Draft(columns, plan, plan.summary(), plan_seconds, num_labels, position,
                      plan.server_work() if self._settings.attention.adapt else None, micro_batches,
                      StepDigests.of(plan))

    def _num_labels(self, piece: TextPiece) -> int:
        """Tokens of a piece that have one before them and are in the loss."""
        in_loss = self._corpus.in_loss(piece.document)
        if in_loss is None:
            return piece.stop - piece.start - 1
        return int(np.count_nonzero(in_loss[piece.start + 1:piece.stop]))

    def _columns(self, nano: NanoBatch, pieces: list[TextPiece]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Tokens, labels and positions of this rank's slices; the token behind a slice comes along as a label."""
        layout = nano.layout
        mine = layout.rank == self._rank
        slices = zip(layout.document[mine].tolist(), layout.start[mine].tolist(), layout.stop[mine].tolist(),
                     strict=True)
        tokens, labels, positions = [], [], []
        for document, start, stop in slices:
            piece = pieces[nano.document[document]]
            ends = stop == piece.stop - piece.start
            read = self._read(piece.document, piece.start + start, piece.start + stop + (not ends))
            in_loss = self._corpus.in_loss(piece.document)
            wanted = read[1:] if in_loss is None else np.where(
                in_loss[piece.start + start + 1:piece.start + start + len(read)], read[1:], IGNORED)
            tokens.append(read[:stop - start])
            labels += [wanted, np.full(int(ends), IGNORED)]
            positions.append(np.arange(start, stop))
        return np.concatenate(tokens), np.concatenate(labels), np.concatenate(positions)

    def _read(self, document: int, start: int, stop: int) -> np.ndarray:
        tokens = self._corpus.tokens(document)[start:stop].astype(np.int64)
        outside = tokens[(tokens < 0) | (tokens >= self._model.vocab)]
        if len(tokens) != stop - start or len(outside):
            what = f"holds token {outside[0]}" if len(outside) else f"ends before token {stop}"
            raise UserError(f"document {document} of the corpus {what}, where model {self._model.name!r} knows tokens "
                            f"0 to {self._model.vocab - 1}; give the data that its tokenizer made")
        return tokens


def attention_time(settings: Settings, model: ModelShape) -> AttentionTime | None:
    """What `attention.cost` knows of this model's seconds; None where causal pairs are balanced."""
    if not settings.attention.cost:
        return None
    return time_of(find_cost(settings.attention.cost), model, settings.parallel.tensor)


def step_plan(
    lengths: Sequence[np.ndarray], settings: Settings, model: ModelShape, num_data: int,
    cost: AttentionTime | None = None, topology: Topology | None = None, speed: np.ndarray | None = None,
) -> StepPlan:
    """`lengths[m]` are the documents of micro-batch m, laid over `num_data` ranks; `speed` is of the pool's servers.

    Attention at home and per-document context parallelism say themselves where documents live, and have no ping-pong.
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
    """What `attention.tolerance` auto is chosen by."""
    return step_seconds(model, find_cluster(cluster), tp, find_cost(cost))


def _whole(state: Mapping[str, Any], name: str) -> int:
    value = state.get(name)
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise UserError(f"the saved data position has {name} {value!r}, not a whole number of at least 0; use another "
                        "checkpoint")
    return value
