"""Orders of a pipeline's units, as tables of ticks.

**Same phase.** Stages can share their attention only while they run the same kind of work, so here a tick is all
forward or all backward. With S stages of one part each and M micro-batches, the last stage runs M forwards, and its
first comes after S-1 forward ticks, so M+S-1 forward ticks are the minimum. Then every stage runs its forwards back to
back: stage s runs micro-batch m in forward tick m+s, as its input is not ready earlier and a later tick would leave
later stages too few. Likewise stage s runs it in backward tick m+(S-1-s). Only the interleaving of forward and backward
ticks is left to choose. Backward tick b needs b+1 forwards of the last stage, hence forward tick b+S-1. Running each
backward tick as early as possible minimizes the memory of every stage: stage s keeps at most min(M, 2(S-s)-1)
micro-batches, where 1F1B keeps min(M, S-s). Both take 2(M+S-1) ticks.

**Interleaved.** With v parts a stage, part p on stage p mod S, micro-batches go through the pipeline in groups of
n >= S: all of a group through the stages' first parts, then through their second parts, and so on. Forward tick
vg + cn + i + s runs, on stage s, the c-th of its parts for the i-th micro-batch of the group that begins with
micro-batch g; a part's output is needed n >= S ticks after stage 0 ran that part, so it is there. That makes vM+S-1
forward ticks when M >= S, each 1/v as long as a stage's layers: the last stage idles for S-1 of them, which no order
can avoid. Backward mirrors it. Weight gradients are units of their own: a stage idles in S-1 ticks after its first
backward (the same number for every stage) and fills these with them; the other vM-(S-1) run in ticks without
attention. So a step takes 3vM+S-1 ticks if M >= 2S, and M for the head. A stage keeps at most n + S/v micro-batches.

`orders` lists the orders in which our steps may run.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from itertools import pairwise

import numpy as np

from distca.cost.work import causal_pairs
from distca.planning.local_orders import (
    INTERLEAVED_1F1B,
    ONE_FORWARD_ONE_BACKWARD,
    ZB_H1,
    grid,
    local_order,
    ticks_at,
)
from distca.planning.schedule import IDLE, Ticks
from distca.validation import UserError, check_whole, short

Row = list[tuple[int, int]]  # [stages] (part, micro-batch), or _NONE
_NONE = (0, IDLE)
SAME_PHASE, INTERLEAVED = "same_phase", "interleaved_"  # names of orders
MOST_CHUNKS = 8              # parts a stage that `orders` lists


def orders(num_stages: int, num_micro_batches: int, num_layers: int, splits: bool = True) -> dict[str, Ticks]:
    """Return the orders in which our steps may run, by the name that settings give them.

    Stages share attention in `same_phase` and `interleaved_v`, with v parts a stage, as many as divide the layers
    evenly, or 1, 2, 4 and 8 if none does. They do not in `1f1b` and, if `splits`, `zb_h1`, which keep fewer
    micro-batches. Without a pipeline all orders are the same, and only `same_phase` is listed.
    """
    names = [SAME_PHASE]
    if num_stages > 1:
        most = min(MOST_CHUNKS, num_layers // num_stages)
        even = [chunks for chunks in range(1, most + 1) if num_layers % (num_stages * chunks) == 0]
        names += [f"{INTERLEAVED}{chunks}" for chunks in even or [count for count in (1, 2, 4, 8) if count <= most]]
        names += [ONE_FORWARD_ONE_BACKWARD, *[ZB_H1] * splits]
    return {name: order_named(name, num_stages, num_micro_batches, splits) for name in names}


def order_named(name: str, num_stages: int, num_micro_batches: int, splits: bool = True) -> Ticks:
    """Return an order by name; `splits` is as for `interleaved_ticks`.

    Of `local_orders` only `zbv` is missing: two parts of a stage would share a segment of the model.
    """
    if name == SAME_PHASE:
        return same_phase_ticks(num_stages, num_micro_batches)
    if name in (ONE_FORWARD_ONE_BACKWARD, ZB_H1):
        return local_order(name, num_stages, num_micro_batches)
    kind = INTERLEAVED_1F1B if name.startswith(INTERLEAVED_1F1B) else INTERLEAVED
    if (chunks := name.removeprefix(kind)) == name or not chunks.isdecimal() or not 0 < int(chunks) <= 999:
        raise UserError(f"schedule is {short(name)}; give {SAME_PHASE}, {ONE_FORWARD_ONE_BACKWARD}, {ZB_H1}, or "
                        f"{INTERLEAVED}2 for two parts of the model on every stage, or any other number")
    if kind == INTERLEAVED_1F1B:
        return local_order(name, num_stages, num_micro_batches)
    return interleaved_ticks(num_stages, num_micro_batches, int(chunks), splits)


def by_work(micro_batches: Sequence[np.ndarray]) -> list[int]:
    """Return the micro-batches' indices in ascending order of causal pairs, given the lengths of their documents.

    The stages of a tick then run micro-batches of about equal attention work, so less of it has to move.
    """
    pairs = [int(causal_pairs(np.zeros_like(lengths), lengths).sum()) for lengths in micro_batches]
    return sorted(range(len(pairs)), key=lambda number: pairs[number])


def same_phase_ticks(num_stages: int, num_micro_batches: int) -> Ticks:
    """Return ticks of one phase each: S forward ticks, then backward and forward alternating, then backward."""
    stage, micro_batch = grid(num_stages, num_micro_batches)
    num_each = num_micro_batches + num_stages - 1                # ticks of either phase
    nth = np.arange(num_each)
    forward_at = nth + np.maximum(nth - num_stages + 1, 0)       # [forward ticks] position among all ticks
    backward_at = nth + np.minimum(nth + num_stages, num_each)   # [backward ticks]
    return ticks_at(forward_at[micro_batch + stage], backward_at[micro_batch + num_stages - 1 - stage])


@lru_cache(maxsize=64)
def interleaved_ticks(num_stages: int, num_micro_batches: int, chunks: int = 1, splits: bool = True) -> Ticks:
    """Return same-phase ticks with `chunks` parts a stage and the head on all stages; `splits` sets dW units apart."""
    check_whole("chunks", chunks)
    if num_stages == 1:
        return same_phase_ticks(num_stages, num_micro_batches)
    stage_of = np.arange(num_stages * chunks) % num_stages
    return _shortest(*_rows(num_stages, num_micro_batches, chunks), stage_of, splits)


def _shortest(forward: list[Row], backward: list[Row], stage_of: np.ndarray, splits: bool) -> Ticks:
    """Interleave the ticks of both phases and fill them with weight units, in as few ticks as possible."""
    sequence = _sequence(forward, backward, len(stage_of))
    num_stages = int(stage_of.max()) + 1
    tables = [_filled(sequence, stage_of, reserve, splits) for reserve in range(num_stages if splits else 1)]
    return min(tables, key=lambda ticks: ticks.num_ticks)        # on a tie the smallest reserve


def _rows(num_stages: int, num_micro_batches: int, chunks: int) -> tuple[list[Row], list[Row]]:
    """Return the units of each forward tick and of each backward tick."""
    num_groups = max(1, num_micro_batches // num_stages)
    edges = [num_micro_batches * group // num_groups for group in range(num_groups + 1)]
    rows: tuple[dict[int, Row], dict[int, Row]] = ({}, {})
    for begin, end in pairwise(edges):
        size = max(end - begin, num_stages)
        for micro_batch in range(begin, end):
            for part in range(num_stages * chunks):
                chunk, stage = divmod(part, num_stages)
                first = begin * chunks + micro_batch - begin
                for row, at in ((rows[0], first + chunk * size + stage),
                                (rows[1], first + (chunks - 1 - chunk) * size + num_stages - 1 - stage)):
                    row.setdefault(at, [_NONE] * num_stages)[stage] = part, micro_batch
    forward, backward = ([row[at] for at in sorted(row)] for row in rows)
    return forward, backward


def _sequence(forward: list[Row], backward: list[Row], num_parts: int) -> list[tuple[str, Row]]:
    """Interleave forward, backward and head ticks, each backward tick as early as its inputs allow."""
    found: list[tuple[str, Row]] = []
    begun: set[int] = set()                                      # micro-batches whose head has run
    waiting = iter(forward)
    for row in backward:
        needs = {micro_batch for part, micro_batch in row if part == num_parts - 1 and micro_batch != IDLE}
        while not needs <= begun:
            for one in waiting:
                found.append(("forward", one))
                heads = [unit for unit in one if unit[0] == num_parts - 1 and unit[1] != IDLE]
                if heads:
                    found.append(("head", heads))
                    begun.update(micro_batch for _, micro_batch in heads)
                    break
        found.append(("backward", row))
    assert not list(waiting)
    return found


def _filled(sequence: list[tuple[str, Row]], stage_of: np.ndarray, reserve: int, splits: bool) -> Ticks:
    """Put weight units into idle ticks and, if every stage has more than `reserve` of them, into ticks of their own."""
    num_stages = int(stage_of.max()) + 1
    pending: list[Row] = [[] for _ in range(num_stages)]
    units: list[Row] = []
    weights: list[Row] = []
    kinds: list[str] = []

    def add(kind: str, row: Row) -> None:
        idle = [kind != "head" and (kind == "weight" or unit[1] == IDLE) for unit in row]
        kinds.append(kind)
        units.append(row)
        weights.append([pending[stage].pop(0) if can and pending[stage] else _NONE for stage, can in enumerate(idle)])

    nothing = [_NONE] * num_stages
    for kind, row in sequence:
        add(kind, row if kind != "head" else [row[0]] * num_stages)
        if kind == "backward" and splits:
            for stage, unit in enumerate(row):
                if unit[1] != IDLE:
                    pending[stage].append(unit)
            if min(map(len, pending)) > reserve:
                add("weight", nothing)
    while any(pending):
        add("weight", nothing)
    return _table(kinds, units, weights, stage_of)


def _table(kinds: list[str], units: list[Row], weights: list[Row], stage_of: np.ndarray) -> Ticks:
    unit, weight = np.array(units), np.array(weights)            # [ticks, stages, part and micro-batch]
    kind = np.array(kinds)
    runs = np.isin(kind, ("forward", "backward"))[:, None]
    micro_batch = np.where(runs, unit[..., 1], IDLE)
    return Ticks(micro_batch, np.broadcast_to((kind == "backward")[:, None], micro_batch.shape),
                 int(micro_batch.max()) + 1, np.where(runs, unit[..., 0], 0), weight[..., 1], weight[..., 0],
                 np.where(kind == "head", unit[:, 0, 1], IDLE), stage_of)
