"""`distca simulate` as a user meets it."""

from __future__ import annotations

import inspect
import json
import re
import shlex
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

import distca
from distca.cli.simulate import simulate_command
from distca.cost.attention_time import shipped_table
from distca.models import model_named
from distca.report.figures import byte_text
from distca.report.runs import read_traces
from distca.simulate.setting import settings
from distca.simulate.strategies import STRATEGIES
from distca.simulate.sweep import Question, compare
from distca.spec import cluster_named
from distca.validation import UserError
from distca.workload.sequences import Source

KEYS = {"tokens_per_second", "step_seconds", "idle_share", "exposed_communication_share", "peak_memory_gb",
        "work_max_over_mean", "speedup_over"}
SHORT = ("simulate", "--batches", "2", "--workers", "1", "--context", "16k", "--gpus", "32")
QUICK = ("simulate", "--batches", "1", "--workers", "1", "--context", "65536", "--gpus", "32")


def test_json_has_every_strategy_with_every_figure(run: Callable[..., tuple[int, str, str]]) -> None:
    code, out, err = run(*QUICK, "--json")
    assert (code, err) == (0, "")
    rows = json.loads(out)["strategies"]
    assert {"fixed_packing", "variable_length", "per_document_cp", "wlb_ideal", "disaggregated", "distca",
            "bound"} == set(rows)
    for name, row in rows.items():
        assert set(row) >= KEYS
        assert set(row["speedup_over"]) == set(rows) - {name}


def test_the_table_names_strategies_and_what_they_chose(run: Callable[..., tuple[int, str, str]]) -> None:
    code, out, _ = run(*QUICK, "--strategies", "wlb_ideal,distca", "--trace", "step.json")
    assert code == 0
    assert "wlb_ideal" in out and "fixed_packing" not in out
    assert "dp " in out and "balanced placement" in out
    assert "Timeline of distca in step.json, for Perfetto in trace_step.json." in out
    with open("trace_step.json", encoding="utf-8") as file:
        assert len(json.load(file)["traceEvents"]) > 100


def test_a_report_shows_the_timeline_that_was_written(run: Callable[..., tuple[int, str, str]]) -> None:
    """What is predicted lies beside what is measured, in the same form."""
    code, _, _ = run(*QUICK, "--strategies", "distca", "--pp", "2", "--trace", "x.json")
    assert code == 0
    traces = read_traces(Path("x.json"))
    assert [trace.rank for trace in traces] == [0, 1, 2, 3]
    assert {"forward 0", "backward 0"} <= {span.name for span in traces[0].spans if span.lane == "pipeline"}
    code, out, err = run("report", "--predicted", "x.json", "--out", "page.html")
    assert (code, err) == (0, "") and "Written to page.html" in out
    assert "predicted" in Path("page.html").read_text(encoding="utf-8")
    code, _, err = run("report", "--predicted", "trace_x.json")
    assert code == 2 and "step traces" in err


def test_own_lengths_and_several_pipelines(run: Callable[..., tuple[int, str, str]]) -> None:
    with open("lengths.txt", "w", encoding="utf-8") as file:
        file.write("9000\n500\n1200\n70\n")
    code, out, _ = run("simulate", "--data", "lengths.txt", "--gpus", "32", "--batches", "1", "--workers", "1", "--pp",
                       "1,2", "--strategies", "distca,bound", "--json")
    found = json.loads(out)
    assert code == 0 and found["context"] == 8960
    assert found["strategies"]["distca"]["pp"] == 1  # no bubble


@pytest.mark.parametrize(("arguments", "said"), [
    (("--gpus", "60", "--tp", "8"), "gpus is 60, not a multiple of tp 8 times pp 1; give --gpus 56"),
    (("--gpus", "64", "--pp", "3"), "not a multiple of tp 1 times pp 3; give --gpus 63"),
    (("--pp", "x"), "pp is 'x'"),
    (("--gpus", "264", "--pp", "33", "--context", "65536"), "pp is 33 but model 'llama3-8b' has 32 layers"),
    (("--strategies", "distco"), "strategy 'distco' is unknown; did you mean 'distca'?"),
    (("--data", "short.txt", "--context", "65536"), "context is 65536 but the longest document"),
    (("--data", "nonsense.txt"), "line 1 is 'abc'"),
    (("--data", "prolonk"), "did you mean 'prolong'?"),
    (("--gpus", "8", "--cluster", "small.toml"), "cluster 'small' cannot hold 'llama3-8b'"),
    (("--cluster", "dgx-h20"), "cluster 'dgx-h20' is unknown"),
    (("--sequences", "4096"), "does not fit"),
    (("--batches", "0"), "batches is 0"),
    (("--tolerance", "2"), "tolerance is 2"),
    (("--context", "0"), "context is 0"),
    (("--context", "1048576"), "reaches kv_len 524288"),
    (("--tp", "3"), "tp is 3"),
    (("--model", "lama"), "model 'lama' is unknown"),
])
def test_mistakes_are_one_line_and_exit_code_2(run: Callable[..., tuple[int, str, str]], arguments: tuple[str, ...],
                                               said: str) -> None:
    with open("short.txt", "w", encoding="utf-8") as file:
        file.write("1000\n")
    with open("nonsense.txt", "w", encoding="utf-8") as file:
        file.write("abc\n")
    with open("small.toml", "w", encoding="utf-8") as file:
        file.write('base = "dgx-h200"\nmemory_bytes = 3e9\n')
    code, out, err = run("simulate", "--batches", "1", "--workers", "1", *arguments)
    assert (code, out) == (2, "")
    assert err.count("\n") == 1 and said in err


def test_terminal_and_page_open_with_the_verdict(run: Callable[..., tuple[int, str, str]], tmp_path: Path) -> None:
    code, out, _ = run(*SHORT, "--html", "page.html")
    assert code == 0 and "Written to page.html." in out
    said = " ".join(out.split("\n\n")[1].split())
    code, printed, _ = run(*SHORT, "--json")
    found = json.loads(printed)
    rows = found["strategies"]
    baselines = {name: row["tokens_per_second"] for name, row in rows.items()
                 if name not in ("distca", "disaggregated", "bound")}
    best = max(baselines, key=lambda name: baselines[name])
    ratio = rows["distca"]["tokens_per_second"] / baselines[best]
    assert f"{ratio:.2f}× as fast as {best}, the best baseline" in found["verdict"]
    assert said.startswith(found["verdict"])
    ours, theirs = (byte_text(1e9 * rows[name]["peak_memory_gb"]) for name in ("distca", best))
    assert f"A GPU holds at most {ours}, against {theirs} with {best}." in found["verdict"]
    page = (tmp_path / "page.html").read_text(encoding="utf-8")
    header = page[page.index("<header>"):page.index("</header>")]
    assert found["verdict"] in header.replace("&#x27;", "'")
    captions = re.findall(r"<figcaption>(\w+), simulated, first batch", page)
    assert captions == [best, "distca"]              # the baseline above ours
    assert '<div class="timelines">' in page         # not side by side
    (tmp_path / "answer.json").write_text(printed)
    code, _, _ = run("report", "answer.json", "--out", "again.html")
    assert code == 0 and found["verdict"] in (tmp_path / "again.html").read_text(encoding="utf-8")


def test_lengths_of_every_format_are_simulated(run: Callable[..., tuple[int, str, str]], tmp_path: Path) -> None:
    lengths = np.array([9000, 500, 1200, 70])
    np.save(tmp_path / "a.npy", lengths)
    (tmp_path / "a.csv").write_text("id,tokens\n" + "".join(f"{at},{n}\n" for at, n in enumerate(lengths)))
    options = ("simulate", "--gpus", "32", "--batches", "1", "--workers", "1", "--strategies", "distca", "--json")
    answers = [run(*options, "--data", *data) for data in (
        ["a.npy"], ["a.csv", "--column", "tokens"], ["9000,500,1200,70"])]
    assert [(code, err) for code, _, err in answers] == [(0, "")] * 3
    seconds = {json.loads(out)["strategies"]["distca"]["step_seconds"] for _, out, _ in answers}
    assert len(seconds) == 1
    code, out, err = run(*options, "--data", "a.csv", "--column", "length")
    assert (code, out) == (2, "") and "the columns are: id, tokens" in err


def test_numbers_take_units(run: Callable[..., tuple[int, str, str]]) -> None:
    small = ("simulate", "--batches", "1", "--workers", "1", "--strategies", "distca", "--json")
    said = [json.loads(run(*small, "--gpus", gpus, "--context", context)[1])
            for gpus, context in (("32", "16384"), ("3_2", "16k"))]
    assert said[0] == said[1] and said[0]["context"] == 16_384
    code, _, err = run(*small, "--gpus", "0.3k")
    assert code == 2 and "which is 307.2 with k = 1024" in err


@pytest.mark.multiprocess
def test_what_a_worker_refuses_is_refused_here() -> None:
    """As a UserError, which the command line prints as one line, not as an accident of the pool's."""
    grid = settings(model_named("llama3-8b"), cluster_named("dgx-h200"), gpus=16, context=8192, tp=8, pp=[1],
                    sequences=None, micro_batches=None)
    question = Question(grid, ("disaggregated",), Source("prolong"), shipped_table("h200"), 0.05, 2)
    object.__setattr__(question, "tolerance", -1.0)   # which only the planner looks at again
    with pytest.raises(UserError, match=r"tolerance is -1\.0; give a number from 0 to 1"):
        compare(question, workers=2)


def test_every_command_of_the_guide_runs(run: Callable[..., tuple[int, str, str]],
                                         monkeypatch: pytest.MonkeyPatch) -> None:
    root = Path(distca.__file__).parents[1]
    text = (root / "docs/guide/simulate.md").read_text(encoding="utf-8")
    commands, code = ("".join(re.findall(rf"^```{language}\n(.*?)^```", text, re.DOTALL | re.MULTILINE))
                      for language in ("bash", "python"))
    ran = 0
    for line in commands.splitlines():
        command, *arguments = shlex.split(line, comments=True)
        if command == "distca":
            exit_code, _, err = run(*arguments, *(("--workers", "1") if arguments[0] == "simulate" else ()))
            notes = [note for note in err.splitlines() if " is scaled " not in note]  # of heads that nobody measured
            assert (exit_code, notes) == (0, []), line
            ran += 1
        else:
            subprocess.run(line, shell=True, check=True)
    assert ran > 4
    monkeypatch.setenv("PYTHONPATH", str(root))
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)


@pytest.mark.parametrize("width", [80, 120])
def test_names_are_whole_columns_have_a_legend_and_the_end_says_what_next(
    run: Callable[..., tuple[int, str, str]], monkeypatch: pytest.MonkeyPatch, width: int
) -> None:
    monkeypatch.setenv("COLUMNS", str(width))
    code, out, _ = run(*SHORT)
    assert code == 0 and "…" not in out
    *lines, last = out.splitlines()
    assert max(map(len, lines)) <= width and last.startswith("Next: ")
    for name in (*STRATEGIES, "bound"):
        assert sum(line.split()[:1] == [name] for line in lines) >= 1 and name in out
    for name in ("fixed_packing", "variable_length", "per_document_cp", "wlb_ideal"):  # in both tables
        assert sum(line.split()[:1] == [name] for line in lines) == 2
    legend = " ".join(out.split())
    assert all(f" {column}: " in legend for column in ("idle", "exposed", "memory", "work"))


@pytest.mark.parametrize("names", ["fixed_packing,wlb_ideal", "wlb_ideal", "distca", "bound"])
def test_any_strategies_alone_make_a_table(run: Callable[..., tuple[int, str, str]], names: str) -> None:
    code, out, err = run(*SHORT, "--strategies", names)
    assert (code, err) == (0, "") and all(name in out for name in names.split(","))


def test_what_is_left_open_is_chosen(run: Callable[..., tuple[int, str, str]]) -> None:
    small = ("simulate", "--batches", "1", "--workers", "1", "--strategies", "distca", "--context", "8k", "--json")
    for given, tp in (((), 8), (("--gpus", "8"), 4), (("--gpus", "6"), 2), (("--gpus", "1"), 1), (("--gpus", "7"), 1),
                      (("--gpus", "60"), 4), (("--gpus", "8", "--tp", "8"), 8)):
        code, out, err = run(*small, "--model", "llama3.2-1b", *given)
        assert code == 0 and json.loads(out)["tp"] == tp, (given, err)


def test_short_documents_gain_nothing_and_the_verdict_says_so(run: Callable[..., tuple[int, str, str]]) -> None:
    code, out, _ = run("simulate", "--data", "2000,1900,2100", "--gpus", "16", "--batches", "1", "--workers", "1",
                       "--strategies", "wlb_ideal,distca", "--json")
    assert code == 0 and json.loads(out)["verdict"].startswith("distca gains nothing here: it trains ")


def test_a_question_fits_a_page() -> None:
    source, first = inspect.getsourcelines(simulate_command)
    assert len(source) <= 60 and first > 0
