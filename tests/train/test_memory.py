"""A run holds no more memory after many steps than after few, and gives back what it has freed."""

import ctypes
import json
import os
from pathlib import Path

import pytest
import torch

from distca.runtime import liveness as heap
from distca.train.launch import launch
from distca.train.settings import load_settings
from tests.support import rank_mains as mains

TOKENS = 512
LEAST_KEPT = TOKENS * 8 * 3  # bytes of a batch's rows: tokens, labels and positions
HEAP_A_STEP = 4096          # bytes; a third of that. Digests of plans are kept by design, and take a few hundred
BLOCKS_A_STEP = 20          # of Python's, a few a digest


@pytest.mark.multiprocess
@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "mallinfo2"), reason="needs glibc's count of live bytes")
@pytest.mark.parametrize("steps", [110, pytest.param(300, marks=pytest.mark.slow)])
def test_live_bytes_do_not_grow_with_steps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, steps: int) -> None:
    """Nor would a leak go unseen: 20 more steps keep the rows of their batches."""
    main = mains.live_memory
    monkeypatch.setenv("TORCH_FR_BUFFER_SIZE", "0")  # torch's record of collectives grows to 2000 entries, then stays
    assert launch(load_settings(None, {
        "run.ranks": "2", "run.steps": str(steps + 20), "run.device": "cpu", "run.threads": "1", "model.hidden": "32",
        "model.layers": "1", "model.heads": "2", "model.kv_heads": "1", "model.head_dim": "16", "model.ffn": "64",
        "batch.tokens_per_rank": str(TOKENS), "batch.ping_pong": "false", "data.max_document": "800",
        "log.folder": str(tmp_path)}), main) == 0
    for rank in range(2):
        told = json.loads((tmp_path / f"rank{rank}.json").read_text())
        (heap_before, blocks_before), (heap_after, blocks_after) = told["before"], told["after"]
        assert heap_after - heap_before <= HEAP_A_STEP * (steps - 50)
        assert blocks_after - blocks_before <= BLOCKS_A_STEP * (steps - 50)
        assert told["trimmed"] == list(range(heap.TRIM_STEPS, steps + 21, heap.TRIM_STEPS))
        assert told["leaking"][0] - heap_after > LEAST_KEPT // 2 * 20


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "malloc_trim"), reason="needs glibc's malloc_trim")
def test_holes_between_live_tensors_are_given_back() -> None:
    """2000 tensors of 64 KiB, below every threshold for mmap, of which every other is freed: 62 MiB of holes."""
    tensors = [torch.ones(2**16, dtype=torch.uint8) for _ in range(2000)]
    del tensors[::2]
    before = _resident_bytes()
    heap.return_freed_memory()
    assert _resident_bytes() < before - 2**25
    assert all(tensor[::4096].all() for tensor in tensors)


def test_a_c_library_without_trimming_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ctypes.CDLL", lambda name: object())
    heap.return_freed_memory()


def _resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
