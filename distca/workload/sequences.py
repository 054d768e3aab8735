"""Batches for one context length: sequences of exactly that many tokens, filled with documents.

Long contexts are trained on long documents. Beyond the samplers' own upsampling, `pretrain` lengths grow with the
context, times context / 64K, and in `prolong` a long document becomes as long as the context with a chance of 0.3.
Lengths of one's own are drawn with replacement, so that a small file fills any number of batches.

A document exactly as long as the context is a sequence by itself. Others are packed in order; one that crosses the end
of a sequence is cut there and the part behind is a document of its own, as packed loaders do.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import numpy as np

from distca.validation import MAX_CORPUS_DOCUMENTS, UserError
from distca.workload.documents import (
    LONG_DOCUMENT,
    QUANTILES,
    check_lengths,
    fill,
    lognormal_lengths,
    quantile_lengths,
    upsampled,
)

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
