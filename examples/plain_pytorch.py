"""Plain PyTorch with FSDP2: packed documents of unequal lengths, attention balanced over the ranks.

    torchrun --nproc-per-node 2 examples/plain_pytorch.py
"""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.fsdp import fully_shard

from distca import ModelShape, PackedAttention, end_process

SHAPE = ModelShape("mine", num_layers=4, hidden=128, num_heads=4, num_kv_heads=2, head_dim=32, ffn=512, vocab=256)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(128, 8 * 32), nn.Linear(128, 128)  # 4 heads of q, 2 of k, 2 of v
        self.mlp = nn.Sequential(nn.RMSNorm(128), nn.Linear(128, 512), nn.SiLU(), nn.Linear(512, 128))
        self.norm = nn.RMSNorm(128)

    def forward(self, x, attention, batch):
        q, k, v = self.qkv(self.norm(x)).view(-1, 8, 32).split([4, 2, 2], dim=1)  # [tokens, heads, dim]
        x = x + self.out(attention.attend(q, k, v, batch).flatten(1))  # where F.scaled_dot_product_attention was
        return x + self.mlp(x)


def main() -> None:
    dist.init_process_group()                                    # gloo on CPUs, NCCL on GPUs
    rank, cuda = dist.get_rank(), torch.cuda.is_available()
    device = torch.device("cuda", rank % torch.cuda.device_count()) if cuda else torch.device("cpu")
    model = nn.ModuleList([nn.Embedding(256, 128), *(Block() for _ in range(4)), nn.Linear(128, 256)]).to(device)
    embed, *blocks, head = map(fully_shard, model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    attention = PackedAttention(model=SHAPE)
    for number in range(5):
        lengths = [2048] if rank == 0 else [256, 1, 300, 700, 791]  # this rank's own documents, any lengths
        batch = attention.begin(lengths, device)                 # one small collective; then every layer uses the plan
        tokens = torch.randint(0, 256, (sum(lengths),), device=device)
        x = embed(tokens)                                        # RoPE, if you have it, restarts with every document
        for block in blocks:
            x = block(x, attention, batch)
        labels = torch.cat([F.pad(document[1:], (0, 1), value=-100) for document in tokens.split(lengths)])
        dist.all_reduce(count := (labels != -100).sum())         # every token weighs the same, whichever rank has it
        loss = F.cross_entropy(head(x), labels, ignore_index=-100, reduction="sum") / count
        (loss * dist.get_world_size()).backward()                # FSDP averages gradients over ranks
        optimizer.step(), optimizer.zero_grad(), dist.all_reduce(loss.detach())
        if rank == 0:
            cost = batch.plan.summary()
            print(f"step {number}: loss {loss:.3f}, attention work max/mean {cost.work_max_over_mean_at_home:.2f} at "
                  f"home, {cost.work_max_over_mean:.2f} with distca")
    dist.barrier(), dist.destroy_process_group(), end_process()  # gloo's threads outlive groups


if __name__ == "__main__":
    main()
