"""Draw what we find for each figure of the DistCA paper, with the paper's own figures in grey beside it.

Takes plain rows and marks, so that drawing knows neither the simulator nor the paper. Colours are from the Okabe–Ito
palette, and forms of ours keep theirs over all figures.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, PercentFormatter

Row = Mapping[str, Any]
Rows = Sequence[Row]

BLUE, ORANGE, GREEN, VERMILION, BLACK = "#0072B2", "#E69F00", "#009E73", "#D55E00", "#000000"
SERIES_COLORS = (BLUE, ORANGE, GREEN, VERMILION)
PAPER_COLOR = "#999999"
_BAR = 0.38


def save_plots(rows: Mapping[str, Rows], marks: Mapping[str, Any], folder: Path) -> list[Path]:
    """One PNG for every figure that has rows; `marks` are the paper's figures."""
    written = []
    for name, here in rows.items():
        figure = _DRAWN[name](here, marks)
        path = folder / f"{name}.png"
        figure.savefig(path, dpi=120)
        written.append(path)
    return written


def _panels(title: str, num_rows: int = 1, num_columns: int = 2, height: float = 4.2) -> tuple[Figure, list[Axes]]:
    figure = Figure(figsize=(10, height * num_rows), layout="constrained")
    panels = list(np.ravel(figure.subplots(num_rows, num_columns)))
    for axes in panels:
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(axis="y", color="#DDDDDD", linewidth=0.6)
        axes.set_axisbelow(True)
    figure.suptitle(title, fontsize=12)
    return figure, panels


def _legend(axes: Axes, **options: Any) -> None:
    axes.legend(frameon=False, fontsize=9, **options)


def _doubling(axes: Axes, ticks: Sequence[int], label: str) -> None:
    axes.set_xscale("log", base=2)
    axes.set_xticks(ticks, [f"{tick:,}" for tick in ticks])
    axes.set_xlabel(label)
    axes.minorticks_off()


def _paper_points(axes: Axes, x: Sequence[float], y: Sequence[float]) -> None:
    axes.plot(x, y, linestyle="none", marker="X", markersize=9, color=PAPER_COLOR, label="paper", zorder=3)


def _fig3(rows: Rows, marks: Mapping[str, Any]) -> Figure:
    figure, (left, right) = _panels("Per-document context parallelism: what gathering keys takes")
    nodes = [row["nodes"] for row in rows]
    left.plot(nodes, [row["gather_share"] for row in rows], color=BLUE, marker="o", label="all-gather of keys")
    left.plot(nodes, [row["gather_and_scatter_share"] for row in rows], color=ORANGE, marker="s",
              label="and reduce-scatter of their gradients")
    right.plot(nodes, [row["kv_memory_share"] for row in rows], color=BLUE, marker="o", label="gathered keys")
    for axes, name, label in ((left, "gather", "share of the step"), (right, "kv_memory", "share of the memory")):
        _paper_points(axes, (nodes[0], nodes[-1]), marks[name])
        axes.set_ylabel(label)
        axes.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
        axes.set_ylim(bottom=0)
        _doubling(axes, nodes, "nodes")
        _legend(axes, loc="upper left")
    return figure


def _fig4(rows: Rows, marks: Mapping[str, Any]) -> Figure:
    figure, (left, right) = _panels("Variable-length chunks at 512K: waiting, and memory that diverges")
    for data, color, marker in zip(_values(rows, "data"), SERIES_COLORS, "os", strict=False):
        here = [row for row in rows if row["data"] == data and row["attention_idle_share"] is not None]
        for axes, field in ((left, "attention_idle_share"), (right, "activations_max_over_mean")):
            axes.plot([row["dp"] for row in here], [row[field] for row in here], color=color, marker=marker, label=data)
    _paper_points(left, list(marks["idle"]), list(marks["idle"].values()))
    left.set_ylabel("share of attention time spent waiting")
    left.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
    left.set_ylim(0, 1)
    right.set_ylabel("activations of the fullest replica, × mean")
    right.set_ylim(bottom=1)
    for axes in (left, right):
        _doubling(axes, sorted({row["dp"] for row in rows}), "replicas (DP)")
        _legend(axes, loc="upper left")
    return figure


def _fig5(rows: Rows, marks: Mapping[str, Any]) -> Figure:
    figure, (axes,) = _panels(f"Attention throughput of one shard before {rows[0]['kv_len']:,} keys, as measured",
                              num_columns=1)
    q_len = [row["q_len"] for row in rows]
    for way, color, marker in (("forward", BLUE, "o"), ("backward", ORANGE, "s")):
        axes.plot(q_len, [row[f"{way}_tflops"] for row in rows], color=color, marker=marker, label=way)
    axes.axvline(marks["saturated_q_len"], color=PAPER_COLOR, linestyle="--", label="saturated from here on (paper)")
    axes.set_ylabel("TFLOP/s")
    axes.set_ylim(bottom=0)
    _doubling(axes, q_len, "queries of the shard")
    _legend(axes, loc="lower right")
    return figure


def _speed(figure_name: str, title: str, rows: Rows, marks: Mapping[str, Any]) -> Figure:
    models, kinds = _values(rows, "model"), _values(rows, "data")
    figure, panels = _panels(title, len(models), len(kinds), height=3.9)
    shown = [row for row in rows if row["distca"] is not None]
    top = max(max(row["distca"] / row["distca_of_bound"], row["distca"], row["disaggregated"]) for row in shown)
    for axes, (model, data) in zip(panels, [(model, data) for model in models for data in kinds], strict=True):
        here = [row for row in shown if (row["model"], row["data"]) == (model, data)]
        at = np.arange(len(here))
        low, high = marks["speed"][figure_name, model, data]
        axes.axhspan(low, high, color=PAPER_COLOR, alpha=0.35, linewidth=0, zorder=0.5, label="paper's range")
        for shift, name, color in ((-_BAR / 2, "disaggregated", ORANGE), (_BAR / 2, "distca", BLUE)):
            axes.bar(at + shift, [row[name] - 1 for row in here], _BAR, bottom=1, color=color, label=name)
        axes.plot(at, [row["distca"] / row["distca_of_bound"] for row in here], linestyle="none", marker="_",
                  markersize=16, markeredgewidth=2, color=BLACK, label="bound")
        axes.axhline(1.0, color=BLACK, linewidth=0.8)
        axes.set_ylim(min(1.0, *(min(row["disaggregated"], row["distca"]) for row in shown)) - 0.03, 1.04 * top)
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:.1f}×"))
        axes.set_xticks(at, [f"{row['context'] // 1024}K\n{row['nodes']}" for row in here], fontsize=8)
        axes.set_title(f"{model}, {data}", fontsize=10)
    panels[-1].set_xlabel("context / nodes")
    panels[0].set_ylabel("speed over WLB-ideal")
    _legend(panels[0], loc="upper left", ncols=2)
    return figure


def _fig11(rows: Rows, marks: Mapping[str, Any]) -> Figure:
    figure, (left, right) = _panels("Hiding communication: step time over that of ping-pong")
    settings = list(dict.fromkeys((row["model"], row["nodes"]) for row in rows))
    at = np.arange(len(settings))
    low, high = marks["single_stream"]
    for axes, field, title in ((left, "single_stream_over", "single stream"),
                               (right, "one_byte_over", "transfers of one byte")):
        for shift, placement, name, color in ((-_BAR / 2, "given", "disaggregated", ORANGE),
                                              (_BAR / 2, "balanced", "distca", BLUE)):
            values = [row[field] for row in rows if row["placement"] == placement]
            axes.bar(at + shift, [value - 1 for value in values], _BAR, bottom=1, color=color, label=name)
        axes.axhline(1.0, color=BLACK, linewidth=0.8)
        axes.set_xticks(at, [f"{model}\n{nodes} nodes" for model, nodes in settings], fontsize=9)
        axes.set_title(title, fontsize=10)
    left.axhspan(1 + low, 1 + high, color=PAPER_COLOR, alpha=0.35, linewidth=0, zorder=0.5, label="paper's range")
    right.axhline(1.0, color=PAPER_COLOR, linewidth=5, alpha=0.6, zorder=0.5, label="paper: equal")
    left.set_ylabel("step time, × ping-pong")
    left.set_ylim(1.0, max(1 + high, *(row["single_stream_over"] for row in rows)) + 0.06)
    right.set_ylim(min(0.94, *(row["one_byte_over"] for row in rows)) - 0.01, 1.03)
    for axes in (left, right):
        _legend(axes, loc="upper center", ncols=3)
    return figure


def _fig12(rows: Rows, marks: Mapping[str, Any]) -> Figure:
    figure, (left, right) = _panels("What more imbalance saves, and costs")
    settings = list(dict.fromkeys((row["model"], row["nodes"]) for row in rows))
    for (model, nodes), color in zip(settings, SERIES_COLORS, strict=False):
        for placement, line in (("given", "-"), ("balanced", "--")):
            here = [row for row in rows if (row["model"], row["nodes"], row["placement"]) == (model, nodes, placement)]
            for axes, field in ((left, "bytes_over"), (right, "seconds_over")):
                axes.plot([row["tolerance"] for row in here], [row[field] for row in here], line, color=color,
                          marker="o", markersize=4,
                          label=f"{model}, {nodes} nodes" if placement == "given" else None)
    low, high = marks["fewer_bytes"]
    tolerance = marks["tolerance"]
    left.plot([tolerance] * 2, [1 - high, 1 - low], color=PAPER_COLOR, linewidth=7, label="paper", zorder=3)
    right.plot([0, tolerance], [1, 1], color=PAPER_COLOR, linewidth=7, alpha=0.6, label="paper", zorder=0)
    left.set_ylabel("bytes, × those at tolerance 0")
    right.set_ylabel("step time, × that at tolerance 0")
    left.set_ylim(0, 1.05)
    for axes in (left, right):
        axes.plot([], [], "--", color=BLACK, label="dashed: balanced placement")
        axes.set_xlabel("tolerance")
    _legend(left, loc="lower left")
    _legend(right, loc="upper left")
    return figure


def _app_a(rows: Rows, marks: Mapping[str, Any]) -> Figure:
    figure, (axes,) = _panels("Shards of a document whose communication stays hidden", num_columns=1)
    here = [row for row in rows if row["tp"] == 1]
    at = np.arange(len(here))
    drawn = axes.bar(at, [row["shards"] for row in here], _BAR, color=BLUE, label="ours")
    axes.bar_label(drawn, fmt="%.0f", padding=2)
    _paper_points(axes, [at[[row["model"] for row in here].index(name)] + 0.75 * _BAR for name in marks["shards"]],
                  list(marks["shards"].values()))
    axes.set_xticks(at, [row["model"] for row in here])
    axes.set_ylabel("shards")
    axes.margins(x=0.4, y=0.15)
    _legend(axes, loc="upper left")
    return figure


def _memory(rows: Rows, marks: Mapping[str, Any]) -> Figure:
    figure, (left, right) = _panels("Memory of ours on every rank")
    for name, color, shift in (("disaggregated", ORANGE, -_BAR / 2), ("distca", BLUE, _BAR / 2)):
        here = [row for row in rows if row["strategy"] == name]
        at = np.arange(len(here)) + shift
        left.plot(at, [row["activations_max_over_min"] for row in here], linestyle="none", marker="o", markersize=4,
                  color=color, label=name)
        right.bar(at, [row["buffers_of_activations"] for row in here], _BAR, color=color, label=name)
    left.set_ylim(0.9, 1.1)
    left.set_ylabel("activations, fullest over emptiest rank of a stage")
    right.axhline(marks["buffers"], color=BLACK, linestyle="--", linewidth=1, label="aim")
    right.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
    right.set_ylabel("exchange buffers, share of activations")
    for axes in (left, right):
        axes.set_xlabel("settings of fig9, then of fig10")
        _legend(axes, loc="upper left", bbox_to_anchor=(0, 0.92))
    return figure


def _values(rows: Rows, field: str) -> list[str]:
    return list(dict.fromkeys(row[field] for row in rows))


_DRAWN: dict[str, Callable[[Rows, Mapping[str, Any]], Figure]] = {
    "fig3": _fig3, "fig4": _fig4, "fig5": _fig5,
    "fig9": lambda rows, marks: _speed("fig9", "Without a pipeline", rows, marks),
    "fig10": lambda rows, marks: _speed("fig10", "With a pipeline", rows, marks),
    "fig11": _fig11, "fig12": _fig12, "appA": _app_a, "memory": _memory,
}
