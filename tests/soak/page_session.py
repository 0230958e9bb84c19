"""Work with the page at random in two tabs, reloads and killed servers included, and a ledger that
finds words that were written or shown and are lost.

python -m tests.soak.page_session MINUTES FOLDER
"""

from __future__ import annotations

import json
import random
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import httpx

from tests.support.browser import BROWSER
from tests.support.child import Child, quire_serve
from tests.support.waiting import HANG_S, wait_until

KILL_EVERY = 40
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
    """Random acts on the page, and a ledger of what was written and shown."""

    def __init__(self, tabs: list[Any], server: Server, seed: int) -> None:
        self.random = random.Random(seed)
        self.tabs = tabs
        self.server = server
        self.written: list[str] = []
        self.titles: set[str] = set()
        self.shown: set[str] = set()
        self.done: list[str] = []
        self.acts = 0

    def act(self) -> None:
        tab = self.random.choice(self.tabs)
        acts: list[Callable[[Any], None]] = [self.ask, self.ask_and_leave, self.draft, self.other]
        acts += [self.again, self.new, self.edit, self.stop, self.turn, self.rename]
        acts += [self.attach, self.search, self.live, self.take, self.go_on, self.compare]
        act = self.random.choices(acts, [6, 4, 2, 3, *[2] * 6, *[1] * 6])[0]
        self.done.append(act.__name__)
        self.acts += 1
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

    def attach(self, tab: Any) -> None:
        """Send a file with a question."""
        tab.wait_for_selector(IDLE, state="attached")
        data = f"Line of file {len(self.done)}\n".encode()
        file = {"name": "notes.txt", "mimeType": "text/plain", "buffer": data}
        tab.set_input_files(".composer input[type=file]", file)
        tab.wait_for_selector(".thumbs .chip")
        self.ask(tab)

    def search(self, tab: Any) -> None:
        """Find the conversation of a question that was asked."""
        if not self.written:
            return
        tab.fill(".search", self.random.choice(self.written))
        tab.wait_for_selector(".entries .entry")
        tab.fill(".search", "")

    def live(self, tab: Any) -> None:
        tab.click("[data-view=live]")
        tab.wait_for_selector("#live:not([hidden])")
        tab.click("a[data-view=chat]")

    def take(self, tab: Any) -> None:
        """Import a conversation that Open WebUI exported."""
        text = f"Question {len(self.written)}, imported."
        messages = {"a": {"id": "a", "parentId": None, "role": "user", "content": text}}
        chat = {"title": text, "history": {"messages": messages, "currentId": "a"}}
        data = json.dumps([{"chat": chat}]).encode()
        file = {"name": "chats.json", "mimeType": "application/json", "buffer": data}
        tab.set_input_files(".side input[type=file]", file)
        tab.wait_for_selector(f".user .text:has-text('{text}')")
        self.written.append(text)

    def go_on(self, tab: Any) -> None:
        """Have an answer that was cut off continued."""
        tab.wait_for_selector(IDLE, state="attached")
        buttons = tab.locator(".continue")
        if buttons.count():
            buttons.last.click()
            tab.wait_for_selector(IDLE, state="attached")

    def compare(self, tab: Any) -> None:
        buttons = tab.locator(".turns:not([hidden]) [aria-label='Compare versions']")
        if buttons.count():
            buttons.last.click()
            tab.click("dialog.wide button.main")


@contextmanager
def profile(browser: Any) -> Iterator[Any]:
    context = browser.new_context()
    context.set_default_timeout(HANG_S * 1000)
    parameters = json.dumps({"temperature": 0, "max_tokens": 80})
    context.add_init_script(f"localStorage['quire.parameters'] = {json.dumps(parameters)}")
    yield context
    context.close()


def words(text: str) -> str:
    return "".join(text.split())


class Ledger:
    """A session's conversations in the browser, compared with what was written and shown."""

    def __init__(self, session: Session, stored: list[list[str]], problems: list[str]) -> None:
        self.session = session
        self.stored = stored
        self.problems = problems

    def _of(self, role: str) -> list[str]:
        return [content for each, content in self.stored if each == role]

    def faults(self) -> list[str]:
        """Name each word that is missing or was never written, and each error of the page."""
        session = self.session
        asked = self._of("user")
        answers = [words(content) for content in self._of("assistant")]
        lost = [each for each in session.shown if not any(words(each) in one for one in answers)]
        return [
            *(f"question lost: {each}" for each in session.written if each not in asked),
            *(f"question twice: {each}" for each in set(asked) if asked.count(each) > 1),
            *(f"never asked: {each}" for each in asked if each not in session.written),
            *(f"answer lost: {each}" for each in lost),
            *(f"title lost: {each}" for each in session.titles - set(self._of("title"))),
            *(f"error in the page: {each}" for each in self.problems),
        ]


def work(
    browser: Any, folder: Path, *, seed: int, goes_on: Callable[[Session], bool], pause_s: float = 0
) -> Ledger:
    """Work with a real server in two tabs while `goes_on` says so.

    Args:
        pause_s: the longest pause between two acts.
    """
    problems: list[str] = []
    with ExitStack() as stack:
        server = Server(stack, folder)
        context = stack.enter_context(profile(browser))
        tabs = [context.new_page() for _ in range(2)]
        for tab in tabs:
            tab.on("pageerror", lambda error: problems.append(error.stack))
            tab.goto(server.url)
            tab.wait_for_selector("html[data-ready]")
        session = Session(tabs, server, seed)
        while goes_on(session):
            session.act()
            tabs[0].wait_for_timeout(session.random.uniform(0, 1000 * pause_s))
            if session.acts % KILL_EVERY == 0:
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
        return Ledger(session, tabs[0].evaluate(STORED), problems)


def main(minutes: float, folder: Path) -> int:
    """Work with pauses of at most three seconds; write all that was done to `folder`."""
    from playwright.sync_api import sync_playwright  # the test can be skipped without it

    folder.mkdir(parents=True, exist_ok=True)
    begun = time.monotonic()

    def goes_on(session: Session) -> bool:
        if session.acts % 20 == 0:
            print(f"{time.monotonic() - begun:.0f} s, {session.acts} acts", flush=True)
        return time.monotonic() - begun < 60 * minutes

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=BROWSER, args=["--no-sandbox"])
        ledger = work(browser, folder, seed=int(begun), goes_on=goes_on, pause_s=3)
    session = ledger.session
    faults = ledger.faults()
    summary = {
        "minutes": round((time.monotonic() - begun) / 60, 1),
        "acts": session.acts,
        "kills": session.acts // KILL_EVERY,
        "questions": len(session.written),
        "shown": len(session.shown),
        "faults": faults,
    }
    print(json.dumps(summary, indent=1))
    everything = {**summary, "done": session.done, "stored": ledger.stored}
    (folder / "session.json").write_text(json.dumps(everything))
    return 1 if faults else 0


if __name__ == "__main__":
    raise SystemExit(main(float(sys.argv[1]), Path(sys.argv[2])))
