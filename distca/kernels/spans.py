"""Ranges of tokens in a buffer, gathered for operators that want them side by side, and put back where they were.

Kernels that call packed operators pay for this only where rows do not lie so already: ranges that are neighbours are
one, and one range is a view.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch

from distca.kernels.interface import merge


@dataclass(frozen=True, slots=True)
class Spans:
    """Ranges of a buffer that lie one after another in a packed one; ranges that were neighbours are joined."""

    bounds: tuple[tuple[int, int], ...]

    @classmethod
    def of(cls, begin: np.ndarray, end: np.ndarray) -> Spans:
        starts = np.ones(len(begin), dtype=bool)
        starts[1:] = begin[1:] != end[:-1]
        stops = np.roll(starts, -1)
        return cls(tuple(zip(begin[starts].tolist(), end[stops].tolist(), strict=True)))

    def gather(self, x: torch.Tensor) -> torch.Tensor:
        """The packed buffer; a view when the ranges are one."""
        pieces = [x[begin:end] for begin, end in self.bounds]
        return pieces[0] if len(pieces) == 1 else torch.cat(pieces)

    def pairs(self, x: torch.Tensor, packed: torch.Tensor) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Each range of x beside its place in the packed buffer."""
        at = 0
        for begin, end in self.bounds:
            yield x[begin:end], packed[at : at + end - begin]
            at += end - begin

    def put(self, x: torch.Tensor, packed: torch.Tensor) -> None:
        for there, here in self.pairs(x, packed):
            there.copy_(here)

    def add(self, x: torch.Tensor, packed: torch.Tensor) -> None:
        for there, here in self.pairs(x, packed):
            there += here

    def merge(self, out: torch.Tensor, lse: torch.Tensor, packed_out: torch.Tensor, packed_lse: torch.Tensor) -> None:
        """Merge partial attention into out and lse, range after range: ranges may overlap."""
        for (out_there, out_here), (lse_there, lse_here) in zip(
            self.pairs(out, packed_out), self.pairs(lse, packed_lse), strict=True
        ):
            merged_out, merged_lse = merge(out_there, lse_there, out_here, lse_here)
            out_there.copy_(merged_out)
            lse_there.copy_(merged_lse)
