"""Loss on documents that training never sees, without a trace in training.

Which documents are held out is a hash of their number and `data.seed`: the same when a run resumes, on any mesh, and
however often it evaluates. An evaluation is the first batches of these documents in an order of their own, always the
same ones and never one twice, through the same forward pass as training's, attention's pool and pipeline included, but
without gradients. Weights, optimizer, random state and position in the data are left as they were.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
import torch.distributed as dist

from distca.corpus.corpora import Corpus, PartOfCorpus, corpus_from
from distca.spec import ModelShape
from distca.train.data import Agree, Batch, Loader
from distca.train.settings import Settings
from distca.validation import UserError
from distca.workload.topology import Topology


def corpora(settings: Settings) -> tuple[Corpus, Corpus | None]:
    """What is trained on, and what is held out, if anything is."""
    whole, chosen = corpus_from(settings), settings.eval
    if chosen.path:
        return whole, corpus_from(settings.with_values({"data.path": chosen.path, "data.split": ""}))
    if not chosen.fraction:
        return whole, None
    held = held_out(whole.num_documents, chosen.fraction, settings.data.seed)
    for what, count in (("held out", held.sum()), ("left to train on", (~held).sum())):
        if count == 0:
            raise UserError(f"eval.fraction is {chosen.fraction}, by which none of {whole.num_documents} documents is "
                            f"{what}; choose another fraction, or give eval.path")
    return PartOfCorpus(whole, np.flatnonzero(~held)), PartOfCorpus(whole, np.flatnonzero(held))


def held_out(num_documents: int, fraction: float, seed: int) -> np.ndarray:
    """[documents] whether each is held out, by a hash (SplitMix64) of its number and the seed."""
    key = _mixed(np.array([seed], dtype=np.uint64))
    hashed = _mixed(np.arange(num_documents, dtype=np.uint64) + key)
    return (hashed >> np.uint64(11)) * 2.0**-53 < fraction


def batch_tokens(settings: Settings, num_data: int) -> int:
    """Tokens of a step over all data ranks."""
    return num_data * settings.batch.tokens_per_rank * settings.batch.micro_batches


def check_fills_a_batch(corpus: Corpus, settings: Settings, num_data: int) -> None:
    """Refuse to train on fewer tokens than a step takes."""
    tokens, needed = int(corpus.lengths().sum()), batch_tokens(settings, num_data)
    if tokens < needed:
        raise UserError(f"the corpus has {tokens} tokens but a step takes {needed} ({num_data} data ranks of "
                        f"batch.tokens_per_rank {settings.batch.tokens_per_rank}, batch.micro_batches "
                        f"{settings.batch.micro_batches}); give more documents, or fewer tokens a step")


class Evaluation:
    """The batches of one data rank that are held out."""

    def __init__(
        self, corpus: Corpus, settings: Settings, *, rank: int, world: int, model: ModelShape,
        topology: Topology | None = None, agree: Agree | None = None,
    ) -> None:
        tokens, needed = int(corpus.lengths().sum()), batch_tokens(settings, world)
        if tokens < needed:
            remedy = "give more at eval.path" if settings.eval.path else "raise eval.fraction"
            raise UserError(f"the held-out documents have {tokens} tokens but a batch takes {needed}; {remedy}, or "
                            "take fewer tokens a step")
        self._loader = Loader(corpus, settings, rank=rank, world=world, model=model, topology=topology,
                              trains=False, agree=agree)
        self._start = self._loader.state()
        self._num_batches = min(settings.eval.batches, tokens // needed)
        self._every, self._last = settings.eval.every, settings.run.steps

    def is_due(self, step: int) -> bool:
        return step % self._every == 0 or step == self._last

    @torch.no_grad()
    def loss(self, forward: Callable[[Batch], torch.Tensor], pool: dist.ProcessGroup) -> float:
        """Mean over the labels of all batches; `forward` gives the sum over this rank's labels of one."""
        self._loader.load(self._start)
        totals, num_labels = [], 0
        for _ in range(self._num_batches):
            batch = self._loader.next()
            totals.append(forward(batch))
            num_labels += batch.num_labels
        self._loader.close()
        if num_labels == 0:
            raise UserError("the held-out documents have no token in the loss; hold out others, or more of them")
        total = torch.stack(totals).sum()
        dist.all_reduce(total, group=pool)
        return float(total) / num_labels


def _mixed(values: np.ndarray) -> np.ndarray:
    """SplitMix64's output function, modulo 2**64."""
    values = (values + np.uint64(0x9E3779B97F4A7C15))
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))
