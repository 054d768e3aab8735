"""Open documents as tokens for training: the standard library, texts, JSON lines, tables, and Megatron datasets.

Packing needs the length of every document first, and tokens of arbitrary documents later. So texts are tokenized once,
into a memory-mapped cache (`cache.py`); Megatron datasets are mapped as they are. Only without `data.cache`, and of the
standard library, every rank reads the source and keeps the tokens in memory.
"""

from __future__ import annotations

import struct
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import starmap
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np

from distca.corpus.cache import FORMAT, Cache, cached, digest_of, in_memory
from distca.corpus.chat import encoded_chats, load_chat_template, messages_of
from distca.corpus.files import format_of, input_files, standard_library_files, text_files, whole_file
from distca.corpus.records import MASK_FIELDS, RawDocuments, raw_texts, raw_tokens, texts_of
from distca.corpus.tables import json_records, table_files, table_records
from distca.corpus.tokenizers import END_OF_DOCUMENT, Text, open_tokenizer, tokenizer_facts
from distca.spec import unknown_name
from distca.validation import UserError, check_number, short

SOURCES = ("stdlib", "text", "jsonl", "table", "megatron")
FIELDS = {"text": "text", "chat": "messages", "tokens": "input_ids"}  # kind of content -> default key or column
KINDS = {"jsonl": "jsonl", "parquet": "table", "arrow": "table", ".bin": "megatron", ".idx": "megatron"}

NO_CACHE = Cache()

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


@dataclass(frozen=True, eq=False)
class JoinedCorpus:
    """The documents of several corpora, numbered one corpus after the other."""

    parts: Sequence[Corpus]
    weights: Sequence[float] = ()  # of the parts' tokens in training; none to shuffle all documents together

    @property
    def vocab(self) -> int | None:
        known = [part.vocab for part in self.parts if part.vocab is not None]
        return max(known) if len(known) == len(self.parts) else None

    @cached_property
    def firsts(self) -> list[int]:
        """Return the number of each part's first document."""
        return [0, *np.cumsum([len(part.lengths()) for part in self.parts])[:-1].tolist()]

    def lengths(self) -> np.ndarray:
        return np.concatenate([part.lengths() for part in self.parts])

    def tokens(self, document: int) -> np.ndarray:
        part = bisect_right(self.firsts, document) - 1
        return self.parts[part].tokens(document - self.firsts[part])

    def in_loss(self, document: int) -> np.ndarray | None:
        part = bisect_right(self.firsts, document) - 1
        return self.parts[part].in_loss(document - self.firsts[part])


def joined(parts: Sequence[Corpus], weights: Sequence[float] = ()) -> Corpus:
    return JoinedCorpus(parts, weights) if len(parts) > 1 else parts[0]


class MixSource(NamedTuple):
    """A file or folder of documents, of one of SOURCES, and its weight in data.mix."""

    kind: str
    path: str
    weight: float = 1.0


def kind_of(path: str, otherwise: str) -> str:
    """Return which of SOURCES the suffix of a path implies."""
    return KINDS.get(format_of(path) or Path(path).suffix, otherwise)


def sources_of(mix: str, source: str, path: str) -> list[MixSource]:
    """Return the sources of data.mix, or the only one, which data.source and data.path name."""
    found = []
    for entry in mix.split(",") if mix else ():
        name, _, weight = (part.strip() for part in entry.rpartition(":"))
        try:
            found.append(MixSource(kind_of(name, source), name, check_number("weight", float(weight), above=0)))
        except ValueError:
            name = ""
        if not name:
            raise UserError(f"data.mix has {short(entry.strip())}; write path:weight for each source, with commas "
                            "between them and weights above 0, such as web.jsonl:0.7, books/:0.3")
        if found[-1].kind == "stdlib":
            raise UserError(f"data.mix has {name!r}, whose name does not say what it holds, and data.source is "
                            "'stdlib'; set data.source to text, jsonl, table or megatron")
    twice = [one.path for number, one in enumerate(found) if one.path in {other.path for other in found[:number]}]
    if twice:
        raise UserError(f"data.mix has {twice[0]!r} twice; give it once, with the sum of its weights")
    return found or [MixSource(source, path)]


def open_corpus(
    source: str, path: str = "", *, content: str = "text", field: str = "", split: str = "", tokenizer: str = "",
    vocab: int = 0, cache: Cache = NO_CACHE,
) -> Corpus:
    """Open a corpus; parameters have the names of the settings [data]."""
    if source not in SOURCES:
        raise unknown_name("data.source", source, SOURCES)
    if source == "stdlib":
        texts = starmap(Text, map(whole_file, standard_library_files()))
        return in_memory(raw_texts("the standard library", texts, None), _vocab(vocab, END_OF_DOCUMENT + 1, "bytes"))
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
    raw: RawDocuments[Any]
    if content == "tokens":
        raw = raw_tokens(path, records, field)
    elif opened is not None and is_chat:
        encode = partial(encoded_chats, template=load_chat_template(tokenizer), tokenizer=opened)
        raw = RawDocuments(path, messages_of(records, field),
                           lambda one: sum(len(str(message["content"])) for message in one[1]), encode)
    else:
        raw = raw_texts(path, starmap(Text, text_files(path)) if source == "text" else texts_of(records, field),
                         opened)
    if not cache.folder:
        return in_memory(raw, checked_vocab)

    def about() -> dict[str, Any]:
        files = (table_files(path, split=split, split_option="data.split") if source == "table" else
                 input_files(path, "jsonl" if source == "jsonl" else ""))
        return {"format": FORMAT, "source": source, "content": content, "field": field, "vocab": checked_vocab,
                "files": len(files), "digest": digest_of(files), "tokenizer": tokenizer_facts(tokenizer, is_chat)}

    return cached(cache, about, raw, checked_vocab)


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
