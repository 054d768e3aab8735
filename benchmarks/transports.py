"""How fast bytes move between two processes: links over TCP and over NIXL, gloo, NCCL, and symmetric memory.

Both processes send as much to the other as they receive, as in an exchange of attention; the slower one's time counts,
from a tensor on the device to a tensor on the device. All ways run in turns in one run. Two processes of one GPU show
what a copy inside its memory costs; NCCL connects them by sockets on loopback, each a host of its own to it.
"""

from __future__ import annotations

import argparse
import os
import queue
import time
from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from common import on_ranks
from outputs import RESULTS, host_facts, wide_console, write_json
from rich.table import Table

from distca.runtime.transport import C10dTransport, Exchanges
from distca.runtime.transport.links import Link, Links
from distca.runtime.transport.nixl import memory_for

SECRET = b"of this benchmark alone"
LOOPBACK = "127.0.0.1", 0
SAID = {"nixl": "links over NIXL", "tcp": "links over TCP", "gloo": "gloo's all-to-all", "nccl": "NCCL's all-to-all",
        "symmetric": "symmetric memory", "copy": "a copy inside the memory"}
WAIT_SECONDS = 60
Way = Callable[[torch.Tensor], torch.Tensor]  # sends to the other process, and returns what that sent


@dataclass(frozen=True, slots=True)
class Result:
    """One way and size."""

    way: str
    num_bytes: int           # that each process sends
    seconds: float           # median of the slower process
    least_seconds: float
    bytes_per_second: float  # that each process sends, by the median


def over_links(links: str, device: torch.device) -> Way:
    """Payloads as pools of servers send them."""
    arrived: queue.Queue[torch.Tensor] = queue.Queue()

    def on_message(_: Link, message: dict[str, Any], payload: torch.Tensor | None) -> None:
        if payload is not None:
            arrived.put(payload)

    ends = Links(SECRET, on_message, lambda _: None, listen=LOOPBACK)
    ends.memory = memory_for(links, device, LOOPBACK)
    where: list[Any] = [ends.address]
    dist.broadcast_object_list(where, src=0)
    if dist.get_rank() == 1:
        ends.connect(where[0])
    while not ends.links:
        time.sleep(0.01)
    (link,) = ends.links

    def exchange(send: torch.Tensor) -> torch.Tensor:
        link.send({"kind": "payload"}, send)
        return arrived.get(timeout=WAIT_SECONDS).to(device)

    return exchange


def over(transport: Exchanges) -> Way:
    def exchange(send: torch.Tensor) -> torch.Tensor:
        splits = [0, len(send)] if dist.get_rank() == 0 else [len(send), 0]
        return transport.exchange(send, splits, splits).wait()

    return exchange


def ways(device: torch.device, names: list[str]) -> dict[str, Way]:
    """Those of these that are possible here."""
    found: dict[str, Way] = {"copy": torch.clone, "tcp": over_links("tcp", device),
                             "gloo": over(C10dTransport(dist.new_group(backend="gloo")))}
    if find_spec("nixl") is not None:
        found["nixl"] = over_links("nixl", device)
    if device.type == "cuda":
        from distca.runtime.transport.symmetric import SymmetricTransport

        found |= {"nccl": over(C10dTransport()), "symmetric": over(SymmetricTransport(device=device))}
    return {name: way for name, way in found.items() if name in names}


def timed(way: Way, send: torch.Tensor) -> float:
    """Seconds of one exchange on the slower process."""
    wait(send.device)
    dist.barrier()
    began = time.perf_counter()
    got = way(send)
    wait(send.device)
    seconds = torch.tensor(time.perf_counter() - began)
    assert len(got) == len(send) and got.device == send.device
    dist.all_reduce(seconds, op=dist.ReduceOp.MAX)
    return float(seconds)


def wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def rank_main(options: argparse.Namespace) -> list[Result]:
    device = torch.device("cpu") if options.cpu else torch.device("cuda", 0)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    rows, contestants = [], ways(device, options.ways)
    for megabytes in options.megabytes:
        send = torch.full((megabytes << 20,), dist.get_rank() + 1, dtype=torch.uint8, device=device)
        seconds: dict[str, list[float]] = {name: [] for name in contestants}
        for repeat in range(options.repeats + 1):
            for name, way in contestants.items():
                if repeat == 0:                                  # warms up, and is checked
                    theirs = dist.get_rank() + 1 if name == "copy" else 2 - dist.get_rank()
                    assert bool((way(send) == theirs).all()), name
                else:
                    seconds[name].append(timed(way, send))
        rows += [Result(said, len(send), median(seconds[name]), min(seconds[name]), len(send) / median(seconds[name]))
                 for name, said in SAID.items() if name in seconds]
    dist.barrier()
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cpu", action="store_true", help="host memory, without a GPU")
    parser.add_argument("--megabytes", type=lambda text: [int(one) for one in text.split(",")],
                        default=[1, 4, 16, 64, 256])
    parser.add_argument("--ways", type=lambda text: text.split(","), default=[*SAID], help="some of " + ", ".join(SAID))
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    if not (options.cpu or torch.cuda.is_available()):
        parser.error("torch sees no NVIDIA GPU; --cpu compares the ways between processes on CPUs")
    os.environ["TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES"] = "1"
    rows = on_ranks(2, rank_main, options, nccl=not options.cpu)[0]
    table = Table("way", *(f"{megabytes} MB" for megabytes in options.megabytes), title="GB/s that each process sends")
    for way in dict.fromkeys(row.way for row in rows):
        table.add_row(way, *(f"{row.bytes_per_second / 1e9:.2f}" for row in rows if row.way == way))
    wide_console().print(table)
    about = {} if options.cpu else {"device": torch.cuda.get_device_name(0)}
    where = "cpu" if options.cpu else "gpu"
    write_json(options.output or RESULTS / f"transports_{where}.json",
               {"host": host_facts(**about), "repeats": options.repeats, "rows": rows})


if __name__ == "__main__":
    main()
