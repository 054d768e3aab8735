"""A Transformers Llama on one GPU: is `enable(model)` at least as fast as flex_attention on a packed row?

Eight layers of width 2048 train one row of 32K tokens in documents of mixed lengths, in bf16 with AdamW. The same
weights, tokens and optimizer run with distca's attention and with transformers' `flex_attention`, whose block mask
skips other documents too; each as it is and under torch.compile. The modes take turns, step by step.
"""

from __future__ import annotations

import argparse
import time
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import torch
from outputs import RESULTS, host_facts, write_json
from rich.console import Console
from rich.table import Table
from train_gpu import LENGTHS
from transformers import LlamaConfig, LlamaForCausalLM

from distca.integrations.huggingface import enable
from distca.profiling.machine import versions

MODES = ("distca", "flex_attention", "distca, compiled", "flex_attention, compiled")
WARM_UP = 3


@dataclass(frozen=True, slots=True)
class Result:
    """One mode; medians."""

    mode: str
    step_seconds: float
    tokens_per_second: float
    first_step_seconds: float  # with compilation
    memory_bytes: int          # the most that a step held
    losses: list[float]


class Loop:
    """The user's loop, one step at a time."""

    def __init__(self, mode: str, layers: int, lengths: list[int], device: str) -> None:
        torch.manual_seed(0)
        config = LlamaConfig(
            vocab_size=32_000, hidden_size=2048, intermediate_size=8192, num_hidden_layers=layers,
            num_attention_heads=16, num_key_value_heads=4, max_position_embeddings=sum(lengths))
        attention = "flex_attention" if mode.startswith("flex") else "sdpa"
        with torch.device(device):
            model = LlamaForCausalLM._from_config(config, attn_implementation=attention, dtype=torch.bfloat16)
        if mode.startswith("distca"):
            enable(model)
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=device == "cuda")
        self.model = torch.compile(model) if mode.endswith("compiled") else model
        tokens = torch.randint(0, 32_000, (1, sum(lengths)), generator=torch.Generator().manual_seed(0)).to(device)
        position = torch.cat([torch.arange(length) for length in lengths])[None].to(device)
        self.batch = {"input_ids": tokens, "position_ids": position, "labels": tokens.masked_fill(position == 0, -100)}

    def step(self) -> tuple[float, float]:
        """Seconds until the device is done, and the loss."""
        torch.cuda.synchronize()
        begin = time.perf_counter()
        loss = self.model(**self.batch, use_cache=False).loss
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        torch.cuda.synchronize()
        return time.perf_counter() - begin, loss.item()


def measure(modes: list[str], layers: int, steps: int) -> list[Result]:
    loops, first, memory = {}, {}, {}
    for mode in modes:
        loops[mode] = Loop(mode, layers, LENGTHS, "cuda")
        held = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        first[mode], _ = loops[mode].step()
        memory[mode] = torch.cuda.max_memory_allocated() - held
        print(f"{mode}: first step {first[mode]:.1f} s", flush=True)
    records: dict[str, list[tuple[float, float]]] = {mode: [] for mode in modes}
    for _ in range(WARM_UP + steps):
        for mode, loop in loops.items():
            records[mode].append(loop.step())
    results = []
    for mode, found in records.items():
        seconds = median(second for second, _ in found[WARM_UP:])
        results.append(Result(mode, seconds, sum(LENGTHS) / seconds, first[mode], memory[mode],
                              [loss for _, loss in found]))
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--steps", type=int, default=8, help="timed steps of each mode")
    parser.add_argument("--modes", nargs="+", choices=MODES, default=list(MODES))
    parser.add_argument("--json", type=Path, default=RESULTS / "transformers_gpu.json")
    chosen = parser.parse_args()
    host = host_facts(device=torch.cuda.get_device_name(), **versions())
    results = measure(chosen.modes, chosen.layers, chosen.steps)
    table = Table("attention", "ms a step", "tokens/s", "first step s", "GiB of a step", title_justify="left",
                  title=f"Llama in Transformers, {chosen.layers} layers of 2048, a packed row of {sum(LENGTHS):,}")
    for row in results:
        table.add_row(row.mode, f"{1e3 * row.step_seconds:.0f}", f"{row.tokens_per_second:,.0f}",
                      f"{row.first_step_seconds:.1f}", f"{row.memory_bytes / 2**30:.1f}")
    Console(width=120).print(table)
    seconds = {row.mode: row.step_seconds for row in results}
    pairs = [("flex_attention", "distca"), ("flex_attention, compiled", "distca, compiled"),
             ("distca", "distca, compiled")]
    ratios = {f"{one} / {other}": seconds[one] / seconds[other] for one, other in pairs if {one, other} <= set(seconds)}
    options = {"layers": chosen.layers, "steps": chosen.steps, "lengths": LENGTHS}
    write_json(chosen.json, {"host": host, "options": options, "rows": results, "ratios": ratios})


if __name__ == "__main__":
    main()
