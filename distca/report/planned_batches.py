"""Several batches of one corpus, planned: the mean and the worst of them, and what the whole corpus looks like.

One batch says little about a corpus: whether it holds the rare long document decides everything. Figures of all batches
are kept, and one of them is shown in full, the one whose slowest rank was furthest above the mean before planning.

Show on a terminal what planning does to a corpus: its lengths, the mean and the worst batch, within 80 columns.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text

from distca.report.figures import PlannedBatch, ReportData, byte_text, count_text, plan_page, seconds_text
from distca.report.render import (
    AFTER_STYLE,
    BEFORE_STYLE,
    MAX_BARS,
    print_plan,
    print_warnings,
    work_bars,
    work_profile,
)
from distca.report.render import verdict as verdict_of_one
from distca.validation import unit_text
from distca.workload.sequences import CorpusFigures

FIELDS: dict[str, Callable[[PlannedBatch], float]] = {
    "work_max_over_mean_before": lambda batch: batch.before.work_max_over_mean,
    "work_max_over_mean": lambda batch: batch.after.work_max_over_mean,
    "bytes_total_before": lambda batch: batch.before.bytes_total,
    "bytes_total": lambda batch: batch.after.bytes_total,
    "bytes_sent_max": lambda batch: batch.after.bytes_sent.max(),
    "bytes_received_max": lambda batch: batch.after.bytes_received.max(),
    "plan_seconds": lambda batch: batch.plan_seconds,
}


@dataclass(frozen=True, slots=True)
class BatchFigures:
    """What is kept of one of many batches."""

    documents: int
    is_valid: bool
    slowest_before: float      # work of the slowest, in the plan's unit
    slowest: float
    figures: dict[str, float]  # by the names of FIELDS

    @classmethod
    def of(cls, batch: PlannedBatch) -> BatchFigures:
        return cls(batch.plan.layout.num_documents, batch.invalid is None, float(batch.before.work.max()),
                   float(batch.after.work.max()), {name: float(figure(batch)) for name, figure in FIELDS.items()})


@dataclass(frozen=True, slots=True, eq=False)
class PlannedBatches:
    """One batch or several. The corpus is None for what is no corpus; `is_dealt` says that the batches are a sample of
    it, of which means make sense."""

    source: str
    note: str                  # how the batches came about
    corpus: CorpusFigures | None
    is_dealt: bool
    batches: tuple[BatchFigures, ...]
    shown: PlannedBatch        # the worst before planning
    shown_number: int          # from 1

    @classmethod
    def of(
        cls, planned: Iterable[PlannedBatch], source: str, *, note: str = "", corpus: CorpusFigures | None = None,
        is_dealt: bool = False,
    ) -> PlannedBatches:
        """Plans are large: of all but the worst only figures are kept."""
        batches: list[BatchFigures] = []
        shown: tuple[int, PlannedBatch] | None = None
        for number, batch in enumerate(planned, 1):
            batches.append(BatchFigures.of(batch))
            if shown is None or _badness(batch) > _badness(shown[1]):
                shown = number, batch
        assert shown is not None, "there is at least one batch"
        return cls(source, note, corpus, is_dealt, tuple(batches), shown[1], shown[0])

    def column(self, name: str) -> np.ndarray:
        """[batches] one of FIELDS."""
        return np.array([batch.figures[name] for batch in self.batches])

    @property
    def are_valid(self) -> bool:
        return all(batch.is_valid for batch in self.batches)

    def as_json(self) -> dict[str, Any]:
        """The shown batch, key by key; where there are more, all of them under `batches`, and the `corpus`."""
        said: dict[str, Any] = self.shown.as_json() | {"valid": self.are_valid}
        if self.is_dealt:
            said["batches"] = {
                "count": len(self.batches), "shown": self.shown_number,
                "mean": {name: float(self.column(name).mean()) for name in FIELDS},
                "worst": {name: float(self.column(name).max()) for name in FIELDS},
                "each": [{"documents": batch.documents, **batch.figures} for batch in self.batches]}
        if self.corpus is not None:
            said["corpus"] = self.corpus.as_json()
        return said

    def page(self) -> ReportData:
        """The page of the shown batch, which opens with what all of them say."""
        data = plan_page(self.shown)
        facts = () if self.corpus is None else _corpus_facts(self.corpus)
        words = [data.subtitle, self.note.rstrip(".")]
        if self.is_dealt:
            words.append(f"Shown is batch {self.shown_number}, the worst before planning")
        subtitle = "".join(f"{one}. " for one in words if one).rstrip()
        return replace(data, title=f"Plan of {self.source}", subtitle=subtitle if self.note else data.subtitle,
                       verdict=self.verdict(), facts=(*data.facts, *facts))

    def verdict(self) -> str:
        """What the figures mean, in a sentence or two."""
        if not self.is_dealt:
            return verdict_of_one(self.shown)
        before, after = self.column("work_max_over_mean_before"), self.column("work_max_over_mean")
        time = sum(batch.slowest for batch in self.batches) / sum(batch.slowest_before for batch in self.batches)
        return (f"The slowest rank did {before.mean():.2f}× the mean work, {before.max():.2f}× in the worst of "
                f"{count_text(len(before), 'batch', 'batches')}; now the slowest server does {after.mean():.2f}×, "
                f"{after.max():.2f}× at worst. Core attention takes {time:.0%} of the time it took, if what travels "
                f"(at most {byte_text(self.column('bytes_sent_max').max())} a layer from one rank) hides behind other "
                "work.")


def quantile_words(corpus: CorpusFigures) -> list[tuple[str, int]]:
    """The quantiles as people call them, and the longest."""
    names = [(f"{100 * level:g} %" if level != 0.5 else "median", length) for level, length in corpus.quantiles]
    return [*names, ("longest", corpus.longest)]


def _badness(batch: PlannedBatch) -> tuple[bool, float]:
    """A plan that failed its proof is worse than any; then the imbalance before planning counts."""
    return batch.invalid is not None, batch.before.work_max_over_mean


def _corpus_facts(corpus: CorpusFigures) -> tuple[tuple[str, str], ...]:
    words = ", ".join(f"{name} {length:,}" for name, length in quantile_words(corpus))
    return (("corpus", f"{corpus.documents:,} documents, {corpus.tokens:,} tokens"), ("document length", words),
            *((f"attention in documents of {unit_text(one.least)} or more",
               f"{one.attention_share:.0%}, of tokens {one.token_share:.0%}")
              for one in corpus.long_documents if one.documents))


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
