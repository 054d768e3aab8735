"""The drawings that explain why packed attention straggles, and what moving it does: all from real plans."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np

import distca
from distca.baselines import at_home
from distca.planning.plan import Plan
from distca.simulate.costs import Costs
from distca.simulate.execute import execute
from distca.trace import StepTrace
from docs.figures.svg import Drawing

MODEL = distca.model_named("llama3-8b")
LENGTHS = [8192, 4096, 4096, *[2048] * 4, *[512] * 16]            # four rows of 8,192 tokens
COLORS = ("orange", "sky", "green", "purple")                    # of ranks
PANEL = 144.0


def squares() -> str:
    """Equal tokens, unequal work: the mask of every rank's row."""
    plan = at_home(distca.pack(LENGTHS, ranks=4), MODEL)
    work = plan.work() / 1e6
    drawing = Drawing(640, 268, (
        "Four ranks hold 8,192 tokens each: one document, two, four and sixteen. The shaded triangles are the pairs of "
        f"queries and keys that attention computes: {_pairs(work)} million."))
    for rank in range(4):
        left = rank * (PANEL + 20)
        count = int(np.count_nonzero(plan.layout.rank == rank))
        _heading(drawing, left, rank, f"{count} document{'s' * (count > 1)}")
        drawing.rect(left, 50, PANEL, PANEL, "wait")
        _masks(drawing, plan, rank, left, 50.0, row=True)
        drawing.text(left, 50 + PANEL + 20, f"{work[rank]:.1f} million pairs", "bold")
        drawing.rect(left, 50 + PANEL + 30, PANEL * work[rank] / work.max(), 8, COLORS[rank])
    drawing.text(0, 264, "Bars: the time that attention takes. All ranks wait for rank 0.", "soft")
    return drawing.svg()


def shares() -> str:
    """The same batch, planned: what every server computes."""
    plan = distca.plan(distca.pack(LENGTHS, ranks=4), model=MODEL)
    work, summary = plan.work() / 1e6, plan.summary()
    queries = np.bincount(plan.tasks.server, plan.tasks.q_len).max()
    height, most = PANEL * queries / LENGTHS[0], LENGTHS[0] * (LENGTHS[0] + 1) / 2e6  # the long document's
    drawing = Drawing(640, round(height) + 146, (
        f"The same four rows, planned. The servers compute {_pairs(work)} million pairs, at most "
        f"{summary.work_max_over_mean:.2f} times the mean. Pieces of the long document lie on all of them; "
        f"{summary.bytes_total / 1e6:.0f} MB travel in one layer's forward pass."))
    for server in range(4):
        left = server * (PANEL + 20)
        _heading(drawing, left, server, f"{np.count_nonzero(plan.tasks.server == server)} tasks")
        drawing.rect(left, 50, PANEL, height, "wait")
        _masks(drawing, plan, server, left, 50.0, row=False)
        drawing.text(left, 50 + height + 20, f"{work[server]:.1f} million pairs", "bold")
        drawing.rect(left, 50 + height + 30, PANEL * work[server] / most, 8, "grey")
    drawing.text(0, 50 + height + 66, "Colour: the rank on which the queries live.", "soft")
    drawing.legend(0, 50 + height + 88, [(color, f"rank {rank}") for rank, color in enumerate(COLORS)])
    return drawing.svg()


def growth() -> str:
    """How far the slowest rank is behind, by the number of ranks, before and after."""
    pools, seeds = (2, 4, 8, 16, 32, 64, 128, 256, 512), range(9)
    before, after = (np.empty((len(pools), len(seeds))) for _ in range(2))
    for row, ranks in enumerate(pools):
        for seed in seeds:
            layout = distca.pack(distca.sample_lengths("prolong", ranks * 65_536, seed=seed), ranks=ranks)
            summary = distca.plan(layout, model=MODEL).summary()
            before[row, seed], after[row, seed] = summary.work_max_over_mean_at_home, summary.work_max_over_mean
    drawing = Drawing(640, 320, (
        "The slowest rank's attention over the mean, by ranks. In order the median grows from "
        f"{np.median(before[0]):.1f} at 2 ranks to {np.median(before[-1]):.1f} at 512; planned it stays below "
        f"{np.ceil(100 * after.max()) / 100:.2f}."))
    left, bottom, width, height, top = 44.0, 270.0, 470.0, 244.0, 14.0
    x = [left + width * row / (len(pools) - 1) for row in range(len(pools))]

    def y(value: float) -> float:
        return bottom - height * value / top

    for tick in range(0, 15, 2):
        drawing.line(left, y(tick), left + width, y(tick))
        drawing.text(left - 8, y(tick) + 4, f"{tick}×", "soft", text_anchor="end")
    for place, ranks in zip(x, pools, strict=True):
        drawing.text(place, bottom + 18, str(ranks), "soft", text_anchor="middle")
    drawing.text(left + width / 2, bottom + 38, "ranks with 65,536 tokens each", "soft", text_anchor="middle")
    drawing.text(left + 4, 18, "slowest / mean", "soft")
    for values, color, name in ((before, "orange", "in order"), (after, "blue", "planned")):
        band = [*zip(x, values.max(1), strict=True), *reversed(list(zip(x, values.min(1), strict=True)))]
        drawing.path([(place, y(value)) for place, value in band], color, closed=True, opacity="0.22")
        median = np.median(values, axis=1)
        drawing.path([(place, y(value)) for place, value in zip(x, median, strict=True)], f"s-{color}")
        drawing.text(left + width + 10, y(median[-1]) + 4, f"{name}: {median[-1]:.2f}×", "bold")
    return drawing.svg()


def hiding() -> str:
    """One rank's stream with one nano-batch and with two."""
    shape = replace(MODEL, num_layers=3)
    table = distca.shipped_table("h200")
    costs = Costs.of(shape, distca.cluster_named("dgx-h200"), 8, table)
    lengths = distca.sample_lengths("prolong", 8 * 65_536, seed=9)
    single, double = (execute(distca.plan_step([lengths], ranks=8, model=shape, tp=8, cost=table, placement="given",
                                               ping_pong=pair), costs, record=True) for pair in (False, True))
    ends = [_forward_end(one.traces[0]) for one in (single, double)]
    drawing = Drawing(640, 250, (
        "One rank in the forward pass of three layers. With one nano-batch it waits for every exchange; with two it "
        f"computes one while the other travels, and ends after {1e3 * ends[1]:.0f} instead of {1e3 * ends[0]:.0f} ms."))
    scale = 540 / max(ends)
    for top, name, one, end in ((28.0, "One nano-batch: every exchange is waited for", single, ends[0]),
                                (136.0, "Two (ping and pong): one computes while the other travels", double, ends[1])):
        drawing.text(0, top - 10, name, "bold")
        for lane, kinds in enumerate((("linear", "attention"), ("network",))):
            drawing.text(0, top + lane * 24 + 14, ("stream", "network")[lane], "soft small")
            drawing.rect(56, top + lane * 24, end * scale, 20, "wait")
            for span in one.traces[0].spans:
                travels = span.name not in ("gather weights", "reduce gradients")
                if span.lane in kinds and travels and span.start_seconds < end:
                    stop = min(span.stop_seconds, end)
                    color = {"linear": "sky", "attention": "orange", "network": "green"}[span.lane]
                    drawing.rect(56 + scale * span.start_seconds, top + lane * 24,
                                 scale * (stop - span.start_seconds), 20, color)
        drawing.text(56 + end * scale, top + 64, f"{1e3 * end:.0f} ms", "bold", text_anchor="end")
    drawing.legend(56, 240, [("sky", "linear layers"), ("orange", "attention"), ("green", "queries, keys, results"),
                             ("wait", "waiting")])
    return drawing.svg()


def _forward_end(trace: StepTrace) -> float:
    return min(span.stop_seconds for span in trace.spans if span.lane == "pipeline")


def _pairs(work: np.ndarray) -> str:
    *most, last = (f"{value:.1f}" for value in work)
    return f"{', '.join(most)} and {last}"


def _heading(drawing: Drawing, left: float, rank: int, said: str) -> None:
    drawing.text(left, 16, f"rank {rank}", "bold")
    drawing.text(left, 34, said, "soft")


def _masks(drawing: Drawing, plan: Plan, server: int, left: float, top: float, *, row: bool) -> None:
    """Draw a server's tasks below each other: queries downwards, their keys to the right, all at one scale.

    With `row` every document stands at its place in the rank's row, so that the whole is the mask of that row.
    """
    tasks, scale, queries = plan.tasks, PANEL / LENGTHS[0], 0
    for task in np.flatnonzero(tasks.server == server):
        q_start, q_stop, kv_start = tasks.q_start[task], tasks.q_stop[task], tasks.kv_start[task]
        begin = left + (queries * scale if row else 0)
        y0, y1 = top + queries * scale, top + (queries + q_stop - q_start) * scale
        ends = (begin + (q_start - kv_start) * scale, y0), (begin + (q_stop - kv_start) * scale, y1)
        drawing.path([(begin, y0), *ends, (begin, y1)], COLORS[tasks.home[task]], closed=True)
        queries += q_stop - q_start


FIGURES: dict[str, Callable[[], str]] = {"squares": squares, "shares": shares, "growth": growth, "hiding": hiding}
