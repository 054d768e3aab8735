"""Transformers with distca gives what transformers gives, on one rank and on many, and refuses what it cannot serve."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.fsdp import fully_shard

import distca
from tests.support.attention import greedy
from tests.support.processes import run_processes

pytest.importorskip("transformers")

import transformers as hf
from transformers import DataCollatorWithFlattening

from distca.integrations.document_lengths import from_arguments, whole_documents
from distca.integrations.huggingface import enable
from distca.integrations.packed import latest_plan
from distca.integrations.row_exchange import RowTable
from distca.runtime.transport.c10d import C10dTransport

ROOT = Path(distca.__file__).parents[1]
SIZE: dict[str, Any] = {
    "vocab_size": 97, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 1024, "pad_token_id": 0}
MIXED: dict[str, Any] = {
    "sliding_window": 20, "layer_types": ["sliding_attention", "full_attention", "sliding_attention"]}


def small(kind: str, **options: Any) -> Any:
    """A model of transformers, whose own types refuse what its methods take."""
    torch.manual_seed(0)
    made = {
        "llama": lambda: hf.LlamaForCausalLM(hf.LlamaConfig(**SIZE, **options)),
        "qwen3": lambda: hf.Qwen3ForCausalLM(hf.Qwen3Config(**SIZE, **options)),
        "mistral": lambda: hf.MistralForCausalLM(hf.MistralConfig(**SIZE, sliding_window=20, **options)),
        "gemma3": lambda: hf.Gemma3ForCausalLM(hf.Gemma3TextConfig(**SIZE, **MIXED, **options)),
    }
    return made[kind]()


def test_a_mask_that_numbers_documents_is_refused() -> None:
    """Transformers would make ones of it, and one document of two."""
    model, tokens = small("llama"), torch.arange(4)[None]
    enable(model), enable(model)
    for call in (lambda mask: model(tokens, attention_mask=mask), lambda mask: model(tokens, mask)):
        call(torch.ones(1, 4, dtype=torch.int64))
        with pytest.raises(ValueError, match=r"attention_mask has numbers up to 2.*position_ids that restart"):
            call(torch.tensor([[1, 1, 2, 2]]))


@pytest.mark.parametrize("ended", ["generating into a static cache", "refused"])
def test_a_model_by_name_is_not_served_by_one_that_ran_before(ended: str) -> None:
    before, tokens = small("llama"), torch.arange(1, 7).view(2, 3)
    enable(before)
    if ended == "refused":
        with pytest.raises(ValueError, match="attention_mask is a mask of your own"):
            before.train()(tokens, attention_mask=torch.zeros(2, 1, 3, 3))
    else:
        before.eval().generate(tokens, max_new_tokens=3, do_sample=False, cache_implementation="static")
    model = small("llama", attn_implementation="distca")
    model(**packed([5, 3], 0))
    assert latest_plan(model).layout.lengths.tolist() == [5, 3]


def packed(lengths: list[int], seed: int, edges: bool = False) -> dict[str, Any]:
    """Documents of these lengths as the padding-free collator gives them; a rank without any has one padding token."""
    draw = np.random.default_rng(seed)
    if not lengths:
        return {"input_ids": torch.ones(1, 1, dtype=torch.int64), "labels": torch.full((1, 1), -100),
                "attention_mask": torch.zeros(1, 1, dtype=torch.int64)}
    collate = DataCollatorWithFlattening(return_flash_attn_kwargs=edges)
    return dict(collate([{"input_ids": draw.integers(1, 97, length).tolist()} for length in lengths]))


def joined(batches: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """Everyone's tokens in one row, as one process would have them."""
    full = [batch for batch in batches if "position_ids" in batch]
    return {name: torch.cat([batch[name] for batch in full], dim=1) for name in ("input_ids", "labels", "position_ids")}


def close(actual: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-5)


def generates_alike(model: Any, one: Any, prompt: torch.Tensor, **options: Any) -> None:
    """The same tokens, where none of them is for rounding to decide."""
    mine, theirs = (x.generate(prompt, do_sample=False, return_dict_in_generate=True, output_logits=True, **options)
                    for x in (model, one))
    greedy(torch.stack(theirs.logits))
    assert torch.equal(mine.sequences, theirs.sequences)


@contextmanager
def counting() -> Iterator[list[int]]:
    """Collectives of lengths."""
    calls, plain = [], RowTable._gather

    def counted(*args: Any) -> Any:
        calls.append(1)
        return plain(*args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(RowTable, "_gather", counted)
        yield calls


def as_on_one_process(transport: C10dTransport, kind: str, rows: list[list[int]],
                      checkpointing: bool | str = False) -> bool:
    """Logits, loss and gradients; a changed token; unequal evaluation and generation; and training again."""
    rank = transport.rank
    one, model = small(kind, attn_implementation="sdpa"), small(kind)
    enable(model, tolerance=0.02)
    if checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": checkpointing == "reentrant"})
        model.enable_input_require_grads()
    batches = [packed(lengths, seed) for seed, lengths in enumerate(rows)]
    begin = sum(sum(lengths) for lengths in rows[:rank])
    here = slice(begin, begin + sum(rows[rank]))
    total = sum(int((batch["labels"][:, 1:] != -100).sum()) for batch in batches)
    model.train(), one.train()
    with counting() as calls:
        got = model(**batches[rank], num_items_in_batch=total, use_cache=False)
        got.loss.backward()
    assert len(calls) == 1, f"{len(calls)} exchanges of lengths in one step"
    tasks = latest_plan(model).tasks
    assert (tasks.home != tasks.server).any()
    whole = one(**joined(batches), num_items_in_batch=total, use_cache=False)
    whole.loss.backward()
    if rows[rank]:
        close(got.logits[0], whole.logits[0, here])
    for mine, theirs in [(got.loss.detach(), whole.loss.detach()),
                         *((p.grad, q.grad) for p, q in zip(model.parameters(), one.parameters(), strict=True))]:
        dist.all_reduce(mine)
        close(mine, theirs)

    changes = rank == next(r for r, lengths in enumerate(rows) if lengths)
    if changes:                                                  # the first token of the first document
        batches[rank]["input_ids"][0, 0] = 96 - batches[rank]["input_ids"][0, 0]
    again = model(**batches[rank], use_cache=False).logits[0].detach()
    before, own = got.logits[0].detach(), rows[rank][0] if changes else 0
    torch.testing.assert_close(again[own:], before[own:], rtol=0, atol=1e-6)
    assert not changes or not torch.allclose(again[:own], before[:own], atol=1e-4)

    model.eval(), one.eval()
    with torch.no_grad(), counting() as calls:
        for seed in range(rank + 1):                             # unequal numbers of batches
            batch = packed([30, 1, 7], 100 + 10 * rank + seed)
            close(model(**batch).logits, one(**batch, use_cache=False).logits)
        prompt = torch.arange(1, 2 * (rank + 3) + 1).view(2, -1)
        generates_alike(model, one, prompt, max_new_tokens=4 + rank, pad_token_id=0)
    assert not calls
    model.train()
    model(**batches[rank], num_items_in_batch=total, use_cache=False).loss.backward()
    return True


def each_kind(transport: C10dTransport, kinds: tuple[str, ...], rows: list[list[int]],
              checkpointing: tuple[bool | str, ...] = (False,)) -> bool:
    return all(as_on_one_process(transport, kind, rows, how) for kind in kinds for how in checkpointing)


def sharded(transport: C10dTransport, kind: str, rows: list[list[int]], checkpointing: bool) -> bool:
    """FSDP2 around every layer and the model: gradients and a step of the optimizer as on one process."""
    one, model = small(kind, attn_implementation="sdpa"), small(kind)
    enable(model, tolerance=0.02)
    if checkpointing:
        model.gradient_checkpointing_enable()
    for layer in model.model.layers:
        fully_shard(layer)
    fully_shard(model)
    batches = [packed(lengths, seed) for seed, lengths in enumerate(rows)]
    total = sum(int((batch["labels"][:, 1:] != -100).sum()) for batch in batches)
    optimizers = [torch.optim.SGD(x.parameters(), lr=0.5) for x in (model.train(), one.train())]
    for _ in range(2):
        mine = model(**batches[transport.rank], num_items_in_batch=total, use_cache=False).loss
        whole = one(**joined(batches), num_items_in_batch=total, use_cache=False).loss
        (transport.size * mine).backward()                       # FSDP2 averages over ranks
        whole.backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    for p, q in zip(model.parameters(), one.parameters(), strict=True):
        close(p.detach().full_tensor(), q.detach())
    return True


TWO = [[400, 1, 1, 37], [90, 25, 1]]
FOUR = [[640, 1], [30, 30, 31], [], [257, 1, 12]]


@pytest.mark.multiprocess
def test_two_ranks_match_one_process() -> None:
    outcomes = run_processes(2, each_kind, ("llama", "gemma3"), TWO, (False, True), deadline_seconds=120)
    assert [(outcome.error, outcome.value) for outcome in outcomes] == [(None, True)] * 2


@pytest.mark.slow
@pytest.mark.multiprocess
@pytest.mark.parametrize("rows", [TWO, [[], [300, 1]], FOUR], ids=["two", "empty", "four"])
def test_ranks_match_one_process(rows: list[list[int]]) -> None:
    kinds = ("llama", "qwen3", "mistral", "gemma3")
    outcomes = run_processes(len(rows), each_kind, kinds, rows, (False, True, "reentrant"), timeout_seconds=60,
                             deadline_seconds=280)
    assert [(outcome.error, outcome.value) for outcome in outcomes] == [(None, True)] * len(rows)


@pytest.mark.slow
@pytest.mark.multiprocess
@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("rows", [TWO, FOUR], ids=["two", "four"])
def test_sharded_ranks_match_one_process(rows: list[list[int]], checkpointing: bool) -> None:
    outcomes = run_processes(len(rows), sharded, "gemma3", rows, checkpointing, timeout_seconds=60,
                             deadline_seconds=200)
    assert [(outcome.error, outcome.value) for outcome in outcomes] == [(None, True)] * len(rows)


@pytest.mark.parametrize("kind", ["llama", "gemma3"])
def test_one_rank_with_padding_edges_caches_and_autocast(kind: str) -> None:
    one, model = small(kind, attn_implementation="sdpa"), small(kind, attn_implementation="distca")
    batch = packed([20, 1, 30, 9], 0, edges=True)
    plain = {name: batch[name] for name in ("input_ids", "position_ids", "labels")}
    close(model(**batch).logits, one(**plain, use_cache=False).logits)
    assert latest_plan(model).layout.lengths.tolist() == [20, 1, 30, 9]
    del batch["position_ids"]                                    # RoPE aside, cu_seq_lens alone tell documents apart
    model(**batch)
    assert latest_plan(model).layout.lengths.tolist() == [20, 1, 30, 9]
    with torch.autocast("cpu", torch.bfloat16):
        torch.testing.assert_close(model(**plain).logits, one(**plain, use_cache=False).logits, rtol=0.05, atol=0.05)
    ids = torch.arange(1, 61).view(2, 30)
    for mask in (torch.ones(2, 30), torch.ones(2, 30).index_put_((torch.tensor(0), torch.arange(5)), torch.tensor(0.)),
                 torch.ones(2, 30).index_put_((torch.tensor(1), torch.arange(22, 30)), torch.tensor(0.))):
        mine, theirs = (x(input_ids=ids, attention_mask=mask.long(), use_cache=False).logits for x in (model, one))
        close(mine[mask.bool()], theirs[mask.bool()])
        if mask[:, -1].all():
            for cache in ("dynamic", "static"):
                generates_alike(model, one, ids, attention_mask=mask.long(), max_new_tokens=4,
                                cache_implementation=cache)
    with pytest.raises(ValueError, match="attention_mask is a mask of your own"):
        model.train()(input_ids=ids, attention_mask=torch.zeros(2, 1, 30, 30))


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.lists(st.integers(1, 5), max_size=4), st.booleans()), min_size=1, max_size=3),
       st.integers(0, 3))
def test_documents_are_read_from_padded_rows(rows: list[tuple[list[int], bool]], spare: int) -> None:
    row_len = max(max(sum(lengths) for lengths, _ in rows), 1) + spare
    position = torch.zeros(len(rows), row_len, dtype=torch.int64)
    mask = torch.zeros(len(rows), row_len, dtype=torch.bool)
    for row, (lengths, right) in enumerate(rows):
        begin = row_len - sum(lengths) if right else 0
        mask[row, begin:begin + sum(lengths)] = True
        position[row, mask[row]] = torch.tensor([i for length in lengths for i in range(length)], dtype=torch.int64)
    slices, kept = from_arguments({"position_ids": position}, mask, (len(rows), row_len))
    assert slices == whole_documents([length for lengths, _ in rows for length in lengths])
    everything = mask.flatten().nonzero().flatten().tolist()
    assert (list(range(len(rows) * row_len)) if kept is None else kept.tolist()) == everything


@pytest.mark.parametrize(("about", "message"), [
    ((None, torch.tensor([0, 3, 2, 6]), None), "rising numbers"),
    ((None, torch.tensor([0, 3, 5]), None), r"cu_seq_lens_q is \[0, 3, 5\] for 6 tokens"),
    ((None, torch.tensor([0, 6]), torch.tensor([[1, 1, 1, 1, 1, 0]])), "give one of them"),
    ((None, None, None), "does not know where documents begin; give cu_seq_lens_q"),
    ((torch.zeros(3, 1, 6), None, None), r"position_ids of shape \(3, 1, 6\)"),
    ((torch.arange(6)[None], None, torch.tensor([[1, 1, 0, 1, 1, 1]])), "padding between the tokens"),
])
def test_documents_that_cannot_be_read_are_named(about: tuple[Any, ...], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        from_arguments({"position_ids": about[0], "cu_seq_lens_q": about[1]}, about[2], (1, 6))


SMALLER: dict[str, Any] = {**SIZE, "num_hidden_layers": 1}


@pytest.mark.parametrize(("make", "message"), [
    (lambda: hf.T5ForConditionalGeneration(hf.T5Config(
        d_model=32, d_ff=32, num_layers=1, num_heads=2, vocab_size=97)), "t5: it has cross-attention"),
    (lambda: hf.GPT2LMHeadModel(hf.GPT2Config(n_embd=32, n_layer=1, n_head=2, vocab_size=97,
                                              add_cross_attention=True)), "gpt2: it has cross-attention"),
    (lambda: small("gemma3", use_bidirectional_attention=True), "gemma3_text: its attention is not causal"),
    (lambda: hf.BertModel(hf.BertConfig(hidden_size=32, num_hidden_layers=1, num_attention_heads=2, vocab_size=97,
                                        attention_probs_dropout_prob=0.0)), "bert: its attention is not causal"),
    (lambda: hf.BloomModel(hf.BloomConfig(hidden_size=32, n_layer=1, n_head=2, vocab_size=97, attention_dropout=0)),
     "bloom: its attention does not go through"),
    (lambda: hf.GlmMoeDsaForCausalLM(hf.GlmMoeDsaConfig(
        **{**SMALLER, "num_key_value_heads": 4}, n_routed_experts=4, q_lora_rank=8, kv_lora_rank=8, qk_rope_head_dim=8,
        qk_nope_head_dim=8, v_head_dim=8)), r"glm_moe_dsa: it has layers of other kinds: .*index_topk"),
    (lambda: small("llama", attention_dropout=0.1), "llama: attention_dropout is 0.1; set it to 0"),
    (lambda: torch.nn.Linear(2, 2), "Linear without a transformers model inside"),
])
def test_what_cannot_be_served_is_refused_when_enabled(make: Callable[..., Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        enable(make())


def test_a_model_that_reads_the_mask_is_refused_at_its_first_layer() -> None:
    model = hf.DogeForCausalLM(hf.DogeConfig(**SMALLER))
    enable(model)
    with pytest.raises(ValueError, match="doge: it reads 'dtype' of its mask, to make one of its own"):
        model(torch.ones(1, 4, dtype=torch.int64), use_cache=False)


def test_a_model_given_the_name_alone_is_refused_ahead_of_its_first_layer() -> None:
    model = small("llama", attention_dropout=0.1, attn_implementation="distca")
    with pytest.raises(ValueError, match=r"llama: attention_dropout is 0\.1; set it to 0"):
        model(torch.ones(1, 4, dtype=torch.int64))


def launched(*command: Any, ranks: int = 2, seconds: int = 120) -> str:
    """What a script printed under torchrun. Where it hangs, every rank says in which line before it is ended."""
    process = subprocess.Popen(
        [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(ranks), "--standalone",
         *map(str, command)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "PYTHONFAULTHANDLER": "1",
             "HF_HUB_OFFLINE": "1"})                             # nothing is fetched, and nobody waits for a network
    try:
        said, errors = process.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        for child in Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split():
            os.kill(int(child), signal.SIGABRT)
            time.sleep(1)                                        # one after another, or their lines mix
        said, errors = process.communicate(timeout=60)
        pytest.fail(f"{command[0]} ran for more than {seconds} s\n{errors[-9000:]}")
    assert process.returncode == 0, errors[-3000:]
    return said


def trained(folder: Path, *options: Any, steps: int = 20) -> tuple[list[float], list[float], str]:
    """Losses of the example, one per step, and what it printed."""
    said = launched(ROOT / "examples/transformers_trainer.py", "--cpu", "--longest", "400", "--steps", steps,
                    "--output", folder, *options)
    history = json.loads((folder / "trainer_state.json").read_text())["log_history"]
    losses, evals = ([row[name] for row in history if name in row] for name in ("loss", "eval_loss"))
    return losses, evals, said


@pytest.mark.slow
@pytest.mark.multiprocess
@pytest.mark.parametrize("options", [(), ("--checkpointing",)], ids=["ddp", "checkpointing"])
@pytest.mark.parametrize("model", ["llama", "qwen3", "gemma3"])
def test_trainer_has_the_same_losses_with_and_without(model: str, options: tuple[str, ...], tmp_path: Path) -> None:
    losses, evals, said = trained(tmp_path / "with", "--model", model, *options)
    plain, plain_evals, _ = trained(tmp_path / "without", "--model", model, "--attention", "sdpa", *options)
    assert len(losses) == len(plain) == 20 and len(evals) == len(plain_evals) == 2
    np.testing.assert_allclose(losses, plain, rtol=0, atol=2e-4)
    np.testing.assert_allclose(evals, plain_evals, rtol=0, atol=2e-4)
    assert said.count("attention work max/mean") == 20


@pytest.mark.slow
@pytest.mark.multiprocess
def test_the_plain_pytorch_example_runs_and_is_short() -> None:
    script = ROOT / "examples/plain_pytorch.py"
    assert len(script.read_text().splitlines()) < 60
    assert launched(script).count("with distca") == 5


LETS_GO_SLOWLY = """
import runpy, sys, threading, time, weakref
import torch, torch.distributed as dist

plain = dist.all_reduce

def all_reduce(tensor):
    # and one more, whose tensor a thread of gloo lets go of last and in many small steps
    plain(tensor)
    last, begun = torch.zeros(1), threading.Event()
    weakref.finalize(last, lambda: (begun.set(), [time.sleep(0.01) for _ in range(100)]))
    plain(last, async_op=True)
    del last
    begun.wait()

dist.all_reduce = all_reduce
runpy.run_path(sys.argv[1], run_name="__main__")
"""


@pytest.mark.slow
@pytest.mark.multiprocess
def test_the_plain_pytorch_example_ends_after_the_threads_that_hold_its_tensors(tmp_path: Path) -> None:
    """A thread of gloo that wants the interpreter when that is ending aborts the process."""
    (tmp_path / "slowly.py").write_text(LETS_GO_SLOWLY)
    launched(tmp_path / "slowly.py", ROOT / "examples/plain_pytorch.py")


def test_the_guide_runs() -> None:
    guide = (ROOT / "docs/guide/integrate.md").read_text(encoding="utf-8").partition("## Transformers")[2]
    block = guide.partition("```python\n")[2].partition("```")[0]
    assert "enable(model)" in block
    exec(compile(block, "docs/guide/integrate.md", "exec"), {})
    for command in ("examples/transformers_trainer.py --steps 20 --cpu", "examples/plain_pytorch.py"):
        assert f"torchrun --nproc-per-node 2 {command}\n" in guide     # as the slow tests run them
