"""Settings about speed and memory: what cannot run is refused by name, and who compiles depends on the device."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from distca.train.settings import Settings, preflight
from distca.train.settings.checks import check_settings
from distca.train.settings.preflight import check_machine, compiles

CPU, CUDA = torch.device("cpu"), torch.device("cuda")


@pytest.mark.parametrize(("values", "message"), [
    ({"model.tile_tokens": 64}, r"model.tile_tokens is 64 but model.recompute is 'none'; set it to 'full'"),
    ({"model.offload": 2.0, "model.recompute": "selective"}, r"model.offload is 2.0 but .* is 'selective'"),
    ({"model.recompute": "some"}, r"model.recompute is 'some'; .*choose one of: none, selective, full"),
    ({"model.name": "qwen3-30b-a3b"}, r"model.name is 'qwen3-30b-a3b', whose experts .*; train it in .* with enable"),
    ({"model.compile": "yes"}, r"model.compile is 'yes'; .*choose one of: auto, on, off"),
    ({"model.offload": -1.0}, r"model.offload is -1.0; give a number of at least 0"),
])
def test_settings_that_cannot_run_anywhere(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        check_settings(Settings().with_values(values))


def test_offloading_on_a_cpu_is_refused(tmp_path: Path) -> None:
    chosen = Settings().with_values({"run.device": "cpu", "model.recompute": "full", "model.offload": 4.0,
                                     "log.folder": str(tmp_path)})
    check_settings(chosen)
    with pytest.raises(ValueError, match=r"model.offload is 4 but this run is on cpu, .*; set it to 0"):
        check_machine(chosen)


def test_links_over_nixl_need_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preflight, "find_spec", lambda name: None if name == "nixl" else name)
    with pytest.raises(ValueError, match=r'attention\.links is "nixl" but nixl is not installed; run: pip'):
        check_machine(Settings().with_values({"attention.links": "nixl"}))


def test_who_compiles(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    def chosen(value: str) -> Settings:
        return Settings().with_values({"model.compile": value})

    monkeypatch.setattr(preflight, "find_spec", lambda name: name)
    monkeypatch.setattr(shutil, "which", lambda name: name)
    assert [compiles(chosen("auto"), device) for device in (CPU, CUDA)] == [False, True]
    assert [compiles(chosen("on"), device) for device in (CPU, CUDA)] == [True, True]
    assert [compiles(chosen("off"), device) for device in (CPU, CUDA)] == [False, False]
    monkeypatch.setattr(preflight, "find_spec", lambda name: None)
    monkeypatch.setattr(shutil, "which", lambda name: None)
    assert not compiles(chosen("auto"), CUDA) and "triton is not installed" in caplog.text
    with pytest.raises(ValueError, match=r"model.compile is 'on' but no C\+\+ compiler .* or set it to off"):
        compiles(chosen("on"), CPU)
