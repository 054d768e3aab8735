"""Load data: take the documents of a batch from a corpus, and read one rank's rows as a plan's layouts place them.

Batches are consecutive tokens of one endless stream of shuffled documents. A checkpoint therefore saves only the
position in the stream, which is valid for any number of ranks. Every rank takes the same documents and reads only the
tokens that are placed on it.

A document is cut at the end of a micro-batch and after `max_document` tokens. The rest becomes a separate document:
there is no attention and no label across a cut. After its last document, the corpus repeats in a new order, also in the
middle of a batch. With `data.mix`, each source is a stream of its own, and one stream takes from all by their weights.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch

from distca.corpus.cache import Cache
from distca.corpus.corpora import Corpus, JoinedCorpus, hold_out, joined, open_corpus
from distca.planning.step import MicroBatch
from distca.spec import ModelShape, unknown_name
from distca.train.settings import MODES, Settings
from distca.validation import UserError, check_whole
from distca.workload.documents import IGNORED
from distca.workload.packing import NanoBatch

Position = dict[str, Any]  # the stream's next token, and figures that identify the corpus


def open_corpora(settings: Settings, *, verify: bool = False) -> tuple[Corpus, Corpus | None]:
    """Open the training documents and the held-out documents, if there are any; `verify` reads caches in full."""
    data, chosen = settings.data, settings.eval
    opened = partial(open_corpus, content=data.content, field=data.field, tokenizer=data.tokenizer, vocab=data.vocab,
                     cache=Cache(data.cache, verify))
    parts = [opened(one.kind, one.path, split=data.split) for one in data.sources()]
    weights = [one.weight for one in data.sources()]
    if chosen.fraction:
        divided = [hold_out(part, chosen.fraction, data.seed) for part in parts]
        return joined([trained for trained, _ in divided], weights), joined([held for _, held in divided])
    return joined(parts, weights), opened(data.kind_of(chosen.path), chosen.path) if chosen.path else None


class TextPiece(NamedTuple):
    """Tokens [start, stop) of a corpus document, which the model sees as one document."""

    document: int
    start: int
    stop: int


class Stream:
    """An endless stream of a corpus's documents, shuffled anew in every epoch.

    Documents longer than `max_document` are cut into pieces, which are shuffled like documents.
    """

    def __init__(self, lengths: np.ndarray, *, seed: int, max_document: int = 0, name: str = "corpus") -> None:
        check_whole("data.seed", seed, least=0)
        check_whole("data.max_document", max_document, least=0)
        lengths = np.ascontiguousarray(lengths, dtype=np.int64)
        if not lengths.any():
            raise UserError(f"the corpus has {len(lengths)} documents and no token; give at least one document")
        self._longest = max_document or int(lengths.max())
        self._lengths = lengths.astype(np.min_scalar_type(lengths.max()))  # a corpus may have many millions
        stops = np.cumsum(-(-lengths // self._longest))          # [documents] pieces up to its end
        self._num_pieces = int(stops[-1])
        self._stops = stops if (lengths > self._longest).any() or not lengths.all() else None  # None: one piece each
        self._seed, self._name = seed, name
        self._corpus: Position = {
            "seed": seed, "max_document": max_document, "num_documents": len(lengths),
            "num_tokens": int(lengths.sum()),
            "lengths_digest": hashlib.blake2b(lengths.data, digest_size=8).hexdigest()}
        self.taken = 0                                           # tokens since the start of the run
        self._epoch, self._index, self.offset = -1, 0, 0         # `offset`: tokens taken of the next piece
        self._enter(0)

    def take(self, num_tokens: int) -> list[TextPiece]:
        """Return the next pieces, with `num_tokens` tokens in total."""
        pieces: list[TextPiece] = []
        while num_tokens > 0:
            pieces.append(self.next(num_tokens))
            num_tokens -= pieces[-1].stop - pieces[-1].start
        return pieces

    def next(self, most: int) -> TextPiece:
        """Return the next piece, or up to `most` tokens of it."""
        document, begin, end = self._piece(self._index)
        start = begin + self.offset
        stop = min(start + most, end)
        self.taken += stop - start
        self.offset += stop - start
        if stop == end:
            self._index, self.offset = self._index + 1, 0
            if self._index == self._num_pieces:
                self._enter(self._epoch + 1)
        return TextPiece(document, start, stop)

    def state(self) -> Position:
        """Return the position of the next token; `load` on a stream of the same corpus continues there."""
        return {**self._corpus, "epoch": self._epoch, "index": self._index, "offset": self.offset,
                "tokens": self.taken}

    def load(self, state: Mapping[str, Any]) -> None:
        if "sources" in state:
            raise _other_mix(state, None)
        seed, epoch, index, offset, taken = (
            _whole(state, name) for name in ("seed", "epoch", "index", "offset", "tokens"))
        if seed != self._seed:
            raise UserError(f"data.seed is {self._seed} but the checkpoint's is {seed}, so the order would change; "
                            f"set data.seed to {seed}")
        if any(state.get(name) != value for name, value in self._corpus.items()):
            raise UserError(
                f"the checkpoint's {self._name} has {state.get('num_documents')} documents of "
                f"{state.get('num_tokens')} tokens, this one {self._corpus['num_documents']} of "
                f"{self._corpus['num_tokens']}, or others than those; give the same [data], or begin "
                "anew from the weights alone with model.load")
        if epoch != self._epoch:
            self._enter(epoch)
        _, begin, end = self._piece(index) if index < self._num_pieces else (0, 0, 0)
        if offset >= end - begin:
            raise UserError(f"the saved data position, document {index} of the epoch at token {offset}, is outside "
                            "the corpus; use another checkpoint")
        self._index, self.offset, self.taken = index, offset, taken

    def _piece(self, index: int) -> tuple[int, int, int]:
        """Return the document, begin and end of a piece of this epoch."""
        piece = int(self._order[index])
        if self._stops is None:
            return piece, 0, int(self._lengths[piece])
        document = int(np.searchsorted(self._stops, piece, side="right"))
        begin = (piece - (int(self._stops[document - 1]) if document else 0)) * self._longest
        return document, begin, min(begin + self._longest, int(self._lengths[document]))

    def _enter(self, epoch: int) -> None:
        order = np.random.default_rng([self._seed, epoch]).permutation(self._num_pieces)
        self._order = order.astype(np.min_scalar_type(self._num_pieces))
        self._epoch, self._index, self.offset = epoch, 0, 0


class Mix(Stream):
    """An endless stream of several sources, in which each has the share of tokens that its weight says.

    The next piece is always of the source with the fewest tokens so far for its weight. So every share is met to within
    the longest pieces of the sources, and cuts between batches change nothing.
    """

    def __init__(self, corpus: JoinedCorpus, *, seed: int, max_document: int) -> None:
        self._streams = [
            Stream(part.lengths(), seed=seed, max_document=max_document, name=f"source {number} of data.mix")
            for number, part in enumerate(corpus.parts, 1)]
        self._weights, self._firsts = list(corpus.weights), corpus.firsts

    def next(self, most: int) -> TextPiece:
        """Return the next piece, or up to `most` tokens of it."""
        source = min(range(len(self._streams)), key=lambda one: (
            not self._streams[one].offset, self._streams[one].taken / self._weights[one]))  # a piece is finished first
        piece = self._streams[source].next(most)
        return piece._replace(document=piece.document + self._firsts[source])

    def state(self) -> Position:
        return {"weights": self._weights, "sources": [stream.state() for stream in self._streams]}

    def load(self, state: Mapping[str, Any]) -> None:
        sources, weights = state.get("sources"), state.get("weights")
        if not isinstance(sources, list) or len(sources) != len(self._streams) or weights != self._weights:
            raise _other_mix(state, self._weights)
        for stream, one in zip(self._streams, sources, strict=True):
            stream.load(one)


def _other_mix(state: Mapping[str, Any], weights: Sequence[float] | None) -> UserError:
    saved, ours = (f"data.mix with the weights {one}" if one else "one source without data.mix"
                   for one in (state.get("weights"), weights))
    return UserError(f"the checkpoint's data is {saved}, this run's {ours}; give the same sources with the same "
                     "weights, or begin anew from the weights alone with model.load")


def _whole(state: Mapping[str, Any], name: str) -> int:
    value = state.get(name)
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise UserError(f"the saved data position has {name} {value!r}, not a whole number of at least 0; use another "
                        "checkpoint")
    return value


@dataclass(frozen=True, slots=True, eq=False)
class TrainingRow:
    """One rank's packed tokens of a micro-batch, or of its ping or pong."""

    tokens: torch.Tensor     # [tokens] int64
    labels: torch.Tensor     # [tokens] int64: the document's next token; -100 if there is none or it is not in the loss
    positions: torch.Tensor  # [tokens] int64: position in the document
    reads: tuple[tuple[int, int], ...] = ()  # tokens [start, stop) of ping's row whose keys pong's queries read


Documents = list[list[TextPiece]]  # [micro-batch][document]


class Loader:
    """Takes the documents of one batch after another, and reads this data rank's rows.

    Loaders that differ only in `rank` take the same documents. The vocabulary of `model` must contain every token.
    """

    def __init__(self, corpus: Corpus, settings: Settings, *, rank: int, world: int, model: ModelShape) -> None:
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
        self.corpus, self.settings, self.model, self.rank, self.world = corpus, settings, model, rank, world
        seed, max_document = settings.data.seed, settings.data.max_document
        self._stream = (Mix(corpus, seed=seed, max_document=max_document)
                        if isinstance(corpus, JoinedCorpus) and corpus.weights else
                        Stream(lengths, seed=seed, max_document=max_document))
        self.start = self._stream.state()

    def check(self, position: Mapping[str, Any]) -> Position:
        """Return a checkpoint's position; raise a UserError if it belongs to another corpus."""
        self._stream.load(position)
        return self._stream.state()

    def epochs(self, position: Position) -> tuple[float, ...]:
        """Return how often each source's tokens have been taken up to a position."""
        return tuple(one["tokens"] / one["num_tokens"] for one in position.get("sources", [position]))

    def take(self, position: Position) -> tuple[Documents, Position]:
        """Return the documents of the batch at a position, for all data ranks, and the position of the next batch."""
        self._stream.load(position)
        batch = self.settings.batch
        documents = [self._stream.take(self.world * batch.tokens_per_rank) for _ in range(batch.micro_batches)]
        return documents, self._stream.state()

    def num_labels(self, documents: Documents) -> int:
        """Return a batch's number of labels over all ranks: tokens in the loss, except a document's first token."""
        every = [piece for pieces in documents for piece in pieces]
        masks = (self.corpus.in_loss(piece.document) for piece in every)
        return sum(piece.stop - piece.start - 1 if mask is None else
                   int(np.count_nonzero(mask[piece.start + 1:piece.stop]))
                   for piece, mask in zip(every, masks, strict=True))

    def rows(self, micro_batches: Sequence[MicroBatch], documents: Documents) -> tuple[tuple[TrainingRow, ...], ...]:
        """Return this rank's rows [micro-batch][nano-batch] of the documents, as the layouts place them."""
        return tuple(
            tuple(TrainingRow(*self._columns(nano, pieces), micro_batch.key_runs(number, self.rank))
                  for number, nano in enumerate(micro_batch.nano_batches))
            for micro_batch, pieces in zip(micro_batches, documents, strict=True))

    def _columns(self, nano: NanoBatch, pieces: list[TextPiece]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return tokens, labels and positions of this rank's slices; a slice's last label is the token after it."""
        layout = nano.layout
        mine = layout.rank == self.rank
        tokens, labels, positions = [], [], []
        for document, start, stop in zip(*(column[mine].tolist() for column in (
                layout.document, layout.start, layout.stop)), strict=True):
            piece = pieces[nano.document[document]]
            begin, ends = piece.start + start, stop == piece.stop - piece.start
            read = self._read(piece.document, begin, piece.start + stop + (not ends))
            in_loss = self.corpus.in_loss(piece.document)
            targets = read[1:] if in_loss is None else np.where(in_loss[begin + 1:begin + len(read)], read[1:], IGNORED)
            tokens.append(read[:stop - start])
            labels += [targets, np.full(int(ends), IGNORED)]
            positions.append(np.arange(start, stop))
        columns = [torch.from_numpy(np.concatenate(column)) for column in (tokens, labels, positions)]
        return columns[0], columns[1], columns[2]

    def _read(self, document: int, start: int, stop: int) -> np.ndarray:
        tokens = self.corpus.tokens(document)[start:stop].astype(np.int64)
        outside = tokens[(tokens < 0) | (tokens >= self.model.vocab)]
        if len(tokens) != stop - start or len(outside):
            what = f"holds token {outside[0]}" if len(outside) else f"ends before token {stop}"
            raise UserError(f"document {document} of the corpus {what}, where model {self.model.name!r} knows tokens "
                            f"0 to {self.model.vocab - 1}; give the data that its tokenizer made")
        return tokens
