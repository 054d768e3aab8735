"""Measure this machine's attention, linear layers and network, so that plans and predictions count its own seconds.

Attention is timed over a grid of (q_len, kv_len), queries at the end of their keys, forward and backward apart. One
short shard alone leaves most of a GPU idle, while a server computes the many shards of its batch in one call. So a grid
point is several identical shards in one call, enough to fill the device, and the time is divided by their number. Each
has keys of its own; only in forward, where those of enough shards would not fit, they share them. Beyond MAX_Q_LEN
queries throughput no longer changes and the table charges its peak.

A kernel that draws items from a work list (cost/dealing.py) says how large they are. Then a few batches of equal
items give what a launch costs and how much faster items run on an idle device, and with that the launch and the tail
are taken out of the grid's times: what is left is what a shard adds to a full batch. Times are medians; see timing.py.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from statistics import median
from typing import Any

import numpy as np
import torch

from distca.cost.dealing import Tasks, WorkList
from distca.cost.latency_table import LatencyTable, peak_rate
from distca.cost.work import attention_backward_flops, attention_flops, pairs_of_shard
from distca.kernels import Kernel, TaskRows, choose
from distca.kernels.hopper.kernel import HopperKernel
from distca.kernels.interface import BackwardInputs
from distca.models import model_named
from distca.profiling.machine import Run, copy_rate, facts, in_turns, linear_layers, queued_samples
from distca.profiling.machine import versions as versions
from distca.spec import ModelShape
from distca.validation import UserError, check_whole

MIN_LEN = 128
MAX_Q_LEN = 2**16  # longer shards run at the rate of these
DEVICES = ("auto", "cpu", "cuda")


@dataclass(frozen=True, slots=True)
class ProfileLimits:
    """What is worth measuring on one kind of device."""

    max_kv_len: int       # unless the user says
    most_kv_len: int      # whatever the user says
    why: str              # that is the most
    num_tiles: int        # tiles of 128 queries, over all heads, that fill the device in a batch of shards
    num_pairs: int        # per call, so that launching it costs little beside it
    most_q_tokens: int    # per batch of shards, as many as a server holds
    most_kv_tokens: int
    budget_seconds: float  # for the samples of one measurement
    most_samples: int
    linear_tokens: int
    copy_bytes: int


CPU = ProfileLimits(2_048, 524_288, "whose keys and values of a layer take 4 GB", 1, 2**16, 4_096, 8_192, 0.1, 30, 256,
                    2**26)
CUDA = ProfileLimits(524_288, 2**22, "whose keys and values of a layer take 16 GB", 2_048, 2**26, 65_536, 2**20, 0.1,
                     1_000, 8_192, 2**30)
SHORT_ITEM, LONG_ITEM = 16, 256   # tiles that an item of a probe walks


@dataclass(frozen=True, slots=True)
class ProfileSettings:
    """One profile's subject."""

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
    def grid(self) -> list[tuple[int, int]]:
        return [(q, kv) for kv in self.kv_len for q in self.q_len if q <= kv]


def settings(
    device: str = "auto",
    model: str | ModelShape = "llama3-8b",
    tp: int = 1,
    kernel: str = "auto",
    max_kv_len: int | None = None,
    quick: bool = False,
) -> ProfileSettings:
    """Check what the user asks for; `quick` takes every second length and few samples."""
    if device not in DEVICES:
        raise UserError(f"device is {device!r}; choose one of: {', '.join(DEVICES)}")
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
    """Powers of two from 128 on, and the longest itself."""
    octaves = range(0, max(1, math.ceil(math.log2(longest / MIN_LEN))), every)
    return (*(MIN_LEN << octave for octave in octaves), longest)


def num_steps(chosen: ProfileSettings) -> int:
    """How often `profile` reports progress."""
    return len(chosen.grid) + 3


def profile(
    chosen: ProfileSettings, step: Callable[[str], None], network: dict[str, object] | None = None
) -> LatencyTable:
    """The latency table of this machine; `step` hears what comes next."""
    tensors = _Tensors.random(chosen)
    step("work list")
    items = work_list_facts(chosen, tensors)
    heads, kv_heads = chosen.model.heads_per_rank(chosen.tp), chosen.model.kv_heads_per_rank(chosen.tp)
    work_list = None if items is None else WorkList.of(items, heads, kv_heads)
    seconds = np.full((2, len(chosen.q_len), len(chosen.kv_len)), np.nan)
    for q_len, kv_len in chosen.grid:
        step(f"attention {q_len} x {kv_len}")
        at = chosen.q_len.index(q_len), chosen.kv_len.index(kv_len)
        seconds[(slice(None), *at)] = attention_seconds(chosen, tensors, q_len, kv_len, work_list)
    forward, backward = seconds
    del tensors
    step("linear layers")
    linear = linear_layers(chosen)
    step("copies")
    metadata = {**facts(chosen), "linear": linear, "copy_bytes_per_second": copy_rate(chosen), "network": network,
                "work_list": items}
    q_grid, kv_grid = np.array(chosen.q_len), np.array(chosen.kv_len)
    return LatencyTable(
        name=f"{metadata['device']}, {chosen.model.name}" + (f", tp {chosen.tp}" if chosen.tp > 1 else ""),
        q_len=q_grid,
        kv_len=kv_grid,
        forward_seconds=forward,
        backward_seconds=backward,
        peak_pairs_per_second=peak_rate(q_grid, kv_grid, forward),
        metadata=metadata,
    )


@dataclass(frozen=True, slots=True)
class _Tensors:
    """Random inputs, as long as the longest batch; every grid point uses their beginning."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    dout: torch.Tensor

    @classmethod
    def random(cls, chosen: ProfileSettings) -> _Tensors:
        num_q = max(q * num_shards(chosen, q, kv, own_keys=own) for q, kv in chosen.grid for own in (False, True))
        num_k = max(kv * num_shards(chosen, q, kv) for q, kv in chosen.grid)
        heads, kv_heads = chosen.model.heads_per_rank(chosen.tp), chosen.model.kv_heads_per_rank(chosen.tp)
        dim, value_dim = chosen.model.head_dim, chosen.model.value_dim
        q, k, v, dout = (torch.randn(shape, dtype=chosen.dtype, device=chosen.device) for shape in (
            (num_q, heads, dim), (num_k, kv_heads, dim), (num_k, kv_heads, value_dim), (num_q, heads, value_dim)))
        return cls(q, k, v, dout)


def num_shards(chosen: ProfileSettings, q_len: int, kv_len: int, *, own_keys: bool = True) -> int:
    """Shards of one grid point that fill the device, within what a server would hold."""
    limits = chosen.limits
    tiles = chosen.model.heads_per_rank(chosen.tp) * -(-q_len // MIN_LEN)
    wanted = max(-(-limits.num_tiles // tiles), -(-limits.num_pairs // pairs_of_shard(q_len, kv_len)))
    return max(1, min(wanted, limits.most_q_tokens // q_len, limits.most_kv_tokens // kv_len if own_keys else wanted))


def attention_seconds(
    chosen: ProfileSettings, tensors: _Tensors, q_len: int, kv_len: int, work_list: WorkList | None = None
) -> tuple[float, float]:
    """Forward and backward seconds of one shard among as many as fill the device."""
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
    return (_of_one(forward, q_len, kv_len, counts[0], False, work_list),
            _of_one(backward, q_len, kv_len, counts[1], True, work_list))


def _of_one(
    seconds: float, q_len: int, kv_len: int, count: int, backward: bool, work_list: WorkList | None
) -> float:
    """A shard's share, without the launch and the tail."""
    if work_list is None:
        return seconds / count
    shards = Tasks(np.ones(count), np.full(count, float(q_len)), np.full(count, float(kv_len)),
                   np.ones(count, dtype=bool), np.zeros(count, dtype=np.int64), np.arange(count), np.zeros(count))
    (tail,) = work_list.tail(shards, 1, backward)                # of shards that take a second each
    return max(seconds - work_list.launch_seconds[backward], 0.5 * seconds) / (count + float(tail))


def _seconds_of_shards(
    chosen: ProfileSettings, tensors: _Tensors, q_len: int, kv_len: int, counts: tuple[int, int]
) -> tuple[float, float]:
    calls = []
    for backward, count in enumerate(counts):
        shard = np.arange(count)
        k_begin = shard * kv_len * (count * kv_len <= len(tensors.k))  # else all shards have the same keys
        rows = TaskRows.aligned(shard * q_len, (shard + 1) * q_len, k_begin, k_begin + kv_len)
        calls.append(_call(chosen, tensors, rows, bool(backward)))
    forward, backward_seconds = _medians(chosen, calls)
    return forward, backward_seconds


def _call(chosen: ProfileSettings, tensors: _Tensors, rows: TaskRows, backward: bool) -> Run:
    kernel, prepared = chosen.kernel, chosen.kernel.prepare(rows, chosen.device)
    num_q, num_k = int(rows.q_end.max()), int(rows.k_end.max())
    q, dout, k, v = tensors.q[:num_q], tensors.dout[:num_q], tensors.k[:num_k], tensors.v[:num_k]
    if not backward:
        return lambda: kernel.forward(q, k, v, prepared)
    out, lse = kernel.forward(q, k, v, prepared)
    return lambda: kernel.backward(BackwardInputs(dout, q, k, v, out, lse), prepared)


def work_list_facts(chosen: ProfileSettings, tensors: _Tensors) -> dict[str, Any] | None:
    """What cost.work_list needs to know of this kernel and device; None of a kernel without a work list.

    A quarter of the multiprocessors get an item each, short ones and long ones: the launch is what items of no length
    would take. Then all of them get a long one: the ratio of the times is the speed-up on an idle device. The
    launch takes no others, so that no item is split for them.
    """
    kernel = chosen.kernel
    if not isinstance(kernel, HopperKernel) or chosen.device.type != "cuda":
        return None
    query_rows, key_tokens = kernel.item_sizes(chosen.model.head_dim)
    workers = torch.cuda.get_device_properties(chosen.device).multi_processor_count
    kv_heads = chosen.model.kv_heads_per_rank(chosen.tp)
    tile = query_rows * kv_heads // chosen.model.heads_per_rank(chosen.tp)

    def calls(num_items: int, length: int) -> list[Run]:
        """Forward and backward of items that walk so many tiles; all queries see all keys."""
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


def describe(table: LatencyTable) -> list[str]:
    """A profile in a few lines, for people."""
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
    """Of calls that take turns."""
    budget = chosen.limits.budget_seconds * len(runs)
    return [median(one) for one in in_turns(runs, chosen.device, budget_seconds=budget, most=chosen.most_samples)]
