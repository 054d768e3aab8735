"""The paper's claims: what is measured must have the shape it should, and verdicts must be able to say no."""

from __future__ import annotations

import ast
import json
import re
import shlex
from dataclasses import replace
from pathlib import Path
from typing import Any

import check_paper
import pytest
from hypothesis import given
from hypothesis import strategies as st
from paper import claims
from paper.cases import FIGURES, Case, cases
from paper.check import hidden_shards_bound, measure, measure_all
from paper.claims import CLAIMS, PAPER_SPEED, figures_of, verdicts

import distca
from distca.cli import run
from distca.cost.attention_time import shipped_table
from distca.models import MODELS, model_named
from distca.spec import cluster_named

PACKAGE = Path(distca.__file__).parent
KIB = 1024
Quick = tuple[dict[str, Any], Path]  # what the command said, and the folder it wrote to


@pytest.fixture(scope="module")
def quick(tmp_path_factory: pytest.TempPathFactory) -> Quick:
    folder = tmp_path_factory.mktemp("paper")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.setattr("paper.check.cases", lambda figure, quick: cases(figure, quick)[-1 if figure == "fig10" else 0:])
        said: list[str] = []
        patch.setattr("builtins.print", lambda *parts, **_: said.append(" ".join(map(str, parts))))
        with pytest.raises(SystemExit) as stop:
            run(check_paper.app, "check_paper.py", ["--quick", "--batches", "1", "--out", "drawn/here", "--json"])
    assert stop.value.code == 0
    return json.loads(said[0]), folder


def test_every_claim_has_a_verdict_and_every_difference_a_reason(quick: Quick) -> None:
    found = quick[0]["claims"]
    assert {line["claim"] for line in found} == set(CLAIMS)
    for line in found:
        assert all(line[field] for field in ("what", "paper", "ours", "setting")), line
        assert line["agrees"] == (line["why"] == ""), line


def test_there_is_a_picture_of_every_figure(quick: Quick) -> None:
    found, folder = quick
    assert {Path(path).stem for path in found["plots"]} == set(FIGURES)
    for path in found["plots"]:
        assert (folder / path).read_bytes().startswith(b"\x89PNG") and (folder / path).stat().st_size > 10_000


def test_gathering_keys_grows_with_the_nodes(quick: Quick) -> None:
    rows = quick[0]["rows"]["fig3"]
    for field in ("gather_share", "gather_and_scatter_share", "kv_memory_share"):
        values = [row[field] for row in rows]
        assert values == sorted(values) and values[-1] > 4 * values[0], field
        assert values[0] > 0 and values[-1] < 1


def test_more_tolerance_moves_less_and_waits_longer(quick: Quick) -> None:
    rows = [row for row in quick[0]["rows"]["fig12"] if row["placement"] == "given"]
    assert rows[0]["tolerance"] == 0 and rows[0]["bytes_over"] == rows[0]["seconds_over"] == 1
    moved = [row["gigabytes"] for row in rows]
    assert moved == sorted(moved, reverse=True) and moved[-1] < 0.8 * moved[0]
    assert rows[-1]["seconds_over"] > 1.05


def test_ping_pong_lies_between_waiting_and_sending_nothing(quick: Quick) -> None:
    for row in quick[0]["rows"]["fig11"]:
        assert row["one_byte_over"] <= 1 < row["single_stream_over"] + 0.05
        if row["placement"] == "given":
            assert row["single_stream_over"] > 1                 # placed documents leave little to hide, and half-size
    assert len(quick[0]["rows"]["fig11"]) == 2                   # calls pay for two tails


def test_speeds_are_ratios_of_the_seconds_beside_them(quick: Quick) -> None:
    for row in (*quick[0]["rows"]["fig9"], *quick[0]["rows"]["fig10"]):
        assert row["distca"] == pytest.approx(row["wlb_ideal_seconds"] / row["distca_seconds"])
        assert row["distca_of_bound"] == pytest.approx(row["bound_seconds"] / row["distca_seconds"])
        assert 0 <= row["wlb_ideal_exposed_share"] < 1
        assert row["distca_of_bound"] <= row["one_byte_of_bound"] <= row["free_links_of_bound"] <= 1


def test_the_settings_are_all_there() -> None:
    for figure, models, nodes in (("fig9", 2, {8, 16, 32}), ("fig10", 2, {8, 16, 32, 64})):
        full = cases(figure, quick=False)
        assert len({(case.model, case.nodes, case.context, case.data) for case in full}) == len(full) == 36
        assert len({case.model for case in full}) == models and {case.nodes for case in full} == nodes
    tokens = {(case.nodes, case.sequences * case.context) for case in cases("fig9", False) if case.model == "llama3-8b"}
    assert tokens == {(nodes, nodes * 64 * KIB) for nodes in (8, 16, 32)}
    assert all(case.settings() for figure in FIGURES for case in cases(figure, False))


def test_a_pipeline_is_chosen_among_those_that_fit() -> None:
    case = Case("fig10", "llama-34b", 32, 384 * KIB, 8, "pretrain", (1, 2, 4))
    wanted = {(where.pp, where.num_micro_batches) for where in case.settings()}
    assert wanted == {(1, 8), (1, 4), (1, 2), (1, 1), (2, 8), (2, 4), (2, 2), (4, 8), (4, 4)}
    (row,) = measure(Case("fig10", "llama3-8b", 4, 64 * KIB, 4, "pretrain", (1, 2)), 1)
    assert row["distca_choice"].endswith("no pipeline")  # no bubble


def _speed_row(model: str, data: str, **changed: Any) -> dict[str, Any]:
    row = {"model": model, "nodes": 8, "context": 128 * KIB, "sequences": 4, "data": data, "disaggregated": 1.1,
           "distca": 1.5, "distca_of_bound": 0.97, "one_byte_of_bound": 0.98, "free_links_of_bound": 0.99,
           "wlb_ideal_seconds": 1.5, "wlb_ideal_exposed_share": 0.2, "bound_seconds": 1.0}
    return row | changed


@pytest.mark.parametrize(("changed", "agrees"), [
    ({}, (True, True, True)),
    ({"disaggregated": 1.5}, (False, True, True)),
    ({"disaggregated": 0.9}, (False, True, True)),
    ({"distca": 1.02}, (True, False, True)),           # below the paper's lower end
    ({"distca": 1.08}, (True, False, True)),           # never reaches its upper end
    ({"distca_of_bound": 0.94}, (True, True, False)),
])
def test_a_verdict_on_speed_can_be_no(changed: dict[str, float], agrees: tuple[bool, bool, bool]) -> None:
    found = verdicts(["fig9"], {"fig9": [_speed_row("llama3-8b", "prolong", **changed)]})
    assert tuple(verdict.agrees for verdict in found) == agrees
    assert all(bool(verdict.why) != verdict.agrees for verdict in found)


def test_what_does_not_fit_is_said() -> None:
    too_large = _speed_row("llama-34b", "prolong", disaggregated=None, distca=None, distca_of_bound=None)
    rows = [_speed_row("llama-34b", "prolong"), too_large]
    assert "1 setting (1 do not fit)" in verdicts(["fig10"], {"fig10": rows})[0].setting


def test_unequal_activations_and_large_buffers_differ() -> None:
    row = {"activations_max_over_min": 1.0, "buffers_of_activations": 0.02}
    for changed, agrees in (({}, [True, True]), ({"activations_max_over_min": 1.001}, [False, True]),
                            ({"buffers_of_activations": 0.11}, [True, False])):
        assert [verdict.agrees for verdict in verdicts(["memory"], {"memory": [row | changed] * 2})] == agrees


def test_only_the_claims_know_the_papers_figures() -> None:
    figures = {number for pair in PAPER_SPEED.values() for number in pair if number > 1} | {
        *claims.PAPER_IDLE.values(), *claims.PAPER_SINGLE_STREAM[1:]}
    for path in [*(PACKAGE / "simulate").glob("*.py"), *Path(claims.__file__).parent.glob("*.py")]:
        tree = ast.parse(path.read_text(encoding="utf-8"))
        imported = {node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
        if path.name not in ("claims.py", "plots.py"):
            assert "paper.claims" not in imported, path.name
        if path.name in ("check.py", "cases.py"):
            assert not figures & {node.value for node in ast.walk(tree) if isinstance(node, ast.Constant)}


@pytest.mark.parametrize(("arguments", "said"), [
    (("--only", "fig9,fig99"), "only has 'fig99'; choose from: fig3a"),
    (("--batches", "0"), "batches is 0"),
    (("--workers", "0"), "workers is 0"),
    (("--out", "taken/below"), "out is 'taken/below' and cannot be made"),
])
def test_mistakes_are_one_line_and_exit_code_2(arguments: tuple[str, str], said: str,
                                               capsys: pytest.CaptureFixture[str], tmp_path: Path,
                                               monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "taken").write_text("a file")
    with pytest.raises(SystemExit) as stop:
        run(check_paper.app, "check_paper.py", ["--quick", *arguments])
    captured = capsys.readouterr()
    assert (stop.value.code, captured.out) == (2, "")
    assert captured.err.count("\n") == 1 and said in captured.err


def test_the_checklist_is_readable(capsys: pytest.CaptureFixture[str], tmp_path: Path,
                                   monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "100")
    slow_on_short_shards = shipped_table("h200_cudnn")           # in backward
    monkeypatch.setattr("paper.check._table", lambda: slow_on_short_shards)
    with pytest.raises(SystemExit) as stop:
        run(check_paper.app, "check_paper.py", ["--only", "appA,fig5", "--no-plots", "--workers", "1"])
    said = capsys.readouterr().out
    assert stop.value.code == 0 and not list(tmp_path.iterdir())
    assert "appA" in said and "agrees" in said and "2 of 3 agree" in said
    assert figures_of(["appA", "fig3b", "fig3a"]) == ("appA", "fig3")


def test_every_command_of_the_guide_runs(quick: Quick, monkeypatch: pytest.MonkeyPatch, tmp_path: Path,
                                         capsys: pytest.CaptureFixture[str]) -> None:
    text = (PACKAGE.parent / "docs/reference/paper.md").read_text(encoding="utf-8")
    assert all(f"`{claim}`" in text for claim in CLAIMS)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("check_paper.measure_all",
                        lambda figures, **_: {figure: quick[0]["rows"][figure] for figure in figures})
    given = re.findall(r"^make paper(?: ARGS='([^']*)')?", text, re.MULTILINE)
    for arguments in map(shlex.split, given):
        with pytest.raises(SystemExit) as stop:
            run(check_paper.app, "check_paper.py", arguments)
        assert stop.value.code == 0
    assert len(given) == 3 and len(list((tmp_path / "paper").iterdir())) == len(FIGURES)
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["plots"] == []


@given(st.sampled_from(["llama3-8b", "llama-34b"]), st.sampled_from([1, 2, 4, 8]), st.floats(1e14, 1e15))
def test_the_bound_is_where_communication_stops_hiding(name: str, tp: int, rate: float) -> None:
    model, cluster = model_named(name), replace(cluster_named("dgx-h200"), peak_flops_per_second=rate)
    shards = hidden_shards_bound(model, cluster, tp)
    compute_seconds = 2 * (4 * model.hidden**2 + 3 * model.hidden * model.ffn) / tp / rate
    token_bytes = model.q_token_bytes(tp) + (shards + 1) / 2 * model.kv_token_bytes(tp)
    assert token_bytes / 50e9 == pytest.approx(compute_seconds)


def test_about_31_shards_hide_for_llama_34b_at_50_gigabytes_a_second() -> None:
    # 4 * 8192**2 + 3 * 8192 * 22016 = 809.5 M weights, 1.619 GFLOP a token, 1.637 us at 989 TFLOP/s: the NIC carries
    # 81,849 bytes meanwhile. With h_q = 16,384 and h_kv = 4,096 bytes: 2 * (81,849 - 16,384) / 4,096 - 1 = 30.97.
    model, cluster = model_named("llama-34b"), cluster_named("dgx-h200")
    assert hidden_shards_bound(model, cluster) == pytest.approx(30.97, abs=0.01)
    assert hidden_shards_bound(model, cluster, tp=8) == pytest.approx(hidden_shards_bound(model, cluster))


def test_the_bound_falls_with_faster_compute_and_rises_with_bandwidth() -> None:
    cluster = cluster_named("dgx-h200")
    for model in MODELS.values():
        bound = hidden_shards_bound(model, cluster)
        assert hidden_shards_bound(model, replace(cluster, inter_node_bandwidth=100e9)) > bound
        assert hidden_shards_bound(model, replace(cluster, peak_flops_per_second=2e15)) < bound


def test_a_check_that_was_interrupted_goes_on_where_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kept, steps = tmp_path / "kept.jsonl", list[str]()

    def rows(batches: int) -> dict[str, list[dict[str, object]]]:
        return measure_all(("fig5", "appA"), quick=True, num_batches=batches, workers=1, step=steps.append, kept=kept)

    def fails(case: Case, num_batches: int) -> list[dict[str, object]]:
        if case.figure == "appA":
            raise KeyboardInterrupt
        return measure(case, num_batches)

    with monkeypatch.context() as patch:
        patch.setattr("paper.check.measure", fails)
        with pytest.raises(KeyboardInterrupt):
            rows(1)
    assert steps == ["fig5"] and len(kept.read_text().splitlines()) == 1
    measured = list[str]()

    def noted(case: Case, num_batches: int) -> list[dict[str, object]]:
        measured.append(case.figure)
        return measure(case, num_batches)

    monkeypatch.setattr("paper.check.measure", noted)
    found = rows(1)
    assert measured == ["appA"] and steps == ["fig5", "fig5", "appA"]
    assert found == {figure: measure(cases(figure, True)[0], 1) for figure in ("fig5", "appA")}
    rows(2)                                                      # of other batches: nothing can be reused
    assert measured == ["appA", "fig5", "appA"]
