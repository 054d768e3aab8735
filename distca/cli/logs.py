"""Read what commands left behind, for the report: a run's traces, log and summary, a comparison of strategies.

The files may come from elsewhere, so everything in them is checked before it is drawn.
"""

from __future__ import annotations

import json
import math
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from distca.cli.figures import comparison_figures
from distca.report.page import RunFigures, StrategyFigures
from distca.report.render import byte_text
from distca.trace import StepTrace

TRACE_NAME = re.compile(r"step_(\d+)\.json")
SERIES = {  # fields of steps.jsonl worth a curve, with a label that says the unit
    "loss": "loss, nats",
    "tokens_per_second": "tokens/s",
    "seconds": "step, seconds",
    "work_after": "busiest rank's attention work, × mean",
    "work_before": "the same without a plan, × mean",
    "bytes_per_layer": "bytes a layer, forward",
    "exposed_seconds": "waiting for exchanges, seconds",
    "host_seconds": "waiting for the batch, seconds",
    "memory_bytes": "memory, bytes",
    "grad_norm": "gradient norm",
    "lr": "learning rate",
}


@dataclass(frozen=True, slots=True, eq=False)
class RunLog:
    """What was found in one path."""

    traces: dict[int, Path] = field(default_factory=dict)  # by step
    run: RunFigures | None = None
    facts: tuple[tuple[str, str], ...] = ()
    comparison: tuple[StrategyFigures, ...] = ()


def read_log(path: Path) -> RunLog:
    """A folder that `distca train` logged into, or one of its files."""
    if not path.exists():
        raise ValueError(f"{path}: no such file or folder; give the log.folder of a run, or a file of it")
    if path.is_dir():
        return _read_folder(path)
    if path.suffix == ".jsonl":
        return RunLog(run=_read_steps(path))
    content = _read_json(path)
    if isinstance(content, list):
        return RunLog(traces={check_traces(content, path)[0].step: path})
    if isinstance(content, dict) and "strategies" in content:
        return RunLog(comparison=comparison_figures(content, str(path)))
    if isinstance(content, dict) and "tokens_per_second" in content:
        return RunLog(facts=_summary_facts(content, path))
    if isinstance(content, dict) and "traceEvents" in content:
        raise ValueError(f"{path}: a Chrome trace, which a report cannot read; give the step_N.json beside it")
    raise ValueError(f"{path}: neither a trace, a log nor a summary of a run, nor a comparison; give step_N.json, "
                     "steps.jsonl, summary.json, their folder, or what distca simulate --json printed")


def _read_folder(folder: Path) -> RunLog:
    named = {path: TRACE_NAME.fullmatch(path.name) for path in folder.iterdir() if path.is_file()}
    traces = {int(match[1]): path for path, match in named.items() if match}
    steps, summary = folder / "steps.jsonl", folder / "summary.json"
    if not (traces or steps in named or summary in named):
        raise ValueError(f"{folder}: holds no step_N.json, steps.jsonl or summary.json; give the log.folder of a run")
    content = _read_json(summary) if summary in named else {}
    return RunLog(traces, _read_steps(steps) if steps in named else None,
                  _summary_facts(content, summary) if content else ())


def read_traces(path: Path) -> tuple[StepTrace, ...]:
    return check_traces(_read_json(path), path)


def check_traces(content: Any, path: Path) -> tuple[StepTrace, ...]:
    """One step's traces, of different ranks, with spans that a chart can draw."""
    try:
        traces = tuple(StepTrace.from_json(trace) for trace in content)
        for trace in traces:
            for span in trace.spans:
                if not (math.isfinite(span.start_seconds) and span.start_seconds <= span.stop_seconds < math.inf):
                    raise ValueError(f"{path}: rank {trace.rank} has a span {span.name!r} from {span.start_seconds} to "
                                     f"{span.stop_seconds} seconds; write the trace again")
                _ = span.num_bytes + 0, span.name + span.lane, int(trace.rank), int(trace.step)
    except (TypeError, KeyError, AttributeError) as error:
        raise ValueError(f"{path}: not a list of step traces ({error}); give a step_N.json that a run wrote") from None
    if not traces:
        raise ValueError(f"{path}: holds no rank's trace; trace a step with --log.trace_step N")
    ranks = [trace.rank for trace in traces]
    if len(set(ranks)) < len(ranks):
        twice = next(rank for rank in ranks if ranks.count(rank) > 1)
        raise ValueError(f"{path}: rank {twice} is there twice; write the trace again")
    return traces


def _read_steps(path: Path) -> RunFigures | None:
    records: list[dict[str, Any]] = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        try:
            record = json.loads(line)
            int(record["step"])
        except (ValueError, KeyError, TypeError):
            raise ValueError(f"{path}: line {number} is not a step's record; remove the line") from None
        records.append(record)
    if not records:
        return None
    found = [name for name in SERIES if all(name in record for record in records)]
    return RunFigures(
        np.array([record["step"] for record in records], dtype=np.int64),
        tuple((SERIES[name], np.array([_number(record[name], path, name) for record in records])) for name in found))


def _summary_facts(content: dict[str, Any], path: Path) -> tuple[tuple[str, str], ...]:
    def figure(name: str) -> float:
        if name not in content:
            raise ValueError(f"{path}: has no {name}; give a summary.json that a run wrote")
        return _number(content[name], path, name)

    return (
        ("steps", f"{figure('steps'):,.0f}"),
        ("tokens/s", f"{figure('tokens_per_second'):,.0f}"),
        ("busiest rank's work, × mean", f"{figure('work_before'):.2f} → {figure('work_after'):.2f}"),
        ("waiting for exchanges", f"{figure('exposed_share'):.1%} of the steps"),
        ("memory", byte_text(figure("memory_bytes"))),
        ("last loss", f"{figure('final_loss'):.4f}"),
    )


def _number(value: Any, path: Path, name: str) -> float:
    if value is None:
        return math.nan
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ValueError(f"{path}: {name} is {value!r}; it should be a number")
    return float(value)


def _read_json(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path}: not JSON ({error}); give step_N.json, steps.jsonl, summary.json or their folder"
                         ) from None
