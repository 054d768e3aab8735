"""Orders of a pipeline's units, as tables of ticks: `orders` of our steps, `local_orders` of baselines.

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

If stages keep their attention, each has a list of units that it runs one after the other, and a tick is one unit long.

**Interleaved 1F1B** (Megatron-LM), for M >= S: v parts a stage, part p on stage p mod S, micro-batches in groups of n
>= S. Stage s runs 2(S-1-s) + (v-1)n + 1 forwards, then a backward and a forward in turn. It takes 2vM + 2(S-1) ticks of
a v-th of a stage's layers: the last stage waits S-1 ticks for its first input, and after its last backward the other
S-1 stages have one each. A stage keeps at most that many parts, a v-th of a micro-batch each, and one more.

**ZB-H1** (zero-bubble pipelines): 1F1B with dW apart. Stage s runs the dW of a micro-batch s backwards later, so that
the S-1-s ticks which it would idle in the drain are dW. It takes 3M + S-1 ticks: the last stage waits S-1 ticks and is
busy from then on. Stage s keeps S-s micro-batches for backward and s for dW, so S, as the first stage of 1F1B does.

**ZBV** (controllable-memory zero bubble): two parts a stage in a V, part p on stage p for p < S and 2S-1-p after. The
last part is on the first stage, so backward starts where forward started. For M >= 2S-1 it takes 6M + S-1 ticks of half
a stage's layers, and a stage keeps at most 2S parts: S micro-batches.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from itertools import pairwise

import numpy as np

from distca.cost.work import causal_pairs
from distca.planning.schedule import IDLE, Ticks
from distca.validation import UserError, check_whole, short

Row = list[tuple[int, int]]  # [stages] (part, micro-batch), or _NONE
Unit = tuple[int, int, int]  # kind, part, micro-batch
FORWARD, BACKWARD, WEIGHT = range(3)
SAME_PHASE, INTERLEAVED = "same_phase", "interleaved_"  # names of orders
ONE_FORWARD_ONE_BACKWARD, INTERLEAVED_1F1B, ZB_H1, ZBV = "1f1b", "interleaved_1f1b_", "zb_h1", "zbv"
MOST_CHUNKS = 8              # parts a stage that `orders` lists
CHUNKS = (2, 4)              # those that `local_orders` lists
_NONE = (0, IDLE)


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
    sequence = _sequence(*_rows(num_stages, num_micro_batches, chunks), len(stage_of))
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


def local_orders(num_stages: int, num_layers: int) -> tuple[str, ...]:
    """Return the names of the orders in which a baseline may run; without a pipeline there is only one."""
    if num_stages == 1:
        return (ONE_FORWARD_ONE_BACKWARD,)
    chunks = [count for count in CHUNKS if count * num_stages <= num_layers]
    return (ONE_FORWARD_ONE_BACKWARD, *(f"{INTERLEAVED_1F1B}{count}" for count in chunks), ZB_H1,
            *([ZBV] if 2 * num_stages <= num_layers else []))


@lru_cache(maxsize=64)
def local_order(name: str, num_stages: int, num_micro_batches: int) -> Ticks:
    """Return an order by its name in `local_orders`."""
    check_whole("num_stages", num_stages)
    check_whole("num_micro_batches", num_micro_batches)
    stages = np.arange(num_stages)
    if name == ONE_FORWARD_ONE_BACKWARD:
        return one_forward_one_backward(num_stages, num_micro_batches)
    if name == ZB_H1:
        return _in_order([_zb_h1(stage, num_stages, num_micro_batches) for stage in stages.tolist()], stages)
    if name == ZBV:
        return _in_order([_zbv(stage, num_stages, num_micro_batches) for stage in stages.tolist()],
                      np.concatenate([stages, stages[::-1]]))
    chunks = int(name.removeprefix(INTERLEAVED_1F1B))
    return _in_order([_interleaved(stage, num_stages, num_micro_batches, chunks) for stage in stages.tolist()],
                  np.tile(stages, chunks))


def one_forward_one_backward(num_stages: int, num_micro_batches: int) -> Ticks:
    """Return 1F1B ticks, each forward and backward one tick long; ticks mix phases, so attention cannot be shared.

    Stage s runs S-1-s warm-up forwards, then alternates one forward and one backward, each as early as possible.
    """
    stage, micro_batch = grid(num_stages, num_micro_batches)
    warming = micro_batch < num_stages - stage                   # these forwards wait for no backward
    return ticks_at(np.where(warming, micro_batch + stage, 2 * micro_batch + stage),
                    2 * (micro_batch + num_stages) - 1 - stage)


def _interleaved(stage: int, num_stages: int, num_micro_batches: int, chunks: int) -> list[Unit]:
    num_groups = max(1, num_micro_batches // num_stages)
    groups = list(pairwise(num_micro_batches * group // num_groups for group in range(num_groups + 1)))
    order = [(chunk, number) for begin, end in groups for chunk in range(chunks) for number in range(begin, end)]
    forward = [(FORWARD, chunk * num_stages + stage, number) for chunk, number in order]
    backward = [(BACKWARD, (chunks - 1 - chunk) * num_stages + stage, number) for chunk, number in order]
    warm_up = 2 * (num_stages - 1 - stage) + (chunks - 1) * max(end - begin for begin, end in groups) + 1
    units = forward[:warm_up]
    for at, unit in enumerate(backward):
        units += [unit, *forward[warm_up + at:warm_up + at + 1]]
    return units


def _zb_h1(stage: int, num_stages: int, num_micro_batches: int) -> list[Unit]:
    kinds = [[(kind, stage, number) for number in range(num_micro_batches)] for kind in (FORWARD, BACKWARD, WEIGHT)]
    forward, backward, weight = kinds
    warm_up = num_stages - stage
    units = forward[:warm_up]
    for at, unit in enumerate(backward):
        units += [unit, *weight[max(at - stage, 0):max(at - stage + 1, 0)], *forward[warm_up + at:warm_up + at + 1]]
    return units + weight[max(num_micro_batches - stage, 0):]


def _zbv(stage: int, num_stages: int, num_micro_batches: int) -> list[Unit]:
    """Warm up, alternate over both parts, drain; fewer than 2S-1 micro-batches leave gaps."""
    most, behind = max(2 * num_stages - 1, num_micro_batches), num_stages - stage
    parts, done, units = (stage, 2 * num_stages - 1 - stage), np.zeros((3, 2), dtype=np.int64), []

    def run(*wanted: tuple[int, int]) -> None:
        for kind, which in wanted:
            units.append((kind, parts[which], int(done[kind, which])))
            done[kind, which] += 1

    whole = [[(BACKWARD, which), (WEIGHT, which)] for which in (0, 1)]
    run(*[(FORWARD, 0)] * (2 * behind - 1), *[(FORWARD, 1), (FORWARD, 0)] * stage)
    run(*[(FORWARD, 1), *whole[1]] * behind)
    while done[FORWARD, 1] < most:
        run(*[(FORWARD, 0)] * bool(done[FORWARD, 0] < most), *whole[0], (FORWARD, 1), *whole[1])
    run(*[(BACKWARD, 0), (BACKWARD, 1)] * stage, *whole[0] * behind)
    run(*[(WEIGHT, 1)] * int(most - done[WEIGHT, 1]), *[(WEIGHT, 0)] * int(most - done[WEIGHT, 0]))
    return [unit for unit in units if unit[2] < num_micro_batches]


def _in_order(lists: list[list[Unit]], stage_of: np.ndarray) -> Ticks:
    """Run every stage's list in order, each unit in the first tick after the units that it needs."""
    last_part, tick_of, ends = len(stage_of) - 1, dict[Unit, int](), [IDLE] * len(lists)
    waiting = [list(reversed(units)) for units in lists]
    while any(waiting):
        before = len(tick_of)
        for stage, units in enumerate(waiting):
            while units and all(need in tick_of for need in _needs(units[-1], last_part)):
                unit = units.pop()
                ends[stage] = tick_of[unit] = 1 + max(
                    [ends[stage], *(tick_of[need] for need in _needs(unit, last_part))])
        if len(tick_of) == before:
            raise UserError("the stages' lists wait for each other; let every unit follow those that it needs")
    shape = (max(ends) + 1, len(lists))
    micro_batch, weight = np.full((2, *shape), IDLE)
    part, weight_part, backward = np.zeros((3, *shape), dtype=np.int64)
    for (kind, which, number), tick in tick_of.items():
        at = tick, int(stage_of[which])
        if kind == WEIGHT:
            weight[at], weight_part[at] = number, which
        else:
            micro_batch[at], part[at], backward[at] = number, which, kind == BACKWARD
    return Ticks(micro_batch, _with_phase(micro_batch, backward != 0), int(micro_batch.max()) + 1, part, weight,
                 weight_part, stage_of=stage_of)


def _needs(unit: Unit, last_part: int) -> list[Unit]:
    """Return the units whose results a unit reads."""
    kind, part, number = unit
    if kind == FORWARD:
        return [(FORWARD, part - 1, number)] if part else []
    if kind == WEIGHT:
        return [(BACKWARD, part, number)]
    return [(FORWARD, part, number), *([(BACKWARD, part + 1, number)] if part < last_part else [])]


def grid(num_stages: int, num_micro_batches: int) -> tuple[np.ndarray, np.ndarray]:
    """Return stage indices [stages, 1] and micro-batch indices [1, micro-batches]."""
    check_whole("num_stages", num_stages)
    check_whole("num_micro_batches", num_micro_batches)
    return np.arange(num_stages)[:, None], np.arange(num_micro_batches)[None, :]


def ticks_at(forward: np.ndarray, backward: np.ndarray) -> Ticks:
    """Build the table from the forward and backward tick of each [stage, micro-batch]."""
    num_stages, num_micro_batches = forward.shape
    micro_batch = np.full((int(backward.max()) + 1, num_stages), IDLE)
    is_backward = np.zeros(micro_batch.shape, dtype=bool)
    stage, number = np.indices(forward.shape)
    micro_batch[forward, stage] = number
    micro_batch[backward, stage] = number
    is_backward[backward, stage] = True
    return Ticks(micro_batch, _with_phase(micro_batch, is_backward), num_micro_batches)


def _with_phase(micro_batch: np.ndarray, backward: np.ndarray) -> np.ndarray:
    """Return `backward` with idle stages in the phase of the tick, if it has one: they serve the others' attention."""
    idle = micro_batch == IDLE
    return np.asarray(backward | (idle & (backward | idle).all(axis=1, keepdims=True)))
