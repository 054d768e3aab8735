"""Let the planner run in a browser's Python: 64-bit numbers on a 32-bit machine, a missing C function, no terminal.

Import this before the planner. WebAssembly's addresses have 32 bits, and numpy's default integers are as wide as
addresses. A plan counts pairs and bytes beyond that, so functions that make or add up integers return 64 bits here, as
they do where the commands run; only indices that numpy itself demands back stay narrow.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

# A WebAssembly library with one function, backtrace(buffer, size), which returns 0. numpy calls it; Pyodide has none.
_BACKTRACE = bytes.fromhex(
    "0061736d01000000" "000f" "08" "64796c696e6b2e30" "010400000000" "0107016002" "7f7f017f" "03020100"
    "070d01" "09" "6261636b7472616365" "0000" "0a0601040041000b")
_TERMINAL = ("typer", "rich")
_WIDENED = ("arange", "argmax", "argmin", "argpartition", "argsort", "array", "asarray", "count_nonzero", "cumsum",
            "flatnonzero", "fromiter", "full", "lexsort", "nonzero", "ones", "searchsorted", "sum", "unique", "zeros")


def prepare() -> None:
    """Prepare numpy and stand-ins for the terminal's libraries."""
    library = Path("/tmp/libbacktrace.so")
    library.write_bytes(_BACKTRACE)
    ctypes.CDLL(str(library), ctypes.RTLD_GLOBAL)
    sys.meta_path.append(_Terminal())
    import numpy as np

    for name in _WIDENED:
        setattr(np, name, _wide(np, getattr(np, name)))
    bincount, repeat, narrow = np.bincount, np.repeat, np.intp

    def wide_bincount(x: Any, weights: Any = None, minlength: int = 0) -> Any:
        return _widened(np, bincount(np.asarray(x).astype(narrow), weights, int(minlength)))

    def wide_repeat(a: Any, repeats: Any, axis: int | None = None) -> Any:
        return _widened(np, repeat(a, np.asarray(repeats).astype(narrow), axis))

    np.bincount, np.repeat = wide_bincount, wide_repeat


class _Terminal(MetaPathFinder, Loader):
    """Import the terminal's libraries, and whatever is inside them, as empty modules."""

    def find_spec(self, name: str, path: Any = None, target: ModuleType | None = None) -> ModuleSpec | None:
        return ModuleSpec(name, self, is_package=True) if name.split(".")[0] in _TERMINAL else None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return _Absent(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        pass


class _Absent(ModuleType):
    """A library that only a terminal needs: whatever is asked of it is there, is false and does nothing."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return self

    def __call__(self, *_: Any, **__: Any) -> Any:
        return self

    def __bool__(self) -> bool:
        return False

    def __enter__(self) -> Any:
        return self

    def __exit__(self, *_: Any) -> None:
        return None


def _wide(np: Any, function: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a function so that it returns wide integers, unless its caller asks for a type."""
    def widened(*args: Any, **options: Any) -> Any:
        found = function(*args, **options)
        if options.get("dtype") is not None:
            return found
        if isinstance(found, tuple):
            index = 1 if options.get("return_index") else None   # of `unique`: only good as an index, so it stays one
            return tuple(one if at == index else _widened(np, one) for at, one in enumerate(found))
        return _widened(np, found)

    return widened


def _widened(np: Any, found: Any) -> Any:
    if isinstance(found, np.ndarray | np.int32) and found.dtype == np.int32:
        return found.astype(np.int64)
    return found
