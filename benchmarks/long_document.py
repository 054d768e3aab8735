"""Does one GPU train a 1B model on one document of a million tokens? Its memory, and the time of its parts.

A whole step at full length computes 2.5e17 operations of attention, many minutes on any GPU, so it is measured in parts
that say together what it needs:

    memory    all layers at full length, attention through a window: the same tensors are kept, sent and fetched as with
              causal attention, only fewer pairs are computed
    layer     one layer at full length, causal
    shorter   all layers, causal, at a length that fits without offloading too: the losses must agree

Each runs one of the trainer's own steps: compiled, recomputed in tiles, activations on the host as far as `--host-gb`
goes. It is the first, so that its seconds include compiling and pinning host memory; run the parts one by one
(`--parts`) to give each a GPU and a host of its own.
"""

from __future__ import annotations

import argparse
import gc
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from one_gpu import OneGpu
from outputs import RESULTS, host_facts, write_json
from rich.console import Console
from rich.table import Table

from distca.models import model_named
from distca.profiling.machine import versions
from distca.runtime.attention import CoreAttention, Pending

WINDOW = 4096


class Windowed(CoreAttention):
    """Every query sees the last WINDOW keys."""

    def start(self, *args: Any, **kwargs: Any) -> Pending:
        return super().start(*args, **kwargs, window=WINDOW)


@dataclass(frozen=True, slots=True)
class Result:
    part: str
    layers: int
    tokens: int
    attention: str
    host_gb: float
    step_seconds: float  # of a first step: compiling and pinning are in it
    memory_bytes: int  # peak of tensors on the GPU
    reserved_bytes: int  # peak of what the process took of it
    host_bytes: int  # pages filled at most
    loss: float


def measure(part: str, layers: int, tokens: int, causal: bool, host_gb: float, tile: int, compile: bool) -> Result:
    gc.collect()
    torch.cuda.empty_cache()
    model = replace(model_named("llama3.2-1b"), num_layers=layers)
    gpu = OneGpu(model, 4096, CoreAttention if causal else Windowed, tied=True)
    gpu.choose(compile=compile, recompute="full", tile_tokens=tile, offload_bytes=int(host_gb * 1e9))
    torch.cuda.reset_peak_memory_stats()
    seconds, loss = gpu.step(gpu.batch([tokens]))
    offload = gpu.work.offload
    filled = 0 if offload is None else len(offload.pages.free) * offload.pages.page_bytes
    return Result(
        part=part, layers=layers, tokens=tokens, attention="causal" if causal else f"window of {WINDOW}",
        host_gb=host_gb, step_seconds=seconds, memory_bytes=torch.cuda.max_memory_allocated(),
        reserved_bytes=torch.cuda.max_memory_reserved(), host_bytes=filled, loss=loss)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=2**20)
    parser.add_argument("--shorter", type=int, default=2**17)
    parser.add_argument("--host-gb", type=float, default=80.0)
    parser.add_argument("--tile", type=int, default=16_384)
    parser.add_argument("--parts", nargs="+", default=["memory", "layer", "shorter"],
                        choices=("memory", "layer", "shorter"))
    parser.add_argument("--eager", action="store_true", help="do not compile")
    parser.add_argument("--output", type=Path, default=RESULTS / "long_document.json")
    arguments = parser.parse_args()
    began, results, compile = time.perf_counter(), [], not arguments.eager
    layers = model_named("llama3.2-1b").num_layers
    runs = {
        "shorter": [(layers, arguments.shorter, True, host, tile) for host, tile in
                    ((0.0, 0), (arguments.host_gb / 8, arguments.tile))],
        "memory": [(layers, arguments.tokens, False, arguments.host_gb, arguments.tile)],
        "layer": [(1, arguments.tokens, True, arguments.host_gb / 8, arguments.tile)],
    }
    host = host_facts(device=torch.cuda.get_device_name(), **versions())
    options = {name: getattr(arguments, name) for name in ("tokens", "shorter", "host_gb", "tile", "eager")}
    console = Console(width=150)
    for part in arguments.parts:
        for run in runs[part]:
            results.append(measure(part, *run, compile))
            console.print(f"{results[-1]} ({time.perf_counter() - began:.0f} s)")
            write_json(arguments.output, {"host": host, "options": options, "rows": results})
    table = Table("part", "layers", "tokens", "attention", "host GB", "s a step", "GPU GiB", "reserved GiB", "loss",
                  title=f"llama3.2-1b, one document, {torch.cuda.get_device_name()}")
    for row in results:
        table.add_row(row.part, str(row.layers), f"{row.tokens:,}", row.attention, f"{row.host_bytes / 1e9:.1f}",
                      f"{row.step_seconds:.1f}", f"{row.memory_bytes / 2**30:.1f}", f"{row.reserved_bytes / 2**30:.1f}",
                      f"{row.loss:.4f}")
    console.print(table)


if __name__ == "__main__":
    main()
