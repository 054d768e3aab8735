"""Examine a group of ranks before the first run on it: versions, links, attention's results, speeds.

Every rank makes the same steps of a RollCall, so that a rank or a link that hangs is named, and gets the records of all
ranks, which report/doctor.py judges. Attention is checked with a plan that uses every link that is measured: a rank's
queries are divided among it and the ranks behind it. Each part is compared with a dense float64 reference on its home
rank, so wrong results name the server they come from.
"""

from __future__ import annotations

import platform
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from distca import profiling
from distca.cost.attention_time import AttentionTime, shipped_names, shipped_table
from distca.kernels import KERNELS, dense_attention, kernel_named
from distca.models import model_named
from distca.planning.plan import Plan
from distca.planning.tasks import TILE, TaskTable
from distca.profiling.machine import cpu_name, versions
from distca.profiling.network import exchange_seconds
from distca.profiling.roll_call import RollCall
from distca.runtime.attention import CoreAttention
from distca.runtime.transport import C10dTransport, HierarchicalTransport, Transport
from distca.spec import ModelShape
from distca.validation import UserError
from distca.workload.packing import pack
from distca.workload.topology import Topology

MUST_AGREE = ("distca", "torch", "nccl")  # ranks that differ in these may hang in each other's calls: nothing is run
ALL_LINKS = 16                # ranks up to which every link is used
LINK_BYTES = {"cpu": (2**22, 8), "cuda": (2**27, 8)}  # for bandwidth and latency; what may hang comes first
ATTENTION_CALLS = 2           # the first prepares and compiles; both are compared
ROW_TILES = {"cpu": 2, "cuda": 8}  # of a rank at least, in which attention is compared
SHARD = {"cpu": (256, 1_024), "cuda": (4_096, 16_384)}  # queries and keys whose speed is measured
BOOT, DRIVER = Path("/proc/sys/kernel/random/boot_id"), Path("/proc/driver/nvidia/version")
Record = dict[str, Any]


def examine(
    call: RollCall, device: torch.device, join: Callable[[], object], update: Callable[[str], object] = lambda _: None
) -> list[Record]:
    """Return the records of all ranks, on every rank; `join` starts the process group, `update` reports progress."""
    record = facts(device)
    record["name"] = call.name = (f"{call.name} ({record['host']}"
                                  f"{'' if device.index is None else f', GPU {device.index}'})")
    update("ranks")
    ranks = call.gather("the meeting of all ranks", record)
    if any(one["versions"].get(name) != record["versions"].get(name) for one in ranks for name in MUST_AGREE):
        return ranks
    node = Topology.of_hosts([one["host"] for one in ranks]).node
    call.step("connecting the ranks by gloo, over the network that GLOO_SOCKET_IFNAME names")
    join()
    update("links")
    record["links"] = links(call, C10dTransport(), device, node)
    update("attention")
    names = ["c10d", *["flat"] * (1 < len(set(node.tolist())) < call.world),
             *["auto"] * ("cuda:nccl" in dist.get_backend_config() and call.world > 1)]
    record["attention"] = [attention(call, device, node, name) for name in names]
    update("speed")
    gpus = [one["gpu"] or rank for rank, one in enumerate(ranks)]
    for turn in range(max(map(gpus.count, gpus))):               # ranks that share a GPU measure one after the other
        call.step("measuring the speed of matrix products, attention and copies")
        if gpus[:call.rank].count(gpus[call.rank]) == turn:
            record["speed"] = speed(device)
        call.gather("the other ranks' measurements", None)
    return call.gather("the results of all ranks", record)


def facts(device: torch.device) -> Record:
    """Return what this rank runs on and with, and for each kernel why it does not run here, if so."""
    gpu = torch.cuda.get_device_properties(device) if device.type == "cuda" else None
    known = {"python": platform.python_version(), **versions(), "numpy": np.__version__}
    if gpu is not None and dist.is_nccl_available():
        known["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))
    is_of_interest = DRIVER.exists() and (gpu is not None or not torch.cuda.is_available())  # not under --device cpu
    if is_of_interest and (driver := re.search(r"\d+\.\d+[.\d]*", DRIVER.read_text(encoding="utf-8"))):
        known["driver"] = driver.group()
    dtype, model = _sample(device)
    return {"host": platform.node(), "machine": BOOT.read_text().strip() if BOOT.exists() else "", "kind": device.type,
            "device": cpu_name() if gpu is None else gpu.name, "gpu": None if gpu is None else str(gpu.uuid),
            "memory_bytes": None if gpu is None else gpu.total_memory, "versions": known,
            "kernels": {name: kernel_named(name).supports(device, dtype, model.head_dim) for name in KERNELS
                        if name != "dense"}}


def shifts(node: np.ndarray) -> list[int]:
    """Return by how many ranks servers are behind homes: all distances, or some inside nodes and some between them."""
    size, here = len(node), int(np.bincount(node).max())
    if size <= ALL_LINKS:
        return list(range(1, size))
    apart = (here << power for power in range(size.bit_length()))
    return [*range(1, min(here, ALL_LINKS // 2)), *(distance for distance in apart if distance < size)]


def links(call: RollCall, transport: Transport, device: torch.device, node: np.ndarray) -> list[Record]:
    """Measure the links that leave this rank, while every rank sends to the one equally far behind it.

    A rank's exchange lasts as long as the slower of what it sends and receives, so the faster of the two ranks counts.
    """
    rank, size, found = transport.rank, transport.size, []
    for distance in shifts(node):
        to, source, seconds = (rank + distance) % size, (rank - distance) % size, []
        for num_bytes in LINK_BYTES[device.type]:
            splits = [[num_bytes * (other == peer) for other in range(size)] for peer in (to, source)]
            call.step(f"sending {num_bytes:,} bytes to rank {to} and receiving as many from rank {source}")
            transport.exchange(torch.zeros(num_bytes, dtype=torch.uint8, device=device), *splits).wait().cpu()
            call.step("the exchanges of all ranks")
            taken = np.median(exchange_seconds(transport, device, *splits), axis=0)
            seconds.append(float(min(taken[rank], taken[to])))
        found.append({"from": rank, "to": to, "between_nodes": bool(node[rank] != node[to]),
                      "bandwidth": LINK_BYTES[device.type][0] / seconds[0], "latency_seconds": seconds[1]})
    return found


def moving_plan(node: np.ndarray, model: ModelShape, row_tiles: int) -> Plan:
    """Return a plan of documents over two ranks, each rank's queries divided among it and the ranks behind it."""
    size, away = len(node), np.array([0, *shifts(node)])
    tile = TILE * max(1, row_tiles // len(away))
    tokens = tile * len(away)
    layout = pack([2 * tokens] * (size // 2) + [tokens] * (size % 2), ranks=size)
    home, part = np.repeat(np.arange(size), len(away)), np.tile(np.arange(len(away)), size)
    start = home % 2 * tokens + part * tile
    tasks = TaskTable(home // 2, start, start + tile, np.zeros_like(start), start + tile, home,
                      (home + away[part]) % size)
    return Plan(layout, tasks, np.ones(size), 0.0, model)


def attention(call: RollCall, device: torch.device, node: np.ndarray, name: str) -> Record:
    """Compare attention over the transport of this name, and its gradients, with the reference."""
    attend, refused, (dtype, model) = None, None, _sample(device)
    call.step(f"setting up transport {name}")
    try:
        attend = CoreAttention(transport=name)
    except (RuntimeError, UserError) as error:
        refused = str(error).splitlines()[0]
    refusals = [one for one in call.gather(f"transport {name}", refused) if one]
    if attend is None or refusals:
        return {"transport": name, "refused": refusals[0]}
    call.step(f"attention over transport {name}")
    hops = 2 if isinstance(attend.transport, HierarchicalTransport) else 1
    return {"transport": name, "refused": None, "over": type(attend.transport).__name__, "hops": hops,
            **compared(attend, moving_plan(node, model, ROW_TILES[device.type]), device, dtype)}


def compared(attend: CoreAttention, plan: Plan, device: torch.device, dtype: torch.dtype) -> Record:
    """Return each task's server and how far its out and dq are from the reference, and dk and dv of this rank's row."""
    rank, model = attend.transport.rank, plan.model
    tokens, tasks = int(plan.layout.tokens_per_rank()[rank]), np.flatnonzero(plan.tasks.home == rank)
    row = slice(rank % 2 * tokens, (rank % 2 + 1) * tokens)
    random = torch.Generator().manual_seed(rank // 2)            # the ranks of a document draw the same
    length, group = int(plan.layout.lengths[rank // 2]), model.num_heads // model.num_kv_heads
    q, dout, k, v = (torch.randn(length, heads, model.head_dim, generator=random).to(device, dtype)
                     for heads in (model.num_heads, model.num_heads, model.num_kv_heads, model.num_kv_heads))
    calls = []
    for _ in range(ATTENTION_CALLS):
        own = [x[row].clone().requires_grad_() for x in (q, k, v)]
        out = attend(own[0], own[1], own[2], plan)
        calls.append((out, *torch.autograd.grad(out, own, dout[row])))
    off = torch.zeros(4, len(tasks), dtype=torch.float64, device=device)  # of out, dq, dk and dv
    for head in range(model.num_kv_heads):
        heads = [slice(head * group, (head + 1) * group)] * 2 + [slice(head, head + 1)] * 2
        wide = [x[:, some].double().requires_grad_() for x, some in zip((q, k, v), heads[1:], strict=True)]
        dense = dense_attention(wide[0], wide[1], wide[2], [length])
        gradients = torch.autograd.grad(dense, wide, dout[:, heads[0]].double())
        for results in calls:
            for at, (actual, right) in enumerate(zip(results, (dense, *gradients), strict=True)):
                error, size = ((x.detach().unflatten(0, (len(tasks), -1)).flatten(1).norm(dim=1))
                               for x in (actual[:, heads[at]] - right[row], right[row]))
                off[at] = torch.maximum(off[at], (error / size).nan_to_num(nan=1e6, posinf=1e6))
    return {"servers": plan.tasks.server[tasks].tolist(), "tasks": len(plan.tasks),
            "moved": int((plan.tasks.server != plan.tasks.home).sum()),
            "allowed": max(2 * torch.finfo(dtype).eps, 2.0**-13), "off": off[:2].amax(dim=0).tolist(),
            "keys_off": float(off[2:].max())}


def speed(device: torch.device) -> Record:
    """Measure products, attention and copies, and what the shipped table of this device and kernel says, if any."""
    chosen, (q_len, kv_len) = profiling.settings(device.type, _sample(device)[1]), SHARD[device.type]
    calls = profiling.call_seconds(chosen, q_len, kv_len)
    found: Record = {
        "kernel": chosen.kernel.name, "queries": q_len, "keys": kv_len, "shards": [count for count, _ in calls],
        "linear_seconds": profiling.linear_layers(chosen)["forward_seconds"],
        "attention_seconds": [seconds for _, seconds in calls],
        "copy_bytes_per_second": profiling.copy_rate(chosen), "table": None, "table_seconds": []}
    about = profiling.facts(chosen)
    for table in map(shipped_table, shipped_names()):
        if all(table.metadata.get(name) == about[name] for name in ("device", "kernel")):
            time, shards = AttentionTime.of(table, chosen.model), [np.ones(count, dtype=int) for count, _ in calls]
            found |= {"table": table.name, "table_seconds": [
                float(time.servers(q_len * ones, kv_len * ones, 0 * ones, 1, bool(way))[0])
                for way, ones in enumerate(shards)]}
    return found


def _sample(device: torch.device) -> tuple[torch.dtype, ModelShape]:
    return (torch.bfloat16, model_named("llama3-8b")) if device.type == "cuda" else (torch.float32, model_named("tiny"))
