"""The calculator in Chromium: its figures are the commands', it needs its server only to open, and everyone can use it.

The planner's tests need its Python for browsers, which `make calculator` fetches once; the closed forms' do not.
"""

from __future__ import annotations

import json
import os
import shlex
import shutil
import time
from collections.abc import Callable, Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any
from urllib.parse import unquote, urlencode

import pytest

import distca
from tests.support.modules import load
from tests.support.questions import FORM, QUESTIONS, question_of

selenium = pytest.importorskip("selenium", reason="selenium is not installed; pip install selenium")
from selenium import webdriver  # noqa: E402
from selenium.webdriver.chrome.webdriver import WebDriver  # noqa: E402
from selenium.webdriver.common.action_chains import ActionChains  # noqa: E402
from selenium.webdriver.common.by import By  # noqa: E402
from selenium.webdriver.common.keys import Keys  # noqa: E402

CHROMIUM = next((path for path in map(shutil.which, ("chromium", "chromium-browser", "google-chrome")) if path), None)
DRIVER = shutil.which("chromedriver")
SWITCHES = ("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync",
            "--disable-background-networking", "--disable-component-update", "--disable-dev-shm-usage",
            "--window-size=1366,900")
HERE = Path(distca.__file__).parents[1] / "docs/calculator"
ERRANDS = ("google", "gstatic", "duckduckgo")                    # of the browser itself, when it starts
PATIENCE_SECONDS = 150                                           # for machines that do much else
Run = Callable[..., tuple[int, str, str]]

pytestmark = [
    pytest.mark.browser,
    pytest.mark.skipif(not (CHROMIUM and DRIVER), reason="no Chromium with chromedriver here; "
                       "apt-get install chromium chromium-driver"),
]
building = load(HERE / "build.py")


class Site:
    """A folder served on the loopback interface, and every address that was asked for there or of a proxy."""

    def __init__(self, folder: Path) -> None:
        asked: list[str] = []

        class Handler(SimpleHTTPRequestHandler):
            def log_message(self, *_: Any) -> None:
                asked.append(self.requestline)

        self.asked = asked
        self.server = ThreadingHTTPServer(("127.0.0.1", 0), partial(Handler, directory=str(folder)))
        self.address = f"http://127.0.0.1:{self.server.server_port}"
        Thread(target=self.server.serve_forever, daemon=True).start()

    def close(self) -> None:
        self.server.shutdown()
        self.server.server_close()


@pytest.fixture(scope="module")
def elsewhere(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    """A proxy for whatever leaves the loopback interface; it answers nothing."""
    site = Site(tmp_path_factory.mktemp("nothing"))
    yield site
    site.close()


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory, elsewhere: Site) -> Iterator[WebDriver]:
    options = webdriver.ChromeOptions()
    assert CHROMIUM is not None
    options.binary_location = CHROMIUM
    for switch in (*SWITCHES, f"--user-data-dir={tmp_path_factory.mktemp('profile')}",
                   f"--proxy-server={elsewhere.address}"):       # loopback goes by itself
        options.add_argument(switch)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    driver = webdriver.Chrome(options=options, service=webdriver.ChromeService(DRIVER, log_output=os.devnull))
    yield driver
    driver.quit()


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory, browser: WebDriver) -> Iterator[Site]:
    """The page with its planner, open and started; the tests below ask it one question after the other."""
    assert building.FORM == FORM
    folder = tmp_path_factory.mktemp("calculator")
    said = building.build(folder, offline=True)
    if "closed forms only" in said:
        pytest.skip(f"{said}; run: make calculator")
    site = Site(folder)
    browser.get(f"{site.address}/index.html")
    until(lambda: shown(browser)[0] == "predict", browser)
    yield site
    site.close()


@pytest.fixture(scope="module")
def bare(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    """The page as it is built where its planner's runtime cannot be had."""
    folder = tmp_path_factory.mktemp("bare")
    assert "closed forms only" in building.build(folder, folder / "no downloads", offline=True)
    site = Site(folder)
    yield site
    site.close()


def until(condition: Callable[[], object], browser: WebDriver) -> None:
    stop = time.monotonic() + PATIENCE_SECONDS
    while not condition():
        assert time.monotonic() < stop, browser.find_element(By.ID, "answer").text
        time.sleep(0.05)


def shown(browser: WebDriver) -> tuple[str, int]:
    """The part of an answer that was shown last, and the number of its question."""
    words = (browser.execute_script("return document.documentElement.dataset.shown") or "nothing 0").split()
    return words[0], int(words[1])


def ask(browser: WebDriver, form: dict[str, str], part: str) -> dict[str, Any]:
    """Ask by the address, as a link would, and return what was found once `part` is shown."""
    number = shown(browser)[1]
    changes = {name: value for name, value in form.items() if value != FORM[name]}
    browser.execute_script("location.hash = arguments[0]", urlencode(changes or {"kind": "typed"}))
    until(lambda: shown(browser)[1] > number, browser)
    until(lambda: part in found(browser), browser)
    return found(browser)


def found(browser: WebDriver) -> dict[str, Any]:
    return browser.execute_script("return {...found, error: document.getElementById('error').hidden ? '' : "
                                  "document.getElementById('error').textContent}")


def said(run: Run, browser: WebDriver, name: str) -> dict[str, Any]:
    """Run the command that the page shows; of many lengths it reads them from the file that the page saves."""
    line = browser.find_element(By.ID, f"command-{name}").text
    if "lengths.txt" in line:
        lengths = unquote(browser.find_element(By.ID, "save-link").get_attribute("href") or "").split(",")[1].split()
        line = line.replace("$(cat lengths.txt)", " ".join(lengths))
        line = line.replace("$(tr '\\n' , < lengths.txt)", ",".join(lengths))
    code, out, err = run(*shlex.split(line)[1:], "--json")
    assert code == 0, err
    return json.loads(out)


def assert_equal(page: dict[str, Any], command: dict[str, Any]) -> None:
    same = command.keys() - {"plan_seconds", "next"}             # the latter is the command to type next
    assert {name: page[name] for name in same} == {name: command[name] for name in same}


@pytest.mark.parametrize("number", range(len(QUESTIONS)))
def test_the_page_plans_what_the_command_plans(page: Site, browser: WebDriver, run: Run, number: int) -> None:
    question = question_of(QUESTIONS[number])
    answer = ask(browser, QUESTIONS[number], "fit")
    assert (answer["question"], answer["error"]) == (question, "")
    assert_equal(answer["plan"], said(run, browser, "plan"))
    before, after = (answer["plan"][f"work_max_over_mean{when}"] for when in ("_before", ""))
    assert browser.find_element(By.ID, "card-work").text == f"{before:.2f}× → {after:.2f}×"
    bars = browser.find_elements(By.CSS_SELECTOR, "#work-chart rect")
    assert len(bars) == 2 * len(answer["plan"]["work_after"]) or len(bars) > 50


@pytest.mark.parametrize("number", [0, *(pytest.param(number, marks=pytest.mark.slow)
                                         for number in range(1, len(QUESTIONS)))])
def test_the_page_predicts_what_the_command_predicts(page: Site, browser: WebDriver, run: Run, number: int) -> None:
    answer = ask(browser, QUESTIONS[number], "predict")
    expected = said(run, browser, "simulate")
    assert_equal(answer["predict"], expected)
    ours, base = expected["strategies"]["distca"], expected["strategies"]["wlb_ideal"]
    assert browser.find_element(By.ID, "card-gain").text == f"{base['step_seconds'] / ours['step_seconds']:.2f}×"
    value, unit = browser.find_element(By.ID, "card-memory").text.split()
    assert float(value) == pytest.approx(ours["peak_memory_gb"], rel=0.006) and unit == "GB"  # to three digits


def test_a_file_is_dealt_as_the_command_deals_it(page: Site, browser: WebDriver, run: Run, tmp_path: Path) -> None:
    rows = [f"{{\"length\": {100 + 7919 * number % 30_000}}}" for number in range(700)]
    (tmp_path / "lengths.jsonl").write_text("\n".join(rows))
    ask(browser, {**FORM, "gpus": "32"}, "fit")
    browser.find_element(By.CSS_SELECTOR, "input[value=file]").send_keys(Keys.SPACE)
    browser.find_element(By.ID, "file").send_keys(str(tmp_path / "lengths.jsonl"))
    until(lambda: "fit" in found(browser) and found(browser)["question"]["source"] == "lengths.jsonl", browser)
    answer = found(browser)
    assert answer["plan"]["batches"]["count"] == 8
    command = said(run, browser, "plan")
    for content in (answer["plan"]["batches"], command["batches"]):
        for figures in (content["mean"], content["worst"], *content["each"]):
            figures.pop("plan_seconds")
    assert_equal(answer["plan"], command)


def test_mistakes_are_told_and_the_next_answer_comes(page: Site, browser: WebDriver) -> None:
    field = browser.find_element(By.ID, "gpus")
    ask(browser, FORM, "fit")
    field.send_keys(Keys.CONTROL, "a", Keys.NULL, "60")
    until(lambda: "gpus is 60" in found(browser)["error"], browser)
    assert not browser.find_element(By.ID, "found").is_displayed()
    assert not browser.find_element(By.ID, "commands").is_displayed()
    field.send_keys(Keys.CONTROL, "a", Keys.NULL, "32")
    until(lambda: "fit" in found(browser) and not found(browser)["error"], browser)
    assert found(browser)["plan"]["ranks"] == 4 and browser.current_url.endswith("#gpus=32")
    browser.find_element(By.ID, "context").get_attribute("value")
    answer = ask(browser, {**FORM, "context": "256k"}, "plan")
    until(lambda: "context is 262144" in found(browser)["error"], browser)
    assert answer["plan"]["ranks"] == 8 and browser.find_element(By.ID, "found").is_displayed()


def test_nothing_is_requested_after_opening_and_nothing_from_elsewhere(
    page: Site, browser: WebDriver, elsewhere: Site
) -> None:
    """Both workers have started; from here on the server may be gone."""
    files = {line.split()[1].lstrip("/") for line in page.asked}
    assert files <= {*building.PAGE, "built.json", "worker.js", "runtime/distca.zip", "runtime/numpy.zip",
                     *(f"runtime/{name}" for name in building.RUNTIME)}
    num_asked = len(page.asked)
    ask(browser, {**FORM, "lengths": "64k, 4k*48", "gpus": "16"}, "fit")
    assert len(page.asked) == num_asked
    assert not [line for line in elsewhere.asked if not any(one in line for one in ERRANDS)]


def test_on_a_phone_by_keyboard_and_in_silence(page: Site, browser: WebDriver) -> None:
    ask(browser, {**FORM, "lengths": "64k, 2k*96"}, "predict")
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride",
                            {"width": 420, "height": 900, "deviceScaleFactor": 1, "mobile": True})
    try:
        assert browser.execute_script("return document.documentElement.scrollWidth") <= 420
    finally:
        browser.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})
    browser.execute_script("document.activeElement.blur(); scrollTo(0, 0)")
    browser.find_element(By.TAG_NAME, "h1").click()              # from where Tab goes on
    wanted = browser.execute_script(
        "return [...document.querySelectorAll('input, select, textarea, button, summary, pre, .scroll')]"
        ".filter((one) => one.checkVisibility() && (one.type !== 'radio' || one.checked))"
        ".map((one) => one.id || one.className || one.tagName)")
    seen = []
    for _ in wanted:
        ActionChains(browser).send_keys(Keys.TAB).perform()
        seen.append(browser.execute_script(
            "const at = document.activeElement, shown = at.type === 'radio' ? at.nextElementSibling : at;"
            "return [at.id || at.className || at.tagName, getComputedStyle(shown).outlineStyle]"))
    assert [name for name, _ in seen] == wanted
    assert all(outline != "none" for _, outline in seen)
    assert browser.get_log("browser") == []


@pytest.mark.parametrize("number", [number for number, form in enumerate(QUESTIONS)
                                    if form["kind"] == "typed" and form["ep"] == "1"])
def test_closed_forms_are_the_planners(bare: Site, browser: WebDriver, number: int) -> None:
    answering = load(HERE / "answer.py")
    question = question_of(QUESTIONS[number])
    form = {name: value for name, value in QUESTIONS[number].items() if value != FORM[name]}
    browser.get("about:blank")
    browser.get(f"{bare.address}/index.html#{urlencode(form)}")
    until(lambda: shown(browser)[0] == "closed", browser)
    closed = found(browser)["closed"]
    plan, fit = (json.loads(answering.answer(json.dumps(question), part)) for part in ("plan", "fit"))
    assert closed["work_max_over_mean_before"] == pytest.approx(plan["work_max_over_mean_before"], rel=1e-12)
    assert closed["work_before"] == pytest.approx(plan["work_before"], rel=1e-12)
    assert [one["recompute"] for one in closed["fit"]["modes"]] == [one["recompute"] for one in fit["modes"]]
    for ours, theirs in zip(closed["fit"]["modes"], fit["modes"], strict=True):
        assert ours["total"] == pytest.approx(theirs["total"], rel=1e-12)
    assert "closed forms only" in browser.find_element(By.ID, "made-by").text
    assert "needs the planner" in browser.find_element(By.ID, "card-gain-note").text
