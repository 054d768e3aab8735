"""Change one token and count which outputs move: those of its document from it on may, and no others.

It needs no reference and no tolerance to speak of: equal operations on equal shapes have equal bits, so an output that
moves at all has seen the token. Only where experts are routed may the shapes of other tokens' products change.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch

from distca.check import Finding
from distca.check.batches import Batch, Tokens, changed
from distca.check.subject import windows
from distca.check.world import World, far, largest

MAX_DOCUMENTS = 6      # of which tokens are changed
MAX_LAYERS = 8
SEES = {
    "other-documents": ("tokens see other documents", "tell the model where documents begin: position_ids that restart "
                        "and no attention_mask, use_cache=False, or an attention that reads cu_seq_lens"),
    "future": ("tokens see the future", "use a causal mask in every layer"),
    "padding": ("tokens see padding", "give the model an attention_mask that is 0 at padding, or leave padding out"),
}


def chosen(tokens: Tokens) -> list[int]:
    """Return tokens worth changing: first, middle and last of the longest documents, at cuts, and some of padding."""
    lengths = np.bincount(tokens.document[tokens.document >= 0], minlength=tokens.num_documents)
    found: list[int] = []
    for document in np.argsort(-lengths, kind="stable")[:MAX_DOCUMENTS]:
        at = tokens.of(int(document))
        found += [int(at[0]), int(at[len(at) // 2]), int(at[-1])]
        cut = np.flatnonzero(np.diff([tokens.rank(int(one)) for one in at]))[:1]
        found += at[cut].tolist()
    padding = np.flatnonzero(tokens.document < 0)
    return [*dict.fromkeys(found), *padding[[0, -1] if len(padding) else []].tolist()]


def one_token(world: World, batches: Sequence[Batch], tokens: Tokens, advance: Any) -> Iterator[Finding]:
    """Change tokens one at a time and find outputs that must not move and do."""
    base = world.logits(batches)
    scale = max(world.gather(float(base.abs().max())))
    noise = largest(tokens, world.join(far(world.logits(batches), base)))
    bound = 8 * noise / scale
    if any("expert" in name for name, _ in world.subject.model.named_modules()):
        bound = max(bound, world.subject.bound)
    wrong: dict[str, list[tuple[int, np.ndarray, float]]] = {}
    for token in chosen(tokens):
        advance()
        moves = world.join(far(world.logits(changed(batches, tokens, token)), base)) / scale
        for kind, at in judged(tokens, token, moves > bound):
            wrong.setdefault(kind, []).append((token, at, float(moves[at].max())))
    yield from (_seen(tokens, kind, some, bound) for kind, some in wrong.items())


def judged(tokens: Tokens, token: int, moves: np.ndarray) -> Iterator[tuple[str, np.ndarray]]:
    """Return which tokens moved that must not, by what that means."""
    document, position = tokens.document[token], tokens.position[token]
    moves = moves & (tokens.document >= 0)
    same = tokens.document == document
    if document < 0:
        yield from [("padding", np.flatnonzero(moves))] * bool(moves.any())
        return
    for kind, at in (("other-documents", moves & ~same), ("future", moves & same & (tokens.position < position))):
        if at.any():
            yield kind, np.flatnonzero(at)


def _seen(tokens: Tokens, kind: str, some: list[tuple[int, np.ndarray, float]], bound: float) -> Finding:
    token, at, _ = max(some, key=lambda one: len(one[1]))
    what, remedy = SEES[kind]
    count = int((tokens.document >= 0).sum())
    where = (f"changing {tokens.name(token)} moves {len(at)} of {count} outputs that must not move, the first at "
             f"{tokens.name(int(at[0]))}")
    return Finding(kind, what, where, max(size for *_, size in some), bound, remedy)


class Recorder:
    """Records how the parts of a model are called in one forward."""

    def __init__(self, parts: Sequence[torch.nn.Module]) -> None:
        self.calls: dict[int, tuple[tuple[Any, ...], dict[str, Any]]] = {}
        self._hooks = [part.register_forward_pre_hook(
            lambda _, args, named, at=at: self.calls.__setitem__(at, (args, named)), with_kwargs=True)
            for at, part in enumerate(parts)]

    def close(self) -> None:
        for hook in self._hooks:
            hook.remove()


def layers_of(model: torch.nn.Module) -> list[torch.nn.Module]:
    """Return the parts that mix tokens, in order: the innermost ones that know which layer they are."""
    indexed = [part for part in model.modules() if isinstance(getattr(part, "layer_idx", None), int)]
    return [part for part in indexed
            if not any(isinstance(getattr(below, "layer_idx", None), int) for below in list(part.modules())[1:])]


def each_layer(world: World, batches: Sequence[Batch], tokens: Tokens, advance: Any) -> Iterator[Finding]:
    """Replay every attention layer with one token's input changed: which outputs move, and how far they reach."""
    model = world.subject.inner or world.subject.model
    layers = layers_of(model)
    seen = windows(world.subject.config) or [0] * len(layers)
    kinds = [(seen[part.layer_idx] if part.layer_idx < len(seen) else 0, type(part)) for part in layers]
    layers = [part for at, part in enumerate(layers) if len(layers) <= MAX_LAYERS or kinds[:at].count(kinds[at]) < 2]
    recorder = Recorder(layers)
    world.logits(batches)
    recorder.close()
    for at, part in enumerate(layers):
        if at in recorder.calls:
            advance()
            window = seen[part.layer_idx] if part.layer_idx < len(seen) else 0
            yield from _layer(world, tokens, part, recorder.calls[at], window)


def _layer(
    world: World, tokens: Tokens, part: torch.nn.Module, call: tuple[tuple[Any, ...], dict[str, Any]],
    window: int | None,
) -> Iterator[Finding]:
    (args, named), here = call, tokens.here(world.rank)
    hidden = named.get("hidden_states", args[0] if args else None)
    if not isinstance(hidden, torch.Tensor) or hidden.ndim != 3 or hidden.shape[:2].numel() != here.stop - here.start:
        return

    def replay(value: torch.Tensor) -> torch.Tensor:
        found = (part(value, *args[1:], **named) if "hidden_states" not in named else
                 part(*args, **{**named, "hidden_states": value}))
        return (found[0] if isinstance(found, tuple) else found).detach().double().flatten(0, 1)

    base = replay(hidden)
    scale = max(world.gather(float(base.abs().max())))
    bound = 8 * largest(tokens, world.join(far(replay(hidden), base))) / scale
    name = f"layer {part.layer_idx}"
    reach, longest, size = 0, 0, 0.0
    wrong: dict[str, tuple[int, np.ndarray, float]] = {}
    for token in chosen(tokens):
        value = hidden.detach().clone()
        if here.start <= token < here.stop:
            value.view(-1, value.shape[-1])[token - here.start].mul_(-1).add_(value.std())
        moves = world.join(far(replay(value), base)) / scale
        for kind, at in judged(tokens, token, moves > bound):
            wrong.setdefault(kind, (token, at, float(moves[at].max())))
        after = np.flatnonzero((tokens.document == tokens.document[token]) & (moves > bound))
        if tokens.document[token] >= 0 and len(after):
            distance = tokens.position[after] - tokens.position[token]
            rest = len(tokens.of(int(tokens.document[token]))) - tokens.position[token]
            reach, longest = max(reach, int(distance.max()) + 1), max(longest, int(rest))
            if window:
                size = max(size, float(moves[after][distance >= window].max(initial=0.0)))
    for kind, (token, at, most) in wrong.items():
        what, remedy = SEES[kind]
        yield Finding(f"layer-{kind}", f"in {name}, {what}", f"changing {tokens.name(token)} moves {len(at)} outputs that "
                      f"must not move, the first at {tokens.name(int(at[0]))}", most, bound, remedy)
    due = longest if window is None else min(window, longest)
    if window != 0 and reach != due and longest > 1:
        kind = "all tokens of a document" if window is None else f"windows of {window} tokens"
        yield Finding("window", f"{name} sees {reach} tokens, itself included", f"its config says {kind}", size or None,
                      bound, f"give {name} the window of its config: a window of {window} is a token and the "
                      f"{(window or 1) - 1} before it" if window else f"give {name} full causal attention")


def positions(world: World, batches: Sequence[Batch], tokens: Tokens) -> Iterator[Finding]:
    """Compare the positions that rotary embeddings get with those that the batch gives."""
    model = world.subject.inner or world.subject.model
    parts = [part for part in model.modules() if "rotary" in type(part).__name__.lower()][:1]
    given = batches[world.rank].get("position_ids")
    recorder = Recorder(parts)
    world.logits(batches)
    recorder.close()
    args, named = recorder.calls.get(0, ((), {}))
    found = next((one for one in (named.get("position_ids"), *args[1:]) if isinstance(one, torch.Tensor)
                  and not one.dtype.is_floating_point), None)
    here, off = tokens.here(world.rank), np.zeros(0, dtype=np.int64)
    if found is not None and given is not None and found.ndim == given.ndim == 2:
        rows = batches[world.rank]["input_ids"].shape
        both = [one.cpu().expand(rows).reshape(-1).numpy() for one in (found, given)]
        off = np.where(tokens.document[here] >= 0, both[0] - both[1], 0)
    for rank, some in enumerate(world.gather(off)):
        if some.any():
            at = int(np.flatnonzero(some)[0])
            yield Finding("positions", "positions are not those of the batch",
                          f"{int((some != 0).sum())} tokens are rotated to other positions, the first, "
                          f"{tokens.name(tokens.rank_edges[rank] + at)}, {abs(int(some[at]))} too "
                          f"{'far' if some[at] > 0 else 'near'}", None, None,
                          "hand position_ids on to the model's rotary embedding")
            return
