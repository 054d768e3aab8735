"""What does the runtime add to, and take from, attention? Three parts, each with a table and JSON.

--cpu     Two gloo processes with one thread each, one with a single long document, the other with short ones of as many
          tokens: forward and backward with the plan against at home, in turns, medians of the slower rank. Planning
          is timed apart, since it runs ahead of the step. Two cores must be free; the ratio of the slower rank's CPU
          seconds, which others on the machine disturb less, stands beside it.
--gpu     One rank of a planned pool on one GPU. Its exchanges return at once with random bytes, so packing, indexing
          and unpacking are real and the wire is not; whatever is not the kernel counts as copying. Calls are issued
          back to back, as layers are, and timed by device events.
--tables  Seconds to build one rank's tables of a large pool, and the tokens its server stores over those it must.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from time import perf_counter, process_time
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.multiprocessing
from one_rank import one_rank, ranks_by_traffic
from outputs import RESULTS, host_facts, wide_console, write_json
from rich.console import Console
from rich.table import Table

from distca.baselines import at_home
from distca.dispatch import RankTables, build
from distca.models import model_named
from distca.planning.balance import balance
from distca.planning.plan import Plan
from distca.planning.tasks import TaskTable
from distca.profiling.machine import versions
from distca.runtime.attention import CoreAttention
from distca.spec import ModelShape
from distca.workload.documents import sample_lengths
from distca.workload.layout import layout_from_rows
from distca.workload.packing import PLACEMENTS, pack

CPU_MODEL = ModelShape("two ranks", 1, 512, 8, 2, 64, 2048, 256)
POOL_RANKS, POOL_TOKENS = 64, 65_536


@dataclass(frozen=True, slots=True)
class TwoRanks:
    """Attention forward and backward of the slower of two CPU ranks."""

    document: int
    short: int
    plan_seconds: float
    at_home_seconds: float       # medians
    planned_seconds: float
    at_home_all: list[float]
    planned_all: list[float]
    speedup: float
    cpu_speedup: float           # of the slower rank's CPU seconds
    ideal_speedup: float         # of the work alone
    bytes_total: int             # forward, float32


@dataclass(frozen=True, slots=True)
class Tables:
    """Building the tables of one rank of a large pool."""

    placement: str
    ranks: int
    tasks: int
    build_seconds: float         # median over ranks
    build_seconds_worst: float
    traffic_seconds: float       # whether anything travels, for all ranks; once per plan
    stored_over_needed: float    # tokens in servers' buffers over the distinct ones their tasks read, worst rank


# ---------------------------------------------------------------------------------------------------------- two ranks


def two_ranks(document: int, short: int, repeats: int) -> TwoRanks:
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(_cpu_rank, (document, short, repeats, folder), nprocs=2)
        return TwoRanks(**json.loads((Path(folder) / "result.json").read_text(encoding="utf-8")))


def _cpu_rank(rank: int, document: int, short: int, repeats: int, folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    layout = layout_from_rows([[document], [short] * (document // short)])
    balance(layout, CPU_MODEL, tolerance=0.05)
    begin = perf_counter()
    planned = balance(layout, CPU_MODEL, tolerance=0.05)
    plan_seconds = perf_counter() - begin
    home_plan = at_home(layout, CPU_MODEL)
    torch.manual_seed(rank)
    q, k, v, dout = (torch.randn(document, heads, CPU_MODEL.head_dim)
                     for heads in (CPU_MODEL.num_heads, *[CPU_MODEL.num_kv_heads] * 2, CPU_MODEL.num_heads))
    leaves = [x.requires_grad_() for x in (q, k, v)]
    attend = CoreAttention()
    times: dict[str, list[float]] = {"home": [], "planned": []}
    cpu_times: dict[str, list[float]] = {"home": [], "planned": []}
    for _ in range(repeats):
        for name, plan in (("home", home_plan), ("planned", planned)):
            dist.barrier()
            begin, cpu_begin = perf_counter(), process_time()
            torch.autograd.grad(attend(q, k, v, plan), leaves, dout)
            slowest = torch.tensor([perf_counter() - begin, process_time() - cpu_begin], dtype=torch.float64)
            dist.all_reduce(slowest, dist.ReduceOp.MAX)
            times[name].append(slowest[0].item())
            cpu_times[name].append(slowest[1].item())
    if rank == 0:
        home, ours = (median(times[name]) for name in ("home", "planned"))
        result = TwoRanks(
            document=document,
            short=short,
            plan_seconds=plan_seconds,
            at_home_seconds=home,
            planned_seconds=ours,
            at_home_all=times["home"],
            planned_all=times["planned"],
            speedup=home / ours,
            cpu_speedup=median(cpu_times["home"]) / median(cpu_times["planned"]),
            ideal_speedup=float(home_plan.work().max() / planned.work().max()),
            bytes_total=2 * planned.summary().bytes_total,  # plans count bf16
        )
        (Path(folder) / "result.json").write_text(json.dumps(asdict(result)), encoding="utf-8")
    dist.barrier()
    dist.destroy_process_group()


# ------------------------------------------------------------------------------------------------------------- tables


def tables(plan: Plan, placement: str, num_measured: int) -> Tables:
    ranks = np.linspace(0, plan.num_servers - 1, min(num_measured, plan.num_servers)).astype(int).tolist()
    build(plan, 0)
    seconds, stored = [], []
    for rank in ranks:
        begin = perf_counter()
        built = build(plan, rank)
        seconds.append(perf_counter() - begin)
        stored.append(stored_over_needed(plan, built))
    begin = perf_counter()
    plan.traffic()
    traffic_seconds = perf_counter() - begin
    worst = max(seconds)
    return Tables(placement, plan.num_servers, len(plan.tasks), median(seconds), worst, traffic_seconds, max(stored))


def stored_over_needed(plan: Plan, built: RankTables) -> float:
    """Tokens in the server's two buffers over the distinct queries and keys of its tasks; 1 means once each."""
    tasks = plan.tasks.take(plan.tasks.server == built.rank)
    needed = _distinct(tasks, tasks.q_start, tasks.q_stop) + _distinct(tasks, tasks.kv_start, tasks.kv_stop)
    return (built.queries.buffer_tokens + built.keys.buffer_tokens) / max(1, needed)


def _distinct(tasks: TaskTable, start: np.ndarray, stop: np.ndarray) -> int:
    total = 0
    reached: dict[int, int] = {}
    for i in np.argsort(start, kind="stable"):
        document = int(tasks.document[i])
        begin = max(int(start[i]), reached.get(document, 0))
        total += max(0, int(stop[i]) - begin)
        reached[document] = max(reached.get(document, 0), int(stop[i]))
    return total


# ------------------------------------------------------------------------------------------------------------- output


def sampled_plan(placement: str, ranks: int, tokens: int) -> Plan:
    lengths = sample_lengths("prolong", ranks * tokens, seed=0)
    return balance(pack(lengths, ranks=ranks, placement=placement), model_named("llama3-8b"), tolerance=0.05)


def table_of(title: str, columns: Iterable[str], rows: Iterable[Iterable[object]]) -> Table:
    table = Table(title=title, title_justify="left")
    for column in columns:
        table.add_column(column, justify="right", no_wrap=True)
    for row in rows:
        table.add_row(*(f"{value:.4g}" if isinstance(value, float) else str(value) for value in row))
    return table


def write(part: str, folder: Path, rows: list[Any], console: Console) -> None:
    device = {"device": torch.cuda.get_device_name()} if part == "gpu" else {}
    path = folder / f"runtime_{part}.json"
    write_json(path, {"host": host_facts(**versions(), **device), "rows": rows})
    console.print(f"Written to {path}.")


def run_cpu(options: argparse.Namespace, console: Console) -> None:
    row = two_ranks(options.document, options.short, options.repeats)
    console.print(table_of(
        "two CPU ranks, attention forward + backward",
        ("document", "short", "at home s", "planned s", "speedup", "of CPU s", "ideal", "MB moved", "planning ms"),
        [(row.document, row.short, row.at_home_seconds, row.planned_seconds, row.speedup, row.cpu_speedup,
          row.ideal_speedup, row.bytes_total / 1e6, row.plan_seconds * 1e3)]))
    write("cpu", options.output, [row], console)


def run_gpu(options: argparse.Namespace, console: Console) -> None:
    if not torch.cuda.is_available():
        raise ValueError("--gpu needs a GPU and torch finds none; leave it out")
    rows = []
    for placement in PLACEMENTS:
        plan = sampled_plan(placement, POOL_RANKS, POOL_TOKENS)
        for which, rank in ranks_by_traffic(plan):
            print(f"{placement} placement, {which} rank {rank} ...", file=sys.stderr, flush=True)
            rows.append(one_rank(plan, placement, rank, which, options.repeats, options.kernel))
            torch.cuda.empty_cache()
    console.print(table_of(
        f"one rank of {POOL_RANKS} with {POOL_TOKENS} tokens; ms a call",
        ("placement", "traffic", "tasks", "MB in", "MB out", "kernel fwd", "bwd", "copies fwd", "bwd", "share %",
         "host fwd", "bwd", "prepare"),
        [(row.placement, row.which, row.tasks, row.bytes_in / 1e6, row.bytes_out / 1e6,
          *(1e3 * seconds for seconds in (row.kernel_forward_seconds, row.kernel_backward_seconds,
                                          row.copy_forward_seconds, row.copy_backward_seconds)),
          100 * row.copy_share, 1e3 * row.host_forward_seconds, 1e3 * row.host_backward_seconds,
          1e3 * row.prepare_seconds) for row in rows]))
    write("gpu", options.output, rows, console)


def run_tables(options: argparse.Namespace, console: Console) -> None:
    rows = [tables(sampled_plan(placement, options.ranks, POOL_TOKENS), placement, 64) for placement in PLACEMENTS]
    console.print(table_of(
        "one rank's tables", ("placement", "ranks", "tasks", "median ms", "worst ms", "traffic ms", "stored / needed"),
        [(row.placement, row.ranks, row.tasks, 1e3 * row.build_seconds, 1e3 * row.build_seconds_worst,
          1e3 * row.traffic_seconds, row.stored_over_needed) for row in rows]))
    write("tables", options.output, rows, console)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Measure the runtime around attention; all parts that fit by default.")
    parser.add_argument("--cpu", action="store_true", help="two CPU ranks, planned against at home")
    parser.add_argument("--gpu", action="store_true", help="one rank's copies against its attention")
    parser.add_argument("--tables", action="store_true", help="seconds to build one rank's tables")
    parser.add_argument("--document", type=int, default=16_384, help="--cpu: tokens of the long document")
    parser.add_argument("--short", type=int, default=512, help="--cpu: tokens of each short one")
    parser.add_argument("--kernel", default="auto", help="--gpu: attention kernel")
    parser.add_argument("--ranks", type=int, default=512, help="--tables: size of the pool")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--output", type=Path, default=RESULTS, help="folder of the JSON files")
    return parser.parse_args()


def run(options: argparse.Namespace, console: Console) -> None:
    if options.repeats < 1:
        raise ValueError(f"repeats is {options.repeats}; give at least 1")
    if options.short < 1 or options.document < 1 or options.document % options.short:
        raise ValueError(f"short is {options.short} and document {options.document}; give lengths that divide")
    if not (options.cpu or options.gpu or options.tables):
        options.cpu = options.tables = True
        options.gpu = torch.cuda.is_available()
    for wanted, part in ((options.tables, run_tables), (options.cpu, run_cpu), (options.gpu, run_gpu)):
        if wanted:
            part(options, console)


if __name__ == "__main__":
    try:
        run(arguments(), wide_console())
    except (ValueError, OSError) as problem:
        sys.exit(f"runtime.py: error: {problem}")
