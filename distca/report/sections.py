"""Sections of a page that show a plan or a step: work, transfers, documents and memory of every rank, and all batches.

A section is text and controls as HTML, and a payload that the script draws. Everything that a chart shows is also in a
text or a table, for readers who cannot see the chart or use a pointer. Data that grows with the square of the ranks or
with the documents is reduced here, and the section says so.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape

import numpy as np

from distca.planning.tasks import TaskTable
from distca.report.figures import BatchColumns, byte_text, count_text, over_mean

MAX_CELLS = 128        # edge of the matrix of transfers
MAX_COLUMNS = 2048     # bars; with more ranks, a bar is the largest of several neighbours
MAX_DOCUMENTS = 40     # documents drawn
MAX_PIECES = 800       # pieces of documents drawn
NUM_LARGEST = 10       # pairs of ranks listed

Facts = Sequence[tuple[str, str]]  # names and values


@dataclass(frozen=True, slots=True, eq=False)
class Section:
    key: str
    title: str
    body: str
    payload: object = None


def detail_section(title: str, text: str, facts: Facts) -> Section:
    """Open the part of the page about one batch or one step, with figures of its own."""
    return Section("detail", title, f"<p>{escape(text)}</p>{fact_list(facts)}")


def batches_section(batches: BatchColumns) -> Section:
    number, before, after = len(batches.before), batches.before, batches.after
    words = ("The slowest rank's work in every batch, before planning and after. "
             f"Batch {batches.shown}, the worst before planning, is shown in full below.")
    entries = [[str(i + 1), f"{batches.documents[i]:,}", f"{before[i]:.2f}", f"{after[i]:.2f}",
                byte_text(batches.num_bytes[i])] for i in range(number)]
    entries.append(["mean", f"{batches.documents.mean():,.0f}", f"{before.mean():.2f}", f"{after.mean():.2f}",
                    byte_text(batches.num_bytes.mean())])
    heads = ("batch", "documents", "work before, max/mean", "after", "bytes a layer, forward")
    body = (f"<p>{words}</p>{chart('batches', words, height=260)}"
            f"<details><summary>The numbers as a table</summary>{table(heads, entries, 'All batches')}</details>")
    return Section("batches", f"All {count_text(number, 'batch', 'batches')}", body, {
        "before": short_numbers(before), "after": short_numbers(after), "shown": batches.shown})


def work_section(before: np.ndarray, after: np.ndarray, *, unit: str, tolerance: float) -> Section:
    """Show [ranks] work before planning and [servers] after it, in `unit`."""
    words = (f"The busiest of {len(before):,} ranks did {over_mean(before).max():.2f} times the mean; after planning "
             f"the busiest of {len(after):,} servers does {over_mean(after).max():.2f} times the mean. All wait for "
             "the busiest.")
    order = select("work-order", "Order", (("rank", "by rank"), ("size", "largest first")))
    group = -(-len(after) // MAX_COLUMNS)
    payload = {"before": short_numbers(_largest(before, group)), "after": short_numbers(_largest(after, group)),
               "unit": unit, "group": group, "mean": short_numbers([before.mean(), after.mean()]),
               "tolerance": tolerance}
    drawn = chart("work", f"Attention work per server. {words}")
    return Section("work", "Work per server", f"<p>{words}</p>{controls(order)}{drawn}{numbers('work')}", payload)


def transfers_section(
    source: np.ndarray, destination: np.ndarray, num_bytes: np.ndarray, *, size: int,
    what: str = "one layer, forward, bf16",
) -> Section:
    """Show bytes by source and destination; entries with the same source and destination are added up."""
    distinct, where = np.unique(source * size + destination, return_inverse=True)
    num_bytes = np.bincount(where, weights=num_bytes, minlength=len(distinct))
    source, destination = distinct // size, distinct % size
    sent = np.bincount(source, weights=num_bytes, minlength=size)
    received = np.bincount(destination, weights=num_bytes, minlength=size)
    group = -(-size // MAX_CELLS)
    cells = -(-size // group)
    matrix = np.zeros((cells, cells))
    np.add.at(matrix, (source // group, destination // group), num_bytes)
    largest = np.argsort(-num_bytes, kind="stable")[:NUM_LARGEST]
    words = f"{byte_text(sent.sum())} cross ranks ({what})."
    if sent.sum():
        words += (f" Rank {sent.argmax()} sends most, {byte_text(sent.max())}; rank {received.argmax()} receives most, "
                  f"{byte_text(received.max())}.")
    if group > 1:
        words += f" A cell stands for {group} × {group} ranks."
    view = select("transfers-view", "Show", (("matrix", "who sends to whom"), ("ranks", "sent and received by rank")))
    pairs = table(("from rank", "to rank", "bytes"),
                  [[str(source[i]), str(destination[i]), byte_text(num_bytes[i])] for i in largest],
                  "The largest transfers")
    body = (f"<p>{escape(words)}</p>{controls(view)}{chart('transfers', words, height=480)}"
            f"<details><summary>The {len(largest)} largest transfers</summary>{pairs}</details>{numbers('transfers')}")
    columns = -(-size // MAX_COLUMNS)
    payload = {"matrix": [short_numbers(line) for line in matrix], "group": group, "size": size,
               "columnGroup": columns, "sent": short_numbers(_largest(sent, columns)),
               "received": short_numbers(_largest(received, columns))}
    return Section("transfers", "Who sends to whom", body, payload)


def documents_section(lengths: np.ndarray, tasks: TaskTable) -> Section:
    num_documents = len(lengths)
    pieces = np.bincount(tasks.document, minlength=num_documents)
    away = tasks.home != tasks.server
    moved = np.bincount(tasks.document, weights=away, minlength=num_documents) > 0
    order = np.argsort(-lengths, kind="stable")
    shown = order[: max(1, min(MAX_DOCUMENTS, int((np.cumsum(pieces[order]) <= MAX_PIECES).sum())))]
    bar = np.full(num_documents, -1)                             # [documents] bar of the chart, -1 if not drawn
    bar[shown] = np.arange(len(shown))
    drawn = np.flatnonzero(bar[tasks.document] >= 0)
    drawn = drawn[np.lexsort((tasks.q_start[drawn], bar[tasks.document[drawn]]))][:MAX_PIECES]
    sub_bar, num_sub_bars = _sub_bars(tasks.document[drawn], tasks.q_start[drawn], tasks.q_stop[drawn])
    words = (f"{count_text(num_documents, 'document')}, {int((pieces > 1).sum()):,} of them in more than one piece and "
             f"{int(moved.sum()):,} with queries computed away from home.")
    if len(shown) < num_documents:
        words += f" The {len(shown)} longest are drawn."
    if num_sub_bars.max(initial=1) > 1:
        words += " Pieces below each other are the same queries with different keys."
    colour = select("documents-color", "Colour", (
        ("moved", "at home or moved"), ("server", "by server"), ("home", "by home")))
    payload = {
        "documents": shown.tolist(), "lengths": lengths[shown].tolist(),
        "row": bar[tasks.document[drawn]].tolist(), "start": tasks.q_start[drawn].tolist(),
        "stop": tasks.q_stop[drawn].tolist(), "home": tasks.home[drawn].tolist(),
        "server": tasks.server[drawn].tolist(), "level": sub_bar.tolist(), "levels": num_sub_bars.tolist()}
    height = 90 + 15 * max(len(shown), 8)
    body = (f"<p>{words}</p>{controls(colour)}{chart('documents', 'How documents were cut. ' + words, height=height)}"
            f"{numbers('documents')}")
    return Section("documents", "How documents were cut", body, payload)


def _sub_bars(document: np.ndarray, start: np.ndarray, stop: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the sub-bar of each piece and the number of sub-bars of its document: pieces with the same queries and
    different keys are drawn below each other."""
    sub_bar = np.zeros(len(document), dtype=np.int64)
    ends: list[int] = []
    for i in range(len(document)):
        if i == 0 or document[i] != document[i - 1]:
            ends = []
        free = next((number for number, end in enumerate(ends) if end <= start[i]), len(ends))
        ends[free:free + 1] = [int(stop[i])]
        sub_bar[i] = free
    most = np.zeros(int(document.max(initial=0)) + 1, dtype=np.int64)
    np.maximum.at(most, document, sub_bar + 1)
    return sub_bar, most[document]


def memory_section(kinds: Mapping[str, np.ndarray], capacity_bytes: float | None = None) -> Section:
    """Show [ranks] bytes of each kind."""
    total = np.sum(list(kinds.values()), axis=0)
    words = (f"The fullest rank is {total.argmax()} with {byte_text(total.max())}, the emptiest has "
             f"{byte_text(total.min())}.")
    if capacity_bytes is not None:
        words += f" A rank holds {byte_text(capacity_bytes)}."
    group = -(-len(total) // MAX_COLUMNS)
    fullest = np.array([first + total[first:first + group].argmax() for first in range(0, len(total), group)])
    payload = {"kinds": list(kinds), "bytes": [short_numbers(part[fullest]) for part in kinds.values()],
               "ranks": fullest.tolist(), "capacity": capacity_bytes}
    body = f"<p>{words}</p>{chart('memory', 'Memory per rank by kind. ' + words)}{numbers('memory')}"
    return Section("memory", "Memory per rank", body, payload)


def chart(key: str, alternative: str, height: int = 340) -> str:
    return (f'<div class="chart" id="chart-{key}" role="img" aria-label="{escape(alternative)}" '
            f'style="height:{height}px"></div>')


def numbers(key: str, summary: str = "The numbers as a table") -> str:
    """Leave room for a table that the script fills when it is opened."""
    return f'<details data-table="{key}"><summary>{summary}</summary>{scrolling("", f"Numbers: {key}")}</details>'


def select(key: str, label: str, options: Sequence[tuple[str, str]]) -> str:
    choices = "".join(f'<option value="{value}">{escape(text)}</option>' for value, text in options)
    return f'<label class="field">{label} <select id="{key}">{choices}</select></label>'


def controls(content: str) -> str:
    return f'<div class="controls">{content}</div>'


def fact_list(facts: Facts) -> str:
    items = "".join(f"<div><dt>{escape(name)}</dt><dd>{escape(value)}</dd></div>" for name, value in facts)
    return f"<dl>{items}</dl>" if facts else ""


def table(
    heads: Sequence[str], entries: Sequence[Sequence[str]], label: str, notes: Mapping[str, str] | None = None,
    kinds: Mapping[str, str] | None = None,
) -> str:
    """Make a table that scrolls by itself. By the first cell of a line, `notes` explain it and `kinds` colour it."""
    head = "".join(f'<th scope="col">{escape(text)}</th>' for text in heads)
    lines = []
    for first, *rest in entries:
        note = f"<small>{escape((notes or {})[first])}</small>" if first in (notes or {}) else ""
        kind = f' class="{(kinds or {})[first]}"' if first in (kinds or {}) else ""
        cells = "".join(f"<td>{escape(text)}</td>" for text in rest)
        lines.append(f'<tr{kind}><th scope="row">{escape(first)}{note}</th>{cells}</tr>')
    return scrolling(f"<table><thead><tr>{head}</tr></thead><tbody>{''.join(lines)}</tbody></table>", label)


def scrolling(content: str, label: str) -> str:
    """Make a region that the arrow keys scroll once it has the focus."""
    return f'<div class="table" tabindex="0" role="group" aria-label="{escape(label)}">{content}</div>'


def _largest(values: np.ndarray, group: int) -> np.ndarray:
    """Maximum over each group of `group` neighbours."""
    return np.maximum.reduceat(values, np.arange(0, len(values), group)) if group > 1 else values


def short_numbers(values: np.ndarray | Sequence[float]) -> list[float | None]:
    """Round to six digits, more than a chart shows; non-finite values become null."""
    return [float(f"{value:.6g}") if np.isfinite(value) else None for value in np.asarray(values, dtype=float).tolist()]
