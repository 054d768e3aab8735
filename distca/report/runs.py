"""Read what a training run logged, and say what came of it.

The files may come from another machine, so everything in them is checked before it is drawn. A run that goes on can be
read at any time: its last line may then be torn, and its summary may be missing or be that of an earlier start.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from distca.report.figures import RunFigures, StrategyFigures, Wait, byte_text, count_text, over_mean
from distca.report.run_sections import HELD_OUT, LOSS
from distca.trace import MAX_COUNT, RankFigures, StepTrace
from distca.validation import (
    UserError,
    check_name,
    check_number,
    check_whole,
    errors_in,
    parse_json,
    read_json,
    read_text,
    read_toml,
    short,
)

MAX_TRACE_BYTES = 2**28  # about two million spans
MAX_LOG_BYTES = 2**26    # about a hundred thousand steps
MAX_SPEEDS = 8           # servers whose speeds are drawn
MAX_WAITS = 10           # waits listed
FILE_NAME = re.compile(r"(step|ranks)_(\d{1,15})\.json")
SERIES = {  # fields of steps.jsonl that are drawn, with labels that include the unit
    "loss": LOSS,
    "eval_loss": HELD_OUT,
    "tokens_per_second": "tokens/s",
    "seconds": "step, seconds",
    "work_after": "busiest rank's attention work, × mean",
    "work_before": "the same without a plan, × mean",
    "bytes_per_layer": "bytes a layer, forward",
    "mfu": "model FLOPs utilization",
    "attention_seconds": "attention, seconds",
    "attention_seconds_max": "attention of the slowest rank, seconds",
    "linear_seconds": "the rest of the model, seconds",
    "exposed_seconds": "waiting for exchanges, seconds",
    "host_seconds": "waiting for the batch, seconds",
    "memory_bytes": "memory, bytes, the most so far",
    "memory_now_bytes": "memory, bytes, between steps",
    "servers": "dedicated servers",
    "faults": "servers lost",
    "fault_seconds": "until what lost servers owed was there, seconds",
    "tolerance": "tolerance chosen",
    "grad_norm": "gradient norm",
    "lr": "learning rate",
}
BEFORE, AFTER, WAITING = SERIES["work_before"], SERIES["work_after"], SERIES["exposed_seconds"]
T = TypeVar("T")


@dataclass(frozen=True, slots=True, eq=False)
class RunFiles:
    """What a run's log folder holds; any of it may be missing."""

    traces: Mapping[int, Path] = field(default_factory=dict)  # by step
    ranks: Mapping[int, Path] = field(default_factory=dict)   # by step
    figures: RunFigures | None = None
    summary: Mapping[str, Any] = field(default_factory=dict)
    about: tuple[tuple[str, str], ...] = ()                   # of run.json: model, ranks, versions, date
    settings: Mapping[str, str] = field(default_factory=dict)
    comparison: tuple[StrategyFigures, ...] = ()              # of a file that `distca simulate --json` printed

    @property
    def facts(self) -> tuple[tuple[str, str], ...]:
        return (*self.about, *(summary_facts(self.summary) if self.summary else ()))

    def curve(self, label: str) -> np.ndarray:
        """[steps] one of SERIES where it is a number; empty if there is none."""
        values = np.zeros(0) if self.figures is None else dict(self.figures.series).get(label, np.zeros(0))
        return values[np.isfinite(values)]

    @property
    def tokens_per_second(self) -> float:
        """Of all steps together; 0 if unknown."""
        speed, seconds = self.curve("tokens/s"), self.curve("step, seconds")
        return float((speed * seconds).sum() / seconds.sum()) if 0 < len(speed) == len(seconds) else 0.0


def read_folder(folder: Path, *, live: bool = False) -> RunFiles:
    """Read a log folder; with `live` the run may go on, or have logged nothing yet."""
    names = {path.name for path in folder.iterdir() if path.is_file()}
    numbered: dict[str, dict[int, Path]] = {"step": {}, "ranks": {}}
    for name in names:
        if match := FILE_NAME.fullmatch(name):
            numbered[match[1]][int(match[2])] = folder / name
    if not (live or numbered["step"] or {"steps.jsonl", "summary.json"} & names):
        raise UserError(f"{folder}: holds no step_N.json, steps.jsonl or summary.json; give the log.folder of a run")

    def read(name: str, parse: Callable[[Any], Mapping[str, Any]], load: Callable[[Path], Any] = read_json) -> Any:
        return named(folder / name, parse, load(folder / name)) if name in names else {}

    figures = read_steps(folder / "steps.jsonl", live=live) if "steps.jsonl" in names else None
    summary = read("summary.json", _object)
    if figures is not None and summary and summary.get("last_step", math.inf) < figures.step.max():
        summary = {}                                             # of an earlier start; the run goes on
    return RunFiles(numbered["step"], numbered["ranks"], figures, summary, tuple(read("run.json", _about).items()),
                    read("settings.toml", _settings, read_toml))


def named(path: Path, parse: Callable[[Any], T], content: Any) -> T:
    """Parse a file's content; errors name the file."""
    with errors_in(path, ValueError):
        return parse(content)


def read_traces(path: Path) -> tuple[StepTrace, ...]:
    """Read one step's traces, one per rank."""
    return named(path, traces_of, read_json(path, MAX_TRACE_BYTES))


def traces_of(content: Any) -> tuple[StepTrace, ...]:
    if not isinstance(content, list) or not content:
        raise UserError("not a list of step traces, one per rank; trace a step with --log.trace_step N")
    traces = tuple(StepTrace.from_json(one) for one in content)
    if twice := [rank for rank, count in Counter(trace.rank for trace in traces).items() if count > 1]:
        raise UserError(f"rank {twice[0]} is there twice; write the trace again")
    return traces


def read_ranks(path: Path) -> RankFigures:
    return named(path, RankFigures.from_json, read_json(path, MAX_TRACE_BYTES))


def read_steps(path: Path, *, live: bool = False) -> RunFigures | None:
    """Read steps.jsonl; None if it is empty. With `live`, a torn last line is left out."""
    records: list[dict[str, Any]] = []
    text = read_text(path, MAX_LOG_BYTES)
    for at, line in enumerate((text[:text.rfind("\n") + 1] if live else text).splitlines(), 1):
        try:
            record = parse_json(line)
            check_whole("step", record["step"], least=0, most=MAX_COUNT)
        except (ValueError, KeyError, TypeError):
            raise UserError(f"{path}: line {at} is not a step's record; remove the line") from None
        records.append(record)
    if not records:
        return None
    curves = [(label, np.array([_figure(record.get(name), f"{path}: {name}") for record in records]))
              for name, label in SERIES.items() if any(name in record for record in records)]
    return RunFigures(np.array([record["step"] for record in records], dtype=np.int64),
                      (*curves, *_server_speeds(path, records)))


def _server_speeds(path: Path, records: list[dict[str, Any]]) -> list[tuple[str, np.ndarray]]:
    """Curves of the servers that differ most from the median, if every step has speeds of equally many servers."""
    lists = [record.get("server_speed") for record in records]
    if not all(isinstance(speeds, list) and len(speeds) == len(lists[0] or []) for speeds in lists):
        return []
    by_server = np.array([[_figure(one, f"{path}: server_speed") for one in speeds or []] for speeds in lists]).T
    apart = np.argsort(-np.abs(by_server - 1.0).max(axis=1, initial=0.0), kind="stable")[:MAX_SPEEDS]
    return [(f"speed of server {server}, × the median", by_server[server]) for server in sorted(apart.tolist())]


def summary_facts(content: Any) -> tuple[tuple[str, str], ...]:
    def figure(name: str) -> float:
        if not isinstance(content, dict) or name not in content:
            raise UserError(f"has no {name}; give a summary.json that a run wrote")
        return _figure(content[name], name)

    lost = () if not isinstance(content, dict) or "faults" not in content else (
        ("servers lost", f"{figure('faults'):,.0f}, {figure('repeated_tasks'):,.0f} tasks repeated, "
                         f"{figure('fault_seconds'):.2f} s"),)
    return (
        ("steps", f"{figure('steps'):,.0f}"), ("tokens/s", f"{figure('tokens_per_second'):,.0f}"),
        ("busiest rank's work, × mean", f"{figure('work_before'):.2f} → {figure('work_after'):.2f}"),
        ("waiting for exchanges", f"{figure('exposed_share'):.1%} of the steps"),
        ("memory", byte_text(figure("memory_bytes"))), ("last loss", f"{figure('final_loss'):.4f}"), *lost)


def _figure(value: Any, field: str) -> float:
    """Check a number; null and non-finite values, as in steps of a run that diverged, become NaN."""
    if value is None or (isinstance(value, float) and not math.isfinite(value)):
        return math.nan
    return check_number(field, value)


def _object(content: Any) -> dict[str, Any]:
    if not isinstance(content, dict):
        raise UserError(f"is {short(content)}; give a file that a run wrote")
    return content


def _about(content: Any) -> dict[str, str]:
    return {check_name("a name", name): check_name(name, value) for name, value in _object(content).items()}


def _settings(content: dict[str, Any]) -> dict[str, str]:
    return {f"{section}.{name}": str(value) for section, values in content.items() if isinstance(values, dict)
            for name, value in values.items()}


def side_by_side(runs: Sequence[Mapping[str, str]]) -> tuple[tuple[str, ...], ...]:
    """Return every name with its value in each run."""
    names = dict.fromkeys(name for run in runs for name in run)
    return tuple((name, *(run.get(name, "–") for run in runs)) for name in names)


def step_detail(step: int, ranks: RankFigures | None) -> tuple[str, str, tuple[tuple[str, str], ...]]:
    """Return the head of the part about a traced step: title, text and facts."""
    if ranks is None:
        return f"Step {step:,}", f"The run wrote no ranks_{step}.json: only the step's timeline is known.", ()
    facts = (("documents", f"{len(ranks.lengths):,}"), ("longest", f"{ranks.lengths.max():,} tokens"),
             ("slowest server's work, × mean", f"{over_mean(ranks.work_before).max():.2f} → "
                                               f"{over_mean(ranks.work_after).max():.2f}"),
             ("bytes across ranks, forward", byte_text(ranks.num_bytes.sum())),
             ("memory of the fullest rank", byte_text(ranks.memory_bytes.max())))
    return f"Step {step:,}", "What this step gave to every rank, and what the ranks did when.", facts


def run_verdict(run: RunFiles) -> str:
    """Say in two sentences how far the run is, what it learned and what held it up; empty if it logged no step."""
    loss, held_out, seconds = run.curve(LOSS), run.curve(HELD_OUT), run.curve("step, seconds")
    if run.figures is None or not len(loss):
        return ""
    last, ended = int(run.figures.step[-1]), run.summary.get("ended", "")
    tested = f", on held-out documents to {held_out[-1]:.4g}" if len(held_out) else ""
    state = check_name("ended", ended) if ended else "So far"
    went = "fell" if loss[-1] < loss[0] else "rose"
    words = f"{state}: in {count_text(last, 'step')} the loss {went} from {loss[0]:.4g} to {loss[-1]:.4g}{tested}."
    if np.isnan(dict(run.figures.series)[LOSS][-1]):
        words = f"{state}: the loss of step {last} is not a number; lower the learning rate or look at the data."
    before, after = run.curve(BEFORE), run.curve(AFTER)
    if len(before) and len(after):
        words += (f" The busiest rank computed {after.mean():.2f}× the mean attention; without a plan it would have "
                  f"computed {before.mean():.2f}×.")
    if len(seconds) and len(waits := run.curve(WAITING)):
        words += f" Waiting for exchanges took {waits.sum() / seconds.sum():.1%} of the time."
    return words


def verdict_on_two(first: RunFiles, second: RunFiles) -> str:
    """Compare the speed of two runs, and their losses after the last step that both have."""
    assert first.figures is not None and second.figures is not None, "both have steps"
    one, other = first.tokens_per_second, second.tokens_per_second
    words = []
    if one and other:
        words.append(f"{first.figures.name} trains {one / other:.2f}× as fast as {second.figures.name}: {one:,.0f} "
                     f"tokens/s against {other:,.0f}.")
    both = np.intersect1d(first.figures.step, second.figures.step)
    losses = [dict(run.series)[LOSS][run.step == both[-1]][0] for run in (first.figures, second.figures)
              if len(both) and LOSS in dict(run.series)]
    if len(losses) == 2:
        words.append(f"After step {both[-1]:,}, the last that both have, the losses are {losses[0]:.4g} and "
                     f"{losses[1]:.4g}.")
    return " ".join(words)


def largest_waits(traces: Sequence[StepTrace], ranks: RankFigures | None) -> tuple[Wait, ...]:
    """Return the largest waits of a measured step, and whom each rank waited for.

    All ranks of a pool run the same exchanges in the same order, so the k-th of one rank is the k-th of the others. Of
    the ranks that a rank exchanges tokens with, the one that began to send last holds it up.
    """
    sent = {trace.rank: [span.start_seconds for span in trace.spans
                         if (span.name, span.lane) == ("exchange", "network")] for trace in traces}
    waits = [(span, trace.rank, number) for trace in traces for name in ("exchange", "neighbour")
             for number, span in enumerate(one for one in trace.spans if (one.name, one.lane) == (name, "wait"))]
    waits.sort(key=lambda one: -one[0].seconds)
    return tuple(Wait(rank, "a neighbouring stage" if span.name == "neighbour" else _last_sender(
                      rank, number, span.start_seconds, sent, ranks), span.seconds, span.start_seconds, span.num_bytes)
                 for span, rank, number in waits[:MAX_WAITS] if span.seconds > 0)


def _last_sender(
    rank: int, number: int, since: float, sent: Mapping[int, Sequence[float]], ranks: RankFigures | None
) -> str:
    tp = 1 if ranks is None else max(1, len(ranks.memory_bytes) // len(ranks.work_before))
    talks = {other for other in sent if other % tp == rank % tp}
    if ranks is not None:                                        # in backward, gradients return the way keys came
        pairs = [(ranks.source, ranks.destination), (ranks.destination, ranks.source)]
        near = {other for one, two in pairs for other in two[one == rank // tp].tolist()}
        talks = {other for other in talks if other // tp in near}
    starts = {other: sent[other][number] for other in talks - {rank} if len(sent[other]) == len(sent[rank]) > number}
    last = max(starts, key=lambda other: starts[other], default=None)
    return "the network" if last is None or starts[last] <= since else f"rank {last}"
