"""What backward recomputes, in seconds and bytes, against arithmetic on paper; and refusals whose remedies work."""

from __future__ import annotations

import random
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import distca
from distca.cost.attention_time import shipped_table
from distca.cost.work import RECOMPUTE, activation_bytes
from distca.models import MODELS, model_named
from distca.planning.orders import interleaved_ticks, one_forward_one_backward
from distca.simulate.costs import Costs
from distca.simulate.fitting import StepAsked, fitting_settings
from distca.simulate.memory import check_fits, least_bytes, memory
from distca.simulate.setting import LEAST_BYTES, Setting, parse_memory, setting
from distca.simulate.sweep import Question, compare
from distca.spec import cluster_named
from distca.validation import UserError
from distca.workload.sequences import Source

MODEL, LARGE = model_named("llama3-8b"), model_named("llama3-70b")
CLUSTER = cluster_named("dgx-h200")
TABLE = shipped_table("h200")
COSTS = Costs.of(MODEL, CLUSTER, 1, TABLE)
TOKENS = np.full(1, 1000.0)


def seconds(mode: str, backward: bool = True, weights: bool | None = None) -> float:
    return sum(float(part[0]) for part in replace(COSTS, recompute=mode).segment_seconds(TOKENS, backward, weights))


def test_bytes_of_every_mode_by_hand() -> None:
    """Llama 3 8B: hidden 4096, 32 heads and 8 KV heads of 128, feed-forward 14336; bf16, and a float32 per head."""
    attention = 2 * (4096 + 2 * 1024 + 4096) + 4 * 32
    assert [activation_bytes(1, MODEL, recompute=mode) for mode in RECOMPUTE] == [
        2 * (4 * 4096 + 3 * 14336) + attention, 2 * (4 * 4096 + 2 * 14336) + attention, 2 * 4096 + attention,
        2 * (4096 + 4096) + 4 * 32]


def test_seconds_of_every_mode_by_hand() -> None:
    forward = COSTS.linear_flops_per_second[0]
    qkv, output, ffn = 4096 * (4096 + 2 * 1024), 4096 * 4096, 4096 * 14336
    none = seconds("none")
    assert seconds("full") - none == pytest.approx(1000 * 2 * (qkv + output + 2 * ffn) / forward)  # no last product
    assert seconds("offload") - none == pytest.approx(1000 * 2 * (2 * qkv + output + 3 * ffn) / forward)
    assert seconds("selective") - none == pytest.approx(1000 * 2 * (5 * 4096 + 3 * 14336) / 4.8e12)
    for mode in RECOMPUTE:
        assert seconds(mode, backward=False) == pytest.approx(seconds("none", backward=False))  # 50 GB/s keep up
        assert seconds(mode, weights=True) == seconds("none", weights=True)      # dW finds all it needs
        assert seconds(mode, weights=False) - seconds("none", weights=False) == pytest.approx(seconds(mode) - none)


def test_a_slow_host_link_is_what_a_layer_takes() -> None:
    slow = replace(COSTS, recompute="offload", host_bandwidth=1e9)
    for backward in (False, True):
        assert sum(float(part[0]) for part in slow.segment_seconds(TOKENS, backward)) == pytest.approx(
            1000 * 16_512 / 1e9)


def test_a_recomputed_part_waits_for_its_weight_unit_whole() -> None:
    """Four layers on two stages, eight micro-batches of 100 tokens: 1F1B keeps 2 and 1 of them, and a layer is whole
    while it is recomputed."""
    tokens = np.full((8, 1), 100)
    whole, kept = (100 * activation_bytes(1, MODEL, recompute=mode) for mode in ("none", "full"))
    full = replace(COSTS, recompute="full")
    held = memory(full, (2, 2), one_forward_one_backward(2, 8), tokens).activations
    assert held.tolist() == [2 * 2 * kept + whole - kept, 2 * kept + whole - kept]
    fused, apart = (memory(full, (2, 2), interleaved_ticks(2, 8, 1, splits), tokens).activations.max()
                    for splits in (False, True))
    assert apart >= fused + 2 * (whole - kept) - 2 * kept        # a part of two layers waits for dW
    offloaded = memory(replace(COSTS, recompute="offload"), (2, 2), one_forward_one_backward(2, 8), tokens).activations
    assert offloaded.tolist() == [100 * (2 * 16_512) + whole] * 2


@pytest.mark.parametrize(("gpus", "tp"), [(16, 8), (64, 8), (256, 8), (32, 4)])
def test_large_models_have_an_answer_by_default(gpus: int, tp: int) -> None:
    where = setting(LARGE, CLUSTER, gpus=gpus, context=131_072, tp=tp)
    found = compare(Question((where,), ("per_document_cp", "distca"), Source("prolong"), TABLE, 0.05, 1))
    assert len(found.outcomes) == 2 and not found.too_large
    for outcome in found.outcomes:
        assert "recompute" in outcome.describe() or "offload" in outcome.describe()
        assert outcome.peak_memory_gb * 1e9 <= CLUSTER.memory_bytes


def typed(options: dict[str, Any], message: str) -> dict[str, Any]:
    """The options after what a refusal says was typed too."""
    said = re.findall(r"--(\w+) (\d+|auto)", message[message.index("; give "):])
    assert said, message
    return options | {name: value if name == "recompute" else (int(value),) if name == "pp" else int(value)
                      for name, value in said}


def settle(model: str, **options: Any) -> tuple[Setting, ...]:
    return fitting_settings(model_named(model), CLUSTER, TABLE, StepAsked(**options))


@pytest.mark.parametrize(("model", "options"), [
    ("llama3-70b", {"gpus": 8, "tp": 8, "pp": (1,)}), ("llama3-70b", {"gpus": 16, "tp": 2, "pp": (1,)}),
    ("llama3-70b", {"gpus": 32, "tp": 1, "pp": (2,)}), ("llama3-405b", {"gpus": 64, "tp": 8, "pp": (1,)}),
    ("llama3-405b", {"gpus": 1}), ("llama3-405b", {"gpus": 1, "pp": (2,)}), ("deepseek-v3", {"gpus": 64, "ep": 1}),
    ("deepseek-v3", {"gpus": 24}), ("llama3-70b", {"gpus": 16, "recompute": "none"}),
    ("llama3-70b", {"gpus": 32, "pp": (4,), "recompute": "selective"}), ("llama3-8b", {"gpus": 1}),
    ("llama3-8b", {"gpus": 64, "sequences": 4096}), ("llama3-8b", {"gpus": 60, "tp": 8}),
    ("llama3-8b", {"gpus": 8, "tp": 1, "pp": (16,)})])
def test_remedies_work(model: str, options: dict[str, Any]) -> None:
    with pytest.raises(UserError) as refusal:
        settle(model, **options)
    for where in settle(model, **typed(options, str(refusal.value))):
        check_fits(where, Costs.of(where.model, CLUSTER, where.tp, TABLE))


@pytest.mark.parametrize("model", MODELS)
def test_defaults_are_never_refused(model: str) -> None:
    """Without a number of GPUs there is one that fits; with any, a refusal names a number that does."""
    for context in (1_000, 131_072, 524_288):
        assert settle(model, context=context)[0].num_pool >= 2
    if MODELS[model].num_layers >= 3:
        assert settle(model, pp=(3,))[0].num_data >= 1           # 64 GPUs would not divide
    for gpus in (1, 7, 60, 512):
        try:
            found = settle(model, gpus=gpus)
        except UserError as refused:
            assert least_bytes(setting(model_named(model), CLUSTER, gpus=gpus, context=131_072, tp=1), Costs.of(
                model_named(model), CLUSTER, 1, TABLE))[1] > CLUSTER.memory_bytes
            found = settle(model, **typed({"gpus": gpus}, str(refused)))
        assert all(least_bytes(where, Costs.of(where.model, CLUSTER, where.tp, TABLE))[1] <= CLUSTER.memory_bytes
                   for where in found)


def test_the_guide_says_what_is_chosen_and_refused() -> None:
    guide = (Path(distca.__file__).parents[1] / "docs/guide/simulate.md").read_text(encoding="utf-8")
    assert f"--strategies distca    # on {settle('deepseek-v3')[0].gpus} GPUs" in guide
    with pytest.raises(UserError) as refusal:
        settle("llama3-405b", gpus=4)
    head, _, remedy = str(refusal.value).partition(": ")
    assert f"distca: error: {head}: … ; give {remedy.partition('; give ')[2]}\n" in guide


@pytest.mark.parametrize(("options", "remedy"), [
    ({"gpus": 24, "tp": 8, "sequences": 1, "context": 1000}, {"context": 996}),
    ({"gpus": 16, "sequences": 7, "micro_batches": (2,)}, {"sequences": 6}),
    ({"model": "tiny", "gpus": 8, "pp": (4,)}, {"pp": (2,)})])
def test_what_does_not_divide_names_a_number_that_does(options: dict[str, Any], remedy: dict[str, Any]) -> None:
    options = {"model": "llama3-8b"} | options
    with pytest.raises(UserError) as refusal:
        settle(**options)
    assert typed(options, str(refusal.value)) == options | remedy
    assert settle(**options | remedy)


@pytest.mark.slow
def test_any_gpus_contexts_and_stages_are_answered_or_the_remedy_is() -> None:
    draw = random.Random(0)
    for _ in range(3000):
        model = draw.choice(list(MODELS))
        options: dict[str, Any] = {
            "gpus": draw.choice((draw.randint(1, 512), 2 ** draw.randint(0, 9))),
            "context": draw.choice((1000, 4096, 8960, 32_768, 65_536, 100_000, 131_072, 262_144, 524_288))}
        if draw.random() < 0.3:
            options["pp"] = (draw.choice([stages for stages in (1, 2, 4, 8) if stages <= MODELS[model].num_layers]),)
        try:
            settle(model, **options)
        except UserError as refused:
            settle(model, **typed(options, str(refused)))


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(12))
def test_defaults_have_an_answer(seed: int) -> None:
    """A whole comparison runs, also where the memory is only just enough."""
    draw = random.Random(seed)
    model, gpus = draw.choice(list(MODELS)), draw.choice((1, 2, 4, 6, 8, 12, 16, 24, 32))
    try:
        found = settle(model, gpus=gpus)
    except UserError as refused:
        found = settle(model, **typed({"gpus": gpus}, str(refused)))
    answer = compare(Question(found, ("fixed_packing", "distca"), Source("prolong"), TABLE, 0.05, 1))
    assert any(outcome.name == "distca" for outcome in answer.outcomes)


def test_memory_is_micro_batches_or_bytes() -> None:
    assert (parse_memory(None), parse_memory("4"), parse_memory("60GB"), parse_memory("60e9")) == (0.0, 4.0, 60e9, 60e9)
    for text in ("", "GB", "-1", "nan", "many", "0.1MB"):
        with pytest.raises(UserError, match="give micro-batches, such as 4, or bytes, such as 60GB"):
            parse_memory(text)


@pytest.mark.parametrize(("memory_", "said"), [(3.0, "'1f1b' the least; give --memory 4 or more"),
                                               (2e9, "give --memory ")])
def test_a_memory_that_no_order_keeps_to_is_refused(memory_: float, said: str) -> None:
    def question(most: float) -> Question:
        where = setting(MODEL, CLUSTER, gpus=64, context=65_536, pp=4, memory=most)
        return Question((where,), ("distca",), Source("prolong"), TABLE, 0.05, 1)

    with pytest.raises(UserError, match=re.escape(said)) as refusal:
        question(memory_)
    needed = parse_memory(re.search(r"--memory (\S+)", str(refusal.value))[1])  # type: ignore[index]
    (outcome,) = compare(question(needed)).outcomes
    assert outcome.choice is not None
    if memory_ < LEAST_BYTES:
        assert outcome.choice.order == "zb_h1"                  # keeps as little as 1f1b, in fewer ticks
    else:
        assert outcome.peak_memory_gb * 1e9 <= needed
