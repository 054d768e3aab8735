"""Show a plan on a terminal: what it was, what it is, and what that means, within 80 columns.

Up to 16 servers each get a bar. Beyond that one column stands for a group of neighbours and shows the busiest of
them, because the busiest is what everybody waits for.
"""

from __future__ import annotations

import numpy as np
from rich.box import SIMPLE_HEAD
from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from distca.report import PlanFigures, Side

MAX_BARS = 16
BEFORE_STYLE, AFTER_STYLE = "yellow", "cyan"

_BAR_WIDTH = 22
_PROFILE_WIDTH = 64
_PROFILE_HEIGHT = 4
_EIGHTHS = " ▁▂▃▄▅▆▇█"
_PARTS = "▏▎▍▌▋▊▉█"
_UNITS = ((1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB"))


def print_plan(figures: PlanFigures, console: Console) -> None:
    """The whole answer of `distca plan`."""
    console.print(heading(figures))
    console.print()
    console.print(comparison(figures))
    console.print("[dim]Bytes are what crosses ranks in one layer's forward pass, in bf16.[/dim]", highlight=False)
    console.print()
    console.print(work_bars(figures) if figures.servers <= MAX_BARS else work_profile(figures))
    console.print()
    console.print(Text(verdict(figures)))
    if figures.limit is not None:
        console.print(Text(f"max/mean stays above 1 + tolerance: {figures.limit}.", style="bold"))
    if figures.invalid is not None:
        console.print(Text(f"THE PLAN IS NOT VALID: {figures.invalid}", style="bold red"))


def heading(figures: PlanFigures) -> Text:
    dedicated = figures.servers - figures.ranks
    servers = f" and {dedicated} dedicated server{'s' * (dedicated > 1)}" if dedicated else ""
    tp = f", tp {figures.tp}" if figures.tp > 1 else ""
    return Text.assemble(
        (figures.source, "bold"),
        f"\n{_count(figures.ranks, 'rank')} of {figures.tokens_per_rank:,} tokens{servers}, "
        f"{_count(figures.num_documents, 'document')}\n{figures.model}{tp}, {figures.placement} placement, "
        f"tolerance {figures.tolerance:g}")


def comparison(figures: PlanFigures) -> Table:
    before, after = figures.before, figures.after
    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    table.add_column("")
    table.add_column("before", justify="right", style=BEFORE_STYLE)
    table.add_column("after", justify="right", style=AFTER_STYLE)
    table.add_row("slowest server's work, × mean", f"{before.work_max_over_mean:.2f}",
                  f"{after.work_max_over_mean:.2f}")
    for label, value in (("bytes in all", lambda side: side.bytes_total),
                         ("busiest sender", lambda side: side.bytes_sent_max),
                         ("busiest receiver", lambda side: side.bytes_received_max),
                         ("all-gather of keys, to compare", lambda side: side.bytes_all_gather)):
        table.add_row(label, byte_text(value(before)), byte_text(value(after)))
    table.add_row("tasks, of which moved", *(f"{side.num_tasks:,}, {side.num_moved:,}" for side in (before, after)))
    table.add_row("smallest shard", "", f"{figures.smallest_shard:,} tokens")
    if (seconds := figures.seconds) is not None:
        table.add_row("attention of a layer, forward", seconds_text(before.work.max()), seconds_text(seconds.forward))
        table.add_row("backward, by its own plan", "", seconds_text(seconds.backward))
        if seconds.exchange is not None:
            table.add_row("exchange of the busiest rank", "", seconds_text(seconds.exchange))
    table.add_row("planning", "", seconds_text(figures.plan_seconds))
    return table


def work_bars(figures: PlanFigures) -> Table:
    """One line per server. Lengths are comparable across both columns, numbers are each column's own × mean."""
    longest = max(figures.before.work.max(), figures.after.work.max(), np.finfo(float).tiny)
    columns = []
    for side, style in ((figures.before, BEFORE_STYLE), (figures.after, AFTER_STYLE)):
        ratio = _over_mean(side)
        columns.append([
            Text.assemble((f"{_bar(work / longest):<{_BAR_WIDTH}}", style), f" {times:5.2f}")
            for work, times in zip(side.work.tolist(), ratio.tolist(), strict=True)])
    table = Table(box=None, pad_edge=False, padding=(0, 3, 0, 0))
    table.add_column("work per server", no_wrap=True)
    table.add_column(f"before, × mean{'':{_BAR_WIDTH - 8}}", no_wrap=True)
    table.add_column(f"after, × mean{'':{_BAR_WIDTH - 7}}", no_wrap=True)
    for server in range(figures.servers):
        owns_tokens = server < figures.ranks
        table.add_row(f"rank {server}" if owns_tokens else f"dedicated {server}",
                      columns[0][server] if owns_tokens else "", columns[1][server])
    return table


def work_profile(figures: PlanFigures) -> RenderableType:
    """Work over all servers in rank order, and its spread in numbers."""
    longest = max(figures.before.work.max(), figures.after.work.max(), np.finfo(float).tiny)
    spread = Table(box=None, pad_edge=False)
    for title in ("work, × mean", "min", "10 %", "median", "90 %", "max"):
        spread.add_column(title, justify="left" if title.startswith("work") else "right")
    parts: list[RenderableType] = []
    for name, side, style in (("before", figures.before, BEFORE_STYLE), ("after", figures.after, AFTER_STYLE)):
        width = min(len(side.work), _PROFILE_WIDTH)
        parts.append(Text(f"{name}: work per server, rank 0 to {len(side.work) - 1}"))
        parts.extend(Text(line, style=style) for line in _profile(side.work / longest, width))
        spread.add_row(name, *(f"{q:.2f}" for q in np.quantile(_over_mean(side), (0, 0.1, 0.5, 0.9, 1))))
    group = -(-figures.servers // _PROFILE_WIDTH)
    note = f"A column is the busiest of up to {group} servers." if group > 1 else "A column is one server."
    return Group(*parts, Text(note, style="dim"), Text(), spread)


def verdict(figures: PlanFigures) -> str:
    """What the numbers mean, in a sentence or two."""
    before, after = figures.before, figures.after
    if after.num_moved == 0 and before.work_max_over_mean <= 1 + figures.tolerance:
        return (f"The slowest rank does {before.work_max_over_mean:.2f}× the mean work, inside the tolerance: "
                "no query has to move.")
    share = after.work.max() / before.work.max()
    return (f"The slowest rank did {before.work_max_over_mean:.2f}× the mean work; now the slowest server does "
            f"{after.work_max_over_mean:.2f}×. Core attention takes {share:.0%} of the time it took, if what travels "
            f"(at most {byte_text(after.bytes_sent_max)} a layer from one rank) hides behind other work.")


def byte_text(count: float) -> str:
    for unit, name in _UNITS:
        if count >= unit:
            return f"{count / unit:.3g} {name}" if count < 1000 * unit else f"{count / unit:,.0f} {name}"
    return f"{count:.0f} B"


def seconds_text(seconds: float) -> str:
    return f"{seconds:.2f} s" if seconds >= 1 else f"{seconds * 1e3:.3g} ms"


def _count(number: int, noun: str) -> str:
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def _over_mean(side: Side) -> np.ndarray:
    mean = side.work.mean()
    return side.work / mean if mean > 0 else np.ones_like(side.work)


def _bar(share: float) -> str:
    eighths = round(share * _BAR_WIDTH * 8)
    whole, part = divmod(eighths, 8)
    return "█" * whole + (_PARTS[part - 1] if part else "") or _PARTS[0] * (share > 0)


def _profile(shares: np.ndarray, width: int) -> list[str]:
    """Rows of block characters, top first; each column is the largest share of its group of servers."""
    first = np.arange(width) * len(shares) // width
    level = np.ceil(np.maximum.reduceat(shares, first) * _PROFILE_HEIGHT * 8).astype(int)
    return ["".join(_EIGHTHS[min(max(int(eighths) - 8 * row, 0), 8)] for eighths in level)
            for row in reversed(range(-(-int(level.max()) // 8)))]
