"""Run a decoder's segments compiled, in tiles of tokens, or with activations offloaded to host memory.

Call `run_segments` after `parallelize`. The loss equals that of plain segments up to rounding.

Offloading keeps x, attention's output and its log-sum-exp of every layer, and recomputes q, k, v from x. A copy stream
moves x and out to pinned pages while the GPU computes, and backward prefetches them one layer ahead. If the host's
pages run out, later layers stay on the GPU.

    forward    segment -> x, q, k, v      x is copied during attention, out during the next segment
    backward   next segment reads x, out      attention reads q, k, v (from x) and out; then both are released
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
from torch.distributed.fsdp import FSDPModule

from distca.train.model.decoder import Decoder, Rotary, Segment
from distca.train.model.recompute import TokenTiles, compile_any_length, in_tiles

PAGE_BYTES = 16 * 2**20
SLAB_PAGES = 64              # pages per allocation: 1 GiB, which pinning does not round up
MIN_BYTES = 2**16            # smaller tensors stay on the GPU
_NOT_COMPUTED: tuple[Any, None, int] = (None, None, 0)


def run_segments(
    decoder: Decoder, *, compile: bool = False, tile_tokens: int = 0, offload: Offload | None = None,
    backend: str = "inductor",
) -> None:
    """Set every segment's `run`. TokenTiles and offloading keep only the inputs, so they replace `recompute`."""
    for segment in decoder.segments:
        assert isinstance(segment, Segment)
        compute = compile_any_length(segment.compute, backend) if compile else segment.compute
        segment.in_tiles = bool(tile_tokens) or offload is not None
        if segment.in_tiles:
            segment.recompute = "none"
            segment.run = partial(_by_tiles, segment, compute, tile_tokens, offload)
        else:
            segment.run = compute if compile else None


def _by_tiles(
    segment: Segment, compute: Callable[..., Any], tile_tokens: int, offload: Offload | None, *inputs: Any
) -> Any:
    run = partial(in_tiles, compute, list(segment.parameters()), tile_tokens, segment.num_shares, *inputs)
    if offload is None or not torch.is_grad_enabled():
        return run()
    entering = [x for x in inputs if isinstance(x, torch.Tensor) and x.requires_grad]  # x and attention's output
    for tensor in entering:
        offload.send(tensor)
    results = run()
    for tensor in entering:
        offload.settle(tensor)
    if isinstance(results, tuple):
        x, *qkv = results
        offload.send(x)
        offload.recomputed(x, qkv, partial(_recomputed_qkv, segment, inputs[-1], tile_tokens))
    return results


def _recomputed_qkv(segment: Segment, rotary: Rotary, tile_tokens: int, x: torch.Tensor) -> Any:
    """Recompute q, k, v for attention's backward, which runs before FSDP gathers the segment for its backward."""
    if isinstance(segment, FSDPModule):
        segment.unshard()
    pre, tiles = segment.pre, TokenTiles(rotary[0].shape[0], tile_tokens, segment.num_shares)
    assert pre is not None
    return tiles.run(lambda x, cos, sin: pre(x, (cos, sin)), [x, *map(tiles.pad, rotary)])


class HostPages:
    """Pool of host memory pages, pinned if a GPU copies from them."""

    def __init__(self, max_bytes: int, pinned: bool, page_bytes: int = PAGE_BYTES) -> None:
        self.num_left, self.pinned, self.page_bytes = max_bytes // page_bytes, pinned, page_bytes
        self.free: list[torch.Tensor] = []

    def take(self, num_bytes: int) -> list[torch.Tensor] | None:
        """Return pages for `num_bytes`, or None if too few are left."""
        wanted = -(-num_bytes // self.page_bytes)
        while len(self.free) < wanted and self.num_left:
            num = min(SLAB_PAGES, self.num_left)
            slab = torch.empty(num * self.page_bytes, dtype=torch.uint8, pin_memory=self.pinned)
            self.free += slab.split(self.page_bytes)
            self.num_left -= num
        return None if len(self.free) < wanted else [self.free.pop() for _ in range(wanted)]


class OffloadedTensor:
    """A tensor that backward reads `uses` times: on the GPU, on the host, or being copied between them."""

    __slots__ = ("copied", "dtype", "pages", "shape", "tensor", "uses")

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor: torch.Tensor | None = tensor
        self.shape, self.dtype, self.uses = tensor.shape, tensor.dtype, 0
        self.pages: list[torch.Tensor] | None = None
        self.copied: Any = None                                  # event that marks the end of the current copy


class Recomputed:
    """Tensors that `make` computes from a kept one when the first of them is read."""

    def __init__(self, make: Callable[[torch.Tensor], Sequence[torch.Tensor]], source: OffloadedTensor) -> None:
        self.make, self.source, self.uses = make, source, 0
        self.made: Sequence[torch.Tensor] | None = None

    def read(self, offload: Offload, number: int) -> torch.Tensor:
        if self.made is None:
            with torch.no_grad():
                self.made = self.make(offload.read(self.source))
        tensor = self.made[number]
        self.uses -= 1
        if not self.uses:
            self.made = None
        return tensor


class Offload:
    """Store of the tensors that backward will read. Run forward inside `keeping()`."""

    def __init__(
        self, device: torch.device, max_bytes: int, page_bytes: int = PAGE_BYTES, min_bytes: int = MIN_BYTES
    ) -> None:
        self.pages = HostPages(max_bytes, pinned=device.type == "cuda", page_bytes=page_bytes)
        self.device, self.min_bytes = device, min_bytes
        self.streams = [torch.cuda.Stream(device) if device.type == "cuda" else None for _ in range(2)]  # to host, back
        self.resident: dict[int, OffloadedTensor] = {}  # by address; keeps the tensor alive
        self.computed: dict[int, tuple[weakref.ref[torch.Tensor], Recomputed, int]] = {}  # by address
        self.sent: list[OffloadedTensor] = []           # in the order of forward; backward reads in reverse

    def keeping(self) -> AbstractContextManager[None]:
        return torch.autograd.graph.saved_tensors_hooks(self._pack, self._unpack)

    def send(self, tensor: torch.Tensor) -> None:
        """Start copying a tensor to the host for backward; call `settle` when forward no longer uses it."""
        kept = self._kept(tensor)
        if kept.pages is None and tensor.is_contiguous():
            kept.pages = self.pages.take(tensor.nbytes)
            if kept.pages is not None:
                self._copy(kept, back=False)
                self.sent.append(kept)

    def settle(self, tensor: torch.Tensor) -> None:
        """Release the tensor's GPU memory, in stream order, after the copy to the host."""
        kept = self.resident.get(tensor.data_ptr())
        if kept is not None and kept.pages is not None:
            self._wait(kept)
            del self.resident[tensor.data_ptr()]
            kept.tensor = None

    def recomputed(
        self, source: torch.Tensor, results: Sequence[torch.Tensor],
        make: Callable[[torch.Tensor], Sequence[torch.Tensor]],
    ) -> None:
        """Keep `source` in place of any saved tensor of `results`; backward recomputes them with `make`."""
        made = Recomputed(make, self._kept(source))
        self.computed = {address: entry for address, entry in self.computed.items() if entry[0]() is not None}
        self.computed |= {result.data_ptr(): (weakref.ref(result), made, number)
                          for number, result in enumerate(results)}

    def read(self, kept: OffloadedTensor) -> torch.Tensor:
        """Return the tensor, and release it after its last use."""
        position = self.sent.index(kept) if kept in self.sent else 0
        for wanted in (kept, *self.sent[max(0, position - 2):position]):  # prefetch x and out of the previous layer
            if wanted.tensor is None:
                wanted.tensor = torch.empty(wanted.shape, dtype=wanted.dtype, device=self.device)
                self._copy(wanted, back=True)
        self._wait(kept)
        tensor = kept.tensor
        assert tensor is not None
        kept.uses -= 1
        if not kept.uses:
            if kept.pages is not None:
                self.pages.free += kept.pages
                self.sent.remove(kept)
            self.resident.pop(tensor.data_ptr(), None)
            kept.tensor = kept.pages = None
        return tensor

    def _kept(self, tensor: torch.Tensor) -> OffloadedTensor:
        kept = self.resident.get(tensor.data_ptr())
        if kept is None or not _same(kept.tensor, tensor):
            kept = self.resident[tensor.data_ptr()] = OffloadedTensor(tensor.detach())
        return kept

    def _pack(self, tensor: torch.Tensor) -> Any:
        if tensor.nbytes < self.min_bytes:
            return tensor
        result, made, number = self.computed.get(tensor.data_ptr(), _NOT_COMPUTED)
        if made is not None and _same(result(), tensor):
            made.source.uses += not made.uses                    # count the source once for all its results
            made.uses += 1
            return made, number
        kept = self._kept(tensor)
        kept.uses += 1
        return kept

    def _unpack(self, packed: Any) -> torch.Tensor:
        if isinstance(packed, torch.Tensor):
            return packed
        return self.read(packed) if isinstance(packed, OffloadedTensor) else packed[0].read(self, packed[1])

    def _copy(self, kept: OffloadedTensor, *, back: bool) -> None:
        """Start a copy between GPU and host on the direction's stream, after the work queued so far."""
        assert kept.tensor is not None and kept.pages is not None
        stream = self.streams[back]
        if stream is not None:
            stream.wait_stream(torch.cuda.current_stream(self.device))
        parts = kept.tensor.reshape(-1).view(torch.uint8).split(self.pages.page_bytes)
        with nullcontext() if stream is None else torch.cuda.stream(stream):
            for page, part in zip(kept.pages, parts, strict=True):
                target, source = (part, page[: len(part)]) if back else (page[: len(part)], part)
                target.copy_(source, non_blocking=True)
        kept.copied = None if stream is None else stream.record_event()

    def _wait(self, kept: OffloadedTensor) -> None:
        if kept.copied is not None:
            torch.cuda.current_stream(self.device).wait_event(kept.copied)
            kept.copied = None


def _same(one: torch.Tensor | None, other: torch.Tensor) -> bool:
    """Return whether two tensors at one address have the same layout; otherwise they are different views."""
    return one is not None and (one.shape, one.stride(), one.dtype) == (other.shape, other.stride(), other.dtype)
