"""A run that was saved goes on: on any number of ranks, after any crash, from the last good checkpoint."""

import gc
import json
import logging
import os
import shutil
import subprocess
import sys
import threading
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any, Never

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from distca.runtime.transport.c10d import C10dTransport
from distca.testing import ProcessOutcome, run_processes
from distca.train import checkpoint, checkpoint_files, checkpoint_folder
from distca.train.checkpoint import Checkpointer, SaveError, load
from distca.train.checkpoint_files import describe
from distca.train.checkpoint_folder import judge, step_folders
from distca.train.folder_lock import FolderLock

KILLED = 17
WAIT_SECONDS = 30


class Small(nn.Module):
    """Sizes that no number of ranks divides, a norm shorter than four ranks, a tied head, a buffer, dropout."""

    scale: torch.Tensor
    row = 0  # of the data that this rank trains on

    def __init__(self, width: int = 6) -> None:
        super().__init__()
        self.embedding = nn.Embedding(9, width)
        self.up = nn.Linear(width, 14)
        self.down = nn.Linear(14, width)
        self.squeeze = nn.Linear(width, 3)
        self.norm = nn.LayerNorm(3)
        self.expand = nn.Linear(3, width)
        self.head = nn.Linear(width, 9, bias=False)
        self.head.weight = self.embedding.weight
        self.register_buffer("scale", torch.full((2, 5), 0.5))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        x = x + self.down(nn.functional.dropout(torch.relu(self.up(x)), 0.3, self.training))
        return self.head(x + self.expand(self.norm(self.squeeze(x))) * self.scale[0, 0])


def build(kind: str = "plain", seed: int = 0, width: int = 6,
          **options: Any) -> tuple[Small, torch.optim.AdamW]:
    torch.manual_seed(seed)
    model = Small(width)
    if kind == "tensor":
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
        parallelize_module(model, mesh["tensor"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
    if kind != "plain":
        sharded: dict[str, Any] = {} if kind == "data" else {"mesh": mesh["data"]}
        for part in (model.up, model.down):
            fully_shard(part, **sharded)
        fully_shard(model, **sharded)
    decayed = [p for p in model.parameters() if p.ndim > 1]
    others = [p for p in model.parameters() if p.ndim <= 1]
    style: dict[str, Any] = {"foreach": True} if kind == "tensor" else {"fused": True}
    optimizer = torch.optim.AdamW([{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}],
                                  lr=1e-2, **style, **options)
    model.row = dist.get_rank() // (2 if kind == "tensor" else 1) if dist.is_initialized() else 0
    torch.manual_seed(100 * seed + model.row)
    return model, optimizer


def train(model: Small, optimizer: torch.optim.AdamW, steps: range) -> None:
    for step in steps:
        tokens = torch.randint(0, 9, (12,), generator=torch.Generator().manual_seed(1000 * step + model.row))
        for group in optimizer.param_groups:
            group["lr"] = 1e-2 / (1 + step)
        nn.functional.cross_entropy(model(tokens), tokens.roll(-1)).backward()
        if dist.is_initialized() and not isinstance(model, FSDPModule):
            for parameter in model.parameters():
                dist.all_reduce(parameter.grad)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)


def everything(model: Small, optimizer: torch.optim.AdamW) -> dict[str, torch.Tensor]:
    """Every tensor of a run, whole."""
    parts: Any = get_state_dict(model, optimizer, options=StateDictOptions(full_state_dict=True))
    found = {f"model.{name}": value.clone() for name, value in parts[0].items()}
    for name, values in parts[1]["state"].items():
        found |= {f"{name}.{key}": value.clone() for key, value in values.items()}
    return found


def assert_same(got: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert got.keys() == expected.keys() and len(got) > 20
    different = [name for name, value in expected.items() if not torch.equal(got[name], value)]
    assert not different


class Gate:
    """Holds every write until it is opened, so that a save is surely in flight."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.open = threading.Event()

        def wait_and_write(path: Path, tensors: Any) -> Any:
            assert self.open.wait(WAIT_SECONDS)
            return checkpoint_files.write_file(path, tensors)

        patch.setattr(checkpoint, "write_file", wait_and_write)


def newest(folder: Path, model: Small | None = None) -> Path:
    """The newest folder that is good by its manifest."""
    expected = describe(model or build()[0])
    return [path for path in step_folders(Path(folder)) if judge(path, expected, {})[0] == "good"][-1]


def resumed(folder: Path | str, pair: tuple[Small, torch.optim.AdamW],
            **options: Any) -> checkpoint.TrainState:
    """What a run that resumes gets; the folder is free again."""
    saver = Checkpointer(folder, *pair, **options)
    try:
        state = saver.resume()
        assert state is not None
        return state
    finally:
        saver.close()


def save_in_flight(transport: C10dTransport, folder: str, kinds: tuple[str, str]) -> None:
    """Per kind: what was at step 3, what at step 5, trained on while the save of step 3 was in flight."""
    for kind in kinds:
        run = build(kind)
        train(*run, range(5))
        uninterrupted = everything(*run)
        run = build(kind)
        saver = Checkpointer(Path(folder) / kind, *run)
        assert saver.resume() is None
        train(*run, range(3))
        at_save = everything(*run)
        with pytest.MonkeyPatch.context() as patch:
            gate = Gate(patch)
            saver.save(3, {"epoch": 1, "index": [7]})
            assert saver.in_flight and not list(Path(folder).glob(f"{kind}/*/{checkpoint_folder.MANIFEST}"))
            train(*run, range(3, 5))
            dist.barrier()
            assert saver.in_flight
            gate.open.set()
            saver.close()
        assert not saver.in_flight
        assert_same(everything(*run), uninterrupted)
        if transport.rank == 0:
            torch.save((at_save, uninterrupted), f"{folder}/{kind}.pt")


def resume_each(transport: C10dTransport, folders: list[str], kinds: tuple[str, str], into: str) -> None:
    """Per folder and kind: what is returned, all tensors as loaded and, where the same ranks saved, two steps later."""
    for number, folder in enumerate(folders):
        for kind in kinds:
            run = build(kind, seed=5)
            state = resumed(folder, run)
            loaded = everything(*run)
            later = None
            if state.num_ranks == transport.size and Path(folder).name == kind:
                train(*run, range(3, 5))
                later = everything(*run)
            if transport.rank == 0:
                torch.save((asdict(state), loaded, later), f"{into}/{number}_{kind}.pt")


def values(outcomes: list[ProcessOutcome]) -> list[Any]:
    assert [outcome.error for outcome in outcomes] == [None] * len(outcomes)
    return [outcome.value for outcome in outcomes]


Saved = dict[str, tuple[int, str, dict[str, torch.Tensor], dict[str, torch.Tensor]]]
KINDS = {1: ("plain", "data"), 2: ("plain", "data"), 4: ("data", "tensor")}


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Saved:
    """folder -> (ranks, kind, tensors at the save, tensors two steps later)"""
    found: Saved = {}
    for ranks, kinds in KINDS.items():
        folder = tmp_path_factory.mktemp(f"ranks_{ranks}")
        values(run_processes(ranks, save_in_flight, str(folder), kinds, timeout_seconds=60, deadline_seconds=120))
        found |= {str(folder / kind): (ranks, kind, *torch.load(folder / f"{kind}.pt")) for kind in kinds}
    return found


@pytest.mark.multiprocess
@pytest.mark.parametrize("ranks", KINDS)
def test_any_number_of_ranks_goes_on_and_the_same_number_bit_for_bit(saved: Saved, ranks: int, tmp_path: Path) -> None:
    values(run_processes(ranks, resume_each, list(saved), KINDS[ranks], str(tmp_path), timeout_seconds=60,
                         deadline_seconds=120))
    num_exact = 0
    for kind in KINDS[ranks]:
        for number, (saved_by, saved_as, at_save, uninterrupted) in enumerate(saved.values()):
            state, loaded, later = torch.load(tmp_path / f"{number}_{kind}.pt")
            assert state == {"step": 3, "loader": {"epoch": 1, "index": [7]}, "num_ranks": saved_by}
            assert_same(loaded, at_save)
            if (saved_by, saved_as) == (ranks, kind):
                assert_same(later, uninterrupted)
                num_exact += 1
    assert num_exact == len(KINDS[ranks])


def die_at(stage: str, patch: pytest.MonkeyPatch) -> None:
    """End the process inside the next save."""
    def end(*_: Any, **__: Any) -> None:
        os._exit(KILLED)

    if stage == "nothing written":
        patch.setattr(checkpoint, "write_file", end)
    elif stage == "data written":
        patch.setattr(checkpoint, "tensor_table", end)
    elif stage == "manifest written but not in place":
        patch.setattr(Path, "rename", end)
    elif stage == "old ones half removed":
        patch.setattr(shutil, "rmtree", end)


def crash(transport: C10dTransport, folder: str, stage: str, victim: int) -> None:
    run = build("data")
    saver = Checkpointer(folder, *run, keep=1)
    train(*run, range(1))
    saver.save(1, {"at": 1})
    saver.finish()
    train(*run, range(1, 2))
    dist.barrier()
    with pytest.MonkeyPatch.context() as patch:
        if transport.rank == victim:
            die_at(stage, patch)
        saver.save(2, {"at": 2})
        saver.finish()


def resume_and_save(transport: C10dTransport, folder: str) -> tuple[int, dict[str, int]]:
    run = build("data", seed=5)
    saver = Checkpointer(folder, *run, keep=1)
    begun = saver.resume()
    assert begun is not None
    train(*run, range(begun.step, 3))
    for step in (2, 3):
        saver.save(step, {"at": step})
    saver.finish()
    return begun.step, begun.loader


@pytest.mark.multiprocess
@pytest.mark.parametrize(("ranks", "stage", "good_step"), [
    (1, "nothing written", 1), (2, "data written", 1),
    (1, "manifest written but not in place", 1), (1, "old ones half removed", 2)])
def test_killed_while_saving(tmp_path: Path, caplog: pytest.LogCaptureFixture, ranks: int, stage: str,
                             good_step: int) -> None:
    outcomes = run_processes(ranks, crash, str(tmp_path), stage, 0)
    assert outcomes[0].exit_code == KILLED
    for other in outcomes[1:]:
        assert other.error is not None
        assert other.error.startswith("SaveError: checkpoint ") and "was not written" in other.error
        assert "\n" not in other.error and other.seconds < 15
    assert [path.name for path in step_folders(tmp_path)] == ["step_00000001", "step_00000002"]
    with caplog.at_level(logging.WARNING, "distca"):
        assert resumed(tmp_path, build()).step == good_step
    warned = [record.getMessage() for record in caplog.records]
    assert len(warned) == (good_step == 1)
    assert all("step_00000002 is torn and not used: it has no manifest.json" in line for line in warned)

    begun = values(run_processes(ranks, resume_and_save, str(tmp_path)))[0]
    assert begun == (good_step, {"at": good_step})
    assert [path.name for path in step_folders(tmp_path)] == ["step_00000003"]
    assert newest(tmp_path).name == "step_00000003"


def die_while_both_write(transport: C10dTransport, folder: str) -> None:
    """Rank 1 dies while both ranks write; rank 0 is told."""
    model, optimizer = build("data")
    saver = Checkpointer(folder, model, optimizer)
    saver.save(1, {})
    saver.finish()
    with pytest.MonkeyPatch.context() as patch:
        if transport.rank == 1:
            die_at("nothing written", patch)
        saver.save(2, {})
        saver.finish()


@pytest.mark.multiprocess
def test_a_rank_that_dies_while_saving_is_reported_by_the_others(tmp_path: Path) -> None:
    outcomes = run_processes(2, die_while_both_write, str(tmp_path))
    assert outcomes[1].exit_code == KILLED
    assert "step_00000002 was not written" in (outcomes[0].error or "")
    assert newest(tmp_path).name == "step_00000001"


def disagree(transport: C10dTransport, folder: str) -> list[str]:
    """Ranks that see different folders, and one that cannot write; neither leaves anything behind."""
    errors = []
    for mine in (f"{folder}/{transport.rank}", f"{folder}/shared" if transport.rank == 0 else f"{folder}/file/below"):
        if transport.rank == 0:
            Path(folder, "file").touch()
        dist.barrier()
        with pytest.raises(ValueError) as caught:
            Checkpointer(mine, *build("data"))
        errors.append(str(caught.value))
    return errors


@pytest.mark.multiprocess
def test_ranks_that_do_not_share_a_folder_are_refused_in_one_line(tmp_path: Path) -> None:
    answers = values(run_processes(2, disagree, str(tmp_path)))
    for rank, (apart, unwritable) in enumerate(answers):
        assert f"{tmp_path}/{rank}" in apart and "another folder on rank 1" in apart and "share" in apart
        assert unwritable == answers[0][1] and f"{tmp_path}/file/below" in unwritable and "\n" not in unwritable
    assert not [path for path in tmp_path.rglob("*") if path.is_file() and path.name != "file"]


def save_steps(folder: Path, steps: tuple[int, ...], keep: int = 10, width: int = 6,
               close: bool = True) -> tuple[tuple[Small, torch.optim.AdamW], Checkpointer]:
    run = build(width=width)
    saver = Checkpointer(folder, *run, keep=keep)
    for step in steps:
        train(*run, range(step, step + 1))
        saver.save(step, {"at": step})
    saver.finish()
    if close:
        saver.close()
    return run, saver


@pytest.fixture(scope="module")
def three(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("three")
    save_steps(folder, (1, 2, 3))
    return folder


@pytest.fixture
def copy(three: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(three, tmp_path / "copy"))


@pytest.mark.parametrize("how", ["no manifest", "truncated", "one bit"])
def test_a_torn_or_damaged_checkpoint_is_named_and_the_last_good_one_used(copy: Path, caplog: pytest.LogCaptureFixture,
                                                                          how: str) -> None:
    newest, verdict = copy / "step_00000003", "damaged"
    file = newest / "model-00000.safetensors"
    if how == "no manifest":
        verdict = "torn"
        (newest / checkpoint_folder.MANIFEST).unlink()
    elif how == "truncated":
        os.truncate(file, file.stat().st_size - 1)
    else:
        content = bytearray(file.read_bytes())
        content[-5] ^= 4
        file.write_bytes(content)
    run = build(seed=5)
    with caplog.at_level(logging.WARNING, "distca"):
        state = resumed(copy, run)
    assert state.step == 2 and state.loader == {"at": 2}
    (line,) = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert f"{newest} is {verdict} and not used: " in line
    if how == "one bit":
        assert "model-00000.safetensors does not match its checksum in bytes" in line
    with pytest.raises(ValueError, match=r"has no manifest|ends at byte|does not match"):
        load(newest, *run)


def test_a_changed_run_is_refused_by_name(copy: Path) -> None:
    """Other sizes, or other settings that the tensors do not show; nothing begins anew over an old run."""
    saver = Checkpointer(copy, *build(), run={"model.tied": True, "run.dtype": "float32"})
    saver.save(4, {})
    saver.close()
    for width, settings, words in (
        (6, {"model.tied": False, "run.dtype": "float32"}, "model.tied is True there and False here"),
        (6, {"model.tied": True, "run.dtype": "bfloat16"}, "run.dtype is 'float32' there and 'bfloat16' here"),
        (4, {"model.tied": True}, r"down.bias is float32 \[6\] there and float32 \[4\] here")):
        with pytest.raises(ValueError, match=f"holds step_00000004 of another run: {words}; set it back, or name"):
            resumed(copy, build(width=width), run=settings)
        shutil.rmtree(copy / "step_00000003", ignore_errors=True)
    assert resumed(copy, build(), run={"model.tied": True, "run.dtype": "float32", "unknown then": 1}).step == 4


def test_a_run_with_nothing_good_left_does_not_begin_anew(tmp_path: Path) -> None:
    save_steps(tmp_path, (1,))
    os.truncate(tmp_path / "step_00000001" / "state-00000.safetensors", 9)
    with pytest.raises(ValueError, match=r"holds step_00000001 but no checkpoint that is whole; restore one"):
        resumed(tmp_path, build())


def test_an_old_folder_asks_to_be_converted(tmp_path: Path) -> None:
    (tmp_path / "step_00000001").mkdir()
    old = {"format": "distca checkpoint", "version": 1}
    (tmp_path / "step_00000001" / checkpoint_folder.MANIFEST).write_text(json.dumps(old))
    with pytest.raises(ValueError, match=rf"distca checkpoint convert {tmp_path} --trust"):
        resumed(tmp_path, build())


def test_after_a_damaged_one_an_older_one_without_optimizer_has_none(tmp_path: Path) -> None:
    run = build()
    saver = Checkpointer(tmp_path, *run)
    saver.save(0, {})
    train(*run, range(1))
    saver.save(1, {})
    saver.close()
    file = tmp_path / "step_00000001" / "state-00000.safetensors"
    file.write_bytes(bytes(file.stat().st_size))
    model, optimizer = build(seed=5)
    assert resumed(tmp_path, (model, optimizer)).step == 0
    assert not optimizer.state
    train(model, optimizer, range(1))
    assert_same(everything(model, optimizer), everything(*run))


def test_two_runs_do_not_share_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FolderLock.__init__, "__defaults__", (0.2,))
    first = Checkpointer(tmp_path, *build())
    with pytest.raises(ValueError) as refused:
        Checkpointer(tmp_path, *build())
    assert f"is in use by process {os.getpid()} on " in str(refused.value) and " since 20" in str(refused.value)
    first.close()
    Checkpointer(tmp_path, *build()).close()


def test_safetensors_reads_what_is_written(three: Path) -> None:
    """The files are safetensors to others too, with the tensors' own names."""
    from safetensors.torch import load_file

    run = build(seed=5)
    resumed(three, run)
    found = load_file(three / "step_00000003" / "model-00000.safetensors")
    expected = {name.removeprefix("model."): value for name, value in everything(*run).items()
                if name.startswith("model.")}
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], value) for name, value in expected.items())


def test_older_ones_go_only_once_a_newer_one_is_complete(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run, saver = save_steps(tmp_path, (1, 2, 3), keep=2, close=False)
    assert [path.name for path in step_folders(tmp_path)] == ["step_00000002", "step_00000003"]
    gate = Gate(monkeypatch)
    saver.save(4, {})
    assert saver.in_flight
    assert [judge(path, describe(run[0]), {})[0] for path in step_folders(tmp_path)][:2] == ["good", "good"]
    assert newest(tmp_path, run[0]).name == "step_00000003"
    gate.open.set()
    saver.close()
    assert [path.name for path in step_folders(tmp_path)] == ["step_00000003", "step_00000004"]


def test_more_files_of_a_crashed_save_do_not_remain(tmp_path: Path) -> None:
    """A save of four ranks was cut short; the same step is then saved by one."""
    (tmp_path / "step_00000001").mkdir()
    for rank in range(4):
        (tmp_path / "step_00000001" / f"state-{rank:05d}.safetensors").touch()
    save_steps(tmp_path, (1,))
    assert sorted(path.name for path in (tmp_path / "step_00000001").iterdir()) == [
        "manifest.json", "model-00000.safetensors", "state-00000.safetensors"]


def test_a_full_disk_says_no_space_and_leaves_the_last_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _, saver = save_steps(tmp_path, (1,), keep=1, close=False)

    def full(*_: Any) -> Never:
        raise OSError(28, "No space left on device")

    for module, name, reason in ((checkpoint, "write_file", "rank 0: no space: No space left on device"),
                                 (shutil, "disk_usage", "no space: No space left on device")):
        with monkeypatch.context() as patch:
            patch.setattr(module, name, full)
            saver.save(2, {})
            while saver.in_flight:
                time.sleep(0.01)
            assert saver.failed                                  # known before anybody waits for it
            with pytest.raises(SaveError, match=rf"step_00000002 was not written: {reason}$"):
                saver.finish()
        assert [path.name for path in step_folders(tmp_path)] == ["step_00000001"]
    saver.save(2, {})
    saver.close()
    assert [path.name for path in step_folders(tmp_path)] == ["step_00000002"]


def test_space_is_asked_for_before_anything_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _, saver = save_steps(tmp_path, (1,), close=False)
    needed = sum(file.stat().st_size for file in (tmp_path / "step_00000001").glob("*.safetensors"))
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=needed // 2))
    monkeypatch.setattr(checkpoint, "write_file", None)
    saver.save(2, {})
    with pytest.raises(SaveError, match=r"no space: it needs [\d,]+ bytes and [\d,]+ are free$"):
        saver.finish()
    saver.close()


def test_a_step_is_saved_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run, _ = save_steps(tmp_path, (1,))
    again = Checkpointer(tmp_path, *run)
    state = again.resume()
    assert state is not None and state.step == 1

    def never(*_: Any) -> Never:
        raise AssertionError("a complete checkpoint is not written again")

    monkeypatch.setattr(checkpoint, "write_file", never)
    again.save(1, {})
    again.close()


def test_saving_before_the_first_step_changes_nothing(tmp_path: Path) -> None:
    model, optimizer = build()
    saver = Checkpointer(tmp_path, model, optimizer)
    saver.save(0, {"at": 0})
    saver.close()
    assert not optimizer.state
    train(model, optimizer, range(2))
    other, fresh = build(seed=5)
    assert resumed(tmp_path, (other, fresh)).step == 0
    assert not fresh.state
    train(other, fresh, range(2))
    assert_same(everything(other, fresh), everything(model, optimizer))


def test_options_of_the_optimizer_are_the_new_runs_own(three: Path) -> None:
    model, optimizer = build(seed=5, betas=(0.5, 0.6))
    assert resumed(three, (model, optimizer)).step == 3
    assert [(group["betas"], group["lr"], group["weight_decay"]) for group in optimizer.param_groups] == [
        ((0.5, 0.6), 1e-2, 0.1), ((0.5, 0.6), 1e-2, 0.0)]


def count_after_saves(folder: str) -> tuple[int, list[tuple[int, int]]]:
    """The tensors of one save, then tensors and threads alive after each of ten saves."""
    run = build()
    saver = Checkpointer(folder, *run, keep=1)
    train(*run, range(1))
    counts = []
    for step in range(1, 11):
        saver.save(step, {})
        saver.finish()
        gc.collect()
        tensors = sum(issubclass(type(found), torch.Tensor) for found in gc.get_objects())
        counts.append((tensors, threading.active_count()))
    return len(everything(*run)), counts


def test_many_saves_hold_on_to_nothing(tmp_path: Path) -> None:
    """What a save leaves behind adds up, ten times; what a thread that is just ending still holds does not.

    In a process of its own: other tests leave tensors behind that come and go.
    """
    code = ("import json, runpy, sys; names = runpy.run_path(sys.argv[1]); "
            "print(json.dumps(names['count_after_saves'](sys.argv[2])))")
    done = subprocess.run([sys.executable, "-c", code, __file__, str(tmp_path)], capture_output=True, text=True,
                          timeout=100)
    of_a_save, counts = json.loads(done.stdout)
    tensors, threads = zip(*counts, strict=True)
    assert of_a_save > 10 and max(tensors) - tensors[0] < 5 * of_a_save, done.stdout
    assert max(threads) <= threads[0] + 1, done.stdout


def test_bad_settings_are_one_line_before_training(three: Path, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ValueError, match=r"checkpoint.folder = .* cannot be written"):
        Checkpointer(tmp_path / "file" / "below", *build())
    with pytest.raises(ValueError, match=r"already holds step_00000003"):
        Checkpointer(three, *build(), resume=False)
    with pytest.raises(ValueError, match=r"checkpoint.keep = 0"):
        Checkpointer(tmp_path, *build(), keep=0)
