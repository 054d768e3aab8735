"""Measure the latency tables that ship with the package, all in one run on one GPU.

`distca profile` measures one table. A shipped name stands for several, one for each number of heads that ranks of
common models have under tensor parallelism.
"""

from __future__ import annotations

import argparse
import sys
import time
from dataclasses import replace
from pathlib import Path

import torch

from distca import profiling
from distca.models import model_named
from distca.spec import ModelShape

TABLES = Path(__file__).parents[1] / "distca" / "cost" / "tables"
DIM_64 = ModelShape("llama3.2-1b", 16, 2048, 32, 8, 64, 8192, 128256)
SUBJECTS = {                                                     # the first is the name's own table
    "": (model_named("llama3-8b"), 1),
    "4x1": (model_named("llama3-8b"), 8),
    "8x2": (model_named("llama3-8b"), 4),
    "8x1": (model_named("llama-34b"), 8),
    "32x8_dim64": (DIM_64, 1),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name", help="such as h200")
    parser.add_argument("--output", type=Path, default=TABLES)
    parser.add_argument("--only", nargs="*", choices=[key or "main" for key in SUBJECTS], help="default: all")
    parser.add_argument("--quick", action="store_true", help="every second length, few samples")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--max-kv-len", type=int)
    chosen = parser.parse_args()
    (chosen.output / chosen.name).mkdir(parents=True, exist_ok=True)
    for key, (model, tp) in SUBJECTS.items():
        if chosen.only and (key or "main") not in chosen.only:
            continue
        begin = time.monotonic()
        settings = profiling.settings(chosen.device, model, tp, max_kv_len=chosen.max_kv_len, quick=chosen.quick)
        table = profiling.profile(settings, lambda _: None)
        path = chosen.output / (f"{chosen.name}/{key}.json" if key else f"{chosen.name}.json")
        replace(table, metadata={**table.metadata, "shipped": chosen.name}).save(path)
        print(f"{path}: {table.name}, {time.monotonic() - begin:.0f} s", flush=True)
        if torch.cuda.is_available():
            torch.cuda.empty_cache()


if __name__ == "__main__":
    try:
        main()
    except (ValueError, OSError) as problem:
        sys.exit(f"shipped_tables.py: error: {problem}")
