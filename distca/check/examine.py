"""Run all probes on a subject and return what they found, the same on every rank.

Whatever a probe finds must be found again with other tokens: where experts are routed, rounding may send a token that
two experts suit equally well to another one, and does not do so twice.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from distca.check import Finding
from distca.check.agreement import gradients, kernels, packed_and_alone
from distca.check.batches import Batch, Tokens, over_ranks, packings, renamed, tokens_of
from distca.check.losses import labels, takes_count, trainer_step, weights
from distca.check.subject import Subject, windows
from distca.check.visibility import each_layer, one_token, positions
from distca.check.world import World, is_shifted
from distca.runtime.transport.c10d import first_line
from distca.runtime.transport.interface import TransportError
from distca.validation import UserError

Record = dict[str, Any]
Update = Callable[[str], object]
GIVEN = "the batch given"


def examine(subject: Subject, update: Update = lambda _: None) -> Record:
    """Return findings, notes and the probes that ran; every rank calls this and returns the same."""
    world = World(subject)
    every, records, findings = _batches(world, 0), list[Record](), list[Finding]()
    for name, batches in every.items():
        found, ran = examined(world, name, batches, update)
        if found:
            again = renamed(batches, subject.special_ids, 1) if name == GIVEN else _batches(world, 1)[name]
            kept = {one.kind for one in examined(world, name, again, update)[0]}
            found = [one for one in found if one.kind in kept]
        records += [{"batch": name, "probe": probe, "seconds": seconds,
                     "wrong": sum(one.kind in kinds for one in found)} for probe, seconds, kinds in ran]
        findings += [one for one in found if one.kind not in {before.kind for before in findings}]
    notes = [*_notes(subject, every[GIVEN])] if GIVEN in every else []
    return {"format": "distca-check", "version": 1, "ok": not findings, "model": subject.about,
            "dtype": str(subject.dtype).removeprefix("torch."), "device": str(subject.device), "ranks": world.size,
            "probes": records, "findings": [one.record() for one in findings], "notes": notes}


def _batches(world: World, seed: int) -> dict[str, list[Batch]]:
    """Return what to examine, per rank: the function's batch, or our own in every packing."""
    subject = world.subject
    if subject.batch is not None:
        host = {name: value.cpu() if hasattr(value, "cpu") else value for name, value in subject.batch.items()}
        return {GIVEN: world.gather(host)}
    vocab, skip = subject.config.vocab_size, subject.special_ids
    found = {name: [batch] * world.size for name, batch in packings(vocab, skip, seed).items()}
    if world.size > 1 and subject.config._attn_implementation == "distca" and 0 not in windows(subject.config):
        found |= over_ranks(vocab, skip, seed, world.size)
    return found


def examined(world: World, name: str, batches: Sequence[Batch], update: Update
             ) -> tuple[list[Finding], list[tuple[str, float, set[str]]]]:
    """Return what the probes find in one kind of batches, and which probes ran for how long with what outcome."""
    try:
        tokens = tokens_of(batches)
        if name == GIVEN and is_shifted(world, batches):
            tokens = tokens_of(batches, shifted=True)
    except UserError as error:
        return [Finding("batch", "the batch contradicts itself", str(error), None, None, "make the batch agree with "
                        "itself before anything else")], [("batch", 0.0, {"batch"})]
    found: list[Finding] = []
    ran = []
    for probe, findings in _probes(world, name, batches, tokens, update):
        begin, before = time.monotonic(), len(found)
        try:
            found += findings()
        except TransportError:
            raise
        except Exception as error:                               # of the user's model, whatever it may raise
            if isinstance(error, UserError) and "the model returned" in str(error):
                raise
            found.append(Finding(f"raises-{probe}", f"the model raises {type(error).__name__} ({probe})",
                                 first_line(error), None, None, "give it what the message says it needs"))
        ran.append((probe, time.monotonic() - begin, {one.kind for one in found[before:]}))
        if found[before:] and found[-1].kind.startswith("raises"):
            break
    return found, ran


def _probes(world: World, name: str, batches: Sequence[Batch], tokens: Tokens, update: Update
            ) -> Iterator[tuple[str, Callable[[], list[Finding]]]]:
    """Yield the probes for these batches in order, what shows causes before what shows effects."""
    own = name in (GIVEN, "one flattened row")
    kept: list[Any] = [None]

    def loss() -> list[Finding]:
        found, kept[0] = weights(world, batches, tokens)
        return found

    every: list[tuple[str, bool, Callable[[], Any]]] = [
        ("one token", True, lambda: one_token(world, batches, tokens)),
        ("layers", own or len(batches) > 1, lambda: each_layer(world, batches, tokens)),
        ("positions", True, lambda: positions(world, batches, tokens)),
        ("packed against alone", True, lambda: packed_and_alone(world, batches, tokens)),
        ("attention", own and world.subject.inner is not None, lambda: kernels(world, batches, tokens)),
        ("labels", True, lambda: labels(tokens)),
        ("loss", True, loss),
        ("gradients", own or len(batches) > 1, lambda: gradients(world, batches, tokens, kept[0])),
        ("step", world.subject.step is not None, lambda: trainer_step(world, batches, tokens)),
    ]
    for probe, applies, run in every:
        if applies:
            update(f"{name}: {probe}")
            yield probe, lambda run=run: [*run()]                # type: ignore[misc]


def _notes(subject: Subject, batches: Sequence[Batch]) -> Iterator[str]:
    """Yield what is not wrong but worth knowing about a function's batch."""
    try:
        tokens = tokens_of(batches)
    except UserError:
        return
    rows = sum(batch["input_ids"].shape[0] for batch in batches)
    if tokens.num_documents <= rows and not (tokens.document < 0).any():
        yield ("every row is one document, as the batch says; if rows are packed, give position_ids that restart; "
               "else documents see each other, and no probe can know")
    if subject.inner is None:
        yield "the model is not one of Transformers: its attention and gradients are compared with nothing but itself"
    if not takes_count(subject.model):
        yield ("the model does not take num_items_in_batch: a trainer that averages its losses over micro-batches or "
               "ranks gives tokens of short ones more weight; have the function return a step, to check that")
