"""The front page's drawing: one step on eight ranks, at home and balanced, as the simulator times it.

Of 21 sampled batches it is the one whose ratio is the median; the test of the drawings checks that.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import distca
from distca.baselines import at_home_step
from distca.simulate.costs import Costs
from distca.simulate.execute import Step, execute
from docs.figures.svg import Drawing

RANKS, TOKENS, LAYERS, TP, SEED, SEEDS = 8, 65_536, 4, 8, 9, 21
LEFT, SPAN, ROW, PANEL = 52.0, 520.0, 14.0, 158.0               # pixels: of the lanes, of a row, of a panel
SHOWN = {"linear": "sky", "attention": "orange"}
SWEEP_SECONDS, SWEEP_SHARE = 8, 0.75                             # of the animation, which then rests


@cache
def simulated(seed: int) -> tuple[Step, Step]:
    """Return the step with attention at home and the balanced one, on the same documents."""
    shape = replace(distca.model_named("llama3-8b"), num_layers=LAYERS)
    table = distca.shipped_table("h200")
    costs = Costs.of(shape, distca.cluster_named("dgx-h200"), TP, table)
    lengths = distca.sample_lengths("prolong", RANKS * TOKENS, seed=seed)
    home = at_home_step([lengths], shape, num_data=RANKS, layers=(LAYERS,), tp=TP)
    ours = distca.plan_step([lengths], ranks=RANKS, model=shape, tp=TP, cost=table)
    return execute(home, costs, record=True), execute(ours, costs, record=True)


def step() -> str:
    home, ours = simulated(SEED)
    before, after = (1e3 * one.seconds for one in (home, ours))
    drawing = Drawing(640, 424, (
        f"A training step on {RANKS} ranks. Before: attention stays where the documents are, the ranks wait for the "
        f"one with the long document, and the step takes {before:.0f} ms. After: attention in equal shares, nobody "
        f"waits long, and the step takes {after:.0f} ms."))
    drawing.style += _moving(after / before)
    drawing.raw('<defs><clipPath id="swept"><rect class="sweep" x="0" y="-40" width="560" height="480"/></clipPath>'
                "</defs>")
    for top, name, one, flag in ((24.0, "Before: every rank computes its own documents", home, "first"),
                                 (24.0 + PANEL + 40, "After: every rank computes an equal share of attention", ours,
                                  "second")):
        _panel(drawing, top, name, one, SPAN / before, flag)
    drawing.legend(LEFT, 414, [("sky", "linear layers"), ("orange", "attention"), ("wait", "waiting")])
    return drawing.svg()


def _panel(drawing: Drawing, top: float, name: str, one: Step, scale: float, flag: str) -> None:
    drawing.text(0, top - 8, name, "bold")
    height, end = len(one.traces) * (ROW + 3) - 3, 1e3 * one.seconds * scale
    for rank in range(len(one.traces)):
        drawing.text(0, top + rank * (ROW + 3) + 11, f"rank {rank}", "soft small")
    drawing.raw(f'<g transform="translate({LEFT:.0f} {top:.0f})"><g clip-path="url(#swept)">')
    for rank, trace in enumerate(one.traces):
        drawing.rect(0, rank * (ROW + 3), end, ROW, "wait")
        for lane, color in SHOWN.items():
            for start, stop in _joined([(span.start_seconds, span.stop_seconds) for span in trace.spans
                                        if span.lane == lane], 2e-4):
                drawing.rect(1e3 * start * scale, rank * (ROW + 3), 1e3 * (stop - start) * scale, ROW, color)
    drawing.raw("</g>")
    drawing.line(end, -4, end, height + 8, f"axis {flag}")
    drawing.text(end, height + 21, f"{1e3 * one.seconds:.0f} ms", f"bold {flag}",
                 text_anchor="end" if end > 400 else "middle")
    drawing.raw("</g>")


def _joined(spans: list[tuple[float, float]], gap: float) -> list[tuple[float, float]]:
    """Join spans that lie closer together than anybody sees."""
    joined: list[tuple[float, float]] = []
    for start, stop in sorted(spans):
        if joined and start - joined[-1][1] < gap:
            joined[-1] = (joined[-1][0], max(stop, joined[-1][1]))
        else:
            joined.append((start, stop))
    return joined


def _moving(share: float) -> str:
    """Time passes from left to right; a step's end appears when it is reached. Readers who want no motion get none."""
    seen = {"first": 100 * SWEEP_SHARE, "second": 100 * SWEEP_SHARE * share}
    frames = "".join(f"@keyframes {name}{{0%,{at:.1f}%{{opacity:0}}{at + 0.5:.1f}%,100%{{opacity:1}}}}"
                     for name, at in seen.items())
    return (f"@keyframes sweep{{0%{{transform:scaleX(0)}}{100 * SWEEP_SHARE:.0f}%,100%{{transform:scaleX(1)}}}}{frames}"
            "@media(prefers-reduced-motion:no-preference){svg.fig .sweep{transform-origin:0 0;"
            f"animation:sweep {SWEEP_SECONDS}s linear infinite}}"
            + "".join(f"svg.fig .{name}{{animation:{name} {SWEEP_SECONDS}s linear infinite}}" for name in seen) + "}")
