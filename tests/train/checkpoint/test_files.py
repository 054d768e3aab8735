"""No damage to any file of a checkpoint trains on in silence: the one before it is used, and one line says why.

Every case damages one file of the newest of two checkpoints, at random, and resumes in this process. Either nothing
that is read was changed and the newest is used bit for bit, or the older one is, bit for bit.
"""

import logging
import os
import random
import shutil
from pathlib import Path

import pytest
import torch
from torch import nn

from distca.train.checkpoint.checkpointer import Checkpointer
from distca.train.checkpoint.folder import MANIFEST, DamagedError, verify

NUM_CASES = 180  # of each file
FILES = (MANIFEST, "model-00000.safetensors", "state-00000.safetensors")


def build(seed: int) -> tuple[torch.nn.Sequential, torch.optim.AdamW]:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(5, 7), nn.LayerNorm(7), nn.Linear(7, 3))
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2)


def train(model: torch.nn.Sequential, optimizer: torch.optim.AdamW) -> None:
    model(torch.randn(4, 5)).square().sum().backward()
    optimizer.step()
    optimizer.zero_grad()


def everything(model: torch.nn.Sequential, optimizer: torch.optim.AdamW) -> dict[str, torch.Tensor]:
    found = {name: value.clone() for name, value in model.state_dict().items()}
    for number, values in optimizer.state_dict()["state"].items():
        found |= {f"{number}.{key}": value.clone() for key, value in values.items()}
    return found | {"rng": torch.get_rng_state()}


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[int, dict[str, torch.Tensor]]]:
    """A folder with checkpoints of steps 1 and 2, and what they hold."""
    folder = tmp_path_factory.mktemp("saved")
    run, held = build(0), {}
    saver = Checkpointer(folder, *run, run={"run.dtype": "float32"})
    for step in (1, 2):
        train(*run)
        saver.save(step, {"epoch": 0, "index": 7 * step, "offset": 12 * step})
        held[step] = everything(*run)
    saver.close()
    assert sorted(file.name for file in (folder / "step_00000002").iterdir()) == sorted(FILES)
    return folder, held


def flip(content: bytearray, chance: random.Random) -> None:
    at = chance.randrange(len(content))
    content[at] ^= 1 << chance.randrange(8)


def truncate(content: bytearray, chance: random.Random) -> None:
    del content[chance.randrange(len(content)):]


def zero(content: bytearray, chance: random.Random) -> None:
    begin = chance.randrange(len(content))
    end = min(len(content), begin + chance.choice((1, 4, 8, 64, 512, 4096)))
    content[begin:end] = bytes(end - begin)


def noise(content: bytearray, chance: random.Random) -> None:
    begin = chance.randrange(len(content))
    end = min(len(content), begin + chance.choice((1, 8, 512)))
    content[begin:end] = chance.randbytes(end - begin)


def shift(content: bytearray, chance: random.Random) -> None:
    """A sector in another's place, the size kept."""
    begin, other, length = chance.randrange(len(content)), chance.randrange(len(content)), chance.choice((8, 64))
    part = content[other:other + length]
    content[begin:begin + len(part)] = part[:len(content) - begin]


def append(content: bytearray, chance: random.Random) -> None:
    content += chance.randbytes(chance.randrange(1, 64))


def edit_a_number(content: bytearray, chance: random.Random) -> None:
    """Another digit somewhere, as an editor would write it: the position in the data is such a number."""
    digits = [at for at, byte in enumerate(content) if 48 <= byte <= 57]
    at = chance.choice(digits)
    content[at] = 48 + (content[at] - 48 + chance.randrange(1, 10)) % 10


@pytest.mark.parametrize("name", FILES)
def test_random_damage_never_goes_unnoticed(saved: tuple[Path, dict[int, dict[str, torch.Tensor]]], name: str,
                                            caplog: pytest.LogCaptureFixture) -> None:
    folder, held = saved
    newest = folder / "step_00000002"
    file, run = newest / name, build(1)
    original, refused, damages = file.read_bytes(), 0, [flip, truncate, zero, noise, shift, append, edit_a_number]
    damages += [flip] * 3
    for case in range(NUM_CASES):
        chance = random.Random(f"{name} {case}")
        content = bytearray(original)
        damages[case % len(damages)](content, chance)
        file.write_bytes(content)
        caplog.clear()
        saver = Checkpointer(folder, *run, run={"run.dtype": "float32"})
        with caplog.at_level(logging.WARNING, "distca"):
            state = saver.resume()
        saver.close()
        same = bytes(content) == original
        assert state is not None
        assert state.step == (2 if same else 1), (case, damages[case % len(damages)].__name__)
        assert state.loader == {"epoch": 0, "index": 7 * state.step, "offset": 12 * state.step}
        found = everything(*run)
        assert all(torch.equal(found[key], value) for key, value in held[state.step].items()), case  # copies
        lines = [record.getMessage() for record in caplog.records]
        assert len(lines) == (not same) and all(name in line and "\n" not in line for line in lines), (case, lines)
        if not same:
            refused += 1
            with pytest.raises(DamagedError, match=name):
                verify(newest)
    file.write_bytes(original)
    assert verify(newest).step == 2
    assert refused > 0.9 * NUM_CASES                             # the cases do damage


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("how", ["missing", "a folder", "a dangling link", "empty", "a pipe nobody writes"])
def test_what_is_no_file_at_all_is_named(saved: tuple[Path, dict[int, dict[str, torch.Tensor]]], tmp_path: Path,
                                         caplog: pytest.LogCaptureFixture, name: str, how: str) -> None:
    folder, held = Path(shutil.copytree(saved[0], tmp_path / "copy")), saved[1]
    file = folder / "step_00000002" / name
    file.unlink()
    if how == "a folder":
        file.mkdir()
    elif how == "a dangling link":
        file.symlink_to(tmp_path / "nowhere")
    elif how == "empty":
        file.touch()
    elif how == "a pipe nobody writes":
        os.mkfifo(file)
    run = build(1)
    saver = Checkpointer(folder, *run, run={"run.dtype": "float32"})
    with caplog.at_level(logging.WARNING, "distca"):
        assert (state := saver.resume()) is not None and state.step == 1
    saver.close()
    found = everything(*run)
    assert all(torch.equal(found[key], value) for key, value in held[1].items())  # copies
    (line,) = [record.getMessage() for record in caplog.records]
    assert name in line and "step_00000002" in line and "\n" not in line


def test_a_file_for_a_folder_is_passed_over(saved: tuple[Path, dict[int, dict[str, torch.Tensor]]], tmp_path: Path,
                                            caplog: pytest.LogCaptureFixture) -> None:
    folder = Path(shutil.copytree(saved[0], tmp_path / "copy"))
    (folder / "step_00000012").write_text("no folder")
    saver = Checkpointer(folder, *build(1), run={"run.dtype": "float32"})
    with caplog.at_level(logging.WARNING, "distca"):
        assert (state := saver.resume()) is not None and state.step == 2
    saver.close()
    assert "step_00000012" in caplog.text
