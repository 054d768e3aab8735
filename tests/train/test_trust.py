"""Nothing unpickles what this run's own processes did not write, and no rank waits longer than it was told to."""

import ast
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import distca
from distca.train.launch import launch
from distca.train.settings import Settings
from tests.support import rank_mains as mains

PACKAGE = Path(distca.__file__).parent
UNPICKLES = {  # file -> whose pickles those are
    "tests/support/processes.py": "of child processes that tests start",
    "distca/check/world.py": "of the other ranks of one check, which all run the code that is checked",
}
PICKLING_MODULES = {"pickle", "cPickle", "dill", "cloudpickle", "joblib", "shelve", "marshal"}
PICKLING_CALLS = {"all_gather_object", "gather_object", "broadcast_object_list", "scatter_object_list",
                  "send_object_list", "recv_object_list", "FileSystemReader", "read_pickle"}


def modules() -> dict[str, ast.Module]:
    paths = [*sorted(PACKAGE.rglob("*.py")), *(PACKAGE.parent / name for name in UNPICKLES)]
    return {path.relative_to(PACKAGE.parent).as_posix(): ast.parse(path.read_text(encoding="utf-8")) for path in paths}


def unpickles(tree: ast.AST) -> Iterator[str]:
    """The names in a module that can unpickle something."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name.split(".")[0] in PICKLING_MODULES)
        elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] in PICKLING_MODULES:
            yield node.module or ""
        elif isinstance(node, ast.Call):
            name = ast.unparse(node.func)
            if name.split(".")[-1] in PICKLING_CALLS or name in ("torch.load", "dcp.load", "eval", "exec"):
                yield name
            if name in ("np.load", "numpy.load"):
                yield from (name for word in node.keywords if ast.unparse(word) == "allow_pickle=True")


def groups_without_timeout(tree: ast.AST) -> list[int]:
    """Lines that make a process group and do not say how long it waits."""
    makers = ("new_group", "init_process_group", "new_subgroups", "TCPStore")
    return [node.lineno for node in ast.walk(tree) if isinstance(node, ast.Call)
            and ast.unparse(node.func).split(".")[-1] in makers
            and not any(word.arg == "timeout" for word in node.keywords)]


def test_only_named_files_unpickle() -> None:
    found = {name for name, tree in modules().items() if any(unpickles(tree))}
    assert found == UNPICKLES.keys()                             # no other, and the walk does see it


def test_the_walk_sees_every_form() -> None:
    for source in ("import pickle", "from pickle import loads", "torch.load(x)", "dist.broadcast_object_list(x)",
                   "np.load(x, allow_pickle=True)", "eval(x)"):
        assert list(unpickles(ast.parse(source))), source
    for source in ("json.loads(x)", "np.load(x)", "np.load(x, allow_pickle=False)", "decoder.load(x)"):
        assert not list(unpickles(ast.parse(source))), source
    assert groups_without_timeout(ast.parse("dist.new_group(backend='gloo')\ndist.new_group(timeout=t)")) == [1]


def test_every_group_is_made_with_a_timeout() -> None:
    found = {name: lines for name, tree in modules().items() if (lines := groups_without_timeout(tree))}
    assert not found


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    return Settings().with_values({
        "log.folder": str(tmp_path), "run.threads": 1, "run.device": "cpu", "run.timeout_seconds": 37,
        "run.steps": 4, "checkpoint.folder": str(tmp_path / "saved"), "checkpoint.every": 1,
        "batch.tokens_per_rank": 256, "data.max_document": 200})


@pytest.mark.multiprocess
@pytest.mark.parametrize("values", [
    {"parallel.fsdp": False, "parallel.pipeline": 2},
    pytest.param({"parallel.tensor": 2}, marks=pytest.mark.slow),
    pytest.param({"run.ranks": 4, "parallel.tensor": 2, "parallel.pipeline": 2}, marks=pytest.mark.slow),
])
def test_every_group_of_a_run_has_its_timeout(settings: Settings, tmp_path: Path,
                                              values: dict[str, Any]) -> None:
    """Also those that torch makes by itself: for meshes, for replicas, for FSDP."""
    assert launch(settings.with_values(values), mains.group_timeouts) == 0
    said = [json.loads(path.read_text()) for path in sorted(tmp_path.glob("rank*.json"))]
    for one in said:
        assert len(one["seconds"]) >= 5 and set(one["seconds"]) == {37.0}


@pytest.mark.multiprocess
def test_a_rank_stopped_in_the_last_save_does_not_hang_the_run(settings: Settings,
                                                               capfd: pytest.CaptureFixture[str]) -> None:
    """torch's own wait is half an hour, longer than a test may take."""
    short = settings.with_values({"run.timeout_seconds": 5, "checkpoint.every": 0, "run.steps": 1})
    assert launch(short, mains.train_and_stop_in_the_last_save) == 1
    error = capfd.readouterr().err
    assert "step_00000001 was not written" in error or "rank 1 gave no sign of life for 5 s" in error
    assert "Traceback" not in error


@pytest.mark.multiprocess
@pytest.mark.parametrize("on_error", [pytest.param("stop", marks=pytest.mark.slow), "continue"])
def test_a_full_disk_says_so_and_the_run_goes_on_if_asked_to(settings: Settings, tmp_path: Path,
                                                             capfd: pytest.CaptureFixture[str], on_error: str) -> None:
    code = launch(settings.with_values({"checkpoint.on_error": on_error}), mains.train_with_a_full_disk)
    error = capfd.readouterr().err
    assert "step_00000001 was not written: rank 0: no space: No space left on device" in error
    assert "Traceback" not in error
    steps = len((tmp_path / "steps.jsonl").read_text().splitlines())
    saved = sorted(path.name for path in (tmp_path / "saved").glob("step_*"))
    if on_error == "stop":
        assert code == 1 and steps < 4 and not saved
    else:
        assert code == 0 and steps == 4 and saved == ["step_00000003", "step_00000004"]
        assert "training goes on" in error
