"""Turn what a user names into batches: a sampler, the standard library, lengths as typed, or a file of them.

A file is a distribution, from which batches are dealt. What is no more than one batch is one batch, and says so.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np

from distca.corpus.files import STDIN
from distca.corpus.length_values import length_of_text
from distca.corpus.lengths import Heard, Reading, read_source
from distca.report.figures import count_text
from distca.spec import unknown_name
from distca.validation import DOCUMENTS_WHY, MAX_DOCUMENTS, MAX_RANKS, UserError, check_whole, is_count, plain, short
from distca.workload.documents import (
    SAMPLERS,
    IntArray,
    Workload,
    check_lengths,
    fill,
    sample_lengths,
    standard_library_lengths,
)
from distca.workload.packing import cut_at_ranks
from distca.workload.sequences import CorpusFigures, deal_batches

STANDARD_LIBRARY = "stdlib"
DEFAULT_RANKS = 8
DEFAULT_TOKENS_PER_RANK = 65_536
DEFAULT_BATCHES = 8  # of a file
MAX_BATCHES = 10_000
SOURCE_HELP = (
    f"A file or folder of lengths, - for stdin, a workload file, a sampler ({', '.join(SAMPLERS)}), {STANDARD_LIBRARY} "
    "for the files of Python's own library, or the lengths themselves, as in 128k,4k,4k. A bare sampler name is the "
    "sampler; write ./NAME for a file called so.")
COST_HELP = ("Latency table: a file that `distca profile` wrote, the name of a shipped one, or a TOML file that names "
             "one for each kind of server.")
MAX_TOKENS = 2**34  # 65,536 ranks of 256K, about as many documents as fit: beyond it a typing error is likelier
RANKS_WHY = "the most that plans have been tried with; plan a larger cluster as several pools"


@dataclass(frozen=True, slots=True, eq=False)
class DocumentBatch:
    """Documents that fill their ranks exactly."""

    source: str  # for people
    lengths: np.ndarray  # [documents]
    ranks: int
    tokens_per_rank: int


@dataclass(frozen=True, slots=True)
class BatchesAsked:
    """What was said on the command line; None is what was left out."""

    source: str
    ranks: int | None = None
    tokens_per_rank: int | None = None
    seed: int | None = None
    max_document: int | None = None
    batches: int | None = None
    whole: bool = False
    reading: Reading = field(default_factory=Reading)

    def __post_init__(self) -> None:
        if self.ranks is not None:
            check_whole("ranks", self.ranks, most=MAX_RANKS, why=RANKS_WHY)
        for name in ("tokens_per_rank", "max_document"):
            if getattr(self, name) is not None:
                check_whole(name, getattr(self, name))
        if self.seed is not None:
            check_whole("seed", self.seed, least=0)
        if self.batches is not None:
            check_whole("batches", self.batches, most=MAX_BATCHES, why="more of them change no mean")
        check_whole("ranks times tokens_per_rank", self.batch_tokens, most=MAX_TOKENS,
                    why="the largest batch that is planned")
        check_whole("the number of documents, ranks times tokens_per_rank over max_document,",
                    self.batch_tokens // (self.max_document or self.batch_tokens), least=0, most=MAX_DOCUMENTS,
                    why=DOCUMENTS_WHY)

    @property
    def num_ranks(self) -> int:
        return self.ranks or DEFAULT_RANKS

    @property
    def row_tokens(self) -> int:
        return self.tokens_per_rank or DEFAULT_TOKENS_PER_RANK

    @property
    def batch_tokens(self) -> int:
        return self.num_ranks * self.row_tokens

    def refuse(self, what: str, *options: str) -> None:
        """Refuse options that mean nothing for this kind of source."""
        for option in options:
            value = getattr(self, option)
            if value is not None and value is not False:
                raise UserError(f"{option} is {value} but {short(self.source)} {what}; leave "
                                f"--{option.replace('_', '-')} out")


@dataclass(frozen=True, slots=True, eq=False)
class DealtBatches:
    """One batch or several, and what the corpus behind them looks like, where there is one."""

    source: str  # for people
    batches: tuple[DocumentBatch, ...]
    corpus: CorpusFigures | None = None
    note: str = ""               # how they came about, for people
    is_dealt: bool = False       # a sample of the corpus, of which means make sense


def read_batches(asked: BatchesAsked, heard: Heard = lambda _: None) -> DealtBatches:
    """The batches that SOURCE names. Bare names of samplers are samplers; anything else that exists is a file."""
    source = asked.source
    if source in SAMPLERS:
        asked.refuse("is a sampler", "whole")
        return _sampled(asked)
    if source == STANDARD_LIBRARY:
        asked.refuse("is not a sampler", "seed", "batches", "whole")
        lengths = standard_library_lengths()
        most = int(lengths.sum()) // asked.num_ranks
        return _one(_batch_of_lengths("Python's standard library, a token per byte", lengths, asked,
                                      asked.tokens_per_rank or min(DEFAULT_TOKENS_PER_RANK, most)))
    content = read_named(source, asked.reading, heard)
    if isinstance(content, Workload):
        asked.refuse("is a workload, one batch", "seed", "batches", "whole")
        return _one(_batch_of_workload(source, content, asked.ranks, asked.tokens_per_rank, asked.max_document))
    if are_typed(source):
        asked.refuse("are lengths as typed, one batch", "seed", "batches", "whole")
        return _one(_batch_of_lengths("lengths as typed", content, asked, asked.tokens_per_rank))
    return _of_file(asked, "stdin" if source == STDIN else plain(source), content)


def read_named(source: str, reading: Reading, heard: Heard = lambda _: None, field: str = "SOURCE"
               ) -> Workload | IntArray:
    """Lengths as typed, or what a file, a folder or stdin holds."""
    if are_typed(source):
        return check_lengths([length_of_text(part, f"{field}, length {number},")
                              for number, part in enumerate(_typed(source), 1)])
    if source != STDIN and not (source and Path(source).exists()):
        refuse_source(source, field)
    return read_source(source, reading, heard)


def are_typed(source: str) -> bool:
    """Whether a source is lengths themselves: numbers with commas or spaces between them, and no file's name."""
    return all(map(is_count, _typed(source))) and not Path(source).exists()


def _typed(source: str) -> list[str]:
    return source.replace(",", " ").split() or [""]


def _one(batch: DocumentBatch, corpus: CorpusFigures | None = None, note: str = "") -> DealtBatches:
    return DealtBatches(batch.source, (batch,), corpus, note)


def _sampled(asked: BatchesAsked) -> DealtBatches:
    seed, count = asked.seed or 0, asked.batches or 1
    check_whole("batches times ranks times tokens_per_rank", count * asked.batch_tokens, most=MAX_TOKENS,
                why="the most that is sampled")
    lengths = sample_lengths(asked.source, count * asked.batch_tokens, seed=seed, max_document=asked.max_document)
    name = f"{asked.source}, seed {seed}"
    batches = _batches(asked, name, deal_batches(lengths, asked.batch_tokens, count, None))
    note = f"{count} batches, sampled one after the other" if count > 1 else ""
    return DealtBatches(name, batches, CorpusFigures.of(lengths) if count > 1 else None, note, count > 1)


def _of_file(asked: BatchesAsked, name: str, lengths: IntArray) -> DealtBatches:
    """Batches dealt from a file's documents; all of them as one batch where that is asked for or all that there is."""
    corpus = CorpusFigures.of(lengths)
    cut = lengths if asked.max_document is None else np.minimum(lengths, asked.max_document)
    total = int(cut.sum())
    size = f"{asked.num_ranks} × {asked.row_tokens:,} tokens"
    if asked.whole:
        asked.refuse("is to be one batch of everything (--whole)", "tokens_per_rank", "seed", "batches")
        return _one(_batch_of_lengths(name, lengths, asked, None), corpus, "One batch of everything.")
    if total < asked.batch_tokens:
        for option in ("tokens_per_rank", "batches", "seed"):
            if getattr(asked, option) is not None:
                raise UserError(
                    f"{option} is {getattr(asked, option)} but {name} holds {total} tokens, fewer than one batch of "
                    f"{size}; give a smaller --tokens-per-rank, or --whole for one batch of everything")
        return _one(_batch_of_lengths(name, lengths, asked, None), corpus,
                    f"Fewer tokens than a batch of {size}: one batch of everything.")
    seed, wanted = asked.seed or 0, asked.batches or DEFAULT_BATCHES
    dealt = deal_batches(cut, asked.batch_tokens, wanted, seed)
    all_of_it = ", all that it fills" if len(dealt) < wanted else ""
    long_ones = int((cut > asked.batch_tokens).sum())
    too_long = f"; {long_ones:,} longer than a batch are cut at its end" if long_ones else ""
    note = f"{count_text(len(dealt), 'batch', 'batches')}{all_of_it}, documents shuffled with seed {seed}{too_long}."
    return DealtBatches(f"{name}: {corpus.documents:,} documents, {corpus.tokens:,} tokens",
                        _batches(asked, name, dealt), corpus, note, is_dealt=True)


def _batches(asked: BatchesAsked, name: str, dealt: Sequence[IntArray]) -> tuple[DocumentBatch, ...]:
    several = len(dealt) > 1
    return tuple(DocumentBatch(f"{name}, batch {number}" if several else name, check_lengths(lengths), asked.num_ranks,
                               asked.row_tokens) for number, lengths in enumerate(dealt, 1))


def refuse_source(source: str, field: str = "SOURCE") -> None:
    """The error for a source that is neither a name nor a file."""
    names = (*SAMPLERS, STANDARD_LIBRARY)
    if Path(source).name != source or Path(source).suffix:
        raise UserError(f"{source}: no such file; check the path, or name one of: {', '.join(names)}")
    raise UserError(f"{unknown_name(field, source, names)}, or give the path of a workload or lengths file; no "
                    "file of this name is here")


def _batch_of_workload(
    path: str, workload: Workload, ranks: int | None, tokens_per_rank: int | None, max_document: int | None
) -> DocumentBatch:
    for name, asked, said in (("ranks", ranks, workload.ranks),
                              ("tokens_per_rank", tokens_per_rank, workload.tokens_per_rank)):
        if asked is not None and asked != said:
            raise UserError(f"{name} is {asked} but {path} says {said}; leave the option out or change the file")
    lengths = np.concatenate(workload.sequences)
    if max_document is not None and lengths.max() > max_document:
        raise UserError(f"max_document is {max_document} but {path} holds a document of {lengths.max()} tokens, and "
                        "cutting it would leave its ranks unfilled; leave the option out or change the file")
    check_whole("ranks", workload.ranks, most=MAX_RANKS, why=RANKS_WHY)
    return DocumentBatch(f"{workload.name} ({plain(path)})", lengths, workload.ranks, workload.tokens_per_rank)


def _batch_of_lengths(
    name: str, lengths: IntArray, asked: BatchesAsked, tokens_per_rank: int | None
) -> DocumentBatch:
    """As many leading documents as fill the ranks, the last one cut; all of them where nothing else is asked."""
    ranks = asked.num_ranks
    whole = len(lengths)
    if asked.max_document is not None:
        lengths = np.minimum(lengths, asked.max_document)
    total = int(lengths.sum())
    tokens_per_rank = tokens_per_rank or total // ranks
    if tokens_per_rank == 0:
        raise UserError(f"ranks is {ranks} but {name} holds {total} tokens; give at most {total} ranks")
    lengths = fill(lengths, ranks * tokens_per_rank)
    return DocumentBatch(f"{plain(name)}: {len(lengths):,} of {whole:,} documents", lengths, ranks, tokens_per_rank)


def without_spanning(batch: DocumentBatch) -> DocumentBatch:
    """The same tokens with every document cut at its rank's end."""
    return replace(batch, source=f"{batch.source}, cut at ranks",
                   lengths=cut_at_ranks(batch.lengths, batch.tokens_per_rank))
