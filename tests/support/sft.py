"""TRL's SFTTrainer with LoRA on a small Llama, the same documents on any number of ranks: `sft.py OUTPUT HOW RANKS`.

HOW is `rows` (documents over ranks by distca's collator), `bfd` or `wrapped` (TRL's own packing).
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
import torch.distributed as dist
from datasets import Dataset
from peft import LoraConfig
from tokenizers import Tokenizer, models
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast, set_seed
from trl import SFTConfig, SFTTrainer

import distca
from distca.data import Collator
from distca.integrations.huggingface import enable
from distca.integrations.huggingface_callbacks import FIGURES, AttentionLogs


def documents(count: int) -> Dataset:
    draw = np.random.default_rng(0)
    return Dataset.from_list([{"input_ids": draw.integers(1, 96, int(200 ** draw.random())).tolist()}
                              for _ in range(count)])


def main() -> None:
    output, how, ranks = sys.argv[1], sys.argv[2], int(sys.argv[3])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.WordLevel({str(i): i for i in range(97)}, unk_token="0")), pad_token="0",
        eos_token="96")
    set_seed(0)
    model = LlamaForCausalLM(LlamaConfig(
        vocab_size=97, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, pad_token_id=0, eos_token_id=96))
    enable(model)
    arguments = SFTConfig(
        output, max_steps=6, per_device_train_batch_size=8 // ranks if how == "rows" else 1, learning_rate=1e-2,
        logging_steps=1, save_strategy="no", report_to="none", use_cpu=True, disable_tqdm=True, bf16=False,
        gradient_checkpointing=False, packing=how != "rows", packing_strategy="bfd" if how == "rows" else how,
        max_length=256, ddp_timeout=60)
    trainer = SFTTrainer(
        model, arguments, train_dataset=documents(64), processing_class=tokenizer,
        data_collator=Collator() if how == "rows" else None, peft_config=LoraConfig(r=4, target_modules="all-linear"))
    AttentionLogs.add_to(trainer)
    trainer.train()
    if trainer.is_world_process_zero():
        history = [row for row in trainer.state.log_history if "loss" in row]
        assert all(name in row for row in history for name in FIGURES)
        Path(output).mkdir(exist_ok=True)
        (Path(output) / "losses.json").write_text(json.dumps([row["loss"] for row in history]))
    if dist.is_initialized():
        dist.barrier()
        dist.destroy_process_group()
        distca.end_process()


if __name__ == "__main__":
    main()
