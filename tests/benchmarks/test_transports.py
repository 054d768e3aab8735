"""The benchmark of links and transports compares bytes that arrived, and divides by the slower process's time."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch")
import transports


@pytest.mark.multiprocess
def test_ways_are_measured_where_they_are_possible(tmp_path: Path) -> None:
    done = subprocess.run([sys.executable, transports.__file__, "--cpu", "--megabytes", "1,2", "--repeats", "2",
                           "--ways", "tcp,copy,nccl", "--output", str(tmp_path / "found.json")],
                          capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    rows = json.loads((tmp_path / "found.json").read_text())["rows"]
    assert {(row["way"], row["num_bytes"] >> 20) for row in rows} == {
        (transports.SAID[way], size) for way in ("tcp", "copy") for size in (1, 2)}
    for row in rows:
        assert 0 < row["least_seconds"] <= row["seconds"]
        assert row["bytes_per_second"] == pytest.approx(row["num_bytes"] / row["seconds"])
        assert row["way"] in done.stdout
