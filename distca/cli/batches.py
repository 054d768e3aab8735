"""Make batches from SOURCE: a sampler, the standard library, lengths as typed, or a file of lengths.

A file is a distribution from which batches are dealt. If it has fewer tokens than a batch, it is planned as one batch.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from os.path import exists  # unlike Path's, false for lengths that are too many for a name
from pathlib import Path

import numpy as np

from distca.columns import IntArray
from distca.corpus.files import STDIN
from distca.corpus.lengths import Progress, Reading, length_of_text, read_source, standard_library_lengths
from distca.report.figures import count_text
from distca.spec import unknown_name
from distca.validation import DOCUMENTS_WHY, MAX_DOCUMENTS, MAX_RANKS, UserError, check_whole, is_count, plain, short
from distca.workload.documents import SAMPLERS, Workload, check_lengths, fill, sample_lengths
from distca.workload.packing import cut_at_ranks
from distca.workload.sequences import CorpusFigures, Source, deal_batches

STANDARD_LIBRARY = "stdlib"
DEFAULT_RANKS = 8
DEFAULT_TOKENS_PER_RANK = 65_536
DEFAULT_BATCHES = 8  # of a file
MAX_BATCHES = 10_000
BATCHES_WHY = "more of them change no mean"
SOURCE_HELP = (
    f"A file or folder of lengths, - for stdin, a workload file, a sampler ({', '.join(SAMPLERS)}), {STANDARD_LIBRARY} "
    "for the files of Python's own library, or the lengths themselves, as in 128k,4k,4k. A bare sampler name is the "
    "sampler; write ./NAME for a file called so.")
COST_HELP = ("Latency table: a file that `distca profile` wrote, the name of a shipped one, or a TOML file that names "
             "one for each kind of server.")
MAX_TOKENS = 2**34  # 65,536 ranks of 256K tokens: more is probably a typing error
RANKS_WHY = "the most that plans have been tried with; plan a larger cluster as several pools"


@dataclass(frozen=True, slots=True)
class BatchesAsked:
    """Options of the command line that describe batches; None for those left out."""

    source: str
    ranks: int | None = None
    tokens_per_rank: int | None = None
    seed: int | None = None
    max_document: int | None = None
    batches: int | None = None
    whole: bool = False
    no_spanning: bool = False
    reading: Reading = field(default_factory=Reading)

    def __post_init__(self) -> None:
        for name, least, most, why in (("ranks", 1, MAX_RANKS, RANKS_WHY), ("tokens_per_rank", 1, None, ""),
                                       ("max_document", 1, None, ""), ("seed", 0, None, ""),
                                       ("batches", 1, MAX_BATCHES, BATCHES_WHY)):
            if (value := getattr(self, name)) is not None:
                check_whole(name, value, least=least, most=most, why=why)
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
    """One batch or several, whose documents fill their ranks exactly."""

    source: str                  # to be printed
    batches: tuple[IntArray, ...]  # [batches][documents] lengths
    ranks: int
    tokens_per_rank: int
    corpus: CorpusFigures | None = None  # from which the batches come
    note: str = ""               # how the batches were made, to be printed
    is_dealt: bool = False       # a sample of the corpus, so that means are meaningful


def read_batches(asked: BatchesAsked, progress: Progress = lambda _: None) -> DealtBatches:
    """Read the batches that SOURCE names. A sampler's name means the sampler even if a file has the same name."""
    dealt = _read(asked, progress)
    if not asked.no_spanning:
        return dealt
    return replace(dealt, batches=tuple(cut_at_ranks(lengths, dealt.tokens_per_rank) for lengths in dealt.batches))


def _read(asked: BatchesAsked, progress: Progress) -> DealtBatches:
    source = asked.source
    if source in SAMPLERS:
        asked.refuse("is a sampler", "whole")
        return _sampled(asked)
    if source == STANDARD_LIBRARY:
        asked.refuse("is not a sampler", "seed", "batches", "whole")
        lengths = standard_library_lengths()
        most = int(lengths.sum()) // asked.num_ranks
        return _one_batch("Python's standard library, a token per byte", lengths, asked,
                          asked.tokens_per_rank or min(DEFAULT_TOKENS_PER_RANK, most))
    content = _read_named(source, asked.reading, progress)
    if isinstance(content, Workload):
        asked.refuse("is a workload, one batch", "seed", "batches", "whole")
        return _workload(content, asked)
    if _are_typed(source):
        asked.refuse("are lengths as typed, one batch", "seed", "batches", "whole")
        return _one_batch("lengths as typed", content, asked, asked.tokens_per_rank)
    return _of_file(asked, "stdin" if source == STDIN else plain(source), content)


def read_lengths(data: str, reading: Reading, progress: Progress) -> Source:
    """Read the distribution of lengths that --data names, by the rules of `read_batches`."""
    if data in SAMPLERS:
        return Source(data)
    if data == STANDARD_LIBRARY:
        return Source(STANDARD_LIBRARY, standard_library_lengths())
    content = _read_named(data, reading, progress, "data")
    name = "lengths as typed" if _are_typed(data) else "stdin" if data == STDIN else plain(data)
    return Source(name, np.concatenate(content.sequences) if isinstance(content, Workload) else content)


def _read_named(source: str, reading: Reading, progress: Progress, field: str = "SOURCE") -> Workload | IntArray:
    """Read lengths from the text itself, or from a file, a folder or stdin."""
    if _are_typed(source):
        return check_lengths([length_of_text(part, f"{field}, length {number},")
                              for number, part in enumerate(_typed(source), 1)])
    if source == STDIN or exists(source):
        return read_source(source, reading, progress)
    names = (*SAMPLERS, STANDARD_LIBRARY)
    if Path(source).name != source or Path(source).suffix:
        raise UserError(f"{source}: no such file; check the path, or name one of: {', '.join(names)}")
    raise UserError(f"{unknown_name(field, source, names)}, or give the path of a workload or lengths file; no "
                    "file of this name is here")


def _are_typed(source: str) -> bool:
    """Whether SOURCE is a list of lengths, separated by commas or spaces, and not the name of a file."""
    return all(map(is_count, _typed(source))) and not exists(source)


def _typed(source: str) -> list[str]:
    return source.replace(",", " ").split() or [""]


def _sampled(asked: BatchesAsked) -> DealtBatches:
    seed, count = asked.seed or 0, asked.batches or 1
    check_whole("batches times ranks times tokens_per_rank", count * asked.batch_tokens, most=MAX_TOKENS,
                why="the most that is sampled")
    lengths = sample_lengths(asked.source, count * asked.batch_tokens, seed=seed, max_document=asked.max_document)
    batches = tuple(map(check_lengths, deal_batches(lengths, asked.batch_tokens, count, None)))
    dealt = DealtBatches(f"{asked.source}, seed {seed}", batches, asked.num_ranks, asked.row_tokens)
    return dealt if count == 1 else replace(dealt, corpus=CorpusFigures.of(lengths), is_dealt=True,
                                            note=f"{count} batches, sampled one after the other")


def _of_file(asked: BatchesAsked, name: str, lengths: IntArray) -> DealtBatches:
    """Deal batches from a file's documents, or make one batch of all if --whole is given or if they are too few."""
    corpus = CorpusFigures.of(lengths)
    cut = lengths if asked.max_document is None else np.minimum(lengths, asked.max_document)
    total = int(cut.sum())
    size = f"{asked.num_ranks} × {asked.row_tokens:,} tokens"
    if asked.whole:
        asked.refuse("is to be one batch of everything (--whole)", "tokens_per_rank", "seed", "batches")
        return _one_batch(name, lengths, asked, None, corpus, "One batch of everything.")
    if total < asked.batch_tokens:
        for option in ("tokens_per_rank", "batches", "seed"):
            if getattr(asked, option) is not None:
                raise UserError(
                    f"{option} is {getattr(asked, option)} but {name} holds {total} tokens, fewer than one batch of "
                    f"{size}; give a smaller --tokens-per-rank, or --whole for one batch of everything")
        return _one_batch(name, lengths, asked, None, corpus,
                          f"Fewer tokens than a batch of {size}: one batch of everything.")
    seed, wanted = asked.seed or 0, asked.batches or DEFAULT_BATCHES
    dealt = deal_batches(cut, asked.batch_tokens, wanted, seed)
    all_of_it = ", all that it fills" if len(dealt) < wanted else ""
    long_ones = int((cut > asked.batch_tokens).sum())
    too_long = f"; {long_ones:,} longer than a batch are cut at its end" if long_ones else ""
    note = f"{count_text(len(dealt), 'batch', 'batches')}{all_of_it}, documents shuffled with seed {seed}{too_long}."
    return DealtBatches(f"{name}: {corpus.documents:,} documents, {corpus.tokens:,} tokens",
                        tuple(map(check_lengths, dealt)), asked.num_ranks, asked.row_tokens, corpus, note, True)


def _workload(workload: Workload, asked: BatchesAsked) -> DealtBatches:
    path = asked.source
    for name in ("ranks", "tokens_per_rank"):
        wanted, found = getattr(asked, name), getattr(workload, name)
        if wanted is not None and wanted != found:
            raise UserError(f"{name} is {wanted} but {path} says {found}; leave the option out or change the file")
    lengths = np.concatenate(workload.sequences)
    if asked.max_document is not None and lengths.max() > asked.max_document:
        raise UserError(f"max_document is {asked.max_document} but {path} holds a document of {lengths.max()} tokens, "
                        "and cutting it would leave its ranks unfilled; leave the option out or change the file")
    check_whole("ranks", workload.ranks, most=MAX_RANKS, why=RANKS_WHY)
    return DealtBatches(f"{workload.name} ({plain(path)})", (lengths,), workload.ranks, workload.tokens_per_rank)


def _one_batch(
    name: str, lengths: IntArray, asked: BatchesAsked, tokens_per_rank: int | None,
    corpus: CorpusFigures | None = None, note: str = "",
) -> DealtBatches:
    """Take documents in order until the ranks are full, and cut the last; without tokens_per_rank take all of them."""
    ranks, num_documents = asked.num_ranks, len(lengths)
    if asked.max_document is not None:
        lengths = np.minimum(lengths, asked.max_document)
    total = int(lengths.sum())
    tokens_per_rank = tokens_per_rank or total // ranks
    if tokens_per_rank == 0:
        raise UserError(f"ranks is {ranks} but {name} holds {total} tokens; give at most {total} ranks")
    lengths = fill(lengths, ranks * tokens_per_rank)
    return DealtBatches(f"{plain(name)}: {len(lengths):,} of {num_documents:,} documents", (lengths,), ranks,
                        tokens_per_rank, corpus, note)
