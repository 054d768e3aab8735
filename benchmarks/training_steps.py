"""Real training steps on CPU ranks, and the same steps simulated with this machine's own costs.

A small decoder trains on skewed documents in every variant, and the trainer's own layouts and plans run through the
simulator's step functions. What is compared are ratios of step times between variants on as many ranks.

home                      each rank computes the attention of its own tokens
disaggregated             a plan shares it out
disaggregated, ping-pong  and two halves of a micro-batch take turns
pipeline, home            two stages, 1F1B
pipeline, disaggregated   two stages that share attention in same-phase ticks

A CPU rank has no link of its own: bytes are copied by the cores that compute, so an exchange costs its ranks computing
time. Ranks share the cores, at the speed measured with all of them busy: a step takes as long as the simulator says of
ranks that have a core each, or as all ranks' work takes on the cores there are, whichever is longer. What a step costs
without tokens (weights, optimizer, interpreter) is measured with next to none, variant by variant, and added.

Other work on the machine only ever adds to a measurement, so the least of several counts, in the profile as in the
steps.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from distca import profiling
from distca.cost.latency_table import LatencyTable, peak_rate
from distca.cost.network import Network
from distca.kernels import TaskRows
from distca.planning.plan import Plan
from distca.runtime.probe import measure_exchange
from distca.runtime.transport import C10dTransport
from distca.simulate.costs import Costs
from distca.simulate.nano import Nano, Served, served
from distca.simulate.setting import Setting
from distca.simulate.step import Groups, grouped_step, served_step
from distca.simulate.timeline import Exchange
from distca.spec import MODELS, ModelShape, cluster_named
from distca.train.config import Settings, load_settings
from distca.train.data import IGNORED, Batch, Row
from distca.train.launch import here, launch
from distca.train.model import Decoder, chunked_cross_entropy, decoder_shape
from distca.train.step_plan import StepPlan, plan_step
from distca.train.trainer import Trainer, start_group
from distca.workload.layout import Layout
from distca.workload.packing import NanoBatch

MODEL = ModelShape("tiny", 4, 64, 2, 1, 32, 176, 257)
FLOAT32_OVER_BF16 = 2        # the simulator counts bytes in bf16, CPU ranks send float32
PASSES = 2                   # over all that is profiled
FEW_TOKENS, FEW_SHORT = 64, 16  # per rank and micro-batch: a step with next to nothing to compute
VARIANTS: dict[str, dict[str, str | bool | int]] = {
    "home": {"attention.mode": "home", "batch.ping_pong": False},
    "disaggregated": {"attention.mode": "disaggregated", "batch.ping_pong": False},
    "disaggregated, ping-pong": {"attention.mode": "disaggregated", "batch.ping_pong": True},
    "pipeline, home": {"attention.mode": "home", "batch.ping_pong": False, "parallel.pipeline": 2},
    "pipeline, disaggregated": {"attention.mode": "disaggregated", "batch.ping_pong": False, "parallel.pipeline": 2},
}


def variants_of(ranks: int) -> list[str]:
    return [name for name, values in VARIANTS.items() if ranks % int(values.get("parallel.pipeline", 1)) == 0]


def step_documents(ranks: int, tokens: int, short: int, num_micro_batches: int) -> list[np.ndarray]:
    """Every second micro-batch begins with two documents of half a rank's tokens; all others are short."""
    long = np.array([tokens // 2] * 2)
    return [np.concatenate([long, np.full((ranks - 1) * tokens // short, short)]) if number % 2 == 0
            else np.full(ranks * tokens // short, short) for number in range(num_micro_batches)]


# --------------------------------------------------------------------------------------------------------- real steps


def random_row(nano: NanoBatch, rank: int, micro_batch: int) -> Row:
    """The rank's part of a row: the same text for a document in whatever row it is."""
    layout = nano.layout
    assert not nano.start.any(), "halves are alike, so no document is cut"
    text = np.concatenate([np.random.default_rng([micro_batch, document]).integers(0, 256, length)
                           for document, length in zip(nano.document.tolist(), layout.lengths.tolist(), strict=True)])
    columns = layout.tokens(rank)
    begin = np.cumsum(layout.lengths) - layout.lengths
    at = begin[columns.document] + columns.position              # [tokens of the rank]
    labels = np.where(columns.next_rank >= 0, np.append(text, 0)[at + 1], IGNORED)
    return Row(*(torch.from_numpy(x) for x in (text[at], labels, columns.position)))


class Batches:
    """A loader that gives what it was given last."""

    batch: Batch

    def next(self) -> Batch:
        return self.batch


class VariantTrainer(Trainer):
    """One variant on one rank."""

    def __init__(self, settings: Settings, device: torch.device) -> None:
        super().__init__(settings, device)
        self.loader.close()
        self.loader = Batches()                                  # type: ignore[assignment]

    def take(self, documents: Sequence[np.ndarray]) -> None:
        plan = plan_step(documents, self.settings, self.decoder.shape.model, self.num_data)
        rank = self.mesh["data"].get_local_rank()
        rows = tuple(tuple(random_row(nano, rank, number) for nano in nanos)
                     for number, nanos in enumerate(plan.nano_batches))
        self.loader.batch = Batch(rows, plan, plan.num_labels, 0.0, 0.0)  # type: ignore[attr-defined]

    def timed_step(self) -> tuple[float, float]:
        """Seconds until the last rank is done, and the loss."""
        dist.barrier()
        begin = time.perf_counter()
        record = self.one_step()
        dist.barrier()
        return time.perf_counter() - begin, record.loss


def steps_main(settings: Settings) -> int:
    """One rank: all variants in turn, on few tokens and on all of them; the first rank leaves what it saw."""
    MODELS[MODEL.name] = MODEL
    options = json.loads(Path(settings.log.folder, "options.json").read_text(encoding="utf-8"))
    rank, ranks = here().rank, here().world
    start_group(settings, torch.device("cpu"), ranks)
    names = variants_of(ranks)
    trainers = {name: VariantTrainer(settings.with_values(VARIANTS[name]), torch.device("cpu")) for name in names}
    seen: dict[str, dict[str, list[float]]] = {name: {"fixed": [], "seconds": [], "loss": []} for name in names}
    for what, tokens, short in (("fixed", FEW_TOKENS, FEW_SHORT), ("seconds", options["tokens"], options["short"])):
        documents = step_documents(ranks, tokens, short, options["micro_batches"])
        for turn in range(-1, options["rounds"]):                # the first one warms up
            for name in names:
                trainers[name].take(documents)
                seconds, loss = trainers[name].timed_step()
                if turn >= 0:
                    seen[name][what].append(seconds)
                if turn >= 0 and what == "seconds":
                    seen[name]["loss"].append(loss)
                    if rank == 0:
                        print(f"{ranks} ranks, {name}: {seconds:.2f} s", file=sys.stderr, flush=True)
    if rank == 0:
        Path(settings.log.folder, "steps.json").write_text(json.dumps(seen), encoding="utf-8")
    dist.barrier()
    dist.destroy_process_group()
    return 0


# ------------------------------------------------------------------------------------------------------------- profile


@dataclass(frozen=True, slots=True)
class Machine:
    """What this machine's cores do in a second, one rank to a core."""

    table: str                          # file of the latency table
    opening: tuple[float, float]        # forward, backward: seconds a token, from the norm to Q, K, V
    closing: tuple[float, float]        # output projection and feed-forward
    head: tuple[float, float]           # last norm, logits and loss
    capacity: tuple[float, ...]         # speed of 1, 2, ... busy cores together
    exchange_seconds_per_byte: float    # of a rank that sends and receives a byte
    copy_seconds_per_byte: float


def profile_main(settings: Settings) -> int:
    """One process per core. The first measures alone; then all at once, which shows how cores slow each other."""
    MODELS[MODEL.name] = MODEL
    folder = Path(settings.log.folder)
    options = json.loads(Path(folder, "options.json").read_text(encoding="utf-8"))
    start_group(settings, torch.device("cpu"), here().world)
    rank, cores = dist.get_rank(), dist.get_world_size()
    chosen = profiling.settings("cpu", MODEL.name, max_kv_len=options["tokens"] // 2)
    found: dict[str, Any] = {}
    if rank == 0:
        passes = [(profiling.profile(chosen, lambda _: None), segments(options["tokens"])) for _ in range(PASSES)]
        table = least([table for table, _ in passes])
        table.save(folder / "table.json")
        rate: Any = table.metadata["copy_bytes_per_second"]
        found = {name: np.min([one[name] for _, one in passes], axis=0).tolist() for name in passes[0][1]}
        found |= {"table": str(folder / "table.json"), "copy_seconds_per_byte": 2 / rate}
    alone = 0.0
    capacity = []
    for busy in range(1, cores + 1):
        dist.barrier()
        taken = torch.tensor(work_seconds() if rank < busy else 0.0, dtype=torch.float64)
        dist.all_reduce(taken)
        alone = float(taken) if busy == 1 else alone
        capacity.append(busy * alone / (float(taken) / busy))
    per_byte = 0.0
    if cores > 1:
        per_byte = 1 / measure_exchange(C10dTransport(), torch.device("cpu"), "gloo").bandwidth
    if rank == 0:
        found |= {"capacity": capacity, "exchange_seconds_per_byte": per_byte}
        Path(folder, "machine.json").write_text(json.dumps(found), encoding="utf-8")
    dist.barrier()
    dist.destroy_process_group()
    return 0


def least(tables: Sequence[LatencyTable]) -> LatencyTable:
    """Of several measurements of each point the least disturbed."""
    first = tables[0]
    assert all(table.backward_seconds is not None for table in tables)
    forward = np.min([table.forward_seconds for table in tables], axis=0)
    backward = np.min([table.backward_seconds for table in tables], axis=0)  # type: ignore[arg-type]
    return LatencyTable(first.name, first.q_len, first.kv_len, forward, backward,
                        peak_rate(first.q_len, first.kv_len, forward), first.metadata)


def work_seconds(length: int = 1_024) -> float:
    """Attention of one document, forward: a piece of work to compare cores by."""
    kernel = profiling.settings("cpu", MODEL.name).kernel
    q, k = torch.randn(length, MODEL.num_heads, MODEL.head_dim), torch.randn(length, MODEL.num_kv_heads, MODEL.head_dim)
    prepared = kernel.prepare(TaskRows.documents([length]), q.device)
    return min(profiling.samples(lambda: kernel.forward(q, k, k, prepared), q.device, budget_seconds=1.0, least=20,
                                 most=200))


def segments(tokens: int) -> dict[str, tuple[float, float]]:
    """Seconds a token of a layer's two parts and of the head, forward and backward, on a row of a rank's tokens."""
    torch.manual_seed(0)
    decoder = Decoder(decoder_shape(load_settings(None, {"model.name": MODEL.name}).model, MODEL.vocab))
    middle: Any = decoder.segments[1]
    last: Any = decoder.segments[-1]
    x = torch.randn(tokens, MODEL.hidden, requires_grad=True)
    out = torch.randn(tokens, MODEL.num_heads, MODEL.head_dim, requires_grad=True)
    rotary, labels = decoder.rotary(torch.arange(tokens)), torch.randint(0, MODEL.vocab, (tokens,))
    chunk = load_settings(None, {}).optimizer.loss_chunk_tokens

    def head() -> tuple[torch.Tensor, ...]:
        return (chunked_cross_entropy(last.norm(x), decoder.head_weight, labels, chunk)[0],)

    return {
        "opening": _two_ways(lambda: middle.pre(x, rotary), [x, *middle.pre.parameters()], tokens),
        "closing": _two_ways(lambda: (middle.post(x, out),), [x, out, *middle.post.parameters()], tokens),
        "head": _two_ways(head, [x, decoder.head_weight, *last.norm.parameters()], tokens),
    }


def _two_ways(
    run: Callable[[], tuple[torch.Tensor, ...]], inputs: list[torch.Tensor], tokens: int
) -> tuple[float, float]:
    results = run()
    gradients = [torch.ones_like(result) for result in results]

    def backward() -> object:
        return torch.autograd.grad(results, inputs, gradients, retain_graph=True)

    forward_seconds, backward_seconds = (
        median(profiling.samples(one, torch.device("cpu"), budget_seconds=0.5, least=5)) for one in (run, backward))
    return forward_seconds / tokens, backward_seconds / tokens


# ------------------------------------------------------------------------------------------------------------ simulate


@dataclass(frozen=True, slots=True, eq=False)
class MachineCosts(Costs):
    """This machine's cores in the simulator's place of a GPU; weights and optimizer are counted elsewhere."""

    machine: Machine | None = None

    def segment_seconds(self, tokens: np.ndarray, backward: bool) -> tuple[np.ndarray, np.ndarray]:
        assert self.machine is not None
        return tokens * self.machine.opening[backward], tokens * self.machine.closing[backward]

    def head_seconds(self, tokens: np.ndarray, backward: bool) -> np.ndarray:
        assert self.machine is not None
        return tokens * self.machine.head[backward]

    def gather_seconds(self, num_bytes: float, num_ranks: int) -> float:
        return 0.0

    def optimizer_seconds(self, parameters: float, shards: int) -> float:
        return 0.0

    def copying(self, exchange: Exchange) -> np.ndarray:
        """Seconds that carrying an exchange takes of each rank's core."""
        assert self.machine is not None
        moved = FLOAT32_OVER_BF16 * (exchange.sent_bytes + exchange.received_bytes)
        return moved * (self.machine.exchange_seconds_per_byte / 2 + self.machine.copy_seconds_per_byte)


def machine_costs(machine: Machine) -> MachineCosts:
    free = Network(1, 1e30, 1e30, 0.0, 0.0)                      # bytes cost computing time instead
    return MachineCosts(MODEL, 1, LatencyTable.load(machine.table), free, 1, 1.0, (1.0, 1.0), 1.0,
                        machine=machine)


def shared(start: np.ndarray, seconds: np.ndarray, capacity: Sequence[float]) -> np.ndarray:
    """When each is done; n that run at once have a total speed of capacity[n - 1], or of the last, in equal parts."""
    left, stop = seconds.astype(np.float64), start + seconds
    now = float(start.min(initial=0.0))
    while (left > 0).any():
        runs = (left > 0) & (start <= now)
        coming = start[(left > 0) & (start > now)]
        if not runs.any():
            now = float(coming.min())
            continue
        speed = capacity[min(int(runs.sum()), len(capacity)) - 1] / int(runs.sum())
        span = min(float(left[runs].min()) / speed, float(coming.min()) - now if len(coming) else np.inf)
        left = np.where(runs, left - span * speed, left)
        now += span
        done = runs & (left <= 1e-12 * seconds)
        stop, left = np.where(done, now, stop), np.where(done, 0.0, left)
    return stop


def simulated_seconds(
    plan: StepPlan, settings: Settings, ranks: int, machine: Machine, fixed_seconds: float
) -> float:
    """The trainer's own step in the simulator, but no faster than the cores can do the work of all ranks."""
    pp, num_micro_batches = settings.parallel.pipeline, len(plan.layouts)
    tokens = plan.layouts[0][0].num_tokens * len(plan.layouts[0])
    setting = Setting(MODEL, cluster_named("dgx-h200"), ranks, 1, pp, tokens, 1, num_micro_batches)
    costs = machine_costs(machine)
    if settings.attention.mode == "home":
        step = grouped_step(setting, costs, home_groups(plan, costs), record=True)
    else:
        nanos: list[tuple[Nano, ...]] = [tuple(map(as_nano, layouts)) for layouts in plan.layouts]
        step = served_step(setting, costs, nanos, served_calls(plan, costs), record=True)
    assert step.traces is not None
    busy = np.array([sum(span.seconds for span in trace.spans if span.lane in ("linear", "attention"))
                     for trace in step.traces])
    return fixed_seconds + max(step.seconds, float(shared(np.zeros(ranks), busy, machine.capacity).max()))


def as_nano(layout: Layout) -> Nano:
    return Nano(layout.lengths, layout.document, layout.start, layout.stop, layout.rank,
                np.zeros(layout.num_slices, dtype=bool))


def home_groups(plan: StepPlan, costs: Costs) -> Groups:
    """Attention at home: of each micro-batch on each data rank, over its rows."""
    ticks, forward, backward, tokens = plan.ticks, [], [], []
    first = ticks.micro_batch[:, 0].tolist()
    for number, layouts in enumerate(plan.layouts):
        rows = [row[0] for row in plan.by_stage[0][first.index(number)]]
        calls = [served(one.layout, one.tasks, np.arange(one.num_servers), costs) for one in rows]
        forward.append(sum(call.forward_seconds for call in calls))
        backward.append(sum(call.backward_seconds for call in calls))
        tokens.append(sum(layout.tokens_per_rank() for layout in layouts))
    return Groups(1, np.array(forward), np.array(backward), np.array(tokens, dtype=np.float64))


def served_calls(plan: StepPlan, costs: MachineCosts) -> list[tuple[Served, ...]]:
    """The n-th forward and the n-th backward tick's plans side by side, as the simulator's steps take them."""
    ways: tuple[list[Any], list[Any]] = ([], [])
    for tick, rows in enumerate(plan.by_stage[0]):
        ways[plan.ticks.phase(tick)].append([row[0] for row in rows])
    return [tuple(served_call(there, back, costs) for there, back in zip(*rows, strict=True))
            for rows in zip(*ways, strict=True)]


def served_call(forward: Plan, backward: Plan, costs: MachineCosts) -> Served:
    """One attention call; what it sends keeps the cores of both ends busy."""
    there, back = (served(one.layout, one.tasks, np.arange(one.num_servers), costs) for one in (forward, backward))
    going, coming = (there.going[0], back.going[1]), (there.coming[0], back.coming[1])
    return Served(there.forward_seconds + costs.copying(going[0]) + costs.copying(coming[0]),
                  back.backward_seconds + costs.copying(going[1]) + costs.copying(coming[1]), going, coming,
                  np.maximum(there.buffer_bytes, back.buffer_bytes))


# ------------------------------------------------------------------------------------------------------------- compare


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
    fixed_seconds: float         # of simulated: measured on next to no tokens
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


def run_on_cpu(arguments: argparse.Namespace) -> tuple[Machine, list[Result]]:
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    options = {name: getattr(arguments, name) for name in ("tokens", "short", "rounds", "micro_batches")}
    results = []
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "options.json").write_text(json.dumps(options), encoding="utf-8")
        _launched(base_settings(folder, cores), profile_main)
        machine = Machine(**json.loads(Path(folder, "machine.json").read_text(encoding="utf-8")))
        for ranks in arguments.ranks:
            settings = base_settings(folder, ranks)
            _launched(settings, steps_main)
            seen = json.loads(Path(folder, "steps.json").read_text(encoding="utf-8"))
            documents = step_documents(ranks, arguments.tokens, arguments.short, arguments.micro_batches)
            for name, found in seen.items():
                chosen = settings.with_values(VARIANTS[name])
                plan = plan_step(documents, chosen, MODEL, ranks // chosen.parallel.pipeline)
                fixed = min(found["fixed"])
                results.append(Result(ranks, name, min(found["seconds"]),
                                      simulated_seconds(plan, chosen, ranks, machine, fixed), fixed,
                                      found["seconds"], found["loss"][-1]))
    return machine, results


def _launched(settings: Settings, main: Callable[[Settings], int]) -> None:
    code = launch(settings, main)
    if code:
        raise SystemExit(code)
