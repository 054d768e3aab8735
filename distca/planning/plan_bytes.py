"""Serialize plans, to send them to dedicated servers or from rank 0: checked data, never code that is run.

A JSON header holds the scalars and the length of each column; the columns follow, eight bytes per number. A plan's
`cost` is not sent: the receiver runs the plan and never plans again.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, fields, replace
from typing import Any

import numpy as np

from distca.planning.plan import Plan
from distca.planning.step import MicroBatch, StepPlan
from distca.planning.tasks import TaskTable
from distca.spec import Experts, Latent, ModelShape
from distca.validation import UserError
from distca.workload.layout import KeySlices, Layout
from distca.workload.packing import NanoBatch

MAGIC = b"distca plan 2\n"
STEP_MAGIC = b"distca step 2\n"
_SLICES = ("document", "start", "stop", "rank")
_LAYOUT = ("lengths", *(f"slice {name}" for name in _SLICES), *(f"key {name}" for name in _SLICES))
_TASKS = tuple(field.name for field in fields(TaskTable))
_COLUMNS = (*_LAYOUT, *(f"task {name}" for name in _TASKS), "speed")


def plan_to_bytes(plan: Plan) -> bytes:
    columns = (*_columns_of(plan.layout), *(getattr(plan.tasks, name) for name in _TASKS), plan.speed)
    header = {"num_ranks": plan.layout.num_ranks, "tolerance": plan.tolerance, "model": asdict(plan.model),
              "tp": plan.tp, "limit": plan.limit, "backward": plan.backward, "window": plan.window}
    return _written(MAGIC, header, dict(zip(_COLUMNS, columns, strict=True)))


def plan_from_bytes(content: bytes | bytearray | memoryview) -> Plan:
    """Read a plan that `plan_to_bytes` wrote; raise ValueError for other bytes."""
    header, columns = _read(MAGIC, bytes(content))
    try:
        model = _model(header["model"])
        num_ranks, tp, backward = int(header["num_ranks"]), int(header["tp"]), bool(header["backward"])
        window = None if header["window"] is None else int(header["window"])
        tolerance, limit = float(header["tolerance"]), None if header["limit"] is None else str(header["limit"])
        layout = _layout([columns[name] for name in _LAYOUT], num_ranks)
        tasks, speed = TaskTable(*(columns[f"task {name}"] for name in _TASKS)), columns["speed"]
    except (KeyError, TypeError, ValueError) as error:
        raise _unread(error) from None
    return Plan(layout, tasks, speed, tolerance, model, tp, limit=limit, backward=backward, window=window)


def step_to_bytes(step: StepPlan) -> bytes:
    """Write the placement of a step's documents and the plan of every call, each plan once."""
    columns = {f"plan {at}": np.frombuffer(plan_to_bytes(plan), dtype="<i8") for at, plan in enumerate(step.plans)}
    columns["calls"] = step.calls.ravel()
    for m, micro_batch in enumerate(step.micro_batches):
        for n, nano in enumerate(micro_batch.nano_batches):
            columns |= {f"{m} {n} {name}": column for name, column in zip(
                ("document", *_LAYOUT), (nano.document, *_columns_of(nano.layout)), strict=True)}
    return _written(STEP_MAGIC, {"placement": step.placement, "tried": step.tried}, columns)


def step_from_bytes(content: bytes, own: StepPlan) -> StepPlan:
    """Read and validate a step that `step_to_bytes` wrote; `own` is this rank's step for the same lengths and settings.

    Raise ValueError for other bytes or an invalid step.
    """
    header, columns = _read(STEP_MAGIC, content)
    try:
        calls = columns["calls"].reshape(own.calls.shape)
        plans = tuple(replace(plan_from_bytes(columns[f"plan {at}"].tobytes()), model=own.model, tp=own.tp,
                              cost=own.plans[0].cost, topology=own.plans[0].topology)
                      for at in range(1 + int(calls.max())))
        micro_batches = tuple(MicroBatch(micro_batch.lengths, tuple(
            NanoBatch(_layout([columns[f"{m} {n} {name}"] for name in _LAYOUT], nano.layout.num_ranks),
                      columns[f"{m} {n} document"]) for n, nano in enumerate(micro_batch.nano_batches)))
            for m, micro_batch in enumerate(own.micro_batches))
        tried = tuple((float(tolerance), float(seconds)) for tolerance, seconds in header["tried"])
        placement = None if header["placement"] is None else str(header["placement"])
        step = replace(own, plans=plans, calls=calls, micro_batches=micro_batches, tried=tried, placement=placement)
    except (KeyError, TypeError, ValueError, IndexError) as error:
        raise _unread(error) from None
    step.validate()
    return step


def _columns_of(layout: Layout) -> list[np.ndarray]:
    return [layout.lengths, *(getattr(table, name) for table in (layout, layout.key_only) for name in _SLICES)]


def _layout(columns: list[np.ndarray], num_ranks: int) -> Layout:
    lengths, document, start, stop, rank = columns[:5]
    return Layout(lengths, document, start, stop, rank, num_ranks, KeySlices(*columns[5:]))


def _written(magic: bytes, header: Mapping[str, Any], columns: Mapping[str, np.ndarray]) -> bytes:
    text = json.dumps({"columns": {name: len(column) for name, column in columns.items()}, **header}).encode()
    text += b" " * (-(len(magic) + 8 + len(text)) % 8)           # pad, so that columns are aligned to 8 bytes
    return b"".join((magic, len(text).to_bytes(8, "little"), text, *(column.astype(column.dtype.newbyteorder("<"))
                     .tobytes() for column in columns.values())))


def _read(magic: bytes, content: bytes) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    begin = len(magic) + 8
    if not content.startswith(magic) or len(content) < begin:
        raise UserError(f"{len(content)} bytes are no plan of this version; run the same distca on every rank")
    end = begin + int.from_bytes(content[len(magic):begin], "little")
    try:
        header: dict[str, Any] = json.loads(content[begin:end])
        lengths = {name: int(length) for name, length in header["columns"].items()}
    except (KeyError, TypeError, ValueError, AttributeError, RecursionError) as error:
        raise _unread(error) from None
    if min(lengths.values(), default=0) < 0 or end + 8 * sum(lengths.values()) != len(content):
        raise UserError(f"a plan's {len(content)} bytes are not the {8 * sum(lengths.values())} of its columns behind "
                        f"{end} of its header; run the same distca on every rank")
    columns: dict[str, np.ndarray] = {}
    for name, length in lengths.items():
        columns[name] = np.frombuffer(content, dtype="<f8" if name == "speed" else "<i8", count=length, offset=end)
        end += 8 * length
    return header, columns


def _unread(error: Exception) -> ValueError:
    return UserError(f"a plan's header cannot be read ({type(error).__name__}: {error}); run the same distca on "
                     "every rank")


def _model(about: dict[str, Any]) -> ModelShape:
    parts = {name: None if about.get(name) is None else kind(**about[name])
             for name, kind in (("experts", Experts), ("latent", Latent))}
    return ModelShape(**{**about, **parts, "windows": tuple(about["windows"])})
