"""Load data: take the documents of a batch from a corpus, and read one rank's rows as a plan's layouts place them.

Batches are consecutive tokens of one endless stream of shuffled documents. A checkpoint therefore saves only the
position in the stream, which is valid for any number of ranks. Every rank takes the same documents and reads only the
tokens that are placed on it.

A document is cut at the end of a micro-batch and after `max_document` tokens. The rest becomes a separate document:
there is no attention and no label across a cut. After its last document, the corpus repeats in a new order, also in the
middle of a batch.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch

from distca.corpus.corpora import Corpus, hold_out, open_corpus
from distca.planning.step import MicroBatch
from distca.spec import ModelShape, unknown_name
from distca.train.settings import MODES, Settings
from distca.validation import UserError
from distca.workload.documents import IGNORED
from distca.workload.packing import NanoBatch

Position = dict[str, int | str]  # the stream's next token, and figures that identify the corpus


def open_corpora(settings: Settings) -> tuple[Corpus, Corpus | None]:
    """Open the training documents and the held-out documents, if there are any."""
    data, chosen = settings.data, settings.eval
    opened = partial(open_corpus, data.source, content=data.content, field=data.field, tokenizer=data.tokenizer,
                     vocab=data.vocab)
    whole = opened(data.path, split=data.split)
    if chosen.path:
        return whole, opened(chosen.path)
    return hold_out(whole, chosen.fraction, data.seed) if chosen.fraction else (whole, None)


class TextPiece(NamedTuple):
    """Tokens [start, stop) of a corpus document, which the model sees as one document."""

    document: int
    start: int
    stop: int


class Stream:
    """An endless stream of a corpus's documents, shuffled anew in every epoch.

    Documents longer than `max_document` are cut into pieces, which are shuffled like documents.
    """

    def __init__(self, lengths: np.ndarray, *, seed: int, max_document: int = 0) -> None:
        for field, value in (("data.seed", seed), ("data.max_document", max_document)):
            if isinstance(value, bool) or not isinstance(value, int) or value < 0:
                raise UserError(f"{field} is {value!r}; give a whole number of at least 0")
        lengths = np.ascontiguousarray(lengths, dtype=np.int64)
        if not lengths.any():
            raise UserError(f"the corpus has {len(lengths)} documents and no token; give at least one document")
        longest = max_document or int(lengths.max())
        count = -(-lengths // longest)                           # [documents] number of pieces
        self._document = np.repeat(np.arange(len(count)), count)  # [pieces]
        self._begin = (np.arange(len(self._document)) - np.repeat(np.cumsum(count) - count, count)) * longest
        self._end = np.minimum(self._begin + longest, lengths[self._document])
        self._seed = seed
        self._corpus: Position = {
            "seed": seed, "max_document": max_document, "num_documents": len(lengths),
            "num_tokens": int(lengths.sum()),
            "lengths_digest": hashlib.blake2b(lengths.tobytes(), digest_size=8).hexdigest()}
        self._taken = 0                                          # tokens since the start of the run
        self._epoch, self._index, self._offset = -1, 0, 0
        self._enter(0)

    def take(self, num_tokens: int) -> list[TextPiece]:
        """Return the next pieces, with `num_tokens` tokens in total."""
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

    def state(self) -> Position:
        """Return the position of the next token; `load` on a stream of the same corpus continues there."""
        return {**self._corpus, "epoch": self._epoch, "index": self._index, "offset": self._offset,
                "tokens": self._taken}

    def load(self, state: Mapping[str, Any]) -> None:
        seed, epoch, index, offset, taken = (
            _whole(state, name) for name in ("seed", "epoch", "index", "offset", "tokens"))
        if seed != self._seed:
            raise UserError(f"data.seed is {self._seed} but the checkpoint's is {seed}, so the order would change; "
                            f"set data.seed to {seed}")
        if any(state.get(name) != value for name, value in self._corpus.items()):
            raise UserError(
                f"the checkpoint's corpus has {state.get('num_documents')} documents of {state.get('num_tokens')} "
                f"tokens, this one {self._corpus['num_documents']} of {self._corpus['num_tokens']}, or others than "
                "those; give the same [data], or begin anew from the weights alone with model.load")
        if epoch != self._epoch:
            self._enter(epoch)
        if index >= len(self._order) or offset >= (self._end - self._begin)[self._order[index]]:
            raise UserError(f"the saved data position, document {index} of the epoch at token {offset}, is outside "
                            "the corpus; use another checkpoint")
        self._index, self._offset, self._taken = index, offset, taken

    def _enter(self, epoch: int) -> None:
        self._order = np.random.default_rng([self._seed, epoch]).permutation(len(self._document))
        self._epoch, self._index, self._offset = epoch, 0, 0


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
        self._stream = Stream(lengths, seed=settings.data.seed, max_document=settings.data.max_document)
        self.start = self._stream.state()

    def check(self, position: Mapping[str, Any]) -> Position:
        """Return a checkpoint's position; raise a UserError if it belongs to another corpus."""
        self._stream.load(position)
        return self._stream.state()

    def take(self, position: Position) -> tuple[Documents, Position]:
        """Return the documents of the batch at a position, for all data ranks, and the position of the next batch."""
        self._stream.load(position)
        batch = self.settings.batch
        documents = [self._stream.take(self.world * batch.tokens_per_rank) for _ in range(batch.micro_batches)]
        return documents, self._stream.state()

    def num_labels(self, documents: Documents) -> int:
        """Return a batch's number of labels over all ranks: tokens in the loss, except a document's first token."""
        return sum(self._num_labels(piece) for pieces in documents for piece in pieces)

    def rows(self, micro_batches: Sequence[MicroBatch], documents: Documents) -> tuple[tuple[TrainingRow, ...], ...]:
        """Return this rank's rows [micro-batch][nano-batch] of the documents, as the layouts place them."""
        return tuple(
            tuple(TrainingRow(*self._columns(nano, pieces), micro_batch.key_runs(number, self.rank))
                  for number, nano in enumerate(micro_batch.nano_batches))
            for micro_batch, pieces in zip(micro_batches, documents, strict=True))

    def _num_labels(self, piece: TextPiece) -> int:
        in_loss = self.corpus.in_loss(piece.document)
        if in_loss is None:
            return piece.stop - piece.start - 1
        return int(np.count_nonzero(in_loss[piece.start + 1:piece.stop]))

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
