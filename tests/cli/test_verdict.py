"""What `distca simulate` comes to: a verdict in the terminal, on the page and in JSON, and refusals out of workers."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from distca.cost.attention_time import shipped_table
from distca.models import model_named
from distca.report.figures import Spread, StrategyFigures, ours_and_best_baseline, verdict
from distca.simulate.setting import settings
from distca.simulate.sweep import Question, compare
from distca.spec import cluster_named
from distca.validation import UserError
from distca.workload.sequences import Source

Run = Callable[..., tuple[int, str, str]]
QUICK = ("simulate", "--batches", "2", "--workers", "1", "--context", "16k", "--gpus", "32")


def _strategy(name: str, speed: float, **ratios: float) -> StrategyFigures:
    return StrategyFigures(name, Spread(speed, speed, speed), 1.0, 0.1, 0.1, 1e9, 1.0, {
        other: Spread(ratio, 0.9 * ratio, 1.1 * ratio) for other, ratio in ratios.items()})


def test_ours_is_told_against_the_best_baseline() -> None:
    rows = [_strategy("fixed_packing", 500), _strategy("wlb_ideal", 800), _strategy("distca", 1000, wlb_ideal=1.25),
            _strategy("disaggregated", 1100, wlb_ideal=1.4), _strategy("bound", 1250)]
    ours, best = ours_and_best_baseline(rows)
    assert ours is not None and best is not None and (ours.name, best.name) == ("distca", "wlb_ideal")
    assert verdict(rows) == (
        "distca trains 1.25× as fast as wlb_ideal, the best baseline (1.12 to 1.38 over the batches): 1,000 tokens/s "
        "against 800, 80% of what no strategy can beat.")


def test_no_gain_is_called_none() -> None:
    rows = [_strategy("wlb_ideal", 1000), _strategy("distca", 990, wlb_ideal=0.99)]
    assert verdict(rows).startswith("distca gains nothing here: it trains 0.99× as fast as wlb_ideal, the best base")


def test_what_has_nothing_beside_it_says_so() -> None:
    assert "no baseline ran and fitted" in verdict([_strategy("distca", 990)])
    assert "no strategy of ours ran and fitted" in verdict([_strategy("wlb_ideal", 990), _strategy("bound", 1000)])
    assert verdict([_strategy("bound", 1000)]) == verdict([_strategy("theirs", 1000)]) == verdict([]) == ""


def test_the_terminal_ends_and_the_page_opens_with_it(run: Run, tmp_path: Path) -> None:
    code, out, _ = run(*QUICK, "--html", "page.html")
    assert code == 0
    said = " ".join(out.replace("Written to page.html.", "").split())
    code, printed, _ = run(*QUICK, "--json")
    found = json.loads(printed)
    rows = found["strategies"]
    baselines = {name: row["tokens_per_second"] for name, row in rows.items()
                 if name not in ("distca", "disaggregated", "bound")}
    best = max(baselines, key=lambda name: baselines[name])
    ratio = rows["distca"]["tokens_per_second"] / baselines[best]
    assert f"{ratio:.2f}× as fast as {best}, the best baseline" in found["verdict"] and said.endswith(found["verdict"])
    page = (tmp_path / "page.html").read_text(encoding="utf-8")
    header = page[page.index("<header>"):page.index("</header>")]
    assert found["verdict"] in header.replace("&#x27;", "'")
    captions = re.findall(r"<figcaption>(\w+), simulated, first batch", page)
    assert captions == [best, "distca"]              # the baseline above ours
    assert '<div class="timelines">' in page         # not side by side
    (tmp_path / "answer.json").write_text(printed)
    code, _, _ = run("report", "answer.json", "--out", "again.html")
    assert code == 0 and found["verdict"] in (tmp_path / "again.html").read_text(encoding="utf-8")


def test_lengths_of_every_format_are_simulated(run: Run, tmp_path: Path) -> None:
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


def test_numbers_take_units(run: Run) -> None:
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
