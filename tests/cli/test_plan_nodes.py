"""`distca plan` with nodes: what crosses them is in the JSON, the table, the plot and the page."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

import distca
from distca.models import MODELS
from distca.workload.documents import sample_lengths

Run = Callable[..., tuple[int, str, str]]
BATCH = ("plan", "prolong", "--ranks", 8, "--tokens-per-rank", 16384, "--seed", 2)


@pytest.mark.parametrize("placement", ["given", "balanced"])
def test_json_says_what_crosses_nodes(run: Run, placement: str) -> None:
    code, out, err = run(*BATCH, "--ranks-per-node", 4, "--placement", placement, "--json")
    assert (code, err) == (0, "")
    said = json.loads(out)
    topology = distca.Topology.regular(8, 4)
    layout = distca.pack(sample_lengths("prolong", 8 * 16384, seed=2), ranks=8, placement=said["placement_used"],
                         topology=topology)
    summary = distca.plan(layout, "llama3-8b", topology=topology).summary()
    assert said["ranks_per_node"] == 4
    assert said["bytes_between_nodes"] == summary.bytes_between_nodes
    assert said["bytes_between_nodes_max"] == summary.bytes_between_nodes_max
    assert said["bytes_between_nodes"] <= said["bytes_total"] == summary.bytes_total


def test_without_nodes_nothing_is_said_of_them(run: Run) -> None:
    code, out, _ = run(*BATCH, "--json")
    said = json.loads(out)
    assert code == 0
    assert [said[key] for key in ("ranks_per_node", "bytes_between_nodes", "bytes_between_nodes_max")] == [None] * 3
    assert "between nodes" not in run(*BATCH)[1]


def test_the_table_and_the_page_show_levels(run: Run, tmp_path: Path) -> None:
    page = tmp_path / "plan.html"
    code, out, err = run(*BATCH, "--ranks-per-node", 4, "--html", page)
    assert (code, err) == (0, "")
    assert "in 2 nodes of up to 4" in out and "bytes between nodes, once per node" in out
    assert "between nodes" in page.read_text(encoding="utf-8")


def test_the_plot_shows_levels(run: Run, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    picture = tmp_path / "plan.svg"
    assert run(*BATCH, "--ranks-per-node", 4, "--plot", picture)[0] == 0
    assert picture.stat().st_size > 0


def test_a_cluster_says_how_many_ranks_share_a_node(run: Run, tmp_path: Path) -> None:
    cluster = tmp_path / "mine.toml"
    cluster.write_text('base = "dgx-h200"\ngpus_per_node = 4\n', encoding="utf-8")
    code, out, _ = run(*BATCH, "--cluster", cluster, "--tp", 2, "--json")
    assert code == 0
    assert json.loads(out)["ranks_per_node"] == 2


@pytest.mark.parametrize(("options", "problem"), [
    (("--ranks-per-node", 0), "ranks_per_node is 0"),
    (("--ranks-per-node", 4, "--cluster", "dgx-h200"), "ranks_per_node is 4 and cluster 'dgx-h200'; give one of them"),
    (("--cluster", "dgx-h300"), "cluster 'dgx-h300' is unknown"),
])
def test_bad_nodes_are_refused_in_one_line(run: Run, options: tuple[object, ...], problem: str) -> None:
    code, out, err = run(*BATCH, *options)
    assert (code, out) == (2, "")
    assert err.startswith("distca: error: ") and problem in err and err.count("\n") == 1


def test_a_batch_of_one_document_is_placed_as_given(run: Run, tmp_path: Path) -> None:
    """Balanced placement has nothing to fill its ranks with, and must not send more for it."""
    lengths = tmp_path / "one.txt"
    lengths.write_text(f"{32 * 65_536}\n", encoding="utf-8")
    said = {placement: json.loads(run("plan", lengths, "--ranks", 32, "--placement", placement, "--json")[1])
            for placement in ("given", "balanced")}
    assert said["balanced"]["placement"] == "balanced"
    for key in ("bytes_total", "bytes_sent_max"):
        assert said["balanced"][key] <= said["given"][key]
    assert MODELS["llama3-8b"].name == said["given"]["model"]
