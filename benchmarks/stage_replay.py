"""Replay the measured pieces of a pipeline's stages, with or without idle stages that serve the others' attention.

Serving is the ideal one: whoever waits takes an equal share of the attention that is running at that moment, cut at
will, with nothing to send and nothing to plan. What it gains, no real server that waits for work can exceed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple


class Piece(NamedTuple):
    attention: bool
    seconds: float


@dataclass(frozen=True, slots=True)
class Op:
    """The forward or backward of one micro-batch on one stage."""

    forward: bool
    micro_batch: int
    pieces: tuple[Piece, ...]

    def needs(self, stage: int, stages: int) -> tuple[int, bool, int] | None:
        """Stage, phase and micro-batch of the op whose result comes from a neighbour."""
        neighbour = stage - 1 if self.forward else stage + 1
        return (neighbour, self.forward, self.micro_batch) if 0 <= neighbour < stages else None


Stages = Sequence[Sequence[Op]]                                  # every stage's ops in the order of its schedule


def replay(stages: Stages, *, serve: bool) -> float:
    """Seconds until every stage has run its ops, each as soon as its neighbour's result is there."""
    todo = [[(op, piece, number == len(op.pieces)) for op in ops for number, piece in enumerate(op.pieces, 1)]
            for ops in stages]                                   # with whether it ends its op
    at, left = [0] * len(stages), [pieces[0][1].seconds for pieces in todo]
    done: set[tuple[int, bool, int]] = set()
    now = 0.0
    while any(number < len(pieces) for number, pieces in zip(at, todo, strict=True)):
        running = [stage for stage, pieces in enumerate(todo) if at[stage] < len(pieces) and _ready(
            pieces[at[stage]][0].needs(stage, len(stages)), done)]
        if not running:
            raise ValueError("every stage waits for another; give ops in an order that a pipeline can run")
        attending = [stage for stage in running if todo[stage][at[stage]][1].attention]
        helped = 1 + (len(stages) - len(running)) / max(len(attending), 1) if serve else 1.0
        rates = {stage: helped if stage in attending else 1.0 for stage in running}
        passed = min(left[stage] / rate for stage, rate in rates.items())
        now += passed
        for stage, rate in rates.items():
            left[stage] -= passed * rate
            if left[stage] <= 1e-12:
                op, _, ends = todo[stage][at[stage]]
                if ends:
                    done.add((stage, op.forward, op.micro_batch))
                at[stage] += 1
                left[stage] = todo[stage][at[stage]][1].seconds if at[stage] < len(todo[stage]) else 0.0
    return now


def balanced_inside(replicas: Sequence[Stages]) -> Stages:
    """One replica that stands for all, whose stages share their attention equally and have equal tokens besides."""
    return [[Op(same[0].forward, same[0].micro_batch, tuple(
        Piece(pieces[0].attention, sum(piece.seconds for piece in pieces) / len(pieces))
        for pieces in zip(*(op.pieces for op in same), strict=True)))
        for same in zip(*ops, strict=True)] for ops in zip(*replicas, strict=True)]


def stretched(stages: Stages, count: int) -> Stages:
    """1F1B over `count` stages, each with the pieces of a measured one in turn."""
    measured = [{(op.forward, op.micro_batch): op for op in ops} for ops in stages]
    micro_batches = len(measured[0]) // 2
    return [[measured[stage % len(stages)][step] for step in one_forward_one_backward(stage, count, micro_batches)]
            for stage in range(count)]


def one_forward_one_backward(stage: int, stages: int, micro_batches: int) -> list[tuple[bool, int]]:
    """Phase and micro-batch of every op of a stage in Megatron's order without interleaving."""
    ahead = min(stages - stage - 1, micro_batches)
    order = [(True, number) for number in range(ahead)]
    for number in range(micro_batches):
        order += [(True, number + ahead)] if number + ahead < micro_batches else []
        order += [(False, number)]
    return order


def _ready(needed: tuple[int, bool, int] | None, done: set[tuple[int, bool, int]]) -> bool:
    return needed is None or needed in done
