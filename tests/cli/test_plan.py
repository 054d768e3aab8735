"""The command line as a user meets it: one JSON object, a table that fits, and one line for every mistake."""

import inspect
import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import distca
from distca.cli.plan import plan_command
from distca.cli.report import report_command
from distca.corpus.lengths import standard_library_lengths
from distca.cost.latency_table import analytic_table
from distca.models import model_named
from distca.train.settings import Settings
from distca.workload.documents import sample_lengths

ROOT = Path(distca.__file__).parents[1]
JSON_KEYS = {
    "placement_used", "ranks_per_node", "bytes_between_nodes", "bytes_between_nodes_max", "bytes_between_pods",
    "bytes_between_pods_max", "verdict", "next",
    "ranks", "servers", "tasks", "valid", "tolerance", "work_max_over_mean_before", "work_max_over_mean", "bytes_total",
    "bytes_sent_max", "bytes_received_max", "bytes_all_gather", "bytes_backward_total", "smallest_shard",
    "plan_seconds", "model", "tp", "placement", "tokens_per_rank", "documents", "limit", "step_seconds_by_tolerance",
             "attention_seconds", "attention_seconds_backward", "work_max_over_mean_backward", "exchange_seconds"}


@pytest.fixture
def run_json(run: Callable[..., tuple[int, str, str]]) -> Callable[..., dict[str, Any]]:
    def call(*arguments: Any) -> dict[str, Any]:
        code, out, err = run(*arguments, "--json")
        assert (code, err) == (0, "")
        assert out.count("\n") == 1
        return json.loads(out)

    return call


def _save_workload(path: Path, name: str, ranks: int, tokens_per_rank: int, *sequences: list[int]) -> None:
    path.write_text(json.dumps({"name": name, "ranks": ranks, "tokens_per_rank": tokens_per_rank,
                                "sequences": sequences}))


def _work_in_order(lengths: list[int] | np.ndarray, ranks: int) -> float:
    """Max/mean of work per rank, token by token: a token at position p sees p + 1 keys."""
    pairs = np.concatenate([np.arange(1, length + 1) for length in lengths]).astype(float)
    work = pairs.reshape(ranks, -1).sum(axis=1)
    return work.max() / work.mean()


def _one_line_error(result: tuple[int, str, str]) -> str:
    code, out, err = result
    assert (code, out) == (2, "")
    assert err.startswith("distca: error: ") and err.count("\n") == 1
    return err


def test_json_says_what_the_library_says(run_json: Callable[..., dict[str, Any]]) -> None:
    said = run_json("plan", "prolong", "--ranks", 4, "--tokens-per-rank", 32768, "--seed", 3, "--placement", "given")
    lengths = sample_lengths("prolong", 4 * 32768, seed=3)
    plan = distca.plan(distca.pack(lengths, ranks=4), "llama3-8b")
    summary = plan.summary()
    assert said.keys() == JSON_KEYS
    assert (said["ranks"], said["servers"], said["documents"]) == (4, 4, len(lengths))
    assert said["valid"] is True and said["limit"] is None
    assert said["work_max_over_mean_before"] == pytest.approx(_work_in_order(lengths, 4))
    assert said["work_max_over_mean"] == pytest.approx(summary.work_max_over_mean) and summary.num_moved > 0
    assert said["work_max_over_mean"] <= 1.05 < said["work_max_over_mean_before"]
    assert said["bytes_total"] == summary.bytes_total > 0
    assert said["bytes_sent_max"] == summary.bytes_sent.max()
    assert said["bytes_received_max"] == summary.bytes_received.max()
    assert said["bytes_all_gather"] == summary.bytes_all_gather
    assert said["tasks"] == summary.num_tasks
    assert said["plan_seconds"] > 0
    assert said["attention_seconds"] is said["attention_seconds_backward"] is said["exchange_seconds"] is None
    assert said["work_max_over_mean_backward"] == said["work_max_over_mean"]


def test_with_a_table_seconds_are_told_both_ways_and_over_its_network(run_json: Callable[..., dict[str, Any]],
                                                                      tmp_path: Path) -> None:
    table = analytic_table(model_named("llama3-8b"), 550e12)
    network = {"backend": "gloo", "num_ranks": 2, "latency_seconds": 1e-3, "bandwidth": 1e10}
    replace(table, metadata={**table.metadata, "network": network}).save(tmp_path / "table.json")
    said = run_json("plan", "prolong", "--ranks", 4, "--tokens-per-rank", 32768, "--cost", tmp_path / "table.json")
    assert said["attention_seconds_backward"] == pytest.approx(2.5 * said["attention_seconds"], rel=0.1)
    assert max(said["work_max_over_mean"], said["work_max_over_mean_backward"]) <= 1.05
    busiest = max(said["bytes_sent_max"], said["bytes_received_max"])
    assert said["exchange_seconds"] == pytest.approx(1e-3 + busiest / 1e10)


def test_heads_are_not_scaled_in_silence_and_head_dims_not_at_all(run: Callable[..., tuple[int, str, str]],
                                                                  tmp_path: Path) -> None:
    analytic_table(model_named("llama3-8b"), 550e12).save(tmp_path / "table.json")
    options = ("prolong", "--ranks", 2, "--tokens-per-rank", 4096, "--cost", tmp_path / "table.json")
    code, _, error = run("plan", *options, "--model", "llama-34b")
    assert code == 0 and "64 query and 8 KV heads is scaled from" in error
    code, _, error = run("plan", *options)
    assert (code, error) == (0, "")
    code, _, error = run("plan", *options, "--model", "tiny")
    assert code == 2 and "head_dim 128 but model 'tiny' has 32; run distca profile --model tiny" in error


def test_defaults_of_a_sampler(run_json: Callable[..., dict[str, Any]]) -> None:
    said = run_json("plan", "pretrain")
    assert (said["ranks"], said["tokens_per_rank"], said["tolerance"], said["model"], said["placement"]) == (
        8, 65536, 0.05, "llama3-8b", "balanced")


def test_balanced_placement_bounds_work_with_the_same_documents(run_json: Callable[..., dict[str, Any]]) -> None:
    options = ("plan", "prolong", "--ranks", 8, "--seed", 1)
    given, balanced = run_json(*options, "--placement", "given"), run_json(*options)
    assert balanced["work_max_over_mean"] <= 1.05
    assert balanced["work_max_over_mean_before"] == given["work_max_over_mean_before"]
    assert balanced["documents"] == given["documents"]


@pytest.mark.parametrize("placement", ["given", "balanced"])
def test_dedicated_servers_share_the_work(run_json: Callable[..., dict[str, Any]], placement: str) -> None:
    options = ("plan", "prolong", "--ranks", 4, "--tokens-per-rank", 32768, "--placement", placement)
    alone, helped = run_json(*options), run_json(*options, "--dedicated", 4)
    assert (helped["ranks"], helped["servers"]) == (4, 8)
    assert helped["work_max_over_mean"] <= 1.05 and helped["valid"]
    assert helped["work_max_over_mean_before"] == alone["work_max_over_mean_before"]
    assert helped["bytes_total"] > alone["bytes_total"]


def test_tensor_parallelism_divides_the_bytes(run_json: Callable[..., dict[str, Any]]) -> None:
    whole, half = (run_json("plan", "prolong", "--ranks", 4, "--tp", tp) for tp in (1, 2))
    assert half["bytes_total"] * 2 == whole["bytes_total"]


def test_workload_file_compares_with_its_documents_in_order(run_json: Callable[..., dict[str, Any]],
                                                            tmp_path: Path) -> None:
    sequences = ([1500, 500, 48], [100] * 20 + [48], [3000, 1096])
    _save_workload(tmp_path / "batch.json", "three", 4, 2048, *sequences)
    said = run_json("plan", "batch.json", "--ranks", 4)
    assert (said["ranks"], said["tokens_per_rank"], said["documents"], said["valid"]) == (4, 2048, 26, True)
    assert said["work_max_over_mean_before"] == pytest.approx(_work_in_order(np.concatenate(sequences), 4))


@pytest.mark.parametrize("text", ["[900, 100, 300, 303]", "900\n100 # two\n\n300\n303\n"])
def test_lengths_file_fills_its_ranks_and_says_so(run: Callable[..., tuple[int, str, str]],
                                                  run_json: Callable[..., dict[str, Any]], tmp_path: Path,
                                                  text: str) -> None:
    (tmp_path / "lengths.txt").write_text(text)
    said = run_json("plan", "lengths.txt", "--ranks", 2)
    assert (said["tokens_per_rank"], said["documents"]) == (1603 // 2, 4)
    code, out, _ = run("plan", "lengths.txt", "--ranks", 2, "--tokens-per-rank", 500)
    assert code == 0 and "lengths.txt: 4 documents, 1,603 tokens" in out and "2 ranks of 500 tokens" in out
    assert "1 batch, all that it fills" in out


def test_standard_library_fills_any_number_of_ranks(run_json: Callable[..., dict[str, Any]]) -> None:
    assert run_json("plan", "stdlib")["tokens_per_rank"] == 65536
    total = int(standard_library_lengths().sum())
    many = total // 65536 + 10
    assert run_json("plan", "stdlib", "--ranks", many)["tokens_per_rank"] == total // many


def test_bare_sampler_name_is_the_sampler_and_a_path_is_the_file(run_json: Callable[..., dict[str, Any]],
                                                                 tmp_path: Path) -> None:
    (tmp_path / "prolong").write_text("[600, 424]")
    (tmp_path / "mine").write_text("[600, 424]")
    assert run_json("plan", "prolong")["tokens_per_rank"] == 65536
    assert run_json("plan", "./prolong", "--ranks", 1)["tokens_per_rank"] == 1024
    assert run_json("plan", "mine", "--ranks", 1)["tokens_per_rank"] == 1024


def test_without_spanning_documents_end_at_ranks(run_json: Callable[..., dict[str, Any]], tmp_path: Path) -> None:
    (tmp_path / "lengths.json").write_text("[700, 700, 648]")
    said = run_json("plan", "lengths.json", "--ranks", 2, "--no-spanning")
    assert said["documents"] == 4
    assert said["work_max_over_mean_before"] == pytest.approx(_work_in_order([700, 324, 376, 648], 2))
    _save_workload(tmp_path / "batch.json", "two", 2, 1024, [700, 700, 648])
    from_file = run_json("plan", "batch.json", "--no-spanning")
    assert from_file["work_max_over_mean_before"] == pytest.approx(said["work_max_over_mean_before"])


def test_max_document_cuts(run_json: Callable[..., dict[str, Any]], tmp_path: Path) -> None:
    (tmp_path / "lengths.json").write_text("[700, 100, 700]")
    said = run_json("plan", "lengths.json", "--ranks", 1, "--max-document", 200)
    assert said["tokens_per_rank"] == 200 + 100 + 200


def test_latency_table_measures_work_in_seconds(run_json: Callable[..., dict[str, Any]], tmp_path: Path) -> None:
    table = analytic_table(model_named("llama3-8b"), 500e12, max_kv_len=65536)
    table.save(tmp_path / "table.json")
    options = ("plan", "prolong", "--ranks", 4, "--tokens-per-rank", 16384, "--max-document", 16384, "--no-spanning")
    pairs, seconds = run_json(*options), run_json(*options, "--cost", "table.json")
    lengths = sample_lengths("prolong", 4 * 16384, seed=0, max_document=16384)
    cut = np.diff(np.union1d(np.cumsum(lengths), 16384 * np.arange(1, 5)), prepend=0)
    rank = (np.cumsum(cut) - 1) // 16384
    work = np.bincount(rank, weights=[table.seconds(int(n), int(n)) for n in cut])
    assert seconds["work_max_over_mean_before"] == pytest.approx(work.max() / work.mean())
    assert seconds["work_max_over_mean_before"] != pytest.approx(pairs["work_max_over_mean_before"], rel=1e-6)
    assert seconds["work_max_over_mean"] <= 1.05
    for placement in ("given", "balanced"):
        said = run_json("plan", "prolong", "--ranks", 4, "--max-document", 65536, "--placement", placement, "--cost",
                        "table.json")
        assert said["valid"] and said["work_max_over_mean"] <= 1.05


@pytest.mark.parametrize("ranks", [1, 4, 16, 17, 300])
def test_tables_and_bars_fit_a_terminal(run: Callable[..., tuple[int, str, str]], ranks: int) -> None:
    code, out, err = run("plan", "prolong", "--ranks", ranks, "--tokens-per-rank", 8192, "--max-document", 8192)
    assert (code, err) == (0, "")
    assert max(len(line) for line in out.splitlines()) <= 80
    for words in ("before", "after", "busiest sender", "busiest receiver", "all-gather", "smallest shard", "planning",
                  "bf16"):
        assert words in out


def test_plot_is_written(run: Callable[..., tuple[int, str, str]], tmp_path: Path) -> None:
    code, out, _ = run("plan", "prolong", "--ranks", 4, "--plot", "plan.png")
    assert code == 0 and "plan.png" in out
    assert (tmp_path / "plan.png").read_bytes().startswith(b"\x89PNG")


def test_a_plan_that_fails_its_proof_is_not_passed_over(run: Callable[..., tuple[int, str, str]],
                                                        monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("distca.cli.plan._validation_error", lambda plan: "task 7 is nowhere")
    code, out, _ = run("plan", "prolong", "--ranks", 2, "--json")
    assert code == 1 and json.loads(out)["valid"] is False
    code, out, _ = run("plan", "prolong", "--ranks", 2)
    assert code == 1 and "task 7 is nowhere" in out


BAD_LENGTHS = [
    ("[4, 0]", ["lengths[1]", "0"]), ("[4, -3]", ["lengths[1]", "-3"]), ("[4, 2.5]", ["lengths[1]", "2.5"]),
    ("[]", ["lengths", "empty"]), ("", ["lengths", "empty"]), ("4\nfour\n", ["line 2", "four"]),
    ("4\n2.5\n", ["line 2", "2.5"]), ("[4, ", ["broken JSON", "line 1"]), ('{"a": 1}', ["not a workload", "'a'"]),
    ('{"name": "x", "ranks": 2, "tokens_per_rank": 64, "sequences": [[64, 63]]}', ["sequences[0]", "127", "64"]),
    ('{"name": "x", "ranks": 3, "tokens_per_rank": 64, "sequences": [[64, 64]]}', ["ranks", "3", "2"]),
    ('{"name": "x", "ranks": 1, "tokens_per_rank": 64, "sequences": [[64.0]]}', ["sequences[0]", "64.0"]),
    ("[3]", ["ranks", "8", "3 tokens"]),
]


@pytest.mark.parametrize(("text", "fragments"), BAD_LENGTHS)
def test_bad_files_get_one_line(run: Callable[..., tuple[int, str, str]], tmp_path: Path, text: str,
                                fragments: list[str]) -> None:
    (tmp_path / "source.json").write_text(text)
    error = _one_line_error(run("plan", "source.json"))
    for fragment in ("source.json", *fragments):
        assert fragment in error


BAD_OPTIONS = [
    (["prolonk"], ["SOURCE", "'prolonk'", "'prolong'", "file"]),
    (["no/such.json"], ["no/such.json", "no such file", "prolong"]),
    (["."], ["directory"]),
    (["prolong", "--tolerance", "1.5"], ["tolerance", "1.5", "0 to 1"]),
    (["prolong", "--tolerance", "-0.1", "--placement", "balanced"], ["tolerance", "-0.1"]),
    (["prolong", "--tolerance", "nan"], ["tolerance", "nan"]),
    (["prolong", "--tolerance", "much"], ["--tolerance"]),
    (["prolong", "--model", "lama3-8b"], ["model", "'lama3-8b'", "'llama3-8b'"]),
    (["prolong", "--tp", "3"], ["tp", "3", "32 heads"]),
    (["prolong", "--tp", "0"], ["tp", "0"]),
    (["prolong", "--dedicated", "-1"], ["dedicated", "-1"]),
    (["prolong", "--ranks", "0"], ["ranks", "0"]),
    (["prolong", "--ranks", "2.5"], ["--ranks"]),
    (["prolong", "--ranks", "999999999"], ["ranks", "at most"]),
    (["prolong", "--tokens-per-rank", "-5"], ["tokens_per_rank", "-5"]),
    (["prolong", "--max-document", "0"], ["max_document", "0"]),
    (["prolong", "--seed", "-1"], ["seed", "-1"]),
    (["stdlib", "--seed", "1"], ["seed", "1", "stdlib"]),
    (["stdlib", "--tokens-per-rank", "99999999"], ["tokens", "lower ranks"]),
    (["prolong", "--placement", "best"], ["placement", "'best'", "balanced"]),
    (["prolong", "--no-spanning", "--tokens-per-rank", "600"], ["tokens", "600", "tokens_per_rank"]),
    (["prolong", "--cost", "none.json"], ["none.json", "no such file"]),
    (["prolong", "--plot", "no/folder/x.png"], ["plot", "no/folder", "does not exist"]),
    (["prolong", "--plot", "x.txt"], ["plot", "x.txt", ".png"]),
    (["prolong", "--plot", "folder.png"], ["plot", "folder.png", "cannot be written"]),
    (["prolong", "--bogus"], ["--bogus"]),
    ([], ["SOURCE"]),
]


@pytest.mark.parametrize(("options", "fragments"), BAD_OPTIONS, ids=lambda value: " ".join(value))
def test_bad_options_get_one_line(run: Callable[..., tuple[int, str, str]], tmp_path: Path, options: list[str],
                                  fragments: list[str]) -> None:
    (tmp_path / "folder.png").mkdir()
    error = _one_line_error(run("plan", *options))
    for fragment in fragments:
        assert fragment in error


@pytest.mark.parametrize(("option", "value"), [("--ranks", 3), ("--tokens-per-rank", 32), ("--max-document", 10)])
def test_options_may_not_contradict_a_workload_file(run: Callable[..., tuple[int, str, str]], tmp_path: Path,
                                                    option: str, value: int) -> None:
    _save_workload(tmp_path / "batch.json", "two", 2, 64, [64], [32, 32])
    error = _one_line_error(run("plan", "batch.json", option, value))
    assert option[2:].replace("-", "_") in error and str(value) in error and "batch.json" in error


def test_latency_table_must_reach_the_longest_document(run: Callable[..., tuple[int, str, str]],
                                                       tmp_path: Path) -> None:
    analytic_table(model_named("llama3-8b"), 500e12, max_kv_len=1024).save(tmp_path / "short.json")
    error = _one_line_error(run("plan", "prolong", "--cost", "short.json"))
    assert "1024" in error and "--max-document" in error
    (tmp_path / "foreign.json").write_text("[1, 2]")
    assert "foreign.json" in _one_line_error(run("plan", "prolong", "--cost", "foreign.json"))


def _subprocess(*arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-m", "distca", *arguments], cwd=cwd, capture_output=True, text=True,
                          env={**os.environ, "PYTHONPATH": str(ROOT)})


def test_the_true_command(tmp_path: Path) -> None:
    good = _subprocess("plan", "lognormal", "--ranks", "4", "--json", cwd=tmp_path)
    assert good.returncode == 0 and good.stderr == ""
    assert json.loads(good.stdout)["valid"] is True
    bad = _subprocess("plan", "prolong", "--tolerance", "7", cwd=tmp_path)
    assert (bad.returncode, bad.stdout) == (2, "") and bad.stderr.count("\n") == 1
    assert _subprocess("--version", cwd=tmp_path).stdout.strip() == distca.__version__


def _blocks(name: str, language: str) -> str:
    text = (ROOT / name).read_text(encoding="utf-8")
    return "".join(re.findall(rf"^```{language}\n(.*?)^```", text, re.DOTALL | re.MULTILINE))


@pytest.mark.parametrize("name", ["README.md", "docs/guide/plan.md", "docs/design/runtime.md"])
def test_every_command_of_the_guides_runs(run: Callable[..., tuple[int, str, str]], monkeypatch: pytest.MonkeyPatch,
                                          name: str) -> None:
    """Python blocks first, as they write files that commands read; `make` lines need only be targets."""
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    program = _blocks(name, "python")
    assert "distca.plan" in program
    subprocess.run([sys.executable, "-c", program], check=True, capture_output=True)
    targets = re.findall(r"^(\w+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)
    planned = 0
    for line in _blocks(name, "bash").splitlines():
        command, *arguments = shlex.split(line, comments=True)
        if command == "make":
            assert arguments[0] in targets
        elif command == "distca" and arguments[0] == "train":    # one short step of it
            short = ["--run.steps", "1", "--batch.tokens_per_rank", "128", "--log.folder", os.path.abspath("log"),
                     "--log.trace_step", "0"]
            done = subprocess.run([sys.executable, "-m", "distca", *arguments, *short], cwd=ROOT, capture_output=True)
            assert done.returncode == 0, (line, done.stderr)
        elif command in ("distca", ".venv/bin/distca"):
            code, _, err = run(*arguments, *(("--workers", "1") if arguments[0] == "simulate" else ()))
            assert (code, err) == (0, ""), line
            planned += 1
        else:
            subprocess.run(line, shell=True, check=True)
    assert planned > 0


def test_benchmark_measures_a_folder_against_a_reference(tmp_path: Path) -> None:
    folder = tmp_path / "batches"
    folder.mkdir()
    _save_workload(folder / "skewed.json", "skewed", 4, 4096, [4096], [512] * 8, [256] * 16, [2048, 2048])
    theirs = {"skewed": {"imbalance": 2.0, "bytes_total": 1e6, "bytes_sent_max": 1e6, "bytes_received_max": 1e6,
                         "plan_seconds": 1.0, "shards_lt128": 3}}
    (tmp_path / "theirs.json").write_text(json.dumps(theirs))
    done = subprocess.run(
        [sys.executable, str(ROOT / "benchmarks/planner.py"), str(folder), "--reference", str(tmp_path / "theirs.json"),
         "--output", str(tmp_path / "out" / "planner.json")],
        capture_output=True, text=True, env={**os.environ, "PYTHONPATH": str(ROOT)})
    assert done.returncode == 0, done.stderr
    written = json.loads((tmp_path / "out" / "planner.json").read_text())
    assert [row["placement"] for row in written["rows"]] == ["given", "balanced"]
    for row in written["rows"]:
        assert row["valid"] and row["equal_tokens"] and row["shards_under_tile"] == 0
        assert row["work_max_over_mean_before"] == pytest.approx(
            _work_in_order([4096, *[512] * 8, *[256] * 16, 2048, 2048], 4))
        assert row["ratios"]["imbalance"] == pytest.approx(row["work_max_over_mean"] / 2.0)
        assert row["ratios"]["bytes_total"] == pytest.approx(row["bytes_total"] / 1e6)
    assert written["host"]["numpy"] == np.__version__
    assert "skewed" in done.stdout


def _said(run: Callable[..., tuple[int, str, str]], *arguments: Any) -> tuple[list[str], str]:
    """The paragraphs of a command's output, and its last line."""
    code, out, err = run(*arguments)
    assert (code, err) == (0, "")
    return out.split("\n\n"), out.rstrip("\n").rpartition("\n")[2].strip()


def test_the_verdict_comes_first_and_names_what_it_is_over(run: Callable[..., tuple[int, str, str]],
                                                           run_json: Callable[..., dict[str, Any]]) -> None:
    options = ("plan", "prolong", "--ranks", 4)
    said = run_json(*options)
    paragraphs, last = _said(run, *options)
    verdict = " ".join(paragraphs[1].split("\n  ")[0].split())
    assert verdict.startswith(said["verdict"]) and last == said["next"]
    before, after = said["work_max_over_mean_before"], said["work_max_over_mean"]
    faster = f"Attention alone is {before / after:.2f}× as fast ({after / before:.0%} of the time), over no balancing"
    assert said["verdict"].startswith(faster)
    assert f"{after:.2f}× the mean work instead of {before:.2f}×" in said["verdict"]
    several = run_json("plan", "prolong", "--ranks", 4, "--batches", 3)
    assert "in the worst of 3 batches" in several["verdict"] and "over no balancing" in several["verdict"]
    alike = run_json("plan", ",".join(["4096"] * 32), "--ranks", 4)
    assert alike["verdict"].endswith("balancing gains nothing.")


@pytest.mark.parametrize(("arguments", "line"), [
    (("prolong", "--ranks", 4), "distca simulate --gpus 4 --tp 1 --batches 2"),
    (("prolong", "--ranks", 3, "--seed", 5, "--tp", 2, "--model", "qwen3-8b"),
     "distca simulate --model qwen3-8b --seed 5 --gpus 6 --tp 2 --batches 2"),
    (("9000.csv", "--ranks", 2, "--column", "my tokens"),
     "distca simulate --data 9000.csv --column 'my tokens' --context 8960 --gpus 2 --tp 1 --sequences 2 --batches 2"),
    (("128k", "4k", "64_000", "--ranks", 2), "distca simulate --data 128k,4k,64_000 --context 131072 --gpus 2 --tp 1 "
     "--sequences 2 --batches 2"),
    (("prolong", "--ranks", 2, "--model", "llama3-70b"), "distca simulate --model llama3-70b --batches 2"),
    (("stdlib", "--ranks", 2, "--cluster", "dgx-h100"), None),
    (("mine.json",), None), (("prolong", "--ranks", 7, "--tokens-per-rank", "1000"), None),
])
def test_the_command_for_whole_steps_runs_as_it_is_printed(
    run: Callable[..., tuple[int, str, str]], tmp_path: Path, arguments: tuple[Any, ...], line: str | None
) -> None:
    (tmp_path / "9000.csv").write_text("id,my tokens\n1,9000\n2,500\n3,1200\n")
    _save_workload(tmp_path / "mine.json", "mine", 3, 4096, [3000, 1096], [8000, 192])
    _, last = _said(run, "plan", *arguments)
    assert last == line or line is None
    command, *pasted = shlex.split(last)
    assert command == "distca"
    code, out, err = run(*pasted, "--workers", 1, "--batches", 1, "--strategies", "per_document_cp,distca", "--json")
    assert code == 0 and "×" in json.loads(out)["verdict"], err


def test_the_readme_pastes_what_plan_prints(run: Callable[..., tuple[int, str, str]], tmp_path: Path) -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    (tmp_path / "lengths.txt").write_text("\n".join(map(str, range(500, 60_001, 3))))
    _, last = _said(run, "plan", "lengths.txt", "--ranks", "16")
    assert "\ndistca plan lengths.txt --ranks 16 " in readme and f"\n{last} " in readme


def test_alone_the_command_shows_five_things_to_do(run: Callable[..., tuple[int, str, str]]) -> None:
    code, out, err = run()
    assert (code, err) == (0, "")
    listed = [line for line in out.splitlines() if line.startswith("  ")]
    assert len(listed) == 5 and max(map(len, out.splitlines())) <= 110
    for line in listed:
        command = line.partition("     distca ")[2].split()[:1]
        assert not command or run(*command, "-h")[0] == 0


def test_plan_places_as_train_does() -> None:
    for command in (plan_command, report_command):
        assert inspect.signature(command).parameters["placement"].default == Settings().attention.placement
