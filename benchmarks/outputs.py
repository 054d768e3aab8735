"""Where benchmarks write, and what all of them write alike: their rows, beside the facts of the host that ran them."""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console

import distca

RESULTS = Path(__file__).parent / "results"
PACKAGES = ("numpy", "torch", "transformers", "triton")


def host_facts(**others: object) -> dict[str, object]:
    """The CPU, other work on it (so ask before measuring), and the versions of what decides how fast things run."""
    return {"cpu": _cpu_name(), "cores": os.cpu_count(), "load_average": round(os.getloadavg()[0], 2),
            "system": platform.system(), "python": platform.python_version(), "distca": distca.__version__,
            **dict(_versions()), **others}


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    """Rows may be records as they are."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content, indent=1, default=asdict) + "\n", encoding="utf-8")


def wide_console(width: int = 150) -> Console:
    """The terminal, or where there is none a console that has room for a table."""
    screen = Console()
    return screen if screen.is_terminal else Console(width=width)


def _cpu_name() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text(encoding="utf-8").splitlines() if info.exists() else []
    names = (line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.machine())


def _versions() -> Iterator[tuple[str, str]]:
    for package in PACKAGES:
        try:
            yield package, importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
