"""The terminal view says what the numbers say."""

from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console, RenderableType

from distca.report.figures import PlannedBatch, byte_text, seconds_text
from distca.report.planned_batches import verdict_on_batch
from distca.report.render import print_plan, work_bars, work_profile


def text(renderable: RenderableType) -> str:
    console = Console(width=80, color_system=None)
    with console.capture() as capture:
        console.print(renderable)
    return capture.get()


def whole(plan_figures: PlannedBatch) -> str:
    console = Console(width=80, color_system=None)
    with console.capture() as capture:
        print_plan(plan_figures, console)
    return capture.get()


def test_bars_are_as_long_as_the_work_on_one_scale(make_batch: Callable[..., PlannedBatch]) -> None:
    lines = text(work_bars(make_batch([8, 2, 1, 1], [3, 3, 3, 3], moved=2))).splitlines()
    blocks = [line.count("█") for line in lines[1:]]
    assert lines[1].startswith("rank 0") and "2.67" in lines[1] and "1.00" in lines[1]
    longest = blocks[0] - int(22 * 3 / 8)
    assert longest == 22
    assert lines[2].count("█") == int(22 * 2 / 8) + int(22 * 3 / 8)


def test_dedicated_servers_have_no_before(make_batch: Callable[..., PlannedBatch]) -> None:
    out = text(work_bars(make_batch([6, 2], [4, 2, 2], moved=1)))
    last = out.splitlines()[-1]
    assert last.startswith("dedicated 2") and last.split()[-1] == "0.75" and len(last.split()) == 4


@settings(max_examples=30, deadline=None)
@given(work=st.lists(st.floats(0.01, 100), min_size=17, max_size=400))
def test_profile_shows_the_busiest_server_however_many_there_are(make_batch: Callable[..., PlannedBatch],
                                                                 work: list[float]) -> None:
    out = text(work_profile(make_batch(work, work)))
    lines = out.splitlines()
    assert max(len(line) for line in lines) <= 80
    top = lines[1]                                               # first row of the first profile
    assert "█" in top
    assert f"{max(work) / np.mean(work):.2f}" in out


def test_profile_names_the_group_size(make_batch: Callable[..., PlannedBatch]) -> None:
    assert "up to 4 servers" in text(work_profile(make_batch(np.arange(1, 251), np.ones(250))))


def test_verdict_states_both_loads_and_the_time_that_remains(make_batch: Callable[..., PlannedBatch]) -> None:
    words = verdict_on_batch(make_batch([9, 1, 1, 1], [3.15, 2.95, 2.95, 2.95], sent=[4e9, 0, 0, 0], moved=3))
    assert "3.00×" in words and "1.05×" in words and "35%" in words and "4 GB" in words


def test_verdict_when_nothing_needs_to_move(make_batch: Callable[..., PlannedBatch]) -> None:
    assert "no query has to move" in verdict_on_batch(make_batch([1.0, 1.02], [1.0, 1.02]))


def test_limit_and_failed_proof_are_shown(make_batch: Callable[..., PlannedBatch]) -> None:
    out = whole(make_batch([3, 1], [2.5, 1.5], moved=1, limit="rank 0 is one tile", invalid="task 3 is lost"))
    assert "rank 0 is one tile" in out and "NOT VALID: task 3 is lost" in out


def test_heading_names_tensor_parallelism_and_dedicated_servers(make_batch: Callable[..., PlannedBatch]) -> None:
    out = whole(make_batch([3, 1], [2, 1, 1], moved=1, tp=2))
    assert "2 ranks of 1,024 tokens and 1 dedicated server," in out and "tp 2" in out


@pytest.mark.parametrize(("count", "said"), [
    (0, "0 B"), (999, "999 B"), (1000, "1 kB"), (1_234_000, "1.23 MB"), (87.4e9, "87.4 GB"), (2.4e12, "2.4 TB"),
])
def test_bytes_are_decimal(count: float, said: str) -> None:
    assert byte_text(count) == said


def test_seconds() -> None:
    assert (seconds_text(0.0123), seconds_text(2.5)) == ("12.3 ms", "2.50 s")
