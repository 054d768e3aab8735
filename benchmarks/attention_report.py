"""What attention.py measured, as a table, as rows over the best of their kernel, and as a plot over shard length.

Run as a script it draws the plot again from a file of results, where matplotlib is installed.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.table import Table

IMAGE = Path(__file__).parents[1] / "docs" / "images" / "attention_shards.png"
BASELINE = "varlen"
SATURATED_Q_LEN, SATURATED = 128, 0.9  # shards from here on should run at this part of their kernel's best
# Okabe and Ito's
COLORS = {"hopper": "#0072B2", "cudnn": "#E69F00", "varlen": "#009E73", "fa4": "#CC79A7", "sdpa": "#D55E00"}
OTHER_COLOR, MARK_COLOR = "#000000", "#999999"


@dataclass(frozen=True, slots=True)
class Result:
    """One kernel on one batch."""

    batch: str
    kernel: str         # as asked for
    runs: str           # as chosen
    rows: int
    pairs: int
    forward_seconds: float
    backward_seconds: float
    forward_tflops: float
    backward_tflops: float
    forward_over_varlen: float | None    # speed over varlen's, where that ran
    backward_over_varlen: float | None
    forward_goal: float | None           # TFLOP/s, where a goal is set for this model and device
    backward_goal: float | None
    forward_reached: bool | None         # the goal, and enough times varlen's speed
    backward_reached: bool | None
    forward_host_seconds: float | None   # until the call returns, the device idle before it; None on a CPU
    backward_host_seconds: float | None
    spread: float              # slowest sample over fastest, the worse of forward and backward
    difference: float | None   # largest relative one of out and gradients from the batch's first kernel


@dataclass(frozen=True, slots=True)
class Failure:
    """A kernel that could not compute a batch."""

    batch: str
    kernel: str
    reason: str


def of_peak(results: list[Result], lengths: dict[str, tuple[int, int]]) -> list[dict[str, Any]]:
    """Rows of the shard-length sweep: each batch's (q_len, kv_len), and each rate over its kernel's best."""
    rows = []
    for row in results:
        same = [other for other in results if other.kernel == row.kernel]
        q_len, kv_len = lengths[row.batch]
        rows.append({"q_len": q_len, "kv_len": kv_len, **asdict(row),
                     "forward_of_peak": row.forward_tflops / max(other.forward_tflops for other in same),
                     "backward_of_peak": row.backward_tflops / max(other.backward_tflops for other in same)})
    return rows


def saturation(rows: list[dict[str, Any]]) -> list[str]:
    """The least part of its best that each kernel reaches from SATURATED_Q_LEN queries on."""
    lines = []
    for kernel in dict.fromkeys(row["kernel"] for row in rows):
        here = [row for row in rows if row["kernel"] == kernel and row["q_len"] >= SATURATED_Q_LEN]
        if here:
            least = [min(row[f"{way}_of_peak"] for row in here) for way in ("forward", "backward")]
            flat = "flat" if min(least) >= SATURATED else "not flat"
            lines.append(f"{kernel}: from {SATURATED_Q_LEN} queries on at least {least[0]:.0%} of its best forward and "
                         f"{least[1]:.0%} backward: {flat}")
    return lines


def result_table(results: list[Result]) -> Table:
    table = Table(title="TFLOP/s", title_justify="left")
    for title in ("batch", "kernel", "runs", "forward", "backward", "goal", f"× {BASELINE}", "ms", "host µs", "spread",
                  "difference"):
        table.add_column(title, justify="left" if title in ("batch", "kernel", "runs") else "right", no_wrap=True)
    for row in results:
        goal = _both(row.forward_goal, row.backward_goal, ".0f")
        if goal:
            goal += f" {'yes' if row.forward_reached else 'no'} / {'yes' if row.backward_reached else 'no'}"
        table.add_row(
            row.batch, row.kernel, row.runs, f"{row.forward_tflops:.3g}", f"{row.backward_tflops:.3g}", goal,
            _both(row.forward_over_varlen, row.backward_over_varlen, ".2f"),
            _both(row.forward_seconds, row.backward_seconds, ".2f", 1e3),
            _both(row.forward_host_seconds, row.backward_host_seconds, ".0f", 1e6),
            f"{row.spread:.2f}", "" if row.difference is None else f"{row.difference:.1e}")
    return table


def _both(forward: float | None, backward: float | None, shape: str, unit: float = 1.0) -> str:
    return "" if forward is None or backward is None else f"{forward * unit:{shape}} / {backward * unit:{shape}}"


def draw_shard_lengths(results: Path, image: Path | None = None) -> str:
    """Throughput against shard length, forward and backward; says what was drawn, or why nothing."""
    again = f"draw them with: python benchmarks/{Path(__file__).name} {results}"
    if importlib.util.find_spec("matplotlib") is None:
        return f"matplotlib is not installed; pip install matplotlib, then {again}"
    from matplotlib.figure import Figure

    content = json.loads(results.read_text(encoding="utf-8"))
    rows = content["rows"]
    if not rows or "q_len" not in rows[0]:
        raise ValueError(f"{results}: no rows over shard length; make them with attention.py --shard-lengths")
    figure = Figure(figsize=(10, 4.2), layout="constrained")
    panels = figure.subplots(1, 2, sharey=True)
    ticks = sorted({row["q_len"] for row in rows})
    for axes, way in zip(panels, ("forward", "backward"), strict=True):
        for kernel in dict.fromkeys(row["kernel"] for row in rows):
            here = [row for row in rows if row["kernel"] == kernel]
            axes.plot([row["q_len"] for row in here], [row[f"{way}_tflops"] for row in here], marker="o",
                      color=COLORS.get(kernel, OTHER_COLOR), label=kernel)
        axes.axvline(SATURATED_Q_LEN, color=MARK_COLOR, linestyle="--", label="saturated from here on (paper)")
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(axis="y", color="#DDDDDD", linewidth=0.6)
        axes.set_xscale("log", base=2)
        axes.set_xticks(ticks, [str(tick) for tick in ticks])
        axes.minorticks_off()
        axes.set_xlabel("queries of the shard")
        axes.set_ylim(bottom=0)
        axes.set_title(way, fontsize=10)
    panels[0].set_ylabel("TFLOP/s")
    panels[1].legend(frameon=False, fontsize=9, loc="lower right")
    figure.suptitle(f"Shards before {rows[0]['kv_len']:,} keys of their own, {content['settings']['model']} on "
                    f"{content['host']['device']}", fontsize=12)
    image = image or (IMAGE if content["settings"]["shrink"] == 1 else results.with_suffix(".png"))
    image.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(image, dpi=120)
    return f"Drawn in {image}."


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Draw throughput against shard length from attention.py's results.")
    parser.add_argument("results", type=Path, help="benchmarks/results/attention_shards_<device>.json")
    parser.add_argument("--image", type=Path, help=f"default: docs/images/{IMAGE.name}")
    try:
        options = parser.parse_args()
        print(draw_shard_lengths(options.results, options.image))
    except (ValueError, OSError) as problem:
        sys.exit(f"attention_report.py: error: {problem}")
