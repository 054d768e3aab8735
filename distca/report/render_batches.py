"""Show on a terminal what planning does to a corpus: its lengths, the mean and the worst batch, within 80 columns."""

from __future__ import annotations

from collections.abc import Callable

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text

from distca.report.figures import byte_text, count_text, seconds_text
from distca.report.planned_batches import PlannedBatches, quantile_words
from distca.report.render import (
    AFTER_STYLE,
    BEFORE_STYLE,
    MAX_BARS,
    print_plan,
    print_warnings,
    work_bars,
    work_profile,
)
from distca.units import unit_text
from distca.workload.distribution import CorpusFigures


def print_batches(planned: PlannedBatches, console: Console) -> None:
    """The whole answer of `distca plan`: one batch in full, or what several say."""
    if not planned.is_dealt:
        print_plan(planned.shown, console, planned.note)
        return
    shown = planned.shown
    pool = shown.pool_text.rsplit(", ", 1)[0]  # without the documents, which differ from batch to batch
    console.print(Text.assemble((planned.source, "bold"), f"\n{planned.note}\n{pool}\n{shown.options_text}"))
    console.print()
    if planned.corpus is not None:
        words = ", ".join(f"{name} {length:,}" for name, length in quantile_words(planned.corpus))
        console.print(Text(f"Lengths: {words}"))
        console.print(corpus_table(planned.corpus))
    console.print(batches_table(planned))
    console.print("[dim]Bytes are what crosses ranks in one layer's forward pass, in bf16.[/dim]", highlight=False)
    console.print(f"\nBatch {planned.shown_number}, the worst before planning:", highlight=False)
    console.print(work_bars(shown) if shown.num_servers <= MAX_BARS else work_profile(shown))
    console.print()
    console.print(Text(planned.verdict()))
    print_warnings(shown, console)


def corpus_table(corpus: CorpusFigures) -> Table:
    """Where the attention is."""
    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    for title in ("documents of at least", "documents", "of tokens", "of attention"):
        table.add_column(title, justify="left" if title.endswith("least") else "right")
    for one in corpus.long_documents:
        if one.documents:
            table.add_row(f"{unit_text(one.least)} tokens", f"{one.documents:,}", f"{one.token_share:.1%}",
                          f"{one.attention_share:.1%}")
    if not table.rows:
        table.add_row("8K tokens", "none", "", "")
    return table


def batches_table(planned: PlannedBatches) -> Table:
    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    table.add_column(count_text(len(planned.batches), "batch", "batches"))
    for title, style in (("before, mean", BEFORE_STYLE), ("worst", BEFORE_STYLE), ("after, mean", AFTER_STYLE),
                         ("worst", AFTER_STYLE)):
        table.add_column(title, justify="right", style=style)

    def both(name: str | None, text: Callable[[float], str]) -> tuple[str, str]:
        if name is None:
            return "", ""
        column = planned.column(name)
        return text(float(column.mean())), text(float(column.max()))

    rows: tuple[tuple[str, str | None, str, Callable[[float], str]], ...] = (
        ("slowest server's work, × mean", "work_max_over_mean_before", "work_max_over_mean", "{:.2f}".format),
        ("bytes in all", "bytes_total_before", "bytes_total", byte_text),
        ("busiest sender", None, "bytes_sent_max", byte_text),
        ("busiest receiver", None, "bytes_received_max", byte_text),
        ("planning", None, "plan_seconds", seconds_text))
    for label, before, after, text in rows:
        table.add_row(label, *both(before, text), *both(after, text))
    return table
