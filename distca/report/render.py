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

from distca.report.figures import PlannedBatch, byte_text, over_mean, seconds_text

MAX_BARS = 16
BEFORE_STYLE, AFTER_STYLE = "yellow", "cyan"

_BAR_WIDTH = 22
_PROFILE_WIDTH = 64
_PROFILE_HEIGHT = 4
_EIGHTHS = " ▁▂▃▄▅▆▇█"
_PARTS = "▏▎▍▌▋▊▉█"


def print_plan(batch: PlannedBatch, console: Console, note: str = "") -> None:
    """One batch in full; the note says how it came about."""
    console.print(heading(batch))
    if note:
        console.print(Text(note))
    console.print()
    console.print(comparison(batch))
    console.print("[dim]Bytes are what crosses ranks in one layer's forward pass, in bf16.[/dim]", highlight=False)
    console.print()
    console.print(work_bars(batch) if batch.num_servers <= MAX_BARS else work_profile(batch))
    console.print()
    console.print(Text(verdict(batch)))
    print_warnings(batch, console)


def print_warnings(batch: PlannedBatch, console: Console) -> None:
    """What keeps the plan from its tolerance, or from being one."""
    if batch.plan.limit is not None:
        console.print(Text(f"max/mean stays above 1 + tolerance: {batch.plan.limit}.", style="bold"))
    if batch.invalid is not None:
        console.print(Text(f"THE PLAN IS NOT VALID: {batch.invalid}", style="bold red"))


def heading(batch: PlannedBatch) -> Text:
    return Text.assemble((batch.source, "bold"), f"\n{batch.pool_text}\n{batch.options_text}")


def comparison(batch: PlannedBatch) -> Table:
    before, after = batch.before, batch.after
    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    table.add_column("")
    table.add_column("before", justify="right", style=BEFORE_STYLE)
    table.add_column("after", justify="right", style=AFTER_STYLE)
    table.add_row("slowest server's work, × mean", f"{before.work_max_over_mean:.2f}",
                  f"{after.work_max_over_mean:.2f}")
    for label, value in (("bytes in all", lambda side: side.bytes_total),
                         ("busiest sender", lambda side: side.bytes_sent.max()),
                         ("busiest receiver", lambda side: side.bytes_received.max()),
                         ("all-gather of keys, to compare", lambda side: side.bytes_all_gather)):
        table.add_row(label, byte_text(value(before)), byte_text(value(after)))
    if batch.plan.topology is not None:
        for label, count in (("bytes between nodes, once per node", lambda side: side.bytes_between_nodes),
                             ("busiest node's", lambda side: side.bytes_between_nodes_max),
                             ("of them between pods", lambda side: side.bytes_between_pods),
                             ("busiest pod's", lambda side: side.bytes_between_pods_max)):
            if count(after) is not None:
                table.add_row(label, *("" if (number := count(side)) is None else byte_text(number)
                                       for side in (before, after)))
    table.add_row("tasks, of which moved", *(f"{side.num_tasks:,}, {side.num_moved:,}" for side in (before, after)))
    table.add_row("smallest shard", "", f"{after.smallest_shard:,} tokens")
    if after.seconds is not None and batch.backward.seconds is not None:
        table.add_row("attention of a layer, forward", seconds_text(before.work.max()), seconds_text(after.seconds))
        table.add_row("backward, by its own plan", "", seconds_text(batch.backward.seconds))
    if batch.exchange_seconds is not None:
        table.add_row("exchange of the busiest rank", "", seconds_text(batch.exchange_seconds))
    table.add_row("planning", "", seconds_text(batch.plan_seconds))
    return table


def work_bars(batch: PlannedBatch) -> Table:
    """One line per server. Lengths are comparable across both columns, numbers are each column's own × mean."""
    longest = max(batch.before.work.max(), batch.after.work.max(), np.finfo(float).tiny)
    columns = []
    for side, style in ((batch.before, BEFORE_STYLE), (batch.after, AFTER_STYLE)):
        ratio = over_mean(side.work)
        columns.append([
            Text.assemble((f"{_bar(work / longest):<{_BAR_WIDTH}}", style), f" {times:5.2f}")
            for work, times in zip(side.work.tolist(), ratio.tolist(), strict=True)])
    table = Table(box=None, pad_edge=False, padding=(0, 3, 0, 0))
    table.add_column("work per server", no_wrap=True)
    table.add_column(f"before, × mean{'':{_BAR_WIDTH - 8}}", no_wrap=True)
    table.add_column(f"after, × mean{'':{_BAR_WIDTH - 7}}", no_wrap=True)
    for server in range(batch.num_servers):
        owns_tokens = server < batch.num_ranks
        table.add_row(f"rank {server}" if owns_tokens else f"dedicated {server}",
                      columns[0][server] if owns_tokens else "", columns[1][server])
    return table


def work_profile(batch: PlannedBatch) -> RenderableType:
    """Work over all servers in rank order, and its spread in numbers."""
    longest = max(batch.before.work.max(), batch.after.work.max(), np.finfo(float).tiny)
    spread = Table(box=None, pad_edge=False)
    for title in ("work, × mean", "min", "10 %", "median", "90 %", "max"):
        spread.add_column(title, justify="left" if title.startswith("work") else "right")
    parts: list[RenderableType] = []
    for name, side, style in (("before", batch.before, BEFORE_STYLE), ("after", batch.after, AFTER_STYLE)):
        width = min(len(side.work), _PROFILE_WIDTH)
        parts.append(Text(f"{name}: work per server, rank 0 to {len(side.work) - 1}"))
        parts.extend(Text(line, style=style) for line in _profile(side.work / longest, width))
        spread.add_row(name, *(f"{q:.2f}" for q in np.quantile(over_mean(side.work), (0, 0.1, 0.5, 0.9, 1))))
    group = -(-batch.num_servers // _PROFILE_WIDTH)
    note = f"A column is the busiest of up to {group} servers." if group > 1 else "A column is one server."
    return Group(*parts, Text(note, style="dim"), Text(), spread)


def verdict(batch: PlannedBatch) -> str:
    """What the numbers mean, in a sentence or two."""
    before, after = batch.before, batch.after
    if after.num_moved == 0 and before.work_max_over_mean <= 1 + batch.plan.tolerance:
        return (f"The slowest rank does {before.work_max_over_mean:.2f}× the mean work, inside the tolerance: "
                "no query has to move.")
    share = after.work.max() / before.work.max()
    return (f"The slowest rank did {before.work_max_over_mean:.2f}× the mean work; now the slowest server does "
            f"{after.work_max_over_mean:.2f}×. Core attention takes {share:.0%} of the time it took, if what travels "
            f"(at most {byte_text(after.bytes_sent.max())} a layer from one rank) hides behind other work.")


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
