"""`torch.compile` around a balanced model: losses and gradients of eager, and no new graph for new lengths.

Dynamo traces everything but our exchange and planning. The backend is aot_eager, which runs what was traced, forward
and backward, without minutes of code generation.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed as dist
from torch._dynamo.utils import counters

from distca.integrations.packed import PackedAttention, PackedBatch
from distca.planning.plan import Plan
from distca.runtime.transport.c10d import C10dTransport
from distca.spec import ModelShape
from tests.support.processes import run_processes

if TYPE_CHECKING:
    from transformers.models.llama.modeling_llama import LlamaForCausalLM

STEPS = [[[60, 1, 30], [5, 7]], [[9], [40, 40, 3]], [[7, 7, 7, 50], [2]], [[33, 2], [21, 80]]]  # of two ranks
SHAPE = ModelShape("mine", num_layers=2, hidden=32, num_heads=4, num_kv_heads=2, head_dim=8, ffn=64, vocab=97)


def needs(package: str) -> pytest.MarkDecorator:
    return pytest.mark.skipif(importlib.util.find_spec(package) is None, reason=f"{package} is not installed")


def same_as_eager(model: Any, call: Callable[..., Any], rows_of_steps: list[list[list[int]]], rank: int) -> list[int]:
    """Every step eagerly and compiled; gives the number of graphs after each step."""
    compiled, graphs = torch.compile(model, backend="aot_eager"), []
    counters.clear()
    for number, rows in enumerate(rows_of_steps):
        results = []
        for forward in (model, compiled):
            model.zero_grad()
            loss = call(forward, rows[rank], number)
            loss.backward()
            results.append([loss.detach(), *(p.grad.clone() for p in model.parameters())])
        for got, want in zip(*reversed(results), strict=True):
            torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)
        graphs.append(counters["stats"]["unique_graphs"])
    return graphs


def moves(plan: Plan | None) -> bool:
    """Return whether the plan computes any task away from its home."""
    assert plan is not None
    return bool((plan.tasks.home != plan.tasks.server).any())


def llama(kind: str = "llama", layers: int = 2) -> LlamaForCausalLM:
    import transformers as hf

    torch.manual_seed(0)
    size: dict[str, Any] = {
        "vocab_size": 97, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": layers, "head_dim": 8,
        "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 512, "pad_token_id": 0}
    if kind == "llama":
        return hf.LlamaForCausalLM(hf.LlamaConfig(**size)).train()
    mixed: dict[str, Any] = {"sliding_window": 20, "layer_types": ["sliding_attention", "full_attention"]}
    return hf.Gemma3ForCausalLM(hf.Gemma3TextConfig(**size, **mixed)).train()


def huggingface_loss(model: Any, lengths: list[int], seed: int) -> torch.Tensor:
    from transformers import DataCollatorWithFlattening

    generator = torch.Generator().manual_seed(seed)
    documents = [{"input_ids": torch.randint(1, 97, (n,), generator=generator).tolist()} for n in lengths]
    return model(**DataCollatorWithFlattening()(documents), use_cache=False).loss


def huggingface(transport: C10dTransport | None, kind: str = "llama", checkpointing: bool = False) -> tuple[list[int],
                bool]:
    from distca.integrations.huggingface import enable

    model = llama(kind)
    attention = enable(model, tolerance=0.02)
    if checkpointing:
        model.gradient_checkpointing_enable()
    graphs = same_as_eager(model, huggingface_loss, STEPS, 0 if transport is None else transport.rank)
    return graphs, moves(attention.latest)


class Block(torch.nn.Module):
    """A layer of one's own around `PackedAttention`."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.qkv, self.out = torch.nn.Embedding(97, 32), torch.nn.Linear(32, 64), torch.nn.Linear(32, 97)

    def forward(self, tokens: torch.Tensor, attention: PackedAttention, batch: PackedBatch) -> torch.Tensor:
        q, k, v = self.qkv(self.embed(tokens)).view(-1, 8, 8).split([4, 2, 2], dim=1)
        return self.out(torch.tanh(attention.attend(q, k, v, batch).flatten(1)))


def plain(transport: C10dTransport | None) -> tuple[list[int], bool]:
    torch.manual_seed(0)
    attention = PackedAttention(model=SHAPE, tolerance=0.02)

    def call(model: Any, lengths: list[int], seed: int) -> torch.Tensor:
        tokens = torch.randint(97, (sum(lengths),), generator=torch.Generator().manual_seed(seed))
        return torch.nn.functional.cross_entropy(model(tokens, attention, attention.begin(lengths)), tokens)

    graphs = same_as_eager(Block(), call, STEPS, 0 if transport is None else transport.rank)
    return graphs, moves(attention.latest)


class Core(torch.nn.Module):
    """Megatron's place for core attention, with little around it."""

    def __init__(self) -> None:
        from megatron.core.transformer import TransformerConfig
        from megatron.core.transformer.enums import AttnMaskType

        from distca.integrations.megatron_core import BalancedCoreAttention

        super().__init__()
        config = TransformerConfig(num_layers=1, hidden_size=32, num_attention_heads=4, num_query_groups=2,
                                   attention_dropout=0.0, use_cpu_initialization=True)
        self.qkv = torch.nn.Linear(32, 64)
        self.core = BalancedCoreAttention(config, 1, AttnMaskType.causal, "self", group=dist.group.WORLD)

    def forward(self, x: torch.Tensor, packed: Any) -> torch.Tensor:
        q, k, v = self.qkv(x).view(-1, 8, 8).split([4, 2, 2], dim=1)
        return self.core(q, k, v, None, packed_seq_params=packed)


def megatron(transport: C10dTransport) -> tuple[list[int], bool]:
    from megatron.core import parallel_state
    from megatron.core.packed_seq_params import PackedSeqParams

    parallel_state.initialize_model_parallel()
    torch.manual_seed(0)
    model = Core()

    def call(forward: Any, lengths: list[int], seed: int) -> torch.Tensor:
        edges = torch.tensor([0, *lengths]).cumsum(0).int()
        x = torch.randn(sum(lengths), 32, generator=torch.Generator().manual_seed(seed))
        return forward(x, PackedSeqParams("thd", edges, edges)).square().mean()

    graphs = same_as_eager(model, call, STEPS, transport.rank)
    assert model.core.pool is not None
    return graphs, moves(model.core.pool.latest)


def check(graphs: list[int]) -> None:
    assert graphs[0] > 0, "something was compiled"
    assert graphs[1] == graphs[-1], f"graphs after each step: {graphs}; sizes are dynamic from the second on"


@pytest.mark.slow
@needs("transformers")
@pytest.mark.parametrize(("kind", "checkpointing"), [("llama", False), ("llama", True), ("gemma3", False)])
def test_a_transformers_model_of_one_process(kind: str, checkpointing: bool) -> None:
    torch.compiler.reset()
    check(huggingface(None, kind, checkpointing)[0])


def test_packed_steps_of_one_process() -> None:
    torch.compiler.reset()
    check(plain(None)[0])


def test_a_step_that_begins_inside_what_is_compiled() -> None:
    torch.compiler.reset()
    block, attention = Block(), PackedAttention(model=SHAPE)

    def whole(tokens: torch.Tensor, lengths: list[int]) -> torch.Tensor:
        return block(tokens, attention, attention.begin(lengths)).sum()

    for lengths in ([30, 1, 9], [4, 16]):
        tokens = torch.arange(sum(lengths))
        torch.testing.assert_close(torch.compile(whole, backend="aot_eager")(tokens, lengths), whole(tokens, lengths))


@pytest.mark.multiprocess
@pytest.mark.parametrize("body", [  # Transformers on two ranks: test_compile_spanning.py
    pytest.param(huggingface, marks=[needs("transformers"), pytest.mark.slow]), plain,
    pytest.param(megatron, marks=needs("megatron"))])
def test_two_ranks(body: Callable[..., Any]) -> None:
    for outcome in run_processes(2, body, timeout_seconds=60, deadline_seconds=120):
        assert outcome.error is None
        graphs, moved = outcome.value
        check(graphs)
        assert moved
