"""Display a run: a live panel in a terminal, plain lines elsewhere, and a summary at the end.

On rank 0 an Observer passes every step's record to the display, the log and the trackers; elsewhere it does nothing.
"""

from __future__ import annotations

import json
import math
import shlex
from collections import deque
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from time import perf_counter
from typing import Any, TextIO

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from distca.train import run_log
from distca.train.settings import Data, Settings
from distca.validation import UserError, read_json, write_own

REFRESH_PER_SECOND = 2
NUM_RECENT = 40  # steps in the loss sparkline and in the estimate of the remaining time
FINISHED = "Finished"
BARS = "▁▂▃▄▅▆▇█"


class Observer:
    """Shows and logs every step's record until `close`, which restores the terminal."""

    def __init__(self, settings: Settings, rank: int, world: int, console: Console | None = None,
                 restarts: int = 0) -> None:
        self.settings, self.restarts = settings, restarts
        self.active = rank == 0
        if not self.active:
            return
        self.console = console or Console(highlight=False)
        self.folder = Path(settings.log.folder)
        self.folder.mkdir(parents=True, exist_ok=True)
        write_own(self.folder / "settings.toml", settings.to_toml())
        self.tally = run_log.Tally()
        self.start = perf_counter()
        self.log: TextIO | None = None
        self.restart_facts: dict[str, Any] = {}
        self.trackers = run_log.trackers_for(settings, self.folder)
        live = self.console.is_terminal and not self.console.is_dumb_terminal
        self.display = (_LiveDisplay if live else _Lines)(settings, world, self.console, self.tally)

    def step(self, record: run_log.StepRecord) -> None:
        if not self.active:
            return
        if self.log is None:
            path = self.folder / "steps.jsonl"
            self.restart_facts = run_log.restart_facts(path, record.step, self.restarts)
            self.log = run_log.open_log(path, record.step)
            if record.step > 1:
                self.resume(record.step - 1)
        record = replace(record, **self.restart_facts)
        self.log.write(json.dumps(run_log.as_json(record)) + "\n")
        self.log.flush()
        for tracker in self.trackers:
            tracker.step(record)
        self.tally.add(record)
        self.display.show(record)

    def resume(self, last: int) -> None:
        """Count what earlier starts of the run logged up to step `last`, and say that the run goes on."""
        for record in run_log.logged_records(self.folder / "steps.jsonl"):
            self.tally.add(record)
            self.display.remember(record)
        before = _written_summary(self.folder / "summary.json")
        known = before if before.get("last_step") == last else {}
        seconds = float(known.get("wall_seconds", self.tally.sums["seconds"]))
        self.start -= seconds
        self.display.start -= seconds
        steps = self.settings.run.steps
        self._print(f"This run had finished its {last:,} steps. It goes on to step {steps:,}, with learning rates of a "
                    f"schedule of {steps:,} steps." if known.get("ended") == FINISHED else
                    f"This run goes on after step {last:,} of {steps:,}.")

    def _print(self, line: str) -> None:
        self.console.print(line, markup=False, soft_wrap=True)

    def close(self, *, stopped: bool = False, restarting: bool = False) -> run_log.RunSummary | None:
        """End the display, write and print the summary, and return it.

        There is none without steps, on other ranks, and if the run goes on after a restart.
        """
        if not self.active:
            return None
        self.display.close()
        if self.log is not None:
            self.log.close()
        path = self.folder / "steps.jsonl"
        if self.restarts and self.log is None and path.exists():  # all steps had been taken before the restart
            self.restart_facts = run_log.restart_facts(path, math.inf, self.restarts)
            for record in run_log.logged_records(path):
                self.tally.add(record)
        summary = self.tally.summary()
        if summary is not None:
            summary = replace(summary, **self.restart_facts)
        for tracker in self.trackers:
            tracker.close(finished=stopped or (summary is not None and summary.last_step >= self.settings.run.steps))
        wall_seconds = perf_counter() - self.start
        if restarting:
            return None
        if summary is None:
            steps, folder = self.settings.run.steps, self.settings.checkpoint.folder
            self._print("Stopped before the first step." if stopped else (
                f"No step was left to take: the newest checkpoint in {folder!r} has all {steps:,} of run.steps. For "
                f"more, give --run.steps {2 * steps}; for another run, another --checkpoint.folder."))
            return None
        ended = _ended(summary, self.settings.run.steps, stopped)
        content = {"ended": ended, "wall_seconds": wall_seconds, **run_log.as_json(summary)}
        write_own(self.folder / "summary.json", json.dumps(content, indent=2) + "\n")
        for line in summary_lines(summary, ended, wall_seconds, self.folder, self.settings):
            self._print(line)
        if (folder := self.settings.checkpoint.folder) and not self.settings.checkpoint.export:
            self._print(f"Its weights for Hugging Face: distca export {shlex.quote(folder)} my-model")
        self._print(f"Its curves as a page: distca report {shlex.quote(str(self.folder))}")
        return summary


class _Lines:
    """Prints a line every `log.every` steps, after a fault or an evaluation, and after the last step."""

    def __init__(self, settings: Settings, world: int, console: Console, tally: run_log.Tally) -> None:
        self.settings, self.console, self.start = settings, console, perf_counter()
        console.print(title(settings, world), markup=False, soft_wrap=True)

    def show(self, record: run_log.StepRecord) -> None:
        every, steps = self.settings.log.every, self.settings.run.steps
        if record.step % every == 0 or record.faults or record.eval_loss is not None or record.step == steps:
            self.console.print(plain_line(record, steps), markup=False, soft_wrap=True)

    def remember(self, record: run_log.StepRecord) -> None: ...

    def close(self) -> None: ...


class _LiveDisplay:
    """Redraws a panel in place, also during a slow step."""

    def __init__(self, settings: Settings, world: int, console: Console, tally: run_log.Tally) -> None:
        self.tally = tally
        self.steps, self.title, self.data = settings.run.steps, title(settings, world), settings.data
        self.recent: deque[run_log.StepRecord] = deque(maxlen=NUM_RECENT)
        self.evaluated: run_log.StepRecord | None = None
        self.start = perf_counter()
        self.live = Live(console=console, get_renderable=self.panel, refresh_per_second=REFRESH_PER_SECOND)
        self.live.start()

    def show(self, record: run_log.StepRecord) -> None:
        self.remember(record)

    def remember(self, record: run_log.StepRecord) -> None:
        """Keep a step for the curve and the estimates; it may be of an earlier start."""
        self.recent.append(record)
        self.evaluated = self.evaluated if record.eval_loss is None else record

    def close(self) -> None:
        self.live.stop()

    def panel(self) -> RenderableType:
        if not self.recent:
            return Panel(Group(Text(self.title), f"starting, {clock(perf_counter() - self.start)}"))
        recent = list(self.recent)
        record = recent[-1]
        left = (self.steps - record.step) * sum(one.seconds for one in recent) / len(recent)
        lines = Table.grid(padding=(0, 2))
        for name, text in (
            ("loss", f"{record.loss:.4f}  {curve([one.loss for one in recent])}"),
            *([("held out", f"{self.evaluated.eval_loss:.4f} at step {self.evaluated.step:,}")]
              if self.evaluated is not None else []),
            ("speed", f"{record.tokens_per_second:,.0f} tokens/s, {record.seconds:.2f} s a step{used(record.mfu)}"),
            ("computing", f"{_share(record.attention_seconds, record.seconds)} of the step in attention, "
                          f"{_share(record.linear_seconds, record.seconds)} in linear layers"),
            ("attention work", f"{record.work_before:.2f} → {record.work_after:.2f} × the mean on the busiest rank"),
            *([("pipeline", bubbles(record.bubble_share, record.served_in_bubbles))] if record.bubble_share else []),
            *([("servers", server_speeds(record.server_speed))] if record.server_speed else []),
            *([("dedicated", f"{record.servers} serve")] if record.servers is not None else []),
            *([("lost", faults_text(whole))] if (whole := self.tally.summary()) and whole.faults else []),
            ("moved", f"{size(record.bytes_per_layer)} a layer"),
            ("exposed", f"{_share(record.exposed_seconds, record.seconds)} of the step in exchanges, "
                        f"{_share(record.host_seconds, record.seconds)} for the batch"),
            ("memory", memory_text(record)),
            *([("epochs", epochs_text(record.epochs, self.data))] if record.epochs else []),
            *([("restarts", restarts_text(record))] if record.restarts else []),
            ("optimizer", f"lr {record.lr:.2e}, gradient norm {record.grad_norm:.2f}"),
            ("time", f"{clock(perf_counter() - self.start)}, about {clock(left)} left"),
        ):
            lines.add_row(name, text)
        bar = Table.grid(padding=(0, 1))
        bar.add_row(f"step {record.step:,}/{self.steps:,}", ProgressBar(self.steps, record.step, width=40))
        return Panel(Group(Text(self.title, style="bold"), bar, lines))  # text wraps where a panel's title would be cut


def plain_line(record: run_log.StepRecord, steps: int) -> str:
    served = f"bubbles {100 * record.bubble_share:.0f} %  " if record.bubble_share else ""
    held_out = f"held out {record.eval_loss:.4f}  " if record.eval_loss is not None else ""
    lost = f"lost: {faults_text(record)}  " if record.faults else ""
    speeds = f"speeds {min(record.server_speed):.2f}–{max(record.server_speed):.2f}  " if record.server_speed else ""
    return (f"step {record.step:>{len(str(steps))}}/{steps}  loss {record.loss:.4f}  {held_out}lr {record.lr:.2e}  "
            f"norm {record.grad_norm:.2f}  {record.tokens_per_second:,.0f} tokens/s{used(record.mfu)}  "
            f"work {record.work_before:.2f}→{record.work_after:.2f}  {served}{speeds}{lost}"
            f"{size(record.bytes_per_layer)}/layer  attention {_share(record.attention_seconds, record.seconds)}  "
            f"linear {_share(record.linear_seconds, record.seconds)}  "
            f"exposed {_share(record.exposed_seconds, record.seconds)}  memory {memory_text(record)}")


def memory_text(record: run_log.StepRecord) -> str:
    now = f", {size(record.memory_now_bytes)} now" if record.memory_now_bytes else ""
    return f"{size(record.memory_bytes)} at the peak{now}"


def summary_lines(
    summary: run_log.RunSummary, ended: str, wall_seconds: float, folder: Path, settings: Settings
) -> list[str]:
    lines = (
        ("time", f"{clock(wall_seconds)}, of which {clock(summary.seconds)} in steps"),
        ("loss", f"{summary.first_loss:.4f} → {summary.final_loss:.4f}, {summary.recent_loss:.4f} over the last "
                 f"{min(summary.steps, run_log.RECENT)} steps"),
        *([("held out", f"{summary.eval_loss:.4f} at the last evaluation")] if summary.eval_loss is not None else []),
        *([("epochs", epochs_text(summary.epochs, settings.data))] if summary.epochs else []),
        *([("restarts", restarts_text(summary))] if summary.restarts else []),
        *([("lost", faults_text(summary))] if summary.faults else []),
        ("speed", f"{summary.tokens_per_second:,.0f} tokens/s{used(summary.mfu)}"),
        ("computing", f"{100 * summary.attention_share:.1f} % of the steps in attention, "
                      f"{100 * summary.linear_share:.1f} % in linear layers"),
        ("attention work", f"{summary.work_before:.2f} → {summary.work_after:.2f} × the mean on the busiest rank: "
                           f"{_gained(summary, settings.attention.mode)}"),
        *([("pipeline", bubbles(summary.bubble_share, summary.served_in_bubbles))] if summary.bubble_share else []),
        ("moved", f"{size(summary.bytes_per_layer)} a layer"),
        ("exposed", f"{100 * summary.exposed_share:.1f} % of the steps waiting for exchanges, "
                    f"{100 * summary.host_share:.1f} % for batches"),
        ("memory", f"{size(summary.memory_bytes)} at most"),
        ("log", str(folder)),
    )
    head = f"{ended}: {summary.steps:,} steps, {summary.tokens:,} tokens"
    return [head, *(f"  {name:<16}{text}" for name, text in lines)]


def _gained(summary: run_log.RunSummary, mode: str) -> str:
    if summary.work_gain > 1.005:
        return f"{summary.work_gain:.2f} times less"
    if mode != "disaggregated" and summary.work_after > 1.05:
        return f"attention.mode disaggregated would make it up to {summary.work_after:.2f} times less"
    return "nothing to gain"


def curve(values: list[float]) -> str:
    """Return a sparkline of the values; values that are not finite are gaps."""
    finite = [value for value in values if math.isfinite(value)]
    low, high = min(finite, default=0.0), max(finite, default=0.0)
    span = (high - low) or 1.0
    return "".join(BARS[round((value - low) / span * (len(BARS) - 1))] if math.isfinite(value) else " "
                   for value in values)


def bubbles(share: float, served: float) -> str:
    return f"{100 * share:.0f} % of the stages' ticks are bubbles; {100 * served:.0f} % of the attention ran in them"


def server_speeds(speed: Sequence[float]) -> str:
    slowest, fastest = min(speed), max(speed)
    return f"speeds {slowest:.2f} (rank {speed.index(slowest)} of the pool) to {fastest:.2f} of the median"


def epochs_text(epochs: Sequence[float], data: Data) -> str:
    """Return how often the data were taken, by source if there are several."""
    names = [f"{one.path} " if data.mix else "" for one in data.sources()]
    return ", ".join(f"{name}{taken:.3g}" for name, taken in zip(names, epochs, strict=True))


def restarts_text(one: run_log.StepRecord | run_log.RunSummary) -> str:
    return (f"{one.restarts}, which took {clock(one.restart_seconds or 0.0)} between steps and repeated "
            f"{one.repeated_steps} steps")


def faults_text(one: run_log.StepRecord | run_log.RunSummary) -> str:
    return (f"{one.faults} server{'s' * (one.faults != 1)}, {one.repeated_tasks} tasks repeated, "
            f"{one.fault_seconds:.2f} s")


def used(mfu: float | None) -> str:
    return "" if mfu is None else f", MFU {100 * mfu:.1f} %"


def size(num_bytes: float) -> str:
    units = ["B", "kB", "MB", "GB", "TB"]
    while num_bytes >= 1000 and len(units) > 1:
        num_bytes /= 1000
        units.pop(0)
    return f"{num_bytes:.0f} {units[0]}" if units[0] == "B" or num_bytes >= 100 else f"{num_bytes:.3g} {units[0]}"


def clock(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def _share(part: float, whole: float) -> str:
    return f"{100 * part / whole:.1f} %" if whole else "0.0 %"


def title(settings: Settings, world: int) -> str:
    """Return a line with the model, the ranks, the tokens of a step and the mode."""
    parallel, batch, dedicated = settings.parallel, settings.batch, settings.attention.dedicated
    tokens = batch.tokens_per_rank * batch.micro_batches * (world - dedicated) // (parallel.tensor * parallel.pipeline)
    model = settings.model.load or settings.model.config or settings.model.name
    ranks = f"{world} ranks" if world > 1 else "1 rank"
    stages = f" in {parallel.pipeline} stages" if parallel.pipeline > 1 else ""
    serving = f", {dedicated} of them only serving attention" if dedicated else ""
    return f"{model} on {ranks}{stages}{serving}, {tokens:,} tokens a step, attention {settings.attention.mode}"


def _written_summary(path: Path) -> dict[str, Any]:
    """Return the summary that an earlier start wrote; empty if there is none."""
    try:
        content = read_json(path)
    except UserError:
        return {}
    return content if isinstance(content, dict) else {}


def _ended(summary: run_log.RunSummary, steps: int, stopped: bool) -> str:
    if summary.last_step >= steps:
        return FINISHED
    return f"Stopped after step {summary.last_step:,} of {steps:,}" if stopped else (
        f"Ended early after step {summary.last_step:,} of {steps:,}")
