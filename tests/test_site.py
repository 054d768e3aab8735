"""The site builds strictly and offline, its links lead somewhere, and its main pages work in a browser.

It is served on the loopback interface, and its pages ask for nothing but its own files.
"""

import json
import os
import re
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from functools import partial
from html.parser import HTMLParser
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import pytest

import distca

pytest.importorskip("mkdocs", reason="mkdocs-material is not installed; pip install '.[site]'")
ROOT = Path(distca.__file__).parents[1]
MAIN = ("index", "why", "start/install", "start/tour", "start/notebook", "start/when", "reference/charts",
        "reference/messages")
LIGHT_DARK_PHONE = ((1366, False), (1366, True), (420, False))   # width, dark

ALONE = {"404.html", "calculator/index.html"}                    # no pages of docs/


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The site as `make site` builds it, elsewhere: a link or an anchor that leads nowhere is an error."""
    folder = tmp_path_factory.mktemp("site")
    done = subprocess.run([sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", folder],
                          cwd=ROOT, capture_output=True, text=True, env={**os.environ, "NO_MKDOCS_2_WARNING": "1"})
    assert done.returncode == 0 and "WARNING" not in done.stderr, done.stderr
    assert (folder / "calculator/built.json").is_file()
    return folder


class Links(HTMLParser):
    """What a page links to, what it loads, and the names of its parts."""

    def __init__(self) -> None:
        super().__init__()
        self.links: set[str] = set()
        self.loads: set[str] = set()
        self.parts: set[str] = set()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        of = {name: value for name, value in attrs if value is not None}
        if tag == "a" and "href" in of:
            self.links.add(of["href"])
        if "src" in of or tag == "link":
            self.loads.add(of.get("src") or of["href"])
        self.parts.update(of[name] for name in ("id", "name") if name in of)


@pytest.fixture(scope="module")
def pages(site: Path) -> dict[str, Links]:
    read = {}
    for path in site.rglob("*.html"):
        read[path.relative_to(site).as_posix()] = links = Links()
        links.feed(path.read_text(encoding="utf-8"))
    return read


def test_every_link_of_the_html_leads_to_a_page_and_a_part_of_it(site: Path, pages: dict[str, Links]) -> None:
    """Looked up by code of our own, in what is served: hooks rewrite links that leave docs/."""
    followed = 0
    for name, page in pages.items():
        for link in page.links | page.loads:
            parts = urlsplit(link)
            if parts.scheme or link.startswith("data:") or name == "404.html":
                continue
            path = (site / name).parent / unquote(parts.path) if parts.path else site / name
            path = path / "index.html" if path.is_dir() else path
            assert path.is_file(), f"{name} leads to {link}"
            target = pages.get(path.resolve().relative_to(site.resolve()).as_posix())
            if parts.fragment and target is not None:
                assert unquote(parts.fragment) in target.parts or parts.fragment.startswith("__"), f"{name}: {link}"
                followed += 1
    assert followed > 100


def test_nothing_is_loaded_from_elsewhere(site: Path, pages: dict[str, Links]) -> None:
    assert not [load for page in pages.values() for load in page.loads if "//" in load and not load.startswith("data:")]
    for path in site.rglob("*.css"):
        assert not re.findall(r"(?:url\(|@import)\s*['\"]?(?:https?:)?//", path.read_text(encoding="utf-8")), path


def test_every_page_is_there_as_markdown_and_llms_txt_lists_it(site: Path, pages: dict[str, Links]) -> None:
    for name in pages.keys() - ALONE:
        text = (site / name).with_suffix(".md").read_text(encoding="utf-8")
        assert text.strip() and "<svg" not in text and "<html" not in text, name
    listed = re.findall(r"^- \[[^\]]+\]\(([^)]+)\): \S", (site / "llms.txt").read_text(encoding="utf-8"), re.MULTILINE)
    assert len(listed) == len(set(listed)) > 30 and "skills/distca/SKILL.md" in listed
    assert all((site / name).is_file() for name in listed)
    shown = {name for name in pages.keys() - ALONE if not name.startswith("source/")}
    assert shown == {str(Path(name).with_suffix(".html")) for name in listed}


def test_every_public_name_has_its_docstring_on_the_site(site: Path) -> None:
    text = (site / "reference/docstrings.md").read_text(encoding="utf-8")
    assert [name for name in distca.__all__ if name != "__version__" and f"\n## `distca.{name}`\n" not in text] == []
    assert "tolerance: float = 0.05" in text and 'model: str | ModelShape = \'llama3-8b\'' in text


selenium = pytest.importorskip("selenium", reason="selenium is not installed; pip install selenium")
axe_core = pytest.importorskip("axe_core_python", reason="axe-core is not installed; pip install axe-core-python")
from selenium.webdriver.chrome.webdriver import WebDriver  # noqa: E402
from selenium.webdriver.common.action_chains import ActionChains  # noqa: E402
from selenium.webdriver.common.by import By  # noqa: E402
from selenium.webdriver.common.keys import Keys  # noqa: E402

from tests.support.browser import IN_BROWSER, until  # noqa: E402

AXE = Path(axe_core.__path__[0], "axe.min.js")
FINDINGS = """const done = arguments[0];
axe.run(document).then(found => done(found.violations.map(one => [one.id, one.nodes.length, one.nodes[0].html])))"""


class Quiet(SimpleHTTPRequestHandler):
    def log_message(self, format: str, *args: Any) -> None:
        pass


@pytest.fixture(scope="module")
def address(site: Path) -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=str(site)))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}/"
    server.shutdown()
    server.server_close()


@pytest.fixture
def visit(browser: WebDriver, address: str) -> Iterator[Callable[..., WebDriver]]:
    """Open a page of the site; at the end the browser has said nothing and asked for nothing but the site's files."""
    def call(name: str, *, width: int = 1366, dark: bool = False) -> WebDriver:
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [scheme]})
        browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", {
            "width": width, "height": 900, "deviceScaleFactor": 1, "mobile": False})
        browser.get(f"{address}{name}.html")
        return browser

    yield call
    assert browser.get_log("browser") == []
    messages = [json.loads(entry["message"])["message"] for entry in browser.get_log("performance")]
    asked = {message["params"]["request"]["url"] for message in messages
             if message["method"] == "Network.requestWillBeSent"}
    assert any(url.startswith(address) for url in asked)
    assert {url for url in asked if not url.startswith((address, "data:", "blob:", "chrome"))} == set()


def findings(browser: WebDriver) -> list[Any]:
    """What axe-core objects to: rule, how often, and the first element."""
    browser.execute_script(AXE.read_text(encoding="utf-8"))
    return browser.execute_async_script(FINDINGS)


def color(browser: WebDriver, selector: str, name: str = "color") -> str:
    return browser.execute_script("return getComputedStyle(document.querySelector(arguments[0]))[arguments[1]]",
                                  selector, name)


class TestInTheBrowser:
    pytestmark = IN_BROWSER

    @pytest.mark.parametrize("name", MAIN)
    def test_a_page_in_light_in_dark_and_on_a_phone(self, visit: Callable[..., WebDriver], name: str) -> None:
        backs = set()
        for width, dark in LIGHT_DARK_PHONE:
            browser = visit(name, width=width, dark=dark)
            assert browser.execute_script("return document.documentElement.scrollWidth") <= width
            assert len(browser.find_elements(By.TAG_NAME, "h1")) == 1
            assert findings(browser) == []
            backs.add(color(browser, "body", "backgroundColor"))
        assert len(backs) == 2                                   # of light and of dark

    @pytest.mark.slow
    def test_axe_finds_nothing_on_any_page(self, visit: Callable[..., WebDriver], pages: dict[str, Links]) -> None:
        for name in sorted(pages.keys() - ALONE):
            for width, dark in LIGHT_DARK_PHONE:
                browser = visit(name.removesuffix(".html"), width=width, dark=dark)
                assert findings(browser) == [], name
                assert browser.execute_script("return document.documentElement.scrollWidth") <= width, name

    def test_axe_would_find_something(self, visit: Callable[..., WebDriver]) -> None:
        browser = visit("start/install")
        browser.execute_script("document.querySelector('article').append(document.createElement('button'))")
        assert [found[0] for found in findings(browser)] == ["button-name"]

    def test_the_drawings_follow_the_switch_from_the_keyboard(self, visit: Callable[..., WebDriver]) -> None:
        browser = visit("index")
        before = color(browser, "svg.fig text", "fill")
        browser.execute_script("document.querySelector('#__palette_0').focus()")
        ActionChains(browser).send_keys(Keys.ARROW_RIGHT, Keys.ARROW_RIGHT).perform()  # light, then dark
        until(lambda: color(browser, "svg.fig text", "fill") != before)
        browser.execute_script("localStorage.clear()")

    def test_the_moving_picture_can_be_stopped_and_stands_still_if_asked(self, visit: Callable[..., WebDriver]) -> None:
        browser = visit("index")
        states = ("return document.querySelector('#figure-step svg').getAnimations({subtree: true})"
                  ".map(one => one.playState)")
        assert set(browser.execute_script(states)) == {"running"}
        button = browser.find_element(By.CSS_SELECTOR, "#figure-step .hold")
        button.send_keys(Keys.ENTER)
        assert set(browser.execute_script(states)) == {"paused"} and button.text == "Play"
        button.send_keys(Keys.SPACE)
        assert set(browser.execute_script(states)) == {"running"} and button.text == "Pause"
        browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [
            {"name": "prefers-reduced-motion", "value": "reduce"}]})
        browser.refresh()
        assert browser.execute_script(states) == []
        assert not browser.find_element(By.CSS_SELECTOR, "#figure-step .hold").is_displayed()

    def test_search_is_reached_and_answers_from_the_keyboard(self, visit: Callable[..., WebDriver]) -> None:
        browser = visit("index")
        until(lambda: browser.execute_script("return document.readyState") == "complete")
        field = browser.find_element(By.CSS_SELECTOR, ".md-search__input")

        def opened() -> bool:
            ActionChains(browser).send_keys("/").perform()
            return browser.switch_to.active_element == field

        until(opened)
        field.send_keys(Keys.CONTROL, "a", Keys.NULL, "tolerance")
        until(lambda: browser.find_elements(By.CSS_SELECTOR, ".md-search-result__link"))
        ActionChains(browser).send_keys(Keys.ARROW_DOWN, Keys.ENTER).perform()
        until(lambda: "index.html" not in browser.current_url)
        assert "tolerance" in browser.find_element(By.TAG_NAME, "article").text.lower()

    def test_the_way_from_the_front_page_to_the_tour_by_tab(self, visit: Callable[..., WebDriver]) -> None:
        browser = visit("index", width=420)
        wanted = ("#long-context-training-without-attention-stragglers", "start/tour.html")
        seen = []
        for _ in range(25):
            ActionChains(browser).send_keys(Keys.TAB).perform()
            seen.append(browser.execute_script(
                "const at = document.activeElement;"
                "return [at.getAttribute('href') ?? '', getComputedStyle(at).outlineStyle]"))
            if seen[-1][0] == wanted[1]:
                break
        hrefs = [href for href, _ in seen]
        assert hrefs[0] == wanted[0] and hrefs[-1] == wanted[1]  # the skip link first
        assert seen[-1][1] != "none"
        ActionChains(browser).send_keys(Keys.ENTER).perform()
        until(lambda: browser.current_url.endswith("start/tour.html"))
        boxes = browser.execute_script("return [...document.querySelectorAll('article pre > code')].filter("
                                       "one => one.scrollWidth > one.clientWidth).map(one => one.tabIndex)")
        assert boxes and set(boxes) == {0}                       # what scrolls sideways can be scrolled by keys
