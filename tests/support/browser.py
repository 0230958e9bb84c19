"""A real browser, for tests of the page."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from typing import Any

import pytest

from tests.support.waiting import HANG_S

_BROWSERS = ("chromium", "chromium-browser", "google-chrome")
BROWSER = next(filter(None, map(shutil.which, _BROWSERS)), None)


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """Yield a browser for one module. No other event loop can run in this thread meanwhile."""
    sync_api = pytest.importorskip("playwright.sync_api")
    if BROWSER is None:
        pytest.skip("no browser is installed")
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=BROWSER, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture
def page(browser: Any) -> Iterator[Any]:
    """Yield a fresh profile; a request to another host, and an error in the page, fail the test."""
    context = browser.new_context()
    page = context.new_page()
    page.set_default_timeout(HANG_S * 1000)
    problems: list[str] = []
    asked: list[str] = []
    page.on("pageerror", lambda error: problems.append(str(error)))
    page.on("request", lambda request: asked.append(request.url))
    yield page
    context.close()
    assert not problems
    assert all(url.startswith(("http://127.0.0.1:", "data:", "blob:")) for url in asked), asked
