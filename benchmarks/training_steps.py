"""Real training steps on CPU ranks, and the very same step plans simulated with this machine's own costs.

A small decoder trains on skewed documents in every variant. Each variant's step plan is the trainer's own, and what the
simulator is given are costs that were measured once (host_costs.py): nothing is fitted to a variant. What is compared
are ratios of step times between variants on as many ranks.

home                      each rank computes the attention of its own tokens
disaggregated             a plan shares it out
disaggregated, ping-pong  and two halves of a micro-batch take turns
pipeline, ...             the same on two stages, that share attention in same-phase ticks or run 1F1B
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from common import GivenBatches, num_cores, random_batch
from host_costs import MODEL, Launches, Machine, Probe, launches_of, on_cores, profile_main, simulated

from distca.models import MODELS
from distca.planning.step import StepPlan
from distca.trace import StepTrace
from distca.train.batches import step_plan
from distca.train.groups import start_group
from distca.train.launch import launch
from distca.train.rank_env import this_rank
from distca.train.settings import Settings, load_settings
from distca.train.trainer import Trainer

PROBE_TOKENS, PROBE_SHORT = 512, 128  # per rank and micro-batch: next to nothing to compute, but tiles to move
PROBES = ("home", "disaggregated")
VARIANTS: dict[str, dict[str, str | bool | int]] = {
    "home": {"attention.mode": "home", "batch.ping_pong": False},
    "disaggregated": {"attention.mode": "disaggregated", "batch.ping_pong": False},
    "disaggregated, ping-pong": {"attention.mode": "disaggregated", "batch.ping_pong": True},
    "pipeline, home": {"attention.mode": "home", "batch.ping_pong": False, "parallel.pipeline": 2},
    "pipeline, disaggregated": {"attention.mode": "disaggregated", "batch.ping_pong": False, "parallel.pipeline": 2},
    "pipeline, disaggregated, ping-pong": {"attention.mode": "disaggregated", "batch.ping_pong": True,
                                           "parallel.pipeline": 2},
}


def variants_of(ranks: int) -> list[str]:
    return [name for name, values in VARIANTS.items() if ranks % int(values.get("parallel.pipeline", 1)) == 0]


def step_documents(ranks: int, tokens: int, short: int, num_micro_batches: int) -> list[np.ndarray]:
    """Every second micro-batch begins with two documents of half a rank's tokens; all others are short."""
    long = np.array([tokens // 2] * 2)
    return [np.concatenate([long, np.full((ranks - 1) * tokens // short, short)]) if number % 2 == 0
            else np.full(ranks * tokens // short, short) for number in range(num_micro_batches)]


def plan_of(documents: Sequence[np.ndarray], settings: Settings, ranks: int) -> StepPlan:
    """The trainer's own: the same documents, settings and planner."""
    return step_plan(documents, settings, MODEL, ranks // settings.parallel.pipeline)


class VariantTrainer(Trainer):
    """One variant on one rank."""

    def __init__(self, settings: Settings, device: torch.device) -> None:
        super().__init__(settings, device)
        self.batches.close()
        self.batches = GivenBatches()                             # type: ignore[assignment]

    def take(self, documents: Sequence[np.ndarray]) -> None:
        plan = plan_of(documents, self.settings, self.world)
        self.batches.batch = random_batch(plan, self.mesh["data"].get_local_rank())  # type: ignore[attr-defined]

    def timed_step(self) -> tuple[float, float]:
        """Seconds until the last rank is done, and the loss."""
        dist.barrier()
        begin = time.perf_counter()
        record = self.one_step()
        dist.barrier()
        return time.perf_counter() - begin, record.loss

    def probed_step(self) -> Probe:
        """The same, by parts."""
        kept: list[StepTrace] = []
        end_step = self.recorder.end_step

        def keep(rank: int, step: int) -> StepTrace:
            kept.append(end_step(rank, step))
            return kept[-1]

        self.recorder.end_step = keep                            # type: ignore[method-assign]
        seconds, _ = self.timed_step()
        self.recorder.end_step = end_step                        # type: ignore[method-assign]
        forward, backward = (sum(span.seconds for span in kept[0].spans if span.name.startswith(f"{way} ")
                                 and span.lane == "pipeline") for way in ("forward", "backward"))
        return Probe(forward, backward, seconds - forward - backward)


def steps_main(settings: Settings) -> int:
    """One rank: probes, or all variants in turn; the first rank leaves what it saw."""
    MODELS[MODEL.name] = MODEL
    options = json.loads(Path(settings.log.folder, "options.json").read_text(encoding="utf-8"))
    rank, ranks, probes = this_rank().rank, this_rank().world, options["probes"]
    start_group(settings, torch.device("cpu"), ranks)
    names = PROBES if probes else variants_of(ranks)
    trainers = {name: VariantTrainer(settings.with_values(VARIANTS[name]), torch.device("cpu")) for name in names}
    documents = step_documents(ranks, PROBE_TOKENS, PROBE_SHORT, options["micro_batches"]) if probes else (
        step_documents(ranks, options["tokens"], options["short"], options["micro_batches"]))
    seen: dict[str, list[Any]] = {name: [] for name in names}
    for turn in range(-1, 3 * options["rounds"] if probes else options["rounds"]):  # the first one warms up
        for name, trainer in trainers.items():
            trainer.take(documents)
            found: Any = asdict(trainer.probed_step()) if probes else trainer.timed_step()
            if turn >= 0:
                seen[name].append(found)
                if rank == 0 and not probes:
                    print(f"{ranks} ranks, {name}: {found[0]:.2f} s", file=sys.stderr, flush=True)
    if rank == 0:
        Path(settings.log.folder, "steps.json").write_text(json.dumps(seen), encoding="utf-8")
    dist.barrier()
    dist.destroy_process_group()
    return 0


@dataclass(frozen=True, slots=True)
class Ratio:
    """Step time of one variant over another's, on as many ranks."""

    ranks: int
    variant: str
    over: str
    measured: float
    simulated: float

    @property
    def error(self) -> float:
        """How far the larger of the two is above the other: the same for a pair turned round."""
        quotient = self.simulated / self.measured
        return max(quotient, 1 / quotient) - 1


@dataclass(frozen=True, slots=True)
class Result:
    """One variant on so many ranks."""

    ranks: int
    variant: str
    step_seconds: float          # of the least disturbed step
    simulated_seconds: float
    host_seconds: float          # of simulated: launches, by counting
    step_seconds_all: list[float]
    loss: float

    def over(self, other: Result) -> Ratio:
        return Ratio(self.ranks, self.variant, other.variant, self.step_seconds / other.step_seconds,
                     self.simulated_seconds / other.simulated_seconds)


def ratios(results: Sequence[Result]) -> list[Ratio]:
    """Of every two variants on as many ranks, the later over the earlier."""
    return [one.over(other) for other, one in combinations(results, 2) if one.ranks == other.ranks]


def base_settings(folder: str, ranks: int) -> Settings:
    MODELS[MODEL.name] = MODEL
    return load_settings(None, {
        "model.name": MODEL.name, "run.ranks": str(ranks), "run.threads": "1", "run.device": "cpu", "run.steps": "1000",
        "optimizer.lr": "1e-12", "log.folder": folder, "attention.placement": "given"})


def launches_on(ranks: int, settings: Settings, known: dict[int, Launches]) -> Launches:
    """Segments gather weights over the data ranks of a stage; exchanges are of who shares attention."""
    data = known[ranks // settings.parallel.pipeline]
    pool = known[ranks] if settings.attention.mode == "disaggregated" else data
    return Launches(data.segment, pool.exchange, known[ranks].step)


def run_on_cpu(arguments: argparse.Namespace) -> tuple[Machine, dict[int, Launches], list[Result]]:
    options = {name: getattr(arguments, name) for name in ("tokens", "short", "rounds", "micro_batches")}
    with tempfile.TemporaryDirectory() as folder:
        _launched(base_settings(folder, num_cores()), profile_main, options | {"probes": False})
        machine = Machine(**json.loads(Path(folder, "machine.json").read_text(encoding="utf-8")))
        known = {}
        for ranks in sorted({count for total in arguments.ranks for count in (total, max(total // 2, 1))}):
            seen = _launched(base_settings(folder, ranks), steps_main, options | {"probes": True})
            known[ranks] = _probed(seen, base_settings(folder, ranks), ranks, arguments.micro_batches, machine)
        results = []
        for ranks in arguments.ranks:
            settings = base_settings(folder, ranks)
            seen = _launched(settings, steps_main, options | {"probes": False})
            documents = step_documents(ranks, arguments.tokens, arguments.short, arguments.micro_batches)
            for name, found in seen.items():
                chosen = settings.with_values(VARIANTS[name])
                plan, launches = plan_of(documents, chosen, ranks), launches_on(ranks, chosen, known)
                expected, bare = (on_cores(simulated(plan, machine, one), machine) for one in (launches, Launches()))
                seconds = [one[0] for one in found]
                results.append(Result(ranks, name, min(seconds), expected, expected - bare, seconds, found[-1][1]))
    return machine, known, results


def _probed(seen: dict[str, Any], settings: Settings, ranks: int, micro_batches: int, machine: Machine) -> Launches:
    """From the least disturbed probe of each kind."""
    documents = step_documents(ranks, PROBE_TOKENS, PROBE_SHORT, micro_batches)
    home, pool = (Probe(*np.min([list(one.values()) for one in seen[name]], axis=0).tolist()) for name in PROBES)
    plans = [plan_of(documents, settings.with_values(VARIANTS[name]), ranks) for name in PROBES]
    return launches_of(home, pool, (plans[0], plans[1]), machine)


def _launched(settings: Settings, main: Callable[[Settings], int], options: dict[str, Any]) -> dict[str, Any]:
    """What the first of the ranks left, if anything."""
    folder = Path(settings.log.folder)
    Path(folder, "options.json").write_text(json.dumps(options), encoding="utf-8")
    code = launch(settings, main)
    if code:
        raise SystemExit(code)
    left = Path(folder, "steps.json")
    return json.loads(left.read_text(encoding="utf-8")) if left.exists() else {}
