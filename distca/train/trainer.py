"""Train a decoder: documents in, checkpoints out, the same loss wherever attention is computed.

Every rank calls `run`. The path of a batch through a step:

    settings → Loader (documents of the corpus) → step_plan (layouts, ticks, plans of attention) → Batches (rows)
    → Pipeline (ticks) → StageWork (this rank's segments) → CoreAttention (exchange and kernel) → loss → update

Only attention communicates, apart from FSDP, neighbouring pipeline stages and the gradients' all-reduce.
"""

from __future__ import annotations

import logging
import os
import platform
import resource
import signal
import sys
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
import torch.distributed as dist

from distca.corpus.corpora import Corpus
from distca.cost.work import peak_flops, training_flops
from distca.planning.plan import Plan
from distca.planning.step import StepPlan
from distca.runtime.attention import CoreAttention
from distca.runtime.liveness import TRIM_STEPS, Liveness, is_lost, return_freed_memory
from distca.runtime.pipeline import Pipeline
from distca.runtime.pool.home import ServerPool
from distca.runtime.recorder import Recorder
from distca.trace import StepTrace
from distca.train.agreement import Agreement, ServerSpeeds
from distca.train.batches import Batch, Batches, Evaluation, StageWork, check_fills_a_batch
from distca.train.checkpoint.checkpointer import Checkpointer, SaveError
from distca.train.checkpoint.export import export_newest, keep_tokenizer, token_ids
from distca.train.checkpoint.folder import step_folders
from distca.train.checkpoint.neighbour import NeighbourCheckpoints
from distca.train.data import Loader, open_corpora
from distca.train.display import Observer
from distca.train.ending import end_rank, report_step, will_restart
from distca.train.groups import gather_json, groups_of, on_first, set_timeouts, start_group, transport_between
from distca.train.model.build import build_decoder, build_optimizer, connect, lasting, learning_rate
from distca.train.model.huggingface import config_of
from distca.train.model.parallel import clip_grad_norm
from distca.train.model.segment_runs import Offload, run_segments
from distca.train.model.shape import DecoderShape, decoder_shape
from distca.train.model.weight_gradients import WeightGradients
from distca.train.rank_env import rank_in, restarts, this_rank
from distca.train.report_files import write_about, write_step
from distca.train.run_log import FolderLock, StepRecord, open_log_folder
from distca.train.servers import (
    MembersFile,
    find_in_store,
    open_pool,
    port_before_restart,
    publish_in_store,
    secret_in,
    serve,
    who_takes_part,
)
from distca.train.settings import Settings, num_roles, num_training
from distca.train.settings.preflight import compiles, device_for, dtype_for
from distca.train.settings.schedule import pipeline_ticks

LOG = logging.getLogger("distca")


def run(settings: Settings) -> int:
    """Run one rank; return 0 after the last step, or after saving if the run was asked to stop."""
    env, secret = this_rank(), b""
    device = device_for(settings, env.local_rank)
    if num_roles(settings):
        secret = secret_in(os.environ)
    training = num_training(settings, env.world)
    if env.rank >= training:
        serve(settings, device, secret, find_in_store, env.rank)
        return 0
    start_group(settings, device, env.local_world, rank=env.rank, world_size=training)
    ranks = Liveness(settings.run.timeout_seconds, end_rank).start()
    finished = False
    try:
        if env.local_rank == 0 and settings.data.is_cached:
            open_corpora(settings, verify=True)                  # tokenizes; the other ranks then find the cache
        ranks.meet()
        port = port_before_restart() if env.rank == 0 and num_roles(settings) else 0
        trainer = Trainer(settings, device, open_pool(settings, device, secret, publish_in_store, port))
        trainer.train()
        finished = trainer.step >= settings.run.steps
    except RuntimeError as error:
        if not is_lost(error):
            raise
        raise ranks.explained(error) from error
    ranks.close()
    dist.destroy_process_group()                                 # not after a failure: its report must come first
    if env.rank == 0 and finished and settings.checkpoint.export:
        export_newest(step_folders(Path(settings.checkpoint.folder)), Path(settings.checkpoint.export))
    return 0


class Trainer:
    """A training rank: its batches, attention, decoder, optimizer and checkpoints.

    `servers` are needed if plans have roles for dedicated servers.
    """

    def __init__(self, settings: Settings, device: torch.device, servers: ServerPool | None = None) -> None:
        self.settings, self.device, self.servers = settings, device, servers
        self.rank, self.world = dist.get_rank(), dist.get_world_size() + settings.attention.dedicated
        (self.mesh, self.pool), self.trainers = groups_of(settings, device), dist.group.WORLD
        self.stage, self.num_data = self.mesh["pipeline"].get_local_rank(), self.mesh["data"].size()
        dtype = dtype_for(settings, device)
        corpus, held_out = open_corpora(settings)
        check_fills_a_batch(corpus, settings, self.num_data)
        shape = decoder_shape(settings.model, corpus.vocab or 1)
        self.recorder = Recorder(device)
        self.peak_flops = peak_of(device, dtype)
        ticks = pipeline_ticks(settings, shape.model, shape.tied)
        is_shared = settings.attention.mode == "disaggregated" and ticks.same_phase
        shared = self.pool if is_shared else self.mesh["data"].get_group()
        self.attention = CoreAttention(shared, kernel=settings.attention.kernel, state=settings.attention.state,
                                       transport=transport_between(shared, settings, servers), recorder=self.recorder)
        agree = Agreement(settings, self.trainers)

        def batches(corpus: Corpus, trains: bool = True) -> Batches:
            loader = Loader(corpus, settings, rank=self.mesh["data"].get_local_rank(), world=self.num_data,
                            model=shape.model)
            return Batches(loader, ticks, topology=self.attention.topology, agree=agree, trains=trains)

        self.batches = batches(corpus)
        self.speeds = ServerSpeeds(self.pool, self.trainers) if settings.attention.adapt else None
        self.evaluation = (Evaluation(batches(held_out, trains=False))
                           if held_out is not None and settings.eval.every else None)
        self.decoder = build_decoder(settings, shape, dtype, device, self.mesh, self.pool)
        compile, host_bytes = compiles(settings, device), int(settings.model.offload * 1e9)
        offload = Offload(device, host_bytes) if host_bytes else None
        run_segments(self.decoder, compile=compile, tile_tokens=settings.model.tile_tokens, offload=offload)
        self.optimizer = build_optimizer(self.decoder, settings)
        self.work = StageWork(self.decoder, self.attention, tensor=settings.parallel.tensor, dtype=dtype, device=device,
                              loss_chunk_tokens=settings.optimizer.loss_chunk_tokens, compiled=compile,
                              offload=offload,
                              gradients=WeightGradients(self.decoder) if ticks.splits or ticks.spreads_head else None,
                              spreads_head=ticks.spreads_head)
        timeout = timedelta(seconds=settings.run.timeout_seconds)
        self.neighbours = connect(self.mesh["pipeline"], timeout)
        set_timeouts(timeout)
        self.step, self.stopping = 0, False
        self.log: FolderLock | None = None                       # rank 0's lock on the log folder during training
        self.copies: NeighbourCheckpoints | None = None          # of checkpoints, in host memory
        self.members: MembersFile | None = None                  # rank 0's
        self.checkpoints = self.open_checkpoints(shape, dtype)

    def open_checkpoints(self, shape: DecoderShape, dtype: torch.dtype) -> Checkpointer | None:
        chosen = self.settings.checkpoint
        if not chosen.folder:
            return None
        checkpoints = Checkpointer(
            chosen.folder, self.decoder, self.optimizer, keep=chosen.keep, resume=chosen.resume,
            timeout_seconds=self.settings.run.timeout_seconds, run=lasting(self.settings, shape, dtype),
            config=config_of(shape, str(next(self.decoder.parameters()).dtype).removeprefix("torch."))
            | token_ids(self.settings), group=self.trainers)
        if self.rank == 0:
            keep_tokenizer(self.settings, Path(chosen.folder))
        if chosen.neighbour_every:
            self.copies = NeighbourCheckpoints(checkpoints, self.trainers, platform.node())
        state = (self.copies or checkpoints).resume() if chosen.resume else None
        if state is not None:
            self.batches.load(state.loader)
            self.step = state.step
        return checkpoints

    def open_log(self) -> str:
        """Lock this run's log folder until the run ends; return its path."""
        saved = self.settings.checkpoint.folder
        self.log = open_log_folder(Path(self.settings.log.folder), Path(saved) if saved else None,
                                   resumed=self.step > 0 or restarts(os.environ)[0] > 0)
        return str(self.log.folder)

    def train(self) -> None:
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self.ask_to_stop)
        self.settings = self.settings.with_values({"log.folder": on_first(self.open_log, self.trainers)})
        people = who_takes_part()
        observer = Observer(self.settings, self.rank, self.world, restarts=restarts(os.environ)[0])
        if self.rank == 0:
            self.members = MembersFile(Path(self.settings.log.folder), people, self.servers)
            write_about(self.settings, self.world, self.batches.loader.model, self.device)
        saved, first = self.settings.checkpoint, self.step + 1
        try:
            while self.step < self.settings.run.steps and not self.agreed_to_stop():
                record = self.one_step()
                if self.step == first:
                    report_step()
                if self.evaluation is not None and self.evaluation.is_due(self.step):
                    record = replace(record, eval_loss=self.evaluation.loss(self.forward_only, self.pool))
                observer.step(record)
                if saved.every and self.step % saved.every == 0:
                    self.save(self.checkpoints)
                elif saved.neighbour_every and self.step % saved.neighbour_every == 0:
                    self.save(self.copies)
            if self.servers is not None:
                self.servers.close()                             # before saving, which may take long
            self.save(self.checkpoints)
        finally:
            self.batches.close()
            if self.members is not None:
                self.members.close()
            observer.close(stopped=self.stopping, restarting=will_restart(sys.exception()))
            if self.log is not None:
                self.log.release()
        if self.checkpoints is not None:
            self.checkpoints.close()
        if self.copies is not None:
            self.copies.close()

    def one_step(self) -> StepRecord:
        began = perf_counter()
        batch = self.batches.next()
        self.recorder.begin_step()
        lr = learning_rate(self.step, self.settings)
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        with self.recorder.span("layers", "linear"):
            own_total = self.forward_backward(batch)
        with self.recorder.span("optimizer", "optimizer"):
            norm = self.update()
        self.step += 1
        if self.device.type == "cpu" and self.step % TRIM_STEPS == 0:
            return_freed_memory()
        faults = self.faults()
        trace = self.recorder.end_step(self.rank, self.step)
        total, attention, linear, wait = self.over_ranks(own_total, trace)
        loss = total / batch.num_labels
        if self.speeds is not None and batch.server_work is not None:
            self.speeds.learn(batch.server_work, trace.seconds("attention"))
            self.batches.speed = self.speeds.for_plans
        if self.step == self.settings.log.trace_step:
            self.write_trace(trace, batch.plan)
        seconds = perf_counter() - began
        plan, summary, now = batch.plan, batch.summary, memory_now(self.device)
        return StepRecord(
            step=self.step, loss=loss, lr=lr, grad_norm=norm, tokens=plan.num_tokens, seconds=seconds,
            tokens_per_second=plan.num_tokens / seconds, work_before=summary.work_before,
            work_after=summary.work_after, bytes_per_layer=summary.bytes_per_layer,
            exposed_seconds=wait, attention_seconds=attention, linear_seconds=linear,
            mfu=self.utilization(plan, seconds), host_seconds=batch.wait_seconds,
            memory_bytes=max(memory_in_use(self.device), now), memory_now_bytes=now,
            plan_seconds=batch.plan_seconds,
            bubble_share=plan.ticks.bubble_share(), served_in_bubbles=summary.served_in_bubbles,
            tolerance=plan.plans[0].tolerance if plan.tried else None,
            attention_seconds_max=None if self.speeds is None else self.speeds.slowest_seconds,
            server_speed=None if self.speeds is None else self.speeds.for_log,
            epochs=self.batches.loader.epochs(self.batches.position), **faults)

    def faults(self) -> dict[str, Any]:
        """Return this step's figures of dedicated servers, and record when a lost one's work was repeated."""
        if self.servers is None:
            return {}
        found = self.servers.take_faults()
        for name, start, stop in found.gaps:
            self.recorder.note_of_host(name, "repeated", start, stop)
        return {"servers": len(self.servers.view.members), "faults": found.lost, "repeated_tasks": found.repeated_tasks,
                "fault_seconds": found.seconds}

    def forward_backward(self, batch: Batch) -> torch.Tensor:
        """Compute gradients of the mean loss over all ranks' labels; return the summed loss of this rank's labels."""
        plans = self.begin(batch)
        Pipeline(self.work, self.attention, self.neighbours).step(batch.plan.ticks, plans)
        return self.work.total

    def forward_only(self, batch: Batch) -> torch.Tensor:
        """Return the summed loss of this rank's labels, under torch.no_grad; no training state changes."""
        self.recorder.begin_step()                               # drops the spans of the previous batch
        plans = self.begin(batch, forward_only=True)
        Pipeline(self.work, self.attention, self.neighbours).forward_only(batch.plan.ticks, plans)
        return self.work.total

    def begin(self, batch: Batch, forward_only: bool = False) -> list[list[list[Plan]]]:
        """Start a batch on this rank's stage and prepare its attention; return plans [tick][nano-batch][depth]."""
        self.work.begin(batch)
        plans, backward = batch.plan.plans_of(self.stage), batch.plan.ticks.backward[:, self.stage]
        self.attention.expect((plan for tick, nanos in enumerate(plans) if not (forward_only and backward[tick])
                               for depths in nanos for plan in depths), self.device)
        return plans

    def over_ranks(self, total: torch.Tensor, trace: StepTrace) -> list[float]:
        """Return the loss summed over ranks, and the ranks' mean seconds in attention, in linear layers and waiting."""
        lanes = total.new_tensor([trace.seconds(lane) for lane in ("attention", "linear", "wait")])
        figures = torch.cat([total.view(1), lanes / dist.get_world_size(self.pool)])
        dist.all_reduce(figures, group=self.pool)
        return figures.tolist()

    def utilization(self, plan: StepPlan, seconds: float) -> float | None:
        """Return a step's MFU over the GPUs of all ranks, dedicated ones included; None if the peak is unknown."""
        if self.peak_flops is None:
            return None
        flops = training_flops((micro_batch.lengths for micro_batch in plan.micro_batches), plan.model,
                               plan.model.layer_windows)
        return flops / (self.peak_flops * self.world * seconds)

    def update(self) -> float:
        norm = clip_grad_norm(self.decoder.parameters(), self.settings.optimizer.clip_norm, self.mesh.get_all_groups())
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return float(norm)

    def save(self, into: Checkpointer | NeighbourCheckpoints | None) -> None:
        if into is not None:
            self.finish_save(into)
            into.save(self.step, self.batches.position)

    def finish_save(self, saver: Checkpointer | NeighbourCheckpoints) -> None:
        """Wait for the save in flight; if it failed, raise or warn, as `checkpoint.on_error` says."""
        try:
            saver.finish()
        except SaveError as error:
            if self.settings.checkpoint.on_error == "stop":
                raise
            LOG.warning("%s; training goes on (checkpoint.on_error is 'continue')", error)

    def ask_to_stop(self, number: int, frame: Any) -> None:
        self.stopping = True

    def agreed_to_stop(self) -> bool:
        """Return whether any rank was asked to stop, so that all ranks stop, or see a failed save, at the same step."""
        savers = [saver for saver in (self.checkpoints, self.copies) if saver is not None]
        flags = torch.tensor([self.stopping, *(saver.failed for saver in savers)], dtype=torch.int64)
        dist.all_reduce(flags, op=dist.ReduceOp.MAX, group=self.trainers)
        if flags[0]:                                             # else a signal may have come since they were read
            self.stopping = True
        for saver, failed in zip(savers, flags[1:], strict=True):
            if failed:
                self.finish_save(saver)
        return bool(flags[0])

    def write_trace(self, trace: StepTrace, plan: StepPlan) -> None:
        gathered = gather_json((trace.to_json(), memory_in_use(self.device)), self.trainers)
        if self.rank == 0:
            write_step(Path(self.settings.log.folder), gathered, plan)


def peak_of(device: torch.device, dtype: torch.dtype) -> float | None:
    """Return the peak FLOP/s of this rank's GPU, or of its share if ranks share the GPU; None if unknown."""
    if device.type != "cuda" or dtype != torch.bfloat16:
        return None
    peak, env = peak_flops(torch.cuda.get_device_name(device)), rank_in(os.environ)
    sharing = 1 if env is None else max(1.0, env.local_world / torch.cuda.device_count())
    return None if peak is None else peak / sharing


def memory_in_use(device: torch.device) -> int:
    """Return the peak bytes of tensors on a GPU, or the peak resident bytes of the process on a CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def memory_now(device: torch.device) -> int:
    """Return the bytes of tensors on a GPU, or the resident bytes of the process on a CPU; 0 if nobody says."""
    if device.type == "cuda":
        return torch.cuda.memory_allocated(device)
    statm = Path("/proc/self/statm")
    return int(statm.read_text(encoding="ascii").split()[1]) * resource.getpagesize() if statm.exists() else 0
