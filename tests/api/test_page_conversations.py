"""Conversations of the page in a real browser: no tab, reload, crash or new wording loses text."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import pytest

from quire.api.app import build_app
from quire.core.config import ServerConfig
from quire.core.request import Failure
from quire.text.tokenizer import Tokenizer
from tests.api.conftest import Served, start
from tests.api.page_helpers import DONE, ask, opened, prompt_of, says
from tests.support.scripted_engine import Script, ScriptedEngine
from tests.support.server import serving, slow_models

TEXTS = ":is(.user, .assistant) > .text"


@pytest.fixture(scope="module")
def served(tokenizer: Tokenizer) -> Iterator[Served]:
    with ExitStack() as stack:
        yield start(stack, tokenizer, ServerConfig())


def holds(served: Served, text: str, at: int) -> threading.Event:
    """Lets answers stop after `at` tokens until the event is set."""
    held = threading.Event()
    served.engine.reset(lambda _: Script(served.ids(text), held=held, held_at=at))
    return held


def texts(page: Any) -> list[str]:
    return [text.strip() for text in page.locator(TEXTS).all_inner_texts()]


def test_two_tabs_on_one_conversation_keep_each_others_messages(page: Any, served: Served) -> None:
    says(served, "Yes")
    opened(page, served.url)
    ask(page, "A1")
    page.wait_for_selector(DONE)
    other = page.context.new_page()
    opened(other, served.url)
    ask(other, "B")
    page.wait_for_selector(f"{DONE} >> nth=1")  # what the other tab said is shown here
    assert texts(page) == ["A1", "Yes", "B", "Yes"]
    ask(page, "A2")
    page.wait_for_selector(f"{DONE} >> nth=2")
    other.wait_for_selector(f"{DONE} >> nth=2")
    assert texts(page) == texts(other) == ["A1", "Yes", "B", "Yes", "A2", "Yes"]
    page.reload()
    page.wait_for_selector(f"{DONE} >> nth=2")
    assert texts(page) == ["A1", "Yes", "B", "Yes", "A2", "Yes"]
    other.click(".new")
    ask(other, "C")
    page.click(".entry:has-text('C')")  # which was started there
    page.wait_for_selector(DONE)
    assert texts(page) == ["C", "Yes"]


@pytest.mark.slow
def test_messages_that_tabs_write_at_once_are_both_kept(page: Any, served: Served) -> None:
    says(served, "Yes")
    opened(page, served.url)
    ask(page, "First")
    page.wait_for_selector(DONE)
    other = page.context.new_page()
    other.add_init_script("delete globalThis.BroadcastChannel")  # a tab that hears nothing
    opened(other, served.url)
    ask(page, "Here")
    page.wait_for_selector(f"{DONE} >> nth=1")
    ask(other, "There")
    other.wait_for_selector(f"{DONE} >> nth=1")
    page.reload()
    page.wait_for_selector(f"{DONE} >> nth=1")
    assert texts(page) == ["First", "Yes", "There", "Yes"]
    page.click(".turns:not([hidden]) [aria-label='Older version']")
    assert texts(page) == ["First", "Yes", "Here", "Yes"]


def test_an_answer_goes_on_after_a_reload(page: Any, served: Served) -> None:
    held = holds(served, "One two three four five six.", 3)
    opened(page, served.url)
    ask(page, "Count")
    page.wait_for_selector(".assistant .text:has-text('One')")
    page.reload()
    page.wait_for_selector(".assistant[aria-busy] .text:has-text('One')")
    held.set()
    page.wait_for_selector(DONE)
    assert texts(page) == ["Count", "One two three four five six."]
    assert len(served.engine.requests) == 1
    page.reload()
    page.wait_for_selector(DONE)
    assert texts(page) == ["Count", "One two three four five six."]


def test_a_question_survives_a_reload_right_after_sending(page: Any, served: Served) -> None:
    says(served, "One two three four five six.")
    opened(page, served.url)
    ask(page, "Count")
    page.reload()
    page.wait_for_selector("html[data-ready]")
    if page.locator(".write textarea").input_value():  # left before the browser had stored it
        page.press(".write textarea", "Enter")
    page.wait_for_selector(DONE)
    assert texts(page) == ["Count", "One two three four five six."]
    assert page.locator(".write textarea").input_value() == ""
    assert len(served.engine.requests) == 1


BUSY = """() => {
  const { transaction } = IDBDatabase.prototype;
  IDBDatabase.prototype.transaction = function (...given) {
    const made = transaction.apply(this, given);
    if (given[1] === "readwrite") setTimeout(() => made.abort());
    return made;
  };
}"""
"""Makes the page's database one that keeps nothing any more."""


def test_a_question_that_is_being_stored_survives_a_draft_and_a_reload(
    page: Any, served: Served
) -> None:
    says(served, "Yes")
    opened(page, served.url)
    ask(page, "First")
    page.wait_for_selector(DONE)
    page.evaluate(BUSY)
    ask(page, "Second")
    page.fill(".write textarea", "Not sent yet")
    page.reload()
    page.wait_for_selector(f"{DONE} >> nth=1")
    assert texts(page) == ["First", "Yes", "Second", "Yes"]
    assert page.locator(".write textarea").input_value() == "Not sent yet"


def test_a_question_that_never_reached_the_server_is_sent_after_a_reload(
    page: Any, served: Served
) -> None:
    says(served, "Seven")
    opened(page, served.url)
    page.route("**/v1/chat/completions", lambda route: None)
    ask(page, "Count")
    page.wait_for_selector(".assistant[aria-busy]")
    page.unroute("**/v1/chat/completions")
    page.reload()
    page.wait_for_selector(DONE)
    assert texts(page) == ["Count", "Seven"]
    assert len(served.engine.requests) == 1


def test_an_answer_that_the_server_lost_is_kept_and_continued(page: Any, served: Served) -> None:
    held = holds(served, "One two three four five six.", 3)
    opened(page, served.url)
    ask(page, "Count")
    page.wait_for_selector(".assistant .text:has-text('One')")
    page.route("**/streams/**", lambda route: route.fulfill(status=404, json={}))
    page.reload()
    page.wait_for_selector(".assistant .note:has-text('Cut off')")
    held.set()
    assert page.locator(".user .note").count() == 0
    kept = texts(page)[1]
    assert kept.startswith("One")
    says(served, " and so on")
    page.get_by_role("button", name="Continue").click()
    page.wait_for_selector(DONE)
    assert texts(page) == ["Count", f"{kept} and so on"]
    assert prompt_of(served, served.engine.requests[-1]).endswith(kept)
    assert page.locator(".assistant .note, .continue").count() == 0


def test_an_answer_goes_on_while_another_conversation_is_open(page: Any, served: Served) -> None:
    held = holds(served, "One two three four five six.", 3)
    opened(page, served.url)
    ask(page, "Slow")
    page.wait_for_selector(".assistant .text:has-text('One')")
    page.click(".new")
    page.wait_for_selector(".entries .running:has-text('Slow') [aria-label='Being answered']")
    says(served, "Quick")
    ask(page, "Fast")
    page.wait_for_selector(f"{DONE}")
    assert texts(page) == ["Fast", "Quick"]
    held.set()
    page.wait_for_selector(".entries:not(:has(.running))")
    page.click(".entry:has-text('Slow')")
    page.wait_for_selector(DONE)
    assert texts(page) == ["Slow", "One two three four five six."]


def test_answering_again_and_sending_again_make_versions(page: Any, served: Served) -> None:
    opened(page, served.url)
    says(served, "Red")
    ask(page, "A colour?")
    page.wait_for_selector(DONE)
    ask(page, "Why?")
    page.wait_for_selector(f"{DONE} >> nth=1")
    says(served, "Blue")
    page.locator("[aria-label='Answer again']").first.click()
    page.wait_for_selector(".assistant .text:has-text('Blue')")
    page.wait_for_selector(DONE)
    assert texts(page) == ["A colour?", "Blue"]
    assert page.locator(".assistant .turn").inner_text() == "2/2"
    page.click("[aria-label='Edit and send again']")
    page.fill(".editing textarea", "A number?")
    says(served, "Seven")
    page.keyboard.press("Enter")
    page.wait_for_selector(".assistant .text:has-text('Seven')")
    page.wait_for_selector(DONE)
    page.click(".user [aria-label='Older version']")
    assert texts(page) == ["A colour?", "Blue"]
    page.click(".assistant [aria-label='Older version']")
    assert texts(page) == ["A colour?", "Red", "Why?", "Red"]
    page.reload()
    page.wait_for_selector(DONE)
    assert texts(page) == ["A colour?", "Red", "Why?", "Red"]
    page.click("[aria-label='Export conversation']")
    with page.expect_download() as download:
        page.get_by_role("button", name="JSON", exact=True).click()
    exported = download.value.path().read_text()
    for text in ("Red", "Blue", "Why?", "A number?", "Seven"):
        assert text in exported


def test_versions_of_an_answer_stand_side_by_side(page: Any, served: Served) -> None:
    says(served, "**Red**")
    opened(page, served.url)
    assert not page.locator("[aria-label='Ask several models']").is_visible()
    ask(page, "A colour?")
    page.wait_for_selector(DONE)
    says(served, "Blue")
    page.click("[aria-label='Answer again']")
    page.wait_for_selector(".assistant .text:has-text('Blue')")
    page.wait_for_selector(DONE)
    page.click("[aria-label='Compare versions']")
    columns = page.locator("dialog .column")
    assert columns.locator(".text").all_inner_texts() == ["Red", "Blue"]
    assert columns.locator("h3").all_inner_texts() == [
        "quire-demo, version 1",
        "quire-demo, version 2",
    ]
    boxes = [column.bounding_box() for column in columns.all()]
    assert boxes[0]["y"] == boxes[1]["y"]
    assert boxes[0]["x"] + boxes[0]["width"] <= boxes[1]["x"]


def test_several_models_answer_one_question_side_by_side(page: Any, served: Served) -> None:
    engine = ScriptedEngine(served.engine.info, lambda _: Script(served.ids("Yes")))
    opening = threading.Event()
    opening.set()
    with serving(build_app(slow_models(engine, opening), ServerConfig())) as url:
        opened(page, url)
        page.fill(".write textarea", "Which?")
        page.click("[aria-label='Ask several models']")
        page.get_by_role("button", name="Ask", exact=True).click()
        columns = page.locator("dialog .column")
        for column in columns.all():
            column.locator(".text:has-text('Yes')").wait_for()
        assert columns.locator("h3").all_inner_texts() == ["a, version 1", "b, version 2"]
        page.get_by_role("button", name="Close").click()
        page.wait_for_selector(DONE)
        assert texts(page) == ["Which?", "Yes"]
        assert page.locator(".assistant .turn").inner_text() == "2/2"
        page.reload()
        page.wait_for_selector(DONE)
        page.click(".assistant [aria-label='Older version']")
        assert page.locator(".assistant .who").inner_text() == "a"


def test_an_answer_cut_off_by_an_error_stays_part_of_the_conversation(
    page: Any, served: Served
) -> None:
    opened(page, served.url)
    gone = Failure("the engine is gone", 503)
    served.engine.reset(lambda _: Script(served.ids("One two"), error=gone))
    ask(page, "Count")
    page.wait_for_selector(".assistant .error:has-text('engine is gone')")
    assert page.locator(".user .note").count() == 0
    says(served, "Seven")
    ask(page, "And then?")
    page.wait_for_selector(".assistant .text:has-text('Seven')")
    prompt = prompt_of(served, served.engine.requests[-1])
    assert prompt.index("Count") < prompt.index("One") < prompt.index("And then?")


def test_what_is_written_and_not_sent_stays(page: Any, served: Served) -> None:
    says(served, "Yes")
    opened(page, served.url)
    ask(page, "First")
    page.wait_for_selector(DONE)
    page.fill(".write textarea", "Not sent yet")
    page.click(".new")
    assert page.locator(".write textarea").input_value() == ""
    page.fill(".write textarea", "Nor is this")
    page.reload()
    page.wait_for_selector("html[data-ready]")
    assert page.locator(".write textarea").input_value() == "Nor is this"
    page.click(".entry:has-text('First')")
    assert page.locator(".write textarea").input_value() == "Not sent yet"
    page.click("[aria-label='Edit and send again']")
    page.fill(".editing textarea", "First, in other words")
    page.reload()
    page.click("[aria-label='Edit and send again']")
    assert page.locator(".editing textarea").input_value() == "First, in other words"
    page.press(".editing textarea", "Enter")
    page.wait_for_selector(".user .turn:text-is('2/2')")
    page.wait_for_selector(DONE)
    kept = page.evaluate("Object.values(JSON.parse(localStorage['quire.drafts']))")
    assert sorted(kept) == ["Nor is this", "Not sent yet"]


OLD = """async () => {
  const request = indexedDB.open("quire", 1);
  const key = { keyPath: "id" };
  request.onupgradeneeded = () => request.result.createObjectStore("conversations", key);
  const db = await new Promise((resolve) => { request.onsuccess = () => resolve(request.result); });
  const store = db.transaction("conversations", "readwrite").objectStore("conversations");
  const question = { role: "user", content: "Old question", images: ["data:image/png;base64,"] };
  const answer = { role: "assistant", content: "Old answer", finish: "stop" };
  Object.assign(answer, { reasoning: "", calls: [], stats: null });
  store.put({ id: "old", title: "Old one", updated: 1, messages: [question, answer] });
  await new Promise((resolve) => { store.transaction.oncomplete = resolve; });
  db.close();
}"""


def test_conversations_of_the_first_version_are_taken_over(page: Any, served: Served) -> None:
    page.goto(f"{served.url}/page/mark.svg")
    page.evaluate(OLD)
    opened(page, served.url)
    page.wait_for_selector(".user .chip")
    assert texts(page) == ["Old question", "Old answer"]
    page.reload()
    page.wait_for_selector(".assistant .text:has-text('Old answer')")
