"""What does a document over all ranks gain over one rank that holds it alone? CPU ranks, a small Llama in Transformers.

The same loop trains the same document from the same weights, mode by mode in every step, so that drift of the machine
hits all: whole on the first rank, on one core, while the others wait; sliced, every rank computing its own queries
against gathered keys as plain context parallelism in order does; and with distca. torch's own context parallelism is
tried as well, and what it says where it does not run is kept.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import time
from dataclasses import asdict
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
import transformers
from integrations import RESULTS, Result, small_llama
from rich.console import Console
from rich.table import Table
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.experimental import context_parallel
from torch.nn.parallel import DistributedDataParallel

from distca.data import rows
from distca.integrations.huggingface import enable
from distca.integrations.packed import latest_plan
from distca.testing import run_processes

MODES = ("one rank alone", "slices at home", "distca")
WARM_UP_TOKENS = 512


class Loop:
    """One document over all ranks, or whole on the first of them while the others wait."""

    def __init__(self, mode: str, layers: int, tokens: int) -> None:
        rank, ranks = dist.get_rank(), dist.get_world_size()
        alone = mode == MODES[0]
        self.works = rank == 0 or not alone
        self.inner = small_llama(layers, "sdpa")
        enable(self.inner, dist.new_subgroups(1)[0] if alone else None, tolerance=1.0 if mode == MODES[1] else 0.05)
        self.model: torch.nn.Module = self.inner if alone else DistributedDataParallel(self.inner)
        self.optimizer = torch.optim.SGD(self.inner.parameters(), lr=1e-2)
        document = torch.randint(0, 256, (tokens,), generator=torch.Generator().manual_seed(0))
        row = rows([document], 0 if alone else rank, 1 if alone else ranks)
        self.batch, self.scale = {**row.batch(), "num_items_in_batch": row.num_items}, 1 if alone else ranks

    def step(self) -> tuple[float, float]:
        """Seconds until every rank is done, and the loss over all tokens."""
        dist.barrier()
        begin = time.perf_counter()
        total = torch.zeros(())
        if self.works:
            loss = self.model(**self.batch, use_cache=False).loss
            (loss * self.scale).backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
            total = loss.detach().clone()
        dist.barrier()
        seconds = time.perf_counter() - begin
        dist.all_reduce(total)
        return seconds, total.item()


def rank_main(
    transport: Any, options: dict[str, int]
) -> tuple[list[tuple[str, float, list[tuple[float, float]]]], str]:
    """Every rank: modes, their work max/mean and their records; and what torch's context parallelism says."""
    for mode in MODES:
        Loop(mode, options["layers"], WARM_UP_TOKENS).step()
    loops = {mode: Loop(mode, options["layers"], options["tokens"]) for mode in MODES}
    records: dict[str, list[tuple[float, float]]] = {mode: [] for mode in MODES}
    for _ in range(options["steps"]):
        for mode, loop in loops.items():
            records[mode].append(loop.step())
    work = {mode: latest_plan(loop.inner).summary().work_max_over_mean if loop.works else 1.0
            for mode, loop in loops.items()}
    return [(mode, work[mode], records[mode]) for mode in MODES], torch_context_parallel()


def torch_context_parallel() -> str:
    """What torch's own context parallelism says of a call on these ranks."""
    q = torch.randn(1, 2, 16, 8)
    try:
        with context_parallel(init_device_mesh("cpu", (dist.get_world_size(),)), buffers=[q], buffer_seq_dims=[2]):
            torch.nn.functional.scaled_dot_product_attention(q, q, q, is_causal=True)
    except (NotImplementedError, RuntimeError) as error:
        return str(error).splitlines()[0]
    return "runs"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--tokens", type=int, default=16_384, help="of the one document")
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--steps", type=int, default=2, help="timed steps of each mode")
    parser.add_argument("--json", type=Path, default=RESULTS / "spanning.json")
    arguments = parser.parse_args()
    options = {name: getattr(arguments, name) for name in ("ranks", "tokens", "layers", "steps")}
    outcomes = run_processes(arguments.ranks, rank_main, options, timeout_seconds=600, deadline_seconds=1800)
    for rank, outcome in enumerate(outcomes):
        if outcome.error is not None or outcome.value is None:
            raise SystemExit(f"rank {rank} failed: {outcome.error or 'it ended without a word'}")
    modes, said = outcomes[0].value
    results = []
    for mode, work, records in modes:
        seconds = median(record[0] for record in records)
        results.append(Result(mode, seconds, arguments.tokens / seconds, work, [record[1] for record in records]))
    alone, home, balanced = results
    content = {
        "host": {"machine": platform.machine(), "cores": os.cpu_count(), "python": platform.python_version(),
                 "torch": torch.__version__, "transformers": transformers.__version__},
        "options": options, "rows": [asdict(row) for row in results],
        "speedup_over_alone": balanced.tokens_per_second / alone.tokens_per_second,
        "speedup_over_slices_at_home": balanced.tokens_per_second / home.tokens_per_second,
        "largest_loss_difference": max(abs(a - b) for row in results
                                       for a, b in zip(row.losses, alone.losses, strict=True)),
        "torch_context_parallel": said}
    show(results, content)
    arguments.json.parent.mkdir(parents=True, exist_ok=True)
    arguments.json.write_text(json.dumps(content, indent=1), encoding="utf-8")


def show(results: list[Result], content: dict[str, Any]) -> None:
    options = content["options"]
    table = Table("attention", "s a step", "tokens/s", "work max/mean", title_justify="left",
                  title=f"One document of {options['tokens']} tokens, {options['ranks']} CPU ranks")
    for row in results:
        table.add_row(row.mode, f"{row.step_seconds:.2f}", f"{row.tokens_per_second:,.0f}",
                      f"{row.work_max_over_mean:.2f}")
    console = Console()
    console.print(table)
    console.print(f"{content['speedup_over_alone']:.2f}x tokens/s over one rank alone, "
                  f"{content['speedup_over_slices_at_home']:.2f}x over slices at home; losses differ by at most "
                  f"{content['largest_loss_difference']:.1e}; torch's context parallelism: "
                  f"{content['torch_context_parallel']}")


if __name__ == "__main__":
    main()
