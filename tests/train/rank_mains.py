"""What stand-in ranks run: small mains that the tests of the launcher hand to it, each in a module a rank can import.

They leave what they saw in the log folder, a file for each rank.
"""

import json
import os
import signal
import time
from pathlib import Path

from distca.train import launch


def _say(settings, **facts):
    rank = launch.here().rank
    path = Path(settings.log.folder) / f"rank{rank}.json"
    path.with_suffix(".part").write_text(json.dumps({"pid": os.getpid(), **facts}))
    os.replace(path.with_suffix(".part"), path)


def meet(settings):
    import torch
    import torch.distributed as dist

    dist.init_process_group("gloo")
    place = launch.here()
    total = torch.tensor([10.0**place.rank])
    dist.all_reduce(total)
    _say(settings, rank=place.rank, world=place.world, local_rank=place.local_rank, total=total.item(),
         threads=torch.get_num_threads(), ranks=settings.run.ranks)
    dist.destroy_process_group()
    return 0


def second_fails(settings):
    if launch.here().rank == 1:
        raise RuntimeError("rank one gave up")
    _say(settings)
    time.sleep(100)
    return 0


def all_refuse(settings):
    settings.with_values({"optimizer.lr": -1.0}).check()
    return 0


def foreign_value_error(settings):
    return int("not a number that the package asked for")


def second_returns_five(settings):
    return 5 if launch.here().rank == 1 else 0


def second_is_killed(settings):
    if launch.here().rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(100)
    return 0


def stop_when_asked(settings):
    asked = []
    signal.signal(signal.SIGTERM, lambda number, frame: asked.append(number))
    _say(settings, ready=True)
    while not asked:
        time.sleep(0.01)
    _say(settings, saved=True)
    return 0


def never_stop(settings):
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    _say(settings, ready=True)
    time.sleep(100)
    return 0


def wait_without_listening(settings):
    _say(settings, ready=True)
    time.sleep(100)
    return 0
