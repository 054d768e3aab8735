"""`distca checkpoint`: what verify says, that nothing is unpickled, the guide's commands."""

import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import distca
from distca.spec import ModelShape
from distca.train.checkpoint.checkpointer import Checkpointer
from distca.train.checkpoint.folder import MANIFEST, verify
from distca.train.model.decoder import Decoder
from distca.train.model.huggingface import config_of
from distca.train.model.shape import DecoderShape

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
SHAPE = DecoderShape(ModelShape("small", num_layers=2, hidden=16, num_heads=2, num_kv_heads=1, head_dim=8, ffn=24,
                                vocab=20))


def build(seed: int = 0) -> tuple[Decoder, torch.optim.AdamW]:
    decoder = Decoder(SHAPE)
    decoder.reset_parameters(torch.Generator().manual_seed(seed))
    optimizer = torch.optim.AdamW(decoder.parameters(), lr=1e-2)
    if seed == 0:
        for parameter in decoder.parameters():
            parameter.grad = torch.ones_like(parameter)
        optimizer.step()
        optimizer.zero_grad()
    return decoder, optimizer


def save(folder: Path, steps: tuple[int, int] = (1, 2)) -> tuple[Decoder, torch.optim.AdamW]:
    run = build()
    saver = Checkpointer(folder, *run, config=config_of(SHAPE, "float32"))
    for step in steps:
        saver.save(step, {"at": step})
    saver.close()
    return run


def test_verify_tells_good_from_damaged(run: Callable[..., tuple[int, str, str]], tmp_path: Path) -> None:
    save(tmp_path / "saved")
    code, out, err = run("checkpoint", "verify", "saved")
    lines = out.splitlines()
    assert code == 0 and not err and [line.split()[0] for line in lines] == ["step_00000001", "step_00000002"]
    size = sum(file.stat().st_size for file in (tmp_path / "saved/step_00000001").glob("*.safetensors"))
    assert all(f"good: {4 * len(list(Decoder(SHAPE).parameters())) + 1} tensors in 2 files, {size:,} bytes" in line
               for line in lines)                                # weights, both moments, steps; one random state
    file = tmp_path / "saved/step_00000002/state-00000.safetensors"
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 16
    file.write_bytes(content)
    code, out, err = run("checkpoint", "verify", "saved")
    assert code == 1 and not err and "step_00000001  good" in out
    assert "step_00000002  damaged: state-00000.safetensors does not match its checksum" in out
    assert run("checkpoint", "verify", "saved/step_00000001")[0] == 0
    (tmp_path / "saved/step_00000002" / MANIFEST).unlink()
    code, out, err = run("checkpoint", "verify", "saved")
    assert code == 0 and not err and "step_00000002  torn: it has no manifest.json: its save was cut short" in out
    code, out, _ = run("export", "saved", "out")
    assert code == 0 and "step_00000002  torn and not used" in out and "step_00000001  exported" in out


def test_a_folder_without_checkpoints_is_one_line(run: Callable[..., tuple[int, str, str]]) -> None:
    code, out, err = run("checkpoint", "verify", "nowhere")
    assert (code, out) == (2, "") and err.startswith("distca: error: nowhere: holds no step_") and err.count("\n") == 1


def test_resuming_looks_up_no_class_by_name(tmp_path: Path) -> None:
    """Python tells its audit hooks of every class or function that an unpickler looks up."""
    save(tmp_path)
    assert verify(tmp_path / "step_00000002").step == 2
    code = ("import os, pickle, runpy, sys\n"
            "names = runpy.run_path(sys.argv[1])\n"
            "told = lambda event, _: event == 'pickle.find_class' and os._exit(17)\n"
            "run = names['build'](1)\nsys.addaudithook(told)\n"
            "saver = names['Checkpointer'](sys.argv[2], *run)\nassert saver.resume().step == 2\n"
            "saver.save(3, {})\nsaver.close()\nnames['verify'](saver.folder / 'step_00000003')\n"
            "print('whole')\npickle.loads(pickle.dumps(os.getcwd))\n")
    done = subprocess.run([sys.executable, "-c", code, __file__, str(tmp_path)], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (17, "whole\n"), done.stderr  # only the last line's own pickle is told


def test_the_guides_commands_run(run: Callable[..., tuple[int, str, str]], tmp_path: Path) -> None:
    save(tmp_path / "saved")
    guide = (Path(distca.__file__).parents[1] / "docs/guide/train.md").read_text(encoding="utf-8")
    commands = re.findall(r"^distca (checkpoint .*?|export .*?) *#", guide, re.MULTILINE)
    assert {" ".join(command.split()[:2]) for command in commands} == {
        "checkpoint verify", "export saved"}
    for command in commands:
        code, _, err = run(*command.split())
        assert (code, err) == (0, ""), command

