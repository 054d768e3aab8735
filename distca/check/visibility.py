"""Change one token and count which outputs move: those of its document from it on may, and no others.

It needs no reference and no tolerance to speak of: equal operations on equal shapes have equal bits, so an output that
moves at all has seen the token. Only where experts are routed may the shapes of other tokens' products change.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from distca.check import Finding
from distca.check.batches import Batch, Tokens, changed
from distca.check.subject import windows
from distca.check.world import World, far, largest, scale_of
from distca.integrations import stateful_layers

MAX_DOCUMENTS = 6      # of which tokens are changed
MAX_LAYERS = 8
FLOOR = torch.finfo(torch.float32).eps  # of what counts as moved, relative to the largest output
SEES = {"other-documents": "tokens see other documents", "future": "tokens see the future",
        "padding": "tokens see padding"}
REMEDIES = {
    "future": "use a causal mask in every layer",
    "padding": "give the model an attention_mask that is 0 at padding, or leave padding out",
}
Call = tuple[tuple[Any, ...], dict[str, Any]]
Seen = tuple[int, np.ndarray, float]  # the token that was changed, those that moved and must not, and the most of them


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


def one_token(world: World, batches: Sequence[Batch], tokens: Tokens) -> Iterator[Finding]:
    """Change tokens one at a time and find outputs that must not move and do."""
    base = world.logits(batches)
    scale = scale_of(world, tokens, base)
    if not np.isfinite(largest(tokens, world.join(base.abs().amax(dim=-1).nan_to_num(nan=torch.inf)))):
        yield Finding("not-finite", "outputs are not finite", "tokens that are not padding among them", None, None,
                      "look for rows of the mask in which a token sees nothing at all")
        return
    bound = max(8 * largest(tokens, world.join(far(world.logits(batches), base))) / scale, FLOOR)
    if any("expert" in name or "moe" in name for name, _ in world.subject.model.named_modules()):
        bound = max(bound, world.subject.bound)
    wrong: dict[str, list[Seen]] = {}
    for token in chosen(tokens):
        moves = world.join(far(world.logits(changed(batches, tokens, token)), base)) / scale
        for kind, at in judged(tokens, token, moves > bound):
            wrong.setdefault(kind, []).append((token, at, float(moves[at].max())))
    for kind, some in wrong.items():
        token, at, _ = max(some, key=lambda one: len(one[1]))
        remedy = REMEDIES.get(kind) or _told(world, batches, tokens, token, bound * scale)
        yield Finding(kind, SEES[kind], _moved(tokens, token, at), max(size for *_, size in some), bound, remedy)


def _moved(tokens: Tokens, token: int, at: np.ndarray) -> str:
    return (f"changing {tokens.name(token)} moves {len(at)} of {int((tokens.document >= 0).sum())} outputs, which must "
            f"not move, the first at {tokens.name(int(at[0]))}")


def _told(world: World, batches: Sequence[Batch], tokens: Tokens, token: int, bound: float) -> str:
    """Return which change to the batch keeps this token from other documents, or what to do where none does."""
    no_mask, no_cache = {"attention_mask": None}, {"use_cache": False}
    for what, change in (("leave out attention_mask", no_mask), ("pass use_cache=False", no_cache),
                         ("leave out attention_mask and pass use_cache=False", {**no_mask, **no_cache})):
        if world.subject.inner is None or all(batches[0].get(name) == value for name, value in change.items()):
            continue
        tried = [{**batch, **change} for batch in batches]
        moves = world.join(far(world.logits(changed(tried, tokens, token)), world.logits(tried)))
        if not any(kind == "other-documents" for kind, _ in judged(tokens, token, moves > bound)):
            return f"{what}: then documents are kept apart"
    if kinds := stateful_layers(world.subject.config):
        return (f"its {', '.join(kinds)} layers carry their state on into the next document: pass cu_seq_lens_q with "
                "the kernels installed that keep packed documents apart, or give every document a row of its own")
    given = [name for name in ("position_ids", "cu_seq_lens_q", "document_ids", "seq_idx") if name in batches[0]]
    return (f"attention makes nothing of {' and '.join(given) or 'this batch'}: hand them on to every layer, or use an "
            "attention that reads them, such as distca.integrations")


def judged(tokens: Tokens, token: int, moves: np.ndarray) -> Iterator[tuple[str, np.ndarray]]:
    """Yield which tokens moved that must not, by what that means."""
    moves = moves & (tokens.document >= 0)
    same = tokens.document == tokens.document[token]
    if tokens.document[token] < 0:
        found = {"padding": moves}
    else:
        found = {"other-documents": moves & ~same,
                 "future": moves & same & (tokens.position < tokens.position[token])}
    yield from ((kind, np.flatnonzero(at)) for kind, at in found.items() if at.any())


def calls_of(world: World, batches: Sequence[Batch], parts: Sequence[Any]) -> dict[int, Call]:
    """Return how the parts of a model are called in one forward, by index."""
    calls: dict[int, Call] = {}
    hooks = [part.register_forward_pre_hook(lambda _, args, named, at=at: calls.__setitem__(at, (args, named)),
                                            with_kwargs=True) for at, part in enumerate(parts)]
    world.logits(batches)
    for hook in hooks:
        hook.remove()
    return calls


def layers_of(model: torch.nn.Module) -> list[Any]:
    """Return the parts that mix tokens, in order: the innermost ones that know which layer they are."""
    def is_indexed(part: torch.nn.Module) -> bool:
        return isinstance(getattr(part, "layer_idx", None), int)

    return [part for part in model.modules() if is_indexed(part) and not any(map(is_indexed, [*part.modules()][1:]))]


@dataclass(slots=True)
class Layer:
    """What one attention layer was seen to do."""

    index: int
    window: int | None                   # by the config; None: all tokens; 0: not known
    reach: int = 0                       # tokens that see a changed one, at most
    longest: int = 0                     # tokens that could
    beyond: float = 0.0                  # the most that one outside the window moves
    bound: float = 0.0
    wrong: dict[str, Seen] = field(default_factory=dict)

    @property
    def due(self) -> int:
        return self.longest if self.window is None else min(self.window, self.longest)


def each_layer(world: World, batches: Sequence[Batch], tokens: Tokens) -> Iterator[Finding]:
    """Replay every attention layer with one token's input changed: which outputs move, and how far they reach."""
    parts = layers_of(world.subject.inner or world.subject.model)
    seen = dict(enumerate(windows(world.subject.config)))
    kinds = [(seen.get(part.layer_idx, 0), type(part)) for part in parts]
    parts = [part for at, part in enumerate(parts) if len(parts) <= MAX_LAYERS or kinds[:at].count(kinds[at]) < 2]
    calls = calls_of(world, batches, parts)
    layers = [found for at, part in enumerate(parts)
              if at in calls and (found := _replayed(world, tokens, part, calls[at], seen)) is not None]
    for kind in SEES:
        some = [one for one in layers if kind in one.wrong]
        if some:
            token, at, size = max((one.wrong[kind] for one in some), key=lambda one: one[2])
            yield Finding(f"layer-{kind}", f"in {_named(some)}, {SEES[kind]}", _moved(tokens, token, at), size,
                          some[0].bound, REMEDIES.get(kind) or "see how the mask of this kind of layers is made")
    other = [one for one in layers if one.window != 0 and one.reach != one.due and one.longest > 1]
    for window, reach in dict.fromkeys((one.window, one.reach) for one in other):
        some = [one for one in other if (one.window, one.reach) == (window, reach)]
        due = "all tokens of their document" if window is None else f"windows of {window}, the token itself included"
        yield Finding("window", f"tokens of {_named(some)} see {reach} tokens, themselves included",
                      f"the config says {due}", max(one.beyond for one in some) or None, some[0].bound,
                      "give these layers full causal attention" if window is None else
                      f"mask keys that are {window} or more tokens before the query, and no others")


def _named(layers: Sequence[Layer]) -> str:
    return f"layer{'s' * (len(layers) > 1)} {', '.join(str(one.index) for one in layers)}"


def _replayed(world: World, tokens: Tokens, part: Any, call: Call, seen: dict[int, int | None]) -> Layer | None:
    """Replay a layer with one token's input changed at a time; None where it does not take [rows, tokens, hidden]."""
    (args, named), here = call, tokens.here(world.rank)
    named = {name: None if "past_key_value" in name else one for name, one in named.items()}  # a cache would grow
    hidden = named.get("hidden_states", args[0] if args else None)
    if not isinstance(hidden, torch.Tensor) or hidden.ndim != 3 or hidden.shape[:2].numel() != here.stop - here.start:
        return None

    def replay(value: torch.Tensor) -> torch.Tensor:
        found = (part(value, *args[1:], **named) if "hidden_states" not in named else
                 part(*args, **{**named, "hidden_states": value}))
        return (found[0] if isinstance(found, tuple) else found).detach().double().flatten(0, 1)

    base = replay(hidden)
    scale = scale_of(world, tokens, base)
    bound = max(8 * largest(tokens, world.join(far(replay(hidden), base))) / scale, FLOOR)
    layer = Layer(part.layer_idx, seen.get(part.layer_idx, 0), bound=bound)
    for token in chosen(tokens):
        value = hidden.detach().clone()
        if here.start <= token < here.stop:
            value.view(-1, value.shape[-1])[token - here.start].mul_(-1).add_(value.std())
        moves = world.join(far(replay(value), base)) / scale
        for kind, at in judged(tokens, token, moves > bound):
            layer.wrong.setdefault(kind, (token, at, float(moves[at].max())))
        _reach(layer, tokens, token, moves)
    return layer


def _reach(layer: Layer, tokens: Tokens, token: int, moves: np.ndarray) -> None:
    """Note how far a changed token is seen in its document."""
    document = tokens.document[token]
    after = np.flatnonzero((tokens.document == document) & (moves > layer.bound))
    if document < 0 or not len(after):
        return
    distance = tokens.position[after] - tokens.position[token]
    layer.reach = max(layer.reach, int(distance.max()) + 1)
    layer.longest = max(layer.longest, len(tokens.of(int(document))) - int(tokens.position[token]))
    if layer.window:
        layer.beyond = max(layer.beyond, float(moves[after][distance >= layer.window].max(initial=0.0)))


def positions(world: World, batches: Sequence[Batch], tokens: Tokens) -> Iterator[Finding]:
    """Compare the positions that rotary embeddings get with those that the batch gives."""
    model = world.subject.inner or world.subject.model
    parts = [part for part in model.modules() if "rotary" in type(part).__name__.lower()][:1]
    given = batches[world.rank].get("position_ids")
    args, named = calls_of(world, batches, parts).get(0, ((), {}))
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
