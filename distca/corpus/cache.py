"""Tokenize a corpus once, into three columns: files that every rank maps, or arrays in memory.

A corpus has a folder of its own in `data.cache`, named after a hash of all that its tokens depend on: the settings, the
tokenizer's files, and of every source file the name, size, time of change and up to 1 MiB of the content. Other data or
settings therefore have another folder. It holds

    tokens.bin   uint16 if the vocabulary has at most 65,536 tokens, otherwise int32
    stops.bin    int64: where each document ends in tokens.bin
    loss.bin     a byte for each token, 1 if it is in the loss; no byte if all are
    index.jsonl  what the tokens depend on, then sizes and checksums of one chunk per line, then that it is complete;
                 each line is a list of that and its own checksum

One process writes, under a lock, and others wait for it. A chunk's line is written when its bytes are on the disk. So a
killed run loses at most one chunk: the next run reads the source up to there, and tokenizes only the rest. Ranks of a
node share the mapped pages, and the kernel takes pages back when memory is short.
"""

from __future__ import annotations

import fcntl
import hashlib
import io
import json
import logging
import os
import re
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import islice, pairwise, takewhile
from pathlib import Path
from time import perf_counter
from typing import Any, BinaryIO, NamedTuple

import numpy as np

from distca.corpus.files import named_errors
from distca.corpus.records import RawDocuments
from distca.corpus.tokenizers import Item, Tokens, in_groups
from distca.validation import UserError, open_own, write_own

FORMAT = 2               # raise it when the same source and settings give other tokens or other files
COLUMNS = ("tokens.bin", "stops.bin", "loss.bin")
INDEX = "index.jsonl"
COMPLETE = {"complete": True}
Facts = Mapping[str, Any]
CHUNK_TOKENS = 2**24
GROUPS_AHEAD = 2         # groups that are tokenized while the documents of another are stored
SAMPLES, SAMPLE_BYTES = 16, 2**16  # of a file's content in the hash
READ_BYTES = 2**23
MAX_TOKEN = 2**31 - 1
LOG = logging.getLogger("distca")

_FIRST_REPORT_SECONDS = 1.0      # progress is logged after this time, then each time that it has doubled,
_MOST_REPORT_SECONDS = 60.0      # and at least this often


class Cache(NamedTuple):
    """The folder `data.cache`, "" for none; `verify` compares every byte of a corpus with its checksum."""

    folder: str = ""
    verify: bool = True


class Chunk(NamedTuple):
    """Totals at the end of a chunk, and the checksum of what the chunk added to each column."""

    items: int = 0
    documents: int = 0
    tokens: int = 0
    masked: int = 0     # bytes of loss.bin: one for each token, or none
    left_out: int = 0   # documents without a token in the loss
    by_turns: int = 0   # conversations that reach no generation block of the chat template
    sums: Sequence[int] = ()

    def column_bytes(self, itemsize: int) -> tuple[int, int, int]:
        return self.tokens * itemsize, self.documents * 8, self.masked


@dataclass(frozen=True, slots=True, eq=False)
class ArrayCorpus:
    """Documents that lie in one array, in memory or mapped."""

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


def in_memory(raw: RawDocuments[Any], vocab: int | None) -> ArrayCorpus:
    """Tokenize the documents into memory, in order."""
    files = [io.BytesIO() for _ in COLUMNS]
    columns = _Columns(files, raw.name, vocab, Chunk())
    for num_items, documents in _tokenized(raw):
        columns.add(num_items, documents)
    _check_any(raw.name, columns.done, says=True)
    return _corpus([np.frombuffer(file.getbuffer(), np.uint8) for file in files], vocab)


def cached(cache: Cache, about: Callable[[], Facts], raw: RawDocuments[Any], vocab: int | None) -> ArrayCorpus:
    """Map the tokens that the cache has for the facts `about` the documents; tokenize these first if it has none."""
    facts = about()
    name = f"{re.sub(r'[^A-Za-z0-9._-]+', '-', Path(raw.name).name)[:40]}-{_checksum(facts)}"
    folder = Path(os.path.expanduser(cache.folder), name)
    itemsize = np.dtype(_token_type(vocab)).itemsize
    chunks, complete = _read_index(folder, facts)
    if complete and cache.verify and (damage := _damage(folder, itemsize, chunks)) is not None:
        raise _damaged(folder, damage[1])
    if not complete:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            with open_own(folder / ".lock", "a") as lock:        # the kernel releases it at the end of the process
                try:
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except BlockingIOError:
                    LOG.info("waiting for another process, which tokenizes into %s", folder)
                    fcntl.flock(lock, fcntl.LOCK_EX)
                chunks, complete = _read_index(folder, facts)    # another process may have written it
                if not complete:
                    _write(folder, facts, about, raw, vocab, chunks)
        except OSError as error:
            raise UserError(f"data.cache is {cache.folder!r}, where {folder} cannot be written ({error.strerror}); "
                            "make room, or name another folder: finished chunks are kept") from None
    if cache.verify:
        LOG.info("%s: %s documents, %s tokens in %s", raw.name, f"{chunks[-1].documents:,}",
                 f"{chunks[-1].tokens:,}", folder)
    _check_any(raw.name, chunks[-1], says=cache.verify)
    columns = []
    for name, size in zip(COLUMNS, chunks[-1].column_bytes(itemsize), strict=True):
        if not (folder / name).is_file() or (folder / name).stat().st_size != size:
            raise _damaged(folder, name)
        columns.append(np.memmap(folder / name, np.uint8, "r").view(np.ndarray) if size else np.empty(0, np.uint8))
    return _corpus(columns, vocab)


def digest_of(files: Sequence[Path]) -> str:
    """Return a hash of the files' names, sizes and times of change, and of up to 1 MiB of each in even blocks."""
    found = hashlib.blake2b(digest_size=16)
    for path in files:
        with named_errors(str(path)), path.open("rb") as file:
            about = os.fstat(file.fileno())
            found.update(json.dumps([path.name, about.st_size, about.st_mtime_ns]).encode())
            last = max(0, about.st_size - SAMPLE_BYTES)
            for start in sorted({last * number // (SAMPLES - 1) for number in range(SAMPLES)}):
                file.seek(start)
                found.update(file.read(SAMPLE_BYTES))
    return found.hexdigest()


class _Columns:
    """Appends documents to the columns; leaves out those without a token, or without a token in the loss."""

    def __init__(self, files: Sequence[BinaryIO], name: str, vocab: int | None, done: Chunk) -> None:
        self.files, self.name, self.done = files, name, done
        self.dtype, self.most = _token_type(vocab), MAX_TOKEN if vocab is None else vocab - 1
        self.report = _reporter()

    def add(self, num_items: int, documents: list[Tokens]) -> None:
        done = self.done
        left_out = [one.in_loss is not None and not one.in_loss[1:].any() for one in documents]
        kept = [one for one, out in zip(documents, left_out, strict=True) if len(one.ids) and not out]
        stops = done.tokens + np.cumsum([len(one.ids) for one in kept], dtype=np.int64)
        tokens, masked = int(stops[-1]) if kept else done.tokens, done.masked
        if kept:
            ids = np.concatenate([one.ids for one in kept])
            outside = (ids < 0) | (ids > self.most)
            if outside.any():
                document = done.documents + int(np.searchsorted(stops - done.tokens, outside.argmax(), side="right"))
                raise UserError(f"document {document} of {self.name} holds token {ids[outside][0]}, where tokens are 0 "
                                f"to {self.most}; give the tokenizer that made them as data.tokenizer, or a larger "
                                "data.vocab")
            self.files[0].write(ids.astype(self.dtype).data)
            self.files[1].write(stops.data)
        if masked or any(one.in_loss is not None for one in kept):
            for begin in range(masked, done.tokens, READ_BYTES):  # of the documents before the first that has a mask
                self.files[2].write(b"\1" * min(READ_BYTES, done.tokens - begin))
            for one in kept:
                self.files[2].write(b"\1" * len(one.ids) if one.in_loss is None else one.in_loss.tobytes())
            masked = tokens
        self.done = Chunk(done.items + num_items, done.documents + len(kept), tokens, masked,
                          done.left_out + sum(left_out), done.by_turns + sum(one.by_turns for one in documents))
        self.report("reading %s: %s documents, %s tokens", self.name, f"{self.done.documents:,}",
                    f"{self.done.tokens:,}")


def _tokenized(raw: RawDocuments[Item], skip: int = 0) -> Iterator[tuple[int, list[Tokens]]]:
    """Yield groups of items in order, after the first `skip`: their number, and their documents."""
    waiting: deque[tuple[int, Future[list[Tokens]]]] = deque()
    with ThreadPoolExecutor(GROUPS_AHEAD) as threads:            # tokenizers run without Python's lock
        for group in in_groups(islice(raw.items, skip, None), raw.size):
            waiting.append((len(group), threads.submit(raw.encode, group)))
            if len(waiting) > GROUPS_AHEAD:
                num_items, documents = waiting.popleft()
                yield num_items, documents.result()
        for num_items, documents in waiting:
            yield num_items, documents.result()


def _write(folder: Path, facts: Facts, about: Callable[[], Facts], raw: RawDocuments[Any], vocab: int | None,
           chunks: list[Chunk]) -> None:
    """Tokenize what the folder lacks, and append it to `chunks`, of which only the good ones are kept."""
    itemsize = np.dtype(_token_type(vocab)).itemsize
    if (damage := _damage(folder, itemsize, chunks)) is not None:
        del chunks[damage[0]:]
    done = chunks[-1] if chunks else Chunk()
    LOG.info("tokenizing %s into %s%s", raw.name, folder, f", from token {done.tokens:,} on" if chunks else "")
    with ExitStack() as stack:
        files = [stack.enter_context(open(folder / name, "ab")) for name in COLUMNS]
        for file, size in zip(files, done.column_bytes(itemsize), strict=True):
            file.truncate(size)
        write_own(folder / f"{INDEX}.new", "".join(map(_line, (facts, *chunks))))
        os.replace(folder / f"{INDEX}.new", folder / INDEX)
        index = stack.enter_context(open_own(folder / INDEX, "a"))
        columns = _Columns(files, raw.name, vocab, done)

        def end_chunk(*more: Any) -> None:
            for file in files:
                file.flush()
                os.fsync(file.fileno())
            sums = _sums(folder, itemsize, chunks[-1] if chunks else Chunk(), columns.done)
            chunks.append(columns.done._replace(sums=sums))
            index.write("".join(map(_line, (chunks[-1], *more))))
            index.flush()
            os.fsync(index.fileno())

        for num_items, documents in _tokenized(raw, done.items):
            columns.add(num_items, documents)
            if columns.done.tokens - (chunks[-1].tokens if chunks else 0) >= CHUNK_TOKENS:
                end_chunk()
        if about() != facts:
            (folder / INDEX).unlink()
            raise UserError(f"{raw.name} changed while it was tokenized; begin again when nothing writes to it")
        end_chunk(COMPLETE)


def _read_index(folder: Path, facts: Facts) -> tuple[list[Chunk], bool]:
    """Return the chunks up to a line that is torn or missing, and whether they are the whole corpus."""
    path = folder / INDEX
    with named_errors(str(path)):
        lines = [_parsed(line) for line in path.read_bytes().splitlines(keepends=True)] if path.exists() else []
    if lines and lines[0] not in (None, facts):
        raise UserError(f"{path} is about other data, another tokenizer or other settings than its folder's name says; "
                        f"delete {folder}, and the next run tokenizes the corpus again")
    chunks = [Chunk(*line) for line in takewhile(lambda line: isinstance(line, list), lines[1:])]
    return chunks, lines[1 + len(chunks):] == [COMPLETE]


def _line(value: Any) -> str:
    return json.dumps([value, _checksum(value)]) + "\n"


def _parsed(line: bytes) -> Any:
    """Return the value of a line of the index, None if the line is torn or damaged."""
    try:
        value, checksum = json.loads(line)
    except (ValueError, TypeError, RecursionError):
        return None
    return value if line.endswith(b"\n") and checksum == _checksum(value) else None


def _checksum(value: Any) -> str:
    return hashlib.blake2b(json.dumps(value).encode(), digest_size=8).hexdigest()


def _damage(folder: Path, itemsize: int, chunks: Sequence[Chunk]) -> tuple[int, str] | None:
    """Return the first chunk whose bytes have another checksum, and the name of the file; None if all are good."""
    report = _reporter()
    for number, (before, chunk) in enumerate(pairwise([Chunk(), *chunks])):
        for name, found, expected in zip(COLUMNS, _sums(folder, itemsize, before, chunk), chunk.sums, strict=True):
            if found != expected:
                return number, name
        report("comparing %s with its checksums: %.0f %%", folder, 100 * chunk.tokens / max(1, chunks[-1].tokens))
    return None


def _sums(folder: Path, itemsize: int, before: Chunk, chunk: Chunk) -> list[int]:
    """Return the checksums of what a chunk added to each column."""
    from xxhash import xxh3_64

    sums = []
    for name, begin, end in zip(COLUMNS, before.column_bytes(itemsize), chunk.column_bytes(itemsize), strict=True):
        digest = xxh3_64()
        if begin < end and (folder / name).is_file():
            with named_errors(str(folder / name)), (folder / name).open("rb") as file:
                file.seek(begin)
                for at in range(begin, end, READ_BYTES):
                    digest.update(file.read(min(READ_BYTES, end - at)))
        sums.append(digest.intdigest())
    return sums


def _damaged(folder: Path, name: str) -> UserError:
    return UserError(f"{folder / name} has not the bytes that {INDEX} beside it says were written: it is truncated or "
                     f"damaged; delete {folder}, and the next run tokenizes the corpus again")


def _reporter() -> Callable[..., None]:
    """Return a function that logs a message and the seconds so far, if that is due."""
    start, due = perf_counter(), _FIRST_REPORT_SECONDS

    def report(message: str, *values: object) -> None:
        nonlocal due
        seconds = perf_counter() - start
        if seconds >= due:
            LOG.info(f"{message} after %.0f s", *values, seconds)
            due = min(2 * seconds, seconds + _MOST_REPORT_SECONDS)

    return report


def _check_any(name: str, total: Chunk, *, says: bool) -> None:
    """Refuse a corpus without documents; log what is left out of it, or of its masks, if it `says` so."""
    if not total.documents:
        missing = "in the loss" if total.left_out else "in it"
        raise UserError(f"{name} holds no document with a token {missing}; give at least one")
    if says and total.left_out:
        LOG.info("%s: %d of %d documents have no token in the loss and are left out", name, total.left_out,
                 total.left_out + total.documents)
    if says and total.by_turns:
        LOG.info("%d conversations reach no {%% generation %%} block of the chat template: all that the assistant says "
                 "in them is in the loss", total.by_turns)


def _corpus(columns: Sequence[np.ndarray], vocab: int | None) -> ArrayCorpus:
    return ArrayCorpus(columns[0].view(_token_type(vocab)), columns[1].view(np.int64), vocab,
                       columns[2].view(np.bool_) if len(columns[2]) else None)


def _token_type(vocab: int | None) -> type:
    return np.uint16 if vocab is not None and vocab <= 2**16 else np.int32
