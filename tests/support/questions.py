"""Twenty questions for the calculator: every kind of source, model, cluster and division that it takes."""

from __future__ import annotations

from collections.abc import Mapping

FORM = {"kind": "typed", "lengths": "128k, 64k, 32k*2, 16k*2, 8k*4, 4k*48", "sampler": "prolong", "model": "llama3-8b",
        "cluster": "dgx-h200", "gpus": "64", "tp": "8", "pp": "1", "ep": "1", "context": "", "tokens_per_rank": "",
        "tolerance": "0.05", "recompute": "auto"}  # what the page opens with


def _form(**changes: str) -> dict[str, str]:
    return {**FORM, **changes}


QUESTIONS = (
    _form(),
    _form(lengths="4096*16", gpus="4", tp="1", model="tiny"),
    _form(lengths="777, 31_000, 5, 64k, 1, 12345", gpus="8", tp="2", context="8k", model="qwen3-0.6b"),
    _form(lengths="32k 16k*3 2k*8 700*9", gpus="8", tp="1", model="llama3.2-3b", recompute="full"),
    _form(lengths="1m, 4k*256", gpus="128", cluster="dgx-b200", context="64k"),
    _form(lengths="128k*2, 8k*32", gpus="32", tp="4", pp="2", model="qwen2.5-7b", cluster="dgx-h100"),
    _form(lengths="64k, 1k*64", gpus="16", tp="2", pp="4", model="llama3.2-1b", tolerance="0.1"),
    _form(lengths="256k, 100k, 30k*5, 10k*10", gpus="72", tp="8", cluster="gb200-nvl72", model="llama3-70b",
          context="36k"),
    _form(lengths="50_000, 1.5k*50", gpus="16", tp="4", model="mixtral-8x7b", ep="4", context="4k"),
    _form(lengths="128k, 4k*32", gpus="32", tp="8", model="llama-34b", tolerance="0", cluster="dgx-h100"),
    _form(lengths="128k, 4k*32", gpus="32", tp="8", model="llama-34b", tolerance="1"),
    _form(lengths="2.5k*3, 100*4000", gpus="16", tp="2", model="gemma3-1b", tokens_per_rank="50_000", context="96"),
    _form(lengths="9*9, 99*99, 999*99, 9999*9, 99999", gpus="24", tp="8", model="mistral-7b", context="3072"),
    _form(lengths="2k*512", gpus="64", tp="1", model="qwen3-8b", context="2k"),
    _form(kind="sampler"),
    _form(kind="sampler", gpus="256"),
    _form(kind="sampler", sampler="pretrain", gpus="128", context="64k"),
    _form(kind="sampler", sampler="lognormal", gpus="16", tp="2", model="phi3-mini", tokens_per_rank="16k",
          context="16k"),
    _form(kind="sampler", model="qwen3-30b-a3b", gpus="32", tp="4", ep="8"),
    _form(kind="sampler", pp="2", gpus="32", tp="4", recompute="selective", model="qwen2.5-14b"),
)
QUICK = 5  # whose steps are predicted in every run; the pipelines' take seconds


def written_out(text: str) -> str:
    """Write out repeats: 4k*3 is 4k,4k,4k."""
    pairs = (word.split("*") for word in text.replace(",", " ").split())
    return ",".join(",".join([length] * int(*times or ["1"])) for length, *times in pairs)


def question_of(form: Mapping[str, str]) -> dict[str, str]:
    """The question that the page asks for this form."""
    source = written_out(form["lengths"]) if form["kind"] == "typed" else form["sampler"]
    return {"source": source, **{name: form[name] for name in FORM if name not in ("kind", "lengths", "sampler")},
            "batches": "1"}


def commands_of(question: Mapping[str, str]) -> tuple[list[str], list[str]]:
    """`distca plan` and `distca simulate` for a question, as a person would write them."""
    count = {name: int(question[name]) for name in ("gpus", "tp", "pp")}

    def options(*names: str) -> list[str]:
        return [word for name in names if question[name] for word in (f"--{name.replace('_', '-')}", question[name])]

    return (["plan", question["source"], "--ranks", str(count["gpus"] // (count["tp"] * count["pp"])), "--json",
             *options("model", "tp", "cluster", "tokens_per_rank", "tolerance")],
            ["simulate", "--data", question["source"], "--strategies", "wlb_ideal,distca", "--json", *options(
                "model", "gpus", "tp", "pp", "ep", "context", "cluster", "recompute", "tolerance", "batches")])
