"""A cached corpus has the tokens of one in memory, whatever happened while it was written, and is never another's."""

import hashlib
import json
import logging
import os
import shutil
import signal
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from distca.corpus import cache
from distca.corpus.cache import COLUMNS, INDEX, ArrayCorpus, Cache
from distca.corpus.corpora import open_corpus
from distca.corpus.tokenizers import encoded
from tests.corpus.test_corpora import KINDS, word_tokenizer, write
from tests.support.refusals import refusal

TEXTS = [f"{number} " * (1 + number * 7 % 40) for number in range(300)] + ["x" * 5_000, "ü"]
IDS = [[number % 7, *range(number % 23), 3] for number in range(300)]
MASKS: list[Any] = [None if number < 90 else [position % 3 == 0 for position in range(len(ids))]
                    for number, ids in enumerate(IDS)]


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunks of a few documents, so that there are many."""
    monkeypatch.setattr(cache, "CHUNK_TOKENS", 700)
    monkeypatch.setattr("distca.corpus.tokenizers.TEXTS_PER_CALL", 5)


def opened(folder: Path, **options: Any) -> ArrayCorpus:
    """The corpus texts.jsonl in a folder, cached there."""
    cached = Cache(options.pop("cache", str(folder / "cache")), options.pop("verify", True))
    corpus = open_corpus("jsonl", str(folder / "texts.jsonl"), cache=cached, **options)
    assert isinstance(corpus, ArrayCorpus)
    return corpus


def write_texts(folder: Path, texts: list[str] = TEXTS) -> None:
    (folder / "texts.jsonl").write_text("".join(json.dumps({"text": text, "more": "m"}) + "\n" for text in texts))


def as_documents(texts: list[str]) -> list[list[int]]:
    return [[*text.encode(), 256] for text in texts]


def documents_of(corpus: ArrayCorpus) -> list[list[int]]:
    return [corpus.tokens(number).tolist() for number in range(len(corpus.lengths()))]


def is_mapped(array: np.ndarray | None) -> bool:
    return array is not None and (isinstance(array, np.memmap) or is_mapped(array.base))


def cache_of(folder: Path) -> Path:
    [found] = (folder / "cache").iterdir()
    return found


def counted(monkeypatch: pytest.MonkeyPatch, die: Callable[[int], None] = lambda count: None) -> list[str]:
    """Texts that are tokenized from now on; `die` gets their number before each call."""
    seen: list[str] = []

    def watched(texts: Any, tokenizer: Any) -> Any:
        die(len(seen))
        seen.extend(text.content.decode() for text in texts)
        return encoded(texts, tokenizer)

    monkeypatch.setattr("distca.corpus.records.encoded", watched)
    return seen


@pytest.mark.parametrize("kind", KINDS)
def test_texts_are_those_that_were_written_and_are_tokenized_once(kind: str, tmp_path: Path,
                                                                  monkeypatch: pytest.MonkeyPatch) -> None:
    source, path = write(kind, tmp_path / "corpus", {"text": TEXTS})
    seen = counted(monkeypatch)
    found = []
    for verify in (True, True, False):
        corpus = open_corpus(source, str(path), cache=Cache(str(tmp_path / "cache"), verify))
        assert isinstance(corpus, ArrayCorpus)
        assert documents_of(corpus) == as_documents(TEXTS)
        found.append(corpus)
    assert sorted(seen) == sorted(TEXTS)
    chunks = (cache_of(tmp_path) / INDEX).read_text().splitlines()
    assert len(chunks) > 10                                      # not vacuous
    whole = open_corpus(source, str(path))
    assert isinstance(whole, ArrayCorpus)
    for corpus in found:
        assert corpus.data.dtype == whole.data.dtype and corpus.vocab == whole.vocab
        assert is_mapped(corpus.data) and is_mapped(corpus.stops)
        assert not corpus.data.flags.writeable and corpus.loss is None


@pytest.mark.parametrize("chunk", [1, 700, 10**9])
def test_masks_are_those_that_were_written_also_if_the_first_documents_have_none(
    chunk: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cache, "CHUNK_TOKENS", chunk)
    monkeypatch.setattr(cache, "READ_BYTES", 64)
    lines = [{"input_ids": ids} | ({} if mask is None else {"loss_mask": [int(one) for one in mask]})
               for ids, mask in zip(IDS, MASKS, strict=True)]
    (tmp_path / "texts.jsonl").write_text("\n".join(map(json.dumps, lines)))
    expected = [(ids, mask or [True] * len(ids)) for ids, mask in zip(IDS, MASKS, strict=True)
                if mask is None or any(mask[1:])]
    assert len(expected) < len(IDS)
    for _ in range(2):
        corpus = opened(tmp_path, content="tokens", vocab=70_000)
        masks = [corpus.in_loss(number) for number in range(len(expected))]
        assert documents_of(corpus) == [ids for ids, _ in expected]
        assert [mask.tolist() for mask in masks if mask is not None] == [mask for _, mask in expected]


def test_a_folder_of_texts_is_cached_too(tmp_path: Path) -> None:
    (tmp_path / "texts").mkdir()
    for number, text in enumerate(TEXTS[:30]):
        (tmp_path / "texts" / f"{number:02}.md").write_text(text)
    for _ in range(2):
        corpus = open_corpus("text", str(tmp_path / "texts"), cache=Cache(str(tmp_path / "cache")))
        assert isinstance(corpus, ArrayCorpus) and documents_of(corpus) == as_documents(TEXTS[:30])


# ---- killed, cut short, damaged

def test_a_killed_run_keeps_its_chunks_and_the_next_gives_the_same_bits(tmp_path: Path,
                                                                        monkeypatch: pytest.MonkeyPatch) -> None:
    write_texts(tmp_path)
    opened(tmp_path, cache=str(tmp_path / "whole"))
    def die(after: int, count: int) -> None:
        if count > after:
            os.kill(os.getpid(), signal.SIGKILL)

    for after in (60, 200):
        if (child := os.fork()) == 0:
            counted(monkeypatch, partial(die, after))
            opened(tmp_path)
            os._exit(0)
        assert os.waitpid(child, 0)[1] == signal.SIGKILL
        (finished, *_), _ = json.loads((cache_of(tmp_path) / INDEX).read_text().splitlines()[-1])
        assert finished > after - 60
    seen = counted(monkeypatch)
    assert documents_of(opened(tmp_path)) == as_documents(TEXTS)
    assert sorted(seen) == sorted(TEXTS[finished:])              # each line is an item
    [whole] = (tmp_path / "whole").iterdir()
    for name in COLUMNS:
        assert (whole / name).read_bytes() == (cache_of(tmp_path) / name).read_bytes()


def test_wherever_the_index_is_cut_the_corpus_is_whole_again(tmp_path: Path) -> None:
    texts = TEXTS[:60]
    write_texts(tmp_path, texts)
    opened(tmp_path)
    index = cache_of(tmp_path) / INDEX
    content = index.read_bytes()
    for size in range(0, len(content), 7):
        index.write_bytes(content[:size])
        assert documents_of(opened(tmp_path)) == as_documents(texts)


@pytest.mark.parametrize("is_complete", [True, False])
def test_a_damaged_line_of_the_index_is_written_again(is_complete: bool, tmp_path: Path) -> None:
    texts = TEXTS[:60]
    write_texts(tmp_path, texts)
    opened(tmp_path)
    folder = cache_of(tmp_path)
    lines = (folder / INDEX).read_bytes().splitlines(keepends=True)[:None if is_complete else -1]
    assert len(lines) > 3
    first, second = (json.loads(line) for line in lines[1:3])
    damaged: list[Any] = [b"[]\n", b"5\n", b'{"a": 1, "b": 2}\n', b"[[1, 2], 3]\n", first[0]]
    damaged += [[[*second[0][:at], value, *second[0][at + 1:]], second[1]]
                for at in range(7) for value in (6, 0.5, "x")]
    for one in damaged:
        line = one if isinstance(one, bytes) else json.dumps(one).encode() + b"\n"
        (folder / INDEX).write_bytes(b"".join([*lines[:2], line, *lines[3:]]))
        assert documents_of(opened(tmp_path)) == as_documents(texts)
        (folder / INDEX).write_bytes(b"".join([*lines[:2], line]))
        assert documents_of(opened(tmp_path)) == as_documents(texts)


@pytest.mark.parametrize("name", COLUMNS)
def test_damage_is_noticed_and_the_file_and_the_remedy_are_named(name: str, tmp_path: Path) -> None:
    lines = [{"input_ids": ids, "loss_mask": [1] * len(ids)} for ids in IDS]
    (tmp_path / "texts.jsonl").write_text("\n".join(map(json.dumps, lines)))
    opened(tmp_path, content="tokens", vocab=100)
    file = cache_of(tmp_path) / name
    content = file.read_bytes()
    wrong = bytearray(content)
    wrong[len(wrong) // 2] ^= 1
    for damaged, options in ((bytes(wrong), ({"verify": True},)), (content[:-1], ({"verify": True}, {"verify": False})),
                             (content + b"\0", ({"verify": False},)), (None, ({"verify": False},))):
        file.unlink() if damaged is None else file.write_bytes(damaged)
        for chosen in options:
            message = refusal(opened, tmp_path, content="tokens", vocab=100, **chosen)
            assert message.startswith(str(file)) and f"delete {file.parent}, and the next run" in message
    shutil.rmtree(file.parent)
    assert documents_of(opened(tmp_path, content="tokens", vocab=100)) == [ids for ids in IDS if len(ids) > 1]


def test_a_damaged_chunk_of_a_killed_run_is_tokenized_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_texts(tmp_path)
    opened(tmp_path)
    folder = cache_of(tmp_path)
    lines = (folder / INDEX).read_bytes().splitlines(keepends=True)
    (folder / INDEX).write_bytes(b"".join(lines[:9]))            # what it depends on, and eight chunks
    content = bytearray((folder / "tokens.bin").read_bytes())
    (num_items, _, num_tokens, *_), _ = json.loads(lines[5])
    content[2 * num_tokens + 3] ^= 1                             # in the sixth chunk
    (folder / "tokens.bin").write_bytes(content)
    seen = counted(monkeypatch)
    assert documents_of(opened(tmp_path)) == as_documents(TEXTS)
    assert sorted(seen) == sorted(TEXTS[num_items:])


# ---- other sources, tokenizers and settings

def test_another_source_is_never_taken_for_this_one(tmp_path: Path) -> None:
    write_texts(tmp_path)
    path = tmp_path / "texts.jsonl"
    opened(tmp_path)
    before = path.stat()
    other = [text.replace("1", "2") for text in TEXTS]
    write_texts(tmp_path, other)                                 # as long, and as old
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert path.stat().st_size == before.st_size and documents_of(opened(tmp_path)) == as_documents(other)
    write_texts(tmp_path, [*TEXTS, "more"])
    assert documents_of(opened(tmp_path)) == as_documents([*TEXTS, "more"])
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns + 1))
    opened(tmp_path)
    assert len(list((tmp_path / "cache").iterdir())) == 4


@pytest.mark.parametrize("name", ["texts.jsonl", "more.jsonl"])
def test_a_source_that_changes_while_it_is_tokenized_is_refused(name: str, tmp_path: Path,
                                                                monkeypatch: pytest.MonkeyPatch) -> None:
    """A file of the folder grows, or another joins it."""
    write_texts(tmp_path)
    source, changes = tmp_path / "source", iter([True])
    source.mkdir()
    (tmp_path / "texts.jsonl").rename(source / "texts.jsonl")

    def change(count: int) -> None:
        if count > 100 and next(changes, False):
            with (source / name).open("a") as file:
                file.write('{"text": "new"}\n')

    opens = partial(open_corpus, "jsonl", str(source), cache=Cache(str(tmp_path / "cache")))
    with monkeypatch.context() as patch:
        counted(patch, change)
        assert f"{source} changed while it was tokenized" in refusal(opens)
    corpus = opens()
    assert isinstance(corpus, ArrayCorpus)
    assert sorted(documents_of(corpus)) == sorted(as_documents([*TEXTS, "new"]))


def test_the_hash_sees_a_large_files_size_time_ends_and_blocks(tmp_path: Path) -> None:
    path = tmp_path / "large"
    content = bytearray(os.urandom(3 * 2**20))
    path.write_bytes(content)
    os.utime(path, ns=(0, 0))
    digests = [cache.digest_of([path])]
    for at in (0, 200_000 // 2**16 * 2**16, len(content) - 1):   # the first block, one within, the last
        at = (len(content) - 2**16) // 15 if 0 < at < 2**20 else at
        content[at] ^= 1
        path.write_bytes(content)
        os.utime(path, ns=(0, 0))
        digests.append(cache.digest_of([path]))
    os.utime(path, ns=(0, 1))
    digests.append(cache.digest_of([path]))
    assert len(set(digests)) == 5
    assert digests[-1] == cache.digest_of([path]) != cache.digest_of([path, path])


def test_other_settings_and_tokenizers_have_caches_of_their_own(tmp_path: Path) -> None:
    write_texts(tmp_path, ["one two", "two two"])
    tokenizer = word_tokenizer(tmp_path / "tokenizer.json", ["?", "one", "two"])
    found = [documents_of(opened(tmp_path, **options)) for options in (
        {}, {"field": "more"}, {"vocab": 300}, {"tokenizer": tokenizer}, {"tokenizer": tokenizer, "vocab": 9})]
    assert found[2] == found[0] and found[3] == found[4] == [[1, 2], [2, 2]] and found[1] == [[109, 256]] * 2
    word_tokenizer(tmp_path / "tokenizer.json", ["?", "two", "one"])
    assert documents_of(opened(tmp_path, tokenizer=tokenizer)) == [[2, 1], [1, 1]]
    assert len(list((tmp_path / "cache").iterdir())) == 6


def test_a_folder_under_another_name_is_refused(tmp_path: Path) -> None:
    write_texts(tmp_path, ["one"])
    opened(tmp_path)
    first = cache_of(tmp_path)
    write_texts(tmp_path, ["two"])
    opened(tmp_path)
    [second] = [folder for folder in (tmp_path / "cache").iterdir() if folder != first]
    shutil.rmtree(second)
    first.rename(second)
    message = refusal(opened, tmp_path)
    assert f"{second / INDEX} is about other data" in message and f"delete {second}" in message


# ---- several processes, and disks that cannot be written

def test_processes_that_start_together_tokenize_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_texts(tmp_path)
    log = os.open(tmp_path / "log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    children = []
    for _ in range(4):
        if (child := os.fork()) == 0:
            seen = counted(monkeypatch)
            code = 1
            try:
                assert documents_of(opened(tmp_path)) == as_documents(TEXTS)
                os.write(log, f"{len(seen)} ".encode())
                code = 0
            finally:
                os._exit(code)
        children.append(child)
    assert [os.waitpid(child, 0)[1] for child in children] == [0] * 4
    assert sorted(map(int, (tmp_path / "log").read_text().split())) == [0, 0, 0, len(TEXTS)]


def test_a_folder_that_cannot_be_written_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_texts(tmp_path)
    (tmp_path / "file").write_text("")
    message = refusal(opened, tmp_path, cache=str(tmp_path / "file"))
    assert message.startswith(f"data.cache is '{tmp_path / 'file'}'") and "cannot be written" in message

    def full(handle: int) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        assert "cannot be written (No space left on device); make room" in refusal(opened, tmp_path)
    assert documents_of(opened(tmp_path)) == as_documents(TEXTS)


def test_the_log_says_which_cache_is_read(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    write_texts(tmp_path, ["one", "two"])
    with caplog.at_level(logging.INFO, logger="distca"):
        opened(tmp_path)
        opened(tmp_path)
        opened(tmp_path, verify=False)
    folder = cache_of(tmp_path)
    read = f"{tmp_path / 'texts.jsonl'}: 2 documents, 8 tokens in {folder}"
    assert caplog.messages == [f"tokenizing {tmp_path / 'texts.jsonl'} into {folder}", read, read]
    facts, checksum = json.loads((folder / INDEX).read_text().splitlines()[0])
    assert checksum == folder.name.rpartition("-")[2]
    assert checksum == hashlib.blake2b(json.dumps(facts).encode(), digest_size=8).hexdigest()
