"""The Hopper kernel's walk through its packed tables, one matrix tile at a time, in plain Python.

The walks read the flat int32 array alone, as a launch does, and yield what the kernel multiplies next. The launches
stand in for the kernel's on any device and in any dtype: they compute along the walks, sum where the kernel sums, and
refuse to write a place twice.
"""

from collections.abc import Iterator
from itertools import groupby

import numpy as np
import torch

from distca.kernels.hopper.buffers import DeviceTable, Kept, Tables
from distca.kernels.hopper.launch import Kind
from distca.kernels.hopper.tables import BLOCK_ROWS, TILE_BLOCKS, TILE_KEYS
from distca.kernels.hopper.variants import tiles_of
from distca.kernels.interface import BackwardInputs, Scores, cap_slope, capped

Packed = tuple[np.ndarray, tuple[int, ...]]  # a table, and the offsets of its sections


def work(num_items: int, kv_heads: int, heads_outer: int) -> Iterator[tuple[int, int]]:
    """(item, head) in the order of the grid."""
    for i in range(num_items * kv_heads):
        yield (i % num_items, i // num_items) if heads_outer else (i // kv_heads, i % kv_heads)


def walk_forward(
    packed: Packed, group: int, kv_heads: int, window: int | None, tile_keys: int = TILE_KEYS,
    step_keys: int | None = None, blocks: int = TILE_BLOCKS,
) -> Iterator[tuple[int, int, int, int, int, int, int, int]]:
    """(head, q_first, q_count, part, k_tile_first, k_lo, k_hi, shift) of every step: its keys are [k_lo, k_hi).

    Parts of tiles are counted from 1; a whole tile is part 0. The table counts in tiles of tile_keys; where dQ is
    computed by itself, steps have step_keys.
    """
    step_keys = step_keys or tile_keys
    ints, (tiles_at, segments_at, merges_at) = packed[0].tolist(), packed[1]
    assert len(ints) == merges_at + 4 * ints[2]
    num_tiles, heads_outer = ints[:2]
    for tile, head in work(num_tiles, kv_heads, heads_outer):
        q_first, q_count, num_steps, segment = ints[tiles_at + 4 * tile : tiles_at + 4 * tile + 4]
        part, q_count = divmod(q_count, 256)
        assert 0 < q_count <= blocks * (BLOCK_ROWS // group)
        assert num_steps > 0
        while num_steps > 0:
            assert segments_at + 4 * segment < merges_at
            k_begin, k_end, shift, _ = ints[segments_at + 4 * segment : segments_at + 4 * segment + 4]
            hi = min(k_end, q_first + q_count + shift)
            lo = k_begin if window is None else max(k_begin, q_first + shift - window + 1)
            n_hi, n_lo = -(-(hi - k_begin) // step_keys), (lo - k_begin) // step_keys
            for n in range(n_hi - 1, n_lo - 1, -1):
                k_tile_first = k_begin + n * step_keys
                k_hi = min(k_end, k_tile_first + step_keys)
                yield head, q_first, q_count, part, k_tile_first, k_tile_first, k_hi, shift
            num_steps -= max(0, -(-(hi - k_begin) // tile_keys) - (lo - k_begin) // tile_keys)
            segment += 1
        assert num_steps == 0, "a tile ends inside a segment"


def walk_backward(
    packed: Packed, group: int, kv_heads: int, window: int | None, tile_keys: int = TILE_KEYS
) -> Iterator[tuple[int, int, int, int, int, int, int, int, int, int, int]]:
    """(head, k_first, k_count, part, block, q_first, q_count, k_begin, k_end, shift, pair) of every block visited.

    The item's keys are [k_first, k_first + k_count), of which the task's are those inside [k_begin, k_end). Parts of
    items are counted from 1; a whole one is part 0.
    """
    ints, (items_at, tasks_at, merges_at, blocks_at) = packed[0].tolist(), packed[1]
    assert blocks_at == merges_at + 4 * ints[3]
    assert len(ints) == blocks_at + 2 * ints[2]
    block_len = BLOCK_ROWS // group
    num_items, heads_outer, num_table_blocks = ints[:3]
    for item, head in work(num_items, kv_heads, heads_outer):
        k_first, k_count, num_blocks, task = ints[items_at + 4 * item : items_at + 4 * item + 4]
        part, k_count = divmod(k_count, 256)
        assert 0 < k_count <= tile_keys
        assert num_blocks > 0
        while num_blocks > 0:
            at = tasks_at + 8 * task
            assert at < merges_at
            q_begin, q_end, k_begin, k_end, shift, block_base, pair_base, _ = ints[at : at + 8]
            task += 1
            a, z = max(k_first, k_begin), min(k_first + k_count, k_end)
            if a >= z or q_end - 1 + shift < a:                  # the last block may be short of a whole one
                continue
            b0, b1 = max(0, a - shift - q_begin) // block_len, (q_end - 1 - q_begin) // block_len
            if window is not None:
                b1 = min(b1, (z - 2 + window - shift - q_begin) // block_len)
            for b in range(b1, b0 - 1, -1):
                q_first = q_begin + b * block_len
                q_count = min(block_len, q_end - q_first)
                assert block_base + b < num_table_blocks
                at = blocks_at + 2 * (block_base + b)
                assert ints[at : at + 2] == [q_first, q_count], "the block's entry is not the task's block"
                yield (head, k_first, k_count, part, block_base + b, q_first, q_count, k_begin, k_end, shift,
                       pair_base + b)
            num_blocks -= max(0, b1 + 1 - b0)
        assert num_blocks == 0, "an item ends inside a task"


def walk_kept(
    packed: Packed, tile_blocks: int, tile_keys: int, group: int, heads: range
) -> Iterator[tuple[int, int, int, int, int, int, bool]]:
    """(head, q_first, q_count, place, k_first, k_stop, is_last) of every product of a block in a tile of dQ."""
    ints, (tiles_at, pairs_at), block_len = packed[0].tolist(), packed[1], BLOCK_ROWS // group
    for tile, head in work(ints[0], len(heads), ints[1]):
        q_first, count, pair, stride = ints[tiles_at + 4 * tile : tiles_at + 4 * tile + 4]
        num_tasks, q_count = divmod(count, 256)
        assert 0 < q_count <= tile_blocks * block_len
        assert num_tasks > 0
        for block in range(-(-q_count // block_len)):
            for task in range(num_tasks):
                at = pairs_at + 4 * (pair + task * stride + block)
                first_key, tiles, place, k_end = ints[at : at + 4]
                for n in range(tiles - 1, -1, -1):
                    k_first = first_key + n * tile_keys
                    yield (head, q_first + block * block_len, min(block_len, q_count - block * block_len), place + n,
                           k_first, min(k_end, k_first + tile_keys), task == num_tasks - 1 and n == 0)


def seen(q: slice, keys: torch.Tensor, shift: int, window: int | None) -> torch.Tensor:
    distance = torch.arange(q.start, q.stop)[:, None] + shift - keys
    return distance >= 0 if window is None else (distance >= 0) & (distance < window)


def write_once(place: torch.Tensor, value: torch.Tensor, written: torch.Tensor) -> None:
    assert not written.any(), "two work items write to the same place"
    written.fill_(True)
    place.copy_(value)


def packed(table: DeviceTable) -> Packed:
    return table.ints.numpy(), table.offsets


def launch_forward(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor, lse: torch.Tensor, kind: Kind, scale: float
) -> None:
    """launch.run_forward, with an online softmax over the steps of a tile, and over its parts."""
    tables, window = kind.tables, kind.scores.window
    kv_heads, group = k.shape[1], q.shape[1] // k.shape[1]
    q, k, v = (x.to(lse.dtype) for x in (q, k, v))
    written = torch.zeros(q.shape[:2], dtype=torch.bool)
    tiles, table = tiles_of(q.shape[2]), tables.forward if tables.tall is None else tables.tall
    walk = walk_forward(packed(table), group, kv_heads, window, tiles.forward_keys,
                        blocks=TILE_BLOCKS if tables.tall is None else tiles.tall_blocks)
    parts = {}
    for (head, q_first, q_count, part), steps in groupby(walk, key=lambda step: step[:4]):
        queries, heads = slice(q_first, q_first + q_count), slice(head * group, (head + 1) * group)
        top = lse.new_full((q_count, group), -torch.inf)
        total, acc = torch.zeros_like(top), lse.new_zeros((q_count, group, v.shape[2]))
        for *_, k_lo, k_hi, shift in steps:
            hidden = ~seen(queries, torch.arange(k_lo, k_hi), shift, window)[:, None]
            scores = torch.einsum("qhd,kd->qhk", q[queries, heads], k[k_lo:k_hi, head]) * scale
            scores = capped(scores, kind.scores.softcap).masked_fill(hidden, -torch.inf)
            higher = torch.maximum(top, scores.amax(dim=-1))
            finite = higher.masked_fill(higher == -torch.inf, 0.0)
            p, less = torch.exp(scores - finite[..., None]), torch.exp(top - finite)
            total, top = total * less + p.sum(dim=-1), higher
            acc = acc * less[..., None] + torch.einsum("qhk,kd->qhd", p, v[k_lo:k_hi, head])
        if part:
            assert (part, head) not in parts, "two work items are the same part"
            parts[part, head] = top, total, acc
            continue
        write_once(out[queries, heads], acc / total[..., None], written[queries, heads])
        lse[queries, heads] = top + total.log()
    for head, q_first, q_count, numbers in merges(tables.forward, kv_heads) if tables.tall is None else ():
        queries, heads = slice(q_first, q_first + q_count), slice(head * group, (head + 1) * group)
        tops, totals, accs = (torch.stack(x) for x in zip(*(parts.pop((n, head)) for n in numbers), strict=True))
        by = torch.exp(tops - tops.amax(dim=0))
        total = (by * totals).sum(dim=0)
        acc = (by[..., None] * accs).sum(dim=0)
        write_once(out[queries, heads], acc / total[..., None], written[queries, heads])
        lse[queries, heads] = tops.amax(dim=0) + total.log()
    assert not parts, "parts that nobody merges"


def merges(table: DeviceTable, kv_heads: int, count_at: int = 2) -> Iterator[tuple[int, int, int, range]]:
    """(head, first token, tokens, parts) of every tile that has parts; `count_at` is where the header counts them."""
    ints, (_, _, merges_at, *_) = packed(table)
    for first, length, part, count in ints[merges_at : merges_at + 4 * ints[count_at]].reshape(-1, 4).tolist():
        for head in range(kv_heads):
            yield head, first, length, range(part + 1, part + 1 + count)


def launch_backward(
    saved: BackwardInputs, gradients: tuple[torch.Tensor, ...], kind: Kind, scale: float, deterministic: bool
) -> None:
    """launch.run_backward: dk and dv are summed per work item, dq per block of the table or by itself.

    Heads whose dS is kept come all at once.
    """
    tables, window, kept = kind.tables, kind.scores.window, kind.tables.kept
    lse = saved[-1]
    dout, q, k, v, out = (x.to(lse.dtype) for x in saved[:-1])
    dq, dk, dv = gradients
    ints, (*_, blocks_at) = packed(tables.backward)
    kv_heads, group = k.shape[1], q.shape[1] // k.shape[1]
    assert ints[2] == tables.num_blocks
    sums = lse.new_zeros((tables.num_blocks, kv_heads, BLOCK_ROWS // group, group, q.shape[2]))
    written = torch.zeros(k.shape[:2], dtype=torch.bool)
    tiles = tiles_of(q.shape[2])
    walk = walk_backward(packed(tables.backward), group, kv_heads, window, tiles.backward_keys)
    places: dict[tuple[int, int], tuple[int, int, torch.Tensor]] = {}
    parts: dict[tuple[int, int], tuple[torch.Tensor, torch.Tensor]] = {}
    for (head, k_first, k_count, part), blocks in groupby(walk, key=lambda visit: visit[:4]):
        heads, tile = slice(head * group, (head + 1) * group), slice(k_first, k_first + k_count)
        dk_sum, dv_sum = (lse.new_zeros((k_count, x.shape[2])) for x in (k, v))
        for *_, block, q_first, q_count, k_begin, k_end, shift, pair in blocks:
            queries, keys = slice(q_first, q_first + q_count), torch.arange(k_first, k_first + k_count)
            shown = seen(queries, keys, shift, window) & (k_begin <= keys) & (keys < k_end)
            p, ds = differentiated((dout, q, k, v, out, lse), queries, heads, tile, head, shown, kind.scores, scale)
            dv_sum += torch.einsum("qhk,qhd->kd", p, dout[queries, heads])
            dk_sum += torch.einsum("qhk,qhd->kd", ds, q[queries, heads])
            sums[block, head, :q_count] += torch.einsum("qhk,kd->qhd", ds, k[tile, head])
            if kept is not None:
                at = kept.table.offsets[1] + 4 * pair
                first_key, num_tiles, first_place, _ = kept.table.ints[at : at + 4].tolist()
                number, inside = divmod(k_first - first_key, tiles.backward_keys)
                assert inside == 0
                assert 0 <= number < num_tiles
                assert (head, first_place + number) not in places, "two gradients of scores have the same place"
                places[head, first_place + number] = q_first, k_first, ds
        if part:
            assert (part, head) not in parts, "two work items are the same part"
            parts[part, head] = dk_sum, dv_sum
            continue
        write_once(dk[tile, head], dk_sum, written[tile, head])
        dv[tile, head] = dv_sum
    for head, k_first, k_count, numbers in merges(tables.backward, kv_heads, count_at=3):
        tile = slice(k_first, k_first + k_count)
        dk_sum, dv_sum = (torch.stack(x).sum(dim=0) for x in zip(*(parts.pop((n, head)) for n in numbers), strict=True))
        write_once(dk[tile, head], dk_sum, written[tile, head])
        dv[tile, head] = dv_sum
    assert not parts, "parts that nobody merges"
    if kept is not None:
        assert {place for _, place in places} == set(range(kept.num_places))
        write_dq_from(places, dq, k, kept, group)
        return
    if deterministic or tiles.dq_apart:
        write_dq((dout, q, k, v, out, lse), dq, tables, kind.scores, scale)
        return
    written = torch.zeros(q.shape[0], dtype=torch.bool)
    for block, (q_first, q_count) in enumerate(ints[blocks_at : blocks_at + 2 * ints[2]].reshape(-1, 2).tolist()):
        queries = slice(q_first, q_first + q_count)
        write_once(dq[queries], sums[block, :, :q_count].transpose(0, 1).flatten(1, 2), written[queries])


def write_dq(
    saved: tuple[torch.Tensor, ...], dq: torch.Tensor, tables: Tables, how: Scores, scale: float
) -> None:
    """dQ by itself, along forward's walk."""
    (_, q, k, *_), window = saved, how.window
    kv_heads, group = k.shape[1], q.shape[1] // k.shape[1]
    written = torch.zeros(q.shape[:2], dtype=torch.bool)
    tiles = tiles_of(q.shape[2])
    walk = walk_forward(packed(tables.forward), group, kv_heads, window, tiles.forward_keys, tiles.dq_keys)
    parts = {}
    for (head, q_first, q_count, part), steps in groupby(walk, key=lambda step: step[:4]):
        queries, heads = slice(q_first, q_first + q_count), slice(head * group, (head + 1) * group)
        total = q.new_zeros((q_count, group, q.shape[2]))
        for *_, k_lo, k_hi, shift in steps:
            tile = slice(k_lo, k_hi)
            shown = seen(queries, torch.arange(k_lo, k_hi), shift, window)
            _, ds = differentiated(saved, queries, heads, tile, head, shown, how, scale)
            total += torch.einsum("qhk,kd->qhd", ds, k[tile, head])
        if part:
            parts[part, head] = total
        else:
            write_once(dq[queries, heads], total, written[queries, heads])
    for head, q_first, q_count, numbers in merges(tables.forward, kv_heads):
        queries, heads = slice(q_first, q_first + q_count), slice(head * group, (head + 1) * group)
        write_once(dq[queries, heads], torch.stack([parts.pop((n, head)) for n in numbers]).sum(dim=0),
                   written[queries, heads])
    assert not parts, "parts that nobody merges"


def write_dq_from(
    places: dict[tuple[int, int], tuple[int, int, torch.Tensor]], dq: torch.Tensor, k: torch.Tensor, kept: Kept,
    group: int,
) -> None:
    """dQ from gradients of scores, each read once, by the block and with the keys that it was kept for."""
    written = torch.zeros(dq.shape[:2], dtype=torch.bool)
    total, kv_heads = torch.zeros(()), k.shape[1]
    tiles = tiles_of(dq.shape[2])
    is_last = True
    for head, q_first, q_count, place, k_first, k_stop, ends in walk_kept(
        packed(kept.table), tiles.kept_blocks, tiles.backward_keys, group, range(kv_heads)
    ):
        queries, heads = slice(q_first, q_first + q_count), slice(head * group, (head + 1) * group)
        if is_last:
            total = dq.new_zeros((q_count, group, dq.shape[2]))
        kept_q, kept_k, ds = places.pop((head, place))
        assert (kept_q, kept_k, len(ds)) == (q_first, k_first, q_count)
        assert not ds[..., k_stop - k_first :].any(), "keys behind the task's last have a gradient"
        total = total + torch.einsum("qhk,kd->qhd", ds[..., : k_stop - k_first], k[k_first:k_stop, head])
        is_last = ends
        if ends:
            write_once(dq[queries, heads], total, written[queries, heads])
    assert not places, "gradients of scores that nobody reads"


def differentiated(
    saved: tuple[torch.Tensor, ...], queries: slice, heads: slice, tile: slice, head: int, shown: torch.Tensor,
    how: Scores, scale: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Probabilities of these queries and keys, and the gradients of their scores: [q, h, k] each."""
    dout, q, k, v, out, lse = saved
    scores = capped(torch.einsum("qhd,kd->qhk", q[queries, heads], k[tile, head]) * scale, how.softcap)
    slope = cap_slope(scores, how.softcap) * scale
    p = torch.exp(scores - lse[queries, heads, None]).masked_fill(~shown[:, None], 0.0)
    delta = (dout[queries, heads] * out[queries, heads]).sum(dim=-1, keepdim=True)
    return p, p * (torch.einsum("qhd,kd->qhk", dout[queries, heads], v[tile, head]) - delta) * slope
