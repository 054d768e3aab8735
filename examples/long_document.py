"""One document longer than a rank, plain PyTorch with FSDP2: each rank holds a part of it, attention is shared.

    torchrun --nproc-per-node 2 examples/long_document.py 262144 1
"""

import resource
import sys

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.fsdp import fully_shard

import distca

WIDTH = 32


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.qkv, self.out = nn.RMSNorm(WIDTH), nn.Linear(WIDTH, 96), nn.Linear(32, WIDTH)  # 2 heads of 16
        self.mlp = nn.Sequential(nn.RMSNorm(WIDTH), nn.Linear(WIDTH, 4 * WIDTH), nn.SiLU(), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, x, attention, position_ids, turns):
        q, k, v = self.qkv(self.norm(x)).view(-1, 3, 2, 16).unbind(1)  # [tokens, heads, dim]
        q, k = (torch.view_as_real(torch.view_as_complex(y.unflatten(-1, (8, 2))) * turns).flatten(-2) for y in (q, k))
        x = x + self.out(attention(q, k, v, position_ids).flatten(1))  # of the whole document, on all ranks
        return x + self.mlp(x)


def main() -> None:
    tokens, steps = int(sys.argv[1]), int(sys.argv[2])           # of the one document; of the optimizer
    dist.init_process_group("gloo")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    model = nn.ModuleList([nn.Embedding(256, WIDTH), Block(), nn.Linear(WIDTH, 256)])
    embed, *blocks, head = map(fully_shard, model)
    optimizer, attention = torch.optim.AdamW(model.parameters(), lr=1e-2), distca.PackedAttention()
    document = torch.arange(tokens) ** 2 % 251                   # the same on every rank; a reader of slices would do
    row = distca.data.rows([document], rank, ranks)              # this rank's part, with the label across the cut
    turns = torch.exp(1j * row.position_ids[:, None, None] * 1e4 ** -torch.linspace(0, 1, 8))  # RoPE, true positions
    for step in range(steps):
        x = embed(row.input_ids)
        for block in blocks:
            x = block(x, attention, row.position_ids, turns)
        loss = F.cross_entropy(head(x), row.shift_labels, ignore_index=-100, reduction="sum") / row.num_items
        (loss * ranks).backward()                                # FSDP averages gradients over ranks
        optimizer.step(), optimizer.zero_grad(), dist.all_reduce(loss.detach())
        memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2 ** 20
        work = attention.latest.work()[rank] / attention.latest.work().sum()
        print(f"step {step}: rank {rank} holds {len(x)} of {tokens} tokens, computes {work:.2f} of the attention, loss "
              f"{loss:.4f}, peak memory {memory:.2f} GiB", flush=True)
    dist.barrier(), dist.destroy_process_group(), distca.end_process()  # gloo's threads outlive groups


if __name__ == "__main__":
    main()
