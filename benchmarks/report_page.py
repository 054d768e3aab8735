"""How large is a report page, and how soon does it answer? Plans and timelines of 8 to 512 ranks, in Chromium.

Every page is opened in a browser of its own with an empty profile. `ready` is the page's own mark: what is in sight is
drawn and the controls answer; `drawn` is the last chart. Medians. A machine that does other things makes them longer,
so the main thread's own CPU seconds stand beside them.
"""

from __future__ import annotations

import argparse
import shutil
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median

import numpy as np
from outputs import RESULTS, host_facts, write_json
from rich.console import Console
from rich.table import Table
from selenium import webdriver

import distca
from distca.report.figures import PlannedBatch, ReportData, Timeline
from distca.report.page import write_page
from distca.trace import Span, StepTrace
from distca.workload.documents import sample_lengths

SWITCHES = ("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync",
            "--disable-background-networking", "--disable-component-update", "--window-size=1366,768")


@dataclass(frozen=True, slots=True)
class Result:
    ranks: int
    num_spans: int
    megabytes: float
    write_seconds: float
    ready_seconds: float
    drawn_seconds: float
    cpu_seconds: float  # of the page's main thread until all is drawn


def report(ranks: int, layers: int) -> ReportData:
    """A sampled batch's plan, and a timeline with a few spans per layer."""
    layout = distca.pack(sample_lengths("prolong", ranks * 65_536, seed=0), ranks=ranks)
    rng = np.random.default_rng(0)
    return ReportData(
        "benchmark", plan=PlannedBatch.of(distca.plan(layout, "llama3-8b"), "prolong"),
        timelines=(Timeline("made up", tuple(trace(rank, layers, rng) for rank in range(ranks))),))


def trace(rank: int, layers: int, rng: np.random.Generator) -> StepTrace:
    spans = []
    for start in 0.01 * np.arange(2 * layers):
        split = start + rng.uniform(0.004, 0.006)
        spans += [Span("linear", "linear", start, split), Span("exchange", "network", start, split - 0.001, 10_000_000),
                  Span("attention", "attention", split, split + 0.003),
                  Span("exchange", "wait", split + 0.003, start + 0.01)]
    return StepTrace(rank, 0, tuple(spans))


def measure(data: ReportData, ranks: int, repeats: int) -> Result:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "page.html"
        begin = time.perf_counter()
        write_page(data, path)
        write_seconds = time.perf_counter() - begin
        loads = [load(path, f"{folder}/profile{number}") for number in range(repeats)]
        megabytes = path.stat().st_size / 1e6
    num_spans = sum(len(one.spans) for timeline in data.timelines for one in timeline.traces)
    return Result(ranks, num_spans, megabytes, write_seconds, *(median(column) for column in zip(*loads, strict=True)))


def load(path: Path, profile: str) -> tuple[float, float, float]:
    """Seconds until ready, until drawn, and of the main thread, in a new browser."""
    options = webdriver.ChromeOptions()
    options.binary_location = shutil.which("chromium") or shutil.which("google-chrome") or ""
    for switch in (*SWITCHES, f"--user-data-dir={profile}"):
        options.add_argument(switch)
    browser = webdriver.Chrome(options=options, service=webdriver.ChromeService(shutil.which("chromedriver")))
    try:
        browser.execute_cdp_cmd("Performance.enable", {"timeDomain": "threadTicks"})
        browser.get(path.as_uri())
        while browser.execute_script("return document.documentElement.dataset.complete") != "true":
            time.sleep(0.1)
        ready, drawn = (browser.execute_script(
            "return performance.getEntriesByName(arguments[0])[0].startTime / 1e3", f"report-{name}")
            for name in ("ready", "complete"))
        metrics = browser.execute_cdp_cmd("Performance.getMetrics", {})["metrics"]
        return ready, drawn, next(one["value"] for one in metrics if one["name"] == "TaskDuration")
    finally:
        browser.quit()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[8, 64, 512])
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--output", type=Path, default=RESULTS / "report_page.json")
    chosen = parser.parse_args()
    host = host_facts()
    rows = [measure(report(ranks, chosen.layers), ranks, chosen.repeats) for ranks in chosen.ranks]
    table = Table("ranks", "spans", "MB", "written, s", "ready, s", "drawn, s", "main thread, s")
    for row in rows:
        table.add_row(*(f"{value:.2f}" if isinstance(value, float) else f"{value:,}" for value in asdict(row).values()))
    Console().print(table)
    write_json(chosen.output, {"host": host, "rows": rows})


if __name__ == "__main__":
    main()
