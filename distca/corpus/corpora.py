"""Real documents as tokens.

Packing needs to know every document's length before it reads one token, and needs any token of any document later, so
a corpus answers just that. Most sources are read and tokenized once and then held in memory, every rank for itself: two
bytes a token where the vocabulary has at most 65,536 tokens and four otherwise, one more where a document says what is
in the loss, eight a document, and a quarter more of it all while it grows. The texts themselves are never held. What
does not fit belongs in a Megatron dataset, which is memory-mapped.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from time import perf_counter
from typing import Protocol

import numpy as np

from distca.corpus.chat import encoded_chats, load_chat_template
from distca.corpus.megatron_files import MegatronCorpus
from distca.corpus.sources import (
    FIELDS,
    messages_of,
    records,
    standard_library_files,
    text_files,
    texts_of,
    tokens_of,
    whole_files,
)
from distca.corpus.tokenizers import Tokens, byte_encoder, encoded, load_tokenizer, open_tokenizer
from distca.spec import unknown_name
from distca.train.settings import SOURCES, Settings
from distca.validation import UserError

MAX_TOKEN = 2**31 - 1
_GROWTH = 1.25
_FIRST_WORD_SECONDS = 1.0  # of reading; then at every doubling
LOG = logging.getLogger("distca")


class Corpus(Protocol):
    """Documents by number. Lengths count every token, an end-of-document token included."""

    @property
    def num_documents(self) -> int: ...

    @property
    def vocab(self) -> int | None:
        """Every token is below this; None where only reading all of them could tell."""

    def lengths(self) -> np.ndarray:
        """[documents] tokens of each."""

    def tokens(self, document: int) -> np.ndarray:
        """[length] of one document, any integer type."""

    def in_loss(self, document: int) -> np.ndarray | None:
        """[length] bool, the tokens of one document that the model is to predict; None where it is all of them."""


@dataclass(frozen=True, slots=True, eq=False)
class MemoryCorpus:
    """All documents in one array."""

    data: np.ndarray   # [tokens]
    stops: np.ndarray  # [documents] where each ends in `data`
    vocab: int | None
    loss: np.ndarray | None = None  # [tokens] bool, those in the loss; None for all

    def __post_init__(self) -> None:
        for column in (self.data, self.stops, self.loss):
            if column is not None:
                column.setflags(write=False)

    @property
    def num_documents(self) -> int:
        return len(self.stops)

    def lengths(self) -> np.ndarray:
        return np.diff(self.stops, prepend=0)

    def tokens(self, document: int) -> np.ndarray:
        return self.data[self._place(document)]

    def in_loss(self, document: int) -> np.ndarray | None:
        return None if self.loss is None else self.loss[self._place(document)]

    def _place(self, document: int) -> slice:
        return slice(int(self.stops[document - 1]) if document else 0, int(self.stops[document]))


@dataclass(frozen=True, slots=True, eq=False)
class PartOfCorpus:
    """Some documents of another corpus, numbered anew."""

    whole: Corpus
    documents: np.ndarray  # [documents] their numbers there

    @property
    def num_documents(self) -> int:
        return len(self.documents)

    @property
    def vocab(self) -> int | None:
        return self.whole.vocab

    def lengths(self) -> np.ndarray:
        return self.whole.lengths()[self.documents]

    def tokens(self, document: int) -> np.ndarray:
        return self.whole.tokens(int(self.documents[document]))

    def in_loss(self, document: int) -> np.ndarray | None:
        return self.whole.in_loss(int(self.documents[document]))


def corpus_from(settings: Settings) -> Corpus:
    """The corpus that the [data] settings name; whatever is wrong with it is a ValueError of one line."""
    data = settings.data
    path = data.path
    if data.source not in SOURCES:
        raise unknown_name("data.source", data.source, SOURCES)
    if data.source == "stdlib":
        stdlib = byte_encoder()
        vocab = _vocab(data.vocab, stdlib.vocab, "bytes")
        return in_memory(encoded(whole_files(standard_library_files()), stdlib), vocab, "the standard library")
    if not path:
        raise UserError(f"data.path is empty but data.source is {data.source!r}; name the file or folder to read")
    field = data.field or FIELDS[data.content]
    if data.source == "megatron" or data.content == "tokens":
        known = (open_tokenizer(data.tokenizer, "data.tokenizer", special_tokens=False).vocab if data.tokenizer
                 else None)
        vocab = _vocab(data.vocab, known, data.tokenizer)
        if data.source == "megatron":
            return MegatronCorpus.open(path, vocab)
        return in_memory(tokens_of(records(data, path), field), vocab, path)
    if data.content == "chat":
        tokenizer = open_tokenizer(data.tokenizer, "data.tokenizer", special_tokens=False)
        template = load_chat_template(data.tokenizer)
        chats = encoded_chats(messages_of(records(data, path), field), template, tokenizer)
        return in_memory(chats, _vocab(data.vocab, tokenizer.vocab, data.tokenizer), path)
    encoder = load_tokenizer(data.tokenizer) if data.tokenizer else byte_encoder()
    texts = text_files(path) if data.source == "text" else texts_of(records(data, path), field)
    return in_memory(encoded(texts, encoder), _vocab(data.vocab, encoder.vocab, data.tokenizer or "bytes"), path)


def in_memory(documents: Iterable[Tokens], vocab: int | None, name: str) -> MemoryCorpus:
    """The documents as they come; those without a token, or without one in the loss, are left out."""
    data = _Column(np.dtype(np.uint16 if vocab is not None and vocab <= 2**16 else np.int32))
    stops, loss, without = _Column(np.dtype(np.int64)), _Column(np.dtype(np.bool_)), 0
    for ids, in_loss in _with_progress(documents, name):
        if in_loss is not None and not in_loss[1:].any():
            without += 1
            continue
        if len(ids) == 0:
            continue
        most = MAX_TOKEN if vocab is None else vocab - 1
        if ids.min() < 0 or ids.max() > most:
            outside = ids[(ids < 0) | (ids > most)][0]
            raise UserError(f"document {stops.size} of {name} holds token {outside}, where tokens are 0 to {most}; "
                            "give the tokenizer that made them as data.tokenizer, or a larger data.vocab")
        if in_loss is not None and loss.size < data.size:
            loss.append(np.ones(data.size - loss.size, dtype=np.bool_))
        data.append(ids)
        stops.append(np.array([data.size]))
        if in_loss is not None:
            loss.append(in_loss)
    if stops.size == 0:
        missing = "in the loss" if without else "in it"
        raise UserError(f"{name} holds no document with a token {missing}; give at least one")
    if without:
        LOG.info("%s: %d of %d documents have no token in the loss and are left out", name, without,
                 without + stops.size)
    if loss.size:
        loss.append(np.ones(data.size - loss.size, dtype=np.bool_))
    return MemoryCorpus(data.array(), stops.array(), vocab, loss.array() if loss.size else None)


class _Column:
    """An array that grows in place, a quarter at a time."""

    def __init__(self, dtype: np.dtype) -> None:
        self._values, self.size = np.empty(1024, dtype), 0

    def append(self, values: np.ndarray) -> None:
        stop = self.size + len(values)
        if stop > len(self._values):
            self._values.resize(max(stop, int(_GROWTH * len(self._values))), refcheck=False)
        self._values[self.size:stop] = values
        self.size = stop

    def array(self) -> np.ndarray:
        self._values.resize(self.size, refcheck=False)
        return self._values


def _with_progress(documents: Iterable[Tokens], name: str) -> Iterator[Tokens]:
    """The documents; a line now and then where reading them takes longer than a second."""
    start, due, num_tokens = perf_counter(), _FIRST_WORD_SECONDS, 0
    for number, tokens in enumerate(documents, start=1):
        num_tokens += len(tokens.ids)
        yield tokens
        seconds = perf_counter() - start
        if seconds >= due:
            LOG.info("reading %s: %s documents, %s tokens after %.0f s", name, f"{number:,}", f"{num_tokens:,}",
                     seconds)
            due = 2 * seconds


def _vocab(given: int, known: int | None, made_by: str) -> int | None:
    """The vocabulary that `data.vocab` says, or its tokenizer; None where neither does."""
    if given and known is not None and given < known:
        raise UserError(f"data.vocab is {given} but {made_by!r} makes {known} different tokens; give at least as "
                        "many, or 0")
    return given or known


def corpora(settings: Settings) -> tuple[Corpus, Corpus | None]:
    """What is trained on, and what is held out, if anything is."""
    whole, chosen = corpus_from(settings), settings.eval
    if chosen.path:
        return whole, corpus_from(settings.with_values({"data.path": chosen.path, "data.split": ""}))
    if not chosen.fraction:
        return whole, None
    held = held_out(whole.num_documents, chosen.fraction, settings.data.seed)
    for what, count in (("held out", held.sum()), ("left to train on", (~held).sum())):
        if count == 0:
            raise UserError(f"eval.fraction is {chosen.fraction}, by which none of {whole.num_documents} documents is "
                            f"{what}; choose another fraction, or give eval.path")
    return PartOfCorpus(whole, np.flatnonzero(~held)), PartOfCorpus(whole, np.flatnonzero(held))


def held_out(num_documents: int, fraction: float, seed: int) -> np.ndarray:
    """[documents] whether each is held out, by a hash (SplitMix64) of its number and the seed."""
    key = _mixed(np.array([seed], dtype=np.uint64))
    hashed = _mixed(np.arange(num_documents, dtype=np.uint64) + key)
    return (hashed >> np.uint64(11)) * 2.0**-53 < fraction


def _mixed(values: np.ndarray) -> np.ndarray:
    """SplitMix64's output function, modulo 2**64."""
    values = (values + np.uint64(0x9E3779B97F4A7C15))
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))
