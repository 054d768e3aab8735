"""Transformers' Trainer over packed documents of very unequal lengths; `enable(model)` is the one line that is ours.

    torchrun --nproc-per-node 2 examples/transformers_trainer.py --steps 20 --cpu

With `--over-ranks` a collator lays each step's documents over all ranks, so that one may be longer than a rank's row.
"""

import argparse

import numpy as np
import torch
import torch.distributed as dist
from transformers import (
    DataCollatorWithFlattening,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    LlamaConfig,
    LlamaForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    Trainer,
    TrainingArguments,
)

import distca
from distca.data import Collator
from distca.integrations.huggingface import enable
from distca.integrations.huggingface_callbacks import AttentionLogs, AttentionWork

SIZE = {"vocab_size": 256, "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 3, "head_dim": 32,
        "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 8192, "pad_token_id": 0}
SLIDING = {"sliding_window": 64, "layer_types": ["sliding_attention", "sliding_attention", "full_attention"]}


def small_model(name: str) -> torch.nn.Module:
    """Small and untrained, the same on every rank; any decoder of yours instead."""
    torch.manual_seed(0)
    if name == "llama":
        return LlamaForCausalLM(LlamaConfig(**SIZE))
    if name == "qwen3":
        return Qwen3ForCausalLM(Qwen3Config(**SIZE))
    return Gemma3ForCausalLM(Gemma3TextConfig(**SIZE, **SLIDING))


def random_documents(count: int, longest: int, seed: int) -> list[dict[str, list[int]]]:
    """Documents whose lengths spread over orders of magnitude, one token among them."""
    draw = np.random.default_rng(seed)
    return [{"input_ids": draw.integers(1, 256, int(longest ** draw.random())).tolist()} for _ in range(count)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=("llama", "qwen3", "gemma3"), default="llama")
    parser.add_argument("--attention", choices=("distca", "sdpa"), default="distca")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--longest", type=int, default=2048, help="tokens of the longest document")
    parser.add_argument("--documents", type=int, default=4, help="documents that a rank draws for a step")
    parser.add_argument("--over-ranks", action="store_true", help="documents may span ranks, with equal tokens on each")
    parser.add_argument("--eval-steps", type=int, default=10)
    parser.add_argument("--checkpointing", action="store_true", help="gradient checkpointing")
    parser.add_argument("--fsdp", action="store_true", help="FSDP2 instead of DDP; the Trainer has it on GPUs alone")
    parser.add_argument("--cpu", action="store_true")
    parser.add_argument("--output", default="output")
    options = parser.parse_args()
    arguments = TrainingArguments(
        options.output, max_steps=options.steps, per_device_train_batch_size=options.documents,
        per_device_eval_batch_size=options.documents, learning_rate=1e-3, logging_steps=1, eval_strategy="steps",
        eval_steps=options.eval_steps, save_strategy="no",
        report_to="none", use_cpu=options.cpu, disable_tqdm=True, gradient_checkpointing=options.checkpointing,
        average_tokens_across_devices=True,                      # the default: every token weighs the same
        ddp_timeout=60,                                          # seconds until a rank that lost the others says so
        fsdp=options.fsdp, fsdp_config={"fsdp_version": 2} if options.fsdp else None)
    model = small_model(options.model)
    if options.attention == "distca":
        enable(model, evaluation="pool" if options.over_ranks else "home")
    trainer = Trainer(
        model, arguments, data_collator=Collator() if options.over_ranks else DataCollatorWithFlattening(),
        train_dataset=random_documents(96, options.longest, seed=0), eval_dataset=random_documents(8, 200, seed=1),
        callbacks=[AttentionWork()] if options.attention == "distca" else [])
    if options.attention == "distca":
        AttentionLogs.add_to(trainer)                            # five figures beside the loss, wherever that is shown
    trainer.train()
    trainer.save_state()
    if dist.is_initialized():
        dist.barrier()
        dist.destroy_process_group()
        distca.end_process()                                     # gloo's threads outlive the group and may want the GIL


if __name__ == "__main__":
    main()
