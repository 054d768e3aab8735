"""The overlap benchmark picks the slowest network that can hide, and says why where it cannot have one."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("torch")
import overlap
import overlap_nccl


def test_the_rate_is_what_the_tightest_window_needs_and_what_may_stick_out() -> None:
    trips = [overlap.Trip(1_000, 1, 2.0), overlap.Trip(1_000, 1, 0.0)]
    assert overlap.slowest_rate(trips, 1.0) == pytest.approx(1_000)   # the first hides; the second is all exposed
    assert overlap.slowest_rate(trips, 4.0) == pytest.approx(2_000 / 6)  # neither hides


@given(st.lists(st.tuples(st.integers(1, 10**8), st.floats(0, 5)), min_size=1), st.floats(1e-3, 10))
def test_no_slower_rate_would_do(drawn: list[tuple[int, float]], allowed_seconds: float) -> None:
    trips = [overlap.Trip(num_bytes, 1, window) for num_bytes, window in drawn]
    rate = overlap.slowest_rate(trips, allowed_seconds)
    assert overlap.sticking_out_seconds(trips, rate) <= allowed_seconds
    assert overlap.sticking_out_seconds(trips, rate * 0.999) > allowed_seconds


def test_nothing_to_exchange_is_refused() -> None:
    with pytest.raises(ValueError, match="raise --tokens"):
        overlap.slowest_rate([overlap.Trip(0, 0, 1.0)], 1.0)


@pytest.mark.parametrize(("missing", "reason"), [("root", "need root"), ("tc", "install iproute2")])
def test_skips_with_a_reason_where_the_network_is_not_allowed(missing: str, reason: str, tmp_path: Path,
                                                              monkeypatch: pytest.MonkeyPatch,
                                                              capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("os.geteuid", lambda: 1000 if missing == "root" else 0)
    monkeypatch.setattr("shutil.which", lambda tool: None if tool == missing else f"/sbin/{tool}")
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: pytest.fail("nothing may be made"))
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    monkeypatch.setattr(sys, "argv", ["overlap.py", "--output", str(tmp_path / "overlap.json")])
    assert overlap.main() == 0
    assert reason in capsys.readouterr().out
    assert reason in json.loads((tmp_path / "overlap.json").read_text())["skipped"]


def test_kernels_beside_nccl_are_counted_by_kind_from_torchs_trace() -> None:
    def kernel(name: str, stream: int, start: float, stop: float, *grid: int) -> dict[str, Any]:
        return {"cat": "kernel", "name": name, "ts": 1e6 + start, "dur": stop - start,
                "args": {"stream": stream, "grid": grid}}

    spans = overlap_nccl.spans_of([
        kernel("attention_backward", 7, 30_000, 60_000, 128), kernel("nvjet_tst_128x256", 7, 0, 20_000, 66, 2, 1),
        kernel("ncclDevKernel_SendRecv", 9, 5_000, 40_000, 4), kernel("ncclDevKernel_SendRecv", 9, 58_000, 63_000, 4),
        {"cat": "cpu_op", "name": "aten::mm", "ts": 0, "dur": 1}])
    found = overlap_nccl.summary(spans)
    assert [span.kind for span in spans] == ["matrix products", "NCCL", "attention backward", "NCCL"]
    assert found["beside_nccl_seconds"] == pytest.approx({"matrix products": 0.015, "attention backward": 0.012})
    assert (found["seconds"], found["nccl_seconds"], found["compute_seconds"]) == pytest.approx((0.063, 0.040, 0.050))
    assert found["nccl_alone_seconds"] == pytest.approx(0.013)  # 20 to 30 and 60 to 63 ms
    assert found["overlapped_share"] == pytest.approx(27 / 40) and found["nccl_blocks"] == [4]
    assert [kernel[:2] for kernel in found["kernels"]] == [(span.stream, span.kind) for span in spans]


@pytest.mark.slow
@pytest.mark.multiprocess
def test_the_variants_over_four_ranks_have_one_loss(tmp_path: Path) -> None:
    output = tmp_path / "overlap_nccl.json"
    subprocess.run([sys.executable, overlap_nccl.__file__, "--device", "cpu", "--tokens", "64", "--rounds", "1",
                    "--output", str(output)], check=True, timeout=240)
    content = json.loads(output.read_text())
    assert [row["variant"] for row in content["rows"]] == list(overlap_nccl.VARIANTS)
    assert content["largest_loss_difference"] < 1e-5 and content["calibration"][0]["bytes_sent_by_rank_0"] > 0
