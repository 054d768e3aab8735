"""Choose what the user left open of a step, so that it divides and fits; and name what to change where it cannot.

Options that are None are open: GPUs, TP, PP and EP. Candidates are tried in the order in which people would choose, and
the first that fits the memory is kept. A remedy is found in the same way, from the options as the user typed them, so
that typing it works.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, replace
from itertools import product
from math import lcm
from typing import Any

from distca.cost.mixed_pool import Cost, MixedPool
from distca.simulate.costs import Costs
from distca.simulate.memory import check_fits, least_bytes
from distca.simulate.setting import Setting, settings
from distca.spec import ClusterShape, ModelShape
from distca.validation import UserError, check_whole

DEFAULT_GPUS = 64
DEFAULT_CONTEXT = 131_072
SPARE = 0.95      # share of the memory that a choice of ours may fill with equal tokens; the rest is for buffers
NO_REMEDY = "a smaller --model"
LEAST_RANKS = 2   # of the pool, where there is a choice: one rank has nothing to balance
LEAST_CONTEXT = 1024  # that a remedy names
_DOUBLINGS = 10   # of the GPUs, before a model counts as too large
_STAGES = (1, 2, 4, 8, 16)


@dataclass(frozen=True, slots=True)
class StepAsked:
    """Options of a simulated step as the user typed them; None where the choice is ours."""

    gpus: int | None = None
    tp: int | None = None
    pp: tuple[int, ...] | None = None             # several: the sweep tries each
    ep: int | None = None
    context: int = DEFAULT_CONTEXT
    sequences: int | None = None
    micro_batches: tuple[int, ...] | None = None  # several: the sweep tries each
    recompute: str = "auto"
    memory: float = 0.0


def check_pool(setting: Setting, table: Cost) -> None:
    """Refuse servers that differ with stages, which would all be charged like the first ranks, or in another number."""
    if isinstance(table, MixedPool):
        if setting.pp > 1:
            raise UserError(f"pp is {setting.pp} but cost names servers that differ, which are simulated without a "
                            "pipeline; give --pp 1, or one latency table")
        table.time(setting.model, setting.tp).check_servers(setting.num_pool)


def fitting_context(longest: int) -> int:
    """Return the longest document's tokens, rounded down to a multiple of 128, at most 128K."""
    return min(DEFAULT_CONTEXT, longest // 128 * 128 or longest)


def fitting_settings(model: ModelShape, cluster: ClusterShape, table: Cost, asked: StepAsked) -> tuple[Setting, ...]:
    """Make the settings that were asked for, with open options chosen such that a step fits; else refuse with a remedy.

    By default there are 64 GPUs, or as many more as the model needs, TP as large as a node that leaves at least two
    pool ranks, and no pipeline.
    """
    chosen = _choose(model, cluster, table, asked)
    if isinstance(chosen, UserError):
        raise _not_divided(model, cluster, table, asked) or chosen
    for one in chosen:
        if not _fits(one, table):
            check_fits(one, Costs.of(model, cluster, one.tp, table),
                       _remedy(model, cluster, table, asked, _changes(asked, one)))
    return chosen


def _choose(
    model: ModelShape, cluster: ClusterShape, table: Cost, asked: StepAsked
) -> tuple[Setting, ...] | UserError:
    """Return the first candidate that fits, else the first that divides, else why the first does not divide."""
    divides: list[tuple[Setting, ...]] = []
    error = None
    for one in _candidates(asked, model, cluster):
        try:
            given = {name: value for name, value in asdict(one).items() if value is not None}
            found = settings(model, cluster, **given)
            for each in found:
                check_pool(each, table)
        except UserError as refused:
            error = error or refused
            continue
        if all(_fits(each, table, SPARE) for each in found):
            return found
        divides.append(found)
    assert error is not None or divides, "there is a candidate"
    tight = (found for found in divides if all(_fits(each, table) for each in found))
    return next(tight, divides[0]) if divides else error  # type: ignore[return-value]


def _not_divided(model: ModelShape, cluster: ClusterShape, table: Cost, asked: StepAsked) -> UserError | None:
    """Return the refusal of GPUs that TP and PP do not divide, with a number that they divide and that fits."""
    tp, stages = asked.tp or 1, asked.pp or (1,)
    unit = tp * lcm(*stages)
    if asked.gpus is None or asked.gpus % unit == 0:
        return None
    nearest = max(asked.gpus // unit, 1) * unit
    remedy = _remedy(model, cluster, table, asked, ({"gpus": nearest}, *_more_gpus(asked, nearest)))
    return None if remedy == NO_REMEDY else UserError(
        f"gpus is {asked.gpus}, not a multiple of tp {tp} times pp {' and '.join(map(str, stages))}; give {remedy}, or "
        "another --tp or --pp")


def _candidates(asked: StepAsked, model: ModelShape, cluster: ClusterShape) -> Iterator[StepAsked]:
    """Yield the options with every open one filled in, the usual choices first."""
    for field, values in (("gpus", [asked.gpus]), ("tp", [asked.tp]), ("ep", [asked.ep]), ("pp", asked.pp or ())):
        for value in values:
            check_whole(field, 1 if value is None else value)
    unit = lcm(*(asked.pp or (1,))) * (asked.tp or cluster.gpus_per_node)
    usual = max(DEFAULT_GPUS // unit, 1) * unit
    grows = range(_DOUBLINGS + 1 if asked.sequences is None else 1)  # for a model, not for a step as large as asked for
    for gpus in (usual << more for more in grows) if asked.gpus is None else (asked.gpus,):
        stages = [(one,) for one in _STAGES if one <= model.num_layers] if asked.pp is None else [asked.pp]
        sizes = sorted((tp for tp in range(1, min(cluster.gpus_per_node, gpus) + 1) if gpus % tp == 0),
                       key=lambda tp: (gpus // tp < LEAST_RANKS, -tp))
        num_experts = 1 if model.experts is None else model.experts.num
        experts = [ep for ep in range(1, min(num_experts, gpus) + 1) if gpus % ep == num_experts % ep == 0]
        for pp, ep, tp in product(stages, experts if asked.ep is None else [asked.ep],
                                  sizes if asked.tp is None else [asked.tp]):
            yield replace(asked, gpus=gpus, tp=tp, pp=pp, ep=ep)


def _fits(setting: Setting, table: Cost, share: float = 1.0) -> bool:
    costs = Costs.of(setting.model, setting.cluster, setting.tp, table)
    return least_bytes(setting, costs)[1] <= share * setting.cluster.memory_bytes


def _remedy(
    model: ModelShape, cluster: ClusterShape, table: Cost, asked: StepAsked, changes: Iterable[dict[str, Any]]
) -> str:
    """Return the first of the changes with which the step fits, as it is typed."""
    for change in changes:
        chosen = _choose(model, cluster, table, replace(asked, **change))
        if not isinstance(chosen, UserError) and all(_fits(one, table, SPARE) for one in chosen):
            return " ".join(f"--{name} {','.join(map(str, value)) if isinstance(value, tuple) else value}"
                            for name, value in change.items())
    return NO_REMEDY


def _changes(asked: StepAsked, refused: Setting) -> Iterator[dict[str, Any]]:
    """Yield changes of options that need less memory, those that leave the GPUs alone first."""
    if asked.recompute != "auto":
        yield {"recompute": "auto"}
    powers = [2**n for n in range(1, 24)]
    count = refused.num_micro_batches
    yield from ({"sequences": refused.num_sequences // by} for by in powers
                if refused.num_sequences % (by * count) == 0)
    yield from ({"context": asked.context // by} for by in powers if asked.context // by >= LEAST_CONTEXT)
    for name in ("ep", "tp"):
        if (given := getattr(asked, name)) is not None:
            yield from ({name: given * by} for by in powers[:7])
    yield from _more_gpus(asked, refused.gpus)


def _more_gpus(asked: StepAsked, gpus: int) -> Iterator[dict[str, Any]]:
    """Yield doublings of the GPUs and, where stages were asked for, of the stages."""
    stages = [{}] if asked.pp is None else [{}, *({"pp": tuple(one << by for one in asked.pp)} for by in range(1, 6))]
    yield from ({"gpus": gpus << more} | other for more in range(_DOUBLINGS + 1) for other in stages if other or more)
