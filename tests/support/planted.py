"""Sound tiny models, and the same with one fault planted in each, as `distca check module:function` takes them.

Each returns a model and a batch. A sound one is a Transformers model as it is; a fault is a wrapper, an attention of
its own or a batch.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import transformers as hf
from torch.nn.functional import cross_entropy
from transformers import AttentionInterface, DataCollatorWithFlattening
from transformers.masking_utils import AttentionMaskInterface

from distca.data import rows
from distca.integrations.huggingface import enable

SIZE: dict[str, Any] = {
    "vocab_size": 97, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 1024, "pad_token_id": 0, "bos_token_id": None,
    "eos_token_id": None}
MIXED: dict[str, Any] = {"sliding_window": 8, "layer_types": ["sliding_attention", "full_attention"]}
ROUTED: dict[str, Any] = {"num_experts_per_tok": 2, "moe_intermediate_size": 16}
MODELS: dict[str, dict[str, Any]] = {
    "llama": {}, "mistral": {"sliding_window": 8}, "qwen2": {}, "qwen3": {}, "phi3": {}, "gemma3_text": MIXED,
    "gemma2": {**MIXED, "query_pre_attn_scalar": 16, "attn_logit_softcapping": 50.0},
    "gpt_oss": {**MIXED, "num_local_experts": 4, "num_experts_per_tok": 2,
                "rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0}},
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2}, "qwen3_moe": {**ROUTED, "num_experts": 4},
    "deepseek_v3": {**ROUTED, "num_key_value_heads": 4, "kv_lora_rank": 8, "q_lora_rank": 8, "qk_rope_head_dim": 8,
                    "qk_nope_head_dim": 16, "v_head_dim": 16, "n_routed_experts": 4, "n_shared_experts": 1,
                    "first_k_dense_replace": 1, "n_group": 1, "topk_group": 1},
}
LENGTHS = (30, 1, 25, 14)
Made = tuple[Any, ...]


def config_of(kind: str) -> Any:
    return hf.AutoConfig.for_model(kind, **{**SIZE, **MODELS[kind]})


def small(kind: str, attention: str | None = None) -> Any:
    torch.manual_seed(0)
    return hf.AutoModelForCausalLM.from_config(config_of(kind), attn_implementation=attention)


def documents(lengths: tuple[int, ...] = LENGTHS) -> list[list[int]]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randint(1, 97, (length,), generator=generator).tolist() for length in lengths]


def flat(lengths: tuple[int, ...] = LENGTHS, **options: bool) -> dict[str, Any]:
    features = [{"input_ids": one} for one in documents(lengths)]
    return {**DataCollatorWithFlattening(**options)(features), "use_cache": False}


def two_rows() -> dict[str, Any]:
    """The second row has labels for its last five tokens alone."""
    row = flat()
    both = {name: torch.cat([one, one]) for name, one in row.items() if name != "use_cache"}
    both["labels"][1, :-5] = -100
    return {**both, "use_cache": False}


def padded() -> dict[str, Any]:
    """Two documents, the second padded at its beginning."""
    ids, mask = torch.zeros(2, 30, dtype=torch.int64), torch.zeros(2, 30, dtype=torch.int64)
    for row, one in enumerate(documents((30, 22))):
        ids[row, 30 - len(one):], mask[row, 30 - len(one):] = torch.tensor(one), 1
    labels = torch.where((mask > 0) & (mask.cumsum(1) > 1), ids, -100)
    return {"input_ids": ids, "attention_mask": mask, "labels": labels, "use_cache": False,
            "position_ids": (mask.cumsum(1) - 1).clamp(min=0)}


def sound() -> Made:
    return small("llama"), flat()


def state_carried() -> Made:
    config = hf.AutoConfig.for_model("lfm2", vocab_size=97, hidden_size=32, intermediate_size=48, num_hidden_layers=2,
                                     num_attention_heads=4, num_key_value_heads=2, pad_token_id=0,
                                     layer_types=["conv", "full_attention"])
    torch.manual_seed(0)
    return hf.AutoModelForCausalLM.from_config(config), flat()


def sound_rows() -> Made:
    return small("qwen3"), two_rows()


def sound_padding() -> Made:
    return small("llama"), padded()


def sound_loss_of_its_own() -> Made:
    """Labels are the next tokens already, and the wrapper's loss takes them as they are."""
    batch = flat()
    batch["labels"] = torch.cat([batch["labels"][:, 1:], torch.tensor([[-100]])], dim=1)

    def call(model: Any, labels: Any = None, num_items_in_batch: Any = None, **batch: Any) -> Any:
        result = model(**batch)
        if labels is not None:
            total = cross_entropy(result.logits[0], labels[0], reduction="sum")
            result.loss = total / (num_items_in_batch or (labels != -100).sum())
        return result

    return Wrapped(small("llama"), call), batch


def sound_experts() -> Made:
    """With a load balancing loss, which is not of labels."""
    model = small("qwen3_moe")
    model.config.output_router_logits = True
    return model, flat()


class Plain(torch.nn.Module):
    """A decoder that is none of Transformers: one layer of attention over documents of position_ids."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.tokens, self.places = torch.nn.Embedding(97, 16), torch.nn.Embedding(128, 16)
        self.qkv, self.head = torch.nn.Linear(16, 48), torch.nn.Linear(16, 97)

    def forward(self, input_ids: torch.Tensor, position_ids: torch.Tensor) -> torch.Tensor:
        x = self.tokens(input_ids) + self.places(position_ids)
        document = (position_ids == 0).cumsum(-1)
        seen = (document[:, :, None] == document[:, None]) & torch.ones(2 * input_ids.shape[1:]).tril().bool()
        q, k, v = self.qkv(x).chunk(3, dim=-1)
        logits: torch.Tensor = self.head(x + torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=seen))
        return logits


def sound_plain() -> Made:
    batch = flat()
    return Plain(), {name: batch[name] for name in ("input_ids", "position_ids")}


class Wrapped(torch.nn.Module):
    """A model whose call goes through a function."""

    def __init__(self, model: Any, call: Callable[..., Any]) -> None:
        super().__init__()
        self.model, self.call = model, call

    def forward(self, **batch: Any) -> Any:
        return self.call(self.model, **batch)


def sound_wrapper() -> Made:
    return Wrapped(small("mistral"), lambda model, **batch: model(**batch)), flat()


def mask_of_ones() -> Made:
    """Transformers takes packed rows for one document each where any attention_mask is given."""
    return small("llama"), {**flat(), "attention_mask": torch.ones(1, sum(LENGTHS), dtype=torch.int64)}


def cache_left_on() -> Made:
    return small("llama"), {name: one for name, one in flat().items() if name != "use_cache"}


def edges_unread() -> Made:
    """SDPA does not read cu_seq_lens."""
    return small("llama"), flat(return_position_ids=False, return_flash_attn_kwargs=True)


def positions_dropped() -> Made:
    return Wrapped(small("llama"), lambda model, position_ids, **batch: model(**batch)), flat()


def positions_not_reset() -> Made:
    """Documents are kept apart by a mask, but positions go on."""
    def call(model: Any, input_ids: torch.Tensor, position_ids: torch.Tensor, **batch: Any) -> Any:
        document = (position_ids == 0).cumsum(1)[0]
        seen = (document[:, None] == document) & torch.ones(len(document), len(document)).tril().bool()
        return model(input_ids=input_ids, attention_mask=seen[None, None], **batch)

    return Wrapped(small("llama"), call), flat()


def labels_across() -> Made:
    batch = flat()
    return small("llama"), {**batch, "labels": batch["input_ids"].clone()}


def labels_shifted_twice() -> Made:
    batch = flat()
    return small("llama"), {**batch, "labels": torch.cat([batch["labels"][:, 1:], batch["labels"][:, :1]], dim=1)}


def mean_of_rows() -> Made:
    def call(model: Any, labels: Any = None, num_items_in_batch: Any = None, **batch: Any) -> Any:
        result = model(**batch)
        if labels is not None:
            result.loss = torch.stack([cross_entropy(row[:-1], label[1:]) for row, label in zip(
                result.logits, labels, strict=True)]).mean()
        return result

    return Wrapped(small("llama"), call), two_rows()


def count_ignored() -> Made:
    """A micro-batch's own mean, whatever the trainer counted."""
    return Wrapped(small("llama"), lambda model, num_items_in_batch=None, **batch: model(**batch)), flat()


def attention(**flaws: Any) -> str:
    """Register an attention that is right but for its flaws, and return its name."""
    name = "planted-" + "-".join(f"{key}-{value}" for key, value in flaws.items())

    def call(module: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: Any, scaling: Any = None,
             softcap: float | None = None, s_aux: torch.Tensor | None = None, position_ids: Any = None,
             **about: Any) -> tuple[torch.Tensor, None]:
        groups, tokens = q.shape[1] // k.shape[1], q.shape[2]
        k, v = ((x.repeat(1, groups, 1, 1) if "heads" in flaws else x.repeat_interleave(groups, dim=1)) for x in (k, v))
        kinds = getattr(module.config, "layer_types", None) or (
            ["sliding_attention" if getattr(module.config, "sliding_window", None) else "full_attention"] * 2)
        window = module.config.sliding_window if kinds[module.layer_idx] == "sliding_attention" else tokens
        window = tokens if "full" in flaws else window + flaws.get("window", 0) * (window != tokens)
        document = (position_ids == 0).cumsum(-1)                # [rows, tokens]
        if "edge" in flaws:
            document = torch.roll(document, flaws["edge"], dims=-1)
        at = torch.arange(tokens)
        far = at[:, None] - at                                   # query less key
        seen = (far >= -flaws.get("future", 0)) & (far < window) & (document[:, :, None] == document[:, None])
        scores = torch.einsum("bhqd,bhkd->bhqk", q, k) * (q.shape[3]**-0.5 if "scale" in flaws else scaling)
        if softcap is not None and "softcap" not in flaws:
            scores = softcap * torch.tanh(scores / softcap)
        scores = scores.masked_fill(~seen[:, None], -torch.inf)
        if s_aux is not None and "sinks" not in flaws:
            sinks = s_aux.view(1, -1, 1, 1).expand(*scores.shape[:3], 1)
            weights = torch.cat([scores, sinks], dim=-1).softmax(-1)[..., :-1]
        else:
            weights = scores.softmax(-1)
        weights = weights.detach() if "backward" in flaws else weights
        return torch.einsum("bhqk,bhkd->bqhd", weights, v), None

    AttentionInterface.register(name, call)
    AttentionMaskInterface.register(name, lambda **about: None)
    return name


def _with(kind: str, **flaws: Any) -> Callable[[], Made]:
    def make() -> Made:
        return small(kind, attention(**flaws)), flat()

    return make


sound_attention = _with("gemma2", none=0)
sound_sinks = _with("gpt_oss", none=0)
window_too_long = _with("mistral", window=1)
window_too_short = _with("gemma3_text", window=-1)
window_ignored = _with("gemma3_text", full=1)
edges_off_by_one = _with("llama", edge=1)
edges_early = _with("llama", edge=-1)
future_seen = _with("llama", future=1)
sinks_dropped = _with("gpt_oss", sinks=1)
scale_ignored = _with("gemma2", scale=1)
softcap_ignored = _with("gemma2", softcap=1)
heads_mixed = _with("qwen3", heads=1)
backward_wrong = _with("llama", backward=1)


def padding_attended() -> Made:
    return Wrapped(small("llama"), lambda model, attention_mask, position_ids, **batch: model(**batch)), padded()


def gradients_doubled() -> Made:
    model = small("llama")
    model.model.layers[0].mlp.up_proj.weight.register_hook(lambda gradient: 2 * gradient)
    return model, flat()


def gradients_times_ranks() -> Made:
    model = small("llama")
    for parameter in model.parameters():
        parameter.register_hook(lambda gradient: 2 * gradient)
    return model, flat()


def step(count: bool, shared: bool = True) -> Callable[[Any, list[dict[str, Any]]], float]:
    """A trainer's step over micro-batches and ranks, whose loss weighs every label the same if `count`."""
    def run(model: Any, batches: list[dict[str, Any]]) -> float:
        every = [int((batch["labels"][:, 1:] != -100).sum()) for batch in batches]
        total, ranks = torch.tensor(sum(every)), dist.get_world_size() if dist.is_initialized() else 1
        if ranks > 1 and shared:
            dist.all_reduce(total)
        parts = [model(**batch, num_items_in_batch=int(total)).loss if count else
                 model(**batch).loss / len(batches) / ranks for batch in batches]
        for part in parts:
            part.backward()
        loss = torch.stack(parts).sum().detach()
        if ranks > 1:
            for value in (loss, *(one.grad for one in model.parameters() if one.grad is not None)):
                dist.all_reduce(value)
        return float(loss)

    return run


def sound_step() -> Made:
    return small("llama"), flat(), step(count=True)


def micro_batches_averaged() -> Made:
    return small("llama"), flat(), step(count=False)


def _rank() -> tuple[int, int]:
    return (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)


def over_ranks(kind: str = "llama") -> Made:
    """Documents over the ranks, by distca's attention."""
    model = small(kind)
    enable(model)
    return model, {**rows(documents((40, 1, 31)), *_rank()).batch(), "use_cache": False}


def over_ranks_windows() -> Made:
    return over_ranks("gemma3_text")


def span_rotated_from_zero() -> Made:
    """Rank 1's slice is rotated as if a document began with it."""
    model, batch = over_ranks()

    def restarted(module: Any, args: tuple[Any, ...], named: dict[str, Any]) -> Any:
        at = named.get("position_ids", args[-1])
        at = at - at[:, :1]
        return (args, {**named, "position_ids": at}) if "position_ids" in named else ((args[0], at), named)

    model.model.rotary_emb.register_forward_pre_hook(restarted, with_kwargs=True)
    return model, batch


def token_on_both_ranks() -> Made:
    """Rank 1 begins with the token that rank 0 ends with."""
    rank, ranks = _rank()
    model, batch = over_ranks()
    whole = rows(documents((40, 1, 31)), 0, 1).batch()
    cut = batch["input_ids"].shape[1]
    if rank == ranks - 1 > 0:
        for name, value in batch.items():
            if name != "use_cache":
                batch[name] = torch.cat([whole[name][:, cut - 1:cut], value], dim=1)
    return model, batch


def labels_lost_at_the_cut() -> Made:
    model, batch = over_ranks()
    del batch["shift_labels"]
    return model, batch


def mean_of_ranks() -> Made:
    """Every rank's own mean, averaged: rank 1 has fewer labels."""
    rank, ranks = _rank()
    batch = flat()
    batch["labels"][:, :20 * rank] = -100

    def call(model: Any, num_items_in_batch: int | None = None, **batch: Any) -> Any:
        result = model(**batch)
        result.loss = None if result.loss is None else result.loss / ranks
        return result

    return Wrapped(small("llama"), call), batch


def step_counts_its_own_rank() -> Made:
    """Gradients are the sum over ranks, each divided by its own labels: twice what they should be."""
    return small("llama"), flat(), step(count=True, shared=False)


def trainer(average: bool = True) -> Any:
    """Transformers' own Trainer over packed rows of unequal numbers of labels."""
    features = [{"input_ids": one} for one in documents((30, 1, 25, 14, 9, 41, 3, 12))]
    arguments = hf.TrainingArguments(
        "unused", use_cpu=True, per_device_train_batch_size=4, report_to="none", save_strategy="no", disable_tqdm=True,
        average_tokens_across_devices=average)
    return hf.Trainer(small("qwen3"), arguments, train_dataset=features,
                      data_collator=DataCollatorWithFlattening())


def sound_trainer() -> Any:
    return trainer()


def trainer_counts_its_own_rank() -> Any:
    """With average_tokens_across_devices=False every rank divides by its own labels: a mean of means."""
    return trainer(average=False)
