"""Charts of what was measured, from benchmarks/results/*.json; the tables are in docs/reference/measured.md."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from docs.figures.svg import SERIES, Drawing

RESULTS = Path(__file__).parents[2] / "benchmarks/results"
LEFT, WIDTH = 240.0, 328.0                                       # pixels: names, and what is drawn beside them
OF_HEADS = " | 32/8 heads | dim 128"
BATCHES = {f"{case}{OF_HEADS}": said for case, said in {         # case of the results -> name in the chart
    "1 of 32768": "1 document of 32K", "4 of 8192": "4 documents of 8K", "32 of 1024": "32 documents of 1K",
    "8 x q=4096 kv=16384, own keys": "8 shards, q 4,096 of 16K",
    "64 x q=512 kv=16384, own keys": "64 shards, q 512 of 16K",
    "64 x q=128 kv=16384, own keys": "64 shards, q 128 of 16K",
    "plan, median server: 24 tasks": "a plan's median server",
    "plan, most fragmented server: 35 tasks": "its most fragmented"}.items()}


class Range(NamedTuple):
    """Least, median and most of something."""

    name: str
    values: Sequence[float]
    color: str
    beside: tuple[float, float] | None = None                    # another range, drawn in grey


def read(name: str) -> Any:
    return json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))


def kernels() -> str:
    """TFLOP/s of the kernels on whole documents, on shards, and on what a plan's servers get."""
    rows = {row["case"]: row["contestants"] for row in read("kernel_rows_nvidia_h200")["rows"]}
    names = {"hopper": "distca's kernel", "fa4": "FlashAttention-4", "varlen": "torch varlen (FlashAttention-2)"}
    bars = [(said, [[rows[case][kernel][f"{way}_tflops"] for kernel in names] for way in ("forward", "backward")])
            for case, said in BATCHES.items()]
    worst = bars[5][1]
    drawing = Drawing(640, 66 + 44 * len(bars), (
        "Attention kernels on an H200 in TFLOP/s, forward and backward. On 64 shards of 128 queries: "
        + "; ".join(f"{name} {worst[0][number]:.0f} and {worst[1][number]:.0f}"
                    for number, name in enumerate(names.values())) + "."))
    drawing.legend(0, 14, [*zip(SERIES, names.values(), strict=False)])
    for column, way in enumerate(("forward", "backward")):
        left = 172 + column * 240
        drawing.text(left, 44, f"{way}, TFLOP/s", "soft")
        for row, (said, both) in enumerate(bars):
            top = 56 + row * 44
            if not column:
                drawing.text(0, top + 20, said)
            for number, value in enumerate(both[column]):
                drawing.rect(left, top + number * 12, 180 * value / 800, 10, SERIES[number])
                drawing.text(left + 180 * value / 800 + 4, top + number * 12 + 9, f"{value:.0f}", "small soft")
    return drawing.svg()


def over_best() -> str:
    """Simulated speed over the best baseline, beside what the paper has."""
    content, ranges = read("paper"), []
    claims = {(claim["claim"], *claim["setting"].split(", ")[:2]): claim["paper"] for claim in content["claims"]
              if claim["what"] == "disaggregated over WLB-ideal"}
    for figure, said in (("fig9", "no pipeline"), ("fig10", "pipeline")):
        for model in ("llama3-8b", "llama-34b"):
            for data in ("pretrain", "prolong"):
                values = [row["distca"] for row in content["rows"][figure]
                          if (row["model"], row["data"]) == (model, data)]
                theirs = [float(end) for end in re.findall(r"[\d.]+", claims[figure, model, data])]  # one end: "up to"
                ranges.append(Range(f"{model}, {data}, {said}", values, "blue", (min([1.0, *theirs][-2:]), theirs[-1])))
    return _ranges(ranges, (0.9, 1.0, 1.1, 1.2, 1.3, 1.4, 1.5), "× the best baseline's speed",
                   "Simulated speed of distca over the better of variable-length packing and adaptive context "
                   "parallelism", grey="the paper's range; where it says \"up to\", from 1")


def bound() -> str:
    """The share of a bound that no strategy can beat."""
    rows = read("share_of_bound")["rows"]
    ranges = []
    for figure, said, tp in (*(("fig9", "no pipeline", tp) for tp in (1, 2, 4, 8)), ("fig10", "pipeline", 8)):
        shares = [100 * row["share"] for row in rows if (row["figure"], row["tp"]) == (figure, tp)]
        ranges.append(Range(f"{said}, TP {tp}", shares, "green"))
    return _ranges(ranges, (80, 85, 90, 95, 100), "% of the bound's speed",
                   "Simulated speed of distca as a share of a bound that no strategy can beat",
                   form=".1f")


def planner() -> str:
    """Ratios to the planner of the paper's authors."""
    rows, ranges = read("planner")["rows"], []
    for key, said in (("bytes_total", "bytes in all"), ("bytes_sent_max", "busiest sender"),
                      ("bytes_received_max", "busiest receiver"), ("imbalance", "slowest / mean")):
        for placement, color in (("given", "orange"), ("balanced", "blue")):
            values = [row["ratios"][key] for row in rows if row["placement"] == placement]
            ranges.append(Range(f"{said}, {placement}", values, color))
    return _ranges(ranges, (0, 0.25, 0.5, 0.75, 1.0, 1.25, 1.5), "× the reference planner's",
                   f"distca's plans over those of the reference planner, on {len(values)} batches; less is better")


def training() -> str:
    """Tokens per second and the share of the step that its products and attention take alone."""
    content = read("train_gpu")
    rows = []
    for row in content["rows"]:
        way, share = row["way"].replace("compiled, recompute full", "full recompute"), row["model_flops_utilization"]
        rows.append((f"{way}, vocabulary {row['vocab'] // 1000}K", 100 * share,
                     f"{100 * share:.0f} %, {row['tokens_per_second'] / 1e3:.1f}K tokens/s"))
    drawing = Drawing(640, 50 + 26 * len(rows), (
        "Share of the GPU's peak in training steps of 8 layers of llama3-8b on one H200: "
        + "; ".join(f"{name} {said}" for name, _, said in rows) + "."))
    drawing.text(270, 14, "share of the peak (MFU) and speed", "soft")
    for row, (name, share, said) in enumerate(rows):
        drawing.text(0, 40 + 26 * row, name)
        drawing.rect(270, 28 + 26 * row, 230 * share / 70, 16, "blue")
        drawing.text(276 + 230 * share / 70, 40 + 26 * row, said, "soft small")
    return drawing.svg()


def predicted() -> str:
    """Measured and predicted ratios of whole training steps on CPUs."""
    content = read("simulator_cpu")
    pairs = [(row["measured"], row["simulated"]) for row in content["ratios"]]
    drawing = Drawing(640, 330, (
        f"{len(pairs)} ratios of step times, measured and predicted: {100 * content['median_error']:.1f} % apart in "
        f"the median, {100 * content['worst_error']:.0f} % at worst."))
    low, high = 0.8, 1.3
    left, bottom, size = 60.0, 286.0, 260.0

    def at(value: float) -> float:
        return size * (value - low) / (high - low)

    for tick in (0.8, 0.9, 1.0, 1.1, 1.2, 1.3):
        drawing.line(left, bottom - at(tick), left + size, bottom - at(tick))
        drawing.line(left + at(tick), bottom, left + at(tick), bottom - size)
        drawing.text(left - 8, bottom - at(tick) + 4, f"{tick}×", "soft", text_anchor="end")
        drawing.text(left + at(tick), bottom + 18, f"{tick}×", "soft", text_anchor="middle")
    drawing.line(left, bottom, left + size, bottom - size, "axis")
    for measured, simulated in pairs:
        drawing.circle(left + at(measured), bottom - at(simulated), 4, "blue")
    drawing.text(left + size / 2, bottom + 40, "measured ratio of two steps", "soft", text_anchor="middle")
    drawing.text(0, 12, "predicted ratio", "soft")
    drawing.text(left + size + 30, 60, f"{len(pairs)} ratios of training steps", "bold")
    drawing.text(left + size + 30, 82, f"median error {100 * content['median_error']:.1f} %", "soft")
    drawing.text(left + size + 30, 102, f"worst error {100 * content['worst_error']:.0f} %", "soft")
    drawing.text(left + size + 30, 122, "the line: predicted as measured", "soft")
    return drawing.svg()


def _ranges(ranges: Sequence[Range], ticks: tuple[float, ...], unit: str, label: str, grey: str = "",
            form: str = ".2f") -> str:
    """A line a range, from the least to the most, with a mark at the median."""
    low, high = ticks[0], ticks[-1]
    said = "; ".join(f"{one.name}: {_three(one.values)}" for one in ranges)
    drawing = Drawing(640, 76 + 26 * len(ranges) + 22 * bool(grey), f"{label}, least, median and most. {said}.")
    left, width, bottom = LEFT, WIDTH, 30.0 + 26 * len(ranges)

    def x(value: float) -> float:
        return left + width * (value - low) / (high - low)

    drawing.text(left, 14, unit, "soft")
    for tick in ticks:
        drawing.line(x(tick), 24, x(tick), bottom)
        drawing.text(x(tick), bottom + 18, f"{tick:.3g}", "soft", text_anchor="middle")
    for row, one in enumerate(ranges):
        middle = 38.0 + 26 * row
        drawing.text(0, middle + 4, one.name)
        if one.beside:
            drawing.rect(x(one.beside[0]), middle - 9, x(one.beside[1]) - x(one.beside[0]), 18, "grey", opacity="0.45")
        drawing.rect(x(min(one.values)), middle - 4, x(max(one.values)) - x(min(one.values)), 8, one.color, rx=4)
        drawing.circle(x(median(one.values)), middle, 6, one.color)
        drawing.text(left + width + 12, middle + 4, format(median(one.values), form), "bold")
    drawing.text(0, bottom + 18, "dot: median", "soft")
    if grey:
        drawing.legend(0, bottom + 42, [("grey", grey)])
    return drawing.svg()


def _three(values: Sequence[float]) -> str:
    return f"{min(values):.3g}, {median(values):.3g}, {max(values):.3g}"


FIGURES: dict[str, Callable[[], str]] = {
    "chart_kernels": kernels, "chart_over_best": over_best, "chart_bound": bound, "chart_planner": planner,
    "chart_training": training, "chart_predicted": predicted,
}
