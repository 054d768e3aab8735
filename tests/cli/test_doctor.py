"""`distca doctor` as a user meets it: alone, under a launcher, where ranks are missing, and without torch."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
import tomllib
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

import distca
from distca.cli import doctor as command
from distca.report.doctor import EXTRAS, report
from distca.train.settings import Settings
from tests.support.processes import free_port

ROOT = Path(distca.__file__).parents[1]
Run = Callable[..., tuple[int, str, str]]
TYPES = {"format": str, "version": int, "ok": bool, "problems": list, "notes": list, "missing": dict, "links": dict,
         "ranks": list}
RANK_TYPES: dict[str, Any] = {
    "name": str, "host": str, "machine": str, "kind": str, "device": str, "gpu": (str, type(None)),
    "memory_bytes": (int, type(None)), "versions": dict, "kernels": dict, "links": list, "attention": list,
    "speed": dict}


def start(*arguments: str, **environment: str) -> subprocess.Popen[str]:
    return subprocess.Popen([sys.executable, "-m", *arguments], text=True, stdout=subprocess.PIPE,
                            stderr=subprocess.PIPE, env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1",
                                                         "GLOO_SOCKET_IFNAME": "lo", **environment})


def check_schema(found: dict[str, Any], ranks: int) -> None:
    assert {name: type(value) for name, value in found.items()} == TYPES
    assert (found["format"], found["version"], len(found["ranks"])) == ("distca-doctor", 1, ranks)
    for one in found["ranks"]:
        assert set(one) == set(RANK_TYPES)
        assert all(isinstance(one[name], kinds) for name, kinds in RANK_TYPES.items())
        assert one["versions"]["torch"] == torch.__version__
        assert one["versions"].get("distca", distca.__version__) == distca.__version__  # of the installed package
        assert one["kernels"]["sdpa"] is None and "NVIDIA" in one["kernels"]["hopper"]
        assert len(one["links"]) == ranks - 1
        assert {"transport", "refused", "hops", "servers", "tasks", "moved", "allowed", "off", "keys_off"} <= set(
            one["attention"][0])
        assert min(one["speed"]["linear_seconds"], *one["speed"]["attention_seconds"]) > 0
    for some in found["links"].values():
        assert some["bandwidth"] >= some["slowest_bandwidth"] > 0 and some["latency_seconds"] >= 0


@pytest.mark.multiprocess
def test_alone_it_starts_two_local_ranks_on_a_cpu(run: Run) -> None:
    code, out, err = run("doctor", "--device", "cpu")
    assert (code, err) == (0, "")
    lines = out.splitlines()
    assert len(lines) < 30 and "exact over transport c10d, 2 of 4 tasks moved" in out
    for label in ("hosts", "device", "versions", "kernels", "attention", "links", "speed", "next"):
        assert any(line.startswith(f"{label} ") for line in lines), label
    assert "no latency table ships" in out and "distca profile" in lines[-1]


@pytest.mark.multiprocess
def test_under_torchrun_rank_0_prints(tmp_path: Path) -> None:
    process = start("torch.distributed.run", "--nproc-per-node", "2", "--master-addr", "127.0.0.1", "--master-port",
                    str(free_port()), "-m", "distca", "doctor", "--device", "cpu", "--json")
    out, err = process.communicate(timeout=120)
    assert process.returncode == 0, err
    check_schema(json.loads(out), 2)


@pytest.mark.multiprocess
def test_ranks_that_are_not_there_are_named(tmp_path: Path) -> None:
    """As srun starts them, rank 0 holding the store: one waits for rank 1, another for its rank 0."""
    shared = {"WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}
    arguments = "distca", "doctor", "--device", "cpu", "--timeout-seconds", "2"
    alone = [start(*arguments, RANK=rank, MASTER_PORT=str(free_port()), **shared) for rank in ("0", "1")]
    (first, second), codes = zip(*(process.communicate(timeout=120) for process in alone), strict=True), [
        process.returncode for process in alone]
    assert codes == [1, 1] and first == ("", "")
    assert second[0].startswith("distca: error: rank 1 did not join within 2 s (--timeout-seconds); start it, or check")
    assert second[1].startswith("distca: error: rank 1 does not reach rank 0 at 127.0.0.1:")
    assert [text.count("\n") for text in second] == [1, 1]


def test_without_torch_it_says_what_is_missing(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command, "find_spec", lambda name: None)
    code, out, err = run("doctor")
    assert (code, err) == (1, "") and "WRONG      torch is not installed" in out
    code, out, err = run("doctor", "--json")
    found = json.loads(out)
    assert (code, err) == (1, "") and not found["ok"] and found["ranks"] == []
    assert {name: type(value) for name, value in found.items()} == TYPES


@pytest.mark.parametrize("error", ["ImportError", "OSError", "RuntimeError"])
def test_a_torch_that_cannot_be_imported_is_named(error: str, tmp_path: Path) -> None:
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch/__init__.py").write_text(f"raise {error}('libcudart.so.13: no such file\\nmore')")
    process = start("distca", "doctor", PYTHONPATH=f"{tmp_path}{os.pathsep}{ROOT}")
    out, err = process.communicate(timeout=60)
    assert (process.returncode, err) == (1, "")
    (line,) = (line for line in out.splitlines() if line.startswith("WRONG"))
    assert line.startswith("WRONG      torch cannot be imported (libcudart.so.13: no such file): only plan, simulate")
    assert line.endswith("run: pip install --force-reinstall torch safetensors xxhash")


@pytest.mark.multiprocess
@pytest.mark.skipif(torch.cuda.is_available(), reason="a rank would find its GPU")
def test_a_rank_that_fails_before_the_others_come_says_why() -> None:
    process = start("distca", "doctor", "--device", "cuda", "--timeout-seconds", "60", RANK="0", WORLD_SIZE="2",
                    LOCAL_RANK="0", LOCAL_WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(free_port()))
    out, err = process.communicate(timeout=50)
    assert (process.returncode, out) == (1, "")
    assert err == ("distca: error: rank 0 failed during its start: run.device is 'cuda' but torch finds no GPU here; "
                   "set it to cpu or auto\n")


@pytest.mark.parametrize(("options", "fragments"), [
    (["--timeout-seconds", "0"], ["timeout_seconds", "0"]),
    (["--ranks", "0"], ["ranks", "0"]),
    (["--ranks", "100000"], ["ranks", "512"]),
    (["--device", "tpu"], ["run.device", "'tpu'", "cpu"]),
    pytest.param(["--device", "cuda"], ["run.device", "'cuda'", "no GPU"], marks=pytest.mark.skipif(
        torch.cuda.is_available(), reason="there is a GPU")),
])
def test_bad_options_get_one_line(run: Run, options: list[str], fragments: list[str]) -> None:
    code, out, err = run("doctor", *options)
    assert (code, out) == (2, "") and err.startswith("distca: error: ") and err.count("\n") == 1
    for fragment in fragments:
        assert fragment in err


def test_extras_are_the_packages() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["optional-dependencies"]
    named = {extra: {line.partition(";")[0].partition(">")[0].strip() for line in lines}
             for extra, lines in project.items() if extra not in ("dev", "site")}  # for those who work on distca
    assert {extra: set(packages) for extra, (_, packages) in EXTRAS.items()} == named


def test_commands_of_the_guide_are_ones_that_start(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[int] = []

    def run_ranks(settings: Settings, main: Any) -> int:
        started.append(settings.run.ranks)
        if isinstance(main, partial):
            main.keywords["file"].write_text(json.dumps(report([])))
        return 0

    monkeypatch.setattr(command, "run_ranks", run_ranks)
    guide = (ROOT / "docs/guide/doctor.md").read_text(encoding="utf-8")
    commands = [shlex.split(line, comments=True) for block in re.findall(r"^```bash\n(.*?)^```", guide, re.S | re.M)
                for line in block.splitlines()]
    assert {words[0] for words in commands} == {"distca", "torchrun", "srun"}
    for words in commands:
        assert words[words.index("distca") + 1] == "doctor"
        code, _, err = run(*words[words.index("distca") + 1:])
        assert (code, err) == (1, "")                            # the made-up report says that torch is missing
    assert started[:2] == [torch.cuda.device_count() if torch.cuda.is_available() else 2, 1]
