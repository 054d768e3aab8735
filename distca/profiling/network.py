"""Measure the latency and the bandwidth of an all-to-all on a process group.

Every rank sends equally many bytes to every other rank, in several sizes; a sample is the time of the slowest rank, and
the median of the samples counts. Seconds = latency + sent bytes / bandwidth is fitted by relative error, so that small
and large exchanges have the same weight. On CUDA the latency includes the launch and the host's synchronization.
"""

from __future__ import annotations

import json
import os
import tempfile
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from time import perf_counter_ns
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.multiprocessing

from distca.runtime.transport import C10dTransport, Transport
from distca.validation import UserError

CPU_SIZES = tuple(4_096 * 8**power for power in range(5))      # to 16 MiB
CUDA_SIZES = (*CPU_SIZES, 2**27, 2**29)
REPEATS = 7
TIMEOUT = timedelta(minutes=5)  # of any one exchange


@dataclass(frozen=True, slots=True)
class ExchangeCost:
    """Cost of an exchange between `num_ranks` ranks that all send at once."""

    backend: str
    num_ranks: int
    latency_seconds: float
    bandwidth: float                # bytes per second that one rank sends
    sent_bytes: tuple[int, ...]     # per rank
    seconds: tuple[float, ...]


def measure_network(device: torch.device, local_ranks: int | None = None) -> tuple[dict[str, object] | None, bool]:
    """Measure exchanges over the initialized group, over torchrun's, or between `local_ranks` new local processes.

    Every rank of a group must call this. Return a profile's entry, and whether this rank measures the rest of it.
    """
    ours = dist.is_torchelastic_launched() and not dist.is_initialized()
    if ours:
        if device.type == "cuda":
            torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        dist.init_process_group("nccl" if device.type == "cuda" else "gloo", timeout=TIMEOUT)
    if dist.is_initialized():
        if local_ranks is not None:
            raise UserError(f"ranks is {local_ranks} but a process group is running; leave --ranks out under torchrun")
        transport = C10dTransport()
        here = torch.device("cuda", torch.cuda.current_device()) if device.type == "cuda" else device
        cost = asdict(measure_exchange(transport, here, dist.get_backend())) if transport.size > 1 else None
        if ours:
            dist.barrier()
            dist.destroy_process_group()
        return cost, transport.rank == 0
    return None if local_ranks is None else asdict(measure_local(local_ranks, device)), True


def measure_exchange(transport: Transport, device: torch.device, backend: str) -> ExchangeCost:
    """Measure exchanges; every rank of the transport must call this at the same time."""
    if transport.size < 2:
        raise UserError(f"the group has {transport.size} rank; give at least 2 to measure an exchange")
    sent, seconds = [], []
    for size in CUDA_SIZES if device.type == "cuda" else CPU_SIZES:
        share = size // (transport.size - 1)
        sent.append(share * (transport.size - 1))
        seconds.append(_seconds(transport, device, share))
    latency, bandwidth = fit(np.array(sent), np.array(seconds))
    return ExchangeCost(backend, transport.size, latency, bandwidth, tuple(sent), tuple(seconds))


def _seconds(transport: Transport, device: torch.device, share: int) -> float:
    splits = [share] * transport.size
    splits[transport.rank] = 0
    return float(np.median(exchange_seconds(transport, device, splits, splits).max(axis=1)))


def exchange_seconds(
    transport: Transport, device: torch.device, send_splits: list[int], recv_splits: list[int]
) -> np.ndarray:
    """Return every rank's seconds in repetitions of one exchange, [repetitions, ranks]; every rank must call this."""
    send = torch.randint(0, 256, (sum(send_splits),), dtype=torch.uint8, device=device)
    nanoseconds = []
    for _ in range(REPEATS + 1):
        _synchronize(device)
        transport.gather(0, device)
        begin = perf_counter_ns()
        transport.exchange(send, send_splits, recv_splits).wait()
        _synchronize(device)
        nanoseconds.append(transport.gather(perf_counter_ns() - begin, device))
    return np.array(nanoseconds[1:]) / 1e9


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def fit(sent_bytes: np.ndarray, seconds: np.ndarray) -> tuple[float, float]:
    """Fit latency and bandwidth by least squared relative error; a negative latency becomes 0."""
    columns = np.stack([1 / seconds, sent_bytes / seconds], axis=1)
    (latency, per_byte), *_ = np.linalg.lstsq(columns, np.ones(len(seconds)), rcond=None)
    if latency < 0 or per_byte <= 0:
        latency, per_byte = 0.0, float(np.mean(seconds / sent_bytes))
    return float(latency), 1 / float(per_byte)


def measure_local(num_ranks: int, device: torch.device) -> ExchangeCost:
    """Measure exchanges between `num_ranks` new processes on this machine: NCCL with a GPU each, or gloo on the CPU."""
    if num_ranks < 2:
        raise UserError(f"ranks is {num_ranks}; give at least 2 to measure an exchange")
    if device.type == "cuda" and num_ranks > torch.cuda.device_count():
        raise UserError(f"ranks is {num_ranks} but this machine has {torch.cuda.device_count()} GPU(s); give at most "
                        "one rank per GPU, or --device cpu")
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(_local_rank, (num_ranks, device.type, folder), nprocs=num_ranks)
        content: dict[str, Any] = json.loads((Path(folder) / "cost.json").read_text(encoding="utf-8"))
    return ExchangeCost(**{**content, "sent_bytes": tuple(content["sent_bytes"]), "seconds": tuple(content["seconds"])})


def _local_rank(rank: int, num_ranks: int, device_type: str, folder: str) -> None:
    torch.set_num_threads(1)
    on_gpu = device_type == "cuda"
    device = torch.device("cuda", rank) if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(device)
    backend = "nccl" if on_gpu else "gloo"
    dist.init_process_group(backend, init_method=f"file://{folder}/store", rank=rank, world_size=num_ranks,
                            timeout=TIMEOUT)
    cost = measure_exchange(C10dTransport(), device, backend)
    if rank == 0:
        (Path(folder) / "cost.json").write_text(json.dumps(asdict(cost)), encoding="utf-8")
    dist.barrier()
    dist.destroy_process_group()
