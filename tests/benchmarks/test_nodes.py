"""The benchmark of plans by levels runs on batches of its own, and writes what it prints."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import distca

ROOT = Path(distca.__file__).parents[1]


def test_it_compares_levels_with_flat_plans(tmp_path: Path) -> None:
    output = tmp_path / "nodes.json"
    done = subprocess.run(
        [sys.executable, str(ROOT / "benchmarks/nodes.py"), "--ranks", "32", "--repeats", "1", "--output", str(output)],
        capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    content = json.loads(output.read_text(encoding="utf-8"))
    sampled = [row for row in content["rows"] if "seed" in row["name"]]
    assert {row["placement"] for row in sampled} == {"given", "balanced"}
    for row in sampled:
        assert row["bytes_between_nodes"] <= row["flat_bytes_between_nodes"]
        assert row["limit"] is not None or row["work_max_over_mean"] <= 1.05 + 1e-9
    for name in {row["name"] for row in content["rows"]}:
        same = {row["placement"]: row for row in content["rows"] if row["name"] == name}
        given, balanced = same["given"], same["balanced"]
        assert balanced["bytes_between_nodes"] <= given["bytes_between_nodes"]
        assert balanced["bytes_between_nodes_max"] <= given["bytes_between_nodes_max"]
