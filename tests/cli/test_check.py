"""`distca check` as a user meets it: a config, a function, JSON, torchrun, and what it refuses."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

import distca
from distca.cli import check as command
from distca.cli import doctor
from distca.train.settings import Settings
from tests.support.processes import free_port

pytest.importorskip("transformers")

ROOT = Path(distca.__file__).parents[1]
Run = Callable[..., tuple[int, str, str]]
TYPES = {"format": str, "version": int, "ok": bool, "model": str, "dtype": str, "device": str, "ranks": int,
         "probes": list, "findings": list, "notes": list, "seconds": float}
FINDING = {"kind", "what", "where", "size", "bound", "remedy", "line"}


@pytest.mark.multiprocess
def test_a_config_is_built_small_and_sound(run: Run, tmp_path: Path) -> None:
    """An 8B model, and the answer of a small one."""
    from transformers import LlamaConfig

    LlamaConfig(hidden_size=4096, num_attention_heads=32, num_key_value_heads=8, num_hidden_layers=32,
                intermediate_size=14336, vocab_size=128256).save_pretrained(tmp_path)
    code, out, _ = run("check", tmp_path)
    assert code == 0, out
    first, *oks, last, _ = out.splitlines()
    assert re.match(r"model    llama, 2 of 32 layers, random weights, narrowed to hidden size .* of 8,030,261,248 "
                    r"parameters, attention sdpa; float64 on cpu, 1 rank$", first)
    assert len(oks) == 4 and all(line.startswith("ok ") for line in oks) and last.endswith("packing is right")


@pytest.mark.multiprocess
def test_a_fault_ends_in_exit_code_1_under_torchrun_too() -> None:
    process = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-addr", "127.0.0.1",
         "--master-port", str(free_port()), "-m", "distca", "check", "tests.support.planted:labels_lost_at_the_cut",
         "--device", "cpu", "--json"], text=True, capture_output=True, timeout=200, check=False, cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"})
    assert process.returncode == 1, process.stderr
    found = json.loads(process.stdout)
    assert {name: type(value) for name, value in found.items()} == TYPES
    assert (found["format"], found["version"], found["ok"], found["ranks"]) == ("distca-check", 1, False, 2)
    assert all(set(one) == FINDING for one in found["findings"])
    assert "label-lost" in {one["kind"] for one in found["findings"]}


@pytest.mark.parametrize(("options", "fragments"), [
    (["nowhere"], ["MODEL is 'nowhere'", "config.json"]),
    (["nowhere", "--dtype", "int8"], ["--dtype is 'int8'", "float64"]),
    (["some:function", "--ranks", "0"], ["ranks", "0"]),
    (["some:function", "--device", "tpu"], ["run.device", "'tpu'", "cpu"]),
])
def test_bad_options_get_one_line(run: Run, options: list[str], fragments: list[str]) -> None:
    code, out, err = run("check", *options)
    assert (code, out) == (2, "") and err.startswith("distca: error: ") and err.count("\n") == 1
    for fragment in fragments:
        assert fragment in err


def test_without_torch_it_says_what_to_install(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command, "find_spec", lambda name: None)
    code, out, err = run("check", "some:function")
    assert (code, out) == (2, "") and "distca check needs torch, which is not installed; run: pip install torch" in err


def test_commands_of_the_guide_are_ones_that_start(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[tuple[str, bool, int]] = []

    def run_ranks(settings: Settings, main: Any) -> int:
        found: dict[str, Any] = {"model": "", "dtype": "", "device": "", "ranks": 1, "probes": [], "findings": [],
                                 "notes": [], "seconds": 0.0, "ok": True}
        as_rank: Any = main.func if isinstance(main, partial) else main
        asked = as_rank.__self__.examine.keywords
        started.append((asked["model"], asked["enable"], settings.run.ranks))
        if isinstance(main, partial):
            main.keywords["file"].write_text(json.dumps(found))
        return 0

    monkeypatch.setattr(doctor, "run_ranks", run_ranks)
    guide = (ROOT / "docs/guide/check.md").read_text(encoding="utf-8")
    commands = [shlex.split(line, comments=True) for block in re.findall(r"^```bash\n(.*?)^```", guide, re.S | re.M)
                for line in block.splitlines()]
    assert {words[0] for words in commands} == {"distca", "torchrun"}
    Path("models/my-model").mkdir(parents=True)
    Path("models/my-model/config.json").write_text("{}")
    for words in commands:
        assert words[words.index("distca") + 1] == "check"
        code, _, err = run(*words[words.index("distca") + 1:])
        assert (code, err) == (0, "")
    assert ("models/my-model", True, 2) in started and ("models/my-model", False, 1) in started


@pytest.mark.multiprocess
def test_the_guides_example_is_sound_as_the_guide_has_it(run: Run) -> None:
    guide = (ROOT / "docs/guide/check.md").read_text(encoding="utf-8")
    example = (ROOT / "examples/check_packing.py").read_text(encoding="utf-8")
    blocks = re.findall(r"^```python\n(.*?)^```", guide, re.S | re.M)
    assert len(blocks) == 2 and all(block.strip() in example for block in blocks)
    for name in ("packed", "trainer"):
        code, out, err = run("check", f"{ROOT}/examples/check_packing.py:{name}", "--ranks", "1")
        assert code == 0, out + err
