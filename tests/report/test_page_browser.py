"""The page in a browser, at 8 and at 512 ranks: it draws, answers to pointing, filtering and keys, and stays silent."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from distca.report.figures import ReportData
from distca.report.page import write_page
from distca.trace import StepTrace

selenium = pytest.importorskip("selenium", reason="selenium is not installed; pip install selenium")
from selenium.webdriver.chrome.webdriver import WebDriver  # noqa: E402
from selenium.webdriver.common.action_chains import ActionChains  # noqa: E402
from selenium.webdriver.common.by import By  # noqa: E402
from selenium.webdriver.common.keys import Keys  # noqa: E402
from selenium.webdriver.support.ui import Select  # noqa: E402

from tests.support.browser import IN_BROWSER, PATIENCE_SECONDS, asked_for, open_page, until  # noqa: E402

LANES = ("linear", "attention", "wait", "optimizer", "network")  # of the example, in display order

pytestmark = IN_BROWSER


@pytest.fixture
def show(browser: WebDriver, make_report: Callable[..., ReportData],
         tmp_path: Path) -> Iterator[Callable[..., WebDriver]]:
    """Open a page and wait until it is drawn; at the end it must have said nothing and asked for nothing."""
    path = tmp_path / "page.html"

    def call(ranks: int, **options: int) -> WebDriver:
        write_page(make_report(ranks, **options), path)
        open_page(browser, path.as_uri())
        return browser

    yield call
    assert browser.get_log("browser") == []
    assert asked_for(browser, path.as_uri()) == {path.as_uri()}


def chart_data(browser: WebDriver, key: str) -> list[dict[str, Any]]:
    return browser.execute_script(
        "return document.getElementById(arguments[0]).data.map(trace => ({...trace}))", f"chart-{key}")


def painted(browser: WebDriver) -> tuple[np.ndarray, np.ndarray]:
    """The first timeline's cells, lane numbers and -1 where nothing is, and the moments of their columns."""
    rows = browser.execute_script("return document.getElementById('chart-timeline-0').data[0].z"
                                  ".map(row => row.map(cell => cell === null ? '-' : cell).join(''))")
    cells = np.array([[-1 if cell == "-" else int(cell) for cell in row] for row in rows])
    start, step = times(browser, 0)
    return cells, start + step * np.arange(cells.shape[1])


def times(browser: WebDriver, number: int) -> list[float]:
    """First moment and width of a cell of a timeline, in milliseconds."""
    return browser.execute_script("const {x0, dx} = document.getElementById(arguments[0]).data[0]; return [x0, dx]",
                                  f"chart-timeline-{number}")


def ticks(browser: WebDriver) -> list[str]:
    return browser.execute_script("return document.getElementById('chart-timeline-0').layout.yaxis.ticktext")


def status(browser: WebDriver) -> str:
    return browser.find_element(By.ID, "timeline-status").text


def point_at(browser: WebDriver, seconds: float, row: float) -> None:
    """Move the pointer over a moment and a row of the first timeline; its axis is in milliseconds."""
    chart = browser.find_element(By.ID, "chart-timeline-0")
    browser.execute_script("arguments[0].scrollIntoView({block: 'center'})", chart)
    x, y = browser.execute_script(
        "const {xaxis, yaxis} = arguments[0]._fullLayout, box = arguments[0].getBoundingClientRect();"
        "return [xaxis._offset + xaxis.l2p(arguments[1]) - box.width / 2,"
        " yaxis._offset + yaxis.l2p(arguments[2]) - box.height / 2]", chart, 1e3 * seconds, row)
    ActionChains(browser).move_to_element_with_offset(chart, round(x) - 3, round(y)).move_by_offset(3, 0).perform()


def test_every_chart_is_drawn_at_8_ranks(show: Callable[..., WebDriver]) -> None:
    browser = show(8, timelines=2)
    for chart in browser.find_elements(By.CLASS_NAME, "chart"):
        assert chart.find_elements(By.CSS_SELECTOR, "svg.main-svg"), chart.get_attribute("id")
    bars, image, line = ".bars .point", ".heatmaplayer image", ".scatterlayer .js-line"
    for key, marks, count in (("work", bars, 16), ("memory", bars, 32), ("comparison", bars, 5), ("run", line, 2),
                              ("transfers", image, 1), ("timeline-0", image, 1), ("timeline-1", image, 1)):
        assert len(browser.find_elements(By.CSS_SELECTOR, f"#chart-{key} {marks}")) == count, key
    assert len(browser.find_elements(By.CSS_SELECTOR, "#chart-documents .bars .point")) > 8


def test_timeline_paints_the_spans_where_they_are(show: Callable[..., WebDriver],
                                                  make_traces: Callable[..., tuple[StepTrace, ...]]) -> None:
    browser = show(8)
    cells, moments = painted(browser)
    spans = make_traces(8)[3].spans
    rows = cells[3 * 6:4 * 6]                                    # five lanes and a gap
    for number, lane in enumerate(LANES):
        busy = np.zeros(len(moments), dtype=bool)
        for span in spans:
            if span.lane == lane:
                busy |= (1e3 * span.start_seconds <= moments) & (moments <= 1e3 * span.stop_seconds)
        assert busy.any() and (rows[number][busy] == number).all()
        assert (rows[number] == number).sum() <= busy.sum() + 2 * sum(span.lane == lane for span in spans)
    assert (rows[5] == -1).all()


def test_pointing_tells_the_span(show: Callable[..., WebDriver],
                                 make_traces: Callable[..., tuple[StepTrace, ...]]) -> None:
    browser = show(8)
    span = next(span for span in make_traces(8)[2].spans if span.lane == "network" and span.start_seconds > 0.05)
    point_at(browser, (span.start_seconds + span.stop_seconds) / 2, 2 - 0.5 + 4.5 / 6)
    tip = browser.find_element(By.ID, "tip")
    until(tip.is_displayed)
    name, rank, start, length, size = tip.text.splitlines()
    assert (name, rank, length, size) == ("queries and keys (network)", "rank 2", "lasts 900 µs", "5 MB")
    assert float(start.split()[-2]) == pytest.approx(1e3 * span.start_seconds, rel=0.01) and start.endswith("ms")
    ActionChains(browser).move_to_element(browser.find_element(By.TAG_NAME, "nav")).perform()
    until(lambda: not tip.is_displayed())


def test_lanes_and_ranks_can_be_filtered_from_the_keyboard(show: Callable[..., WebDriver]) -> None:
    browser = show(8)
    browser.find_element(By.CSS_SELECTOR, "#timeline-lanes input[value=linear]").send_keys(Keys.SPACE)
    cells, _ = painted(browser)
    assert 0 not in cells and {1, 2, 4} <= set(np.unique(cells)) and len(cells) == 8 * 5
    field = browser.find_element(By.ID, "timeline-ranks")
    field.send_keys("2-3, 6", Keys.ENTER)
    assert ticks(browser) == ["rank 2", "rank 3", "rank 6"] and "3 of 8 ranks" in status(browser)
    for wrong in ("abc", "100"):
        field.send_keys(Keys.CONTROL, "a", Keys.NULL, wrong, Keys.ENTER)
        assert field.get_attribute("aria-invalid") == "true" and wrong in status(browser)
        assert ticks(browser) == ["rank 2", "rank 3", "rank 6"]
    field.send_keys(Keys.CONTROL, "a", Keys.NULL, "all", Keys.ENTER)
    assert field.get_attribute("aria-invalid") == "false" and len(ticks(browser)) == 8


def test_zoom_by_buttons_and_by_dragging_moves_both_timelines(show: Callable[..., WebDriver]) -> None:
    browser = show(8, timelines=2)
    whole = times(browser, 0)
    assert whole == times(browser, 1)                            # one scale, so that lengths compare
    press = {key: browser.find_element(By.CSS_SELECTOR, f"[data-zoom={key}]") for key in ("in", "right", "all")}
    press["in"].send_keys(Keys.ENTER)
    closer = times(browser, 1)
    assert closer[1] == pytest.approx(whole[1] / 2) and closer == times(browser, 0)
    press["right"].send_keys(Keys.ENTER)
    assert times(browser, 1)[0] > closer[0] > whole[0]
    press["all"].send_keys(Keys.ENTER)
    assert times(browser, 1) == whole
    point_at(browser, 0.02, 1.0)
    ActionChains(browser).click_and_hold().move_by_offset(100, 60).release().perform()
    until(lambda: times(browser, 1)[1] < 0.5 * whole[1])
    assert times(browser, 0)[0] == pytest.approx(20, abs=1)
    assert 1 < len(ticks(browser)) < 5 and ticks(browser)[0] == "rank 1"


def test_choices_redraw_and_tables_open(show: Callable[..., WebDriver]) -> None:
    browser = show(8)
    before = chart_data(browser, "work")[0]["y"]
    Select(browser.find_element(By.ID, "work-order")).select_by_value("size")
    assert chart_data(browser, "work")[0]["y"] == sorted(before, reverse=True) != before
    Select(browser.find_element(By.ID, "transfers-view")).select_by_value("ranks")
    assert [trace["name"] for trace in chart_data(browser, "transfers")] == ["sent", "received"]
    Select(browser.find_element(By.ID, "documents-color")).select_by_value("server")
    assert {trace["name"] for trace in chart_data(browser, "documents")} <= {f"rank {rank}" for rank in range(8)}
    rows = {}
    for details in browser.find_elements(By.CSS_SELECTOR, "details"):
        details.find_element(By.TAG_NAME, "summary").send_keys(Keys.ENTER)
        until(partial(details.find_elements, By.CSS_SELECTOR, "tbody tr"))
        rows[details.get_attribute("data-table")] = len(details.find_elements(By.CSS_SELECTOR, "tbody tr"))
    assert rows["work"] == rows["memory"] == rows["timeline"] == rows["transfers"] == 8
    assert rows["spans"] == 32 * 4 + 1 and rows["run"] == 300


def test_every_control_is_reached_by_tab_and_shows_it(show: Callable[..., WebDriver]) -> None:
    browser = show(8)
    wanted = browser.execute_script(
        "return document.querySelectorAll('a, button, input, select, summary, [tabindex=\"0\"]').length"
        " - document.querySelectorAll('details :is(input, [tabindex=\"0\"])').length")
    browser.execute_script("document.activeElement.blur()")
    seen = []
    for _ in range(wanted):
        ActionChains(browser).send_keys(Keys.TAB).perform()
        seen.append(browser.execute_script(
            "const at = document.activeElement;"
            "return [at.tagName, at.getBoundingClientRect().top + scrollY, getComputedStyle(at).outlineStyle]"))
    tables = {"DIV"}                                             # which scroll
    assert {tag for tag, _, _ in seen} <= {"A", "BUTTON", "INPUT", "SELECT", "SUMMARY"} | tables
    assert all(outline != "none" for _, _, outline in seen)
    below_the_head = [top for tag, top, _ in seen if tag != "A"]
    assert all(b > a - 40 for a, b in pairwise(below_the_head))  # reading order


def test_512_ranks(show: Callable[..., WebDriver], make_traces: Callable[..., tuple[StepTrace, ...]],
                   tmp_path: Path) -> None:
    browser = show(512)
    assert (tmp_path / "page.html").stat().st_size < 10e6
    ready = browser.execute_script("return performance.getEntriesByName('report-ready')[0].startTime")
    assert ready < 1e3 * PATIENCE_SECONDS / 4
    cells, _ = painted(browser)
    assert 200 < len(cells) <= 256 and "one row per 2 ranks" in status(browser)
    span = next(span for span in make_traces(512)[300].spans if span.lane == "linear" and span.start_seconds > 0.05)
    point_at(browser, (span.start_seconds + span.stop_seconds) / 2, 300.5)
    tip = browser.find_element(By.ID, "tip")
    until(tip.is_displayed)
    name, rank, *_ = tip.text.splitlines()
    assert name == "layer forward (linear)" and abs(int(rank.split()[1]) - 300) <= 4  # a row of pixels is two ranks
    field = browser.find_element(By.ID, "timeline-ranks")
    field.send_keys("300-303", Keys.ENTER)
    assert ticks(browser) == [f"rank {rank}" for rank in range(300, 304)] and "per rank and lane" in status(browser)
    browser.find_element(By.CSS_SELECTOR, "#timeline-lanes input[value=wait]").send_keys(Keys.SPACE)
    assert 2 not in painted(browser)[0]
    assert len(chart_data(browser, "work")[0]["y"]) == 512


def test_names_of_files_are_no_links(browser: WebDriver, make_report: Callable[..., ReportData],
                                     tmp_path: Path) -> None:
    """The charting library would make links of names; ours stay the letters they are, wherever they are shown."""
    evil = '<a href="https://example.com">distca</a>'
    data = make_report(8)
    first, *others = data.comparison
    run, = data.runs
    label, values = run.series[0]
    named = replace(data, comparison=(replace(first, name=evil), *others),
                    runs=(replace(run, series=((evil + label, values), *run.series[1:])),))
    write_page(named, tmp_path / "page.html")
    open_page(browser, (tmp_path / "page.html").as_uri())
    links = browser.execute_script(
        "return [...document.querySelectorAll('a')].map(a => a.getAttribute('href') ?? a.getAttribute('xlink:href'))")
    assert links and all(link.startswith("#") for link in links)
    ticks_ = browser.execute_script(
        "return [...document.querySelectorAll('#chart-comparison .ytick text')].map(tick => tick.textContent)")
    assert evil in ticks_
    assert evil in browser.find_element(By.ID, "comparison").text
    browser.get_log("browser"), browser.get_log("performance")   # the next page's logs begin here
