"""What survival costs without faults, and what a fault costs: dedicated servers over links, beside an all-to-all.

The same processes compute the same plan in turns: as ranks of one gloo group, whose last ones own no tokens, and as
training ranks with servers that joined over links. Then a server's process ends in the middle of calls (SIGKILL).
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import signal
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from outputs import RESULTS, host_facts, write_json
from rich.console import Console
from rich.table import Table

from distca.kernels.interface import PLAIN
from distca.models import model_named
from distca.planning.balance import balance
from distca.planning.plan import Plan
from distca.runtime.attention import CoreAttention
from distca.runtime.call import Phase
from distca.runtime.liveness import end_process, one_worker_per_group
from distca.runtime.pool.server import Server
from distca.runtime.pool.transport import PoolTransport, connect_servers
from distca.runtime.prepared import Shapes
from distca.runtime.transport import C10dTransport
from distca.workload.layout import Layout
from distca.workload.packing import pack

SECRET = b"of this benchmark alone"
TIMEOUT = timedelta(seconds=600)
WARM_UP = 2                      # calls, in which tables are built


@dataclass(frozen=True, slots=True)
class Case:
    """One pool; a call is a forward and a backward."""

    trainers: int
    servers: int
    tokens_per_rank: int
    all_to_all_seconds: float    # of a call on the slowest training rank: the median over calls, the least over rounds
    links_seconds: float
    ratio: float                 # median over rounds of links over all-to-all in the same round
    ratio_of_least: float
    cpu_ratio: float             # of a call's CPU seconds in all processes, which a busy host changes less
    crash_seconds: float | None  # the call in which a server was killed, less the median call; None: one has no other


def plans_of(trainers: int, servers: int, tokens: int) -> tuple[Plan, Plan]:
    """The same tasks for a pool with dedicated servers, and for ranks of which the last own no tokens."""
    shape = model_named("tiny")
    layout = pack([trainers * tokens * 5 // 8, trainers * tokens * 3 // 8], ranks=trainers)
    plan = balance(layout, shape, tolerance=0.05, speed=np.ones(trainers + servers))
    wide = Layout(layout.lengths, layout.document, layout.start, layout.stop, layout.rank, trainers + servers)
    return plan, Plan(wide, plan.tasks, plan.speed, plan.tolerance, shape)


class Calls:
    """Repeats forward and backward of one plan on this rank, timed on training ranks."""

    def __init__(self, attend: CoreAttention, plan: Plan) -> None:
        self.attend, self.plan = attend, plan
        tokens = int(plan.layout.tokens_per_rank()[attend.transport.rank])
        shape, generator = plan.model, torch.Generator().manual_seed(attend.transport.rank)
        self.row = [torch.randn(tokens, heads, shape.head_dim, generator=generator)
                    for heads in (shape.num_heads, shape.num_kv_heads, shape.num_kv_heads)]

    def __call__(self) -> float:
        began = time.perf_counter()
        q, k, v = (x.clone().requires_grad_() for x in self.row)
        self.attend(q, k, v, self.plan).sum().backward()
        return time.perf_counter() - began


def serve_in_group(attend: CoreAttention, plan: Plan, calls: int) -> None:
    """Take part in every call without tokens, as a rank of the group."""
    shape = plan.model
    shapes = Shapes(shape.num_heads, shape.num_kv_heads, shape.head_dim, torch.float32, torch.device("cpu"))
    for _ in range(calls):
        for backward in (False, True):
            call = attend.call(plan, shapes, PLAIN, backward)
            for phase in Phase:
                call.run_without_tokens(phase)


def one_process(rank: int, options: argparse.Namespace, store: str, results: Any) -> None:
    trainers, servers = options.trainers, options.servers
    torch.set_num_threads(1)
    one_worker_per_group()
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=trainers + servers,
                            timeout=TIMEOUT)
    among = dist.new_group(range(trainers), timeout=TIMEOUT)
    plan, wide = plans_of(trainers, servers, options.tokens)
    flat = CoreAttention(transport=C10dTransport())
    pids: list[Any] = [None] * (trainers + servers)
    dist.all_gather_object(pids, os.getpid())
    found: dict[str, list[tuple[float, float]]] = {"all-to-all": [], "links": []}
    for _ in range(options.rounds):
        if rank < trainers:
            found["all-to-all"].append(timed(Calls(flat, wide), options.calls, among, pids))
            found["links"].append(over_links(rank, among, plan, options, pids))
        else:
            serve_in_group(flat, wide, options.calls + WARM_UP)
            serve_over_links()
        dist.barrier()
    if servers > 1 and rank >= trainers:
        serve_over_links()
    if rank < trainers:
        usual = median(seconds for seconds, _ in found["links"])
        results.put((rank, found, None if servers < 2 else crashed(rank, among, plan, options, pids[-1], usual)))
        dist.barrier(among)
    results.close()
    results.join_thread()                                        # `end_process` waits for no thread
    end_process()


def cpu_seconds(pids: Sequence[int]) -> float:
    """CPU seconds of these processes so far, all threads."""
    threads = (file for pid in pids for file in Path(f"/proc/{pid}/task").glob("*/schedstat"))
    return sum(int(file.read_text().split()[0]) for file in threads) / 1e9


def timed(calls: Calls, count: int, among: Any, pids: Sequence[int]) -> tuple[float, float]:
    """The median seconds of a call, and the CPU seconds of a call in all processes; the first calls prepare."""
    for _ in range(WARM_UP):
        calls()
    dist.barrier(among)
    before = cpu_seconds(pids)
    seconds = median(calls() for _ in range(count))
    dist.barrier(among)
    return seconds, (cpu_seconds(pids) - before) / count


def with_servers(rank: int, among: Any, options: argparse.Namespace) -> PoolTransport:
    """The training ranks' transport, once all servers have joined."""
    pool = connect_servers(C10dTransport(among), roles=options.servers, secret=SECRET)
    if rank == 0:
        dist.distributed_c10d._get_default_store().set("address", json.dumps(pool.address))
    assert pool.wait_for_servers(options.servers, 60)
    return pool


def serve_over_links() -> None:
    def address() -> Any:
        store = dist.distributed_c10d._get_default_store()
        return tuple(json.loads(store.get("address")))

    Server(address, SECRET, patience_seconds=600).run()


def over_links(rank: int, among: Any, plan: Plan, options: argparse.Namespace,
               pids: Sequence[int]) -> tuple[float, float]:
    pool = with_servers(rank, among, options)
    found = timed(Calls(CoreAttention(transport=pool), plan), options.calls, among, pids)
    pool.close()
    return found


def crashed(rank: int, among: Any, plan: Plan, options: argparse.Namespace, victim: int, usual: float) -> float:
    """Kill a server in the middle of calls; return by how much the slowest call was longer than usual."""
    pool = with_servers(rank, among, options)
    calls = Calls(CoreAttention(transport=pool), plan)
    for _ in range(WARM_UP):
        calls()
    dist.barrier(among)
    if rank == 0 and os.fork() == 0:                             # kills from outside, while this rank is in a call
        time.sleep(1.5 * usual)
        os.kill(victim, signal.SIGKILL)
        os._exit(0)
    slowest, lost, deadline = 0.0, 0, time.monotonic() + 60
    while not lost and time.monotonic() < deadline:
        slowest = max(slowest, calls())
        lost_here = torch.tensor(pool.pool.take_faults().lost)
        dist.all_reduce(lost_here, group=among)                  # all ranks make as many calls
        lost = int(lost_here)
    assert lost == options.trainers
    dist.barrier(among)
    pool.close()
    return slowest - usual


def run_case(options: argparse.Namespace) -> Case:
    context = multiprocessing.get_context("spawn")
    results = context.Queue()
    with tempfile.TemporaryDirectory() as folder:
        processes = [context.Process(target=one_process, args=(rank, options, f"{folder}/store", results))
                     for rank in range(options.trainers + options.servers)]
        for process in processes:
            process.start()
        got = [results.get(timeout=1800) for _ in range(options.trainers)]
        for process in processes:
            process.join()
    way = {name: [[of_rank[name][at] for _, of_rank, _ in sorted(got, key=lambda one: one[0])]
                  for at in range(options.rounds)] for name in ("all-to-all", "links")}  # [round][rank]
    slowest = {name: [max(seconds for seconds, _ in ranks) for ranks in rounds] for name, rounds in way.items()}
    crashes = [crash for _, _, crash in got if crash is not None]
    return Case(options.trainers, options.servers, options.tokens, min(slowest["all-to-all"]), min(slowest["links"]),
                median(b / a for a, b in zip(slowest["all-to-all"], slowest["links"], strict=True)),
                min(slowest["links"]) / min(slowest["all-to-all"]),
                median(b[0][1] / a[0][1] for a, b in zip(way["all-to-all"], way["links"], strict=True)),
                max(crashes) if crashes else None)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--calls", type=int, default=20)
    parser.add_argument("--cases", default="2+1x512,2+1x2048,2+2x2048", help="trainers+serversxtokens, …")
    parser.add_argument("--output", type=Path, default=RESULTS / "servers.json")
    options = parser.parse_args()
    rows = []
    table = Table("trainers + servers", "tokens a rank", "all-to-all", "links", "ratio", "CPU", "crash adds")
    for case in options.cases.split(","):
        pool, _, tokens = case.partition("x")
        one = argparse.Namespace(**{**vars(options), "trainers": int(pool.split("+")[0]),
                                    "servers": int(pool.split("+")[1]), "tokens": int(tokens)})
        row = run_case(one)
        rows.append(asdict(row))
        table.add_row(pool, tokens, f"{1e3 * row.all_to_all_seconds:.1f} ms", f"{1e3 * row.links_seconds:.1f} ms",
                      f"{row.ratio:.2f} ({row.ratio_of_least:.2f})",
                      f"{row.cpu_ratio:.2f}", "" if row.crash_seconds is None else f"{1e3 * row.crash_seconds:.0f} ms")
    Console().print(table)
    write_json(options.output, {"host": host_facts(), "rounds": options.rounds,
                                "calls": options.calls, "rows": rows})


if __name__ == "__main__":
    main()
