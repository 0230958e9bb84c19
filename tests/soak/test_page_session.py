"""A long session with the page: conversations, reloads, two tabs, a server that is killed. No word
that was written or shown may be lost.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.support.browser import browser, page  # noqa: F401
from tests.support.child import Child, quire_serve
from tests.support.waiting import HANG_S, wait_until

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]

ROUNDS = 150
FIELD = ".write textarea"
EDITED = ".editing textarea"
IDLE = ".composer:has([aria-label=Stop][hidden])"
STORED = """async () => {
  const { all } = await import("/page/store.js");
  const conversations = await all();
  const messages = conversations.flatMap((each) => each.messages);
  const said = messages.map(({ role, content }) => [role, content]);
  return [...said, ...conversations.map(({ title }) => ["title", title])];
}"""


class Server:
    """A real server on one port, which can be killed and started again."""

    def __init__(self, stack: ExitStack, folder: Path) -> None:
        self._folder = folder
        self._stack = stack
        self.child: Child = stack.enter_context(quire_serve(folder))
        self.url = self.child.url

    def restart(self) -> None:
        self.child.process.kill()
        self.child.process.wait(HANG_S)
        port = str(httpx.URL(self.url).port)
        self.child = self._stack.enter_context(quire_serve(self._folder, "--port", port))


class Session:
    """What one does with the page at random, and a ledger of what was written and shown."""

    def __init__(self, tabs: list[Any], server: Server, seed: int) -> None:
        self.random = random.Random(seed)
        self.tabs = tabs
        self.server = server
        self.written: list[str] = []
        self.titles: set[str] = set()
        self.shown: set[str] = set()
        self.done: list[str] = []

    def act(self) -> None:
        tab = self.random.choice(self.tabs)
        acts: list[Callable[[Any], None]] = [self.ask, self.ask_and_leave, self.draft, self.other]
        acts += [self.again, self.new, self.edit, self.stop, self.turn, self.rename]
        act = self.random.choices(acts, [6, 4, 2, 3, 2, 2, 2, 2, 2, 2])[0]
        self.done.append(act.__name__)
        act(tab)
        self.note(tab)

    def send(self, tab: Any) -> None:
        """Write a question that is not like any other, and send it."""
        text = f"Question {len(self.written)}: count from 1 to 30."
        tab.fill(FIELD, text)
        while tab.input_value(FIELD) == text:  # else an answer of the other tab was in the way
            tab.wait_for_selector(IDLE, state="attached")
            tab.press(FIELD, "Enter")
        self.written.append(text)
        self.done.append(text)

    def ask(self, tab: Any) -> None:
        self.send(tab)
        tab.wait_for_selector(IDLE, state="attached")

    def ask_and_leave(self, tab: Any) -> None:
        """Reload the page somewhere in the middle of an answer."""
        self.send(tab)
        tab.wait_for_timeout(self.random.choice([0, 5, 30, 100, 300, 700]))
        self.note(tab)
        tab.reload()
        tab.wait_for_selector("html[data-ready]")
        if tab.input_value(FIELD) == self.written[-1]:  # the browser had not stored it yet
            tab.press(FIELD, "Enter")

    def draft(self, tab: Any) -> None:
        """Write without sending, and reload."""
        text = f"Draft {len(self.done)}"
        tab.fill(FIELD, text)
        tab.reload()
        tab.wait_for_selector("html[data-ready]")
        assert tab.input_value(FIELD) == text, self.done
        tab.fill(FIELD, "")

    def again(self, tab: Any) -> None:
        tab.wait_for_selector(IDLE, state="attached")
        buttons = tab.locator("[aria-label='Answer again']")
        if buttons.count():
            buttons.last.click()

    def edit(self, tab: Any) -> None:
        """Send a question in other words; it may be left and taken up again in between."""
        tab.wait_for_selector(IDLE, state="attached")
        buttons = tab.locator("[aria-label='Edit and send again']")
        if not buttons.count():
            return
        text = f"Question {len(self.written)}, in other words: count from 1 to 20."
        last = buttons.count() - 1
        buttons.nth(last).click()
        tab.fill(EDITED, text)
        if self.random.random() < 0.3:
            tab.reload()
            tab.wait_for_selector("html[data-ready]")
            tab.wait_for_selector(IDLE, state="attached")
            buttons.nth(last).click()
            assert tab.input_value(EDITED) == text, self.done
        tab.press(EDITED, "Enter")
        tab.wait_for_selector(EDITED, state="detached")
        self.written.append(text)

    def stop(self, tab: Any) -> None:
        """Stop an answer somewhere in its middle."""
        self.send(tab)
        tab.wait_for_timeout(self.random.choice([30, 100, 300]))
        self.note(tab)
        tab.evaluate("document.querySelector('[aria-label=Stop]').click()")
        tab.wait_for_selector(IDLE, state="attached")

    def turn(self, tab: Any) -> None:
        """Show another version."""
        older = tab.locator(".turns:not([hidden]) [aria-label='Older version']:enabled")
        if count := older.count():
            older.nth(self.random.randrange(count)).click()

    def rename(self, tab: Any) -> None:
        current = tab.locator(".entries .current")
        if not current.count():
            return
        title = f"Title {len(self.done)}"
        tab.evaluate("document.querySelector('.entries .current [aria-label^=Rename]').click()")
        self.titles.discard(tab.input_value(".rename"))
        tab.fill(".rename", title)
        tab.press(".rename", "Enter")
        self.titles.add(title)

    def other(self, tab: Any) -> None:
        """Open another conversation, whatever runs in this one."""
        entries = tab.locator(".entries .entry")
        if count := entries.count():
            entries.nth(self.random.randrange(count)).click()

    def new(self, tab: Any) -> None:
        tab.click(".new")

    def note(self, tab: Any) -> None:
        """Note what is shown now."""
        script = "nodes => nodes.map((each) => each.textContent)"
        shown = tab.locator(".assistant > .text:not([hidden])").evaluate_all(script)
        self.shown |= {each.strip() for each in shown if each.strip()}


@contextmanager
def profile(browser: Any) -> Iterator[Any]:  # noqa: F811
    context = browser.new_context()
    context.set_default_timeout(HANG_S * 1000)
    parameters = json.dumps({"temperature": 0, "max_tokens": 80})
    context.add_init_script(f"localStorage['quire.parameters'] = {json.dumps(parameters)}")
    yield context
    context.close()


def words(text: str) -> str:
    return "".join(text.split())


def test_no_word_of_a_long_session_is_lost(browser: Any, tmp_path: Path) -> None:  # noqa: F811
    with ExitStack() as stack:
        server = Server(stack, tmp_path)
        context = stack.enter_context(profile(browser))
        tabs = [context.new_page() for _ in range(2)]
        problems: list[str] = []
        for tab in tabs:
            tab.on("pageerror", lambda error: problems.append(error.stack))
            tab.goto(server.url)
            tab.wait_for_selector("html[data-ready]")
        session = Session(tabs, server, seed=43)
        for number in range(1, ROUNDS + 1):
            session.act()
            if number % 40 == 0:
                session.send(tabs[0])
                session.note(tabs[0])
                server.restart()
        for tab in tabs:
            tab.wait_for_selector(IDLE, state="attached")
            session.note(tab)
        wait_until(lambda: not tabs[0].locator(".entries .running").count())
        tabs[1].close()
        tabs[0].reload()
        tabs[0].wait_for_selector("html[data-ready]")
        stored = tabs[0].evaluate(STORED)
    asked = [content for role, content in stored if role == "user"]
    assert sorted(asked) == sorted(session.written), "\n".join(session.done)
    answers = [words(content) for role, content in stored if role == "assistant"]
    lost = [each for each in session.shown if not any(words(each) in one for one in answers)]
    assert not lost, session.done
    assert session.titles <= {content for role, content in stored if role == "title"}
    assert not problems
