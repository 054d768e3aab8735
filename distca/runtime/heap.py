"""Give memory that was freed back to the system, which glibc's heap does not do by itself.

Exchanges have other sizes in every step, so that tensors on a CPU leave holes that the next ones do not fit: processes
grow for hundreds of steps, although their live bytes do not. Trimming the heap now and then stops that for next to no
time. A small threshold for mmap does so too, but pays with page faults in every step; fewer arenas do not help.
`benchmarks/host_memory.py` compares them.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable
from functools import cache

TRIM_STEPS = 10    # optimizer steps between two trims
TRIM_CALLS = 256   # calls of a server that only serves, which knows no steps


def return_freed_memory() -> None:
    """Let the system have every page of the heap that holds nothing; where the C library has no such call, nothing."""
    trim = _malloc_trim()
    if trim is not None:
        trim(0)


@cache
def _malloc_trim() -> Callable[[int], int] | None:
    """glibc's; musl and macOS have none."""
    return getattr(ctypes.CDLL(None), "malloc_trim", None) if os.name == "posix" else None
