"""What `distca check` takes beside a config: functions that return a model and a batch, or a Trainer.

    distca check examples/check_packing.py:packed
    distca check examples/check_packing.py:trainer
"""

import torch
from transformers import DataCollatorWithFlattening, Qwen3Config, Qwen3ForCausalLM, Trainer, TrainingArguments

CONFIG = Qwen3Config(vocab_size=256, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
                     num_key_value_heads=2, head_dim=16)
DOCUMENTS = [{"input_ids": torch.randint(1, 256, (length,)).tolist()} for length in (40, 1, 25, 14, 9, 31, 12, 3)]


def packed():
    model = Qwen3ForCausalLM(CONFIG)                      # yours, wrapped and patched as you train it
    batch = DataCollatorWithFlattening()(DOCUMENTS)       # what your loader returns
    return model, {**batch, "use_cache": False}           # called as model(**batch)


def trainer():
    arguments = TrainingArguments("runs/check", per_device_train_batch_size=4, use_cpu=True, report_to="none")
    return Trainer(Qwen3ForCausalLM(CONFIG), arguments, train_dataset=DOCUMENTS,
                   data_collator=DataCollatorWithFlattening())
