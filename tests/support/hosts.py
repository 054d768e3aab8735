"""Network namespaces as other hosts, whose links to this one can be cut and slowed."""

from __future__ import annotations

import ctypes
import os
import re
import shutil
import subprocess
from pathlib import Path

CLONE_NEWNET = 0x40000000
NEEDS = "needs root, ip and tc"


def can_make_hosts() -> bool:
    return os.geteuid() == 0 and shutil.which("ip") is not None and shutil.which("tc") is not None


def command(*words: str) -> str:
    return subprocess.run(words, check=True, capture_output=True, text=True).stdout


class Hosts:
    """Hosts with a link each to this one, which all of them reach at `address`."""

    def __init__(self, count: int) -> None:
        own = os.getpid() % 16_384                               # tests of several processes share a machine
        self.net = f"10.{64 + own // 256}.{own % 256}"
        self.address = f"{self.net}.253"
        self.names = [f"dc{own}x{number}" for number in range(count)]

    def __enter__(self) -> Hosts:
        command("ip", "addr", "add", f"{self.address}/32", "dev", "lo")
        for number, name in enumerate(self.names):
            here, there = f"{self.net}.{4 * number + 1}", f"{self.net}.{4 * number + 2}"
            command("ip", "netns", "add", name)
            command("ip", "link", "add", f"{name}a", "type", "veth", "peer", "name", f"{name}b", "netns", name)
            command("ip", "addr", "add", f"{here}/30", "dev", f"{name}a")
            command("ip", "link", "set", f"{name}a", "up")
            command("ip", "-n", name, "addr", "add", f"{there}/30", "dev", f"{name}b")
            command("ip", "-n", name, "link", "set", "lo", "up")
            command("ip", "-n", name, "link", "set", f"{name}b", "up")
            command("ip", "-n", name, "route", "add", "default", "via", here)
        return self

    def __exit__(self, *_: object) -> None:
        for name in self.names:
            for words in (("link", "del", f"{name}a"), ("netns", "del", name)):
                subprocess.run(["ip", *words], capture_output=True, check=False)
        subprocess.run(["ip", "addr", "del", f"{self.address}/32", "dev", "lo"], capture_output=True, check=False)

    def cut(self, name: str) -> None:
        command("ip", "link", "set", f"{name}a", "down")

    def join(self, name: str) -> bool:
        """End that; return whether it was cut until now."""
        was_cut = Path(f"/sys/class/net/{name}a/operstate").read_text(encoding="ascii") == "down\n"
        command("ip", "link", "set", f"{name}a", "up")
        return was_cut

    def slow(self, name: str) -> None:
        """1 MB/s from here to there, by a queue so short that it drops packets."""
        command("tc", *f"qdisc replace dev {name}a root tbf rate 8mbit burst 4kb latency 5ms".split())

    def hasten(self, name: str) -> bool:
        """End that; return whether something was sent slowly until now."""
        shown = command("tc", "-s", "qdisc", "show", "dev", f"{name}a")
        found = re.search(r"qdisc tbf[^\n]*\s+Sent (\d+) bytes", shown)
        if found:
            command("tc", "qdisc", "del", "dev", f"{name}a", "root")
        return found is not None and int(found[1]) > 0


def move_to(name: str) -> None:
    """Move this thread, and those that it starts, to a host."""
    with Path("/run/netns", name).open(encoding="ascii") as there:
        if ctypes.CDLL(None, use_errno=True).setns(there.fileno(), CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), "setns", name)
