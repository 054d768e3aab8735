"""Real documents as tokens.

Packing needs to know every document's length before it reads one token, and needs any token of any document later, so
a corpus answers just that. Small sources are read and tokenized once and then held in memory, every rank for itself;
what does not fit there belongs in a Megatron dataset, which is memory-mapped.

Without a tokenizer a token is a byte and 256 ends a document. With one, its own rules apply (special tokens included)
and a document ends with the first of `END_NAMES` that it knows, where it knows one. Empty documents are left out.
"""

from __future__ import annotations

import json
import os
import sysconfig
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import chain, islice
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np

from distca.spec import unknown_name
from distca.train.config import Settings
from distca.train.megatron_files import MegatronCorpus

SOURCES = ("stdlib", "text", "jsonl", "megatron")
END_OF_DOCUMENT = 256  # behind the bytes 0 to 255
END_NAMES = ("<|end_of_text|>", "<|endoftext|>", "</s>", "<eos>", "<|eos|>", "[SEP]")

_NOT_THE_LIBRARY = {"site-packages", "dist-packages", "test", "tests", "idle_test"}
_TEXTS_PER_CALL = 512  # the tokenizer spreads the texts of one call over threads


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


@dataclass(frozen=True, slots=True, eq=False)
class MemoryCorpus:
    """All documents in one array."""

    data: np.ndarray   # [tokens]
    stops: np.ndarray  # [documents] where each ends in `data`
    vocab: int

    def __post_init__(self) -> None:
        for column in (self.data, self.stops):
            column.setflags(write=False)

    @property
    def num_documents(self) -> int:
        return len(self.stops)

    def lengths(self) -> np.ndarray:
        return np.diff(self.stops, prepend=0)

    def tokens(self, document: int) -> np.ndarray:
        begin = self.stops[document - 1] if document else 0
        return self.data[begin:self.stops[document]]


class Text(NamedTuple):
    """A document before it is tokens."""

    where: str  # for people: its file, and its line where a file holds several
    content: bytes


class Encoder(NamedTuple):
    """How texts become tokens."""

    vocab: int
    encode: Callable[[list[Text]], list[np.ndarray]]


def corpus_from(settings: Settings) -> Corpus:
    """The corpus that the [data] settings name; whatever is wrong with it is a ValueError of one line."""
    data = settings.data
    if data.source not in SOURCES:
        raise unknown_name("data.source", data.source, SOURCES)
    if data.source == "stdlib":
        return _in_memory(_files(standard_library_files()), _byte_encoder(), "the standard library")
    if not data.path:
        raise ValueError(f"data.path is empty but data.source is {data.source!r}; name the file or folder to read")
    if data.source == "megatron":
        return MegatronCorpus.open(data.path)
    encoder = load_tokenizer(data.tokenizer) if data.tokenizer else _byte_encoder()
    if data.source == "text":
        return _in_memory(_files(_paths(data.path, "")), encoder, data.path)
    lines = chain.from_iterable(_jsonl(path, data.field) for path in _paths(data.path, ".jsonl"))
    return _in_memory(lines, encoder, data.path)


def standard_library_files() -> list[Path]:
    """Every .py file of this Python's standard library in order of path, test suites and installed packages aside."""
    root = Path(sysconfig.get_path("stdlib"))
    found = [path for path in _walk(root, _NOT_THE_LIBRARY) if path.suffix == ".py"]
    return sorted(found, key=lambda path: path.relative_to(root).as_posix())


def load_tokenizer(path: str) -> Encoder:
    """The encoder of a Hugging Face tokenizer.json."""
    try:
        from tokenizers import Tokenizer
    except ImportError:
        raise ValueError(f"data.tokenizer is {path!r} but the package tokenizers is not installed; run `pip install "
                         "tokenizers`, or leave data.tokenizer empty for byte tokens") from None
    if not Path(path).is_file():
        raise ValueError(f"data.tokenizer is {path!r}, which is no file; name a tokenizer.json")
    try:
        tokenizer = Tokenizer.from_file(path)
    except Exception as error:  # the package raises plain Exception
        reason = " ".join(str(error).split())
        raise ValueError(f"data.tokenizer is {path!r}, which is no tokenizer.json ({reason}); name one") from None
    end = next((number for name in END_NAMES if (number := tokenizer.token_to_id(name)) is not None), None)
    return Encoder(1 + max(tokenizer.get_vocab().values()), lambda texts: _tokenized(tokenizer, end, texts))


def _tokenized(tokenizer: Any, end: int | None, texts: list[Text]) -> list[np.ndarray]:
    encoded = [encoding.ids for encoding in tokenizer.encode_batch([_decoded(text) for text in texts])]
    return [np.array(ids if end is None or ids[-1:] == [end] else [*ids, end], dtype=np.int64) for ids in encoded]


def _decoded(text: Text) -> str:
    try:
        return text.content.decode("utf-8-sig")
    except UnicodeDecodeError:
        raise ValueError(f"{text.where}: not UTF-8 text, which data.tokenizer needs; convert it, or leave "
                         "data.tokenizer empty for byte tokens") from None


def _byte_encoder() -> Encoder:
    end = np.array([END_OF_DOCUMENT], dtype=np.uint16)
    return Encoder(END_OF_DOCUMENT + 1, lambda texts: [
        np.concatenate([np.frombuffer(text.content, dtype=np.uint8), end]) for text in texts])


def _in_memory(texts: Iterable[Text], encoder: Encoder, name: str) -> MemoryCorpus:
    dtype = np.uint16 if encoder.vocab <= 2**16 else np.int32
    documents: list[np.ndarray] = []
    texts = (text for text in texts if text.content)
    while batch := list(islice(texts, _TEXTS_PER_CALL)):
        documents += [tokens.astype(dtype) for tokens in encoder.encode(batch) if len(tokens)]
    if not documents:
        raise ValueError(f"{name} holds no document with a token in it; give at least one")
    stops = np.cumsum([len(tokens) for tokens in documents], dtype=np.int64)
    return MemoryCorpus(np.concatenate(documents), stops, encoder.vocab)


def _files(paths: list[Path]) -> Iterator[Text]:
    """Each file is a document."""
    for path in paths:
        try:
            yield Text(str(path), path.read_bytes())
        except OSError as error:
            raise ValueError(f"{path}: cannot be read ({error.strerror}); give readable files") from None


def _jsonl(path: Path, field: str) -> Iterator[Text]:
    """Each line is a JSON object with a document's text under `field`; blank lines are left out."""
    try:
        with path.open("rb") as lines:
            for number, line in enumerate(lines, start=1):
                if line.strip():
                    yield Text(f"{path}: line {number}", _text_of(line, field, f"{path}: line {number}"))
    except OSError as error:
        raise ValueError(f"{path}: cannot be read ({error.strerror}); give readable files") from None


def _text_of(line: bytes, field: str, where: str) -> bytes:
    try:
        record = json.loads(line.strip())
    except (ValueError, RecursionError) as error:
        reason = error.msg if isinstance(error, json.JSONDecodeError) else type(error).__name__
        raise ValueError(f"{where} is not JSON ({reason}); repair or drop it") from None
    if not isinstance(record, dict):
        raise ValueError(f"{where} holds {_short(record)}, not an object; write {{\"{field}\": \"…\"}}")
    if not isinstance(record.get(field), str):
        raise ValueError(f"{where} has {_short(record.get(field))} under {field!r}, not text; its keys are "
                         f"{_short(list(record))}: set data.field to the one that holds the text")
    try:
        return record[field].encode("utf-8")
    except UnicodeEncodeError:
        raise ValueError(f"{where} has half a surrogate pair under {field!r}; repair or drop it") from None


def _paths(path: str, suffix: str) -> list[Path]:
    """The file itself, or the files of a folder (with this suffix, none hidden) in order of path."""
    root = Path(path)
    if root.is_file():
        return [root]
    if not root.is_dir():
        raise ValueError(f"data.path is {path!r}, which is no file or folder; check the path")
    found = [file for file in _walk(root, set()) if file.name.endswith(suffix)]
    if not found:
        kind = f"{suffix} file" if suffix else "file"
        raise ValueError(f"data.path is {path!r}, a folder without a {kind} in it; name another")
    return sorted(found, key=lambda file: file.relative_to(root).as_posix())


def _walk(root: Path, left_out: set[str]) -> Iterator[Path]:
    for folder, folders, files in os.walk(root):
        folders[:] = [name for name in folders if name not in left_out and not name.startswith(".")]
        for name in files:
            path = Path(folder, name)
            if not name.startswith(".") and path.is_file():
                yield path


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
