"""Helpers that several tests of the page share."""

from __future__ import annotations

from typing import Any

from quire.core.request import Request
from tests.api.conftest import Served
from tests.support.scripted_engine import Script

DONE = ".assistant:not([aria-busy]) .stats:not(:empty)"
"""An answer that has ended."""


def says(served: Served, text: str, *, silent: bool = False) -> None:
    served.engine.reset(lambda _: Script(tokens=served.ids(text), group=4, silent=silent))


def opened(page: Any, url: str) -> None:
    page.goto(url)
    page.wait_for_selector("html[data-ready]")


def ask(page: Any, text: str) -> None:
    page.fill(".write textarea", text)
    page.keyboard.press("Enter")


def prompt_of(served: Served, request: Request) -> str:
    return served.tokenizer.decode(request.prompt)
