"""What does leaving multiprocessors free gain where copies run beside attention on the same GPU?

The kernel's thread blocks take whole multiprocessors until all work is done, so that a copy issued after a launch waits
for its end, and a peer waits for the copy. With some multiprocessors to spare the copy runs beside. Measured with the
copies that exchanges make: one launch that packs runs of tokens, on a stream of its own, right behind the launch of
attention. For each number to spare, forward and backward: alone, the copy alone, and both, until the copy is done and
until all is; the best that could be is the longer of the two alone, the worst their sum.
"""

from __future__ import annotations

import argparse
import json
import platform
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median

import torch
from rich.console import Console
from rich.table import Table

from distca.kernels import TaskRows
from distca.kernels.hopper import HopperKernel
from distca.kernels.interface import BackwardInputs
from distca.models import model_named
from distca.profiling import versions
from distca.runtime.copy_tables import Copies
from distca.runtime.exchange_triton import COPY_BYTES, copy

RESULTS = Path(__file__).parent / "results"
SPARES = (0, 4, 8, 16)
UNIT = 16


@dataclass(frozen=True, slots=True)
class Result:
    """Medians, in seconds, of attention in one direction with so many multiprocessors to spare."""

    direction: str
    spare_multiprocessors: int
    attention_seconds: float       # alone
    copy_seconds: float            # alone, on all multiprocessors
    copy_done_seconds: float       # both, from the launch of attention until the copy is done
    both_seconds: float            # until both are
    both_over_sum: float
    both_over_max: float
    attention_over_no_spares: float


def whole_copy(source: torch.Tensor, target: torch.Tensor) -> Callable[[], None]:
    """One launch that copies all bytes, cut as an exchange's packing is."""
    block = COPY_BYTES // UNIT
    begin = torch.arange(0, source.numel() // UNIT, block, device=source.device)
    nothing = torch.zeros_like(begin)
    how = Copies(torch.stack([nothing, nothing, begin, begin, nothing + block], dim=1), UNIT, COPY_BYTES)
    return lambda: copy(how, (source,), (target,))


def timed(attend: Callable[[], object], copies: Callable[[], None] | None, beside: torch.cuda.Stream,
          rounds: int) -> tuple[float, float]:
    """Median seconds from the launch of attention until the copy behind it, and until all, is done."""
    copied, done = [], []
    for number in range(rounds + 2):
        begin, end, both = (torch.cuda.Event(enable_timing=True) for _ in range(3))
        torch.cuda._sleep(400_000)                               # until all is queued
        begin.record()
        beside.wait_stream(torch.cuda.current_stream())
        attend()
        if copies is not None:
            with torch.cuda.stream(beside):
                torch.cuda._sleep(20_000)                        # microseconds, so that attention is there first
                copies()
                end.record(beside)
            torch.cuda.current_stream().wait_stream(beside)
        both.record()
        torch.cuda.synchronize()
        if number >= 2:
            done.append(begin.elapsed_time(both) / 1e3)
            copied.append(begin.elapsed_time(end) / 1e3 if copies is not None else 0.0)
    return median(copied), median(done)


def measure(tokens: int, copied_bytes: int, rounds: int) -> list[Result]:
    device, model = torch.device("cuda", 0), model_named("llama3-8b")
    q, k, v, dout = (torch.randn(tokens, heads, model.head_dim, dtype=torch.bfloat16, device=device)
                     for heads in (model.num_heads, model.num_kv_heads, model.num_kv_heads, model.num_heads))
    wire = torch.randint(0, 256, (2, copied_bytes), dtype=torch.uint8, device=device)
    copies, beside = whole_copy(wire[0], wire[1]), torch.cuda.Stream()
    _, copy_seconds = timed(copies, None, beside, rounds)
    assert torch.equal(wire[0], wire[1])
    results: list[Result] = []
    for spare in SPARES:
        kernel = HopperKernel(spare_multiprocessors=spare)
        prepared = kernel.prepare(TaskRows.documents([tokens]), device)
        out, lse = kernel.forward(q, k, v, prepared)
        saved = BackwardInputs(dout, q, k, v, out, lse)
        ways: dict[str, Callable[[], object]] = {
            "forward": lambda: kernel.forward(q, k, v, prepared),  # noqa: B023  # called before the next turn
            "backward": lambda: kernel.backward(saved, prepared)}  # noqa: B023
        for direction, attend in ways.items():
            _, alone = timed(attend, None, beside, rounds)
            copied, both = timed(attend, copies, beside, rounds)
            first = next((row.attention_seconds for row in results if row.direction == direction), alone)
            results.append(Result(direction, spare, alone, copy_seconds, copied, both, both / (alone + copy_seconds),
                                  both / max(alone, copy_seconds), alone / first))
    return sorted(results, key=lambda row: row.direction, reverse=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=16_384, help="of the document that is attended to")
    parser.add_argument("--megabytes", type=int, default=512, help="that are copied beside")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--json", type=Path, default=RESULTS / "beside_copies.json")
    chosen = parser.parse_args()
    results = measure(chosen.tokens, chosen.megabytes * 2**20, chosen.rounds)
    table = Table("direction", "spare", "attention ms", "copy ms", "copy done ms", "both ms", "over sum", "over max",
                  title=f"one document of {chosen.tokens}, {chosen.megabytes} MiB copied beside", title_justify="left")
    for row in results:
        table.add_row(row.direction, str(row.spare_multiprocessors), *(f"{1e3 * seconds:.2f}" for seconds in (
            row.attention_seconds, row.copy_seconds, row.copy_done_seconds, row.both_seconds)),
            f"{row.both_over_sum:.2f}", f"{row.both_over_max:.2f}")
    Console().print(table)
    host = {"device": torch.cuda.get_device_name(), "python": platform.python_version(), **versions()}
    options = {name: getattr(chosen, name) for name in ("tokens", "megabytes", "rounds")}
    chosen.json.parent.mkdir(parents=True, exist_ok=True)
    chosen.json.write_text(json.dumps({"host": host, "options": options, "rows": [asdict(row) for row in results]},
                                      indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
