"""The page's list of conversations and what one sets for each, in a real browser."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import pytest

from quire.core.config import ServerConfig
from quire.text.tokenizer import Tokenizer
from tests.api.conftest import Served, start
from tests.api.page_helpers import DONE, ask, opened, prompt_of, says
from tests.support.scripted_engine import Script

TEXTS = ":is(.user, .assistant) > .text"


@pytest.fixture(scope="module")
def served(tokenizer: Tokenizer) -> Iterator[Served]:
    with ExitStack() as stack:
        yield start(stack, tokenizer, ServerConfig(), modalities=("text", "image"))


def entries(page: Any) -> list[str]:
    return list(page.locator(".entries .entry").all_inner_texts())


def texts(page: Any) -> list[str]:
    return [text.strip() for text in page.locator(TEXTS).all_inner_texts()]


def imported(page: Any, data: object) -> None:
    file = {"name": "x.json", "mimeType": "application/json", "buffer": json.dumps(data).encode()}
    page.set_input_files("[aria-label='File of conversations']", file)


def test_conversations_are_found_renamed_and_tagged(page: Any, served: Served) -> None:
    says(served, "An answer about whales")
    opened(page, served.url)
    ask(page, "First")
    page.wait_for_selector(DONE)
    page.keyboard.press("Control+Shift+O")
    says(served, "Something else")
    ask(page, "Second")
    page.wait_for_selector(DONE)
    assert page.locator(".group").all_inner_texts() == ["Today"]
    page.keyboard.press("Control+k")
    page.keyboard.type("WHALES")
    assert entries(page) == ["First"]
    page.keyboard.press("Control+a")
    page.keyboard.press("Delete")
    page.click("[aria-label='Rename First']", force=True)
    page.keyboard.type("About whales #sea #big")
    page.keyboard.press("Enter")
    page.reload()
    page.wait_for_selector("html[data-ready]")
    assert sorted(entries(page)) == ["About whales #sea #big", "Second"]
    page.get_by_role("button", name="#big", exact=True).click()
    assert entries(page) == ["About whales #sea #big"]
    page.get_by_role("button", name="#big", exact=True).click()
    assert len(entries(page)) == 2


def test_a_click_while_an_answer_streams_is_not_lost(page: Any, served: Served) -> None:
    """The button that is pressed stays the same while the list is drawn."""
    says(served, "Short")
    opened(page, served.url)
    ask(page, "First")
    page.wait_for_selector(DONE)
    page.click(".new")
    held = threading.Event()
    script = Script(served.ids("One two three four five six."), held=held, held_at=3)
    served.engine.reset(lambda _: script)
    ask(page, "Second")
    page.wait_for_selector(".assistant .text:has-text('One')")
    page.hover(".entry:has-text('First')")
    page.mouse.down()
    held.set()
    page.wait_for_selector(DONE)
    page.wait_for_selector(".entries:not(:has(.running))")
    page.mouse.up()
    page.wait_for_selector(".assistant .text:has-text('Short')")
    assert texts(page) == ["First", "Short"]


NOT_EXPORTED = "(a picture or file that the export does not hold)"
CHATGPT = {
    "title": "From ChatGPT",
    "update_time": 1_700_000_000.5,
    "current_node": "c",
    "mapping": {
        "root": {"parent": None, "message": None},
        "s": {
            "parent": "root",
            "message": {"author": {"role": "system"}, "content": {"parts": [""]}},
        },
        "a": {
            "parent": "s",
            "message": {"author": {"role": "user"}, "content": {"parts": [{"asset": "x"}, "Q"]}},
        },
        "b": {
            "parent": "a",
            "message": {"author": {"role": "assistant"}, "content": {"parts": ["One"]}},
        },
        "c": {
            "parent": "a",
            "message": {"author": {"role": "assistant"}, "content": {"parts": ["Two"]}},
        },
    },
}
PIXEL = (
    "data:image/png;base64,iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9"
    "awAAAABJRU5ErkJggg=="
)
FILES = [{"type": "image", "url": PIXEL}, {"type": "file", "name": "notes.pdf"}]
OPEN_WEBUI = {
    "chat": {
        "title": "From Open WebUI",
        "timestamp": 1_700_000_000_000,
        "history": {
            "currentId": "y",
            "messages": {
                "x": {"role": "user", "content": "Hi", "parentId": None, "files": FILES},
                "y": {"role": "assistant", "content": "Ho", "parentId": "x", "model": "m"},
            },
        },
    }
}


def test_conversations_are_imported(page: Any, served: Served) -> None:
    says(served, "Own answer")
    opened(page, served.url)
    imported(page, [CHATGPT])
    page.wait_for_selector(".assistant .text:has-text('Two')")
    assert texts(page) == [f"{NOT_EXPORTED}\n\nQ", "Two"]
    page.click(".assistant [aria-label='Older version']")
    assert texts(page)[1] == "One"
    assert page.locator(".group").all_inner_texts() == ["November 2023"]
    imported(page, [OPEN_WEBUI])
    page.wait_for_selector(".assistant .text:has-text('Ho')")
    assert page.locator(".user img.sent").get_attribute("src") == PIXEL
    hi = "Hi\n\n(notes.pdf: not in the export)"
    assert texts(page) == [hi, "Ho"]
    assert page.locator(".assistant .who").inner_text() == "m"
    ask(page, "More")
    page.wait_for_selector(".assistant .text:has-text('Own answer')")
    page.wait_for_selector(DONE)
    page.click("[aria-label='Export conversation']")
    with page.expect_download() as download:
        page.get_by_role("button", name="JSON", exact=True).click()
    imported(page, json.loads(download.value.path().read_text()))
    page.wait_for_selector(".entry >> nth=2")
    assert texts(page) == [hi, "Ho", "More", "Own answer"]
    imported(page, {"something": "else"})
    page.wait_for_selector(".side .error:has-text('no conversation of this page')")
    page.reload()
    page.wait_for_selector("html[data-ready]")
    assert sorted(entries(page)) == ["From ChatGPT", "From Open WebUI", "From Open WebUI"]
    with page.expect_download() as download:
        page.get_by_role("button", name="Export all").click()
    imported(page, json.loads(download.value.path().read_text()))
    page.wait_for_selector(".entry >> nth=5")
    assert sorted(entries(page)) == 2 * ["From ChatGPT"] + 4 * ["From Open WebUI"]


def test_parameters_are_a_conversations_own_and_saved_as_presets(page: Any, served: Served) -> None:
    says(served, "Fine")
    opened(page, served.url)
    page.click("[aria-label=Parameters]")
    page.get_by_label("System message").fill("You are a poet")
    page.once("dialog", lambda dialog: dialog.accept("Poet"))
    page.get_by_role("button", name="Save as preset").click()
    page.get_by_role("button", name="Use").click()
    ask(page, "One")
    page.wait_for_selector(DONE)
    assert "You are a poet" in prompt_of(served, served.engine.requests[-1])
    page.click(".new")
    ask(page, "Two")
    page.wait_for_selector(DONE)
    assert "You are a poet" not in prompt_of(served, served.engine.requests[-1])
    page.click("[aria-label=Parameters]")
    assert page.get_by_role("button", name="Delete preset").is_disabled()
    page.get_by_label("Preset", exact=True).select_option("Poet")
    page.once("dialog", lambda dialog: dialog.accept())
    page.get_by_role("button", name="Delete preset").click()
    assert page.locator("[aria-label=Preset] option").all_inner_texts() == ["Presets"]
    page.get_by_role("button", name="Use").click()
    page.reload()
    page.wait_for_selector("html[data-ready]")
    ask(page, "Three")
    page.wait_for_selector(f"{DONE} >> nth=1")
    assert "You are a poet" in prompt_of(served, served.engine.requests[-1])


def test_keys_edit_the_last_message_and_show_a_sheet(page: Any, served: Served) -> None:
    says(served, "Yes")
    opened(page, served.url)
    ask(page, "word " * 600)
    page.wait_for_selector(DONE)
    title = page.locator(".title").inner_text()
    assert title.endswith("word…")
    page.click("text=Show all")
    assert page.locator(".user .folded").count() == 0
    page.focus(".write textarea")
    page.keyboard.press("ArrowUp")
    page.wait_for_selector("[aria-label='Edit message']:focus")
    page.keyboard.press("Escape")
    page.fill(".write textarea", "Say it in one word.")
    page.click("[aria-label='Prompts (/)']")
    page.get_by_label("Name of the prompt").fill("Short")
    page.keyboard.press("Enter")
    page.get_by_role("button", name="Close").click()
    page.fill(".write textarea", "")
    page.keyboard.press("/")
    page.click(".prompt:has-text('Short')")
    assert page.locator(".write textarea").input_value() == "Say it in one word."
    page.keyboard.press("Control+/")
    page.wait_for_selector("dialog:has-text('Keyboard shortcuts')")
    page.keyboard.press("Escape")
