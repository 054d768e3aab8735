"""accelerate's own DDP and FSDP2 with documents over ranks give the steps of one process.

accelerate (1.15) reads an FSDP plugin on GPUs and other accelerators alone: on CPU ranks `AcceleratorState` keeps
`MULTI_CPU` and wraps in DDP without a word. The tests stand in for that one choice, and everything behind it is
accelerate's: wrapping by layer class, sharding, switching the optimizer's parameters, backward and clipping.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from distca.data import Collator, rows
from distca.runtime.transport import Transport
from tests.integrations import test_huggingface_spanning as plain
from tests.support.processes import run_processes

pytest.importorskip("transformers")
pytest.importorskip("accelerate")
STEPS = [[200, 30], [61, 59], [5, 1, 170, 4]]


def launched(transport: Transport) -> None:
    """What torchrun would have told accelerate."""
    os.environ.update(RANK=str(transport.rank), LOCAL_RANK=str(transport.rank), WORLD_SIZE=str(transport.size),
                      LOCAL_WORLD_SIZE=str(transport.size), MASTER_ADDR="localhost", MASTER_PORT="1")


def plugin(**options: Any) -> Any:
    from accelerate import FullyShardedDataParallelPlugin

    return FullyShardedDataParallelPlugin(
        fsdp_version=2, auto_wrap_policy="transformer_based_wrap", transformer_cls_names_to_wrap=["LlamaDecoderLayer"],
        **options)


def accept_cpus() -> None:
    """Stand in for the list of devices in accelerate's state on which a plugin counts."""
    from accelerate import DistributedType
    from accelerate.state import AcceleratorState, PartialState

    begin = AcceleratorState.__init__

    def with_plugin(self: Any, *args: Any, fsdp_plugin: Any = None, **named: Any) -> None:
        begin(self, *args, fsdp_plugin=fsdp_plugin, **named)
        if fsdp_plugin is not None:
            self.fsdp_plugin, self.distributed_type = fsdp_plugin, DistributedType.FSDP
            PartialState._shared_state["distributed_type"] = DistributedType.FSDP

    AcceleratorState.__init__ = with_plugin


def forget() -> None:
    from accelerate.state import AcceleratorState

    AcceleratorState._reset_state(reset_partial_state=True)
    os.environ.pop("ACCELERATE_USE_FSDP", None)


def whole_of(x: torch.Tensor) -> torch.Tensor:
    from torch.distributed.tensor import DTensor

    return x.full_tensor() if isinstance(x, DTensor) else x


def own_loop(transport: Transport, accelerator: Any, checkpointing: bool = False) -> str:
    """Gradients and weights of a loop around `prepare`, as one process has them; gives the wrapper's name."""
    from distca.integrations.huggingface import enable

    one, model = plain.small("llama", attn_implementation="sdpa").train(), plain.small("llama").train()
    attention = enable(model, tolerance=0.02)
    if checkpointing:
        model.gradient_checkpointing_enable()
    theirs = torch.optim.SGD(one.parameters(), lr=0.5)
    model, mine = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.5))
    for seed, lengths in enumerate(STEPS):
        documents = plain.documents_of(lengths, seed)
        row, whole = rows(documents, transport.rank, transport.size), rows(documents, 0, 1)
        loss = model(**row.batch(), num_items_in_batch=row.num_items, use_cache=False).loss
        accelerator.backward(loss * transport.size)              # DDP and FSDP2 average over ranks
        expected = one(**whole.batch(), num_items_in_batch=row.num_items, use_cache=False).loss
        expected.backward()
        plain.close(accelerator.reduce(loss.detach(), "sum"), expected.detach())
        for p, q in zip(model.parameters(), one.parameters(), strict=True):
            plain.close(whole_of(p.grad), q.grad)
        norms = [float(whole_of(accelerator.clip_grad_norm_(model.parameters(), 1.0))),
                 float(torch.nn.utils.clip_grad_norm_(one.parameters(), 1.0))]
        np.testing.assert_allclose(norms[0], norms[1], rtol=1e-5)
        for optimizer in (mine, theirs):
            optimizer.step()
            optimizer.zero_grad()
    for p, q in zip(model.parameters(), one.parameters(), strict=True):
        plain.close(whole_of(p.detach()), q.detach())
    assert attention.latest is not None and (attention.latest.layout.ranks_per_document() > 1).any()
    return type(model).__name__


def loops(transport: Transport) -> list[str]:
    from accelerate import Accelerator

    launched(transport)
    found = [own_loop(transport, Accelerator(cpu=True))]
    forget()
    found.append(str(Accelerator(cpu=True, fsdp_plugin=plugin()).distributed_type))
    forget()
    accept_cpus()
    found.append(own_loop(transport, Accelerator(cpu=True, fsdp_plugin=plugin(cpu_ram_efficient_loading=False)), True))
    forget()
    found.append(own_loop(transport, Accelerator(cpu=True, fsdp_plugin=plugin(
        cpu_ram_efficient_loading=True, activation_checkpointing=True))))
    return found


def trainer_losses(transport: Transport, folder: str, **options: Any) -> list[float]:
    """Six steps and an evaluation of Trainer with documents over ranks."""
    import transformers as hf

    from distca.integrations.huggingface import enable

    hf.set_seed(0)
    model = plain.small("llama", **({} if transport.size > 1 else {"attn_implementation": "sdpa"}))
    if transport.size > 1:
        enable(model, evaluation="pool")
    arguments = hf.TrainingArguments(
        folder, max_steps=6, per_device_train_batch_size=4 // transport.size, per_device_eval_batch_size=4 //
        transport.size, learning_rate=1e-2, logging_steps=1, eval_strategy="steps", eval_steps=6, save_strategy="no",
        report_to="none", use_cpu=True, disable_tqdm=True, ddp_timeout=100, **options)
    train, evaluated = ([{"input_ids": document} for document in plain.documents_of(lengths, seed)]
                        for seed, lengths in enumerate(([120, 3, 40, 1, 77, 200, 5, 9] * 3, [100, 1, 30, 8])))
    trainer = hf.Trainer(model, arguments, data_collator=Collator(), train_dataset=train, eval_dataset=evaluated)
    trainer.train()
    names = {type(part).__name__ for part in trainer.model_wrapped.modules()}
    assert ("FSDPLlamaDecoderLayer" in names) == ("fsdp" in options and transport.size > 1)
    return [row[name] for name in ("loss", "eval_loss") for row in trainer.state.log_history if name in row]


def trainer_runs(transport: Transport, folder: str) -> list[list[float]]:
    launched(transport)
    accept_cpus()
    runs = []
    wrapped = {"transformer_layer_cls_to_wrap": "LlamaDecoderLayer"}
    options: list[dict[str, Any]] = [{}, {"torch_compile": True, "torch_compile_backend": "aot_eager"}]
    for added in [*options, {"fsdp": True, "fsdp_config": wrapped}] if transport.size > 1 else [{}]:
        runs.append(trainer_losses(transport, folder, **added))
        forget()
    return runs


@pytest.mark.multiprocess
def test_ddp_and_fsdp2_of_accelerate_match_one_process() -> None:
    for outcome in run_processes(2, loops, timeout_seconds=60, deadline_seconds=200):
        assert outcome.error is None
        assert outcome.value == ["DistributedDataParallel", "DistributedType.MULTI_CPU", "FSDPLlamaForCausalLM",
                                 "FSDPLlamaForCausalLM"]


@pytest.mark.slow
@pytest.mark.multiprocess
def test_trainer_compiled_and_with_its_fsdp_config_has_the_losses_of_one_process(tmp_path: Path) -> None:
    """Training and evaluation, under DDP, compiled, and with FSDP2 as TrainingArguments asks accelerate for it."""
    [alone] = run_processes(1, trainer_runs, str(tmp_path), timeout_seconds=60, deadline_seconds=100)
    assert alone.error is None and len(alone.value[0]) == 7
    for outcome in run_processes(2, trainer_runs, str(tmp_path), timeout_seconds=100, deadline_seconds=280):
        assert outcome.error is None and len(outcome.value) == 3
        for losses in outcome.value:
            np.testing.assert_allclose(losses, alone.value[0], rtol=0, atol=2e-4)
