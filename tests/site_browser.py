"""The built site in a headless Chromium, for the tests that look at its pages: fixtures.

`make site` installs what they need; the browser is a package too. One worker builds it once.
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
def browser(tmp_path_factory):
    """Start a headless Chromium, unpacked from its package."""
    if not (INSTALLED / ".installed").exists():
        pytest.skip(f"{page_reader.SITE} is not there: make site")
    # Of the same Python; the guide's own environment needs no browser.
    site.addsitedir(INSTALLED / "lib" / f"python{sys.version_info.major}.{sys.version_info.minor}"
                    / "site-packages")  # fmt: skip
    from conftest import MARK
    from playwright.sync_api import sync_playwright

    asked = 'import("@sparticuz/chromium").then(c => c.default.executablePath()).then(console.log)'
    node, temporary = INSTALLED / "bin" / "node", tmp_path_factory.mktemp("browser")
    path = subprocess.check_output(
        [node, "--input-type=module", "-e", asked], cwd=REPO / "site", text=True, timeout=120,
        env={"TMPDIR": str(temporary)},
    ).strip()  # fmt: skip
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv(MARK)  # or the first test's end would end it
        driver = sync_playwright().start()
        flags = ["--no-sandbox", "--disable-gpu"]  # as root in a container; nothing from elsewhere
        running = driver.chromium.launch(executable_path=path, args=flags)
    yield running
    running.close()
    driver.stop()


@pytest.fixture(scope="session")
def tab(browser):
    """One tab that notes what goes wrong: errors, and requests that leave the folder."""
    page = browser.new_page(viewport=dict(zip(("width", "height"), WIDE, strict=True)))
    page.faults = []
    page.on("console", lambda m: m.type == "error" and page.faults.append(m.text))
    page.on("pageerror", lambda error: page.faults.append(str(error)))
    page.on("request", lambda r: r.url.startswith(("file:", "data:", "blob:"))
            or page.faults.append(f"asks for {r.url}"))  # fmt: skip
    return page


@pytest.fixture
def at(built, tab):
    """Open a page of the site, by its path without .html, with nothing kept from another one."""

    def opened(path: str, size: tuple[int, int] = WIDE, theme: str = "light"):
        tab.set_viewport_size(dict(zip(("width", "height"), size, strict=True)))
        tab.emulate_media(color_scheme=theme)
        tab.faults.clear()
        tab.goto((built / f"{path}.html").as_uri())
        return tab

    return opened
