"""Reach into the TCP connections of another process: reset one, or let it lose packets.

`pidfd_getfd` gives this process the other's sockets. They are given back at once, since a connection that this process
holds would outlive the other's end.
"""

from __future__ import annotations

import ctypes
import os
import socket
import struct
from collections.abc import Iterator
from contextlib import contextmanager, suppress

PIDFD_GETFD = 438
SO_ATTACH_FILTER, SO_DETACH_FILTER, SO_MEMINFO = 26, 27, 55
MEMINFO = struct.Struct("9I")    # the last one counts packets that were dropped
TCP_CLOSE = 7
LOAD, JUMP_IF_ABOVE, RETURN = 0x20, 0x25, 0x06
RANDOM = 0xfffff000 + 56         # SKF_AD_OFF + SKF_AD_RANDOM: a number of 32 bits, a new one for each packet
WHOLE = 0x7fffffff
_LIBC = ctypes.CDLL(None, use_errno=True)


def can_reach() -> bool:
    """Whether this system gives processes the sockets of others; containers may forbid it."""
    if not hasattr(os, "pidfd_open"):
        return False
    own = os.pidfd_open(os.getpid())
    copy = _LIBC.syscall(PIDFD_GETFD, own, own, 0)
    for number in (own, copy):
        if number >= 0:
            os.close(number)
    return bool(copy >= 0)


@contextmanager
def connections(pid: int) -> Iterator[list[socket.socket]]:
    """The connected TCP sockets of a process, which may end meanwhile: then there are none."""
    found: list[socket.socket] = []
    with suppress(OSError):
        process = os.pidfd_open(pid)
        try:
            for name in os.listdir(f"/proc/{pid}/fd"):
                with suppress(OSError):
                    if os.readlink(f"/proc/{pid}/fd/{name}").startswith("socket:"):
                        found += _connected(_LIBC.syscall(PIDFD_GETFD, process, int(name), 0))
        finally:
            os.close(process)
    try:
        yield found
    finally:
        for one in found:
            one.close()


def _connected(number: int) -> list[socket.socket]:
    if number < 0:
        return []
    one = socket.socket(fileno=number)
    with suppress(OSError):
        if one.family == socket.AF_INET and one.type == socket.SOCK_STREAM and one.getpeername():
            return [one]
    one.close()
    return []


def reset(one: socket.socket) -> bool:
    """Break a connection, which neither end has closed; return whether it is broken."""
    _LIBC.connect(one.fileno(), bytes(16), 16)                   # to AF_UNSPEC
    return bool(one.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1)[0] == TCP_CLOSE)


def lose_packets(one: socket.socket, share: float) -> None:
    """Drop a share of the packets that arrive, before TCP sees them."""
    program = b"".join(struct.pack("HBBI", *line) for line in (
        (LOAD, 0, 0, RANDOM), (JUMP_IF_ABOVE, 1, 0, int(share * 0xffffffff)), (RETURN, 0, 0, 0), (RETURN, 0, 0, WHOLE)))
    lines = ctypes.create_string_buffer(program, len(program))
    one.setsockopt(socket.SOL_SOCKET, SO_ATTACH_FILTER, struct.pack("HP", 4, ctypes.addressof(lines)))


def lose_no_more(one: socket.socket) -> int:
    """Return how many packets the connection has lost."""
    with suppress(FileNotFoundError):                            # it is younger than the loss
        one.setsockopt(socket.SOL_SOCKET, SO_DETACH_FILTER, 0)
    return int(MEMINFO.unpack(one.getsockopt(socket.SOL_SOCKET, SO_MEMINFO, MEMINFO.size))[-1])
