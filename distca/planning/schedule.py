"""The table of a pipeline step: which unit of work every stage runs in every tick.

The model is cut into parts, in order; a stage holds one part or several. Units are forward, backward (dX, and dW too if
the table has no separate weight units) and weight (dW) of one part for one micro-batch. In a tick, all stages that run
forward or backward attend together. A stage without such a unit runs a weight unit or nothing, and serves the attention
of the others. If the output head is spread over the stages, it has ticks of its own, in which every stage computes it
for an equal share of a micro-batch's tokens.

`planning/orders.py` makes the tables.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np

from distca.columns import freeze
from distca.validation import UserError, check_whole
from distca.workload.layout import KeySlices, Layout

IDLE = -1


def _unset() -> np.ndarray:
    return np.empty(0, dtype=np.int64)


@dataclass(frozen=True, slots=True)
class Ticks:
    """The units of every stage in every tick. Fields after `num_micro_batches` default to one part per stage, backward
    units that include dW, and a head that belongs to the last part."""

    micro_batch: np.ndarray     # [ticks, stages] of the forward or backward unit; -1 if the stage has none
    backward: np.ndarray        # [ticks, stages] bool; without a unit in a same-phase tick, the tick's phase
    num_micro_batches: int
    part: np.ndarray = field(default_factory=_unset)  # [ticks, stages] part of the model that the unit runs
    weight: np.ndarray = field(default_factory=_unset)  # [ticks, stages] micro-batch of the weight unit; -1 if none
    weight_part: np.ndarray = field(default_factory=_unset)  # [ticks, stages] part of the weight unit
    head: np.ndarray = field(default_factory=_unset)  # [ticks] micro-batch whose head all stages compute; -1 if none
    stage_of: np.ndarray = field(default_factory=_unset)  # [parts] stage that holds each part

    def __post_init__(self) -> None:
        shape = self.micro_batch.shape
        stages = np.arange(shape[-1] if shape else 0)
        defaults = {"part": np.broadcast_to(stages, shape), "weight": np.full(shape, IDLE),
                    "weight_part": np.broadcast_to(stages, shape), "head": np.full(shape[:1], IDLE), "stage_of": stages}
        for name, value in defaults.items():
            if len(getattr(self, name)) == 0:
                object.__setattr__(self, name, value)
        freeze(self, ("micro_batch", *defaults))
        freeze(self, ("backward",), np.bool_)

    @property
    def num_ticks(self) -> int:
        return self.micro_batch.shape[0]

    @property
    def num_stages(self) -> int:
        return self.micro_batch.shape[1]

    @property
    def num_parts(self) -> int:
        return len(self.stage_of)

    @property
    def active(self) -> np.ndarray:
        """[ticks, stages] Whether the stage runs forward or backward."""
        return self.micro_batch != IDLE

    @property
    def splits(self) -> bool:
        """Whether weight gradients are units of their own."""
        return bool((self.weight != IDLE).any())

    @property
    def spreads_head(self) -> bool:
        """Whether all stages compute the head, in ticks of its own."""
        return bool((self.head != IDLE).any())

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
        return np.flatnonzero([self.active[tick].any() and not self.phase(tick) for tick in range(self.num_ticks)])

    def alive(self, size: np.ndarray, recomputed: np.ndarray | None = None) -> np.ndarray:
        """[stages, …] Return the peak of `size` [parts, micro-batches, …] over what a stage keeps for backward.

        A part is kept from its forward to its backward. If its weight unit comes apart, it is kept until that, from
        backward on with size `recomputed`, by default the same.
        """
        change = np.zeros((self.num_ticks, self.num_stages, *size.shape[2:]), dtype=size.dtype)
        later = (size if recomputed is None else recomputed) if self.splits else np.zeros_like(size)
        begins, ends = (np.where(self.backward == phase, self.micro_batch, IDLE) for phase in (False, True))
        for number, part, grows in ((begins, self.part, size), (ends, self.part, later - size),
                                    (self.weight, self.weight_part, -later)):
            tick, stage = np.nonzero(number != IDLE)
            np.add.at(change, (tick, stage), grows[part[tick, stage], number[tick, stage]])
        return np.asarray(np.cumsum(change, axis=0).max(axis=0))

    def peak_live(self) -> np.ndarray:
        """[stages] Return the peak number of micro-batches kept, each of a stage's parts counted by its share."""
        units = self.alive(np.ones((self.num_parts, self.num_micro_batches), dtype=np.int64))
        chunks = self.num_parts // self.num_stages
        return units if chunks == 1 else units / chunks

    def bubble_share(self) -> float:
        """Return the share of stage-ticks in which the stage runs no unit of its own."""
        return float(1.0 - (self.active | (self.weight != IDLE) | (self.head != IDLE)[:, None]).mean())

    def validate(self) -> None:
        """Prove that every part runs each micro-batch once in every kind of unit, on its stage, after its inputs."""
        shape = self.micro_batch.shape
        if self.micro_batch.ndim != 2 or self.micro_batch.shape != self.backward.shape or self.micro_batch.size == 0:
            raise UserError(f"micro_batch has shape {shape} and backward {self.backward.shape}; give both one entry "
                            "per tick and stage")
        check_whole("num_micro_batches", self.num_micro_batches)
        self._check_columns()
        forward, backward = (self._tick_of(np.where(self.backward == phase, self.micro_batch, IDLE), self.part, name)
                             for phase, name in ((False, "forward"), (True, "backward")))
        _check_after(forward[1:], forward[:-1], "forward", 1, "the part before it")
        last = forward[-1:]
        if self.spreads_head:
            last = self._tick_of(self.head[:, None], np.full((self.num_ticks, 1), self.num_parts - 1), "in the head",
                                 parts=range(self.num_parts - 1, self.num_parts))
            _check_after(last, forward[-1:], "in the head", self.num_parts - 1, "its forward")
        _check_after(backward[-1:], last, "backward", self.num_parts - 1, "its head or forward")
        _check_after(backward[:-1], backward[1:], "backward", 0, "the part behind it")
        if self.splits:
            weight = self._tick_of(self.weight, self.weight_part, "for weight gradients")
            _check_after(weight, backward, "for weight gradients", 0, "its backward")

    def _check_columns(self) -> None:
        """Check shapes and ranges of all columns, and that parts run on the stages that hold them."""
        shape = self.micro_batch.shape
        if any(column.shape != shape for column in (self.part, self.weight, self.weight_part)) or (
                self.head.shape != shape[:1]):
            raise UserError("part, weight and weight_part need one entry per tick and stage, and head one per tick")
        if self.num_parts % self.num_stages or (np.bincount(self.stage_of, minlength=1) !=
                                                self.num_parts // self.num_stages).any():
            raise UserError(f"stage_of is {self.stage_of.tolist()}; "
                            f"give each of {self.num_stages} stages as many parts")
        for name, units, part in (("micro_batch", self.micro_batch, self.part), ("head", self.head, None),
                                  ("weight", self.weight, self.weight_part)):
            outside = units[(units < IDLE) | (units >= self.num_micro_batches)]
            if len(outside):
                raise UserError(f"{name} names {outside[0]} but num_micro_batches is {self.num_micro_batches}; use 0 "
                                f"to {self.num_micro_batches - 1}, or {IDLE} for idle")
            if part is None:
                continue
            tick, stage = np.nonzero(units != IDLE)
            held = part[tick, stage]
            wrong = (held < 0) | (held >= self.num_parts)
            wrong |= self.stage_of[np.where(wrong, 0, held)] != stage
            if wrong.any():
                at = np.flatnonzero(wrong)[0]
                raise UserError(f"stage {stage[at]} runs part {held[at]} in tick {tick[at]}, which it does not hold")
        if (self.active & (self.head != IDLE)[:, None]).any():
            raise UserError("a tick of the head runs forward or backward units too; give the head its own tick")

    def _runs(self, backward: bool) -> np.ndarray:
        return self.active & (self.backward == backward)         # [ticks, stages]

    def _tick_of(
        self, units: np.ndarray, part: np.ndarray, what: str, parts: Iterable[int] | None = None
    ) -> np.ndarray:
        """[parts, micro-batches] Return the tick of each unit; raise a UserError if one does not run exactly once."""
        wanted = np.arange(self.num_parts) if parts is None else np.array(parts)
        tick, stage = np.nonzero(units != IDLE)
        row, micro_batch = part[tick, stage] - wanted[0], units[tick, stage]
        count = np.zeros((len(wanted), self.num_micro_batches), dtype=np.int64)
        np.add.at(count, (row, micro_batch), 1)
        if (count != 1).any():
            at_part, at_micro_batch = np.argwhere(count != 1)[0]
            times = count[at_part, at_micro_batch]
            raise UserError(f"part {wanted[at_part]} runs micro-batch {at_micro_batch} {times} times {what}; "
                            "run it exactly once")
        ticks = np.empty_like(count)
        ticks[row, micro_batch] = tick
        return ticks


def layers_of_stages(num_layers: int, num_stages: int) -> tuple[int, ...]:
    """Divide layers over stages as evenly as possible.

    The last stage also has the head, and earlier stages keep more micro-batches alive, so the stages right before the
    last get the remaining layers.
    """
    for name, value in (("num_layers", num_layers), ("num_stages", num_stages)):
        check_whole(name, value)
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


def _check_after(tick: np.ndarray, needed: np.ndarray, what: str, first_part: int, before: str) -> None:
    """Check that every [part, micro-batch] of `tick` comes after the same entry of `needed`."""
    early = np.argwhere(tick <= needed)
    if len(early):
        part, micro_batch = early[0]
        raise UserError(f"part {part + first_part} runs micro-batch {micro_batch} {what} in tick "
                        f"{tick[part, micro_batch]} but {before} is in tick {needed[part, micro_batch]}; run it later")
