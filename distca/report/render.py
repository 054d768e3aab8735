"""Print plans and comparisons of strategies on a terminal, within 80 columns.

Up to 16 servers each get a bar. With more servers, a column shows the busiest of a group of neighbours, because all
ranks wait for the busiest.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import zip_longest

import numpy as np
from rich.box import SIMPLE_HEAD
from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from distca.report.figures import (
    PlannedBatch,
    byte_text,
    count_text,
    over_mean,
    seconds_text,
    strategies_of,
    verdict,
)
from distca.report.planned_batches import PlannedBatches, quantile_words, verdict_on_batch
from distca.simulate.outcomes import Comparison
from distca.simulate.strategies import STRATEGIES
from distca.validation import unit_text
from distca.workload.sequences import CorpusFigures

MAX_BARS = 16
BEFORE_STYLE, AFTER_STYLE = "yellow", "cyan"
COLUMNS_NOTE = (
    "[dim]idle: share of the time in which ranks compute nothing. exposed: how much shorter the step would be if links "
    "took no time. memory: of the fullest GPU at its peak. work: attention seconds of the slowest rank, × mean. "
    "distca and disaggregated share attention over all GPUs; the others but the bound are baselines.[/dim]")
BYTES_NOTE = (
    "[dim]before: no balancing, every query on its own rank. after: by the plan. bytes: what crosses ranks in one "
    "layer's forward pass, in bf16. tasks: pieces of attention; moved: computed on another rank.[/dim]")

_BAR_WIDTH = 22
_PROFILE_WIDTH = 64
_PROFILE_HEIGHT = 4
_EIGHTHS = " ▁▂▃▄▅▆▇█"
_PARTS = "▏▎▍▌▋▊▉█"


def print_plan(batch: PlannedBatch, console: Console, note: str = "") -> None:
    """Print one batch in full; `note` says how the batch was made."""
    console.print(Text.assemble((batch.source, "bold"), f"\n{batch.pool_text}\n{batch.options_text}"))
    if note:
        console.print(Text(note))
    _print_verdict(batch, verdict_on_batch(batch), console)
    console.print(plan_table(batch))
    console.print(BYTES_NOTE, highlight=False)
    console.print()
    console.print(_work(batch))


def _work(batch: PlannedBatch) -> RenderableType:
    return work_bars(batch) if batch.num_servers <= MAX_BARS else work_profile(batch)


def _print_verdict(batch: PlannedBatch, words: str, console: Console) -> None:
    """Print the verdict, and why the plan exceeds its tolerance or is not valid."""
    console.print(Text(f"\n{words}", style="bold"))
    if batch.plan.limit is not None:
        console.print(Text(f"max/mean stays above 1 + tolerance: {batch.plan.limit}.", style="bold"))
    if batch.invalid is not None:
        console.print(Text(f"THE PLAN IS NOT VALID: {batch.invalid}", style="bold red"))


def _table(titles: Sequence[str], styles: Sequence[str] = (), title: str | None = None) -> Table:
    """Make an empty table with a left-aligned first column and right-aligned others."""
    table = Table(box=SIMPLE_HEAD, pad_edge=False, title=title, title_justify="left")
    for at, (name, style) in enumerate(zip_longest(titles, styles)):
        table.add_column(name, justify="right" if at else "left", style=style)
    return table


def plan_table(batch: PlannedBatch) -> Table:
    before, after = batch.before, batch.after
    table = _table(("", "before", "after"), ("", BEFORE_STYLE, AFTER_STYLE))
    table.add_row("slowest server's work, × mean", *(f"{side.work_max_over_mean:.2f}" for side in (before, after)))
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
    """Draw one bar per server, before and after, on the same scale; numbers are relative to their column's mean."""
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
    """Draw work over all servers in rank order, with its quantiles."""
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


def print_batches(planned: PlannedBatches, console: Console) -> None:
    """Print the result of `distca plan`: one batch in full, or the mean and the worst of several."""
    if not planned.is_dealt:
        print_plan(planned.shown, console, planned.note)
        return
    shown = planned.shown
    pool = shown.pool_text.rsplit(", ", 1)[0]  # without the documents, which differ from batch to batch
    console.print(Text.assemble((planned.source, "bold"), f"\n{planned.note}\n{pool}\n{shown.options_text}"))
    _print_verdict(shown, planned.verdict(), console)
    console.print()
    if planned.corpus is not None:
        words = ", ".join(f"{name} {length:,}" for name, length in quantile_words(planned.corpus))
        console.print(Text(f"Lengths: {words}"))
        console.print(corpus_table(planned.corpus))
    console.print(batches_table(planned))
    console.print(BYTES_NOTE, highlight=False)
    console.print(f"\nBatch {planned.shown_number}, the worst before planning:", highlight=False)
    console.print(_work(shown))


def corpus_table(corpus: CorpusFigures) -> Table:
    """Tabulate the shares of tokens and of attention in documents of at least some lengths."""
    table = _table(("documents of at least", "documents", "of tokens", "of attention"))
    for one in corpus.long_documents:
        if one.documents:
            table.add_row(f"{unit_text(one.least)} tokens", f"{one.documents:,}", f"{one.token_share:.1%}",
                          f"{one.attention_share:.1%}")
    if not table.rows:
        table.add_row("8K tokens", "none", "", "")
    return table


def batches_table(planned: PlannedBatches) -> Table:
    number = count_text(len(planned.batches), "batch", "batches")
    table = _table((number, "before, mean", "worst", "after, mean", "worst"),
                   ("", BEFORE_STYLE, BEFORE_STYLE, AFTER_STYLE, AFTER_STYLE))

    def both(name: str | None, text: Callable[[float], str]) -> tuple[str, str]:
        if name is None:
            return "", ""
        column = planned.column(name)
        return text(float(column.mean())), text(float(column.max()))

    entries: tuple[tuple[str, str | None, str, Callable[[float], str]], ...] = (
        ("slowest server's work, × mean", "work_max_over_mean_before", "work_max_over_mean", "{:.2f}".format),
        ("bytes in all", "bytes_total_before", "bytes_total", byte_text),
        ("busiest sender", None, "bytes_sent_max", byte_text),
        ("busiest receiver", None, "bytes_received_max", byte_text),
        ("planning", None, "plan_seconds", seconds_text))
    for label, before, after, text in entries:
        table.add_row(label, *both(before, text), *both(after, text))
    return table


def print_comparison(comparison: Comparison, console: Console) -> None:
    """Print the verdict first, then the table of strategies, what its columns mean, and the choice of each."""
    first = comparison.setting
    stages = ", ".join(sorted({str(outcome.setting.pp) for outcome in comparison.outcomes}))
    experts = "" if first.model.experts is None else f"ep {first.ep}, "
    console.print(Text.assemble(
        (f"{first.model.name} on {first.gpus:,} GPUs of {first.cluster.name}", "bold"),
        f"\n{comparison.source}, context {first.context:,}, {first.num_tokens:,} tokens a step\ntp {first.tp}, "
        f"{experts}pp {stages}, {count_text(comparison.num_batches, 'batch', 'batches')}, tolerance "
        f"{comparison.tolerance}"))
    if words := verdict(strategies_of(comparison)):
        console.print(Text(f"\n{words}", style="bold"))
    if comparison.too_large:
        console.print(Text(f"Too large for the memory: {', '.join(comparison.too_large)}.", style="bold"))
    table = _table(("", "tokens/s", "step", "idle", "exposed", "memory", "work"))
    for outcome in comparison.entries:
        table.add_row(outcome.name, f"{outcome.tokens_per_second:,.0f}", seconds_text(outcome.step_seconds),
                      f"{outcome.idle_share:.1%}", f"{outcome.exposed_communication_share:.1%}",
                      byte_text(1e9 * outcome.peak_memory_gb), f"{outcome.work_max_over_mean:.2f}")
    console.print(table)
    console.print(COLUMNS_NOTE, highlight=False)
    console.print()
    if any(STRATEGIES[outcome.name].is_baseline for outcome in comparison.outcomes):
        console.print(_ratios(comparison))
    console.print("What each settled on:")
    for outcome in comparison.outcomes:
        console.print(Text(f"{outcome.name}: {outcome.describe()}", style="dim"))


def _ratios(comparison: Comparison) -> Table:
    """Tabulate the speedup of our strategies over each baseline: the mean, and the range over the batches.

    Baselines are the entries and ours the columns, which fit 80 columns with their whole names. Without a strategy of
    ours the best baseline is the only column.
    """
    baselines = [outcome for outcome in comparison.outcomes if STRATEGIES[outcome.name].is_baseline]
    ours = [outcome for outcome in comparison.entries if outcome not in baselines] or [
        min(baselines, key=lambda outcome: outcome.step_seconds)]
    table = _table(("", *(one.name for one in ours)), title="times as fast as (range over the batches)")
    for other in baselines:
        table.add_row(other.name, *(
            f"{ratio:.2f} ({low:.2f}-{high:.2f})" for ratio, low, high in (one.speedup_over(other) for one in ours)))
    return table


def _bar(share: float) -> str:
    eighths = round(share * _BAR_WIDTH * 8)
    whole, part = divmod(eighths, 8)
    return "█" * whole + (_PARTS[part - 1] if part else "") or _PARTS[0] * (share > 0)


def _profile(shares: np.ndarray, width: int) -> list[str]:
    """Draw lines of block characters, top first; each column is the largest share of its group of servers."""
    first = np.arange(width) * len(shares) // width
    height = np.ceil(np.maximum.reduceat(shares, first) * _PROFILE_HEIGHT * 8).astype(int)
    return ["".join(_EIGHTHS[min(max(int(eighths) - 8 * line, 0), 8)] for eighths in height)
            for line in reversed(range(-(-int(height.max()) // 8)))]
