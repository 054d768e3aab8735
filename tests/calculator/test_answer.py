"""The calculator's answers are the commands' JSON, its memory adds up on paper, and its mistakes name what is wrong."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import distca
from tests.support.modules import load
from tests.support.questions import QUESTIONS, QUICK, commands_of, question_of

HERE = Path(distca.__file__).parents[1] / "docs/calculator"
Run = Callable[..., tuple[int, str, str]]
answering = load(HERE / "answer.py")


def answered(question: dict[str, str], part: str) -> dict[str, Any]:
    return json.loads(answering.answer(json.dumps(question), part))


def said(run: Run, command: list[str]) -> tuple[dict[str, Any], str]:
    code, out, err = run(*command)
    assert code == 0, err
    return json.loads(out), err


@pytest.mark.parametrize("number", range(len(QUESTIONS)))
def test_a_plan_is_the_commands(run: Run, number: int) -> None:
    question = question_of(QUESTIONS[number])
    found, expected = answered(question, "plan"), said(run, commands_of(question)[0])[0]
    del expected["plan_seconds"], expected["next"]               # the latter is the command to type next
    assert {name: found[name] for name in expected} == expected
    assert max(found["work_before"]) == pytest.approx(expected["work_max_over_mean_before"], rel=1e-12)
    assert sum(found["work_before"]) == pytest.approx(sum(found["work_after"])) == pytest.approx(expected["ranks"])
    assert sum(found["sent"]) == sum(found["received"]) == expected["bytes_total"]


@pytest.mark.parametrize("number", range(QUICK))
def test_a_prediction_is_the_commands(run: Run, number: int) -> None:
    question = question_of(QUESTIONS[number])
    found, (expected, remarks) = answered(question, "predict"), said(run, commands_of(question)[1])
    assert found == {**expected, "remarks": remarks}


@pytest.mark.slow
@pytest.mark.parametrize("number", range(QUICK, len(QUESTIONS)))
def test_every_prediction_is_the_commands(run: Run, number: int) -> None:
    test_a_prediction_is_the_commands(run, number)


def test_memory_adds_up_on_paper() -> None:
    """llama3-8b on 64 GPUs, tp 8: an eighth of its parameters in bf16, the rest of Adam over 8 data ranks."""
    found = answered(question_of(QUESTIONS[0]), "fit")
    layer = 4096 * (2 * 4096 + 2 * 1024) + 3 * 4096 * 14336      # Q, O, K, V; gate, up, down; norms are not counted
    parameters = (32 * layer + 2 * 4096 * 128256) / 8
    states = parameters * (2 + 4 / 8 + 12 / 8)                   # weights whole, gradients and Adam sharded
    full = 4096 / 8 * 2 + (2 * 4096 + 2 * 1024) / 8 * 2 + 32 / 8 * 4  # layer input; Q, out, K, V; log-sum-exp
    none = full + 3 * 4096 / 8 * 2 + 3 * 14336 / 8 * 2           # both norms, a second input; gate, up, product
    by_mode = {one["recompute"]: one for one in found["modes"]}
    assert by_mode["none"]["states"] == states
    assert by_mode["none"]["activations"] == 65536 * 32 * none
    assert by_mode["full"]["activations"] == 65536 * (32 * full + none - full)  # and one layer, recomputed
    assert (found["refusal"], found["capacity"], found["context"]) == (None, 141e9, 131072)


@pytest.mark.parametrize(("changes", "part", "words"), [
    ({"gpus": "60"}, "plan", "gpus is 60"), ({"gpus": "many"}, "plan", "gpus"), ({"source": "4k,x"}, "plan", "4k,x"),
    ({"source": "5", "gpus": "64"}, "plan", "5 tokens"), ({"tolerance": "2"}, "plan", "tolerance"),
    ({"model": "gpt9"}, "fit", "gpt9"), ({"context": "256k"}, "fit", "context"), ({"pp": "x"}, "plan", "pp"),
    ({"tokens_per_rank": "1g"}, "plan", "tokens_per_rank"),
])
def test_mistakes_are_named(changes: dict[str, str], part: str, words: str) -> None:
    assert words in answered({**question_of(QUESTIONS[0]), **changes}, part)["error"]


def test_what_does_not_fit_comes_with_a_remedy() -> None:
    found = answered({**question_of(QUESTIONS[0]), "model": "llama3-405b", "gpus": "8"}, "fit")
    assert "cannot hold 'llama3-405b'" in found["refusal"] and "give --" in found["refusal"]
    assert all(one["total"] > found["capacity"] for one in found["modes"])
