"""Does the simulator tell what really happens? On CPU ranks whole training steps, on a GPU each rank's attention.

`--cpu` (the default) trains a small decoder in several ways on 1, 2 and 4 ranks, as far as each has a core to itself,
simulates the very same step plans with costs measured once on this machine, and compares ratios of step times; see
training_steps.py. Nothing else may run: what is predicted are a few per cent.

`--gpu` replays the attention batches of simulated pools of 64 and 512 GPUs on one GPU and puts predictions beside; see
attention_replay.py. `--predict FILE` makes the predictions again from its measurements and the shipped tables; see
attention_prediction.py.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

import attention_prediction
import attention_replay
import torch
from common import num_cores
from outputs import RESULTS, host_facts, wide_console
from rich.console import Console
from rich.table import Table

from distca.models import model_named

if TYPE_CHECKING:
    from training_steps import Result



def cpu_table(results: Sequence[Result]) -> Table:
    table = Table(title="a step, measured and simulated", title_justify="left")
    for title in ("ranks", "variant", "measured s", "simulated s", "host s", "over home", "simulated", "error"):
        table.add_column(title, justify="left" if title == "variant" else "right", no_wrap=True)
    for row in results:
        ratio = row.over(next(one for one in results if one.ranks == row.ranks))
        table.add_row(str(row.ranks), row.variant, f"{row.step_seconds:.2f}", f"{row.simulated_seconds:.2f}",
                      f"{row.host_seconds:.2f}", f"{ratio.measured:.2f}", f"{ratio.simulated:.2f}",
                      f"{100 * ratio.error:.0f} %")
    return table


def on_cpu(arguments: argparse.Namespace, console: Console) -> dict[str, Any]:
    from host_costs import MODEL  # these need what training needs; --gpu does not
    from training_steps import ratios, run_on_cpu

    host = host_facts()
    machine, launches, results = run_on_cpu(arguments)
    console.print(cpu_table(results))
    pairs = ratios(results)
    errors = [pair.error for pair in pairs]
    difference = max(abs(one.loss - other.loss) for one in results for other in results if one.ranks == other.ranks)
    console.print(f"{len(pairs)} ratios between variants: median error {100 * median(errors):.1f} %, worst "
                  f"{100 * max(errors):.1f} %; losses differ by at most {difference:.1e}")
    options = {name: getattr(arguments, name) for name in ("ranks", "tokens", "short", "micro_batches", "rounds")}
    return {
        "mode": "cpu", "host": host, "options": options, "model": asdict(MODEL),
        "machine": {name: value for name, value in asdict(machine).items() if name != "table"},
        "launches": {ranks: asdict(one) for ranks, one in launches.items()},
        "rows": [asdict(one) for one in results],
        "ratios": [asdict(pair) | {"error": pair.error} for pair in pairs],
        "median_error": median(errors), "worst_error": max(errors), "largest_loss_difference": difference}


# ----------------------------------------------------------------------------------------------------------------- gpu


def gpu_table(rows: Sequence[dict[str, Any]]) -> Table:
    table = Table(title="attention of a rank's batch: absolute errors, median / worst", title_justify="left")
    facts = ("GPUs", "context", "direction", "batches", "ranks", "ms", "TFLOP/s")
    for title in (*facts, *attention_prediction.PREDICTORS):
        table.add_column(title, justify="left" if title == "direction" else "right", no_wrap=True)
    for row in rows:
        name = [str(row[key] or "all") for key in ("gpus", "context", "direction")]
        table.add_row(*name, str(row["num_batches"]), str(row["num_ranks"]), f"{1e3 * row['median_seconds']:.2f}",
                      f"{row['tflops']:.0f}",
                      *(f"{100 * row[one]['median_error']:.1f} / {100 * row[one]['worst_error']:.1f} %"
                        for one in attention_prediction.PREDICTORS))
    return table


def predicted(console: Console, content: dict[str, Any]) -> dict[str, Any]:
    """Predictions beside the measurements of `content`, which stay as they are."""
    model, tp = model_named(content["options"]["model"]), content["options"]["tp"]
    replays = attention_prediction.predict(content)
    rows = attention_prediction.summary(replays, model, tp)
    console.print(gpu_table(rows))
    return content | {"mode": "gpu", "table": attention_prediction.TABLE, "summary": rows,
                      "replays": [asdict(one) for one in replays]}


def device_named(name: str) -> torch.device:
    if name == "cuda" and not torch.cuda.is_available():
        raise ValueError("device is 'cuda' but torch finds no GPU; give --device cpu --tiny to try it out")
    return torch.device(name)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    mode = parser.add_mutually_exclusive_group()
    mode.add_argument("--cpu", action="store_true", help="training steps on CPU ranks, the default")
    mode.add_argument("--gpu", action="store_true", help="replay attention batches on one GPU")
    mode.add_argument("--predict", type=Path, help="make --gpu's predictions again from its JSON")
    parser.add_argument("--json", type=Path, help="default: benchmarks/results/simulator_<mode>.json")
    parser.add_argument("--ranks", type=int, nargs="+", default=[ranks for ranks in (1, 2, 4) if ranks <= num_cores()],
                        help="--cpu: as many as have a core each; by default 1, 2 and 4")
    parser.add_argument("--tokens", type=int, default=8_192, help="per rank and micro-batch")
    parser.add_argument("--short", type=int, default=256)
    parser.add_argument("--micro-batches", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=3, help="timed steps of each variant")
    parser.add_argument("--budget-seconds", type=float, default=120.0, help="--gpu measures no longer than this")
    parser.add_argument("--measure-only", action="store_true", help="--gpu without predictions, which need no GPU")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--kernel", default="auto", help="--gpu")
    parser.add_argument("--tiny", action="store_true", help="--gpu with sizes for a CPU")
    chosen = parser.parse_args()
    if chosen.tokens % (4 * chosen.short) or chosen.tokens < 4 * chosen.short:
        parser.error(f"--tokens is {chosen.tokens}; give a multiple of four times --short, {chosen.short}")
    return chosen


def main() -> None:
    chosen = arguments()
    console = wide_console()
    output = chosen.json or RESULTS / f"simulator_{'gpu' if chosen.gpu or chosen.predict else 'cpu'}.json"
    if chosen.predict:
        content = predicted(console, json.loads(chosen.predict.read_text(encoding="utf-8")))
    elif chosen.gpu:
        scale = attention_replay.TINY if chosen.tiny else attention_replay.FULL
        measured = attention_replay.measure(
            output, device=device_named(chosen.device), kernel_name=chosen.kernel, model_name="llama3-8b", tp=8,
            scale=scale, budget_seconds=chosen.budget_seconds)
        content = measured if chosen.measure_only else predicted(console, measured)
    else:
        content = on_cpu(chosen, console)
    output.parent.mkdir(parents=True, exist_ok=True)
    output.write_text(json.dumps(content) + "\n", encoding="utf-8")  # on one line: thousands of batches
    console.print(f"Written to {output}.")


if __name__ == "__main__":
    try:
        main()
    except (ValueError, OSError) as problem:
        sys.exit(f"simulator.py: error: {problem}")
