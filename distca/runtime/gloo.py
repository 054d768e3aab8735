"""Keep clear of two races in torch's gloo groups (seen in 2.13 and 2.15, without any code of ours).

A group runs its collectives on two worker threads. Both write the name of what they finished into one string of the
group, without a lock. Names of up to 15 characters stay inside the string; that of a functional all-gather, which
DTensor uses, is longer, and two workers that finish together free it twice: the heap is corrupt. One worker has nobody
to race with, and collectives of a group keep their order anyway.

A worker also takes the GIL to let go of tensors that Python holds too, and it outlives `destroy_process_group` wherever
DDP, FSDP2, a device mesh or a functional collective kept the group. A late one then finds the interpreter finalizing,
which ends the thread inside a destructor ("terminate called without an active exception"), or DDP's destructor, which
waits for the worker and holds the GIL that it needs. So our processes end without finalizing the interpreter.
"""

from __future__ import annotations

import os
import sys
from datetime import timedelta
from functools import cache
from typing import Any, NoReturn


@cache
def one_worker_per_group() -> None:
    """Give every gloo group that this process makes from now on one worker thread; torch has no option for it."""
    import torch.distributed as dist

    gloo: Any = dist.ProcessGroupGloo
    start = gloo.__init__

    def start_one_worker(self: Any, store: Any, rank: int, size: int, timeout: timedelta, **more: Any) -> None:
        options = gloo._Options()
        options._threads, options._timeout = 1, timeout
        interfaces = os.environ.get("GLOO_SOCKET_IFNAME")        # as torch reads it
        options._devices = [gloo.create_device(interface=name) for name in interfaces.split(",")] if interfaces else [
            gloo.create_default_device()]
        for name, value in more.items():
            setattr(options, name, value)
        start(self, store, rank, size, options)

    gloo.__init__ = start_one_worker


def end_process(code: int = 0) -> NoReturn:
    """End this process with its output written, the interpreter not finalized and exit handlers not run.

    The last call of a rank, behind `dist.barrier()` and `dist.destroy_process_group()` where all went well, and while
    its model lives: that is the last to hold the group, and waits for its workers.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
