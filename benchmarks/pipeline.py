"""What does sharing attention over a pipeline's stages gain? Two CPU ranks as two stages, one thread each.

1F1B at home   each stage computes its own attention and mixes phases: the usual schedule
               interleaved: with two parts of the model a stage; zero bubble: with weight gradients in idle time (ZB-H1)
same phase     all stages run the same phase in a tick and share its attention, idle ones included
interleaved    and each stage has two parts of the model, weight gradients in idle time, and a share of the head
ping-pong      and each micro-batch is two nano-batches, one of which computes while the other travels

Some micro-batches are two long documents, the others as many tokens of short ones, and at every step the long ones come
one micro-batch later. A long document of 6K tokens has six times as many FLOPs in attention as in linear layers, like
one of 320K in an 8B model. All variants train on the same documents in turns, each step's plans are new to them, and
their losses must agree. A step lasts as long as its slower stage; a gain is the median over steps of what 1F1B took
over what the variant took for the same documents. A step before the timed ones also counts what autograd keeps for
backward, in micro-batches and in bytes, against the schedule's bound.

Planning is timed apart, since it runs ahead of the step: all ticks of 8 stages × 8 data ranks with 16 micro-batches.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from common import GivenBatches, random_batch
from outputs import RESULTS, host_facts, wide_console, write_json
from pipeline_planning import planning, planning_table
from rich.table import Table
from torch import nn

from distca.models import MODELS
from distca.planning.orders import one_forward_one_backward
from distca.runtime.pipeline import Send
from distca.runtime.transport import Handle
from distca.spec import ModelShape
from distca.trace import StepTrace
from distca.train.batches import RowPlans, StageWork, step_plan
from distca.train.groups import start_group
from distca.train.launch import launch
from distca.train.model.weight_gradients import WeightUnit
from distca.train.rank_env import this_rank
from distca.train.settings import Settings, load_settings
from distca.train.trainer import Trainer
from distca.workload.documents import fill

RESULT = RESULTS / "pipeline.json"
MODEL = ModelShape("tiny", 4, 96, 3, 1, 32, 256, 257)
STAGES = 2
OPTIONS = ("micro_batches", "tokens", "short", "long_every", "rounds")
BASELINE = "1F1B at home"
VARIANTS: dict[str, dict[str, str | bool]] = {
    BASELINE: {"attention.mode": "home", "batch.ping_pong": False},
    "1F1B, interleaved": {"attention.mode": "home", "batch.ping_pong": False,
                          "parallel.schedule": "interleaved_1f1b_2"},
    "1F1B, zero bubble": {"attention.mode": "home", "batch.ping_pong": False, "parallel.schedule": "zb_h1"},
    "same phase": {"parallel.schedule": "same_phase", "batch.ping_pong": False},
    "same phase, ping-pong": {"parallel.schedule": "same_phase", "batch.ping_pong": True},
    "interleaved": {"parallel.schedule": "interleaved_2", "batch.ping_pong": False},
    "interleaved, ping-pong": {"parallel.schedule": "interleaved_2", "batch.ping_pong": True},
}


@dataclass(frozen=True, slots=True)
class Speed:
    """One variant with one number of micro-batches: medians over its steps; where time goes, of each stage."""

    micro_batches: int
    variant: str
    tokens: int
    step_seconds: float
    tokens_per_second: float
    gain: float                               # over the baseline, same documents
    attention_seconds: list[float]            # [stages]
    served_in_bubbles_seconds: list[float]    # [stages] part of attention
    neighbour_seconds: list[float]            # [stages] waiting for activations and gradients
    exchange_seconds: list[float]             # [stages] waiting for attention's exchanges
    linear_seconds: list[float]               # [stages] all else in forward and backward: layers, loss, copies
    update_seconds: list[float]               # [stages] the optimizer, and waiting there for the other stage
    cpu_seconds: list[float]                  # [stages] with the threads that carry bytes
    work_max_over_mean: float                 # planned, over ticks
    served_in_bubbles: float                  # planned share of attention
    largest_loss_difference: float            # from the baseline
    step_seconds_all: list[float]
    losses: list[float]


@dataclass(frozen=True, slots=True)
class Memory:
    """What autograd keeps on one stage, at most."""

    micro_batches: int
    variant: str
    stage: int
    live: float             # micro-batches between forward and backward or weight unit, counted in parts
    live_bound: float       # by the variant's ticks
    live_1f1b: float        # by 1F1B's
    kept_bytes: int
    kept_bytes_bound: float  # the largest micro-batch's, times the bound


# ------------------------------------------------------------------------------------------------------------- batches


def step_documents(
    step: int, num_micro_batches: int, tokens: int, short: int, long_every: int
) -> list[np.ndarray]:
    """Lengths for each micro-batch, whose two halves are alike."""
    documents = []
    for number in range(num_micro_batches):
        rng = np.random.default_rng([step, number])
        drawn = rng.integers(short // 2, short + short // 2, 2 * tokens // short)
        half = np.array([tokens // 2]) if (number - step) % long_every == 0 else fill(drawn, tokens // 2)
        documents.append(np.concatenate([half, half]))
    return documents


# -------------------------------------------------------------------------------------------------------------- memory


Unit = tuple[int, int]                               # part and micro-batch


class Kept:
    """Counts what is kept for backward and for weight units: storages once each, and no parameters."""

    def __init__(self) -> None:
        self.uses: Counter[int] = Counter()          # by storage
        self.tensors: Counter[Unit] = Counter()
        self.bytes = self.peak_bytes = self.peak_live = self.largest = 0

    @contextmanager
    def of(self, unit: Unit) -> Iterator[None]:
        before = self.bytes
        with torch.autograd.graph.saved_tensors_hooks(lambda x: _Saved(self, x, unit), lambda saved: saved.x):
            yield
        self.largest = max(self.largest, self.bytes - before)

    def count(self, weights: dict[Unit, WeightUnit]) -> None:
        """Note the peaks; `weights` are the weight units that remain to be computed."""
        pairs = {x.untyped_storage().data_ptr(): x.untyped_storage().nbytes()
                 for unit in weights.values() for _, *pair in unit.pairs for x in pair}
        self.peak_bytes = max(self.peak_bytes, self.bytes + sum(pairs.values()))
        alive = {unit for unit, count in self.tensors.items() if count}.union(weights)
        self.peak_live = max(self.peak_live, len(alive))


class _Saved:
    """One tensor that autograd keeps."""

    def __init__(self, kept: Kept, x: torch.Tensor, unit: Unit) -> None:
        self.kept, self.x, self.unit = kept, x.detach(), unit
        self.storage, self.bytes = x.untyped_storage().data_ptr(), x.untyped_storage().nbytes()
        if isinstance(x if x._base is None else x._base, nn.Parameter):
            self.storage = self.bytes = 0                        # sharded parameters give their memory back meanwhile
        if not kept.uses[self.storage]:
            kept.bytes += self.bytes
        kept.uses[self.storage] += 1
        kept.tensors[unit] += 1
        kept.peak_bytes = max(kept.peak_bytes, kept.bytes)

    def __del__(self) -> None:
        self.kept.uses[self.storage] -= 1
        self.kept.tensors[self.unit] -= 1
        if not self.kept.uses[self.storage]:
            self.kept.bytes -= self.bytes


class CountedWork(StageWork):
    """A stage whose kept tensors are counted."""

    def count(self) -> Kept:
        self.kept = Kept()
        return self.kept

    def forward(
        self, part: int, micro_batch: int, received: Sequence[Handle], send: Send, plans: RowPlans,
        backward_plans: RowPlans,
    ) -> list[torch.Tensor]:
        with self.kept.of((part, micro_batch)):
            outputs = super().forward(part, micro_batch, received, send, plans, backward_plans)
        self.kept.count(self.units)
        return outputs

    def backward(self, *args: Any, **options: Any) -> None:
        super().backward(*args, **options)
        self.kept.count(self.units)


# --------------------------------------------------------------------------------------------------------------- speed


class StageTrainer(Trainer):
    """One variant's trainer on one stage."""

    def __init__(self, settings: Settings, device: torch.device) -> None:
        super().__init__(settings, device)
        self.batches = GivenBatches()                             # type: ignore[assignment]
        self.uncounted = self.work
        self.counted = CountedWork(self.decoder, self.attention, tensor=1, dtype=self.work.shapes.dtype, device=device,
                                   loss_chunk_tokens=settings.optimizer.loss_chunk_tokens,
                                   gradients=self.work.gradients, spreads_head=self.work.spreads_head)

    def take(self, documents: Sequence[np.ndarray]) -> None:
        plan = step_plan(documents, self.settings, self.decoder.shape.model, self.num_data)
        self.batches.batch = random_batch(plan, 0)                # type: ignore[attr-defined]

    def counted_step(self) -> dict[str, float]:
        self.work, kept = self.counted, self.counted.count()
        self.one_step()
        self.work = self.uncounted
        if kept.bytes:
            raise ValueError(f"{kept.bytes} bytes are kept after the step; nothing may be")
        ticks = self.batches.next().plan.ticks
        one_by_one = one_forward_one_backward(ticks.num_stages, ticks.num_micro_batches)
        bound, chunks = float(ticks.peak_live()[self.rank]), ticks.num_parts // ticks.num_stages
        return {"stage": self.rank, "live": kept.peak_live / chunks, "live_bound": bound,
                "live_1f1b": float(one_by_one.peak_live()[self.rank]), "kept_bytes": kept.peak_bytes,
                "kept_bytes_bound": bound * chunks * kept.largest}

    def measured_step(self) -> dict[str, Any]:
        dist.barrier()
        cpu = time.process_time()
        record = self.one_step()
        cpu_seconds = time.process_time() - cpu
        return {"seconds": record.seconds, "cpu": cpu_seconds, "loss": record.loss, "tokens": record.tokens,
                "work_max_over_mean": record.work_after, "served_in_bubbles": record.served_in_bubbles,
                **where(self.recorder.end_step(self.rank, record.step), record.seconds)}


def where(trace: StepTrace, step_seconds: float) -> dict[str, float]:
    """Seconds of one stage's step by what it did."""
    bubbles = [span for span in trace.spans if span.lane == "bubble"]
    attention = [span for span in trace.spans if span.lane == "attention"]
    served = [span for span in attention if any(
        bubble.start_seconds <= span.start_seconds < bubble.stop_seconds for bubble in bubbles)]
    waits = {name: sum(span.seconds for span in trace.spans if (span.lane, span.name) == ("wait", name))
             for name in ("neighbour", "exchange")}
    computing, linear = sum(span.seconds for span in attention), trace.seconds("linear")
    return {"attention": computing, "served": sum(span.seconds for span in served), **waits, "linear": linear,
            "update": step_seconds - computing - linear - sum(waits.values())}


def rank_main(settings: Settings) -> int:
    """One stage: all variants in turn; leaves what it saw in the folder."""
    MODELS[MODEL.name] = MODEL                                   # this process's tiny model
    options = json.loads(Path(settings.log.folder, "options.json").read_text(encoding="utf-8"))
    rank, device = this_rank().rank, torch.device("cpu")
    start_group(settings, device, STAGES)
    trainers = {variant: StageTrainer(settings.with_values(values), device) for variant, values in VARIANTS.items()}
    names = list(VARIANTS)
    seen: dict[str, list[dict[str, Any]]] = {"steps": [], "memory": []}
    for num_micro_batches in options["micro_batches"]:
        for turn in range(1 + options["rounds"]):
            documents = step_documents(turn, num_micro_batches, options["tokens"], options["short"],
                                       options["long_every"])
            first = turn % len(names)
            for variant in names[first:] + names[:first]:
                trainers[variant].take(documents)
                about = {"micro_batches": num_micro_batches, "variant": variant}
                if turn == 0:                                    # warm-up
                    seen["memory"].append(about | trainers[variant].counted_step())
                    continue
                seen["steps"].append(about | trainers[variant].measured_step())
                if rank == 0:
                    print(f"{num_micro_batches} micro-batches, round {turn} of {options['rounds']}: {variant} "
                          f"{seen['steps'][-1]['seconds']:.2f} s", file=sys.stderr, flush=True)
    Path(settings.log.folder, f"rank_{rank}.json").write_text(json.dumps(seen), encoding="utf-8")
    dist.barrier()
    dist.destroy_process_group()
    return 0


def measure(arguments: argparse.Namespace) -> tuple[list[Speed], list[Memory]]:
    with tempfile.TemporaryDirectory() as folder:
        options = {name: getattr(arguments, name) for name in OPTIONS}
        Path(folder, "options.json").write_text(json.dumps(options), encoding="utf-8")
        MODELS[MODEL.name] = MODEL
        code = launch(load_settings(None, {
            "model.name": MODEL.name, "run.ranks": str(STAGES), "parallel.pipeline": str(STAGES), "run.threads": "1",
            "run.device": "cpu", "run.steps": "1000", "optimizer.lr": "1e-12", "log.folder": folder,
            "batch.tokens_per_rank": str(arguments.tokens)}), rank_main)
        if code:
            raise SystemExit(code)
        stages = [json.loads(Path(folder, f"rank_{rank}.json").read_text(encoding="utf-8")) for rank in range(STAGES)]
    memory = [Memory(**one) for stage in zip(*(seen["memory"] for seen in stages), strict=True) for one in stage]
    return [_speed(stages, number, variant) for number in arguments.micro_batches for variant in VARIANTS], memory


def _speed(stages: Sequence[dict[str, Any]], num_micro_batches: int, variant: str) -> Speed:
    def steps(variant: str) -> list[tuple[dict[str, Any], ...]]:
        """[step][stage]"""
        about = num_micro_batches, variant
        return list(zip(*([step for step in seen["steps"] if (step["micro_batches"], step["variant"]) == about]
                          for seen in stages), strict=True))

    def medians(name: str) -> list[float]:
        return [median(step[stage][name] for step in ours) for stage in range(STAGES)]

    ours, base = steps(variant), steps(BASELINE)
    slower, base_slower = ([max(stage["seconds"] for stage in step) for step in taken] for taken in (ours, base))
    losses, tokens = [step[0]["loss"] for step in ours], ours[0][0]["tokens"]
    return Speed(
        micro_batches=num_micro_batches, variant=variant, tokens=tokens, step_seconds=median(slower),
        tokens_per_second=tokens / median(slower),
        gain=median(theirs / seconds for theirs, seconds in zip(base_slower, slower, strict=True)),
        attention_seconds=medians("attention"), served_in_bubbles_seconds=medians("served"),
        neighbour_seconds=medians("neighbour"), exchange_seconds=medians("exchange"),
        linear_seconds=medians("linear"), update_seconds=medians("update"), cpu_seconds=medians("cpu"),
        work_max_over_mean=median(step[0]["work_max_over_mean"] for step in ours),
        served_in_bubbles=median(step[0]["served_in_bubbles"] for step in ours),
        largest_loss_difference=max(abs(step[0]["loss"] - loss) for step, loss in zip(base, losses, strict=True)),
        step_seconds_all=slower, losses=losses)


# ---------------------------------------------------------------------------------------------------------------- show


def speed_table(rows: Sequence[Speed]) -> Table:
    table = Table(title=f"{STAGES} stages, {rows[0].micro_batches} micro-batches, {rows[0].tokens} tokens; seconds of "
                        "stage 0 / stage 1", title_justify="left")
    for title in ("variant", "s a step", "tokens/s", "gain", "attention", "in bubbles", "neighbour",
                  "exchange", "linear", "update"):
        table.add_column(title, justify="left" if title == "variant" else "right", no_wrap=True)
    for row in rows:
        columns = (row.attention_seconds, row.served_in_bubbles_seconds, row.neighbour_seconds, row.exchange_seconds,
                   row.linear_seconds, row.update_seconds)
        table.add_row(row.variant, f"{row.step_seconds:.2f}", f"{row.tokens_per_second:,.0f}", f"{row.gain:.2f}",
                      *(" / ".join(f"{stage:.2f}" for stage in column) for column in columns))
    return table


def memory_table(rows: Sequence[Memory]) -> Table:
    table = Table(title="kept for backward, at most", title_justify="left")
    for title in ("micro-batches", "variant", "stage", "live", "bound", "1F1B's", "MB", "bound MB"):
        table.add_column(title, justify="left" if title == "variant" else "right", no_wrap=True)
    for row in rows:
        table.add_row(str(row.micro_batches), row.variant, str(row.stage), f"{row.live:g}", f"{row.live_bound:g}",
                      f"{row.live_1f1b:g}", f"{row.kept_bytes / 1e6:.1f}", f"{row.kept_bytes_bound / 1e6:.1f}")
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--micro-batches", type=int, nargs="+", default=[4, 8])
    parser.add_argument("--tokens", type=int, default=12_288, help="of a micro-batch; long documents have half of it")
    parser.add_argument("--short", type=int, default=512, help="mean length of the others")
    parser.add_argument("--long-every", type=int, default=2, help="of how many micro-batches one has long documents")
    parser.add_argument("--rounds", type=int, default=4, help="timed steps of each variant")
    parser.add_argument("--no-planning", action="store_true", help="leave out planning of a large pool")
    parser.add_argument("--repeats", type=int, default=5, help="timed plannings of each kind")
    parser.add_argument("--json", type=Path, nargs="?", const=RESULT, help=f"write results; without a path: {RESULT}")
    arguments = parser.parse_args()
    if arguments.tokens % 2 or arguments.short < 4:
        parser.error(f"--tokens is {arguments.tokens} and --short {arguments.short}; give an even number, and at least "
                     "4")
    console, host = wide_console(), host_facts()
    plannings = [] if arguments.no_planning else planning(arguments.repeats)
    speeds, memory = measure(arguments)
    for number in arguments.micro_batches:
        console.print(speed_table([row for row in speeds if row.micro_batches == number]))
    difference = max(row.largest_loss_difference for row in speeds)
    console.print(f"losses differ by at most {difference:.1e}; CPU seconds of both stages: " + ", ".join(
        f"{sum(row.cpu_seconds):.2f}" for row in speeds))
    console.print(memory_table(memory))
    if plannings:
        console.print(planning_table(plannings))
    if arguments.json is not None:
        options = {name: getattr(arguments, name) for name in (*OPTIONS, "repeats")}
        write_json(arguments.json, {
            "host": host, "model": MODEL, "options": options, "speed": speeds, "memory": memory, "planning": plannings,
            "largest_loss_difference": difference})


if __name__ == "__main__":
    main()
