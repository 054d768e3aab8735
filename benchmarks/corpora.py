"""What does the cache of a corpus cost: tokenizing beside the bare tokenizer, loading beside memory, a rank's memory?

Tokenizing: `open_corpus` with a cache, from JSON lines to columns on the disk, beside `encode_batch` of the package
tokenizers on the same texts, which has nothing to read and throws its tokens away. Loading: one rank's rows of batch
after batch, from the mapped cache and from copies of its columns in memory. Both alternate over rounds, and seconds are
also counted as CPU seconds of the process, which other work on the machine hardly changes.

Memory: `distca train` on JSON lines as bytes, once a small file and once one of `--gigabytes`. A thread of each rank
samples what is private to the rank (RssAnon): what the large corpus adds to the largest sample, tokenizing included, is
the cache's. Mapped pages are shared by ranks and taken back by the kernel, so they are counted apart (RssFile).
"""

from __future__ import annotations

import argparse
import json
import sys
import sysconfig
import tempfile
import threading
import time
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
from outputs import RESULTS, host_facts, wide_console, write_json
from rich.table import Table

from distca.corpus.cache import ArrayCorpus, Cache
from distca.corpus.corpora import Corpus, open_corpus
from distca.corpus.tokenizers import TEXTS_PER_CALL
from distca.train.launch import launch
from distca.train.rank_env import this_rank
from distca.train.settings import Settings, load_settings

DOCUMENT_CHARS = 4_000
SAMPLE_SECONDS = 0.02
BATCHES, PASSES = 200, 10
SMALL_BYTES = 20_000_000
AT_END = ("Rss", "Pss", "Anonymous", "Private_Dirty", "Private_Clean", "Shared_Clean", "Shared_Dirty")


@dataclass(frozen=True, slots=True)
class Speed:
    what: str
    tokens: int
    seconds: float           # median over rounds
    cpu_seconds: float       # of all threads
    tokens_per_second: float
    ratio: float             # speed over the first row's of its kind, by seconds: median over rounds
    cpu_ratio: float         # the same by CPU seconds


@dataclass(frozen=True, slots=True)
class Memory:
    corpus_bytes: int
    corpus_tokens: int
    rank: int
    anonymous_bytes: int     # RssAnon, the largest sample
    added_bytes: int         # over the same rank's with the small corpus
    file_bytes: int          # RssFile, the largest sample: mapped pages, libraries' included
    at_end: dict[str, int]   # of /proc/self/smaps_rollup after the last step, bytes
    seconds: float           # of the run, tokenizing included


def texts_of_the_library() -> list[str]:
    root = Path(sysconfig.get_path("stdlib"))
    whole = [path.read_text(encoding="utf-8", errors="ignore") for path in sorted(root.rglob("*.py"))
             if "site-packages" not in path.parts]
    return [text[at:at + DOCUMENT_CHARS] for text in whole for at in range(0, len(text), DOCUMENT_CHARS)]


def trained_tokenizer(path: Path, texts: list[str]) -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.train_from_iterator(texts, trainers.BpeTrainer(
        vocab_size=16_000, special_tokens=["<|endoftext|>"], show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet()))
    tokenizer.save(str(path))


def write_lines(path: Path, texts: list[str], num_bytes: int) -> None:
    """The texts over and over, as JSON lines, until the file is large enough."""
    block = "".join(json.dumps({"text": text}) + "\n" for text in texts).encode()
    with path.open("wb") as file:
        while file.tell() < num_bytes:
            file.write(block)


def speeds(rounds: dict[str, list[tuple[float, float]]], tokens: int) -> list[Speed]:
    first = next(iter(rounds.values()))
    ratios = {what: [median(one[kind] / other[kind] for one, other in zip(first, found, strict=True))
                     for kind in (0, 1)] for what, found in rounds.items()}
    return [Speed(what, tokens, median(one[0] for one in found), median(one[1] for one in found),
                  tokens / median(one[0] for one in found), *ratios[what]) for what, found in rounds.items()]


def timed(call: Any) -> tuple[float, float]:
    began, cpu = time.perf_counter(), time.process_time()
    call()
    return time.perf_counter() - began, time.process_time() - cpu


def tokenizing(folder: Path, texts: list[str], num_rounds: int) -> list[Speed]:
    from tokenizers import Tokenizer

    trained_tokenizer(folder / "tokenizer.json", texts[::8])
    write_lines(folder / "texts.jsonl", texts, 1)
    bare = Tokenizer.from_file(str(folder / "tokenizer.json"))
    groups = [texts[at:at + TEXTS_PER_CALL] for at in range(0, len(texts), TEXTS_PER_CALL)]
    rounds: dict[str, list[tuple[float, float]]] = {"encode_batch": [], "encode_batch_fast": [], "cached corpus": []}
    corpus: Corpus | None = None
    for number in range(num_rounds):
        rounds["encode_batch"].append(timed(lambda: [bare.encode_batch(group) for group in groups] and None))
        rounds["encode_batch_fast"].append(timed(lambda: [bare.encode_batch_fast(group) for group in groups] and None))

        def fill(number: int = number) -> None:
            nonlocal corpus
            corpus = open_corpus("jsonl", str(folder / "texts.jsonl"), tokenizer=str(folder),
                                 cache=Cache(str(folder / f"round{number}")))

        rounds["cached corpus"].append(timed(fill))
    assert corpus is not None
    return speeds(rounds, int(corpus.lengths().sum()))


def loading(folder: Path, num_rounds: int) -> list[Speed]:
    from distca.models import model_named
    from distca.train.batches import step_plan
    from distca.train.data import Loader

    mapped = open_corpus("jsonl", str(folder / "texts.jsonl"), tokenizer=str(folder),
                         cache=Cache(str(folder / "round0")))
    assert isinstance(mapped, ArrayCorpus)
    copied = ArrayCorpus(np.array(mapped.data), np.array(mapped.stops), mapped.vocab)
    settings = Settings().with_values({"batch.tokens_per_rank": 16_384, "model.vocab": 16_384})
    model = replace(model_named("tiny"), vocab=16_384)
    loaders = {"memory": Loader(copied, settings, rank=0, world=2, model=model),
               "cached corpus": Loader(mapped, settings, rank=0, world=2, model=model)}
    position, batches = loaders["memory"].start, []
    for _ in range(BATCHES):
        documents, position = loaders["memory"].take(position)
        lengths = [np.array([piece.stop - piece.start for piece in pieces]) for pieces in documents]
        batches.append((step_plan(lengths, settings, model, 2).micro_batches, documents))
    rounds: dict[str, list[tuple[float, float]]] = {what: [] for what in loaders}
    for _ in range(num_rounds):
        for what, loader in loaders.items():
            def load(loader: Loader = loader) -> None:
                for _ in range(PASSES):
                    at = loader.start
                    for micro_batches, documents in batches:
                        _, at = loader.take(at)
                        loader.rows(micro_batches, documents)

            rounds[what].append(timed(load))
    return speeds(rounds, PASSES * BATCHES * 2 * 16_384)


def sampled_rank(settings: Settings) -> int:
    from distca.train.trainer import run

    most, ended = {"RssAnon": 0, "RssFile": 0}, threading.Event()

    def sample() -> None:
        while not ended.wait(SAMPLE_SECONDS):
            for name, found in status("/proc/self/status").items():
                if name in most:
                    most[name] = max(most[name], found)

    sampler = threading.Thread(target=sample, daemon=True)
    sampler.start()
    code = run(settings)
    ended.set()
    sampler.join()
    at_end = status("/proc/self/smaps_rollup")
    Path(settings.log.folder, f"rank{this_rank().rank}.json").write_text(
        json.dumps({"most": most, "at_end": {name: at_end[name] for name in AT_END}}), encoding="utf-8")
    return code


def status(path: str) -> dict[str, int]:
    """The lines of a file of /proc that count kB, as bytes."""
    lines = (line.split() for line in Path(path).read_text(encoding="utf-8").splitlines())
    return {words[0].rstrip(":"): 1024 * int(words[1]) for words in lines if len(words) == 3 and words[2] == "kB"}


def memory(folder: Path, texts: list[str], num_bytes: int, steps: int) -> list[Memory]:
    found: list[Memory] = []
    for name, size in (("small", SMALL_BYTES), ("large", num_bytes)):
        path = folder / f"{name}.jsonl"
        write_lines(path, texts, size)
        began = time.perf_counter()
        code = launch(load_settings(None, {
            "run.ranks": "2", "run.threads": "1", "run.device": "cpu", "run.steps": str(steps), "data.source": "jsonl",
            "data.path": str(path), "data.cache": str(folder / "cache"), "batch.tokens_per_rank": "2048",
            "log.folder": str(folder / name), "log.every": str(steps)}), sampled_rank)
        if code:
            raise SystemExit(code)
        seconds = time.perf_counter() - began
        tokens = sum(file.stat().st_size // 2 for file in folder.glob(f"cache/{name}*/tokens.bin"))
        for rank in range(2):
            seen = json.loads((folder / name / f"rank{rank}.json").read_text(encoding="utf-8"))
            base = found[rank].anonymous_bytes if found[rank:] else seen["most"]["RssAnon"]
            found.append(Memory(path.stat().st_size, tokens, rank, seen["most"]["RssAnon"],
                                seen["most"]["RssAnon"] - base, seen["most"]["RssFile"], seen["at_end"], seconds))
        path.unlink()
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--texts", type=int, default=5_000, help="documents of 4,000 characters to tokenize")
    parser.add_argument("--gigabytes", type=float, default=5.0, help="of the large file; needs 3.1 times that on disk")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--output", type=Path, default=RESULTS / "corpora.json")
    arguments = parser.parse_args()
    host, texts = host_facts(device="cpu"), texts_of_the_library()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        tokenized = tokenizing(folder, texts[:arguments.texts], arguments.rounds)
        print(tokenized, file=sys.stderr, flush=True)
        loaded = loading(folder, arguments.rounds)
        print(loaded, file=sys.stderr, flush=True)
        used = memory(folder, texts, int(arguments.gigabytes * 1e9), arguments.steps)
    console = wide_console()
    for title, rows in (("tokenizing", tokenized), ("loading", loaded)):
        table = Table(title, "tokens/s", "CPU s", "speed ratio", "by CPU seconds")
        for row in rows:
            table.add_row(row.what, f"{row.tokens_per_second:,.0f}", f"{row.cpu_seconds:.2f}", f"{row.ratio:.2f}",
                          f"{row.cpu_ratio:.2f}")
        console.print(table)
    table = Table("corpus", "tokens", "rank", "MB private", "MB added", "MB of files", "seconds")
    for one in used:
        table.add_row(f"{one.corpus_bytes / 1e9:.2f} GB", f"{one.corpus_tokens:,}", str(one.rank),
                      f"{one.anonymous_bytes / 1e6:.0f}", f"{one.added_bytes / 1e6:.0f}", f"{one.file_bytes / 1e6:.0f}",
                      f"{one.seconds:.0f}")
    console.print(table)
    options = {name: getattr(arguments, name) for name in ("rounds", "texts", "gigabytes", "steps")}
    write_json(arguments.output, {"host": host, "options": options, "tokenizing": tokenized, "loading": loaded,
                                  "memory": used})


if __name__ == "__main__":
    main()
