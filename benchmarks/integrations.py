"""What does `enable(model)` gain in someone else's loop? Two CPU ranks, a small Llama in Transformers, skewed rows.

One rank's row is a long document, the other's as many tokens of short ones. The same loop trains the same tokens from
the same weights with transformers' attention as it would run without us and with distca; the modes alternate step by
step, so that drift of the machine hits both. Without distca attention runs per document, as FlashAttention would run
it: `sdpa` with its dense mask over the whole row is shown beside.
"""

from __future__ import annotations

import argparse
import time
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from common import on_ranks
from outputs import RESULTS, host_facts, write_json
from rich.console import Console
from rich.table import Table
from torch.nn.parallel import DistributedDataParallel
from transformers import LlamaConfig, LlamaForCausalLM

from distca.integrations.huggingface import enable
from distca.integrations.packed import latest_plan

MODES = ("sdpa", "per document", "distca")


@dataclass(frozen=True, slots=True)
class Result:
    """One mode: medians over its steps; a step is as long as its slowest rank."""

    mode: str
    step_seconds: float
    tokens_per_second: float
    work_max_over_mean: float
    losses: list[float]


def rows_of(ranks: int, tokens: int, short: int) -> list[list[int]]:
    """The first rank has one long document, the others short ones."""
    return [[tokens], *([[short] * (tokens // short)] * (ranks - 1))]


def small_llama(layers: int, attention: str) -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=256, hidden_size=256, intermediate_size=704, num_hidden_layers=layers, num_attention_heads=8,
        num_key_value_heads=2, max_position_embeddings=65_536)
    return LlamaForCausalLM._from_config(config, attn_implementation=attention)


class Loop:
    """The user's loop, one step at a time."""

    def __init__(self, mode: str, layers: int, lengths: list[int], begin: int = 0) -> None:
        """The first document's tokens here begin at position `begin` of it."""
        self.mode = mode
        model = small_llama(layers, "sdpa")
        if mode == "distca":
            enable(model)
        elif mode == "per document":                             # a pool of one rank: everything at home
            enable(model, dist.new_subgroups(1)[0])
        self.model, self.inner = DistributedDataParallel(model), model
        self.optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
        generator = torch.Generator().manual_seed(dist.get_rank())
        tokens = torch.randint(0, 256, (1, sum(lengths)), generator=generator)
        position = torch.cat([torch.arange(length) for length in lengths])[None] + begin
        self.batch = {"input_ids": tokens, "position_ids": position, "labels": tokens.masked_fill(position == 0, -100)}
        self.count = torch.tensor(sum(lengths) - len(lengths))
        dist.all_reduce(self.count)

    def step(self) -> tuple[float, float]:
        """Seconds until every rank is done, and the loss over all tokens."""
        dist.barrier()
        begin = time.perf_counter()
        loss = self.model(**self.batch, num_items_in_batch=self.count, use_cache=False).loss
        (loss * dist.get_world_size()).backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        dist.barrier()
        seconds = time.perf_counter() - begin
        total = loss.detach().clone()
        dist.all_reduce(total)
        return seconds, total.item()


def rank_main(options: dict[str, Any]) -> tuple[dict[str, list[tuple[float, float]]], Any]:
    """Every rank: all modes in turn; the first rank's records, and the plan's max/mean before and after."""
    rows = rows_of(dist.get_world_size(), options["tokens"], options["short"])
    loops = {mode: Loop(mode, options["layers"], rows[dist.get_rank()]) for mode in MODES}
    records: dict[str, list[tuple[float, float]]] = {mode: [] for mode in MODES}
    for number in range(options["steps"] + 1):
        for mode, loop in loops.items():
            record = loop.step()
            if number:                                           # the first is warm-up
                records[mode].append(record)
    summary = latest_plan(loops["distca"].inner).summary()
    return records, (summary.work_max_over_mean_at_home, summary.work_max_over_mean)


def measure(arguments: argparse.Namespace) -> list[Result]:
    options = {name: getattr(arguments, name) for name in ("tokens", "short", "steps", "layers")}
    records, (before, after) = on_ranks(arguments.ranks, rank_main, options)[0]
    tokens = arguments.ranks * arguments.tokens
    results = []
    for mode in MODES:
        seconds = median(record[0] for record in records[mode])
        results.append(Result(mode, seconds, tokens / seconds, after if mode == "distca" else before,
                              [record[1] for record in records[mode]]))
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--tokens", type=int, default=8192, help="per rank; the length of the long document")
    parser.add_argument("--short", type=int, default=256)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--steps", type=int, default=3, help="timed steps of each mode")
    parser.add_argument("--json", type=Path, default=RESULTS / "integrations.json")
    arguments = parser.parse_args()
    host, results = host_facts(), measure(arguments)
    sdpa, home, balanced = results
    speedup = balanced.tokens_per_second / home.tokens_per_second
    speedup_over_sdpa = balanced.tokens_per_second / sdpa.tokens_per_second
    difference = max(abs(a - b) for row in (sdpa, home) for a, b in zip(row.losses, balanced.losses, strict=True))
    table = Table("attention", "s a step", "tokens/s", "work max/mean", title_justify="left",
                  title=f"Llama in Transformers, {arguments.ranks} CPU ranks of {arguments.tokens} tokens")
    for row in results:
        table.add_row(row.mode, f"{row.step_seconds:.2f}", f"{row.tokens_per_second:,.0f}",
                      f"{row.work_max_over_mean:.2f}")
    console = Console()
    console.print(table)
    console.print(f"{speedup_over_sdpa:.2f}x tokens/s over sdpa, {speedup:.2f}x over attention per document at home; "
                  f"losses differ by at most {difference:.1e}")
    options = {name: getattr(arguments, name) for name in ("ranks", "tokens", "short", "layers", "steps")}
    write_json(arguments.json, {
        "host": host, "options": options, "rows": results, "speedup": speedup, "speedup_over_sdpa": speedup_over_sdpa,
        "largest_loss_difference": difference})


if __name__ == "__main__":
    main()
