"""Every kind of page in Chromium, light and dark, wide and on a phone: drawn, complete, silent, and without findings.

axe-core checks what a screen reader and a keyboard need: names, contrast, headings, regions that scroll.
"""

import importlib.util
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from threading import Thread

import numpy as np
import pytest

from distca.cli.watch import listen
from distca.models import MODELS
from distca.planning.choose import plan_step
from distca.report.figures import PlannedBatch, ReportData, RunFigures, Spread, StrategyFigures, Timeline, Wait
from distca.report.page import write_page
from distca.report.planned_batches import PlannedBatches
from distca.report.run_sections import LOSS
from distca.report.runs import step_detail
from distca.simulate.strategies import NAMES
from distca.trace import StepTrace
from distca.train.report_files import rank_figures

selenium = pytest.importorskip("selenium", reason="selenium is not installed; pip install selenium")
from selenium.webdriver.chrome.webdriver import WebDriver  # noqa: E402
from selenium.webdriver.common.by import By  # noqa: E402
from selenium.webdriver.common.keys import Keys  # noqa: E402
from selenium.webdriver.support.ui import Select  # noqa: E402

from tests.support.browser import IN_BROWSER, asked_for, open_page, until  # noqa: E402

AXE = importlib.util.find_spec("axe_core_python")
LOOKS = {"light and wide": ("light", 1280), "dark on a phone": ("dark", 420)}
PAGES = ("plan", "strategies", "run", "two runs")

pytestmark = IN_BROWSER


def strategies() -> tuple[StrategyFigures, ...]:
    return tuple(StrategyFigures(
        name, Spread(1e6 + 1e5 * at, 9e5, 2e6), 1.5, 0.2, 0.05, 60e9, 1.5 - 0.05 * at,
        {other: Spread(1.25, 1.1, 1.4) for other in NAMES if other != name}) for at, name in enumerate(NAMES))


def pages(batch: PlannedBatch, report: ReportData, traces: tuple[StepTrace, ...]) -> dict[str, ReportData]:
    plans = PlannedBatches.of([batch] * 3, "sampled", note="Three batches", is_dealt=True)
    step = plan_step([batch.plan.layout.lengths], MODELS["llama3-8b"], num_data=8, layers=(4,), ping_pong=False)
    ranks = rank_figures(step, 7, [10**9] * 8)
    measured = (Timeline("measured, step 7", traces),)
    run, = report.runs
    run = RunFigures(run.step[40:60], tuple((label, values[40:60]) for label, values in run.series), "runs/one")
    other = RunFigures(run.step[:10], ((LOSS, np.linspace(9, 3, 10)),), "runs/other")
    settings = (("run.steps", "300", "100"), ("run.seed", "0", "0"))
    one = ReportData("A run", verdict="It went well.", facts=(("model", "tiny"),), runs=(run,), ranks=ranks,
                     timelines=measured, waits=(Wait(3, "rank 1", 0.002, 0.5, 10**6),), detail=step_detail(7, ranks),
                     settings=tuple(line[:2] for line in settings))
    return {
        "plan": plans.page(),
        "strategies": replace(report, plan=None, runs=(), comparison=strategies(), verdict="Ours is faster."),
        "run": one,
        "two runs": replace(one, runs=(run, other), sides=(("tokens/s", "2", "1"),), settings=settings,
                            timelines=(*measured, Timeline("predicted", traces)))}


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory, make_pages: Callable[[], tuple[PlannedBatch, ReportData,
            tuple[StepTrace, ...]]]) -> dict[str, str]:
    """Address of every page by its name."""
    folder = tmp_path_factory.mktemp("pages")
    found = {}
    for name, data in pages(*make_pages()).items():
        write_page(data, path := folder / f"{name.replace(' ', '_')}.html")
        found[name] = path.as_uri()
    return found


def look(browser: WebDriver, look: str) -> None:
    scheme, width = LOOKS[look]
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {
        "features": [{"name": "prefers-color-scheme", "value": scheme}]})
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", {
        "width": width, "height": 900, "deviceScaleFactor": 1, "mobile": False})


def findings(browser: WebDriver) -> list[str]:
    """What axe-core finds wrong; the page's policy does not bind what the driver runs."""
    if AXE is None or AXE.origin is None:
        pytest.skip("axe-core is not here; pip install axe-core-python")
    browser.execute_script(Path(AXE.origin).with_name("axe.min.js").read_text(encoding="utf-8"))
    return browser.execute_async_script(
        "const done = arguments[0]; axe.run().then(found => done(found.violations.flatMap(one =>"
        " one.nodes.map(node => `${one.id}: ${node.target}`))))")


@pytest.mark.parametrize("looks", LOOKS)
@pytest.mark.parametrize("name", PAGES)
def test_every_page_is_drawn_fits_and_asks_nobody(browser: WebDriver, written: dict[str, str], name: str,
                                                  looks: str) -> None:
    look(browser, looks)
    browser.get_log("performance")
    open_page(browser, written[name])
    charts = browser.find_elements(By.CLASS_NAME, "chart")
    assert len(charts) >= 3 and all(chart.find_elements(By.CSS_SELECTOR, "svg.main-svg") for chart in charts)
    wide, shown = browser.execute_script("return [document.documentElement.scrollWidth, innerWidth]")
    assert wide <= shown == LOOKS[looks][1]
    dark = browser.execute_script("return getComputedStyle(document.body).backgroundColor")
    assert (sum(map(int, dark.strip("rgb()").split(","))) < 200) == looks.startswith("dark")
    assert asked_for(browser, written[name]) == {written[name]} and browser.get_log("browser") == []


@pytest.mark.parametrize("looks", LOOKS)
@pytest.mark.parametrize("name", PAGES)
def test_axe_finds_nothing(browser: WebDriver, written: dict[str, str], name: str, looks: str) -> None:
    look(browser, looks)
    open_page(browser, written[name])
    for details in browser.find_elements(By.TAG_NAME, "details"):
        details.find_element(By.TAG_NAME, "summary").send_keys(Keys.ENTER)
    assert findings(browser) == []


def hidden_columns(browser: WebDriver) -> int:
    return browser.execute_script(
        "return [...document.querySelectorAll('main > section > .table')]"
        ".filter(one => one.scrollWidth > one.clientWidth + 1).length")


def test_no_column_is_lost_and_on_a_phone_the_arrow_keys_scroll(browser: WebDriver, written: dict[str, str]) -> None:
    look(browser, "light and wide")
    open_page(browser, written["strategies"])
    assert hidden_columns(browser) == 0
    rows = browser.find_elements(By.CSS_SELECTOR, "#comparison .table:first-of-type tbody tr")
    kinds = {row.find_element(By.TAG_NAME, "th").text.split("\n")[0]: row.get_attribute("class") for row in rows}
    assert kinds == {"fixed_packing": "other", "variable_length": "other", "per_document_cp": "other",
                     "wlb_ideal": "best", "disaggregated": "ours", "distca": "ours", "bound": "bound"}
    assert all("\n" in row.find_element(By.TAG_NAME, "th").text for row in rows)  # each is explained below its name
    colors = browser.execute_script("return document.getElementById('chart-comparison').data[0].marker.color")
    assert colors[3] != colors[0] == colors[1] != colors[5] == colors[4] != colors[3]
    look(browser, "dark on a phone")
    open_page(browser, written["strategies"])
    assert hidden_columns(browser) > 0
    table = browser.find_element(By.CSS_SELECTOR, "#comparison .table")
    table.send_keys(Keys.ARROW_RIGHT)
    until(lambda: browser.execute_script("return arguments[0].scrollLeft", table) > 0)


def test_curves_are_smoothed_and_two_runs_share_a_chart(browser: WebDriver, written: dict[str, str]) -> None:
    look(browser, "light and wide")
    open_page(browser, written["two runs"])

    def lines() -> dict[str, list[float | None]]:
        return dict(browser.execute_script(
            "return document.getElementById('chart-run').data.map(({name, y}) => [name, y])"))

    assert list(lines()) == ["runs/one", "runs/one, held out", "runs/other"]
    raw = lines()["runs/other"]
    Select(browser.find_element(By.ID, "run-smoothing")).select_by_value("20")
    smooth = lines()["runs/other, smoothed"]
    keep, mean, weight = 1 - 2 / 21, 0.0, 0.0
    for value, drawn in zip(raw, smooth, strict=True):
        assert value is not None
        mean, weight = keep * mean + (1 - keep) * value, keep * weight + 1 - keep
        assert drawn == pytest.approx(mean / weight)


def test_the_live_page_grows_and_says_when_it_ends(browser: WebDriver, tmp_path: Path) -> None:
    look(browser, "light and wide")

    def log(step: int) -> None:
        with open(tmp_path / "steps.jsonl", "a") as file:
            file.write(json.dumps({"step": step, "loss": 5.0 / step}) + "\n")

    def drawn() -> list[int]:
        return browser.execute_script("return document.getElementById('chart-run')?.data?.[0].x ?? []")

    with listen(tmp_path, "127.0.0.1", 0) as server:
        thread = Thread(target=server.serve_forever, args=(0.05,))
        thread.start()
        open_page(browser, address := f"http://127.0.0.1:{server.server_port}/")
        until(lambda: "No step" in browser.find_element(By.ID, "live").text)
        log(1)                                                   # a new section: the page loads itself again
        until(lambda: drawn() == [1])
        log(2)
        until(lambda: drawn() == [1, 2] and "Live: step 2" in browser.find_element(By.ID, "live").text)
        assert "in 2 steps the loss fell from 5 to 2.5" in browser.find_element(By.ID, "summary").text
        assert findings(browser) == []
        server.shutdown()
        thread.join()
    until(lambda: "has ended" in browser.find_element(By.ID, "live").text)
    assert asked_for(browser, address) == {address, f"{address}figures"}
    browser.get_log("browser")                                   # the refused connection
