"""What makes a checkpoint folder good, torn or foreign, and what may be removed."""

import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any, Never

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from distca.train.checkpoint.folder import (
    FORMAT,
    MANIFEST,
    VERSION,
    Block,
    FileFacts,
    Manifest,
    StoredTensor,
    check_folder,
    checksum,
    judge,
    make_room,
    prune,
    read_manifest,
    step_folders,
    step_name,
    verify,
    write_manifest,
)

MODEL = {"norm.weight": "float32 [8]", "up.weight": "float32 [32, 8]"}
RUN = {"model.tied": False, "run.dtype": "float32"}
SIZES = {"model-00000.safetensors": 16 + 32 + 512, "model-00001.safetensors": 24 + 512}
anything = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=5), inner, max_size=2), max_leaves=4)


def tensors() -> dict[str, StoredTensor]:
    """A norm and the upper half of a matrix in the first file, its lower half in the second."""
    first, second = SIZES
    return {"model.norm.weight": StoredTensor("float32", [8], [Block(first, 16, 32, [0], [8], checksum(b"x" * 32))]),
            "model.up.weight": StoredTensor("float32", [32, 8], [
                Block(first, 48, 512, [0, 0], [16, 8], checksum(b"x" * 512)),
                Block(second, 24, 512, [16, 0], [16, 8], checksum(b"x" * 512))])}


def complete(folder: Path, number: int, /, **changes: Any) -> Path:
    path = folder / step_name(number)
    path.mkdir()
    for name, num_bytes in SIZES.items():
        (path / name).write_bytes(b"x" * num_bytes)
    files = {name: FileFacts(size, size - 512 - 32 * (size == 560), checksum(b"x" * (size - 512 - 32 * (size == 560))))
             for name, size in SIZES.items()}
    whole = Manifest(FORMAT, VERSION, number, 2, "2.11", RUN, True, ["cpu"], {"at": number}, {}, files, tensors())
    write_manifest(path, replace(whole, **changes))
    return path


def other_tensors(**changes: StoredTensor) -> dict[str, StoredTensor]:
    return tensors() | {f"model.{name.replace('_', '.')}": value for name, value in changes.items()}


def without_manifest(folder: Path, step: int, also: str = "") -> Path:
    path = complete(folder, step)
    (path / MANIFEST).unlink()
    if also:
        (path / also).write_text("mine")
    return path


def with_text(folder: Path, step: int, text: str) -> Path:
    path = complete(folder, step)
    (path / MANIFEST).write_text(text)
    return path


def cut(folder: Path, step: int, name: str, num_bytes: int) -> Path:
    path = complete(folder, step)
    os.truncate(path / name, num_bytes)
    return path


def short_of(folder: Path, step: int, name: str) -> Path:
    path = complete(folder, step)
    (path / name).unlink()
    return path


SPOILT = {
    "no manifest": (lambda folder: without_manifest(folder, 3), "torn", "no manifest.json"),
    "manifest not in place": (lambda folder: without_manifest(folder, 3, f"{MANIFEST}.tmp"), "torn", "cut short"),
    "truncated": (lambda folder: cut(folder, 3, "model-00001.safetensors", 300), "damaged",
                  "model-00001.safetensors has 300 bytes of 536"),
    "file missing": (lambda folder: short_of(folder, 3, "model-00000.safetensors"), "damaged", "00000.safetensors is"),
    "strange files": (lambda folder: without_manifest(folder, 3, "notes.txt"), "foreign", "holds notes.txt"),
    "other format": (lambda folder: with_text(folder, 3, '{"format": "theirs"}'), "foreign", "not of the format"),
    "other version": (lambda folder: complete(folder, 3, version=9), "foreign", "version 9 and only"),
    "version 1": (lambda folder: with_text(folder, 3, '{"format": "distca checkpoint", "version": 1}'), "foreign",
                  "not of the format"),
    "no step": (lambda folder: complete(folder, 3, step=None), "damaged", "no proper 'step'"),
    "another step": (lambda folder: complete(folder, 3, step=7), "foreign", "that of step_00000007"),
    "not json": (lambda folder: with_text(folder, 3, '{"format": "dist'), "damaged", "cannot be read"),
    "deep json": (lambda folder: with_text(folder, 3, "[" * 200_000), "damaged", "cannot be read"),
    "not an object": (lambda folder: with_text(folder, 3, "[]"), "foreign", "not of the format"),
    "a file outside": (lambda folder: complete(folder, 3, files={"../../elsewhere": FileFacts(1, 1, "")}), "damaged",
                       "no proper 'files'"),
    "another setting": (lambda folder: complete(folder, 3, run=RUN | {"model.tied": True}), "another run's",
                        "model.tied is True there and False here"),
    "another shape": (lambda folder: complete(folder, 3, tensors=other_tensors(up_weight=StoredTensor(
        "float32", [4, 8], []))), "another run's", "up.weight is float32 [4, 8] there and float32 [32, 8] here"),
    "another dtype": (lambda folder: complete(folder, 3, tensors=other_tensors(norm_weight=StoredTensor(
        "bfloat16", [8], []))), "another run's", "norm.weight is bfloat16 [8] there"),
    "more parameters": (lambda folder: complete(folder, 3, tensors=other_tensors(z=StoredTensor("float32", [1], []))),
                        "another run's", "z is float32 [1] there and nothing here"),
    "fewer parameters": (lambda folder: complete(folder, 3, tensors={
        "model.norm.weight": tensors()["model.norm.weight"]}), "another run's", "up.weight is nothing there"),
}


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


@pytest.mark.parametrize("how", SPOILT)
def test_what_is_not_a_good_checkpoint_of_this_run_is_told_apart(tmp_path: Path, how: str) -> None:
    make, verdict, reason = SPOILT[how]
    found, why = judge(make(tmp_path), MODEL, RUN)
    assert found == verdict and reason in why and "\n" not in why


def test_a_complete_folder_is_good_and_its_manifest_reads_back(tmp_path: Path) -> None:
    path = complete(tmp_path, 123_456_789, loader={"epoch": 2, "index": [1, 2]})
    assert judge(path, MODEL, RUN) == ("good", "") and verify(path) == read_manifest(path)
    assert read_manifest(path).loader == {"epoch": 2, "index": [1, 2]} and read_manifest(path).tensors == tensors()
    assert names(path) == [MANIFEST, *sorted(SIZES)]
    assert judge(path, MODEL, {})[0] == judge(path, MODEL, RUN | {"another": 1})[0] == "good"


def test_steps_are_ordered_as_numbers(tmp_path: Path) -> None:
    for step in (99_999_999, 100_000_000, 2):
        complete(tmp_path, step)
    (tmp_path / "step_7").mkdir()
    assert [path.name for path in step_folders(tmp_path)] == ["step_00000002", "step_99999999", "step_100000000"]


def test_the_manifest_leaves_no_byte_without_a_checksum(tmp_path: Path) -> None:
    """What an edited manifest with a checksum of its own does not cover is found by reading everything."""
    fewer = tensors()
    del fewer["model.norm.weight"]
    with pytest.raises(ValueError, match="without a checksum"):
        verify(complete(tmp_path, 1, tensors=fewer))
    fewer = tensors()
    fewer["model.up.weight"].blocks.pop()
    with pytest.raises(ValueError, match="leaves the end of model-00001"):
        verify(complete(tmp_path, 2, tensors=fewer))


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow], max_examples=60)
@given(data=st.data())
def test_any_change_of_a_manifest_is_seen(tmp_path: Path, data: st.DataObject) -> None:
    path = tmp_path / step_name(1)
    if not path.exists():
        complete(tmp_path, 1)
    content = (path / MANIFEST).read_bytes()
    how = data.draw(st.sampled_from(["whole", "cut", "byte", "loader", "step"]))
    if how == "whole":
        changed = json.dumps(data.draw(anything)).encode()
    elif how == "cut":
        changed = content[:data.draw(st.integers(0, len(content) - 1))]
    elif how == "byte":
        at, bits = data.draw(st.integers(0, len(content) - 1)), data.draw(st.integers(1, 255))
        changed = content[:at] + bytes([content[at] ^ bits]) + content[at + 1:]
    else:
        fields = json.loads(content)
        fields[how] = data.draw(anything.filter(lambda value: value != fields[how]))
        changed = content.split(b"\n")[0] + b"\n" + json.dumps(fields)[1:].encode()
    (path / MANIFEST).write_bytes(changed)
    try:
        verdict, reason = judge(path, MODEL, RUN)
    finally:
        (path / MANIFEST).write_bytes(content)
    assert verdict in ("damaged", "foreign") and reason and "\n" not in reason


@pytest.mark.parametrize(("keep", "left"), [(1, [6, 7]), (2, [5, 6, 7]), (3, [3, 5, 6, 7]), (9, [1, 2, 3, 5, 6, 7])])
def test_pruning_drops_good_ones_beyond_keep_and_older_torn_ones(tmp_path: Path, keep: int, left: list[int]) -> None:
    for step in (1, 3, 5, 6):
        complete(tmp_path, step)
    without_manifest(tmp_path, 2)
    without_manifest(tmp_path, 7)                                # newer than any good one
    complete(tmp_path, 4, tensors={})
    complete(tmp_path, 0, format="theirs")
    prune(tmp_path, keep, MODEL, RUN)
    assert names(tmp_path) == [step_name(step) for step in sorted([0, 4, *left])]


def test_half_a_removal_is_torn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for step in (1, 2):
        complete(tmp_path, step)

    def killed(_: Path) -> Never:
        raise KeyboardInterrupt

    monkeypatch.setattr("distca.train.checkpoint.folder.shutil.rmtree", killed)
    with pytest.raises(KeyboardInterrupt):
        prune(tmp_path, 1, MODEL, RUN)
    assert [judge(path, MODEL, RUN)[0] for path in step_folders(tmp_path)] == ["torn", "good"]


def test_room_is_made_without_loss_of_what_is_not_ours(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    make_room(tmp_path / step_name(1), MODEL, RUN)
    for make in (without_manifest, complete):
        make_room(make(tmp_path, 1), MODEL, RUN)
        assert not names(tmp_path)
    for _ in range(2):
        make_room(without_manifest(tmp_path, 1, "notes.txt"), MODEL, RUN)
    assert names(tmp_path) == ["step_00000001.1", "step_00000001.2"]
    assert (tmp_path / "step_00000001.1" / "notes.txt").read_text() == "mine"
    assert caplog.text.count("step_00000001 is not a good one of this run") == 2
    assert not step_folders(tmp_path)


def test_an_unwritable_folder_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for folder in (tmp_path / "file", tmp_path / "file" / "below", Path("/proc/nowhere")):
        with pytest.raises(ValueError) as caught:
            check_folder(folder, resume=True)
        line = str(caught.value)
        assert line.startswith(f"checkpoint.folder = '{folder}' cannot be written") and "\n" not in line


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_read_only_folder_is_refused(tmp_path: Path) -> None:
    tmp_path.chmod(0o555)
    with pytest.raises(ValueError, match="Permission denied"):
        check_folder(tmp_path, resume=True)


def test_a_fresh_run_does_not_mix_with_another(tmp_path: Path) -> None:
    check_folder(tmp_path / "deep" / "new", resume=False)
    assert not names(tmp_path / "deep" / "new")
    without_manifest(tmp_path, 1)
    check_folder(tmp_path, resume=False)
    complete(tmp_path, 2)
    check_folder(tmp_path, resume=True)
    with pytest.raises(ValueError, match=r"already holds step_00000002; set checkpoint.resume = true"):
        check_folder(tmp_path, resume=False)
