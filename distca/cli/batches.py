"""Turn what a user names into a batch: a sampler, the standard library, a lengths file or a workload file."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from distca.spec import unknown_name
from distca.validation import DOCUMENTS_WHY, MAX_DOCUMENTS, MAX_RANKS, check_whole, plain
from distca.workload.documents import SAMPLERS, Workload, fill, read_source, sample_lengths, standard_library_lengths
from distca.workload.packing import cut_at_ranks

STANDARD_LIBRARY = "stdlib"
DEFAULT_RANKS = 8
DEFAULT_TOKENS_PER_RANK = 65_536
COST_HELP = "Latency table: a file that `distca profile` wrote, or the name of a shipped one."
MAX_TOKENS = 2**34  # 65,536 ranks of 256K, about as many documents as fit: beyond it a typing error is likelier
RANKS_WHY = "the most that plans have been tried with; plan a larger cluster as several pools"


@dataclass(frozen=True, slots=True, eq=False)
class DocumentBatch:
    """Documents that fill their ranks exactly; with a workload, each inside its own sequence's ranks."""

    source: str  # for people
    lengths: np.ndarray  # [documents]
    ranks: int
    tokens_per_rank: int
    workload: Workload | None = None


def read_batch(
    source: str, ranks: int | None, tokens_per_rank: int | None, seed: int | None, max_document: int | None
) -> DocumentBatch:
    """The batch that SOURCE names. Bare names of samplers are samplers; anything else that exists is a file."""
    if ranks is not None:
        check_whole("ranks", ranks, most=MAX_RANKS, why=RANKS_WHY)
    if tokens_per_rank is not None:
        check_whole("tokens_per_rank", tokens_per_rank)
    wanted = (ranks or DEFAULT_RANKS) * (tokens_per_rank or DEFAULT_TOKENS_PER_RANK)
    check_whole("ranks times tokens_per_rank", wanted, most=MAX_TOKENS, why="the largest batch that is planned")
    check_whole("the number of documents, ranks times tokens_per_rank over max_document,",
                wanted // (max_document or wanted), least=0, most=MAX_DOCUMENTS, why=DOCUMENTS_WHY)
    if source in SAMPLERS:
        seed = 0 if seed is None else seed
        lengths = sample_lengths(source, wanted, seed=seed, max_document=max_document)
        return DocumentBatch(f"{source}, seed {seed}", lengths, ranks or DEFAULT_RANKS,
                     tokens_per_rank or DEFAULT_TOKENS_PER_RANK)
    if seed is not None:
        raise ValueError(f"seed is {seed} but {source!r} is not a sampler; leave --seed out or name one of: "
                         f"{', '.join(SAMPLERS)}")
    if source == STANDARD_LIBRARY:
        lengths = standard_library_lengths()
        most = int(lengths.sum()) // (ranks or DEFAULT_RANKS)
        return _batch_of_lengths("Python's standard library, a token per byte", lengths, ranks,
                                 tokens_per_rank or min(DEFAULT_TOKENS_PER_RANK, most), max_document)
    if not Path(source).exists():
        refuse_source(source)
    content = read_source(source)
    if isinstance(content, Workload):
        return _batch_of_workload(source, content, ranks, tokens_per_rank, max_document)
    return _batch_of_lengths(source, content, ranks, tokens_per_rank, max_document)


def refuse_source(source: str, field: str = "SOURCE") -> None:
    """The error for a source that is neither a name nor a file."""
    names = (*SAMPLERS, STANDARD_LIBRARY)
    if Path(source).name != source or Path(source).suffix:
        raise ValueError(f"{source}: no such file; check the path, or name one of: {', '.join(names)}")
    raise ValueError(f"{unknown_name(field, source, names)}, or give the path of a workload or lengths file; no "
                     "file of this name is here")


def _batch_of_workload(
    path: str, workload: Workload, ranks: int | None, tokens_per_rank: int | None, max_document: int | None
) -> DocumentBatch:
    for field, asked, said in (("ranks", ranks, workload.ranks),
                               ("tokens_per_rank", tokens_per_rank, workload.tokens_per_rank)):
        if asked is not None and asked != said:
            raise ValueError(f"{field} is {asked} but {path} says {said}; leave the option out or change the file")
    lengths = np.concatenate(workload.sequences)
    if max_document is not None and lengths.max() > max_document:
        raise ValueError(f"max_document is {max_document} but {path} holds a document of {lengths.max()} tokens, and "
                         "cutting it would leave its ranks unfilled; leave the option out or change the file")
    check_whole("ranks", workload.ranks, most=MAX_RANKS, why=RANKS_WHY)
    return DocumentBatch(f"{workload.name} ({plain(path)})", lengths, workload.ranks, workload.tokens_per_rank,
                         workload)


def _batch_of_lengths(
    name: str, lengths: np.ndarray, ranks: int | None, tokens_per_rank: int | None, max_document: int | None
) -> DocumentBatch:
    """As many leading documents as fill the ranks, the last one cut; all of them where nothing else is asked."""
    ranks = ranks or DEFAULT_RANKS
    whole = len(lengths)
    if max_document is not None:
        lengths = np.minimum(lengths, max_document)
    total = int(lengths.sum())
    tokens_per_rank = tokens_per_rank or total // ranks
    if tokens_per_rank == 0:
        raise ValueError(f"ranks is {ranks} but {name} holds {total} tokens; give at most {total} ranks")
    lengths = fill(lengths, ranks * tokens_per_rank)
    return DocumentBatch(f"{plain(name)}: {len(lengths):,} of {whole:,} documents", lengths, ranks, tokens_per_rank)


def without_spanning(batch: DocumentBatch) -> DocumentBatch:
    """The same tokens with every document cut at its rank's end."""
    lengths = cut_at_ranks(batch.lengths, batch.tokens_per_rank)
    workload = batch.workload
    if workload is not None:
        workload = Workload(workload.name, workload.ranks, workload.tokens_per_rank,
                            tuple(cut_at_ranks(sequence, workload.tokens_per_rank) for sequence in workload.sequences))
    return DocumentBatch(f"{batch.source}, cut at ranks", lengths, batch.ranks, batch.tokens_per_rank, workload)
