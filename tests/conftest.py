"""What tests of several packages share, and what keeps them independent of the machine, of time and of their order.

No example has a deadline, since other work may share the machine, and every run draws the same examples.
`--hypothesis-profile sweep` draws others, `--shuffle SEED` changes the order.
"""

import os
import random
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

from distca import cli
from tests.support.browser import start_chromium

BFLOAT16_PRODUCT = "import torch; x = torch.ones(64, 64, dtype=torch.bfloat16); x @ x"


def _without_broken_amx() -> str | None:
    """Some virtual machines offer the CPU's matrix tiles (AMX) and fault when they are used, inside torch's libraries.

    Where that is so, oneDNN is kept from them for these tests and the processes they start; says so, or None.
    """
    info = Path("/proc/cpuinfo")
    if "ONEDNN_MAX_CPU_ISA" in os.environ or not info.exists() or "amx_bf16" not in info.read_text(encoding="utf-8"):
        return None
    if subprocess.run([sys.executable, "-c", BFLOAT16_PRODUCT], capture_output=True, check=False).returncode == 0:
        return None
    os.environ["ONEDNN_MAX_CPU_ISA"] = "AVX512_CORE_FP16"
    return "AMX faults on this machine: ONEDNN_MAX_CPU_ISA=AVX512_CORE_FP16"


WITHOUT_AMX = _without_broken_amx()  # before anything imports torch


def pytest_report_header() -> str | None:
    return WITHOUT_AMX


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--shuffle", type=int, metavar="SEED", help="run files, and the tests of each, in an order that "
                     "depends on SEED alone: workers of pytest-xdist must agree on it")


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Shuffle, or begin with the files that take longest: two workers that share files then end at about one time.

    Those start processes; and of the others, a file of few tests has longer ones.
    """
    seed = config.getoption("shuffle")
    if seed is not None:
        draw = random.Random(seed)
        file_order = {path: draw.random() for path in dict.fromkeys(item.path for item in items)}
        items.sort(key=lambda item: (file_order[item.path], draw.random()))
        return
    of_file = Counter(item.path for item in items)
    with_processes = Counter(item.path for item in items if item.get_closest_marker("multiprocess"))
    items.sort(key=lambda item: (-with_processes[item.path], of_file[item.path], item.path))


UNTIMED: Any = {"deadline": None, "suppress_health_check": [HealthCheck.too_slow]}
settings.register_profile("distca", derandomize=True, **UNTIMED)
settings.register_profile("sweep", print_blob=True, **UNTIMED)
settings.load_profile("distca")


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    driver = start_chromium(tmp_path_factory.mktemp("profile"))
    yield driver
    driver.quit()


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[...,
        tuple[int, str, str]]:
    """Run `distca …` in an empty folder: (exit code, stdout, stderr)."""
    monkeypatch.chdir(tmp_path)

    def call(*arguments: Any) -> tuple[int, str, str]:
        with pytest.raises(SystemExit) as stop:
            cli.main([str(argument) for argument in arguments])
        captured = capsys.readouterr()
        assert isinstance(stop.value.code, int)
        return stop.value.code, captured.out, captured.err

    return call
