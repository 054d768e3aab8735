"""`distca report` as a user meets it: a page from a run's folder, and one line for every mistake."""

import json
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import distca
from distca.trace import Span, StepTrace

ROOT = Path(distca.__file__).parents[1]
RECORD = {"loss": 2.5, "seconds": 0.5, "tokens_per_second": 100.0, "work_after": 1.0, "grad_norm": None}
SUMMARY = {"steps": 2, "tokens_per_second": 123.0, "work_before": 2.0, "work_after": 1.1, "exposed_share": 0.25,
           "memory_bytes": 5e9, "final_loss": 1.5}


def trace_text(step: int, seconds: float = 1.0, ranks: tuple[int, ...] = (0, 1)) -> str:
    return json.dumps([StepTrace(rank, step, (Span("forward", "linear", 0.0, seconds),)).to_json() for rank in ranks])


@pytest.fixture
def log(tmp_path: Path) -> Path:
    folder = tmp_path / "log"
    folder.mkdir()
    (folder / "step_3.json").write_text(trace_text(3))
    (folder / "step_20.json").write_text(trace_text(20, seconds=2.0))
    (folder / "trace_step_3.json").write_text('{"traceEvents": []}')
    (folder / "step_00000020").mkdir()                           # a checkpoint
    (folder / "steps.jsonl").write_text("".join(json.dumps({"step": i, **RECORD}) + "\n" for i in (1, 2)))
    (folder / "summary.json").write_text(json.dumps(SUMMARY))
    return folder


def payload(path: Path) -> dict[str, dict[str, Any]]:
    (data,) = re.findall(r'id="report-data">(.*?)</script>', path.read_text(encoding="utf-8"), re.DOTALL)
    return json.loads(data)


def test_a_folder_shows_its_last_traced_step_its_log_and_its_summary(run: Callable[..., tuple[int, str, str]],
                                                                     log: Path, tmp_path: Path) -> None:
    assert run("report", "log") == (0, "Written to report.html. Open it in a browser.\n", "")
    shown = payload(tmp_path / "report.html")
    assert list(shown) == ["run", "timeline"]
    (timeline,) = shown["timeline"]["timelines"]
    assert (timeline["title"], timeline["stop"], timeline["ranks"]) == ("measured, step 20", 2.0, [0, 1])
    (drawn,) = shown["run"]["runs"]
    assert drawn["step"] == [1, 2] and drawn["values"][0] == [2.5, 2.5]
    assert drawn["values"][shown["run"]["labels"].index("gradient norm")] == [None, None]
    page = (tmp_path / "report.html").read_text(encoding="utf-8")
    for fact in ("2.00 → 1.10", "25.0% of the steps", "5 GB", "123"):
        assert f"<dd>{fact}</dd>" in page


def test_measured_and_predicted_lie_side_by_side(run: Callable[..., tuple[int, str, str]], log: Path,
                                                 tmp_path: Path) -> None:
    (tmp_path / "simulated.json").write_text(trace_text(3, seconds=0.5))
    assert run("report", "log", "--step", 3, "--predicted", "simulated.json", "--out", "two.html")[0] == 0
    first, second = payload(tmp_path / "two.html")["timeline"]["timelines"]
    assert (first["title"], first["stop"]) == ("measured, step 3", 1.0)
    assert (second["title"], second["stop"]) == ("predicted", 0.5)


def test_a_plan_joins_a_trace(run: Callable[..., tuple[int, str, str]], log: Path, tmp_path: Path) -> None:
    assert run("report", "log/step_3.json", "--plan", "prolong", "--ranks", 4, "--tokens-per-rank", 32768)[0] == 0
    shown = payload(tmp_path / "report.html")
    assert list(shown) == ["work", "timeline", "transfers", "documents"] and len(shown["work"]["after"]) == 4


@pytest.mark.parametrize("placement", ["given", "balanced"])
def test_plan_writes_the_page_of_the_plan_it_made(run: Callable[..., tuple[int, str, str]], tmp_path: Path,
                                                  placement: str) -> None:
    code, out, err = run("plan", "prolong", "--ranks", 4, "--dedicated", 1, "--placement", placement, "--json",
                         "--html", "plan.html")
    assert (code, err) == (0, "")
    said, shown = json.loads(out), payload(tmp_path / "plan.html")
    work = shown["work"]
    assert len(work["before"]) == 4 and len(work["after"]) == 5
    assert max(work["after"]) / work["mean"][1] == pytest.approx(said["work_max_over_mean"], rel=1e-4)
    assert max(work["before"]) / work["mean"][0] == pytest.approx(said["work_max_over_mean_before"], rel=1e-4)
    assert sum(map(sum, shown["transfers"]["matrix"])) == pytest.approx(said["bytes_total"], rel=1e-4)
    assert max(shown["transfers"]["sent"]) == pytest.approx(said["bytes_sent_max"], rel=1e-4)
    assert max(shown["transfers"]["received"]) == pytest.approx(said["bytes_received_max"], rel=1e-4)
    pieces = shown["documents"]
    longest = [i for i, row in enumerate(pieces["row"]) if row == 0]
    covered = set().union(*(range(pieces["start"][i], pieces["stop"][i]) for i in longest))
    assert len(covered) == pieces["lengths"][0]


def test_what_simulate_says_becomes_the_table(run: Callable[..., tuple[int, str, str]], tmp_path: Path) -> None:
    shares = {"step_seconds": 2.0, "idle_share": 0.25, "exposed_communication_share": 0.125, "peak_memory_gb": 60.0,
              "work_max_over_mean": 1.5}
    said = {"tokens_per_step": 1000, "strategies": {
        "fixed": {**shares, "tokens_per_second": 500.0, "step_seconds_range": [1.0, 4.0], "speedup_over": {}},
        "distca": {**shares, "tokens_per_second": 900.0, "speedup_over": {"fixed": 1.8},
                   "speedup_range_over": {"fixed": [1.5, 2.5]}}}}
    (tmp_path / "said.json").write_text(json.dumps(said))
    assert run("report", "said.json")[0] == 0
    page = (tmp_path / "report.html").read_text(encoding="utf-8")
    rows = [re.sub(r"<[^>]+>", "|", row).strip("|") for row in re.findall(r"<tr[^>]*>(.*?)</tr>", page)]
    assert "fixed||500 (250–1,000)||2.00 s||25.0%||12.5%||60 GB||1.50" in rows
    assert "times as fast as||fixed" in rows and "distca||1.80× (1.50–2.50)" in rows
    assert "Tokens per second of each strategy: fixed 500, distca 900" in page


BAD = [
    ([], ["nothing to report", "--plan"]),
    (["nowhere"], ["nowhere", "no such file"]),
    (["empty"], ["empty", "step_N.json"]),
    (["log", "--step", "7"], ["step is 7", "3, 20"]),
    (["log/steps.jsonl", "--step", "7"], ["step is 7", "none"]),
    (["log/trace_step_3.json"], ["Chrome trace", "step_N.json"]),
    (["log", "log/step_3.json", "log/step_20.json"], ["3 timelines", "at most 2"]),
    (["text.json"], ["text.json", "broken JSON"]),
    (["other.json"], ["other.json", "neither"]),
    (["torn.jsonl"], ["torn.jsonl", "line 2"]),
    (["words.jsonl"], ["words.jsonl", "loss", "'low'"]),
    (["list.json"], ["list.json", "not a list of step traces"]),
    (["none.json"], ["none.json", "not a list of step traces"]),
    (["twice.json"], ["twice.json", "rank 1 is there twice"]),
    (["backwards.json"], ["backwards.json", "-1.0"]),
    (["summary.json"], ["summary.json", "steps"]),
    (["strategies.json"], ["strategies.json", "tokens_per_second"]),
    (["log", "--out", "page.txt"], ["out", "page.txt", ".html"]),
    (["log", "--out", "no/page.html"], ["out", "no", "does not exist"]),
    (["log", "--out", "folder.html"], ["out", "folder.html", "cannot be written"]),
    (["log", "--compare", "log/step_3.json"], ["compare", "there are 1", "steps.jsonl"]),
    (["--plan", "prolonk"], ["SOURCE", "'prolonk'"]),
    (["--plan", "prolong", "--ranks", "0"], ["ranks", "0"]),
]


@pytest.mark.parametrize(("arguments", "fragments"), BAD, ids=lambda value: " ".join(value))
def test_mistakes_get_one_line(run: Callable[..., tuple[int, str, str]], log: Path, tmp_path: Path,
                               arguments: list[str], fragments: list[str]) -> None:
    for name in ("empty", "folder.html"):
        (tmp_path / name).mkdir()
    for name, text in (("text.json", "hello"), ("other.json", '{"a": 1}'), ("torn.jsonl", '{"step": 1}\n{"st'),
                       ("words.jsonl", '{"step": 1, "loss": "low"}'), ("list.json", '[{"rank": 0}]'),
                       ("none.json", "[]"), ("twice.json", trace_text(1, ranks=(0, 1, 1))),
                       ("backwards.json", trace_text(1, seconds=-1.0)), ("summary.json", '{"tokens_per_second": 1}'),
                       ("strategies.json", '{"strategies": {"fixed": {}}}')):
        (tmp_path / name).write_text(text)
    code, out, err = run("report", *arguments)
    assert (code, out) == (2, "") and err.startswith("distca: error: ") and err.count("\n") == 1
    for fragment in fragments:
        assert fragment in err


def test_bad_html_of_a_plan_is_refused_before_planning(run: Callable[..., tuple[int, str, str]]) -> None:
    code, out, err = run("plan", "prolong", "--html", "no/plan.html")
    assert (code, out) == (2, "") and "html" in err and "does not exist" in err


def test_every_command_of_the_guide_runs(run: Callable[..., tuple[int, str, str]], log: Path, tmp_path: Path) -> None:
    text = (ROOT / "docs/guide/report.md").read_text(encoding="utf-8")
    (code,) = re.findall(r"^```python\n(.*?)^```", text, re.DOTALL | re.MULTILINE)
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, env={"PYTHONPATH": str(ROOT)})
    (tmp_path / "runs").mkdir()
    shutil.copytree(log, tmp_path / "runs" / "other", ignore=shutil.ignore_patterns("step_*"))
    log.rename(tmp_path / "runs" / "demo")
    for line in re.findall(r"^```bash\n(.*?)^```", text, re.DOTALL | re.MULTILINE)[0].splitlines():
        command, *arguments = shlex.split(line, comments=True)
        assert command == "distca"
        assert run(*arguments)[::2] == (0, ""), line
    pages = ("report.html", "two_runs.html", "both.html", "plan.html", "two_ranks.html")
    assert [list(payload(tmp_path / page)) for page in pages] == [
        ["run", "timeline"], ["run", "timeline"], ["run", "work", "timeline", "transfers", "documents"],
        ["work", "transfers", "documents"], ["work", "timeline", "transfers", "documents", "memory"]]
