"""What this machine's cores take for the parts of a training step, and the simulator's costs made of them.

Each part is measured once and applied to any step plan by counting the plan's own calls:

attention            a latency table of the CPU kernel
linear parts         seconds a token of a layer's two parts and of the head
bytes                seconds that carrying and copying a byte takes of a core: a CPU rank has no link of its own
launches             host seconds of a segment, of a call that travels, and of a step's end, from two probes: steps on
                     next to no tokens, with attention at home and shared, of which what the parts above take is no part

Other work on the machine only ever adds to a measurement, so the least of several counts. Seconds are those of a rank
that has a core to itself; where ranks outnumber cores, they share them (`shared`).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from distca import profiling
from distca.cost.attention_time import AttentionTime
from distca.cost.latency_table import LatencyTable, peak_rate
from distca.kernels import TaskRows
from distca.models import MODELS
from distca.planning.step import StepPlan
from distca.profiling.machine import samples
from distca.profiling.network import measure_exchange
from distca.runtime.transport import C10dTransport
from distca.simulate.calls import PlanCosts
from distca.simulate.costs import FREE, Costs
from distca.simulate.execute import Step, execute
from distca.spec import FLOAT32_BYTES, ModelShape
from distca.train.groups import start_group
from distca.train.model.decoder import Decoder
from distca.train.model.loss import chunked_cross_entropy
from distca.train.model.shape import decoder_shape
from distca.train.rank_env import this_rank
from distca.train.settings import Settings, load_settings

MODEL = ModelShape("tiny", 4, 64, 2, 1, 32, 176, 257)
FLOAT32_OVER_BF16 = 2        # the simulator counts bytes in bf16, CPU ranks send float32
PASSES = 2                   # over all that is profiled
Ways = tuple[float, float]   # forward, backward


@dataclass(frozen=True, slots=True)
class Machine:
    """What this machine's cores do in a second, one rank to a core."""

    table: str                          # file of the latency table
    opening: Ways                       # seconds a token, from the norm to Q, K, V
    closing: Ways                       # output projection and feed-forward
    head: Ways                          # last norm, logits and loss
    capacity: tuple[float, ...]         # speed of 1, 2, ... busy cores together
    exchange_seconds_per_byte: float    # of a rank that sends and receives a byte
    copy_seconds_per_byte: float


@dataclass(frozen=True, slots=True)
class Launches:
    """Host seconds on so many data ranks, on a core of its own."""

    segment: Ways = (0.0, 0.0)   # of each part of a layer, and of the head
    exchange: Ways = (0.0, 0.0)  # of a call whose plan sends anything
    step: float = 0.0            # optimizer, norm and loss


# ------------------------------------------------------------------------------------------------------------- profile


def profile_main(settings: Settings) -> int:
    """One process per core. The first measures alone; then all at once, which shows how cores slow each other."""
    MODELS[MODEL.name] = MODEL
    folder = Path(settings.log.folder)
    options = json.loads(Path(folder, "options.json").read_text(encoding="utf-8"))
    start_group(settings, torch.device("cpu"), this_rank().world)
    rank, cores = dist.get_rank(), dist.get_world_size()
    chosen = profiling.settings("cpu", MODEL.name, max_kv_len=max(options["tokens"] // 2, 1_024))
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
    return min(samples(lambda: kernel.forward(q, k, k, prepared), q.device, budget_seconds=1.0, least=20,
                                 most=200))


def segments(tokens: int) -> dict[str, Ways]:
    """Seconds a token of a layer's two parts and of the head: what a row of many tokens takes beyond one of few."""
    torch.manual_seed(0)
    decoder = Decoder(decoder_shape(load_settings(None, {"model.name": MODEL.name}).model, MODEL.vocab))
    chunk = load_settings(None, {}).optimizer.loss_chunk_tokens
    few = max(tokens // 16, 1)
    many_seconds, few_seconds = (_segments_of(decoder, count, chunk) for count in (tokens, few))
    more = tokens - few
    return {name: ((forward - few_seconds[name][0]) / more, (backward - few_seconds[name][1]) / more)
            for name, (forward, backward) in many_seconds.items()}


def _segments_of(decoder: Decoder, tokens: int, chunk: int) -> dict[str, Ways]:
    middle: Any = decoder.segments[1]
    last: Any = decoder.segments[-1]
    x = torch.randn(tokens, MODEL.hidden, requires_grad=True)
    out = torch.randn(tokens, MODEL.num_heads, MODEL.head_dim, requires_grad=True)
    rotary, labels = decoder.rotary(torch.arange(tokens)), torch.randint(0, MODEL.vocab, (tokens,))

    def head() -> tuple[torch.Tensor, ...]:
        return (chunked_cross_entropy(last.norm(x), decoder.head_weight, labels, chunk)[0],)

    return {
        "opening": _two_ways(lambda: middle.pre(x, rotary), [x, *middle.pre.parameters()]),
        "closing": _two_ways(lambda: (middle.post(x, out),), [x, out, *middle.post.parameters()]),
        "head": _two_ways(head, [x, decoder.head_weight, *last.norm.parameters()]),
    }


def _two_ways(run: Callable[[], tuple[torch.Tensor, ...]], inputs: list[torch.Tensor]) -> Ways:
    results = run()
    gradients = [torch.ones_like(result) for result in results]

    def backward() -> object:
        return torch.autograd.grad(results, inputs, gradients, retain_graph=True)

    forward_seconds, backward_seconds = (
        median(samples(one, torch.device("cpu"), budget_seconds=0.5, least=5)) for one in (run, backward))
    return forward_seconds, backward_seconds


# --------------------------------------------------------------------------------------------------------------- costs


@dataclass(frozen=True, slots=True, eq=False)
class MachineCosts(Costs):
    """This machine's cores in the simulator's place of a GPU."""

    machine: Machine | None = None
    launches: Launches = Launches()

    @classmethod
    def on(cls, machine: Machine, launches: Launches) -> MachineCosts:
        """Links are free: bytes cost computing time instead."""
        attention = AttentionTime.of(LatencyTable.load(machine.table), MODEL)
        return cls(MODEL, 1, attention, FREE, FREE, FREE, 1, (1.0, 1.0), 1.0, 1.0, machine=machine, launches=launches)

    def segment_seconds(
        self, tokens: np.ndarray, backward: bool, weights: bool | None = None
    ) -> tuple[np.ndarray, np.ndarray]:
        assert self.machine is not None and weights is None
        launch = np.where(tokens > 0, self.launches.segment[backward], 0.0)
        return launch + tokens * self.machine.opening[backward], launch + tokens * self.machine.closing[backward]

    def head_seconds(self, tokens: np.ndarray, backward: bool) -> np.ndarray:
        assert self.machine is not None
        return np.where(tokens > 0, self.launches.segment[backward], 0.0) + tokens * self.machine.head[backward]

    def send_seconds(self, tokens: np.ndarray, num_data: int) -> np.ndarray:
        assert self.machine is not None
        return tokens * (MODEL.hidden * FLOAT32_BYTES * self.machine.exchange_seconds_per_byte)

    def optimizer_seconds(self, layers: Sequence[int] | np.ndarray, shards: int) -> np.ndarray:
        return np.full(len(layers), self.launches.step)


class HostPlanCosts(PlanCosts):
    """A call's attention with what its exchanges take of each rank's core."""

    def __init__(self, step: StepPlan, costs: MachineCosts) -> None:
        super().__init__(step, costs.attention)
        self.costs = costs

    def seconds(self, at: int, backward: bool) -> np.ndarray:
        machine, found = self.costs.machine, self.messages(at, backward)
        assert machine is not None
        moved = FLOAT32_OVER_BF16 * sum(np.bincount(
            rank, weights=found.dispatch_bytes + found.combine_bytes, minlength=self.plans[at].num_servers)
            for rank in (found.home, found.server))              # a byte is sent by one core and received by another
        host = self.costs.launches.exchange[backward] if len(found.home) else 0.0
        return super().seconds(at, backward) + host + moved * (
            machine.exchange_seconds_per_byte / 2 + machine.copy_seconds_per_byte)


def simulated(plan: StepPlan, machine: Machine, launches: Launches) -> Step:
    """A step plan on ranks that have a core each."""
    costs = MachineCosts.on(machine, launches)
    return execute(plan, costs, plan_costs=HostPlanCosts(plan, costs), record=True)


def on_cores(step: Step, machine: Machine) -> float:
    """Its seconds, but no fewer than the cores there are need for the work of all ranks."""
    busy = np.array([sum(trace.seconds(lane) for lane in ("linear", "attention")) for trace in step.traces])
    last = min(trace.seconds("optimizer") for trace in step.traces)
    shares = max(1.0, len(busy) / machine.capacity[min(len(busy), len(machine.capacity)) - 1])
    return max(step.seconds - last, float(shared(np.zeros(len(busy)), busy, machine.capacity).max())) + last * shares


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


@dataclass(frozen=True, slots=True)
class Probe:
    """Seconds of a step on next to no tokens, of the rank that saw them."""

    forward: float   # over all micro-batches
    backward: float
    step: float      # behind the last backward


def launches_of(home: Probe, pool: Probe, plans: tuple[StepPlan, StepPlan], machine: Machine) -> Launches:
    """What two probes, with attention at home and shared, took beyond their tokens, by the calls of their plans."""
    num_micro_batches, (num_layers,) = len(plans[0].micro_batches), plans[0].layers
    ranks = plans[0].num_data
    share = machine.capacity[min(ranks, len(machine.capacity)) - 1] / ranks  # of a core that each rank has
    bare = [_phases(simulated(plan, machine, Launches())) for plan in plans]
    segment, exchange = [], []
    for way, (at_home, in_pool) in enumerate(((home.forward, pool.forward), (home.backward, pool.backward))):
        host = [max(share * seconds - part[way], 0.0) for seconds, part in zip((at_home, in_pool), bare, strict=True)]
        segment.append(host[0] / num_micro_batches / (2 * num_layers + 1))
        exchange.append(max(host[1] - host[0], 0.0) / max(num_layers * travelling_calls(plans[1], bool(way)), 1))
    return Launches((segment[0], segment[1]), (exchange[0], exchange[1]), share * home.step)


def travelling_calls(plan: StepPlan, backward: bool) -> int:
    """Attention calls of one layer, over all ticks of a direction, whose plan sends anything."""
    moved = [depths[0].traffic() for tick, rows in enumerate(plan.plans_of(0)) if plan.ticks.phase(tick) == backward
             for depths in rows]
    return sum(len(one.q_tokens) + len(one.kv_tokens) > 0 for one in moved)


def _phases(step: Step) -> Ways:
    """Seconds of the first rank's forward and backward ticks."""
    ticks = [span for span in step.traces[0].spans if span.lane == "pipeline"]
    forward, backward = (sum(span.seconds for span in ticks if span.name.startswith(way))
                         for way in ("forward", "backward"))
    return forward, backward
