"""torchtitan's own models, packed over real ranks, equal themselves with its SDPA on one document at a time."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch.distributed as dist

from tests.support.processes import run_processes, values

if TYPE_CHECKING:
    import torch

    from distca.runtime.transport.c10d import C10dTransport

from tests.support import trainers

HAVE_TORCHTITAN = all(importlib.util.find_spec(name) is not None for name in ("torchtitan", "triton"))
needs_torchtitan = pytest.mark.skipif(not HAVE_TORCHTITAN, reason="torchtitan or triton is not installed: pip install "
                                                                  "'torchtitan>=0.3,<0.4' triton")
NEW_TORCH = hasattr(dist, "set_timeout")                         # from 2.14, as torchtitan's trainer asks
VOCAB = 2048
ROWS = {
    2: [[40, 1, 300, 7], [1, 25, 1]],
    4: [[3, 700], [1], [1, 1], [50, 1, 30]],
}


def spec_of(name: str) -> Any:
    """torchtitan's debug model with varlen attention, of two layers; Qwen 3 has grouped queries and query norms.

    Experts are few and small; DeepSeek-V3's first layer has none, and its values have a head size of their own.
    """
    from importlib import import_module

    module, moe, _ = name.partition("_moe")
    spec = import_module(f"torchtitan.models.{module}").model_registry(f"debugmodel{moe}", attn_backend="varlen")
    spec.model.layers = spec.model.layers[:2]
    for moe in [layer.moe for layer in spec.model.layers if layer.moe is not None and name != "gpt_oss"]:
        inner, dispatcher = moe.routed_experts.inner_experts, moe.routed_experts.token_dispatcher
        inner.hidden_dim, dispatcher.top_k, moe.router.top_k, moe.router.gate.out_features = 64, 2, 2, 4
        moe.num_experts = inner.num_experts = dispatcher.num_experts = moe.router.num_experts = 4
    return spec


def model_of(config: Any) -> Any:
    import torch

    model = config.build()
    model.init_states()
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for x in model.parameters():
            x.copy_(torch.randn(x.shape, generator=generator) * 0.05)
    return model


def balanced_model(config: Any, parallelism: Any = None, **options: Any) -> Any:
    """The model after torchtitan's own override hook, named as on its command line."""
    import json
    from types import SimpleNamespace

    from torchtitan.config import DebugConfig, ParallelismConfig, TrainingConfig
    from torchtitan.config.override import OverrideConfig, apply_overrides, parse_cli_imports

    config.update_from_config(config=SimpleNamespace(parallelism=parallelism or ParallelismConfig(),
                                                     training=TrainingConfig(), debug=DebugConfig()))
    flag = f"distca.integrations.torchtitan.enable={json.dumps(options)}"
    assert len(apply_overrides(OverrideConfig(imports=parse_cli_imports([flag])), config)) == len(config.layers)
    return model_of(config)


def plain_model(name: str) -> Any:
    """The same weights with torchtitan's own SDPA, which knows nothing of documents: for one at a time."""
    from torchtitan.models.common.attention import ScaledDotProductAttention

    config = spec_of(name).model
    for layer in config.layers:
        layer.attention.inner_attention = ScaledDotProductAttention.Config()
    return model_of(config)


def replicated(size: int, checkpointing: Any = None, **options: Any) -> Any:
    """Llama 3 after its own `parallelize`, whole on every rank; gradients are left to the caller."""
    from torchtitan.distributed import ParallelDims

    model = balanced_model(spec_of("llama3").model, **options)
    model.parallelize(ParallelDims(dp_replicate=1, dp_shard=size, cp=1, tp=1, pp=1, ep=1, world_size=size))
    if checkpointing is not None:
        checkpointing.build(dump_folder="").apply(model)
    return model


def sharded(name: str, size: int, checkpointing: Any = None, experts: int = 1) -> Any:
    """A model as the trainer shards it, with FSDP2 that sums gradients, which gloo does without scaling them."""
    from torch.distributed.fsdp import FSDPModule
    from torchtitan.config import CompileConfig, ParallelismConfig, TrainingConfig
    from torchtitan.distributed import ParallelDims
    from torchtitan.distributed.utils import set_spmd_backend

    backend = "partial_dtensor"
    spec, parallelism = spec_of(name), ParallelismConfig(spmd_backend=backend, expert_parallel_degree=experts)
    set_spmd_backend(backend)
    model = balanced_model(spec.model, parallelism, tolerance=0.02)
    model = spec.parallelize_fn(
        model, parallel_dims=ParallelDims.from_config(parallelism, size),
        training=TrainingConfig(mixed_precision_param="float32"), parallelism=parallelism,
        compile_config=CompileConfig(), ac_config=checkpointing, dump_folder="")
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_force_sum_reduction_for_comms(True)
    return model


def packed(model: Any, documents: list[torch.Tensor]) -> torch.Tensor:
    """Logits of a rank's documents in one row, with the metadata that the trainer makes from positions."""
    import torch

    position = torch.cat([torch.arange(len(document) - 1) for document in documents])[None]
    tokens = torch.cat([document[:-1] for document in documents])[None]
    return model(tokens, position, model.get_attention_masks(position))[0]


def check_equal(transport: C10dTransport, rows: list[list[int]], name: str, model: Any) -> tuple[list[float], bool]:
    """Logits, loss and gradients; gives the work per server and whether a task moved."""
    import torch
    from torch.distributed.tensor import DTensor

    from distca.integrations.packed import latest_plan

    documents = trainers.rows_of_tokens(rows, VOCAB)
    mine = documents[transport.rank]
    logits = packed(model, mine)
    loss = trainers.total_loss(logits, mine)
    loss.backward()
    actual = {"loss": loss.detach()}
    dist.all_reduce(actual["loss"])
    for parameter, x in model.named_parameters():
        whole = x.grad.full_tensor() if isinstance(x.grad, DTensor) else x.grad
        actual[parameter.replace("_checkpoint_wrapped_module.", "")] = whole
        if whole is x.grad:
            dist.all_reduce(whole)

    plain = plain_model(name)
    everyone = [document for row in documents for document in row]
    alone = [plain(document[None, :-1], torch.arange(len(document) - 1)[None])[0] for document in everyone]
    expected = trainers.total_loss(torch.cat(alone), everyone)
    expected.backward()
    first = sum(len(row) for row in rows[:transport.rank])
    torch.testing.assert_close(logits, torch.cat(alone[first:first + len(mine)]), rtol=1e-5, atol=1e-5)
    wanted = {"loss": expected.detach(), **{key: x.grad for key, x in plain.named_parameters()}}
    trainers.assert_same({key: actual[key] for key in wanted}, wanted)
    pools = {module.pool for module in model.modules() if type(module).__name__ == "BalancedAttention"}
    assert [pool.latest for pool in pools] == [latest_plan(model)]  # all layers share it
    return trainers.balance_of(latest_plan(model))


def tokens_unchanged(transport: C10dTransport, rows: list[list[int]], changed: tuple[int, int]) -> list[bool]:
    """Which logits stay when a document's first token changes; between the two, ranks evaluate unequally often."""
    import torch

    model = replicated(transport.size)
    before = packed(model, trainers.rows_of_tokens(rows, VOCAB)[transport.rank])
    model.eval()
    for _ in range(transport.rank):
        packed(model, trainers.rows_of_tokens(rows, VOCAB)[transport.rank])
    model.train()
    after = packed(model, trainers.rows_of_tokens(rows, VOCAB, changed)[transport.rank])
    return torch.eq(before, after).all(dim=1).tolist()


def refusals() -> list[str]:
    import torch
    from torchtitan.distributed import ParallelDims
    from torchtitan.models.common.attention import VarlenAttention, VarlenMetadata

    from distca.integrations.torchtitan import BalancedAttention, enable

    attention = BalancedAttention.Config().build()
    q = torch.zeros(1, 4, 2, 8)
    edges = torch.tensor([0, 4])
    metadata = VarlenMetadata(edges, edges, 4, 4)
    wrong = [
        lambda: enable(VarlenAttention.Config(window_size=(-1, -1))),
        lambda: attention(q, q, q, attention_masks=metadata),
        lambda: attention.parallelize(ParallelDims(1, 1, 2, 1, 1, 1, 2)),
        lambda: attention(q, q, q, attention_masks=None),
        lambda: attention(q, q, q, attention_masks=metadata, out_transform=lambda out, lse: out),
    ]
    return trainers.refusals(wrong)


def two_ranks(transport: C10dTransport) -> dict[str, Any]:
    from torchtitan.distributed.activation_checkpoint import FullAC

    size = transport.size
    return {
        "told": refusals(),                                      # first, before torchtitan makes a mesh
        "plain": check_equal(transport, ROWS[2], "llama3", replicated(size, tolerance=0.02)),
        "replayed": check_equal(transport, ROWS[2], "llama3", replicated(size, FullAC.Config(), tolerance=0.02)),
        "unchanged": tokens_unchanged(transport, ROWS[2], (0, 2)),
    }


def four_ranks(transport: C10dTransport) -> dict[str, Any]:
    import torch

    torch._utils._get_available_device_type = lambda: "cpu"      # torchtitan takes a GPU for granted
    from torchtitan.distributed.activation_checkpoint import SelectiveAC

    model = sharded("qwen3", transport.size, SelectiveAC.Config())
    return {"sharded": check_equal(transport, ROWS[4], "qwen3", model)}


def routed(transport: C10dTransport, name: str) -> list[bool]:
    """Experts divided over two ranks, with unequal tokens on them. They compute in float32 here, to be compared."""
    import torch

    torch._utils._get_available_device_type = lambda: "cpu"
    torch.Tensor.bfloat16 = lambda x: x  # type: ignore[assignment, method-assign, return-value]
    _, moved = check_equal(transport, ROWS[transport.size], name, model := sharded(name, transport.size, None, 2))
    return [moved, *("ep" in x.device_mesh.mesh_dim_names for key, x in model.named_parameters() if "inner_exp" in key)]


@needs_torchtitan
@pytest.mark.multiprocess
def test_two_ranks_equal_one_document_at_a_time() -> None:
    first, second = values(run_processes(2, two_ranks, deadline_seconds=200.0, timeout_seconds=60.0))
    for rank in (first, second):
        trainers.assert_balanced(rank["plain"])
        trainers.assert_balanced(rank["replayed"])
    assert first["unchanged"] == [True] * 41 + [False] * 300 + [True] * 7 and second["unchanged"] == [True] * 27
    expected = ["window_size is (-1, -1)", "made no mesh of data-parallel ranks", "context_parallel_degree is 2",
                "attention_masks is a NoneType", "passes out_transform refusals.<locals>"]
    trainers.assert_refused(first["told"], expected)


@needs_torchtitan
def test_the_sinks_of_gpt_oss() -> None:
    """Its attention over two documents, windowed and whole, as its own rescaling of (out, log-sum-exp) gives them."""
    import torch
    from torchtitan.models.gpt_oss.model import apply_attention_sink_rescale

    from distca.integrations.torchtitan import document_edges, enable

    spec = spec_of("gpt_oss")
    windows = [layer.attention.inner_attention.window_size for layer in spec.model.layers]
    assert windows[0] != windows[1] == (-1, 0)
    lengths = [200, 56]
    position = torch.cat([torch.arange(length) for length in lengths])[None]
    for layer, (left, _) in zip(spec.model.layers, windows, strict=True):
        layer.attention.inner_attention = enable(layer.attention.inner_attention)
        attention = model_of(layer.attention).double()
        seen: list[torch.Tensor] = []

        def plain(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float, left: int = left,
                  sinks: torch.Tensor = attention.sinks) -> torch.Tensor:
            outs = []
            for qs, ks, vs in zip(*(x[0].split(lengths) for x in (q, k, v)), strict=True):
                keys, values = (x.repeat_interleave(qs.shape[1] // x.shape[1], dim=1) for x in (ks, vs))
                mask = torch.ones(len(qs), len(qs), dtype=torch.bool).tril()
                mask = mask if left == -1 else mask.triu(-left)
                scores = (torch.einsum("qhd,khd->hqk", qs, keys) * scale).masked_fill(~mask, -torch.inf)
                out = torch.einsum("hqk,khd->qhd", scores.softmax(-1), values)
                outs.append(apply_attention_sink_rescale(out, scores.logsumexp(-1).T, sinks))
            return torch.cat(outs)[None]

        attention.inner_attention.register_forward_hook(
            lambda _, inputs, named, out, plain=plain, seen=seen: seen.extend([out, plain(*inputs, named["scale"])]),
            with_kwargs=True)
        with torch.no_grad():
            attention.sinks.copy_(torch.linspace(-2, 3, len(attention.sinks)))
        attention(torch.randn(1, sum(lengths), spec.model.dim).double(), document_edges(position), position)
        out, expected = seen
        parameters, dout = [attention.sinks, *attention.qkv_linear.parameters()], torch.randn_like(out)
        actual, wanted = ((x, *torch.autograd.grad(x, parameters, dout, retain_graph=True)) for x in (out, expected))
        for number, (got, want) in enumerate(zip(actual, wanted, strict=True)):
            bound = 1e-8 if number < 2 else 2 ** -21              # RoPE rounds to float32: a tie may fall either way
            torch.testing.assert_close(got, want, rtol=bound, atol=bound * max(1.0, float(want.abs().max())))


@needs_torchtitan
@pytest.mark.multiprocess
def test_four_ranks_sharded_and_replayed_selectively() -> None:
    for outcome in values(run_processes(4, four_ranks, deadline_seconds=200.0, timeout_seconds=60.0)):
        trainers.assert_balanced(outcome["sharded"])


@needs_torchtitan
@pytest.mark.multiprocess
@pytest.mark.parametrize(("name", "ranks"), [("qwen3_moe", 2), ("deepseek_v3", 2), ("deepseek_v3", 4)])
def test_experts_over_ranks_equal_one_document_at_a_time(name: str, ranks: int) -> None:
    layers = 2 if name == "qwen3_moe" else 1
    found = values(run_processes(ranks, routed, name, deadline_seconds=200.0, timeout_seconds=60.0))
    assert found == [[True] * (1 + 3 * layers)] * ranks


@needs_torchtitan
@pytest.mark.slow
@pytest.mark.multiprocess
@pytest.mark.skipif(not NEW_TORCH or importlib.util.find_spec("datasets") is None,
                    reason="torchtitan's trainer needs datasets and torch from 2.14: pip install '.[torchtitan]'")
@pytest.mark.parametrize(("ranks", "stages"), [(2, 1), (4, 2)])
def test_the_example_trains(tmp_path: Path, ranks: int, stages: int) -> None:
    home, balanced = trainers.run_example("torchtitan", "torchtitan_train.py", tmp_path, ranks, "2", "512",
                                          str(stages))
    assert balanced < 1.1 < home
