"""What does leaving multiprocessors free gain where copies run beside attention on the same GPU?

The kernel's thread blocks take whole multiprocessors until all work is done, so that a copy issued after a launch waits
for its end, and a peer waits for the copy. With some multiprocessors to spare the copy runs beside. Measured with the
copy that exchanges make: one launch that packs runs of tokens, on a stream of its own, issued while attention runs. For
each number to spare, forward and backward, in turns: attention alone, and both. The best that could be is the longer of
the two, the worst their sum.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import torch
from outputs import RESULTS, host_facts, write_json
from rich.console import Console
from rich.table import Table

from distca.kernels import TaskRows
from distca.kernels.hopper.kernel import HopperKernel
from distca.kernels.interface import BackwardInputs
from distca.models import model_named
from distca.profiling import versions
from distca.runtime.copy_tables import COPY_BYTES, Copies
from distca.runtime.exchange_triton import copy

SPARES = (0, 4, 8, 16)
UNIT = 16
ISSUED_SECONDS = 5e-4    # after attention was launched: its kernels are running then

Run = Callable[[], object]


@dataclass(frozen=True, slots=True)
class Result:
    """Medians, in seconds, of attention in one direction with so many multiprocessors to spare."""

    direction: str
    spare_multiprocessors: int
    attention_seconds: float       # alone
    copy_seconds: float            # alone, on all multiprocessors
    copy_beside_seconds: float     # from when it was issued until it was done, attention running
    both_seconds: float            # from the launch of attention until both were done
    both_over_sum: float
    both_over_max: float
    attention_over_no_spares: float


def whole_copy(source: torch.Tensor, target: torch.Tensor) -> Run:
    """One launch that copies all bytes, cut as an exchange's packing is."""
    block = COPY_BYTES // UNIT
    begin = torch.arange(0, source.numel() // UNIT, block, device=source.device)
    nothing = torch.zeros_like(begin)
    how = Copies(torch.stack([nothing, nothing, begin, begin, nothing + block], dim=1), UNIT, COPY_BYTES)
    return lambda: copy(how, (source,), (target,))


def alone(run: Run) -> float:
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    run()
    end.record()
    torch.cuda.synchronize()
    return begin.elapsed_time(end) / 1e3


def together(attend: Run, copies: Run, beside: torch.cuda.Stream) -> tuple[float, float]:
    """Seconds of the copy, and of both."""
    begin, issued, copied, end = (torch.cuda.Event(enable_timing=True) for _ in range(4))
    begin.record()
    attend()
    until = time.perf_counter() + ISSUED_SECONDS
    while time.perf_counter() < until:
        pass
    with torch.cuda.stream(beside):
        issued.record()
        copies()
        copied.record()
    torch.cuda.current_stream().wait_stream(beside)
    end.record()
    torch.cuda.synchronize()
    return issued.elapsed_time(copied) / 1e3, begin.elapsed_time(end) / 1e3


def runs_of(tokens: int, spare: int) -> dict[str, Run]:
    device, model = torch.device("cuda", 0), model_named("llama3-8b")
    q, k, v, dout = (torch.randn(tokens, heads, model.head_dim, dtype=torch.bfloat16, device=device)
                     for heads in (model.num_heads, model.num_kv_heads, model.num_kv_heads, model.num_heads))
    kernel = HopperKernel(spare_multiprocessors=spare)
    prepared = kernel.prepare(TaskRows.documents([tokens]), device)
    out, lse = kernel.forward(q, k, v, prepared)
    saved = BackwardInputs(dout, q, k, v, out, lse)
    return {"forward": lambda: kernel.forward(q, k, v, prepared), "backward": lambda: kernel.backward(saved, prepared)}


def measure(tokens: int, copied_bytes: int, rounds: int) -> list[Result]:
    wire = torch.randint(0, 256, (2, copied_bytes), dtype=torch.uint8, device="cuda")
    copies, beside = whole_copy(wire[0], wire[1]), torch.cuda.Stream()
    runs = {(way, spare): run for spare in SPARES for way, run in runs_of(tokens, spare).items()}
    found: dict[tuple[str, int], list[tuple[float, ...]]] = {key: [] for key in runs}
    copy_alone = []
    for number in range(rounds + 2):
        copy_alone.append(alone(copies))
        for key, run in runs.items():
            seconds = alone(run), *together(run, copies, beside)
            if number >= 2:                                      # the first ones warm up
                found[key].append(seconds)
    assert torch.equal(wire[0], wire[1])
    copy_seconds, results = median(copy_alone[2:]), []
    for way in ("forward", "backward"):
        medians = {spare: [median(column) for column in zip(*found[way, spare], strict=True)] for spare in SPARES}
        results += [Result(way, spare, attention, copy_seconds, copied, both, both / (attention + copy_seconds),
                           both / max(attention, copy_seconds), attention / medians[0][0])
                    for spare, (attention, copied, both) in medians.items()]
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=16_384, help="of the document that is attended to")
    parser.add_argument("--megabytes", type=int, default=512, help="that are copied beside")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--json", type=Path, default=RESULTS / "beside_copies.json")
    chosen = parser.parse_args()
    host = host_facts(device=torch.cuda.get_device_name(), **versions())
    results = measure(chosen.tokens, chosen.megabytes * 2**20, chosen.rounds)
    table = Table("direction", "spare", "attention ms", "copy ms", "copy beside ms", "both ms", "over sum", "over max",
                  title=f"one document of {chosen.tokens}, {chosen.megabytes} MiB copied beside", title_justify="left")
    for row in results:
        table.add_row(row.direction, str(row.spare_multiprocessors), *(f"{1e3 * seconds:.2f}" for seconds in (
            row.attention_seconds, row.copy_seconds, row.copy_beside_seconds, row.both_seconds)),
            f"{row.both_over_sum:.2f}", f"{row.both_over_max:.2f}")
    Console(width=130).print(table)
    options = {name: getattr(chosen, name) for name in ("tokens", "megabytes", "rounds")}
    write_json(chosen.json, {"host": host, "options": options, "rows": results})


if __name__ == "__main__":
    main()
