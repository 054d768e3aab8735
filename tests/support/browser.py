"""Chromium by selenium: start it, look at pages, and list what a page asked for."""

from __future__ import annotations

import json
import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

CHROMIUM = next((path for path in map(shutil.which, ("chromium", "chromium-browser", "google-chrome")) if path), None)
DRIVER = shutil.which("chromedriver")
NO_BROWSER = "no Chromium with chromedriver here; apt-get install chromium chromium-driver"
PATIENCE_SECONDS = 120                                           # for machines that do much else
SWITCHES = ("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync",
            "--disable-background-networking", "--disable-component-update", "--disable-dev-shm-usage",
            "--window-size=1366,768")
IN_BROWSER = [pytest.mark.browser, pytest.mark.skipif(not (CHROMIUM and DRIVER), reason=NO_BROWSER)]


def start_chromium(profile: Path) -> Any:
    from selenium import webdriver

    options = webdriver.ChromeOptions()
    assert CHROMIUM is not None
    options.binary_location = CHROMIUM
    for switch in (*SWITCHES, f"--user-data-dir={profile}"):
        options.add_argument(switch)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    driver = webdriver.Chrome(options=options, service=webdriver.ChromeService(DRIVER, log_output=os.devnull))
    driver.set_script_timeout(PATIENCE_SECONDS)
    return driver


def until(condition: Callable[[], object]) -> None:
    stop = time.monotonic() + PATIENCE_SECONDS
    while not condition():
        assert time.monotonic() < stop, "the page did not get there"
        time.sleep(0.05)


def open_page(browser: Any, address: str) -> None:
    """Open a page and wait until all of it is drawn."""
    browser.get(address)
    until(lambda: browser.execute_script("return document.documentElement.dataset.complete") == "true")


def asked_for(browser: Any, address: str) -> set[str]:
    """Addresses that the page at `address` asked for since the last call."""
    messages = [json.loads(entry["message"])["message"] for entry in browser.get_log("performance")]
    asked = {message["params"]["request"]["url"] for message in messages
             if message["method"] == "Network.requestWillBeSent" and message["params"]["documentURL"] == address}
    return {url for url in asked if not url.startswith(("data:", "blob:"))}
