"""Keep activations in host memory between forward and backward, as far as it was given for them.

Of every layer stay x, attention's output and its log-sum-exp; queries, keys and values are computed again from x. x and
out travel to pinned pages on a stream of their own while the GPU computes, and come back one layer before they are
needed. What the host has no room for stays on the GPU: the first layers, which wait longest, go first.

    forward    segment -> x, q, k, v      x leaves while attention runs, out while the next segment does
    backward   next segment needs x, out      attention needs q, k, v (from x) and out; then both are let go
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

PAGE_BYTES = 16 * 2**20
SLAB_PAGES = 64              # are allocated at once: 1 GiB, a size that pinning does not round up
MIN_BYTES = 2**16            # what is smaller stays
_NOT_COMPUTED: tuple[Any, None, int] = (None, None, 0)


class HostPages:
    """Pages of host memory, taken and given back; pinned where a GPU copies from them."""

    def __init__(self, max_bytes: int, pinned: bool, page_bytes: int = PAGE_BYTES) -> None:
        self.num_left, self.pinned, self.page_bytes = max_bytes // page_bytes, pinned, page_bytes
        self.free: list[torch.Tensor] = []

    def take(self, num_bytes: int) -> list[torch.Tensor] | None:
        """As many as hold this much, or None where there are too few."""
        wanted = -(-num_bytes // self.page_bytes)
        while len(self.free) < wanted and self.num_left:
            num = min(SLAB_PAGES, self.num_left)
            slab = torch.empty(num * self.page_bytes, dtype=torch.uint8, pin_memory=self.pinned)
            self.free += slab.split(self.page_bytes)
            self.num_left -= num
        if len(self.free) < wanted:
            return None
        return [self.free.pop() for _ in range(wanted)]

    def give(self, pages: Sequence[torch.Tensor]) -> None:
        self.free += pages


class Kept:
    """A tensor that backward will ask for, `uses` times: on the GPU, on the host, or on its way between them."""

    __slots__ = ("copied", "dtype", "pages", "shape", "tensor", "uses")

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor: torch.Tensor | None = tensor
        self.shape, self.dtype, self.uses = tensor.shape, tensor.dtype, 0
        self.pages: list[torch.Tensor] | None = None
        self.copied: Any = None                                  # the event after which the copy under way is there


class Again:
    """Several tensors that one function makes of a kept one; made when the first of them is asked for."""

    def __init__(self, make: Callable[[torch.Tensor], Sequence[torch.Tensor]], source: Kept) -> None:
        self.make, self.source, self.num_asked = make, source, 0
        self.made: Sequence[torch.Tensor] | None = None

    def ask(self, offload: Offload, number: int) -> torch.Tensor:
        if self.made is None:
            with torch.no_grad():
                self.made = self.make(offload.ask(self.source))
        asked = self.made[number]
        self.num_asked -= 1
        if not self.num_asked:
            self.made = None
        return asked


class Offload:
    """What backward will need of the rows in flight. `keeping()` stands around their forward."""

    def __init__(
        self, device: torch.device, max_bytes: int, page_bytes: int = PAGE_BYTES, min_bytes: int = MIN_BYTES
    ) -> None:
        self.pages = HostPages(max_bytes, pinned=device.type == "cuda", page_bytes=page_bytes)
        self.device, self.min_bytes = device, min_bytes
        self.streams = [torch.cuda.Stream(device) for _ in range(2)] if device.type == "cuda" else [None, None]
        self.resident: dict[int, Kept] = {}                      # by address; its tensor lives as long as it is here
        self.computed: dict[int, tuple[weakref.ref[torch.Tensor], Again, int]] = {}  # by address, while they live
        self.sent: list[Kept] = []                               # in order; backward asks in the opposite one

    def keeping(self) -> AbstractContextManager[None]:
        return torch.autograd.graph.saved_tensors_hooks(self._pack, self._unpack)

    def send(self, tensor: torch.Tensor) -> None:
        """Start on its way to the host what backward will ask for; `settle` when it is used no more in forward."""
        kept = self._kept(tensor)
        if kept.pages is None and tensor.is_contiguous():
            kept.pages = self.pages.take(tensor.nbytes)
            if kept.pages is not None:
                with self._beside(0):
                    _copy(kept.tensor, kept.pages, self.pages.page_bytes, back=False)
                self._mark(0, kept)
                self.sent.append(kept)

    def settle(self, tensor: torch.Tensor) -> None:
        """Free its memory on the GPU, in stream order, once the copy is complete."""
        kept = self.resident.get(tensor.data_ptr())
        if kept is not None and kept.pages is not None:
            self._wait(kept)
            del self.resident[tensor.data_ptr()]
            kept.tensor = None

    def recomputed(
        self, source: torch.Tensor, results: Sequence[torch.Tensor],
        make: Callable[[torch.Tensor], Sequence[torch.Tensor]],
    ) -> None:
        """Where backward saves one of `results`, keep `source` instead and make them of it again."""
        again = Again(make, self._kept(source))
        self.computed = {address: entry for address, entry in self.computed.items() if entry[0]() is not None}
        self.computed |= {result.data_ptr(): (weakref.ref(result), again, number)
                          for number, result in enumerate(results)}

    def ask(self, kept: Kept) -> torch.Tensor:
        """The tensor, and for the last time where nobody else will ask."""
        self._fetch(kept)
        before = self.sent.index(kept) if kept in self.sent else 0
        for earlier in self.sent[max(0, before - 2):before]:     # the layer before, x and out
            self._fetch(earlier)
        self._wait(kept)
        tensor = kept.tensor
        assert tensor is not None
        kept.uses -= 1
        if not kept.uses:
            self._release(kept)
        return tensor

    def _kept(self, tensor: torch.Tensor) -> Kept:
        kept = self.resident.get(tensor.data_ptr())
        if kept is None or not _same(kept.tensor, tensor):
            kept = self.resident[tensor.data_ptr()] = Kept(tensor.detach())
        return kept

    def _pack(self, tensor: torch.Tensor) -> Any:
        if tensor.nbytes < self.min_bytes:
            return tensor
        result, again, number = self.computed.get(tensor.data_ptr(), _NOT_COMPUTED)
        if again is not None and _same(result(), tensor):
            again.source.uses += not again.num_asked             # asked once, however many are made of it
            again.num_asked += 1
            return again, number
        kept = self._kept(tensor)
        kept.uses += 1
        return kept

    def _unpack(self, packed: Any) -> torch.Tensor:
        if isinstance(packed, torch.Tensor):
            return packed
        return self.ask(packed) if isinstance(packed, Kept) else packed[0].ask(self, packed[1])

    def _fetch(self, kept: Kept) -> None:
        """Start it on its way back, if it is not here or coming."""
        if kept.tensor is None:
            assert kept.pages is not None
            kept.tensor = torch.empty(kept.shape, dtype=kept.dtype, device=self.device)
            with self._beside(1):
                _copy(kept.tensor, kept.pages, self.pages.page_bytes, back=True)
            self._mark(1, kept)

    def _release(self, kept: Kept) -> None:
        if kept.pages is not None:
            self.pages.give(kept.pages)
            self.sent.remove(kept)
        assert kept.tensor is not None
        self.resident.pop(kept.tensor.data_ptr(), None)
        kept.tensor = kept.pages = None

    def _beside(self, way: int) -> AbstractContextManager[Any]:
        """On the stream of this way, after what this stream has been given to do so far."""
        stream = self.streams[way]
        if stream is None:
            return nullcontext()
        stream.wait_stream(torch.cuda.current_stream(self.device))
        return torch.cuda.stream(stream)

    def _mark(self, way: int, kept: Kept) -> None:
        stream = self.streams[way]
        kept.copied = None if stream is None else stream.record_event()

    def _wait(self, kept: Kept) -> None:
        if kept.copied is not None:
            torch.cuda.current_stream(self.device).wait_event(kept.copied)
            kept.copied = None


def _same(one: torch.Tensor | None, other: torch.Tensor) -> bool:
    """Whether tensors at one address are the same, not views of different parts."""
    return one is not None and (one.shape, one.stride(), one.dtype) == (other.shape, other.stride(), other.dtype)


def _copy(tensor: torch.Tensor | None, pages: Sequence[torch.Tensor], page_bytes: int, *, back: bool) -> None:
    assert tensor is not None
    for page, part in zip(pages, tensor.reshape(-1).view(torch.uint8).split(page_bytes), strict=True):
        target, source = (part, page[: len(part)]) if back else (page[: len(part)], part)
        target.copy_(source, non_blocking=True)
