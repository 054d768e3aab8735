"""Measure this machine's attention, linear layers and copies, so that plans and predictions use its own seconds.

Attention is timed over a grid of (q_len, kv_len), queries at the end of their keys, forward and backward separately.
One short shard alone leaves most of a GPU idle, while a server computes many shards in one call. So a grid point is one
call with several identical shards, enough to fill the device, and the time is divided by their number. Each shard has
its own keys; in forward, all shards share keys if separate keys would not fit. Beyond MAX_Q_LEN queries throughput no
longer changes and the table charges its peak.

If the kernel has a work list (cost/dealing.py), a few batches of equal items measure the launch and the speed-up of
items on an idle device. The launch and the tail are then subtracted from the grid's times: the rest is the time that a
shard adds to a full batch. Times are medians; see machine.py.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from statistics import median
from typing import Any

import numpy as np
import torch

from distca.cost.dealing import Tasks, WorkList
from distca.cost.latency_table import LatencyTable, peak_rate
from distca.cost.work import attention_backward_flops, attention_flops, linear_flops, pairs_of_shard
from distca.kernels import Kernel, TaskRows, choose
from distca.kernels.hopper.kernel import HopperKernel
from distca.kernels.interface import BackwardInputs
from distca.models import model_named
from distca.profiling.machine import Run, cpu_name, in_turns, queued_samples, versions
from distca.spec import ModelShape
from distca.validation import UserError, check_choice, check_whole

MIN_LEN = 128
MAX_Q_LEN = 2**16  # longer shards run at the rate of these
DEVICES = ("auto", "cpu", "cuda")


@dataclass(frozen=True, slots=True)
class ProfileLimits:
    """Limits of a profile on one kind of device."""

    max_kv_len: int       # by default
    most_kv_len: int      # that a user may ask for
    why: str              # reason for most_kv_len, in its error message
    num_tiles: int        # tiles of 128 queries, over all heads, that fill the device in a batch of shards
    num_pairs: int        # per call, so that the launch is a small part of its time
    most_q_tokens: int    # per batch of shards: what a server holds
    most_kv_tokens: int
    budget_seconds: float  # for the samples of one measurement
    most_samples: int
    linear_tokens: int
    copy_bytes: int


CPU = ProfileLimits(2_048, 524_288, "whose keys and values of a layer take 4 GB", 1, 2**16, 4_096, 8_192, 0.1, 30, 256,
                    2**26)
CUDA = ProfileLimits(524_288, 2**22, "whose keys and values of a layer take 16 GB", 2_048, 2**26, 65_536, 2**20, 0.1,
                     1_000, 8_192, 2**30)
SHORT_ITEM, LONG_ITEM = 16, 256   # tiles per item in measurements of the work list


@dataclass(frozen=True, slots=True)
class ProfileSettings:
    """Checked options of one profile."""

    device: torch.device
    dtype: torch.dtype
    model: ModelShape
    tp: int
    kernel: Kernel
    q_len: tuple[int, ...]
    kv_len: tuple[int, ...]
    limits: ProfileLimits
    most_samples: int

    @property
    def heads(self) -> tuple[int, int]:
        """Query and key heads of a tensor-parallel rank."""
        return self.model.heads_per_rank(self.tp), self.model.kv_heads_per_rank(self.tp)

    @property
    def num_updates(self) -> int:
        """Number of progress reports of `profile`."""
        return len(self.grid) + 3

    @property
    def grid(self) -> list[tuple[int, int]]:
        return [(q, kv) for kv in self.kv_len for q in self.q_len if q <= kv]


def settings(
    device: str = "auto", model: str | ModelShape = "llama3-8b", tp: int = 1, kernel: str = "auto",
    max_kv_len: int | None = None, quick: bool = False,
) -> ProfileSettings:
    """Check the options; `quick` takes every second length and few samples."""
    check_choice("device", device, DEVICES)
    if device == "cuda" and not torch.cuda.is_available():
        raise UserError("device is 'cuda' but torch finds no GPU; give --device cpu, or install torch with CUDA")
    use_gpu = torch.cuda.is_available() if device == "auto" else device == "cuda"
    limits = CUDA if use_gpu else CPU
    where = torch.device("cuda", torch.cuda.current_device()) if use_gpu else torch.device("cpu")
    dtype = torch.bfloat16 if use_gpu else torch.float32
    longest = limits.max_kv_len if max_kv_len is None else max_kv_len
    check_whole("max_kv_len", longest, least=2 * MIN_LEN, most=limits.most_kv_len, why=limits.why)
    shape = model if isinstance(model, ModelShape) else model_named(model)
    shape.kv_heads_per_rank(tp)
    kv_len = lengths_up_to(longest, every=2 if quick else 1)
    q_len = tuple(length for length in kv_len if length <= MAX_Q_LEN)
    chosen = choose(where, dtype, shape.head_dim, name=kernel, value_dim=shape.value_dim)
    return ProfileSettings(where, dtype, shape, tp, chosen, q_len, kv_len, limits, 5 if quick else limits.most_samples)


def lengths_up_to(longest: int, every: int = 1) -> tuple[int, ...]:
    """128 times powers of two, or `every` nth of these, and the longest itself."""
    octaves = range(0, max(1, math.ceil(math.log2(longest / MIN_LEN))), every)
    return (*(MIN_LEN << octave for octave in octaves), longest)


def profile(
    chosen: ProfileSettings, update: Callable[[str], None], network: dict[str, object] | None = None
) -> LatencyTable:
    """Measure the latency table of this machine; `update` is the progress callback."""
    tensors = _Tensors.random(chosen)
    update("work list")
    items = work_list_facts(chosen, tensors)
    work_list = None if items is None else WorkList.of(items, *chosen.heads)
    seconds = np.full((2, len(chosen.q_len), len(chosen.kv_len)), np.nan)
    for q_len, kv_len in chosen.grid:
        update(f"attention {q_len} x {kv_len}")
        at = chosen.q_len.index(q_len), chosen.kv_len.index(kv_len)
        seconds[(slice(None), *at)] = attention_seconds(chosen, tensors, q_len, kv_len, work_list)
    forward, backward = seconds
    del tensors
    update("linear layers")
    linear = linear_layers(chosen)
    update("copies")
    metadata = {**facts(chosen), "linear": linear, "copy_bytes_per_second": copy_rate(chosen), "network": network,
                "work_list": items}
    q_grid, kv_grid = np.array(chosen.q_len), np.array(chosen.kv_len)
    name = f"{metadata['device']}, {chosen.model.name}" + (f", tp {chosen.tp}" if chosen.tp > 1 else "")
    return LatencyTable(name=name, q_len=q_grid, kv_len=kv_grid, forward_seconds=forward, backward_seconds=backward,
                        peak_pairs_per_second=peak_rate(q_grid, kv_grid, forward), metadata=metadata)


@dataclass(frozen=True, slots=True)
class _Tensors:
    """Random inputs for the longest batch; every grid point uses their beginning."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    dout: torch.Tensor

    @classmethod
    def random(cls, chosen: ProfileSettings) -> _Tensors:
        num_q = max(q * num_shards(chosen, q, kv, own_keys=own) for q, kv in chosen.grid for own in (False, True))
        num_k = max(kv * num_shards(chosen, q, kv) for q, kv in chosen.grid)
        heads, kv_heads = chosen.heads
        dim, value_dim = chosen.model.head_dim, chosen.model.value_dim
        q, k, v, dout = (torch.randn(shape, dtype=chosen.dtype, device=chosen.device) for shape in (
            (num_q, heads, dim), (num_k, kv_heads, dim), (num_k, kv_heads, value_dim), (num_q, heads, value_dim)))
        return cls(q, k, v, dout)


def num_shards(chosen: ProfileSettings, q_len: int, kv_len: int, *, own_keys: bool = True) -> int:
    """Number of shards of a grid point: enough to fill the device, at most what a server would hold."""
    limits = chosen.limits
    tiles = chosen.heads[0] * -(-q_len // MIN_LEN)
    wanted = max(-(-limits.num_tiles // tiles), -(-limits.num_pairs // pairs_of_shard(q_len, kv_len)))
    return max(1, min(wanted, limits.most_q_tokens // q_len, limits.most_kv_tokens // kv_len if own_keys else wanted))


def attention_seconds(
    chosen: ProfileSettings, tensors: _Tensors, q_len: int, kv_len: int, work_list: WorkList | None = None
) -> tuple[float, float]:
    """Forward and backward seconds of one shard in a batch that fills the device."""
    counts = num_shards(chosen, q_len, kv_len, own_keys=False), num_shards(chosen, q_len, kv_len)
    while True:
        try:
            forward, backward = _seconds_of_shards(chosen, tensors, q_len, kv_len, counts)
            break
        except torch.OutOfMemoryError:
            if max(counts) == 1:
                raise UserError(f"attention of {q_len} queries and {kv_len} keys does not fit the memory of "
                                f"{chosen.device}; give a smaller --max-kv-len or a larger --tp") from None
        torch.cuda.empty_cache()
        counts = max(1, counts[0] // 2), max(1, counts[1] // 2)
    return (_seconds_per_shard(forward, q_len, kv_len, counts[0], False, work_list),
            _seconds_per_shard(backward, q_len, kv_len, counts[1], True, work_list))


def call_seconds(chosen: ProfileSettings, q_len: int, kv_len: int) -> list[tuple[int, float]]:
    """Return the number of shards and the seconds of a forward and of a backward call that fill the device."""
    only = replace(chosen, q_len=(q_len,), kv_len=(kv_len,))
    seconds = attention_seconds(only, _Tensors.random(only), q_len, kv_len)
    counts = (num_shards(only, q_len, kv_len, own_keys=own) for own in (False, True))
    return [(count, count * one) for count, one in zip(counts, seconds, strict=True)]


def _seconds_per_shard(
    seconds: float, q_len: int, kv_len: int, count: int, backward: bool, work_list: WorkList | None
) -> float:
    """Divide a call's seconds by its shards, without the launch and the tail."""
    if work_list is None:
        return seconds / count
    shards = Tasks(np.ones(count), np.full(count, float(q_len)), np.full(count, float(kv_len)),
                   np.ones(count, dtype=bool), np.zeros(count, dtype=np.int64), np.arange(count), np.zeros(count))
    (tail,) = work_list.tail(shards, 1, backward)                # in units of a shard's seconds
    return max(seconds - work_list.launch_seconds[backward], 0.5 * seconds) / (count + float(tail))


def _seconds_of_shards(
    chosen: ProfileSettings, tensors: _Tensors, q_len: int, kv_len: int, counts: tuple[int, int]
) -> tuple[float, float]:
    calls = []
    for backward, count in enumerate(counts):
        shard = np.arange(count)
        k_begin = shard * kv_len * (count * kv_len <= len(tensors.k))  # else all shards have the same keys
        tasks = TaskRows.aligned(shard * q_len, (shard + 1) * q_len, k_begin, k_begin + kv_len)
        calls.append(_call(chosen, tensors, tasks, bool(backward)))
    forward, backward_seconds = _medians(chosen, calls)
    return forward, backward_seconds


def _call(chosen: ProfileSettings, tensors: _Tensors, tasks: TaskRows, backward: bool) -> Run:
    kernel, prepared = chosen.kernel, chosen.kernel.prepare(tasks, chosen.device)
    num_q, num_k = int(tasks.q_end.max()), int(tasks.k_end.max())
    q, dout, k, v = tensors.q[:num_q], tensors.dout[:num_q], tensors.k[:num_k], tensors.v[:num_k]
    if not backward:
        return lambda: kernel.forward(q, k, v, prepared)
    out, lse = kernel.forward(q, k, v, prepared)
    return lambda: kernel.backward(BackwardInputs(dout, q, k, v, out, lse), prepared)


def work_list_facts(chosen: ProfileSettings, tensors: _Tensors) -> dict[str, Any] | None:
    """Measure the parameters of `WorkList` for this kernel and device; None for a kernel without a work list.

    A quarter of the multiprocessors get one item each, first short and then long ones: extrapolating to items of length
    zero gives the launch. Then all multiprocessors get a long item: the ratio of the times is the speed-up on an idle
    device. A call uses only as many multiprocessors as it has items, so that no item is split.
    """
    kernel = chosen.kernel
    if not isinstance(kernel, HopperKernel) or chosen.device.type != "cuda":
        return None
    query_rows, key_tokens = kernel.item_sizes(chosen.model.head_dim)
    workers = torch.cuda.get_device_properties(chosen.device).multi_processor_count
    heads, kv_heads = chosen.heads
    tile = query_rows * kv_heads // heads

    def calls(num_items: int, length: int) -> list[Run]:
        """Forward and backward calls of items of `length` tiles; all queries see all keys."""
        number, zero = max(1, num_items // kv_heads), np.zeros(1, dtype=np.int64)
        only = replace(chosen, kernel=replace(kernel, num_sms=min(workers, number * kv_heads)))
        sides = (number * tile, length * key_tokens), (length * tile, number * key_tokens)
        return [_call(only, tensors, TaskRows(zero, zero + q, zero, zero + k, zero + k), bool(backward))
                for backward, (q, k) in enumerate(sides)]

    few = workers // 4
    short, long = ([median(queued_samples(run)) for run in calls(few, length)] for length in (SHORT_ITEM, LONG_ITEM))
    launch = [max(0.0, a - (b - a) * SHORT_ITEM / (LONG_ITEM - SHORT_ITEM)) for a, b in zip(short, long, strict=True)]
    idle, full = _medians(chosen, calls(few, LONG_ITEM)), _medians(chosen, calls(workers, LONG_ITEM))
    speedup = [max(1.0, (b - start) / (a - start)) for start, a, b in zip(launch, idle, full, strict=True)]
    return {"num_workers": workers, "query_rows": query_rows, "key_tokens": key_tokens, "launch_seconds": launch,
            "idle_speedup": speedup}


def linear_layers(chosen: ProfileSettings) -> dict[str, float]:
    """Time the matrix products of one layer: Q, K, V and output projections, gate, up and down."""
    model, tokens = chosen.model, chosen.limits.linear_tokens
    attention, kv = (heads * model.head_dim for heads in chosen.heads)
    ffn = -(-model.ffn // chosen.tp)
    widths = [(model.hidden, attention + 2 * kv), (attention, model.hidden), (model.hidden, 2 * ffn),
              (ffn, model.hidden)]

    def random(height: int, width: int) -> torch.Tensor:
        return torch.randn(height, width, dtype=chosen.dtype, device=chosen.device) / math.sqrt(width)

    products = [(random(tokens, wide), random(wide, high), random(tokens, high)) for wide, high in widths]

    def forward() -> None:
        for x, weight, _ in products:
            torch.mm(x, weight)

    def backward() -> None:
        for x, weight, gradient in products:
            torch.mm(gradient, weight.T)
            torch.mm(x.T, gradient)

    (forward_seconds,), (backward_seconds,) = _medians(chosen, [forward]), _medians(chosen, [backward])
    flops = float(linear_flops(tokens, model, chosen.tp))
    return {"tokens": tokens, "forward_seconds": forward_seconds, "backward_seconds": backward_seconds,
            "forward_flops_per_second": flops / forward_seconds,
            "backward_flops_per_second": 2 * flops / backward_seconds}


def copy_rate(chosen: ProfileSettings) -> float:
    """Bytes read plus bytes written per second by a large copy inside the device."""
    source = torch.randint(0, 256, (chosen.limits.copy_bytes,), dtype=torch.uint8, device=chosen.device)
    target = torch.empty_like(source)
    return 2 * source.numel() / _medians(chosen, [lambda: target.copy_(source)])[0]


def facts(chosen: ProfileSettings) -> dict[str, Any]:
    """Describe the machine, the kernel and the heads, for the table."""
    gpu = chosen.device.type == "cuda"
    heads, kv_heads = chosen.heads
    return {
        "device": torch.cuda.get_device_name(chosen.device) if gpu else cpu_name(),
        "date": datetime.now(UTC).date().isoformat(), "versions": versions(), "kernel": chosen.kernel.name,
        "dtype": str(chosen.dtype).removeprefix("torch."), "model": chosen.model.name, "tp": chosen.tp,
        "num_heads": heads, "num_kv_heads": kv_heads, "head_dim": chosen.model.head_dim,
        "threads": None if gpu else torch.get_num_threads(),
    }


def describe(table: LatencyTable) -> list[str]:
    """Describe a profile in a few lines of text."""
    about: Any = table.metadata
    model, tp = model_named(about["model"]), about["tp"]
    lines = [f"{table.name}: {about['kernel']} in {about['dtype']}", "attention   queries x keys   forward   backward"]
    last = len(table.kv_len) - 1
    for i in sorted({0, len(table.q_len) // 2, len(table.q_len) - 1}):
        pairs = int(pairs_of_shard(int(table.q_len[i]), int(table.kv_len[last])))
        forward = attention_flops(pairs, model, tp) / table.forward_seconds[i, last]
        assert table.backward_seconds is not None
        backward = attention_backward_flops(pairs, model, tp) / table.backward_seconds[i, last]
        shape = f"{table.q_len[i]} x {table.kv_len[last]}"
        lines.append(f"{shape:>26}   {forward / 1e12:7.4g}   {backward / 1e12:8.4g} TFLOP/s")
    linear, cost = about["linear"], about["network"]
    lines.append(f"linear layers {linear['forward_flops_per_second'] / 1e12:.4g} forward, "
                 f"{linear['backward_flops_per_second'] / 1e12:.4g} backward TFLOP/s; copies "
                 f"{about['copy_bytes_per_second'] / 1e9:.4g} GB/s")
    lines.append("network not measured" if cost is None else
                 f"network {cost['bandwidth'] / 1e9:.4g} GB/s and {cost['latency_seconds'] * 1e6:.4g} µs over "
                 f"{cost['num_ranks']} ranks ({cost['backend']})")
    return lines


def _medians(chosen: ProfileSettings, runs: list[Run]) -> list[float]:
    """Median seconds of runs that take turns."""
    budget = chosen.limits.budget_seconds * len(runs)
    return [median(one) for one in in_turns(runs, chosen.device, budget_seconds=budget, most=chosen.most_samples)]
