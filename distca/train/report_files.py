"""Files that a run writes for its report alone: what it is, and what a traced step gave to its ranks.

Work and bytes of a step are summed over all forward calls, so that stages and micro-batches count; the pieces of a
document are those of the first layers, because its other layers are cut in the same way.
"""

from __future__ import annotations

import json
import platform
import time
from collections import Counter
from collections.abc import Sequence
from importlib.metadata import distributions
from pathlib import Path
from typing import Any

import numpy as np
import torch

from distca.planning.plan import server_work
from distca.planning.schedule import IDLE
from distca.planning.step import NO_CALL, StepPlan
from distca.planning.tasks import tasks_at_home
from distca.spec import ModelShape
from distca.trace import RankFigures, StepTrace, write_chrome_trace
from distca.train.settings import Settings
from distca.validation import write_own
from distca.workload.packing import pack

VERSIONS = ("distca", "torch")  # told of a run


def write_about(settings: Settings, world: int, model: ModelShape, device: torch.device) -> None:
    """Write run.json: what a report says about a run beside its settings."""
    parallel, dedicated = settings.parallel, settings.attention.dedicated
    shared = f", tp {parallel.tensor}, pp {parallel.pipeline}" if parallel.tensor * parallel.pipeline > 1 else ""
    serving = f", {dedicated} of them only serve attention" if dedicated else ""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else f"CPU ({platform.machine()})"
    installed = {one.metadata["Name"]: one.version for one in distributions() if one.metadata["Name"] in VERSIONS}
    versions = [f"{one} {installed[one]}" for one in VERSIONS if one in installed]
    about = {
        "model": f"{model.name}, {model.num_layers} layers, hidden {model.hidden:,}",
        "ranks": f"{world}{shared}{serving}", "device": name, "started": time.strftime("%Y-%m-%d %H:%M %z"),
        "versions": ", ".join([*versions, f"Python {platform.python_version()}"])}
    write_own(Path(settings.log.folder) / "run.json", json.dumps(about, indent=2) + "\n")


def write_step(folder: Path, gathered: Sequence[tuple[Any, int]], plan: StepPlan) -> None:
    """Write a step's traces, also for Perfetto, and its figures by rank; `gathered` are trace and memory of each."""
    written, memory = zip(*gathered, strict=True)
    traces = [StepTrace.from_json(data) for data in written]
    number = traces[0].step
    folder.mkdir(parents=True, exist_ok=True)
    write_chrome_trace(traces, folder / f"trace_step_{number}.json")
    write_own(folder / f"step_{number}.json", json.dumps(written))
    write_own(folder / f"ranks_{number}.json", json.dumps(rank_figures(plan, number, list(memory)).to_json()))


def rank_figures(step: StepPlan, number: int, memory_bytes: list[int]) -> RankFigures:
    """Return the figures of step `number`, whose training ranks took `memory_bytes`."""
    first, ranks = step.plans[0], step.num_stages * step.num_data
    servers = first.num_servers if step.is_shared else ranks
    after, matrix = np.zeros(servers), np.zeros((servers, servers), dtype=np.int64)
    for stage in range(1 if step.is_shared else step.num_stages):
        forward = ~step.ticks.backward[:, stage] if not step.is_shared else step.ticks.forward_ticks()
        begin = stage * step.num_data
        for at, count in Counter(step.calls[stage, forward].ravel().tolist()).items():
            if at != NO_CALL:
                plan = step.plans[at]
                own = slice(begin, begin + plan.num_servers)
                after[own] += count * plan.work()
                matrix[own, own] += count * plan.traffic().matrix_bytes(step.model, step.tp).astype(np.int64)
    if first.cost is not None:
        after /= first.cost.speeds(servers)
    source, destination = np.nonzero(matrix)
    document, q_start, q_stop, home, server = _pieces(step)
    return RankFigures(
        step=number, unit="causal pairs" if first.cost is None else "seconds", tolerance=first.tolerance,
        work_before=_work_at_home(step), work_after=after,
        source=source, destination=destination, num_bytes=matrix[source, destination],
        lengths=np.concatenate([one.lengths for one in step.micro_batches]),
        document=document, q_start=q_start, q_stop=q_stop, home=home, server=server,
        memory_bytes=np.array(memory_bytes))


def _work_at_home(step: StepPlan) -> np.ndarray:
    """[ranks of all stages] Forward work if documents stayed in order and every rank computed its own attention."""
    cost, work = step.plans[0].cost, np.zeros((step.num_stages, step.num_data))
    speeds = 1.0 if cost is None else cost.speeds(step.num_data)
    of_part = np.split(np.array(step.model.layer_windows), np.cumsum(step.layers))
    at_home = [tasks_at_home(pack(one.lengths, ranks=step.num_data)) for one in step.micro_batches]
    for tick, stage in np.argwhere((step.ticks.micro_batch != IDLE) & ~step.ticks.backward).tolist():
        tasks = at_home[step.ticks.micro_batch[tick, stage]]
        for window, count in Counter(of_part[step.ticks.part[tick, stage]].tolist()).items():
            work[stage] += count * server_work(tasks, step.num_data, cost, window=window) / speeds
    return work.ravel()


def _pieces(step: StepPlan) -> list[np.ndarray]:
    """Return document, q_start, q_stop, home and server of every piece, with documents numbered over the step."""
    counts = [len(one.lengths) for one in step.micro_batches]
    offset, found = np.cumsum(counts) - counts, []
    forward = (step.ticks.micro_batch != IDLE) & ~step.ticks.backward & (step.ticks.part == 0)
    for tick, stage in np.argwhere(forward).tolist():
        own = int(step.ticks.micro_batch[tick, stage])
        for number, nano in enumerate(step.micro_batches[own].nano_batches):
            tasks, begin = step.plans[step.calls[stage, tick, number, 0]].tasks, 0
            rank = 0 if step.is_shared else stage * step.num_data
            if step.is_shared:                                   # the plan numbers the documents of all stages
                running = set(step.ticks.micro_batch[tick].tolist()) - {IDLE}
                begin = sum(step.micro_batches[one].layouts[number].num_documents for one in running if one < own)
            tasks = tasks.take((tasks.document >= begin) & (tasks.document < begin + nano.layout.num_documents))
            found.append((offset[own] + nano.document[tasks.document - begin], tasks.q_start, tasks.q_stop,
                          tasks.home + rank, tasks.server + rank))
    return [np.concatenate(column) for column in zip(*found, strict=True)]
