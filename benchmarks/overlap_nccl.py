"""Does ping-pong hide NCCL's exchanges, and do attention's kernels leave NCCL's room? Four ranks that share one GPU.

Each rank is a host of its own to NCCL, which connects them by sockets on loopback: a slow link, slower with fewer
channels. Every nano-batch is one document over all ranks. What is timed is forward and backward of its layers, without
optimizer and gradient reduction, in the variants of `overlap.py` (ping-pong, single stream, exchanges of 1 byte), in
turns, over links with these settings:

    channels   thread blocks that an exchange may take (ncclConfig_t.maxCTAs)
    priority   whether NCCL's stream has high priority, so that its blocks go first when a multiprocessor is free
    spare      multiprocessors that attention's kernels leave to others

Exposed is what the bytes add to a step: 1 - seconds with exchanges of 1 byte / seconds. Travel is what a step's
exchanges take by themselves, one after the other. Documents have the fewest tokens, of those asked for, at which travel
takes at most half of the computing. Traces of one step on rank 0 tell which kernels ran beside NCCL's.

The GPU runs one process at a time, in time slices, unless --mps is given: CUDA's Multi-Process Service then gives every
rank a quarter of the multiprocessors for itself, which is nearer to four GPUs.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from common import on_ranks, random_batch
from outputs import RESULTS, host_facts, wide_console, write_json
from overlap import OneAfterTheOther, OneByteTransport
from rich.table import Table

from distca.kernels import choose
from distca.kernels.hopper.kernel import HopperKernel
from distca.runtime import prepared
from distca.runtime.attention import CoreAttention
from distca.runtime.recorder import Recorder
from distca.runtime.transport import C10dTransport
from distca.spec import ModelShape
from distca.train.batches import Batch, StageWork, step_plan
from distca.train.model.decoder import Decoder
from distca.train.model.shape import DecoderShape
from distca.train.settings import load_settings

RANKS = 4
MODEL = ModelShape("wide", 8, 4096, 16, 1, 128, 8192, 512)  # many FLOPs for few bytes of keys
SMALL = ModelShape("small", 2, 128, 4, 1, 32, 256, 512)     # on CPUs
VARIANTS = ("ping-pong", "single stream", "1 byte")
HALF = 0.5
SHOWN_SECONDS = 2e-4  # kernels of a trace that are written down


@dataclass(frozen=True, slots=True)
class Link:
    """How NCCL's kernels and attention's share the GPU; with 0 channels NCCL takes as many as it wants."""

    channels: int = 0
    high_priority: bool = False
    spare: int = 0

    def __str__(self) -> str:
        about = f"{self.channels} channels" if self.channels else "as it is"
        return about + ", high priority" * self.high_priority + f", {self.spare} spare" * bool(self.spare)


@dataclass(frozen=True, slots=True)
class Result:
    """One variant over one link: medians over steps of the slowest rank, and the ranks' mean wait."""

    link: str
    variant: str
    step_seconds: float
    exposed_share: float  # 1 - seconds of 1-byte steps over the plain link / step_seconds
    wait_share: float     # of a step that a rank's stream waits for exchanges, late ranks among the reasons
    step_seconds_all: list[float]


@dataclass(frozen=True, slots=True)
class KernelSpan:
    """A kernel on a stream of the GPU."""

    stream: int
    kind: str
    start: float          # seconds
    stop: float
    blocks: int


class RankSteps:
    """One rank: its layers and batch, and an attention for every link and variant."""

    def __init__(self, device: torch.device, tokens: int, room: dict[str, int]) -> None:
        self.rank, self.device, self.room = dist.get_rank(), device, room
        model = MODEL if device.type == "cuda" else SMALL
        settings = load_settings(None, {"run.ranks": str(RANKS), "batch.ping_pong": "true"})
        plan = step_plan([np.array([RANKS * tokens] * 2)], settings, model, RANKS)
        self.batch: Batch = random_batch(plan, self.rank)
        assert not any(row.reads for rows in self.batch.micro_batches for row in rows)
        dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
        self.decoder = Decoder(DecoderShape(model), device="meta").to(dtype).to_empty(device=device)
        self.decoder.reset_parameters(torch.Generator(device).manual_seed(0))
        for segment in self.decoder.segments:
            segment.recompute = "full"  # type: ignore[assignment]
        self.works: dict[tuple[Link, str], StageWork] = {}

    def work(self, link: Link, variant: str, transport: C10dTransport) -> StageWork:
        found = self.works.get((link, variant))
        if found is None:
            kind = OneAfterTheOther if variant == "single stream" else StageWork
            attention = CoreAttention(transport=transport, recorder=Recorder(self.device))
            found = self.works[link, variant] = kind(
                self.decoder, attention, tensor=1, dtype=next(self.decoder.parameters()).dtype, device=self.device,
                loss_chunk_tokens=4096)
        return found

    def step(self, link: Link, variant: str, transport: C10dTransport) -> tuple[float, float, float]:
        """Forward and backward: seconds of the slowest rank, the ranks' mean wait, the loss."""
        work, self.room["spare"] = self.work(link, variant, transport), link.spare
        if isinstance(transport, OneByteTransport):
            transport.noted = []
        self.decoder.zero_grad(set_to_none=True)
        work.begin(self.batch)
        forward, backward = plans = self.batch.plan.plans_of(0)
        work.attention.expect((plan for tick in plans for row in tick for plan in row), self.device)
        self.wait()
        dist.barrier()
        began = time.perf_counter()
        assert work.attention.recorder is not None
        work.attention.recorder.begin_step()
        torch.autograd.backward(work.forward(0, 0, (), _nothing_sent, forward, backward))
        self.wait()
        seconds = time.perf_counter() - began
        waits = work.attention.recorder.end_step(self.rank, 0).seconds("wait")
        slowest, mean = torch.tensor(seconds), torch.tensor(waits / RANKS)
        dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
        dist.all_reduce(mean)
        return float(slowest), float(mean), float(work.total) / self.batch.num_labels

    def travel_seconds(self, one_byte: OneByteTransport, transport: C10dTransport) -> float:
        """A step's exchanges by themselves, one after the other."""
        buffers = [torch.empty(sum(sent), dtype=torch.uint8, device=self.device) for sent, _ in one_byte.kinds]
        seconds = []
        for _ in range(2):
            self.wait()
            dist.barrier()
            began = time.perf_counter()
            for buffer, splits in zip(buffers, one_byte.kinds, strict=True):
                transport.exchange(buffer, *splits).wait()
            self.wait()
            slowest = torch.tensor(time.perf_counter() - began)
            dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
            seconds.append(float(slowest))
        return min(seconds)

    def wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


def _nothing_sent(row: torch.Tensor) -> torch.Tensor:
    raise AssertionError("one stage sends no rows")


def leave_room(device: torch.device) -> dict[str, int]:
    """Make attention's kernel leave as many multiprocessors as the returned table says when a plan is prepared."""
    room = {"spare": 0}

    def chosen(*about: Any, **more: Any) -> Any:
        kernel = choose(*about, **more)
        if not room["spare"]:
            return kernel
        assert isinstance(kernel, HopperKernel), f"{kernel.name} takes all multiprocessors"
        return replace(kernel, num_sms=torch.cuda.get_device_properties(device).multi_processor_count - room["spare"])

    vars(prepared)["choose"] = chosen
    return room


def group_of(link: Link, device: torch.device) -> dist.ProcessGroup:
    if device.type == "cpu":
        return dist.new_group()
    options = dist.ProcessGroupNCCL.Options(is_high_priority_stream=link.high_priority)
    if link.channels:
        options.config.max_ctas = link.channels
    return dist.new_group(backend="nccl", pg_options=options)


def rank_main(options: argparse.Namespace) -> dict[str, Any]:
    """One rank: choose the tokens, then all variants and links in turn, then traces."""
    began, device, gpu = time.perf_counter(), torch.device(options.device), {}
    if options.device == "cuda":
        torch.cuda.set_device(device := torch.device("cuda", 0))
        about = torch.cuda.get_device_properties(device)
        gpu = {"name": about.name, "multiprocessors_of_a_rank": about.multi_processor_count}
    plain, *others = options.links
    transports = {(link.channels, link.high_priority): C10dTransport(group_of(link, device)) for link in options.links}

    def over(link: Link) -> C10dTransport:
        return transports[link.channels, link.high_priority]

    steps, one_byte, calibration = calibrated(options.tokens, device, plain, over(plain))
    cases = [(plain, variant) for variant in VARIANTS] + [(link, "ping-pong") for link in others]
    found: dict[tuple[Link, str], list[tuple[float, float, float]]] = {case: [] for case in cases}
    for turn in range(options.rounds + 1):
        for link, variant in cases[turn % len(cases):] + cases[:turn % len(cases)]:
            taken = steps.step(link, variant, one_byte if variant == "1 byte" else over(link))
            if turn:                                             # the first prepares plans and connects
                found[link, variant].append(taken)
        if turn and _rank_zeros(time.perf_counter() - began) > options.seconds:
            break
    losses = [loss for steps_of_case in found.values() for _, _, loss in steps_of_case]
    least = median(seconds for seconds, _, _ in found[plain, "1 byte"])
    rows = [result(case, steps_of_case, least) for case, steps_of_case in found.items()]
    if dist.get_rank() == 0:                                     # before profiling, which some machines refuse
        print(*rows, sep="\n", flush=True)
    traces = {}
    for link, variant in [cases[0], cases[1], *((link, "ping-pong") for link in others if link.spare)]:
        with traced(device, dist.get_rank() == 0) as spans:
            steps.step(link, variant, over(link))
        traces[f"{variant}, {link}"] = spans
    return {"gpu": gpu, "calibration": calibration, "largest_loss_difference": max(losses) - min(losses),
            "rows": rows, "traces": {name: summary(spans) for name, spans in traces.items() if spans}}


def calibrated(
    candidates: Sequence[int], device: torch.device, link: Link, transport: C10dTransport
) -> tuple[RankSteps, OneByteTransport, list[dict[str, float]]]:
    """Steps of the fewest tokens at which travel takes at most half of the computing, else of the most tokens."""
    room, tried = leave_room(device), list[dict[str, float]]()
    for tokens in candidates:
        steps, one_byte = RankSteps(device, tokens, room), OneByteTransport(transport.group)
        for _ in range(2 + (not tried)):                         # connects, compiles, keeps what it will hand over
            compute, *_ = steps.step(link, "1 byte", one_byte)
        travel = steps.travel_seconds(one_byte, transport)
        tried.append({"tokens_per_rank": tokens, "compute_seconds": compute, "travel_seconds": travel,
                      "exchanges": len(one_byte.kinds), "bytes_sent_by_rank_0": sum(sum(a) for a, _ in one_byte.kinds)})
        if dist.get_rank() == 0:
            print(json.dumps(tried[-1]), flush=True)
        if travel <= HALF * compute:
            break
    return steps, one_byte, tried


def _rank_zeros(value: float) -> float:
    """Rank 0's value, on all ranks."""
    shared = torch.tensor(value, dtype=torch.float64)
    dist.broadcast(shared, src=0)
    return float(shared)


def result(case: tuple[Link, str], steps: Sequence[tuple[float, float, float]], least: float) -> Result:
    seconds = median(seconds for seconds, _, _ in steps)
    return Result(str(case[0]), case[1], seconds, 1 - least / seconds,
                  median(wait / seconds for seconds, wait, _ in steps), [seconds for seconds, _, _ in steps])


@contextmanager
def traced(device: torch.device, wanted: bool) -> Iterator[list[KernelSpan]]:
    """The kernels that run inside, once it has ended; none on a CPU."""
    spans: list[KernelSpan] = []
    if device.type == "cpu" or not wanted:
        yield spans
        return
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as seen:
        yield spans
    with tempfile.TemporaryDirectory() as folder:
        seen.export_chrome_trace(f"{folder}/trace.json")
        spans += spans_of(json.loads(Path(folder, "trace.json").read_text(encoding="utf-8"))["traceEvents"])


def spans_of(events: Sequence[dict[str, Any]]) -> list[KernelSpan]:
    """Kernels of torch's trace, in the order in which they began."""
    spans = [KernelSpan(int(event["args"]["stream"]), kind_of(event["name"]), event["ts"] / 1e6,
                        (event["ts"] + event["dur"]) / 1e6, int(np.prod(event["args"].get("grid", [1]))))
             for event in events if event.get("cat") == "kernel"]
    return sorted(spans, key=lambda span: span.start)


def kind_of(name: str) -> str:
    kinds = {"nccl": "NCCL", "attention_forward": "attention forward", "attention_": "attention backward",
             "_copy_block": "pack and unpack", "_sum_block": "pack and unpack", "_merge_block": "pack and unpack",
             "nvjet": "matrix products", "gemm": "matrix products", "cutlass": "matrix products"}
    return next((kind for part, kind in kinds.items() if part in name.lower()), "other")


def summary(spans: Sequence[KernelSpan]) -> dict[str, Any]:
    """How long NCCL's kernels ran, beside what, and beside nothing; and the longer kernels one by one."""
    if not spans:
        return {}
    nccl = [span for span in spans if span.kind == "NCCL"]
    beside: dict[str, float] = defaultdict(float)
    for span in spans:
        if span.kind != "NCCL":
            beside[span.kind] += sum(max(0.0, min(span.stop, one.stop) - max(span.start, one.start)) for one in nccl)
    first, busy = spans[0].start, _union([span for span in spans if span.kind != "NCCL"])
    total = _union(nccl)
    alone = _union(spans) - busy                                 # NCCL and nothing else
    return {"seconds": max(span.stop for span in spans) - first, "nccl_seconds": total, "compute_seconds": busy,
            "nccl_alone_seconds": alone, "overlapped_share": 1 - alone / total if total else 0.0,
            "beside_nccl_seconds": dict(beside), "nccl_blocks": sorted({span.blocks for span in nccl}),
            "kernels": [(span.stream, span.kind, round(span.start - first, 6), round(span.stop - first, 6), span.blocks)
                        for span in spans if span.stop - span.start >= SHOWN_SECONDS]}


def _union(spans: Sequence[KernelSpan]) -> float:
    """Seconds in which any of them runs."""
    total, end = 0.0, float("-inf")
    for span in sorted(spans, key=lambda span: span.start):
        total += max(0.0, span.stop - max(span.start, end))
        end = max(end, span.stop)
    return total


@contextmanager
def mps(wanted: bool) -> Iterator[None]:
    """Let the ranks share the GPU's multiprocessors at the same time, a part for each."""
    if not wanted:
        yield
        return
    with tempfile.TemporaryDirectory() as folder:
        os.environ.update(CUDA_MPS_PIPE_DIRECTORY=folder, CUDA_MPS_LOG_DIRECTORY=folder,
                          CUDA_MPS_ACTIVE_THREAD_PERCENTAGE=str(100 // RANKS))
        subprocess.run(["nvidia-cuda-mps-control", "-d"], check=True)
        try:
            yield
        finally:
            subprocess.run(["nvidia-cuda-mps-control"], input="quit\n", text=True, check=False, timeout=30)


def show(report: dict[str, Any]) -> None:
    console, chosen = wide_console(), report["calibration"][-1]
    share = chosen["travel_seconds"] / chosen["compute_seconds"]
    table = Table("link", "variant", "s a step", "exposed", "waiting", title_justify="left", title=(
        f"{RANKS} ranks, {chosen['tokens_per_rank']:,} tokens each in a nano-batch; exchanges alone take "
        f"{chosen['travel_seconds']:.2f} s, {100 * share:.0f} % of {chosen['compute_seconds']:.2f} s of computing"))
    for row in report["rows"]:
        table.add_row(row.link, row.variant, f"{row.step_seconds:.3f}", f"{100 * row.exposed_share:.1f} %",
                      f"{100 * row.wait_share:.1f} %")
    console.print(table)
    traces = Table("trace of rank 0", "s", "NCCL s", "with others", "alone s", "blocks", "beside", title_justify="left")
    for name, one in report["traces"].items():
        beside = ", ".join(f"{kind} {seconds:.2f}" for kind, seconds in sorted(
            one["beside_nccl_seconds"].items(), key=lambda entry: -entry[1]))
        traces.add_row(name, f"{one['seconds']:.2f}", f"{one['nccl_seconds']:.2f}",
                       f"{100 * one['overlapped_share']:.0f} %", f"{one['nccl_alone_seconds']:.2f}",
                       "/".join(map(str, one["nccl_blocks"])), beside)
    console.print(traces)
    plain, *others = (row for row in report["rows"] if row.variant == "ping-pong")
    for row in others:
        console.print(f"{row.link}: {row.step_seconds / plain.step_seconds:.3f}× the step over {plain.link}")
    console.print(f"losses differ by at most {report['largest_loss_difference']:.1e}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, nargs="+", default=[8_192, 16_384, 24_576], help="of a rank's nano-batch")
    parser.add_argument("--channels", type=int, default=4, help="of the links")
    parser.add_argument("--rounds", type=int, default=3, help="timed steps of each case, while there is time")
    parser.add_argument("--seconds", type=float, default=110.0, help="after which no round begins")
    parser.add_argument("--mps", action="store_true", help="share multiprocessors instead of time")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="cpu: over gloo, to try it")
    parser.add_argument("--output", type=Path, default=RESULTS / "overlap_nccl.json")
    options = parser.parse_args()
    many = options.channels
    options.links = [Link()] if options.device == "cpu" else [
        Link(many), Link(many, True), Link(many, True, many), Link(1)]
    host = host_facts(device=options.device, sharing="MPS" if options.mps else "time slices")
    with mps(options.mps):
        report = on_ranks(RANKS, rank_main, options, nccl=options.device == "cuda")[0]
    show(report)
    model = asdict(MODEL if options.device == "cuda" else SMALL)
    write_json(options.output, {"host": host, "model": model, "channels": options.channels, **report})


if __name__ == "__main__":
    main()
