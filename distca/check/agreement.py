"""Compare what must agree: packed and alone, one attention and another, the gradients of both.

Alone, a document is a batch of its own, so nothing can be wrong about where it begins. The plain copy of a Transformers
model, with eager attention and nothing added, is what attention is held against.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch.nn.functional import cross_entropy

from distca.check import Finding
from distca.check.batches import Batch, Tokens, alone
from distca.check.subject import KERNELS, plain_copy
from distca.check.visibility import layers_of
from distca.check.world import Gradients, World, far, scale_of
from distca.workload.documents import IGNORED

GRADIENT_BOUND = 4     # times that of outputs: backward adds as many roundings again, to sums over tokens
SMALL_GRADIENT = 0.05  # of the largest: below it a parameter's gradient is compared with this, for it may cancel


def packed_and_alone(world: World, batches: Sequence[Batch], tokens: Tokens) -> Iterator[Finding]:
    """Compare every document in the batches with the same document in a batch of its own."""
    packed = world.logits(batches)
    off, scale = np.zeros(len(tokens.document)), scale_of(world, tokens, packed)
    here = tokens.here(world.rank)
    for document in range(tokens.num_documents):
        at = tokens.of(document)
        lone = world.logits([alone(batches, tokens, document)] * world.size)
        mine = (at >= here.start) & (at < here.stop)
        apart = far(packed[torch.from_numpy(at[mine] - here.start).to(packed.device)],
                    lone[torch.from_numpy(np.flatnonzero(mine)).to(lone.device)])
        for its_tokens, values in world.gather((at[mine], apart.cpu().numpy())):
            off[its_tokens] = values
    yield from _apart(tokens, off / scale, world.subject.bound)


def _apart(tokens: Tokens, off: np.ndarray, bound: float) -> Iterator[Finding]:
    wrong = np.flatnonzero(off > bound)
    if not len(wrong):
        return
    spans = len({tokens.rank(int(one)) for one in tokens.of(int(tokens.document[wrong[0]]))}) > 1
    what, remedy = (
        ("a document over ranks differs from the same on one",
         "give every rank's slice its true positions, and attention the keys of the slices before") if spans else
        ("a packed document differs from the same alone", "check masks, edges and positions of the packed batch"))
    documents = np.unique(tokens.document[wrong])
    yield Finding("over-ranks" if spans else "alone", what,
                  f"{len(wrong)} outputs of document{'s' * (len(documents) > 1)} "
                  f"{', '.join(map(str, documents[:6]))}, the first at {tokens.name(int(wrong[0]))}",
                  float(off.max()), bound, remedy)


def kernels(world: World, batches: Sequence[Batch], tokens: Tokens) -> Iterator[Finding]:
    """Compare attention on single documents with eager's: the subject's own and, built from a config, all there are."""
    subject, names = world.subject, KERNELS if world.subject.batch is None else ()
    plain = world.plain
    if plain is None:
        return
    lone = [alone(batches, tokens, document) for document in range(tokens.num_documents)]
    own = getattr(subject.config, "_attn_implementation", "its own")
    others: dict[str, Any] = {own: None}
    others |= {name: found for name in names if name != own and (found := plain_copy(subject, name)) is not None}
    wrong: set[str] = set()
    for raised in (False, True)[:1 + bool(getattr(subject.config, "attn_logit_softcapping", None))]:
        scales = [*_raised([subject.model, plain, *filter(None, others.values())], subject.config)] if raised else []
        for name, model in others.items():
            off, scale, first = 0.0, 0.0, 0
            for document, batch in enumerate(lone):
                expected = world.logits([batch] * world.size, plain)
                apart = far(world.logits([batch] * world.size, model), expected)
                scale = max(scale, float(expected.abs().max()))
                off, first = max((off, first), (float(apart.max()), document), key=lambda one: one[0])
            off = max(world.gather(off / scale))
            if off > subject.bound and name not in wrong:
                wrong.add(name)
                softly = ", where scores are large enough for the softcap" if raised else ""
                yield Finding("kernel", f"attention {name} differs from eager",
                              f"on single documents{softly}, most in document {first}", off, subject.bound,
                              "check that it applies the model's scale, softcap, sinks and window, or use another")
        for part, scaling in scales:
            part.scaling = scaling


def _raised(models: Sequence[torch.nn.Module], config: Any) -> Iterator[tuple[Any, float]]:
    """Raise the scale of scores until the softcap bends them; yield the parts with their scale of before."""
    for model in models:
        for part in layers_of(model):
            scaling = getattr(part, "scaling", None)
            if isinstance(scaling, float):
                yield part, scaling
                dim = getattr(part, "head_dim", 64)
                part.scaling = max(scaling, float(config.attn_logit_softcapping) / 8 / dim**0.5)


def gradients(world: World, batches: Sequence[Batch], tokens: Tokens, found: Gradients | None) -> Iterator[Finding]:
    """Compare the gradients of the mean loss over all labels with those of the documents one at a time."""
    total = int((tokens.due_label != IGNORED).sum())
    if found is None or not total:
        return
    expected = lone_gradients(world, batches, tokens, total)
    if expected is None or expected.keys() != found.keys():
        return
    yield from compared(expected, found, GRADIENT_BOUND * world.subject.bound, world.size)


def lone_gradients(world: World, batches: Sequence[Batch], tokens: Tokens, total: int) -> Gradients | None:
    """Return the gradients that a plain copy has on one document at a time, or None without such a copy."""
    plain = world.plain
    if plain is None:
        return None
    plain.zero_grad(set_to_none=True)
    for document in range(tokens.num_documents):
        batch, at = alone(batches, tokens, document), tokens.of(document)
        logits = world.run({"input_ids": batch["input_ids"], "position_ids": torch.arange(len(at))[None],
                            "use_cache": False}, plain).logits[0]
        labels = torch.from_numpy(tokens.due_label[at]).to(logits.device)
        if (labels != IGNORED).any():
            (cross_entropy(logits.float(), labels, ignore_index=IGNORED, reduction="sum") / total).backward()
    return {name: torch.zeros_like(one).double() if one.grad is None else one.grad.double()
            for name, one in plain.named_parameters() if one.requires_grad}


def compared(expected: Gradients, found: Gradients, bound: float, ranks: int) -> Iterator[Finding]:
    largest_of_all = max(float(one.abs().max()) for one in expected.values())
    products = [(float((found[name] * one).sum()), float((one * one).sum())) for name, one in expected.items()]
    ratio = sum(one for one, _ in products) / max(sum(one for _, one in products), 1e-300)

    def off(name: str, times: float = 1.0) -> float:
        """Return how far a gradient is from `times` the expected one, relative to its largest entry."""
        size = max(float(expected[name].abs().max()), SMALL_GRADIENT * largest_of_all)
        return float((found[name] - times * expected[name]).abs().nan_to_num(nan=torch.inf).max()) / size

    apart = {name: off(name) for name in expected}
    count, worst = sum(one > bound for one in apart.values()), max(apart, key=lambda name: apart[name])
    if not count:
        return
    if abs(ratio - 1) > bound and all(off(name, ratio) <= bound * abs(ratio) for name in expected):
        as_ranks = next((f", the number of ranks{' inverted' * (ratio < 1)}" for one in (ranks, 1 / ranks)
                         if ranks > 1 and abs(ratio / one - 1) < 10 * bound), "")
        yield Finding("gradient-scale", f"gradients are {ratio:.6g} times those of the mean loss over labels",
                      f"all {len(expected)} parameters{as_ranks}", abs(ratio - 1), bound,
                      "divide the summed loss by the labels of all ranks and micro-batches, once, and average or sum "
                      "gradients over ranks accordingly")
        return
    yield Finding("gradients", "gradients differ from those of the documents alone",
                  f"{count} of {len(expected)} parameters, most {worst}", apart[worst], bound,
                  "see the lines before; if there are none, look at the backward of the attention in use")

