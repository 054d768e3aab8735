"""The dedicated attention servers of a run: how they find its trainers, and the list of who takes part.

The last `attention.dedicated` ranks only serve: they join no process group, hold no layers, data or checkpoints, and
the run survives them. More servers may join with `distca serve --join`. Tensor parallelism shards the heads, so a
server belongs to the training ranks of one tensor index, which rank 0 chooses.
"""

from __future__ import annotations

import json
import logging
import os
import platform
import re
import signal
import socket
import tempfile
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist

from distca.runtime.pool.home import ServerPool, local_address
from distca.runtime.pool.protocol import Peer, PoolShape, View
from distca.runtime.pool.server import Server
from distca.runtime.transport.links import Address
from distca.train.groups import gather_json
from distca.train.launch import SECRET
from distca.train.rank_env import restarts
from distca.train.settings import Settings, num_roles
from distca.validation import UserError, read_text

SECRET_FILE = "secret"             # in the run's folder, readable by its owner alone
MEMBERS_FILE = "members.json"
LEAST_SECRET = 16                  # characters
MAX_PORT = 65_535
WAIT_FOR_SERVERS_SECONDS = 120.0
STORE_KEY = "distca/join/{}"        # the number of restarts before
LOG = logging.getLogger("distca")


def secret_in(environ: Mapping[str, str]) -> bytes:
    """Return the run's secret, which a local launcher makes and a cluster's user sets."""
    text = environ.get(SECRET, "")
    if len(text) < LEAST_SECRET:
        raise UserError(f"{SECRET} has {len(text)} characters but servers and trainers prove by it that they belong "
                        f"together; set it to at least {LEAST_SECRET} on all of them, for example export {SECRET}="
                        "$(openssl rand -hex 32)")
    return text.encode()


def read_secret(path: Path) -> bytes:
    """Return the secret in a file, which others must not be able to read."""
    if not path.is_file():
        raise UserError(f"secret-file is {str(path)!r}, where there is no file; a run has one, {SECRET_FILE!r} in its "
                        "folder, only while it runs")
    if path.stat().st_mode & 0o077:
        raise UserError(f"{path} can be read by others; run: chmod 600 {path}")
    return secret_in({SECRET: read_text(path, 4096).strip()})


def open_pool(
    settings: Settings, device: torch.device, secret: bytes, publish: Callable[[Address], None], port: int = 0
) -> ServerPool | None:
    """Connect the training ranks with each other, and wait for the run's own servers; None if plans have no roles.

    `publish` tells servers where rank 0 listens: at `port`, unless attention.listen names another. A collective call
    of the training ranks.
    """
    if not num_roles(settings):
        return None
    tensor, timeout = settings.parallel.tensor, settings.run.timeout_seconds
    shape = PoolShape(dist.get_world_size(), tensor, num_roles(settings) // tensor)
    rank, (host, named) = dist.get_rank(), listens_at(settings.attention.listen, os.environ)
    pool = ServerPool(shape, rank, secret, listen=(host, named or (0 if rank else port)), device=device,
                      kernel=settings.attention.kernel, patience_seconds=settings.attention.patience,
                      links=settings.attention.links)
    pool.meet([Peer(*one) for one in gather_json(pool.peer)], timeout)
    if pool.rank == 0:
        publish((pool.peer.host, pool.peer.port))
        own = settings.attention.dedicated
        if not pool.wait_for_servers(own, min(WAIT_FOR_SERVERS_SECONDS, timeout)):
            LOG.warning("%d of %d servers have joined; training begins without the others, which may join later",
                        len(pool.view.members), own)
    dist.barrier()                                               # all views have the servers before the first step
    return pool


def listens_at(listen: str, environ: Mapping[str, str]) -> Address:
    """Return where this training rank listens: at `listen`, else at its own address towards the launcher's host."""
    host, _, port = listen.partition(":")
    if not listen:
        return local_address(environ.get("MASTER_ADDR", "127.0.0.1"))
    rank = int(environ.get("RANK", "0"))
    at = int(port) + rank if port.isdecimal() and int(port) else 0
    if not re.fullmatch(r"[^:\s]+(:\d+)?", listen) or at > MAX_PORT:
        raise UserError(f"attention.listen is {listen!r}; give an IPv4 address or a host's name, such as 10.0.0.7, or "
                        f"10.0.0.7:29600, with a port that plus the rank is at most {MAX_PORT}")
    return host, at


def serve(settings: Settings, device: torch.device, secret: bytes, find: Callable[[], Address], wish: int = -1) -> int:
    """Serve attention until the run ends; return the number of calls. SIGTERM makes this server leave."""
    server = Server(find, secret, device=device, wish=wish, patience_seconds=settings.run.timeout_seconds)
    leave_on_signals(server)
    return server.run()


def leave_on_signals(server: Server) -> None:
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: server.leave())


def _store() -> dist.Store:
    """Open the launcher's store once more; servers are in no process group that has one."""
    return dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False,
                         wait_for_workers=False, timeout=timedelta(seconds=20))


def _published(counts: Iterable[int]) -> Address | None:
    """Return where rank 0 listens, or did, after the first of these numbers of restarts for which it has said so."""
    store = _store()
    key = next((key for key in map(STORE_KEY.format, counts) if store.check([key])), None)
    return None if key is None else cast(Address, tuple(json.loads(store.get(key))))


def publish_in_store(address: Address) -> None:
    _store().set(STORE_KEY.format(restarts(os.environ)[0]), json.dumps(address))


def find_in_store() -> Address:
    """Return where rank 0 listens since the latest restart, which a server on the launcher's host outlives."""
    own, most = restarts(os.environ)
    try:
        found = _published(range(max(own, most), own - 1, -1))
    except RuntimeError as error:                                # the store's
        raise ConnectionError(f"the launcher's store does not answer ({str(error).splitlines()[0]})") from None
    if found is None:
        raise ConnectionError("rank 0 has not said where it listens")
    return found


def port_before_restart() -> int:
    """Return the port at which rank 0 listened before the latest restart, by which servers know it; 0: none is free."""
    count, _ = restarts(os.environ)
    before = _published(range(count - 1, -1, -1)) if count else None
    with suppress(OSError):
        if before is not None:
            socket.create_server(before).close()
            return before[1]
    return 0


class MembersFile:
    """Keeps `members.json` and the secret in the run's folder, on rank 0."""

    def __init__(self, folder: Path, people: list[tuple[int, str]], pool: ServerPool | None) -> None:
        self.path, self.people, self.pool = folder / MEMBERS_FILE, people, pool
        self.gone: list[dict[str, Any]] = []                     # servers that were lost or left
        self.before, self.trains = View(0, (), ()), True
        if pool is None:
            return self.write(self.before, "")
        write_atomically(folder / SECRET_FILE, pool.secret.decode() + "\n", 0o600)
        with pool.changed:
            pool.on_change = self.write
            self.write(pool.view, "")

    def write(self, view: View, reason: str) -> None:
        self.gone += [self._server(one, "left" if reason == "leave" else "lost") for one in self.before.members
                      if view.member(one.rank) is None]
        self.before = view
        state = "training" if self.trains else "left"
        trainers = [{"role": "trainer", "rank": rank, "pid": pid, "host": host, "state": state}
                    for rank, (pid, host) in enumerate(self.people)]
        content: dict[str, Any] = {"members": [
            *trainers, *(self._server(one, "serving") for one in view.members), *self.gone]}
        if self.pool is not None and self.trains:
            content["join"] = f"{self.pool.peer.host}:{self.pool.peer.port}"
        write_atomically(self.path, json.dumps(content, indent=1) + "\n")

    def close(self) -> None:
        """Everybody leaves. Take away the secret, which is worth nothing after the run."""
        self.trains = False
        if self.pool is not None:
            self.path.with_name(SECRET_FILE).unlink(missing_ok=True)
            with self.pool.changed:
                self.pool.on_change = None
        self.write(View(self.before.epoch, (), ()), "leave")

    @staticmethod
    def _server(one: Any, state: str) -> dict[str, Any]:
        return {"role": "server", "rank": one.rank, "pid": one.pid, "host": one.host, "state": state}


def who_takes_part() -> list[tuple[int, str]]:
    """Return process and host of every training rank; a collective call."""
    return [(int(pid), str(host)) for pid, host in gather_json((os.getpid(), platform.node()))]


def write_atomically(path: Path, text: str, mode: int = 0o644) -> None:
    """Write a file that others may read at any moment; they see the one before or this one."""
    with tempfile.NamedTemporaryFile("w", dir=path.parent, prefix=f".{path.name}-", delete=False) as fresh:
        os.fchmod(fresh.fileno(), mode)
        fresh.write(text)
    os.replace(fresh.name, path)
