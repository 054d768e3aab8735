"""What does a document over all ranks gain over one rank that holds it alone? CPU ranks, a small Llama in Transformers.

The same loop trains the same document from the same weights, mode by mode in every step, so that drift of the machine
hits all:

one rank alone      whole on the first rank, on one core, while the others wait
slices in order     every rank its own slice against gathered keys, as context parallelism without balancing does
head and tail       every rank the r-th chunk from the front and from the back, against gathered keys: the placement of
                    torch's and Megatron's context parallelism, which permutes tokens, with our kernel and exchange
distca              slices in order, balanced over all ranks
  balanced placement  the same with rows(…, placement="balanced"), which lays slices so that most queries stay home

CPU seconds stand beside the clock's: a rank's process, the threads that carry its bytes included. They grow little
where a core is shared with other work, which only ever adds to the clock's, so the least of a mode's steps counts.
torch's own context parallelism is tried in each of its forms as well, and what it says where it does not run is kept.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from common import on_ranks
from integrations import small_llama
from outputs import RESULTS, host_facts, write_json
from rich.console import Console
from rich.table import Table
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor.experimental import _attention as torch_cp
from torch.distributed.tensor.experimental._context_parallel import _attention as torch_flex_cp
from torch.nn.attention import SDPBackend, flex_attention, sdpa_kernel
from torch.nn.parallel import DistributedDataParallel

from distca.data import rows
from distca.integrations.huggingface import enable
from distca.integrations.packed import latest_plan

MODES = ALONE, IN_ORDER, HEAD_AND_TAIL, DISTCA, PLACED = (
    "one rank alone", "slices in order", "head and tail", "distca", "distca, balanced placement")
WARM_UP_TOKENS = 512
PROBE_TOKENS = 512


@dataclass(frozen=True, slots=True)
class Result:
    """One mode: the least of its steps; a step is as long as its slowest rank and busy as its busiest."""

    mode: str
    step_seconds: float
    tokens_per_second: float
    cpu_seconds: float          # of the busiest rank
    work_max_over_mean: float
    losses: list[float]


class Loop:
    """One document over all ranks, or whole on the first of them while the others wait."""

    def __init__(self, mode: str, layers: int, tokens: int) -> None:
        rank, ranks = dist.get_rank(), dist.get_world_size()
        alone = mode == ALONE
        self.works = rank == 0 or not alone
        self.inner = small_llama(layers, "sdpa")
        enable(self.inner, dist.new_subgroups(1)[0] if alone else None,
               tolerance=0.05 if mode in (DISTCA, PLACED) else 1.0)
        self.model: torch.nn.Module = self.inner if alone else DistributedDataParallel(self.inner)
        self.optimizer = torch.optim.SGD(self.inner.parameters(), lr=1e-2)
        document = torch.randint(0, 256, (tokens,), generator=torch.Generator().manual_seed(0))
        row = rows([document], 0 if alone else rank, 1 if alone else ranks,
                   placement="balanced" if mode == PLACED else "given")
        batch = row.batch()
        if mode == HEAD_AND_TAIL:
            chunks = torch.arange(tokens).chunk(2 * ranks)
            here = torch.cat([chunks[rank], chunks[-1 - rank]])
            batch = {name: column[:, here] for name, column in rows([document], 0, 1).batch().items()}
            batch["document_ids"] = torch.zeros_like(batch["input_ids"])
        self.batch, self.scale = {**batch, "num_items_in_batch": row.num_items}, 1 if alone else ranks

    def step(self) -> tuple[float, float, float]:
        """Seconds until every rank is done, CPU seconds of the busiest, and the loss over all tokens."""
        dist.barrier()
        begin, busy = time.perf_counter(), time.process_time()
        total = torch.zeros((), dtype=torch.float64)
        if self.works:
            loss = self.model(**self.batch, use_cache=False).loss
            (loss * self.scale).backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
            total += loss.detach()
        spent = torch.tensor(time.process_time() - busy)
        dist.barrier()
        seconds = time.perf_counter() - begin
        dist.all_reduce(total)
        dist.all_reduce(spent, dist.ReduceOp.MAX)
        return seconds, spent.item(), total.item()


def rank_main(
    options: dict[str, int]
) -> tuple[list[tuple[str, float, list[tuple[float, float, float]]]], dict[str, str]]:
    """Every rank: modes, their work max/mean and their records; and what torch's context parallelism says."""
    for mode in MODES:
        Loop(mode, options["layers"], WARM_UP_TOKENS).step()
    loops = {mode: Loop(mode, options["layers"], options["tokens"]) for mode in MODES}
    records: dict[str, list[tuple[float, float, float]]] = {mode: [] for mode in loops}
    for _ in range(options["steps"]):
        for mode, loop in loops.items():
            records[mode].append(loop.step())
    work = {mode: latest_plan(loop.inner).summary().work_max_over_mean if loop.works else 1.0
            for mode, loop in loops.items()}
    return [(mode, work[mode], records[mode]) for mode in loops], torch_context_parallel()


def torch_context_parallel() -> dict[str, str]:
    """What each form of torch's own context parallelism says of a forward and backward on these ranks."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    said = {}
    forms: dict[str, Callable[[DeviceMesh], None]] = {"ring": _ring, "ring, math": _ring_of_math, "flex": _flex}
    for name, run in forms.items():
        try:
            run(mesh)
            said[name] = "runs"
        except (NotImplementedError, RuntimeError) as error:
            said[name] = str(error).splitlines()[0]
    return said


def _ring(mesh: DeviceMesh) -> None:
    q = torch.randn(1, 2, PROBE_TOKENS, 8, requires_grad=True)
    with torch_cp.context_parallel(mesh, buffers=[q.data], buffer_seq_dims=[2]):
        torch.nn.functional.scaled_dot_product_attention(q, q, q, is_causal=True).sum().backward()  # patched by name


def _ring_of_math(mesh: DeviceMesh) -> None:
    with sdpa_kernel(SDPBackend.MATH):
        _ring(mesh)


class _FlexAttention(torch.nn.Module):
    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, block_mask: Any) -> Any:
        return flex_attention.flex_attention(q, k, v, block_mask=block_mask)


def _flex(mesh: DeviceMesh) -> None:
    module = _FlexAttention()
    style = torch_flex_cp._ContextParallel
    style(2, style.AttentionType.FLEX)._apply(module, mesh)
    mask = torch_flex_cp._create_cp_block_mask(
        lambda batch, head, query, key: query >= key, B=1, H=1, Q_LEN=PROBE_TOKENS, KV_LEN=PROBE_TOKENS,
        device_mesh=mesh)
    q = torch.randn(1, 2, PROBE_TOKENS // mesh.size(), 8, requires_grad=True)
    module(q, q, q, mask).sum().backward()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--tokens", type=int, default=16_384, help="of the one document")
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--steps", type=int, default=3, help="timed steps of each mode")
    parser.add_argument("--json", type=Path, default=RESULTS / "spanning.json")
    arguments = parser.parse_args()
    options = {name: getattr(arguments, name) for name in ("ranks", "tokens", "layers", "steps")}
    host = host_facts()                                          # other work is in the clock's seconds
    records, said = on_ranks(arguments.ranks, rank_main, options)[0]
    results = {}
    for mode, work, steps in records:
        seconds, busy = (min(step[at] for step in steps) for at in range(2))
        results[mode] = Result(mode, seconds, arguments.tokens / seconds, busy, work, [step[2] for step in steps])
    ours, alone = results[DISTCA], results[ALONE]
    content = {
        "host": host, "options": options, "rows": list(results.values()),
        "speedup_over": {mode: ours.tokens_per_second / row.tokens_per_second for mode, row in results.items()
                         if mode not in (DISTCA, PLACED)},
        "speedup_over_in_cpu_seconds": {mode: row.cpu_seconds / ours.cpu_seconds for mode, row in results.items()
                                        if mode not in (DISTCA, PLACED)},
        "largest_loss_difference": max(abs(a - b) for row in results.values()
                                       for a, b in zip(row.losses, alone.losses, strict=True)),
        "torch_context_parallel": said}
    show(list(results.values()), content)
    write_json(arguments.json, content)


def show(results: list[Result], content: dict[str, Any]) -> None:
    options = content["options"]
    table = Table("attention", "s a step", "tokens/s", "CPU s of the busiest", "work max/mean", title_justify="left",
                  title=f"One document of {options['tokens']} tokens, {options['ranks']} CPU ranks")
    for row in results:
        table.add_row(row.mode, f"{row.step_seconds:.2f}", f"{row.tokens_per_second:,.0f}", f"{row.cpu_seconds:.2f}",
                      f"{row.work_max_over_mean:.2f}")
    console = Console()
    console.print(table)
    for mode, ratio in content["speedup_over"].items():
        console.print(f"{ratio:.2f}x tokens/s over {mode}, {content['speedup_over_in_cpu_seconds'][mode]:.2f}x by CPU "
                      "seconds")
    console.print(f"losses differ by at most {content['largest_loss_difference']:.1e}")
    for form, line in content["torch_context_parallel"].items():
        console.print(f"torch's context parallelism, {form}: {line}")


if __name__ == "__main__":
    main()
