"""Megatron-Core's own GPT, packed over real ranks, equals itself with its own attention on one document at a time."""

import importlib.util
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.distributed_c10d import ProcessGroup

from distca.integrations.megatron_core import BalancedCoreAttention
from distca.runtime.transport.c10d import C10dTransport
from tests.support import trainers
from tests.support.attention import gradient, qkv_of
from tests.support.processes import run_processes, values

HAVE_MEGATRON = importlib.util.find_spec("megatron") is not None
needs_megatron = pytest.mark.skipif(not HAVE_MEGATRON, reason="megatron-core is not installed: pip install "
                                                              "'megatron-core>=0.16,<0.20'")
VOCAB = 64
ROWS = {
    2: [[40, 1, 300, 7], [1, 25, 1]],
    4: [[3, 700], [1], [1], [50, 1, 30]],
}


class CpuTorch:
    """torch whose "cuda" is the CPU, for Megatron's pipeline schedules."""

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)

    def zeros(self, *size: Any, device: str, **named: Any) -> torch.Tensor:
        assert device == "cuda"
        return torch.zeros(*size, **named)


def cpu_megatron(**sizes: int) -> None:
    """Groups of gloo ranks, and stand-ins for the device, clock and random state of a GPU that is not there."""
    from contextlib import nullcontext

    import torch
    from megatron.core import parallel_state, tensor_parallel
    from megatron.core.pipeline_parallel import schedules
    from megatron.core.tensor_parallel import random

    parallel_state.destroy_model_parallel()
    parallel_state.initialize_model_parallel(**sizes)
    torch.cuda.current_device = lambda: "cpu"  # type: ignore[assignment, return-value]
    torch.cuda.synchronize = lambda *_: None
    schedules.torch = CpuTorch()
    random._get_cuda_rng_state = lambda *args, **kwargs: None
    random._set_cuda_rng_state = lambda *args, **kwargs: None
    tensor_parallel.get_cuda_rng_tracker().fork = nullcontext


def gpt(spec: Any, first: bool = True, last: bool = True, **settings: Any) -> Any:
    import torch
    from megatron.core.models.gpt import GPTModel
    from megatron.core.transformer import TransformerConfig

    torch.manual_seed(11)
    vp_stage = settings.pop("vp_stage", None)
    settings = {"attention_dropout": 0.0, "num_layers": 2, **settings}
    config = TransformerConfig(
        hidden_size=32, num_attention_heads=4, num_query_groups=2, ffn_hidden_size=64,
        hidden_dropout=0.0, use_cpu_initialization=True, bias_dropout_fusion=False, masked_softmax_fusion=False,
        **settings)
    return GPTModel(config, spec, VOCAB, 1024, pre_process=first, post_process=last, position_embedding_type="rope",
                    share_embeddings_and_output_weights=False, parallel_output=False, vp_stage=vp_stage).double()


def one_by_one(model: Any, documents: list[torch.Tensor]) -> list[torch.Tensor]:
    """Logits of each document by itself, with Megatron's own attention and an explicit causal mask."""
    import torch

    logits = []
    for document in documents:
        length = len(document) - 1
        mask = torch.ones(1, 1, length, length).triu(1).bool()
        logits.append(model(document[None, :-1], torch.arange(length)[None], mask)[0])
    return logits


def packed(model: Any, documents: list[torch.Tensor]) -> torch.Tensor:
    """What the model gives for a rank's documents, laid end to end as `packed_seq_params` describes them."""
    import torch
    from megatron.core.packed_seq_params import PackedSeqParams

    lengths = [len(document) - 1 for document in documents]
    edges = torch.tensor([0, *lengths]).cumsum(0).int()
    params = PackedSeqParams("thd", edges, edges, max_seqlen_q=max(lengths), max_seqlen_kv=max(lengths))
    position = torch.cat([torch.arange(length) for length in lengths])
    tokens = torch.cat([document[:-1] for document in documents])
    return model(tokens[None], position[None], None, packed_seq_params=params)


def expected_of(model: Any, rows: list[list[torch.Tensor]]) -> tuple[list[torch.Tensor], dict[str, torch.Tensor]]:
    """Logits of each document, and all documents' gradients by name, without packing and without other ranks."""
    import torch

    everyone = [document for row in rows for document in row]
    logits = one_by_one(model, everyone)
    loss = trainers.total_loss(torch.cat(logits), everyone)
    loss.backward()
    return logits, {"loss": loss.detach(), **{name: x.grad for name, x in model.named_parameters()}}


def summed(named: dict[str, torch.Tensor], group: ProcessGroup | None = None) -> dict[str, torch.Tensor]:
    import torch.distributed as dist

    for x in named.values():
        dist.all_reduce(x, group=group)
    return named


def check_equal(transport: C10dTransport, rows: list[list[int]], settings: dict[str, Any]) -> tuple[bool, list[float],
                bool]:
    """Logits, loss and gradients; gives whether layers share a pool, the work per server and whether a task moved."""
    import torch
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec

    from distca.integrations.megatron_core import enable
    from distca.integrations.packed import latest_plan

    documents = trainers.rows_of_tokens(rows, VOCAB)
    ours = gpt(enable(get_gpt_layer_local_spec(), tolerance=0.02), **settings)
    theirs = gpt(get_gpt_layer_local_spec())
    theirs.load_state_dict(ours.state_dict())                    # the same names: nothing of ours is saved
    mine = documents[transport.rank]
    logits = packed(ours, mine)[0]
    loss = trainers.total_loss(logits, mine)
    loss.backward()
    actual = summed({"loss": loss.detach(), **{name: x.grad for name, x in ours.named_parameters()}})
    alone, expected = expected_of(theirs, documents)
    first = sum(len(row) for row in rows[:transport.rank])
    torch.testing.assert_close(logits, torch.cat(alone[first:first + len(mine)]), rtol=1e-9, atol=1e-9)
    trainers.assert_same(actual, expected, 1e-9)
    first, second = (layer.self_attention.core_attention.pool for layer in ours.decoder.layers)
    assert latest_plan(ours) is first.latest
    return first is second, *trainers.balance_of(first.latest)


def tokens_unchanged(transport: C10dTransport, rows: list[list[int]], changed: tuple[int, int]) -> list[bool]:
    """Which logits stay when a document's first token changes; between the two, ranks evaluate unequally often."""
    import torch

    from distca.integrations.megatron_core import gpt_layer_local

    model = gpt(gpt_layer_local)
    before = packed(model, trainers.rows_of_tokens(rows, VOCAB)[transport.rank])
    model.eval()
    for _ in range(transport.rank):
        packed(model, trainers.rows_of_tokens(rows, VOCAB)[transport.rank])
        one_by_one(model, trainers.rows_of_tokens(rows, VOCAB)[transport.rank])
    model.train()
    after = packed(model, trainers.rows_of_tokens(rows, VOCAB, changed)[transport.rank])
    return torch.eq(before, after)[0].all(dim=1).tolist()


def check_without_tokens(transport: C10dTransport, core: BalancedCoreAttention) -> list[bool]:
    """The module itself where one rank brings nothing, which Megatron's own layers cannot reshape."""
    import torch
    from megatron.core.packed_seq_params import PackedSeqParams

    from distca.kernels import dense_attention

    lengths = [[300, 4], [3], [], [1]][transport.rank]
    leaves = [torch.randn(sum(lengths), heads, 8, dtype=torch.float64, requires_grad=True) for heads in (4, 2, 2)]
    edges = torch.tensor([0, *lengths]).cumsum(0).int()
    actual = core(*leaves, None, packed_seq_params=PackedSeqParams("thd", edges, edges))
    expected = dense_attention(*qkv_of(leaves), lengths).flatten(1) if lengths else torch.empty(0, 32).double()
    torch.testing.assert_close(actual, expected, rtol=1e-9, atol=1e-9)
    actual.sum().backward()
    return [tuple(gradient(x).shape) == tuple(x.shape) for x in leaves]


def refusals() -> list[str]:
    import torch
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.packed_seq_params import PackedSeqParams

    from distca.integrations.megatron_core import enable, gpt_layer_local

    core, q = gpt(gpt_layer_local).decoder.layers[0].self_attention.core_attention, torch.zeros(4, 4, 8)

    def attend(packed_seq_params: Any) -> None:
        core(q, q, q, None, packed_seq_params=packed_seq_params)

    wrong = [
        lambda: gpt(gpt_layer_local, attention_dropout=0.1),
        lambda: gpt(gpt_layer_local, softmax_type="learnable"),
        lambda: gpt(gpt_layer_local, window_size=(4, 4)),
        lambda: enable(get_gpt_layer_local_spec().submodules.self_attention),
        lambda: attend(PackedSeqParams("sbhd")),
        lambda: attend(PackedSeqParams("thd", torch.tensor([0, 4]), torch.tensor([0, 2]))),
        lambda: attend(PackedSeqParams("thd", torch.tensor([0, 3]))),
    ]
    return trainers.refusals(wrong)


def two_ranks(transport: C10dTransport) -> dict[str, Any]:
    cpu_megatron()
    replay = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
    return {
        "plain": check_equal(transport, ROWS[2], {}),
        "replayed": check_equal(transport, ROWS[2], replay),
        "unchanged": tokens_unchanged(transport, ROWS[2], (0, 2)),
        "told": refusals(),
    }


def four_ranks(transport: C10dTransport) -> dict[str, Any]:
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec

    from distca.integrations.megatron_core import gpt_layer_local

    cpu_megatron()
    replay = {"recompute_granularity": "selective", "recompute_modules": ["core_attn"]}
    equal = check_equal(transport, ROWS[4], replay)
    core = gpt(gpt_layer_local).decoder.layers[0].self_attention.core_attention
    nothing = check_without_tokens(transport, core)
    whole = gpt(get_gpt_layer_local_spec())
    alone, _ = expected_of(whole, trainers.rows_of_tokens(ROWS[2], VOCAB))
    backwards = trainers.rows_of_tokens(ROWS[2][::-1], VOCAB)
    _, expected = expected_of(whole, backwards)                  # on top of the first micro-batch's gradients
    cpu_megatron(tensor_model_parallel_size=2)
    heads = check_sharded_heads(alone)
    cpu_megatron(pipeline_model_parallel_size=2)
    return {"replayed": equal, "nothing": nothing, "heads": heads,
            "pipeline": check_pipeline(whole, expected, [ROWS[2], ROWS[2][::-1]])}


def check_sharded_heads(alone: list[torch.Tensor]) -> list[int]:
    """Two replicas of two tensor-parallel ranks: a pool is the ranks with the same heads."""
    import torch
    import torch.distributed as dist
    from megatron.core import parallel_state

    from distca.integrations.megatron_core import gpt_layer_local

    replica = parallel_state.get_data_parallel_rank()
    model = gpt(gpt_layer_local, tensor_model_parallel_size=2)
    logits = packed(model, trainers.rows_of_tokens(ROWS[2], VOCAB)[replica])[0]
    first = replica * len(ROWS[2][0])
    expected = torch.cat(alone[first:first + len(ROWS[2][replica])])
    torch.testing.assert_close(logits, expected, rtol=1e-9, atol=1e-9)
    logits.sum().backward()
    pool = model.decoder.layers[0].self_attention.core_attention.pool
    return dist.get_process_group_ranks(pool.group)


def check_pipeline(whole: Any, expected: dict[str, torch.Tensor], micro_batches: list[list[list[int]]]) -> tuple[int,
                   int]:
    """Two stages of two replicas: each stage's replicas are a pool, and the stages run 1F1B, each at its own pace."""
    import torch
    import torch.distributed as dist
    from megatron.core import parallel_state

    from distca.integrations.megatron_core import gpt_layer_local

    stage, replica = parallel_state.get_pipeline_model_parallel_rank(), parallel_state.get_data_parallel_rank()
    other = parallel_state.get_pipeline_model_parallel_next_rank()       # of two
    model = gpt(gpt_layer_local, first=stage == 0, last=stage == 1, pipeline_model_parallel_size=2,
                pipeline_dtype=torch.float64)
    ours = {name.replace("layers.0.", f"layers.{stage}."): x for name, x in model.named_parameters()}
    with torch.no_grad():
        for name, x in whole.named_parameters():
            if name in ours:
                ours[name].copy_(x)
    rows = [trainers.rows_of_tokens(rows, VOCAB)[replica] for rows in micro_batches]
    held, sent = [], []

    def forward(documents: list[torch.Tensor]) -> None:
        received = torch.zeros(sum(len(document) - 1 for document in documents), 1, 32, dtype=torch.float64,
                               requires_grad=True)
        if stage == 1:
            dist.recv(received.detach(), other)
            model.set_input_tensor(received)
        out = packed(model, documents)
        if stage == 0:
            sent.append((out.detach(), dist.isend(out.detach(), other)))
        held.append((received, out, documents))

    def backward() -> None:
        received, out, documents = held.pop(0)
        if stage == 1:
            trainers.total_loss(out[0], documents).backward()
            back = gradient(received)
            sent.append((back, dist.isend(back, other)))
        else:
            grad = torch.empty_like(out)
            dist.recv(grad, other)
            out.backward(grad)

    todo = iter(rows)
    for phase in ("FFBB", "FBFB")[stage]:
        forward(next(todo)) if phase == "F" else backward()
    for _, handle in sent:
        assert handle is not None
        handle.wait()
    actual = summed({name: x.grad for name, x in ours.items()}, parallel_state.get_data_parallel_group())
    trainers.assert_same(actual, {name: expected[name] for name in actual}, 1e-9)
    return stage, model.decoder.layers[0].self_attention.core_attention.pool.latest.layout.num_ranks


def assert_shared(result: tuple[bool, list[float], bool]) -> None:
    """All layers have one pool, which is balanced."""
    shared = result[0]
    assert shared
    trainers.assert_balanced((result[1], result[2]))


@needs_megatron
@pytest.mark.multiprocess
def test_two_ranks_equal_one_document_at_a_time() -> None:
    first, second = values(run_processes(2, two_ranks, deadline_seconds=200.0, timeout_seconds=60.0))
    for rank in (first, second):
        assert_shared(rank["plain"])
        assert_shared(rank["replayed"])
    assert first["unchanged"] == [True] * 41 + [False] * 300 + [True] * 7 and second["unchanged"] == [True] * 27
    expected = ["attention_dropout is 0.1", "softmax_type is 'learnable'", "window_size is (4, 4)",
                "give the spec of a", "qkv_format is 'sbhd'", "of keys differ from those of queries",
                "[0, 3] for 4 tokens"]
    trainers.assert_refused(first["told"], expected)


@needs_megatron
@pytest.mark.multiprocess
def test_four_ranks_replay_attention_and_pool_by_heads_and_by_stage() -> None:
    outcomes = values(run_processes(4, four_ranks, deadline_seconds=200.0, timeout_seconds=60.0))
    for outcome in outcomes:
        assert_shared(outcome["replayed"])
        assert outcome["nothing"] == [True] * 3
    assert [outcome["heads"] for outcome in outcomes] == [[0, 2], [1, 3], [0, 2], [1, 3]]
    assert [outcome["pipeline"] for outcome in outcomes] == [(0, 2), (0, 2), (1, 2), (1, 2)]


@needs_megatron
@pytest.mark.slow
@pytest.mark.multiprocess
def test_the_example_trains(tmp_path: Path) -> None:
    home, balanced = trainers.run_example("megatron", "megatron_core.py", tmp_path, 2)
    assert balanced < 1.1 < home
