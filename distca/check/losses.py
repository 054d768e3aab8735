"""Is every label counted once, with the same weight, and compared with the right token?

The loss is held against the mean cross entropy over the labels, of the model's own logits. So what is wrong with
attention does not show here. Where the loss is another known mean, the finding names that mean.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch

from distca.check import Finding
from distca.check.agreement import GRADIENT_BOUND, compared, lone_gradients
from distca.check.batches import Batch, Tokens, alone, tokens_of
from distca.check.world import Gradients, World, loss_in, sums
from distca.workload.documents import IGNORED

LOSS_BOUND = 2e-5      # relative: losses are computed in float32, by sums over the vocabulary and over labels
COUNTED = "num_items_in_batch"


def labels(tokens: Tokens) -> Iterator[Finding]:
    """Compare what each output is compared with, as the batch says, with the next token of its document."""
    given, due, real = tokens.next_label, tokens.due_label, tokens.document >= 0
    following = np.full(len(given), IGNORED)
    for document in range(tokens.num_documents):
        at = tokens.of(document)
        following[at[:-1]] = tokens.ids[at[1:]]
    last, cuts = real & (following == IGNORED), {edge - 1 for edge in tokens.rank_edges[1:]}
    for kind, what, at, remedy in (
        ("label-across", "labels cross from one document into the next", last & (given != IGNORED),
         f"give each document's first token the label {IGNORED}, as DataCollatorWithFlattening does"),
        ("label-lost", "labels are lost where a document is cut", (given == IGNORED) & (due != IGNORED),
         "shift labels before the cut and pass them as shift_labels, as distca.data.rows does"),
        ("label-padding", "padding has labels", ~real & (given != IGNORED), f"label padding {IGNORED}"),
        ("label-shift", "labels are not the next token", real & ~last & (given != IGNORED) & (given != following),
         "labels are the tokens themselves, the model shifts them; only shift_labels are shifted"),
    ):
        most = at.sum() > 0.5 * (given != IGNORED).sum()
        if at.any() and (kind != "label-shift" or most or set(np.flatnonzero(at).tolist()) <= cuts):
            yield Finding(kind, what, f"{int(at.sum())} of {int((due != IGNORED).sum())} labels, the first at "
                          f"{tokens.name(int(np.flatnonzero(at)[0]))}", None, None, remedy)


def takes_count(model: torch.nn.Module) -> bool:
    names = inspect.signature(getattr(model, "module", model).forward).parameters.values()
    return any(one.name == COUNTED or one.kind is one.VAR_KEYWORD for one in names)


def weights(world: World, batches: Sequence[Batch], tokens: Tokens) -> tuple[list[Finding], Gradients | None]:
    """Compare the loss with the mean over labels, and return the gradients of the loss of all ranks."""
    batch, here = batches[world.rank], tokens.here(world.rank)
    total = int((tokens.next_label != IGNORED).sum())
    if total == 0 or (batch.get("labels") is None and batch.get("shift_labels") is None):
        return [], None
    logits, given = world.logits(batches), tokens.next_label[here]
    mine = sums(logits, given)
    means = _other_means(world, logits, given, tokens)
    plain = loss_in(world.run(batch))
    if not all(world.gather(plain is not None)):
        return [], None
    assert plain is not None
    found: list[Finding | None] = []
    if mine.labels:
        found.append(_weighed(float(plain.detach()), mine.loss / mine.labels, means, "the loss of a batch"))
    gradients = None
    if takes_count(world.subject.model):
        counted = loss_in(world.run({**batch, COUNTED: total}))
        assert counted is not None
        gradients = world.gradients(counted.backward)
        said = f"the loss with {COUNTED}, summed over ranks" if world.size > 1 else f"the loss with {COUNTED}"
        every = world.gather((float(counted.detach()), mine.loss))
        twice = loss_in(world.run({**batch, COUNTED: 2 * total}))
        found.append(_weighed(sum(one for one, _ in every), sum(one for _, one in every) / total, means, said))
        if mine.labels and twice is not None and not found[-1]:
            found.append(_weighed(float(twice.detach()), mine.loss / (2 * total), {"the mean of this micro-batch alone":
                                  float(plain.detach())}, f"the loss with {COUNTED} of two micro-batches"))
    elif world.size == 1:
        gradients = world.gradients(plain.backward)
    firsts = world.gather([one for one in found if one is not None])
    return next((some[:1] for some in firsts if some), []), gradients


def _other_means(world: World, logits: torch.Tensor, given: np.ndarray, tokens: Tokens) -> dict[str, float]:
    """Return what the loss would be, were it weighed in another way."""
    rows = given.reshape(-1, tokens.row_len[world.rank])
    per_row = [sums(part, row) for part, row in zip(logits.split(rows.shape[1]), rows, strict=True)]
    own = sums(logits, given)
    means = [one.loss / one.labels for one in per_row if one.labels]
    ranks = [one.loss / one.labels for one in world.gather(own) if one.labels]
    document = [sums(logits[torch.from_numpy(at)], given[at]) for at in (
        np.flatnonzero(tokens.document[tokens.here(world.rank)] == one) for one in range(tokens.num_documents))]
    by_document = [one.loss / one.labels for one in document if one.labels]
    found = {"that divided by the ranks": own.loss / max(own.labels, 1) / world.size,
             "the mean of the rows' means": float(np.mean(means or [0.0])),
             "the mean of the documents' means": float(np.mean(by_document or [0.0])),
             "the mean of this rank's labels": own.loss / max(own.labels, 1),
             "the mean over all tokens, labelled or not": own.loss / len(given)}
    if len(ranks) > 1:
        found |= {"the mean of the ranks' means": float(np.mean(ranks)), "the sum of the ranks' means": sum(ranks)}
    return found


def _weighed(actual: float, expected: float, means: dict[str, float], what: str) -> Finding | None:
    off = abs(actual - expected) / max(abs(expected), 1e-30)
    if off <= LOSS_BOUND:
        return None
    known = next((name for name, one in means.items() if abs(one - actual) <= LOSS_BOUND * abs(actual)), None)
    where = f"it is {actual:.6g}{f', {known},' if known else ''} and the mean over labels {expected:.6g}"
    said = "does not weigh every label the same" if known else "is not the mean cross entropy over labels"
    return Finding("loss", f"{what} {said}", where, off, LOSS_BOUND,
                   f"divide the summed cross entropy by the labels of all rows, ranks and micro-batches ({COUNTED})")


def trainer_step(world: World, batches: Sequence[Batch], tokens: Tokens) -> Iterator[Finding]:
    """Run the trainer's own step on two uneven micro-batches; compare its loss and the gradients that it leaves."""
    subject = world.subject
    total = int((tokens.due_label != IGNORED).sum())
    step = subject.step
    if step is None or not total:
        return
    lengths = np.bincount(tokens.document[tokens.document >= 0])
    second = [alone(batches, tokens, int(np.argmax(lengths)))] * world.size
    both = [(second, tokens_of(second, shifted=tokens.shifted)), (batches, tokens)]
    count = sum(int((one.due_label != IGNORED).sum()) for _, one in both)
    loss = sum(sums(world.logits(some), one.due_label[one.here(world.rank)]).loss for some, one in both)
    expected = sum(world.gather(loss)) / count
    returned: list[Any] = []
    found = world.gradients(lambda: returned.append(step(subject.model, [batches[world.rank], second[0]])), summed=True)
    if returned[0] is not None:
        found_loss = float(np.mean(world.gather(float(returned[0]))))
        yield from filter(None, [_weighed(found_loss, expected, {}, "the loss of a step")])
    parts = [lone_gradients(world, some, one, count) for some, one in both]
    if parts[0] is not None and parts[1] is not None:
        due = {name: one + parts[1][name] for name, one in parts[0].items()}
        yield from compared(due, found, GRADIENT_BOUND * subject.bound, world.size)

