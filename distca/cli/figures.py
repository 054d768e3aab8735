"""Turn plans into what the report page shows, and hand pages to files.

The page knows nothing of planning and planning nothing of pages; commands that write one meet here.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from distca.planning.plan import Plan
from distca.report import PlanFigures
from distca.report.page import (
    DocumentFigures,
    MemoryFigures,
    ReportData,
    Spread,
    StrategyFigures,
    Timeline,
    TransferFigures,
    WorkFigures,
    write_page,
)
from distca.report.render import byte_text, seconds_text

PAGE_SUFFIXES = (".html", ".htm")


def page_writer(path: Path, option: str) -> Callable[[ReportData], None]:
    """What writes a page into `path`; refuses before long work what would fail after it."""
    if path.suffix not in PAGE_SUFFIXES:
        raise ValueError(f"{option} is {str(path)!r}; give a file name that ends in {PAGE_SUFFIXES[0]}")
    if not path.parent.is_dir():
        raise ValueError(f"{option} is {str(path)!r} but the folder {str(path.parent)!r} does not exist; create it "
                         "first")

    def write(data: ReportData) -> None:
        try:
            write_page(data, path)
        except OSError as error:
            raise ValueError(f"{option} is {str(path)!r} and cannot be written ({error.strerror}); give a file in a "
                             "folder that you may write to") from None

    return write


def plan_page(figures: PlanFigures, before: Plan, after: Plan) -> ReportData:
    """The page of one batch: its work before and after, what travels, and how its documents were cut."""
    dedicated = figures.servers - figures.ranks
    tp = f", tp {figures.tp}" if figures.tp > 1 else ""
    facts = [
        ("slowest server's work, × mean",
         f"{figures.before.work_max_over_mean:.2f} → {figures.after.work_max_over_mean:.2f}"),
        ("bytes a layer, forward", byte_text(figures.after.bytes_total)),
        ("busiest sender", byte_text(figures.after.bytes_sent_max)),
        ("tasks, of which moved", f"{figures.after.num_tasks:,}, {figures.after.num_moved:,}"),
        ("planning", seconds_text(figures.plan_seconds)),
    ]
    if figures.limit is not None:
        facts.append(("what keeps it above the tolerance", figures.limit))
    if figures.invalid is not None:
        facts.append(("THE PLAN IS NOT VALID", figures.invalid))
    return ReportData(
        title=f"Plan of {figures.source}",
        subtitle=f"{figures.ranks:,} ranks of {figures.tokens_per_rank:,} tokens"
                 f"{f' and {dedicated} dedicated servers' if dedicated else ''}, {figures.num_documents:,} documents, "
                 f"{figures.model}{tp}, {figures.placement} placement, tolerance {figures.tolerance:g}",
        facts=tuple(facts),
        work=work_figures(before, after),
        transfers=transfer_figures(after),
        documents=document_figures(after),
    )


def work_figures(before: Plan, after: Plan) -> WorkFigures:
    return WorkFigures(before.work(), after.work(), "causal pairs" if after.cost is None else "seconds",
                       after.tolerance)


def transfer_figures(plan: Plan) -> TransferFigures:
    """Forward bytes of one layer: queries and keys on their way to a server, outputs on their way back."""
    moved, model, tp = plan.traffic(), plan.model, plan.tp
    return TransferFigures(
        num_ranks=plan.num_servers,
        source=np.concatenate([moved.q_home, moved.q_server, moved.kv_home]),
        destination=np.concatenate([moved.q_server, moved.q_home, moved.kv_server]),
        num_bytes=np.concatenate([moved.q_tokens * model.q_token_bytes(tp), moved.q_tokens * model.out_token_bytes(tp),
                                  moved.kv_tokens * model.kv_token_bytes(tp)]),
        note="one layer, forward, bf16")


def document_figures(plan: Plan) -> DocumentFigures:
    tasks = plan.tasks
    return DocumentFigures(plan.layout.lengths, tasks.document, tasks.q_start, tasks.q_stop, tasks.home, tasks.server)


def comparison_page(
    said: dict[str, Any], where: str, timelines: tuple[Timeline, ...] = (), memory: MemoryFigures | None = None
) -> ReportData:
    """The page of what `distca simulate --json` says; `where` names it in refusals."""
    strategies = comparison_figures(said, where)
    known = [(name, f"{said[name]:,}" if isinstance(said[name], int) else str(said[name]))
             for name in ("model", "cluster", "gpus", "tp", "pp", "context", "data", "batches", "tolerance")
             if name in said]
    return ReportData(
        title="Strategies on the same documents", subtitle=", ".join(f"{name} {value}" for name, value in known),
        comparison=strategies, timelines=timelines, memory=memory)


def comparison_figures(said: dict[str, Any], where: str) -> tuple[StrategyFigures, ...]:
    """The strategies that `distca simulate --json` compares, with the spread over batches where it says one."""
    try:
        found = tuple(_strategy(name, one, said.get("tokens_per_step")) for name, one in said["strategies"].items())
        unknown = {name for one in found for name in one.speedup_over} - said["strategies"].keys()
        if unknown:
            raise KeyError(min(unknown))
        return found
    except (KeyError, TypeError, AttributeError, ValueError, ZeroDivisionError) as error:
        raise ValueError(f"{where}: not a comparison of strategies ({error!r}); give what distca simulate --json "
                         "printed") from None


def _strategy(name: str, one: dict[str, Any], tokens: float | None) -> StrategyFigures:
    speed = float(one["tokens_per_second"])
    low, high = speed, speed
    if tokens and "step_seconds_range" in one:
        high, low = (tokens / float(seconds) for seconds in one["step_seconds_range"])
    ranges = one.get("speedup_range_over", {})
    return StrategyFigures(
        name=name, tokens_per_second=Spread(speed, low, high), step_seconds=float(one["step_seconds"]),
        idle_share=float(one["idle_share"]), exposed_communication_share=float(one["exposed_communication_share"]),
        peak_memory_bytes=1e9 * float(one["peak_memory_gb"]), work_max_over_mean=float(one["work_max_over_mean"]),
        speedup_over={other: Spread(float(ratio), *map(float, ranges.get(other, (ratio, ratio))))
                      for other, ratio in one["speedup_over"].items()})
