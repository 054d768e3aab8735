"""What makes a checkpoint folder good, torn or foreign, and what may be removed."""

import json
import logging
import os
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from distca.train.manifest import (
    FORMAT,
    MANIFEST,
    VERSION,
    Manifest,
    check_folder,
    judge,
    make_room,
    newest_good,
    prune,
    read_manifest,
    step_folders,
    step_name,
    write_manifest,
)

MODEL = {"norm.weight": "float32 [8]", "up.weight": "float32 [32, 8]"}
FILES = {".metadata": 70, "__0_0.distcp": 500, "__1_0.distcp": 301}
anything = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=5), inner, max_size=2), max_leaves=4)


def complete(folder, number, /, **changes):
    path = folder / step_name(number)
    path.mkdir()
    for name, num_bytes in FILES.items():
        (path / name).write_bytes(b"x" * num_bytes)
    whole = Manifest(FORMAT, VERSION, number, 2, "2.11", MODEL, True, ["cpu"], {"at": number}, FILES)
    write_manifest(path, replace(whole, **changes))
    return path


def without_manifest(folder, step, also=""):
    path = complete(folder, step)
    (path / MANIFEST).unlink()
    if also:
        (path / also).write_text("mine")
    return path


def with_text(folder, step, text):
    path = complete(folder, step)
    (path / MANIFEST).write_text(text)
    return path


def cut(folder, step, name, num_bytes):
    path = complete(folder, step)
    os.truncate(path / name, num_bytes)
    return path


def short_of(folder, step, name):
    path = complete(folder, step)
    (path / name).unlink()
    return path


SPOILT = {
    "no manifest": (lambda folder: without_manifest(folder, 3), "torn", "no manifest.json"),
    "manifest not in place": (lambda folder: without_manifest(folder, 3, f"{MANIFEST}.tmp"), "torn", "cut short"),
    "truncated": (lambda folder: cut(folder, 3, "__1_0.distcp", 300), "torn", "__1_0.distcp has 300 bytes of 301"),
    "file missing": (lambda folder: short_of(folder, 3, ".metadata"), "torn", ".metadata is missing"),
    "strange files": (lambda folder: without_manifest(folder, 3, "notes.txt"), "foreign", "holds notes.txt"),
    "other format": (lambda folder: complete(folder, 3, format="theirs"), "foreign", "not of the format"),
    "other version": (lambda folder: complete(folder, 3, version=9), "foreign", "version 9 and only 1"),
    "no step": (lambda folder: complete(folder, 3, step=None), "foreign", "no proper 'step'"),
    "another step": (lambda folder: complete(folder, 3, step=7), "foreign", "that of step_00000007"),
    "not json": (lambda folder: with_text(folder, 3, '{"format": "dist'), "foreign", "cannot be read"),
    "not an object": (lambda folder: with_text(folder, 3, "[]"), "foreign", "not of the format"),
    "another shape": (lambda folder: complete(folder, 3, model=MODEL | {"up.weight": "float32 [4, 8]"}), "foreign",
                      "up.weight is float32 [4, 8] there and float32 [32, 8] here"),
    "another dtype": (lambda folder: complete(folder, 3, model=MODEL | {"norm.weight": "bfloat16 [8]"}), "foreign",
                      "norm.weight is bfloat16 [8] there"),
    "more parameters": (lambda folder: complete(folder, 3, model=MODEL | {"z": "float32 [1]"}), "foreign",
                        "z is float32 [1] there and nothing here"),
    "fewer parameters": (lambda folder: complete(folder, 3, model={"norm.weight": "float32 [8]"}), "foreign",
                         "up.weight is nothing there"),
}


def names(folder):
    return sorted(path.name for path in folder.iterdir())


@pytest.mark.parametrize("how", SPOILT)
def test_a_torn_or_foreign_folder_is_named_and_the_one_before_it_used(tmp_path, caplog, how):
    make, verdict, reason = SPOILT[how]
    for step in (1, 2):
        complete(tmp_path, step)
    spoilt = make(tmp_path)
    assert judge(spoilt, MODEL)[0] == verdict
    with caplog.at_level(logging.WARNING, "distca"):
        assert newest_good(tmp_path, MODEL) == tmp_path / "step_00000002"
    (line,) = [record.getMessage() for record in caplog.records]
    assert f"{spoilt} is {verdict} and not used: " in line and reason in line and "\n" not in line


def test_a_complete_folder_is_good_and_its_manifest_reads_back(tmp_path):
    path = complete(tmp_path, 123_456_789, loader={"epoch": 2, "index": [1, 2]})
    assert judge(path, MODEL) == ("good", "") and newest_good(tmp_path, MODEL) == path
    assert read_manifest(path).loader == {"epoch": 2, "index": [1, 2]} and read_manifest(path).files == FILES
    assert [*sorted(FILES), MANIFEST] == names(path)


def test_steps_are_ordered_as_numbers(tmp_path):
    for step in (99_999_999, 100_000_000, 2):
        complete(tmp_path, step)
    (tmp_path / "step_7").mkdir()
    assert [path.name for path in step_folders(tmp_path)] == ["step_00000002", "step_99999999", "step_100000000"]


def test_nothing_good_is_none(tmp_path):
    without_manifest(tmp_path, 1)
    assert newest_good(tmp_path, MODEL) is None
    assert newest_good(tmp_path / "nowhere", MODEL) is None
    assert judge(tmp_path / "nowhere", MODEL)[0] == "torn"


@settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(name=st.sampled_from(sorted(FILES)), num_bytes=st.integers(0, 1000))
def test_a_file_of_any_other_size_is_torn(tmp_path, name, num_bytes):
    path = tmp_path / "step_00000001"
    if not path.exists():
        complete(tmp_path, 1)
    (path / name).write_bytes(b"x" * num_bytes)
    verdict, reason = judge(path, MODEL)
    (path / name).write_bytes(b"x" * FILES[name])
    assert verdict == ("good" if num_bytes == FILES[name] else "torn")
    assert verdict == "good" or name in reason


@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_no_manifest_but_the_true_one_is_good(tmp_path, data):
    path = tmp_path / "step_00000001"
    if not path.exists():
        complete(tmp_path, 1)
    content = (path / MANIFEST).read_bytes()
    fields = json.loads(content)
    name = data.draw(st.sampled_from(["whole", "cut", "format", "version", "step", "model"]))
    if name == "whole":
        changed = json.dumps(data.draw(anything)).encode()
    elif name == "cut":
        changed = content[:data.draw(st.integers(0, len(content) - 1))]
    else:
        changed = json.dumps(fields | {name: data.draw(anything.filter(lambda value: value != fields[name]))}).encode()
    (path / MANIFEST).write_bytes(changed)
    verdict, reason = judge(path, MODEL)
    (path / MANIFEST).write_bytes(content)
    assert verdict == "foreign" and reason


@pytest.mark.parametrize(("keep", "left"), [(1, [6, 7]), (2, [5, 6, 7]), (3, [3, 5, 6, 7]), (9, [1, 2, 3, 5, 6, 7])])
def test_pruning_drops_good_ones_beyond_keep_and_older_torn_ones(tmp_path, keep, left):
    for step in (1, 3, 5, 6):
        complete(tmp_path, step)
    without_manifest(tmp_path, 2)
    without_manifest(tmp_path, 7)                                # newer than any good one
    complete(tmp_path, 4, model={})
    complete(tmp_path, 0, format="theirs")
    prune(tmp_path, keep, MODEL)
    assert names(tmp_path) == [step_name(step) for step in sorted([0, 4, *left])]


def test_half_a_removal_is_torn(tmp_path, monkeypatch):
    for step in (1, 2):
        complete(tmp_path, step)

    def killed(_):
        raise KeyboardInterrupt

    monkeypatch.setattr("distca.train.manifest.shutil.rmtree", killed)
    with pytest.raises(KeyboardInterrupt):
        prune(tmp_path, 1, MODEL)
    assert [judge(path, MODEL)[0] for path in step_folders(tmp_path)] == ["torn", "good"]


def test_room_is_made_without_loss_of_what_is_not_ours(tmp_path, caplog):
    make_room(tmp_path / step_name(1), MODEL)
    for make in (without_manifest, complete):
        make_room(make(tmp_path, 1), MODEL)
        assert not names(tmp_path)
    for _ in range(2):
        make_room(without_manifest(tmp_path, 1, "notes.txt"), MODEL)
    assert names(tmp_path) == ["step_00000001.1", "step_00000001.2"]
    assert (tmp_path / "step_00000001.1" / "notes.txt").read_text() == "mine"
    assert caplog.text.count("step_00000001 is not of this run") == 2
    assert not step_folders(tmp_path)


def test_an_unwritable_folder_is_one_line(tmp_path):
    (tmp_path / "file").touch()
    for folder in (tmp_path / "file", tmp_path / "file" / "below", Path("/proc/nowhere")):
        with pytest.raises(ValueError) as caught:
            check_folder(folder, resume=True)
        line = str(caught.value)
        assert line.startswith(f"checkpoint.folder = '{folder}' cannot be written") and "\n" not in line


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_read_only_folder_is_refused(tmp_path):
    tmp_path.chmod(0o555)
    with pytest.raises(ValueError, match="Permission denied"):
        check_folder(tmp_path, resume=True)


def test_a_fresh_run_does_not_mix_with_another(tmp_path):
    check_folder(tmp_path / "deep" / "new", resume=False)
    assert not names(tmp_path / "deep" / "new")
    without_manifest(tmp_path, 1)
    check_folder(tmp_path, resume=False)
    complete(tmp_path, 2)
    check_folder(tmp_path, resume=True)
    with pytest.raises(ValueError, match=r"already holds step_00000002; set checkpoint.resume = true"):
        check_folder(tmp_path, resume=False)
