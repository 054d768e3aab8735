"""What stand-in ranks run: small mains that the tests of the launcher hand to it, each in a module a rank can import.

They leave what they saw in the log folder, a file for each rank.
"""

import ctypes
import errno
import gc
import json
import os
import signal
import sys
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

from distca.train.rank_env import restarts, this_rank
from distca.train.settings import Settings
from distca.train.settings.checks import check_settings


def _say(settings: Settings, **facts: Any) -> None:
    rank = this_rank().rank
    path = Path(settings.log.folder) / f"rank{rank}.json"
    path.with_suffix(".part").write_text(json.dumps({"pid": os.getpid(), **facts}))
    os.replace(path.with_suffix(".part"), path)


def _listening(pid: int) -> list[str]:
    """Addresses, in the kernel's hex, on which a process listens."""
    held = {os.readlink(entry).removeprefix("socket:[").removesuffix("]") for entry in Path(f"/proc/{pid}/fd").iterdir()
            if entry.is_symlink() and os.readlink(entry).startswith("socket:")}
    rows = [line.split() for kind in ("tcp", "tcp6") if Path(f"/proc/{pid}/net/{kind}").exists()
            for line in Path(f"/proc/{pid}/net/{kind}").read_text().splitlines()[1:]]
    return [row[1].partition(":")[0] for row in rows if row[3] == "0A" and row[9] in held]


def meet(settings: Settings) -> int:
    import torch
    import torch.distributed as dist

    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    place = this_rank()
    total = torch.tensor([10.0**place.rank])
    dist.all_reduce(total)
    _say(settings, rank=place.rank, world=place.world, local_rank=place.local_rank, total=total.item(),
         threads=torch.get_num_threads(), ranks=settings.run.ranks,
         listening=[_listening(pid) for pid in (os.getpid(), os.getppid())])
    dist.destroy_process_group()
    return 0


def second_fails(settings: Settings) -> int:
    if this_rank().rank == 1:
        raise RuntimeError("rank one gave up")
    _say(settings)
    time.sleep(1000)                                             # longer than a test may take
    return 0


def all_refuse(settings: Settings) -> int:
    check_settings(settings.with_values({"optimizer.lr": -1.0}))
    return 0


def foreign_value_error(settings: Settings) -> int:
    return int("not a number that the package asked for")


def second_returns_five(settings: Settings) -> int:
    return 5 if this_rank().rank == 1 else 0


def second_is_killed(settings: Settings) -> None:
    """Rank 0 learns of it by an exchange that fails, and says so at once."""
    import torch
    import torch.distributed as dist

    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    dist.barrier()
    if this_rank().rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    while True:
        dist.all_reduce(torch.ones(1))


def group_timeouts(settings: Settings) -> int:
    """Every process group of a training rank, with the seconds that it waits."""
    import torch
    from torch.distributed import distributed_c10d

    from distca.train.groups import start_group
    from distca.train.trainer import Trainer

    start_group(settings, torch.device("cpu"), this_rank().local_world)
    trainer = Trainer(settings, torch.device("cpu"))
    groups = list(distributed_c10d._world.pg_map)
    seconds = [group._get_backend(torch.device("cpu")).options._timeout.total_seconds() for group in groups]
    _say(settings, seconds=seconds)
    assert trainer.checkpoints is not None
    trainer.checkpoints.close()
    return 0


def train_with_a_full_disk(settings: Settings) -> int:
    """The first save finds no space."""
    from distca.train import trainer
    from distca.train.checkpoint import checkpointer as checkpoint
    from distca.train.checkpoint import files as checkpoint_files

    failed = []

    def full(path: Path, tensors: Any) -> Any:
        if "step_00000001" in str(path):
            failed.append(path)
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return checkpoint_files.write_file(path, tensors)

    vars(checkpoint)["write_file"] = full
    return trainer.run(settings)


def train_and_stop_in_the_last_save(settings: Settings) -> int:
    """As a debugger, a hung disk or a scheduler would leave a rank."""
    from distca.train import trainer
    from distca.train.checkpoint import checkpointer as checkpoint

    def stopped(path: Path, tensors: Any) -> None:
        os.kill(os.getpid(), signal.SIGSTOP)

    if this_rank().rank == 1:
        vars(checkpoint)["write_file"] = stopped
    return trainer.run(settings)


def train_impatiently(settings: Settings) -> int:
    """Five seconds without a sign of life are too many, though ranks may take longer than that to start."""
    from distca.train import trainer

    class Watched(trainer.Trainer):
        def train(self) -> None:
            _say(settings)
            super().train()

    liveness = vars(trainer)["Liveness"]
    vars(trainer).update(Trainer=Watched, Liveness=lambda seconds, on_lost: liveness(5, on_lost))
    return trainer.run(settings)


def stop_when_asked(settings: Settings) -> int:
    asked = []
    signal.signal(signal.SIGTERM, lambda number, frame: asked.append(number))
    _say(settings, ready=True)
    while not asked:
        time.sleep(0.01)
    _say(settings, saved=True)
    return 0


def never_stop(settings: Settings) -> int:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    _say(settings, ready=True)
    time.sleep(1000)                                             # longer than a test may take
    return 0


def wait_without_listening(settings: Settings) -> int:
    _say(settings, ready=True)
    time.sleep(1000)                                             # longer than a test may take
    return 0


def live_memory(settings: Settings) -> int:
    """Live bytes of the heap and Python's blocks after 50 steps, all but 20, and all; those 20 keep their batches."""
    import torch

    from distca.train import trainer as training
    from distca.train.groups import start_group

    kept: list[Any] = []
    start_group(settings, torch.device("cpu"), this_rank().local_world)
    trainer = training.Trainer(settings, torch.device("cpu"))
    run_step = trainer.forward_backward

    def live_after(step: int) -> list[int]:
        """The least of five steps: what is on its way to the next step comes and goes."""
        while trainer.step < step - 5:
            trainer.one_step()
        seen = []
        for _ in range(5):
            trainer.one_step()
            gc.collect()
            seen.append((live_heap_bytes(), sys.getallocatedblocks()))
        return [min(column) for column in zip(*seen, strict=True)]

    def keep_rows(batch: Any) -> torch.Tensor:
        kept.append(batch.rows)
        return run_step(batch)

    trimmed: list[int] = []
    vars(training)["return_freed_memory"] = lambda: trimmed.append(trainer.step)
    before, after = live_after(50), live_after(settings.run.steps - 20)
    vars(trainer)["forward_backward"] = keep_rows
    _say(settings, before=before, after=after, leaking=live_after(settings.run.steps), trimmed=trimmed)
    trainer.batches.close()
    return 0


def live_heap_bytes() -> int:
    """What is allocated and not freed, by glibc's own count."""
    class MallInfo(ctypes.Structure):
        _fields_ = [("counts", ctypes.c_size_t * 10)]

    ask = ctypes.CDLL(None).mallinfo2
    ask.restype = MallInfo
    counts = ask().counts
    return int(counts[7] + counts[4])                            # uordblks in arenas, hblkhd in mappings of their own


def die(settings: Settings) -> int:
    _say(settings, restarts=restarts(os.environ))
    os.kill(os.getpid(), signal.SIGKILL)
    return 0


MOMENTS = {  # where a rank is killed -> (module, class or "", function)
    "forward": ("distca.train.batches", "StageWork", "forward"),
    "attention": ("distca.runtime.call", "ForwardCall", "serve"),
    "backward": ("distca.train.batches", "StageWork", "backward"),
    "optimizer": ("distca.train.trainer", "", "clip_grad_norm"),
    "copying": ("distca.train.checkpoint.checkpointer", "", "local_part"),
    "writing to memory": ("distca.train.checkpoint.neighbour", "", "write_files"),
    "naming it complete": ("distca.train.checkpoint.folder", "", "write_manifest"),
    "loading": ("distca.train.checkpoint.files", "Reader", "fill"),
}


def train_and_die(settings: Settings) -> int:
    """deaths.json has, for every start of the run, a rank, a moment, and the step of that start that it comes in."""
    import importlib

    from distca.train import trainer

    deaths = json.loads((Path(settings.log.folder).parent / "deaths.json").read_text())
    count, _ = restarts(os.environ)
    if count < len(deaths) and deaths[count][0] == this_rank().rank:
        _, moment, step = deaths[count]
        module, owner, name = MOMENTS[moment]
        place = importlib.import_module(module)
        place = getattr(place, owner) if owner else place
        original, one_step, begun = getattr(place, name), trainer.Trainer.one_step, [0]

        def counted(self: Any) -> Any:
            begun[0] += 1
            return one_step(self)

        def fatal(*args: Any, **options: Any) -> Any:
            if begun[0] >= step:
                os.kill(os.getpid(), signal.SIGKILL)
            return original(*args, **options)

        setattr(place, name, fatal)
        vars(trainer)["Trainer"].one_step = counted
    return trainer.run(settings)


def train_and_note_servers(settings: Settings) -> int:
    """As `train_and_die`; rank 0 notes which processes serve when each start of the run begins to train."""
    from distca.train import trainer

    class Noting(trainer.Trainer):
        def train(self) -> None:
            if self.rank == 0:
                assert self.servers is not None
                note = restarts(os.environ)[0], [one.pid for one in self.servers.view.members]
                with open(Path(settings.log.folder).parent / "servers.jsonl", "a", encoding="utf-8") as notes:
                    notes.write(json.dumps(note) + "\n")
            super().train()

    vars(trainer)["Trainer"] = Noting
    return train_and_die(settings)


def train_without_the_device(settings: Settings) -> int:
    """As `train_and_die`, but after the first start there is no device for rank 1."""
    if restarts(os.environ)[0] and this_rank().rank == 1:
        raise RuntimeError("CUDA error: no such device")
    return train_and_die(settings)
