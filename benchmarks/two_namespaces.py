"""Two network namespaces of this machine, joined by a link whose rate tc limits; needs Linux, root and iproute2."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

INTERFACE = "distca0"
UNHURRIED_MBIT = 10_000.0  # before the rate is chosen


class Skip(Exception):
    """This machine does not allow the network that the benchmark needs."""


def limit(discipline: str, rate_mbit: float) -> list[str]:
    """tc's words for a rate limit; the bucket holds 5 ms, and at least two of TCP's largest packets."""
    rate = f"{round(rate_mbit * 1000)}kbit"
    if discipline == "netem":
        return ["netem", "rate", rate, "limit", "10000"]
    return ["tbf", "rate", rate, "burst", str(max(2**17, round(rate_mbit * 1e6 / 8 * 0.005))), "latency", "50ms"]


def tell(command: Sequence[str]) -> None:
    """Run a command of iproute2; it must succeed."""
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise Skip(f"{' '.join(command)}: {done.stderr.strip() or f'exit code {done.returncode}'}")


@contextmanager
def network() -> Iterator[tuple[list[str], list[str], str]]:
    """Two joined namespaces: their names, addresses and how they limit rates. Whatever was made is removed."""
    missing = [tool for tool in ("ip", "tc") if shutil.which(tool) is None]
    if not hasattr(os, "geteuid") or os.geteuid() != 0:
        raise Skip("network namespaces need root")
    if missing:
        raise Skip(f"{' and '.join(missing)} missing; install iproute2")
    names = [f"distca-overlap-{os.getpid()}-{rank}" for rank in range(2)]
    addresses = [f"10.200.{os.getpid() % 256}.{rank + 1}" for rank in range(2)]
    made: list[str] = []
    try:
        for name in names:
            tell(["ip", "netns", "add", name])
            made.append(name)
        tell(["ip", "-n", names[0], "link", "add", INTERFACE, "type", "veth", "peer", "name", INTERFACE,
              "netns", names[1]])
        for name, address in zip(names, addresses, strict=True):
            tell(["ip", "-n", name, "address", "add", f"{address}/24", "dev", INTERFACE])
            for interface in ("lo", INTERFACE):
                tell(["ip", "-n", name, "link", "set", interface, "up"])
        yield names, addresses, discipline(names)
    finally:
        for name in made:
            subprocess.run(["ip", "netns", "delete", name], check=False)


def discipline(names: Sequence[str]) -> str:
    """The first of tc's rate limits that the kernel knows, now in place at both ends."""
    refusals = []
    for kind in ("tbf", "netem"):
        try:
            for name in names:
                tell(["tc", "-n", name, "qdisc", "replace", "dev", INTERFACE, "root", *limit(kind, UNHURRIED_MBIT)])
            return kind
        except Skip as refusal:
            refusals.append(str(refusal))
    raise Skip("; ".join(refusals))
