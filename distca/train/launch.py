"""Start local ranks, or join the ranks that torchrun or SLURM started, and end them together.

Every rank runs `main(settings)` with torchrun's environment variables set, for every launcher. SIGTERM or one Ctrl-C
asks local ranks to save and stop; a second Ctrl-C kills them. If a rank fails, the others get a moment to report their
errors and are then killed. The run reports the first failure; a rank that a signal killed counts as first, because the
errors of other ranks follow from its loss.

With `run.restarts` the ranks that train are then all started again: their process group is lost with any of them. The
process that takes a lost one's place has its rank and its device, so the mesh stays. The ranks learn of the restart as
from torchrun, whose agent restarts the ranks of clusters and may give them another number. Ranks that only serve stay:
they look for the restarted ones in the store, which is one for the whole run. If the same rank fails in two starts in a
row before its first step, its device counts as gone, and the run goes on with the same batch on fewer data ranks.
"""

from __future__ import annotations

import ctypes
import logging
import multiprocessing
import os
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterable
from datetime import timedelta
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection, wait
from pathlib import Path
from secrets import token_hex
from typing import Any, cast

from distca.train.display import title
from distca.train.ending import MAX_REPORT, Failure, Report, end_rank, is_final, is_transport_error
from distca.train.rank_env import MAX_RESTARTS, RESTART_COUNT, RankEnv, rank_in, restarts
from distca.train.settings import Settings, num_roles, num_training, on_fewer_ranks
from distca.train.settings.checks import check_settings
from distca.train.settings.preflight import MemoryKills, check_machine, threads_for
from distca.validation import MAX_LOCAL_RANKS, UserError, check_whole

Main = Callable[[Settings], int]

FAILURE_GRACE_SECONDS = 2.0
STOP_MARGIN_SECONDS = 5.0
POLL_SECONDS = 0.2
SECRET = "DISTCA_SECRET"  # environment variable by which a run's servers and trainers know each other
PR_SET_PDEATHSIG = 1  # of Linux's prctl


def launch(settings: Settings, main: Main) -> int:
    """Run `main(settings)` on every rank and return the exit code; bad settings raise a ValueError before any start."""
    env = rank_in(os.environ)
    if env is not None:
        quiet_torch()                                            # check_machine imports torch
        settings = settings.with_values({"run.ranks": env.world})
    check_settings(settings)
    if env is None:
        check_whole("run.ranks", settings.run.ranks, most=MAX_LOCAL_RANKS,
                    why="the most processes that one machine starts; torchrun and srun start more machines")
    if (env is None or env.rank == 0) and sys.stderr.isatty():   # before torch is imported, which takes seconds
        print(f"Starting {title(settings, settings.run.ranks)} …", file=sys.stderr, flush=True)
    check_machine(settings)
    return run_ranks(settings, main)


def run_ranks(settings: Settings, main: Main) -> int:
    """Run `main(settings)` on `run.ranks` local ranks, or as the rank that a launcher started; check no settings."""
    env = rank_in(os.environ)
    if env is None:
        return _LocalRanks(settings, main).run()
    quiet_torch()
    os.environ.update(env.environment())
    _prepare(settings, env)
    if env.rank == 0 and settings.run.restarts and not restarts(os.environ)[1]:
        logging.getLogger("distca").warning("run.restarts is %d but only the launcher of these ranks can restart "
                                            "them; torchrun has --max-restarts", settings.run.restarts)
    try:
        return main(_resuming(settings))
    except Exception as error:
        if not is_transport_error(error):
            raise
        end_rank(str(error))


def _resuming(settings: Settings) -> Settings:
    """Return settings that resume after a restart, also if the run was to begin anew."""
    return settings.with_values({"checkpoint.resume": True}) if restarts(os.environ)[0] else settings


def quiet_torch() -> None:
    """Keep torch from logging C++ stacks and aborting when a rank is lost: Liveness reports it. Call before import."""
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "FATAL")
    os.environ.setdefault("TORCH_NCCL_ASYNC_ERROR_HANDLING", "0")


def _prepare(settings: Settings, env: RankEnv) -> None:
    """Set this rank's number of threads, and its log handler, which prefixes messages with the rank."""
    threads = threads_for(settings, env.local_world, os.environ)
    os.environ["OMP_NUM_THREADS"] = str(threads)  # read when torch is imported
    if "torch" in sys.modules:
        sys.modules["torch"].set_num_threads(threads)
    logger = logging.getLogger("distca")
    logger.setLevel(logging.INFO if env.rank == 0 else logging.WARNING)
    logger.handlers = [_ToStderr()]
    logger.handlers[0].setFormatter(logging.Formatter(
        "%(message)s" if env.rank == 0 else f"rank {env.rank}: %(message)s"))
    logger.propagate = False


class _ToStderr(logging.Handler):
    """Looks up sys.stderr for every message, because the live display replaces it."""

    def emit(self, record: logging.LogRecord) -> None:
        print(self.format(record), file=sys.stderr, flush=True)


def _loopback_store(timeout_seconds: int) -> Any:
    """Open the rendezvous store of local ranks on the loopback interface; torch's socket would listen on all."""
    from torch.distributed import TCPStore

    listener = socket.create_server(("127.0.0.1", 0))            # passed on open, so no process can take its port
    return TCPStore("127.0.0.1", listener.getsockname()[1], is_master=True, wait_for_workers=False,
                    timeout=timedelta(seconds=timeout_seconds), master_listen_fd=listener.detach())


class _LocalRanks:
    """Starts the ranks of this machine, watches them, and ends them."""

    def __init__(self, settings: Settings, main: Main) -> None:
        self.settings, self.main = settings, main
        self.stop_signals: list[int] = []
        self.restarts = 0
        self.stuck: int | None = None                        # that failed in the last start, before any step
        self.training = num_training(settings, settings.run.ranks)  # ranks after these only serve: a run survives them
        self.processes: dict[int, Any] = {}                      # by rank
        self.reports: dict[int, Connection] = {}
        self.ended: dict[int, float] = {}                        # rank -> time.time() of its end
        self.memory_kills = MemoryKills.of(Path("/"))            # before the ranks were started last

    def run(self) -> int:
        if num_roles(self.settings):
            os.environ.setdefault(SECRET, token_hex(32))         # the ranks inherit it
        before = self._handle_signals()
        store = _loopback_store(self.settings.run.timeout_seconds)
        try:
            while (code := self._run_once(store.port)) is None:
                self.restarts += 1
            return code
        finally:
            self._kill(self.processes)
            for number, handler in before.items():
                signal.signal(number, handler)
            if self.settings.checkpoint.neighbour_every:
                from distca.train.checkpoint.neighbour import forget

                forget(Path(self.settings.checkpoint.folder))

    def _run_once(self, port: int) -> int | None:
        """Start ranks and wait for their end; return the exit code, or None if they are to be started again."""
        self.memory_kills = MemoryKills.of(Path("/"))
        for rank in range(self.settings.run.ranks):
            if rank not in self.processes or rank in self.ended:  # servers may still run
                self._start(rank, port)
        self._watch()
        late = self._kill(range(self.training))
        return self._code([self._failure(rank) for rank in range(self.training)
                           if self.processes[rank].exitcode and rank not in late], late)

    def _start(self, rank: int, port: int) -> None:
        world = self.settings.run.ranks
        context = multiprocessing.get_context("spawn")
        report, reporter = context.Pipe(duplex=False)
        process = context.Process(target=_rank, name=f"rank {rank}", args=(
            self.settings, self.main, RankEnv(rank, world, rank, world, "127.0.0.1", port), self.restarts, reporter))
        resource_tracker.ensure_running()                        # its start, else the process's, unblocks signals
        before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})  # a terminal's, until the rank ignores it
        try:
            process.start()
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
        reporter.close()
        self.processes[rank], self.reports[rank] = process, report
        self.ended.pop(rank, None)

    def _watch(self) -> None:
        """Wait for all ranks, or after a failure for those that train; that and a stop signal set a deadline."""
        forwarded, deadline = 0, float("inf")
        while time.monotonic() < deadline:
            for rank, process in self.processes.items():
                if process.exitcode is not None and rank not in self.ended:
                    self.ended[rank] = time.time()
                    if process.exitcode and rank >= self.training:
                        print(self._failure(rank).text, file=sys.stderr, flush=True)
            trained = all(rank in self.ended for rank in range(self.training))
            failed = any(self.processes[rank].exitcode for rank in self.ended if rank < self.training)
            if trained and (failed or len(self.ended) == len(self.processes)):
                return
            if failed or trained:
                deadline = min(deadline, time.monotonic() + FAILURE_GRACE_SECONDS)
            if len(self.stop_signals) > forwarded:
                kill_now = self.stop_signals.count(signal.SIGINT) > 1
                patience = self.settings.run.timeout_seconds + STOP_MARGIN_SECONDS  # ranks find a stuck peer earlier
                deadline = min(deadline, time.monotonic() + (0 if kill_now else patience))
                forwarded = len(self.stop_signals)
                for rank in range(self.training):                # they release the servers
                    self.processes[rank].terminate()
            wait([process.sentinel for process in self.processes.values() if process.exitcode is None], POLL_SECONDS)

    def _code(self, failures: list[Failure], late: list[int]) -> int | None:
        if self.stop_signals:  # ranks that had not yet set a handler were ended by SIGTERM
            failures = [failure for failure in failures if failure.code != 128 + signal.SIGTERM]
        if failures:
            first = min(failures, key=lambda failure: (failure.signal is None, failure.when))
            most = 0 if self.stop_signals or first.final else self.settings.run.restarts
            again = self.restarts < most
            then = (f"; restart {self.restarts + 1} of {most} (run.restarts), from the newest checkpoint"
                    f"{self._on_fewer_ranks(first)}" if again else
                    f"; run.restarts is {most} and all have been used" if most else "")
            print(first.text + then, file=sys.stderr, flush=True)
            return None if again else first.code
        if not self.stop_signals:
            return 0
        if late:
            print(f"distca: rank {late[0]} did not stop in time and was ended", file=sys.stderr, flush=True)
        saved = self.stop_signals[0] == signal.SIGTERM and not any(
            self.processes[rank].exitcode for rank in range(self.training))
        return 0 if saved else 128 + self.stop_signals[0]

    def _on_fewer_ranks(self, first: Failure) -> str:
        """Leave out the device of a rank that failed in two starts in a row before any step; return what to say of it.

        Neither SIGKILL, which comes from outside, counts, nor what a rank says of another one.
        """
        lost = first.rank
        fails = first.text.startswith(f"distca: rank {lost} ") and first.signal != signal.SIGKILL and not first.stepped
        before, self.stuck = self.stuck, lost if fails else None
        fewer = on_fewer_ranks(self.settings) if fails and before == lost else None
        if fewer is None:
            return ""
        import torch

        seen = os.environ.get("CUDA_VISIBLE_DEVICES", ",".join(map(str, range(torch.cuda.device_count())))).split(",")
        if len(seen) >= self.settings.run.ranks:                 # a GPU each
            os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(seen[:lost] + seen[lost + 1:])
        self._kill(self.processes)                               # servers too: their ranks move up
        self.processes, self.ended, self.stuck = {}, {}, None
        self.settings, self.training = fewer, num_training(fewer, fewer.run.ranks)
        return (f", with the same batch on fewer ranks, because rank {lost} failed twice before a step: run.ranks is "
                f"{fewer.run.ranks} and batch.tokens_per_rank {fewer.batch.tokens_per_rank}")

    def _failure(self, rank: int) -> Failure:
        report, code, when, stepped = self.reports[rank], self.processes[rank].exitcode, self.ended[rank], False
        try:
            while report.poll():
                told = cast(Failure | None, report.recv())
                if told is not None:
                    return told._replace(stepped=stepped)
                stepped = True
        except EOFError:
            pass
        if code < 0:
            text = f"distca: rank {rank} was ended by {signal.Signals(-code).name}"
            if -code == signal.SIGKILL and self.memory_kills.risen():
                text += (f": memory ran out, by the kernel's count ({self.memory_kills.file}); use fewer tokens per "
                         "rank, more ranks, or a machine with more memory")
            cause = None if -code in (signal.SIGABRT, signal.SIGTERM) else -code
            return Failure(when, rank, 128 - code, text, cause, stepped=stepped)
        return Failure(when, rank, code, f"distca: rank {rank} ended with exit code {code}", stepped=stepped)

    def _kill(self, ranks: Iterable[int]) -> list[int]:
        """Kill those of these ranks that still run and return them."""
        running = [rank for rank in ranks if self.processes[rank].exitcode is None]
        for rank in running:
            self.processes[rank].kill()
        for rank in ranks:
            self.processes[rank].join()
            self.ended.setdefault(rank, time.time())
        return running

    def _handle_signals(self) -> dict[int, Any]:
        if threading.current_thread() is not threading.main_thread():
            return {}                                            # only the main thread may set signal handlers

        return {number: signal.signal(number, lambda number, _: self.stop_signals.append(number))
                for number in (signal.SIGTERM, signal.SIGINT)}


def _rank(settings: Settings, main: Main, env: RankEnv, count: int, reporter: Connection) -> None:
    """Run one local rank; it sends its failure to the launcher and ends with the launcher."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # terminals send Ctrl-C to all; the launcher sends SIGTERM instead
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})  # for those who handle it
    _end_with_launcher()
    quiet_torch()
    os.environ.update(env.environment(), TORCHELASTIC_USE_AGENT_STORE="True",
                      **{RESTART_COUNT: str(count), MAX_RESTARTS: str(settings.run.restarts)})
    for name in [name for _, name in socket.if_nameindex() if name in ("lo", "lo0")][:1]:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", name)
        os.environ.setdefault("NCCL_SOCKET_IFNAME", name)
    Report.launcher = reporter
    try:
        _prepare(settings, env)
        code = main(_resuming(settings))
    except Exception as error:
        if isinstance(error, UserError | OSError) or is_transport_error(error):
            end_rank(str(error), 2 if isinstance(error, UserError) else 1, final=is_final(error))
        end_rank(f"distca: rank {env.rank} failed:\n{traceback.format_exc()[-MAX_REPORT:]}".rstrip())
    reporter.close()
    from distca.runtime.liveness import end_process

    end_process(code)


def _end_with_launcher() -> None:
    """End this process when the launcher ends: by prctl, which works for a stopped process too, and by a thread."""
    launcher = multiprocessing.parent_process()
    assert launcher is not None
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)

    def watch() -> None:
        launcher.join()
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()          # covers a launcher that ended before prctl
