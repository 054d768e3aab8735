"""What the launches of exchange_triton do with their tables, block after block in plain torch, on any device."""

from __future__ import annotations

import torch

from distca.runtime.copy_tables import Copies, Merges, Sums
from distca.runtime.exchange import Tensors


def numbers(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """All of a contiguous tensor's bytes, as numbers of this kind."""
    return tensor.reshape(-1).view(torch.uint8).view(dtype)


def copy(how: Copies, sources: Tensors, targets: Tensors) -> None:
    for source, target, there, here, count in (how.table * torch.tensor([1, 1, *[how.unit] * 3])).tolist():
        numbers(targets[target], torch.uint8)[here:here + count] = numbers(
            sources[source], torch.uint8)[there:there + count]


def combine(how: Sums | Merges, wire: torch.Tensor, buffers: Tensors, rows: Tensors) -> None:
    if isinstance(how, Sums):
        add(how, wire, buffers, rows)
    else:
        merge(how, wire, buffers, rows)


def add(how: Sums, wire: torch.Tensor, buffers: Tensors, rows: Tensors) -> None:
    for field, first, count, skipped, begin, end in how.table.tolist():
        kind, unit = rows[field].dtype, how.unit // rows[field].element_size()
        total = torch.zeros(count * unit, dtype=kind)
        for is_on_wire, at in how.parts[begin:end].tolist():
            source = numbers(wire if is_on_wire else buffers[field], kind)
            total += source[(at + skipped) * unit:(at + skipped + count) * unit]
        numbers(rows[field], kind)[first * unit:(first + count) * unit] = total


def merge(how: Merges, wire: torch.Tensor, buffers: Tensors, rows: Tensors) -> None:
    (out, lse), dim = rows, rows[0].shape[-1]
    unit = how.unit // out.element_size()
    for first, count, skipped, begin, end in how.table.tolist():
        outs, lses = [torch.zeros(count, dim, dtype=out.dtype)], [torch.full((count,), -torch.inf, dtype=lse.dtype)]
        for is_on_wire, out_at, lse_at in how.parts[begin:end].tolist():
            there = [numbers(wire if is_on_wire else one, one.dtype) for one in buffers]
            at = out_at * unit + skipped * dim
            outs.append(there[0][at:at + count * dim].view(count, dim))
            lses.append(there[1][lse_at + skipped:lse_at + skipped + count])
        together = torch.logsumexp(torch.stack(lses), dim=0)
        finite = together.masked_fill(together == -torch.inf, 0.0)
        total = sum(torch.exp(one - finite)[:, None] * part for one, part in zip(lses, outs, strict=True))
        numbers(lse, lse.dtype)[first:first + count] = together
        numbers(out, out.dtype)[first * dim:(first + count) * dim] = total.flatten()  # type: ignore[union-attr]
