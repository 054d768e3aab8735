"""`distca check` finds every planted fault by its name, and nothing in sound models of eleven architectures."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch

from distca.runtime.transport import Transport
from tests.support.processes import run_processes, values

pytest.importorskip("transformers")

from distca.check import causes
from distca.check.examine import GIVEN, examine
from distca.check.subject import subject_of, with_attention
from distca.cli.check import page
from tests.support import planted

CPU = torch.device("cpu")
PLANTED = {  # a function of tests.support.planted -> what is found first
    "mask_of_ones": "other-documents", "cache_left_on": "other-documents", "edges_unread": "other-documents",
    "positions_dropped": "other-documents", "edges_off_by_one": "other-documents", "edges_early": "other-documents",
    "state_carried": "other-documents",
    "future_seen": "future", "padding_attended": "padding", "positions_not_reset": "positions",
    "window_too_long": "window", "window_too_short": "window", "window_ignored": "window",
    "sinks_dropped": "kernel", "scale_ignored": "kernel", "softcap_ignored": "kernel", "heads_mixed": "kernel",
    "labels_across": "label-across", "labels_shifted_twice": "label-shift", "mean_of_rows": "loss",
    "count_ignored": "loss", "micro_batches_averaged": "loss", "gradients_doubled": "gradients",
    "backward_wrong": "gradients", "gradients_times_ranks": "gradient-scale",
}
OVER_RANKS = {
    "over_ranks": None, "over_ranks_windows": None, "sound_step": None, "sound_trainer": None,
    "span_rotated_from_zero": "positions", "token_on_both_ranks": "batch", "labels_lost_at_the_cut": "label-lost",
    "mean_of_ranks": "loss", "step_counts_its_own_rank": "gradient-scale", "trainer_counts_its_own_rank": "loss",
}
SOUND = ("sound", "sound_rows", "sound_padding", "sound_wrapper", "sound_attention", "sound_sinks", "sound_step",
         "sound_trainer", "sound_loss_of_its_own", "sound_experts")


def found_in(name: str) -> dict[str, Any]:
    found = examine(subject_of(f"tests.support.planted:{name}", CPU, None))
    found["seconds"] = 0.0
    return found


@pytest.mark.parametrize("name", PLANTED)
def test_a_planted_fault_is_found_and_said_in_a_line(name: str) -> None:
    found = found_in(name)
    assert not found["ok"] and PLANTED[name] in {one["kind"] for one in causes(found["findings"])}
    assert all(one["wrong"] for one in found["probes"] if one["probe"] == PROBE[PLANTED[name]])
    lines = [line for line in page(found) if line.startswith("WRONG ") and GIVEN not in line]
    assert len(lines) == len(causes(found["findings"])) and all("; " in line for line in lines)


PROBE = {"other-documents": "one token", "future": "one token", "padding": "one token", "positions": "positions",
         "window": "layers", "kernel": "attention", "label-across": "labels", "label-shift": "labels", "loss": None,
         "gradients": "gradients", "gradient-scale": "gradients"}


@pytest.mark.parametrize("name", SOUND)
def test_nothing_is_found_where_nothing_is_wrong(name: str) -> None:
    found = found_in(name)
    assert found["ok"] and found["findings"] == [] and page(found)[-2].endswith("packing is right")
    assert {"one token", "packed against alone", "attention", "loss", "gradients"} <= {
        one["probe"] for one in found["probes"]}


def test_a_state_that_is_carried_on_is_not_blamed_on_attention() -> None:
    finding = causes(found_in("state_carried")["findings"])[0]
    assert "its conv layers carry their state on into the next document: pass cu_seq_lens_q" in finding["remedy"]


def test_a_model_of_your_own_is_compared_with_itself() -> None:
    found = found_in("sound_plain")
    assert found["ok"] and "attention" not in {one["probe"] for one in found["probes"]}
    assert any("not one of Transformers" in one for one in found["notes"])


def over_ranks(transport: Transport) -> dict[str, Any]:
    rank = str(transport.rank)                                   # by which a Trainer knows that there are ranks
    os.environ.update(RANK=rank, LOCAL_RANK=rank, WORLD_SIZE="2", LOCAL_WORLD_SIZE="2", MASTER_ADDR="127.0.0.1",
                      MASTER_PORT="1")
    return {name: found_in(name) for name in OVER_RANKS}


@pytest.mark.multiprocess
def test_faults_between_two_ranks_are_found() -> None:
    first, second = values(run_processes(2, over_ranks, timeout_seconds=60, deadline_seconds=200))
    for name, kind in OVER_RANKS.items():
        found = first[name]
        assert [one["line"] for one in found["findings"]] == [one["line"] for one in second[name]["findings"]]
        kinds = {one["kind"] for one in causes(found["findings"])}
        assert kind in kinds if kind else not kinds, (name, kinds)
    said = " ".join(one["line"] for one in first["step_counts_its_own_rank"]["findings"])
    assert "gradients are 2 times" in said and "the number of ranks" in said
    (rotated, *_) = first["span_rotated_from_zero"]["findings"]
    assert "rank 1, row 0, token 0 (position 36 of document 0)" in rotated["where"]


@pytest.mark.parametrize("with_distca", [False, True], ids=["as it is", "enabled"])
@pytest.mark.parametrize("kind", planted.MODELS)
def test_models_of_transformers_are_sound(kind: str, with_distca: bool, tmp_path: Path) -> None:
    """Except gpt-oss, whose masks do not get position_ids: its packed documents see each other without distca."""
    from distca.integrations.huggingface import enable

    planted.config_of(kind).save_pretrained(tmp_path)
    found = examine(with_attention(subject_of(str(tmp_path), CPU, None), enable if with_distca else None))
    assert {one["batch"] for one in found["probes"]} == {
        "one flattened row", "two rows", "a flattened row with cu_seq_lens", "padded rows"}
    kinds = {one["kind"] for one in causes(found["findings"])}
    assert kinds == ({"other-documents"} if kind == "gpt_oss" and not with_distca else set())


def spanning(transport: Transport, folder: str) -> bool:
    from distca.integrations.huggingface import enable

    found = examine(with_attention(subject_of(folder, CPU, None), enable))
    assert any("balanced placement" in one["batch"] for one in found["probes"])
    return bool(found["ok"])


@pytest.mark.multiprocess
def test_documents_over_ranks_are_examined_where_distca_is_enabled(tmp_path: Path) -> None:
    planted.config_of("gpt_oss").save_pretrained(tmp_path)
    assert values(run_processes(2, spanning, str(tmp_path), timeout_seconds=60, deadline_seconds=120)) == [True, True]
