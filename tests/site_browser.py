"""Fixtures of the site's tests: the built site in a headless Chromium.

`make site` installs what they need, with the browser. One worker builds the site.
"""

import site
import subprocess
import sys
from pathlib import Path

import page_reader
import pytest

REPO = page_reader.REPO
INSTALLED = REPO / page_reader.SITE
WIDE, PHONE = (1280, 800), (390, 800)
sys.path.append(str(REPO / "site"))


@pytest.fixture(scope="session")
def built() -> Path:
    """Build the site; return its folder."""
    if not (INSTALLED / ".installed").exists():
        pytest.skip(f"{page_reader.SITE} is not there: make site")
    out = REPO / "runs" / "site"
    words = [INSTALLED / "bin" / "python", REPO / "site" / "build.py", out]
    ended = subprocess.run(words, capture_output=True, text=True, timeout=600)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return out


@pytest.fixture(scope="session")
def browser(built):
    """Start a headless Chromium."""
    # Of the same Python; the guide's own environment needs no browser.
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    site.addsitedir(INSTALLED / "lib" / version / "site-packages")
    from browser import FLAGS, find_browser
    from conftest import MARK
    from playwright.sync_api import sync_playwright

    path = find_browser()
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv(MARK)  # or the first test's end would end it
        driver = sync_playwright().start()
        running = driver.chromium.launch(executable_path=path, args=FLAGS)
    yield running
    running.close()
    driver.stop()


@pytest.fixture(scope="session")
def tab(browser):
    """One tab that notes errors, and requests that leave the folder."""
    page = browser.new_page()
    page.faults = []
    local = ("file:", "data:", "blob:")
    page.on("console", lambda m: m.type == "error" and page.faults.append(m.text))
    page.on("pageerror", lambda error: page.faults.append(str(error)))
    page.on(
        "request",
        lambda r: r.url.startswith(local) or page.faults.append(f"asks for {r.url}"),
    )
    return page


@pytest.fixture
def at(built, tab):
    """Open a page of the site, by its address without .html."""

    def opened(address: str, size: tuple[int, int] = WIDE, theme: str = "light"):
        tab.set_viewport_size(dict(zip(("width", "height"), size, strict=True)))
        tab.emulate_media(color_scheme=theme)
        tab.faults.clear()
        path, hash_, rest = address.partition("#")
        tab.goto("about:blank")
        tab.goto(f"{(built / f'{path}.html').as_uri()}{hash_}{rest}")
        return tab

    return opened
