"""Megatron-Core's GPT on packed documents (THD), its attention balanced over data-parallel ranks.

    torchrun --nproc-per-node 8 examples/megatron_core.py

One line below turns distca on. With Megatron-LM's own training script the same line is a flag:

    --spec distca.integrations.megatron_core gpt_layer_local
"""

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.distributed.finalize_model_grads import finalize_model_grads
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed
from megatron.core.transformer import TransformerConfig

from distca import end_process, latest_plan
from distca.integrations.megatron_core import enable


def documents_of(rank: int, generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor, PackedSeqParams]:
    """Tokens and positions [1, 2048]: one long document on even ranks, sixteen short ones on odd ones."""
    lengths = [2048] if rank % 2 == 0 else [128] * 16
    tokens = torch.randint(2048, (1, 2048), generator=generator)
    positions = torch.cat([torch.arange(length) for length in lengths])[None]
    edges = torch.tensor([0, *lengths]).cumsum(0).int().cuda()
    packed = PackedSeqParams("thd", edges, edges, max_seqlen_q=max(lengths), max_seqlen_kv=max(lengths))
    return tokens.cuda(), positions.cuda(), packed


def main(steps: int = 10) -> None:
    dist.init_process_group("nccl")
    torch.cuda.set_device(dist.get_rank() % torch.cuda.device_count())
    parallel_state.initialize_model_parallel()
    model_parallel_cuda_manual_seed(0)
    config = TransformerConfig(
        num_layers=4, hidden_size=256, num_attention_heads=8, num_query_groups=2, attention_dropout=0.0,
        hidden_dropout=0.0, bf16=True, params_dtype=torch.bfloat16)
    spec = enable(get_gpt_layer_local_spec())                    # the one line
    model = GPTModel(config, spec, 2048, 2048, position_embedding_type="rope").cuda().bfloat16()
    model = DistributedDataParallel(config, DistributedDataParallelConfig(grad_reduce_in_fp32=True), model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    generator = torch.Generator().manual_seed(dist.get_rank())
    for step in range(steps):
        tokens, positions, packed = documents_of(dist.get_rank(), generator)
        model.zero_grad_buffer()
        loss = model(tokens, positions, None, labels=tokens.roll(-1, 1), packed_seq_params=packed).mean()
        loss.backward()
        finalize_model_grads([model])
        for x in model.parameters():
            x.grad = x.main_grad.to(x.dtype)
        optimizer.step()
        if dist.get_rank() == 0:
            print(f"step {step}: loss {loss.item():.3f}")
    summary = latest_plan(model).summary()
    if dist.get_rank() == 0:
        print(f"attention work max/mean {summary.work_max_over_mean_at_home:.2f} at home, "
              f"{summary.work_max_over_mean:.2f} with distca")
    dist.barrier()
    dist.destroy_process_group()
    end_process()                                                # gloo's threads outlive the group and may want the GIL


if __name__ == "__main__":
    main()
