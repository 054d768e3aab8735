"""torchtitan's own trainer and Llama 3 on skewed packed documents, its attention balanced over data-parallel ranks.

    torchrun --nproc-per-node 8 examples/torchtitan_train.py

One line below turns distca on. With a config of your own, and a varlen attention backend, the same line is a flag:

    torchrun --nproc-per-node 8 -m torchtitan.train --module llama3 --config llama3_debugmodel_varlen_attn \
        --override.imports distca.integrations.torchtitan.enable

Arguments: steps, tokens of a row, pipeline stages.
"""

import sys
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torchtitan.components.dataloader import BaseDataLoader
from torchtitan.components.tokenizer import BaseTokenizer
from torchtitan.config.override import OverrideConfig
from torchtitan.models.llama3.config_registry import llama3_debugmodel_varlen_attn
from torchtitan.tools.logging import init_logger

from distca import end_process, latest_plan


class SkewedDocuments(BaseDataLoader):
    """Rows of random tokens: one long document on the first rank of two, short ones on the second."""

    @dataclass(kw_only=True, slots=True)
    class Config(BaseDataLoader.Config):
        pass

    def __init__(self, config: Config, *, dp_rank: int, seq_len: int, local_batch_size: int, **_: object) -> None:
        self.rank, self.rows, self.seq_len = dp_rank, local_batch_size, seq_len

    def __iter__(self) -> Iterator[tuple[dict[str, torch.Tensor], torch.Tensor]]:
        generator = torch.Generator().manual_seed(self.rank)
        document_len = self.seq_len if self.rank % 2 == 0 else self.seq_len // 16
        positions = (torch.arange(self.seq_len) % document_len).expand(self.rows, -1).contiguous()
        while True:
            tokens = torch.randint(2048, (self.rows, self.seq_len + 1), generator=generator)
            yield {"input": tokens[:, :-1].contiguous(), "positions": positions}, tokens[:, 1:].contiguous()

    def state_dict(self) -> dict[str, object]:
        return {}

    def load_state_dict(self, state_dict: dict[str, object]) -> None:
        pass


class NoTokenizer(BaseTokenizer):
    @dataclass(kw_only=True, slots=True)
    class Config(BaseTokenizer.Config):
        pass

    def __init__(self, config: Config, **_: object) -> None:
        super().__init__()

    def encode(self, *_: object) -> list[int]:
        return []

    def decode(self, *_: object) -> str:
        return ""

    def get_vocab_size(self) -> int:
        return 2048


def main(steps: int = 10, seq_len: int = 2048, stages: int = 1) -> None:
    config = llama3_debugmodel_varlen_attn()
    config.override = OverrideConfig(imports=["distca.integrations.torchtitan.enable"])  # the one line
    config.dataloader, config.tokenizer = SkewedDocuments.Config(), NoTokenizer.Config()
    config.training.steps, config.training.seq_len, config.training.local_batch_size = steps, seq_len, 2
    config.parallelism.pipeline_parallel_degree = stages
    config.parallelism.pipeline_parallel_schedule = "1F1B"
    config.validator.enable = config.checkpoint.enable = False
    init_logger()
    trainer = config.build()
    trainer.train()
    summary = latest_plan(trainer.model_parts[0]).summary()
    if torch.distributed.get_rank() == 0:
        print(f"attention work max/mean {summary.work_max_over_mean_at_home:.2f} at home, "
              f"{summary.work_max_over_mean:.2f} with distca")
    trainer.close()
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()
    end_process()                                                # gloo's threads outlive the group and may want the GIL


if __name__ == "__main__":
    main(*(int(argument) for argument in sys.argv[1:]))
