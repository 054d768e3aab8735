"""A corpus as a distribution of lengths: batches dealt from it, and what all of it looks like.

No training step sees a whole corpus. What balancing saves is decided batch by batch, by the few documents that share
one, so a file of lengths is shuffled and dealt into batches of the size that a step has. The documents of a batch
follow each other as in a packed loader: the one that crosses its end is cut there, however long it is, and what is
behind the cut begins the next batch as a document of its own.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from distca.validation import check_whole
from distca.workload.documents import IntArray
from distca.workload.packing import causal_work

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
