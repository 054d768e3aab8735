"""Does ping-pong hide the exchanges? Three variants of one training step on a network that is really slow.

ping-pong      two nano-batches take turns, so that one's exchange travels while the other computes
single stream  the same two nano-batches one after the other: nothing stands between an exchange and its wait
1 byte         ping-pong whose exchanges carry one byte a segment and hand over bytes kept from before: the same compute

Two ranks with one thread each run in two network namespaces, made here and removed afterwards, joined by a veth pair
with a rate limit. One rank owns a long document, the other as many tokens of short ones. 1-byte steps show how long
each exchange may travel before it is waited for; the rate is the slowest at which what sticks out is a small share of
a step, or the one asked for. Variants take turns; medians of the slower rank.

gloo moves bytes on threads of its own. With no core to spare they take time from the ranks' computing threads, and
ping-pong pays for that too: the CPU seconds of the variants tell how much. Hence a long document: its attention grows
faster than its bytes. The first layer's exchanges have little to hide behind; more layers make that a smaller share.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from common import GivenBatches, skewed_batch
from outputs import RESULTS, host_facts, write_json
from rich.console import Console
from rich.table import Table
from two_namespaces import INTERFACE, Skip, limit, network, tell

from distca.models import MODELS
from distca.runtime.attention import CoreAttention
from distca.runtime.ping_pong import forward_segments
from distca.runtime.pipeline import Send
from distca.runtime.transport import C10dTransport, Handle
from distca.spec import ModelShape
from distca.train.batches import RowPlans, StageWork
from distca.train.groups import start_group
from distca.train.launch import launch
from distca.train.model.decoder import Decoder
from distca.train.rank_env import RankEnv, this_rank
from distca.train.settings import Settings, load_settings
from distca.train.trainer import Trainer

VARIANTS = ("ping-pong", "single stream", "1 byte")
MODEL = ModelShape("tiny", 4, 128, 4, 1, 32, 352, 257)
CALIBRATION_STEPS = 2
RANKS = 2
PORT = 29_500              # the namespaces are new, so every port is free
GRACE_SECONDS = 5.0        # for the other rank to say what it saw


@dataclass(frozen=True, slots=True)
class Trip:
    """One exchange of a step: both directions' bytes, which gloo may well move one after the other, and segments, and
    how long they may travel before anyone waits for them."""

    num_bytes: int
    num_segments: int
    window_seconds: float


@dataclass(frozen=True, slots=True)
class Result:
    """One variant: medians over its steps; of the two ranks the slower step, the mean wait and all CPU seconds."""

    variant: str
    step_seconds: float
    exposed_seconds: float
    cpu_seconds: float
    attention_bytes: int          # that crossed the network in a step, both ways
    step_seconds_all: list[float]
    losses: list[float]


def sticking_out_seconds(trips: Sequence[Trip], bytes_per_second: float) -> float:
    """Travel that ends after its window."""
    return sum(max(0.0, trip.num_bytes / bytes_per_second - trip.window_seconds) for trip in trips)


def slowest_rate(trips: Sequence[Trip], allowed_seconds: float) -> float:
    """The fewest bytes per second with which no more than `allowed_seconds` stick out."""
    total = sum(trip.num_bytes for trip in trips)
    if not total or allowed_seconds <= 0:
        raise ValueError(f"a step exchanges {total} bytes and may expose {allowed_seconds} s of them; raise --tokens "
                         "until the plan moves something, and --exposed-share above 0")
    enough = total / allowed_seconds * (1 + 1e-9)                # even without any window, however sums are rounded
    too_slow = enough / 2
    while sticking_out_seconds(trips, too_slow) <= allowed_seconds:
        too_slow, enough = too_slow / 2, too_slow
    for _ in range(40):
        middle = math.sqrt(too_slow * enough)
        too_slow, enough = (too_slow, middle) if sticking_out_seconds(trips, middle) <= allowed_seconds else (
            middle, enough)
    return enough


class OneByteTransport(C10dTransport):
    """Exchanges of one byte a segment, in steps that all make the same; the first step's travel whole, and what arrives
    then is handed over ever after.

    Notes when each exchange of a step started, when it was waited for and what it would have carried; empty `noted`
    before each step.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        super().__init__(group)
        self.kinds: list[tuple[list[int], list[int]]] = []  # splits of each exchange
        self.kept: list[torch.Tensor] = []  # what arrived
        self.noted: list[list[float]] = []  # per exchange: bytes, segments, when it started, was waited for

    def exchange(self, send: torch.Tensor, send_splits: list[int], recv_splits: list[int]) -> Handle:
        kind, number = (send_splits, recv_splits), len(self.noted)
        if number == len(self.kept):
            self.kinds.append(kind)
            self.kept.append(super().exchange(send, send_splits, recv_splits).wait())
        assert self.kinds[number] == kind, f"exchange {number} has other splits than in the first step"
        few = [[min(1, split) for split in splits] for splits in kind]
        note = [sum(map(sum, kind)), sum(map(sum, few)), time.perf_counter(), math.nan]
        self.noted.append(note)
        return _OneByteHandle(super().exchange(send[:sum(few[0])], *few), self.kept[number], note)


class _OneByteHandle:
    def __init__(self, handle: Handle, arrived: torch.Tensor, note: list[float]) -> None:
        self.handle, self.arrived, self.note = handle, arrived, note

    def wait(self) -> torch.Tensor:
        self.note[3] = time.perf_counter()
        self.handle.wait()
        return self.arrived


class OneAfterTheOther(StageWork):
    """The rows of a micro-batch in a single stream; they share no document."""

    def forward(
        self, part: int, micro_batch: int, received: Sequence[Handle], send: Send, plans: RowPlans,
        backward_plans: RowPlans,
    ) -> list[torch.Tensor]:
        def run(decoder: Decoder) -> list[torch.Tensor]:
            losses = []
            for row, (tokens, labels, positions) in enumerate(self.rows[micro_batch]):
                state, = forward_segments(
                    list(decoder.segments), [(tokens,)], [decoder.rotary(positions)], [plans[row]], self.attention,
                    [backward_plans[row]])
                losses.append(self.loss(state, decoder.head_weight, labels))
            return [torch.stack(losses).sum()]

        return self.decoder(run)


class VariantTrainer(Trainer):
    """A trainer that takes its steps in any of the variants."""

    def __init__(self, settings: Settings, device: torch.device, batch_tokens: int, short: int) -> None:
        super().__init__(settings, device)
        self.batches = loader = GivenBatches()  # type: ignore[assignment]
        loader.batch = skewed_batch(self.rank, RANKS, batch_tokens, short, settings, self.decoder.shape.model)
        self.one_byte = OneByteTransport(self.pool)
        few = CoreAttention(self.pool, kernel=settings.attention.kernel, state=settings.attention.state,
                            transport=self.one_byte, recorder=self.recorder)
        kinds = {"ping-pong": (StageWork, self.attention), "single stream": (OneAfterTheOther, self.attention),
                 "1 byte": (StageWork, few)}
        self.works = {variant: kind(self.decoder, attention, tensor=1, dtype=self.work.shapes.dtype, device=device,
                                    loss_chunk_tokens=settings.optimizer.loss_chunk_tokens)
                      for variant, (kind, attention) in kinds.items()}

    def measured_step(self, variant: str) -> dict[str, Any]:
        self.work = self.works[variant]
        self.attention = self.work.attention
        self.one_byte.noted = []
        dist.barrier()
        cpu = time.process_time()
        record = self.one_step()
        if not math.isfinite(record.loss + record.grad_norm):
            raise ValueError(f"{variant}: loss {record.loss}, gradient norm {record.grad_norm}; fewer --rounds")
        return {"seconds": record.seconds, "exposed_seconds": record.exposed_seconds, "loss": record.loss,
                "cpu_seconds": time.process_time() - cpu}

    def calibrate(self) -> tuple[float, list[Trip]]:
        """Seconds of a 1-byte step, and its exchanges with the shorter of both ranks' windows; medians."""
        seconds, windows = [], []
        for _ in range(CALIBRATION_STEPS):
            seconds.append(self.measured_step("1 byte")["seconds"])
            everyone: list[Any] = [None] * RANKS
            dist.all_gather_object(everyone, [waited - started for _, _, started, waited in self.one_byte.noted])
            windows.append([min(exchange) for exchange in zip(*everyone, strict=True)])
        trips = [Trip(int(num_bytes), int(num_segments), median(window)) for (num_bytes, num_segments, _, _), window
                 in zip(self.one_byte.noted, zip(*windows, strict=True), strict=True)]
        return median(seconds), trips


def rank_main(settings: Settings) -> int:
    """One rank, inside its namespace: choose the rate, then all variants in turn; leaves what it saw in the folder."""
    options = json.loads(Path(settings.log.folder, "options.json").read_text(encoding="utf-8"))
    rank, device = this_rank().rank, torch.device("cpu")
    start_group(settings, device, RANKS)
    trainer = VariantTrainer(settings, device, options["tokens"], options["short"])
    say = print if rank == 0 else lambda *_, **__: None
    for variant in ("ping-pong", "1 byte"):                      # the latter keeps what it will hand over
        seconds = trainer.measured_step(variant)["seconds"]
        say(f"warm-up, unlimited: {variant} {seconds:.2f} s a step", file=sys.stderr, flush=True)
    compute_seconds, trips = trainer.calibrate()
    chosen = [options["rate_mbit"] or slowest_rate(trips, options["exposed_share"] * compute_seconds) * 8 / 1e6]
    dist.broadcast_object_list(chosen)                           # steps took other seconds on the other rank
    rate_mbit = chosen[0]
    tell(["tc", "qdisc", "change", "dev", INTERFACE, "root", *limit(options["discipline"], rate_mbit)])
    calibration = {
        "rate_mbit": rate_mbit, "measured_mbit": measured_mbit(rate_mbit), "compute_seconds": compute_seconds,
        "work_max_over_mean": trainer.batches.next().summary.work_after,
        "travel_seconds": sum(trip.num_bytes for trip in trips) * 8 / rate_mbit / 1e6,
        "sticking_out_seconds": sticking_out_seconds(trips, rate_mbit * 1e6 / 8),
        "trips": [asdict(trip) for trip in trips],
    }
    say(f"{rate_mbit:.0f} Mbit/s, found {calibration['measured_mbit']:.0f}: exchanges travel for "
        f"{calibration['travel_seconds']:.2f} s of a {compute_seconds:.2f} s step, of which "
        f"{calibration['sticking_out_seconds']:.2f} s have nothing to hide behind", file=sys.stderr, flush=True)
    steps: dict[str, list[dict[str, Any]]] = {variant: [] for variant in VARIANTS}
    for turn in range(options["rounds"]):
        for variant in VARIANTS[turn % 3:] + VARIANTS[:turn % 3]:
            steps[variant].append(trainer.measured_step(variant))
            say(f"round {turn + 1} of {options['rounds']}: {variant} {steps[variant][-1]['seconds']:.2f} s a step",
                file=sys.stderr, flush=True)
    Path(settings.log.folder, f"rank_{rank}.json").write_text(
        json.dumps({"calibration": calibration, "steps": steps}), encoding="utf-8")
    dist.barrier()
    dist.destroy_process_group()
    return 0


def measured_mbit(rate_mbit: float) -> float:
    """The rate at which half a second's bytes really come from the first rank to the second."""
    num_bytes = int(rate_mbit * 1e6 / 8 / 2)
    payload = torch.zeros(num_bytes, dtype=torch.uint8)
    dist.barrier()
    began = time.perf_counter()
    dist.broadcast(payload, src=0)
    dist.barrier()                                               # the sender is done before the bytes have arrived
    return num_bytes * 8 / 1e6 / (time.perf_counter() - began)


def run_ranks(names: Sequence[str], addresses: Sequence[str], folder: str) -> None:
    """One process in each namespace; when one fails the other is ended."""
    processes: list[subprocess.Popen[bytes]] = []
    try:
        for rank, name in enumerate(names):
            place = RankEnv(rank, RANKS, rank, RANKS, addresses[0], PORT)
            environment = {**os.environ, **place.environment(), "GLOO_SOCKET_IFNAME": INTERFACE, "OMP_NUM_THREADS": "1",
                           "TORCH_CPP_LOG_LEVEL": "ERROR"}       # no names can be looked up there, which is no news
            processes.append(subprocess.Popen(
                ["ip", "netns", "exec", name, sys.executable, __file__, "--rank-in", folder], env=environment))
        while any(process.poll() is None for process in processes) and not any(p.poll() for p in processes):
            time.sleep(0.1)
        deadline = time.monotonic() + GRACE_SECONDS
        while any(process.poll() is None for process in processes) and time.monotonic() < deadline:
            time.sleep(0.1)
    finally:
        for process in processes:
            process.kill()
            process.wait()
    failed = [rank for rank, process in enumerate(processes) if process.returncode]
    if failed:
        raise SystemExit(f"overlap: rank {failed[0]} ended with exit code {processes[failed[0]].returncode}")


def settings_for(folder: str, tokens: int) -> Settings:
    """The model is whole on each rank, so that attention has the network nearly to itself; its weights as good as stand
    still, so that every step computes the same."""
    MODELS[MODEL.name] = MODEL                                   # this process's tiny model
    return load_settings(None, {
        "model.name": MODEL.name, "run.ranks": str(RANKS), "run.threads": "1", "run.device": "cpu", "run.steps": "1000",
        "run.seed": "0", "batch.tokens_per_rank": str(2 * tokens), "optimizer.lr": "1e-12", "parallel.fsdp": "false",
        "attention.placement": "given", "log.folder": folder})


def measure(arguments: argparse.Namespace) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder, network() as (names, addresses, kind):
        options = {name: getattr(arguments, name) for name in (
            "tokens", "short", "rounds", "rate_mbit", "exposed_share")}
        Path(folder, "options.json").write_text(json.dumps({**options, "discipline": kind}), encoding="utf-8")
        run_ranks(names, addresses, folder)
        ranks = [json.loads(Path(folder, f"rank_{rank}.json").read_text(encoding="utf-8")) for rank in range(RANKS)]
    calibration = ranks[0]["calibration"]
    counted = {"ping-pong": "num_bytes", "single stream": "num_bytes", "1 byte": "num_segments"}
    results = [result(variant, [rank["steps"][variant] for rank in ranks],
                      sum(trip[counted[variant]] for trip in calibration["trips"])) for variant in VARIANTS]
    ping_pong, single, one_byte = results
    return {
        "model": asdict(MODEL), "options": options, "discipline": kind, "calibration": calibration,
        "rows": [asdict(row) for row in results],
        "single_stream_over_ping_pong": single.step_seconds / ping_pong.step_seconds,
        "ping_pong_over_one_byte": ping_pong.step_seconds / one_byte.step_seconds,
        "carrying_cpu_seconds": ping_pong.cpu_seconds - one_byte.cpu_seconds,
        "largest_loss_difference": max(abs(a - b) for a, b in zip(ping_pong.losses, single.losses, strict=True)),
    }


def result(variant: str, ranks: Sequence[list[dict[str, float]]], attention_bytes: int) -> Result:
    """Of every rank's steps."""
    seconds, exposed, cpu = ([[rank[name] for rank in step] for step in zip(*ranks, strict=True)]
                             for name in ("seconds", "exposed_seconds", "cpu_seconds"))  # [step][rank]
    slower = [max(step) for step in seconds]
    return Result(
        variant=variant, step_seconds=median(slower), exposed_seconds=median(sum(step) / RANKS for step in exposed),
        cpu_seconds=median(sum(step) for step in cpu), attention_bytes=attention_bytes, step_seconds_all=slower,
        losses=[step["loss"] for step in ranks[0]])


def show(report: dict[str, Any]) -> None:
    console, calibration = Console(), report["calibration"]
    table = Table("variant", "s a step", "exposed s", "CPU s", "attention MB", title_justify="left",
                  title=f"2 ranks, {report['options']['tokens']} tokens a nano-batch, {calibration['rate_mbit']:.0f} "
                        f"Mbit/s ({report['discipline']})")
    for row in report["rows"]:
        table.add_row(row["variant"], f"{row['step_seconds']:.2f}", f"{row['exposed_seconds']:.2f}",
                      f"{row['cpu_seconds']:.2f}", f"{row['attention_bytes'] / 1e6:.1f}")
    console.print(table)
    console.print(f"single stream / ping-pong {report['single_stream_over_ping_pong']:.3f} (target at least 1.10), "
                  f"ping-pong / 1 byte {report['ping_pong_over_one_byte']:.3f} (target at most 1.05)")
    console.print(f"carrying the bytes took {report['carrying_cpu_seconds']:.2f} CPU s of a step on {os.cpu_count()} "
                  f"cores; losses differ by at most {report['largest_loss_difference']:.1e}")


def stop(number: int, frame: Any) -> NoReturn:
    raise SystemExit(128 + number)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=8_192, help="per rank in a nano-batch, and the long document's")
    parser.add_argument("--short", type=int, default=512)
    parser.add_argument("--rounds", type=int, default=5, help="timed steps of each variant")
    parser.add_argument("--rate-mbit", type=float, default=0.0, help="0: the slowest at which exchanges can hide")
    parser.add_argument("--exposed-share", type=float, default=0.005, help="of a step, that may stick out at that rate")
    parser.add_argument("--output", type=Path, default=RESULTS / "overlap.json")
    parser.add_argument("--rank-in", default="", help=argparse.SUPPRESS)  # the folder of a rank started here
    arguments = parser.parse_args()
    if arguments.rank_in:
        options = json.loads(Path(arguments.rank_in, "options.json").read_text(encoding="utf-8"))
        return launch(settings_for(arguments.rank_in, options["tokens"]), rank_main)
    if arguments.tokens % arguments.short:
        parser.error(f"--tokens is {arguments.tokens}; give a multiple of --short, {arguments.short}")
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, stop)                              # so that the network is removed then too
    host = host_facts()
    try:
        report = measure(arguments)
        show(report)
    except Skip as reason:
        report = {"skipped": str(reason)}
        print(f"skipped: {reason}")
    write_json(arguments.output, {"host": host, **report})
    return 0


if __name__ == "__main__":
    sys.exit(main())
