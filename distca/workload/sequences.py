"""Batches for one context length: sequences of exactly that many tokens, filled with documents.

Long contexts are trained on long documents. Beyond the samplers' own upsampling, `pretrain` lengths grow with the
context, times context / 64K, and in `prolong` a long document becomes as long as the context with a chance of 0.3.
Lengths of one's own are drawn with replacement, so that a small file fills any number of batches.

A document exactly as long as the context is a sequence by itself. Others are packed in order; one that crosses the end
of a sequence is cut there and the part behind is a document of its own, as packed loaders do.

A corpus as a distribution of lengths: batches dealt from it, and what all of it looks like.

No training step sees a whole corpus. What balancing saves is decided batch by batch, by the few documents that share
one, so a file of lengths is shuffled and dealt into batches of the size that a step has. The documents of a batch
follow each other as in a packed loader: the one that crosses its end is cut there, however long it is, and what is
behind the cut begins the next batch as a document of its own.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from distca.validation import MAX_CORPUS_DOCUMENTS, UserError, check_whole
from distca.workload.documents import (
    LONG_DOCUMENT,
    QUANTILES,
    IntArray,
    check_lengths,
    fill,
    lognormal_lengths,
    quantile_lengths,
    upsampled,
)
from distca.workload.packing import causal_work

CONTEXT_LONG_CHANCE = 0.3  # of a long document of `prolong` to fill the whole context
_DRAWS = 4096


@dataclass(frozen=True, slots=True, eq=False)
class Source:
    """Where lengths come from: a sampler by name, or lengths to draw from."""

    name: str
    lengths: np.ndarray | None = None  # None: `name` is a sampler

    def __post_init__(self) -> None:
        if self.lengths is not None:
            object.__setattr__(self, "lengths", check_lengths(self.lengths, most=MAX_CORPUS_DOCUMENTS))

    def check_context(self, context: int) -> None:
        """Refuse a context that no document would ever fill."""
        if self.lengths is not None and int(self.lengths.max()) < context:
            raise UserError(f"context is {context} but the longest document of {self.name} has "
                            f"{self.lengths.max()} tokens; give --context {self.lengths.max()} or less")


def batch_sequences(source: Source, context: int, num_sequences: int, seed: tuple[int, ...]) -> list[np.ndarray]:
    """`num_sequences` lists of document lengths of `context` tokens each; the same seed gives the same documents."""
    for field, value in (("context", context), ("num_sequences", num_sequences)):
        if value < 1:
            raise UserError(f"{field} is {value}; give a whole number of at least 1")
    rng = np.random.default_rng(seed)
    draw = partial(_drawn, source, context, rng)
    chunks: list[np.ndarray] = []
    total, wanted = 0, context * num_sequences
    while total < wanted:
        chunks.append(draw())
        total += int(chunks[-1].sum())
    lengths = np.concatenate(chunks)
    before = np.cumsum(lengths) - lengths                        # [documents] tokens drawn earlier
    lengths, before = lengths[before < wanted], before[before < wanted]
    is_whole = lengths == context
    firsts = before[is_whole].tolist()[:num_sequences]
    sequences = [np.array([context])] * len(firsts)
    num_packed = num_sequences - len(firsts)
    if num_packed:
        ends = np.cumsum(fill(lengths[~is_whole], context * num_packed))
        cuts = np.unique(np.concatenate([ends, context * np.arange(1, num_packed + 1)]))
        parts = np.split(np.diff(cuts, prepend=0), np.searchsorted(cuts, context * np.arange(1, num_packed)) + 1)
        drawn = np.cumsum(lengths[~is_whole]) - lengths[~is_whole]
        opens = np.searchsorted(drawn, context * np.arange(num_packed), side="right") - 1
        firsts += before[~is_whole][opens].tolist()
        sequences += parts
    return [sequences[at] for at in np.argsort(firsts, kind="stable")]


def _drawn(source: Source, context: int, rng: np.random.Generator) -> np.ndarray:
    if source.lengths is not None:
        return np.minimum(rng.choice(source.lengths, _DRAWS), context)
    if source.name not in QUANTILES:
        return upsampled(rng, lognormal_lengths(rng, _DRAWS))
    lengths = upsampled(rng, quantile_lengths(rng, _DRAWS, source.name))
    if source.name == "pretrain":
        return np.maximum(lengths * context // LONG_DOCUMENT, 1)
    grows = (lengths > LONG_DOCUMENT) & (rng.random(len(lengths)) < CONTEXT_LONG_CHANCE)
    return np.where(grows, context, lengths)


QUANTILE_LEVELS_SHOWN = (0.5, 0.9, 0.99, 0.999)
LONG_FROM = (8_192, 32_768, 131_072, 524_288, 2_097_152)


@dataclass(frozen=True, slots=True)
class LongDocuments:
    """Documents of at least so many tokens. Shares are of the corpus."""

    least: int
    documents: int
    token_share: float
    attention_share: float  # of the causal pairs


@dataclass(frozen=True, slots=True)
class CorpusFigures:
    """What the lengths of a corpus look like."""

    documents: int
    tokens: int
    quantiles: tuple[tuple[float, int], ...]  # level and length: so many documents are no longer
    longest: int
    long_documents: tuple[LongDocuments, ...]

    @classmethod
    def of(cls, lengths: IntArray) -> CorpusFigures:
        tokens = int(lengths.sum())
        pairs = _pairs(lengths)
        levels = np.quantile(lengths, QUANTILE_LEVELS_SHOWN, method="inverted_cdf")
        long_documents = []
        for least in LONG_FROM:
            is_long = lengths >= least
            long_documents.append(LongDocuments(
                least, int(is_long.sum()), int(lengths[is_long].sum()) / tokens,
                _pairs(lengths[is_long]) / pairs))
        return cls(len(lengths), tokens, tuple(zip(QUANTILE_LEVELS_SHOWN, map(int, levels), strict=True)),
                   int(lengths.max()), tuple(long_documents))

    def as_json(self) -> dict[str, Any]:
        return {
            "documents": self.documents, "tokens": self.tokens, "longest": self.longest,
            "quantiles": {f"{level:g}": length for level, length in self.quantiles},
            "long_documents": [{"least": one.least, "documents": one.documents, "token_share": one.token_share,
                                "attention_share": one.attention_share} for one in self.long_documents],
        }


def _pairs(lengths: IntArray) -> float:
    return float(causal_work(np.zeros_like(lengths), lengths).sum())


def deal_batches(lengths: IntArray, batch_tokens: int, num_batches: int, seed: int | None) -> list[IntArray]:
    """As many batches as are asked for and the documents fill, at most; the seed shuffles, None keeps the order."""
    check_whole("batch_tokens", batch_tokens)
    check_whole("num_batches", num_batches)
    if seed is not None:
        lengths = np.random.default_rng(seed).permutation(lengths)
    ends = np.cumsum(lengths)
    num_batches = min(num_batches, int(ends[-1]) // batch_tokens)
    stops = batch_tokens * np.arange(1, num_batches + 1)
    if not num_batches:
        return []
    cuts = np.union1d(ends[:np.searchsorted(ends, stops[-1])], stops)
    return np.split(np.diff(cuts, prepend=0), np.searchsorted(cuts, stops[:-1]) + 1)
