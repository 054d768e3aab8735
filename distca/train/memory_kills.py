"""Whether the kernel ended a process of ours because memory ran out: a plain SIGKILL does not say so itself."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple


class MemoryKills(NamedTuple):
    """The kernel's count of processes that it ended for lack of memory, where a cgroup has one."""

    file: Path | None            # None where nobody counts
    before: int

    @classmethod
    def of(cls, root: Path) -> MemoryKills:
        """As it is now, for this process's own cgroup or the nearest above that counts."""
        try:
            lines = (root / "proc/self/cgroup").read_text().splitlines()
        except OSError:
            return cls(None, 0)
        for line in lines:                                       # v2 is 0::/path, v1 has its controllers named
            _, controllers, path = line.split(":", 2)
            version_1 = "memory" in controllers.split(",")
            if not version_1 and controllers:
                continue
            top = root / "sys/fs/cgroup" / ("memory" if version_1 else "")
            own = top / path.lstrip("/")
            for folder in (own, *own.parents):
                file = folder / ("memory.oom_control" if version_1 else "memory.events")
                if file.is_file():
                    return cls(file, _oom_kills(file))
                if folder == top:
                    break
        return cls(None, 0)

    def risen(self) -> bool:
        return self.file is not None and _oom_kills(self.file) > self.before


def _oom_kills(file: Path) -> int:
    try:
        return sum(int(line.split()[1]) for line in file.read_text().splitlines() if line.startswith("oom_kill "))
    except (OSError, ValueError, IndexError):
        return 0
