"""Files that nobody should get far with, by what they pretend to be. Every one is refused where it is read."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from distca.validation import UserError

ESCAPE = "\x1b]0;owned\x07\x1b[31m"
DIGITS = "9" * 400
TOO_MANY_DIGITS = "9" * 5000
DEEP = 100_000

# what a field that wants a number, and nothing near it, may hold instead
NO_NUMBERS = ("null", "true", '"3"', '"low"', "[]", "[3]", "{}", "NaN", "Infinity", "-Infinity", DIGITS)

WORKLOAD = {"name": "x", "ranks": 2, "tokens_per_rank": 64, "sequences": [[64], [32, 32]]}
SPAN = {"name": "forward", "lane": "linear", "start_seconds": 0.0, "stop_seconds": 1.0, "num_bytes": 0}
STRATEGY = {"tokens_per_second": 500.0, "step_seconds": 2.0, "idle_share": 0.25, "exposed_communication_share": 0.1,
            "peak_memory_gb": 60.0, "work_max_over_mean": 1.5, "speedup_over": {}}
SUMMARY = {"steps": 2, "tokens_per_second": 123.0, "work_before": 2.0, "work_after": 1.1, "exposed_share": 0.25,
           "memory_bytes": 5e9, "final_loss": 1.5}
TABLE = {"format": "distca-latency-table", "version": 1, "name": "t", "q_len": [128, 524288], "kv_len": [128, 524288],
         "forward_seconds": [[1e-6, 1e-3], [None, 2.0]], "backward_seconds": [[2e-6, 2e-3], [None, 4.0]],
         "peak_pairs_per_second": 1e11, "metadata": {"num_heads": 32, "num_kv_heads": 8, "head_dim": 128}}
CONFIG = {"model_type": "llama", "num_attention_heads": 4, "num_key_value_heads": 2, "hidden_size": 64,
          "intermediate_size": 128, "num_hidden_layers": 2, "vocab_size": 257}


def with_text(content: dict[str, Any], field: str, text: str) -> bytes:
    """JSON of the content with this text as a field's value, which need not be something Python could write."""
    return json.dumps({**content, field: "@@"}).replace('"@@"', text).encode()


def not_text() -> dict[str, bytes]:
    """What is no JSON, no TOML and no list of numbers, whatever was asked for."""
    return {
        "binary": bytes(range(256)) * 8, "utf16": "[1, 2]".encode("utf-16"), "nul": b"[1, 2\x00]",
        "deep_list": b"[" * DEEP, "deep_object": b'{"a":' * DEEP, "closed_deep_list": b"[" * DEEP + b"]" * DEEP,
        "digits": b"[" + TOO_MANY_DIGITS.encode() + b"]", "half_a_string": b'{"name": "x', "escape": ESCAPE.encode(),
    }


def documents() -> dict[str, bytes]:
    """Lengths and workloads."""
    found = dict(not_text())
    for at, text in enumerate((*NO_NUMBERS, "0", "-3", "2.5", "2147483648")):
        found[f"length_{at}"] = f"[4, {text}]".encode()
    for field in ("ranks", "tokens_per_rank"):
        for at, text in enumerate((*NO_NUMBERS, "0", "-1", "1000000000")):
            found[f"{field}_{at}"] = with_text(WORKLOAD, field, text)
    for at, text in enumerate(("5", "null", '""', json.dumps(ESCAPE), '"' + "x" * 1000 + '"', "[]")):
        found[f"name_{at}"] = with_text(WORKLOAD, "name", text)
    for at, text in enumerate(("5", "null", "[]", "[[]]", "[5]", '["64"]', "{}", f"[[{DIGITS}]]", "[[64.0, 64]]")):
        found[f"sequences_{at}"] = with_text(WORKLOAD, "sequences", text)
    return found | {"line_words": b"4\nfour\n", "line_digits": DIGITS.encode(), "line_zero": b"0\n", "empty": b"",
                    "object": b"{}", "string": b'"4"'}


def traces() -> dict[str, bytes]:
    """What `distca report` takes for a traced step."""
    def step(span: bytes | None = None, **changes: Any) -> bytes:
        text = json.dumps([{"rank": 0, "step": 1, "spans": ["@@"], **changes}])
        return text.encode().replace(b'"@@"', json.dumps(SPAN).encode() if span is None else span)

    found = dict(not_text())
    for field in ("start_seconds", "stop_seconds", "num_bytes"):
        for at, text in enumerate((*NO_NUMBERS, "-1e308", "1e308")):
            found[f"{field}_{at}"] = step(with_text(SPAN, field, text))
    for field in ("name", "lane"):
        for at, text in enumerate(("5", "null", "[]", '""', json.dumps(ESCAPE), '"' + "x" * 1000 + '"')):
            found[f"{field}_{at}"] = step(with_text(SPAN, field, text))
    for field in ("rank", "step"):
        for at, text in enumerate((*NO_NUMBERS, "-1", "1.0")):
            found[f"{field}_{at}"] = step(None, **{field: "##"}).replace(b'"##"', text.encode())
    return found | {"no_spans": b'[{"rank": 0, "step": 1}]', "spans_5": b'[{"rank": 0, "step": 1, "spans": 5}]',
                    "none": b"[]", "numbers": b"[1, 2]", "span_list": step(b"[]"), "bytes_nan": step(
                        with_text(SPAN, "num_bytes", "1.5")), "twice": step()[:-1] + b"," + step()[1:]}


def logs() -> dict[str, bytes]:
    """steps.jsonl."""
    found = dict(not_text())
    for at, text in enumerate((*NO_NUMBERS, "-1", "1.5")):
        found[f"step_{at}"] = f'{{"step": {text}, "loss": 1.0}}'.encode()
    for at, text in enumerate(("true", '"low"', "[]", "{}", DIGITS)):
        found[f"loss_{at}"] = f'{{"step": 1, "loss": {text}}}'.encode()
    return found | {"no_step": b'{"loss": 1}', "torn": b'{"step": 1}\n{"st', "list": b"[1]"}


def summaries() -> dict[str, bytes]:
    """summary.json and what `distca simulate --json` printed."""
    found = {f"summary_{at}": with_text(SUMMARY, "final_loss", text)
             for at, text in enumerate(("true", '"low"', "[]", "{}", DIGITS))}
    for at, field in enumerate(SUMMARY):
        if field != "tokens_per_second":
            found[f"without_{at}"] = json.dumps({key: value for key, value in SUMMARY.items() if key != field}).encode()
    for at, text in enumerate(NO_NUMBERS):
        found[f"strategy_{at}"] = b'{"strategies": {"a": ' + with_text(STRATEGY, "idle_share", text) + b"}}"
    for at, text in enumerate(("5", "null", "[1]", '{"a": "2"}', '{"b": 2}', f'{{"a": {DIGITS}}}')):
        found[f"speedup_{at}"] = b'{"strategies": {"a": ' + with_text(STRATEGY, "speedup_over", text) + b"}}"
    for at, text in enumerate(("5", "[1]", "[1, 2, 3]", '["1", "2"]', "[0, 0]", "[-1, 2]", f"[1, {DIGITS}]")):
        found[f"range_{at}"] = (b'{"tokens_per_step": 10, "strategies": {"a": '
                                + with_text(STRATEGY, "step_seconds_range", text) + b"}}")
    for at, name in enumerate((ESCAPE, "", "x" * 1000)):
        found[f"strategy_name_{at}"] = json.dumps({"strategies": {name: STRATEGY}}).encode()
    return found | {"strategies_5": b'{"strategies": 5}', "strategies_none": b'{"strategies": {}}',
                    "chrome": b'{"traceEvents": []}', "tokens": b'{"tokens_per_step": "x", "strategies": {"a": {}}}'}


def tables() -> dict[str, bytes]:
    """Latency tables."""
    found = dict(not_text())
    for at, text in enumerate((*NO_NUMBERS, "0", "-1", "1e308")):
        found[f"peak_{at}"] = with_text(TABLE, "peak_pairs_per_second", text)
        if text != "null":
            found[f"seconds_{at}"] = with_text(TABLE, "forward_seconds", f"[[1e-6, {text}], [null, 2.0]]")
    for at, text in enumerate(("5", "null", "[128]", "[524288, 128]", "[0, 128]", f"[1, {DIGITS}]", '["128", "256"]',
                               json.dumps(list(range(1, 200))))):
        found[f"kv_len_{at}"] = with_text(TABLE, "kv_len", text)
    for at, text in enumerate(("5", "null", json.dumps(ESCAPE), '""')):
        found[f"name_{at}"] = with_text(TABLE, "name", text)
    for at, text in enumerate(("5", "[]", '{"num_heads": 0}', '{"num_heads": "32"}', f'{{"head_dim": {DIGITS}}}')):
        found[f"metadata_{at}"] = with_text(TABLE, "metadata", text)
    for at, text in enumerate(('{"num_workers": 1e308}', f'{{"num_workers": {DIGITS}}}', '{"launch_seconds": 5}')):
        facts = '{"num_workers": 1, "query_rows": 1, "key_tokens": 1, "launch_seconds": [0, 0], "idle_speedup": [1, 1]}'
        work_list = facts[:-1] + ", " + text[1:]
        about = f'{{"num_heads": 32, "num_kv_heads": 8, "head_dim": 128, "work_list": {work_list}}}'
        found[f"work_list_{at}"] = with_text(TABLE, "metadata", about)
    return found | {"version": with_text(TABLE, "version", "2"), "format": with_text(TABLE, "format", '"x"')}


TOML_VALUES = ("true", '"fast"', "[1]", "[[[1]]]", "{a = 1}", "nan", "inf", DIGITS, "1979-05-27")


def tomls() -> dict[str, bytes]:
    """What is no TOML, or more of it than anybody writes."""
    return {
        "binary": bytes(range(256)), "utf16": "a = 1".encode("utf-16"), "open": b"[run", "no_value": b"a =",
        "deep_list": b"a = " + b"[" * DEEP, "deep_inline": b"a = " + b"{a=" * 20_000, "long": b"#" * 2**18,
        "dotted": b".".join([b"a"] * 50_000) + b" = 1",
        "dotted_lines": b"\n".join(b".".join([b"a"] * 500) + b".b%d = 1" % at for at in range(200)),
        "dotted_quoted": b".".join([b'"a"'] * 30_000) + b" = 1", "header": b"[" + b".".join([b"a"] * 60_000) + b"]",
        "word": b"a" * 100_000, "spaces": b"a" + b" " * 100_000 + b".", "quotes": b'"' * 100_001,
        "digits": b"a = " + TOO_MANY_DIGITS.encode(), "escape": f"a = '{ESCAPE}'".encode(), "twice": b"a = 1\na = 1",
    }


def clusters() -> dict[str, bytes]:
    found = dict(tomls())
    for field in ("gpus_per_node", "memory_bytes", "inter_node_bandwidth", "intra_node_latency_seconds"):
        for at, text in enumerate((*TOML_VALUES, "-1", "1e308")):
            found[f"{field}_{at}"] = f'base = "dgx-h200"\n{field} = {text}'.encode()
    for at, text in enumerate(("5", "[1]", "['dgx-h200']", "{a = 1}", "'dgx'", "''", json.dumps(ESCAPE))):
        found[f"base_{at}"] = f"base = {text}".encode()
        if at != 4:
            found[f"name_{at}"] = f'base = "dgx-h200"\nname = {text if at != 2 else "nan"}'.encode()
    return found | {"unknown": b'base = "dgx-h200"\nspeed = 1', "nothing": b"",
                    "zero": b'base = "dgx-h200"\nmemory_bytes = 0'}


def settings() -> dict[str, bytes]:
    """Settings of `distca train`."""
    found = dict(tomls())
    for field in ("run.steps", "run.timeout_seconds", "batch.micro_batches", "optimizer.lr"):
        for at, text in enumerate((*TOML_VALUES, "-1", "1" + "0" * 18)):
            section, key = field.split(".")
            found[f"{key}_{at}"] = f"[{section}]\n{key} = {text}".encode()
    return found | {"section": b"[runs]\nsteps = 1", "outside": b"steps = 1", "section_5": b"run = 5",
                    "inside": b"[run.steps]\na = 1", "array": b"[[run]]\nsteps = 1"}


def configs() -> dict[str, bytes]:
    """config.json of a model to load."""
    found = dict(not_text())
    for field in ("num_attention_heads", "hidden_size", "num_hidden_layers", "vocab_size"):
        for at, text in enumerate((*NO_NUMBERS, "0", "-1", "1.5")):
            found[f"{field}_{at}"] = with_text(CONFIG, field, text)
    for at, text in enumerate(("5", "[1]", '"x"', '{"rope_type": "llama3"}', '{"rope_type": "llama3", "factor": "8"}',
                               '{"rope_type": "yarn"}', '{"rope_theta": []}', f'{{"rope_theta": {DIGITS}}}')):
        found[f"rope_{at}"] = with_text(CONFIG, "rope_parameters", text)
    return found | {"list": b"[]", "gpt2": with_text(CONFIG, "model_type", '"gpt2"'), "empty": b"{}",
                    "heads": with_text(CONFIG, "num_key_value_heads", "3")}


def refused_changes(path: Path, read: Callable[[], object]) -> int:
    """Change bytes near the end of a file, again and again: it is read, or refused in one line. Count refusals."""
    whole, random, num_refused = path.read_bytes(), np.random.default_rng(0), 0
    for _ in range(60):
        changed = bytearray(whole)
        for at in random.integers(max(0, len(whole) - 2_000), len(whole), 3):
            changed[at] ^= int(random.integers(1, 256))
        path.write_bytes(changed)
        try:
            read()
        except ValueError as error:
            assert type(error) is UserError and str(path) in str(error) and "\n" not in str(error)
            num_refused += 1
    return num_refused
