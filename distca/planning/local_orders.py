"""Orders of a pipeline whose stages keep their attention: 1F1B, and what may run instead of it.

Each stage has a list of units that it runs one after the other, and a tick is one unit long. With S stages and M
micro-batches, M >= S:

**Interleaved 1F1B** (Megatron-LM): v parts a stage, part p on stage p mod S, micro-batches in groups of n >= S. Stage s
runs 2(S-1-s) + (v-1)n + 1 forwards, then a backward and a forward in turn. It takes 2vM + 2(S-1) ticks of a v-th of a
stage's layers: the last stage waits S-1 ticks for its first input, and after its last backward the other S-1 stages
have one each. A stage keeps at most that many parts, a v-th of a micro-batch each, and one more.

**ZB-H1** (zero-bubble pipelines): 1F1B with dW apart. Stage s runs the dW of a micro-batch s backwards later, so that
the S-1-s ticks which it would idle in the drain are dW. It takes 3M + S-1 ticks: the last stage waits S-1 ticks and is
busy from then on. Stage s keeps S-s micro-batches for backward and s for dW, so S, as the first stage of 1F1B does.

**ZBV** (controllable-memory zero bubble): two parts a stage in a V, part p on stage p for p < S and 2S-1-p after. The
last part is on the first stage, so backward starts where forward started. For M >= 2S-1 it takes 6M + S-1 ticks of half
a stage's layers, and a stage keeps at most 2S parts: S micro-batches.
"""

from __future__ import annotations

from functools import lru_cache
from itertools import pairwise

import numpy as np

from distca.planning.schedule import IDLE, Ticks
from distca.validation import UserError, check_whole

FORWARD, BACKWARD, WEIGHT = range(3)
Unit = tuple[int, int, int]  # kind, part, micro-batch
ONE_FORWARD_ONE_BACKWARD, INTERLEAVED_1F1B, ZB_H1, ZBV = "1f1b", "interleaved_1f1b_", "zb_h1", "zbv"
CHUNKS = (2, 4)              # parts a stage that are listed


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
        return _table([_zb_h1(stage, num_stages, num_micro_batches) for stage in stages.tolist()], stages)
    if name == ZBV:
        return _table([_zbv(stage, num_stages, num_micro_batches) for stage in stages.tolist()],
                      np.concatenate([stages, stages[::-1]]))
    chunks = int(name.removeprefix(INTERLEAVED_1F1B))
    return _table([_interleaved(stage, num_stages, num_micro_batches, chunks) for stage in stages.tolist()],
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


def _table(lists: list[list[Unit]], stage_of: np.ndarray) -> Ticks:
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
