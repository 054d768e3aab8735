"""Verdicts on records that are made up: what is wrong, what is slow and how it is said."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import pytest

from distca.report.doctor import MAX_NOTES, numbers, page, report

Record = dict[str, Any]


def records(size: int, ranks_per_node: int) -> list[Record]:
    """What healthy ranks with a GPU each send to each other, every rank with all others."""
    def link(rank: int, to: int) -> Record:
        between = rank // ranks_per_node != to // ranks_per_node
        return {"from": rank, "to": to, "between_nodes": between, "latency_seconds": 1e-5,
                "bandwidth": 5e10 if between else 4e11}

    speed = {"kernel": "hopper", "queries": 4096, "keys": 16384, "shards": [2, 2], "linear_seconds": 1e-3,
             "attention_seconds": [2e-3, 5e-3], "copy_bytes_per_second": 4e12, "table": "h200",
             "table_seconds": [2e-3, 4.9e-3]}
    attention = {"transport": "c10d", "refused": None, "hops": 1, "servers": [0, 0], "tasks": 2 * size, "moved": size,
                 "allowed": 1e-2, "off": [3e-3, 3e-3], "keys_off": 4e-3}
    return [deepcopy({
        "name": f"rank {rank} (node{rank // ranks_per_node}, GPU {rank % ranks_per_node})", "kind": "cuda",
        "host": f"node{rank // ranks_per_node}", "machine": f"m{rank // ranks_per_node}", "device": "NVIDIA H200",
        "gpu": f"GPU-{rank}", "memory_bytes": 150_000_000_000, "versions": {"torch": "2.11.0", "driver": "580.1"},
        "kernels": {"hopper": None, "fa4": "not installed"},
        "links": [link(rank, to) for to in range(size) if to != rank], "speed": speed,
        "attention": [attention | {"servers": [rank, (rank + 1) % size]}]}) for rank in range(size)]


def test_healthy_ranks_pass_on_one_screen() -> None:
    found = report(records(16, 8))
    assert found["ok"] and not found["problems"] and not found["notes"]
    text = "\n".join(page(found))
    assert "hosts      node0: ranks 0-7; node1: ranks 8-15" in text and "NVIDIA H200, 150 GB" in text
    assert "run here: hopper" in text and "not fa4: not installed" in text
    assert "inside nodes: 400 GB/s, 10 µs; slowest of 112: 400 GB/s" in text and "between nodes: 50 GB/s" in text
    assert "exact over transport c10d, 16 of 32 tasks moved: off by 4.0e-03 of the result" in text
    assert "1.00 and 1.02 times the shipped table 'h200'" in text
    assert len(page(found)) <= 24 and page(found)[-1].startswith("next       distca plan")


def test_versions_that_differ_name_their_ranks() -> None:
    ranks = records(4, 2)
    ranks[3]["versions"]["driver"] = "570.2"
    del ranks[1]["versions"]["torch"]
    found = report(ranks)
    assert not found["ok"] and found["problems"] == [
        "driver differs: 580.1 on ranks 0-2, 570.2 on rank 3; give all ranks the same",
        "torch differs: 2.11.0 on ranks 0, 2-3, none on rank 1; give all ranks the same"]
    assert page(found)[-1] == "next       mend what is wrong, and run distca doctor again"


def test_wrong_results_name_the_server_or_the_pair() -> None:
    ranks = records(4, 2)
    ranks[1]["attention"][0]["off"] = [3e-3, 0.5]                # rank 1's queries on rank 2
    assert report(ranks)["problems"] == [
        "rank 2 (node1, GPU 0) returns wrong attention to rank 1 over transport c10d, off by 5.0e-01 of the result, "
        "and rounding explains 1.0e-02: check the links between them"]
    ranks[2]["attention"][0]["off"] = [1e6, 3e-3]                # and its own
    (line,) = report(ranks)["problems"]
    assert line.startswith("rank 2 (node1, GPU 0) computes wrong attention over transport c10d, off by 1.0e+06 of")
    assert any(one.startswith("attention  WRONG over transport c10d") for one in page(report(ranks)))
    ranks = records(2, 2)
    ranks[0]["attention"][0]["keys_off"] = 0.1
    (line,) = report(ranks)["problems"]
    assert line.startswith("rank 0 (node0, GPU 0) gets wrong gradients of keys over transport c10d, off by 1.0e-01")
    for one in ranks:
        one["attention"][0] = {"transport": "auto", "refused": "no peer access"}
    assert report(ranks)["problems"] == [
        "transport auto cannot be set up: no peer access; keep to attention.transport c10d"]


def test_machines_of_one_name_are_wrong() -> None:
    ranks = records(4, 2)
    for one in ranks:
        one["host"] = "localhost"
    assert report(ranks)["problems"] == [
        "2 machines have the host name 'localhost'; give each its own, to tell nodes apart"]


@pytest.mark.parametrize(("field", "value", "text"), [
    ("linear_seconds", 1.2e-3, "matrix products take 1.20 times the median on NVIDIA H200 (noted from 1.15: GPUs of "),
    ("attention_seconds", [3e-3, 5.6e-3], "attention takes 1.23 times the median"),  # and more than the table says
    ("copy_bytes_per_second", 2e12, "copies take 2.00 times the median"),
    ("table_seconds", [1e-3, 5e-3], "attention forward takes 2.00 times what 'h200' says"),
    ("linear_seconds", 1.1e-3, ""),
])
def test_a_slow_rank_is_a_note_by_name(field: str, value: Any, text: str) -> None:
    ranks = records(8, 8)
    ranks[5]["speed"][field] = value
    found = report(ranks)
    assert found["ok"] and bool(found["notes"]) == bool(text)
    assert not text or found["notes"][0].startswith(f"rank 5 (node0, GPU 5): {text}")
    assert all(note.startswith("rank 5 ") for note in found["notes"])


def test_ranks_are_compared_with_those_on_like_devices() -> None:
    ranks = records(4, 4)
    for one in ranks[2:]:
        one["device"] = "NVIDIA A100"
        one["speed"].update(linear_seconds=3e-3, table=None, table_seconds=[])
    notes = report(ranks)["notes"]
    assert notes == ["devices differ: NVIDIA H200 on ranks 0-1, NVIDIA A100 on ranks 2-3; profile each kind"]


def test_a_slow_link_and_a_rank_of_slow_links_are_notes_by_name() -> None:
    ranks = records(8, 8)
    ranks[2]["links"][0]["bandwidth"] = 1e11                     # to rank 0
    (note,) = report(ranks)["notes"]
    assert note.startswith("the link inside nodes from rank 2 (node0, GPU 2) to rank 0 (node0, GPU 0) has 100 GB/s, 4 "
                           "times less than the median (noted from 1.5: ")
    ranks = records(8, 8)
    for one in ranks:
        for link in one["links"]:
            if 3 in (link["from"], link["to"]):
                link["bandwidth"] = 1e11
    (note,) = report(ranks)["notes"]
    assert note.startswith("all links inside nodes of rank 3 (node0, GPU 3) have 100 GB/s, 4 times less")


def test_ranks_that_share_a_gpu_and_a_gpu_that_torch_does_not_find_are_notes() -> None:
    ranks = records(2, 2)
    ranks[1]["gpu"] = ranks[0]["gpu"]
    assert report(ranks)["notes"] == ["ranks 0-1 share one GPU, GPU-0; their speeds were measured one after the other"]
    for one in ranks:
        one.update(kind="cpu", gpu=None)
    assert report(ranks)["notes"][0].startswith("an NVIDIA driver is here but torch finds no GPU: ")


def test_notes_stay_on_the_screen() -> None:
    ranks = records(64, 8)
    for one in ranks[::3]:
        one["speed"]["linear_seconds"] = 1.0
    assert len(report(ranks)["notes"]) == MAX_NOTES


@pytest.mark.parametrize(("ranks", "text"), [
    ([3], "rank 3"), ([0, 1, 2], "ranks 0-2"), ([5, 0, 1], "ranks 0-1, 5"), (range(100), "ranks 0-99")])
def test_rank_numbers(ranks: list[int], text: str) -> None:
    assert numbers(ranks) == text
