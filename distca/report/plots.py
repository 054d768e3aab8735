"""Plot a plan: work per server before and after planning, and the bytes that each rank sends for it.

Colours are from the Okabe–Ito palette, which colour-blind readers can distinguish. A few servers get bars side by side;
many get outlines over rank, which stay legible at hundreds.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from distca.report.figures import PlannedBatch

BEFORE_COLOR, AFTER_COLOR = "#E69F00", "#0072B2"
TOLERANCE_COLOR = "#000000"
MAX_BARS = 40

_BAR_WIDTH = 0.4
_BYTE_UNITS = ((1e9, "GB"), (1e6, "MB"), (1e3, "kB"), (1.0, "B"))


def save_plot(batch: PlannedBatch, path: str | Path) -> None:
    """Write the picture; the format follows the file's suffix."""
    draw(batch).savefig(path, dpi=120)


def draw(batch: PlannedBatch) -> Figure:
    figure = Figure(figsize=(10, 6), layout="constrained")
    top, bottom = figure.subplots(2, 1, sharex=True, height_ratios=(3, 2))
    _draw_work(top, batch)
    _draw_bytes(bottom, batch)
    for axes in (top, bottom):
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(axis="y", color="#DDDDDD", linewidth=0.6)
        axes.set_axisbelow(True)
        axes.margins(x=0.01)
    bottom.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=12, min_n_ticks=1))
    dedicated = batch.num_servers - batch.num_ranks
    bottom.set_xlabel("rank" if not dedicated else f"rank (the last {dedicated} are dedicated servers)")
    figure.suptitle(
        f"{batch.num_ranks:,} ranks of {batch.tokens_per_rank:,} tokens, {batch.plan.model.name}, "
        f"{batch.placement} placement: slowest server {batch.before.work_max_over_mean:.2f}× → "
        f"{batch.after.work_max_over_mean:.2f}× the mean", fontsize=12)
    return figure


def _draw_work(axes: Axes, batch: PlannedBatch) -> None:
    unit = batch.before.work.mean()
    _series(axes, batch.before.work / unit, batch.after.work / unit, batch.num_servers)
    mean = batch.after.work.mean() / unit
    axes.axhline(mean, color=TOLERANCE_COLOR, linewidth=1.0, label="mean after")
    axes.axhline(mean * (1 + batch.plan.tolerance), color=TOLERANCE_COLOR, linewidth=1.0, linestyle="--",
                 label=f"mean + {batch.plan.tolerance:.0%} tolerance")
    axes.set_ylabel("attention work, × mean before")
    handles = {label: handle for handle, label in zip(*axes.get_legend_handles_labels(), strict=True)}
    names = sorted(handles, key=lambda label: label.startswith("mean"))
    axes.legend([handles[name] for name in names], names, loc="lower right", ncols=4, frameon=False,
                bbox_to_anchor=(1.0, 1.0), borderaxespad=0.2)


def _draw_bytes(axes: Axes, batch: PlannedBatch) -> None:
    before, after = batch.before.bytes_sent, batch.after.bytes_sent
    largest = max(before.max(), after.max())
    unit, name = next(((unit, name) for unit, name in _BYTE_UNITS if largest >= unit), _BYTE_UNITS[-1])
    _series(axes, before / unit, after / unit, batch.num_servers)
    axes.set_ylabel(f"{name} sent per layer")
    by_node, topology = batch.after.bytes_sent_by_node, batch.plan.topology
    if by_node is not None and topology is not None:
        share = by_node / np.bincount(topology.node)             # of each of a node's ranks
        axes.stairs(share[topology.node] / unit, np.arange(batch.num_servers + 1) - 0.5, color=TOLERANCE_COLOR,
                    linewidth=1.0, label="to other nodes, a rank of the node")
        axes.legend(loc="upper right", frameon=False)


def _series(axes: Axes, before: np.ndarray, after: np.ndarray, servers: int) -> None:
    """Draw both sides over rank; there may be fewer ranks before than servers after."""
    if servers <= MAX_BARS:
        axes.bar(np.arange(len(before)) - _BAR_WIDTH / 2, before, _BAR_WIDTH, color=BEFORE_COLOR, label="before")
        axes.bar(np.arange(len(after)) + _BAR_WIDTH / 2, after, _BAR_WIDTH, color=AFTER_COLOR, label="after")
        return
    for values, color, label in ((before, BEFORE_COLOR, "before"), (after, AFTER_COLOR, "after")):
        axes.stairs(values, np.arange(len(values) + 1) - 0.5, fill=True, color=color, linewidth=0, label=label)
    axes.stairs(before, np.arange(len(before) + 1) - 0.5, color=BEFORE_COLOR, linewidth=0.4)  # visible where lower
