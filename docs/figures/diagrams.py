"""Boxes and arrows: how a batch passes through the package, a call, and a thread block of the kernel."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from docs.figures.svg import Drawing

HEIGHT, ROW = 44.0, 62.0                                         # of a box; from a row of boxes to the next
Box = tuple[float, float, float, str]                            # left, row, width, text with | between lines
HEADS = ('<defs><marker id="{id}" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" '
         'orient="auto"><path d="M0 0L8 4L0 8Z" fill="var(--soft)"/></marker></defs>')


def architecture() -> str:
    return _flow("architecture", "Documents become a layout by placement; a layout becomes tasks, at home; balancing "
                 "makes a plan of them; the plans of all calls are a step plan. The runtime gets it as tables of each "
                 "rank, the simulator directly. Both write traces, which the report shows.", {
                     "documents": (0, 0, 92, "documents"), "layout": (168, 0, 80, "Layout"),
                     "tasks": (286, 0, 104, "TaskTable:|tasks at home"), "plan": (466, 0, 60, "Plan"),
                     "step": (560, 0, 80, "StepPlan:|every call"),
                     "tables": (412, 1.2, 100, "tables of|one rank"),
                     "runtime": (250, 1.2, 120, "runtime:|CoreAttention"),
                     "simulator": (500, 2.3, 140, "simulator:|on a clock"),
                     "report": (30, 1.78, 140, "StepTrace → report")},
                 [("documents", "layout", "placement"), ("layout", "tasks", ""), ("tasks", "plan", "balance"),
                  ("plan", "step", ""), ("step", "tables", "dispatch"), ("tables", "runtime", ""),
                  ("step", "simulator", ""), ("runtime", "report", ""), ("simulator", "report", "")], 3.2)


def call() -> str:
    return _flow("call", "One attention call. The home rank has queries, keys and values from its linear layers; "
                 "dispatch sends those of moved tasks to their servers. Every server computes all its tasks in one "
                 "kernel call. Outputs and log-sum-exps return to the home, which merges the parts of each query.", {
                     "home": (0, 0.5, 130, "home rank:|linear layers"),
                     "own": (262, 0, 130, "its own server:|kernel, one call"),
                     "other": (262, 1, 130, "another server:|kernel, one call"),
                     "merge": (510, 0.5, 130, "home rank:|merge, next layer")},
                 [("home", "own", "stays"), ("home", "other", "q, k, v"), ("own", "merge", "stays"),
                  ("other", "merge", "out, lse")], 2)


def hopper() -> str:
    return _flow("hopper", "A thread block of distca's Hopper kernel. Tasks become tables on the device once a plan. A "
                 "copying warp draws the next item, longest first, and fills shared memory in two or three stages. Two "
                 "warpgroups compute and write out and lse, or dK and dV, and add dQ in float32.", {
                     "tasks": (0, 0.5, 50, "tasks"), "tables": (92, 0.5, 72, "tables on|the device"),
                     "copy": (194, 0.5, 112, "copying warp:|next item, longest"),
                     "memory": (356, 0.5, 60, "shared|memory"),
                     "one": (442, 0, 94, "warpgroup 1|wgmma"), "two": (442, 1, 94, "warpgroup 2|wgmma"),
                     "out": (562, 0.5, 78, "out, lse|dQ, dK, dV")},
                 [("tasks", "tables", "once"), ("tables", "copy", ""), ("copy", "memory", "copies"),
                  ("memory", "one", ""), ("memory", "two", ""), ("one", "out", ""), ("two", "out", "")], 2)


def _flow(name: str, label: str, boxes: Mapping[str, Box], arrows: Sequence[tuple[str, str, str]], rows: float) -> str:
    drawing = Drawing(640, round(rows * ROW), label)
    drawing.raw(HEADS.replace("{id}", f"head-{name}"))
    for origin, target, said in arrows:
        _arrow(drawing, boxes[origin], boxes[target], said, f"url(#head-{name})")
    for left, row, width, text in boxes.values():
        top, lines = 6 + row * ROW, text.split("|")
        drawing.rect(left + 0.5, top, width - 1, HEIGHT, "wait", rx=6)
        for number, line in enumerate(lines):
            drawing.text(left + width / 2, top + HEIGHT / 2 + 4 + 16 * (number - (len(lines) - 1) / 2), line,
                         "" if number else "bold", text_anchor="middle", style="font-size:12px")
    return drawing.svg()


def _arrow(drawing: Drawing, origin: Box, target: Box, said: str, head: str) -> None:
    """From the side of a box that faces the other one, to that one's."""
    (left, row, width, _), (to, to_row, to_width, _) = origin, target
    middle, to_middle = (6 + one * ROW + HEIGHT / 2 for one in (row, to_row))
    x1, y1, x2, y2 = left + width, middle, to, to_middle         # to the right
    if to + to_width <= left:                                    # to the left
        x1, x2 = left, to + to_width
    if to_row - row > 1:                                         # down
        x1, y1 = left + width / 2, middle + HEIGHT / 2
        if to + to_width > left:
            x2, y2 = left + width / 2, to_middle - HEIGHT / 2
    drawing.line(x1, y1, x2, y2, "axis", marker_end=head)
    if said:
        drawing.text((x1 + x2) / 2, (y1 + y2) / 2 + (
            18 if (y1 + y2) > drawing.height and y1 != y2 else -9), said, "soft small", text_anchor="middle")


FIGURES: dict[str, Callable[[], str]] = {"architecture": architecture, "call": call, "hopper": hopper}
