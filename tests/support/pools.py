"""Pools of dedicated servers on threads of this process, over real connections on the loopback interface."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

from distca.runtime.pool.home import ServerPool
from distca.runtime.pool.protocol import PoolShape
from distca.runtime.pool.server import Server
from distca.runtime.pool.transport import PoolTransport
from distca.validation import to_install

SECRET = b"of pools in tests only"
CPU = torch.device("cpu")
MEET_SECONDS = 20.0
NEEDS_NIXL = pytest.mark.skipif(find_spec("nixl") is None, reason=f"needs NIXL; {to_install('nixl')}")
LINKS = ["tcp", pytest.param("nixl", marks=NEEDS_NIXL)]
USED = {"links": "tcp"}          # by all pools of a test


def server_for(pools: list[ServerPool], secret: bytes = SECRET, **options: Any) -> Server:
    address = pools[0].peer.host, pools[0].peer.port
    return Server(lambda: address, secret, device=CPU, **{"patience_seconds": 20.0, **options})


def start(server: Server) -> threading.Thread:
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    return thread


def write_address(path: Path, address: Any) -> None:
    """Write a file that nobody sees half of; one process does it."""
    path.with_suffix(".part").write_text(json.dumps(address))
    os.replace(path.with_suffix(".part"), path)


def read_address(path: Path) -> Any:
    host, port = json.loads(path.read_text())                    # an OSError until there is one: servers try again
    return host, port


POOL: list[PoolTransport] = []                                   # the one of this process, for `pool_of`


def pool_of(group: Any) -> PoolTransport:
    """What a trainer is given to find its pool with, by its name or as a function."""
    assert POOL[-1].inner.size == torch.distributed.get_world_size(group)
    return POOL[-1]


@contextmanager
def server_pools(
    homes: int, roles: int, servers: int | None = None, *, patience_seconds: float = 20.0, kernel: str = "auto",
) -> Iterator[list[ServerPool]]:
    """Every home's end of a pool with this many roles, and as many servers or fewer; all have ended afterwards."""
    shape = PoolShape(homes, 1, roles)
    pools = [ServerPool(shape, rank, SECRET, listen=("127.0.0.1", 0), device=CPU, kernel=kernel,
                        patience_seconds=patience_seconds, **USED) for rank in range(homes)]
    peers = [pool.peer for pool in pools]
    with ThreadPoolExecutor(homes) as threads:
        list(threads.map(lambda pool: pool.meet(peers, MEET_SECONDS), pools))
    count = roles if servers is None else servers
    running = [start(server_for(pools)) for _ in range(count)]
    try:
        assert all(pool.wait_for_servers(count, MEET_SECONDS) for pool in pools)
        yield pools
    finally:
        for pool in pools:
            pool.close()
        for thread in running:
            thread.join(MEET_SECONDS)
            assert not thread.is_alive()
