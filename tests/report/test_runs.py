"""A run in words: the verdict, the comparison with another run, and the largest waits, from logs written by hand."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from distca.report.figures import RunFigures
from distca.report.runs import (
    RunFiles,
    largest_waits,
    read_folder,
    read_steps,
    run_verdict,
    side_by_side,
    step_detail,
    verdict_on_two,
)
from distca.trace import RankFigures, Span, StepTrace
from distca.validation import UserError

RECORDS = [  # 100 tokens in 1 s, then 300 tokens in 3 s
    {"step": 1, "loss": 4.0, "seconds": 1.0, "tokens_per_second": 100.0, "work_before": 2.0, "work_after": 1.0,
     "exposed_seconds": 0.5},
    {"step": 2, "loss": 3.5, "seconds": 3.0, "tokens_per_second": 100.0, "work_before": 3.0, "work_after": 1.1,
     "exposed_seconds": 0.5, "eval_loss": 3.75}]


def folder_with(folder: Path, records: list[dict[str, Any]], **files: object) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "steps.jsonl").write_text("".join(json.dumps(one) + "\n" for one in records))
    for name, content in files.items():
        (folder / name.replace("__", ".")).write_text(content if isinstance(content, str) else json.dumps(content))
    return folder


def test_the_verdict_says_how_far_what_was_learned_and_what_held_it_up(tmp_path: Path) -> None:
    found = read_folder(folder_with(tmp_path, RECORDS))
    assert run_verdict(found) == (
        "So far: in 2 steps the loss fell from 4 to 3.5, on held-out documents to 3.75. The busiest rank computed "
        "1.05× the mean attention; without a plan it would have computed 2.50×. Waiting for exchanges took 25.0% of "
        "the time.")
    assert found.tokens_per_second == 100 and found.figures is not None
    assert run_verdict(replace(found, summary={"ended": "Finished"})).startswith("Finished: in 2 steps the loss fell")
    assert run_verdict(RunFiles()) == ""
    diverged = read_folder(folder_with(tmp_path, [*RECORDS, {"step": 3, "loss": None}]))
    assert run_verdict(diverged).startswith("So far: the loss of step 3 is not a number")


def test_a_summary_of_an_earlier_start_is_left_out(tmp_path: Path) -> None:
    summary = {"ended": "Stopped after step 1 of 9", "last_step": 1}
    assert read_folder(folder_with(tmp_path, RECORDS, summary__json=summary)).summary == {}
    assert read_folder(folder_with(tmp_path, RECORDS, summary__json=summary | {"last_step": 2})).summary != {}


def test_lost_servers_have_a_curve_and_a_fact(tmp_path: Path) -> None:
    assert "servers lost" not in dict(read_folder(folder_with(tmp_path, RECORDS)).facts)
    summary = {"last_step": 2, "steps": 2, "tokens_per_second": 1, "work_before": 1, "work_after": 1,
               "exposed_share": 0, "memory_bytes": 1, "final_loss": 1, "faults": 3, "repeated_tasks": 12,
               "fault_seconds": 0.75}
    found = read_folder(folder_with(tmp_path, [one | {"servers": 2, "faults": at, "fault_seconds": 0.5 * at}
                                               for at, one in enumerate(RECORDS)], summary__json=summary))
    assert dict(found.facts)["servers lost"] == "3, 12 tasks repeated, 0.75 s"
    assert found.curve("servers lost").tolist() == [0, 1] and found.curve("dedicated servers").tolist() == [2, 2]


def test_settings_and_facts_come_from_their_files(tmp_path: Path) -> None:
    one = read_folder(folder_with(tmp_path, RECORDS, run__json={"model": "tiny"},
                                  settings__toml="[run]\nsteps = 9\nranks = 2\n"))
    other = replace(one, settings={"run.steps": "9", "run.seed": "1"})
    assert one.about == (("model", "tiny"),) and one.settings == {"run.steps": "9", "run.ranks": "2"}
    assert side_by_side([one.settings, other.settings]) == (
        ("run.steps", "9", "9"), ("run.ranks", "2", "–"), ("run.seed", "–", "1"))


@pytest.mark.parametrize(("name", "text"), [
    ("run.json", "[]"), ("run.json", '{"model": 5}'), ("run.json", '{"model": "\\u001b[31m"}'), ("run.json", "{"),
    ("summary.json", "[]"), ("settings.toml", "run = ["), ("steps.jsonl", '{"step": 1')])
def test_broken_files_are_refused_by_name(tmp_path: Path, name: str, text: str) -> None:
    folder_with(tmp_path, RECORDS)
    (tmp_path / name).write_text(text)
    with pytest.raises(UserError, match=name):
        read_folder(tmp_path)


def test_a_run_that_goes_on_may_have_a_torn_line_or_nothing(tmp_path: Path) -> None:
    assert read_folder(tmp_path, live=True).figures is None
    (tmp_path / "steps.jsonl").write_text(json.dumps(RECORDS[0]) + '\n{"step": 2, "lo')
    found = read_steps(tmp_path / "steps.jsonl", live=True)
    assert found is not None and found.step.tolist() == [1]


def test_two_runs_are_compared_in_speed_and_at_the_last_step_of_both(tmp_path: Path) -> None:
    slow = [{**RECORDS[0], "tokens_per_second": 50.0}, {**RECORDS[1], "tokens_per_second": 50.0, "loss": 3.25},
            {**RECORDS[1], "step": 3, "tokens_per_second": 50.0, "loss": 1.0}]
    runs = [read_folder(folder_with(tmp_path / name, records)) for name, records in (("a", RECORDS), ("b", slow))]
    first, second = (replace(run, figures=replace(run.figures, name=name)) for run, name in zip(runs, "ab", strict=True)
                     if run.figures is not None)
    assert verdict_on_two(first, second) == (
        "a trains 2.00× as fast as b: 100 tokens/s against 50. After step 2, the last that both have, the losses are "
        "3.5 and 3.25.")
    bare = RunFiles(figures=RunFigures(np.array([9]), ()))
    assert verdict_on_two(bare, bare) == ""


def rank_trace(rank: int, *exchanges: tuple[float, float, float]) -> StepTrace:
    """Each exchange as (sent, wait begins, arrived), with computing in between."""
    spans = [Span("layers", "linear", 0.0, 9.0)]
    for sent, begins, arrived in exchanges:
        spans += [Span("exchange", "network", sent, arrived, 1000), Span("exchange", "wait", begins, arrived, 1000)]
    return StepTrace(rank, 1, tuple(sorted(spans, key=lambda span: span.start_seconds)))


def pairs(source: list[int], destination: list[int], ranks: int, tp: int = 1) -> RankFigures:
    one, none = np.ones(ranks), np.zeros(1, dtype=np.int64)
    return RankFigures(1, "causal pairs", 0.05, one, one, np.array(source), np.array(destination),
                       np.full(len(source), 1000), np.array([1]), none, none, none + 1, none, none, np.ones(ranks * tp))


TRACES = (  # two exchanges: in the first rank 1 sends last, in the second everybody sends before anybody waits
    rank_trace(0, (1.0, 1.5, 4.2), (5.0, 6.0, 6.5)),
    rank_trace(1, (4.0, 4.1, 4.2), (5.0, 6.0, 6.1)),
    rank_trace(2, (3.0, 3.5, 4.3), (5.0, 6.0, 6.2)))


def test_the_last_sender_is_the_one_that_is_waited_for() -> None:
    waits = largest_waits(TRACES, None)
    assert [(wait.rank, wait.waits_for, round(wait.seconds, 6)) for wait in waits] == [
        (0, "rank 1", 2.7), (2, "rank 1", 0.8), (0, "the network", 0.5), (2, "the network", 0.2),
        (1, "the network", 0.1), (1, "the network", 0.1)]


def test_only_a_rank_that_exchanges_tokens_with_it_is_waited_for() -> None:
    """Rank 1 sends last, but rank 0 has to do with rank 2 alone: that one sent at 3.0."""
    assert [(wait.rank, wait.waits_for) for wait in largest_waits(TRACES, pairs([2, 1], [0, 2], 3))[:2]] == [
        (0, "rank 2"), (2, "rank 1")]


def test_tensor_parallel_ranks_wait_for_their_own_kind() -> None:
    """Ranks 0 and 2 are one pool, 1 and 3 the other: what rank 3 sends late holds up rank 1 alone."""
    traces = (rank_trace(0, (1.0, 2.0, 3.0)), rank_trace(1, (1.0, 2.0, 6.0)), rank_trace(2, (2.5, 2.6, 3.0)),
              rank_trace(3, (5.5, 5.6, 6.0)))
    found = {wait.rank: wait.waits_for for wait in largest_waits(traces, pairs([0, 1], [1, 0], 2, tp=2))}
    assert found == {0: "rank 2", 1: "rank 3", 2: "the network", 3: "the network"}


def test_neighbours_and_old_traces_still_make_a_list() -> None:
    traces = (StepTrace(0, 1, (Span("neighbour", "wait", 0.0, 2.0), Span("exchange", "wait", 3.0, 4.0))),)
    assert [wait.waits_for for wait in largest_waits(traces, None)] == ["a neighbouring stage", "the network"]
    assert largest_waits((StepTrace(0, 1, ()),), None) == ()


def test_the_head_of_a_step_names_its_figures() -> None:
    title, _, facts = step_detail(1200, pairs([0], [1], 2))
    assert title == "Step 1,200" and dict(facts)["bytes across ranks, forward"] == "1 kB"
    assert "ranks_5.json" in step_detail(5, None)[1]
