"""Draw batches from a distribution of lengths: sequences of one context length, or the batches of a corpus.

Long contexts are trained on long documents. So, besides the samplers' upsampling, `pretrain` lengths are multiplied by
context / 64K, and in `prolong` a long document becomes as long as the context with probability 0.3. Users' lengths are
drawn with replacement, so that a small file fills any number of batches. A document as long as the context is a
sequence by itself; others are packed in order.

How much balancing saves depends on the few documents that share a batch. So `deal_batches` shuffles the lengths of a
corpus and cuts them into batches of the size of a step. As in packed loaders, a document that crosses the end of a
sequence or batch is cut there, and the part after the cut becomes a separate document.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from distca.columns import IntArray
from distca.spec import unknown_name
from distca.validation import MAX_CORPUS_DOCUMENTS, UserError, check_whole
from distca.workload.documents import LONG_DOCUMENT, SAMPLERS, check_lengths, draw_lengths, fill, upsampled
from distca.workload.packing import causal_work

CONTEXT_LONG_CHANCE = 0.3  # probability that a long document of `prolong` fills the whole context
_DRAWS = 4096


@dataclass(frozen=True, slots=True, eq=False)
class Source:
    """A distribution of lengths: a sampler by name, or lengths to draw from."""

    name: str
    lengths: np.ndarray | None = None  # None: `name` is a sampler

    def __post_init__(self) -> None:
        if self.lengths is not None:
            object.__setattr__(self, "lengths", check_lengths(self.lengths, most=MAX_CORPUS_DOCUMENTS))
        elif self.name not in SAMPLERS:
            raise unknown_name("sampler", self.name, SAMPLERS)

    def check_context(self, context: int) -> None:
        """Refuse a context longer than every document."""
        if self.lengths is not None and int(self.lengths.max()) < context:
            raise UserError(f"context is {context} but the longest document of {self.name} has "
                            f"{self.lengths.max()} tokens; give --context {self.lengths.max()} or less")


def batch_sequences(source: Source, context: int, num_sequences: int, seed: tuple[int, ...]) -> list[np.ndarray]:
    """Draw `num_sequences` sequences of `context` tokens, as document lengths; the same seed gives the same ones."""
    check_whole("context", context)
    check_whole("num_sequences", num_sequences)
    rng = np.random.default_rng(seed)
    chunks: list[np.ndarray] = []
    total, wanted = 0, context * num_sequences
    while total < wanted:
        chunks.append(_draw(source, context, rng))
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


def _draw(source: Source, context: int, rng: np.random.Generator) -> np.ndarray:
    if source.lengths is not None:
        return np.minimum(rng.choice(source.lengths, _DRAWS), context)
    lengths = upsampled(rng, draw_lengths(rng, _DRAWS, source.name))
    if source.name == "pretrain":
        return np.maximum(lengths * context // LONG_DOCUMENT, 1)
    if source.name != "prolong":
        return lengths
    grows = (lengths > LONG_DOCUMENT) & (rng.random(len(lengths)) < CONTEXT_LONG_CHANCE)
    return np.where(grows, context, lengths)


QUANTILES_SHOWN = (0.5, 0.9, 0.99, 0.999)
LONG_FROM = (8_192, 32_768, 131_072, 524_288, 2_097_152)


@dataclass(frozen=True, slots=True)
class LongDocuments:
    """The number of documents of at least `least` tokens, and their shares of the corpus."""

    least: int
    documents: int
    token_share: float
    attention_share: float  # of the causal pairs


@dataclass(frozen=True, slots=True)
class CorpusFigures:
    """Statistics of the lengths of a corpus."""

    documents: int
    tokens: int
    quantiles: tuple[tuple[float, int], ...]  # (probability, length)
    longest: int
    long_documents: tuple[LongDocuments, ...]

    @classmethod
    def of(cls, lengths: IntArray) -> CorpusFigures:
        tokens = int(lengths.sum())
        pairs = _pairs(lengths)
        quantiles = np.quantile(lengths, QUANTILES_SHOWN, method="inverted_cdf").astype(int).tolist()
        long_documents = (LongDocuments(least, len(some), int(some.sum()) / tokens, _pairs(some) / pairs)
                          for least in LONG_FROM for some in [lengths[lengths >= least]])
        return cls(len(lengths), tokens, tuple(zip(QUANTILES_SHOWN, quantiles, strict=True)), int(lengths.max()),
                   tuple(long_documents))

    def as_json(self) -> dict[str, Any]:
        return {"documents": self.documents, "tokens": self.tokens, "longest": self.longest,
                "quantiles": {f"{share:g}": length for share, length in self.quantiles},
                "long_documents": [asdict(one) for one in self.long_documents]}


def _pairs(lengths: IntArray) -> float:
    return float(causal_work(np.zeros_like(lengths), lengths).sum())


def deal_batches(lengths: IntArray, batch_tokens: int, num_batches: int, seed: int | None) -> list[IntArray]:
    """Return `num_batches` batches, or fewer if the documents do not fill them; a seed shuffles the documents."""
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
