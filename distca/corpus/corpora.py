"""Open documents as tokens for training: the standard library, texts, JSON lines, tables, and Megatron datasets.

Packing needs the length of every document first, and tokens of arbitrary documents later. So every rank reads and
tokenizes most sources once and keeps the tokens in memory: 2 bytes per token if the vocabulary has at most 65,536
tokens and 4 otherwise, 1 more if documents have a loss mask, 8 per document, and up to an eighth more while the arrays
grow. Texts are not kept. A corpus that does not fit belongs in a Megatron dataset, which is memory-mapped.
"""

from __future__ import annotations

import logging
import struct
from array import array
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import starmap
from pathlib import Path
from time import perf_counter
from typing import Protocol

import numpy as np

from distca.corpus.chat import encoded_chats, load_chat_template, messages_of
from distca.corpus.files import standard_library_files, text_files, whole_file
from distca.corpus.tables import Record, json_records, table_records
from distca.corpus.tokenizers import END_OF_DOCUMENT, Text, Tokens, encoded, open_tokenizer
from distca.spec import unknown_name
from distca.validation import UserError, short
from distca.workload.documents import IGNORED

SOURCES = ("stdlib", "text", "jsonl", "table", "megatron")
FIELDS = {"text": "text", "chat": "messages", "tokens": "input_ids"}  # kind of content -> default key or column
MASK_FIELDS = ("loss_mask", "labels")  # keys of a loss mask beside the tokens; the first that exists is used
MAX_TOKEN = 2**31 - 1
LOG = logging.getLogger("distca")

_FIRST_REPORT_SECONDS = 1.0   # progress is logged after this time, then each time that the time has doubled
_MAGIC, _VERSION = b"MMIDIDX\x00\x00", 1
_TOKEN_TYPES = {1: np.uint8, 2: np.int8, 3: np.int16, 4: np.int32, 5: np.int64, 8: np.uint16}


class Corpus(Protocol):
    """Documents by number. Lengths count every token, an end-of-document token included."""

    @property
    def vocab(self) -> int | None:
        """Upper bound of all tokens, exclusive; None if unknown."""

    def lengths(self) -> np.ndarray:
        """Return the number of tokens of each document, [documents]."""

    def tokens(self, document: int) -> np.ndarray:
        """Return the tokens of one document, [length] of any integer type."""

    def in_loss(self, document: int) -> np.ndarray | None:
        """Return which tokens of one document are in the loss, [length] bool; None if all are."""


@dataclass(frozen=True, slots=True, eq=False)
class MemoryCorpus:
    """All documents in one array."""

    data: np.ndarray   # [tokens]
    stops: np.ndarray  # [documents] end of each in `data`
    vocab: int | None
    loss: np.ndarray | None = None  # [tokens] bool, whether a token is in the loss; None if all are

    def __post_init__(self) -> None:
        for column in (self.data, self.stops, self.loss):
            if column is not None:
                column.setflags(write=False)

    def lengths(self) -> np.ndarray:
        return np.diff(self.stops, prepend=0)

    def tokens(self, document: int) -> np.ndarray:
        return self.data[self._slice(document)]

    def in_loss(self, document: int) -> np.ndarray | None:
        return None if self.loss is None else self.loss[self._slice(document)]

    def _slice(self, document: int) -> slice:
        return slice(int(self.stops[document - 1]) if document else 0, int(self.stops[document]))


@dataclass(frozen=True, slots=True, eq=False)
class PartOfCorpus:
    """Some documents of another corpus, numbered from 0."""

    whole: Corpus
    documents: np.ndarray  # [documents] number of each in `whole`

    @property
    def vocab(self) -> int | None:
        return self.whole.vocab

    def lengths(self) -> np.ndarray:
        return self.whole.lengths()[self.documents]

    def tokens(self, document: int) -> np.ndarray:
        return self.whole.tokens(int(self.documents[document]))

    def in_loss(self, document: int) -> np.ndarray | None:
        return self.whole.in_loss(int(self.documents[document]))


@dataclass(frozen=True, slots=True, eq=False)
class MegatronCorpus:
    """A memory-mapped .bin/.idx dataset; a document consists of one or several sequences."""

    data: np.ndarray          # [bytes] of the .bin file
    vocab: int | None
    dtype: np.dtype
    sequence_len: np.ndarray  # [sequences] tokens
    begins: np.ndarray        # [sequences] offset of each in `data`
    documents: np.ndarray     # [documents + 1] first sequence of each document, then the number of sequences

    def lengths(self) -> np.ndarray:
        before = np.concatenate([[0], np.cumsum(self.sequence_len, dtype=np.int64)])
        return np.diff(before[self.documents])

    def tokens(self, document: int) -> np.ndarray:
        parts = [self.data[self.begins[one]:][:int(self.sequence_len[one]) * self.dtype.itemsize].view(self.dtype)
                 for one in range(self.documents[document], self.documents[document + 1])]
        return parts[0] if len(parts) == 1 else np.concatenate([np.empty(0, self.dtype), *parts])

    def in_loss(self, document: int) -> np.ndarray | None:
        return None


def open_corpus(
    source: str, path: str = "", *, content: str = "text", field: str = "", split: str = "", tokenizer: str = "",
    vocab: int = 0,
) -> Corpus:
    """Open the corpus of the settings [data]; parameters have the names of its fields."""
    if source not in SOURCES:
        raise unknown_name("data.source", source, SOURCES)
    if source == "stdlib":
        texts = starmap(Text, map(whole_file, standard_library_files()))
        return in_memory(encoded(texts, None), _vocab(vocab, END_OF_DOCUMENT + 1, "bytes"), "the standard library")
    if not path:
        raise UserError(f"data.path is empty but data.source is {source!r}; name the file or folder to read")
    has_texts, is_chat = (source != "megatron" and content == kind for kind in ("text", "chat"))
    opened = (open_tokenizer(tokenizer, "data.tokenizer", special_tokens=has_texts) if tokenizer or is_chat else None)
    known = opened.vocab if opened else END_OF_DOCUMENT + 1 if has_texts else None
    checked_vocab = _vocab(vocab, known, tokenizer or "bytes")
    if source == "megatron":
        return open_megatron(path, checked_vocab)
    field = field or FIELDS[content]
    beside = MASK_FIELDS if content == "tokens" else ()
    records = json_records(path) if source == "jsonl" else table_records(path, split, field, beside)
    if content == "tokens":
        documents = _tokens_of(records, field)
    elif opened is not None and is_chat:
        documents = encoded_chats(messages_of(records, field), load_chat_template(tokenizer), opened)
    else:
        documents = encoded(starmap(Text, text_files(path)) if source == "text" else _texts_of(records, field), opened)
    return in_memory(documents, checked_vocab, path)


def in_memory(documents: Iterable[Tokens], vocab: int | None, name: str) -> MemoryCorpus:
    """Collect the documents in order, without those that have no token or no token in the loss."""
    dtype, code = (np.uint16, "H") if vocab is not None and vocab <= 2**16 else (np.int32, "i")
    data, stops, loss, num_without = array(code), array("q"), bytearray(), 0
    most = MAX_TOKEN if vocab is None else vocab - 1
    for ids, in_loss in _with_progress(documents, name):
        if in_loss is not None and not in_loss[1:].any():
            num_without += 1
            continue
        if len(ids) == 0:
            continue
        if ids.min() < 0 or ids.max() > most:
            outside = ids[(ids < 0) | (ids > most)][0]
            raise UserError(f"document {len(stops)} of {name} holds token {outside}, where tokens are 0 to {most}; "
                            "give the tokenizer that made them as data.tokenizer, or a larger data.vocab")
        if in_loss is not None:
            loss += b"\1" * (len(data) - len(loss)) + in_loss.tobytes()
        data.frombytes(ids.astype(dtype).tobytes())
        stops.append(len(data))
    if not stops:
        missing = "in the loss" if num_without else "in it"
        raise UserError(f"{name} holds no document with a token {missing}; give at least one")
    if num_without:
        LOG.info("%s: %d of %d documents have no token in the loss and are left out", name, num_without,
                 num_without + len(stops))
    if loss:
        loss += b"\1" * (len(data) - len(loss))
    return MemoryCorpus(np.frombuffer(data, dtype), np.frombuffer(stops, np.int64), vocab,
                        np.frombuffer(loss, np.bool_) if loss else None)


def hold_out(whole: Corpus, fraction: float, seed: int) -> tuple[Corpus, Corpus]:
    """Divide a corpus into the documents to train on and those to evaluate on."""
    num_documents = len(whole.lengths())
    held = held_out(num_documents, fraction, seed)
    for what, count in (("held out", held.sum()), ("left to train on", (~held).sum())):
        if count == 0:
            raise UserError(f"eval.fraction is {fraction}, by which none of {num_documents} documents is "
                            f"{what}; choose another fraction, or give eval.path")
    return PartOfCorpus(whole, np.flatnonzero(~held)), PartOfCorpus(whole, np.flatnonzero(held))


def held_out(num_documents: int, fraction: float, seed: int) -> np.ndarray:
    """Return which documents are held out, [documents] bool, by a hash (SplitMix64) of their number and the seed."""
    key = _splitmix(np.array([seed], dtype=np.uint64))
    hashed = _splitmix(np.arange(num_documents, dtype=np.uint64) + key)
    return (hashed >> np.uint64(11)) * 2.0**-53 < fraction


def _splitmix(values: np.ndarray) -> np.ndarray:
    """Apply SplitMix64's output function, modulo 2**64."""
    values = values + np.uint64(0x9E3779B97F4A7C15)
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))


def _vocab(given: int, known: int | None, made_by: str) -> int | None:
    """Return data.vocab if it is given, else the size of the tokenizer's vocabulary; None if neither is known."""
    if given and known is not None and given < known:
        raise UserError(f"data.vocab is {given} but {made_by!r} makes {known} different tokens; give at least as "
                        "many, or 0")
    return given or known


def _with_progress(documents: Iterable[Tokens], name: str) -> Iterator[Tokens]:
    """Yield the documents; log the progress if reading takes longer than a second."""
    start, due, num_tokens = perf_counter(), _FIRST_REPORT_SECONDS, 0
    for number, tokens in enumerate(documents, start=1):
        num_tokens += len(tokens.ids)
        yield tokens
        seconds = perf_counter() - start
        if seconds >= due:
            LOG.info("reading %s: %s documents, %s tokens after %.0f s", name, f"{number:,}", f"{num_tokens:,}",
                     seconds)
            due = 2 * seconds


def _texts_of(records: Iterable[Record], field: str) -> Iterator[Text]:
    for record in records:
        try:
            yield Text(record.where, record.value(field, str, "text").encode("utf-8"))
        except UnicodeEncodeError:
            raise UserError(f"{record.where} has half a surrogate pair under {field!r}; repair or drop it") from None


def _tokens_of(records: Iterable[Record], field: str) -> Iterator[Tokens]:
    """Yield documents of tokens; all of these are in the loss, unless `loss_mask` or `labels` select some."""
    for record in records:
        ids = _whole_numbers(record, field)
        mask_field = next((name for name in MASK_FIELDS if record.fields.get(name) is not None), None)
        if mask_field is None:
            yield Tokens(ids, None)
            continue
        mask = _whole_numbers(record, mask_field)
        if len(mask) != len(ids):
            raise UserError(f"{record.where} has {len(ids)} tokens under {field!r} but {len(mask)} under "
                            f"{mask_field!r}; give one for each token")
        in_loss = mask != (IGNORED if mask_field == "labels" else 0)
        wrong = in_loss & (mask != (ids if mask_field == "labels" else 1))
        if wrong.any():
            known = f"the token itself or {IGNORED}" if mask_field == "labels" else "0 or 1"
            raise UserError(f"{record.where} has {mask[wrong][0]} under {mask_field!r} at token {wrong.argmax()}; "
                            f"give {known}, not yet shifted")
        yield Tokens(ids, in_loss)


def _whole_numbers(record: Record, field: str) -> np.ndarray:
    value = record.fields.get(field)
    try:
        column = np.asarray(value)
    except ValueError:  # lists of different lengths
        column = np.empty(0, dtype=object)
    if isinstance(value, list | np.ndarray) and len(value) == 0:
        return np.empty(0, dtype=np.int64)
    if column.ndim != 1 or column.dtype.kind not in "iub":
        raise UserError(f"{record.where} has {short(value)} under {field!r}, not a list of whole numbers; its keys "
                        f"are {short(list(record.fields))}: set data.field to the one that holds tokens")
    return column.astype(np.int64)


def open_megatron(path: str, vocab: int | None = None) -> MegatronCorpus:
    """Open a Megatron dataset by its path, with or without .bin or .idx at the end.

    A truncated copy would be read as wrong documents, so the index is checked against the sizes of both files.
    """
    prefix = path[:-4] if path.endswith((".bin", ".idx")) else path
    index_path, data_path = Path(prefix + ".idx"), Path(prefix + ".bin")
    for file in (index_path, data_path):
        if not file.is_file():
            raise UserError(f"data.path is {path!r} but {file} is no file; a Megatron dataset needs .idx and .bin")
    corpus = MegatronCorpus(_mapped(data_path), vocab, *_read_index(index_path))
    data, lengths, begins = corpus.data, corpus.sequence_len, corpus.begins
    if (begins < 0).any() or (lengths < 0).any():
        raise _truncated(index_path, "holds a negative length or pointer")
    end = int((begins + lengths.astype(np.int64) * corpus.dtype.itemsize).max(initial=0))
    if end > len(data):
        raise _truncated(data_path, f"holds {len(data)} bytes but {index_path.name} points up to byte {end}")
    if not lengths.any():
        raise UserError(f"{prefix} holds no document with a token in it; give at least one")
    return corpus


def _read_index(path: Path) -> tuple[np.dtype, np.ndarray, np.ndarray, np.ndarray]:
    """Return the type of tokens, the lengths and offsets of sequences, and the first sequence of each document."""
    content = _mapped(path)
    if content[:len(_MAGIC)].tobytes() != _MAGIC:
        raise UserError(f"{path} does not begin with {_MAGIC[:7].decode()}, as every index does that Megatron has "
                        "written since 2019; preprocess the text again")
    header = struct.Struct(f"<{len(_MAGIC)}sQBQQ")
    if len(content) < header.size:
        raise _truncated(path, f"holds {len(content)} bytes, less than a header of {header.size}")
    _, version, code, sequences, bounds = header.unpack(content[:header.size].tobytes())
    if version != _VERSION:
        raise UserError(f"{path} is of version {version}; only version {_VERSION} is known: preprocess the text again")
    if code not in _TOKEN_TYPES:
        known = ", ".join(f"{number} ({np.dtype(kind).name})" for number, kind in _TOKEN_TYPES.items())
        raise UserError(f"{path} gives its tokens the type code {code}; tokens are one of {known}")
    size = header.size + 12 * sequences + 8 * bounds
    if sequences and len(content) == size + sequences:
        raise UserError(f"{path} is multimodal: it has a mode for each sequence; give a dataset of text alone")
    if len(content) != size:
        raise _truncated(path, f"holds {len(content)} bytes where its header promises {size}")
    lengths, begins, rest = np.split(content[header.size:], np.cumsum([4 * sequences, 8 * sequences]))
    documents = rest.view("<i8")
    if not bounds or documents[0] != 0 or documents[-1] != sequences or (np.diff(documents) < 0).any():
        raise _truncated(path, f"does not divide its {sequences} sequences into documents")
    return np.dtype(_TOKEN_TYPES[code]).newbyteorder("<"), lengths.view("<i4"), begins.view("<i8"), documents


def _mapped(path: Path) -> np.ndarray:
    try:
        if path.stat().st_size == 0:
            return np.empty(0, dtype=np.uint8)
        return np.memmap(path, dtype=np.uint8, mode="r").view(np.ndarray)
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror}); give readable files") from None


def _truncated(path: Path, what: str) -> UserError:
    return UserError(f"{path} {what}; the file is torn: copy or preprocess it again")
