"""A plan as bytes that travel to a dedicated server, and back: data that is checked, never code that is run.

A header in JSON says how long each column is and holds the few scalars; the columns follow, eight bytes to a number.
What `cost` a plan was balanced by stays behind: a server runs the plan and never plans again.
"""

from __future__ import annotations

import json
from dataclasses import asdict, fields
from typing import Any

import numpy as np

from distca.planning.plan import Plan
from distca.planning.tasks import TaskTable
from distca.spec import Experts, Latent, ModelShape
from distca.workload.layout import KeySlices, Layout

MAGIC = b"distca plan 2\n"
_SLICES = ("document", "start", "stop", "rank")
_TASKS = tuple(field.name for field in fields(TaskTable))
_COLUMNS = ("lengths", *(f"slice {name}" for name in _SLICES), *(f"key {name}" for name in _SLICES),
            *(f"task {name}" for name in _TASKS), "speed")


def plan_to_bytes(plan: Plan) -> bytes:
    layout, keys = plan.layout, plan.layout.key_only
    columns = [layout.lengths, *(getattr(layout, name) for name in _SLICES), *(getattr(keys, name) for name in _SLICES),
               *(getattr(plan.tasks, name) for name in _TASKS), plan.speed]
    header = {"columns": dict(zip(_COLUMNS, map(len, columns), strict=True)), "num_ranks": layout.num_ranks,
              "tolerance": plan.tolerance, "model": asdict(plan.model), "tp": plan.tp, "limit": plan.limit,
              "backward": plan.backward, "window": plan.window}
    text = json.dumps(header).encode()
    return b"".join((MAGIC, len(text).to_bytes(8, "little"), text, *(column.astype(column.dtype.newbyteorder("<"))
                     .tobytes() for column in columns)))


def plan_from_bytes(content: bytes | bytearray | memoryview) -> Plan:
    """The plan that `plan_to_bytes` wrote; ValueError where these are not its bytes."""
    content = bytes(content)
    begin = len(MAGIC) + 8
    if not content.startswith(MAGIC) or len(content) < begin:
        raise ValueError(f"{len(content)} bytes are no plan of this version; run the same distca on every rank")
    end = begin + int.from_bytes(content[len(MAGIC):begin], "little")
    try:
        header: dict[str, Any] = json.loads(content[begin:end])
        lengths = {name: int(header["columns"][name]) for name in _COLUMNS}
        model = _model(header["model"])
        num_ranks, tp, backward = int(header["num_ranks"]), int(header["tp"]), bool(header["backward"])
        window = None if header["window"] is None else int(header["window"])
        tolerance, limit = float(header["tolerance"]), None if header["limit"] is None else str(header["limit"])
    except (KeyError, TypeError, ValueError, RecursionError, UnicodeDecodeError) as error:
        raise ValueError(f"a plan's header cannot be read ({type(error).__name__}: {error}); run the same distca on "
                         "every rank") from None
    if min(lengths.values()) < 0 or end + 8 * sum(lengths.values()) != len(content):
        raise ValueError(f"a plan's {len(content)} bytes are not the {8 * sum(lengths.values())} of its columns behind "
                         f"{end} of its header; run the same distca on every rank")
    columns: dict[str, np.ndarray] = {}
    for name, length in lengths.items():
        columns[name] = np.frombuffer(content, dtype="<f8" if name == "speed" else "<i8", count=length, offset=end)
        end += 8 * length
    slices = {name: columns[f"slice {name}"] for name in _SLICES}
    layout = Layout(columns["lengths"], **slices, num_ranks=num_ranks,
                    key_only=KeySlices(*(columns[f"key {name}"] for name in _SLICES)))
    tasks = TaskTable(*(columns[f"task {name}"] for name in _TASKS))
    return Plan(layout, tasks, columns["speed"], tolerance, model, tp, limit=limit, backward=backward,
                window=window)


def _model(about: dict[str, Any]) -> ModelShape:
    parts = {name: None if about.get(name) is None else kind(**about[name])
             for name, kind in (("experts", Experts), ("latent", Latent))}
    return ModelShape(**{**about, **parts, "windows": tuple(about["windows"])})
