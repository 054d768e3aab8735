"""Documents over ranks that share one GPU, in bf16: as far from float64 as rounding explains, and no farther."""

from typing import Any

import pytest
import torch
import torch.distributed as dist

from distca.data import rows
from distca.integrations.packed import PackedAttention
from distca.kernels import TaskRows
from distca.runtime.transport.c10d import C10dTransport
from tests.support.accuracy import expected_attention
from tests.support.attention import gradient, random_qkv
from tests.support.processes import run_processes

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.multiprocess,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU; torch.cuda.is_available() is False"),
]
LENGTHS = [2900, 1, 127, 700, 1300]
CUTS = {2: [2500, 2528], 4: [2900, 0, 1, 2127]}                  # tokens of each rank: at, before and past an end


def attends(transport: C10dTransport, tokens: list[int]) -> bool:
    torch.cuda.set_device(0)
    begin, end = sum(tokens[:transport.rank]), sum(tokens[:transport.rank + 1])
    positions = torch.cat([torch.arange(length) for length in LENGTHS])[begin:end].cuda()
    whole = [x.to(torch.bfloat16).cuda() for x in random_qkv(0, sum(LENGTHS), 8, 2, 128, torch.float32)]
    q, k, v = (x[begin:end].clone().requires_grad_() for x in whole[:3])
    out = PackedAttention(tolerance=0.02)(q, k, v, positions)
    out.backward(whole[3][begin:end])
    expected = expected_attention(whole[0], whole[1], whole[2], whole[3], TaskRows.documents(LENGTHS))
    index = torch.arange(begin, end, device="cuda")
    for one, got in zip([expected[0], *expected[2:]], (out.detach(), *map(gradient, (q, k, v))), strict=True):
        assert got.dtype == torch.bfloat16
        one.at(index).check(got)
    return True


@pytest.mark.parametrize("ranks", CUTS)
def test_plain_pytorch_is_exact(ranks: int) -> None:
    for outcome in run_processes(ranks, attends, CUTS[ranks], timeout_seconds=90.0, deadline_seconds=240.0):
        assert outcome.error is None and outcome.value is True, outcome


SIZE: dict[str, Any] = {
    "vocab_size": 97, "hidden_size": 512, "intermediate_size": 512, "num_hidden_layers": 2, "num_attention_heads": 8,
    "num_key_value_heads": 2, "head_dim": 64, "max_position_embeddings": 8192, "pad_token_id": 0}
ROUTED: dict[str, Any] = {                                       # to all experts: rounding decides nothing
    "num_key_value_heads": 8, "kv_lora_rank": 64, "q_lora_rank": 64, "qk_rope_head_dim": 64, "qk_nope_head_dim": 128,
    "v_head_dim": 128, "n_routed_experts": 2, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1,
    "moe_intermediate_size": 256, "first_k_dense_replace": 1}


def small(kind: str, dtype: torch.dtype, **options: Any) -> Any:
    """Llama, or DeepSeek-V3 with its heads of 192 and values of 128; torch's grouped_mm has no float64."""
    import transformers

    torch.manual_seed(0)
    if kind == "deepseek_v3":
        options |= {**ROUTED, "experts_implementation": "eager" if dtype is torch.float64 else "grouped_mm"}
    config = transformers.AutoConfig.for_model(kind, **{**SIZE, **options})
    model: Any = transformers.AutoModelForCausalLM.from_config(config)
    return model.to(dtype).cuda().train()


def step(model: Any, row: Any) -> list[torch.Tensor]:
    """Logits and all gradients, in float64."""
    batch = {name: value.cuda() for name, value in row.batch().items()}
    result = model(**batch, num_items_in_batch=row.num_items, use_cache=False)
    result.loss.backward()
    return [result.logits[0].detach().double(), *(parameter.grad.double() for parameter in model.parameters())]


def trains(transport: C10dTransport, kind: str, lengths: list[int]) -> list[tuple[float, float]]:
    """Errors of ours and of plain bf16 against float64: of this rank's logits, and of the summed gradients."""
    from distca.integrations.huggingface import enable

    torch.cuda.set_device(0)
    rank, ranks = transport.rank, transport.size
    generator = torch.Generator().manual_seed(1)
    documents = [torch.randint(1, 97, (length,), generator=generator).tolist() for length in lengths]
    row, whole = rows(documents, rank, ranks), rows(documents, 0, 1)
    exact = step(small(kind, torch.float64, attn_implementation="sdpa"), whole)
    plain = step(small(kind, torch.bfloat16, attn_implementation="sdpa"), whole)
    model = small(kind, torch.bfloat16)
    enable(model, tolerance=0.02)
    ours = step(model, row)
    for gradients in ours[1:]:
        dist.all_reduce(gradients)
    before = sum(len(rows(documents, other, ranks).input_ids) for other in range(rank))
    here = slice(before, before + len(row.input_ids))
    ours[0] = ours[0][:len(row.input_ids)]
    exact[0], plain[0] = exact[0][here], plain[0][here]
    return [(float((a - e).norm()), float((p - e).norm())) for a, p, e in zip(ours, plain, exact, strict=True)]


@pytest.mark.parametrize(("ranks", "kind", "lengths"), [
    (2, "llama", [4096]), (2, "llama", [3, 1, 3000, 1, 40]), (4, "llama", [9, 3000, 11, 500]),
    (2, "deepseek_v3", [3, 1, 3000, 1, 40])])
def test_transformers_is_within_twice_plain_bfloat16(ranks: int, kind: str, lengths: list[int]) -> None:
    pytest.importorskip("transformers")
    for outcome in run_processes(ranks, trains, kind, lengths, timeout_seconds=90.0, deadline_seconds=240.0):
        assert outcome.error is None, outcome
        for ours, plain in outcome.value:
            assert ours <= 2 * plain, outcome.value
