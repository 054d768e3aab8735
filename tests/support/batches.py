"""Random tokens for the micro-batches of a step plan, as a rank's loader would give them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from distca.corpus.corpora import Corpus
from distca.planning.step import MicroBatch, StepPlan
from distca.spec import ModelShape
from distca.train.batches import Batch, Batches
from distca.train.data import Loader, TrainingRow
from distca.train.settings import Settings


def nano_index(micro_batch: MicroBatch, nano: int, rank: int) -> torch.Tensor:
    """The same of a rank's row in a nano-batch, for the documents of the whole micro-batch."""
    tokens = micro_batch.layouts[nano].tokens(rank)
    begin = np.cumsum(micro_batch.lengths) - micro_batch.lengths
    return torch.from_numpy(begin[micro_batch.nano_batches[nano].document[tokens.document]] + tokens.position)


def document_columns(lengths: Sequence[int], vocab: int, seed: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Random tokens of documents laid end to end, with their labels and positions."""
    tokens = torch.randint(0, vocab, (sum(lengths),), generator=torch.Generator().manual_seed(seed))
    labels = torch.cat([F.pad(document[1:], (0, 1), value=-100) for document in tokens.split(list(lengths))])
    return tokens, labels, torch.cat([torch.arange(length) for length in lengths])


def batch_of(plan: StepPlan, rank: int, vocab: int) -> Batch:
    """A data rank's rows of a step whose micro-batch m is `document_columns(…, seed=m)`."""
    rows = []
    for number, micro_batch in enumerate(plan.micro_batches):
        tokens, labels, positions = document_columns(micro_batch.lengths.tolist(), vocab, number)
        at = [nano_index(micro_batch, nano, rank) for nano in range(plan.num_nano_batches)]
        rows.append(tuple(TrainingRow(tokens[index], labels[index], positions[index], micro_batch.key_runs(nano, rank))
                          for nano, index in enumerate(at)))
    return Batch(tuple(rows), plan, plan.summary(), 0.0, 0.0, plan.num_labels)


def batches_of(corpus: Corpus, settings: Settings, *, rank: int = 0, world: int = 1, model: ModelShape,
               **options: Any) -> Batches:
    """One data rank's batches of a corpus."""
    return Batches(Loader(corpus, settings, rank=rank, world=world, model=model), **options)
