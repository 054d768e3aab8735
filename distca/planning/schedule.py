"""Order a pipeline's work so that all stages attend in the same phase at the same time.

Stages can share their attention only while they run the same kind of work, and 1F1B mixes forward with backward. Here
a tick is all forward or all backward, and a stage that is idle in it serves the attention of the others.

With S stages and M micro-batches this order is optimal. The last stage runs M forwards, and its first comes after S-1
forward ticks, so M+S-1 forward ticks are the minimum. Then every stage runs its forwards back to back: stage s runs
micro-batch m in forward tick m+s, as its input is not ready earlier and a later tick would leave later stages too few.
Likewise stage s runs it in backward tick m+(S-1-s). Only the interleaving of forward and backward ticks is left to
choose. Backward tick b needs b+1 forwards of the last stage, hence forward tick b+S-1. Running each backward tick as
early as possible minimizes the memory of every stage: stage s keeps at most min(M, 2(S-s)-1) micro-batches, where
1F1B keeps min(M, S-s). Both take 2(M+S-1) ticks.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from distca.columns import freeze
from distca.validation import UserError, check_whole
from distca.workload.layout import KeySlices, Layout

IDLE = -1


@dataclass(frozen=True, slots=True)
class Ticks:
    """The micro-batch and phase of every stage in every tick."""

    micro_batch: np.ndarray  # [ticks, stages] -1 where the stage is idle
    backward: np.ndarray     # [ticks, stages] bool; an idle stage of a same-phase tick has the tick's phase
    num_micro_batches: int

    def __post_init__(self) -> None:
        freeze(self, ("micro_batch",))
        freeze(self, ("backward",), np.bool_)

    @property
    def num_ticks(self) -> int:
        return self.micro_batch.shape[0]

    @property
    def num_stages(self) -> int:
        return self.micro_batch.shape[1]

    @property
    def active(self) -> np.ndarray:
        """[ticks, stages] Whether the stage runs a micro-batch."""
        return self.micro_batch != IDLE

    @property
    def same_phase(self) -> bool:
        """Whether no tick mixes forward with backward."""
        return not (self._runs(False).any(axis=1) & self._runs(True).any(axis=1)).any()

    def phase(self, tick: int) -> bool:
        """Return whether the tick is backward; raise if it mixes phases."""
        active = self.active[tick]
        phases = self.backward[tick][active] if active.any() else self.backward[tick]
        if phases.any() != phases.all():
            raise UserError(f"tick {tick} mixes forward with backward and has no phase; use same_phase_ticks")
        return bool(phases[0])

    def forward_ticks(self) -> np.ndarray:
        """Return the indices of forward ticks; raise if a tick mixes phases."""
        return np.flatnonzero([not self.phase(tick) for tick in range(self.num_ticks)])

    def peak_live(self) -> np.ndarray:
        """[stages] Return the peak number of micro-batches between their forward and their backward."""
        return np.cumsum(self._runs(False).astype(np.int64) - self._runs(True), axis=0).max(axis=0)

    def bubble_share(self) -> float:
        """Return the share of stage-ticks that are idle."""
        return float(1.0 - self.active.mean())

    def validate(self) -> None:
        """Prove that every stage runs each micro-batch once forward and once backward, after its input is ready."""
        if self.micro_batch.ndim != 2 or self.micro_batch.shape != self.backward.shape or self.micro_batch.size == 0:
            raise UserError(f"micro_batch has shape {self.micro_batch.shape} and backward {self.backward.shape}; give "
                            "both one entry per tick and stage")
        check_whole("num_micro_batches", self.num_micro_batches)
        outside = self.micro_batch[(self.micro_batch < IDLE) | (self.micro_batch >= self.num_micro_batches)]
        if len(outside):
            raise UserError(f"micro_batch names {outside[0]} but num_micro_batches is {self.num_micro_batches}; use 0 "
                            f"to {self.num_micro_batches - 1}, or {IDLE} for idle")
        forward, backward = self._tick_of(False), self._tick_of(True)
        _check_after(forward[1:], forward[:-1], "forward", 1, "the stage before it")
        _check_after(backward[-1:], forward[-1:], "backward", self.num_stages - 1, "its forward")
        _check_after(backward[:-1], backward[1:], "backward", 0, "the stage behind it")

    def _runs(self, backward: bool) -> np.ndarray:
        return self.active & (self.backward == backward)         # [ticks, stages]

    def _tick_of(self, backward: bool) -> np.ndarray:
        """[stages, micro-batches] Return the tick in which each runs; raise ValueError if one does not run once."""
        tick, stage = np.nonzero(self._runs(backward))
        micro_batch = self.micro_batch[tick, stage]
        count = np.zeros((self.num_stages, self.num_micro_batches), dtype=np.int64)
        np.add.at(count, (stage, micro_batch), 1)
        if (count != 1).any():
            at_stage, at_micro_batch = np.argwhere(count != 1)[0]
            raise UserError(f"stage {at_stage} runs micro-batch {at_micro_batch} {count[at_stage, at_micro_batch]} "
                            f"times {'backward' if backward else 'forward'}; run it exactly once")
        ticks = np.empty_like(count)
        ticks[stage, micro_batch] = tick
        return ticks


def same_phase_ticks(num_stages: int, num_micro_batches: int) -> Ticks:
    """Return ticks of one phase each: S forward ticks, then backward and forward alternating, then backward."""
    stage, micro_batch = _grid(num_stages, num_micro_batches)
    num_each = num_micro_batches + num_stages - 1                # ticks of either phase
    nth = np.arange(num_each)
    forward_at = nth + np.maximum(nth - num_stages + 1, 0)       # [forward ticks] position among all ticks
    backward_at = nth + np.minimum(nth + num_stages, num_each)   # [backward ticks]
    return _ticks(forward_at[micro_batch + stage], backward_at[micro_batch + num_stages - 1 - stage])


def one_forward_one_backward(num_stages: int, num_micro_batches: int) -> Ticks:
    """Return 1F1B ticks, each forward and backward one tick long; ticks mix phases, so attention cannot be shared.

    Stage s runs S-1-s warm-up forwards, then alternates one forward and one backward, each as early as possible.
    """
    stage, micro_batch = _grid(num_stages, num_micro_batches)
    warming = micro_batch < num_stages - stage                   # these forwards wait for no backward
    return _ticks(np.where(warming, micro_batch + stage, 2 * micro_batch + stage),
                  2 * (micro_batch + num_stages) - 1 - stage)


def layers_of_stages(num_layers: int, num_stages: int) -> tuple[int, ...]:
    """Divide layers over stages as evenly as possible.

    The last stage also has the head, and earlier stages keep more micro-batches alive, so the stages right before the
    last get the remaining layers.
    """
    for field, value in (("num_layers", num_layers), ("num_stages", num_stages)):
        check_whole(field, value)
    if num_stages > num_layers:
        raise UserError(f"num_stages is {num_stages} but the model has {num_layers} layers; use at most {num_layers} "
                        "stages, so that each has a layer")
    each, left = divmod(int(num_layers), int(num_stages))
    return tuple(each + (num_stages - 1 - left <= stage < num_stages - 1) for stage in range(num_stages))


def tick_layout(running: Sequence[int], layouts: Sequence[Layout]) -> Layout:
    """Return the layout over the ranks of all stages if stage s runs micro-batch running[s], or nothing if that is -1.

    Documents are numbered in micro-batch order, so that their numbers do not depend on the stages.
    """
    num_data = layouts[0].num_ranks
    here = sorted(micro_batch for micro_batch in running if micro_batch != IDLE)
    counts = np.array([layouts[micro_batch].num_documents for micro_batch in here])
    first = dict(zip(here, (np.cumsum(counts) - counts).tolist(), strict=True))  # index of its first document
    parts = [(stage * num_data, first[number], layouts[number]) for stage, number in enumerate(running)
             if number != IDLE]

    def columns(slices: Sequence[tuple[int, int, Layout | KeySlices]]) -> Iterable[np.ndarray]:
        return map(np.concatenate, zip(*((one.document + document, one.start, one.stop, one.rank + rank)
                                         for rank, document, one in slices), strict=True))

    document, start, stop, rank = columns(parts)
    only = KeySlices(*columns([(*moved, one.key_only) for *moved, one in parts]))
    return Layout(np.concatenate([layouts[number].lengths for number in here]), document, start, stop, rank,
                  len(running) * num_data, only)


def _grid(num_stages: int, num_micro_batches: int) -> tuple[np.ndarray, np.ndarray]:
    """Return stage indices [stages, 1] and micro-batch indices [1, micro-batches]."""
    check_whole("num_stages", num_stages)
    check_whole("num_micro_batches", num_micro_batches)
    return np.arange(num_stages)[:, None], np.arange(num_micro_batches)[None, :]


def _ticks(forward: np.ndarray, backward: np.ndarray) -> Ticks:
    """Build the table from the forward and backward tick of each [stage, micro-batch]."""
    num_stages, num_micro_batches = forward.shape
    micro_batch = np.full((int(backward.max()) + 1, num_stages), IDLE)
    is_backward = np.zeros(micro_batch.shape, dtype=bool)
    stage, number = np.indices(forward.shape)
    micro_batch[forward, stage] = number
    micro_batch[backward, stage] = number
    is_backward[backward, stage] = True
    idle = micro_batch == IDLE
    is_backward |= idle & (is_backward | idle).all(axis=1, keepdims=True)
    return Ticks(micro_batch, is_backward, num_micro_batches)


def _check_after(tick: np.ndarray, needed: np.ndarray, phase: str, first_stage: int, what: str) -> None:
    """Check that every [stage, micro-batch] of `tick` comes after the same entry of `needed`."""
    early = np.argwhere(tick <= needed)
    if len(early):
        stage, micro_batch = early[0]
        raise UserError(f"stage {stage + first_stage} runs micro-batch {micro_batch} {phase} in tick "
                        f"{tick[stage, micro_batch]} but {what} is in tick {needed[stage, micro_batch]}; run it later")
