"""`distca plan` on files of lengths: a distribution, dealt into batches, and the corpus behind them."""

from __future__ import annotations

import io
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import distca
from distca.workload.documents import sample_lengths
from distca.workload.sequences import deal_batches

Run = Callable[..., tuple[int, str, str]]
FIELDS = {"work_max_over_mean_before", "work_max_over_mean", "bytes_total_before", "bytes_total", "bytes_sent_max",
          "bytes_received_max", "plan_seconds"}


@pytest.fixture
def lengths(tmp_path: Path) -> np.ndarray:
    """About 20 batches of 4 × 8,192 tokens, in lengths.txt, the long documents last."""
    drawn = np.sort(sample_lengths("prolong", 20 * 4 * 8192, seed=1, max_document=40_000))
    (tmp_path / "lengths.txt").write_text("\n".join(map(str, drawn)))
    return drawn


def _said(run: Run, *arguments: object) -> dict[str, Any]:
    code, out, err = run(*arguments, "--json")
    assert (code, err, out.count("\n")) == (0, "", 1)
    found: dict[str, Any] = json.loads(out)
    return found


def _refused(run: Run, *arguments: object) -> str:
    code, out, err = run(*arguments)
    assert (code, out, err.count("\n")) == (2, "", 1) and err.startswith("distca: error: ")
    return err


def _work_in_order(lengths: np.ndarray, ranks: int) -> float:
    """Max/mean of work per rank, token by token: a token at position p sees p + 1 keys."""
    pairs = np.concatenate([np.arange(1, length + 1) for length in lengths]).astype(float)
    work = pairs.reshape(ranks, -1).sum(axis=1)
    return float(work.max() / work.mean())


def test_a_file_is_a_distribution(run: Run, lengths: np.ndarray) -> None:
    said = _said(run, "plan", "lengths.txt", "--ranks", 4, "--tokens-per-rank", "8k", "--seed", 5,
                 "--placement", "given")
    batches = said["batches"]
    dealt = deal_batches(lengths, 4 * 8192, 8, 5)
    assert batches["count"] == len(dealt) == len(batches["each"]) == 8
    assert set(batches["mean"]) == set(batches["worst"]) == FIELDS
    before = [_work_in_order(batch, 4) for batch in dealt]
    plans = [distca.plan(distca.pack(batch, ranks=4)).summary() for batch in dealt]
    for one, batch, work, plan in zip(batches["each"], dealt, before, plans, strict=True):
        assert one["documents"] == len(batch)
        assert one["work_max_over_mean_before"] == pytest.approx(work)
        assert one["work_max_over_mean"] == pytest.approx(plan.work_max_over_mean)
        assert one["bytes_total"] == plan.bytes_total and one["bytes_sent_max"] == plan.bytes_sent.max()
    assert batches["mean"]["work_max_over_mean_before"] == pytest.approx(np.mean(before))
    assert batches["worst"]["work_max_over_mean_before"] == pytest.approx(max(before))
    assert batches["worst"]["work_max_over_mean"] <= 1.05 < batches["mean"]["work_max_over_mean_before"]
    shown = int(np.argmax(before))
    assert batches["shown"] == shown + 1
    assert said["work_max_over_mean_before"] == pytest.approx(before[shown])
    assert said["bytes_total"] == plans[shown].bytes_total and said["tokens_per_rank"] == 8192


def test_the_corpus_is_told_whole(run: Run, lengths: np.ndarray) -> None:
    corpus = _said(run, "plan", "lengths.txt", "--ranks", 4, "--tokens-per-rank", "8k")["corpus"]
    assert (corpus["documents"], corpus["tokens"], corpus["longest"]) == (
        len(lengths), int(lengths.sum()), int(lengths.max()))
    assert corpus["quantiles"]["0.5"] == int(np.sort(lengths)[(len(lengths) + 1) // 2 - 1])
    pairs = lengths * (lengths + 1) / 2
    for one in corpus["long_documents"]:
        assert one["attention_share"] == pytest.approx(pairs[lengths >= one["least"]].sum() / pairs.sum())


def test_the_whole_is_one_batch_of_everything(run: Run, lengths: np.ndarray) -> None:
    said = _said(run, "plan", "lengths.txt", "--ranks", 4, "--whole")
    kept = lengths.sum() // 4 * 4
    assert said["tokens_per_rank"] == kept // 4 and "batches" not in said
    assert said["work_max_over_mean_before"] == pytest.approx(
        _work_in_order(np.append(lengths[:-1], lengths[-1] - (lengths.sum() - kept)), 4))
    code, out, _ = run("plan", "lengths.txt", "--ranks", 4, "--whole")
    assert code == 0 and "One batch of everything." in out


def test_defaults_are_64k_a_rank_and_8_batches(run: Run, tmp_path: Path) -> None:
    np.save(tmp_path / "a.npy", sample_lengths("pretrain", 9 * 8 * 65_536, seed=0))
    said = _said(run, "plan", "a.npy")
    assert (said["ranks"], said["tokens_per_rank"], said["batches"]["count"]) == (8, 65_536, 8)
    assert _said(run, "plan", "a.npy", "--batches", 3)["batches"]["count"] == 3
    code, out, _ = run("plan", "a.npy", "--batches", 1000)
    assert code == 0 and "9 batches, all that it fills, documents shuffled with seed 0" in out


def test_less_than_a_batch_is_one_batch_and_says_so(run: Run, tmp_path: Path) -> None:
    (tmp_path / "few.txt").write_text("900\n100\n300\n303\n")
    code, out, _ = run("plan", "few.txt", "--ranks", 2)
    assert code == 0 and "Fewer tokens than a batch of 2 × 65,536 tokens: one batch of everything." in out
    assert "few.txt: 4 of 4 documents" in out
    error = _refused(run, "plan", "few.txt", "--ranks", 2, "--tokens-per-rank", "64k")
    assert "tokens_per_rank is 65536 but few.txt holds 1603 tokens, fewer than one batch of 2 × 65,536" in error
    assert "--whole" in error
    assert "--whole" in _refused(run, "plan", "few.txt", "--batches", "2")


def test_documents_longer_than_a_batch_are_cut_and_counted(run: Run, tmp_path: Path) -> None:
    (tmp_path / "long.txt").write_text("100000\n" + "64\n" * 200)
    code, out, _ = run("plan", "long.txt", "--ranks", 2, "--tokens-per-rank", 1024)
    assert code == 0 and "1 longer than a batch are cut at its end" in " ".join(out.split())
    said = _said(run, "plan", "long.txt", "--ranks", 2, "--tokens-per-rank", 1024, "--max-document", 64)
    assert said["work_max_over_mean_before"] == pytest.approx(1.0)


def test_lengths_may_be_typed(run: Run) -> None:
    typed = _said(run, "plan", "128k", "4k", "60_000", "536", "--ranks", 2)
    assert typed == {**_said(run, "plan", "128k,4k,60_000,536", "--ranks", 2), "plan_seconds": typed["plan_seconds"]}
    lengths = np.array([131_072, 4096, 60_000, 536])
    assert (typed["documents"], typed["tokens_per_rank"]) == (4, lengths.sum() // 2)
    assert typed["work_max_over_mean_before"] == pytest.approx(_work_in_order(lengths, 2))


def test_more_lengths_may_be_typed_than_a_file_name_may_have_letters(run: Run) -> None:
    assert _said(run, "plan", ",".join(["4096"] * 200), "--ranks", 2)["documents"] == 200
    assert "length 2, is 0" in _refused(run, "plan", "5,0")
    assert "give one file or name, or lengths alone" in _refused(run, "plan", "128k", "lengths.txt")
    assert "one batch" in _refused(run, "plan", "128k,4k", "--batches", 2)


def test_stdin_columns_and_formats(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    table = "id,tokens\n" + "".join(f"{at},{100 + at}\n" for at in range(50))
    (tmp_path / "a.csv").write_text(table)
    from_file = _said(run, "plan", "a.csv", "--column", "tokens", "--ranks", 2)
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(table.encode())))
    piped = _said(run, "plan", "-", "--format", "csv", "--column", "tokens", "--ranks", 2)
    assert piped.pop("next").startswith("… | distca simulate --data - --format csv ")
    assert from_file.pop("next").startswith("distca simulate --data a.csv ")
    assert {**piped, "plan_seconds": 0} == {**from_file, "plan_seconds": 0} and piped["documents"] == 50
    error = _refused(run, "plan", "a.csv", "--column", "lenght")
    assert "a.csv: column is 'lenght'; the columns are: id, tokens" in error


def test_sampled_batches_follow_each_other(run: Run) -> None:
    options = ("plan", "prolong", "--ranks", 2, "--tokens-per-rank", 8192)
    one, three = _said(run, *options), _said(run, *options, "--batches", 3)
    assert "batches" not in one and three["batches"]["count"] == 3
    assert three["batches"]["each"][0]["bytes_total"] == one["bytes_total"]
    assert "whole" in _refused(run, *options, "--whole")


def test_the_tables_fit_a_terminal_and_pages_show_the_worst(run: Run, lengths: np.ndarray, tmp_path: Path) -> None:
    for ranks in (4, 40):
        code, out, err = run("plan", "lengths.txt", "--ranks", ranks, "--tokens-per-rank", 1024, "--html", "p.html",
                             "--plot", "p.svg")
        shown, _, to_paste = out.partition("\nNext: ")           # a command that is pasted stays in one line
        assert (code, err) == (0, "") and "distca simulate" in to_paste and max(map(len, shown.splitlines())) <= 80
    assert "of attention" in out and "Lengths: median" in out and "the worst before planning" in out
    assert "Attention alone is " in out and "over no balancing" in out
    page = (tmp_path / "p.html").read_text(encoding="utf-8")
    assert page.index('class="verdict"') < page.index("<dl>") and "the worst before planning" in page
    assert "attention in documents of 8K or more" in page and (tmp_path / "p.svg").stat().st_size > 1000


@pytest.mark.parametrize(("options", "words"), [
    (("--ranks", "1.5"), "--ranks"), (("--ranks", "2kk"), "128k or 1.5M"), (("--tokens-per-rank", "1.3k"), "give 1331"),
    (("--batches", "0"), "batches is 0"), (("--whole", "--seed", "1"), "leave --seed out"),
    (("--whole", "--tokens-per-rank", "4k"), "leave --tokens-per-rank out"), (("--format", "xml"), "format 'xml'"),
    (("--tokenizer", "none"), "tokenizer is 'none'"), (("--column", "length"), "has no columns"),
])
def test_wrong_options_are_one_line(run: Run, lengths: np.ndarray, options: tuple[str, ...], words: str) -> None:
    assert words in _refused(run, "plan", "lengths.txt", *options)


def test_a_report_takes_the_same_files(run: Run, lengths: np.ndarray, tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("tokens\n" + "\n".join(map(str, lengths)))
    code, _, err = run("report", "--plan", "a.csv", "--column", "tokens", "--ranks", "4", "--tokens-per-rank", "8k")
    assert (code, err) == (0, "")
    assert "the worst before planning" in (tmp_path / "report.html").read_text(encoding="utf-8")
